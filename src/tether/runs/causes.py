"""Why a run cannot learn, in words: the cause and the remedy, the same at the first step, live, and in the verdict of the report.

Four things leave a step with nothing to learn from: episodes that an environment error ended, replies that are not in the format, conversations that
outgrow the context, and groups whose members all earn the same. They are read from the metrics of a step. What is wrong with replies is known
only while they are at hand: the note of that step, which holds an example, stands in for the general words.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tether.core.shares import percent
from tether.runs.panels import WORDS
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

    Args:
        metrics: by catalogued name; what is missing is no cause.
        notes: of the step, among which the words on its replies may be.
    """
    found = []
    errors, episodes = metrics.get("rollout/errors", 0.0), metrics.get("rollout/episodes")
    if errors and episodes is not None and errors >= MOST_EPISODES * (errors + episodes):
        found.append(_cause(CauseKind.ERRORS, failed=f"{errors:.0f} of {errors + episodes:.0f}"))
    valid = metrics.get("rollout/format_valid")
    if valid is not None and valid < FEW_VALID and metrics.get("rollout/tokens_sampled"):
        said = next((note for note in notes if REPLIES.match(note)), None)
        found.append(_cause(CauseKind.FORMAT, share=percent(valid)) if said is None else Cause(CauseKind.FORMAT, said, ""))
    full = metrics.get("rollout/context_full", 0.0)
    if full >= MOST_EPISODES:
        found.append(_cause(CauseKind.CONTEXT, share=percent(full)))
    variance = metrics.get("groups/rv_mean")
    # Only where there is no other cause: replies that are not valid all earn the same as well.
    if not found and variance is not None and variance <= ZERO_VARIANCE and episodes != 0:
        words = {0.0: "all_fail", 1.0: "all_succeed"}.get(metrics.get("rollout/success", math.nan), "no_variance")
        found.append(_cause(CauseKind.NO_VARIANCE, words))
    return found


def _cause(kind: CauseKind, words: str = "", **values: str) -> Cause:
    """A cause in the words of words.yaml, by default those of its kind."""
    said = WORDS["causes"][words or kind.value]
    return Cause(kind, said["what"].format(**values), said["remedy"])


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
