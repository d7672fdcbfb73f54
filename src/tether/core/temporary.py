"""Folders for a while: whole in their place at the end or gone, and what a kill left of earlier ones is removed by the next that is made.

Who makes a folder holds a flock on it. The system gives that back however the process ends, so a folder that can be locked belongs to nobody.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder whose name begins with `prefix`, removed at the end of the block; `parent` None: where the system has such."""
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            if left.is_dir() and not left.is_symlink() and left.stat().st_uid == os.getuid() and (handle := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(handle)
    handle, folder = None, parent
    while handle is None:  # another process, which clears up, may take it in this moment
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            handle = _locked(folder)
        except FileNotFoundError:
            continue
        except OSError:  # a file system without locks: nobody clears up there
            break
        if handle is not None and not folder.exists():
            os.close(handle)
            handle = None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _locked(folder: Path) -> int | None:
    """The folder, opened and locked; None if somebody else has it. OSError where the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        return None
    return handle
