"""Run folders on object storage: what is uploaded in which order, what a reader trusts, and how a run continues from there.

With fsspec's local files; `make test-storage` runs the same tests against a server of S3 (moto) in a process of its own.
"""

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.core.errors import BadInput, MissingDependency, StorageError
from tether.runs import mirror as mirror_module
from tether.runs import remote as remote_module
from tether.runs.checkpoints import best_checkpoint, file_sum, list_checkpoints, write_manifest
from tether.runs.lock import RunLocked
from tether.runs.mirror import Mirror
from tether.runs.remote import OWNER, Remote, address_of, fetched, local_folder
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

STORAGES = ["file", "s3"] if os.environ.get("TETHER_TEST_S3") else ["file"]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of a server of S3."""
    server = pytest.importorskip("moto.server", reason="moto is not installed: make test-storage").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=STORAGES)
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nothing lies; the cache of this machine is empty."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror_module, "POLL_SECONDS", 0.02)
    if request.param == "file":
        return f"file://{tmp_path}/bucket/run"
    import fsspec

    for name, value in {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket := f"tether-{os.getpid()}-{abs(hash(str(tmp_path))) % 10**9}")
    fsspec.filesystem("s3").clear_instance_cache()
    return f"s3://{bucket}/runs/run"


def _checkpoint(store: RunStore, step: int, *, size: int = 100, name: str | None = None) -> Path:
    """A checkpoint as far as an upload looks at it."""
    target = store.checkpoints / (name or f"step_{step:06d}")
    draft = store.folder / ".draft"
    (draft / "model").mkdir(parents=True)
    (draft / "model" / "config.json").write_text("{}")
    (draft / "model" / "model.safetensors").write_bytes(bytes([step]) * size)
    if name is None:
        (draft / "state.pt").write_bytes(b"state" * step)
    write_manifest(draft, step, {str(path.relative_to(draft)): file_sum(path) for path in draft.rglob("*") if path.is_file()})
    if name:
        (draft / "best.json").write_text(json.dumps({"step": step, "success": 0.5}))
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target


def _begun(address: str, keep: int = 1) -> RunStore:
    store = RunStore.create(local_folder(address), f"steps: 9\ncheckpoint: {{keep: {keep}}}\n", {"seed": 1})
    store.mirror = Mirror(store.folder, address)
    return store


def _step(store: RunStore, step: int) -> None:
    store.append(StepRecord(step, {"rollout/success": step / 10}))
    store.append_trajectories([{"step": step, "split": "train", "reward": float(step)}])


def _forget_cache() -> None:
    shutil.rmtree(os.environ["TETHER_CACHE"])


def test_addresses() -> None:
    assert address_of("s3://bucket/run") == address_of(Path("s3://bucket/run/")) == "s3://bucket/run"
    assert address_of(Path("file:///tmp/run")) == "file:///tmp/run" and address_of("gs://b/c/d") == "gs://b/c/d"
    for place in ("runs/run", "/s3/run", "http://host/run", "s3x://b/run", None, "s3:"):
        assert address_of(place) is None
    assert local_folder("runs/run") == Path("runs/run") == fetched("runs/run")
    assert local_folder("s3://a/run") != local_folder("s3://b/run")


def test_what_a_run_writes_is_there_and_comes_back(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "PART", 100)
    monkeypatch.setattr(mirror_module, "PART", 100)
    store = _begun(address)
    for step in range(1, 8):
        _step(store, step)
        store.mirror.upload()  # type: ignore[union-attr]
    _checkpoint(store, 7)
    _checkpoint(store, 5, name="best")
    (store.folder / "images").mkdir()
    (store.folder / "images" / "aa.png").write_bytes(b"picture")
    steps, episodes, here = store.steps(), list(store.trajectories()), store.folder
    contents = {name: (here / name).read_bytes() for name in ("metrics.jsonl", "trajectories.jsonl", "run.json", "config.yaml")}
    store.close()
    names = Remote(address).sizes()
    assert {
        "run.json",
        "metrics.jsonl/000001",
        "images/aa.png",
        "checkpoints/step_000007/state.pt",
        "checkpoints/best_000005/best.json",
    } <= set(names)
    assert not [name for name in names if "lock" in name or "sqlite" in name or "/." in name]
    assert max(size for name, size in names.items() if name.startswith("metrics")) == 100
    _forget_cache()
    copy = RunStore.open(fetched(address))
    assert copy.steps() == steps and list(copy.trajectories()) == episodes
    assert all((copy.folder / name).read_bytes() == content for name, content in contents.items())
    assert [path.name for path in list_checkpoints(copy.checkpoints)] == ["step_000007"] and best_checkpoint(copy.checkpoints) == (5, 0.5)
    assert (copy.folder / "images" / "aa.png").read_bytes() == b"picture"
    assert tether.Run(address).metrics("rollout/success")[7] == 0.7 and tether.Run(address).model().parent.name == "step_000007"


def test_a_reader_gets_what_was_added_since(address: str) -> None:
    store = _begun(address)
    _step(store, 1)
    store.close()
    _forget_cache()
    assert [record.step for record in RunStore.open(fetched(address, weights=False)).steps()] == [1]
    copy = fetched(address, to_write=True)
    again = RunStore.open(copy)
    again.mirror = Mirror(copy, address)
    _step(again, 2)
    _checkpoint(again, 2)
    again.close()
    assert [record.step for record in RunStore.open(fetched(address)).steps()] == [1, 2]
    _forget_cache()
    assert [record.step for record in RunStore.open(fetched(address)).steps()] == [1, 2]


def test_older_checkpoints_go_once_the_new_one_is_there(address: str) -> None:
    store = _begun(address, keep=2)
    for step in (1, 2, 3):
        _checkpoint(store, step)
        store.mirror.upload()  # type: ignore[union-attr]
    store.close()
    remote = Remote(address)
    assert list(remote.whole(remote.sizes())) == ["step_000002", "step_000003"]
    assert not [name for name in remote.sizes() if "step_000001" in name]


class _Cut(StorageError):
    pass


@pytest.mark.parametrize("cut", range(4))
def test_an_upload_that_is_cut_off_leaves_the_checkpoint_before(cut: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each file of the new checkpoint, and before its manifest."""
    store = _begun(address)
    mirror = store.mirror
    assert mirror is not None
    _step(store, 1)
    _checkpoint(store, 1)
    mirror.upload()
    mirror._given_up.set()  # the process is gone; what follows are its last moments
    mirror._uploader.join()
    _step(store, 2)
    _checkpoint(store, 2)
    done: list[str] = []

    def count(*_: Any) -> None:
        if len(done) == cut:
            raise _Cut("killed")
        done.append("")

    put, write = mirror._remote.fs.put_file, mirror._remote.write
    with monkeypatch.context() as patched:
        patched.setattr(mirror, "_check_going", lambda: None)
        patched.setattr(mirror._remote.fs, "put_file", lambda *args, **kwargs: (count(), put(*args, **kwargs)))
        patched.setattr(mirror._remote, "write", lambda name, content: (count() if "checkpoints/" in name else None, write(name, content)))
        with pytest.raises(StorageError):
            mirror.upload()
    sizes = Remote(address).sizes()
    assert list(Remote(address).whole(sizes)) == ["step_000001"] and sum("step_000002" in name for name in sizes) == cut
    store.mirror = None
    store.close()
    _forget_cache()
    monkeypatch.setattr(remote_module, "STALE_SECONDS", 0.1)  # a record that was left behind is waited for
    copy = RunStore.open(fetched(address, to_write=True))
    assert [path.name for path in list_checkpoints(copy.checkpoints)] == ["step_000001"] and [record.step for record in copy.steps()] == [
        1,
        2,
    ]


