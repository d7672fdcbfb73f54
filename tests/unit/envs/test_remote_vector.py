"""A vector of environments plays like its members would one by one, wherever they live, and together in far less time."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput, ConfigError, EnvironmentFailure, UnknownName
from tether.core.protocols import ConcurrentEnv, Env, few_shot_of, is_concurrent
from tether.core.types import Step
from tether.envs.registry import ENVIRONMENTS, make_env, register_env
from tether.envs.remote import VectorEnv, make_envs

sys.path.append(str(Path(__file__).parent))

from troubled_environments import Awaiting, Troubled, TroubledOptions

SCRIPT = [["Right || Up", "Left", "Down || Down", "Up"], ["Down", "", "Left || Left || Left", "Right"], ["jump", "Up", "Up", "Up"]]


@pytest.fixture
def own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))


def _serially(env: Env, seed: int, env_seed: int | None, answers: list[str]) -> list[Any]:
    played: list[Any] = [env.reset(seed, env_seed=env_seed)]
    for answer in answers:
        played.append(env.step(answer))
        if played[-1].done:
            break
    return played


@pytest.mark.parametrize("work", ["inline", "wait", "process"])
def test_equals_serial_play(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same observations, rewards and infos as one by one, also when members play again on environments used by others."""
    from tether.envs.frozen_lake.env import FrozenLake

    monkeypatch.setattr(FrozenLake, "work", property(lambda self: work))
    options = {"slip": 0.5, "max_turns": 4}
    with VectorEnv("frozen_lake", 3, options=options) as vector:
        for round_number in range(2):
            seeds, env_seeds = [7, 8, 7], [1, None, 2 + round_number]
            played: list[list[Any]] = [[observation] for observation in vector.reset(seeds, env_seeds)]
            for turn in range(4):
                for member, step in zip(played, vector.step([answers[turn] for answers in SCRIPT]), strict=True):
                    member.extend([step] if step is not None else [])
            expected = [_serially(make_env("frozen_lake", **options), *each) for each in zip(seeds, env_seeds, SCRIPT, strict=True)]
            assert played == expected


@pytest.mark.parametrize("work", ["inline", "wait", "process"])
def test_a_member_is_an_env(work: str) -> None:
    with VectorEnv(Troubled, 2, options={"work": work, "max_turns": 2}) as vector:
        member = vector.members[1]
        assert isinstance(member, ConcurrentEnv) and is_concurrent(member)  # and so an Env
        assert (member.name, member.max_turns, member.instructions) == ("troubled", 2, Troubled().instructions)
        assert member.reset(5).text.startswith("Turn 1 of 2.\nseed 5")
        assert not member.over
        assert member.step("hello").observation.text == "Turn 2 of 2.\nseed 5 heard hello"
        assert member.step("bye").info["truncated"] and member.over


def test_tags_of_its_own_are_passed_on() -> None:
    class Tagged(Awaiting):
        reply_tags = ("search", "answer")

    for source, tags in ((Tagged, ("search", "answer")), (Awaiting, ("answer",))):
        with VectorEnv(source, 1) as vector:
            assert vector.members[0].reply_tags == tags


def test_examples_as_turns_are_passed_on() -> None:
    here = make_env("countdown")
    here.reset(5)
    with VectorEnv("countdown", 1) as vector:
        (member,) = vector.members
        assert member.few_shot == ()
        member.reset(5)
        assert member.few_shot == few_shot_of(here) and len(member.few_shot) == 6


def test_instructions_follow_the_instance() -> None:
    with VectorEnv(Awaiting, 2) as vector:
        assert [member.instructions for member in vector.members] == ["Wait."] * 2
        assert [observation.text for observation in vector.reset([3, 4], [None, 9])] == ["seed 3, env_seed None", "seed 4, env_seed 9"]  # type: ignore[union-attr]
        assert [member.instructions for member in vector.members] == ["Wait for 3.", "Wait for 4."]


@pytest.mark.parametrize("work", ["wait", "process"])
def test_many_slow_members_finish_together(work: str) -> None:
    with VectorEnv(Troubled, 32, options={"work": work}) as vector:
        vector.reset(range(32))
        start = time.monotonic()
        steps = vector.step(["sleep 0.2"] * 32)
        took = time.monotonic() - start
        assert all(isinstance(step, Step) for step in steps)
        assert 0.2 <= took < 3.2  # one after the other they need 6.4 s


