"""Estimators on random episodes: against plain loops over one trajectory at a time, and laws that hold whatever the numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.algorithms.advantages import ESTIMATORS, bilevel_gae, gae, group_relative, penalize
from tether.algorithms.batch import Episodes
from tether.algorithms.presets import preset

laws = settings(derandomize=True, max_examples=60, deadline=None, database=None)
PLAIN = preset("ppo").model_copy(update={"whiten": False})
SHARES = st.sampled_from([0.0, 0.3, 0.9, 1.0])


@st.composite
def random_episodes(draw: st.DrawFn) -> Episodes:
    """Up to five trajectories of up to nine positions, with holes, one to four groups; the last token of each ends a turn."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num, length = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    mask_RT = torch.rand(num, length, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    ends_RT = mask_RT & (torch.rand(num, length, generator=generator) < 0.4)
    for row, mask in enumerate(mask_RT):
        if mask.any():
            ends_RT[row, int(mask.nonzero()[-1])] = True
    rewards_RT, values_RT = (torch.randn(num, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return Episodes(rewards_RT * mask_RT, mask_RT, ends_RT, torch.randint(0, 4, (num,), generator=generator), values_RT)


def errors(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """sum_l (gamma lam)^l (r + gamma V' - V), term by term."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * gae_lambda) ** step * delta for step, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def tokens_of(episodes: Episodes, row: int) -> tuple[list[float], list[float], list[bool]]:
    assert episodes.values_RT is not None
    mask = episodes.mask_RT[row]
    return episodes.rewards_RT[row][mask].tolist(), episodes.values_RT[row][mask].tolist(), episodes.turn_ends_RT[row][mask].tolist()


def rows_of(advantages_RT: Tensor, episodes: Episodes) -> list[list[float]]:
    return [advantages[mask].tolist() for advantages, mask in zip(advantages_RT, episodes.mask_RT, strict=True)]


@laws
@given(random_episodes(), SHARES, SHARES)
def test_gae_term_by_term(episodes: Episodes, gamma: float, gae_lambda: float) -> None:
    result = rows_of(gae(episodes, PLAIN.model_copy(update={"gamma": gamma, "gae_lambda": gae_lambda})).advantages_RT, episodes)
    for row, advantages in enumerate(result):
        rewards, values, _ = tokens_of(episodes, row)
        assert advantages == pytest.approx(errors(rewards, values, gamma, gae_lambda), abs=1e-12)


@laws
@given(random_episodes(), SHARES, SHARES, SHARES)
def test_bilevel_gae_turn_by_turn(episodes: Episodes, gamma: float, gae_lambda: float, turn_gamma: float) -> None:
    """Turns are cut out as lists; each is paid, at its end, the turn's advantage plus value less what it was paid on the way."""
    result = rows_of(
        bilevel_gae(episodes, PLAIN.model_copy(update={"gamma": gamma, "gae_lambda": gae_lambda, "turn_gamma": turn_gamma})).advantages_RT,
        episodes,
    )
    for row, advantages in enumerate(result):
        rewards, values, ends = tokens_of(episodes, row)
        stops = [t + 1 for t, end in enumerate(ends) if end]
        turns = list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []
        earned = [sum(rewards[start:stop]) for start, stop in turns]
        turn_advantages = errors(earned, [values[stop - 1] for _, stop in turns], turn_gamma, gae_lambda)
        expected: list[float] = []
        for (start, stop), turn_advantage in zip(turns, turn_advantages, strict=True):
            paid = [*rewards[start : stop - 1], turn_advantage + values[stop - 1] - sum(rewards[start : stop - 1])]
            expected += errors(paid, values[start:stop], gamma, gae_lambda)
        assert advantages == pytest.approx(expected, abs=1e-12)


@laws
@given(random_episodes())
def test_without_discount_both_levels_are_what_is_still_to_come(episodes: Episodes) -> None:
    for estimator in (gae, bilevel_gae):
        returns_RT = estimator(episodes, PLAIN).returns_RT
        assert returns_RT is not None
        to_come_RT = episodes.rewards_RT.flip(1).cumsum(1).flip(1) * episodes.mask_RT
        assert torch.allclose(returns_RT, to_come_RT, atol=1e-12)


@laws
@given(random_episodes(), st.sampled_from(sorted(ESTIMATORS)), SHARES, SHARES, st.booleans())
def test_nothing_outside_the_mask_counts(episodes: Episodes, name: str, gamma: float, gae_lambda: float, whitened: bool) -> None:
    """Closing the holes, and writing anything into the values that lie outside, changes no token."""
    assert episodes.values_RT is not None
    algorithm = PLAIN.model_copy(
        update={"gamma": gamma, "gae_lambda": gae_lambda, "turn_gamma": 0.8, "whiten": whitened, "normalize_std": whitened}
    )
    order = torch.argsort((~episodes.mask_RT).long(), dim=1, stable=True)
    closed = Episodes(
        episodes.rewards_RT.gather(1, order),
        episodes.mask_RT.gather(1, order),
        episodes.turn_ends_RT.gather(1, order),
        episodes.groups_R,
        torch.where(episodes.mask_RT, episodes.values_RT, torch.nan).gather(1, order),
    )
    ours, theirs = ESTIMATORS[name](episodes, algorithm), ESTIMATORS[name](closed, algorithm)
    assert torch.allclose(ours.advantages_RT.gather(1, order), theirs.advantages_RT, atol=1e-9)
    assert not ours.advantages_RT[~episodes.mask_RT].any()


@laws
@given(random_episodes(), st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_trajectories_does_not_matter(episodes: Episodes, normalize_std: bool, random: object) -> None:
    algorithm = preset("grpo").model_copy(update={"normalize_std": normalize_std})
    order = torch.tensor(random.sample(range(len(episodes.groups_R)), len(episodes.groups_R)))  # type: ignore[attr-defined]
    moved = Episodes(episodes.rewards_RT[order], episodes.mask_RT[order], episodes.turn_ends_RT[order], episodes.groups_R[order] * 7 - 3)
    expected = group_relative(episodes, algorithm).advantages_RT[order]
    assert torch.allclose(group_relative(moved, algorithm).advantages_RT, expected, atol=1e-9)


@laws
@given(random_episodes(), st.sampled_from([0.0, 0.1, 2.0]))
def test_a_penalty_costs_the_return_its_sum(episodes: Episodes, coef: float) -> None:
    divergence_RT = torch.linspace(-1, 1, episodes.rewards_RT.numel(), dtype=torch.float64).view(episodes.rewards_RT.shape)
    before, after = gae(episodes, PLAIN).returns_RT, gae(penalize(episodes, divergence_RT, coef), PLAIN).returns_RT
    assert before is not None and after is not None
    cost_RT = (divergence_RT * episodes.mask_RT).flip(1).cumsum(1).flip(1) * episodes.mask_RT
    assert torch.allclose(before - after, coef * cost_RT, atol=1e-12)
