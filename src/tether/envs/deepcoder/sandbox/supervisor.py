"""The first process of a sandbox: starts the program's process, enforces its limits, and reports to Tether how it ended.

It forks when it has read nothing but the settings. So the program's process, which reads the job itself, is forked from a process that has
never read a program, an input or an output, and nothing passes from one test to the next. The supervisor treats the program's output as
bytes: it counts them, keeps them up to the limit and passes them on. When the supervisor ends, the kernel ends everything left in the
sandbox. Imports the standard library only: it runs in the sandboxes.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tether.core import codec
from tether.envs.deepcoder.sandbox import linux, namespaces, program

PROGRAM = 2
"""The program's process id in a sandbox of its own, where the supervisor is 1."""

Limit = tuple[str, str]
"""A limit that was passed: the ending it means, and the words for it."""

_TICK = 0.05
_END_SECONDS = 5.0
_SET_UP_SECONDS = 30.0
_CHUNK = 1 << 16
_RESULT_HEAD = 4096
"""Bytes for what the program's process reports besides the value."""


@dataclass(slots=True)
class Stream:
    """One pipe from the program's process: its limit, and what was read from it."""

    descriptor: int
    limit: int
    kept: bool
    data: bytearray = field(default_factory=bytearray)
    count: int = 0

    def read(self) -> bool | None:
        """Read what is there: True if there was something, False if there is nothing yet, None at the end."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        self.count += len(chunk)
        if self.kept:
            self.data += chunk[: max(0, self.limit - len(self.data))]
        return True if chunk else None


def main(connection: socket.socket, config: namespaces.SandboxConfig) -> NoReturn:
    """Run one task in this process's sandbox; never returns."""
    settings = json.loads(codec.receive(connection))
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the end of the child wakes the poll below
    folder = _work_folder(settings, config)
    if linux.LINUX and not config.kernel:
        linux.adopt_orphans()
    pipes = [os.pipe() for _ in range(3)]
    process = os.fork()
    if process == 0:
        try:
            program.main(connection, settings, config, folder, [write for _, write in pipes])
        finally:
            os._exit(program.NOT_STARTED)
    for read, write in pipes:
        os.close(write)
        os.set_blocking(read, False)
    if linux.LINUX:  # keep only the rights the supervisor needs: to kill a process of another user, and to read that user's folder
        needed = linux.MAY_KILL | (0 if config.kernel else linux.MAY_READ_ALL)
        linux.keep_capabilities(needed if config.program_user else 0)
        linux.forbid_new_privileges()
        linux.forbid_inspection()
    size = settings["output_kib"] * 1024
    (output, _), (errors, _), (result, _) = pipes
    streams = [Stream(output, size, kept=True), Stream(errors, size, kept=False), Stream(result, size + _RESULT_HEAD, kept=True)]
    facts = Watch(process, connection, settings, streams, None if config.kernel else folder).facts_of_its_life()
    if not config.kernel:
        _end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ConnectionError):
        connection.sendall(codec.pack([json.dumps(facts).encode(), bytes(streams[0].data), bytes(streams[2].data)]))
    os._exit(0)


def _work_folder(settings: dict[str, Any], config: namespaces.SandboxConfig) -> str:
    if config.kernel:
        namespaces.make_work_folder(config.work, settings["folder_kib"], namespaces.PROGRAM_USER if config.program_user else 0)
        return config.work
    folder = os.path.join(config.folder, str(os.getpid()))
    os.mkdir(folder, 0o700)
    if config.program_user:
        os.chown(folder, namespaces.OUTSIDE_USER, namespaces.OUTSIDE_USER)
    return folder