def test_coroutines_wait_together() -> None:
    with VectorEnv(Awaiting, 32) as vector:
        vector.reset(range(32))
        start, threads = time.monotonic(), threading.active_count()
        futures = [member.submit_step("sleep 0.3") for member in vector.members]
        assert threading.active_count() <= threads  # they are awaited on the loop itself
        assert {future.result().observation.text for future in futures} == {"heard sleep 0.3"}
        assert 0.3 <= time.monotonic() - start < 4


def test_workers_bounds_how_many_work_at_once() -> None:
    """Two at a time: four sleeps take two rounds, and the time spent in the queue is not held against anybody."""
    with VectorEnv(Troubled, 4, options={"work": "wait"}, workers=2, step_timeout=1.6) as vector:
        vector.reset(range(4))
        start = time.monotonic()
        assert all(isinstance(step, Step) for step in vector.step(["sleep 0.9"] * 4))
        assert time.monotonic() - start >= 1.8  # more than step_timeout


def test_the_environment_may_set_the_bound_itself() -> None:
    class Crowded(Troubled):
        workers = 1

    for workers, least in ((None, 0.6), (2, 0.3)):
        with VectorEnv(Crowded, 2, options={"work": "wait"}, workers=workers) as vector:
            vector.reset([0, 1])
            start = time.monotonic()
            vector.step(["sleep 0.3"] * 2)
            took = time.monotonic() - start
            assert took >= least
            assert vector._background is not None
            slots = vector._background.slot()
            assert slots._value == (workers or 1)  # type: ignore[attr-defined]


def test_each_playing_member_has_a_process_of_its_own_and_idle_ones_have_none() -> None:
    with VectorEnv(Troubled, 3, options={"max_turns": 1}) as vector:
        processes = [observation.text.rpartition(" ")[2] for observation in vector.reset([0, 1, 2])]  # type: ignore[union-attr]
        assert len(set(processes)) == 3
        vector.step(["end", "end", None])
        again = vector.members[1].reset(5).text.rpartition(" ")[2]
        assert again in processes[:2]  # one that another episode has left


def test_bulk_calls_leave_out_whoever_is_over_or_has_no_answer() -> None:
    with VectorEnv(Troubled, 3, options={"work": "inline"}) as vector:
        vector.reset([1, 2, 3])
        first = vector.step(["end", "x", None])
        assert [step and step.done for step in first] == [True, False, None]  # type: ignore[union-attr]
        assert [step and step.reward for step in vector.step(["x", "x", "x"])] == [None, 2.0, 1.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("work", ["inline", "wait", "process"])
def test_mistakes_of_the_caller(work: str) -> None:
    with VectorEnv(Troubled, 2, options={"work": work, "max_turns": 1}) as vector:
        with pytest.raises(BadInput, match=r"step was called but the episode has not been reset; call reset\(seed\) first"):
            vector.members[0].step("x")
        with pytest.raises(BadInput, match="got 1 seeds for 2 members"):
            vector.reset([1])
        with pytest.raises(BadInput, match="got 3 answers for 2 members"):
            vector.step(["x"] * 3)
        vector.reset([1, 2])
        vector.members[0].step("x")
        with pytest.raises(BadInput, match="the episode is over"):
            vector.members[0].step("x")
    with pytest.raises(BadInput, match="closed"):
        vector.members[0].reset(1)


def test_a_member_takes_one_call_at_a_time() -> None:
    with VectorEnv(Troubled, 1, options={"work": "wait"}) as vector:
        member = vector.members[0]
        member.reset(0)
        first = member.submit_step("sleep 0.3")
        assert not first.cancel()
        for call in (lambda: member.submit_step("x"), lambda: member.submit_reset(1)):
            with pytest.raises(BadInput, match="member 0 is still at work"):
                call()
        assert first.result().reward == 1
        assert member.step("x").reward == 2


@pytest.mark.parametrize("wrong", [{"count": 0}, {"step_timeout": 0}, {"workers": 0}, {"step_timeout": -1}])
def test_sizes_have_to_be_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="greater than zero"):
        VectorEnv(Troubled, **{"count": 2, **wrong})


