"""Strict, typed settings: files and `key=value` overrides in, one validated object out, or every problem at once.

A settings class is a pydantic model derived from `Settings`: unknown keys are refused, with the nearest known key suggested;
values are checked against their type and range. Files are TOML or YAML. What a run resolved to is written back as YAML that
loads to the same object, so any run can be repeated from its own folder.
"""

import logging
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tether.core.errors import ConfigError, did_you_mean
from tether.core.files import read_plain
from tether.core.text import short_repr, shortened, without_passwords

log = logging.getLogger("tether")

MAX_FILE = 2**20
"""Bytes of a settings file; the longest of ours have a few thousand."""
MAX_VALUE = 2**16
"""Characters of one `--set`."""
MAX_ENTRIES = 50_000
"""Values in a file with its aliases written out: a few lines of YAML can stand for billions."""
MAX_DEPTH = 64
_TOO_DEEP = "it is nested too deeply"
MAX_PROBLEMS = 20
"""Lines about wrong settings."""


class _Loader(yaml.SafeLoader):
    """YAML without keys that are given twice, the last of which would win in silence, and without deep nesting.

    Not libyaml's CSafeLoader: half a million brackets overflow its stack and end the process.
    """

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= MAX_DEPTH:  # before it is parsed: PyYAML's time grows with the square of the nesting
            raise yaml.YAMLError(_TOO_DEEP)
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key_node.tag != "tag:yaml.org,2002:merge" and isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.YAMLError(
                        f"key '{shortened(key_node.value, 60)}' is given twice (line {key_node.start_mark.line + 1}); leave out one"
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The value of some YAML; ValueError or YAMLError where it does not parse, is nested too deeply or is far larger than it looks."""
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader: values only, no classes
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_size(data)
    return data


def _check_size(data: Any) -> None:
    """Count every value, an alias each time it is used, and stop at the limit."""
    count, level = 0, [data]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for value in level:
            inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
            count += len(inside)
            if count > MAX_ENTRIES:
                raise ValueError(f"it holds more than {MAX_ENTRIES} values, aliases written out")
            following += inside
        if not following:
            return
        level = following
    raise ValueError(_TOO_DEEP)


class Settings(BaseModel):
    """Base of every settings class: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    synonyms: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Words that other programs have for settings, to the keys that are meant."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Former names of fields to present ones: accepted for one release, with a line that says the new name."""

    @model_validator(mode="before")
    @classmethod
    def _accept_former_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not (former := [name for name in cls.renamed if name in data]):
            return data
        for name in former:
            if cls.renamed[name] in data:
                raise ValueError(f"'{name}' is the former name of '{cls.renamed[name]}'; give only the new one")
        section = cls.__name__.removesuffix("Settings").lower()
        log.warning("renamed settings: %s", ", ".join(f"{section}.{name} is now {section}.{cls.renamed[name]}" for name in former))
        return {cls.renamed.get(name, name): value for name, value in data.items()}


S = TypeVar("S", bound=BaseModel)


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a settings class, sections included.

    >>> known_keys(Settings)
    []
    """
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def read_file(path: Path) -> dict[str, Any]:
    """A TOML or YAML file as a nested dictionary."""
    try:
        text = read_plain(path, MAX_FILE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file '{path}' is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"cannot read config file '{path}': {error.strerror or error}; check the path") from error
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"config file '{path}' has ending '{path.suffix}'; use .toml, .yaml or .yml")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text)
        _check_size(data)
    except (ValueError, yaml.YAMLError) as error:  # PyYAML lets the ValueError of an impossible date through
        raise ConfigError(f"config file '{path}' does not parse: {shortened(' '.join(str(error).split()), 500)}") from error
    except RecursionError:
        raise ConfigError(f"config file '{path}' does not parse: {_TOO_DEEP}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file '{path}' holds a {type(data).__name__}; use sections of key = value")
    return data


CONFIGS = Path(__file__).parents[1] / "configs"
"""The configs that come with Tether: configs/ of the repository, as a part of the package."""
MOST_NAMED = 8
"""Configs that a message about an unknown one lists."""
_ENDINGS = (".toml", ".yaml", ".yml")


def cache_folder(kind: str) -> Path:
    """Where things of one kind ("models", "search") lie that Tether made or fetched once: below TETHER_CACHE, or the platform's cache folder."""
    base = os.environ.get("TETHER_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tether")
    return Path(base) / kind


def config_names() -> list[str]:
    """The names of the configs that come with Tether, such as "sokoban/ppo"."""
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))


def is_config(name: str) -> bool:
    """Whether a name is that of a config file, there or not, or of a config that comes with Tether."""
    return name.endswith(_ENDINGS) or _short(name) in config_names()


