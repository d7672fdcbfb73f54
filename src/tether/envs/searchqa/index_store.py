"""Indexes on disk, each built once: found by the digest of the corpus and the layout, put in place whole, checked when opened.

An index is built in a folder of its own beside its place and renamed when complete, so a half-built one is never seen; a lock keeps other
processes from building the same one meanwhile. A list of its files with their sizes and digests tells a damaged index, which is built anew.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tether.core.cache import cache_folder
from tether.core.errors import BadInput, StorageError
from tether.envs.searchqa.corpus import Corpus
from tether.envs.searchqa.index import LAYOUT, SearchIndex, write_index

FILES = "files.json"
MAX_HASHED_BYTES = 64_000_000
"""Of larger files only the size is checked: reading them whole would take longer than opening the index is worth."""


def open_index(corpus: Corpus) -> SearchIndex:
    """The index of a corpus, built if it is not there or damaged."""
    key = hashlib.blake2b(f"{LAYOUT}\n{corpus.digest}".encode(), digest_size=16).hexdigest()
    folder = cache_folder("search") / key
    if not _is_whole(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock")) as alone:
                if alone:
                    _clear_unfinished(folder)
                if not _is_whole(folder):  # else somebody built it while we waited
                    _build(corpus, folder)
        except BadInput:  # about the corpus, not about the index
            raise
        except (OSError, ValueError) as error:  # tantivy reports a full disk as a ValueError
            raise StorageError(
                f"cannot keep the search index in '{folder.parent}': {getattr(error, 'strerror', None) or error}; set TETHER_CACHE to a folder with room"
            ) from error
    return SearchIndex(folder)


def _build(corpus: Corpus, folder: Path) -> None:
    """Replace whatever lies in the folder by a fresh index."""
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        write_index(building, corpus.read())
        (building / FILES).write_text(json.dumps(_described(building)), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            building.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process, not held by the lock, was first
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _clear_unfinished(folder: Path) -> None:
    """Remove what a process left behind that was killed while it built this index."""
    for left in folder.parent.glob(f"{folder.name}.building-*"):
        shutil.rmtree(left, ignore_errors=True)


def _described(folder: Path) -> dict[str, list[int | str]]:
    """Size and digest of every file of an index but the list itself and tantivy's own locks."""
    return {
        path.name: [path.stat().st_size, _digest(path)]
        for path in sorted(folder.iterdir())
        if path.name != FILES and path.suffix != ".lock"
    }


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.stat().st_size <= MAX_HASHED_BYTES else ""


def _is_whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / FILES).read_text(encoding="utf-8"))
        return bool(listed) and listed == _described(folder)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock among processes; answers False where the file system has none: two may then build the same index, and one wins."""
    with path.open("wb") as file:
        alone = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        yield alone
