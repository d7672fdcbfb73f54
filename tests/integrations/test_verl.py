"""The verl plug-in against the verl wheel: its own classes, with the queue, the inference server and the worker group replaced by small stand-ins.

verl trains on GPUs only, so no run of it is made here.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed here; `make test-verl` runs these tests")
pytest.importorskip("transfer_queue", reason="verl's TransferQueue is not installed here")

import transfer_queue as tq
from verl.utils import tensordict_utils as tu

import tether
from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.errors import BadInput
from tether.integrations.verl.plugin import NAME, TARGET, check_version
from tether.integrations.verl.probe import ActorScorer, ProbeSettings, VerlProbe, last_outputs, uid_of
from tether.integrations.verl.sampler import TetherReplayBuffer, TetherReplayBufferAsync, filter_of

pytestmark = pytest.mark.filterwarnings("default")
REWARDS = {"a": (1.0, 0.0, 1.0), "b": (0.5, 0.5, 0.5), "c": (0.2, 0.1, 0.2), "d": (0.0, 0.0, 0.0)}


class Queue:
    """verl's key-value store, in memory: prompts `uid` with a status, trajectories `uid_session_index` with their fields."""

    def __init__(self, tiny: Any, rewards: dict[str, tuple[float, ...]]) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.fields: dict[str, dict[str, torch.Tensor]] = {}
        encode = lambda text: torch.tensor(tiny.tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
        for place, (uid, returns) in enumerate(rewards.items()):
            self.tags[uid] = {"is_prompt": True, "status": "finished", "global_steps": 1}
            for session, reward in enumerate(returns):
                key = f"{uid}_{session}_0"
                response = encode(f"<think>go {'left' if place % 2 else 'up'} {session}</think> <answer>Up</answer>")
                scores = torch.zeros(len(response))
                scores[-1] = reward
                self.tags[key] = {"status": "finished"}
                self.fields[key] = {
                    "rm_scores": scores, "prompts": encode(f"user: number {place}\n"), "responses": response, "response_mask": torch.ones_like(response),
                }  # fmt: skip

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {"train": dict(self.tags)}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        columns = {name: [self.fields[key][name] for key in keys] for name in select_fields if name in self.fields[keys[0]]}
        nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
        return tu.get_tensordict(nested) if nested else {}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)
            self.fields.pop(key, None)


