"""Several ranks that sample from the same servers, over real HTTP: the first publishes for all, and a rank without weights is given them. And
servers that move, as those do that Ray replaces."""

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from tether.core.errors import BadInput, EngineUnavailable, EnvironmentFailure
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.envs.remote.http_server import serving
from tether.models.load import LoadedModel
from tether.models.policy import Policy
from tether.rollout import sampler as sampler_module
from tether.rollout.engines import server as server_module
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.registry import make_engine
from tether.rollout.engines.server import ServerEngine, ServerOptions
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, Sampler, play_plan, training_plan
from tether.rollout.serving.app import serving_model

SAMPLING = Sampling(max_tokens=24)
RULES = EpisodeRules(max_context=900, max_tokens=24, format_penalty=-0.1)
PLAN = training_plan(0, 1, 3, 2)


class ThreadRanks:
    """One of several ranks that are threads of this process; what fails on one is raised on all, as between processes."""

    def __init__(self, rank: int, size: int, found: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._found, self._barrier = found, barrier
        self.before: Callable[[], None] = lambda: None
        """Called before the part of this rank."""

    def share(self, part: Callable[[], Any]) -> list[Any]:
        try:
            self.before()
            self._found[self.rank] = part()
        except EngineUnavailable as error:
            self._found[self.rank] = error
        self._barrier.wait(60)
        found = list(self._found)
        self._barrier.wait(60)
        failures = [result for result in found if isinstance(result, EngineUnavailable)]
        if failures:
            raise failures[0]
        return found


def _world(size: int) -> list[ThreadRanks]:
    found, barrier = [None] * size, threading.Barrier(size)
    return [ThreadRanks(rank, size, found, barrier) for rank in range(size)]


def _on_every(ranks: list[ThreadRanks], work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, range(len(ranks))))


@contextmanager
def _served(tiny: Any) -> Iterator[str]:
    with serving_model(LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), "tiny", max_rows=8) as url:
        yield url


def _sampler(engine: Any, chat: Any, ranks: Any = None) -> Sampler:
    specs = [EnvSpec("frozen_lake", {"instructions": "plain", "max_turns": 1})]
    return Sampler(specs, lambda rows: engine, chat, RULES, max_rows=8, device=torch.device("cpu"), ranks=ranks)


def _tokens(groups: list[Group]) -> list[Any]:
    return [[turn.response_ids for turn in t.turns] for group in groups for t in group.trajectories]


