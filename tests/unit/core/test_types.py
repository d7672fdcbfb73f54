"""Records of the data flow: what is derived from a trajectory is aligned, token by token."""

import dataclasses
import pickle

import numpy as np
import pytest

from tether.core.enums import FinishReason, Regime, Split, StopReason
from tether.core.protocols import BatchScorer, ContextReset, Env, Sampling, Scorer
from tether.core.types import Completion, Group, Observation, Step, TokenSequence, Trajectory, Turn


def _turn(context: tuple[int, ...], response: tuple[int, ...], span: tuple[int, int] | None, **rest: float) -> Turn:
    logprobs = tuple(-token / 10 for token in response)
    return Turn(context, response, logprobs, FinishReason.STOP_TEXT, "text", span, **rest)  # type: ignore[arg-type]


def _trajectory(**rest: bool) -> Trajectory:
    turns = [_turn((1, 2, 3), (4, 5), (0, 1), reward=1.0, penalty=-0.1), _turn((6,), (7, 8, 9), None, reward=0.5)]
    return Trajectory(group=0, member=1, seed=7, turns=turns, stop_reason=StopReason.SUCCESS, **rest)


def test_a_segment_is_aligned() -> None:
    (segment,) = _trajectory().sequences
    assert segment.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert segment.loss_mask == [False, False, False, True, True, False, True, True, True]
    assert segment.sampled_logprobs == [0, 0, 0, -0.4, -0.5, 0, -0.7, -0.8, -0.9]
    assert segment.turn_ends == [4, 8] and segment.num_tokens == 9 and segment.has_trained
    assert _trajectory().num_sampled == 5


def test_an_episode_is_cut_before_each_fresh_turn() -> None:
    first, second, third, fourth = (_turn((n,), (10 + n,), None) for n in range(4))
    for turn in (first, third, fourth):
        turn.new_context = True
    trajectory = Trajectory(0, 0, 7, [first, second, third, fourth], StopReason.FAILURE)
    assert trajectory.sequences == [TokenSequence((first, second)), TokenSequence((third,)), TokenSequence((fourth,))]
    assert [segment.token_ids for segment in trajectory.sequences] == [[0, 10, 1, 11], [2, 12], [3, 13]]


def test_the_first_turn_begins_a_segment_whatever_it_says() -> None:
    """Records of runs before context modes do not say that it is fresh."""
    trajectory = _trajectory()
    assert not trajectory.turns[0].new_context
    assert trajectory.sequences == [TokenSequence(tuple(trajectory.turns))]


def test_return_is_rewards_plus_penalties() -> None:
    trajectory = _trajectory()
    assert trajectory.reward == pytest.approx(1.4)
    trajectory.turns[1].overlong = -0.25
    assert trajectory.reward == pytest.approx(1.15)
    assert [turn.earned for turn in trajectory.turns] == pytest.approx([0.9, 0.25])


def test_trajectory_without_turns() -> None:
    """An environment that fails at reset leaves one; it must still count."""
    empty = Trajectory(0, 0, 7, [], StopReason.ENV_ERROR, error="reset failed")
    assert (empty.reward, empty.sequences, empty.num_sampled, empty.env, empty.measures) == (0, [], 0, "", {})
    assert not empty.success


def test_a_new_conversation_is_a_feed_with_another_meaning() -> None:
    feed = ContextReset((1, 2))
    assert feed == (1, 2) and hash(feed) == hash((1, 2))
    assert isinstance(feed, ContextReset) and not isinstance((*feed, 3), ContextReset)


@pytest.mark.parametrize(("span", "expected"), [((0, 2), (4, 5)), ((1, 3), (5, 6)), ((0, 0), ()), ((1, 1), ()), (None, ())])
def test_reasoning_ids(span: tuple[int, int] | None, expected: tuple[int, ...]) -> None:
    assert _turn((1,), (4, 5, 6), span).reasoning_ids == expected


def test_group_keeps_the_order_of_its_members() -> None:
    better = _trajectory(success=True)
    better.turns[1].reward = 2.5
    group = Group(index=0, seed=7, trajectories=[_trajectory(), better])
    assert group.rewards == pytest.approx([1.4, 3.4])
    assert group.successes == [False, True]


def test_what_an_environment_says_cannot_be_changed_afterwards() -> None:
    step = Step(Observation("state"), 1.0, True, True)
    assert step.info == {}
    assert step.info is not Step(Observation("state"), 0.0, False, False).info
    for record, field in [(step, "reward"), (step.observation, "text"), (Completion((1,), (0.0,), FinishReason.LENGTH), "token_ids")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_records_survive_pickling() -> None:
    """They cross process boundaries when environments run in workers."""
    group = Group(0, 7, [_trajectory()])
    assert pickle.loads(pickle.dumps(group)) == group


def test_enum_values_are_what_files_hold() -> None:
    assert [reason.value for reason in StopReason] == [
        "success",
        "failure",
        "turn_limit",
        "context_full",
        "env_error",
        "model_error",
        "unknown",
    ]
    assert [reason.value for reason in FinishReason] == ["stop_text", "end_of_turn", "length"]
    assert [regime.value for regime in Regime] == ["diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"]
    assert [split.value for split in Split] == ["train", "validation", "test", "all"]
    assert f"{StopReason.SUCCESS}" == "success"
    assert StopReason("env_error") is StopReason.ENV_ERROR


def test_sampling_defaults_are_the_papers() -> None:
    assert Sampling() == Sampling(temperature=1.0, max_tokens=400)


def test_whoever_has_the_methods_fits() -> None:
    class Corridor:
        name = "corridor"
        max_turns = 3
        instructions = "Walk."

        def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
            return Observation(f"{seed} {env_seed}")

        def step(self, answer: str) -> Step:
            return Step(Observation(answer), 0.0, True, False)

    class Constant:
        def score(self, prompt: list[int], reasoning: list[int]) -> float:
            return 0.0

    assert isinstance(Corridor(), Env)
    assert isinstance(Constant(), Scorer)
    assert not isinstance(Constant(), BatchScorer)
    assert not isinstance(np.zeros(1), Env)
