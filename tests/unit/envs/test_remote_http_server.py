"""The HTTP API as another language would use it: raw requests, exact replies, and a clear no to everything wrong."""

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from tether import __version__, make_env
from tether.core.errors import BadInput, UnknownName
from tether.core.http import Refusal, address_of, bind, server_token
from tether.core.images import Image
from tether.envs.remote.http_client import HttpEnvError, connect
from tether.envs.remote.http_server import MAX_BODY, Service, check, make_app, serving
from tether.envs.remote.sessions import SessionLimits, SessionTable


@contextmanager
def _client(name: str = "frozen_lake", **arguments: Any) -> Iterator[httpx.Client]:
    with serving(name, allow="*", **arguments) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    with _client(slip=0.0) as client:
        yield client


def _error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    return str(body["error"])


def _open(api: httpx.Client, seed: int = 0, **fields: Any) -> tuple[str, dict[str, Any]]:
    reply = api.post("/v1/sessions", json={"seed": seed, **fields})
    assert reply.status_code == 200, reply.text
    return f"/v1/sessions/{reply.json()['session']}", reply.json()


def test_health(api: httpx.Client) -> None:
    assert api.get("/health").json()["status"] == "ok"


def test_description(api: httpx.Client) -> None:
    assert api.get("/v1/env").json() == {
        "protocol": 1,
        "version": f"tether {__version__}",
        "name": "frozen_lake",
        "max_turns": 5,
        "instructions": make_env("frozen_lake", slip=0.0).instructions,
        "reward_range": [0.0, 2.0],
        "reply_tags": ["answer"],
        "actions": ["Left", "Down", "Right", "Up"],
        "shows_images": False,
        "options": {
            "max_turns": 5,
            "split": "train",
            "instructions": "example",
            "examples": 0,
            "few_shot": None,
            "observation": "grid",
            "actions_per_turn": 2,
            "lenient": True,
            "tile": 16,
            "style": "flat",
            "colours": "default",
            "size": 4,
            "frozen": 0.9,
            "slip": 0.0,
        },
        "client_options": ["*"],
        "seed_field": "env_seed",
    }
    assert api.get("/v1/env", params={"options": '{"max_turns": 2}'}).json()["max_turns"] == 2


def test_an_episode(api: httpx.Client) -> None:
    """The lake of seed 0: player (0, 1), goal (3, 1)."""
    path, opened = _open(api)
    assert set(opened) == {"session", "instructions", "few_shot", "observation"} and len(opened["session"]) >= 32
    played = make_env("frozen_lake", slip=0.0)
    played.reset(0)
    assert opened["few_shot"] == [list(pair) for pair in played.few_shot]  # type: ignore[attr-defined]
    assert opened["observation"] == {"text": "Turn 1 of 5, 10 actions left.\n_P__\n__O_\n____\n_G__", "image": None}
    assert api.post(f"{path}/step", json={"turn": 1, "answer": "Down || Down"}).json() == {
        "observation": {"text": "Turn 2 of 5, 8 actions left.\n____\n__O_\n_P__\n_G__", "image": None},
        "reward": 0.0,
        "done": False,
        "success": False,
        "info": {"valid": True, "truncated": False, "executed": ["Down", "Down"], "lenient": False, "player": [2, 1], "slips": 0},
    }
    last = api.post(f"{path}/step", json={"turn": 2, "answer": "Down"}).json()
    assert (last["reward"], last["done"], last["success"]) == (1.0, True, True)
    assert api.get(f"{path}/instance").json() == {"instance": "FSFFFFHFFFFFFGFF"}
    again = api.post(f"{path}/reset", json={"seed": 0, "env_seed": 4}).json()
    assert set(again) == {"instructions", "few_shot", "observation"} and again["observation"] == opened["observation"]
    assert api.delete(path).json() == {} == api.delete(path).json()
    assert "no such session" in _error(api.post(f"{path}/reset", json={"seed": 0}), 404)


def test_clients_of_tether_0_1_may_say_luck() -> None:
    """On ice that always slips, the seed of the slips shows after a few steps."""
    with serving("frozen_lake", slip=1.0, size=12, frozen=1.0) as url, httpx.Client(base_url=url) as api:

        def played(**seeds: int) -> list[str]:
            path = f"/v1/sessions/{api.post('/v1/sessions', json={'seed': 0, **seeds}).json()['session']}"
            replies = [api.post(f"{path}/step", json={"turn": turn, "answer": "Down || Right"}).json() for turn in (1, 2, 3)]
            again = api.post(f"{path}/reset", json={"seed": 0, **seeds})
            assert again.status_code == 200
            return [reply["observation"]["text"] for reply in replies]

        assert played(luck=5) == played(env_seed=5) != played(env_seed=6)


