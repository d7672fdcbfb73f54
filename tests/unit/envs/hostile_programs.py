"""Programs that attack the sandbox, by what they try; the tests of the sandbox and scripts/torture.py run the same ones.

A test says what becomes of each program. `single_programs` gives all of them for a set of targets, for whoever only wants to see that nothing
happened. Nothing here runs a program.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.envs.deepcoder.sandbox import linux

# ------------------------------------------------------------------------------------------------ using up the machine

PROCESSOR_TIME = {
    "loop": "while True: pass",
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "blocked signals": (
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    ),
    "threads": "import threading\nfor _ in range(4): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    "caught": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "one long operation": "9 ** 9 ** 9",
    "regular expression": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
}

WALL_TIME = {
    "sleep": "import time\ntime.sleep(1000)",
    "pause": "import signal\nsignal.pause()",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "lock": "import threading\nthreading.Event().wait()",
    "closed descriptors": "import os\nos.close(0), os.close(1), os.close(2), os.close(3)\nimport time\ntime.sleep(1000)",
    "exit function": "import atexit, time\natexit.register(time.sleep, 1000)",
    "select": "import select\nselect.select([], [], [])",
}

MEMORY = {
    "doubling": "x = [0]\nwhile True: x += x",
    "at once": "x = bytearray(10**12)",
    "blocks": "x = []\nwhile True: x.append(bytearray(2**20))",
    "objects": "x = []\nwhile True: x.append(object())",
    "text": "x = 'a'\nwhile True: x += x",
    "maps": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 2**24))",
    "one map": "import mmap\nx = mmap.mmap(-1, 2**40)",
    "inside a function": "def f():\n    x = []\n    while True: x.append([x] * 1000)\nf()",
}

OUTPUT = {
    "lines": "while True: print('x' * 1000)",
    "bytes": "import os\nwhile True: os.write(1, b'x')",
    "one line": "print('x' * 10_000_000)",
    "errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "result": "import os\nwhile True: os.write(3, b'x' * 1000)",
}

PROCESSES = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "terminals": "import os\nwhile True: os.forkpty()",
    "multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'])",
    "spawn": "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "exec": "import os\nos.execv('/bin/true', ['true'])",
    "exec of Python": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "popen": "import os\nos.popen('true')",
    "shell": "import pty\npty.spawn('/bin/sh')",
}

THREAD_BOMB = "import threading, time\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"

FILES = {
    "one file": "open('big', 'wb').write(bytes(2**20))",
    "sparse file": "open('big', 'wb').truncate(2**40)",
    "total": "for n in range(10**6): open(str(n), 'wb').write(bytes(200_000))",
    "many files": "for n in range(10**6): open(str(n), 'wb')\nimport time\ntime.sleep(1)",
    "descriptors": "x = [open('/dev/null') for _ in range(100)]",
    "pipes": "import os\nx = [os.pipe() for _ in range(100)]",
    "memory file": "import os\nos.memfd_create('x')",
    "shared memory": "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=2**30)",
}

LIMITS_LIFTED = """
import resource
for name in ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'STACK', 'CORE', 'DATA'):
    kind = getattr(resource, 'RLIMIT_' + name)
    for wanted in ((resource.RLIM_INFINITY,) * 2, resource.getrlimit(kind)):
        try: resource.setrlimit(kind, wanted)
        except (ValueError, OSError): print('refused')
