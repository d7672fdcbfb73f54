"""Generic records, field maps, and what is said when a file is nothing we know."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput, UnknownName
from tether.diagnostics.rollouts import Rollout, open_rollouts, parse_fields
from tether.diagnostics.rollouts.formats import suggestions


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read_one(tmp_path: Path, record: Mapping[str, Any], **options: Any) -> Rollout:
    [rollout] = open_rollouts(write(tmp_path / "g.jsonl", [record]), **options)
    return rollout


PLAIN = {"step": 3, "group": "p1", "prompt": "2+2?", "response": "<think>easy</think>4", "reward": 1, "success": True}


def test_the_example_of_the_record(tmp_path: Path) -> None:
    where = f"{tmp_path / 'g.jsonl'} line 1"
    assert read_one(tmp_path, PLAIN) == Rollout(
        step=3,
        group="p1",
        trajectory=1,
        turn=0,
        where=where,
        prompt="2+2?",
        response="<think>easy</think>4",
        reasoning="easy",
        lead="<think>",
        reward=1.0,
        success=True,
    )


def test_groups_fall_back_to_equal_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    records: list[dict[str, Any]] = [
        {"prompt": "a", "response": "x"},
        {"prompt": "a", "response": "y", "group": None},
        {"messages": chat, "response": "x"},
        {"messages": [dict(reversed(chat[0].items()))], "response": "x"},
        {"prompt_ids": [1, 2], "reasoning_ids": [3]},
        {"prompt_ids": [1, 2], "reasoning_ids": [4]},
        {"prompt": "a", "response": "x", "group": [1, "b"]},
        {"prompt": "a", "response": "x", "group": 0},
    ]
    groups = [rollout.group for rollout in open_rollouts(write(tmp_path / "g.jsonl", records))]
    assert groups[0] == groups[1]
    assert groups[2] == groups[3]
    assert groups[4] == groups[5]
    assert len(set(groups)) == 5
    assert groups[6:] == ['[1, "b"]', 0]


def test_reasoning_and_ids_that_the_file_gives_are_taken(tmp_path: Path) -> None:
    given = read_one(tmp_path, {"prompt": "p", "response": "<think>a</think>b", "reasoning": "mine"})
    assert (given.reasoning, given.lead, given.context()) == ("mine", "", "p")
    ids = read_one(tmp_path, {"prompt_ids": [5, 6], "response_ids": [7, 8], "reasoning_ids": [7]})
    assert (ids.prompt_ids, ids.response_ids, ids.reasoning_ids, ids.has_reasoning, ids.missing) == ((5, 6), (7, 8), (7,), True, None)


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"reasoning": " \n"}, "blank"),
        ({"reasoning": None}, "absent"),
        ({"reasoning_ids": []}, "blank"),
        ({"response": "no tags"}, "untagged"),
        ({"response": "<think>cut off"}, "unclosed"),
        ({"response": "<think> </think>x"}, "blank"),
    ],
)
def test_no_reasoning_is_counted_with_its_cause(tmp_path: Path, more: dict[str, Any], missing: str) -> None:
    reader = open_rollouts(write(tmp_path / "g.jsonl", [{"prompt": "p", **more}]))
    [rollout] = reader
    assert (rollout.missing, rollout.has_reasoning) == (missing, False)
    assert reader.tally.missing == {missing: 1}
    assert any("give a pattern" in note for note in reader.tally.notes())


@pytest.mark.parametrize(("reward", "expected"), [(True, 1.0), (0, 0.0), (None, None), (float("inf"), None), (10**400, None)])
def test_rewards(tmp_path: Path, reward: Any, expected: float | None) -> None:
    reader = open_rollouts(write(tmp_path / "g.jsonl", [{**PLAIN, "reward": reward}]))
    assert [rollout.reward for rollout in reader] == [expected]
    assert reader.tally.num_without_reward == (expected is None)


def test_a_format_that_was_asked_for_is_held_to(tmp_path: Path) -> None:
    both = {"input": "a", "output": "b", "score": 1, "prompt": "p", "response": "r</think>"}
    assert read_one(tmp_path, both).prompt == "a"
    assert read_one(tmp_path, both, format="generic").prompt == "p"
    with pytest.raises(BadInput, match=r"line 1: has no field 'score'; expected verl's rollout dump \(input, output, score\)"):
        read_one(tmp_path, {"input": "a", "output": "b"}, format="verl")


def test_the_first_record_that_is_recognised_decides(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", [{"about": "this file"}, PLAIN])
    reader = open_rollouts(path, bad_lines="skip")
    assert (reader.format.name, len(list(reader)), reader.tally.num_bad) == ("generic", 1, 1)


def test_a_whole_conversation_is_cut_at_its_answers(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>1</think>"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "2</think>"},
    ]
    path = write(tmp_path / "g.jsonl", [{"messages": talk, "reward": 0.5, "trajectory": "e", "turn": 4}])
    rollouts = list(open_rollouts(path))
    assert [(rollout.turn, rollout.trajectory, rollout.reasoning) for rollout in rollouts] == [(4, "e", "1"), (5, "e", "2")]
    assert [rollout.messages for rollout in rollouts] == [talk[:1], talk[:3]]
    assert rollouts[1].context("R") == "R<think>"


def test_a_response_repeated_as_the_last_message_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>1</think>"}]
    assert read_one(tmp_path, {"messages": talk, "response": "<think>1</think>"}).messages == talk[:1]
    assert read_one(tmp_path, {"messages": talk, "response": "<think>2</think>"}).messages == talk
    assert read_one(tmp_path, {"messages": talk[1:], "response": "<think>1</think>"}).messages == talk[1:]
    rendered = read_one(tmp_path, {"messages": talk, "prompt": "already rendered", "response": "x"})
    assert (rendered.prompt, rendered.messages) == ("already rendered", None)


def test_a_field_map_walks_and_takes_dotted_keys_as_they_stand(tmp_path: Path) -> None:
    record = {
        "in.put": "p",
        "choices": [{"message": {"content": "<think>z</think>"}}],
        "info": {"score": 2, "ok": 0},
        "reward": "unused",
        "step": 7,
    }
    fields = parse_fields(["prompt=in.put, response=choices.0.message.content", "reward=info.score,success=info.ok"])
    rollout = read_one(tmp_path, record, fields=fields)
    assert (rollout.prompt, rollout.reasoning, rollout.reward, rollout.success, rollout.step) == ("p", "z", 2.0, False, 7)


def test_a_mapped_prompt_and_response_may_be_messages(tmp_path: Path) -> None:
    record = {"q": [{"role": "user", "content": "a"}], "a": {"role": "assistant", "content": "<think>z</think>"}}
    rollout = read_one(tmp_path, record, fields={"prompt": "q", "response": "a"})
    assert (rollout.messages, rollout.reasoning) == ([{"role": "user", "content": "a"}], "z")


def test_bad_field_maps(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", [{"input": "a", "output": {"text": "b"}}])
    with pytest.raises(UnknownName, match="'promt', which is no field of a rollout; did you mean 'prompt'"):
        open_rollouts(path, fields={"promt": "input"})
    with pytest.raises(BadInput, match="entry 'prompt' is not NAME=FIELD"):
        parse_fields(["prompt"])
    with pytest.raises(BadInput, match=r"names prompt twice \('a' and 'b'\)"):
        parse_fields(["prompt=a", "prompt=b"])
    with pytest.raises(BadInput, match=r"line 1: has no field 'output.txt' \(mapped to response\); did you mean 'output.text'"):
        list(open_rollouts(path, fields={"prompt": "input", "response": "output.txt"}))
    several = write(tmp_path / "s.jsonl", [{"input": "a", "choices": ["b"]}])
    with pytest.raises(BadInput, match=r"has no field 'choices.1' \(mapped to response\)"):
        list(open_rollouts(several, fields={"prompt": "input", "response": "choices.1"}))
    with pytest.raises(BadInput, match="field map is for generic records, but format 'verl'"):
        open_rollouts(path, fields={"prompt": "input"}, format="verl")
    with pytest.raises(UnknownName, match="'very' is not known; did you mean 'verl'"):
        open_rollouts(path, format="very")


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({**PLAIN, "reward": "1"}, r"reward is '1' \(str\); expected a number"),
        ({**PLAIN, "success": 0.5}, r"success is 0.5 \(float\); expected true or false"),
        ({**PLAIN, "step": 1.5}, r"step is 1.5 \(float\); expected a whole number"),
        ({**PLAIN, "step": True}, r"step is True \(bool\); expected a whole number"),
        ({**PLAIN, "prompt": 5}, r"prompt is 5 \(int\); expected text"),
        ({**PLAIN, "prompt": ""}, "the prompt is empty"),
        ({**PLAIN, "response": 5}, r"response is 5 \(int\); expected text"),
        ({**PLAIN, "response_ids": [1, -1]}, r"response_ids is \[1, -1\] \(list\); expected a list of token ids"),
        ({**PLAIN, "prompt_ids": [True]}, "prompt_ids is .* expected a list of token ids"),
        ({**PLAIN, "prompt_ids": []}, "the prompt is empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages begins with an assistant message"),
        ({"messages": [{"role": "user"}, "x", {"role": "assistant"}]}, r"messages\[1\] is 'x' \(str\); expected a message"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path, record: dict[str, Any], cause: str) -> None:
    with pytest.raises(BadInput, match=f"g.jsonl line 1: {cause}.*; correct it, or have bad lines skipped"):
        list(open_rollouts(write(tmp_path / "g.jsonl", [record])))


def test_an_unknown_format_is_told_with_a_field_map_to_try(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", [{"Question": "a", "data": {"completion": "b", "score": 1}}])
    with pytest.raises(BadInput) as error:
        open_rollouts(path)
    message = str(error.value)
    assert message.startswith(f"{path} line 1 is no rollout of a known format: its fields are Question, data; known: Tether's")
    assert message.endswith("try the field map prompt=Question,response=data.completion,reward=data.score")
    assert "\n" not in message
    with pytest.raises(BadInput, match=r"its fields are none; known: .*; give a field map"):
        open_rollouts(write(tmp_path / "e.jsonl", [{}]))


def test_suggestions_take_each_field_once_and_forgive_a_slip() -> None:
    assert suggestions({"promt": "a", "responce": "b", "text": "c"}) == {"prompt": "promt", "response": "text"}
    assert suggestions({"prompt": "a", "x": {"prompt": "b"}}) == {"prompt": "prompt"}
    assert suggestions({"output": "a", "cot": "b", "iteration": 1, "uid": 2}) == {
        "response": "output",
        "reasoning": "cot",
        "group": "uid",
        "step": "iteration",
    }


def test_a_later_record_without_a_response_is_told_what_it_may_be_called(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", [PLAIN, {"prompt": "a", "completion": "b"}])
    with pytest.raises(
        BadInput, match=r"line 2: has no response: .* got completion, prompt; is it 'completion'\? \(field map response=comp"
    ):
        list(open_rollouts(path))
    path = write(tmp_path / "h.jsonl", [PLAIN, {"response": "b"}])
    with pytest.raises(BadInput, match="line 2: has no prompt: expected one of prompt, messages, prompt_ids, got response;"):
        list(open_rollouts(path))
