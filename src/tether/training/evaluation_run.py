"""One evaluation from settings to record: a model that is loaded here, or one behind a chat endpoint.

With a folder to write to, three files of one name are left there: the record (.json), its page (.html) and, of an endpoint, the conversations
(.conversations.jsonl). A model behind an endpoint plays the same prompts, with the same seeds, and gets the same numbers as one that is loaded here.
Every conversation with it is written to the file when it ends. The same command continues that file: a conversation that ended is never asked
again, one that failed is. The file holds what was said and counted, and no key.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.enums import ERRORED
from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.types import Trajectory
from tether.models.chat_endpoint import ChatEndpoint, RemoteModel, api_key, is_endpoint
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.registry import DEFAULT_ENGINE
from tether.rollout.episode import EpisodeRules
from tether.rollout.remote import RemotePlayer
from tether.rollout.sampler import EnvPool, EnvSpec, error_note, group_trajectories
from tether.runs.evaluations import file_stem, prepare_folder, write_result
from tether.runs.pages import write_result_page
from tether.runs.schema import conversation_record, read_conversation
from tether.runs.store import append_records, read_records
from tether.training.build import build_sampler, compute_dtype, env_specs
from tether.training.callbacks import Callback, CallbackList
from tether.training.evaluate import Evaluation, evaluate, evaluation_plan, validation_specs
from tether.training.evaluation_record import Price, evaluation_record, identity
from tether.training.replies import few_valid_note
from tether.training.settings import RunSettings

CONVERSATIONS = ".conversations.jsonl"
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


def run_evaluation(
    settings: RunSettings,
    target: str,
    callbacks: Sequence[Callback] = (),
    *,
    endpoint: EndpointOptions | None = None,
    price: Price | None = None,
    out: Path | None = None,
) -> Evaluation:
    """Play the validation prompts.

    Args:
        settings: of the evaluation.
        target: the model or run as the user named it, for the record.
        callbacks: follow the progress.
        endpoint: how a model behind an endpoint is asked.
        price: of a million tokens of prompts and of completions.
        out: the folder that record, page and conversations are written to.
    """
    specs, options, began = evaluated_specs(settings), endpoint or EndpointOptions(), time.monotonic()
    identified = identity(settings, specs, target, options.body if is_endpoint(target) else {})
    stem = file_stem(identified)
    if out is not None:
        prepare_folder(out)
    if is_endpoint(target):
        journal = out / f"{stem}{CONVERSATIONS}" if out is not None else None
        result, precision = evaluate_endpoint(settings, specs, options, CallbackList(callbacks), journal), None
    else:
        result, precision = _evaluate_here(settings, specs, callbacks), compute_dtype(settings)
    if not any(group.trajectories for group in result.groups):
        raise EnvironmentFailure(f"nothing was measured: {error_note(result.groups)}")
    env = "+".join(spec.name for spec in specs)
    if note := few_valid_note(result.groups, env=env, model=settings.model.name, max_tokens=settings.rollout.max_tokens):
        result.notes.append(note)
    record = evaluation_record(result, identified, target, precision=precision, seconds=time.monotonic() - began, price=price)
    if out is not None:
        write_result(record, out / f"{stem}.json")
        write_result_page(record, out / f"{stem}.html")
    return dataclasses.replace(result, record=record, files=out / stem if out is not None else None)


def _evaluate_here(settings: RunSettings, specs: Sequence[EnvSpec], callbacks: Sequence[Callback]) -> Evaluation:
    loaded = load_model(settings.model.name, device=settings.model.device, dtype=compute_dtype(settings))
    policy = Policy(loaded.model, loaded.tokenizer, max_positions=settings.rollout.max_context)
    sampler = build_sampler(settings, policy, CallbackList(callbacks))
    evaluation = settings.evaluation
    return evaluate(sampler, evaluation.prompts, settings.evaluation_sampling(), samples=evaluation.samples, specs=specs)


def evaluated_specs(settings: RunSettings) -> list[EnvSpec]:
    """The environments of an evaluation: a split that was asked for is played, otherwise it is the validation split."""
    if settings.evaluation.env is not None:
        return env_specs([settings.evaluation.env])
    return [spec if "split" in spec.options else validation_specs([spec])[0] for spec in env_specs(settings.environments())]


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
