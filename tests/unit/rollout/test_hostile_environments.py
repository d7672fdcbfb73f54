"""Environments that exit, hang, shout and pay the impossible: each ends its own episode with a line, and the others go on."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import StopReason
from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Sampling
from tether.core.types import Observation, Step
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.remote.vector import VectorEnv, make_envs, work_of
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))  # worker processes import it by this name, too
from troubled_environments import Silent, TroubledOptions

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


def test_the_boundary_lets_ctrl_c_through() -> None:
    with pytest.raises(KeyboardInterrupt), environment_boundary("step"):
        raise KeyboardInterrupt
    with pytest.raises(EnvironmentFailure, match="step: SystemExit: 1"), environment_boundary("step"):
        raise SystemExit(1)


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
