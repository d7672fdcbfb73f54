"""TRL's completions parquet, as pandas writes it (trl 1.16.0, trl/trainer/grpo_trainer.py, GRPOTrainer.log), through pyarrow."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput, MissingDependency
from tether.diagnostics.rollouts import open_rollouts


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency, match=r"c.parquet' needs pyarrow, which is not installed; run: pip install 'tether-agents\[data\]'"
    ):
        open_rollouts(tmp_path / "c.parquet")


def save(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(dict(columns)), path, **options)
    return path


def chat(step: int) -> dict[str, Any]:
    asked = [[{"role": "user", "content": "2+2?"}], [{"role": "user", "content": "3+3?"}]]
    answered = [
        [{"role": "assistant", "content": "<think>a\u00e9</think>4"}],
        [
            {"role": "assistant", "content": "b</think>"},
            {"role": "tool", "content": "6", "name": "add"},
            {"role": "assistant", "content": "6"},
        ],
    ]
    return {
        "step": [step] * 2,
        "prompt": asked,
        "completion": answered,
        "accuracy_reward": [1.0, float("nan")],
        "format_reward": [0.25, 0.5],
        "solution": ["4", "6"],
        "advantage": [0.7, -0.7],
    }


def test_the_output_folder_of_trl(tmp_path: Path) -> None:
    for step in (100000, 2):
        save(tmp_path / "completions" / f"completions_{step:05d}.parquet", chat(step))
    calls: list[tuple[int, int]] = []
    reader = open_rollouts(tmp_path, progress=lambda read, total: calls.append((read, total)))
    rollouts = list(reader)
    assert reader.format.name == "trl"
    assert [rollout.step for rollout in rollouts] == [2, 2, 2, 100000, 100000, 100000]
    assert [rollout.reward for rollout in rollouts[:3]] == [1.25, 0.5, 0.5]
    assert [rollout.turn for rollout in rollouts[:3]] == [0, 0, 1]
    assert [rollout.reasoning for rollout in rollouts[:3]] == ["a\u00e9", "b", None]
    assert rollouts[0].messages == [{"role": "user", "content": "2+2?"}]
    assert (rollouts[2].messages or [])[2] == {"role": "tool", "content": "6", "name": "add"}
    assert "name" not in (rollouts[2].messages or [])[1]
    assert rollouts[0].group == rollouts[3].group != rollouts[1].group
    assert rollouts[1].where.endswith("completions_00002.parquet row 2")
    total = sum(path.stat().st_size for path in reader.files)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert reader.tally.missing == {"untagged": 2}


def test_generic_fields_in_a_table_with_a_map(tmp_path: Path) -> None:
    path = save(tmp_path / "t.parquet", {"q": ["a", "b"], "extra": [{"out": "x</think>"}, {"out": None}], "r": [1, 0]})
    reader = open_rollouts(path, fields={"prompt": "q", "response": "extra.out", "reward": "r"})
    assert [(rollout.reasoning, rollout.reward) for rollout in reader] == [("x", 1.0), (None, 0.0)]
    assert reader.tally.missing == {"absent": 1}


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "t.parquet", {"prompt": ["a"], "response": ["b"]})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"cannot read '.*t.parquet' as parquet after row 0"):
        open_rollouts(path)


def test_rows_come_in_batches_over_row_groups(tmp_path: Path) -> None:
    count = 1000
    columns = {"prompt": [f"p{n}" for n in range(count)], "response": [f"{n}</think>" for n in range(count)]}
    path = save(tmp_path / "t.parquet", columns, row_group_size=150)
    calls: list[int] = []
    rollouts = list(open_rollouts(path, progress=lambda read, total: calls.append(read)))
    assert [rollout.reasoning for rollout in rollouts] == [str(n) for n in range(count)]
    assert len(calls) == 8  # seven row groups and the end
    assert calls == sorted(calls)
