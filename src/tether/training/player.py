"""Playing the episodes of a run: its environments, the engine on the policy's own weights, and what to do where memory runs out.

A rollout that does not fit is played once more from its start, with half the rows. Every episode has seeds of its own, so what comes of it is
the same; only how many episodes live at a time is not. The smaller number holds for the rest of the process.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from tether.core.errors import OutOfMemory
from tether.core.types import Group
from tether.models.chat import ChatFormat
from tether.rollout.collect import training_plan
from tether.rollout.engines.native import NativeEngine
from tether.rollout.env_pool import EnvPool
from tether.training.evaluate import Evaluation, env_specs, evaluate
from tether.training.fit import GIB
from tether.training.memory import forget_failed, memory_boundary
from tether.training.parts import Parts, episode_rules
from tether.training.settings import RunSettings
from tether.training.watch import Callback

Played = TypeVar("Played")


class Player:
    """Plays what a run trains on and what it is validated on."""

    def __init__(self, settings: RunSettings, parts: Parts, watcher: Callback) -> None:
        self._settings, self._watcher = settings, watcher
        self._model, self._tokenizer, self._fit = parts.model, parts.tokenizer, parts.fit
        self.chat = ChatFormat(parts.tokenizer)
        self._rules = episode_rules(settings, parts.model)
        self.env_pool = EnvPool(env_specs(settings.environments()))
        self.max_rows = settings.rollout.max_rows
        self.engine = self._new_engine()
        self._notes: list[str] = []

    def train(self, step: int, num_groups: int, first: int) -> list[Group]:
        """New prompts of a step, from a place in its sequence of prompts on."""
        settings = self._settings
        plan = training_plan(settings.seed, step, num_groups, settings.rollout.group_size, first, self.env_pool.weights)
        return self.env_pool.play(plan, self.engine, self.chat, settings.sampling(), self._rules, self._watcher.advance)

    def validate(self) -> Evaluation:
        """The fixed validation prompts."""
        settings, chosen = self._settings, self._settings.evaluation
        return evaluate(
            env_specs(settings.environments()),
            self.engine,
            self.chat,
            chosen.prompts,
            settings.evaluation_sampling(),
            self._rules,
            self._watcher.advance,
            samples=chosen.samples,
        )

    def within_memory(self, stage: str, episodes: int, play: Callable[[], Played]) -> Played:
        """What `play` gives; where memory runs out, from a second attempt with half the rows."""
        try:
            with memory_boundary(stage, self._remedy()):
                return play()
        except OutOfMemory:
            if self.max_rows == 1:
                raise
        # Not inside the handler: the tensors of the failed attempt live as long as its error does.
        del self.engine
        self.env_pool.close()  # environments may be half-way through an episode
        forget_failed(self._model.device)
        before, self.max_rows = self.max_rows, self.max_rows // 2
        self.engine = self._new_engine()
        self._notes.append(f"out of memory in the {stage} with rollout.max_rows={before}; played again with {self.max_rows}")
        self._watcher.stage(stage, episodes)
        with memory_boundary(stage, self._remedy()):
            return play()

    def take_notes(self) -> list[str]:
        """What happened since this was last asked."""
        notes, self._notes = self._notes, []
        return notes

    def counts(self) -> dict[str, float]:
        """What the engine counted the last time it played."""
        return dataclasses.asdict(self.engine.statistics)

    def engine_note(self) -> str | None:
        """What to say of an engine that is not the fast one."""
        if self.engine.backend == ("paged" if self._model.device.type == "cuda" else "contiguous"):
            return None
        kind = self._model.config.model_type
        return f"models of type '{kind}' have no fast path of their own here: the engine decodes in the {self.engine.backend} way, which is slower"

    def _new_engine(self) -> NativeEngine:
        cache_gb = self._settings.rollout.cache_gb
        if cache_gb is None and self._fit is not None:  # not from what is free now: the optimiser takes its memory with the first update
            cache_gb = self._fit.cache / GIB
        return NativeEngine(self._model, self._tokenizer, max_rows=self.max_rows, max_context=self._rules.max_context, cache_gb=cache_gb)

    def _remedy(self) -> str:
        return f"lower rollout.max_rows (now {self.max_rows})"
