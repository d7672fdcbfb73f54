"""However a run is stopped, the last complete step is kept, and the resumed run ends as one that was never stopped."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import EnvironmentFailure, StorageError
from tether.core.types import Observation, Step
from tether.envs.base import TurnOptions
from tether.envs.registry import ENVIRONMENTS
from tether.runs.checkpoints import list_checkpoints
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.runs.verdict import verdict
from tether.training.callbacks import Callback
from tether.training.loop import Trainer
from tether.training.optim import FP32MasterAdamW
from tether.training.settings import RunSettings


@pytest.fixture(scope="module")
def settings(small_policy: Callable[[int], str]) -> Callable[..., RunSettings]:
    small: dict[str, Any] = {
        "env": {"name": "frozen_lake", "options": {"max_turns": 1}},
        "model": {"name": small_policy(1), "device": "cpu"},
        "rollout": {"num_groups": 1, "group_size": 2, "max_tokens": 4},
        "filter": {"strategy": "all"},
        "learner": {"learning_rate": 1e-3, "update_batch": 1},
        "diagnosis": {"every": 0},
        "evaluation": {"every": 0, "prompts": 1},
        "checkpoint": {"every": 100},
        "early_stop": {"invalid_steps": 0},
        "steps": 3,
    }

    def build(**changes: Any) -> RunSettings:
        return validate(RunSettings, merge(small, changes))

    return build


def _trainer(folder: Path, settings: RunSettings, *callbacks: Callback) -> Trainer:
    store = RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {})
    return Trainer(settings, store, callbacks)


def _saved(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def _weights(folder: Path) -> bytes:
    return (list_checkpoints(folder / "checkpoints")[-1] / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(settings: Callable[..., RunSettings], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    _trainer(folder, settings()).run()
    return folder


class _After(Callback):
    """Does something once step 2 is on disk."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        if record.step == 2:
            self._act()


def _continues(folder: Path, settings: RunSettings, straight: Path) -> None:
    assert _saved(folder) == ["step_000002"]
    _trainer(folder, settings).run()
    assert _weights(folder) == _weights(straight)
    assert RunStore.open(folder).steps() == RunStore.open(straight).steps()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal(number: int, settings: Callable[..., RunSettings], straight: Path, tmp_path: Path) -> None:
    def stop() -> None:
        signal.raise_signal(number)
        raise AssertionError("never: it is raised at once")

    trainer = _trainer(tmp_path / "run", settings(), _After(stop))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.ranks.interrupts.received == number
    _continues(tmp_path / "run", settings(), straight)


def _fail() -> None:
    raise RuntimeError("a callback of the user's")


def test_an_error_between_steps(settings: Callable[..., RunSettings], straight: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a callback of the user's"):
        _trainer(tmp_path / "run", settings(), _After(_fail)).run()
    _continues(tmp_path / "run", settings(), straight)


def test_an_error_before_an_update_changed_anything(
    settings: Callable[..., RunSettings], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path / "run", settings())
    real: Any = trainer.learner._backward

    def backward(*args: Any) -> None:
        if trainer.step == 2:
            raise RuntimeError("a kernel failed")
        real(*args)

    monkeypatch.setattr(trainer.learner, "_backward", backward)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        trainer.run()
    _continues(tmp_path / "run", settings(), straight)


def test_weights_of_half_a_step_are_not_saved(
    settings: Callable[..., RunSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path / "run", settings())
    real, calls = FP32MasterAdamW.step, []

    def step(optimizer: FP32MasterAdamW, *finite: Any) -> None:
        calls.append(1)
        if len(calls) == 4:  # the second update of step 2
            raise RuntimeError("the optimiser failed")
        real(optimizer, *finite)

    monkeypatch.setattr(FP32MasterAdamW, "step", step)
    with pytest.raises(RuntimeError, match="the optimiser failed"):
        trainer.run()
    assert _saved(tmp_path / "run") == []


def test_a_record_that_cannot_be_written_saves_no_weights_without_it(
    settings: Callable[..., RunSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path / "run", settings())
    real: Any = trainer.store.append

    def append(record: StepRecord) -> None:
        if record.step == 2:
            raise StorageError("the disk is full")
        real(record)

    monkeypatch.setattr(trainer.store, "append", append)
    with pytest.raises(StorageError, match="the disk is full"):
        trainer.run()
    assert _saved(tmp_path / "run") == []


# ---------------------------------------------------------------------------------------------------- environments that fail


class _Failing:
    """Raises at reset, or at its first step."""

    name, max_turns, instructions, Options = "failing", 1, "Answer.", TurnOptions
    at = "reset"
    work = "inline"

    def __init__(self, options: TurnOptions) -> None:
        self.options = options

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if self.at == "reset":
            raise FileNotFoundError("no levels in 'wrong.txt'")
        return Observation("Speak.")

    def step(self, answer: str) -> Step:
        raise ConnectionError("refused")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def register(at: str) -> None:
        monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "failing": _Failing})
        monkeypatch.setattr(_Failing, "at", at)

    return register


def test_where_no_episode_can_begin_the_run_stops_with_the_cause(
    settings: Callable[..., RunSettings], tmp_path: Path, failing: Callable[[str], None]
) -> None:
    failing("reset")
    chosen = settings(env={"name": "failing", "options": {}})
    with pytest.raises(EnvironmentFailure) as caught:
        _trainer(tmp_path / "run", chosen).run()
    said = str(caught.value)
    assert said.startswith("no episode of the validation of step 0 could begin: 1 of 1 episodes ended by an environment error")
    assert "FileNotFoundError: no levels in 'wrong.txt'" in said and "nothing already written is lost" in said and "\n" not in said
    assert caught.value.exit_code == 1 and caught.value.common


def test_in_a_training_step_too(
    settings: Callable[..., RunSettings], tmp_path: Path, failing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("reset")
    chosen = settings(env={"name": "failing", "options": {}}, evaluation={"env": {"name": "frozen_lake"}})
    with pytest.raises(EnvironmentFailure, match=r"no episode of step 1 could begin: 2 of 2 episodes .*wrong.txt.*--resume continues"):
        _trainer(tmp_path / "run", chosen).run()


def test_a_run_in_which_every_episode_failed_is_a_failure_and_says_why(
    settings: Callable[..., RunSettings], tmp_path: Path, failing: Callable[[str], None]
) -> None:
    failing("step")
    chosen = settings(env={"name": "failing", "options": {}}, steps=2)
    with pytest.raises(EnvironmentFailure, match=r"every episode of the run failed, nothing was learned; .*ConnectionError: refused"):
        _trainer(tmp_path / "run", chosen).run()
    store = RunStore.open(tmp_path / "run")
    assert store.finished == "all 2 steps done"
    assert all(any("2 of 2 episodes ended by an environment error" in note for note in record.notes) for record in store.steps()[1:])
    assert any("the commonest error: step 1: ConnectionError: refused" in sentence for sentence in verdict(store.steps()))