try: resource.prlimit(1, resource.RLIMIT_AS)
except (PermissionError, ProcessLookupError): print('refused')
"""

# ---------------------------------------------------------------------------------------------------- lying about the end

HEAD = b'{"ending": "ok", "detail": "", "word": ""}\n'
"""The message of a program that ran to its end, up to the value."""

FORGED_MESSAGES = [
    b"",
    b"\x00" * 100,
    b"not json",
    b"[]\n1",
    b"{}\n1",
    b"null",
    b'{"ending": ["ok"]}\n1',
    b'{"ending": "ok", "detail": 5}\n1',
    b'{"ending": "invented"}\n1',
    b"[" * 4000,
    b'{"a":' * 800,
    HEAD,
    HEAD + b"{",
    HEAD + b"[" * 100_000,
    HEAD + b"9" * 100_000,
    HEAD + b'"' + b'\\"' * 100_000,
    HEAD + b"\xff\xfe",
    HEAD + b'{"$x": 1}',
    HEAD + b'{"$s": [[1]]}',
    HEAD + b'{"$dict": [1]}',
    HEAD + b'{"$i": "zz"}',
    HEAD + b'{"$bytes": "0"}',
    HEAD + b'{"$c": [1, {}]}',
    HEAD + b'{"$c": [1, ' + b"9" * 400 + b"]}",
    HEAD + b'{"$t": {"$s": 2}}',
    HEAD + b'{"$__reduce__": ["os.system", ["id"]]}',
    HEAD + b"1\n2",
    HEAD * 2 + b"1",
]

SABOTAGE = [
    "import json; json.dumps = json.loads = None",
    "import builtins; builtins.len = builtins.isinstance = builtins.str = None",
    "import os; os._exit = os.write = lambda *a: 0",
    "import sys; sys.stdout = sys.__stdout__ = sys.stderr = None",
    "import sys; sys.modules.clear()",
    "import sys; sys.settrace(lambda *a: 1 / 0)",
    "import sys; sys.exit = exit = quit = None",
    "import atexit; atexit.register(lambda: 1 / 0)",
    "import gc; [o.clear() for o in gc.get_objects() if type(o) is dict and 'kind' in o]",
    "import signal; signal.alarm(1); signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    "import sys; frame = sys._getframe()\nwhile frame: frame.f_locals.clear() if isinstance(frame.f_locals, dict) else None; frame = frame.f_back",
    "import os; os.closerange(0, 100)",
    "del __builtins__",
    "raise type('E', (BaseException,), {'__str__': lambda self: 1 / 0})()",
    "raise type('E' * 10000, (Exception,), {})('x' * 10**6)",
]

COMPILER = {
    "brackets": "(" * 100_000,
    "lists": "x = " + "[" * 5000 + "]" * 5000,
    "minus": "x = " + "-" * 1_000_000 + "1",
    "sum": "x = " + "1+" * 300_000 + "1",
    "blocks": "if 1:\n" * 200,
    "text": "x = '" + "a" * 2_000_000 + "'",
}

# --------------------------------------------------------------------------------------------------- reaching what is not its own

TRY = """
import os
def attempt(what, *arguments, **options):
    try: result = what(*arguments, **options)
    except Exception as error: return type(error).__name__
    return f'GOT {result!r:.60}'
"""
"""The programs below print what came of each attempt: the name of an error, or GOT."""


def reading(paths: Sequence[str | Path]) -> str:
    return TRY + f"for path in {[str(path) for path in paths]!r}: print(attempt(lambda: open(path, 'rb').read(64)))"


def listing(folders: Sequence[str | Path]) -> str:
    return TRY + f"for path in {[str(folder) for folder in folders]!r}: print(attempt(os.listdir, path))"


def importing(added: Sequence[str]) -> str:
    return (
        TRY
        + f"""
import sys
for added in ([], {[*added]!r}):
    sys.path += added
    for name in ('tether', 'tether.envs', 'pip', 'pytest', 'numpy'): print(attempt(__import__, name))
print([name for name in sys.modules if name.startswith('tether')])
"""
    )


def writing(paths: Sequence[str | Path]) -> str:
    return TRY + f"for path in {[str(path) for path in paths]!r}: print(attempt(open, path, 'a'))"


def deleting(folder: Path, victim: Path) -> str:
    return (
        TRY
        + f"""
import shutil
for path in ('/dev', {str(folder)!r}, os.path.dirname(os.__file__) + '/json', '/tmp', '..', '.', '/etc', '/home', '/'):
    shutil.rmtree(path, ignore_errors=True)