@dataclass(slots=True)
class Watch:
    """Watches one program's process from outside."""

    process: int
    connection: socket.socket
    settings: dict[str, Any]
    streams: list[Stream]
    folder: str | None
    """The work folder, where the kernel does not limit its size; its size is then polled."""
    began: float = field(default_factory=time.monotonic)
    started: bool = False
    looked: float = 0.0

    def facts_of_its_life(self) -> dict[str, Any]:
        """Wait for the end of the process; returns the limit it reached, if any, how it ended, and what it used."""
        poll = select.poll()
        poll.register(self.connection, 0)  # no events requested; a hang-up of the other side is reported anyway
        # SIGCHLD writes to this pipe, so that the end of the process wakes the poll at once and not at the next tick.
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        poll.register(wake, select.POLLIN)
        open_streams = {stream.descriptor: stream for stream in self.streams}
        for descriptor in open_streams:
            poll.register(descriptor, select.POLLIN)
        limit: Limit | None = None
        ended: dict[str, Any] | None = None
        while limit is None and ended is None:
            ready = {descriptor for descriptor, _ in poll.poll(_TICK * 1000)}
            if self.connection.fileno() in ready:  # Tether has closed the connection
                limit = ("killed", "given up")
                break
            if wake in ready:
                os.read(wake, _CHUNK)
            for descriptor in ready & open_streams.keys():
                if open_streams[descriptor].read() is None:
                    poll.unregister(descriptor)
                    del open_streams[descriptor]
            self._note_the_start()
            ended = self._reap(os.WNOHANG)
            limit = self._too_much_written() or (None if ended else self._too_long() or self._too_many_files())
        if ended is None:
            self._kill()
            ended = self._reap(0)
        # The process has ended, but its pipes may still hold output, which counts towards the limits as well.
        for stream in open_streams.values():
            while limit is None and stream.read():
                self._note_the_start()
                limit = self._too_much_written()
        if limit is None and ended and ended["cpu_seconds"] > self.settings["cpu_seconds"]:
            limit = self._used_up_its_time()
        return {"limit": limit, "started": self.started, "seconds": time.monotonic() - self.began, **(ended or {})}

    def _note_the_start(self) -> None:
        if not self.started and self.streams[2].data[:1] == program.STARTED:
            self.started, self.began = True, time.monotonic()

    def _too_much_written(self) -> Limit | None:
        for stream, name in zip(self.streams, ("standard output", "standard error", "value"), strict=True):
            if stream.count > stream.limit:
                return "output", f"more than {self.settings['output_kib']} KiB of {name}"
        return None

    def _too_long(self) -> Limit | None:
        """Checked only while the process lives: a program that has ended in time is not at fault if the supervisor is late."""
        lived = time.monotonic() - self.began
        if not self.started:
            return ("killed", "the sandbox was not ready in time") if lived > _SET_UP_SECONDS else None
        if lived > self.settings["wall_seconds"]:
            return "timeout", f"more than {self.settings['wall_seconds']:g} s"
        return self._used_up_its_time() if _processor_time(self.process) > self.settings["cpu_seconds"] else None

    def _used_up_its_time(self) -> Limit:
        return "timeout", f"more than {self.settings['cpu_seconds']:g} s of processor time"

    def _too_many_files(self) -> Limit | None:
        now = time.monotonic()
        if self.folder and now - self.looked > _TICK:
            self.looked = now
            if not _folder_within(self.folder, self.settings["folder_kib"]):
                return "output", f"more than {self.settings['folder_kib']} KiB of files"
        return None

    def _reap(self, options: int) -> dict[str, Any] | None:
        process, status, used = os.wait4(self.process, options)
        if process == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        return {"code": max(code, 0), "signal": max(-code, 0), "cpu_seconds": used.ru_utime + used.ru_stime}

    def _kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        if self.folder:  # without a process-id namespace, other processes of the program are found by its process group
            try:
                os.killpg(self.process, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return


def _end_descendants() -> None:
    """Without a process-id namespace and a filter that forbids it, a program may have started processes, which outlive it; orphans are
    children of this process."""
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ChildProcessError):  # there are none left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for entry in filter(str.isdecimal, os.listdir("/proc")):
                with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        os.kill(int(entry), signal.SIGKILL)
            time.sleep(0.001)


def _processor_time(process: int) -> float:
    """Seconds of processor time of all threads so far. Only Linux reports it; elsewhere RLIMIT_CPU alone limits the process."""
    if not linux.LINUX:
        return 0.0
    try:
        return time.clock_gettime((~process << 3) | 2)  # the kernel's name for the processor clock of a process
    except OSError:
        return 0.0  # it has just ended


def _folder_within(folder: str, kib: int) -> bool:
    try:
        sizes = [entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(folder)]
    except FileNotFoundError:
        return True  # a file was removed during the scan
    return len(sizes) <= namespaces.FILES and sum(sizes) <= kib * 1024
