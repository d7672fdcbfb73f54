"""The verl plug-in against classes of the verl wheel in one process: its samplers, trainers' config, dispatch and micro-batches.

The queue, the inference server and the actor's processes are small stand-ins here; `test_verl_run.py` has the real ones.
"""

import asyncio
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed here; `make test-verl` runs these tests")
pytest.importorskip("transfer_queue", reason="verl's TransferQueue is not installed here")

import transfer_queue as tq
from omegaconf import OmegaConf
from verl.single_controller.base.decorator import _split_args_kwargs_data_proto
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

import tether
from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.errors import BadInput
from tether.integrations.verl.plugin import NAME, TARGET, check_version
from tether.integrations.verl.probe import ActorScorer, last_outputs, uid_of
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
                self.tags[key] = {"status": "success", "min_global_steps": 0, "max_global_steps": 0}
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
        trainer_mode=cls.modes[0],
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


def verl_config(*overrides: str) -> Any:
    """verl's own config, as its entry point composes it."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*CUSTOM, *overrides])


CUSTOM = ["trainer.v1.sampler.custom_sampler.path=pkg://tether.integrations.verl.sampler", "data.train_batch_size=6"]
SYNC, ASYNC = (f"trainer.v1.sampler.custom_sampler.name={name}" for name in ("TetherReplayBuffer", "TetherReplayBufferAsync"))
DAPO = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]


def replay_buffer(*overrides: str) -> Any:
    """The sampler that verl's trainer makes of a config."""
    trainer: Any = object.__new__(PPOTrainerSync)
    trainer.config = verl_config(*overrides)
    trainer.trainer_mode = trainer.config.trainer.v1.trainer_mode
    return trainer._build_replay_buffer()


def test_verls_own_filter_and_refill_work_beside_the_custom_sampler() -> None:
    """verl hands neither to a custom sampler."""
    plain = replay_buffer(SYNC)
    assert plain.filter_groups_metric is None and not plain.sync_refill_failed_groups
    both = replay_buffer(
        SYNC, *DAPO, "trainer.v1.sampler.sync_refill_failed_groups=True", "algorithm.filter_groups.max_inflight_gen_batches=3"
    )
    assert (both.filter_groups_metric, both.train_batch_size, both.gen_batch_size, both.max_inflight_gen_batches) == ("reward", 6, 1, 3)
    assert both.sync_refill_failed_groups and both.refill_fn is not None
    assert replay_buffer(ASYNC, "trainer.v1.trainer_mode=separate_async", *DAPO).filter_groups_metric == "reward"


