"""What a run is to do, resolved: from arguments, settings files and the configs that come with Tether, or from the folder of a run that is resumed or
evaluated.

Everything is checked as far as that goes without torch. A run folder or a file may have come from somebody else: what they name is neither imported
nor started, unless the user names it too.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.algorithms.filters.group_filter import filter_settings
from tether.algorithms.filters.scores import find_score
from tether.algorithms.presets import own_changes
from tether.core.config import Settings, find_config, known_keys, merge, parse_overrides, read_file, validate
from tether.core.errors import BadInput, ConfigError
from tether.core.importing import is_import_path
from tether.core.protocols import Env
from tether.envs.registry import check_received, env_factory, make_env
from tether.models.catalog import SHIPPED, check_name, images_refused, reads_text_only
from tether.models.chat_endpoint import is_endpoint
from tether.rollout.engines.registry import DEFAULT_ENGINE, ENGINES, SERVERS
from tether.rollout.gateway.agents import find_agent
from tether.rollout.gateway.trained import train_rule
from tether.runs.checkpoints import MODEL, find_checkpoint
from tether.runs.remote import fetched
from tether.runs.store import ABOUT, CONFIG, RunStore
from tether.runs.trackers import check_tracker
from tether.training.agent import Agent
from tether.training.settings import TASKS, EnvSettings, EvaluationSettings, RunSettings, ServerSettings
from tether.training.synonyms import own_names

SMOKE: dict[str, Any] = {
    "model": {"name": "tiny"},
    "rollout": {"num_groups": 2, "group_size": 4, "max_tokens": 64, "max_context": 1024, "max_rows": 64},
    "learner": {"learning_rate": None, "update_batch": 4},
    "critic": {"model": None, "learning_rate": None},
    "algorithm": {"reference": None},
    "filter": {
        "strategy": "all"
    },  # `tiny` may know nothing of the environment: then no group varies, and the update is to be seen all the same
    "evaluation": {"prompts": 4, "samples": 1},
    "diagnosis": {"every": 1},
    "steps": 2,
}
"""Any run, reduced to what shows within a minute whether it works."""

CPU_PROMPTS = 128
LARGE_CPU_PROMPTS = 16
"""Validation prompts by default where a CPU plays them, with a model as small as `tiny` and with a larger one; the paper's 512 elsewhere."""
SMALL_MODEL_BYTES = 50_000_000

SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|passwd|api_?key|credentials?)$")
"""Names of options that are never written down, whatever their class says."""

FREE_ON_RESUME = {
    "steps": (),
    "learner": ("micro_tokens", "gradient_checkpointing", "share_prompts", "sharding"),
    "rollout": ("max_rows", "cache_gb", "speculative_tokens", "error_retries", "engine", "precision"),
    "server": (),
    "diagnosis": ("every",),
    "checkpoint": ("every", "keep", "last", "moments"),
    "agent": ("target", "command", "tasks", "timeout", "concurrency", "workers"),
    "trackers": (),
}
"""What may change when a run is resumed, whole sections where no keys are named: how long it is, where it samples, who follows it, and what
decides how much memory and disk it takes but not what it learns."""

COMMANDS = ("vllm_command", "vllm_args")
"""Settings of the section `server` that start a program."""

_LOG = logging.getLogger(__name__)

FORMER_WORDING = {"instructions": "plain", "lenient": False, "few_shot": 0}
"""The values that these options of environments had, in effect, before there were such options."""


def run_settings(out: Path | str | None, config: Path | str | None, given: Mapping[str, Any], *, resume: bool, smoke: bool) -> RunSettings:
    """The resolved settings of a new or a resumed run."""
    if not resume:
        file = find_config(config) if config is not None else None
        settings, notes = _resolved(file, given, SMOKE if smoke else {})
        _say(notes)
        return _fewer_prompts_on_cpu(settings, file, given)
    if smoke:
        raise ConfigError("--smoke starts a run of its own; leave it out with --resume")
    return _reopen(out, config, given)


def _fewer_prompts_on_cpu(settings: RunSettings, file: Path | None, given: Mapping[str, Any]) -> RunSettings:
    """The settings with fewer validation prompts where a CPU would play the default number of them: that takes longer than some steps."""
    asked = merge(read_file(file) if file is not None else {}, given).get("evaluation") or {}
    default = EvaluationSettings.model_fields["prompts"].default
    if "prompts" in asked or settings.evaluation.prompts != default or not on_cpu(settings):
        return settings
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"prompts": cpu_prompts(settings.model.name)})})


