"""Which isolation this machine gives, found out by trying: a program is run at the strongest level that starts."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tether.envs.deepcoder.sandbox.client import Isolation, running_warden
from tether.envs.deepcoder.sandbox.jobs import SandboxUnavailable, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Level:
    """What programs would be kept in here."""

    name: Isolation | None
    """The strongest isolation there is; None if programs cannot be run at all."""
    strong: bool
    detail: str


@lru_cache(maxsize=1)
def describe_isolation() -> Level:
    """The strongest level this machine gives; tried once per process."""
    try:
        facts = _tried("kernel")
    except SandboxUnavailable as refusal:
        return _weaker(str(refusal))
    threads = "" if facts["threads"] else "; before Linux 5.14 threads are bounded by memory only"
    return Level("kernel", True, f"namespaces, a root folder of its own, system call filter, limits{threads}")


def _weaker(refusal: str) -> Level:
    try:
        facts = _tried("process")
    except SandboxUnavailable as second:
        return Level(None, False, str(second))
    given = [name for name, there in (("system call filter", facts["seccomp"]), ("file rules (Landlock)", facts["landlock"])) if there]
    missing = [name for name, there in (("network", facts["seccomp"]), ("files", facts["landlock"])) if not there]
    open_to = f"; programs can reach this machine's {' and '.join(missing)}" if missing else ""
    return Level("process", False, f"a process with {', '.join([*given, 'limits'])}{open_to}; {refusal}")


def _tried(isolation: Isolation) -> dict[str, Any]:
    [report] = Sandbox(isolation=isolation, concurrency=1).run("print(6 * 7)", [StdinTask("")])
    if (report.ending, report.stdout) != ("ok", "42\n"):
        raise SandboxUnavailable(f"isolation={isolation}: a first program did not run ({report.detail or report.ending})")
    return running_warden(isolation).facts