def test_pictures_are_png_files(api: httpx.Client) -> None:
    options = {"observation": "image", "tile": 32, "style": "sprites"}
    _, opened = _open(api, options=options)
    image = opened["observation"]["image"]
    assert list(image) == ["png"] and len(image["png"]) < 128 * 128 * 3 // 5
    here = make_env("frozen_lake", **options).reset(0).image
    assert np.array_equal(Image.read(base64.b64decode(image["png"])).pixels, here)
    assert api.get("/v1/env", params={"options": '{"observation": "grid_image"}'}).json()["shows_images"] is True


def test_a_turn_asked_for_twice_is_played_once(api: httpx.Client) -> None:
    path, _ = _open(api)
    first = api.post(f"{path}/step", json={"turn": 1, "answer": "Down"})
    assert api.post(f"{path}/step", json={"turn": 1, "answer": "Down"}).content == first.content
    assert "turn 1 was asked for, but 1 turns" in _error(api.post(f"{path}/step", json={"turn": 1, "answer": "Up"}), 409)
    assert "turn 3 was asked for, but 1 turns" in _error(api.post(f"{path}/step", json={"turn": 3, "answer": "Down"}), 409)
    assert "turn 0 was asked for" in _error(api.post(f"{path}/step", json={"turn": 0, "answer": ""}), 409)
    api.post(f"{path}/step", json={"turn": 2, "answer": "Down"})
    solved = api.post(f"{path}/step", json={"turn": 3, "answer": "Down"})
    assert solved.json()["success"]
    assert api.post(f"{path}/step", json={"turn": 3, "answer": "Down"}).content == solved.content
    assert "is over; reset" in _error(api.post(f"{path}/step", json={"turn": 4, "answer": "Down"}), 409)
    api.post(f"{path}/reset", json={"seed": 0})
    for turn in (0, 3):  # nothing of the episode before can be had again
        assert f"turn {turn} was asked for, but 0 turns" in _error(api.post(f"{path}/step", json={"turn": turn, "answer": "Down"}), 409)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "request key 'seed' is missing; give it a value"),
        ({"seed": "1"}, "request key 'seed': got '1'; it should be a valid integer"),
        ({"seed": True}, "request key 'seed': got True; it should be a valid integer"),
        ({"seed": 1.0}, "request key 'seed': got 1.0"),
        ({"seed": 1, "env_seed": "x"}, "request key 'env_seed': got 'x'"),
        ({"seed": 1, "luck": "x"}, "request key 'luck': got 'x'"),
        ({"seed": 1, "luck": 1, "env_seed": 1}, "request: got both 'env_seed' and its old name 'luck'; give env_seed alone"),
        ({"seed": 1, "options": [1]}, "request key 'options': got [1]; it should be an instance of dict"),
        ({"seed": 1, "option": {}}, "unknown request key 'option': did you mean 'options'?"),
        ({"seed": 1, "options": {"sise": 5}}, "unknown frozen_lake option key 'sise': did you mean 'size'?"),
        ([1], "the body is a list; send a JSON object"),
    ],
)
def test_bad_bodies(api: httpx.Client, body: Any, said: str) -> None:
    assert _error(api.post("/v1/sessions", json=body), 400).startswith(said)


def test_bad_steps(api: httpx.Client) -> None:
    path, _ = _open(api)
    assert "request key 'answer' is missing" in _error(api.post(f"{path}/step", json={"turn": 1}), 400)
    assert "request key 'turn' is missing" in _error(api.post(f"{path}/step", json={"answer": "Up"}), 400)
    assert "no such session" in _error(api.post("/v1/sessions/nonsense/step", json={"turn": 1, "answer": "Up"}), 404)
    assert api.post(f"{path}/step", json={"turn": 1, "answer": "Up"}).status_code == 200, "a bad request changes nothing"


