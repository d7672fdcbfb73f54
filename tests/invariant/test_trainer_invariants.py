"""What must not change a run: settings that are about memory and speed, and stopping it; whatever the algorithm, the same comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tether.core.config import dump_yaml, merge, validate
from tether.models.fast.decoding import contiguous
from tether.models.load import load_model
from tether.rollout.engines import continuous_batch
from tether.runs.store import RunStore
from tether.training.checkpoint import load_state
from tether.training.loop import Trainer
from tether.training.settings import RunSettings

BASE: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 2}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 28},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 1},
    "evaluation": {"prompts": 1},
    "steps": 1,
}


def _one_step(folder: Path, changes: dict[str, dict[str, Any]]) -> tuple[list[Any], dict[str, float]]:
    """What was sampled in the first step, and its numbers."""
    settings = validate(RunSettings, {**BASE, **{name: {**BASE.get(name, {}), **section} for name, section in changes.items()}})
    store = RunStore.create(folder, dump_yaml(settings), {})
    Trainer(settings, store).run()
    sampled = [[turn["response_ids"] for turn in t["turns"]] for t in store.trajectories(step=1)]
    return sampled, {record.step: record for record in store.steps()}[1].metrics


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, float]]:
    sampled, metrics = _one_step(tmp_path_factory.mktemp("reference") / "run", {})
    assert metrics["groups/rv_mean"] > 0, "there is something to learn"
    return sampled, metrics


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "micro_tokens": ({"learner": {"micro_tokens": 1}}, {}),
    "no packing": ({"learner": {"packing": False}}, {}),
    "checkpointing": ({"learner": {"gradient_checkpointing": True, "micro_tokens": 700}}, {}),
    "max_rows": ({"rollout": {"max_rows": 1}}, {}),
    "FEED_SHARE": ({"rollout": {"max_rows": 3}}, {"FEED_SHARE": 1}),
    "PREFILL_TOKENS": ({}, {"PREFILL_TOKENS": 1, "FEED_SHARE": 10**9}),
}
EVERY_TIME = ("checkpointing", "no packing", "FEED_SHARE")
"""The other cases are long."""


MANNER = {f"update/{name}" for name in ("padding", "micro_tokens", "recompute", "tokens_shared", "memory_retries")}
"""Metrics of how an update was computed, not of what came of it."""


@pytest.mark.parametrize("case", [case if case in EVERY_TIME else pytest.param(case, marks=pytest.mark.long) for case in CASES])
def test_memory_and_speed_do_not_change_the_result(case: str, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, constants = CASES[case]
    for name, value in constants.items():
        monkeypatch.setattr(contiguous if name == "PREFILL_TOKENS" else continuous_batch, name, value)
    sampled, metrics = _one_step(tmp_path / "run", changes)
    assert sampled == reference[0]
    assert metrics["update/loss"] == pytest.approx(reference[1]["update/loss"], abs=1e-5)
    assert 0 <= metrics["update/padding"] < 1
    learned, expected = ({name: value for name, value in found.items() if name not in MANNER} for found in (metrics, reference[1]))
    assert learned == pytest.approx(expected, rel=1e-4, abs=1e-4)


# Everything that watches, at once.

WATCHED: dict[str, Any] = {
    "steps": 2,
    "rollout": {"num_groups": 2, "group_size": 3, "max_tokens": 32},
    "filter": {"strategy": "top_p"},
    "diagnosis": {
        "every": 1,
        "scopes": ["first_turn", "trajectory", "turn"],
        "contexts": 12,
        "budget": 0.05,
        "scorer": "reference",
        "gradients": {"every": 2, "prompts": 2, "buckets": 2},
    },
    "alarms": {
        "actions": {"critical": ["tighten_filter", "checkpoint"], "warning": "checkpoint"},
        "rules": {"start_steps": 2, "recent_steps": 2, "step_p": 0.2},
    },
    "checkpoint": {"every": 1, "keep": 4},
}


@pytest.mark.long
def test_one_seed_one_run_with_everything_on(tmp_path: Path) -> None:
    settings = validate(RunSettings, merge(BASE, WATCHED))
    for name in ("one", "two"):
        Trainer(settings, RunStore.create(tmp_path / name, dump_yaml(settings), {})).run()
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    records = _records(tmp_path / "one")
    for step in (1, 2):
        metrics = records[step]["metrics"]
        for section in ("information", "information_trajectory", "information_turn"):
            assert metrics[f"{section}/failed"] == 0 and 0 <= metrics[f"{section}/retrieval_p_value"] <= 1
        assert metrics["information/sampling_error"] > 0, "the budget is short here"
        assert [metrics.get(f"gradients/{name}") for name in ("failed", "bound_broken")] == ([0, 0] if step == 1 else [None, None])


# Stopped after a step and resumed, a run is the one that was never stopped.

SHORT: dict[str, Any] = {
    **BASE,
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 16},
    "diagnosis": {"every": 2},
    "evaluation": {"prompts": 1, "every": 1},
    "checkpoint": {"every": 1, "keep": 2},
    "steps": 2,
}
RUNS: dict[str, dict[str, Any]] = {
    "ppo, bfloat16, a reference in the reward": {
        "model": {"dtype": "bfloat16"},
        "env": {"options": {"max_turns": 1, "few_shot": 0}},
        "learner": {"learning_rate": 1e-4},
        "algorithm": {"name": "ppo", "kl_coef": 0.05, "kl_mode": "reward"},
        "rollout": {"prompt_memory": {"candidates": 4}},
    },
    "ppo, shared head, its first step alone, last_k": {
        "algorithm": {"name": "ppo"},
        "critic": {"shared": True, "warmup_steps": 1},
        "env": {"options": {"max_turns": 3}},
        "rollout": {"context": "last_k", "last_k": 1},
    },
    "lora, a reference in the loss, cosine": {
        "lora": {"rank": 2, "alpha": 4},
        "algorithm": {"name": "grpo", "kl_coef": 0.1},
        "learner": {"schedule": "cosine", "min_lr_ratio": 0.5},
    },
    "dapo, refill, two environments, single_turn": {
        "algorithm": {"name": "dapo"},
        "also": [{"name": "sokoban", "options": {"max_turns": 2}}],
        "filter": {"refill": 1, "score": "length", "strategy": "top_k", "keep": 0.5},
        "rollout": {"context": "single_turn", "overlong_share": 1.0, "max_tokens": 32, "prompt_memory": {"candidates": 4}},
    },
}


def _settings(name: str, folder: Path) -> RunSettings:
    """A CPU may take minutes for what bfloat16 costs `tiny`: that run has a smaller model, of random weights."""
    model = {"model": {"name": _random_model(folder)}} if "bfloat16" in name else {}
    return validate(RunSettings, merge(merge(SHORT, RUNS[name]), model))


def _random_model(folder: Path) -> str:
    tokenizer = load_model("tiny", device="cpu").tokenizer
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1024, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **size
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _records(folder: Path) -> dict[int, Any]:
    return {record["step"]: record for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def _same(one: Any, other: Any) -> bool:
    """Whether two states hold the same, bit for bit."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 takes another way