def cpu_prompts(model: str) -> int:
    """Validation prompts by default on a CPU: SmolLM2 needs five seconds or more for an episode, `tiny` a tenth of one."""
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    return CPU_PROMPTS if model in SHIPPED or 0 < weights < SMALL_MODEL_BYTES else LARGE_CPU_PROMPTS


def on_cpu(settings: RunSettings) -> bool:
    """Whether a CPU plays and trains."""
    from tether.models.hardware import default_device

    return (settings.model.device or default_device()) == "cpu"


def evaluation_settings(target: str, env: str | None, best: bool, given: Mapping[str, Any]) -> RunSettings:
    """The settings of an evaluation: those of the run folder if `target` is one, with what was given on top; names are checked."""
    return comparison_settings([target], env, best, given)[0]


def comparison_settings(targets: Sequence[str], env: str | None, best: bool, given: Mapping[str, Any]) -> list[RunSettings]:
    """The settings of an evaluation of each of some models or runs. One of which nothing is known is asked as the first that knows how it was
    trained, so that a model before and after training is compared on equal terms."""
    named = merge(given, {"env": {"name": env}} if env is not None else {})
    found = [_target_settings(target, best, named, env) for target in targets]
    known = [(target, agent) for target, (_, agent) in zip(targets, found, strict=True) if agent is not None and agent.environments]
    settings = []
    for target, (base, own) in zip(targets, found, strict=True):
        lead, agent = (target, own) if own is not None or not known else (known[0][0], known[0][1].for_model(target))
        if "env" not in base and agent is not None and agent.environments:
            first, *others = ({"name": name} for name in agent.environments)
            base = {**base, "env": first, "also": others}
        if "env" not in base and _names_data(given):
            base = {**base, "env": _played_as_questions(given)["env"]}
        if "agent" in given and "env" not in base:
            base = {**base, "env": {"name": TASKS, "options": {"data": (given["agent"] or {}).get("tasks")}}}
        if "env" not in base and "/" in target and not Path(target).exists():
            raise BadInput(f"run folder '{target}' does not exist; check the path, or, where it is a model, add --env")
        if "env" not in base:
            raise BadInput(f"which environment should '{target}' play? add --env, see `tether envs`")
        data = merge(base, given)
        if agent is not None:
            how = "it was trained" if lead == target else f"'{lead}' was trained, to compare them on equal terms"
            data, notes = agent.beneath(data, f"'{target}' is asked as {how}")
            _say(notes)
        settings.append(validate(RunSettings, data))
        for chosen in settings[-1].environments():
            _made(settings[-1], chosen)
        if not is_endpoint(settings[-1].model.name):
            check_name(settings[-1].model.name)
    return settings


def gateway_settings(target: str, best: bool, given: Mapping[str, Any]) -> RunSettings:
    """The settings of a gateway for programs that open sessions themselves: those of the run folder if `target` is one, without the program that
    it was trained with."""
    given = merge({"agent": {"target": None, "command": None, "tasks": None}}, given)
    base, agent = _target_settings(target, best, given, TASKS)
    data = merge(base, given)
    if agent is not None:
        data, notes = agent.beneath(data, f"'{target}' is asked as it was trained")
        _say(notes)
    settings = validate(RunSettings, data)
    if is_endpoint(target) or settings.rollout.engine != DEFAULT_ENGINE:
        raise BadInput(
            f"a gateway samples by itself, and got '{target}' with rollout.engine={settings.rollout.engine}; give a model or a run folder"
        )
    if settings.agent.is_given:
        raise BadInput("a gateway starts no program: agents open sessions themselves; leave out agent.target and agent.command")
    check_name(settings.model.name)
    return settings