def find_config(name: Path | str, also: Iterable[str] = ()) -> Path:
    """The file of a config, by its path or by the name of one that comes with Tether. `also`: further names to suggest."""
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():  # one that is no plain file is refused when it is read
        return path
    short, known = _short(str(name)), config_names()
    if short in known:
        return CONFIGS / f"{short}.yaml"
    if path.is_dir():
        own = [known_name for known_name in known if known_name.startswith(f"{short}/")]
        raise ConfigError(f"config '{name}' is a folder; give a file{', or one of ' + ', '.join(own) if own else ''}")
    if path.suffix in _ENDINGS:
        raise ConfigError(
            f"config file '{name}' does not exist; check the path, or name a config that comes with Tether: {did_you_mean(short, known, MOST_NAMED)}"
        )
    raise ConfigError(f"unknown config '{name}', and no such file: {did_you_mean(short, [*known, *also], MOST_NAMED)}")


def _short(name: str) -> str:
    """A config as it is named: "configs/sokoban/ppo.yaml", as the documents write it, is "sokoban/ppo"."""
    return name.removeprefix("./").removeprefix("configs/").removesuffix(".yaml")


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs as a nested dictionary; values are read as YAML scalars or lists, keys may be dotted."""
    nested: dict[str, Any] = {}
    for pair in pairs:
        key, equals, raw = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set got '{shortened(pair)}'; write it as key=value, for example --set rollout.group_size=8")
        if len(pair) > MAX_VALUE:
            raise ConfigError(
                f"--set {shortened(key, 60)}: it has {len(pair)} characters; put that much into a file and give it with --config"
            )
        try:
            value = load_yaml(raw) if raw else ""
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"--set {shortened(key, 60)}: the value '{shortened(raw)}' does not parse; quote it if it is text") from error
        *sections, leaf = key.strip().split(".")
        if len(sections) >= MAX_DEPTH:
            raise ConfigError(f"--set {shortened(key, 60)}: it names {len(sections)} sections inside each other; settings have two")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {key}: '{section}' was given a value before; set its keys or the whole, not both")
        if isinstance(place.get(leaf), dict):
            raise ConfigError(f"--set {key}: its keys were set before; set its keys or the whole, not both")
        place[leaf] = value
    return nested


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys; lists are values.

    >>> flattened({"env": {"name": "sokoban", "options": {"size": 6}}, "also": []})
    {'env.name': 'sokoban', 'env.options.size': 6, 'also': []}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def validate(model: type[S], data: Mapping[str, Any], what: str = "config") -> S:
    """The settings object of `data`, or a ConfigError with one line per problem."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        keys, synonyms = known_keys(model), getattr(model, "synonyms", {})
        problems = error.errors(include_url=False, include_context=False)
        lines = [_explain(what, problem, keys, synonyms) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            lines.append(f"and {len(problems) - MAX_PROBLEMS} more problems")
        raise ConfigError("\n".join(lines)) from None
    except UnicodeEncodeError:
        raise ConfigError(f"{what}: a value holds half a character, which is no text; give UTF-8") from None
    except RecursionError:
        raise ConfigError(f"{what}: a value is nested too deeply") from None


def _explain(what: str, problem: Any, keys: Sequence[str], synonyms: Mapping[str, Sequence[str]]) -> str:
    """One line for one pydantic error: what, got, what to do."""
    key = shortened(".".join(str(part) for part in problem["loc"]))
    if problem["type"] == "extra_forbidden":
        meant = synonyms.get(key.rpartition(".")[2].lower().replace("-", "_"), ())
        likely = f"did you mean {' or '.join(map(repr, meant))}?" if meant else _nearest_key(key, keys)
        return f"unknown {what} key '{key}': {likely}"
    if problem["type"] == "missing":
        return f"{what} key '{key}' is missing; give it a value"
    inside = [known for known in keys if known.startswith(f"{key}.")]
    if inside and not isinstance(problem["input"], Mapping):
        meant = f"{key}.name" if f"{key}.name" in inside else inside[0]
        return (
            f"{what} key '{key}' holds settings: got {without_passwords(short_repr(problem['input']))}; set one of them, such as '{meant}'"
        )
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").strip()
    if not key or message.startswith("unknown "):  # the message names what was given
        return f"{what} key '{key}': {message}" if key else f"{what}: {message}"
    return f"{what} key '{key}': got {without_passwords(short_repr(problem['input']))}; it {message}"


def _nearest_key(key: str, keys: Sequence[str]) -> str:
    """Suggest a key by its full path, or by its last part wherever that occurs."""
    leaf = key.rpartition(".")[2]
    for known in keys:
        if known.rpartition(".")[2] == leaf:
            return f"did you mean '{known}'?"
    siblings = [known for known in keys if known.rpartition(".")[0] == key.rpartition(".")[0]]
    return did_you_mean(key, siblings or [known for known in keys if "." not in known])


def load(model: type[S], file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> S:
    """Settings from a file (or defaults) with overrides on top."""
    return validate(model, merge(read_file(file) if file else {}, overrides or {}))


def dump_yaml(settings: BaseModel) -> str:
    """Every setting, defaults included, as YAML that `load` reads back to an equal object."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
