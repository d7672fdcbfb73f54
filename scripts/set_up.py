"""Make the environment that every make target runs in: `.venv`, with Tether and its dependencies at the versions of constraints.txt.

Standard library only, because it runs before anything is installed. The folder carries a record, `.venv/set-up.json`: where it was
made, by which Python, and, once an installation has succeeded, a fingerprint of what was installed. A second run compares the record
and is done at once. The record is written without a fingerprint before anything is installed, so an interrupted or failed run
is never taken for a finished one: the next run carries on where it stopped, and an environment that cannot be used any more
(half made, made by another Python, copied from elsewhere) is made afresh. Linux and macOS.

Environment variables: TETHER_TORCH_INDEX is one more package index to look for torch in (a CPU or CUDA build); all of pip's own
(PIP_INDEX_URL, PIP_PROXY, PIP_CERT, ...) are obeyed.
"""

import sys

if sys.version_info < (3, 11) or sys.version_info >= (3, 14):
    # Before any other line, so that a Python too old for the rest of this file still says something useful.
    from shutil import which

    _better = [_name for _name in ("python3.13", "python3.12", "python3.11") if which(_name)]
    sys.exit(
        "set-up: Tether needs Python 3.11, 3.12 or 3.13, but {} is {}.{}.{}; {}".format(
            sys.executable,
            *sys.version_info[:3],
            "run make with PYTHON=" + _better[0] if _better else "install one of them and run make with PYTHON=/path/to/it",
        )
    )

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

RECORD = "set-up.json"
DRAFT = "set-up.json.new"
LOG = "set-up.log"
STEP_MARK = "\n== "
TAIL_LINES = 15
ROOM_NEEDED = 3 * 2**30
"""Bytes the CPU build of everything takes, with the space pip unpacks in."""


class SetUpError(Exception):
    """A step failed; the message is complete."""


def python_identity() -> str:
    """What compiled packages are bound to: the Python version and the machine."""
    return f"{platform.python_implementation()} {platform.python_version()} {sys.platform} {platform.machine()}"


