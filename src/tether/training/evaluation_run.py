"""One evaluation from settings to record: a model that is loaded here, or one behind a chat endpoint.

With a folder to write to, three files of one name are left there: the record (.json), its page (.html) and, of an endpoint, the conversations
(.conversations.jsonl). A model behind an endpoint plays the same prompts, with the same seeds, and gets the same numbers as one that is loaded here.
Every conversation with it is written to the file when it ends. The same command continues that file: a conversation that ended is never asked
again, one that failed is. The file holds what was said and counted, and no key.

The fields of the record are listed in docs/evaluation.md; `tether.runs.evaluations` reads and compares records. No key is among them, and data files
are named without their folder.
"""

import dataclasses
import hashlib
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tether.core.config import Settings
from tether.core.enums import ERRORED, FinishReason
from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.types import Group, Trajectory
from tether.core.version import __version__
from tether.envs.registry import env_factory, make_env
from tether.models.chat_endpoint import ChatEndpoint, RemoteModel, api_key, is_endpoint
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.registry import DEFAULT_ENGINE
from tether.rollout.episode import EpisodeRules
from tether.rollout.remote import RemotePlayer
from tether.rollout.sampler import EnvPool, EnvSpec, error_note, group_trajectories
from tether.runs.evaluations import KIND, SCHEMA, file_digest, file_stem, prepare_folder, write_result
from tether.runs.images import read_image, write_images
from tether.runs.pages import write_result_page
from tether.runs.schema import conversation_record, images_of, read_conversation
from tether.runs.store import append_records, read_records
from tether.training.build import agent_player, build_sampler, compute_dtype, env_specs
from tether.training.callbacks import Callback, CallbackList
from tether.training.evaluate import Evaluation, evaluate, evaluation_plan, validation_specs
from tether.training.replies import few_valid_note, not_begun_note
from tether.training.settings import RunSettings

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "httpx")
EXAMPLES = 3
"""Of each kind: episodes that solved their task, and episodes that did not."""
DECIMALS = 6

Price = tuple[float, float]
"""Of a million tokens: of prompts, of completions."""
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
        precision = None
        result = evaluate_endpoint(settings, specs, options, CallbackList(callbacks), journal)
    else:
        precision = compute_dtype(settings)
        loaded = load_model(settings.model.name, device=settings.model.device, dtype=precision)
        policy = Policy(loaded.model, loaded.tokenizer, max_positions=settings.rollout.max_context)
        sampler, asked = build_sampler(settings, policy, CallbackList(callbacks)), settings.evaluation
        result = evaluate(sampler, asked.prompts, settings.evaluation_sampling(), samples=asked.samples, specs=specs)
    if not any(group.trajectories for group in result.groups):
        raise EnvironmentFailure(f"nothing was measured: {error_note(result.groups)}")
    if short := not_begun_note(result.groups, settings.rollout.max_tokens):
        if not result.tokens["responses"]:  # a rate of 0 would look like a policy that fails
            raise BadInput(f"nothing was measured: {short}")
        result.notes.append(short)
    env = "+".join(spec.name for spec in specs)
    if note := few_valid_note(result.groups, env=env, model=settings.model.name, max_tokens=settings.rollout.max_tokens):
        result.notes.append(note)
    record = evaluation_record(result, identified, target, precision=precision, seconds=time.monotonic() - began, price=price)
    if out is not None:
        write_images(out, images_of(t for kind in (True, False) for t in _shown(result.groups, success=kind)))
        write_result(record, out / f"{stem}.json")
        write_result_page(record, out / f"{stem}.html")
    return dataclasses.replace(result, record=record, files=out / stem if out is not None else None)


def evaluated_specs(settings: RunSettings) -> list[EnvSpec]:
    """The environments of an evaluation: a split that was asked for is played, otherwise it is the validation split."""
    if settings.evaluation.env is not None:
        return env_specs([settings.evaluation.env], agent_player(settings.agent))
    own = env_specs(settings.environments(), agent_player(settings.agent))
    return [spec if "split" in spec.options else validation_specs([spec])[0] for spec in own]


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
    notes = list(endpoint.notes)
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
        self._every: list[Trajectory] = []
        if path is not None:
            self._every += [read_conversation(record, partial(read_image, path.parent)) for record in read_records(path)]
        self.last = {(trajectory.group, trajectory.member): trajectory for trajectory in self._every}

    def holds(self, group: int, member: int) -> bool:
        """Whether a conversation ended without an error."""
        found = self.last.get((group, member))
        return found is not None and found.stop_reason not in ERRORED

    def add(self, trajectory: Trajectory) -> None:
        if self._path is not None:
            write_images(self._path.parent, images_of([trajectory]))
            append_records(self._path, [conversation_record(trajectory)])
        self._every.append(trajectory)
        self.last[trajectory.group, trajectory.member] = trajectory

    def attempts(self, last: Sequence[Trajectory]) -> list[Trajectory]:
        """Those that others took the place of."""
        kept = set(map(id, last))
        return [trajectory for trajectory in self._every if id(trajectory) not in kept]


# ------------------------------------------------------------------------------------------------------------------ the record


