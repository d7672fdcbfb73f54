"""Speculative decoding: drafts come from where the last tokens occurred before, and trajectories stay what they are without them."""

from typing import Any

import numpy as np
import pytest

from tether.core.config import validate
from tether.core.errors import TetherError
from tether.core.types import Group
from tether.models.fast.decoding import drafts as drafts_module
from tether.models.fast.decoding.contiguous import ContiguousDecoder
from tether.models.fast.decoding.drafts import MATCHES, DraftPause, Drafts
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.sampler import EnvPool, play_plan, training_plan
from tether.training.build import env_specs, episode_rules
from tether.training.settings import RunSettings


def known(*texts: list[int]) -> Drafts:
    drafts = Drafts()
    for slot, text in enumerate(texts):
        drafts.write(slot, 0, text)
    return drafts


def test_a_draft_is_what_followed_the_last_tokens() -> None:
    assert MATCHES == (8, 4, 2)
    drafts = known([1, 2, 3, 4, 5, 6, 7], [9, 9, 3, 4], [6, 7], [9, 4], [4])
    assert drafts.guess(1, 2) == [5, 6]
    assert drafts.guess(1, 9) == [5, 6, 7]
    assert drafts.guess(2, 2) == [], "nothing followed"
    assert drafts.guess(3, 2) == []
    assert drafts.guess(4, 2) == []


def test_the_longest_match_goes_first_and_then_the_latest() -> None:
    drafts = known([1, 2, 3, 4, 50], [3, 4, 60], [1, 2, 3, 4], [0, 2, 3, 4])
    assert drafts.guess(2, 1) == [50]
    assert drafts.guess(3, 1) == [60]


def test_a_text_grows_and_is_overwritten_from_where_it_is_written() -> None:
    drafts = known([1, 2])
    assert drafts.guess(0, 4) == []
    drafts.write(0, 2, [4, 1, 2])
    assert drafts.guess(0, 4) == [4, 1, 2]
    drafts.write(0, 4, [2])  # nothing new
    assert drafts.guess(0, 4) == [4, 1, 2]
    drafts.write(0, 3, [4, 8, 2, 4])  # tokens behind the end of a response were dropped
    assert drafts.guess(0, 4) == [4, 8, 2, 4]
    drafts.write(0, 0, [5, 2, 4])  # another conversation; the one before may still be copied
    assert drafts.guess(0, 2) == [4, 8]


def test_a_slot_that_was_filled_before() -> None:
    drafts = Drafts()
    drafts.write(3, 2, [7, 8, 7, 8])
    assert drafts.guess(3, 2) == [7, 8]


