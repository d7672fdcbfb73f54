"""A run with prompt memory: what it writes, resumed it is the same run, and a prompt file that changed is refused with nothing lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.errors import BadInput
from tether.envs.qa import dataset
from tether.runs.schema import choice_words
from tether.runs.store import RunStore

SETTINGS: dict[str, Any] = {
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 8, "prompt_memory": {"candidates": 4, "explore": 0.2}},
    "evaluation": {"prompts": 0},
    "diagnosis": {"every": 0},
    "filter": "all",
    "checkpoint": {"every": 2},
    "early_stop": {"invalid_steps": 0, "variance_share": 0},
}


def _rows(path: Path, answer: str = "4") -> Path:
    path.write_text("".join(json.dumps({"question": f"{n} + {n}?", "answer": answer}) + "\n" for n in range(12)))
    dataset.load.cache_clear()  # a file is read once in a process
    return path


def _train(out: Path, data: Path, model: str, steps: int) -> RunStore:
    tether.train("qa", out=out, model=model, steps=steps, options={"data": str(data), "split": "all"}, **SETTINGS)
    return RunStore.open(out)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_resumed_it_is_the_same_run_and_other_prompts_are_refused(small_policy: Callable[..., str], tmp_path: Path) -> None:
    data, model = _rows(tmp_path / "rows.jsonl"), small_policy(1)
    straight = _train(tmp_path / "straight", data, model, 4)
    _train(tmp_path / "cut", data, model, 2)

    before = _files(tmp_path / "cut")
    _rows(data, answer="5")
    with pytest.raises(BadInput, match="the prompts of qa have changed since the checkpoint"):
        tether.train(out=tmp_path / "cut", steps=4, resume=True)
    assert _files(tmp_path / "cut") == before

    _rows(data)
    tether.train(out=tmp_path / "cut", steps=4, resume=True)
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (straight.folder / name).read_bytes(), name

    episodes = list(straight.trajectories(step=4))
    assert all(episode["choice"]["prompt"] == f"row {episode['seed']}" for episode in episodes)
    assert "row" in choice_words(episodes[0]["choice"])
    last = straight.steps()[-1].metrics
    assert last["prompts/known"] == last["prompts/hopeless"] > 2 and last["prompts/success_chosen"] == 0