def identity(settings: RunSettings, specs: Sequence[EnvSpec], target: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an evaluation this one: equal for a command that is given again, different where anything that matters differs."""
    return {
        "model": _model(target)["name"],
        "address": _model(target)["address"],
        "environments": [environment(spec) for spec in specs],
        "protocol": protocol(settings, specs, body),
    }


def environment(spec: EnvSpec) -> dict[str, Any]:
    """An environment with every option, and the hashes of the files that its options name."""
    options = getattr(make_env(spec.name, **spec.options), "options", None)
    values = options.model_dump(mode="json") if isinstance(options, Settings) else dict(spec.options)
    known = env_factory(spec.name).options
    secret = {"token"} if known is None else {name for name, field in known.model_fields.items() if not field.repr}
    data = {}
    for name, value in values.items():
        if name not in secret and _names_a_file(value, getattr(options, name, None)):
            path = Path(value).expanduser()
            data[name] = {"name": path.name, "sha256": file_digest(path)}
    shown = {name: value for name, value in values.items() if name not in secret and name not in data}
    return {"name": spec.name, "options": shown, "data": data}


def _names_a_file(value: Any, option: Any) -> bool:
    """Whether the value of an option is a file or folder that is there. A plain word, such as the name of a split, never is."""
    if not isinstance(value, str) or not value:
        return False
    return (isinstance(option, Path) or "/" in value or bool(Path(value).suffix)) and Path(value).expanduser().exists()


def protocol(settings: RunSettings, specs: Sequence[EnvSpec], body: Mapping[str, Any]) -> dict[str, Any]:
    """How prompts were played and responses drawn."""
    rollout, evaluation = settings.rollout, settings.evaluation
    sampling = {name: getattr(rollout, name) for name in ("max_tokens", "top_p", "top_k", "min_p", "stop_strings")}
    episodes = {name: getattr(rollout, name) for name in ("context", "last_k", "format_penalty", "max_context")}
    return {
        "prompts": evaluation.prompts,
        "samples": evaluation.samples,
        "temperature": evaluation.temperature,
        **sampling,
        **episodes,
        "weights": [spec.weight for spec in specs],
        "body": dict(body),
    }


def evaluation_record(
    result: Evaluation,
    identified: Mapping[str, Any],
    target: str,
    *,
    precision: str | None = None,
    seconds: float,
    price: Price | None = None,
) -> dict[str, Any]:
    """The whole record.

    Args:
        result: what was found.
        identified: its `identity`.
        target: the model or run as the user named it.
        precision: what a model that was loaded here computes in.
        seconds: that it took.
        price: of a million tokens.
    """
    tokens: dict[str, Any] = dict(result.tokens)
    if price is not None:
        cost = (tokens["prompt"] * price[0] + tokens["completion"] * price[1]) / 1e6
        tokens |= {"price": list(price), "cost": None if tokens["uncounted"] else round(cost, DECIMALS)}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(seconds, 1),
        "model": {**_model(target), "precision": precision},
        "environments": identified["environments"],
        "protocol": {**identified["protocol"], "prompts": len(result.groups)},
        "versions": {"tether": __version__, "python": platform.python_version(), **_versions()},
        "metrics": {name: float(value) for name, value in result.metrics.items()},
        "intervals": {name: None if ends is None else list(ends) for name, ends in result.intervals.items()},
        "by_environment": result.environments if result.mixed else {},
        "tokens": tokens,
        "cut_responses": sum(turn.finish is FinishReason.LENGTH for group in result.groups for t in group.trajectories for turn in t.turns),
        "instances": [_instance(group) for group in result.groups],
        "failed": [
            {"env": group.env, "prompt": group.index, "sample": t.member, "reason": t.error}
            for group in result.groups
            for t in group.errored
        ],
        "examples": {
            "successes": _examples(result.groups, success=True),
            "failures": _examples(result.groups, success=False),
        },
        "notes": list(result.notes),
    }


def _model(target: str) -> dict[str, Any]:
    """The name of a model for people, and its address where it has one."""
    if "://" not in target:
        return {"name": target, "address": None}
    url, _, name = target.partition("#")
    return {"name": name or url, "address": url}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # an optional one
    return found


def _instance(group: Group) -> dict[str, Any]:
    """The outcomes on one prompt. Its key is a hash of what was shown first: equal wherever the same instance is played."""
    shown = next((t.turns[0].observation for t in (*group.trajectories, *group.errored) if t.turns), f"prompt {group.index}")
    played = group.trajectories
    return {
        "env": group.env,
        "prompt": group.index,
        "seed": group.seed,
        "key": hashlib.sha256(f"{group.env}\n{shown}".encode()).hexdigest()[:16],
        "categories": next((dict(t.categories) for t in played if t.categories), {}),
        "successes": [int(t.success) for t in played],
        "rewards": [round(t.reward, DECIMALS) for t in played],
        "failed": len(group.errored),
    }


def _shown(groups: Sequence[Group], *, success: bool) -> list[Trajectory]:
    """The first episodes of their kind, of different prompts."""
    found = [next((t for t in group.trajectories if t.success is success and t.turns), None) for group in groups]
    return [t for t in found if t is not None][:EXAMPLES]


def _examples(groups: Sequence[Group], *, success: bool) -> list[dict[str, Any]]:
    return [
        {
            "env": t.env,
            "prompt": t.group,
            "sample": t.member,
            "reward": round(t.reward, DECIMALS),
            "stop_reason": str(t.stop_reason),
            "turns": [
                {
                    **{"observation": turn.observation, "response": turn.text, "valid": turn.valid},
                    **({"images": [image.digest for image in turn.images]} if turn.images else {}),
                }
                for turn in t.turns
            ],
        }
        for t in _shown(groups, success=success)
    ]