def test_bad_names_and_options_are_refused_at_once() -> None:
    with pytest.raises(UnknownName, match="did you mean 'sokoban'"):
        VectorEnv("sokobn", 2)
    with pytest.raises(ConfigError, match="did you mean 'work'"):
        VectorEnv(Troubled, 2, options={"wrok": "inline"})
    with pytest.raises(BadInput, match="takes no options, but got slip"):
        VectorEnv(Awaiting, 2, options={"slip": 1})


class _Lost(Awaiting):
    work = "nowhere"


def test_an_unknown_kind_of_work_is_refused() -> None:
    with pytest.raises(BadInput, match="environment 'awaiting' has work 'nowhere'; use one of inline, process, wait"):
        VectorEnv(_Lost, 1)


@pytest.mark.usefixtures("own_entries")
def test_an_environment_registered_by_user_code_plays_in_processes() -> None:
    """The worker has never heard of the registration: what travels is the class's module and name."""
    register_env("trouble", Troubled)
    with VectorEnv("trouble", 2) as vector:
        texts = [observation.text for observation in vector.reset([1, 2])]  # type: ignore[union-attr]
        assert len({text.rpartition(" ")[2] for text in texts}) == 2
    with VectorEnv("troubled_environments:Troubled", 1) as vector:
        assert "seed 3" in vector.members[0].reset(3).text


@pytest.mark.usefixtures("own_entries")
def test_one_that_a_worker_cannot_import_is_refused_at_once() -> None:
    class Local(Troubled):
        pass

    register_env("local", Local)
    threads = set(threading.enumerate())  # of tests before, some may end meanwhile
    with pytest.raises(BadInput, match=r"environment 'local' cannot be built in another process .* at the top level of a module"):
        VectorEnv("local", 2)
    assert set(threading.enumerate()) <= threads
    with VectorEnv("local", 2, options={"work": "wait"}) as vector:  # no other process, no such need
        assert "seed 1" in vector.members[0].reset(1).text


@pytest.fixture
def closings() -> Iterator[list[int]]:
    Awaiting.closed = 0
    yield [0]
    Awaiting.closed = 0


@pytest.mark.usefixtures("closings")
def test_environments_that_can_be_closed_are() -> None:
    with VectorEnv(Awaiting, 3) as vector:
        vector.reset([1, 2, 3])
    assert Awaiting.closed == 3
    vector.close()
    assert Awaiting.closed == 3


def test_pool_of_quick_environments_is_plain() -> None:
    with make_envs("sokoban", {"boxes": 2}, 3) as pool:
        assert [type(env).__name__ for env in pool.envs] == ["Sokoban"] * 3
        assert len(set(map(id, pool.envs))) == 3
        assert pool.envs[0].options.boxes == 2  # type: ignore[attr-defined]


def test_pool_of_slow_environments_is_a_vector() -> None:
    pool = make_envs("troubled_environments:Troubled", {"work": "process"}, 2, 0.5)
    assert [env.name for env in pool.envs] == ["troubled"] * 2
    pool.envs[0].reset(1)
    with pytest.raises(EnvironmentFailure, match=r"step: timed out after 0.5 s"):
        pool.envs[0].step("loop")
    pool.close()
    with pytest.raises(BadInput, match="closed"):
        pool.envs[1].reset(1)


def test_pool_closes_its_environments() -> None:
    class Closable(Awaiting):
        work = "inline"
        Options = TroubledOptions

        def __init__(self, options: TroubledOptions | None = None) -> None:
            self.left = False

        def close(self) -> None:
            self.left = True

    from tether.envs.remote import WorkerPool

    envs = [Closable(), Closable()]
    with WorkerPool(envs):  # type: ignore[arg-type]
        assert not any(env.left for env in envs)
    assert all(env.left for env in envs)


def test_an_environment_that_names_its_workers_does_not_let_others_time_out(own_entries: None) -> None:
    """Three steps of 0.4 s, one at a time, with 1 s each: the last ends after 1.2 s, but its clock began at 0.8 s."""

    class OneAtATime(Troubled):
        workers = 1

    ENVIRONMENTS.register("one_at_a_time", OneAtATime)
    with make_envs("one_at_a_time", {"work": "wait"}, 3, step_timeout=1.0) as pool:
        members: list[Any] = pool.envs
        for future in [member.submit_reset(1) for member in members]:
            future.result()
        began = time.monotonic()
        assert [future.result().done for future in [member.submit_step("sleep 0.4") for member in members]] == [False] * 3
        assert time.monotonic() - began > 1.1
