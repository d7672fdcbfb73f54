"""Programs that try to reach what is not theirs: files, the environment, the network, other processes, the kernel's other doors."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

LIMITS = Limits(cpu_seconds=3, wall_seconds=10)

needs_kernel = pytest.mark.skipif(describe_isolation().name != "kernel", reason="this machine gives no kernel isolation")
needs_file_rules = pytest.mark.skipif(not client.running_fork_server("process").facts["landlock"], reason="this kernel has no Landlock")
BOTH = [pytest.param("kernel", marks=needs_kernel), pytest.param("process", marks=needs_file_rules)]


@pytest.fixture(params=BOTH)
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    """Whatever the test did, this process and the sandbox are well afterwards."""
    level: Isolation = request.param
    fork_server = client.running_fork_server(level).process_id
    yield level
    assert client.running_fork_server(level).process_id == fork_server
    assert attack("print(6 * 7)", level).stdout == "42\n"


def attack(code: str, isolation: Isolation) -> Report:
    [report] = Sandbox(LIMITS, isolation=isolation).run(code, [StdinTask("")])
    return report


TRY = """
import os
def attempt(what, *arguments, **options):
    try: result = what(*arguments, **options)
    except Exception as error: return type(error).__name__
    return f'GOT {result!r:.60}'
"""


def outcomes(code: str, isolation: Isolation) -> list[str]:
    report = attack(TRY + code, isolation)
    assert report.ending == "ok", report
    return report.stdout.splitlines()


REFUSED = {"PermissionError", "FileNotFoundError", "NotADirectoryError", "OSError", "IsADirectoryError"}


# ------------------------------------------------------------------------------------------------------------------ files


def test_reading_files_of_the_machine(isolation: Isolation, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    paths = [secret, Path.home() / ".bashrc", "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/self/environ"]
    paths += [
        "/proc/self/mem",
        "/proc/self/maps",
        "/proc/cpuinfo",
        "/sys/kernel/uevent_seqnum",
        "/dev/mem",
        "/dev/kmsg",
        "/dev/tty",
        "/dev/sda",
    ]
    paths += [
        Path(__file__),
        Path.cwd() / "pyproject.toml",
        "../secret.txt",
        "/var/run/docker.sock",
        "/bin/sh",
        "/lib/ld-linux-aarch64.so.1",
    ]
    code = f"for path in {[str(path) for path in paths]!r}: print(attempt(lambda: open(path, 'rb').read(10)))"
    assert set(outcomes(code, isolation)) <= REFUSED


def test_listing_folders_of_the_machine(isolation: Isolation, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folders = [
        str(tmp_path),
        "/etc",
        "/proc",
        "/sys",
        "/home",
        "/var",
        "/usr/bin",
        "/dev/shm",
        "/dev/pts",
        "/run",
        "/boot",
        "/opt/..",
    ]
    assert set(outcomes(f"for path in {folders!r}: print(attempt(os.listdir, path))", isolation)) <= REFUSED


@needs_kernel
def test_the_whole_tree_a_program_sees() -> None:
    code = "for folder, folders, files in os.walk('/'):\n    if 'python3' not in folder: print(folder, sorted(files))"
    seen = outcomes(code, "kernel")
    library = Path(os.__file__).parent
    above = {str(parent) for parent in library.parents}
    listed = dict(line.split(" ", 1) for line in seen)
    assert set(listed) == above | {"/", "/dev", "/tmp"}
    assert listed.pop("/dev") == "['full', 'null', 'random', 'stdin', 'urandom', 'zero']"
    assert set(listed.values()) == {"[]"}


def test_tether_and_other_packages_cannot_be_imported(isolation: Isolation) -> None:
    source = str(Path(client.__file__).parents[4])
    site = [os.path.dirname(os.__file__) + "/site-packages"] if isolation == "kernel" else []
    code = f"""
import sys
for added in ([], [{source!r}, '.', *{site!r}]):
    sys.path += added
    for name in ('tether', 'tether.envs', 'pip', 'pytest', 'numpy'): print(attempt(__import__, name))
print([name for name in sys.modules if name.startswith('tether')])
"""
    assert set(outcomes(code, isolation)) <= {"ModuleNotFoundError", "PermissionError", "[]"}


def test_writing_outside_its_folder(isolation: Isolation, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    library = os.path.dirname(os.__file__)
    targets = [
        tmp_path / "new",
        "/new",
        "/dev/new",
        "/dev/shm/new",
        f"{library}/os.py",
        f"{library}/new.py",
        "/etc/passwd",
        "../new",
    ]
    targets += ["/dev/stdin"] if isolation == "kernel" else []  # without a root of its own, the input is a file in its folder
    code = f"for path in {[str(path) for path in targets]!r}: print(attempt(open, path, 'a'))"
    assert set(outcomes(code, isolation)) <= REFUSED
    assert list(tmp_path.iterdir()) == []


def test_deleting_everything(isolation: Isolation, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("alive")
    tmp_path.chmod(0o777)
    code = f"""
import shutil
for path in ('/dev', {str(tmp_path)!r}, os.path.dirname(os.__file__) + '/json', '/tmp', '..', '.', '/etc', '/home', '/'):
    shutil.rmtree(path, ignore_errors=True)
