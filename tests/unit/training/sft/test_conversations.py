"""Conversations from a file: what is trained on, and a mistake is named with its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.models.chat import ChatFormat
from tether.training.sft.demonstrations import read_conversations, tokenized

ANSWER = "<think> I look </think> <answer> Up </answer>"
SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": text} for role, text in (("system", "Rules."), ("user", "_P_G"), ("assistant", ANSWER))
)


def _file(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_every_assistant_turn_is_in_the_loss_and_nothing_else(tmp_path: Path, tiny: Any, chat: ChatFormat) -> None:
    path = _file(tmp_path, {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT], "id": 7}, "", {"prompt": "_P_G", "response": ANSWER})
    talk, pair = tokenized(read_conversations(path), chat, end_of_turn=True)
    (sequence,) = talk.trajectory.sequences
    assert tiny.tokenizer.decode(sequence.token_ids) == (
        "<|im_start|>system\nRules.<|im_end|>\n"
        f"<|im_start|>user\n_P_G<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
        f"<|im_start|>user\n_P_G<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )
    said = tiny.tokenizer.decode([token for token, flag in zip(sequence.token_ids, sequence.loss_mask, strict=True) if flag])
    assert said == 2 * f"{ANSWER.removeprefix('<think>')}<|im_end|>"
    (sequence,) = pair.trajectory.sequences  # without a system message the template decides about one; this one has none
    assert tiny.tokenizer.decode(sequence.token_ids) == f"<|im_start|>user\n_P_G<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>"


def test_a_response_may_leave_the_opening_tag_to_the_prompt(tmp_path: Path, chat: ChatFormat) -> None:
    path = _file(tmp_path, {"prompt": "a", "response": ANSWER}, {"prompt": "a", "response": ANSWER.removeprefix("<think>")})
    one, other = tokenized(read_conversations(path), chat, end_of_turn=True)
    assert one == other  # of the same prompt, too


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ([1], "a list; write an object"),
        ({"mesages": []}, "but 'mesages': did you mean 'messages'"),
        ({"prompt": "a"}, "neither messages nor prompt and response"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": "hello"}, "messages is not a list of messages"),
        ({"messages": [USER, "hello"]}, "message 2 has no role and content"),
        ({"messages": [USER, {"role": "asistant", "content": "x"}]}, "message 2 has the unknown role 'asistant': did you mean 'assistant'"),
        ({"messages": [SYSTEM, USER]}, "the roles are system, user; after an optional system message, user and assistant alternate"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "the roles are user, assistant, assistant"),
        ({"messages": [SYSTEM]}, "the roles are system"),
        ({"messages": [USER, {"role": "assistant", "content": "Paris."}]}, "message 2 has no </think>"),
        ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "message 1 is no text"),
        ({"prompt": " ", "response": ANSWER}, "prompt is empty"),
        ({"prompt": "a", "response": 3}, "response is no text"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, row: Any, said: str) -> None:
    path = _file(tmp_path, {"prompt": "a", "response": ANSWER}, "", row)
    with pytest.raises(BadInput) as refused:
        read_conversations(path)
    assert str(refused.value).startswith(f"line 3 of '{path}': ") and said in str(refused.value) and "\n" not in str(refused.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no conversation"):
        read_conversations(_file(tmp_path, ""))
    with pytest.raises(BadInput, match=r"cannot read '.*': No such file"):
        read_conversations(tmp_path / "nowhere.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(BadInput, match="not UTF-8"):
        read_conversations(tmp_path / "latin.jsonl")
