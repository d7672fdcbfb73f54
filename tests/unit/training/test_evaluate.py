"""Evaluation plays the fixed validation prompts of the validation split and gives success with its Wilson interval, pass@k, and each
environment's own numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tether
from tether.cli.main import main
from tether.core.config import Settings
from tether.core.errors import BadInput
from tether.core.intervals import clustered_interval
from tether.core.protocols import Sampling
from tether.core.seeding import validation_seed
from tether.core.types import Observation, Step
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.splits import Split, split_of
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvSpec, Sampler
from tether.runs.store import RunStore
from tether.training.build import env_specs
from tether.training.evaluate import Evaluation
from tether.training.evaluate import evaluate as evaluate_sampler
from tether.training.resolve import evaluation_settings
from tether.training.settings import EnvSettings

RULES = EpisodeRules(900, 45, -0.1)
LAKE = EnvSpec("frozen_lake", {"max_turns": 1, "slip": 0.0})
RIGHT_DOWN = " </think> <answer> Right || Down </answer>"


def evaluate(
    specs: list[EnvSpec], engine: Any, chat: Any, prompts: int, sampling: Sampling, rules: EpisodeRules, *, samples: int = 1
) -> Evaluation:
    """An evaluation with an engine that the test brings."""
    sampler = Sampler(specs, lambda max_rows: engine, chat, rules, max_rows=128, device=torch.device("cpu"))
    return evaluate_sampler(sampler, prompts, sampling, samples=samples)


def answers(chat: Any, text: str) -> ScriptedEngine:
    """An engine that says one thing."""
    return ScriptedEngine(lambda context, conversation, turn: text, chat._tokenizer)


def test_the_rate_and_its_interval(chat: Any) -> None:
    """One answer reaches some of the goals; which ones is played out here by hand."""
    wins: dict[str, list[bool]] = {}
    for index in range(60):
        env = make_env("frozen_lake", **LAKE.options, split="validation")
        map_ = env.reset(validation_seed(index)).text
        wins.setdefault(map_, []).append(env.step("Right || Down").success)
    rate = sum(map(sum, wins.values())) / 60
    assert 0 < rate < 1
    result = evaluate([LAKE], answers(chat, RIGHT_DOWN), chat, 60, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == rate and result.metrics["prompts"] == 60
    assert result.metrics["instances"] == len(wins)
    assert (result.metrics["success_low"], result.metrics["success_high"]) == clustered_interval(list(wins.values()))
    assert (result.metrics["turns"], result.metrics["format_valid"], result.metrics["errors"]) == (1, 1, 0)


@pytest.mark.parametrize(("wins", "interval"), [(0, (0.0, 0.277533)), (10, (0.722467, 1.0))])
def test_literal_ends(chat: Any, wins: int, interval: tuple[float, float]) -> None:
    """Ten of ten and none of ten have the Wilson interval of every table; nobody wins without an action, and all win in a lake of goals."""
    from tether.envs.frozen_lake import env as module

    class Easy(module.FrozenLake):
        def act(self, index: int) -> tuple[float, bool, bool]:
            return 1.0, True, True

    text = " </think> <answer> Right </answer>" if wins else " nothing"
    spec = EnvSpec("frozen_lake", {"max_turns": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FrozenLake", Easy)
        result = evaluate([spec], answers(chat, text), chat, 10, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == wins / 10
    assert (result.metrics["success_low"], result.metrics["success_high"]) == pytest.approx(interval, abs=1e-6)


def test_prompts_are_the_fixed_ones_of_the_validation_split(tiny: Any, chat: Any) -> None:
    engine = NativeEngine(Policy(tiny.model, tiny.tokenizer))
    spec = EnvSpec("frozen_lake", {"max_turns": 1, "split": "train"})  # the split is not the user's to choose here
    first = evaluate([spec], engine, chat, 3, Sampling(0.5, 45), RULES)
    again = evaluate([spec], engine, chat, 3, Sampling(0.5, 45), RULES)
    assert first.metrics == again.metrics
    assert [group.seed for group in first.groups] == [validation_seed(index) for index in range(3)]
    assert [t.turns for g in first.groups for t in g.trajectories] == [t.turns for g in again.groups for t in g.trajectories]
    for group in first.groups:
        env = make_env("frozen_lake", max_turns=1, split="validation")
        shown = env.reset(group.seed).text
        assert split_of(env.lake.fingerprint) is Split.VALIDATION
        assert group.trajectories[0].turns[0].observation == shown


class Plain:
    """A bare environment without splits."""

    work = "inline"

    class Options(Settings):
        pass

    name, max_turns, instructions = "plain", 1, "Say Right."

    def __init__(self, options: Options) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(f"Say it, number {seed}.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Said."), 1.0, True, answer == "Right", {"valid": True, "truncated": False})


def test_an_environment_without_splits_is_evaluated_as_it_is(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "plain": Plain})
    result = evaluate([EnvSpec("plain")], answers(chat, " </think> <answer> Right </answer>"), chat, 3, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == 1.0
    assert list(result.environments) == ["plain"]


def lots(chat: Any, outcomes: list[bool]) -> ScriptedEngine:
    """An engine whose answer to the nth conversation is right if the nth of a row of outcomes says so."""

    def respond(context: str, conversation: int, turn: int) -> str:
        return f" </think> <answer> {'Right' if outcomes[conversation] else 'Left'} </answer>"

    return ScriptedEngine(respond, chat._tokenizer)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "plain": Plain})
    return EnvSpec("plain")


def test_several_samples_of_a_prompt(chat: Any, plain: EnvSpec) -> None:
    """Three prompts with 4, 1 and 0 of 4 right: samples of a prompt are not independent."""
    outcomes = [True] * 4 + [False, True, False, False] + [False] * 4
    result = evaluate([plain], lots(chat, outcomes), chat, 3, Sampling(0.5, 45), RULES, samples=4)
    metrics = result.metrics
    assert [len(group.trajectories) for group in result.groups] == [4, 4, 4]
    assert metrics["success"] == pytest.approx(5 / 12) and metrics["prompts"] == 3
    assert (metrics["pass_at_1"], metrics["pass_at_2"], metrics["pass_at_4"]) == pytest.approx((5 / 12, (1 + 1 / 2) / 3, 2 / 3))
    # The variance of the mean by the prompts is 3/2 (49/9 + 4/9 + 25/9) / 12^2 = 13/144, that of one trial 5/12 x 7/12 = 35/144: as of 35/13
    # trials. Wilson by its definition, with Student's quantile for 2 degrees of freedom.
    for end in (metrics["success_low"], metrics["success_high"]):
        assert abs(end - 5 / 12) / math.sqrt(end * (1 - end) / (35 / 13)) == pytest.approx(4.302653, rel=1e-6)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_interval_holds_the_rate_as_often_as_it_says(samples: int) -> None:
    """Instances of mixed difficulty, 80 of them: between 93% and 97.5% of the intervals hold the true rate."""
    rng, rounds, held = np.random.default_rng(0), 2000, 0
    for _ in range(rounds):
        solved = rng.binomial(samples, rng.beta(1.2, 2.0, 80))
        low, high = clustered_interval([[True] * count + [False] * (samples - count) for count in solved.tolist()])
        held += low <= 1.2 / 3.2 <= high
    assert 0.93 <= held / rounds <= 0.975


def test_a_list_of_instances_is_played_once_in_order(chat: Any, tmp_path: Path) -> None:
    """Forty puzzles in a file: the split that is asked for, each row once, also where more prompts are asked for."""
    rows = [{"nums": [index + 2, 3, 5], "target": index + 10} for index in range(40)]
    data = tmp_path / "puzzles.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = EnvSpec("countdown", {"data": str(data), "split": "all", "max_turns": 1})
    engine, sampling = answers(chat, " </think> <answer> 1 </answer>"), Sampling(0.5, 45)
    sampler = Sampler([whole], lambda max_rows: engine, chat, RULES, max_rows=128, device=torch.device("cpu"))
    for prompts, played in ((None, 40), (512, 40), (7, 7)):
        result = evaluate_sampler(sampler, prompts, sampling, specs=[whole])
        assert [group.trajectories[0].seed for group in result.groups] == list(range(played))
        assert (result.metrics["prompts"], result.metrics["instances"]) == (played, played)
    held_out = evaluate_sampler(sampler, None, sampling)
    assert 0 < held_out.metrics["prompts"] < 40


def test_rows_that_come_twice_count_as_one_instance(chat: Any, tmp_path: Path) -> None:
    data = tmp_path / "puzzles.jsonl"
    data.write_text('{"nums": [2, 3, 5], "target": 10}\n' * 6 + '{"nums": [4, 3, 5], "target": 12}\n')
    spec = EnvSpec("countdown", {"data": str(data), "split": "all", "max_turns": 1})
    sampler = Sampler(
        [spec], lambda max_rows: answers(chat, " </think> <answer> 2+3+5 </answer>"), chat, RULES, max_rows=128, device=torch.device("cpu")
    )
    metrics = evaluate_sampler(sampler, None, Sampling(0.5, 45), specs=[spec]).metrics
    assert (metrics["prompts"], metrics["instances"], metrics["success"]) == (7, 2, pytest.approx(6 / 7))


def test_the_first_samples_do_not_depend_on_how_many_follow(tiny: Any, chat: Any) -> None:
    engine = NativeEngine(Policy(tiny.model, tiny.tokenizer))
    once = evaluate([LAKE], engine, chat, 2, Sampling(1.0, 45), RULES)
    thrice = evaluate([LAKE], engine, chat, 2, Sampling(1.0, 45), RULES, samples=3)
    for alone, group in zip(once.groups, thrice.groups, strict=True):
        assert group.trajectories[0].turns[0].response_ids == alone.trajectories[0].turns[0].response_ids
        assert len({t.turns[0].response_ids for t in group.trajectories}) > 1


def test_several_environments(chat: Any) -> None:
    """Prompts are shared out by weight; each environment's numbers are those it has alone on as many prompts."""
    boxes = EnvSpec("sokoban", {"max_turns": 1}, weight=3.0)
    engine = answers(chat, RIGHT_DOWN)
    mixed = evaluate([LAKE, boxes], engine, chat, 40, Sampling(0.5, 45), RULES)
    lake = evaluate([LAKE], engine, chat, 10, Sampling(0.5, 45), RULES).metrics
    pushes = evaluate([boxes], engine, chat, 30, Sampling(0.5, 45), RULES).metrics
    assert mixed.environments == {"frozen_lake": lake, "sokoban": pushes}
    assert 0 < lake["success"] < 1
    assert mixed.metrics["success"] == pytest.approx((10 * lake["success"] + 30 * pushes["success"]) / 40)
    own = {name: value for name, value in mixed.metrics.items() if name.startswith("env/")}
    assert own == {
        "env/frozen_lake/slips": 0.0,
        "env/frozen_lake/success": lake["success"],
        "env/frozen_lake/reward_mean": lake["reward_mean"],
        "env/sokoban/boxes_on_target": pushes["env/sokoban/boxes_on_target"],
        "env/sokoban/success": pushes["success"],
        "env/sokoban/reward_mean": pushes["reward_mean"],
    }
    assert "env/frozen_lake/success" not in lake, "a single environment's success is not told twice"


