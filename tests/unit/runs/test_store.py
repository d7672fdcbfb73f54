"""The run folder keeps what was appended, survives kills and full disks, and never overwrites another run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput, StorageError
from tether.core.types import Trajectory, Turn
from tether.runs.files import write_whole
from tether.runs.schema import SCHEMA_VERSION, StepRecord, trajectory_record
from tether.runs.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path / "run", "seed: 3\nenv:\n  name: frozen_lake\n", {"env": "frozen_lake", "seed": 3})


def episode(group: int = 0, text: str = " go </think> <answer> Up </answer>") -> Trajectory:
    turn = Turn((1, 2), (5, 6), (-0.12345678, -2.0), FinishReason.STOP_TEXT, text, (0, 1), 1.0, -0.1, -0.25, True, "P _\n_ G", True)
    return Trajectory(group, 0, 100 + group, [turn], StopReason.SUCCESS, True, None, "frozen_lake", {"steps": 3.0})


def records(step: int, count: int, split: str = "train", text: str = "") -> list[dict[str, object]]:
    return [trajectory_record(episode(group, text), step, split, kept=True) for group in range(count)]


def test_steps_come_back_as_they_were_appended(store: RunStore) -> None:
    written = [StepRecord(1, {"rollout/success": 0.25}), StepRecord(2, {"rollout/success": 1 / 3}, "diverse reasoning", ["a note"])]
    for record in written:
        store.append(record)
    assert RunStore.open(store.folder).steps() == written


def test_equal_records_write_equal_bytes_whatever_the_order_of_the_metrics(tmp_path: Path) -> None:
    bytes_of = []
    for name, metrics in (("a", {"x": 1.0, "y": 2.0}), ("b", {"y": 2.0, "x": 1.0})):
        store = RunStore.create(tmp_path / name, "", {"started": name})
        store.append(StepRecord(1, metrics))
        store.append_timings(1, {"seconds": {"rollout": float(ord(name))}})
        bytes_of.append((store.folder / "metrics.jsonl").read_bytes())
    assert bytes_of[0] == bytes_of[1]


def test_config_about_and_ending(store: RunStore) -> None:
    assert store.config() == {"seed": 3, "env": {"name": "frozen_lake"}}
    assert store.about() == {"env": "frozen_lake", "seed": 3}
    assert store.finished is None
    store.finish("30 of 30 steps")
    assert RunStore.open(store.folder).finished == "30 of 30 steps"
    assert store.about() == {"env": "frozen_lake", "seed": 3}
    assert store.checkpoints.is_dir()


def test_the_last_record_of_a_step_wins_after_a_resume_and_steps_are_sorted(store: RunStore) -> None:
    for step, value in ((3, 0.3), (1, 0.1), (2, 0.2), (2, 0.25)):
        store.append(StepRecord(step, {"rollout/success": value}))
        store.append_timings(step, {"seconds": {"rollout": value}})
    assert [(record.step, record.metrics["rollout/success"]) for record in store.steps()] == [(1, 0.1), (2, 0.25), (3, 0.3)]
    assert [record["seconds"]["rollout"] for record in store.timings()] == [0.1, 0.25, 0.3]


def test_a_torn_last_line_is_skipped_remembered_and_healed_by_the_next_append(store: RunStore) -> None:
    store.append(StepRecord(1, {"rollout/success": 0.1}))
    with (store.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "metrics": {"rollout/succ')
    assert [record.step for record in store.steps()] == [1]
    assert store.torn_lines["metrics.jsonl"] == [2]
    store.append(StepRecord(2, {"rollout/success": 0.2}))
    store.append(StepRecord(3, {"rollout/success": 0.3}))
    assert [record.step for record in store.steps()] == [1, 2, 3]
    assert store.torn_lines["metrics.jsonl"] == [2]


def test_a_foreign_line_is_an_error_that_names_it(store: RunStore) -> None:
    (store.folder / "metrics.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(BadInput, match=r"line 1 of .*metrics\.jsonl.* is not a step record"):
        store.steps()


def test_a_metric_that_is_not_finite_is_refused(store: RunStore) -> None:
    with pytest.raises(ValueError, match="'rollout/success' of step 1 is nan"):
        store.append(StepRecord(1, {"rollout/success": float("nan")}))


def test_trajectories_are_filtered_by_step_and_split(store: RunStore) -> None:
    store.append_trajectories(records(1, 2))
    store.append_trajectories(records(1, 3, "validation"))
    store.append_trajectories(records(2, 4))
    assert store.trajectory_blocks() == [(1, "train"), (1, "validation"), (2, "train")]
    assert [len(list(store.trajectories(*key))) for key in ((), (1,), (1, "validation"), (2, "validation"))] == [9, 5, 3, 0]


def test_only_the_last_attempt_of_a_step_is_read_after_a_resume(store: RunStore) -> None:
    store.append_trajectories(records(1, 2, text="kept"))
    store.append_trajectories(records(2, 3, text="replaced"))
    store.append_trajectories(records(2, 3, "validation", text="kept"))
    resumed = RunStore.open(store.folder)
    resumed.append_trajectories(records(2, 2, text="kept"))
    read = list(resumed.trajectories())
    assert [(one["step"], one["split"], one["attempt"]) for one in read] == [(1, "train", 0)] * 2 + [(2, "validation", 0)] * 3 + [
        (2, "train", 1)
    ] * 2
    assert {one["turns"][0]["response"] for one in read} == {"kept"}


def test_a_trajectory_torn_by_a_kill_is_skipped_and_its_step_can_be_written_again(store: RunStore) -> None:
    store.append_trajectories(records(1, 2))
    path = store.folder / "trajectories.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert len(list(store.trajectories())) == 1
    assert store.torn_lines["trajectories.jsonl"] == [2]
    resumed = RunStore.open(store.folder)
    resumed.append_trajectories(records(1, 2))
    assert [one["attempt"] for one in resumed.trajectories()] == [1, 1]
    path.write_bytes(path.read_bytes() + b'{"step": 2, "spl')
    assert len(list(resumed.trajectories())) == 2
    assert resumed.torn_lines["trajectories.jsonl"] == [2, 5]


def test_trajectory_record_holds_every_field(store: RunStore) -> None:
    record = trajectory_record(episode(4), 7, "train", kept=False)
    assert json.loads(json.dumps(record)) == {
        "step": 7, "split": "train", "env": "frozen_lake", "group": 4, "member": 0, "seed": 104, "reward": 0.65, "success": True, "stop_reason": "success",
        "error": None, "measures": {"steps": 3.0}, "kept": False,
        "turns": [{
            "observation": "P _\n_ G", "response": " go </think> <answer> Up </answer>", "reasoning_span": [0, 1], "reward": 1.0,
            "penalty": -0.1, "overlong": -0.25, "valid": True, "lenient": False, "finish": "stop_text", "fresh": True, "context_ids": [1, 2], "response_ids": [5, 6],
            "logprobs": [-0.123457, -2.0],
        }],
    }  # fmt: skip


def test_a_reward_that_is_not_finite_is_recorded_as_null(store: RunStore) -> None:
    broken = episode()
    broken.turns[0].reward = float("inf")
    store.append_trajectories([trajectory_record(broken, 1, "train", kept=True)])
    assert next(store.trajectories())["reward"] is None


def test_a_log_prob_that_is_not_finite_is_recorded_as_null() -> None:
    broken = episode(4)
    broken.turns[0].logprobs = (float("-inf"), -0.12345678, float("nan"))
    assert trajectory_record(broken, 1, "train", kept=True)["turns"][0]["logprobs"] == [None, -0.123457, None]


def test_an_existing_folder_is_never_overwritten(store: RunStore, tmp_path: Path) -> None:
    before = (store.folder / "run.json").read_bytes()
    with pytest.raises(BadInput, match=r"run folder '.*run' exists; resume it with --resume or choose another --out"):
        RunStore.create(store.folder, "", {})
    assert (store.folder / "run.json").read_bytes() == before
    (tmp_path / "empty").mkdir()
    assert RunStore.create(tmp_path / "empty", "", {}).steps() == []


@pytest.mark.parametrize(("missing", "words"), [("run.json", "run.json missing"), ("config.yaml", "config.yaml missing")])
def test_what_is_not_a_run_folder_says_what_is_missing(store: RunStore, missing: str, words: str) -> None:
    (store.folder / missing).unlink()
    with pytest.raises(BadInput, match=f"is not a run folder: {words}"):
        RunStore.open(store.folder)


def test_a_folder_that_does_not_exist_and_a_broken_run_json(store: RunStore, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        RunStore.open(tmp_path / "nowhere")
    (store.folder / "run.json").write_text("{")
    with pytest.raises(BadInput, match="does not parse"):
        RunStore.open(store.folder)


def test_a_newer_schema_is_refused(store: RunStore) -> None:
    data = json.loads((store.folder / "run.json").read_text())
    (store.folder / "run.json").write_text(json.dumps({**data, "schema": SCHEMA_VERSION + 1}))
    with pytest.raises(BadInput, match=r"has schema 2, this Tether reads up to 1; upgrade Tether"):
        RunStore.open(store.folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full gives a real ENOSPC on Linux only")
def test_a_full_disk_is_one_plain_line_and_loses_nothing(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append(StepRecord(1, {"rollout/success": 0.1}))
    real = os.fdopen

    def on_a_full_disk(handle: int, *rest: Any) -> Any:
        """The file becomes one whose every write fails, once it is open: a run opens plain files alone."""
        if os.readlink(f"/proc/self/fd/{handle}").endswith("timings.jsonl"):
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, handle)
            os.close(full)
        return real(handle, *rest)

    monkeypatch.setattr(os, "fdopen", on_a_full_disk)
    with pytest.raises(StorageError) as caught:
        store.append_timings(1, {"seconds": {"rollout": 1.0}})
    message = str(caught.value)
    assert "timings.jsonl': no space left on device; nothing already written is lost: free some space" in message
    assert "\n" not in message
    assert [record.step for record in store.steps()] == [1]


# ----------------------------------------------------------------------------------------------- a folder that somebody sent


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "trajectories.jsonl", "trajectories.sqlite"])
def test_nothing_is_appended_through_a_link(store: RunStore, tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_bytes(b"mine\n")
    (store.folder / name).symlink_to(tmp_path / "precious")
    writes = {
        "metrics.jsonl": lambda: store.append(StepRecord(1, {})),
        "timings.jsonl": lambda: store.append_timings(1, {}),
        "trajectories.jsonl": lambda: store.append_trajectories(records(1, 1)),
        "trajectories.sqlite": lambda: store.append_trajectories(records(1, 1)),
    }
    if name == "trajectories.sqlite":
        writes[name]()  # no index of this run: a fresh file takes the place of the link
        assert not (store.folder / name).is_symlink()
    else:
        with pytest.raises(StorageError, match="it is a symbolic link, which a run does not write through"):
            writes[name]()
    assert (tmp_path / "precious").read_bytes() == b"mine\n"


@pytest.mark.parametrize("link", ["report.html", "report.html.part", ".report.html.part"])
def test_a_file_that_is_replaced_leaves_the_target_of_a_link_alone(tmp_path: Path, link: str) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / link).symlink_to(tmp_path / "precious")
    write_whole(tmp_path / "report.html", "<html>")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "report.html").read_text() == "<html>"
    assert not (tmp_path / "report.html").is_symlink()


def test_checkpoints_outside_the_run_folder_are_not_written(store: RunStore, tmp_path: Path) -> None:
    store.close()
    store.checkpoints.rmdir()
    (tmp_path / "elsewhere").mkdir()
    store.checkpoints.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="is a symbolic link, and a run writes only into its own folder"):
        RunStore.open(store.folder).lock()


# -------------------------------------------------------------------------------------------------- a start that failed


def test_a_start_that_failed_takes_back_what_it_made_and_nothing_else(tmp_path: Path) -> None:
    RunStore.create(tmp_path / "a" / "b" / "run", "", {}).discard()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    store = RunStore.create(tmp_path / "mine" / "run", "", {})
    (store.folder / "notes.txt").write_text("of the user")
    store.discard()
    assert [path.name for path in store.folder.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    RunStore.create(tmp_path / "empty", "", {}).discard()
    assert (tmp_path / "empty").is_dir() and not any((tmp_path / "empty").iterdir())


def test_a_start_that_failed_in_a_folder_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    RunStore.create(tmp_path / "link", "", {}).discard()
    assert (tmp_path / "link").is_symlink() and not any((tmp_path / "real").iterdir())


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        RunStore.create(tmp_path / "file" / "run", "", {})


def test_a_store_that_does_not_write(tmp_path: Path) -> None:
    """Of several ranks the first writes: the others read what is there, and leave every file as it is."""
    first = RunStore.create(tmp_path / "run", "steps: 1\n", {"seed": 3})
    first.append(StepRecord(1, {"rollout/success": 0.5}))
    before = {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()}
    other = RunStore.open(first.folder, writes=False)
    other.append(StepRecord(2, {}))
    other.append_timings(2, {"seconds": {}})
    other.append_trajectories([{"step": 2, "split": "train"}])
    other.computed_on({"device": "abacus"})
    other.replace_config("steps: 2\n")
    other.sync()
    other.finish("otherwise")
    assert {path.name: path.read_bytes() for path in first.folder.iterdir() if path.is_file()} == before
    assert [record.step for record in other.steps()] == [1] and other.about() == {"seed": 3}


# ------------------------------------------------------------------------------------------------------------------- drafts

_WRITER = """
import os, signal, sys, time
from pathlib import Path
from tether.runs.files import write_whole
def at_the_disk(handle):
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else time.sleep(60)
os.fsync = at_the_disk
write_whole(Path(sys.argv[1]), "half")
"""


def test_what_a_kill_left_is_removed_by_the_next_writer_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    def writer(name: str, end: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path / name), end], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"writing\n"
        return child

    def drafts() -> list[str]:
        return [path.name.split(".")[1] for path in sorted(tmp_path.glob(".*.part"))]

    (tmp_path / ".mine.part").write_text("not a draft of ours")
    living = writer("slow.json", "waits")
    try:
        with writer("report.html", "killed") as killed:
            killed.wait()
        assert drafts() == ["mine", "report", "slow"]
        write_whole(tmp_path / "other.json", "{}")
        assert drafts() == ["mine", "slow"]
    finally:
        living.kill()
        living.wait()
        assert living.stdout is not None
        living.stdout.close()
    store = RunStore.create(tmp_path / "run", "{}", {})
    store.close()
    next(tmp_path.glob(".slow.*.part")).rename(tmp_path / "run" / ".report.html.0123456789abcdef.part")
    store.append(StepRecord(1, {}))
    assert not list((tmp_path / "run").glob(".*.part")), "whoever continues a run removes them, too"
    store.close()
