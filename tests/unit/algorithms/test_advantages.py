"""Advantages: group-relative, GAE and bi-level GAE with numbers worked by hand, values from verl 0.9.1, and what lies outside the mask."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tether.algorithms.advantages import ESTIMATORS, bilevel_gae, gae, group_relative, penalize, place_rewards, whiten
from tether.algorithms.batch import Episodes
from tether.algorithms.presets import preset

PLAIN = preset("ppo").model_copy(update={"whiten": False})


def double(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def approx(values: list[list[float]], abs: float = 1e-12) -> list[object]:
    return [pytest.approx(row, abs=abs) for row in values]


# -------------------------------------------------------------------------------------------------------- group-relative


def outcome(groups: dict[int, list[float]]) -> Episodes:
    """One token a trajectory, group after group."""
    rewards = [reward for members in groups.values() for reward in members]
    ids = [group for group, members in groups.items() for _ in members]
    mask_RT = torch.ones(len(ids), 1, dtype=torch.bool)
    return Episodes(double([[reward] for reward in rewards]), mask_RT, mask_RT, torch.tensor(ids))


def relative(groups: dict[int, list[float]], normalize_std: bool) -> list[float]:
    return group_relative(outcome(groups), preset("grpo").model_copy(update={"normalize_std": normalize_std})).advantages_RT[:, 0].tolist()


def test_grpo_by_hand() -> None:
    """1 2 3 6: mean 3, deviations -2 -1 0 3, squares 14, over 3: std 2.1602469 (ddof 0 would give 1.8708)."""
    std = math.sqrt(14 / 3) + 1e-6
    result = relative({0: [1, 2, 3, 6]}, normalize_std=True)
    assert result == pytest.approx([-2 / std, -1 / std, 0, 3 / std], rel=1e-14)
    assert result == pytest.approx([-0.925820, -0.462910, 0, 1.388730], abs=1e-6)


def test_the_floor_of_the_std() -> None:
    """0 and 1e-6: std is 1e-6 / sqrt 2, so the advantage is 0.5 / (1 / sqrt 2 + 1) = 1 / (2 + sqrt 2)."""
    assert relative({0: [0, 1e-6]}, normalize_std=True) == pytest.approx([-0.2928932188, 0.2928932188], rel=1e-9)


def test_dr_grpo_by_hand() -> None:
    assert relative({0: [1, 2, 3, 6]}, normalize_std=False) == [-2, -1, 0, 3]
    assert relative({0: [0, 1e-6]}, normalize_std=False) == pytest.approx([-5e-7, 5e-7], rel=1e-12)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_no_signal_is_exactly_zero(normalize_std: bool) -> None:
    """Also where the mean of equal numbers rounds to something else: 0.1 three times, 1e10 + 0.1 ten times."""
    assert relative({0: [7.5], 1: [0.1] * 3, 2: [1e10 + 0.1] * 10}, normalize_std) == [0] * 14


@pytest.mark.parametrize("normalize_std", [True, False])
def test_shifting_rewards_changes_nothing_and_the_sum_is_zero(normalize_std: bool) -> None:
    base = relative({0: [1, 2, 3, 6]}, normalize_std)
    assert relative({0: [101, 102, 103, 106]}, normalize_std) == pytest.approx(base, rel=1e-12)
    assert sum(base) == pytest.approx(0, abs=1e-14)


def test_groups_are_separate_and_uneven() -> None:
    """[0 2] has mean 1, [10] is alone, [3 4 8] has mean 5."""
    groups = {9: [0.0, 2.0], -4: [10.0], 3: [3.0, 4.0, 8.0]}
    assert relative(groups, normalize_std=False) == [-1, 1, 0, -2, -1, 3]
    std_a, std_c = math.sqrt(2) + 1e-6, math.sqrt(7) + 1e-6  # (1 + 1) / 1 and (4 + 1 + 9) / 2
    expected = [-1 / std_a, 1 / std_a, 0, -2 / std_c, -1 / std_c, 3 / std_c]
    assert relative(groups, normalize_std=True) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("normalize_std", "expected"),
    [
        (True, [-0.218217747, 0.707102781, 1.091088737, -0.707102781, -0.87287099]),
        (False, [-0.333333333, 0.125, 1.666666667, -0.125, -1.333333333]),
    ],
)
def test_interleaved_groups_give_the_values_of_verl(normalize_std: bool, expected: list[float]) -> None:
    """compute_grpo_outcome_advantage, verl 0.9.1; rewards of several tokens add up to the return."""
    rewards_RT = double([[0, 1], [0.5, 0], [1, 2], [0.25, 0], [1, -1]])
    mask_RT = torch.ones(5, 2, dtype=torch.bool)
    episodes = Episodes(rewards_RT, mask_RT, mask_RT, torch.tensor([4, 1, 4, 1, 4]))
    estimates = group_relative(episodes, preset("grpo").model_copy(update={"normalize_std": normalize_std}))
    assert estimates.advantages_RT.tolist() == approx([[value, value] for value in expected], abs=1e-9)
    assert estimates.returns_RT is None


def test_the_advantage_stands_at_the_tokens_of_the_mask() -> None:
    mask_RT = torch.tensor([[True, False, True], [False, True, False]])
    episodes = Episodes(double([[0, 0, 3], [0, 1, 0]]), mask_RT, mask_RT, torch.tensor([0, 0]))
    assert group_relative(episodes, preset("dr_grpo")).advantages_RT.tolist() == [[1, 0, 1], [0, -1, 0]]


def test_double_precision() -> None:
    """In float32 the ulp at 2^24 is 2: the odd reward would be lost."""
    assert relative({0: [2.0**24, 2.0**24 + 1]}, normalize_std=False) == [-0.5, 0.5]


# ------------------------------------------------------------------------------------------------------------------- GAE

# Two trajectories of two turns. Positions outside the mask hold what must never be read.
MASK = torch.tensor([[True, True, False, True, True], [True, True, True, False, False]])
ENDS = torch.tensor([[False, True, False, False, True], [False, True, True, False, False]])
VALUES = double([[0.1, 0.2, 9.0, 0.3, 0.4], [-0.5, 0.25, 1.0, 7.0, math.nan]])


def episodes(rewards: list[list[float]]) -> Episodes:
    return Episodes(double(rewards), MASK, ENDS, torch.tensor([0, 0]), VALUES)


REWARDS = [[0, 0.5, 0, 0, -1.0], [0, 0, 2.0, 0, 0]]


def test_gae_of_one_step_is_the_error_of_the_critic() -> None:
    """lambda 0: r + gamma V' - V. In row 0 the state after 0.2 is 0.3: 9.0 lies outside the mask."""
    estimates = gae(episodes(REWARDS), PLAIN.model_copy(update={"gamma": 0.5, "gae_lambda": 0.0}))
    expected = [[0.1 - 0.1, 0.5 + 0.15 - 0.2, 0, 0.2 - 0.3, -1 - 0.4], [0.125 + 0.5, 0.5 - 0.25, 2 - 1, 0, 0]]
    assert estimates.advantages_RT.tolist() == approx(expected)


