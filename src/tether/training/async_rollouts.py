"""Asynchronous rollouts: a thread samples the batches of the next steps while the learner updates (`rollout.max_staleness` above 0).

Which weights sample which batch is fixed: the batch of step t is sampled with the weights after step t - 1 - max_staleness (those of the
start where that is less than 0), never with "whatever is ready". So the same seed gives the same run, and a slow machine changes times only.
What the filter is told (its share, the ratios of recent steps) is what is known when those weights are.

The weights are copied when their step ends, and published by the thread before it samples with them: the learner meanwhile changes its own.
Batches that are sampled but not yet trained on belong to a checkpoint; a resumed run trains on them.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import CheckpointError
from tether.core.protocols import AsyncEngine, EngineStatistics
from tether.core.types import Group, Trajectory, Turn
from tether.training.batch import SampledBatch, selected_again
from tether.training.settings import FilterSettings

CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the thread."""
THREAD_NAME = "asynchronous rollouts"


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """What decides about the filter of a batch, besides its groups."""

    keep: float
    """The filter's share, which alarm actions may have changed."""
    ratios: tuple[float, ...]
    """`groups/rv_ratio` of the recent steps, for strategy `auto`."""

    def rules(self, settings: FilterSettings) -> FilterSettings:
        return settings.model_copy(update={"keep": self.keep})


@dataclass(slots=True)
class BatchAhead:
    """A batch that was sampled for a later step, and what that took."""

    sampled: SampledBatch
    inputs: FilterInputs
    published: dict[str, float] = field(default_factory=dict)
    """Numbers of the publish of its weights, for the "update/" metrics."""
    statistics: list[EngineStatistics] = field(default_factory=list)
    seconds: float = 0.0


SampleStep = Callable[[int, FilterInputs, list[EngineStatistics]], SampledBatch]
"""Samples the batch of a step, and appends what the engine counted in each round."""


