"""Evaluation of a model behind a chat endpoint: the same prompts, seeds and numbers as of a model that is loaded here.

Every conversation is written to a file when it ends. The same command continues that file: a conversation that ended is never asked again, one
that failed is. The file holds what was said and counted, and no key.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.enums import ERRORED
from tether.core.errors import BadInput
from tether.core.types import Trajectory
from tether.models.chat_endpoint import ChatEndpoint, RemoteModel, api_key
from tether.rollout.engines.registry import DEFAULT_ENGINE
from tether.rollout.episode import EpisodeRules
from tether.rollout.remote import RemotePlayer
from tether.rollout.sampler import EnvPool, EnvSpec, group_trajectories
from tether.runs.schema import conversation_record, read_conversation
from tether.runs.store import append_records, read_records
from tether.training.callbacks import Callback
from tether.training.evaluate import Evaluation, evaluation_plan
from tether.training.settings import RunSettings

DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """How a model behind a chat endpoint is asked."""

    concurrency: int = DEFAULT_CONCURRENCY
    """Conversations at a time."""
    api_key_env: str | None = None
    """The variable that holds the key; None takes TETHER_TOKEN or OPENAI_API_KEY, if set."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request; None leaves out a field that would be sent."""


def evaluate_endpoint(
    settings: RunSettings, specs: Sequence[EnvSpec], options: EndpointOptions, callbacks: Callback, journal: Path | None = None
) -> Evaluation:
    """Play the prompts of an evaluation; `journal`: the file that conversations are written to, and continued from."""
    check_endpoint_settings(settings, options)
    key, source = api_key(options.api_key_env)
    endpoint = ChatEndpoint(
        RemoteModel.parse(settings.model.name),
        key=key,
        key_source=source,
        timeout=settings.server.timeout,
        parallel=options.concurrency,
        body=options.body,
    )
    with endpoint, EnvPool(specs) as pool:
        endpoint.connect()
        plan = evaluation_plan(pool, settings.evaluation.prompts, settings.evaluation.samples)
        book = _Journal(journal)
        left = [seeds for seeds in plan if not book.holds(seeds.group, seeds.member)]
        callbacks.on_stage_begin("validation", len(left))

        def ended(trajectory: Trajectory, again: bool) -> None:
            book.add(trajectory)
            if not again:
                callbacks.on_stage_progress()

        player = RemotePlayer(
            pool,
            endpoint,
            settings.evaluation_sampling(),
            episode_rules(settings),
            concurrency=options.concurrency,
            error_retries=settings.rollout.error_retries,
        )
        player.play(left, ended)
    last = [book.last[seeds.group, seeds.member] for seeds in plan]
    notes = endpoint.notes
    if len(left) < len(plan):
        notes.append(f"{len(plan) - len(left)} of {len(plan)} conversations were found in {journal} and not asked again")
    return Evaluation(group_trajectories(last), mixed=len(specs) > 1, attempts=book.attempts(last), notes=notes)


def check_endpoint_settings(settings: RunSettings, options: EndpointOptions) -> None:
    """Refuse what an endpoint cannot do."""
    rollout = settings.rollout
    if options.concurrency < 1:
        raise BadInput(f"concurrency is {options.concurrency}; give at least 1")
    if rollout.engine != DEFAULT_ENGINE:
        raise BadInput(f"'{settings.model.name}' is asked at its address, so rollout.engine '{rollout.engine}' has no use; leave it out")
    if rollout.stop_ids or rollout.overlong_share:
        raise BadInput("rollout.stop_ids and rollout.overlong_share count the tokens of a model that is loaded here; leave them out")


def episode_rules(settings: RunSettings) -> EpisodeRules:
    """The rules of an episode. Its conversation is as long as the server allows: tokens are not counted here."""
    rollout = settings.rollout
    return EpisodeRules(sys.maxsize, rollout.max_tokens, rollout.format_penalty, rollout.context, rollout.last_k)


class _Journal:
    """The conversations that have ended, by prompt and sample, in memory and in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._every = [read_conversation(record) for record in read_records(path)] if path is not None else []
        self.last = {(trajectory.group, trajectory.member): trajectory for trajectory in self._every}

    def holds(self, group: int, member: int) -> bool:
        """Whether a conversation ended without an error."""
        found = self.last.get((group, member))
        return found is not None and found.stop_reason not in ERRORED

    def add(self, trajectory: Trajectory) -> None:
        if self._path is not None:
            append_records(self._path, [conversation_record(trajectory)])
        self._every.append(trajectory)
        self.last[trajectory.group, trajectory.member] = trajectory

    def attempts(self, last: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that others took the place of."""
        kept = set(map(id, last))
        return [trajectory for trajectory in self._every if id(trajectory) not in kept]