def _target_settings(target: str, best: bool, given: Mapping[str, Any], env: str | None) -> tuple[dict[str, Any], Agent | None]:
    """Settings of a run folder with its newest or best checkpoint as the model; of a model, just its name. And how it was trained, where that is
    known. `env`: what is played instead of the run's own environments. `given` is what the user named."""
    folder = Path(target)
    played: dict[str, Any] = {"env": {"name": env}, "also": []} if env is not None else {}
    if is_endpoint(target) or not (folder / ABOUT).is_file():
        if best:
            raise BadInput(f"--best is for run folders, and '{target}' is not one; leave it out")
        return {"model": {"name": target}, **played}, Agent.read(target)
    store = RunStore.open(folder)
    config = _stored_config(store, given, env)
    server = {key: value for key, value in (config.get("server") or {}).items() if key not in COMMANDS}  # a file starts no program
    model = {**config.get("model", {}), "name": str(find_checkpoint(store.checkpoints, best=best)[0] / MODEL)}
    agent = Agent.of_config(config)
    for chosen in (config["env"], *config.get("also", [])):
        chosen.get("options", {}).pop("split", None)  # what the run was trained on is not what it is tested on
    if played:
        evaluation = {key: value for key, value in (config.get("evaluation") or {}).items() if key != "env"}
        timeout = next((each["step_timeout"] for each in _sections(config) if each.get("name") == env and "step_timeout" in each), None)
        played["env"] |= {} if timeout is None else {"step_timeout": timeout}
        config = {**config, **played, "evaluation": evaluation}
    rollout = {**config.get("rollout", {}), "engine": DEFAULT_ENGINE}  # its servers hold other weights by now
    return {**config, "model": model, "server": server, "rollout": rollout}, agent


def _sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The environments of a run's nested settings."""
    return [section for section in (config.get("env"), *(config.get("also") or [])) if isinstance(section, Mapping)]


KNOWN = frozenset(known_keys(RunSettings))


def overrides(pairs: Sequence[str] | None, **other: str) -> dict[str, Any]:
    """`--set` pairs as nested settings, words of other trainers taken for what they mean; `other`: what some mean here instead."""
    return own_names(parse_overrides(pairs or []), KNOWN, other)


def named_settings(
    env: str | None,
    model: str | Mapping[str, Any] | None,
    algo: str | None,
    filter: str | Mapping[str, Any] | None,
    steps: int | None,
    seed: int | None,
) -> dict[str, Any]:
    """The arguments that have a name of their own, as nested settings."""
    nested: dict[str, Any] = {}
    for section, name in (("env", env), ("model", model), ("algorithm", algo)):
        if name is not None:
            nested[section] = dict(name) if isinstance(name, Mapping) else {"name": name}
    if filter is not None:
        nested["filter"] = dict(filter) if isinstance(filter, Mapping) else filter_settings(filter)
    nested.update({key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None})
    return nested


def nested_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section or by dotted name, as a nested dictionary."""
    nested: dict[str, Any] = {}
    for key, value in given.items():
        value = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
        for section in reversed(key.split(".")):
            value = {section: value}
        nested = merge(nested, value)
    return nested


def chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a verb that were given, by dotted names, as nested settings."""
    return nested_settings({name: value for name, value in options.items() if value is not None})


def resolve_settings(config: Path | None, given: Mapping[str, Any], base: Mapping[str, Any]) -> RunSettings:
    """All settings, checked as far as that goes without torch: names, ranges, the environment's own options, the model's name."""
    return _resolved(config, given, base)[0]