class AsyncRollouts:
    """The batches of the next steps, sampled in order by one thread.

    Args:
        engine: samples with weights of its own.
        max_staleness: how many updates the weights of a batch are behind.
        last_step: no batch is sampled for a later step.
        sample: samples one batch, in the thread.
    """

    def __init__(self, engine: AsyncEngine, max_staleness: int, last_step: int, sample: SampleStep) -> None:
        self._engine, self._max_staleness, self._last_step, self._sample = engine, max_staleness, last_step, sample
        self._batches: dict[int, Future[BatchAhead]] = {}
        """By step: in work, sampled, or being trained on. A batch stays until its step is complete: an interrupted step is not."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
        self._failure: BaseException | None = None
        self._published: dict[str, float] = {}
        """Numbers of the latest publish."""

    def prefetch(self, step: int, inputs: FilterInputs) -> list[int]:
        """After a step: sample what its weights are for. Returns the steps whose batch is missing and is sampled with newer weights.

        That is the next step's batch and `max_staleness` more: all at the start of a run, one after each step. After a resume from a
        checkpoint without them, and after a rollback, more than one is missing.
        """
        self._batches = {number: future for number, future in self._batches.items() if number > step}
        wanted = [number for number in range(step + 1, step + 2 + self._max_staleness) if number <= self._last_step]
        missing = [number for number in wanted if number not in self._batches]
        if missing:
            snapshot = self._engine.snapshot(step)
            for number in missing:
                self._submit(number, snapshot, inputs)
        return [number for number in missing if step > 0 and number < step + 1 + self._max_staleness]

    def take(self, step: int) -> BatchAhead:
        """The batch of a step, once it is sampled; raises what sampling it failed with."""
        return self._batches[step].result()

    def settle(self, version: int) -> None:
        """Wait until nothing is being sampled, then give the engine the policy's current weights, those after step `version`."""
        for future in list(self._batches.values()):
            future.result()
        if self._engine.version != version:
            self._published = self._engine.sync(version)

    def discard(self) -> None:
        """Forget what was sampled: other weights took the place of those it was sampled with."""
        for future in self._batches.values():
            future.exception()  # waits; what failed does not matter any more
        self._batches.clear()

    def _submit(self, step: int, snapshot: Any, inputs: FilterInputs) -> None:
        self._batches[step] = future = self._thread.submit(self._run, step, snapshot, inputs)
        future.add_done_callback(self._note_failure)  # runs in the thread, before its next batch

    def _note_failure(self, future: "Future[BatchAhead]") -> None:
        if not future.cancelled():
            self._failure = self._failure or future.exception()

    def _run(self, step: int, snapshot: Any, inputs: FilterInputs) -> BatchAhead:
        if self._failure is not None:  # one batch failed: those after it would, too
            raise self._failure
        start = time.perf_counter()
        if self._engine.version != snapshot.version:
            self._published = self._engine.publish(snapshot)
        else:  # a server that is restarted while the learner trains must get these weights, not the learner's
            self._engine.adopt(snapshot)
        statistics: list[EngineStatistics] = []
        sampled = self._sample(step, inputs, statistics)
        return BatchAhead(sampled, inputs, self._published, statistics, time.perf_counter() - start)

    # ------------------------------------------------------------------------------------------------------- checkpoints

    def state(self, step: int) -> str:
        """For the checkpoint of a step: the batches that its weights cannot sample again, as JSON. Waits for them; failed ones are left out."""
        batches = {}
        for number in range(step + 1, step + 1 + self._max_staleness):
            future = self._batches.get(number)
            if future is not None and future.exception() is None:
                batches[number] = _to_json(future.result())
        return json.dumps(batches)

    def is_busy(self, step: int) -> bool:
        """Whether `state` would have to wait."""
        return any(not future.done() for number, future in self._batches.items() if number <= step + self._max_staleness)

    def begin(self, published: dict[str, float], state: str | None, filter_settings: FilterSettings) -> None:
        """Begin with weights that were just published, and with what `state` gave, where the run is resumed."""
        self._published = published
        if not state:
            return
        try:
            for number, batch in json.loads(state).items():
                future: Future[BatchAhead] = Future()
                future.set_result(_from_json(batch, filter_settings))
                self._batches[int(number)] = future
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the sampled batches of the checkpoint cannot be read ({error}); move it away to resume from the one before it"
            ) from error

    def close(self) -> None:
        """End the thread; what it samples is given up."""
        self._engine.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait(self._batches.values(), CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _to_json(batch: BatchAhead) -> dict[str, Any]:
    sampled = batch.sampled
    return {
        "groups": [dataclasses.asdict(group) for group in sampled.groups],
        "num_first": len(sampled.first_round),
        "num_rounds": sampled.num_rounds,
        "num_wanted": sampled.num_wanted,
        "keep": batch.inputs.keep,
        "ratios": batch.inputs.ratios,
        "published": batch.published,
    }


def _from_json(data: Mapping[str, Any], filter_settings: FilterSettings) -> BatchAhead:
    inputs = FilterInputs(data["keep"], tuple(data["ratios"]))
    groups = [
        Group(**{**group, "trajectories": _trajectories(group["trajectories"]), "errored": _trajectories(group["errored"])})
        for group in data["groups"]
    ]
    sampled = selected_again(
        groups, data["num_first"], data["num_rounds"], data["num_wanted"], inputs.rules(filter_settings), inputs.ratios
    )
    return BatchAhead(sampled, inputs, data["published"])


def _trajectories(entries: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    return [
        Trajectory(**{**entry, "stop_reason": StopReason(entry["stop_reason"]), "turns": [_turn(turn) for turn in entry["turns"]]})
        for entry in entries
    ]


def _turn(entry: Mapping[str, Any]) -> Turn:
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    return Turn(**{**entry, **lists, "finish": FinishReason(entry["finish"])})
