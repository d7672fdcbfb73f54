"""`tether show` on a real run, and what `tether dashboard` refuses before it serves."""

import shutil
from pathlib import Path

import pytest

from tether.cli.main import main
from tether.runs.store import RunStore


def _run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_show_lists_the_episodes_that_fit(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = list(RunStore.open(runs / "first").trajectories())
    assert _run(["show", str(runs / "first"), "--limit", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["step", "split", "group", "member", "outcome"]
    notes = [f"step {record.step}: {note}" for record in RunStore.open(runs / "first").steps() for note in record.notes]
    printed = " ".join(" ".join(lines).split())
    assert notes and all(" ".join(note.split()) in printed for note in notes), "the notes of the steps that are shown"
    assert f"{len(episodes)} shown of {len(episodes)}" in lines[-1]
    failed = [episode for episode in episodes if episode["step"] == 1 and episode["success"] is False]
    assert _run(["show", str(runs / "first"), "--step", "1", "--failed", "--limit", "100", "--split", "train"]) == 0
    assert capsys.readouterr().out.count("failure") >= len(failed) > 1
    assert _run(["show", str(runs / "first"), "--text", "turn 2 OF", "--limit", "2"]) == 0
    assert "Turn 2 of" in capsys.readouterr().out


def test_show_prints_an_episode_turn_by_turn(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episode = next(iter(RunStore.open(runs / "first").trajectories(2, "train")))
    assert (
        _run(
            [
                "show",
                str(runs / "first"),
                "--step",
                "2",
                "--split",
                "train",
                "--group",
                str(episode["group"]),
                "--member",
                str(episode["member"]),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith(f"Step 2, train, group {episode['group']}, member {episode['member']}")
    for turn in episode["turns"]:
        assert turn["observation"] in printed and turn["response"].strip() in printed


def test_show_never_sends_control_characters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore.open(runs / "first")
    record = next(iter(store.trajectories(1, "train")))
    evil = "\x1b[2J\x1b]0;owned\x07 [red]\r\x9b31m"
    turn = {**record["turns"][0], "observation": evil, "response": evil, "response_ids": [], "logprobs": [], "reasoning_span": None}
    store.append_trajectories([{**record, "step": 3, "error": evil, "stop_reason": "env_error", "turns": [turn]}])
    store.close()
    for more in (["--turns"], ["--text", "owned"], ["--step", "3"]):
        assert _run(["show", str(runs / "first"), "--step", "3", *more]) == 0
        printed = capsys.readouterr().out
        assert not set(printed) & {chr(code) for code in (*range(9), *range(11, 32), *range(0x7F, 0xA0))}
        assert "\\x1b[2J" in printed and "[red]" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--failed", "--solved"], "leave no episode"),
        (["--member", "0"], "give --group as well"),
        (["--step", "77"], "it has steps 0 to 2 (train, validation)"),
        (["--text", "xyzzy"], "no episode of"),
    ],
)
def test_show_says_what_is_wrong(words: list[str], says: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["show", str(runs / "first"), *words]) == 2
    assert says in capsys.readouterr().err


def test_show_without_a_tokenizer_says_why_there_are_no_colours(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(runs / "first" / "checkpoints")
    assert _run(["show", str(runs / "first"), "--limit", "1"]) == 0
    assert "no checkpoint in the run folder holds a tokenizer" in capsys.readouterr().out


def test_dashboard_refuses_a_missing_folder_and_other_machines_without_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TETHER_TOKEN", raising=False)
    assert _run(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert _run(["dashboard", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "TETHER_TOKEN" in capsys.readouterr().err
