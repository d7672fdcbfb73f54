"""Runs are ranked only where they are of one task; other runs stand side by side, with what differs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.core.metrics import wilson_interval
from tether.runs.compare import SettingDifference, compare_runs, evaluation_prompts, settings_difference
from tether.runs.report import write_report
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

CONFIG: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"size": 4, "slip": 0.02}, "step_timeout": 120.0, "weight": 1.0},
    "also": [],
    "rollout": {"num_groups": 8},
    "evaluation": {"every": 10, "prompts": 256, "temperature": 0.5, "samples": 1, "env": None},
    "seed": 0,
}


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = {**config}
    for key, value in changes.items():
        found[key] = merged(found[key], value) if isinstance(value, dict) and isinstance(found.get(key), dict) else value
    return found


def run(folder: Path, successes: int, changes: dict[str, Any] | None = None, boards: tuple[str, ...] = ()) -> RunStore:
    """A run that ends with so many of 256 validation prompts solved, of which these first observations are on record."""
    store = RunStore.create(folder, yaml.safe_dump(merged(CONFIG, changes or {})), {})
    low, high = wilson_interval(successes, 256)
    rates = {"validation/success": successes / 256, "validation/success_low": low, "validation/success_high": high}
    store.append(StepRecord(9, {**rates, "validation/prompts": 256.0}))
    if boards:
        store.append_trajectories(
            [
                {"step": 9, "split": "validation", "env": "frozen_lake", "group": n, "turns": [{"observation": b}]}
                for n, b in enumerate(boards)
            ]
        )
    return store


def compared(*stores: RunStore) -> Any:
    named = {store.folder.name: store for store in stores}
    records = {name: store.steps() for name, store in named.items()}
    configs = {name: store.config() for name, store in named.items()}
    return compare_runs(configs, records, lambda name: evaluation_prompts(named[name], records[name]))


def test_runs_of_one_task_are_ranked_whatever_else_differs(tmp_path: Path) -> None:
    other = {"rollout": {"num_groups": 4}, "seed": 7, "env": {"step_timeout": 60.0, "weight": 2.0}, "evaluation": {"every": 5}}
    found = compared(run(tmp_path / "a", 100), run(tmp_path / "b", 164, other))
    assert found.is_ranked and found.sentence.endswith("b is ahead beyond chance.")
    assert {item.key for item in found.differences} == {"env.step_timeout", "env.weight", "rollout.num_groups", "seed", "evaluation.every"}
    assert not any(item.is_task for item in found.differences)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env": {"name": "countdown"}}, "env.name (frozen_lake, countdown)"),
        ({"env": {"options": {"size": 6}}}, "env.options.size (4, 6)"),
        ({"env": {"options": {"data": "b.jsonl"}}}, "env.options.data (not recorded, b.jsonl)"),
        ({"also": [{"name": "sokoban"}]}, "also (none, name sokoban)"),
        ({"evaluation": {"prompts": 512}}, "evaluation.prompts (256, 512)"),
        ({"evaluation": {"temperature": 0.0}}, "evaluation.temperature (0.5, 0.0)"),
        ({"evaluation": {"samples": 4}}, "evaluation.samples (1, 4)"),
        ({"evaluation": {"env": {"name": "countdown"}}}, "evaluation.env.name (not recorded, countdown)"),
    ],
)
def test_runs_of_different_tasks_are_not(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    found = compared(run(tmp_path / "a", 20), run(tmp_path / "b", 250, changes))
    assert not found.is_ranked and found.differences[0].is_task
    assert found.sentence.startswith("Not ranked: the runs are not of one task, they differ in ") and words in found.sentence
    assert "ahead" not in found.sentence and found.sentence.endswith("validation success at the end: a 8%, b 98%.")


def test_equal_settings_with_other_prompts_are_not_ranked(tmp_path: Path) -> None:
    first, same, other = (
        run(tmp_path / name, 90, boards=boards) for name, boards in (("a", ("x", "y")), ("b", ("y", "x")), ("c", ("y", "z")))
    )
    assert compared(first, same).is_ranked
    assert compared(first, run(tmp_path / "unknown", 90)).is_ranked, "prompts that are not on record are no reason"
    found = compared(first, other)
    assert not found.is_ranked and "not evaluated on the same prompts, they share 1 of 2" in found.sentence


def test_a_run_that_does_not_name_its_environment_is_not_ranked(tmp_path: Path) -> None:
    silent = RunStore.create(tmp_path / "silent", "", {})
    assert compared(run(tmp_path / "a", 90), silent).sentence.startswith("Not ranked: silent does not record the environment.")


def test_settings_that_an_older_version_did_not_have(tmp_path: Path) -> None:
    old = {key: value for key, value in CONFIG.items() if key != "also"}
    old = {**old, "evaluation": {key: value for key, value in CONFIG["evaluation"].items() if key not in ("samples", "env")}}
    assert settings_difference({"old": old, "new": CONFIG}) == ()
    changed = merged(CONFIG, {"rollout": {"context": "full"}})
    assert settings_difference({"old": old, "new": changed}) == (SettingDifference("rollout.context", ("not recorded", "full"), False),)


def test_the_page_shows_the_settings_that_differ_and_escapes_them(tmp_path: Path) -> None:
    stores = [run(tmp_path / "a", 90), run(tmp_path / "b", 90, {"env": {"options": {"size": "<script>alert(1)</script>"}}, "seed": 3})]
    page = write_report(stores, tmp_path / "two.html").read_text()
    table = page[page.index("Settings that differ</h2>") :]
    table = table[: table.index("</table>")]
    assert "env.options.size" in table and ">task<" in table and "<td>0</td><td>3</td>" in table
    assert "<script>" not in table and "&lt;script&gt;alert(1)" in table
    assert "Not ranked: the runs are not of one task" in page
