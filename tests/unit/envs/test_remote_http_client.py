"""An environment over HTTP is the local one: same observations, pictures, rewards, endings and infos, and the same manners."""

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tether import make_env
from tether.core import http_client
from tether.core.errors import BadInput
from tether.core.protocols import Env, few_shot_of
from tether.core.seeding import derive_seed
from tether.core.types import Observation, Step
from tether.envs.checker.episodes import Answers
from tether.envs.remote.http_client import HttpEnv, HttpEnvError, connect
from tether.envs.remote.http_server import serving


@pytest.fixture(scope="module")
def lake() -> Iterator[str]:
    with serving("frozen_lake", allow="*", slip=0.3) as url:
        yield url


def _sessions(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["sessions"])


def _listed(value: Any) -> Any:
    """Tuples as lists, as the documentation says of infos."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _same_view(here: Observation, there: Observation) -> None:
    assert here.text == there.text
    assert (here.image is None) == (there.image is None)
    if here.image is not None and there.image is not None:
        assert here.image.dtype == there.image.dtype and np.array_equal(here.image, there.image)


def _same_step(here: Step, there: Step) -> None:
    _same_view(here.observation, there.observation)
    assert (repr(here.reward), here.done, here.success) == (repr(there.reward), there.done, there.success)
    assert repr(_listed(here.info)) == repr(there.info)


def _play_both(local: Env, remote: Env, seeds: range) -> int:
    """Play the same answers in both and compare everything; gives the number of steps."""
    steps = 0
    for seed in seeds:
        env_seed = None if seed % 3 == 0 else derive_seed("test", seed)
        instance = derive_seed("instance", seed)
        here, there = local.reset(instance, env_seed=env_seed), remote.reset(instance, env_seed=env_seed)
        _same_view(here, there)
        assert local.instructions == remote.instructions
        assert local.instance == remote.instance  # type: ignore[attr-defined]
        answers = Answers(local, seed)
        done = False
        while not done:
            answer = answers.next(here.text)
            step, step_there = local.step(answer), remote.step(answer)
            _same_step(step, step_there)
            done, here, steps = step.done, step.observation, steps + 1
    return steps


CASES: list[tuple[str, dict[str, Any], int]] = [
    ("frozen_lake", {"slip": 0.5}, 30),
    ("frozen_lake", {"observation": "coordinates", "size": 6}, 15),
    ("frozen_lake", {"observation": "grid_coordinates", "split": "test"}, 15),
    ("frozen_lake", {"observation": "image", "actions_per_turn": 1}, 15),
    ("sokoban", {"observation": "grid_coordinates"}, 25),
    ("sokoban", {"observation": "image", "height": 8, "width": 7, "boxes": 2, "max_turns": 9}, 10),
    ("countdown", {}, 40),
    ("metamathqa", {"attempts": 3}, 6),
    ("qa", {"max_turns": 2}, 10),
    ("searchqa", {}, 8),
    ("webshop", {}, 6),
    ("deepcoder", {}, 3),
]


@pytest.mark.parametrize(("name", "options", "episodes"), CASES, ids=lambda value: str(value) if not isinstance(value, int) else "")
def test_as_the_local_one(name: str, options: dict[str, Any], episodes: int) -> None:
    local = make_env(name, **options)
    with serving(name, allow="*") as url:
        remote = make_env(url, **options)
        assert isinstance(remote, HttpEnv) and isinstance(remote, Env)
        assert (remote.name, remote.max_turns, remote.instructions) == (local.name, local.max_turns, local.instructions)
        assert remote.work == "wait" and remote.reward_range == local.reward_range  # type: ignore[attr-defined]
        assert remote.actions == getattr(local, "actions", ())
        assert remote.options == local.options.model_dump(mode="json", exclude={"retriever_token"})  # type: ignore[attr-defined]
        assert _play_both(local, remote, range(episodes)) >= episodes


def test_examples_as_turns_are_those_of_the_local_one(lake: str) -> None:
    there, here = connect(lake), make_env("frozen_lake", slip=0.3)
    assert there.few_shot == ()
    there.reset(3)
    here.reset(3)
    assert there.few_shot == few_shot_of(here) and len(there.few_shot) == 3
    bare = connect(lake, few_shot=0)
    bare.reset(3)
    assert bare.few_shot == ()


def test_server_options_are_defaults_that_a_client_may_change(lake: str) -> None:
    assert connect(lake).options["slip"] == 0.3
    assert connect(lake, slip=0.1, split="validation").options | {"size": 4} == {
        **connect(lake).options,
        "slip": 0.1,
        "split": "validation",
    }
    _play_both(make_env("frozen_lake", slip=0.3, max_turns=2), connect(lake, max_turns=2), range(5))


def test_sixteen_at_once(lake: str) -> None:
    def play(number: int) -> int:
        return _play_both(make_env("frozen_lake", slip=0.3), connect(lake), range(100 * number, 100 * number + 4))

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(play, range(16))) >= 64


def test_order_of_calls_is_guarded_as_locally(lake: str) -> None:
    for env in (make_env("frozen_lake"), connect(lake)):
        with pytest.raises(BadInput, match=r"frozen_lake: step was called but the episode has not been reset; call reset\(seed\) first"):
            env.step("Up")
        env.reset(0)
        while not env.step("Up").done:
            pass
        with pytest.raises(BadInput, match=r"frozen_lake: step was called but the episode is over; call reset\(seed\) first"):
            env.step("Up")
        with pytest.raises(BadInput, match=r"reset got seed 1\.5; give a whole number"):
            env.reset(1.5)  # type: ignore[arg-type]
        assert env.reset(np.int64(7), env_seed=np.int32(3)).text == env.reset(7, env_seed=3).text  # type: ignore[arg-type]


def test_no_instance_before_the_first_reset(lake: str) -> None:
    with pytest.raises(BadInput, match="no instance before the first reset"):
        _ = connect(lake).instance


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slipp": 0.1}, "unknown frozen_lake option key 'slipp': did you mean 'slip'? (known: "),
        ({"size": 99}, "frozen_lake option key 'size': got 99; it should be less than or equal to 12"),
        ({"slip": float("nan")}, "frozen_lake option key 'slip'"),
        ({"size": {1, 2}}, "option size is a set, which cannot travel"),
        ({"timeout": 0}, "http option 'timeout': got 0; give a number of seconds above 0"),
        ({"timeout": "long"}, "http option 'timeout': got 'long'"),
        ({"token": "two words"}, "the token may only hold"),
    ],
)
def test_wrong_options_are_told_at_once(lake: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        connect(lake, **options)
    assert str(refused.value).startswith(said) and len(str(refused.value).splitlines()) == 1


def test_bad_input_of_a_reset_is_bad_input_here(lake: str) -> None:
    """A lake of two by two with nothing but holes has only a few instances; none is in the test split with these options."""
    options = {"size": 2, "frozen": 0.0, "split": "test"}
    with pytest.raises(BadInput, match="none of 10000 draws gave a test instance") as locally:
        make_env("frozen_lake", **options).reset(0)
    with pytest.raises(BadInput) as refused:
        connect(lake, **options).reset(0)
    assert str(refused.value) == str(locally.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        "http://a b/",
        "http://u:p@host",
        "http://h/?a=1",
        "h",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(BadInput, match="is not the address of an environment server; write it as http://HOST:PORT or https://HOST/PATH"):
        connect(url)


def test_an_unused_environment_leaves_its_session_to_the_next(lake: str) -> None:
    before = _sessions(lake)
    for seed in range(5):
        connect(lake, max_turns=3).reset(seed)
    assert _sessions(lake) == before + 1
    first, second = connect(lake, max_turns=3), connect(lake, max_turns=3)
    first.reset(0)
    second.reset(0)
    assert _sessions(lake) == before + 2
    connect(lake, max_turns=4).reset(0)
    assert _sessions(lake) == before + 3, "a session has the options it was opened with"
    first.close()
    second.close()
    assert _sessions(lake) == before + 1


def test_closing_ends_the_session_and_nothing_else(lake: str) -> None:
    env = connect(lake)
    opening = env.reset(5).text
    env.close()
    env.close()
    with pytest.raises(BadInput, match="has not been reset"):
        env.step("Up")
    assert env.reset(5).text == opening


def test_copies_are_environments_of_their_own(lake: str) -> None:
    env = connect(lake, slip=0.0)
    env.reset(1)
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert twin.options == env.options
        with pytest.raises(BadInput, match="has not been reset"):
            twin.step("Up")
        twin.reset(2)
        twin.step("Up")
    _same_step(env.step("Down"), _after_reset(connect(lake, slip=0.0), 1).step("Down"))


def _after_reset(env: HttpEnv, seed: int) -> HttpEnv:
    env.reset(seed)
    return env


def test_a_forked_child_has_connections_and_sessions_of_its_own(lake: str) -> None:
    """In a process of its own, because this one has threads, which must not be forked. Both sides play at the same time."""
    script = f"""