def _resolved(config: Path | None, given: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[RunSettings, list[str]]:
    """The same, and what is worth saying about them before a run."""
    env = given.get("env") or {}
    if config is None and isinstance(env, Mapping) and "name" not in env and "agent" not in given:
        if not _names_data(given):
            raise BadInput("no environment given; name one, as in `tether train frozen_lake`, or give --config FILE")
        given = _played_as_questions(given)
    data, asked = own_names(read_file(config), KNOWN) if config is not None else {}, merge(base, given)
    section, wanted = data.get("algorithm"), asked.get("algorithm")
    name = wanted.get("name") if isinstance(wanted, Mapping) else None
    if isinstance(section, dict) and name not in (None, section.get("name", "grpo")):  # the file may state every value of its own preset
        data = {**data, "algorithm": own_changes(section)}
    data, notes = _as_trained(merge(data, asked))
    settings = validate(RunSettings, data)
    if config is not None:  # environments that a file names and that would run code of the current folder; those in `given` the user named
        other = [settings.evaluation.env] if settings.evaluation.env is not None else []
        for chosen in (*settings.environments(), *other):
            if chosen.name not in _named_environments(given):
                check_received(chosen.name, f"settings file '{config}'")
        _check_agent(settings.agent.model_dump(), given.get("agent") or {}, f"settings file '{config}'")
    if base is SMOKE and any(_shows_images(make_env(chosen.name, **chosen.options)) for chosen in settings.environments()):
        return _resolved(config, given, merge(SMOKE, {"model": {"name": "tiny-vl"}}))
    check_name(settings.model.name)
    find_score(settings.filter.score)  # a function of the user's is imported here, so that its mistakes are told before anything runs
    if settings.agent.is_given:
        find_agent(settings.agent.target, settings.agent.command, settings.agent.env)
        train_rule(settings.agent.train_calls)
    for name in settings.trackers:
        check_tracker(name)
    return _with_options(settings, lambda chosen: _all_options(chosen, _made(settings, chosen))), notes


def _made(settings: RunSettings, chosen: EnvSettings) -> Env:
    """An environment of a run, unless it shows images to a model whose files say that it sees none."""
    env = make_env(chosen.name, **chosen.options)
    if _shows_images(env) and reads_text_only(settings.model.name):
        raise images_refused(chosen.name, settings.model.name)
    return env


def _shows_images(env: Env) -> bool:
    return bool(getattr(env, "shows_images", False))


def _names_data(given: Mapping[str, Any]) -> bool:
    env = given.get("env")
    options = env.get("options") if isinstance(env, Mapping) else None
    return isinstance(options, Mapping) and bool(options.get("data"))


def _played_as_questions(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the environment that plays any file of questions, for data without an environment."""
    _say([f"{given['env']['options']['data']} is played by the environment qa, questions with an answer; name another one that reads it"])
    return merge({"env": {"name": "qa"}}, given)


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        _LOG.warning("%s", note)


def _named_environments(settings: Mapping[str, Any]) -> set[str]:
    """The names of environments in nested settings, which need not be valid."""
    evaluation = settings.get("evaluation")
    sections = [settings.get("env"), evaluation.get("env") if isinstance(evaluation, Mapping) else None]
    sections += list(settings["also"]) if isinstance(settings.get("also"), list) else []
    return {str(section["name"]) for section in sections if isinstance(section, Mapping) and "name" in section}


def _as_trained(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Nested settings with what they leave open as their model was trained, where its folder says how; and what to say about it."""
    model = data.get("model")
    name = str(model.get("name", "")) if isinstance(model, Mapping) else ""
    agent = Agent.read(name) if name else None
    return (dict(data), []) if agent is None else agent.beneath(data, f"'{name}' is asked as it was trained")


def _with_options(settings: RunSettings, options: Callable[[EnvSettings], dict[str, Any]]) -> RunSettings:
    """The settings with other options for each of their environments."""
    env, *also = (chosen.model_copy(update={"options": options(chosen)}) for chosen in settings.environments())
    return settings.model_copy(update={"env": env, "also": also})


def _all_options(chosen: EnvSettings, env: Env) -> dict[str, Any]:
    """Every option of the environment, so that the run's record states the defaults it was made with."""
    options = getattr(env, "options", None)
    if not isinstance(options, Settings):
        return dict(chosen.options)
    return options.model_dump(mode="json", exclude={"split"} - chosen.options.keys())


def without_secrets(settings: RunSettings) -> RunSettings:
    """The settings as they may be written down: an option that must not be shown (a token) is left out, and comes from TETHER_TOKEN."""

    def shown(chosen: EnvSettings) -> dict[str, Any]:
        known = env_factory(chosen.name).options
        secret = set() if known is None else {name for name, field in known.model_fields.items() if not field.repr}
        return {key: value for key, value in chosen.options.items() if key not in secret and not SECRET_NAME.search(key)}

    cleared = _with_options(settings, shown)
    if (other := settings.evaluation.env) is None:
        return cleared
    evaluation = settings.evaluation.model_copy(update={"env": other.model_copy(update={"options": shown(other)})})
    return cleared.model_copy(update={"evaluation": evaluation})


def _reopen(out: Path | str | None, config: Path | str | None, given: Mapping[str, Any]) -> RunSettings:
    """The settings of the run in `out`; the number of steps may be raised, and memory may be saved."""
    if out is None:
        raise BadInput("--resume needs to know which run; add --out FOLDER")
    store = RunStore.open(fetched(out, to_write=True))
    named, given = given, _without_own_names(given, store.config())
    fixed = [
        section
        for section, value in given.items()
        if (keys := FREE_ON_RESUME.get(section)) is None or (keys and not (isinstance(value, dict) and set(value) <= set(keys)))
    ]
    if config is not None or fixed:
        free = ", ".join(
            f"{section}.{key}" for section, keys in FREE_ON_RESUME.items() for key in keys or "*" if section not in ("steps", "trackers")
        )
        raise ConfigError(
            f"--resume continues with the run's own settings; only --steps, --track, and --set of {free}, may be given with it"
        )
    stored = _stored_config(store, named)
    _check_commands(stored, given, store.folder)
    before = validate(RunSettings, stored)
    if (
        not before.rollout.samples_with_copy and before.algorithm.importance_cap is None
    ):  # the engine's default, which another engine has not
        (stored.get("algorithm") or {}).pop("importance_cap", None)
    settings = validate(RunSettings, merge(stored, given)) if given else before
    find_score(settings.filter.score)
    for name in settings.trackers:
        check_tracker(name)
    if settings.steps < before.steps:
        raise BadInput(
            f"the run has {before.steps} steps and cannot be cut to {settings.steps}; give at least {before.steps}, or no --steps"
        )
    return settings


def _without_own_names(given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """What was given with --resume, less the names of the run's own environments: naming them allows their import, and changes nothing."""
    if not _named_environments({key: given[key] for key in ("env", "also") if key in given}) <= _named_environments(stored):
        return dict(given)

    def holds_only_names(value: Any) -> bool:
        sections = value if isinstance(value, list) else [value]
        return all(isinstance(section, Mapping) and set(section) <= {"name"} for section in sections)

    return {key: value for key, value in given.items() if key not in ("env", "also") or not holds_only_names(value)}


def _check_commands(stored: Mapping[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """Refuse to start a program because a run folder says so: it may have come from somebody else."""
    engine = (merge(stored, given).get("rollout") or {}).get("engine")
    if not ENGINES.get(str(engine), SERVERS).starts_programs:
        return
    defaults, server = ServerSettings(), stored.get("server") or {}
    for name in COMMANDS:
        if server.get(name, getattr(defaults, name)) != getattr(defaults, name) and name not in (given.get("server") or {}):
            raise BadInput(
                f"'{folder / CONFIG}' has server.{name}={server[name]!r}, and starts a program with it; if that is what you want, say so: "
                f"add --set server.{name}={json.dumps(server[name])}"
            )


def _check_agent(stored: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Refuse an agent that would run code of the current folder, or start a program, because a file says so."""
    for name in ("target", "tool_format"):
        if isinstance(path := stored.get(name), str) and is_import_path(path) and name not in given:
            check_received(path, where, "agent")
    if stored.get("command") and "command" not in given:
        raise BadInput(
            f"{where} has agent.command={stored['command']!r}, and starts a program with it; if that is what you want, say so: "
            f"add --agent-command {json.dumps(stored['command'])}"
        )


def _stored_config(store: RunStore, given: Mapping[str, Any], env: str | None = None) -> dict[str, Any]:
    """The settings of a run as it was made: one of tether 0.1 goes on with the wording and the strict reading of that version. Environments that
    would run code of the current folder are refused, unless `given` names them. `env`: what alone is played; if the run does not know it, nothing
    of the run's environments is.

    A run's record states every option of its environments, so an option that is missing there is younger than the run.
    """
    config = store.config()
    if "invalid_steps" not in (config.get("early_stop") or {}):  # a rule that the run's version did not have
        config = merge(config, {"early_stop": {"invalid_steps": 0}})
    environments = [each for each in _sections(config) if env in (None, each.get("name"))]
    if env is None:
        for name in sorted(_named_environments(config) - _named_environments(given)):
            check_received(name, f"'{store.folder / CONFIG}'")
    functions = [(key, (each.get("options") or {}).get(key)) for each in environments for key in ("reward", "opponent")]
    score = (config.get("filter") or {}).get("score") if env is None else None
    _check_agent(config.get("agent") or {}, given.get("agent") or {}, f"'{store.folder / CONFIG}'")
    for what, function in (("score", score), *functions):
        if isinstance(function, str) and is_import_path(function):
            check_received(function, f"'{store.folder / CONFIG}'", what)
    younger = [_keep_former_wording(each) for each in environments if isinstance(each, dict) and "name" in each]
    if any(younger):
        _LOG.warning(
            "this run was made by tether %s: it keeps the instructions of that version (instructions=plain, lenient=false)", store.version
        )
    return config


def _keep_former_wording(env: dict[str, Any]) -> bool:
    """Put the former values of options that the record does not have into an environment's options; whether it has no wording at all."""
    known = env_factory(env["name"]).options
    options = env.get("options") or {}
    missing = {
        key: value for key, value in FORMER_WORDING.items() if known is not None and key in known.model_fields and key not in options
    }
    env["options"] = {**options, **missing}
    return "instructions" in missing
