"""Prompt memory: a record of every prompt that a run has played, and the choice of further prompts by it (`rollout.prompt_memory`).

- **Prompts.** Instances of an environment that are a list (rows of a file, tasks of an agent) have a record each. Generated levels are hardly
  ever played twice: all levels with the same parameters, such as the distance to the goal, share a record.
- **Expected signal** of a prompt: the variance within its groups, sum of squares / degrees of freedom, pulled towards the mean of all prompts
  as if `PRIOR` further degrees of freedom had shown that mean. A prompt without a record has that mean. Evidence loses half its weight in
  `half_life` steps, because the policy that it is about has changed.
- **Choice.** For a group, `candidates` prompts are drawn evenly, and one of them in proportion to its expected signal. A share `explore` of the
  groups plays the first that was drawn. So a prompt is played at most `candidates` times as often as without memory, however good its record.
- **Determinism.** Draws are hashes of run seed, step, group and candidate. A choice reads the records of steps that are complete, which every rank
  and every resumed run has alike. It never reads the episodes it chooses, so the gradient of a chosen prompt is as unbiased as that of any other.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from tether.core.config import Settings
from tether.core.errors import BadInput, EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.core.seeding import derive_seed, generator
from tether.core.types import Group

PRIOR = 4.0
"""Degrees of freedom that the mean of all prompts counts for in the expected signal of one."""
SOLVED, HOPELESS = 0.95, 0.05
"""A prompt with at least, or at most, this share of successes on its record."""
EXPLORED, NEW, SIGNAL = "explored", "new", "signal"
"""Why a prompt was chosen: by the share of exploration, or by expected signal, without a record or with one."""


def _compared(candidates: int) -> int:
    if candidates == 1:
        raise ValueError("is 1, which leaves nothing to choose between; give 2 or more, or 0 for no memory")
    return candidates


class PromptMemorySettings(Settings):
    """Remember how prompts went, and choose further ones by their expected signal."""

    candidates: Annotated[int, Field(ge=0, le=1024), AfterValidator(_compared)] = 0
    """Prompts that are drawn for a group, of which one is played, in proportion to its expected signal; 0 for no memory."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the groups that play the first prompt drawn, whatever is known of it."""
    half_life: Annotated[float, Field(gt=0)] = 50.0
    """Steps in which what is known of a prompt loses half its weight."""
    signal: Literal["reward", "success"] = "reward"
    """What the variance within a prompt is taken of."""


class PromptRecord(NamedTuple):
    """What is known of a prompt. All but the first two are sums whose weights are those of `step`."""

    episodes: int = 0
    """Ever played."""
    step: int = 0
    """Last played in."""
    weight: float = 0.0
    """Episodes."""
    successes: float = 0.0
    rewards: float = 0.0
    squares: float = 0.0
    """Of the deviations from the mean of their group."""
    freedom: float = 0.0
    """Episodes less groups."""

    @property
    def success(self) -> float:
        return self.successes / self.weight

    def plus(self, step: int, group: Group, settings: PromptMemorySettings) -> "PromptRecord":
        """With a further group of the prompt."""
        values = group.rewards if settings.signal == "reward" else [float(won) for won in group.successes]
        rest = decay(step - self.step, settings.half_life)
        return PromptRecord(
            self.episodes + len(values),
            step,
            rest * self.weight + len(values),
            rest * self.successes + sum(group.successes),
            rest * self.rewards + math.fsum(group.rewards),
            rest * self.squares + float(np.var(values)) * len(values),
            rest * self.freedom + len(values) - 1,
        )


def decay(steps: int, half_life: float) -> float:
    """What is left of the weight of evidence after so many steps."""
    return 0.5 ** (steps / half_life)