import os, sys
from tether import make_env
from tether.core import http_client
from tether.envs.remote.http_client import HttpEnvError, connect

def play(seeds):
    local = make_env("frozen_lake", slip=0.3)
    for seed in seeds:
        env = connect({lake!r})  # takes over the session of the one before
        assert env.reset(seed).text == local.reset(seed).text
        done = False
        while not done:
            step = env.step("Up || Left")
            assert step.observation.text == local.step("Up || Left").observation.text
            done = step.done

play(range(3))
env = connect({lake!r}, slip=0.0)
env.reset(3)
child = os.fork()
if child == 0:
    try:
        env.step("Up")
    except HttpEnvError as error:
        assert "forked" in str(error), error
    else:
        os._exit(3)
    play(range(100, 120))
    env.reset(3)
    env.step("Up")
    os._exit(0)
play(range(200, 220))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(env.step("Down").observation.text)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-X", "dev", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    local = make_env("frozen_lake", slip=0.0)
    local.reset(3)
    assert done.stdout.rstrip("\n") == local.step("Down").observation.text


def test_the_end_of_a_process_gives_its_sessions_back_without_a_warning(lake: str) -> None:
    before = _sessions(lake)
    script = f"""
from tether.core import http_client
from tether.envs.remote.http_client import connect
for seed in range(3):
    connect({lake!r}, max_turns=2 + seed).reset(seed)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-X", "dev", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert _sessions(lake) == before


def test_connections_are_shared(lake: str) -> None:
    def client() -> http_client.Connections:
        return http_client._shared_connections(lake)

    assert client() is http_client._shared_connections(f"{lake}/some/prefix")
    found: list[http_client.Connections] = []
    threads = [threading.Thread(target=lambda: found.append(client())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and set(found) == {client()}


def test_error_is_a_tether_error() -> None:
    from tether.core.errors import TetherError

    assert issubclass(HttpEnvError, TetherError) and not issubclass(HttpEnvError, BadInput)
