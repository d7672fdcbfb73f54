"""The record of an evaluation, as it is saved and published: what was played, how, by which software, and what came of it.

The fields are listed in docs/evaluation.md; `tether.runs.evaluations` reads and compares records. No key is among them, and data files are
named without their folder.
"""

import hashlib
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tether.core.config import Settings
from tether.core.enums import FinishReason
from tether.core.types import Group, Trajectory
from tether.core.version import __version__
from tether.envs.registry import env_factory, make_env
from tether.rollout.sampler import EnvSpec
from tether.runs.evaluations import KIND, SCHEMA, file_digest
from tether.training.evaluate import Evaluation
from tether.training.settings import RunSettings

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "httpx")
EXAMPLES = 3
"""Of each kind: episodes that solved their task, and episodes that did not."""
DECIMALS = 6

Price = tuple[float, float]
"""Of a million tokens: of prompts, of completions."""


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
        "cut_responses": sum(turn.finish is FinishReason.LENGTH for t in _every(result.groups) for turn in t.turns),
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


def _every(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


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


def _examples(groups: Sequence[Group], *, success: bool) -> list[dict[str, Any]]:
    """The first episodes of their kind, of different prompts."""
    found = [next((t for t in group.trajectories if t.success is success and t.turns), None) for group in groups]
    return [
        {
            "env": t.env,
            "prompt": t.group,
            "sample": t.member,
            "reward": round(t.reward, DECIMALS),
            "stop_reason": str(t.stop_reason),
            "turns": [{"observation": turn.observation, "response": turn.text, "valid": turn.valid} for turn in t.turns],
        }
        for t in found
        if t is not None
    ][:EXAMPLES]
