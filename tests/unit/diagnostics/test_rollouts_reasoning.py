"""Where the reasoning of a response begins and ends."""

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.rollouts import WHOLE_RESPONSE, ReasoningRule, Rollout, Tally
from tether.diagnostics.rollouts.reasoning import Cut


def applied(response: str, pattern: str | None = None, prompt: str = "P ") -> Rollout:
    return ReasoningRule(pattern).apply(Rollout(None, "g", "t", 0, "w", prompt=prompt, response=response))


@pytest.mark.parametrize(
    ("response", "lead", "reasoning", "implied"),
    [
        ("<think> a b </think> c", "<think>", " a b ", False),
        ("Well. <think>a</think><think>b</think>", "Well. <think>", "a", False),
        ("a</think> c", "", "a", True),
        ("a</think> <think>b</think>", "", "a", True),
        ("<think>\n<think>a</think>", "<think>\n<think>", "a", False),
        ("<think>say <think> now</think>", "<think>", "say <think> now", False),
    ],
)
def test_think_tags(response: str, lead: str, reasoning: str, implied: bool) -> None:
    rollout = applied(response)
    assert (rollout.lead, rollout.reasoning, rollout.think_implied, rollout.missing) == (lead, reasoning, implied, None)


@pytest.mark.parametrize(
    ("response", "missing"),
    [("", "untagged"), ("42", "untagged"), ("<think>a", "unclosed"), ("<think> \n </think>a", "blank"), ("</think>", "blank")],
)
def test_no_reasoning_says_why(response: str, missing: str) -> None:
    rollout = applied(response)
    assert (rollout.reasoning, rollout.missing, rollout.lead) == (None, missing, "")


def test_the_context_ends_with_one_opening_tag() -> None:
    assert applied("<think>a</think>").context() == "P <think>"
    assert applied("a</think>").context() == "P <think>"
    assert applied("a</think>", prompt="P <think>\n").context() == "P <think>\n"
    assert applied("Thought: a", pattern="Thought:(.*)").context() == "P Thought:"


def test_a_pattern_takes_its_group_over_lines() -> None:
    rollout = applied("Thought: go\nleft\nAction: left", r"Thought:(.*?)\nAction:")
    assert (rollout.lead, rollout.reasoning, rollout.think_implied) == ("Thought:", " go\nleft", False)
    assert applied("no tags\nat all", WHOLE_RESPONSE).reasoning == "no tags\nat all"
    assert applied("Action: left", r"Thought:(.*?)\nAction:").missing == "unmatched"
    assert applied("a", "(b)?a").missing == "unmatched"
    assert ReasoningRule("a(.*)b").cut("a b") == Cut(missing="blank")


@pytest.mark.parametrize(("pattern", "cause"), [("(", "is no regular expression"), ("a", "has 0 groups"), ("(a)(b)", "has 2 groups")])
def test_a_pattern_needs_exactly_one_group(pattern: str, cause: str) -> None:
    with pytest.raises(BadInput, match=cause):
        ReasoningRule(pattern)


def test_other_tags_are_not_taken_but_suggested() -> None:
    tally = Tally()
    for response in ("<reasoning>a</reasoning>", "<reasoning>b</reasoning>", "plain", "<think>a"):
        tally.add(applied(response))
    assert tally.missing == {"untagged": 3, "unclosed": 1}
    assert tally.notes()[:3] == [
        "1 of 4 responses open a think tag and never close it (cut off by the token limit?); they count as empty",
        "3 of 4 responses hold no <think> ... </think>; they count as empty",
        "2 responses hold <reasoning>; to take that as the reasoning, give the pattern '<reasoning>(.*?)</reasoning>'",
    ]
    assert not any("no response holds reasoning" in note for note in tally.notes())
    assert applied("<reasoning>a</reasoning>", "<reasoning>(.*?)</reasoning>").reasoning == "a"


def test_what_the_file_says_is_left_alone() -> None:
    given = Rollout(None, "g", "t", 0, "w", prompt="P", response="<think>a</think>", reasoning_ids=(1,))
    assert ReasoningRule().apply(given) is given
