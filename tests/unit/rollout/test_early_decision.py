"""Early decision: which prompts are played whole, whatever ends first; and what that does to the expected gradient (docs/early-decision.md)."""

import copy
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tether.algorithms.advantages import group_relative
from tether.algorithms.batch import Episodes
from tether.algorithms.filters.scores import sample_variance
from tether.algorithms.presets import preset
from tether.core.enums import Decision, FinishReason, StopReason
from tether.core.protocols import Sampling
from tether.core.types import Group, Observation, Step, Trajectory, Turn
from tether.envs.base import TurnOptions
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.rollout.early_decision import EarlyRules, Places, is_worth
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.engines.server import ServerEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import FunctionAgent, ModelAddress
from tether.rollout.gateway.player import AgentPlayer, AgentRules
from tether.rollout.sampler import EnvPool, EnvSpec, Sampler, play_plan, training_plan
from tether.rollout.serving.app import serving_model

CONTINUED, EXPLORED, STOPPED, SURPLUS = Decision.CONTINUED, Decision.EXPLORED, Decision.NOT_CONTINUED, Decision.SURPLUS
HERE = "tests.unit.rollout.test_early_decision" if __name__.startswith("tests.") else __name__


class Coin:
    """Pays 1 or 0: an instance has its own chance (0, 1/2 or 1), an episode its own luck. Fails in a reset now and then, if asked."""

    name, max_turns, instructions, work = "coin", 1, "Say something.", "inline"
    Options = TurnOptions
    failures: dict[int, int] = {}
    """By env seed, how often the next resets fail."""

    def __init__(self, options: TurnOptions) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if Coin.failures.get(env_seed or 0, 0):
            Coin.failures[env_seed or 0] -= 1
            raise RuntimeError("out of order")
        self._reward = float(seed % 3) if seed % 3 != 1 else float((env_seed or 0) % 2)
        self._reward = min(1.0, self._reward)
        return Observation("Toss.")

    def step(self, answer: str) -> Step:
        return Step(Observation("Done."), self._reward, True, self._reward > 0)


def _rules(places: int, size: int, first: int, **changes: Any) -> EarlyRules:
    chosen: dict[str, Any] = {"oversample": 1, "explore": 0.0, "seed": 0, "step": 1, "score": _variance} | changes
    return EarlyRules(num_places=places, group_size=size, first_members=first, **chosen)


def _variance(group: Group) -> float:
    return sample_variance(np.array(group.rewards))


def _ended(seeds: EpisodeSeeds, reward: float, stop: StopReason = StopReason.SUCCESS) -> Trajectory:
    turn = Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, "x", None, reward=reward)
    return Trajectory(seeds.group, seeds.member, seeds.instance, [turn], stop, success=reward > 0, env="coin")


def _play(plan: Sequence[EpisodeSeeds], rules: EarlyRules, reward: Callable[[EpisodeSeeds], float], order: int = 0) -> list[Group]:
    """Play by these rewards; of the episodes that are in play, any may end next."""
    places, rng = Places(plan, rules, 0), random.Random(order)
    in_play = places.begin()
    while in_play:
        seeds = in_play.pop(rng.randrange(len(in_play)))
        in_play += places.take(_ended(seeds, reward(seeds)))
    return sorted(places.groups(), key=lambda group: group.index)


def _said(groups: Sequence[Group]) -> dict[int, tuple[Decision | None, int]]:
    """By prompt, what was decided and how many members were played."""
    return {group.index: (group.decision, len(group.trajectories)) for group in groups}