print(attempt(os.remove, {str(victim)!r}), attempt(os.rename, {str(victim)!r}, 'mine'), attempt(os.rmdir, '/dev'))
print(len(os.listdir(os.path.dirname(os.__file__))) > 50)
"""
    first, second = outcomes(code, isolation)
    assert set(first.split()) <= REFUSED and second == "True"
    assert victim.read_text() == "alive"


def test_links_lead_nowhere(isolation: Isolation, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    code = f"""
for target in ({str(secret)!r}, '/etc/passwd', '/proc/self/exe', '/', os.path.dirname(os.__file__) + '/os.py'):
    print(attempt(os.symlink, target, 'soft'), attempt(os.link, target, 'hard'))
    print(attempt(lambda: open('soft').read(5)), attempt(lambda: open('hard').read(5)))
print(attempt(os.mkfifo, 'fifo'), attempt(os.mknod, 'node', 0o600 | 0o020000, os.makedev(1, 1)), attempt(os.mkdir, 'folder'))
"""
    assert {word for line in outcomes(code, isolation) for word in line.split()} <= REFUSED


def test_the_interpreter_cannot_be_rewritten(isolation: Isolation) -> None:
    code = """
import ctypes, sys
for path in ('/proc/self/exe', sys.executable, '/proc/1/exe', '/proc/self/mem', os.__file__, ctypes.__file__):
    print(attempt(open, path, 'r+b'), attempt(os.open, path, os.O_WRONLY | os.O_TRUNC))
"""
    assert {word for line in outcomes(code, isolation) for word in line.split()} <= REFUSED


def test_attributes_of_files_stay(isolation: Isolation) -> None:
    code = """
open('mine', 'w').close()
for path in ('mine', os.__file__, '/', '/dev/null'):
    print(attempt(os.chmod, path, 0o4777), attempt(os.chown, path, 0, 0), attempt(os.setxattr, path, 'user.x', b'x'), attempt(os.utime, path))
print(attempt(os.chroot, '.'), attempt(os.truncate, os.__file__, 0))
"""
    assert {word for line in outcomes(code, isolation) for word in line.split()} <= REFUSED


# ------------------------------------------------------------------------------------------------- environment and network


def test_environment_variables(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    code = """
import ctypes
print(dict(os.environ), os.environb, attempt(lambda: open('/proc/self/environ').read()))
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
print(environ and environ[0])
"""
    lines = outcomes(code, isolation)
    assert lines[0].startswith("{} environ({}) ") and lines[1] == "None"


def test_network(isolation: Isolation) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    code = f"""
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
    with listener:
        assert set(outcomes(code, isolation)) <= {"PermissionError", "gaierror", "URLError", "OSError", "herror"}
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


# -------------------------------------------------------------------------------------------------------- other processes


def test_signals_reach_only_oneself(isolation: Isolation) -> None:
    ours = [os.getpid(), os.getppid(), client.running_fork_server(isolation).process_id]
    code = f"""
import signal
for process in (1, 0, -1, -os.getpid(), os.getppid(), 3, *{ours!r}):
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP): print(attempt(os.kill, process, number))
print(attempt(os.killpg, 0, signal.SIGKILL), attempt(os.killpg, os.getpgrp(), signal.SIGKILL))
print(attempt(os.pidfd_open, os.getppid()), attempt(signal.pidfd_send_signal, 0, 9))
"""
    assert {word for line in outcomes(code, isolation) for word in line.split()} == {"PermissionError"}


def test_killing_the_parent_does_not_work(isolation: Isolation) -> None:
    report = attack("__import__('os').kill(__import__('os').getppid(), 9)", isolation)
    assert (report.ending, report.detail) == ("error", "PermissionError: [Errno 1] Operation not permitted (solution.py, line 1)")


def test_priorities_and_sessions_stay(isolation: Isolation) -> None:
    code = """
print(attempt(os.nice, -5), attempt(os.nice, 5), attempt(os.setpriority, os.PRIO_PROCESS, 0, -20), attempt(os.setsid), attempt(os.setpgid, 0, 0))
print(attempt(os.sched_setaffinity, 0, {0}), attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(99)))
print(attempt(os.setuid, 0), attempt(os.setresuid, 0, 0, 0), attempt(os.setgid, 0), attempt(os.setgroups, [0]), attempt(os.waitpid, -1, 0))
"""
    assert {word for line in outcomes(code, isolation) for word in line.split()} == {"PermissionError"}


def test_descriptors_are_only_its_own(isolation: Isolation) -> None:
    code = """
import stat
for number in range(1024):
    try: print(number, stat.filemode(os.fstat(number).st_mode)[0])
    except OSError: pass
for number in range(4, 1024):
    assert attempt(os.write, number, b'x') == 'OSError' and attempt(os.read, number, 1) == 'OSError'
"""
    assert outcomes(code, isolation) == ["0 -", "1 p", "2 p", "3 p"]


def test_terminals(isolation: Isolation) -> None:
    code = """
import fcntl, termios
print(attempt(open, '/dev/tty'), attempt(os.openpty), attempt(os.open, '/dev/ptmx', os.O_RDWR))
print(*(attempt(fcntl.ioctl, number, request, b'x') for number in range(4) for request in (termios.TIOCSTI, termios.TIOCSCTTY, 0x4B3A)))
print(*(attempt(fcntl.fcntl, 1, command, 1) for command in (fcntl.F_SETOWN, fcntl.F_SETSIG, fcntl.F_SETLEASE, 1031)))
print(attempt(fcntl.flock, 0, fcntl.LOCK_EX), attempt(fcntl.lockf, 1, fcntl.LOCK_EX))
"""
    opened, *filtered = outcomes(code, isolation)
    assert set(opened.split()) <= REFUSED
    assert {word for line in filtered for word in line.split()} == {"PermissionError"}
