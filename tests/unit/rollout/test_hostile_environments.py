"""Environments that exit, hang, shout and pay the impossible: each ends its own episode with a line, and the others go on."""

import asyncio
import logging
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether.core.enums import StopReason
from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.output import MOST_SHOWN
from tether.core.protocols import Sampling
from tether.core.types import Observation, Step, Trajectory
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.gym_wrapper import GymEnv
from tether.envs.registry import ENVIRONMENTS, build, make_env
from tether.envs.remote.calls import Take, perform
from tether.envs.remote.vector import VectorEnv, make_envs, work_of
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.sampler import group_trajectories
from tether.training.interrupts import Interrupts

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))  # worker processes import it by this name, too
from troubled_environments import Printing, Silent, TroubledOptions

RULES = EpisodeRules(max_context=4096, max_tokens=40, format_penalty=-0.1)


class Hostile:
    """Does one impossible thing in its first step."""

    name, max_turns, instructions = "hostile", 2, "Play."

    def __init__(self, text: str = "fine", reward: float = 0.0, exits: bool = False, opening: str = "Begin.") -> None:
        self._text, self._reward, self._exits, self._opening = text, reward, exits, opening

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(self._opening)

    def step(self, answer: str) -> Step:
        if self._exits:
            raise SystemExit(3)
        return Step(Observation(self._text), self._reward, False, False, {"valid": True})


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ({"exits": True}, "step 1: SystemExit: 3"),
        ({"reward": 1e300}, "step 1: ValueError: the reward is 1e+300; it must be a number between -1e+12 and 1e+12"),
        ({"reward": float("nan")}, "the reward is nan"),
        ({"text": "half \ud83d"}, "step 1: ValueError: the observation holds half a character ('\\ud83d' at 5), which is no text"),
        ({"opening": "\udc00"}, "reset: ValueError: the observation holds half a character"),
        ({"text": "x" * 3_000_000}, "step 1: ValueError: the observation has 3000000 characters"),
    ],
)
def test_each_ends_its_own_episode(does: dict[str, Any], said: str, chat: Any) -> None:
    episodes = [
        Episode(env, chat, EpisodeSeeds(0, member, 1, 2, 3), RULES)  # type: ignore[arg-type]
        for member, env in enumerate((Hostile(**does), make_env("frozen_lake", max_turns=1)))
    ]
    engine = ScriptedEngine(lambda context, conversation, turn: " </think> <answer> Right </answer>", chat._tokenizer)
    engine.run(episodes, Sampling(1.0, 40))
    first, second = (episode.trajectory for episode in episodes)
    assert first.stop_reason is StopReason.ENV_ERROR and said in (first.error or "")
    assert second.stop_reason is not StopReason.ENV_ERROR


class Replies(Hostile):
    """Replies to a step with whatever it was given."""

    def __init__(self, reply: Any) -> None:
        super().__init__()
        self._reply = reply

    def step(self, answer: str) -> Step:
        return self._reply  # type: ignore[no-any-return]


def _step(**wrong: Any) -> Step:
    return Step(**{"observation": Observation("next"), "reward": 1.0, "done": True, "success": True, "info": {}, **wrong})


WRONG = [
    (None, "it gave None where a Step belongs"),
    (("next", 1.0, True, {}), "it gave ('next', 1.0, True, {}) where a Step belongs"),
    (_step(done="maybe"), "done is 'maybe'; it must be True or False"),
    (_step(success="no"), "success is 'no'; it must be True or False"),
    (_step(success=None), "success is None; it must be True or False"),
    (_step(reward="1.0"), "the reward is '1.0'; it must be a number"),
    (_step(reward=None), "the reward is None; it must be a number"),
    (_step(reward=[1.0]), "the reward is [1.0]; it must be a number"),
    (_step(reward=np.float32("inf")), "the reward is inf; it must be a finite number"),
    (_step(observation=7), "it gave 7 where an Observation belongs"),
    (_step(observation=Observation(7)), "the text of an observation is 7; it must be a text"),  # type: ignore[arg-type]
    (_step(observation=None), "it gave None where an Observation belongs"),
    (_step(info=None), "info is None; it must be a dictionary"),
    (_step(info={"valid": "yes"}), "info['valid'] is 'yes'; it must be True or False"),
    (_step(info={"truncated": 1}), "info['truncated'] is 1; it must be True or False"),
]


def _played(env: Any, chat: Any) -> Trajectory:
    episode = Episode(env, chat, EpisodeSeeds(0, 0, 1, 2, 3), RULES)
    ScriptedEngine(lambda context, conversation, turn: " </think> <answer> a </answer>", chat._tokenizer).run([episode], Sampling(1.0, 40))
    return episode.trajectory


@pytest.mark.parametrize(("reply", "said"), WRONG)
def test_a_reply_of_a_wrong_type_is_the_error_of_its_episode(reply: Any, said: str, chat: Any) -> None:
    """In this process, in the pool of environments, over HTTP and through gymnasium; nothing of it is learned from."""
    played = _played(Replies(reply), chat)
    assert played.stop_reason is StopReason.ENV_ERROR and said in (played.error or "")
    assert (played.turns[0].reward, played.success) == (0.0, False)
    assert not group_trajectories([played])[0].trajectories
    with pytest.raises(EnvironmentFailure, match=re.escape(said)):
        perform(Replies(reply), Take("a"))  # type: ignore[arg-type]
    env = GymEnv(Replies(reply))  # type: ignore[arg-type]
    env.reset(seed=1)
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        env.step("a")


