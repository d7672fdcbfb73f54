"""Between client and server: replies that get lost, servers that die, hang, drip or talk nonsense. One clear error each, never a wrong step."""

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tether import make_env
from tether.core.errors import BadInput
from tether.core.types import Observation, Step
from tether.envs.remote.http_client import HttpEnv, HttpEnvError, connect
from tether.envs.remote.http_server import serving

sys.path.append(str(Path(__file__).parents[1]))
from hostile_images import BOMB


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.core.http_client.STRANGER_SECONDS", 0.8)


def _message(connection: socket.socket) -> bytes:
    """One request or reply, head and body; nothing once the other side has closed."""
    data = b""
    while not (head := re.match(rb"(?s)(.*?)\r\n\r\n", data)):
        if not (more := connection.recv(65536)):
            return b""
        data += more
    length = re.search(rb"(?i)content-length: (\d+)", head.group())
    while len(data) < head.end() + (int(length.group(1)) if length else 0):
        data += connection.recv(65536)
    return data


class _Line:
    """A line between client and server that can lose a reply: the request arrives, the answer does not."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose_next: bytes | None = None
        self.lost = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._target) as far:
            while request := _message(near):
                far.sendall(request)
                reply = _message(far)
                if self.lose_next is not None and self.lose_next in request:
                    self.lose_next, self.lost = None, self.lost + 1
                    return
                near.sendall(reply)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def test_a_step_whose_reply_was_lost_is_not_played_twice() -> None:
    with serving("frozen_lake", allow="*", slip=0.5) as url:
        line = _Line(url)
        try:
            env, local = connect(line.url), make_env("frozen_lake", slip=0.5)
            env.reset(3, env_seed=1)
            local.reset(3, env_seed=1)
            for turn, answer in enumerate(("Up || Left", "Left", "Up"), start=1):
                line.lose_next = b"/step"
                step, expected = env.step(answer), local.step(answer)
                assert line.lost == turn
                assert (step.observation.text, step.info["slips"]) == (expected.observation.text, expected.info["slips"])
            line.lose_next = b"/reset"
            assert env.reset(4).text == local.reset(4).text and line.lost == 4
            assert httpx.get(f"{url}/health").json()["sessions"] == 1
        finally:
            line.close()


def test_a_server_killed_in_the_middle_of_an_episode() -> None:
    code = "from tether.cli.serve_env import serve_env; serve_env('frozen_lake', port=0)"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.findall(r"http://[\d.:]+", server.stdout.readline())[0]
        env = connect(url, timeout=2)
        env.reset(0)
        assert not env.step("Up").done
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        for call in (lambda: env.step("Up"), lambda: env.reset(0), lambda: connect(url, split="test", timeout=2)):
            began = time.monotonic()
            with pytest.raises(HttpEnvError, match=rf"^nothing answers at {re.escape(url)} \(.*\); start it with `tether serve-env NAME`"):
                call()
            assert time.monotonic() - began < 10
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


@contextmanager
def _answering(reply: Callable[[str, str], tuple[int, bytes, dict[str, str]]], bodies: list[Any] | None = None) -> Iterator[str]:
    """A server that answers whatever `reply` makes of method and path; the JSON it was sent is put into `bodies`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if sent and bodies is not None:
                bodies.append(json.loads(sent))
            status, body, headers = reply(self.command, self.path.partition("?")[0])
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


LAKE = {"protocol": 1, "name": "lake", "max_turns": 3}
OPENED = {"session": "s", "instructions": "i", "observation": {"text": "t"}}


