"""Asynchronous rollouts: a thread samples the batches of the next steps while the learner updates (`rollout.max_staleness` above 0).

Which weights sample which batch is fixed: the batch of step t is sampled with the weights after step t - 1 - max_staleness (those of the
start where that is less than 0), never with "whatever is ready". So the same seed gives the same run, and a slow machine changes times only.
What the filter is told (its share, the ratios of recent steps), and what prompts are chosen by, is what is known when those weights are.

The weights are copied when their step ends, and published by the thread before it samples with them: the learner meanwhile changes its own.
Batches that are sampled but not yet trained on belong to a checkpoint; a resumed run trains on them.
"""

import base64
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from tether.core.enums import Decision, FinishReason, StopReason
from tether.core.errors import CheckpointError
from tether.core.images import Image
from tether.core.protocols import AsyncEngine, EngineStatistics
from tether.core.types import Group, Trajectory, Turn
from tether.rollout.prompt_memory import PromptChooser, PromptMemory
from tether.rollout.sampler import Sampler, check_resets
from tether.runs.schema import images_of
from tether.training.batch import FilterInputs, Rollouts, SampledBatch, sample_batch, selected_again
from tether.training.callbacks import Callback
from tether.training.settings import RunSettings
from tether.training.throughput import StepTimer

CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the thread."""
THREAD_NAME = "asynchronous rollouts"


@dataclass(slots=True)
class BatchAhead:
    """A batch that was sampled for a later step, and what that took."""

    sampled: SampledBatch
    inputs: FilterInputs
    published: dict[str, float] = field(default_factory=dict)
    """Numbers of the publish of its weights, for the "update/" metrics."""
    statistics: list[EngineStatistics] = field(default_factory=list)
    seconds: float = 0.0


class AsyncRollouts(Rollouts):
    """The batches of the next steps, sampled in order by one thread, with an engine that has weights of its own."""

    def __init__(
        self, settings: RunSettings, sampler: Sampler, timer: StepTimer, callbacks: Callback, prompt_memory: PromptMemory | None = None
    ) -> None:
        super().__init__(settings, sampler, timer, callbacks, prompt_memory)
        assert isinstance(sampler.engine, AsyncEngine)  # the settings allow no other
        self._engine, self._max_staleness, self._last_step = sampler.engine, settings.rollout.max_staleness, settings.steps
        self._batches: dict[int, Future[BatchAhead]] = {}
        """By step: in work, sampled, or being trained on. A batch stays until its step is complete: an interrupted step is not."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        self._failure: BaseException | None = None
        self._published: dict[str, float] = {}
        """Numbers of the latest publish."""
        self._published_for_step: dict[str, float] = {}
        """Numbers of the publish of the weights that sampled the batch of the present step."""

    def begin(self, step: int, state: str | None) -> None:
        self._published = self._engine.sync(step)
        try:
            for number, batch in json.loads(state or "{}").items():
                future: Future[BatchAhead] = Future()
                future.set_result(_from_json(batch, self._settings))
                self._batches[int(number)] = future
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the sampled batches of the checkpoint cannot be read ({error}); move it away to resume from the one before it"
            ) from error

    def sample(self, step: int, inputs: FilterInputs) -> SampledBatch:
        """The batch of a step, once it is sampled; raises what sampling it failed with."""
        self._callbacks.on_stage_begin("wait", 1)
        with self._timer.stage("wait"):
            batch = self._batches[step].result()
        self._timer.count_background("rollout", batch.seconds)
        for statistics in batch.statistics:
            self._timer.count_engine(statistics)
        self._timer.count_rollout(batch.sampled.groups)
        self._published_for_step = batch.published
        check_resets(batch.sampled.groups, f"step {step}")
        return batch.sampled

    def prefetch(self, step: int, inputs: FilterInputs) -> None:
        """That is the next step's batch and `max_staleness` more: all at the start of a run, one after each step. After a resume from a
        checkpoint without them, and after a rollback, more than one is missing, and is sampled with newer weights; that is said."""
        self._batches = {number: future for number, future in self._batches.items() if number > step}
        wanted = [number for number in range(step + 1, step + 2 + self._max_staleness) if number <= self._last_step]
        missing = [number for number in wanted if number not in self._batches]
        if missing:
            snapshot = self._engine.snapshot(step)
            for number in missing:
                self._batches[number] = self._thread.submit(self._run, number, snapshot, inputs, self._chooser(number))
        for number in missing:
            if step > 0 and number < step + 1 + self._max_staleness:
                self._callbacks.on_note(
                    f"the batch of step {number} that was sampled ahead is not there; it is sampled with the weights of step {step}"
                )

    def publish(self, step: int) -> dict[str, float]:
        """The thread publishes the new weights when it has sampled with those before them."""
        return self._published_for_step

    def settle(self, step: int) -> None:
        """Wait until nothing is being sampled, then give the engine the policy's current weights."""
        with self._timer.stage("wait"):
            for future in list(self._batches.values()):
                future.result()
            if self._engine.version != step:
                self._published = self._engine.sync(step)

    def replace_weights(self, step: int) -> None:
        """Forget what was sampled with the weights before."""
        for future in self._batches.values():
            future.exception()  # waits; what failed does not matter any more
        self._batches.clear()

    def _run(self, step: int, snapshot: Any, inputs: FilterInputs, choose: PromptChooser | None) -> BatchAhead:
        """The batch of a step, sampled in the thread, where nothing is measured or reported."""
        settings, sampler, statistics = self._settings, self._sampler, list[EngineStatistics]()

        def play(count: int, first: int) -> list[Group]:
            groups = self.play(step, count, first, inputs, choose, quiet=True)
            statistics.append(sampler.statistics)
            return groups

        if self._failure is not None:  # one batch failed: those after it would, too
            raise self._failure
        start = time.perf_counter()
        try:
            if self._engine.version != snapshot.version:
                self._published = self._engine.publish(snapshot)
            else:  # a server that is restarted while the learner trains must get these weights, not the learner's
                self._engine.adopt(snapshot)
            chosen = settings.rollout
            sampled = sample_batch(play, chosen.num_groups, inputs.rules(settings.filter), inputs.ratios, chosen.first_members)
        except BaseException as error:
            self._failure = error
            raise
        return BatchAhead(sampled, inputs, self._published, statistics, time.perf_counter() - start)

    def state(self, step: int) -> dict[str, str]:
        """The batches that the weights of the step cannot sample again, as JSON. Waits for them; failed ones are left out."""
        batches = {}
        with self._timer.stage("wait"):
            for number in range(step + 1, step + 1 + self._max_staleness):
                future = self._batches.get(number)
                if future is not None and future.exception() is None:
                    batches[number] = _to_json(future.result())
        return {"batches_ahead": json.dumps(batches)}

    def is_busy(self, step: int) -> bool:
        return any(not future.done() for number, future in self._batches.items() if number <= step + self._max_staleness)

    def close(self) -> None:
        """End the thread; what it samples is given up."""
        self._engine.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait(self._batches.values(), CLOSE_SECONDS)


