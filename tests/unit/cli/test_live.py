"""The live view says how many alarms stand, in red, and prints notes as they are."""

import dataclasses
import io
import re
import time

import pytest
from rich.console import Console

from tether.cli import live
from tether.cli.live import LiveView
from tether.cli.main import main
from tether.core.protocols import EngineStatistics
from tether.runs.schema import StepRecord
from tether.runs.timings import StepTimings

UNTIMED = StepTimings()
RED = "\x1b[1;31m"


def shown(*records: StepRecord, terminal: bool = False, timings: StepTimings = UNTIMED) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system="standard" if terminal else None, legacy_windows=False)
    view = LiveView(console, 9)
    with view.running():
        for record in records:
            view.on_step_end(record, timings)
    return file.getvalue()


def test_the_line_of_a_step_ends_with_the_alarms_that_stand() -> None:
    alarmed = {"rollout/success": 0.5, "alarms/critical": 1.0, "alarms/warning": 2.0}
    assert (
        shown(StepRecord(3, alarmed, "template collapse")) == "step 3/9  success 50%  [template collapse]  alarms: 1 critical, 2 warning\n"
    )
    assert shown(StepRecord(3, {"alarms/critical": 0.0, "alarms/warning": 1.0})) == "step 3/9    alarms: 1 warning\n"
    for quiet in ({"rollout/success": 0.5}, {"rollout/success": 0.5, "alarms/critical": 0.0, "alarms/warning": 0.0}):
        assert shown(StepRecord(3, quiet)) == "step 3/9  success 50%\n"


def measured(prompts: int, regime: str | None = None) -> StepRecord:
    values = {
        "retrieval_acc": 1.0,
        "chance": 1 / prompts,
        "num_prompts": prompts,
        "num_reasonings": 4 * prompts,
        "retrieval_p_value": 0.001,
    }
    return StepRecord(3, {f"information/{name}": float(value) for name, value in values.items()}, regime)


def test_a_sample_that_is_too_small_has_no_regime() -> None:
    assert "[cannot be told from 8 reasonings under 2 prompts]" in shown(measured(2))
    assert "regime: cannot be told from 8 reasonings under 2 prompts" in shown(measured(2), terminal=True).replace("\n", " ")
    assert "[compressed reasoning]" in shown(measured(8, "compressed reasoning"))


def test_the_share_of_valid_replies_is_a_column() -> None:
    assert shown(StepRecord(3, {"rollout/success": 0.5, "rollout/format_valid": 0.25})) == "step 3/9  success 50%  valid 25%\n"


def test_on_a_terminal_the_title_counts_alarms_in_red() -> None:
    text = shown(StepRecord(1, {"alarms/critical": 2.0}, "diverse reasoning"), terminal=True)
    assert "alarms: 2 critical" in text and any(RED in line and "alarms: 2 critical" in line for line in text.splitlines())


def test_alarms_that_no_longer_stand_are_no_longer_counted() -> None:
    first, second = shown(StepRecord(1, {"alarms/critical": 2.0}), StepRecord(2, {"alarms/critical": 0.0})).splitlines()
    assert "alarms: 2 critical" in first and "alarms" not in second


def test_notes_are_printed_whole_and_as_they_are() -> None:
    note = "critical: x since step 2: " + "long " * 30 + "[/odd] [red]brackets[/red]"
    first, second = shown(StepRecord(2, {}, None, [note])).splitlines()
    assert first == f"step 2: {note}" and second.startswith("step 2/9")
    coloured = shown(StepRecord(2, {}, None, ["critical: x", "an ordinary note"]), terminal=True).splitlines()
    assert any(RED in line and "step 2: critical: x" in line for line in coloured)
    assert any("\x1b[33m" in line and "an ordinary note" in line for line in coloured)


def test_the_time_left_is_told_for_steps_of_any_length() -> None:
    clock = [0.0]
    view = LiveView(Console(file=io.StringIO(), get_time=lambda: clock[0]), 9)
    for step in range(4):
        view.on_step_end(StepRecord(step, {}), UNTIMED)
        clock[0] += 100.0
    assert view._bars.tasks[0].time_remaining == 600.0  # 6 steps of 100 s