def _json(value: Any, status: int = 200, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    return status, value if isinstance(value, bytes) else json.dumps(value).encode(), headers


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (_json(b"<html>hello</html>"), "does not answer as an environment server does: the reply is not JSON"),
        (_json(b""), "the reply is not JSON"),
        (_json([1, 2]), "the reply is a list"),
        (_json({}), "speaks version None of the protocol (None), this client version 1"),
        (_json({**LAKE, "protocol": 2, "version": "tether 9"}), "speaks version 2 of the protocol (tether 9), this client version 1"),
        (_json({**LAKE, "name": 5}), "has no usable 'name'"),
        (_json({**LAKE, "max_turns": 0}), "has no usable 'max_turns'"),
        (_json({**LAKE, "max_turns": "3"}), "has no usable 'max_turns'"),
        (_json({**LAKE, "instructions": 1}), "has no usable 'instructions'"),
        (_json({**LAKE, "options": []}), "has no usable 'options'"),
        (_json({**LAKE, "reward_range": [1]}), "has no usable 'reward_range'"),
        (_json({**LAKE, "reward_range": ["a", "b"]}), "has no usable 'reward_range'"),
        (_json({**LAKE, "reply_tags": []}), "has no usable 'reply_tags'"),
        (_json({**LAKE, "actions": [1]}), "has no usable 'actions'"),
        (_json({**LAKE, "seed_field": "chance"}), "has no usable 'seed_field'"),
        (_json(b"not gzip", **{"Content-Encoding": "gzip"}), "cannot be asked"),
        (_json(b"", 301, Location="http://elsewhere/"), "answered 301"),
        (_json(b"oops", 500), "answered 500"),
        (_json(b"oops", 400), "answered 400"),
        (_json({"error": 5}, 418), "answered 418"),
        (_json({"error": "down for repairs"}, 503), "answered 503: down for repairs"),
    ],
)
def test_descriptions_that_are_none(reply: tuple[int, bytes, dict[str, str]], said: str) -> None:
    with _answering(lambda method, path: reply) as url, pytest.raises(HttpEnvError) as failed:
        connect(url)
    assert said in str(failed.value) and str(failed.value).startswith(url) and len(str(failed.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("opened", "stepped", "said"),
    [
        (_json([]), _json({}), "the reply is a list"),
        (_json({"session": 5}), _json({}), "has no session and instructions"),
        (_json({**OPENED, "observation": {}}), _json({}), "has no observation with a text"),
        (_json(OPENED), _json(b"garbage"), "is not JSON"),
        (_json(OPENED), _json({"reward": 1}), "has no observation"),
        (_json(OPENED), _json({"observation": {"text": "t"}, "reward": "much", "done": True, "success": True}), "has the reward 'much'"),
        (_json({**OPENED, "observation": {"text": "t", "image": {"png": "AAAA"}}}), _json({}), "its picture cannot be read as an image"),
        (_json(OPENED), _json({"observation": {"text": "t", "image": {"png": b64encode(BOMB).decode()}}}), "has 20000 x 4000 pixels"),
        (_json(OPENED), _json(b"", 404), "the server lost the episode"),
        (_json(OPENED), _json({"error": "asleep"}, 504), "answered 504: asleep"),
        (_json(OPENED), _json({"error": "turn 9"}, 409), "answered 409: turn 9"),
    ],
)
def test_episodes_that_are_none(opened: Any, stepped: Any, said: str) -> None:
    def reply(method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        return _json(LAKE) if path == "/v1/env" else stepped if path.endswith("/step") else opened

    with _answering(reply) as url:
        env = connect(url)
        with pytest.raises(HttpEnvError, match=re.escape(said)):
            _one_turn(env)
        with pytest.raises(BadInput, match="lake: step was called but the episode has not been reset"):
            env.step("x")


def _one_turn(env: HttpEnv) -> Step:
    env.reset(0)
    return env.step("x")


def test_the_tersest_server_that_will_do() -> None:
    """What docs/environments/http.md asks of a server in another language, and not a field more."""
    step = {"observation": {"text": "u"}, "reward": 1, "done": True, "success": True}

    def reply(method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        return _json({"/v1/env": LAKE, "/v1/sessions": {"session": "s", "observation": {"text": "t"}}}.get(path, step))

    with _answering(reply) as url:
        env = connect(url)
        assert (env.name, env.max_turns, env.reward_range, env.options) == ("lake", 3, (float("-inf"), float("inf")), {})
        assert (env.reply_tags, env.actions, env.instructions) == (("answer",), (), "")
        assert env.reset(2**63 - 1) == Observation("t")
        assert env.step("x") == Step(Observation("u"), 1.0, True, True, {})


@pytest.mark.parametrize(
    ("described", "field"), [({}, "luck"), ({"version": "tether 0.1.0"}, "luck"), ({"seed_field": "env_seed"}, "env_seed")]
)
def test_the_server_says_what_it_calls_env_seed(described: dict[str, Any], field: str) -> None:
    """A server of tether 0.1 knows `luck` alone and refuses any other field, so the client sends the name that the server knows."""
    bodies: list[Any] = []
    with _answering(lambda method, path: _json({**LAKE, **described} if path == "/v1/env" else OPENED), bodies) as url:
        env = connect(url)
        env.reset(1, env_seed=7)
        env.reset(2)
    assert bodies == [{"seed": 1, field: 7, "options": {}}, {"seed": 2, field: None}]


def test_a_description_is_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reply(method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        asked.append(path)
        return _json({**LAKE, "name": f"lake {len(asked)}"})

    with _answering(reply) as url:
        assert {connect(url).name for _ in range(20)} == {"lake 1"}
        assert connect(url, size=5).name == "lake 2", "other options, another description"
        monkeypatch.setattr("tether.envs.remote.http_client.DESCRIPTION_LIFE", 0.0)
        assert connect(url).name == "lake 3"


def test_another_version_of_tether_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with _answering(lambda method, path: _json({**LAKE, "version": "tether 0.0.1"})) as url:
        connect(url)
    assert "runs tether 0.0.1, this is tether" in caplog.text
    caplog.clear()
    with _answering(lambda method, path: _json({**LAKE, "version": "lakes 3 in Fortran"})) as url:
        connect(url)
    assert caplog.text == "", "another program has other versions"


def test_servers_that_say_later_are_asked_again() -> None:
    seen: list[int] = []

    def reply(method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        seen.append(len(seen))
        return _json(b"", [502, 503, 429, 200][seen[-1]]) if len(seen) < 4 else _json(LAKE)

    with _answering(reply) as url:
        assert connect(url).name == "lake"
    assert len(seen) == 4


@pytest.mark.parametrize("drip", [False, True])
def test_slow_servers(drip: bool) -> None:
    """One that never answers, and one that never stops."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if drip:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(15):
                    time.sleep(0.1)
                    try:
                        connection.sendall(b" " if drip else b"")
                    except OSError:
                        return

        thread = threading.Thread(target=answer)
        thread.start()
        began = time.monotonic()
        with pytest.raises(HttpEnvError, match=rf"^{re.escape(url)} did not answer within 0\.4 s, the option timeout$"):
            connect(url, timeout=0.4)
        assert time.monotonic() - began < 1.3
        thread.join()


def test_endless_replies_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.envs.remote.http_client.MAX_REPLY", 1000)
    with (
        _answering(lambda method, path: _json(b" " * 2000)) as url,
        pytest.raises(HttpEnvError, match="answered more than 1000 bytes"),
    ):
        connect(url)


def test_something_that_is_no_http_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HttpEnvError, match=r"^nothing answers at http://127\.0\.0\.1:\d+ \(.+\); start it with"):
            connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