def expected_signal(record: PromptRecord | None, mean: float, step: int, half_life: float) -> float:
    """The variance that a group of a prompt is expected to have at a step; `mean` is that of all prompts."""
    if record is None:
        return mean
    rest = decay(step - record.step, half_life)
    return (PRIOR * mean + rest * record.squares) / (PRIOR + rest * record.freedom)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one environment."""

    env: Env
    size: int | None
    """How many there are; None where they are generated."""
    digest: str
    """Of all of them, where they are a list."""

    @classmethod
    def of(cls, label: str, env: Env) -> "Prompts":
        size = getattr(env, "num_instances", None)
        if not size:  # an empty list says so itself
            with environment_boundary("reset"):
                env.reset(0)
            if not getattr(env, "parameters", {}):
                raise BadInput(
                    f"rollout.prompt_memory: environment '{label}' makes every prompt anew and names no parameters of it, so there is nothing to "
                    "remember; give it num_instances or parameters (docs/prompt-memory.md), or set rollout.prompt_memory.candidates=0"
                )
        return cls(env, size, getattr(env, "instances_digest", None) or "")

    def draw(self, seed: int) -> tuple[int, str]:
        """The instance that a seed stands for, and the name of its record."""
        if self.size is not None:
            return seed % self.size, f"row {seed % self.size}"
        with environment_boundary("reset"):
            self.env.reset(seed)
            parameters: Mapping[str, str] = getattr(self.env, "parameters", {})
            return seed, ", ".join(f"{name} {value}" for name, value in sorted(parameters.items()))


class PromptMemory:
    """The records of a run's prompts, environment by environment."""

    def __init__(self, settings: PromptMemorySettings, seed: int, environments: Mapping[str, Env]) -> None:
        """`environments`: by what the run calls them, for looking at prompts; they are played elsewhere."""
        self.settings, self.seed = settings, seed
        self.prompts = {label: Prompts.of(label, env) for label, env in environments.items()}
        self.records: dict[tuple[str, str], PromptRecord] = {}
        """By environment and prompt."""
        self.totals = dict.fromkeys(self.prompts, PromptRecord())
        """Of all prompts of an environment."""

    def chooser(self, step: int) -> "PromptChooser":
        """Chooses the prompts of a step by what is known now, whatever becomes known while it is sampled."""
        return PromptChooser(self, step)

    def observe(self, step: int, groups: Iterable[Group]) -> None:
        """A step is complete: remember its groups."""
        for group in groups:
            if group.choice and group.trajectories:
                key = group.env, group.choice["prompt"]
                self.records[key] = self.records.get(key, PromptRecord()).plus(step, group, self.settings)
                self.totals[group.env] = self.totals[group.env].plus(step, group, self.settings)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The "prompts/" metrics of a step that is not yet remembered."""
        played = [group for group in groups if group.choice]
        if not played:
            return {}
        rates = [record.success for record in self.records.values()]
        recalled = [group.choice["success"] for group in played if group.choice["why"] == SIGNAL]
        found = {
            "known": len(rates),
            "solved": sum(rate >= SOLVED for rate in rates),
            "hopeless": sum(rate <= HOPELESS for rate in rates),
            "explored": sum(group.choice["why"] == EXPLORED for group in played) / len(played),
            "new": sum(group.choice["why"] == NEW for group in played) / len(played),
            **({"success_recalled": math.fsum(recalled) / len(recalled)} if recalled else {}),
        }
        for name, reasons in (("explored", (EXPLORED,)), ("chosen", (NEW, SIGNAL))):
            of_kind = [group for group in played if group.choice["why"] in reasons and group.trajectories]
            if of_kind:
                found[f"success_{name}"] = float(np.mean([np.mean(group.successes) for group in of_kind]))
                record = PromptRecord()
                for group in of_kind:
                    record = record.plus(0, group, self.settings)
                if record.freedom:
                    found[f"signal_{name}"] = record.squares / record.freedom
        return found

    def state(self) -> dict[str, Any]:
        """For the checkpoint of the last step that was observed."""
        return {
            "records": [[*key, *record] for key, record in self.records.items()],
            "totals": {label: list(record) for label, record in self.totals.items()},
            "prompts": {label: [prompts.size, prompts.digest] for label, prompts in self.prompts.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave; records of rows are about rows, so the prompts must be the same."""
        for label, prompts in self.prompts.items():
            size, digest = state["prompts"][label]
            if (size, digest) != (prompts.size, prompts.digest):
                raise BadInput(
                    f"rollout.prompt_memory: the prompts of {label} have changed since the checkpoint ({size} rows with digest {digest}, now "
                    f"{prompts.size} with {prompts.digest}), and its records are about rows; nothing was written: put the file back and resume, or "
                    "start a run of its own from the checkpoint's model"
                )
        self.records = {(label, prompt): PromptRecord(*numbers) for label, prompt, *numbers in state["records"]}
        self.totals = {label: PromptRecord(*numbers) for label, numbers in state["totals"].items()}


class PromptChooser:
    """The choices of one step: called with a group and its environment's index, gives the instance to play."""

    def __init__(self, memory: PromptMemory, step: int) -> None:
        self._settings, self._seed, self._step = memory.settings, memory.seed, step
        self._prompts = list(memory.prompts.items())
        self._records, self._totals = dict(memory.records), dict(memory.totals)
        self._taken: set[tuple[str, int]] = set()
        self._choices: dict[int, dict[str, Any]] = {}

    def __call__(self, group: int, env_index: int) -> int:
        label, prompts = self._prompts[env_index]
        rng = generator("choice", self._seed, self._step, group)
        explores = rng.random() < self._settings.explore
        drawn = list(islice(self._candidates(label, prompts, group), 1 if explores else None))
        if not drawn:  # no instance could be made: the episodes of this one put the cause on record
            return derive_seed("prompt", self._seed, self._step, group, 0)
        total = self._totals[label]
        mean = total.squares / total.freedom if total.freedom else 0.0
        records = [self._records.get((label, prompt)) for _, prompt in drawn]
        # While no group has varied, any mean above zero sets prompts without a record before those that were played in vain.
        signals = [expected_signal(record, mean or 1.0, self._step, self._settings.half_life) for record in records]
        ends = np.cumsum(signals)
        place = min(int(np.searchsorted(ends, rng.random() * ends[-1], side="right")), len(drawn) - 1)  # rounding may reach the end
        (seed, prompt), record = drawn[place], records[place]
        why = EXPLORED if explores else NEW if record is None else SIGNAL
        known = {} if record is None else {"success": round(record.success, 6), "episodes": record.episodes, "last": record.step}
        self._choices[group] = {"prompt": prompt, "why": why, "expected": round(signals[place], 6) if mean else 0.0, **known}
        self._taken.add((label, seed))
        return seed

    def _candidates(self, label: str, prompts: Prompts, group: int) -> Iterable[tuple[int, str]]:
        """What is drawn for a group, less what the step plays already, unless that is all."""
        repeated = []
        for number in range(self._settings.candidates):
            try:
                drawn = prompts.draw(derive_seed("prompt", self._seed, self._step, group, number))
            except EnvironmentFailure:  # of a generator that fails for some seeds
                continue
            if (label, drawn[0]) in self._taken:
                repeated.append(drawn)
            else:
                yield drawn
        if len(repeated) == self._settings.candidates:
            yield from repeated

    def marked(self, groups: list[Group]) -> list[Group]:
        """The groups, each with why it was chosen."""
        for group in groups:
            group.choice = self._choices.get(group.index, {})
        return groups