print(attempt(os.remove, {str(victim)!r}), attempt(os.rename, {str(victim)!r}, 'mine'), attempt(os.rmdir, '/dev'))
print(len(os.listdir(os.path.dirname(os.__file__))) > 50)
"""
    )


def linking(secret: Path) -> str:
    return (
        TRY
        + f"""
for target in ({str(secret)!r}, '/etc/passwd', '/proc/self/exe', '/', os.path.dirname(os.__file__) + '/os.py'):
    print(attempt(os.symlink, target, 'soft'), attempt(os.link, target, 'hard'))
    print(attempt(lambda: open('soft').read(64)), attempt(lambda: open('hard').read(64)))
print(attempt(os.mkfifo, 'fifo'), attempt(os.mknod, 'node', 0o600 | 0o020000, os.makedev(1, 1)), attempt(os.mkdir, 'folder'))
"""
    )


def network(port: int) -> str:
    return (
        TRY
        + f"""
import socket, urllib.request
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        print(attempt(socket.socket, family, kind))
print(attempt(socket.socketpair))
print(attempt(socket.create_connection, ('127.0.0.1', {port}), 1))
print(attempt(socket.create_connection, ('1.1.1.1', 53), 1))
print(attempt(socket.getaddrinfo, 'example.com', 80))
print(attempt(socket.gethostbyname, 'example.com'))
print(attempt(urllib.request.urlopen, 'http://127.0.0.1:{port}'))
"""
    )


def signalling(processes: Sequence[int]) -> str:
    return (
        TRY
        + f"""
import signal
for process in (1, 0, -1, -os.getpid(), os.getppid(), 3, *{[*processes]!r}):
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP): print(attempt(os.kill, process, number))
print(attempt(os.killpg, 0, signal.SIGKILL), attempt(os.killpg, os.getpgrp(), signal.SIGKILL))
print(attempt(os.pidfd_open, os.getppid()), attempt(signal.pidfd_send_signal, 0, 9))
"""
    )


KILLING_THE_PARENT = "__import__('os').kill(__import__('os').getppid(), 9)"

REWRITING_THE_INTERPRETER = (
    TRY
    + """
import ctypes, sys
for path in ('/proc/self/exe', sys.executable, '/proc/1/exe', '/proc/self/mem', os.__file__, ctypes.__file__):
    print(attempt(open, path, 'r+b'), attempt(os.open, path, os.O_WRONLY | os.O_TRUNC))
"""
)

ATTRIBUTES = (
    TRY
    + """
open('mine', 'w').close()
for path in ('mine', os.__file__, '/', '/dev/null'):
    print(attempt(os.chmod, path, 0o4777), attempt(os.chown, path, 0, 0), attempt(os.setxattr, path, 'user.x', b'x'), attempt(os.utime, path))
print(attempt(os.chroot, '.'), attempt(os.truncate, os.__file__, 0))
"""
)

ENVIRONMENT = (
    TRY
    + """
import ctypes
print(dict(os.environ), os.environb, attempt(lambda: open('/proc/self/environ').read()))
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
print(environ and environ[0])
"""
)

PRIORITIES = (
    TRY
    + """
print(attempt(os.nice, -5), attempt(os.nice, 5), attempt(os.setpriority, os.PRIO_PROCESS, 0, -20), attempt(os.setsid), attempt(os.setpgid, 0, 0))
print(attempt(os.sched_setaffinity, 0, {0}), attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(99)))
print(attempt(os.setuid, 0), attempt(os.setresuid, 0, 0, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]), attempt(os.waitpid, -1, 0))
"""
)

DESCRIPTORS = (
    TRY
    + """
import stat
for number in range(1024):
    try: print(number, stat.filemode(os.fstat(number).st_mode)[0])
    except OSError: pass
for number in range(4, 1024):
    assert attempt(os.write, number, b'x') == 'OSError' and attempt(os.read, number, 1) == 'OSError'
