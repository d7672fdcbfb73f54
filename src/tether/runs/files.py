"""The files of a run folder, written whole or by appending, never through a link, and with one line where that fails.

A run folder may have come from somebody else. A file in it that is a symbolic link would turn a write into the run folder into a write
anywhere, so no link is followed: a file that is replaced is written under a fresh name and renamed, one that is appended to is opened with
O_NOFOLLOW.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, StorageError, TetherError
from tether.core.files import open_plain, read_plain
from tether.core.text import shortened, visible

LONGEST_OBJECT = 2**26
"""Bytes of a JSON file that is read whole, unless a reader knows better."""
DRAFT = ".part"
"""How the names of files end that are being written; a kill can leave one behind, and nothing reads them."""
_DRAFT_NAME = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(DRAFT)}", re.DOTALL)

_REMEDIES = {
    errno.ENOSPC: "free some space, then continue with --resume",
    errno.EDQUOT: "free some of your quota, then continue with --resume",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then continue with --resume",
    errno.EACCES: "make it writable or choose another --out",
    errno.EROFS: "choose another --out",
    errno.ELOOP: "it is a symbolic link, which a run does not write through; put a plain file or folder in its place",
}


def write_whole(path: Path, text: str) -> None:
    """Write a file under a fresh name beside its place and move it there: a reader sees the old one or the new one, never half of it."""
    remove_drafts(path.parent)
    place_whole(path, text.encode("utf-8", errors="backslashreplace"))  # halves of characters, as JSON writes them


def place_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """`write_whole` in a folder that may hold many files; without `sync` the caller forces it to the disk."""
    try:
        while True:
            draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{DRAFT}")
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a system without flock: drafts that kills leave stay there
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)  # taken for one that a kill left, before it was locked
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                if sync:  # else a power cut can leave an empty file under the new name
                    os.fsync(file.fileno())
                draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise storage_error(path, error) from error


def append_whole(path: Path, content: bytes) -> int:
    """Add lines to the end of a file, which is made if it is not there; returns where they begin.

    A line that a kill tore is ended first, so that what is added begins on a line of its own.
    """
    try:
        handle = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
        with os.fdopen(handle, "ab") as file:
            size = os.fstat(file.fileno()).st_size
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write(b"\n" + content if torn else content)
        return size + torn
    except OSError as error:
        raise storage_error(path, error) from error


def is_draft(name: str) -> bool:
    """Whether a file of this name is being written, or a kill left it behind."""
    return _DRAFT_NAME.fullmatch(name) is not None


def remove_drafts(folder: Path) -> None:
    """Remove what killed writers left in a folder. A writer holds a flock on its draft, so one that can be locked has none."""
    with contextlib.suppress(OSError):  # a folder or a draft that is gone or is somebody else's, a writer at work, a system without flock
        for name in os.listdir(folder):
            if is_draft(name):
                with contextlib.suppress(OSError), os.fdopen(open_plain(folder / name, os.O_RDONLY | os.O_NOFOLLOW)) as draft:
                    fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    (folder / name).unlink()


def read_object(path: Path, most: int = LONGEST_OBJECT) -> dict[str, Any]:
    """The object in a JSON file. StorageError where the file cannot be read, BadInput where it holds something else."""
    try:
        data = json.loads(read_plain(path, most))
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number without end, or nested without end
        raise BadInput(f"'{path}' does not parse: {shortened(' '.join(str(error).split()))}; restore it or take it away") from error
    if not isinstance(data, dict):
        raise BadInput(f"'{path}' holds a {type(data).__name__}; expected an object; restore it or take it away")
    return data


@contextlib.contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Says of what is read from a file or a folder that it does not have the form in which Tether writes it."""
    try:
        yield
    except TetherError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        said = visible(shortened(" ".join(f"{type(error).__name__}: {error}".split())))
        raise BadInput(f"'{path}' is not what Tether writes ({said}); restore it or take it away") from error


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The object on a line of a JSONL file; None if a kill tore the line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        return None
    return data if isinstance(data, dict) else None


def storage_error(path: Path, error: OSError, doing: str = "write") -> StorageError:
    """The one line for a file that cannot be written or read."""
    reason = (error.strerror or type(error).__name__).lower()
    if doing == "read":
        return StorageError(f"cannot read '{path}': {reason}; check the file and its permissions")
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and the folder's permissions")
    return StorageError(f"cannot write '{path}': {reason}; nothing already written is lost: {remedy}")
