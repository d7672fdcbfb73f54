"""The record of an alarm: its name, its severity, the numbers behind it, the likely cause and the suggested change.

Diagnosis raises alarms, training acts on them, a run stores them and a report shows them. All four use these records.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class AlarmName(StrEnum):
    """Every alarm, in the order in which the alarms of one step are listed."""

    INFORMATION_FALLS = "information_falls"
    """The reasoning tells less about its prompt than before; this usually precedes a fall of success."""
    RETRIEVAL_AT_CHANCE = "retrieval_at_chance"
    """The prompt cannot be told from the reasoning."""
    ENTROPY_UP_INFORMATION_DOWN = "entropy_up_information_down"
    """Reasoning becomes more varied within a prompt and less different between prompts."""
    INPUT_AGNOSTIC_TEXT = "input_agnostic_text"
    """Responses are well formed and do not depend on the prompt."""
    IMAGE_IGNORED = "image_ignored"
    """The reasoning is as likely with the images of another episode: the agent has stopped looking, or never looked."""
    REWARD_VARIANCE_COLLAPSE = "reward_variance_collapse"
    """The members of a group earn the same reward although they do not all succeed."""
    REPEATED_TEXT = "repeated_text"
    """The reasoning repeats one character, word or phrase."""
    LENGTH_COLLAPSE = "length_collapse"
    """Responses or their reasoning shrink to a small part of their earlier length."""
    LENGTH_EXPLOSION = "length_explosion"
    """Responses grow until the token budget cuts them off."""
    SAMPLER_MISMATCH = "sampler_mismatch"
    """The engine samples from another distribution than the learner's: its log-probs differ, or its weights are old."""
    NO_TOOL_CALLS = "no_tool_calls"
    """An agent's requests have tools, and no reply of the step calls one."""
    TOOL_USE_FALLS = "tool_use_falls"
    """An agent calls its tools much less often than at the run's start."""
    BROKEN_HISTORY = "broken_history"
    """Most requests that send an agent's replies back continue none of them."""
    SINGLE_CALLS = "single_calls"
    """Every episode of an agent with tools is a single request."""


class Severity(StrEnum):
    """How serious an alarm is."""

    WARNING = "warning"
    """Something is being lost; the run may still succeed."""
    CRITICAL = "critical"
    """It is lost; continuing unchanged is likely a waste."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that moved, or that stands where it should not.

    Example: str(Evidence("groups/rv_mean", 0.01, (41, 48), "rank-sum p = 0.00002", 0.2, (1, 10)))
    is "groups/rv_mean 0.01 in steps 41-48, 0.2 in steps 1-10 (rank-sum p = 0.00002)".
    """

    metric: str
    value: float
    steps: tuple[int, int]
    """First and last step of the window."""
    test: str
    """The test and its outcome."""
    reference: float | None = None
    """The earlier value; None where the comparison is not with the past."""
    reference_steps: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.words()

    def words(self, dash: str = "-") -> str:
        """The evidence as text; `dash` stands between two steps."""
        words = f"{self.metric} {self.value:.3g} in steps {self.steps[0]}{dash}{self.steps[1]}"
        if self.reference is not None and self.reference_steps is not None:
            words += f", {self.reference:.3g} in steps {self.reference_steps[0]}{dash}{self.reference_steps[1]}"
        return f"{words} ({self.test})"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Evidence":
        """Evidence from a step's record; JSON turned the windows into lists."""
        first, last = data["steps"]
        reference_steps = tuple(data["reference_steps"]) if data.get("reference_steps") else None
        return cls(str(data["metric"]), data["value"], (first, last), str(data["test"]), data.get("reference"), reference_steps)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem at the last step on record."""

    name: AlarmName
    severity: Severity
    began: int
    """The first step of the unbroken stretch at which the alarm stands."""
    evidence: tuple[Evidence, ...]
    """The numbers at the last step."""
    cause: str
    remedy: str

    def sentence(self) -> str:
        """The whole alarm in one line, for a record's notes or the terminal."""
        numbers = "; ".join(str(item) for item in self.evidence)
        return f"{self.severity}: {self.name} since step {self.began}: {numbers}. Likely cause: {self.cause}. To change: {self.remedy}."

    def to_json(self) -> dict[str, Any]:
        """The form that a step's record holds."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Alarm":
        """An alarm from a step's record."""
        evidence = tuple(Evidence.from_json(item) for item in data["evidence"])
        return cls(AlarmName(data["name"]), Severity(data["severity"]), int(data["began"]), evidence, data["cause"], data["remedy"])
