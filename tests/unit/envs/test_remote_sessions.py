"""Environments that hang, raise, or cannot be built or written down: each ends its own episode, and the server goes on."""

import logging
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from pydantic import Field

from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.http import serving_app
from tether.envs import registry
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.remote.http_client import HttpEnvError, connect
from tether.envs.remote.http_server import Service, check, make_app, serving
from tether.envs.remote.sessions import STUCK_CALLS, SessionLimits


class _MoodyOptions(TurnOptions):
    max_turns: int = 4
    slow_to_build: float = 0.0
    refuses: bool = False
    never_resets: bool = False
    password: str = Field(default="", repr=False)


class Moody(TextEnv[_MoodyOptions]):
    """Does what the answer says: "wait" (for the test), "raise", "exit", "set", or nothing. The reward counts the steps."""

    name = "moody"
    Options = _MoodyOptions
    closed: list[int] = []
    waiting, released = threading.Event(), threading.Event()

    def __init__(self, options: _MoodyOptions | None = None) -> None:
        super().__init__(options or _MoodyOptions())
        self._seed: int | None = None
        time.sleep(self.options.slow_to_build)
        if self.options.refuses:
            raise RuntimeError("no\nand no again")

    @property
    def task(self) -> str:
        return "Be moody."

    def opening(self) -> str:
        return f"seed {self._seed}"

    def generate(self, seed: int) -> None:
        if seed < 0 or self.options.never_resets:
            raise BadInput(f"moody: got seed {seed}; give one from 0 on")
        self._seed, self._steps = seed, 0
        if seed == 666:
            raise LookupError("cursed")

    def take(self, answer: str) -> Outcome:
        self._steps += 1
        if answer == "wait":
            self.waiting.set()
            assert self.released.wait(20)
        elif answer == "raise":
            raise ValueError("in a\nbad mood")
        elif answer == "exit":
            sys.exit("goodbye")
        return Outcome(answer, float(self._steps), info={"set": {1}} if answer == "set" else {})

    def close(self) -> None:
        if self._seed:  # seed 0 is what a server tries before it serves
            self.closed.append(self._seed)
        if self._seed == 13:
            raise RuntimeError("never closes")


class Cursed(Moody):
    """Never begins."""

    def generate(self, seed: int) -> None:
        super().generate(666)


@pytest.fixture(autouse=True)
def _moody(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {**registry.ENVIRONMENTS._entries, "moody": Moody, "cursed": Cursed}
    monkeypatch.setattr(registry.ENVIRONMENTS, "_entries", entries)
    monkeypatch.setattr(Moody, "closed", [])
    monkeypatch.setattr(Moody, "waiting", threading.Event())
    monkeypatch.setattr(Moody, "released", threading.Event())


def _closed(expected: list[int]) -> bool:
    """Whether exactly these seeds have been closed; closing happens on the side."""
    for _ in range(100):
        if sorted(Moody.closed) == expected:
            return True
        time.sleep(0.02)
    return False


def test_a_stuck_step_is_left_behind_and_holds_up_nobody() -> None:
    with serving("moody", allow="*", limits=SessionLimits(step_timeout=1.0)) as url, ThreadPoolExecutor(1) as thread:
        stuck, other = connect(url), connect(url)
        stuck.reset(1)
        other.reset(2)
        step = thread.submit(stuck.step, "wait")
        assert Moody.waiting.wait(10)
        assert other.step("still here").reward == 1.0 and not step.done()
        with pytest.raises(HttpEnvError) as failed:
            step.result()
        assert str(failed.value) == f"{url} answered 504: the environment took longer than 1 s, the server's --step-timeout"
        assert _sessions(url) == 1, "its session is gone"
        with pytest.raises(BadInput, match="has not been reset"):
            stuck.step("x")
        assert stuck.reset(3).text == "Turn 1 of 4.\nseed 3"
        time.sleep(0.1)
        assert Moody.closed == [], "not while its step is running"
        Moody.released.set()
        assert _closed([1]), "once its step came back"
        other.close()
        assert _closed([1, 2])


def test_a_client_that_gave_up_begins_elsewhere() -> None:
    """Its session is still busy with the step that took too long."""
    with serving("moody", allow="*") as url:
        env = connect(url, timeout=1.5)
        env.reset(1)
        with pytest.raises(HttpEnvError, match=r"did not answer within 1\.5 s, the option timeout"):
            env.step("wait")
        assert env.reset(2).text.endswith("seed 2") and _sessions(url) == 2
        Moody.released.set()


def _sessions(url: str) -> int:
    return int(httpx.get(f"{url}/health").json()["sessions"])


def test_building_and_resetting_are_under_the_same_limit() -> None:
    with serving("moody", allow="*", limits=SessionLimits(step_timeout=0.3)) as url:
        with pytest.raises(HttpEnvError, match=r"answered 504: the environment took longer than 0\.3 s"):
            connect(url, slow_to_build=1.0)
        assert _sessions(url) == 0


def test_a_server_that_drains_plays_its_episodes_to_the_end_and_begins_none() -> None:
    app = make_app(Service("moody"))
    draining = app.state.telemetry.draining
    with serving_app(app, "moody") as url, httpx.Client(base_url=url, trust_env=False) as client:
        session = client.post("/v1/sessions", json={"seed": 1}).json()["session"]
        draining.begin()
        assert httpx.get(f"{url}/ready").status_code == 503 and not draining.is_over, "an episode is being played"
        assert client.post("/v1/sessions", json={"seed": 2}).status_code == 503
        steps = [client.post(f"/v1/sessions/{session}/step", json={"turn": turn, "answer": "fine"}).json()["done"] for turn in (1, 2, 3, 4)]
        assert steps == [False, False, False, True]
        assert client.post(f"/v1/sessions/{session}/reset", json={"seed": 3}).status_code == 503 and draining.is_over


def test_a_server_whose_calls_all_hang_is_not_healthy() -> None:
    with serving("moody", allow="*", limits=SessionLimits(step_timeout=0.05)) as url:
        for left in range(STUCK_CALLS, 0, -1):
            assert httpx.get(f"{url}/health").status_code == 200, left
            with pytest.raises(HttpEnvError, match="answered 504"):
                connect(url, slow_to_build=0.2)
        assert f"the last {STUCK_CALLS} calls of the environment ran past" in httpx.get(f"{url}/health").json()["error"]
        assert f"tether_late_calls_total {STUCK_CALLS}.0" in httpx.get(f"{url}/metrics").text
        time.sleep(0.3)  # until their threads are gone
        for _ in range(50):
            if httpx.get(f"{url}/v1/env").is_success:
                break
        assert httpx.get(f"{url}/health").status_code == 200, "one call that ends is enough"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise", "answered 500: ValueError: in a bad mood"),
        ("exit", "answered 500: SystemExit: goodbye"),
        ("set", "answered 500: CodecError: info['set'] is a set, which cannot travel over HTTP; use text"),
    ],
)
def test_what_an_environment_raises_ends_its_episode_only(answer: str, said: str) -> None:
    with serving("moody", allow="*") as url:
        env, other = connect(url), connect(url)
        env.reset(1)
        other.reset(2)
        env.step("fine")
        with pytest.raises(HttpEnvError, match=re.escape(f"{url} {said}")):
            env.step(answer)
        assert _sessions(url) == 1 and _closed([1])
        assert other.step("fine").reward == 1.0
        assert env.reset(5).text.endswith("seed 5") and env.step("fine").reward == 1.0


