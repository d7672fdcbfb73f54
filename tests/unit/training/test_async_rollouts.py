"""Asynchronous rollouts over real HTTP: which weights sample which batch, the same run twice and across a resume, failures, Ctrl-C."""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tether
from tether.core.config import validate
from tether.core.errors import ConfigError, EngineUnavailable
from tether.core.http import serving_app
from tether.core.images import Image, patch_ids
from tether.core.types import Group
from tether.models.load import LoadedModel
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.server import ServerEngine
from tether.rollout.sampler import Sampler, play_plan, training_plan
from tether.rollout.serving.app import make_app, serving_model
from tether.rollout.serving.served import ServedModel
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.async_rollouts import THREAD_NAME, AsyncRollouts, BatchAhead, _from_json, _to_json
from tether.training.batch import FilterInputs, sample_batch
from tether.training.build import env_specs, episode_rules
from tether.training.settings import RunSettings
from tether.training.throughput import StepTimer

STEPS = 4
SETTINGS: dict[str, Any] = {
    "learner": {"update_batch": 4, "learning_rate": 1e-3},
    "evaluation": {"prompts": 1, "every": 0},
    "diagnosis": {"every": 0},
    "filter": "all",
    "checkpoint": {"every": 10},
    "options": {"max_turns": 1},
}
LAKE = {"name": "frozen_lake", "options": {"max_turns": 1}}
ROLLOUT = {"num_groups": 2, "group_size": 2, "max_tokens": 24, "max_context": 900, "max_rows": 1}
"""One request at a time: the server's batches do not depend on when requests arrive, so two runs are equal to the last bit."""


@contextmanager
def _served(tiny: Any) -> Iterator[str]:
    with serving_model(LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), "tiny", max_rows=4) as url:
        yield url


def _train(out: Path, engine: str, staleness: int, memory: int = 0, **more: Any) -> RunStore:
    settings = {"steps": STEPS, **SETTINGS, **more}
    rollout = {**ROLLOUT, "engine": engine, "max_staleness": staleness, "prompt_memory": {"candidates": memory}}
    tether.train("frozen_lake", out=out, rollout=rollout, **settings)
    return RunStore.open(out)


def _trajectories(store: RunStore) -> list[dict[str, Any]]:
    """Of training, one per episode: of a step that was played again, the last."""
    lines = [json.loads(line) for line in (store.folder / "trajectories.jsonl").read_text().splitlines()]
    found = {(line["step"], line["group"], line["member"]): line for line in lines if line["split"] == "train"}
    return [found[key] for key in sorted(found)]


def _tokens(store: RunStore) -> list[Any]:
    return [[turn["response_ids"] for turn in line["turns"]] for line in _trajectories(store)]


def _versions(store: RunStore) -> dict[int, set[int]]:
    """By step, the weights that sampled its tokens."""
    found: dict[int, set[int]] = {}
    for line in _trajectories(store):
        found.setdefault(line["step"], set()).update(number for turn in line["turns"] for number, _ in turn["versions"])
    return found


def _weights(store: RunStore) -> dict[str, torch.Tensor]:
    return load_file(store.checkpoints / f"step_{STEPS:06d}" / "model" / "model.safetensors")


def _is_the_same_run(first: RunStore, second: RunStore) -> None:
    assert _tokens(first) == _tokens(second) and _versions(first) == _versions(second)
    for name, tensor in _weights(first).items():
        assert torch.equal(tensor, _weights(second)[name]), name
    for mine, theirs in zip(first.steps(), second.steps(), strict=True):
        assert mine.metrics == theirs.metrics and mine.notes == theirs.notes