# ------------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("score", "mean_score", "first", "size", "worth"),
    [
        (0.0, 0.0, 4, 16, False),  # nothing is known and nothing was seen
        (0.5, 0.0, 2, 4, True),
        (0.0, 0.3, 2, 4, False),  # expected (0 + 0.15) / 1.5 = 0.1 for 2 more episodes; a new prompt shows 0.3 for 4
        (0.05, 0.3, 2, 4, False),  # (0.05 + 0.15) / 1.5 = 0.1333 for 2: 0.0667 an episode, less than 0.075
        (0.08, 0.3, 2, 4, True),  # (0.08 + 0.15) / 1.5 = 0.1533 for 2: 0.0767 an episode
        (0.1, 0.2, 4, 16, False),  # (0.3 + 0.1) / 3.5 = 0.1143 for 12: 0.0095, less than 0.0125
        (0.15, 0.2, 4, 16, True),  # (0.45 + 0.1) / 3.5 = 0.1571 for 12: 0.0131
        (0.0, 0.2, 16, 16, True),  # nothing is left to play
    ],
)
def test_a_prompt_is_worth_what_an_episode_of_it_is_expected_to_show(
    score: float, mean_score: float, first: int, size: int, worth: bool
) -> None:
    assert is_worth(score, mean_score, first, size) is worth


def test_prompts_are_tried_in_order_until_one_is_worth_it() -> None:
    plan = training_plan(0, 1, 2, 4, tries=3)
    varied = {3, 4}  # place 0 tries prompts 0, 2, 4; place 1 tries 1, 3, 5
    groups = _play(plan, _rules(2, 4, 2), lambda seeds: float(seeds.group in varied and seeds.member % 2))
    assert _said(groups) == {0: (STOPPED, 2), 1: (STOPPED, 2), 2: (STOPPED, 2), 3: (CONTINUED, 4), 4: (CONTINUED, 4)}
    assert [[t.member for t in group.trajectories] for group in groups if group.is_whole] == [[0, 1, 2, 3]] * 2
    none = _play(plan, _rules(2, 4, 2), lambda seeds: 1.0)
    assert _said(none) == dict.fromkeys(range(6), (STOPPED, 2)), "every prompt of every place was tried"


def test_a_prompt_that_was_started_in_vain_ends_with_its_first_members() -> None:
    groups = _play(training_plan(0, 1, 1, 4, tries=5), _rules(1, 4, 2, oversample=3), lambda seeds: float(seeds.group > 0 and seeds.member))
    assert _said(groups) == {0: (STOPPED, 2), 1: (CONTINUED, 4), 2: (SURPLUS, 2), 3: (SURPLUS, 2)}


def test_what_is_played_does_not_depend_on_what_ends_first() -> None:
    plan = training_plan(3, 1, 4, 6, tries=6, weights=(1.0, 1.0))
    rules = _rules(4, 6, 3, oversample=3, explore=0.4, seed=3)

    def reward(seeds: EpisodeSeeds) -> float:
        return float(seeds.group % 3 == 0 and seeds.env_seed % 2 == 0)

    found = [_play(plan, rules, reward, order) for order in range(20)]
    assert all(_said(groups) == _said(found[0]) for groups in found)
    assert {decision for decision, _ in _said(found[0]).values()} == set(Decision), "all that can happen does"
    envs = {seeds.group: seeds.env_index for seeds in plan}
    assert [envs[number] for number in range(24)] == [0, 0, 1, 1] * 6, "a place has one environment"


def test_ranks_play_what_one_plays() -> None:
    plan = training_plan(5, 2, 5, 4, tries=4)
    rules = _rules(5, 4, 2, oversample=2, explore=0.3, seed=5, step=2)

    def reward(seeds: EpisodeSeeds) -> float:
        return float(seeds.env_seed % 5 == 0)

    parts = [[seeds for seeds in plan if seeds.group % 5 % 2 == rank] for rank in (0, 1)]
    assert sorted((g.index, g.decision) for part in parts for g in _play(part, rules, reward)) == sorted(
        (g.index, g.decision) for g in _play(plan, rules, reward)
    )


def test_the_share_of_exploration_is_drawn_by_seed() -> None:
    rules = _rules(1, 4, 2, explore=0.25, seed=7)
    flat = [rules.decide(Group(number, 0, [])) for number in range(4000)]
    assert set(flat) == {EXPLORED, STOPPED} and flat.count(EXPLORED) == pytest.approx(1000, abs=3 * 750**0.5)
    again = _rules(1, 4, 2, explore=0.25, seed=7)
    assert [again.decide(Group(number, 0, [])) for number in range(100)] == flat[:100]


# ---------------------------------------------------------------------------------------------------------- in environments


