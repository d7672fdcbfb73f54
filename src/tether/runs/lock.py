"""One writer at a time for a run folder: a lock that a kill cannot leave behind for good.

`run.lock` is locked with flock as long as a process writes the run, and holds a record of it: host, process, when that process started. The
system gives the flock back however the process ends. The record is for what flock does not reach: a file system that does not pass locks on to
other machines, or has none.

- Another process of this machine holds it: refused, and the line names it. A number of a process that was given to another one since is
  recognised by the start of the process.
- The folder is deleted, or moved and another one put in its place, while the run writes: the next write sees that it is not the folder that was
  locked, and ends the run (`RunLock.check`).
- The record names another host: its owner moves the file's time every few seconds. One that has not moved for `STALE_SECONDS` was left behind,
  and is taken over; a job that is started again on another machine waits so long.

Readers need no lock. Of several ranks the first holds it.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, StorageError
from tether.core.files import open_plain
from tether.runs.files import parsed_line, storage_error

LOCK = "run.lock"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
_LONGEST = 4096
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class RunLocked(BadInput):
    """Another process writes this run folder."""


class RunLock:
    """Held by this process from `acquire` to the last `release`: whoever asks again in the same process shares it."""

    def __init__(self, path: Path, handle: int) -> None:
        self._path, self._handle, self._folder = path, handle, os.stat(path.parent)
        self._owner, self._users = os.getpid(), 1
        self._released = threading.Event()
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    @classmethod
    def acquire(cls, folder: Path, *, patience: float = STALE_SECONDS) -> "RunLock":
        """Lock a run folder for writing; waits up to `patience` seconds to see whether the process of another host is gone."""
        path = folder.resolve() / LOCK
        with _ASKING:
            held = _HELD.get(path)
            if held is not None and held._owner == os.getpid() and os.fstat(held._handle).st_ino == _inode(path):
                held._users += 1
                return held
            _HELD[path] = cls(path, _opened(path, patience))
            return _HELD[path]

    def _beat(self) -> None:
        """Move the file's time until the lock is released."""
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a disk that is gone for a while: the flock still holds, and the next beat may come through
                os.utime(self._handle)

    def check(self, folder: Path) -> None:
        """Refuse to write where the folder of this path is no longer the one that was locked."""
        try:
            if os.path.samestat(os.stat(folder), self._folder):
                return
            what = "is another folder now than the one that this run writes, and nothing is written into it"
        except (FileNotFoundError, NotADirectoryError):
            what = "is gone: it was deleted or moved while the run wrote it"
        except OSError as error:
            raise storage_error(folder, error) from error
        raise StorageError(
            f"run folder '{folder}' {what}; where it was moved, continue there: tether train --resume --out THAT-FOLDER, "
            "where it was deleted, start a new run"
        )

    def release(self) -> None:
        """Give the folder back."""
        with _ASKING:
            self._users -= 1
            if self._users or os.getpid() != self._owner:  # a process that was forked meanwhile has a lock of its parent's
                return
            self._released.set()
            if _HELD.get(self._path) is self:
                del _HELD[self._path]
            if _inode(self._path) == os.fstat(self._handle).st_ino:
                self._path.unlink(missing_ok=True)  # before the flock goes: whoever opened it meanwhile sees that it is another file
            os.close(self._handle)


_HELD: dict[Path, RunLock] = {}
_ASKING = threading.RLock()


def _opened(path: Path, patience: float) -> int:
    """The lock file, locked and with the record of this process."""
    while True:
        try:
            handle = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise storage_error(path, error) from error
        try:
            has_flock = _flock(handle, path)
            if os.fstat(handle).st_ino == _inode(path):
                _check_record(handle, path, has_flock=has_flock, patience=patience)
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(own_record()).encode() + b"\n", 0)
                return handle
            os.close(handle)  # its owner removed it just now
        except OSError as error:
            os.close(handle)
            raise storage_error(path, error) from error
        except BaseException:
            os.close(handle)
            raise


def lock_holder(folder: Path) -> str | None:
    """Who writes this run folder now, in words; None where nobody does. Only reads."""
    path = folder / LOCK
    try:
        handle = open_plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        record = _read(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return _words(record) if error.errno not in _NO_FLOCK or is_alive(record) else None
        if record.get("host") == socket.gethostname() or not record:
            return None
        age = abs(time.time() - os.fstat(handle).st_mtime)  # a clock that was set back leaves times of the future
        return _words(record) if age < STALE_SECONDS else None
    finally:
        os.close(handle)


def own_record() -> dict[str, Any]:
    """What the lock says about this process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": process_start(os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def process_start(pid: int) -> str | None:
    """When a process started: the boot of the machine and the clock ticks since. None where there is no such process or no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return f"{boot}/{fields[19]}" if len(fields) > 19 else None


def _flock(handle: int, path: Path) -> bool:
    """Take the flock; whether this file system has such. Refuses where another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        record = _read(handle)
        if record and record.get("host") == socket.gethostname() and not is_alive(record):
            raise RunLocked(
                f"run folder '{path.parent}' is locked by a process that {_words(record)} started before it ended; end that process, "
                "or choose another --out"
            ) from None
        raise _refusal(path, record) from None
    return True


def _check_record(handle: int, path: Path, *, has_flock: bool, patience: float) -> None:
    """Refuse a record whose process is at work; one that was left behind counts for nothing."""
    record = _read(handle)
    if not record:
        return
    if record.get("host") == socket.gethostname():
        if not has_flock and is_alive(record):
            raise _refusal(path, record)
        return
    end, first = time.monotonic() + patience, os.fstat(handle).st_mtime_ns
    while time.monotonic() < end:
        time.sleep(min(0.5, patience))
        if os.fstat(handle).st_mtime_ns != first:
            raise _refusal(path, record)
    if patience < STALE_SECONDS and abs(time.time() - first / 1e9) < STALE_SECONDS:
        raise _refusal(path, record)


def is_alive(record: dict[str, Any]) -> bool:
    """Whether the process of a record of this host still runs, and is not another one under its number."""
    pid, started = record.get("pid"), record.get("process_started")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return started is None or process_start(pid) in (None, started)


def _refusal(path: Path, record: dict[str, Any]) -> RunLocked:
    return RunLocked(
        f"run folder '{path.parent}' is being written by {_words(record)}; wait for it or stop it, or choose another --out. "
        "Reading it (tether report, tether eval) works meanwhile"
    )


def _words(record: dict[str, Any]) -> str:
    if not record:
        return "another process"
    if (record.get("host"), record.get("pid")) == (socket.gethostname(), os.getpid()):
        return "this process itself, which has not closed it"
    return f"process {record.get('pid')} on {str(record.get('host'))[:64]} (since {str(record.get('since'))[:32]})"


def _read(handle: int) -> dict[str, Any]:
    return parsed_line(os.pread(handle, _LONGEST, 0)) or {}  # empty where a kill tore it


def _inode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