@pytest.fixture(scope="module")
def run(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    with _served(tiny) as url:
        return _train(tmp_path_factory.mktemp("async") / "run", url, 1)


def test_each_batch_is_sampled_with_the_weights_that_it_should_be(run: RunStore) -> None:
    assert _versions(run) == {1: {0}, 2: {0}, 3: {1}, 4: {2}}
    assert [record.metrics.get("rollout/staleness") for record in run.steps()] == [None, 0, 1, 1, 1]
    assert all(record.metrics["update/probe_difference"] < 1e-4 for record in run.steps()[1:])
    late = run.steps()[2].metrics  # its batch was sampled before the first update, which moved the policy by more than rounding
    assert late["update/mismatch"] > 10 * run.steps()[1].metrics["update/mismatch"] and late["update/importance_weight"] != 1
    timings = [json.loads(line) for line in (run.folder / "timings.jsonl").read_text().splitlines()]
    assert all(line["background"]["rollout"] > 0 and "wait" in line["seconds"] for line in timings if line["step"])
    seeds = {(line["step"], line["group"]): line["seed"] for line in _trajectories(run)}
    planned = {(step, plan.group): plan.instance for step in range(1, STEPS + 1) for plan in training_plan(0, step, 2, 2)}
    assert seeds == planned, "the prompts of a run without staleness, in the same order"


class InterruptIn(tether.Callback):
    """Ctrl-C in a step that has its batch, before its update; once, so that the run ends its checkpoint."""

    def __init__(self, step: int) -> None:
        self._left = step

    def on_stage_begin(self, name: str, total: int) -> None:
        self._left -= name == "advantages"
        if not self._left and name == "advantages":
            raise KeyboardInterrupt


def test_interrupted_and_resumed_it_is_the_same_run(tiny: Any, run: RunStore, tmp_path: Path) -> None:
    """Ctrl-C in step 3: its batch, sampled with the weights of step 1, is in the checkpoint of step 2. Batch 4 is sampled again."""
    with _served(tiny) as url:
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path / "run", url, 1, callbacks=[InterruptIn(3)])
        stopped = RunStore.open(tmp_path / "run")
        assert stopped.steps()[-1].step == 2 and max(_versions(stopped)) == 2
        for thread in threading.enumerate():
            if thread.name.startswith(THREAD_NAME):
                thread.join(20)
                assert not thread.is_alive()
        tether.train(out=tmp_path / "run", resume=True)
    _is_the_same_run(RunStore.open(tmp_path / "run"), run)


@pytest.mark.long
def test_with_prompt_memory_too(tiny: Any, tmp_path: Path) -> None:
    """Prompts are chosen by what was known when the weights of their batch were; Ctrl-C and a resume change nothing."""
    with _served(tiny) as url:
        straight = _train(tmp_path / "straight", url, 1, memory=3)
    with _served(tiny) as url:
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path / "run", url, 1, memory=3, callbacks=[InterruptIn(3)])
        tether.train(out=tmp_path / "run", resume=True)
    _is_the_same_run(RunStore.open(tmp_path / "run"), straight)
    assert [line["choice"] for line in _trajectories(RunStore.open(tmp_path / "run"))] == [
        line["choice"] for line in _trajectories(straight)
    ]
    played = {(line["step"], line["choice"]["prompt"]): line["choice"].get("last", 0) for line in _trajectories(straight)}
    known = {
        (step, prompt): max((other for other, name in played if name == prompt and other <= step - 2), default=0) for step, prompt in played
    }
    assert played == known, "the batch of a step is chosen by what was known two steps before"
    assert any(known.values()) and any((step - 1, prompt) in played for step, prompt in played), played