def _episodes(engine: Any, chat: Any, rules: EarlyRules, places: int, tries: int, max_tokens: int = 12) -> list[Group]:
    with EnvPool([EnvSpec(f"{HERE}:Coin")]) as pool:
        plan = training_plan(rules.seed, 1, places, rules.group_size, tries=tries)
        budget = EpisodeRules(900, max_tokens, 0.0)
        return play_plan(pool, plan, engine, chat, Sampling(1.0, max_tokens), budget, early=rules)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_engine_goes_on_with_what_was_decided(tiny: Any, chat: Any, rows: int) -> None:
    rules = _rules(3, 4, 2, oversample=2)
    few = _episodes(NativeEngine(Policy(*tiny), max_rows=rows), chat, rules, 3, 4)
    many = _episodes(NativeEngine(Policy(*tiny), max_rows=64), chat, rules, 3, 4)
    assert [(g.index, g.decision, [t.turns[0].response_ids for t in g.trajectories]) for g in few] == [
        (g.index, g.decision, [t.turns[0].response_ids for t in g.trajectories]) for g in many
    ]
    assert {CONTINUED, STOPPED} <= {group.decision for group in many}
    assert all(len(group.trajectories) == (4 if group.is_whole else 2) for group in many)


def test_servers_play_what_the_native_engine_plays(tiny: Any, chat: Any) -> None:
    rules, policy = _rules(3, 4, 2, oversample=2, explore=0.5), Policy(*tiny)
    here = _episodes(NativeEngine(policy), chat, rules, 3, 4)
    with serving_model(tiny, "tiny", max_rows=8) as url:
        there = _episodes(ServerEngine([url], policy, max_rows=5), chat, rules, 3, 4)
    assert [(g.index, g.decision, [t.turns[0].response_ids for t in g.trajectories]) for g in there] == [
        (g.index, g.decision, [t.turns[0].response_ids for t in g.trajectories]) for g in here
    ]


def test_agents_go_on_with_what_was_decided(tiny: Any) -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

    async def agent(task: Any, llm: ModelAddress) -> float:
        async with httpx.AsyncClient() as client:
            asked = {"model": llm.model, "messages": [{"role": "user", "content": "Toss."}]}
            (
                await client.post(f"{llm.base_url}/chat/completions", json=asked, headers={"Authorization": f"Bearer {llm.api_key}"})
            ).raise_for_status()
        return float(task["group"] and task["member"] % 2)

    places = Places(training_plan(0, 1, 1, 4, tries=3), _rules(1, 4, 2), 0)
    player = AgentPlayer(FunctionAgent(agent), AgentRules())
    engine = NativeEngine(Policy(tiny.model, tokenizer), max_rows=4, max_context=600, keeps_slots=True)

    def tasks(seeds: EpisodeSeeds) -> dict[str, Any]:
        return {"group": seeds.group, "member": seeds.member}

    try:
        budget = EpisodeRules(600, 6, 0.0)
        played = player.play(tasks, places.begin(), engine, ChatFormat(tokenizer), Sampling(1.0, 6), budget, None, places.take)
    finally:
        player.close()
    assert _said(places.groups()) == {0: (STOPPED, 2), 1: (CONTINUED, 4)} and len(played) == 6


def test_ranks_divide_the_places_and_all_get_all_groups(chat: Any) -> None:
    rules = _rules(3, 4, 2, oversample=2, explore=0.4)
    plan = training_plan(0, 1, 3, 4, tries=4)

    def sampler(ranks: Any) -> Sampler:
        engine = ScriptedEngine(lambda context, conversation, turn: " x </think> <answer> Go </answer>", chat._tokenizer)
        specs, cpu = [EnvSpec(f"{HERE}:Coin")], torch.device("cpu")
        return Sampler(specs, lambda rows: engine, chat, EpisodeRules(900, 12, 0.0), max_rows=8, device=cpu, ranks=ranks)

    def collect(rank: int) -> list[Group]:
        return sampler(_ThreadRank(rank, found, barrier)).collect(plan, Sampling(1.0, 12), early=rules)

    found, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(collect, (0, 1))
    alone = sampler(None).collect(plan, Sampling(1.0, 12), early=rules)
    assert one == other == alone and {CONTINUED, STOPPED} <= {group.decision for group in alone}


