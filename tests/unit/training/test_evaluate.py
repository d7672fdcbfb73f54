"""Evaluation plays the fixed validation prompts of the validation split and gives success with its Wilson interval, pass@k, and each
environment's own numbers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tether.cli.evaluate import _run_settings
from tether.cli.main import main
from tether.core.config import Settings
from tether.core.errors import BadInput
from tether.core.protocols import Sampling
from tether.core.seeding import validation_seed
from tether.core.types import Completion, Observation, Step
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.splits import Split, split_of
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvSpec
from tether.runs.store import RunStore
from tether.training.evaluate import env_specs, evaluate
from tether.training.settings import EnvSettings

RULES = EpisodeRules(900, 45, -0.1)
LAKE = EnvSpec("frozen_lake", {"max_turns": 1, "slip": 0.0})
RIGHT_DOWN = " </think> <answer> Right || Down </answer>"


class Answers:
    """An engine that says one thing."""

    def __init__(self, chat: Any, text: str) -> None:
        self._ids = chat.encode(text)

    def run(self, conversations: Any, sampling: Sampling, on_finished: Any = None) -> None:
        for conversation in conversations:
            feed = conversation.begin()
            while feed is not None:
                feed = conversation.receive(Completion(self._ids, (-1.0,) * len(self._ids), "stop_text"))

    def sync(self) -> None:
        pass


def test_the_rate_and_its_interval(chat: Any) -> None:
    """One answer reaches some of the goals; which ones is played out here by hand."""
    wins = 0
    for index in range(60):
        env = make_env("frozen_lake", **LAKE.options, split="validation")
        env.reset(validation_seed(index))
        wins += env.step("Right || Down").success
    assert 0 < wins < 60
    result = evaluate([LAKE], Answers(chat, RIGHT_DOWN), chat, 60, Sampling(0.5, 45), RULES)
    rate, z = wins / 60, 1.959964
    half = z * math.sqrt(rate * (1 - rate) / 60 + z * z / (4 * 60**2))
    assert result.metrics["success"] == rate and result.metrics["prompts"] == 60
    assert result.metrics["success_low"] == pytest.approx((rate + z * z / 120 - half) / (1 + z * z / 60))
    assert result.metrics["success_high"] == pytest.approx((rate + z * z / 120 + half) / (1 + z * z / 60))
    assert (result.metrics["turns"], result.metrics["format_valid"], result.metrics["errors"]) == (1, 1, 0)


@pytest.mark.parametrize(("wins", "interval"), [(0, (0.0, 0.277533)), (10, (0.722467, 1.0))])
def test_literal_ends(chat: Any, wins: int, interval: tuple[float, float]) -> None:
    """Ten of ten and none of ten have the Wilson interval of every table; nobody wins without an action, and all win in a lake of goals."""
    from tether.envs.frozen_lake import env as module

    class Easy(module.FrozenLake):
        def _act(self, index: int) -> tuple[float, bool, bool]:
            return 1.0, True, True

    text = " </think> <answer> Right </answer>" if wins else " nothing"
    spec = EnvSpec("frozen_lake", {"max_turns": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FrozenLake", Easy)
        result = evaluate([spec], Answers(chat, text), chat, 10, Sampling(0.5, 45), RULES)
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

    class Options(Settings):
        pass

    name, max_turns, instructions = "plain", 1, "Say Right."

    def __init__(self, options: Options) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation("Say it.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Said."), 1.0, True, answer == "Right", {"valid": True, "truncated": False})


def test_an_environment_without_splits_is_evaluated_as_it_is(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "plain": Plain})
    result = evaluate([EnvSpec("plain")], Answers(chat, " </think> <answer> Right </answer>"), chat, 3, Sampling(0.5, 45), RULES)
    assert result.metrics["success"] == 1.0
    assert list(result.environments) == ["plain"]


class Lots:
    """An engine whose answer to the nth dialogue is right if the nth of a row of outcomes says so."""

    def __init__(self, chat: Any, outcomes: list[bool]) -> None:
        self._outcomes = outcomes
        self._ids = {solved: chat.encode(f" </think> <answer> {'Right' if solved else 'Left'} </answer>") for solved in (True, False)}

    def run(self, conversations: Any, sampling: Sampling, on_finished: Any = None) -> None:
        for conversation, solved in zip(conversations, self._outcomes, strict=True):
            conversation.begin()
            assert conversation.receive(Completion(self._ids[solved], (-1.0,) * len(self._ids[solved]), "stop_text")) is None
            on_finished()

    def sync(self) -> None:
        pass


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "plain": Plain})
    return EnvSpec("plain")


def test_several_samples_of_a_prompt(chat: Any, plain: EnvSpec) -> None:
    """Three prompts with 4, 1 and 0 of 4 right. The interval is that of three trials: samples of a prompt are not independent."""
    outcomes = [True] * 4 + [False, True, False, False] + [False] * 4
    heard: list[int] = []
    result = evaluate([plain], Lots(chat, outcomes), chat, 3, Sampling(0.5, 45), RULES, lambda: heard.append(1), samples=4)
    metrics = result.metrics
    assert len(heard) == 12 and [len(group.trajectories) for group in result.groups] == [4, 4, 4]
    assert metrics["success"] == pytest.approx(5 / 12) and metrics["prompts"] == 3
    assert (metrics["pass_at_1"], metrics["pass_at_2"], metrics["pass_at_4"]) == pytest.approx((5 / 12, (1 + 1 / 2) / 3, 2 / 3))
    # Wilson by its definition: the two rates whose own standard error over 3 trials puts 5/12 at 1.959964 deviations.
    for end in (metrics["success_low"], metrics["success_high"]):
        assert abs(end - 5 / 12) / math.sqrt(end * (1 - end) / 3) == pytest.approx(1.959964)


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
    engine = Answers(chat, RIGHT_DOWN)
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
        _run_settings(str(store.folder), best=False)
    for name in ("step_000005", "step_000010"):
        (store.checkpoints / name / "model").mkdir(parents=True)
    with pytest.raises(BadInput, match="has no best checkpoint: it has not been evaluated yet; leave out --best"):
        _run_settings(str(store.folder), best=True)
    (store.checkpoints / "best" / "model").mkdir(parents=True)
    for best, name in ((False, "step_000010"), (True, "best")):
        assert _run_settings(str(store.folder), best) == {
            "env": {"name": "sokoban"},
            "model": {"name": str(store.checkpoints / name / "model")},
        }
    assert _run_settings("tiny", best=False) == {"model": {"name": "tiny"}}
    with pytest.raises(BadInput, match="--best is for run folders, and 'tiny' is none"):
        _run_settings("tiny", best=True)


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
    rows = {line.split()[0]: line.split()[1] for line in printed[2].splitlines()[2:]}
    assert rows == {"frozen_lake": "2", "sokoban": "2"}
    assert "4 prompts, temperature 0.5, 2 samples each" in " ".join(printed[2].split())
