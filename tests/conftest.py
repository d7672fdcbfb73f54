"""What all tests share: one thread, no network, and the real embedded model, loaded once per worker."""

import os
import shutil
import signal

# Before anything imports torch or huggingface_hub; subprocesses inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if shutil.which("nvidia-smi") is None:  # without a GPU, kernels are interpreted; to be said before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

# What a shell starts in the background ignores Ctrl-C and under nohup a hang-up too, and every process that a test starts would inherit that and
# outlive the signals that the test sends. A handler is not inherited: this process takes a hang-up as before, its children have the defaults.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

import contextlib
import copy
import fcntl
import functools
import gc
import importlib.util
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("hypothesis"):  # the machine with a GPU has none
    import hypothesis

    # On a busy machine examples take longer to make; that is no defect of a test.
    hypothesis.settings.register_profile("busy", suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.load_profile("busy")


def _is_compiled() -> bool:
    found = importlib.util.find_spec("transformers")
    return found is None or found.origin is None or Path(importlib.util.cache_from_source(found.origin)).exists()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """In a fresh checkout one worker compiles torch, transformers and the tests, and the others read what it wrote: half a minute of a core for each."""
    with contextlib.ExitStack() as stack:
        if not _is_compiled() and hasattr(session.config, "workerinput"):
            lock = stack.enter_context((Path(session.config.option.basetemp).parent / "compiling.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_compiled():  # another worker had it until everything was
                fcntl.flock(lock, fcntl.LOCK_UN)
        return (yield)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A test that computes on a GPU where there is one is marked `gpu`: it takes one of the two fixtures, or its module says DEVICE."""
    for item in items:
        if {"gpu", "device"} & set(getattr(item, "fixturenames", ())) or hasattr(getattr(item, "module", None), "DEVICE"):
            item.add_marker("gpu")


def pytest_collection_finish() -> None:
    """What was imported so far stays: no collection of garbage looks through it again, which takes 0.4 s each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx reads the file of the world's certificates anew, for 40 ms of processor time, even where it only speaks plain HTTP."""
    real = ssl.create_default_context
    cached = functools.cache(lambda cafile: real(cafile=cafile))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ssl, "create_default_context", lambda *args, **more: real(*args, **more) if args or [*more] != ["cafile"] else cached(**more)
        )
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where a test computes: on the GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def gpu(device: str) -> str:
    """The same for a test that says nothing without a GPU."""
    if device == "cpu":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(scope="session")
def check_each() -> Callable[[Iterable[Any], Callable[[Any], None]], None]:
    """Runs one check over many things (files, pages, configs) as one test, which fails with all that break it, not with the first."""

    def check_all(things: Iterable[Any], check: Callable[[Any], None]) -> None:
        failures = []
        for thing in things:
            try:
                check(thing)
            except AssertionError as error:
                failures.append(f"{thing}: {error}")
        assert not failures, "\n".join(failures)

    return check_all


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The embedded model with its tokenizer. Read only: a test that trains takes `tiny_model`."""
    from tether.models.load import load_model

    return load_model("tiny", device="cpu")


@pytest.fixture(scope="session")
def tiny_on_device(tiny: Any, device: str) -> Any:
    """The embedded model on the GPU if there is one, for a test that computes with it."""
    from tether.models.load import load_model

    return tiny if device == "cpu" else load_model("tiny", device=device)


@pytest.fixture
def tiny_model(tiny: Any) -> Any:
    """A copy of the embedded model that a test may change."""
    return copy.deepcopy(tiny.model)


@pytest.fixture(scope="session")
def chat(tiny: Any) -> Any:
    from tether.models.chat import ChatFormat

    return ChatFormat(tiny.tokenizer)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct, real weights; tests that need it are skipped where it was not fetched."""
    from tether.models.catalog import is_at_hand
    from tether.models.load import load_model

    if not is_at_hand("smollm2"):
        pytest.skip("smollm2 is not here; fetch it with: tether models get smollm2")
    return load_model("smollm2", device="cpu")
