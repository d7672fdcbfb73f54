"""Programs that try to reach what is not theirs: files, the environment, the network, other processes, the kernel's other doors."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.envs.deepcoder.sandbox import client
from tether.envs.deepcoder.sandbox.jobs import Limits, Report, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Isolation, Sandbox, describe_isolation

sys.path.append(str(Path(__file__).parent))

import hostile_programs as programs

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


def outcomes(code: str, isolation: Isolation) -> list[str]:
    report = attack(code, isolation)
    assert report.ending == "ok", report
    return report.stdout.splitlines()


REFUSED = {"PermissionError", "FileNotFoundError", "NotADirectoryError", "OSError", "IsADirectoryError"}


# ------------------------------------------------------------------------------------------------------------------ files


def test_reading_files_of_the_machine(isolation: Isolation, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    paths = [secret, Path.home() / ".bashrc", Path(__file__), Path.cwd() / "pyproject.toml", *programs.MACHINE_FILES]
    assert set(outcomes(programs.reading(paths), isolation)) <= REFUSED


def test_listing_folders_of_the_machine(isolation: Isolation, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert set(outcomes(programs.listing([tmp_path, *programs.MACHINE_FOLDERS]), isolation)) <= REFUSED


@needs_kernel
def test_the_whole_tree_a_program_sees() -> None:
    code = "import os\nfor folder, folders, files in os.walk('/'):\n    if 'python3' not in folder: print(folder, sorted(files))"
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
    code = programs.importing([source, ".", *site])
    assert set(outcomes(code, isolation)) <= {"ModuleNotFoundError", "PermissionError", "[]"}


def test_writing_outside_its_folder(isolation: Isolation, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    targets = [tmp_path / "new", *programs.MACHINE_TARGETS]
    targets += ["/dev/stdin"] if isolation == "kernel" else []  # without a root of its own, the input is a file in its folder
    assert set(outcomes(programs.writing(targets), isolation)) <= REFUSED
    assert list(tmp_path.iterdir()) == []


def test_deleting_everything(isolation: Isolation, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("alive")
    tmp_path.chmod(0o777)
    first, second = outcomes(programs.deleting(tmp_path, victim), isolation)
    assert set(first.split()) <= REFUSED and second == "True"
    assert victim.read_text() == "alive"


def test_links_lead_nowhere(isolation: Isolation, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o755)
    assert {word for line in outcomes(programs.linking(secret), isolation) for word in line.split()} <= REFUSED


def test_the_interpreter_cannot_be_rewritten(isolation: Isolation) -> None:
    assert {word for line in outcomes(programs.REWRITING_THE_INTERPRETER, isolation) for word in line.split()} <= REFUSED


def test_attributes_of_files_stay(isolation: Isolation) -> None:
    assert {word for line in outcomes(programs.ATTRIBUTES, isolation) for word in line.split()} <= REFUSED


# ------------------------------------------------------------------------------------------------- environment and network


def test_environment_variables(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "swordfish")
    lines = outcomes(programs.ENVIRONMENT, isolation)
    assert lines[0].startswith("{} environ({}) ") and lines[1] == "None"


def test_network(isolation: Isolation) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with listener:
        assert set(outcomes(programs.network(port), isolation)) <= {"PermissionError", "gaierror", "URLError", "OSError", "herror"}
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


# -------------------------------------------------------------------------------------------------------- other processes


def test_signals_reach_only_oneself(isolation: Isolation) -> None:
    ours = [os.getpid(), os.getppid(), client.running_fork_server(isolation).process_id]
    assert {word for line in outcomes(programs.signalling(ours), isolation) for word in line.split()} == {"PermissionError"}


def test_killing_the_parent_does_not_work(isolation: Isolation) -> None:
    report = attack(programs.KILLING_THE_PARENT, isolation)
    assert (report.ending, report.detail) == ("error", "PermissionError: [Errno 1] Operation not permitted (solution.py, line 1)")


def test_priorities_and_sessions_stay(isolation: Isolation) -> None:
    assert {word for line in outcomes(programs.PRIORITIES, isolation) for word in line.split()} == {"PermissionError"}


def test_descriptors_are_only_its_own(isolation: Isolation) -> None:
    assert outcomes(programs.DESCRIPTORS, isolation) == ["0 -", "1 p", "2 p", "3 p"]


def test_terminals(isolation: Isolation) -> None:
    opened, *filtered = outcomes(programs.TERMINALS, isolation)
    assert set(opened.split()) <= REFUSED
    assert {word for line in filtered for word in line.split()} == {"PermissionError"}