def test_gae_with_gamma_and_lambda_one_is_what_is_still_to_come() -> None:
    estimates = gae(episodes(REWARDS), PLAIN)
    assert estimates.returns_RT is not None
    assert estimates.returns_RT.tolist() == approx([[-0.5, -0.5, 0, -1, -1], [2, 2, 2, 0, 0]])
    assert estimates.advantages_RT.tolist() == approx([[-0.6, -0.7, 0, -1.3, -1.4], [2.5, 1.75, 1, 0, 0]])


def test_gae_by_hand() -> None:
    """gamma 0.9, lambda 0.8, so a step back costs 0.72. Row 1: 1; 0.9 - 0.25 + 0.72 = 1.37; 0.225 + 0.5 + 0.72 * 1.37 = 1.7114."""
    estimates = gae(episodes(REWARDS), PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8}))
    assert estimates.advantages_RT[1].tolist() == pytest.approx([1.7114, 1.37, 1, 0, 0], abs=1e-12)
    assert estimates.returns_RT is not None
    assert estimates.returns_RT.tolist() == approx([[0.0989568, 0.08744, 0, -0.648, -1], [1.2114, 1.62, 2, 0, 0]])


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        (1.0, 1.0, [[-0.499294833, -0.563424445, 0, -0.948202115, -1.012331726], [1.488723127, 1.00775104, 0.526778953, 0, 0]]),
        (0.9, 0.8, [[-0.197601956, -0.292403529, 0, -1.002619627, -1.386869456], [1.258163543, 0.967935908, 0.653395119, 0, 0]]),
    ],
)
def test_whitened_gae_gives_the_values_of_verl(gamma: float, gae_lambda: float, expected: list[list[float]]) -> None:
    """compute_gae_advantage_return, verl 0.9.1; its masked mean adds 1e-8 to the number of tokens. Returns are not whitened."""
    algorithm = preset("ppo").model_copy(update={"gamma": gamma, "gae_lambda": gae_lambda})
    estimates, plain = gae(episodes(REWARDS), algorithm), gae(episodes(REWARDS), algorithm.model_copy(update={"whiten": False}))
    assert estimates.advantages_RT.tolist() == approx(expected, abs=3e-9)
    assert estimates.returns_RT is not None and plain.returns_RT is not None
    assert estimates.returns_RT.tolist() == plain.returns_RT.tolist()


