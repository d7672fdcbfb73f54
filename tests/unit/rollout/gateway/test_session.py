"""A session without a server: which tokens are reasoning and which are calls, what is counted, and which calls are trained."""

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.types import Completion, Trajectory
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat, read_messages
from tether.rollout.gateway.session import Budgets, Call, Session, trajectory_of
from tether.rollout.gateway.trained import train_rule
from tether.rollout.pack import pack
from tether.runs.schema import trajectory_record

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Talk:
    """A session whose replies are written here."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.chat_template = TEMPLATE
        self.session = Session(AgentChat(ChatFormat(self.tokenizer), "hermes"), 0, Budgets(64, None, 600, 64), **options)

    def ask(self, messages: list[dict[str, Any]], reply: str, tools: bool = True) -> Call:
        call = self.session.begin(read_messages(messages), (TOOL,) if tools else ())
        ids = (*self.tokenizer.encode(reply, add_special_tokens=False), self.tokenizer.eos_token_id)
        self.session.finish(call, Completion(ids, (-1.0,) * len(ids), FinishReason.END_OF_TURN), reply)
        return call

    def trajectory(self, rule: str = "all") -> Trajectory:
        self.session.close()
        return trajectory_of(self.session, Trajectory(0, 0, 5, [], StopReason.SUCCESS), train_rule(rule))


@pytest.fixture
def talk(tiny: Any) -> Any:
    return lambda **options: Talk(tiny.tokenizer, **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("text", "reasoning", "calls"),
    [
        (CALL, None, CALL),
        (f"I look.\n{CALL}", "I look.", CALL),
        (f"{CALL}\nDone.", None, CALL),
        (f"I look. {CALL} Done.", "I look.", CALL),
        (f"{CALL} and {CALL}", None, f"{CALL} and {CALL}"),
        (f"<think>think</think>\n{CALL}", "think", CALL),
        (f"<think>\n\n</think>\nI look.\n{CALL}", "I look.", CALL),
        (f"<think>Where? {CALL}?</think>Here: {CALL}", f"Where? {CALL}?", CALL),
        ("It is 4.", None, None),
        ("<think>2 and 2</think>It is 4.", "2 and 2", None),
        ('<tool_call>{"name": </tool_call>', None, None),
    ],
)
def test_which_tokens_are_reasoning_and_which_are_calls(talk: Any, text: str, reasoning: str | None, calls: str | None) -> None:
    said = talk()
    said.ask([user("Where?")], text)
    (turn,) = said.trajectory().turns
    read = [said.tokenizer.decode(ids).strip() or None for ids in (turn.reasoning_ids, turn.calls_ids)]
    assert read == [reasoning, calls]


def test_follow_ups_that_continue_and_those_that_do_not(talk: Any) -> None:
    said = talk()
    said.ask([user("a")], "one")
    for text, more in (("one", "b"), ("one", "c"), ("one, rewritten", "d")):  # the second forks, the third was edited
        said.ask([user("a"), {"role": "assistant", "content": text}, user(more)], "two")
    said.ask([user("another conversation")], "three", tools=False)
    measures = said.trajectory().measures
    named = ("calls", "contexts", "follow_ups", "continued", "with_tools", "contexts_forked", "contexts_edited", "contexts_other")
    assert [measures[name] for name in named] == [5, 4, 3, 1, 4, 1, 1, 1]


def test_history_rendered_anew_is_no_fault_where_it_was_asked_for(talk: Any) -> None:
    said = talk(exact=False)
    said.ask([user("a")], CALL.replace("\n", ""))
    call = {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    said.ask([user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}, user("b")], "two")
    measures = said.trajectory().measures
    assert (measures["contexts_template"], measures["follow_ups"]) == (1, 0)


def _with_a_title(talk: Any, title: bool = True) -> Talk:
    said: Talk = talk()
    if title:
        said.ask([user("a title")], "Title", tools=False)
    said.ask([user("a")], CALL)
    return said


def test_auxiliary_calls_are_recorded_and_not_trained(talk: Any) -> None:
    alone, both = (_with_a_title(talk, title).trajectory("with_tools") for title in (False, True))
    assert [turn.trained for turn in both.turns] == [True, False] and both.turns[1].text == "Title"
    assert [(turn.get("trained"), "calls_span" in turn) for turn in trajectory_record(both, 1, "train", True)["turns"]] == [
        (None, True),
        (False, False),
    ], "the record says only what is out of the ordinary"
    wanted, got = pack([alone]), pack([both])
    for name in ("ids_BT", "loss_mask_BT", "behavior_logprobs_BT", "rewards_BT", "turn_ends_BT", "lengths_B", "trajectory_index_B"):
        assert torch.equal(getattr(wanted, name), getattr(got, name)), name
    assert len(pack([_with_a_title(talk).trajectory("all")])) == 2


def test_without_tools_anywhere_all_calls_are_trained(talk: Any) -> None:
    said = talk()
    said.ask([user("a")], "one", tools=False)
    assert [turn.trained for turn in said.trajectory("with_tools").turns] == [True]


def test_a_function_says_which_calls_are_trained(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module: Any = ModuleType("own_rules")
    module.rule = lambda call: seen.append((call.number, call.messages[-1]["content"], len(call.tools), call.text)) or call.number == 1
    module.broken = lambda call: call.nothing
    module.unsure = lambda call: "yes"
    module.number = 3
    monkeypatch.setitem(sys.modules, "own_rules", module)
    said = talk()
    said.ask([user("a")], "one")
    said.ask([user("a"), {"role": "assistant", "content": "one"}, user("b")], "two")
    trajectory = said.trajectory("own_rules:rule")
    assert seen == [(0, "a", 1, "one"), (1, "b", 1, "two")]
    (sequence,) = trajectory.sequences
    first, second = trajectory.turns
    before, trained = len(first.context_ids) + len(first.response_ids) + len(second.context_ids), len(second.response_ids)
    assert sequence.loss_mask == [False] * before + [True] * trained, "what is not trained is context"
    assert sequence.sampled_logprobs == [0.0] * before + [-1.0] * trained
    for name, line in (
        ("own_rules:broken", "failed at call 0 of an episode: AttributeError"),
        ("own_rules:unsure", "returned 'yes'; return True or False"),
        ("own_rules:number", "is a int; give a function"),
        ("own_rules:rul", "did you mean 'rule'"),
        ("with_tool", "agent.train_calls 'with_tool' is not known: did you mean 'with_tools'"),
    ):
        with pytest.raises(BadInput if name != "own_rules:rul" else Exception, match=line):
            said.trajectory(name)