def test_stages_of_settings() -> None:
    lake = EnvSettings(name="frozen_lake", options={"size": 5}, step_timeout=7.0, weight=0.25)
    assert env_specs([lake, EnvSettings(name="sokoban")]) == [
        EnvSpec("frozen_lake", {"size": 5}, 7.0, 0.25),
        EnvSpec("sokoban", {}, 120.0, 1.0),
    ]


@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_an_environments_metrics_are_keys_of_what_it_tells(name: str) -> None:
    """Played to its end with an answer that is none of its actions: the numbers named are there, or come with a final answer."""
    env: Any = make_env(name)
    env.reset(0)
    info = next(step.info for step in iter(lambda: env.step("nonsense"), None) if step.done)
    late = {"webshop": {"score"}}.get(name, set())
    assert set(env.metrics) - late <= set(info)
    assert all(isinstance(info[key], int | float) for key in set(env.metrics) - late)


def test_which_checkpoint_of_a_run(tmp_path: Path) -> None:
    """The last one, or the best on demand; where there is none, a line that says what to do."""
    store = RunStore.create(tmp_path / "run", "env: {name: sokoban}\nmodel: {name: tiny}\n", {})
    with pytest.raises(BadInput, match="has no checkpoint yet; let it train on"):
        evaluation_settings(str(store.folder), None, False, {})
    for name in ("step_000005", "step_000010"):
        (store.checkpoints / name / "model").mkdir(parents=True)
        (store.checkpoints / name / "state.pt").touch()
    with pytest.raises(BadInput, match="has no best checkpoint: none was evaluated yet; leave out --best"):
        evaluation_settings(str(store.folder), None, True, {})
    (store.checkpoints / "best" / "model").mkdir(parents=True)
    (store.checkpoints / "best" / "best.json").write_text('{"step": 5, "success": 0.5}')
    for best, name in ((False, "step_000010"), (True, "best")):
        settings = evaluation_settings(str(store.folder), None, best, {})
        assert (settings.env.name, settings.model.name) == ("sokoban", str(store.checkpoints / name / "model"))
    assert evaluation_settings("tiny", "frozen_lake", False, {}).model.name == "tiny"
    with pytest.raises(BadInput, match="--best is for run folders, and 'tiny' is not one"):
        evaluation_settings("tiny", "frozen_lake", True, {})