"""
)

TERMINALS = (
    TRY
    + """
import fcntl, termios
print(attempt(open, '/dev/tty'), attempt(os.openpty), attempt(os.open, '/dev/ptmx', os.O_RDWR))
print(*(attempt(fcntl.ioctl, number, request, b'x') for number in range(4) for request in (termios.TIOCSTI, termios.TIOCSCTTY, 0x4B3A)))
print(*(attempt(fcntl.fcntl, 1, command, 1) for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETLEASE, 1031)))
print(attempt(fcntl.flock, 0, fcntl.LOCK_EX), attempt(fcntl.lockf, 1, fcntl.LOCK_EX))
"""
)

MACHINE_FILES = [
    "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/self/environ", "/proc/self/mem", "/proc/self/maps",
    "/proc/cpuinfo", "/sys/kernel/uevent_seqnum", "/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/sda", "../secret.txt", "/var/run/docker.sock",
    "/bin/sh", "/lib/ld-linux-aarch64.so.1",
]  # fmt: skip
MACHINE_FOLDERS = ["/etc", "/proc", "/sys", "/home", "/var", "/usr/bin", "/dev/shm", "/dev/pts", "/run", "/boot", "/opt/.."]
_LIBRARY = os.path.dirname(os.__file__)
MACHINE_TARGETS = ["/new", "/dev/new", "/dev/shm/new", f"{_LIBRARY}/os.py", f"{_LIBRARY}/new.py", "/etc/passwd", "../new"]

# ------------------------------------------------------------------------------------------------ asking the kernel directly

FORBIDDEN = """
    execve 59 221 | execveat 322 281 | fork 57 - | vfork 58 - | ptrace 101 117 0 1 | process_vm_readv 310 270 1 | process_vm_writev 311 271 1
    socket 41 198 2 1 | socketpair 53 199 1 1 | connect 42 203 | bind 49 200 | sendto 44 206 | sendmsg 46 211 | pipe2 293 59
    unshare 272 97 268435456 | unshare 272 97 131072 | setns 308 268 0 | mount 165 40 | umount2 166 39 | pivot_root 155 41 | chroot 161 51
    move_mount 429 429 | open_tree 428 428 | fsopen 430 430 | mount_setattr 442 442 | memfd_create 319 279 | memfd_secret 447 447
    shmget 29 194 0 4096 | shmat 30 196 | semget 64 190 | msgget 68 186 | mq_open 240 180 | io_setup 206 0 | io_uring_setup 425 425 8
    userfaultfd 323 282 | perf_event_open 298 241 | bpf 321 280 | keyctl 250 219 | add_key 248 217 | request_key 249 218
    kexec_load 246 104 | reboot 169 142 | init_module 175 105 | finit_module 313 273 | swapon 167 224 | syslog 103 116 3 | acct 163 89
    open_by_handle_at 304 265 | name_to_handle_at 303 264 | setuid 105 146 0 | setresuid 117 147 0 0 0 | setgid 106 144 0 | capset 126 91
    prctl 157 167 15 | prctl 157 167 1 0 | prctl 157 167 4 1 | prctl 157 167 22 0 | seccomp 317 277 1 | personality 135 92 65536
    setpriority 141 140 0 0 -20 | sched_setscheduler 144 119 | sched_setaffinity 203 122 | ioprio_set 251 30 1 0 | sethostname 170 161
    pidfd_open 434 434 1 | pidfd_getfd 438 438 | pidfd_send_signal 424 424 | process_madvise 440 440 | tkill 200 130 1 9 | rt_sigqueueinfo 129 138 1 9
    kill 62 129 1 9 | kill 62 129 -1 9 | kill 62 129 0 9 | tgkill 234 131 1 1 9 | mlockall 151 230 3 | mlock 149 228 4096 4096
    inotify_init1 294 26 | fanotify_init 300 262 | eventfd2 290 19 | epoll_create1 291 20 | timerfd_create 283 85 | timer_create 222 107
    signalfd4 289 74 | splice 275 76 | vmsplice 278 75 | tee 276 77 | sendfile 40 71 | sync 162 81 | settimeofday 164 170 | clock_settime 227 112
    mkdirat 258 34 | symlinkat 266 36 | linkat 265 37 | mknodat 259 33 | fchmodat 268 53 | fchownat 260 54 | setxattr 188 5 | quotactl 179 60
    setrlimit 160 164 | prlimit64 302 261 0 9 4096 | landlock_create_ruleset 444 444 0 0 1 | wait4 61 260 -1 | sysinfo 99 179 | modify_ldt 154 -
    mbind 237 235 | migrate_pages 256 238 | move_pages 279 239 | kcmp 312 272 | get_robust_list 274 100 1 | set_mempolicy 238 237 | ioperm 173 -
