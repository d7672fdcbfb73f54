"""Runs the checks on an environment and reports the results."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tether.core.errors import EnvironmentFailure, TetherError, environment_boundary
from tether.envs.checker.checks import CHECKS, Check, EnvUnderTest, NotApplicable
from tether.envs.factory import EnvFactory, EnvSource, env_factory, refuse_while_main_is_imported

NUM_EPISODES = 200
_MAX_VIOLATIONS = 3
"""Violations reported per check."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    check: str
    violations: tuple[str, ...] = ()
    skipped: str = ""
    """Why the check was skipped, if it was."""

    @property
    def ok(self) -> bool:
        return not self.violations


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the checks found, in their order."""

    env: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(result.ok for result in self.results)

    @property
    def failed(self) -> list[str]:
        """The names of the failed checks."""
        return [result.check for result in self.results if not result.ok]

    def __str__(self) -> str:
        if self.ok:
            passed = sum(1 for result in self.results if not result.skipped)
            return f"{self.env}: all {passed} checks pass"
        lines = [f"  {result.check}: {violation}" for result in self.results for violation in result.violations]
        return "\n".join([f"{self.env} fails {len(self.failed)} of {len(self.results)} checks", *lines])


def check_env(env: EnvSource, *, episodes: int = NUM_EPISODES, **options: Any) -> CheckReport:
    """Check an environment: a name with options, a class with options, or a callable that makes one.

    In a script, call it under `if __name__ == "__main__":`; one of the checks plays in another process.
    """
    refuse_while_main_is_imported()
    return run_checks(env_factory(env, options), episodes)


def run_checks(factory: EnvFactory, episodes: int = NUM_EPISODES, on_check: Callable[[str], None] | None = None) -> CheckReport:
    """Run every check; `on_check` is called with the name of each check before it runs."""
    tested = EnvUnderTest(factory, episodes)
    results: dict[str, CheckResult] = {}
    for check in CHECKS:
        if on_check is not None:
            on_check(check.name)
        results[check.name] = _run(check, tested, results)
    return CheckReport(factory.label, tuple(results.values()))


def _run(check: Check, tested: EnvUnderTest, before: dict[str, CheckResult]) -> CheckResult:
    missing = [name for name in check.requires if not before[name].ok or before[name].skipped]
    if missing:
        return CheckResult(check.name, skipped=f"requires {missing[0]}")
    try:
        with environment_boundary(check.name):
            return CheckResult(check.name, tuple(islice(check.violations(tested), _MAX_VIOLATIONS)))
    except EnvironmentFailure as failure:
        cause = failure.__cause__
        if isinstance(cause, NotApplicable):
            return CheckResult(check.name, skipped=str(cause))
        return CheckResult(check.name, (str(cause) if isinstance(cause, TetherError) else str(failure),))