@dataclass
class _ThreadRank:
    """One of two ranks that are threads of this process."""

    rank: int
    found: list[Any]
    barrier: threading.Barrier
    size: int = 2

    def share(self, part: Callable[[], Any]) -> list[Any]:
        self.found[self.rank] = part()
        self.barrier.wait(60)
        return list(self.found)


def test_an_episode_that_fails_is_played_again_before_anything_is_decided(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(lambda context, conversation, turn: " x </think> <answer> Go </answer>", chat._tokenizer)
    plan = training_plan(0, 1, 1, 4, tries=1)
    rules = _rules(1, 4, 2, score=lambda group: float(len(group.trajectories)))
    monkeypatch.setattr(Coin, "failures", {plan[0].env_seed: 1, plan[2].env_seed: 5})
    (group,) = _episodes(engine, chat, rules, 1, 1)
    assert [(t.member, t.retries) for t in group.trajectories] == [(0, 1), (1, 0), (3, 0)]
    assert [(t.member, t.retries, t.stop_reason) for t in group.errored] == [(2, 1, StopReason.ENV_ERROR)]
    monkeypatch.setattr(Coin, "failures", {plan[0].env_seed: 9, plan[1].env_seed: 9})
    (nothing,) = _episodes(engine, chat, _rules(1, 4, 2), 1, 1)
    assert (nothing.decision, nothing.trajectories, len(nothing.errored)) == (STOPPED, [], 2), "an error is no evidence"


# -------------------------------------------------------------------------------------------------------- the expected gradient
#
# One parameter, the logit of the success rate p: a member's score is d log P / d logit = R - p, and the gradient of p is p (1 - p).


@lru_cache
def _gradient(rewards: tuple[float, ...], p: float, algorithm: str = "dr_grpo") -> float:
    """Mean over the members of advantage times score, by the estimator that trains."""
    rewards_RT = torch.tensor(rewards, dtype=torch.float64)[:, None]
    mask_RT = torch.ones_like(rewards_RT, dtype=torch.bool)
    episodes = Episodes(rewards_RT, mask_RT, mask_RT, torch.zeros(len(rewards), dtype=torch.long))
    advantages_R = group_relative(episodes, preset(algorithm)).advantages_RT[:, 0]
    return float((advantages_R * (rewards_RT[:, 0] - p)).mean())


def _expected(
    p: float, size: int, first: int, explore: float = 0.0, weight: float = 1.0, algorithm: str = "dr_grpo"
) -> tuple[float, float]:
    """Of one prompt that is started: the exact expectation of its gradient, and of the episodes played, over all outcomes of its members."""
    rules, gradient, episodes = _rules(1, size, first), 0.0, 0.0
    seeds = [EpisodeSeeds(0, member, 0, 0, 0) for member in range(size)]
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        chance = np.prod([p if reward else 1 - p for reward in outcome])
        firsts = Group(0, 0, [_ended(seeds[member], outcome[member]) for member in range(first)])
        continued = rules.decide(firsts) is CONTINUED
        gradient += chance * (1.0 if continued else explore * weight) * _gradient(outcome, p, algorithm)
        episodes += chance * (first + (1.0 if continued else explore) * (size - first))
    return float(gradient), float(episodes)


def test_the_gradient_of_four_members_decided_after_two() -> None:
    """By hand (docs/early-decision.md): whole groups 3/4 pq; decided (6 + 4 pq) / 16 pq, for 2 + 4 pq episodes."""
    for p, whole, decided, episodes in ((0.5, 0.1875, 0.109375, 3.0), (0.1, 0.0675, 0.035775, 2.36), (0.9, 0.0675, 0.035775, 2.36)):
        assert _expected(p, 4, 4) == pytest.approx((whole, 4.0), rel=1e-12)
        assert _expected(p, 4, 2) == pytest.approx((decided, episodes), rel=1e-12)
        explored, _ = _expected(p, 4, 2, explore=0.25)
        assert explored == pytest.approx(0.75 * decided + 0.25 * whole, rel=1e-12), "without weights: between the two"
        weighed, _ = _expected(p, 4, 2, explore=0.25, weight=4.0)
        assert weighed == pytest.approx(whole, rel=1e-12), "with weights: that of whole groups"
    # Divided by the standard deviation (GRPO): 1/2 where one differs, 3^-1/2 where two do; with the floor of the division.
    assert _expected(0.5, 4, 4, algorithm="grpo")[0] == pytest.approx(0.75 * (8 / 16 * 0.5 + 6 / 16 * 3**-0.5), rel=1e-5)
    assert _expected(0.5, 4, 2, algorithm="grpo")[0] == pytest.approx(0.75 * (4 / 16 * 0.5 + 4 / 16 * 3**-0.5), rel=1e-5)
    assert _expected(0.5, 4, 2, 0.25, 4.0, "grpo")[0] == pytest.approx(_expected(0.5, 4, 4, algorithm="grpo")[0], rel=1e-12)


def test_the_formula_of_the_page_holds_for_other_sizes() -> None:
    for size, first, p in ((6, 2, 0.3), (6, 3, 0.3), (8, 4, 0.05), (8, 3, 0.8)):
        q, rest = 1 - p, size - first
        both, across, behind = first * (first - 1), first * rest * (2 - p ** (first - 1) - q ** (first - 1)), rest * (rest - 1)
        multiple = (both + across + behind * (1 - p**first - q**first)) / size**2
        assert _expected(p, size, first)[0] == pytest.approx(multiple * p * q, rel=1e-12)


def test_other_baselines_have_the_multiples_of_the_page() -> None:
    """A critic that says v, and the members behind the decision alone."""
    size, first, v = 6, 3, 0.7
    for p in (0.2, 0.6):
        q, sums = 1 - p, np.zeros(3)
        for outcome in itertools.product((0.0, 1.0), repeat=size):
            if len(set(outcome[:first])) == 1:
                continue
            rewards = np.array(outcome)
            chance, scores, behind = np.prod(np.where(rewards > 0, p, q)), rewards - p, rewards[first:]
            others = (behind.sum() - behind) / (len(behind) - 1)
            with_critic = (rewards - v) * scores
            sums += chance * np.array([with_critic[:first].mean(), with_critic[first:].mean(), ((behind - others) * scores[first:]).mean()])
        of_first = (1 - p ** (first - 1)) * (1 - v) + (1 - q ** (first - 1)) * v
        continued = 1 - p**first - q**first
        assert (sums / (p * q)).tolist() == pytest.approx([of_first, continued, continued], rel=1e-12)


def test_simulated_places_have_the_expected_gradient_of_whole_groups() -> None:
    """Prompts of three success rates, places that try until one is worth it, exploration weighed by 1 / explore: per prompt that was started, the
    gradient of each rate is 3/4 pq; the stopping itself adds nothing (Wald). Without the weights the rates differ in what is lost."""
    rates, explore, num_places = (0.1, 0.5, 0.95), 0.25, 1200
    rng = np.random.default_rng(0)
    luck = {}

    def reward(seeds: EpisodeSeeds) -> float:
        draw = luck.setdefault((seeds.group, seeds.member), rng.random())
        return float(draw < rates[seeds.group % 3])

    groups = _play(training_plan(0, 1, num_places, 4, tries=4), _rules(num_places, 4, 2, explore=explore, oversample=1), reward)
    for number, rate in enumerate(rates):
        own = [group for group in groups if group.index % 3 == number and group.decision is not SURPLUS]
        values = [_gradient(tuple(g.rewards), rate) * (1 / explore if g.decision is EXPLORED else 1.0) if g.is_whole else 0.0 for g in own]
        margin = 4 * float(np.std(values)) / len(values) ** 0.5
        assert np.mean(values) == pytest.approx(0.75 * rate * (1 - rate), abs=margin)
        plain = [value * (explore if g.decision is EXPLORED else 1.0) for value, g in zip(values, own, strict=True)]
        decided = (1 - explore) * _expected(rate, 4, 2)[0] + explore * 0.75 * rate * (1 - rate)
        assert np.mean(plain) == pytest.approx(decided, abs=margin)
        assert np.mean(plain) < 0.75 * rate * (1 - rate) - margin / 2
