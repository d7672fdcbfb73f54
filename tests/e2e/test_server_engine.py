"""Training through servers over real HTTP: the same run as with the native engine, with dead servers, and refused where weights differ."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request, Response
from safetensors.torch import load_file

import tether
from tether.core.errors import EngineUnavailable
from tether.core.http import serving_app
from tether.models.load import LoadedModel
from tether.rollout.engines.connection import PROBE_SAMPLES
from tether.rollout.serving.app import make_app, serving_model
from tether.rollout.serving.served import ServedModel
from tether.runs.store import RunStore
from tether.training import stages

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 24, "max_context": 900, "max_rows": 8},
    "learner": {"update_batch": 4, "learning_rate": 1e-4},
    "evaluation": {"prompts": 1},
    "diagnosis": {"every": 0},
    "algorithm": {"importance_cap": 2.0},
    "filter": "all",
    "checkpoint": {"every": 1},
}


def _train(out: Path, engine: str, **more: Any) -> RunStore:
    settings = {**SETTINGS, **more}
    settings["rollout"] = {**SETTINGS["rollout"], "engine": engine}
    tether.train({"name": "frozen_lake", "options": {"max_turns": 2}}, out=out, **settings)
    return RunStore.open(out)


def _weights(store: RunStore, step: int) -> dict[str, torch.Tensor]:
    return load_file(store.checkpoints / f"step_{step:06d}" / "model" / "model.safetensors")


def _responses(store: RunStore) -> list[Any]:
    lines = (store.folder / "trajectories.jsonl").read_text().splitlines()
    return [[turn["response_ids"] for turn in json.loads(line)["turns"]] for line in lines]


@contextmanager
def _served(tiny: Any) -> Iterator[str]:
    with serving_model(LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), "tiny", max_rows=8) as url:
        yield url


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    return _train(tmp_path_factory.mktemp("native") / "run", "native")


def test_a_run_through_a_server_is_the_native_run(tiny: Any, native: RunStore, tmp_path: Path) -> None:
    with _served(tiny) as url:
        served = _train(tmp_path / "run", url)
    assert _responses(served) == _responses(native)
    for name, tensor in _weights(served, 2).items():
        assert torch.allclose(tensor, _weights(native, 2)[name], rtol=0, atol=1e-5), name
    assert not torch.equal(_weights(served, 2)["model.norm.weight"], _weights(served, 1)["model.norm.weight"])
    for record in served.steps()[1:]:
        assert record.metrics["update/mismatch"] < 1e-4
        assert record.metrics["update/probe_difference"] < 1e-5
        assert record.metrics["rollout/staleness"] == 0
        assert record.metrics["update/checked_tokens"] == record.metrics["update/tokens_trained"], "the filter left nothing out"
        assert 0 < record.metrics["update/checked_difference"] < record.metrics["update/checked_difference_max"] < 1e-4
    versions = [
        turn["versions"] for line in (served.folder / "trajectories.jsonl").read_text().splitlines() for turn in json.loads(line)["turns"]
    ]
    assert {number for spans in versions for number, _ in spans} == {0, 1, 2}, "the start, and two updates"
    assert json.loads((served.folder / "run.json").read_text())["machine"]["engine"] == "server (tether)"


# ------------------------------------------------------------------------------------------------------------ wrong answers


@contextmanager
def _lying(tiny: Any, change: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """A server whose responses are changed on their way; those to the probe are shorter, and stay."""
    app = make_app(ServedModel("tiny", LoadedModel(copy.deepcopy(tiny.model), tiny.tokenizer), max_rows=8))

    async def changed(request: Request, call_next: Any) -> Response:
        reply = await call_next(request)
        data = b"".join([part async for part in reply.body_iterator])
        if request.url.path.endswith("/generate") and len((answer := json.loads(data))["choices"][0]["token_ids"]) > PROBE_SAMPLES:
            change(answer["choices"][0])
            data = json.dumps(answer).encode()
        return Response(data, reply.status_code, media_type=reply.media_type or "application/json")

    app.middleware("http")(changed)
    with serving_app(app, "tiny") as url:
        yield url


def _other_token(choice: dict[str, Any]) -> None:
    choice["token_ids"][4] = choice["logprobs"]["content"][4]["token_id"] = 300


def test_wrong_tokens_stop_the_first_step_before_anything_is_learned(tiny: Any, tmp_path: Path) -> None:
    """Here no pass of the batch computes the learner's log-probs, so episodes are drawn and recomputed."""
    said = r"step 1: tokens or log-probs from http://.* over \d+ tokens of \d rows the learner's log-probs differ from the server's by [\d.]+ on average"
    with _lying(tiny, _other_token) as url, pytest.raises(EngineUnavailable, match=said) as ended:
        _train(tmp_path / "run", url, evaluation={"prompts": 0}, algorithm={"importance_cap": None})
    assert "no weights that learned from them are kept" in str(ended.value) and len(str(ended.value).splitlines()) == 1
    assert RunStore.open(tmp_path / "run").steps() == []