@pytest.mark.parametrize("name", [name if "bfloat16" in name else pytest.param(name, marks=pytest.mark.long) for name in RUNS])
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    settings, folder = _settings(name, tmp_path / "small"), tmp_path / "run"
    store = RunStore.create(folder, dump_yaml(settings), {})
    Trainer(settings, store).run()
    records = _records(folder)
    trajectories = list(store.trajectories(step=2))
    first, last, before = (folder / "checkpoints" / part for part in ("step_000001", "step_000002", "kept-aside"))
    last.rename(before)
    best = (folder / "checkpoints" / "best" / "best.json").read_text()
    again = Trainer(settings, RunStore.open(folder))
    assert again.step == 1
    again.run()
    assert _records(folder) == records and len((folder / "metrics.jsonl").read_text().splitlines()) == 7  # 0, 1, 2, 2: three evaluated
    for one, other in zip(RunStore.open(folder).trajectories(step=2), trajectories, strict=True):
        assert {**one, "attempt": 0} == {**other, "attempt": 0}
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    weights = [load_file(path / "model" / file) for path in (before, last, first)]
    assert _same(weights[0], weights[1]) and not _same(weights[1], weights[2])
    assert all(tensor.dtype == (torch.bfloat16 if "bfloat16" in name else torch.float32) for tensor in weights[1].values())
    states = [load_state(path) for path in (before, last)]
    assert _same(states[0], states[1])
    assert (folder / "checkpoints" / "best" / "best.json").read_text() == best
    _holds(name, records, weights[1], states[1])


def _holds(name: str, records: dict[int, Any], weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
    """That the run did what its name says."""
    metrics = [records[step]["metrics"] for step in (1, 2)]
    assert all(step["update/skipped"] == 0 and step["update/num_updates"] >= 1 for step in metrics)
    exact = "bfloat16" not in name
    assert all(step["update/mismatch"] < (1e-4 if exact else 0.1) for step in metrics)
    if "refill" not in name:
        assert all(step["update/tokens_trained"] == step["rollout/tokens_sampled"] for step in metrics)
    if "reference" in name:
        assert metrics[0]["update/kl_reference"] < metrics[1]["update/kl_reference"]
    if not exact:  # masters are finer than what the model computes in
        assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
        learner = state["learner"]
        for part in ("policy", "critic"):
            assert any(master.low.any() for master in learner["optimizers"][part]["masters"])
        types = {name: tensor.dtype for name, tensor in learner["critic"].items()}
        assert (types["head.linear.weight"], types["trunk.norm.weight"]) == (torch.float32, torch.bfloat16)
    if "first step" in name:
        assert [step["update/learning_rate"] for step in metrics] == [0, 1e-4]
    if "cosine" in name:
        assert [step["update/learning_rate"] for step in metrics] == [1e-4, 5e-5]
    if "two environments" in name:
        assert {"rollout/env/sokoban/success", "rollout/env/frozen_lake/success"} <= metrics[0].keys() | metrics[1].keys()
        assert all(step["groups/rounds"] == 2 and step["groups/sampled"] == 4 and step["groups/kept"] == 2 for step in metrics)
        assert all(step["rollout/tokens_sampled"] == step["update/tokens_trained"] + step["groups/tokens_discarded"] for step in metrics)