def test_a_server_restarted_after_the_start_gets_the_weights_that_its_version_says(tiny: Any, chat: Any) -> None:
    """The servers had the weights of the start from the policy itself, which the learner changes while batches are sampled with version 0."""
    rollout = {**ROLLOUT, "engine": "http://h:1", "max_staleness": 1}
    settings = validate(RunSettings, {"env": LAKE, "rollout": rollout, "filter": {"strategy": "all"}, "steps": 4})
    policy, trained = Policy(copy.deepcopy(tiny.model), tiny.tokenizer), threading.Event()
    served = ServedModel("tiny", LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), max_rows=4)
    with torch.no_grad():
        policy.module.model.embed_tokens.weight[: len(tiny.tokenizer) // 2] *= 1.01  # a resumed run: not what the server starts with

    class WaitsForTheLearner(Sampler):
        """Samples its second batch once the first update is done."""

        num_plans = 0

        def collect(self, *given: Any, **more: Any) -> list[Group]:
            self.num_plans += 1
            assert self.num_plans == 1 or trained.wait(60)
            return super().collect(*given, **more)

    def sampler(kind: type[Sampler], engine: Any) -> Sampler:
        return kind(env_specs([settings.env]), lambda rows: engine, chat, episode_rules(settings, policy), max_rows=1, device=policy.device)

    with sampler(Sampler, NativeEngine(policy, max_rows=4, max_context=900)).pool as pool:
        plan = training_plan(0, 2, 2, 2)
        expected = play_plan(
            pool, plan, NativeEngine(policy, max_rows=4, max_context=900), chat, settings.sampling(), episode_rules(settings, policy)
        )
    with serving_app(make_app(served), "tiny") as url:
        waits = sampler(WaitsForTheLearner, ServerEngine([url], policy, max_rows=1, max_context=900))
        with waits.pool, AsyncRollouts(settings, waits, StepTimer(policy.module), tether.Callback()) as rollouts:
            inputs = FilterInputs(1.0, ())
            rollouts.begin(0, None)
            rollouts.prefetch(0, inputs)
            rollouts.sample(1, inputs)
            with torch.no_grad():  # the update of step 1, and the server as if it had been started again
                for parameter in policy.module.parameters():
                    parameter *= 1.05
                for parameter, first in zip(served.policy.module.parameters(), tiny.model.parameters(), strict=True):
                    parameter.copy_(first)
            served.version = "0"
            trained.set()
            played = rollouts.sample(2, inputs).groups
    turns = [[turn for group in groups for t in group.trajectories for turn in t.turns] for groups in (played, expected)]
    assert [turn.response_ids for turn in turns[0]] == [turn.response_ids for turn in turns[1]]
    assert {version for turn in turns[0] for version in turn.versions} == {0}


class Notes(tether.Callback):
    def __init__(self) -> None:
        self.said: list[str] = []

    def on_note(self, note: str) -> None:
        self.said.append(note)


class EndServer(tether.Callback):
    """Ends a server when a step has ended."""

    def __init__(self, server: ExitStack, step: int) -> None:
        self._server, self._step = server, step

    def on_step_end(self, record: StepRecord, timings: Any) -> None:
        if record.step == self._step:
            self._server.close()


@pytest.mark.long
def test_a_failure_of_the_thread_ends_the_run_and_a_lost_batch_is_sampled_again(tiny: Any, tmp_path: Path) -> None:
    with ExitStack() as server:
        url = server.enter_context(_served(tiny))
        with pytest.raises(
            EngineUnavailable, match=r"no server of rollout.engine could be used .*--resume continues from step_00000"
        ) as ended:
            _train(tmp_path / "run", url, 2, callbacks=[EndServer(server, 1)], server={"patience": 0.3}, steps=6)
    assert len(str(ended.value).splitlines()) == 1
    stopped = RunStore.open(tmp_path / "run").steps()[-1].step
    notes = Notes()
    with _served(tiny) as url:
        tether.train(out=tmp_path / "run", resume=True, rollout={"engine": url}, callbacks=[notes])
    store = RunStore.open(tmp_path / "run")
    lost = [number for number in range(stopped + 1, min(stopped + 2, 6) + 1) if _versions(store)[number] == {stopped}]
    said = [note for note in notes.said if "sampled ahead is not there" in note]
    assert len(said) == len(lost) and all(str(stopped) in note for note in said)
    assert all(_versions(store)[step] == {max(0, step - 3)} for step in (1, 2, 3, 6) if step not in lost)


def test_a_batch_comes_back_from_json_as_it_was(run: RunStore, tiny: Any) -> None:
    settings = RunSettings.model_validate({"env": {"name": "frozen_lake"}})
    groups = tether.play("frozen_lake", "tiny", prompts=3, group_size=3, seed=1, rollout={"max_tokens": 30})
    picture = Image.of(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    seen = groups[0].trajectories[0].turns[0]
    seen.context_ids, seen.images = (*seen.context_ids, *patch_ids(picture.digest, 3)), (picture,)
    inputs = FilterInputs(0.7, (1.25,))
    sampled = sample_batch(lambda count, first: groups[first : first + count], 3, inputs.rules(settings.filter), inputs.ratios)
    data = json.loads(json.dumps(_to_json(BatchAhead(sampled, inputs, {"probe_difference": 1e-7}))))
    again = _from_json(data, settings)
    assert (
        again.sampled.groups == sampled.groups and again.sampled.kept == sampled.kept and again.sampled.first_round == sampled.first_round
    )
    assert again.sampled.groups[0].trajectories[0].turns[0].images == (picture,) and list(data["images"]) == [picture.digest]
    assert again.sampled.selection.scores == sampled.selection.scores and again.sampled.keep == 0.7 and again.inputs == inputs


def test_the_native_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has max_staleness 1, but engine is native.*tether serve MODEL"):
        tether.train("frozen_lake", out=tmp_path / "run", steps=1, rollout={"max_staleness": 1})
