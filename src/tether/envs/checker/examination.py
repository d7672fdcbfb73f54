"""Holding the laws against an environment, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tether.core.errors import EnvironmentFailure, TetherError, environment_boundary
from tether.envs.checker.laws import LAWS, Law
from tether.envs.checker.subject import NotApplicable, Subject
from tether.envs.factory import EnvFactory, EnvSource, env_factory, refuse_while_main_is_imported

NUM_EPISODES = 200
_MAX_VIOLATIONS = 3
"""Violations told of one law."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one law found."""

    law: str
    violations: tuple[str, ...] = ()
    skipped: str = ""
    """Why the law was not held against this environment, if it was not."""

    @property
    def ok(self) -> bool:
        return not self.violations


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the laws found, in their order."""

    env: str
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """No law is broken."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def broken(self) -> list[str]:
        """The names of the laws that are."""
        return [verdict.law for verdict in self.verdicts if not verdict.ok]

    def __str__(self) -> str:
        if self.ok:
            held = sum(1 for verdict in self.verdicts if not verdict.skipped)
            return f"{self.env}: all {held} laws hold"
        lines = [f"  {verdict.law}: {violation}" for verdict in self.verdicts for violation in verdict.violations]
        return "\n".join([f"{self.env} breaks {len(self.broken)} of {len(self.verdicts)} laws", *lines])


def check_env(env: EnvSource, *, episodes: int = NUM_EPISODES, **options: Any) -> CheckReport:
    """Hold every law against an environment: a name with options, a class with options, or a callable that makes one.

    In a script, call it under `if __name__ == "__main__":`; part of the check plays in another process.
    """
    refuse_while_main_is_imported()
    return examine(env_factory(env, options), episodes)


def examine(plan: EnvFactory, episodes: int = NUM_EPISODES, on_law: Callable[[str], None] | None = None) -> CheckReport:
    """The same for a blueprint; `on_law` is told the name of each law before it is held against the environment."""
    subject = Subject(plan, episodes)
    verdicts: dict[str, Verdict] = {}
    for law in LAWS:
        if on_law is not None:
            on_law(law.name)
        verdicts[law.name] = _hold(law, subject, verdicts)
    return CheckReport(plan.label, tuple(verdicts.values()))


def _hold(law: Law, subject: Subject, before: dict[str, Verdict]) -> Verdict:
    missing = [name for name in law.rests_on if not before[name].ok or before[name].skipped]
    if missing:
        return Verdict(law.name, skipped=f"rests on {missing[0]}")
    try:
        with environment_boundary(law.name):
            return Verdict(law.name, tuple(islice(law.violations(subject), _MAX_VIOLATIONS)))
    except EnvironmentFailure as failure:
        cause = failure.__cause__
        if isinstance(cause, NotApplicable):
            return Verdict(law.name, skipped=str(cause))
        return Verdict(law.name, (str(cause) if isinstance(cause, TetherError) else str(failure),))