def install(monkeypatch: pytest.MonkeyPatch, queue: Queue) -> Queue:
    for name in ("kv_list", "kv_batch_get", "kv_clear"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    return queue


def sampler(cls: Any = TetherReplayBuffer, refill: Any = None, **options: Any) -> Any:
    return cls(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=options,
        refill_fn=refill or (lambda count: None),
    )


@pytest.mark.parametrize("cls", [TetherReplayBuffer, TetherReplayBufferAsync])
def test_the_sampler_hands_on_the_kept_groups(tiny: Any, monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    """By hand: variances 1/3, 0, 1/300, 0; nine tenths of their sum are reached by the first."""
    queue = install(monkeypatch, Queue(tiny, REWARDS))
    batch, metrics = sampler(cls, reward_variance_filtering={"strategy": "top_p", "top_p": 0.9, "selection_eps": 0.0}).sample(1, "train", 4)
    assert list(batch.keys) == ["a_0_0", "a_1_0", "a_2_0"] and len(batch.tags) == 3
    assert sorted(queue.fields) == ["a_0_0", "a_1_0", "a_2_0"], "dropped trajectories leave the queue"
    assert metrics["tether/groups/kept_ratio"] == 0.25 and metrics["tether/groups/zero_variance"] == 2
    assert metrics["tether/groups/rv_mean"] == pytest.approx((1 / 3 + 1 / 300) / 4)


def test_without_a_filter_the_batch_is_verls(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = install(monkeypatch, Queue(tiny, REWARDS))
    batch, metrics = sampler().sample(1, "train", 4)
    assert len(batch.keys) == 12 and len(queue.fields) == 12 and not metrics


def test_nothing_varies(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Queue(tiny, {"a": (1.0, 1.0), "b": (0.0, 0.0)}))
    batch, metrics = sampler(reward_variance_filtering={"strategy": "top_p"}).sample(1, "train", 2)
    assert len(batch.keys) == 4 and metrics["tether/groups/nothing_kept"] == 1.0


def test_missing_rewards(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = install(monkeypatch, Queue(tiny, REWARDS))
    for fields in queue.fields.values():
        del fields["rm_scores"]
    with pytest.raises(BadInput, match="no rm_scores when the batch is sampled"):
        sampler(reward_variance_filtering={"strategy": "top_p"}).sample(1, "train", 4)


def test_keys() -> None:
    assert uid_of("3f_2_a_1_0") == "3f_2_a"
    assert last_outputs(["u_0_0", "u_1_0", "u_0_1", "v_0_0"]) == [2, 1, 3], "the last output of each session"
    with pytest.raises(BadInput, match="expected uid_session_index"):
        last_outputs(["plain"])


def test_options() -> None:
    assert filter_of(None) is None and filter_of({"enable": False, "strategy": "top_p"}) is None
    assert filter_of({"strategy": "top_k", "top_k": 3, "include_zero": True}) == GroupFilter("top_k", num_groups=3)
    for options, message in (
        ({"strategi": "top_p"}, "did you mean 'strategy'"),
        ({"ddof": 0}, "ddof 1"),
        ({"strategy": "top_k"}, "needs top_k"),
    ):
        with pytest.raises(BadInput, match=message):
            filter_of(options)
    with pytest.raises(BadInput, match="score entropy is not known"):
        sampler(reward_variance_filtering={"score": "entropy"})


# ------------------------------------------------------------------------------------------------------------ the probe


class Workers:
    """A worker group that computes log-probs with `tiny`, in verl's form: nested, each place holding the log-prob of the next token."""

    world_size = 3

    def __init__(self, model: Any) -> None:
        self._model = model

    def compute_log_prob(self, data: Any) -> Any:
        assert len(data) % self.world_size == 0, "verl divides rows between its workers"
        rows = []
        for ids in data["input_ids"].unbind():
            with torch.no_grad():
                logp = torch.log_softmax(self._model(input_ids=ids[None]).logits[0].double(), -1)
            rows.append(torch.cat([logp[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1, dtype=torch.double)]))
        return tu.get_tensordict({"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})


def test_the_actor_scores(tiny: Any) -> None:
    prompts, reasonings = [[1, 2, 3, 4], [5, 6]], [[8, 9, 10], [11], [12, 13]]
    found = ActorScorer(Workers(tiny.model), rows_at_once=4).score_all(prompts, reasonings)
    assert found == pytest.approx(tether.cross_score(tiny.model, prompts, reasonings), abs=1e-4)


def test_the_probe_measures_what_was_sampled_before_the_filter(tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer's own method still runs; the numbers are those of the monitor on all four groups."""
    install(monkeypatch, Queue(tiny, REWARDS))

    class Trainer:
        tokenizer, actor_rollout_wg, global_steps = tiny.tokenizer, Workers(tiny.model), 1

        def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> str:
            return f"{len(batch.keys)} keys"

        def refill(self, count: int) -> None: ...

    trainer = Trainer()
    buffer = sampler(
        refill=trainer.refill,
        reward_variance_filtering={"strategy": "top_p"},
        probe={"every": 1, "out": str(tmp_path / "run"), "budget": 1.0},
    )
    batch, metrics = buffer.sample(1, "train", 4)
    assert trainer._compute_old_log_prob(batch, metrics) == f"{len(batch.keys)} keys" and len(batch.keys) < 12
    assert metrics["tether/groups/sampled"] == 4 and metrics["tether/information/num_reasonings"] == 12
    responses = [
        f"<think>go {'left' if place % 2 else 'up'} {session}</think> <answer>Up</answer>" for place in range(4) for session in range(3)
    ]
    expected = tether.Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(
        1,
        prompts=[f"user: number {place}\n" for place in range(4) for _ in range(3)],
        responses=responses,
        groups=[n // 3 for n in range(12)],
    )
    assert metrics["tether/information/mi_seq"] == pytest.approx(expected.metrics["information"]["mi_seq"], abs=0.05)
    assert tether.Run(tmp_path / "run").metrics("information/mi_seq")[1] == metrics["tether/information/mi_seq"]
    assert VerlProbe(trainer, ProbeSettings()).observe(1) == {}


# ------------------------------------------------------------------------------------------------------------ agent loop


def test_an_episode(tiny: Any, tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from tether.integrations.verl.agent_loop import TetherAgentLoop, write_prompts

    encode = lambda text: tiny.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    asked: list[list[int]] = []

    class Server:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            asked.append(prompt_ids)
            ids = encode(" I go up. </think> <answer> Up </answer> and more")
            return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids))

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"prompt_length": 400, "response_length": 300}}, "data": {}})
    path = write_prompts(tmp_path / "lake.parquet", "frozen_lake", 3, options={"slip": 0.0, "instructions": "plain", "max_turns": 2})
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len({row["prompt"][1]["content"] for row in rows}) == 3 and rows[0]["agent_name"] == NAME

    async def play(session: int) -> Any:
        loop = TetherAgentLoop(DictConfigWrap(config), Server(), tiny.tokenizer, None, None, DictConfigWrap(config.data))
        return await loop.run({"temperature": 1.0}, **rows[0], session_id=session, max_tokens=60)

    first, second = asyncio.run(play(0)), asyncio.run(play(1))
    assert first.prompt_ids == second.prompt_ids == asked[0], "members of a group start alike"
    assert len(first.response_ids) == len(first.response_mask) == len(first.response_logprobs)
    sampled = [token for token, flag in zip(first.response_ids, first.response_mask, strict=True) if flag]
    assert tiny.tokenizer.decode(sampled).count("</answer>") == first.num_turns // 2 and "and more" not in tiny.tokenizer.decode(sampled)
    assert first.reward_score is not None and first.extra_fields["reward_extra_info"].keys() == {"acc", "success"}
    with pytest.raises(BadInput, match="no column 'env'"):
        asyncio.run(
            TetherAgentLoop(DictConfigWrap(config), Server(), tiny.tokenizer, None, None, DictConfigWrap(config.data)).run({}, seed=1)
        )


def test_the_plugin_registers_the_agent_loop() -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    assert _agent_loop_registry[NAME] == {"_target_": TARGET}
    assert check_version() is None
    remark = check_version("0.12.1")
    assert remark is not None and "verl 0.12.1 is outside the tested range 0.9 to below 0.10" in remark and "tether.Monitor" in remark
