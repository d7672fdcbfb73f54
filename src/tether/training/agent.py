"""How an agent is asked: its environments with their options (wording, examples), the context it sees, and how long it may answer.

A trained model answers well in the form that it was trained in, and often in no other. So every model folder that Tether writes holds an
`agent.json`: the model of a checkpoint, an export, the result of `tether sft`. What is played with such a model, and is not set otherwise, is
taken from there, and said. Options that name files of the machine it was made on are left out.

    {"version": 1, "environments": {"frozen_lake": {"instructions": "plain", "few_shot": null, ...}}, "rollout": {"max_tokens": 80, ...}}

A folder may have come from somebody else: what it names is imported only where it is installed (`check_received`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.config import Settings, merge
from tether.core.errors import BadInput
from tether.core.importing import is_import_path
from tether.envs.registry import ENVIRONMENTS, check_received, env_factory
from tether.models.catalog import MERGED, TRAINED_WORDING
from tether.models.chat_endpoint import is_endpoint
from tether.runs.store import ABOUT, RunStore
from tether.training.settings import RolloutSettings
from tether.training.sft.settings import RECORD

AGENT = "agent.json"
VERSION = 1
ROLLOUT = (
    "max_tokens", "max_context", "context", "last_k", "format_penalty", "top_k", "top_p", "min_p", "stop_ids", "stop_strings",
)  # fmt: skip
"""Settings of the section `rollout` that decide what the agent sees, and how its responses are drawn and end."""
EXAMPLES = ("instructions", "few_shot")
"""Options of environments that word a prompt, and of which an embedded model has its own."""


@dataclass(frozen=True, slots=True)
class Agent:
    """How one agent is asked."""

    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options by environment."""
    rollout: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Agent":
        """Of the nested settings of a run."""
        sections = (section for section in (config.get("env"), *(config.get("also") or [])) if isinstance(section, Mapping))
        rollout = config.get("rollout") or {}
        return cls(
            {str(section.get("name")): _without_split(section.get("options") or {}) for section in sections},
            {name: rollout[name] for name in ROLLOUT if name in rollout},
        )

    def write(self, folder: Path) -> None:
        """Write the file into a model folder; nothing where there is nothing to say."""
        if self.environments:
            environments = {
                name: {key: value for key, value in options.items() if not _names_a_file(value)}
                for name, options in self.environments.items()
            }
            data = {"version": VERSION, "environments": environments, "rollout": dict(self.rollout)}
            (folder / AGENT).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, model: str) -> "Agent | None":
        """Of a model folder; None where nothing is known of it. Folders of earlier versions have a run folder around them, or a record of `tether sft`."""
        folder = Path(model.removeprefix(MERGED))
        if is_endpoint(model) or not folder.is_dir():
            return None
        if (folder / AGENT).is_file():
            return _parsed(folder / AGENT)
        run = folder.resolve().parents[2] if len(folder.resolve().parents) > 2 else folder
        if folder.resolve().parent.parent.name == "checkpoints" and (run / ABOUT).is_file():
            return cls.of_config(RunStore.open(run).config())
        return _taught(folder / RECORD) if (folder / RECORD).is_file() else None

    def beneath(self, data: Mapping[str, Any], words: str) -> tuple[dict[str, Any], list[str]]:
        """Nested settings with what they leave open as this agent was trained, and a note on what that is; `words` begin it."""
        said: list[str] = []

        def asked(section: Any) -> Any:
            if not isinstance(section, Mapping) or not isinstance(section.get("options", {}), Mapping | None):
                return section
            name, given = str(section.get("name")), section.get("options") or {}
            taken = {key: value for key, value in self._options(name).items() if key not in given}
            known = env_factory(name).options if name in ENVIRONMENTS.names() else None
            if differing := _differing(taken, known):
                said.append(f"{name} with {differing}")
            return {**section, "options": {**taken, **given}}

        changed: dict[str, Any] = {**data, "env": asked(data.get("env"))} if "env" in data else dict(data)
        if isinstance(data.get("also"), list):
            changed["also"] = [asked(section) for section in data["also"]]
        given = data.get("rollout") or {}
        if isinstance(given, Mapping):
            taken = {name: value for name, value in self.rollout.items() if name not in given}
            changed["rollout"] = merge(taken, given)
            said += [differing] if (differing := _differing(taken, RolloutSettings)) else []
        how = "--set env.options.NAME or rollout.NAME asks in another way"
        return changed, [f"{words}: {'; '.join(said)} ({how})"] if said else []

    def for_model(self, model: str) -> "Agent":
        """The same terms for another model that is compared with this one; an embedded model keeps the wording that it was trained on, a served one
        its own lengths."""
        own = TRAINED_WORDING.get(model)
        environments = {
            name: {key: value for key, value in options.items() if key not in EXAMPLES}
            if own not in (None, options.get("instructions"))
            else options
            for name, options in self.environments.items()
        }
        return Agent(environments, {} if is_endpoint(model) else self.rollout)

    def _options(self, env: str) -> Mapping[str, Any]:
        """Of an environment that the agent does not know: the wording of those it knows."""
        if env in self.environments or env not in ENVIRONMENTS.names():
            return self.environments.get(env, {})
        wordings = [options["instructions"] for options in self.environments.values() if "instructions" in options]
        known = env_factory(env).options
        return {"instructions": wordings[0]} if wordings and known is not None and "instructions" in known.model_fields else {}


def _parsed(path: Path) -> Agent:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["version"] > VERSION:
            raise ValueError(f"version {data['version']}, this Tether reads up to {VERSION}: upgrade Tether")
        agent = Agent(
            {str(name): _without_split(dict(options)) for name, options in data["environments"].items()},
            {name: data["rollout"][name] for name in ROLLOUT if name in data["rollout"]},
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"'{path}' cannot be read ({' '.join(str(error).split())[:100]}); delete it to ask the model with the defaults"
        ) from error
    for name, options in agent.environments.items():
        for what in ("reward", "opponent"):
            if isinstance(function := options.get(what), str) and is_import_path(function):
                check_received(function, f"'{path}'", what)
        check_received(name, f"'{path}'")
    return agent


def _taught(record: Path) -> Agent:
    """What a folder of `tether sft` without `agent.json` says: how many examples the prompts of its demonstrations held."""
    try:
        about = json.loads(record.read_text(encoding="utf-8"))
        source, options = about["source"], about["settings"]["experts"]["options"]
        shown = {str(name): options.get(name, {}).get("few_shot", 0) for name in source["names"] if source["kind"] == "experts"}
        return Agent({name: {"few_shot": int(count)} for name, count in shown.items() if count is not None})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"'{record}' is not what tether sft writes ({error!r}); delete it to use the model without") from error


def _without_split(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "split"}  # what an agent was trained on is not what it is tested on


def _names_a_file(value: Any) -> bool:
    return (
        isinstance(value, str) and ("/" in value or bool(Path(value).suffix)) and "://" not in value and Path(value).expanduser().exists()
    )


def _differing(values: Mapping[str, Any], model: type[Settings] | None) -> str:
    """The values that are not the defaults, in words."""
    defaults = {} if model is None else {name: each.get_default(call_default_factory=True) for name, each in model.model_fields.items()}
    return ", ".join(f"{name}={value}" for name, value in values.items() if name not in defaults or defaults[name] != value)
