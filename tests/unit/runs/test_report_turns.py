"""How the report shows a turn: in the grammar of its environment, and malformed only where it is."""

from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import FinishReason, StopReason
from tether.core.types import Trajectory, Turn
from tether.runs.reasoning_view import TurnView, sample_steps
from tether.runs.report import write_report
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore
from tether.runs.timings import fast_path_words

SEARCH = " who wrote it? </think> <search> author of Emma </search> and more"


def _run(folder: Path, *turns: tuple[str, bool]) -> RunStore:
    store = RunStore.create(folder, "algo: grpo\n", {"env": "searchqa"})
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    played = [Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, text, (0, 1), valid=valid, observation="Q") for text, valid in turns]
    store.append_trajectories([trajectory_record(Trajectory(0, 0, 0, played, StopReason.SUCCESS, True), 1, "train", kept=True)])
    return store


def _shown(tmp_path: Path, text: str, valid: bool) -> TurnView:
    (sample,) = sample_steps(_run(tmp_path / "run", (text, valid)))
    turn: TurnView = sample.episodes[0]["turns"][0]
    return turn


def test_a_valid_search_is_not_malformed(tmp_path: Path) -> None:
    """Search-R1 replies with <search> or <answer>; the record says that the turn was valid."""
    turn = _shown(tmp_path, SEARCH, valid=True)
    assert (turn.well_formed, turn.reasoning, turn.answer) == (True, "who wrote it?", "<search>author of Emma</search>")
    page = write_report([_run(tmp_path / "other", (SEARCH, True))], tmp_path / "report.html").read_text()
    assert "malformed:" not in page and "→ &lt;search&gt;author of Emma&lt;/search&gt;" in page


@pytest.mark.parametrize(
    ("text", "valid", "well_formed", "answer"),
    [
        (" go </think> <answer> Up </answer>", True, True, "Up"),
        (" go </think> <answer> Fly </answer>", False, True, "Fly"),
        (SEARCH, False, False, "<search> author of Emma </search> and more"),  # in an environment that knows no <search>
        (" no end", False, False, "no end"),
        (" go </think> Up", True, True, "Up"),  # an environment whose replies have no tag
    ],
)
def test_other_turns(tmp_path: Path, text: str, valid: bool, well_formed: bool, answer: str) -> None:
    turn = _shown(tmp_path, text, valid)
    assert (turn.well_formed, turn.answer, turn.valid) == (well_formed, answer, valid)


FAST: dict[str, Any] = {"decoder": "paged", "learner_attention": "packed", "scorer": "shared prefix", "head": "module"}


@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        ({}, []),
        ({"fast_path": None}, []),
        ({"fast_path": FAST}, ["Fast path: decoder paged; attention in the learner packed; scorer shared prefix; head module."]),
        (
            {"fast_path": {"decoder": "cached", "reasons": ["the probe <differs>"]}},
            ["Fast path: decoder cached.", "Slow way: the probe <differs>"],
        ),
        ({"fast_path": {"reasons": {"head": "it scales its logits"}}}, ["Slow way: head: it scales its logits"]),
    ],
)
def test_the_fast_path_report(tmp_path: Path, machine: dict[str, Any], lines: list[str]) -> None:
    assert fast_path_words(machine) == lines
    store = _run(tmp_path / "run", (SEARCH, True))
    store.computed_on(machine)
    page = write_report([store], tmp_path / "report.html").read_text()
    assert all(line.replace("<", "&lt;").replace(">", "&gt;") in page for line in lines)
    assert ("Fast path" in page) == any(line.startswith("Fast path") for line in lines)
