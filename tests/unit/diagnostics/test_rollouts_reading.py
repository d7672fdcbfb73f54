"""Files of every kind: bad lines, odd bytes, compression, progress, memory."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.rollouts import containers, open_rollouts


def a_line(number: int = 0, response: str = "<think>a</think>", **more: Any) -> bytes:
    return json.dumps({"prompt": f"p{number}", "response": response, "reward": 1, **more}, ensure_ascii=False).encode() + b"\n"


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (b'{"prompt": "a", "resp\n', "is not JSON: .*; expected one JSON object a line"),
        (b'{"prompt": "\xff", "response": "b"}\n', "is not UTF-8"),
        (b'"text"\n', "holds a str; expected one JSON object a line"),
        (b"[1]\n", "begins a JSON array; expected one object a line"),
        (b'{"prompt": ' + b"[" * 100_000 + b"\n", "is not JSON"),
        (b'{"prompt": "a", "response": "b", "reward": {}}\n', r"reward is {} \(dict\)"),
    ],
)
def test_a_bad_line_stops_the_reading_or_is_counted(tmp_path: Path, bad: bytes, cause: str) -> None:
    path = written(tmp_path / "r.jsonl", a_line(1) + b"\n" + bad + a_line(2))
    reader = open_rollouts(path)
    with pytest.raises(BadInput, match=rf"r.jsonl line 3: {cause}.*; correct it, or have bad lines skipped") as error:
        list(reader)
    assert "\n" not in str(error.value)
    reader = open_rollouts(path, bad_lines="skip")
    assert [rollout.prompt for rollout in reader] == ["p1", "p2"]
    assert (reader.tally.num_bad, reader.tally.num_records, reader.tally.num_rollouts) == (1, 3, 2)
    assert reader.tally.notes()[0].startswith(f"1 of 3 records could not be read and were left out; first: {path} line 3: ")


def test_a_record_is_used_whole_or_not_at_all(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>"}, {"role": "assistant", "content": 5}]
    path = written(tmp_path / "r.jsonl", a_line(1) + json.dumps({"messages": talk}).encode())
    reader = open_rollouts(path, bad_lines="skip")
    assert [rollout.prompt for rollout in reader] == ["p1"]
    assert reader.tally.bad_examples == [f"{path} line 2: messages after the prompt[1].content is 5 (int); expected text"]


def test_only_the_first_few_bad_lines_are_kept_in_words(tmp_path: Path) -> None:
    reader = open_rollouts(written(tmp_path / "r.jsonl", a_line() + b"x\n" * 50), bad_lines="skip")
    list(reader)
    assert (reader.tally.num_bad, len(reader.tally.bad_examples)) == (50, 5)


def test_a_bad_first_line(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", b"oops\n" + a_line(2))
    with pytest.raises(BadInput, match=r"r.jsonl line 1: is not JSON: .*; correct it, or have bad lines skipped"):
        open_rollouts(path)
    assert [rollout.prompt for rollout in open_rollouts(path, bad_lines="skip")] == ["p2"]
    with pytest.raises(BadInput, match="bad_lines is 'ignore'; expected 'raise' or 'skip'"):
        open_rollouts(path, bad_lines="ignore")  # type: ignore[arg-type]


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'.*none.jsonl' does not exist; check the path"):
        open_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match="no rollout file was given"):
        open_rollouts([])
    with pytest.raises(BadInput, match=r"folder '.*' holds no rollouts; expected files that end with .jsonl"):
        open_rollouts(tmp_path)
    with pytest.raises(BadInput, match=r"'.*e.jsonl' holds no records"):
        open_rollouts(written(tmp_path / "e.jsonl", b"\n \n"))
    with pytest.raises(BadInput, match=r"b.jsonl line 1: is not JSON"):
        open_rollouts(written(tmp_path / "b.jsonl", b"x\n"), bad_lines="skip")
    with pytest.raises(BadInput, match=r"holds no readable rollouts: all 1 records are bad; first: .*c.jsonl line 1: reward is"):
        list(open_rollouts(written(tmp_path / "c.jsonl", b'{"prompt": "a", "response": "b", "reward": "c"}'), bad_lines="skip"))


@pytest.mark.parametrize(
    ("head", "cause"),
    [(b"\x80\x04\x95", "is a pickle, which can run code"), (b"PK\x03\x04", "is a zip archive"), (b"\x28\xb5\x2f\xfd", "zstd -d")],
)
def test_other_kinds_of_file_are_refused_with_a_remedy(tmp_path: Path, head: bytes, cause: str) -> None:
    with pytest.raises(BadInput, match=cause):
        open_rollouts(written(tmp_path / "val_rollouts.pkl", head + b"\x00" * 9))


def test_text_of_every_kind(tmp_path: Path) -> None:
    odd = "\u8bf7\u601d\u8003 \U0001f600 \u2028 \x85"  # the last two end a line for str.splitlines, not in JSON Lines
    lines = (
        b"\xef\xbb\xbf"
        + a_line(1, f"<think>{odd}</think>").replace(b"\n", b"\r\n")
        + b'{"prompt": "q", "response": "\\ud83d\\ude00</think>"}'
    )
    rollouts = list(open_rollouts(written(tmp_path / "r.jsonl", lines)))
    assert [rollout.reasoning for rollout in rollouts] == [odd, "\U0001f600"]
    assert "".join(rollout.where[-6:] for rollout in rollouts) == "line 1line 2"


@pytest.mark.parametrize("container", ["lines", "array"])
@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ('"prompt": "a \\ud800 b", "response": "<think>a</think>"', r"prompt holds half a character at 2 \(a lone surrogate, '\\ud800'\)"),
        ('"prompt": "a", "response": "<think>a \\udc00</think>"', "response holds half a character at 9"),
        ('"prompt": "a", "reasoning": "\\udc00"', "reasoning holds half a character at 0"),
        ('"messages": [{"role": "user", "content": [{"text": "\\ud83d"}]}], "response": "a"', r"messages\[0\] holds half a character"),
        ('"messages": [{"role": "user", "content": ' + "[" * 900 + "]" * 900 + '}], "response": "a"', "is nested too deeply"),
        ('"prompt": "a", "prompt": "b", "response": "a"', "names the field 'prompt' twice"),
        ('"prompt": "a", "response": "a", "step": Infinity', "step is too large"),
        ('"prompt": "a", "response": "a", "step": ' + "9" * 4000, "step is too large"),
    ],
)
def test_a_hostile_record_is_one_line_and_can_be_skipped(tmp_path: Path, fields: str, cause: str, container: str) -> None:
    bad, good = f"{{{fields}}}".encode(), [a_line(number).strip() for number in range(3)]
    records = [good[0], bad, *good[1:]]
    whole = b"\n".join(records) if container == "lines" else b"[" + b",".join(records) + b"]"
    path = written(tmp_path / "r.jsonl", whole)
    with pytest.raises(
        BadInput, match=rf"{'line' if container == 'lines' else 'item'} 2: {cause}.*; correct it, or have bad lines skipped"
    ):
        list(open_rollouts(path))
    reader = open_rollouts(path, bad_lines="skip")
    assert len(list(reader)) == 3 and "1 of 4 records could not be read and were left out; first:" in " ".join(reader.notes())


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero")):
        with pytest.raises(BadInput, match="is a pipe or a device, not a file; write the rollouts to a file first"):
            open_rollouts(path)
    with pytest.raises(BadInput, match="holds no rollouts"):
        open_rollouts(tmp_path)
    with pytest.raises(BadInput, match="is UTF-16; convert it first"):
        open_rollouts(written(tmp_path / "wide.jsonl", a_line(1).decode().encode("utf-16")))


def test_mixed_steps_come_in_the_order_of_the_file_and_a_reader_can_be_read_again(tmp_path: Path) -> None:
    reader = open_rollouts(written(tmp_path / "r.jsonl", b"".join(a_line(step, step=step) for step in (3, 1, 3, 2))))
    assert [rollout.step for rollout in reader] == [rollout.step for rollout in reader] == [3, 1, 3, 2]
    assert (reader.tally.num_rollouts, reader.tally.num_empty, reader.tally.notes()) == (4, 0, [])


def test_gzip_is_told_by_its_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", gzip.compress(a_line(1) + a_line(2)))
    assert [rollout.where for rollout in open_rollouts(path)] == [f"{path} line 1", f"{path} line 2"]
    packed = gzip.compress(b"".join(a_line(number, str(hash(str(number)))) for number in range(4000)))
    cut = written(tmp_path / "cut.jsonl.gz", packed[: len(packed) // 2])
    with pytest.raises(BadInput, match=r"cut.jsonl.gz after line \d{3,}: the gzip stream is damaged"):
        list(open_rollouts(cut))
    reader = open_rollouts(cut, bad_lines="skip")
    assert 100 < len(list(reader)) < 4000
    assert reader.tally.num_bad == 1


def test_a_line_without_end_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = written(tmp_path / "r.jsonl", a_line(1) + a_line(2, "<think>" + "x" * 3_000_000 + "</think>") + a_line(3))
    assert [len(rollout.reasoning or "") for rollout in open_rollouts(long)] == [1, 3_000_000, 1]
    monkeypatch.setattr(containers, "MAX_LINE_BYTES", 2**20)
    with pytest.raises(BadInput, match="line 2: is longer than 1 MiB; expected one JSON object a line"):
        list(open_rollouts(long))
    assert [rollout.where[-6:] for rollout in open_rollouts(long, bad_lines="skip")] == ["line 1", "line 3"]


def test_progress_counts_the_bytes_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "PROGRESS_BYTES", 1)
    calls: list[tuple[int, int]] = []
    first, second = written(tmp_path / "1.jsonl", a_line(1) * 2), written(tmp_path / "2.jsonl", gzip.compress(a_line(3)))
    size, total = len(a_line(1)), first.stat().st_size + second.stat().st_size
    list(open_rollouts([first, str(second)], progress=lambda read, whole: calls.append((read, whole))))
    assert calls[:3] == [(size, total), (2 * size, total), (2 * size, total)]
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        for number in range(3000):
            file.write(a_line(number, "<think>" + "abcdefgh" * 1000 + "</think>", step=number // 100))
    assert path.stat().st_size > 24_000_000
    reader = open_rollouts(path)
    tracemalloc.start()
    try:
        total = sum(len(rollout.reasoning or "") for rollout in reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 24_000_000
    assert peak < 1_000_000
