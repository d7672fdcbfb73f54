"""Why a run cannot learn, in words: the cause and the remedy, the same at the first step, live, and in the verdict of the report.

Four things leave a step with nothing to learn from: episodes that an environment error ended, replies that are not in the format, conversations that
outgrow the context, and groups whose members all earn the same. They are read from the metrics of a step. What is wrong with replies is known
only while they are at hand: the note of that step, which holds an example, stands in for the general words.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tether.core.shares import percent
from tether.runs.schema import StepRecord

FEW_VALID = 0.1
"""Replies are the cause below this share of valid ones."""
MOST_EPISODES = 0.5
"""Errors and full contexts are the cause from this share of the episodes on."""
ZERO_VARIANCE = 1e-12
REPLIES = re.compile(r"(none|only \d+) of \d+ replies (was|were) valid\b")
"""How the note of a step begins that says what is wrong with its replies."""


class CauseKind(StrEnum):
    """What can leave a step with nothing to learn from."""

    ERRORS = "errors"
    FORMAT = "format"
    CONTEXT = "context"
    NO_VARIANCE = "no_variance"


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause, with what to do about it. Example: Cause(CauseKind.CONTEXT, "80% of the episodes ran out of context", "raise ...")."""

    kind: CauseKind
    what: str
    remedy: str

    def sentence(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def find_causes(metrics: Mapping[str, float], notes: Sequence[str] = ()) -> list[Cause]:
    """The causes in the metrics of a training step, which make it useless or nearly so; none for other steps.

    Groups without reward variance are a cause only where there is no other: replies that are not valid all earn the same as well.

    Args:
        metrics: by catalogued name; what is missing is no cause.
        notes: of the step, among which the words on its replies may be.
    """
    found = [cause for cause in (_errors(metrics), _format(metrics, notes), _context(metrics)) if cause is not None]
    flat = _no_variance(metrics)
    return [flat] if flat is not None and not found else found


def cause_words(records: Sequence[StepRecord]) -> list[str]:
    """A sentence for each cause that holds at the last training step and in at least half of all; none where the run could learn."""
    trained = [record for record in records if "groups/rv_mean" in record.metrics or "rollout/errors" in record.metrics]
    if not trained:
        return []
    by_step = [find_causes(record.metrics, record.notes) for record in trained]
    sentences = []
    for cause in by_step[-1]:
        held = [found for causes in by_step for found in causes if found.kind is cause.kind]
        if 2 * len(held) >= len(trained):
            when = f"at step {trained[-1].step}" if len(trained) == 1 else f"in {len(held)} of {len(trained)} steps"
            # The first step's words on replies have an example; later ones are written only where none was valid.
            said = next((item for item in held if REPLIES.match(item.what)), cause)
            sentences.append(f"Hardly anything could be learned {when}: {said.sentence().rstrip('.')}.")
    return sentences


def _errors(metrics: Mapping[str, float]) -> Cause | None:
    errors, episodes = metrics.get("rollout/errors", 0.0), metrics.get("rollout/episodes")
    if not errors or episodes is None or errors < MOST_EPISODES * (errors + episodes):
        return None
    return Cause(
        CauseKind.ERRORS,
        f"{errors:.0f} of {errors + episodes:.0f} episodes were ended by an environment error",
        "the notes of the step name it; check the environment with tether envs --check",
    )


def _format(metrics: Mapping[str, float], notes: Sequence[str]) -> Cause | None:
    valid = metrics.get("rollout/format_valid")
    if valid is None or valid >= FEW_VALID or not metrics.get("rollout/tokens_sampled"):
        return None
    said = next((note for note in notes if REPLIES.match(note)), None)
    if said is not None:
        return Cause(CauseKind.FORMAT, said, "")
    return Cause(
        CauseKind.FORMAT,
        f"{percent(valid)} of the replies were in the expected format",
        "teach the model the form first (tether sft), or word the instructions for it (env.options.instructions)",
    )


def _context(metrics: Mapping[str, float]) -> Cause | None:
    full = metrics.get("rollout/context_full", 0.0)
    if full < MOST_EPISODES:
        return None
    return Cause(
        CauseKind.CONTEXT,
        f"{percent(full)} of the episodes ran out of context before they ended",
        "raise rollout.max_context where the model allows it, lower rollout.max_tokens, keep fewer turns (rollout.context last_k), "
        "or show fewer examples (env.options.few_shot=0)",
    )


def _no_variance(metrics: Mapping[str, float]) -> Cause | None:
    """Groups without a difference between their members have no task gradient."""
    variance, success = metrics.get("groups/rv_mean"), metrics.get("rollout/success")
    if variance is None or variance > ZERO_VARIANCE or metrics.get("rollout/episodes", 1.0) == 0:
        return None
    if success == 1:
        return Cause(
            CauseKind.NO_VARIANCE, "every episode succeeds, so no group has reward variance", "play harder tasks (env.options), or stop"
        )
    failing = "no episode succeeds and " if success == 0 else ""
    return Cause(
        CauseKind.NO_VARIANCE,
        f"{failing}the members of every group earn the same reward",
        "play easier or more varied tasks (env.options), raise rollout.group_size or rollout.temperature, or start from a stronger model",
    )