def _changed(tiny: Any) -> Policy:
    """Other weights than the servers start with."""
    model = copy.deepcopy(tiny.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    return Policy(model, tiny.tokenizer)


def _version(url: str) -> str:
    return str(httpx.get(f"{url}/weight_info").json()["weight_version"])


def test_two_ranks_play_what_one_plays(tiny: Any, chat: Any) -> None:
    policy = _changed(tiny)
    alone = _sampler(NativeEngine(policy, max_rows=8, max_context=900), chat).collect(PLAN, SAMPLING)
    ranks = _world(2)
    with _served(tiny) as first, _served(tiny) as second:
        engines = [ServerEngine([first, second], policy, max_rows=8, max_context=900, ranks=rank) for rank in ranks]
        numbers = _on_every(ranks, lambda rank: engines[rank].sync(7))
        assert [engine.servers[0].num_published for engine in engines] == [1, 1]
        assert engines[1].servers[0]._publisher is None, "the first rank publishes, alone"
        assert numbers[0] == numbers[1] and numbers[0]["probe_difference"] < 1e-5
        assert engines[0].label == engines[1].label == _version(first) == _version(second) and engines[0].label.endswith("-7")
        assert [engine.least_loaded().address for engine in engines] == [first, second], "each begins with another"
        played = _on_every(ranks, lambda rank: _sampler(engines[rank], chat, ranks[rank]).collect(PLAN, SAMPLING))
    assert _tokens(played[0]) == _tokens(played[1]) == _tokens(alone)
    assert {version for group in played[1] for t in group.trajectories for turn in t.turns for version in turn.versions} == {7}


def test_a_rank_that_finds_other_weights_gets_them_from_the_first(tiny: Any, chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run takes the only server when the first rank has played its share: it cannot help until both come together."""
    monkeypatch.setattr(server_module, "OUTDATED_SECONDS", 0.2)
    policy = _changed(tiny)
    ranks, first_done = _world(2), threading.Event()
    with _served(tiny) as url:
        engines = [ServerEngine([url], policy, max_rows=8, max_context=900, ranks=rank) for rank in ranks]
        samplers = [_sampler(engine, chat, rank) for engine, rank in zip(engines, ranks, strict=True)]
        _on_every(ranks, lambda rank: engines[rank].sync(3))
        before = _on_every(ranks, lambda rank: samplers[rank].collect(PLAN, SAMPLING))
        own = ranks[0].share

        def steal() -> None:
            if not first_done.is_set():
                first_done.wait(60)
                ServerEngine([url], Policy(*tiny), max_rows=8, max_context=900).sync(1)

        def told(part: Callable[[], Any]) -> Any:
            def counted() -> Any:
                result = part()
                first_done.set()
                return result

            return own(counted)

        monkeypatch.setattr(ranks[0], "share", told)
        ranks[1].before = steal
        again = _on_every(ranks, lambda rank: samplers[rank].collect(PLAN, SAMPLING))
        assert _version(url) == engines[0].label
    assert _tokens(again[0]) == _tokens(again[1]) == _tokens(before[0])
    (note,) = samplers[1].take_notes()
    assert note.startswith("weights were published again and the rollout was played again") and note == samplers[0].take_notes()[0]


def test_what_fails_on_the_first_rank_fails_on_all(tiny: Any) -> None:
    ranks = _world(2)
    with _served(tiny) as url:
        options = ServerOptions(patience=0.2)
        engines = [ServerEngine([url], Policy(*tiny), max_rows=8, max_context=900, options=options, ranks=rank) for rank in ranks]

    def publish(rank: int) -> str:
        with pytest.raises(EngineUnavailable) as said:
            engines[rank].sync(1)
        return str(said.value)

    said = _on_every(ranks, publish)
    assert said[0] == said[1] and "could be used for 0.2 s (server.patience)" in said[0]


# ------------------------------------------------------------------------------------------------------ servers that move


def test_an_engine_that_was_replaced_is_found_at_its_new_address(tiny: Any, chat: Any) -> None:
    """Its weights are those it starts with, so it is inspected, gets the weights and is verified before it samples."""
    policy = _changed(tiny)
    places: list[str | None] = []
    options = ServerOptions(patience=20.0, find=lambda: list(places))
    with _served(tiny) as first:
        places.append(first)
        engine = make_engine("ray", policy, max_rows=8, max_context=900, server=options)
        assert isinstance(engine, ServerEngine)
        engine.sync(5)
        before = _sampler(engine, chat).collect(PLAN, SAMPLING)
    places[0] = None  # being replaced
    with _served(tiny) as second:
        threading.Timer(0.5, lambda: places.__setitem__(0, second)).start()
        after = _sampler(engine, chat).collect(PLAN, SAMPLING)
        assert _version(second) == engine.label and engine.servers[0].address == second
    assert _tokens(after) == _tokens(before)
    with pytest.raises(BadInput, match="Ray has placed no engine for this process"):
        make_engine("ray", policy, server=ServerOptions())


@pytest.mark.long
def test_environments_are_played_by_their_workers(tiny: Any, chat: Any) -> None:
    """Two workers by turns, then one that is gone, then another in its place: the same episodes, and none is lost."""
    engine = NativeEngine(Policy(*tiny), max_rows=8, max_context=900)
    alone = _sampler(engine, chat).collect(PLAN, SAMPLING)
    places: list[str] = []
    (spec,) = _sampler(engine, chat).pool.specs
    spec = dataclasses.replace(spec, workers=lambda: list(places))
    with EnvPool([spec]) as pool, serving("frozen_lake", allow=["*"]) as first:
        play = functools.partial(play_plan, pool, PLAN, engine, chat, SAMPLING, RULES, error_retries=0)
        with serving("frozen_lake", allow=["*"]) as second:
            places[:] = [first, second]
            assert _rewards(play()) == _rewards(alone)
            assert pool._addresses == {0: [first, second]}
        assert _rewards(play()) == _rewards(alone)
        assert pool._addresses == {0: [first]}
    with serving("frozen_lake", allow=["*"]) as third, EnvPool([spec]) as pool:
        threading.Timer(0.6, lambda: places.__setitem__(slice(None), [third])).start()
        found = play_plan(pool, PLAN, engine, chat, SAMPLING, RULES, error_retries=0)
        assert _rewards(found) == _rewards(alone) and pool._addresses == {0: [third]}
    assert _tokens(found) == _tokens(alone) and found[0].env == "frozen_lake"


def test_no_worker_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "WORKER_SECONDS", 0.1)
    with pytest.raises(EnvironmentFailure, match=r"no worker of sokoban answered for 0.1 s \(last at: nowhere\)"):
        sampler_module.present_workers("sokoban", lambda: [])


def _rewards(groups: list[Group]) -> list[float]:
    assert not any(group.errored for group in groups)
    return [t.reward for group in groups for t in group.trajectories]
