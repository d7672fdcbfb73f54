"""Environment and retrieval servers that go away and come back while episodes are played: waited for, played again with the same seeds, said."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tether.core import http_client
from tether.core.http import address_of, bind, make_server
from tether.core.http_client import close_connections, note_answer, note_silence, take_outages
from tether.core.protocols import Sampling
from tether.envs.remote.http_client import HttpEnvError, connect
from tether.envs.remote.http_server import Service, make_app
from tether.envs.searchqa.client import RemoteRetriever
from tether.envs.searchqa.corpus import Document, of_documents
from tether.envs.searchqa.index import open_index
from tether.envs.searchqa.server import create_app
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.rollout.engines.scripted import ScriptedEngine
from tether.rollout.engines.server import ServerEngine, ServerOptions
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, error_note, play_plan, training_plan
from tether.rollout.serving.app import make_app as serve
from tether.rollout.serving.served import ServedModel

SECONDS_AWAY = 1.5


class Restartable:
    """A server that can be stopped and started again at its address."""

    def __init__(self, app: Any) -> None:
        self._make, self._port = app, 0
        self.start()

    def start(self) -> None:
        self._listener = bind("127.0.0.1", self._port)
        self.url = address_of(self._listener)
        self._port = int(self.url.rpartition(":")[2])
        self._server = make_server(self._make())
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def away(self) -> threading.Thread:
        """Stop now, and come back in a moment."""
        self.stop()
        thread = threading.Thread(target=lambda: (time.sleep(SECONDS_AWAY), self.start()))
        thread.start()
        return thread


@contextmanager
def _restartable(app: Any) -> Iterator[Restartable]:
    server = Restartable(app)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def _said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "SAID_AFTER", 0.2)
    monkeypatch.setattr(http_client, "LONGEST_DELAY", 0.4)
    take_outages()


def test_an_environment_server_that_restarts_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with _restartable(lambda: make_app(Service("frozen_lake"))) as server, caplog.at_level(logging.WARNING):
        env = connect(server.url, timeout=20)
        first = env.reset(3)
        back = server.away()
        with pytest.raises(HttpEnvError, match="the server lost the episode"):  # it answers again, and knows nothing of the episode
            env.step("Up")
        back.join()
        assert env.reset(3).text == first.text
        said = [record.message for record in caplog.records if record.name == "tether.core.http_client"]
        assert (
            len(said) == 2
            and "does not answer (no connection); trying again for up to 20 s" in said[0]
            and "answers again, after" in said[1]
        )
        assert take_outages() == [server.url] and take_outages() == []


def test_a_sampling_server_that_restarts_is_waited_for(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    with _restartable(lambda: serve(ServedModel("tiny", tiny, max_rows=4))) as server, caplog.at_level(logging.WARNING):
        engine = ServerEngine([server.url], Policy(*tiny), max_rows=4, max_context=900, options=ServerOptions(patience=60))
        engine.sync()
        back = server.away()
        assert engine.sync()["probe_difference"] < 1e-5
        back.join()
        said = [record.message for record in caplog.records if record.name == "tether.rollout.engines.server"]
        assert re.fullmatch(rf"the server at {server.url} is left out \(ConnectError: .*\); waiting for up to 60 s", said[0]), said
        assert len(said) == 2 and re.fullmatch(rf"the server at {server.url} is used again, after \d+\.\d s", said[1])
        assert engine.take_notes() == said and engine.take_notes() == []


def test_a_server_that_stays_away_fails_at_its_time_out() -> None:
    with _restartable(lambda: make_app(Service("frozen_lake"))) as server:
        env = connect(server.url, timeout=1.0)
        env.reset(0)
        server.stop()
        begun = time.monotonic()
        with pytest.raises(HttpEnvError, match="nothing answers at"):
            env.step("Up")
        assert 0.8 < time.monotonic() - begun < 4
        server.start()


def test_a_wrong_address_is_said_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(HttpEnvError, match="nothing answers at"):
        connect("http://127.0.0.1:9", timeout=60)
    assert time.monotonic() - begun < 5


def test_a_retrieval_server_that_restarts_is_waited_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    index = open_index(of_documents([Document("a", "Long Bridge", "It spans the river.")]))
    with _restartable(lambda: create_app(index)) as server:
        retriever = RemoteRetriever(server.url, timeout=20)
        found = retriever.search("bridge", 1)
        back = server.away()
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: retriever.search("bridge", 1), range(4))) == [found] * 4
        back.join()
        close_connections()


def test_its_episodes_are_played_again_with_the_same_seeds(tiny: Any) -> None:
    chat = ChatFormat(tiny.tokenizer)
    plan = training_plan(0, 1, 2, 2)
    rules = EpisodeRules(max_context=2048, max_tokens=64, format_penalty=-0.1)
    sampling = Sampling(max_tokens=64)

    def play(name: str, options: dict[str, Any], on_turn: Any = lambda: None) -> Any:
        def answer(*_: Any) -> str:
            on_turn()
            return " </think> <answer> Down </answer>"

        with EnvPool([EnvSpec(name, options, step_timeout=30)]) as pool:
            return play_plan(pool, plan, ScriptedEngine(answer, tiny.tokenizer), chat, sampling, rules)

    expected = play("frozen_lake", {})
    with _restartable(lambda: make_app(Service("frozen_lake"))) as server:
        turns, back = [], []

        def go_away_once() -> None:
            turns.append(1)
            if len(turns) == 6:
                back.append(server.away())

        groups = play(server.url, {"timeout": 20}, go_away_once)
        back[0].join()
    retried = [trajectory.retries for group in groups for trajectory in group.trajectories]
    assert len(retried) == 4 and any(retried) and "succeeded when played again" in (error_note(groups) or "")
    told = [
        [[turn.observation for turn in trajectory.turns] for group in found for trajectory in group.trajectories]
        for found in (groups, expected)
    ]
    assert told[0] == told[1]


def test_a_single_broken_connection_is_no_outage(caplog: pytest.LogCaptureFixture) -> None:
    note_silence("http://here", "no connection", 60)
    note_answer("http://here")
    assert caplog.text == "" and take_outages() == []