def test_rewards_of_the_trajectory_stand_at_its_last_token() -> None:
    """A divergence taken from the reward afterwards stays where it is."""
    given = episodes([[0, 0.5, 0, 0, -1.0], [0, 1.5, 2.0, 0, 0]])
    assert place_rewards(given, "turn") is given
    placed = place_rewards(given, "trajectory")
    assert placed.rewards_RT.tolist() == [[0, 0, 0, 0, -0.5], [0, 0, 3.5, 0, 0]]
    penalised = penalize(placed, torch.full(placed.rewards_RT.shape, 2.0), 0.25)
    assert penalised.rewards_RT.tolist() == [[-0.5, -0.5, 0, -0.5, -1.0], [-0.5, -0.5, 3.0, 0, 0]]


def test_after_a_truncated_episode_the_critics_value_follows() -> None:
    """Row 1 was cut, and the critic expects 0.5 after it: 2 + 0.9 * 0.5 - 1 = 1.45; 0.9 - 0.25 + 0.72 * 1.45 = 1.694; 0.225 + 0.5 + 0.72 * 1.694.
    Row 0 ended by itself, and stays as it was."""
    cut = replace(episodes(REWARDS), final_values_R=double([0.0, 0.5]))
    estimates = gae(cut, PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8}))
    assert estimates.advantages_RT[1].tolist() == pytest.approx([1.94468, 1.694, 1.45, 0, 0], abs=1e-12)
    assert estimates.returns_RT is not None
    assert estimates.returns_RT[1].tolist() == pytest.approx([1.44468, 1.944, 2.45, 0, 0], abs=1e-12)
    whole = gae(episodes(REWARDS), PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8}))
    assert torch.equal(estimates.advantages_RT[0], whole.advantages_RT[0])


# ------------------------------------------------------------------------------------------------------------- bi-level


def test_bilevel_gae_of_a_truncated_episode() -> None:
    """Row 1 of the case below, with 0.5 expected after it: 2 + 0.95 * 0.5 - 1 = 1.475; 1.5 + 0.95 - 0.25 + 0.76 * 1.475 = 3.321; within the
    first turn 0.225 + 0.5 + 0.72 * 3.321 = 3.11612. The value counts once, at the level of turns."""
    cut = replace(episodes([[0, 0.5, 0, 0, -1], [0, 1.5, 2, 0, 0]]), final_values_R=double([0.0, 0.5]))
    estimates = bilevel_gae(cut, PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8, "turn_gamma": 0.95}))
    assert estimates.advantages_RT.tolist() == approx([[-0.19648, -0.384, 0, -0.948, -1.4], [3.11612, 3.321, 1.475, 0, 0]])


