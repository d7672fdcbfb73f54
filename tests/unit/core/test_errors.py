"""Error classes: exit codes, the standard exceptions they refine, and suggestions for near misses."""

import doctest
import signal

import pytest

from tether.core import config, errors
from tether.core.errors import (
    BadInput,
    CheckpointError,
    ConfigError,
    DivergedModel,
    EngineUnavailable,
    EnvironmentFailure,
    MissingDependency,
    ModelUnavailable,
    OutdatedEngine,
    OutOfMemory,
    StorageError,
    TetherError,
    UnknownName,
    did_you_mean,
    environment_boundary,
)

CLASSES: dict[type[TetherError], tuple[int, type[Exception]]] = {
    TetherError: (1, Exception),
    BadInput: (2, ValueError),
    UnknownName: (2, ValueError),
    ConfigError: (2, ValueError),
    ModelUnavailable: (2, ValueError),
    MissingDependency: (2, ImportError),
    CheckpointError: (1, Exception),
    StorageError: (1, OSError),
    OutOfMemory: (1, MemoryError),
    EngineUnavailable: (1, Exception),
    OutdatedEngine: (1, Exception),
    DivergedModel: (1, ArithmeticError),
    EnvironmentFailure: (1, Exception),
}


@pytest.mark.parametrize(("kind", "exit_code", "standard"), [(kind, *expected) for kind, expected in CLASSES.items()])
def test_exit_code_and_standard_base(kind: type[TetherError], exit_code: int, standard: type[Exception]) -> None:
    error = kind("what; got; what to do")
    assert error.exit_code == exit_code
    assert isinstance(error, standard)
    assert isinstance(error, TetherError)
    assert str(error) == "what; got; what to do"


def test_every_error_class_is_tested_above() -> None:
    assert {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TetherError)} == set(CLASSES)


def test_boundary_attributes_what_an_environment_raises() -> None:
    with pytest.raises(EnvironmentFailure) as caught, environment_boundary("step 3"):
        raise KeyError("box")
    assert str(caught.value) == "step 3: KeyError: 'box'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_boundary_says_a_failure_from_a_worker_once() -> None:
    with pytest.raises(EnvironmentFailure, match=r"^step 3: timed out after 60 s$"), environment_boundary("step 3"):
        raise EnvironmentFailure("step: timed out after 60 s")


def test_boundary_lets_an_interrupt_through() -> None:
    with pytest.raises(KeyboardInterrupt), environment_boundary("step 3"):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(EnvironmentFailure, match="step 3: KeyboardInterrupt"), environment_boundary("step 3"):
        raise KeyboardInterrupt


def test_boundary_is_silent_when_nothing_happens() -> None:
    with environment_boundary("reset"):
        reached = True
    assert reached


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("frozenlake", ["sokoban", "frozen_lake"], "did you mean 'frozen_lake'? (known: frozen_lake, sokoban)"),
        ("SOKOBAN", ["sokoban", "countdown"], "did you mean 'sokoban'? (known: countdown, sokoban)"),
        ("chess", ["sokoban", "countdown"], "known: countdown, sokoban"),
        ("anything", [], "known: none"),
        ("sokobn", iter(["sokoban"]), "did you mean 'sokoban'? (known: sokoban)"),
    ],
)
def test_did_you_mean(name: str, known: list[str], expected: str) -> None:
    assert did_you_mean(name, known) == expected


@pytest.mark.parametrize("module", [errors, config])
def test_examples_in_the_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
