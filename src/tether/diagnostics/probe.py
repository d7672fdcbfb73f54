"""The fixed probe: the same prompts at every measurement, how many reasonings the budget allows, and the change since the first measurement.

The change is the difference of the two levels, exactly. Prompts differ much more from each other than one prompt differs from its former
self, and what a prompt has in common with its former self cancels in the difference. So the effect of a prompt on the change is the
difference of its effects on the two levels (tether.diagnostics.intervals: a delete-one jackknife of its rows and its column, in both
measurements at once), and these P differences are resampled like the effects on one level:

    change    = level - first level
    effect_i  = effect of prompt i on the level - its effect on the first level

Like the interval of a level, the interval says what other prompts of the same kind would give. Its coverage over repeated sampling is
measured by benchmarks/coverage_of_change.py.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from tether.core.errors import BadInput
from tether.diagnostics.information import Information
from tether.diagnostics.intervals import studentised_intervals
from tether.diagnostics.pairs import Pairs, Rows

CHANGES = ("mi_seq", "retrieval_acc", "h_conditional")
"""The numbers whose change is measured."""
LIMITS = {"retrieval_acc": (-1.0, 1.0)}


@dataclass(frozen=True, slots=True)
class ProbeMeasurement:
    """What a later measurement on the same prompts is compared with. Plain values, so that a checkpoint can hold them."""

    step: int
    prompts: str
    """A digest of the prompts in their order: equal digests are the same columns."""
    num_measured: int
    """Prompts with at least one reasoning."""
    levels: dict[str, float]
    effects: dict[str, list[float]]
    """By name, one number per prompt."""

    @classmethod
    def of(cls, step: int, pairs: Pairs, information: Information) -> Self:
        """Of a measurement with intervals, in which at least two prompts have reasonings."""
        digest = hashlib.blake2b(repr(pairs.prompts).encode(), digest_size=16).hexdigest()
        levels = {name: float(getattr(information, name)) for name in CHANGES}
        return cls(step, digest, len(set(pairs.source)), levels, {name: list(information.effects[name]) for name in CHANGES})

    @property
    def num_prompts(self) -> int:
        return len(self.effects[CHANGES[0]])

    def change_since(self, first: "ProbeMeasurement", resamples: int, rng: np.random.Generator) -> dict[str, float]:
        """For each of CHANGES the change and the ends of its interval, as `<name>_change`, `<name>_change_low`, `<name>_change_high`."""
        changes = {name: self.levels[name] - first.levels[name] for name in CHANGES}
        effects = {name: np.subtract(self.effects[name], first.effects[name]) for name in CHANGES}
        degrees = min(self.num_measured, first.num_measured) - 1
        intervals = studentised_intervals(changes, effects, LIMITS, degrees=degrees, resamples=resamples, rng=rng)
        found = {}
        for name in CHANGES:
            found[f"{name}_change"] = changes[name]
            found[f"{name}_change_low"], found[f"{name}_change_high"] = intervals[name]
        return found


class FixedProbe:
    """What a run keeps of its probe from one measurement to the next."""

    def __init__(self, num_prompts: int, samples: int, fewest: int) -> None:
        """`samples` reasonings for each of the prompts; where the budget is short fewer, but never below `fewest`."""
        if num_prompts < 2 or samples < 1:
            raise BadInput(f"probe_prompts is {num_prompts}, probe_samples {samples}; give at least 2 prompts (0: no probe) and 1 sample")
        self.num_prompts, self.samples = num_prompts, samples
        self._fewest = min(fewest, samples)
        self._is_noted = False
        """The note about a probe that exceeds its budget was given."""
        self._first: ProbeMeasurement | None = None

    def affordable_samples(self, rows: Rows, response_tokens: float | None, budget: float, notes: list[str]) -> int:
        """Reasonings for each prompt: as many as the budget allows, and never more than before, so that measurements compare.

        Nothing is sampled yet: lengths are expected from the first turns of the step's own rollout, by the same policy.
        """
        firsts = [turns[0] for turns in rows.trajectories]
        written = [len(rows.reasonings[row]) for row in firsts if rows.reasonings[row]]
        prompt = float(np.mean([len(rows.prompts[row]) for row in firsts])) if firsts else 0.0
        reasoning = float(np.mean(written)) if written else 0.0
        response = reasoning if response_tokens is None else response_tokens
        # Every prompt is scored once. A reasoning is sampled after its prompt, and scored under every prompt.
        once = self.num_prompts * prompt
        each = self.num_prompts * (prompt + response + self.num_prompts * reasoning)
        if once + self.samples * each <= budget:
            return self.samples
        affordable = max(self._fewest, int((budget - once) / each))
        if affordable < self.samples:
            notes.append(
                f"the probe samples {affordable} reasonings for each prompt from now on, not {self.samples}, because of diagnosis.budget"
            )
            self.samples = affordable
        cost = once + self.samples * each
        if cost > budget and not self._is_noted:
            self._is_noted = True
            notes.append(
                f"the probe takes about {cost:,.0f} tokens at its fewest reasonings, more than its {budget:,.0f} of diagnosis.budget; it is "
                "measured anyway: raise diagnosis.every or diagnosis.budget, or lower diagnosis.probe_prompts"
            )
        return self.samples

    def change(
        self, step: int, pairs: Pairs, information: Information, resamples: int, rng: np.random.Generator, notes: list[str]
    ) -> dict[str, float]:
        """The change since the first measurement; nothing at the first one, and where the columns are not the same."""
        now, first = ProbeMeasurement.of(step, pairs, information), self._first
        if first is None:
            self._first = now
            if now.num_prompts < self.num_prompts:
                notes.append(
                    f"probe: {now.num_prompts} columns, not {self.num_prompts}: equal prompts are one column, and a prompt that could not "
                    "be shown is none"
                )
            return {}
        if now.prompts == first.prompts:
            return now.change_since(first, resamples, rng)
        if grew := now.num_prompts > first.num_prompts:  # a prompt that could not be shown at first can be now
            self._first = now
        notes.append(
            f"probe: the prompts ({now.num_prompts} columns) are not those of step {first.step} ({first.num_prompts} columns); "
            + ("changes are measured from this step on" if grew else "no change is measured at this step")
        )
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {
            "samples": self.samples,
            "is_noted": self._is_noted,
            "first": dataclasses.asdict(self._first) if self._first else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.samples = min(self.samples, int(state["samples"]))
        self._is_noted = bool(state["is_noted"])
        self._first = ProbeMeasurement(**state["first"]) if state["first"] else None