def test_a_piped_run_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.05)
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=False, width=100), 9)
    with view.running():
        view.on_step_end(StepRecord(2, {}), UNTIMED)
        view.on_stage_begin("rollout", 128)
        view.on_stage_progress()
        time.sleep(0.2)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("step 2/9") and any(line.startswith("step 3/9: sampling 1/128, 0 s") for line in lines[1:])
    told = file.getvalue()
    time.sleep(0.1)
    assert file.getvalue() == told  # it ends with the run


def test_a_piped_evaluation_says_that_it_lives(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.05)
    with pytest.raises(SystemExit):
        main(["eval", "tiny", "--env", "frozen_lake", "--prompts", "4", "--device", "cpu"])
    assert re.search(r"^playing tiny( [0-4]/4)?(, [\d,]+ tokens( of prompts read)?)?, \d+ s$", capsys.readouterr().err, re.MULTILINE)


COSTLY = StepTimings(
    seconds={"rollout": 3.0, "update": 6.9, "select": 0.1},
    tokens_per_second=1234.0,
    update_tokens_per_second=5000.0,
    share_of_peak={"rollout": 0.01, "update": 0.314},
    peak_memory={"rollout": 4_000_000_000, "update": 12_500_000_000},
    unused_memory=0,
)
COST = "10 s: update 69% at 5,000 tokens/s, 31% of peak, rollout 30% at 1,234 tokens/s; 12.5 GB"


def test_what_the_step_cost_is_said_with_it() -> None:
    assert shown(StepRecord(3, {"rollout/success": 0.5}), timings=COSTLY) == f"step 3/9  success 50%  ({COST})\n"
    assert COST in shown(StepRecord(1, {}), terminal=True, timings=COSTLY)
    assert shown(StepRecord(3, {}), timings=StepTimings({"validation": 2.0})) == "step 3/9    (2 s: validation 100%)\n"


def test_a_cpu_has_no_share_of_a_peak() -> None:
    """Its peak is measured beside whatever else runs there: a step was said to reach 100% of it."""
    timings = dataclasses.replace(COSTLY, unused_memory=None, share_of_peak={"update": 1.0})
    assert "of peak" not in shown(StepRecord(3, {}), timings=timings)


def test_a_resumed_run_counts_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.05)
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=False, width=100), 9, done=5)
    with view.running():
        view.on_stage_begin("rollout", 128)
        time.sleep(0.2)
    assert file.getvalue().startswith("step 6/9: sampling 0/128, 0 s")
    terminal = io.StringIO()
    view = LiveView(Console(file=terminal, force_terminal=True, width=100), 9, done=5)
    with view.running():
        pass
    assert "5/9" in terminal.getvalue() and "0/9" not in terminal.getvalue()


def test_tokens_are_shown_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.05)
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=False, width=100), 9)
    rounds = [EngineStatistics(sampled_tokens=77)]  # of an earlier round
    view.on_sampling_ready(lambda: rounds[-1])
    with view.running():
        view.on_stage_begin("validation", 2)
        time.sleep(0.15)
        rounds.append(EngineStatistics(fed_tokens=300))
        time.sleep(0.15)
        rounds[-1].sampled_tokens = 1234
        time.sleep(0.15)
        view.on_stage_begin("update", 1)
        time.sleep(0.15)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("step 0/9: validating 0/2, 0 s") and "77" not in file.getvalue()
    assert any("validating 0/2, 300 tokens of prompts read, 0 s" in line for line in lines)
    assert any("validating 0/2, 1,234 tokens, 0 s" in line for line in lines)
    assert "tokens" not in lines[-1]


def test_a_note_before_the_first_step() -> None:
    file = io.StringIO()
    LiveView(Console(file=file, width=60), 9).on_note("fits only with [recomputed] activations")
    assert file.getvalue() == "fits only with [recomputed] activations\n"
