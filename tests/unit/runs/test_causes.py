"""The cause of a run that cannot learn is named, with what to do about it: from the metrics of a step, and in the verdict."""

import pytest

from tether.runs.causes import CauseKind, cause_words, find_causes
from tether.runs.schema import StepRecord
from tether.runs.verdict import verdict

HEALTHY = {
    "rollout/success": 0.3,
    "rollout/format_valid": 0.9,
    "rollout/tokens_sampled": 900.0,
    "rollout/context_full": 0.1,
    "rollout/episodes": 32.0,
    "rollout/errors": 0.0,
    "groups/rv_mean": 0.2,
}
NOTE = "none of 64 replies was valid: 64 never close the think tag, for example 'hm'; raise rollout.max_tokens (now 40)"


def test_a_step_that_can_teach_has_no_cause() -> None:
    assert find_causes(HEALTHY) == [] and find_causes({}) == []
    assert verdict([StepRecord(1, HEALTHY)]) == verdict([StepRecord(1, {"rollout/success": 0.3, "groups/rv_mean": 0.2})])


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"rollout/errors": 32.0}, CauseKind.ERRORS, "32 of 64 episodes were ended by an environment error; the notes of the step name it"),
        ({"rollout/errors": 31.0}, None, ""),
        ({"rollout/format_valid": 0.09}, CauseKind.FORMAT, "9% of the replies were in the expected format; teach the model the form first"),
        ({"rollout/format_valid": 0.1}, None, ""),
        ({"rollout/format_valid": 0.0, "rollout/tokens_sampled": 0.0}, None, ""),
        (
            {"rollout/context_full": 0.5},
            CauseKind.CONTEXT,
            "50% of the episodes ran out of context before they ended; raise rollout.max_context",
        ),
        ({"rollout/context_full": 0.49}, None, ""),
        (
            {"groups/rv_mean": 0.0},
            CauseKind.NO_VARIANCE,
            "the members of every group earn the same reward; play easier or more varied tasks",
        ),
        ({"groups/rv_mean": 0.0, "rollout/success": 0.0}, CauseKind.NO_VARIANCE, "no episode succeeds and the members of every group earn"),
        ({"groups/rv_mean": 0.0, "rollout/success": 1.0}, CauseKind.NO_VARIANCE, "every episode succeeds, so no group has reward variance"),
    ],
)
def test_each_cause_and_its_bound(changes: dict[str, float], kind: CauseKind | None, words: str) -> None:
    found = find_causes(HEALTHY | changes)
    assert [cause.kind for cause in found] == ([kind] if kind else [])
    assert not found or found[0].sentence().startswith(words)


def test_the_note_on_the_replies_stands_in_for_the_general_words() -> None:
    invalid = HEALTHY | {"rollout/format_valid": 0.0, "groups/rv_mean": 0.0, "rollout/success": 0.0}
    found = find_causes(invalid, ["97% of 239 replies were valid", NOTE])
    assert [cause.sentence() for cause in found] == [NOTE], "equal rewards are what invalid replies earn, not a cause beside them"


def test_the_verdict_names_what_holds_at_the_end_and_in_half_of_the_steps() -> None:
    invalid = HEALTHY | {"rollout/format_valid": 0.02}
    records = [StepRecord(0, {"validation/success": 0.1}), StepRecord(1, invalid, None, [NOTE]), StepRecord(2, invalid)]
    assert cause_words(records) == [f"Hardly anything could be learned in 2 of 2 steps: {NOTE}."]
    assert verdict(records)[2] == cause_words(records)[0]
    assert cause_words(records[:2]) == [f"Hardly anything could be learned at step 1: {NOTE}."]
    assert cause_words([*records, StepRecord(3, HEALTHY)]) == [], "it was overcome"
    assert cause_words([StepRecord(1, HEALTHY), StepRecord(2, HEALTHY), StepRecord(3, invalid)]) == [], "one step is no cause"