def test_requests_that_are_not_json(api: httpx.Client) -> None:
    header = {"Content-Type": "application/json"}
    assert "the body is not JSON" in _error(api.post("/v1/sessions", content=b"{", headers=header), 400)
    assert "nested too deeply" in _error(api.post("/v1/sessions", content=b"[" * 100_000, headers=header), 400)
    assert "declared as 'text/plain'" in _error(api.post("/v1/sessions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    assert "declared as ''" in _error(api.post("/v1/sessions", content=b"{}"), 415)
    long = b'{"seed": 1, "x": "' + b"x" * MAX_BODY + b'"}'
    assert f"longer than {MAX_BODY} bytes" in _error(api.post("/v1/sessions", content=long, headers=header), 413)
    chunked = (b"x" * 2**20 for _ in range(6))
    assert "longer than" in _error(api.post("/v1/sessions", content=chunked, headers=header), 413)
    assert "the query's options is not JSON" in _error(api.get("/v1/env", params={"options": "{"}), 400)
    assert "the query's options is a list" in _error(api.get("/v1/env", params={"options": "[]"}), 400)


def test_unknown_paths_and_methods(api: httpx.Client) -> None:
    assert _error(api.get("/v2/env"), 404) == "Not Found"
    assert _error(api.put("/v1/env"), 405) == "Method Not Allowed"
    assert _error(api.get("/docs"), 404) == "Not Found"


def test_web_pages_cannot_use_a_server_without_a_token(api: httpx.Client) -> None:
    """A page whose name was made to point to this machine would send its own name as the host."""
    assert "only answers to the names of this machine, not to 'evil.example'" in _error(
        api.get("/v1/env", headers={"Host": "evil.example"}), 403
    )
    for host in ("localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert api.get("/v1/env", headers={"Host": host}).status_code == 200
    assert _error(api.get("/v1/env", headers={"Host": ""}), 403)


def test_token() -> None:
    with _client(token="s3cret") as api:
        assert api.get("/health").status_code == 200
        for value in ("", "s3cret", "Bearer", "Bearer s3cre", "Bearer s3cret2", "bearer s3cret", "Basic s3cret"):
            assert "wants its token" in _error(api.get("/v1/env", headers={"Authorization": value} if value else {}), 401)
        assert "wants its token" in _error(api.post("/v1/sessions", json={"seed": 1}), 401)
        right = {"Authorization": "Bearer s3cret", "Host": "any.name"}
        assert api.get("/v1/env", headers=right).status_code == 200


def test_client_brings_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHER_TOKEN", raising=False)
    with serving("frozen_lake", token="s3cret") as url:
        for token in (None, "wrong"):
            with pytest.raises(
                BadInput, match=r"refused: this server wants its token.*; give the server's token as option token or in TETHER_TOKEN"
            ):
                connect(url, token=token)
        assert connect(url, token="s3cret").reset(0).text
        monkeypatch.setenv("TETHER_TOKEN", "s3cret")
        assert make_env(url).reset(0).text


@contextmanager
def _running(app: Any) -> Iterator[str]:
    listener = bind("localhost", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_options_are_locked_unless_allowed() -> None:
    with _running(make_app(Service("frozen_lake", {"size": 6}))) as url, httpx.Client(base_url=url) as api:
        assert api.get("/v1/env").json()["client_options"] == ["split"]
        locked = api.post("/v1/sessions", json={"seed": 1, "options": {"size": 4}})
        assert _error(locked, 400) == (
            "option 'size' is locked by the server; clients may choose: split (tether serve-env --allow-option size would allow it)"
        )
        assert "option 'slip' is locked" in _error(api.get("/v1/env", params={"options": '{"slip": 1}'}), 400)
        assert api.get("/v1/env", params={"options": '{"split": "test"}'}).json()["options"]["size"] == 6
        with pytest.raises(BadInput, match="option 'slip' is locked"):
            connect(url, slip=0.0)


def test_what_the_server_allows_may_be_chosen_and_nothing_else() -> None:
    with serving("frozen_lake", size=6, allow=("slip",)) as url:
        assert connect(url, slip=0.5).options["slip"] == 0.5  # type: ignore[index]
        with pytest.raises(BadInput, match="option 'size' is locked by the server; clients may choose: slip"):
            connect(url, size=4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepcoder", {"isolation": "process"}),
        ("deepcoder", {"data": "/etc/passwd"}),
        ("sokoban", {"levels": "/etc/passwd"}),
        ("frozen_lake", {"instructions": "/etc/passwd"}),
        ("searchqa", {"retriever": "http://127.0.0.1:9"}),
    ],
)
def test_clients_can_neither_weaken_a_sandbox_nor_name_files_or_addresses(name: str, options: dict[str, Any]) -> None:
    service = Service(name)
    with pytest.raises(BadInput, match="is locked by the server"):
        service.build(options)
    with pytest.raises(BadInput, match="is locked by the server"):
        service.describe(options)


def test_a_client_that_may_name_an_address_gets_no_secret_of_the_server_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_TOKEN", "of-this-server")
    own = {"retriever": "http://127.0.0.1:1", "retriever_token": "of-the-retriever"}
    service = Service("searchqa", own, allowed=frozenset({"retriever", "top_k"}))

    def token(**wanted: Any) -> str | None:
        env: Any = service.build(wanted)
        env._load()
        return env._retriever.token

    assert token() == token(top_k=3) == "of-the-retriever"
    assert token(retriever="http://127.0.0.1:2") is None
    assert Service("searchqa", own).build({}).options.retriever_token == "of-the-retriever"  # type: ignore[attr-defined]


def test_a_full_server_drops_ended_episodes_first_and_then_refuses() -> None:
    with _client(limits=SessionLimits(max_sessions=2), max_turns=1) as api:
        first, _ = _open(api)
        second, _ = _open(api)
        full = api.post("/v1/sessions", json={"seed": 0})
        assert _error(full, 429) == "all 2 sessions of the server are being played; try later, or raise --max-sessions"
        assert full.headers["retry-after"] == "1"
        assert api.post(f"{second}/step", json={"turn": 1, "answer": "Up"}).json()["done"]
        third, _ = _open(api)
        assert api.get("/health").json()["sessions"] == 2
        assert "no such session" in _error(api.post(f"{second}/reset", json={"seed": 0}), 404)
        assert api.post(f"{first}/step", json={"turn": 1, "answer": "Up"}).json()["done"]
        assert api.post(f"{third}/step", json={"turn": 1, "answer": "Up"}).json()["done"]
        _open(api)
        assert "no such session" in _error(api.post(f"{first}/reset", json={"seed": 0}), 404), "the one that ended longest ago goes"


def test_client_of_a_full_server_says_so_when_the_time_is_up() -> None:
    with serving("frozen_lake", limits=SessionLimits(max_sessions=1)) as url:
        player = connect(url)
        player.reset(0)
        began = time.monotonic()
        with pytest.raises(HttpEnvError, match="answered 429: all 1 sessions of the server are being played"):
            connect(url, timeout=1.0).reset(0)
        assert 0.9 < time.monotonic() - began < 10


def test_idle_sessions_are_dropped_and_a_new_episode_opens_another() -> None:
    with _client(limits=SessionLimits(idle_timeout=0.3)) as api:
        idle, resting = connect(str(api.base_url)), connect(str(api.base_url))
        idle.reset(0)
        resting.reset(0)
        time.sleep(0.8)
        assert api.get("/health").json()["sessions"] == 0, "dropped without anybody asking"
        with pytest.raises(HttpEnvError, match=r"the server lost the episode: .* dropped for being idle"):
            idle.step("Up")
        with pytest.raises(BadInput, match="has not been reset"):
            idle.step("Up")
        assert idle.reset(0).text == resting.reset(0).text == make_env("frozen_lake").reset(0).text


def test_every_request_keeps_a_session_alive() -> None:
    now = 0.0
    table = SessionTable(SessionLimits(idle_timeout=10), clock=lambda: now)

    async def play() -> list[int]:
        nonlocal now
        sizes = []
        used, unused = [json.loads(await table.open(lambda: make_env("frozen_lake"), 0, None))["session"] for _ in range(2)]
        for request in (table.step(used, 1, "Up"), table.instance(used), table.reset(used, 1, None)):
            now += 8
            await request
            table.drop_idle()
            sizes.append(len(table))
        with pytest.raises(Refusal, match="no such session"):
            await table.instance(unused)
        now += 10.5
        await table.open(lambda: make_env("frozen_lake"), 0, None)
        return [*sizes, len(table)]

    assert asyncio.run(play()) == [2, 1, 1, 1], "opening a session drops idle ones too"


def test_behind_a_prefix() -> None:
    """As behind a proxy that serves several environments under one name."""
    with _running(Starlette(routes=[Mount("/envs/lake", make_app(Service("frozen_lake")))])) as base:
        url = f"{base}/envs/lake"
        for written in (url, f"{url}/"):
            env = make_env(written)
            assert env.reset(0).text == make_env("frozen_lake").reset(0).text and env.step("Up").info["valid"]
        with pytest.raises(HttpEnvError, match="answered 404; no environment is served at this address, check its path"):
            make_env(f"{url}x")


def test_hosts_that_others_can_reach_need_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert server_token(None, host) is None and server_token("", host) is None
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(BadInput, match="so clients need a token; set TETHER_TOKEN or --token"):
            server_token(None, host)
        assert server_token("s3cret", host) == "s3cret"
    with pytest.raises(BadInput, match="without spaces"):
        server_token("two words", "localhost")


def test_ports_and_hosts() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            BadInput, match=rf"cannot serve on port {port} of '127\.0\.0\.1': Address already in use; choose another --port"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(BadInput, match="host 'no such host' is not an address of this machine"):
        bind("no such host", 0)
    with bind("0.0.0.0", 0) as listener:
        assert address_of(listener) == f"http://{socket.gethostname()}:{listener.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6() -> None:
    try:
        listener = bind("::1", 0)
    except BadInput:
        pytest.skip("this machine's IPv6 is switched off")
    with listener:
        assert address_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_what_cannot_be_served_is_found_before_anything_listens() -> None:
    with pytest.raises(UnknownName, match="did you mean 'frozen_lake'"):
        check(Service("frozenlake"))
    with pytest.raises(BadInput, match="unknown frozen_lake option key 'sise'"), serving("frozen_lake", sise=3):
        pass