def _to_json(batch: BatchAhead) -> dict[str, Any]:
    sampled = batch.sampled
    images = images_of(t for group in sampled.groups for t in (*group.trajectories, *group.errored))
    return {
        "groups": [dataclasses.asdict(group, dict_factory=_plain) for group in sampled.groups],
        **({"images": {image.digest: base64.b64encode(image.png).decode() for image in images}} if images else {}),
        "num_first": len(sampled.first_round),
        "num_rounds": sampled.num_rounds,
        "num_wanted": sampled.num_wanted,
        "keep": batch.inputs.keep,
        "ratios": batch.inputs.ratios,
        "published": batch.published,
    }


def _plain(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A record with the digests of its pictures, which stand apart, each once."""
    return {name: [image.digest for image in value] if name == "images" else value for name, value in fields}


def _from_json(data: Mapping[str, Any], settings: RunSettings) -> BatchAhead:
    inputs = FilterInputs(data["keep"], tuple(data["ratios"]))
    images = {digest: Image.read(base64.b64decode(png)) for digest, png in data.get("images", {}).items()}
    groups = [
        Group(**{**group, **{name: _trajectories(group[name], images) for name in ("trajectories", "errored")}}) for group in data["groups"]
    ]
    for group in groups:
        group.decision = None if group.decision is None else Decision(group.decision)
    counts = (data["num_first"], data["num_rounds"], data["num_wanted"])
    sampled = selected_again(groups, *counts, inputs.rules(settings.filter), inputs.ratios, settings.rollout.first_members)
    return BatchAhead(sampled, inputs, data["published"])


def _trajectories(entries: Sequence[Mapping[str, Any]], images: Mapping[str, Image]) -> list[Trajectory]:
    return [
        Trajectory(**{**entry, "stop_reason": StopReason(entry["stop_reason"]), "turns": [_turn(turn, images) for turn in entry["turns"]]})
        for entry in entries
    ]


def _turn(entry: Mapping[str, Any], images: Mapping[str, Image]) -> Turn:
    lists: dict[str, Any] = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    lists["images"] = tuple(images[digest] for digest in entry.get("images", ()))
    return Turn(**{**entry, **lists, "finish": FinishReason(entry["finish"])})