def test_numbers_and_truth_values_of_numpy_are_right(chat: Any) -> None:
    reply = _step(
        reward=np.float32(0.5), done=np.bool_(True), success=np.array(True), info={"valid": np.bool_(True), "truncated": np.bool_(False)}
    )
    played = _played(Replies(reply), chat)
    assert (played.turns[0].reward, played.success, played.error) == (0.5, True, None)
    step = perform(Replies(reply), Take("a"))  # type: ignore[arg-type]
    assert [type(value) for value in (step.reward, step.done, step.success, step.info["valid"])] == [float, bool, bool, bool]


# --- what ends a run, and what does not ---


@pytest.mark.parametrize("error", [KeyboardInterrupt("mine"), SystemExit(1), GeneratorExit("mine"), BaseException("mine")])
def test_an_environment_cannot_end_the_run_by_what_it_raises(error: BaseException) -> None:
    with pytest.raises(EnvironmentFailure, match=f"step: {type(error).__name__}: "), environment_boundary("step"):
        raise error

    class Own(Hostile):
        Options = TurnOptions

        def __init__(self, options: TurnOptions) -> None:
            raise error

    with pytest.raises(EnvironmentFailure, match=f"'own' cannot be built: {type(error).__name__}"):
        build(Own, "own", {})  # type: ignore[arg-type]


def _signalled(number: int) -> None:
    with environment_boundary("step"):
        try:
            signal.raise_signal(number)
            time.sleep(5)
        except KeyboardInterrupt:  # an environment that tidies up
            raise


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_still_stop_the_run(number: signal.Signals) -> None:
    with Interrupts().listening(), pytest.raises(KeyboardInterrupt):
        _signalled(number)


def test_ctrl_c_passes_without_a_handler_of_ours() -> None:
    with pytest.raises(KeyboardInterrupt):
        _signalled(signal.SIGINT)


def test_a_task_that_is_cancelled_and_a_generator_that_is_closed_end_as_they_should() -> None:
    async def cancelled() -> None:
        async def work() -> None:
            with environment_boundary("step"):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def generator() -> Iterator[int]:
        with environment_boundary("step"):
            yield 1

    asyncio.run(cancelled())
    opened = generator()
    next(opened)
    opened.close()  # type: ignore[attr-defined]


# --- what environments print ---


def test_what_an_environment_prints_is_cleaned_and_bounded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.core.output._room", MOST_SHOWN)
    print("before")
    with environment_boundary("step"):
        print("clear \x1b[2J and turn \u202e")
        sys.stdout.buffer.write(b"bytes \x1b[31m\n")
        for _ in range(310):
            print("x" * 100_000)
            print("y", file=sys.stderr)
    print("after \x1b[0m")
    shown = capsys.readouterr()
    assert shown.out == "before\nafter \x1b[0m\n"
    assert "\x1b" not in shown.err and "clear \\x1b[2J and turn \\u202e" in shown.err and "bytes \\x1b[31m" in shown.err
    assert len(shown.err) < MOST_SHOWN + 200 and shown.err.count("is not shown") == 1


def test_what_a_worker_process_prints_is_too(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.core.output._room", MOST_SHOWN)
    with VectorEnv(Printing, 1, options={}) as vector:
        vector.reset([0])
        assert isinstance(vector.step(["a"])[0], Step)
        deadline, shown = time.monotonic() + 20, ""
        while "is not shown" not in shown and time.monotonic() < deadline:
            printed = capfd.readouterr()
            assert printed.out == ""
            shown += printed.err
            time.sleep(0.02)
    assert "\x1b" not in shown and "raw \\x1b[2J" in shown and len(shown) < MOST_SHOWN + 200


# --- where environments of one's own run ---


def test_those_that_do_not_say_run_in_workers() -> None:
    assert work_of(make_env("frozen_lake")) == "inline"
    assert work_of(Silent(TroubledOptions())) == "process"
    assert work_of(Hostile()) == "process"  # type: ignore[arg-type]

    class SaysInline(Hostile):
        work = "inline"

    assert work_of(SaysInline()) == "inline"  # type: ignore[arg-type]


def test_a_hang_ends_at_the_time_out_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "silent": Silent})
    with make_envs("silent", {}, 2, step_timeout=0.5) as pool:
        first, second = pool.envs
        first.reset(1)
        second.reset(2)
        with pytest.raises(EnvironmentFailure, match=r"step: timed out after 0.5 s"):
            first.step("loop")
        with pytest.raises(EnvironmentFailure, match="ended with exit code 3"):
            second.step("exit 3")
        assert first.reset(3).text.split(",")[0].endswith("seed 3")


def test_one_that_no_process_can_build_runs_in_threads(caplog: pytest.LogCaptureFixture) -> None:
    class Local(TextEnv[TurnOptions]):
        name, Options, instructions = "local", TurnOptions, "Play."

        def generate(self, seed: int) -> None:
            pass

        def opening(self) -> str:
            return "Begin."

        def take(self, answer: str) -> Outcome:
            return Outcome("Heard.")

        @property
        def task(self) -> str:
            return "Play."

    with caplog.at_level(logging.WARNING), VectorEnv(Local, 1, step_timeout=5) as vector:
        assert vector.work == "wait" and vector.members[0].reset(0).text.endswith("Begin.")
    assert "environment 'local' runs in threads of this process: environment 'local' cannot be built in another process" in caplog.text
