"""A console that is gone, or cannot be written, never costs a run its work."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.cli.console import SafeStream, surviving_console
from tether.cli.main import main
from tether.runs.checkpoints import list_checkpoints
from tether.runs.store import RunStore

SMALL = [
    "env.options.max_turns=1", "rollout.num_groups=1", "rollout.group_size=2", "rollout.max_tokens=8", "filter.strategy=all", "diagnosis.every=0",
    "evaluation.prompts=1", "checkpoint.every=50", "model.device=cpu",
]  # fmt: skip


def _train(out: Path, steps: int) -> list[str]:
    return ["train", "frozen_lake", "--steps", str(steps), "--out", str(out), *(word for pair in SMALL for word in ("--set", pair))]


class _Broken(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_closed_pipe_is_told_once_and_nothing_is_raised() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    told: list[str] = []
    with os.fdopen(writing, "w", buffering=1) as pipe:
        stream = SafeStream(pipe, lambda: told.append("closed"))
        for _ in range(3):
            assert stream.write("a line\n") == 7
            stream.flush()
    assert told == ["closed"]  # and closing the pipe itself raised nothing: what was left went nowhere


def test_what_cannot_be_written_silences_the_stream_and_says_so_once() -> None:
    other, told = io.StringIO(), []
    stream = SafeStream(_Broken(), lambda: told.append("closed"), other)
    stream.write("one")
    stream.write("two")
    assert told == [] and other.getvalue().count("\n") == 1
    assert "No space left on device" in other.getvalue() and "the run goes on without it" in other.getvalue()


def test_a_stream_that_was_closed_is_silent() -> None:
    gone = io.StringIO()
    gone.close()
    SafeStream(gone, lambda: None).write("x")


def test_letters_that_the_terminal_does_not_know_are_replaced() -> None:
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="ascii", write_through=True), lambda: None)
    stream.write("H(Z|X) ≥ 1")
    assert raw.getvalue() == b"H(Z|X) \\u2265 1"


def test_the_streams_come_back() -> None:
    before = sys.stdout, sys.stderr
    with surviving_console(lambda: None):
        assert isinstance(sys.stdout, SafeStream) and isinstance(sys.stderr, SafeStream)
    assert (sys.stdout, sys.stderr) == before


def test_a_run_whose_output_nobody_reads_stops_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tether train ... | head -1`, with a head that reads until the first step is reported."""
    reading, writing = os.pipe()
    real: Any = SafeStream.write

    def write(stream: SafeStream, text: str) -> int:
        if "step 1/" in text:
            os.close(reading)
        return int(real(stream, text))

    monkeypatch.setattr(SafeStream, "write", write)
    with os.fdopen(writing, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as caught:
            main(_train(tmp_path / "run", 50))
        monkeypatch.undo()
    assert caught.value.code == 141
    said = capsys.readouterr().err
    assert "nobody reads the output any more: stopped after step 1; the last checkpoint is step_000001" in said
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_000001"]
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_run_whose_log_cannot_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", _Broken())
        with pytest.raises(SystemExit) as caught:
            main(_train(tmp_path / "run", 1))
    assert caught.value.code == 0
    assert RunStore.open(tmp_path / "run").finished == "all 1 steps done"
    assert capsys.readouterr().err.count("cannot write to the console") == 1