def fingerprint(root: Path, python: str) -> str:
    """A hash of everything that decides what gets installed, the extras aside."""
    digest = hashlib.sha256(python.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update(b"\0" + (root / name).read_bytes())
    return digest.hexdigest()


def read_record(venv: Path) -> dict[str, object]:
    """The record of an environment; empty if there is none or it does not parse."""
    try:
        record = json.loads((venv / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(venv: Path, python: str, *, made: bool, installed: str | None = None, extras: Sequence[str] = ()) -> None:
    """Replace the record in one move: a reader sees the old one or the new one, never half of it."""
    record = {"place": str(venv.resolve()), "python": python, "made": made, "installed": installed, "extras": sorted(extras)}
    draft = venv / DRAFT
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(venv / RECORD)


def recorded_extras(record: dict[str, object]) -> set[str]:
    """The extras of a record."""
    extras = record.get("extras")
    return {str(extra) for extra in extras} if isinstance(extras, list) else set()


def is_installed(record: dict[str, object], wanted: str, extras: Sequence[str]) -> bool:
    """Whether the fingerprint is the wanted one and every wanted extra is there (more may be)."""
    return record.get("installed") == wanted and set(extras) <= recorded_extras(record)


def why_unusable(venv: Path, python: str) -> str | None:
    """Why the folder cannot be used as it stands; None if it can."""
    record = read_record(venv)
    if not record.get("made"):
        return "is only half made"
    if record.get("place") != str(venv.resolve()):
        return "was made at another path"  # the scripts in bin/ and the link to the source hold absolute paths
    if record.get("python") != python:
        return f"was made by {record.get('python')}"
    if not (venv / "bin" / "python").exists():  # also where it points to a Python that is gone
        return "has lost its Python"
    return None


def is_ours(venv: Path) -> bool:
    """Whether this script made the folder, so that it may be deleted; an environment made by hand or by another tool stays."""
    if venv.is_symlink() or not venv.is_dir():
        return False
    return (venv / RECORD).exists() or all(path.name == DRAFT for path in venv.rglob("*"))


def advice(log: str, free: int) -> str:
    """What to do about a failure, from what pip wrote and the bytes free on the disk."""
    text = log.lower()
    if "no space left" in text or "disk quota" in text or free < ROOM_NEEDED // 10:
        return f"the disk is full ({free / 2**30:.1f} GiB free, about {ROOM_NEEDED / 2**30:.0f} GiB needed): make room, or set TMPDIR elsewhere"
    if "certificate" in text:
        return "the index's certificate was refused: set PIP_CERT to your organisation's certificate file"
    network = (
        "connection",
        "timed out",
        "timeout",
        "name resolution",
        "failed to resolve",
        "proxy",
        "network is unreachable",
        "getaddrinfo",
    )
    if any(sign in text for sign in network):
        return "the package index was not reached: check the network; behind a proxy set HTTPS_PROXY, with a mirror set PIP_INDEX_URL"
    if "python.h" in text:
        return "a package was compiled and the Python headers are missing: install them (Debian: python3-dev)"
    if any(sign in text for sign in ("no matching distribution", "could not find a version", "resolutionimpossible")):
        return "the package index lacks a pinned version or was not reached: check the network, or set PIP_INDEX_URL to a complete mirror (for torch alone TETHER_TORCH_INDEX)"
    if "permission denied" in text:
        return "a file could not be written: check who owns the checkout and .venv"
    return "read the log; `make clean` removes .venv for a fresh start"


def failure_message(step: str, log_path: Path, free: int) -> str:
    """Which step failed, the end of pip's log, where the log is, what to do."""
    log = log_path.read_text(encoding="utf-8", errors="replace") if log_path.exists() else ""
    log = log.rpartition(STEP_MARK)[2].partition("\n")[2]  # what earlier steps and runs wrote would mislead
    tail = [f"  | {line}" for line in log.splitlines()[-TAIL_LINES:]]
    return "\n".join(
        [f"set-up: failed at: {step}", *tail, f"log: {log_path}", f"what to do: {advice(log, free)}; then run the same command again"]
    )


def run_step(step: str, command: Sequence[str], venv: Path) -> None:
    """Run a command with its output in the log; one line on the screen, with the time it took."""
    print(f"set-up: {step} ...", end="", flush=True)
    start = time.monotonic()
    # Settings meant for another Python would leak into this one; a --user install is impossible here.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX")}
    environment |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with (venv / LOG).open("a", encoding="utf-8") as log:
        log.write(f"{STEP_MARK}{step}\n")
        log.flush()
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, check=False)
    if done.returncode != 0:
        print(" failed", flush=True)
        raise SetUpError(failure_message(step, venv / LOG, shutil.disk_usage(venv).free))
    print(f" {time.monotonic() - start:.1f} s", flush=True)


def make_environment(venv: Path, python: str) -> None:
    """A fresh, empty environment in place of whatever stands there."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetUpError(
            f"set-up: {sys.executable} has no module {' and no '.join(missing)}; "
            f"install it (Debian, Ubuntu: python{version}-venv) or run make with PYTHON= another Python 3.11 to 3.13"
        )
    if venv.is_symlink() or venv.exists():
        if not is_ours(venv):
            raise SetUpError(f"set-up: {venv} was not made by this script; remove it or move it away, then run the same command again")
        shutil.rmtree(venv)
    venv.mkdir()
    write_record(venv, python, made=False)
    run_step("make .venv", [sys.executable, "-m", "venv", str(venv)], venv)
    write_record(venv, python, made=True)


def requirements(root: Path, extras: Sequence[str]) -> list[str]:
    """The packages that the extras of pyproject.toml name."""
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return sorted({package for extra in extras for package in declared[extra]})


def install(root: Path, venv: Path, extras: Sequence[str], *, with_tether: bool = True) -> None:
    """Install Tether, as links to the source, and its dependencies into the environment; or the packages of the extras alone."""
    # Compiling every module of torch and transformers costs more than compiling the few that get imported, when they are.
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-compile", "-c", str(root / "constraints.txt")]
    index = os.environ.get("TETHER_TORCH_INDEX")
    if index:
        pip += ["--extra-index-url", index]
    if not with_tether:
        run_step(f"install the packages of {', '.join(extras)} (log: {LOG} in {venv.name})", [*pip, *requirements(root, extras)], venv)
        return
    # The build tool first, at its pinned version: the build then needs no environment of its own.
    run_step("install the build tool", [*pip, "setuptools"], venv)
    target = f"{root}[{','.join(sorted(extras))}]" if extras else str(root)
    run_step(
        f"install tether and its dependencies (minutes the first time; log: {LOG} in .venv)",
        [*pip, "--no-build-isolation", "-e", target],
        venv,
    )


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold the checkout's set-up lock: under `make -j` two targets may ask for set-up at once."""
    with (root / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("set-up: another set-up is at work here, waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(root: Path, extras: Sequence[str], name: str = ".venv", *, with_tether: bool = True) -> None:
    """Bring `.venv` of a checkout, or another environment beside it, up to date."""
    venv, python = root / name, python_identity()
    wanted = fingerprint(root, python)
    with only_one(root):
        reason = why_unusable(venv, python)
        if reason:
            if is_ours(venv):
                print(f"set-up: {name} {reason}: making it afresh", flush=True)
            make_environment(venv, python)
        record = read_record(venv)
        if is_installed(record, wanted, extras):
            return
        # What an earlier target asked for stays: `make demo` after `make test` must not take the test tools away.
        everything = sorted(set(extras) | recorded_extras(record))
        write_record(venv, python, made=True, extras=everything)
        start = time.monotonic()
        install(root, venv, everything, with_tether=with_tether)
        write_record(venv, python, made=True, installed=wanted, extras=everything)
        print(f"set-up: done in {time.monotonic() - start:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: `set_up.py [--venv NAME] [--only-extras] [EXTRA ...]`."""
    parser = argparse.ArgumentParser(description="Make .venv and install Tether into it.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="extras of pyproject.toml, for example: gguf dev")
    parser.add_argument("--venv", default=".venv", metavar="NAME", help="the environment's folder in the checkout; .venv if left out")
    parser.add_argument("--only-extras", action="store_true", help="the packages of the extras, without Tether and torch")
    options = parser.parse_args(arguments)
    try:
        set_up(Path(__file__).resolve().parent.parent, options.extras, options.venv, with_tether=not options.only_extras)
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"set-up: {error}; if the disk is full or the folder is read-only, mend that and run the same command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; run the same command again to carry on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