def test_bilevel_gae_by_hand() -> None:
    """turn_gamma 0.95, gamma 0.9, lambda 0.8.

    Turns of row 0 end at values 0.2 and 0.4: -1 - 0.4 = -1.4; 0.5 + 0.95 * 0.4 - 0.2 + 0.76 * -1.4 = -0.384. With their values these pay
    -1 and -0.184. Within a turn: 0.9 * 0.4 - 0.3 + 0.72 * -1.4 = -0.948 and 0.9 * 0.2 - 0.1 + 0.72 * -0.384 = -0.19648.
    Row 1, whose second turn is one token: 2 - 1 = 1; 1.5 + 0.95 - 0.25 + 0.76 = 2.96; 0.225 + 0.5 + 0.72 * 2.96 = 2.8562.
    The returns are those of RAGEN's function on the same numbers.
    """
    estimates = bilevel_gae(
        episodes([[0, 0.5, 0, 0, -1], [0, 1.5, 2, 0, 0]]), PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8, "turn_gamma": 0.95})
    )
    assert estimates.advantages_RT.tolist() == approx([[-0.19648, -0.384, 0, -0.948, -1.4], [2.8562, 2.96, 1, 0, 0]])
    assert estimates.returns_RT is not None
    assert estimates.returns_RT.tolist() == approx([[-0.09648, -0.184, 0, -0.648, -1], [2.3562, 3.21, 2, 0, 0]])


def test_a_turn_that_earned_nothing_is_still_a_turn() -> None:
    """Row 1: 2 - 1 = 1, then 0 + 0.5 * 1 - 0.25 + 0.5 * 1 = 0.75. Merged into the next turn it would be 1 + 1 - 0.25 = 1.75."""
    estimates = bilevel_gae(episodes(REWARDS), PLAIN.model_copy(update={"turn_gamma": 0.5}))
    assert estimates.advantages_RT[1].tolist() == pytest.approx([0.75 + 0.25 + 0.5, 0.75, 1, 0, 0], abs=1e-12)


def test_rewards_within_a_turn_are_paid_once() -> None:
    """Without discounts and with lambda 1, what is still to come at each token, whatever stands where."""
    rewards = [[0.25, 0.5, 0, -0.125, -1.0], [0.5, 1.5, 2.0, 0, 0]]
    bilevel, plain = bilevel_gae(episodes(rewards), PLAIN), gae(episodes(rewards), PLAIN)
    assert bilevel.returns_RT is not None
    assert bilevel.returns_RT.tolist() == approx([[-0.375, -0.625, 0, -1.125, -1], [4, 3.5, 2, 0, 0]])
    assert bilevel.advantages_RT.tolist() == approx(plain.advantages_RT.tolist())


def test_the_last_token_ends_a_turn_marked_or_not() -> None:
    marked = episodes(REWARDS)
    unmarked = replace(marked, turn_ends_RT=ENDS & ~torch.tensor([[False] * 4 + [True], [False] * 5]))
    settings = PLAIN.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8, "turn_gamma": 0.95})
    assert bilevel_gae(unmarked, settings).advantages_RT.tolist() == bilevel_gae(marked, settings).advantages_RT.tolist()


def test_bilevel_whitens_advantages_alone() -> None:
    plain, whitened = bilevel_gae(episodes(REWARDS), PLAIN), bilevel_gae(episodes(REWARDS), preset("ppo"))
    assert whitened.advantages_RT.tolist() == whiten(plain.advantages_RT, MASK).tolist()
    assert plain.returns_RT is not None and whitened.returns_RT is not None
    assert whitened.returns_RT.tolist() == plain.returns_RT.tolist()