def test_the_precision_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set model.dtype` reaches the model."""
    seen: list[str | None] = []

    def load(name: str, *, device: str | None = None, dtype: str | None = None) -> Any:
        seen.append(dtype)
        raise BadInput("enough seen")

    monkeypatch.setattr("tether.training.evaluation_run.load_model", load)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(BadInput, match="enough seen"):
            tether.evaluate("tiny", "frozen_lake", prompts=1, model={"device": "cpu", "dtype": dtype})
    assert seen == ["bfloat16", "float32"]


def test_the_command_prints_the_same_numbers_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A mixture with two samples a prompt: one object, a row for each environment in the table, and not a digit changes."""
    also = 'also=[{"name": "sokoban", "options": {"max_turns": 1}}]'
    words = ["eval", "tiny", "--env", "frozen_lake", "--prompts", "4", "--samples", "2", "--set", also]
    words += ["--set", "rollout.max_tokens=20", "--set", "env.options.max_turns=1"]
    printed = []
    for more in (["--json"], ["--json"], []):
        with pytest.raises(SystemExit) as stopped:
            main([*words, *more])
        assert not stopped.value.code
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    found = json.loads(printed[0])
    assert (found["env"], found["samples"], found["prompts"]) == ("frozen_lake + sokoban", 2, 4)
    assert {name: numbers["prompts"] for name, numbers in found["environments"].items()} == {"frozen_lake": 2, "sokoban": 2}
    assert found["pass_at_1"] == found["success"] <= found["pass_at_2"]
    rows = {line.split()[0]: line.split()[1] for line in printed[2].splitlines()[2:4]}
    assert rows == {"frozen_lake": "2", "sokoban": "2"}
    assert "4 prompts, temperature 0.5, 2 samples each" in " ".join(printed[2].split())
    assert "responses were cut at 20 tokens; --max-tokens gives more" in printed[2]


def test_without_a_valid_reply_it_says_so_with_a_command_that_works(tmp_path: Path) -> None:
    """The model of a run folder is that of its checkpoint: `tether sft` takes no run folder for a model."""
    rollout = {"num_groups": 1, "group_size": 2, "max_tokens": 4}
    quiet = {"evaluation": {"prompts": 1}, "diagnosis": {"every": 0}, "model": {"name": "tiny", "device": "cpu"}}
    tether.train("frozen_lake", steps=1, out=tmp_path / "run", filter="all", rollout=rollout, **quiet)
    result = tether.evaluate(tmp_path / "run", prompts=2)
    (note,) = result.notes
    assert note.startswith("none of 10 replies was valid: ") and result.record["notes"] == [note]
    assert f"tether sft frozen_lake --model {tmp_path / 'run' / 'checkpoints' / 'step_000001' / 'model'})" in note
