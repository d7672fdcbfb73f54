"""`tether serve-env` as a person meets it: the lines it prints, how it is used and stopped, and one line for each mistake."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tether import make_env
from tether.cli.serve_env import EXAMPLES, serve_env
from tether.core.errors import BadInput, UnknownName
from tether.envs.remote.http_client import HttpEnvError

app = typer.Typer(rich_markup_mode=None)
app.command(epilog=EXAMPLES)(serve_env)
COMMAND = "import typer; from tether.cli.serve_env import serve_env; app = typer.Typer(); app.command()(serve_env); app()"


@contextmanager
def _started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command in a process of its own, and the first lines it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, [process.stdout.readline().rstrip("\n") for _ in range(2)]
        finally:
            process.kill()


def test_says_where_it_is_and_how_to_use_it_and_stops_at_once() -> None:
    with _started("frozen_lake", "--set", "slip=0", "--set", "max_turns=3") as (process, (first, second)):
        found = re.fullmatch(r"Serving frozen_lake at (http://127\.0\.0\.1:\d+) \(Ctrl-C stops\)\.", first)
        assert found, first
        url = found.group(1)
        assert second == f'Use it as make_env("{url}") or: tether train {url}'
        env = make_env(url)
        assert env.max_turns == 3 and env.reset(0).text == make_env("frozen_lake", slip=0, max_turns=3).reset(0).text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "Stopped.\n", "")


def test_token_from_the_environment() -> None:
    with _started("sokoban", "--host", "0.0.0.0", "--lock-options", TETHER_TOKEN="s3cret") as (process, (first, _)):
        assert first.endswith("(Ctrl-C stops), token required.")
        assert process.stdout is not None
        assert process.stdout.readline() == "Clients read the token from TETHER_TOKEN or from the option token.\n"
        port = re.findall(r":(\d+) ", first)[0]
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(BadInput, match="wants its token"):
            make_env(url)
        assert make_env(url, token="s3cret", split="test").reset(0).text == make_env("sokoban", split="test").reset(0).text
        with pytest.raises(BadInput, match="option 'boxes' is locked by the server"):
            make_env(url, token="s3cret", boxes=2)


def test_sigterm_stops_it_in_the_middle_of_requests() -> None:
    with _started("frozen_lake", "--grace", "0.5") as (process, (first, _)):  # the session below stays open
        url = re.findall(r"http://[\d.:]+", first)[0]
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half, socket.create_connection((host, int(port))) as silent:
            half.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{")
            make_env(url).reset(0)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=20)
            assert (process.returncode, out, err) == (143, "Stopped.\n", "") and silent.recv(1) == b""


def test_the_environment_never_sees_the_token_of_the_server() -> None:
    with _started("sokoban", "--allow-option", "boxes", TETHER_TOKEN="s3cret") as (_, (first, _)):
        url = re.findall(r"http://[\d.:]+", first)[0]
        assert make_env(url, token="s3cret", boxes=2).options["boxes"] == 2  # type: ignore[attr-defined]
        with pytest.raises(BadInput, match="option 'levels' is locked by the server"):
            make_env(url, token="s3cret", levels="/etc/passwd")
    assert "TETHER_TOKEN" not in _environment_of_the_served()


def _environment_of_the_served() -> set[str]:
    """The variables that an environment sees when it is built by `tether serve-env`."""
    code = (
        "import os, sys\n"
        "from tether.envs.remote import http_server\n"
        "http_server.run = lambda service, listener: print(*sorted(os.environ))\n"
        f"{COMMAND}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "sokoban", "--port", "0"], env={**os.environ, "TETHER_TOKEN": "s3cret"}, capture_output=True, text=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_limits_reach_the_server() -> None:
    with _started("frozen_lake", "--idle-timeout", "0.3", "--step-timeout", "50") as (_, (first, _)):
        env = make_env(re.findall(r"http://[\d.:]+", first)[0])
        env.reset(0)
        time.sleep(1)
        with pytest.raises(HttpEnvError, match="the server lost the episode"):
            env.step("Up")


def _refused(arguments: list[str], kind: type[BadInput]) -> str:
    with pytest.raises(kind) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False, env={"TETHER_TOKEN": ""})
    assert len(str(refused.value).splitlines()) == 1 and refused.value.exit_code == 2
    return str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["frozenlake"], UnknownName, "unknown environment 'frozenlake': did you mean 'frozen_lake'?"),
        (["sokoban", "--set", "boxs=2"], BadInput, "unknown sokoban option key 'boxs': did you mean 'boxes'?"),
        (["sokoban", "--set", "boxes"], BadInput, "write it as key=value"),
        (["sokoban", "--host", "0.0.0.0"], BadInput, "host '0.0.0.0' can be reached from other machines, so clients need a token"),
        (["sokoban", "--token", "two words"], BadInput, "the token may only hold"),
        (["sokoban", "--host", "no such host", "--token", "t"], BadInput, "host 'no such host' is not an address of this machine"),
    ],
)
def test_mistakes(arguments: list[str], kind: type[BadInput], said: str) -> None:
    assert said in _refused(arguments, kind)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = _refused(["sokoban", "--port", str(port)], BadInput)
    assert (
        said == f"cannot serve on port {port} of '127.0.0.1': Address already in use; choose another --port (0 takes a free one) or --host"
    )


@pytest.mark.parametrize("arguments", [["--port", "70000"], ["--max-sessions", "0"], ["--step-timeout", "0"], ["--idle-timeout", "-1"]])
def test_numbers_out_of_range(arguments: list[str]) -> None:
    result: Any = CliRunner().invoke(app, ["sokoban", *arguments])
    assert result.exit_code == 2


def test_help_ends_with_examples() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    assert "tether serve-env sokoban" in output and "--allow-option" in output