def test_verls_filter_comes_first(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups b and d do not vary: verl evicts them and asks for others, which are c's kind here; Tether ranks what is left."""
    queue = install(monkeypatch, Queue(tiny, REWARDS))
    buffer = replay_buffer(SYNC, *DAPO, "+trainer.v1.sampler.sampler_kwargs.reward_variance_filtering={top_k: 1, strategy: top_k}")
    buffer.poll_interval, asked = 0.0, []

    def refill(count: int) -> None:
        asked.append(count)
        more = Queue(tiny, {"e": (0.2, 0.1, 0.2), "f": (0.3, 0.1, 0.1)} if len(asked) == 1 else {})
        queue.tags |= more.tags
        queue.fields |= more.fields

    buffer.refill_fn = refill
    batch, metrics = buffer.sample(1, "train", 4)
    assert asked == [4] and metrics["training/filter_groups/evicted_samples"] == 2
    assert metrics["tether/groups/zero_variance"] == 0 and {uid_of(key) for key in batch.keys} == {"a"}


def test_the_sampler_of_another_trainer() -> None:
    for overrides, message in (
        (
            [SYNC, "trainer.v1.trainer_mode=colocate_async"],
            "not the sampler of trainer_mode 'colocate_async'; set custom_sampler.name=TetherReplayBufferAsync",
        ),
        ([ASYNC], "not the sampler of trainer_mode 'sync'; set custom_sampler.name=TetherReplayBuffer"),
        ([SYNC, "+trainer.v1.sampler.sampler_kwargs.probe.evry=2"], "unknown probe key 'evry': did you mean 'every'"),
        ([SYNC, "+trainer.v1.sampler.sampler_kwargs.probe.budget=2"], "probe key 'budget': got 2"),
    ):
        with pytest.raises(BadInput, match=message):
            replay_buffer(*overrides)


# ------------------------------------------------------------------------------------------------------------ the probe


def actor_config(**options: Any) -> Any:
    """`actor_rollout_ref` with verl's defaults, without dynamic batches."""
    given = {"rollout.log_prob_micro_batch_size_per_gpu": 2, **options}
    return verl_config(SYNC, *(f"actor_rollout_ref.{name}={value}" for name, value in given.items())).actor_rollout_ref


class Workers:
    """A worker group that divides rows between ranks and into micro-batches by verl's own functions, and computes log-probs with `tiny`."""

    def __init__(self, model: Any, config: Any, ranks: int = 1) -> None:
        self._model, self._config, self.calls = model, config, []
        self._dispatch_info = {} if ranks == 1 else {"actor": list(range(ranks))}

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == "actor"
        return [0]

    def compute_log_prob(self, data: Any) -> Any:
        self.calls.append(len(data))
        parts = _split_args_kwargs_data_proto(max(self._dispatch_info["actor"]) + 1, data)[0][0]
        return tu.concat_tensordict([self._rank(part) for part in parts])

    def _rank(self, data: Any) -> Any:
        """As `TrainingWorker.infer_batch`, in another process: what the caller does not set comes from the config."""
        data = pickle.loads(pickle.dumps(data))
        actor, rollout = self._config.actor, self._config.rollout
        defaults = {
            "use_dynamic_bsz": actor.use_dynamic_bsz,
            "micro_batch_size_per_gpu": rollout.log_prob_micro_batch_size_per_gpu,
            "max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu,
        }
        tu.assign_non_tensor(data, **{name: value for name, value in defaults.items() if name not in data.keys()})  # noqa: SIM118
        micro_batches, indices = prepare_micro_batches(data)
        outputs = [{"model_output": {"log_probs": self._forward(each["input_ids"].unbind())}} for each in micro_batches]
        if not actor.use_dynamic_bsz:
            assert all(len(each) <= rollout.log_prob_micro_batch_size_per_gpu for each in micro_batches), "verl's limit of memory holds"
        return tu.get_tensordict(postprocess_batch_func(outputs, indices, data)["model_output"])

    def _forward(self, rows: Any) -> torch.Tensor:
        """In verl's form: nested, each place holding the log-prob of the next token."""
        found = []
        for ids in rows:
            with torch.no_grad():
                logp = torch.log_softmax(self._model(input_ids=ids[None]).logits[0].double(), -1)
            found.append(torch.cat([logp[:-1].gather(1, ids[1:, None])[:, 0], torch.zeros(1, dtype=torch.double)]))
        return torch.nested.as_nested_tensor(found, layout=torch.jagged)


@pytest.mark.parametrize(
    ("ranks", "micro", "shape", "rows"),
    [(1, 8, (4, 5), [24]), (8, 16, (8, 8), [128]), (3, 2, (5, 4), [12, 12]), (2, None, (4, 5), [12, 8])],
)
def test_the_actor_scores(tiny: Any, ranks: int, micro: int | None, shape: tuple[int, int], rows: list[int]) -> None:
    """Ranks, rows of a micro-batch (None: dynamic batches), prompts and reasonings, and the rows that go to the actor in each call."""
    few = 64 if len(rows) == 1 else 12
    config = actor_config(**({"rollout.log_prob_micro_batch_size_per_gpu": micro} if micro else {"actor.use_dynamic_bsz": True,
        "rollout.log_prob_use_dynamic_bsz": True, "rollout.log_prob_max_token_len_per_gpu": 16}))  # fmt: skip
    prompts = [[2 + number, *range(4 + number % 3)] for number in range(shape[0])]
    reasonings = [[8 + number, *range(1, 1 + number % 4)] for number in range(shape[1])]
    workers = Workers(tiny.model, config, ranks)
    found = ActorScorer(workers, config, rows_at_once=few).score_all(prompts, reasonings)
    assert found == pytest.approx(tether.cross_score(tiny.model, prompts, reasonings), abs=1e-4)
    assert workers.calls == rows


def test_rows_too_long_for_dynamic_batches_do_not_reach_the_workers(tiny: Any) -> None:
    """One rank would raise, and the others would wait for it."""
    config = actor_config(**{"actor.use_dynamic_bsz": True, "rollout.log_prob_max_token_len_per_gpu": 5})
    workers = Workers(tiny.model, config, 2)
    with pytest.raises(BadInput, match="have 6 tokens together; verl's actor takes 5: raise"):
        ActorScorer(workers, config).score_all([[1, 2, 3, 4], [5]], [[6, 7]])
    assert workers.calls == []


class Trainer:
    """What the probe uses of verl's trainer."""

    def __init__(self, tiny: Any) -> None:
        self.config = verl_config(SYNC, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8")
        self.tokenizer, self.actor_rollout_wg = tiny.tokenizer, Workers(tiny.model, self.config.actor_rollout_ref)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> str:
        return f"{len(batch.keys)} keys"

    def _resolve_filter_groups_metric(self) -> None: ...

    def refill(self, count: int) -> None: ...


def test_the_probe_measures_what_was_sampled_before_the_filter(tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer's own method still runs; the numbers are those of the monitor on all four groups."""
    install(monkeypatch, Queue(tiny, REWARDS))
    trainer = Trainer(tiny)
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
    assert metrics["tether/probe/failed"] == 0.0 and metrics["tether/rollout/staleness"] == 0.0
    assert tether.Run(tmp_path / "run").metrics("information/mi_seq")[1] == metrics["tether/information/mi_seq"]
    again: dict[str, Any] = {}
    trainer._compute_old_log_prob(batch, again)
    assert again == {}, "a batch is observed once"


def test_the_probe_never_ends_a_run(tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A worker that raises, a queue without rewards, a folder that cannot be written: the step is made, the log and a metric say what was."""
    queue = install(monkeypatch, Queue(tiny, REWARDS))
    trainer = Trainer(tiny)
    (tmp_path / "file").write_text("")

    def step(number: int, **probe: Any) -> dict[str, Any]:
        buffer = sampler(refill=trainer.refill, probe={"every": 1, "budget": 1.0, **probe})
        queue.tags |= {uid: {"is_prompt": True, "status": "finished", "global_steps": number} for uid in REWARDS}
        batch, metrics = buffer.sample(number, "train", 4)
        assert trainer._compute_old_log_prob(batch, metrics) == "12 keys"
        del trainer._compute_old_log_prob
        return metrics

    def broken(data: Any) -> Any:
        raise AssertionError("data size must be divisible by\nsomething")

    with caplog.at_level(logging.WARNING):
        assert step(1, out=str(tmp_path / "file")) == {"tether/probe/failed": 1.0}
        monkeypatch.setattr(trainer.actor_rollout_wg, "compute_log_prob", broken)
        failed = step(2)
        assert failed["tether/probe/failed"] == failed["tether/information/failed"] == 1.0 and failed["tether/groups/sampled"] == 4
        for fields in queue.fields.values():
            del fields["rm_scores"]
        assert step(3) == {"tether/probe/failed": 1.0}
    assert (
        "the probe failed at step 1, training goes on:" in caplog.text
        and "training goes on: BadInput: the trajectories have no rm_scores" in caplog.text
    )
    assert "verl's actor could not score 24 rows: AssertionError: data size must be divisible by\n" in caplog.text


def test_one_observation_a_step_and_the_age_of_the_weights(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """parameter_sync_step 2 in separate_async: two batches have the same step. Their weights are two versions and one behind."""
    queue = install(monkeypatch, Queue(tiny, {**REWARDS, "e": (1.0, 0.0), "f": (0.0, 1.0)}))
    for key, tag in queue.tags.items():
        tag |= {"global_steps": 0 if key[0] < "e" else 1} if tag.get("is_prompt") else {"min_global_steps": 2 if key[0] in "ab" else 3}
    trainer = Trainer(tiny)
    buffer = sampler(TetherReplayBufferAsync, trainer.refill, probe={"every": 1, "budget": 1.0})
    logs: list[dict[str, Any]] = []
    with caplog.at_level(logging.WARNING):
        for size in (4, 2):
            batch, metrics = buffer.sample(5, "train", size)
            trainer._compute_old_log_prob(batch, metrics)
            logs.append(metrics)
    assert logs[0]["tether/groups/sampled"] == 4 and logs[0]["tether/rollout/staleness"] == 1.5
    assert not any(name.startswith("tether") for name in logs[1])
    assert (
        "the probe observes the batch of the first" in caplog.text
        and "rollouts come from earlier weights than those of the actor" in caplog.text
    )


# ------------------------------------------------------------------------------------------------------------ agent loop


def test_an_episode(tiny: Any, tmp_path: Path) -> None:
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from tether.integrations.verl.agent_loop import TetherAgentLoop, write_prompts

    encode = lambda text: tiny.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    asked: list[list[int]] = []

    class Server:
        async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            asked.append(prompt_ids)
            ids = encode(" I go up. </think> <answer> Up </answer> and more")
            versions = {"min_global_steps": len(asked), "max_global_steps": len(asked) + 1}
            return SimpleNamespace(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=versions)

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
    turns = first.num_turns // 2
    assert (first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]) == (1, turns + 1), "verl's metrics read these"
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
