"""Sessions that programs open themselves: from Python, and over HTTP at a real `tether gateway`."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import tether
from tether.cli.main import main
from tether.core.enums import StopReason

SMALL: dict[str, Any] = {"rollout": {"max_tokens": 12, "max_context": 400}, "model": {"device": "cpu"}}


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def post(url: str, status: int = 200, **body: Any) -> Any:
    reply = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_sessions_of_a_driver(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tether.gateway("tiny", out=tmp_path / "run", agent={"timeout": 0.5, "max_calls": 2}, **SMALL) as gateway:
        first = gateway.open({"id": "a", "question": "1 + 1"})
        messages: list[Any] = [say("1 + 1")]
        reply = post(f"{first.base_url}/chat/completions", messages=messages, temperature=0.2)["choices"][0]["message"]
        refused = post(
            f"{first.base_url}/chat/completions", 400, messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )
        assert "in no format that is known here; name one as agent.tool_format" in refused["error"]["message"]
        with pytest.raises(tether.BadInput, match="the session is not finished"):
            _ = first.trajectory
        messages += [reply, say("and?")]
        post(f"{first.base_url}/chat/completions", messages=messages)
        post(f"{first.base_url}/chat/completions", 400, messages=[*messages, say("more")])
        for bad, line in ((None, "finish got None; give a number"), (float("nan"), "give a finite number"), ("1", "finish got '1'")):
            with pytest.raises(tether.BadInput, match=line):
                first.finish(reward=bad)
        trajectory = first.finish(reward=0.5, measures={"steps": 2})
        assert trajectory is first.trajectory and (trajectory.reward, trajectory.stop_reason) == (0.5, StopReason.TURN_LIMIT)
        assert trajectory.measures["contexts"] == 1 and trajectory.measures["steps"] == 2 and len(trajectory.sequences) == 1
        assert (
            post(f"{first.base_url}/chat/completions", 410, messages=messages)["error"]["message"] == "the episode of this session is over"
        )
        with pytest.raises(tether.BadInput, match="the session is over; open another"):
            first.finish(reward=1.0)
        again, silent = gateway.open({"id": "a", "question": "1 + 1"}), gateway.open({"question": "2"})
        post(f"{again.base_url}/chat/completions", messages=[say("1 + 1")])
        assert again.fail(f"gave up at {again.base_url}").error == f"gave up at {gateway.url}/sessions/SECRET/v1"
        assert silent.finish(reward=1.0).error == "the session got no request at its base_url"
        late = gateway.open({"question": "3"})
        time.sleep(0.6)
        gateway.open({"question": "4"})
        assert late.trajectory.error == "the session was open for 0.5 s without an end (agent.timeout)"
        with pytest.raises(tether.BadInput, match="a task is an object"):
            gateway.open("task")  # type: ignore[arg-type]
    assert "agents send temperature, which has no effect" in caplog.text
    records = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [(record["group"], record["member"], record["stop_reason"]) for record in records] == [
        (0, 0, "turn_limit"), (0, 1, "env_error"), (1, 0, "env_error"), (2, 0, "env_error"), (3, 0, "env_error")
    ]  # fmt: skip
    assert records[-1]["error"] == "the gateway was closed before the session was finished"
    assert not any(first.api_key in path.read_text() for path in (tmp_path / "run").glob("*.json*"))
    assert tether.Run(tmp_path / "run").finished == "gateway closed"


def test_the_same_sessions_draw_the_same_tokens() -> None:
    def sampled() -> list[Any]:
        with tether.gateway("tiny", seed=4, **SMALL) as gateway:
            session = gateway.open({"q": "1"})
            post(f"{session.base_url}/chat/completions", messages=[say("1 + 1")])
            return [turn.response_ids for turn in session.finish(reward=0.0).turns]

    assert sampled() == sampled() != [()]


def test_the_verb_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program in any language: open, ask, finish; the record is a run folder."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "tether", "gateway", "tiny", "--port", "0", "--out", str(out), "--token", "s3cret"]
    settings = ["--set", "rollout.max_tokens=12", "--set", "model.device=cpu"]
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            assert httpx.post(f"{url}/sessions", json={"task": {"id": "1"}}, trust_env=False).status_code == 401
            with httpx.Client(base_url=url, headers={"Authorization": "Bearer s3cret"}, trust_env=False, timeout=60) as client:
                for number in range(4):
                    opened = client.post("/sessions", json={"task": {"id": number // 2}}).json()
                    key = {"Authorization": f"Bearer {opened['api_key']}"}  # the secret of a session, not the server's token
                    asked = {"model": opened["model"], "messages": [say(f"1 + {number // 2}")]}
                    reply = httpx.post(f"{opened['base_url']}/chat/completions", json=asked, headers=key, trust_env=False, timeout=60)
                    assert reply.status_code == 200 and reply.json()["model"] == "tiny"
                    finished = client.post(f"/sessions/{opened['id']}/finish", json={"reward": number % 2, "measures": {"m": 1}}).json()
                    assert finished["error"] is None and finished["measures"]["calls"] == 1
                refused = [
                    ("/sessions", {"task": []}, 400, "a task is an object"),
                    ("/sessions", {"tsk": {}}, 400, "unknown field 'tsk'; send task"),
                    ("/sessions/other/finish", {"reward": 1}, 404, "no open session of this id"),
                    (f"/sessions/{opened['id']}/finish", {"reward": 1}, 404, "it was finished"),
                ]
                for path, body, status, line in refused:
                    said = client.post(path, json=body)
                    assert said.status_code == status and line in said.json()["error"]["message"], said.text
                last = client.post("/sessions", json={"task": {"id": 2}}).json()
                for wrong in (
                    {"reward": "1"},
                    {"reward": 1, "success": 1},
                    {"reward": 1, "measures": {"a": "b"}},
                    {"reward": 1, "measures": 5},
                    {},
                ):
                    assert client.post(f"/sessions/{last['id']}/finish", json=wrong).status_code == 400, wrong
                assert client.post(f"/sessions/{last['id']}/finish", json={"error": "no luck"}).json()["error"] == "no luck"
        finally:
            server.terminate()
    assert [json.loads(line)["task"]["id"] for line in (out / "tasks.jsonl").read_text().splitlines()] == [0, 1, 2]
    with pytest.raises(SystemExit) as shown:
        main(["show", str(out)])
    assert not shown.value.code and "5 shown" in capsys.readouterr().out
    with pytest.raises(tether.BadInput, match="4 of 4 responses open a think tag"):  # all are read; `tiny` closes none after such prompts
        tether.audit(out, "tiny")