"""
"""Calls that must fail: name, number on x86_64, number on aarch64, arguments."""


def forbidden_calls() -> list[tuple[str, int, list[int]]]:
    """Those that this machine's processor has: name, number, arguments."""
    found = []
    for entry in FORBIDDEN.replace("\n", "|").split("|"):
        if entry.strip():
            name, x86, arm, *arguments = entry.split()
            number = x86 if linux.machine() == "x86_64" else arm
            found += [(name, int(number), [int(argument) for argument in arguments])] if number != "-" else []
    return found


CALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
    return errno.errorcode[ctypes.get_errno()] if result == -1 else f'returned {result}'
"""


def calling(calls: Sequence[tuple[str, int, list[int]]]) -> str:
    return CALL + f"for name, number, arguments in {[*calls]!r}: print(name, call(number, *arguments))"


CRASH = "print('before', flush=True)\nimport ctypes\nctypes.string_at(0)"

# ------------------------------------------------------------------------------------------------------------------- all


@dataclass(frozen=True, slots=True)
class Targets:
    """What of this machine the programs are told to attack. The folder and the secret are open to every user."""

    folder: Path
    secret: Path
    """A file in the folder."""
    port: int
    """A listening socket on 127.0.0.1."""
    processes: tuple[int, ...]


def single_programs(targets: Targets) -> dict[str, str]:
    """Every program by what it tries."""
    lists = {
        "time": PROCESSOR_TIME,
        "waiting": WALL_TIME,
        "memory": MEMORY,
        "output": OUTPUT,
        "processes": PROCESSES,
        "files": FILES,
        "compiler": COMPILER,
        "forgery": {str(n): f"import os\nos.write(3, {message!r})\nos._exit(0)" for n, message in enumerate(FORGED_MESSAGES)},
        "sabotage": {str(n): code for n, code in enumerate(SABOTAGE)},
    }
    named = {f"{kind}: {name}": code for kind, programs in lists.items() for name, code in programs.items()}
    secrets: list[str | Path] = [targets.secret, Path.home() / ".bashrc", *(f"/proc/{process}/environ" for process in targets.processes)]
    return named | {
        "thread bomb": THREAD_BOMB,
        "limits": LIMITS_LIFTED,
        "reading": reading([*secrets, *MACHINE_FILES]),
        "listing": listing([targets.folder, *MACHINE_FOLDERS]),
        "importing": importing([str(targets.folder), str(Path(linux.__file__).parents[4]), *sys.path]),
        "writing": writing([targets.folder / "new", targets.secret, *MACHINE_TARGETS]),
        "deleting": deleting(targets.folder, targets.secret),
        "linking": linking(targets.secret),
        "network": network(targets.port),
        "signalling": signalling(targets.processes),
        "killing the parent": KILLING_THE_PARENT,
        "rewriting the interpreter": REWRITING_THE_INTERPRETER,
        "attributes": ATTRIBUTES,
        "environment": ENVIRONMENT,
        "priorities": PRIORITIES,
        "descriptors": DESCRIPTORS,
        "terminals": TERMINALS,
        "system calls": calling(forbidden_calls()),
        "crash": CRASH,
    }