# ---------------------------------------------------------------------------------------------------- shared by the two


@pytest.mark.parametrize("name", ["gae", "bilevel_gae"])
def test_an_estimator_with_a_critic_says_that_it_needs_one(name: str) -> None:
    with pytest.raises(ValueError, match="needs the values of a critic; got none"):
        ESTIMATORS[name](replace(episodes(REWARDS), values_RT=None), PLAIN)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_nothing_in_nothing_out(name: str) -> None:
    for shape in ((0, 0), (2, 0), (0, 3)):
        zeros_RT, flags_RT = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        nothing = Episodes(zeros_RT, flags_RT, flags_RT, torch.zeros(shape[0], dtype=torch.long), zeros_RT)
        assert ESTIMATORS[name](nothing, preset("ppo")).advantages_RT.shape == shape


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_results_are_double_and_zero_outside_the_mask(name: str) -> None:
    given = episodes(REWARDS)
    single = replace(given, rewards_RT=given.rewards_RT.float(), values_RT=VALUES.float())
    estimates = ESTIMATORS[name](single, PLAIN)
    for field_RT in (estimates.advantages_RT, estimates.returns_RT):
        if field_RT is not None:
            assert field_RT.dtype == torch.float64
            assert not field_RT[~MASK].any()


def test_estimators_by_name() -> None:
    assert {"group_relative": group_relative, "gae": gae, "bilevel_gae": bilevel_gae} == ESTIMATORS


# ------------------------------------------------------------------------------------------------------ whiten, penalize


def test_whiten_by_hand() -> None:
    """1 2 3 6 under the mask: mean 3, variance 14 / 3."""
    mask_RT = torch.tensor([[True, True, False], [True, False, True]])
    root = math.sqrt(14 / 3 + 1e-8)
    result = whiten(double([[1, 2, 50], [3, math.nan, 6]]), mask_RT)
    assert result.tolist() == approx([[-2 / root, -1 / root, 0], [0, 0, 3 / root]], abs=1e-14)


def test_whiten_gives_the_values_of_verl() -> None:
    """masked_whiten, verl 0.9.1; its masked mean adds 1e-8 to the number of tokens."""
    expected = [[-0.338959601, -0.112986533, 0, 0.112986535, 0.338959602], [-1.694798006, 0, 1.694798007, 0, 0]]
    assert whiten(VALUES, MASK).tolist() == approx(expected, abs=2e-9)


def test_whiten_of_what_has_no_spread_is_zero() -> None:
    for values, mask in (([5.0], [True]), ([0.1] * 3, [True] * 3), ([5.0, 6.0], [False, False]), ([5.0, 7.0], [True, False])):
        assert whiten(double([values]), torch.tensor([mask])).tolist() == [[0.0] * len(values)]


def test_the_floor_of_the_variance() -> None:
    """0 and 2e-4: mean 1e-4, variance 2e-8, so 1e-4 / sqrt(3e-8)."""
    assert whiten(double([[0, 2e-4]]), torch.tensor([[True, True]])).tolist() == approx([[-0.5773502692, 0.5773502692]], abs=1e-9)


def test_penalise_takes_the_divergence_from_each_sampled_token() -> None:
    given = episodes(REWARDS)
    divergence_RT = double([[1, 2, 100, -3, 4], [0.5, 0, 1, 100, math.nan]])
    result = penalize(given, divergence_RT, 0.1)
    assert result.rewards_RT.tolist() == approx([[-0.1, 0.3, 0, 0.3, -1.4], [-0.05, 0, 1.9, 0, 0]], abs=1e-15)
    assert given.rewards_RT.tolist() == REWARDS
    assert (result.mask_RT is MASK, result.turn_ends_RT is ENDS, result.values_RT is VALUES) == (True, True, True)


def test_an_algorithm_names_its_estimator() -> None:
    algorithm = preset("ppo", advantages="bilevel_gae")
    assert algorithm.has_critic
