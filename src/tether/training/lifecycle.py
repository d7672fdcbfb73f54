"""The borders of a run: what is said and done before its first step, what holds a step together, and how a run ends.

A run that ends for whatever reason keeps its last complete step in a checkpoint, as long as the weights are that step's.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tether.core.errors import EngineUnavailable, EnvironmentFailure, OutOfMemory, TetherError
from tether.models.fast_path import fast_path_report
from tether.models.hardware import device_name
from tether.models.policy import Policy
from tether.rollout.prompt_memory import PromptMemory
from tether.runs.checkpoints import newest_checkpoint
from tether.runs.schema import StepRecord
from tether.runs.verdict import every_episode_failed
from tether.training.alarm_actions import AlarmActions
from tether.training.checkpoint import fitting, restore
from tether.training.disk import DiskPlan, disk_notes
from tether.training.hooks import BestCheckpoint, Evaluations, Hook, Run, write_record
from tether.training.memory import MemoryPlan
from tether.training.settings import RunSettings
from tether.training.throughput import StartTimer


class WholeRun(Run, Protocol):
    """What the borders of a run see of it, beside what hooks see."""

    policy: Policy
    plan: MemoryPlan | None
    disk: DiskPlan | None
    start_timer: StartTimer
    alarm_actions: AlarmActions
    prompt_memory: PromptMemory | None
    hooks: Sequence[Hook]
    whole: bool
    """The weights are those of `step`. A second Ctrl-C can interrupt an update; such weights must not be saved."""


def resume(run: WholeRun, checkpoint: Path) -> str | None:
    """Put everything but the policy, which is built from the checkpoint, back as it was. Returns the batches that had been sampled ahead."""
    state = restore(checkpoint, run.ranks)
    with fitting(checkpoint):
        run.learner.restore(state.learner)
        run.monitor.restore(state.monitor)
        run.alarm_actions.restore(state.alarm_actions)
    if run.prompt_memory is not None and state.prompt_memory is not None:
        run.prompt_memory.restore(state.prompt_memory)
    run.step = state.step
    return state.batches_ahead


def begin(run: WholeRun) -> None:
    """Report the machine, then do what the last complete step still lacks: step 0 is nothing but its evaluation."""
    _introduce(run)
    record = next((known for known in run.records if known.step == run.step), StepRecord(run.step, {}, None, []))
    if Evaluations.is_due(run, run.step) and "validation/success" not in record.metrics:
        run.timer.begin()
        for hook in run.hooks:
            record = hook.on_step(run, record)
    else:
        BestCheckpoint().on_step(run, record)


def _introduce(run: WholeRun) -> None:
    """Put on record what the run is computed on, and report what is worth knowing before the first step."""
    with run.start_timer.part("probe"):
        report = fast_path_report(run.policy)
    machine = {
        "device": device_name(run.policy.device),
        "dtype": str(run.policy.dtype).removeprefix("torch."),
        "peak": run.timer.peak,
        "engine": run.sampler.engine.backend,
        "ranks": run.ranks.size,
        "fast_path": report.to_json(),
        "start": {name: round(seconds, 2) for name, seconds in run.start_timer.seconds.items()},
    }
    run.store.computed_on(machine)
    run.saver.prepare(run.learner.saved_sizes())
    divided = [f"weights are divided among {run.ranks.size} ranks, none holds all of them"] if run.policy.divided else []
    rounded = [_rounded_words(run.settings)] if run.settings.rollout.precision else []
    full = disk_notes(run.disk) if run.disk is not None else []
    for note in (*(run.plan.notes if run.plan else ()), *full, *divided, *report.lines(), *rounded, *run.sampler.chat.notes):
        run.callbacks.on_note(note)


def _rounded_words(settings: RunSettings) -> str:
    cap = settings.algorithm.importance_cap
    corrected = (
        "nothing corrects the difference (algorithm.importance_cap is null)"
        if cap is None
        else f"importance weights up to {cap:g} correct it"
    )
    return f"rollouts sample with the MLPs in {settings.rollout.precision} (rollout.precision); {corrected}, update/mismatch shows it"


@contextmanager
def atomic(run: WholeRun) -> Iterator[None]:
    """Hold back Ctrl-C until weights and record belong to the same step again."""
    with run.ranks.interrupts.shield():
        run.whole, before, run.learner.updates_applied = False, run.step, 0
        try:
            yield
        except Exception:
            run.whole = run.step == before and not run.learner.updates_applied  # nothing was changed yet
            raise
        run.whole = True


@contextmanager
def running(run: WholeRun) -> Iterator[None]:
    """The block that trains: environments, the thread of asynchronous rollouts, signals and callbacks end with it."""
    with run.sampler.pool, run.rollouts, run.ranks.interrupts.listening(), run.callbacks.running(), _keeping_last_step(run):
        yield


@contextmanager
def _keeping_last_step(run: WholeRun) -> Iterator[None]:
    """Whatever ends the block, write a checkpoint of the last complete step if the weights are whole, and say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if run.whole:
            if run.rollouts.is_busy(run.step):
                run.callbacks.on_note("waiting for the batch that is being sampled: a resumed run trains on it; Ctrl-C again does not wait")
            run.save()
        run.saver.finish()  # a second Ctrl-C does not wait, nor does the end of the grace time
        raise
    except (OutOfMemory, EngineUnavailable, EnvironmentFailure) as error:
        ended = type(error)(f"{error}; nothing already written is lost: {_how_to_resume(run)}")
        ended.common = error.common
        raise ended from error
    except Exception as error:
        _save_after(run, error)
        raise