def test_a_pause_ends_and_then_drafts_are_tried_anew() -> None:
    """64 drafts with fewer than 0.4 x 64 = 25.6 right tokens: 4 calls without, then 8, 16 and 32, until drafts are right again."""

    def paused(pause: DraftPause) -> int:
        num_calls = 0
        while pause.applies():
            num_calls += 1
        return num_calls

    pause = DraftPause()
    pause.count(63, 0)
    assert paused(pause) == 0
    pause.count(1, 25)
    assert paused(pause) == 4
    for num_calls in (8, 16, 32, 32):
        pause.count(64, 0)
        assert paused(pause) == num_calls
    pause.count(64, 26)  # those before do not count any more
    assert paused(pause) == 0
    pause.count(64, 0)
    assert paused(pause) == 4


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts for any number of rows, also on a CPU."""
    monkeypatch.setattr(ContiguousDecoder, "most_drafted_rows", 128)


def play(tiny: Any, chat: Any, env: str, speculative_tokens: int, **rollout: Any) -> tuple[list[Group], NativeEngine]:
    sizes = {"num_groups": 2, "group_size": 4, "max_tokens": 40, **rollout}
    settings = validate(RunSettings, {"env": {"name": env, "options": {"max_turns": 2}}, "model": {"name": "tiny"}, "rollout": sizes})
    policy = Policy(tiny.model, tiny.tokenizer)
    rules = episode_rules(settings, policy)
    engine = NativeEngine(
        policy,
        max_rows=settings.rollout.max_rows,
        max_context=rules.max_context,
        cache_gb=settings.rollout.cache_gb,
        speculative_tokens=speculative_tokens,
    )
    with EnvPool(env_specs(settings.environments())) as pool:
        plan = training_plan(0, 1, settings.rollout.num_groups, settings.rollout.group_size, weights=pool.weights)
        return play_plan(pool, plan, engine, chat, settings.sampling(), rules), engine


def turns(groups: list[Group]) -> list[tuple[tuple[int, ...], str]]:
    return [(turn.response_ids, turn.observation) for group in groups for one in group.trajectories for turn in one.turns]


def logprobs(groups: list[Group]) -> list[float]:
    return [x for group in groups for one in group.trajectories for turn in one.turns for x in turn.logprobs]


@pytest.fixture(scope="module")
def plain(tiny: Any, chat: Any) -> list[Group]:
    """What is played without drafts."""
    return play(tiny, chat, "frozen_lake", 0)[0]


@pytest.mark.parametrize(
    ("env", "rollout"),
    [
        pytest.param("frozen_lake", {}, marks=pytest.mark.long),
        ("frozen_lake", {"temperature": 0.5, "top_p": 0.9}),
        ("frozen_lake", {"context": "last_k", "last_k": 1}),
        pytest.param("sokoban", {"max_rows": 5}, marks=pytest.mark.long),
        pytest.param("countdown", {"max_tokens": 24}, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("everywhere")
def test_trajectories_are_the_same_in_fewer_calls(tiny_on_device: Any, chat: Any, env: str, rollout: dict[str, Any]) -> None:
    plain, without = play(tiny_on_device, chat, env, 0, **rollout)
    drafted, engine = play(tiny_on_device, chat, env, 4, **rollout)
    assert turns(drafted) == turns(plain)
    assert logprobs(drafted) == pytest.approx(logprobs(plain), abs=1e-4)
    found, before = engine.statistics, without.statistics
    assert found.sampled_tokens == before.sampled_tokens and before.drafts == before.accepted_tokens == 0
    assert 0 < found.accepted_tokens <= 4 * found.drafts
    if tiny_on_device.model.device.type == "cpu":  # a GPU decodes several tokens a call anyway
        assert found.decode_calls < before.decode_calls


@pytest.mark.usefixtures("everywhere")
def test_where_memory_runs_out_nothing_changes(tiny: Any, chat: Any, plain: list[Group]) -> None:
    drafted, engine = play(tiny, chat, "frozen_lake", 4, cache_gb=0.005)
    assert engine.statistics.evictions > 0 and engine.statistics.accepted_tokens > 0
    assert turns(drafted) == turns(plain)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.long
def test_drafts_that_are_seldom_right_pause(tiny: Any, chat: Any, plain: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "TRIED_DRAFTS", 20)
    monkeypatch.setattr(drafts_module, "LEAST_ACCEPTED", 0.0)
    _, always = play(tiny, chat, "frozen_lake", 4)
    monkeypatch.setattr(drafts_module, "LEAST_ACCEPTED", 4.1)  # more than a draft has
    monkeypatch.setattr(drafts_module, "PAUSED_CALLS", 16)
    paused, engine = play(tiny, chat, "frozen_lake", 4)
    assert 20 <= engine.statistics.drafts < always.statistics.drafts / 2
    monkeypatch.setattr(drafts_module, "PAUSED_CALLS", 10**6)
    _, given_up = play(tiny, chat, "frozen_lake", 4)
    assert 20 <= given_up.statistics.drafts < 20 + 12  # one call more at most
    assert turns(paused) == turns(plain)


@pytest.mark.usefixtures("everywhere")
def test_what_stands_behind_the_sampled_tokens_is_not_looked_at(
    tiny: Any, chat: Any, plain: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device leaves there what an earlier call wrote."""
    speculate = ContiguousDecoder.speculate

    def with_leftovers(self: Any, *given: Any) -> Any:
        output = speculate(self, *given)()
        output.logprobs_BK[np.arange(output.ids_BK.shape[1]) >= output.counts_B[:, None]] = np.nan
        return lambda: output

    monkeypatch.setattr(ContiguousDecoder, "speculate", with_leftovers)
    drafted, engine = play(tiny, chat, "frozen_lake", 4)
    assert turns(drafted) == turns(plain) and engine.statistics.drafts > 0


def test_other_engines_refuse_the_setting() -> None:
    rollout = {"engine": "http://127.0.0.1:8000", "speculative_tokens": 4}
    with pytest.raises(
        TetherError, match=r"it has speculative_tokens 4, but engine is http://127\.0\.0\.1:8000, and only the native engine guesses"
    ):
        validate(RunSettings, {"env": {"name": "frozen_lake"}, "rollout": rollout})