def test_sizes_must_agree(address: str) -> None:
    store = _begun(address)
    _checkpoint(store, 1)
    store.close()
    remote = Remote(address)
    remote.write("checkpoints/step_000001/state.pt", b"half")
    assert list(remote.whole(remote.sizes())) == []


def test_names_that_lead_out_of_the_folder_are_not_fetched(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _begun(address)
    store.close()
    remote = Remote(address)
    found = dict(remote.fs.find(remote.path(""), detail=True))
    (size,) = {entry["size"] for name, entry in found.items() if name.endswith("run.json")}
    monkeypatch.setattr(remote.fs, "find", lambda *_, **__: {**found, remote.path("images/../../../out.png"): {"size": size}})
    assert not [name for name in remote.sizes() if "out.png" in name] and "run.json" in remote.sizes()


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_uploaded_whole(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _begun(address)
    mirror = store.mirror
    assert mirror is not None
    begun, deleted = threading.Event(), threading.Event()
    real = mirror._upload_checkpoint

    def slow(name: str, staged: Path) -> None:
        begun.set()
        deleted.wait(10)
        real(name, staged)

    monkeypatch.setattr(mirror, "_upload_checkpoint", slow)
    first = _checkpoint(store, 1)
    assert begun.wait(10)
    shutil.rmtree(first)
    deleted.set()
    store.close()
    assert list(Remote(address).whole(Remote(address).sizes())) == ["step_000001"]


def test_uploads_that_fail_are_said_tried_again_and_given_up_at_last(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(mirror_module, "FIRST_DELAY", 0.01)
    store = _begun(address)
    mirror = store.mirror
    assert mirror is not None
    write, failures = mirror._remote.write, [1, 2, 3]

    def failing(name: str, content: bytes) -> None:
        if name != OWNER and failures:
            failures.pop()
            raise StorageError("cannot write to it (no network)")
        write(name, content)

    monkeypatch.setattr(mirror._remote, "write", failing)
    _step(store, 1)
    store.close()
    assert "cannot write to it (no network); tried again in 0 s" in caplog.text and "work again" in caplog.text
    assert "metrics.jsonl/000000" in Remote(address).sizes()
    failures += [0] * 10**6
    monkeypatch.setattr(mirror_module, "END_SECONDS", 0.1)
    again = RunStore.open(store.folder)
    again.mirror = Mirror(store.folder, address)
    monkeypatch.setattr(again.mirror._remote, "write", failing)
    _step(again, 2)
    with pytest.raises(StorageError, match=r"no network.*the run is whole in .* --resume on this machine continues from there"):
        again.close()
    assert [record.step for record in RunStore.open(fetched(address)).steps()] == [1, 2]  # what is here is ahead of the address


def test_one_writer_at_a_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _begun(address)
    mirror = store.mirror
    assert mirror is not None
    mirror.upload()
    remote = Remote(address)
    owner = remote.read_object(OWNER)
    monkeypatch.setattr(remote_module.time, "sleep", lambda _: remote.write(OWNER, json.dumps({**owner, "host": "b", "beat": -1}).encode()))
    with pytest.raises(RunLocked, match=r"is being written by process .* on b"):
        remote.wait_for_owner()
    monkeypatch.undo()
    monkeypatch.setattr(mirror_module, "BEAT_SECONDS", 0.01)
    remote.write(OWNER, json.dumps({**owner, "token": "another"}).encode())
    threading.Thread(target=mirror._keep_owning).start()
    mirror._uploader.join(30)
    with pytest.raises(StorageError, match="taken over by another process"):
        store.append(StepRecord(1, {}))
    with pytest.raises(StorageError, match="taken over"):
        store.close()


def test_a_copy_of_another_attempt_is_fetched_anew(address: str) -> None:
    """This machine wrote steps that it did not upload; another one continued from what there was."""
    store = _begun(address)
    _step(store, 1)
    store.close()
    with (store.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(StepRecord(2, {"rollout/success": 0.99}).to_json()) + "\n")
    Remote(address).write(OWNER, json.dumps({"token": "another", "ended": True}).encode())
    assert [record.step for record in RunStore.open(fetched(address)).steps()] == [1]


def test_what_is_not_there_is_said(address: str) -> None:
    with pytest.raises(BadInput, match=f"there is no run at '{address}'"):
        fetched(address)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingDependency, match=r"pip install 'tether-agents\[gs\]'"):
        Remote("gs://bucket/run")


def test_verbs_read_runs_at_an_address_and_write_folders(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = _begun(address)
    _step(store, 1)
    store.close()
    _forget_cache()
    for words, code in ((["show", address], 0), (["show", f"{address}-not"], 2), (["sweep", "frozen_lake", "--out", address], 2)):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == code, capsys.readouterr()
    said = capsys.readouterr().err
    assert (
        f"there is no run at '{address}-not'" in said
        and f"`tether sweep` writes to a folder of this machine, and --out is '{address}'" in said
    )


# ---------------------------------------------------------------------------------------------------------------- whole runs

SMALL: dict[str, Any] = {
    "env.options.max_turns": 1,
    "rollout.num_groups": 2,
    "rollout.group_size": 2,
    "rollout.max_tokens": 16,
    "learner.update_batch": 2,
    "diagnosis.every": 0,
    "evaluation.prompts": 2,
    "checkpoint.every": 1,
    "early_stop.invalid_steps": 0,
    "model.device": "cpu",
}


def _trained(run: tether.Run) -> list[dict[str, float]]:
    """What was measured in training: the shorter run validated at its own last step."""
    return [{name: value for name, value in record.metrics.items() if "validation" not in name} for record in run.records]


def test_a_run_continues_on_another_machine_and_ends_as_one_in_a_folder(address: str, tmp_path: Path) -> None:
    whole = tether.train("frozen_lake", "tiny", filter="all", steps=3, out=tmp_path / "whole", **SMALL)
    first = tether.train("frozen_lake", "tiny", filter="all", steps=2, out=address, **SMALL)
    assert first.finished == "all 2 steps done" and first.path == local_folder(address)
    with pytest.raises(BadInput, match=f"there is a run at '{address}'"):
        tether.train("frozen_lake", "tiny", filter="all", steps=2, out=address, **SMALL)
    _forget_cache()  # another machine
    second = tether.train(out=Path(address), resume=True, steps=3)
    _forget_cache()
    run = tether.Run(address)
    assert run.finished == "all 3 steps done"
    assert _trained(run) == _trained(whole)
    names = [path.relative_to(whole.model()) for path in whole.model().rglob("*") if path.is_file()]
    assert all((run.model() / name).read_bytes() == (whole.model() / name).read_bytes() for name in names)
    assert second.path == run.path