def _how_to_resume(run: WholeRun) -> str:
    if run.whole and not run.saver.has(run.step):
        run.save()
    run.saver.finish()
    checkpoint = run.ranks.broadcast_object(lambda: newest_checkpoint(run.store.checkpoints))
    return f"--resume continues from {checkpoint.name}" if checkpoint else "--resume starts from scratch, as there is no checkpoint yet"


def _save_after(run: WholeRun, error: Exception) -> None:
    """A failure of saving is a note. Several ranks can save only where all of them came here."""
    is_common = run.ranks.size == 1 or (isinstance(error, TetherError) and error.common)
    try:
        if run.whole and run.step and is_common and not run.saver.has(run.step):
            run.save()
        run.saver.wait()
    except (TetherError, OSError, RuntimeError) as second:  # torch's errors are RuntimeErrors
        run.callbacks.on_note(f"no checkpoint of step {run.step} could be written: {second}")


def stop_reason(run: WholeRun) -> str | None:
    """Why the run should end before its last step, or None."""
    if run.step == run.settings.steps:
        return None
    return next((reason for hook in (*run.hooks, run.alarm_actions) if (reason := hook.stop_reason(run))), None)


def finish(run: WholeRun, stopped: str | None) -> None:
    """The last step is done, or the run was `stopped` for a reason: keep the weights, measure them, put the reason on the record."""
    if stopped is not None:
        if run.settings.checkpoint.last:
            run.save(last=True)
        record, note = run.records[-1], f"stopped early: {stopped}"
        if note not in record.notes:  # else a run that had stopped was resumed
            record = dataclasses.replace(record, notes=[*record.notes, note])
            if "validation/success" in record.metrics or run.settings.evaluation.prompts == 0:
                record = write_record(run, record)
            else:
                record = BestCheckpoint().on_step(run, Evaluations.evaluate(run, record))
            run.callbacks.on_step_end(record, run.timer.timings())
    run.callbacks.on_trained()
    run.saver.finish()
    if seconds := run.saver.take_seconds():  # the cost of the last checkpoint belongs to the last step, whose timings are written again
        run.timer.count_background("checkpoint", seconds)
        run.store.append_timings(run.step, run.timer.timings().to_json())


def check_evidence(records: Sequence[StepRecord]) -> None:
    """A run in which no episode ever ended by itself has learned nothing: that is a failure, and it has a cause."""
    causes = [every_episode_failed(record) for record in records if record.step]
    if causes and all(causes):
        failure = EnvironmentFailure(f"every episode of the run failed, nothing was learned; in the last step with: {causes[-1]}")
        failure.common = True
        raise failure