def test_a_reset_that_raises() -> None:
    with serving("moody", allow="*") as url:
        env = connect(url)
        with pytest.raises(HttpEnvError, match="answered 500: LookupError: cursed"):
            env.reset(666)
        with pytest.raises(BadInput, match=r"^moody: got seed -1; give one from 0 on$"):
            env.reset(-1)
        assert _sessions(url) == 0 and _closed([666])
        env.reset(1)
        path = f"{url}/v1/sessions/{env._session}"
        assert httpx.post(f"{path}/reset", json={"seed": -1}).status_code == 400
        assert httpx.post(f"{path}/step", json={"turn": 1, "answer": "x"}).json()["error"].startswith("the episode of this session is over")
        assert httpx.post(f"{path}/reset", json={"seed": 4}).status_code == 200, "a seed that is refused does not cost the session"
        assert httpx.post(f"{path}/reset", json={"seed": 666}).status_code == 500
        assert httpx.post(f"{path}/reset", json={"seed": 4}).status_code == 404


def test_what_cannot_be_built() -> None:
    with pytest.raises(EnvironmentFailure, match="environment 'moody' cannot be built: RuntimeError: no and no again"):
        check(Service("moody", {"refuses": True}))
    with (
        serving("moody", allow="*") as url,
        pytest.raises(HttpEnvError, match="answered 500: environment 'moody' cannot be built: RuntimeError: no"),
    ):
        connect(url, refuses=True)


def test_what_resets_only_with_other_options_can_be_served() -> None:
    with serving("moody", allow="*", never_resets=True) as url:
        with pytest.raises(BadInput, match="moody: got seed 3"):
            connect(url).reset(3)
        assert connect(url, never_resets=False).reset(3).text.endswith("seed 3")
    with pytest.raises(EnvironmentFailure, match="environment 'cursed' cannot be served: LookupError: cursed"):
        check(Service("cursed"))


def test_secrets_among_the_options_are_not_told() -> None:
    with serving("moody", allow="*", password="hunter2") as url:
        known = {"max_turns": 4, "split": "train", "instructions": "example", "examples": 0, "few_shot": None}
        assert connect(url).options == {**known, "slow_to_build": 0.0, "refuses": False, "never_resets": False}


def test_an_environment_without_an_instance() -> None:
    with serving("moody", allow="*") as url:
        env = connect(url)
        env.reset(0)
        assert env.instance is None
        assert env.step("fine").reward == 1.0


def test_a_failing_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving("moody", allow="*") as url, caplog.at_level(logging.WARNING):
        env = connect(url)
        env.reset(13)
        env.close()
        assert _closed([13])
        time.sleep(0.05)
    assert "closing environment moody: close: RuntimeError: never closes" in caplog.text


def test_stopping_closes_every_environment() -> None:
    with serving("moody", allow="*") as url:
        envs = [connect(url) for _ in range(3)]
        for seed, env in enumerate(envs, start=1):
            env.reset(seed)
    assert _closed([1, 2, 3])


def test_closed_while_a_step_is_running() -> None:
    with serving("moody", allow="*") as url, ThreadPoolExecutor(1) as thread:
        env = connect(url)
        env.reset(1)
        session = env._session
        step = thread.submit(env.step, "wait")
        assert Moody.waiting.wait(10)
        assert httpx.delete(f"{url}/v1/sessions/{session}").status_code == 200
        time.sleep(0.1)
        assert Moody.closed == [] and not step.done(), "not under its feet"
        Moody.released.set()
        assert step.result().reward == 1.0
        assert _closed([1])