@pytest.mark.parametrize("drawn", [8, 0])
def test_one_wrong_logprob_stops_the_step(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: int) -> None:
    """One token of one response is 0.7 off, all others are right: seen before the update, or in it where the episode was not drawn."""
    monkeypatch.setattr(stages, "CHECKED_EPISODES", drawn)
    wrong: list[bool] = []

    def change(choice: dict[str, Any]) -> None:
        if not wrong:
            wrong.append(True)
            choice["logprobs"]["content"][3]["logprob"] -= 0.7

    with (
        _lying(tiny, change) as url,
        pytest.raises(EngineUnavailable, match=r"differ from the server's by .*0\.7 at the worst token \(at most 0\.5\)"),
    ):
        _train(tmp_path / "run", url, evaluation={"prompts": 0})
    assert RunStore.open(tmp_path / "run").steps() == []


# ------------------------------------------------------------------------------------------------------------- dead servers

SCRIPT = """
import sys
from tether import load_model
from tether.core.http import address_of, bind
from tether.rollout.serving.app import run
from tether.rollout.serving.served import ServedModel
with bind("127.0.0.1", int(sys.argv[1])) as listener:
    served = ServedModel("tiny", load_model("tiny", device="cpu"), max_rows=8)
    print(address_of(listener), flush=True)
    run(served, listener, None)
"""


class Process:
    """A server in a process of its own, to be killed."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(port)], stdout=subprocess.PIPE, text=True)

    def address(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class KillAfter(tether.Callback):
    """Kills a server when so many episodes of a step's rollout have ended."""

    def __init__(self, server: Process, step: int, episodes: int) -> None:
        self._server, self._step, self._left, self._stage = server, step, episodes, ""

    def on_stage_begin(self, name: str, total: int) -> None:
        self._step -= name == "rollout"
        self._stage = name

    def on_stage_progress(self) -> None:
        if self._stage == "rollout" and self._step == 0:
            self._left -= 1
            if self._left == 0:
                self._server.kill()


@pytest.mark.slow
@pytest.mark.long
def test_servers_killed_in_a_rollout(tiny: Any, native: RunStore, tmp_path: Path) -> None:
    """One of two: the same run. Then the last one too: one line, a checkpoint, and a resumed run that is the same."""
    first, second = Process(), Process()
    try:
        addresses = [first.address(), second.address()]
        both = ",".join(addresses)
        folder = tmp_path / "run"
        with pytest.raises(
            EngineUnavailable, match=r"no server of rollout.engine could be used for 1 s .*--resume continues from step_000001"
        ) as ended:
            _train(
                folder,
                both,
                callbacks=[KillAfter(first, step=1, episodes=1), KillAfter(second, step=2, episodes=2)],
                server={"patience": 1.0},
            )
        assert len(str(ended.value).splitlines()) == 1
        stopped = RunStore.open(folder)
        assert [record.step for record in stopped.steps()] == [0, 1]
        (left_out,) = (note for note in stopped.steps()[1].notes if "is left out" in note)
        assert left_out.startswith(f"the server at {addresses[0]} is left out (") and left_out.endswith("continue on the others")
    finally:
        for server in (first, second):
            server.kill()
    with _served(tiny) as url:
        tether.train(out=folder, resume=True, rollout={"engine": url})
    again = RunStore.open(folder)
    for name, tensor in _weights(again, 2).items():
        assert torch.allclose(tensor, _weights(native, 2)[name], rtol=0, atol=1e-5), name
    assert {str(turns) for turns in _responses(again)} == {str(turns) for turns in _responses(native)}
