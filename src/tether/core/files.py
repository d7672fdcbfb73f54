"""Files that may have come from somebody else, opened without waiting and read within bounds.

A named pipe, a socket or a device in the place of a file would hang whoever opens it, or never end. So only plain files are opened, and a file
that is read whole has a size beyond which it is refused.
"""

import errno
import io
import os
import stat
from pathlib import Path

NO_FILE = "it is no file"


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """A handle of a plain file. OSError where there is none, or something else in its place, a folder, a pipe, a socket or a device."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise OSError(error.errno, NO_FILE, str(path)) from None
        raise
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise (
            OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path)) if stat.S_ISDIR(mode) else OSError(errno.EINVAL, NO_FILE, str(path))
        )
    return handle


def open_to_read(path: Path) -> io.BufferedReader:
    """A plain file, opened to read its bytes."""
    return os.fdopen(open_plain(path), "rb")


def read_plain(path: Path, most: int) -> bytes:
    """The bytes of a plain file. OSError where it cannot be read or holds more than `most`."""
    with open_to_read(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes", str(path))
    return data
