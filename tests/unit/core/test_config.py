"""Settings: files and overrides in, one object or every problem at once out."""

import time
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field, ValidationError, model_validator

from tether.core import config
from tether.core.config import Settings, dump_yaml, known_keys, load, load_yaml, merge, parse_overrides, read_file, validate
from tether.core.errors import ConfigError


class Rollout(Settings):
    group_size: int = Field(default=8, ge=1)
    temperature: float = Field(default=1.0, ge=0)


class Run(Settings):
    steps: int = Field(default=10, ge=1)
    algo: Literal["ppo", "grpo"] = "ppo"
    sizes: tuple[int, ...] = (1, 2)
    out: Path | None = None
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _not_thirteen(self) -> "Run":
        if self.steps == 13:
            raise ValueError("13 steps are unlucky")
        return self


class Named(Settings):
    name: str


def _problems(data: dict[str, object], model: type[Settings] = Run) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(model, data)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


# ------------------------------------------------------------------------------------------------------------- validation


def test_defaults() -> None:
    assert load(Run) == Run(steps=10, algo="ppo", sizes=(1, 2), out=None, rollout=Rollout(group_size=8, temperature=1.0))


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load(Run).steps = 3  # type: ignore[misc]


def test_a_default_is_checked_like_any_value() -> None:
    class Wrong(Settings):
        steps: int = Field(default=0, ge=1)

    assert _problems({}, Wrong) == ["config key 'steps': got 0; it should be greater than or equal to 1"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"stepps": 3}, "unknown config key 'stepps': did you mean 'steps'? (known: algo, out, rollout, sizes, steps)"),
        ({"zzz": 3}, "unknown config key 'zzz': known: algo, out, rollout, sizes, steps"),
        (
            {"rollout": {"groupsize": 3}},
            "unknown config key 'rollout.groupsize': did you mean 'rollout.group_size'? (known: rollout.group_size, rollout.temperature)",
        ),
        ({"group_size": 3}, "unknown config key 'group_size': did you mean 'rollout.group_size'?"),
        ({"rollout": {"steps": 3}}, "unknown config key 'rollout.steps': did you mean 'steps'?"),
        ({"rolout": {"group_size": 3}}, "unknown config key 'rolout': did you mean 'rollout'? (known: algo, out, rollout, sizes, steps)"),
        ({"steps": 0}, "config key 'steps': got 0; it should be greater than or equal to 1"),
        ({"algo": "pppo"}, "config key 'algo': got 'pppo'; it should be 'ppo' or 'grpo'"),
        ({"rollout": "fast"}, "config key 'rollout' holds settings: got 'fast'; set one of them, such as 'rollout.group_size'"),
        ({"rollout": {"temperature": -0.5}}, "config key 'rollout.temperature': got -0.5; it should be greater than or equal to 0"),
        ({"sizes": [1, "x"]}, "config key 'sizes.1': got 'x'; it should be a valid integer, unable to parse string as an integer"),
        ({"steps": 13}, "config: 13 steps are unlucky"),
    ],
)
def test_one_problem_one_line(data: dict[str, object], expected: str) -> None:
    assert _problems(data) == [expected]


def test_missing_key() -> None:
    assert _problems({}, Named) == ["config key 'name' is missing; give it a value"]


def test_every_problem_at_once() -> None:
    problems = _problems({"steps": 0, "algo": "x", "stepps": 1, "rollout": {"group_size": "many", "temprature": 1}})
    assert len(problems) == 5
    assert {problem.split("'")[1] for problem in problems} == {"steps", "algo", "stepps", "rollout.group_size", "rollout.temprature"}


def test_what_is_named_in_the_message() -> None:
    with pytest.raises(ConfigError, match=r"^unknown environment key 'x': known: group_size, temperature$"):
        validate(Rollout, {"x": 1}, what="environment")


def test_the_validation_library_does_not_show_in_the_traceback() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Run, {"steps": 0})
    assert caught.value.__suppress_context__


def test_known_keys() -> None:
    assert known_keys(Run) == ["steps", "algo", "sizes", "out", "rollout", "rollout.group_size", "rollout.temperature"]

    class Outer(Settings):
        run: Run = Run()

    assert known_keys(Outer)[-3:] == ["run.rollout", "run.rollout.group_size", "run.rollout.temperature"]


# ------------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.toml", 'steps = 3\nalgo = "grpo"\n[rollout]\ngroup_size = 4\n'),
        ("run.yaml", "steps: 3\nalgo: grpo\nrollout:\n  group_size: 4\n"),
        ("run.yml", "{steps: 3, algo: grpo, rollout: {group_size: 4}}"),
    ],
)
def test_toml_and_yaml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load(Run, tmp_path / name) == Run(steps=3, algo="grpo", rollout=Rollout(group_size=4))


@pytest.mark.parametrize("name", ["empty.toml", "empty.yaml"])
def test_empty_file_means_defaults(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# nothing set\n")
    assert read_file(tmp_path / name) == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("run.json", "{}", r"config file '.*run\.json' has ending '\.json'; use \.toml, \.yaml or \.yml"),
        ("run.toml", "steps = [", r"config file '.*run\.toml' does not parse: Invalid value \(at end of document\)"),
        ("run.yaml", "steps: [", r"config file '.*run\.yaml' does not parse: while parsing a flow node .* line 1, column 9"),
        ("run.yaml", "- steps", r"config file '.*run\.yaml' holds a list; use sections of key = value"),
        ("run.yaml", "steps", r"config file '.*run\.yaml' holds a str; use sections of key = value"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(Run, tmp_path / name)
    assert "\n" not in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config file '.*no\.yaml': No such file or directory; check the path"):
        load(Run, tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(Run, tmp_path)


def test_yaml_cannot_make_python_objects(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match="does not parse"):
        read_file(tmp_path / "run.yaml")


# -------------------------------------------------------------------------------------------------------------- overrides


def test_override_values_are_read_as_yaml() -> None:
    pairs = [
        "steps=3",
        "rollout.temperature=0.5",
        "algo=grpo",
        "sizes=[3, 4]",
        "out=null",
        "flag=true",
        "text=",
        "expr=a=b",
        "filter=top_p:0.9",
    ]
    assert parse_overrides(pairs) == {
        "steps": 3,
        "rollout": {"temperature": 0.5},
        "algo": "grpo",
        "sizes": [3, 4],
        "out": None,
        "flag": True,
        "text": "",
        "expr": "a=b",
        "filter": "top_p:0.9",
    }


def test_small_numbers_without_a_dot_still_count_as_numbers() -> None:
    """YAML 1.1 reads 1e-6 as text; the check against the type turns it into a number."""
    assert load(Rollout, overrides=parse_overrides(["temperature=1e-6"])).temperature == 1e-6


def test_later_override_wins_and_sections_add_up() -> None:
    assert parse_overrides(["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["steps"], "--set got 'steps'; write it as key=value, for example --set rollout.group_size=8"),
        (["=3"], "--set got '=3'; write it as key=value, for example --set rollout.group_size=8"),
        (["sizes=[1"], "--set sizes: the value '[1' does not parse; quote it if it is text"),
        (
            ["rollout=3", "rollout.group_size=4"],
            "--set rollout.group_size: 'rollout' was given a value before; set its keys or the whole, not both",
        ),
    ],
)
def test_bad_override(pairs: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(pairs)
    assert str(caught.value) == expected


def test_override_lies_on_top_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 3\n[rollout]\ngroup_size = 4\n")
    run = load(Run, tmp_path / "run.toml", parse_overrides(["rollout.temperature=0.5", "steps=7"]))
    assert run == Run(steps=7, rollout=Rollout(group_size=4, temperature=0.5))


def test_merge_leaves_its_arguments_alone() -> None:
    base = {"a": {"b": 1}, "c": 2}
    assert merge(base, {"a": {"d": 3}, "c": {"e": 4}}) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}
    assert base == {"a": {"b": 1}, "c": 2}


# ------------------------------------------------------------------------------------------------------------- round trip


def test_dump_is_complete_and_loads_to_the_same_object(tmp_path: Path) -> None:
    run = Run(steps=3, sizes=(5, 6), out=tmp_path / "Ü folder", rollout=Rollout(temperature=1e-6))
    text = dump_yaml(run)
    assert text.splitlines()[:2] == ["steps: 3", "algo: ppo"], "in the order of the class, defaults included"
    assert "Ü folder" in text
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert load(Run, tmp_path / "config.yaml") == run


def test_texts_that_look_like_other_things_survive(tmp_path: Path) -> None:
    for name in ("yes", "null", "1e3", "010", "2024-01-01", "a: b", "#", "", "√"):
        (tmp_path / "config.yaml").write_text(dump_yaml(Named(name=name)), encoding="utf-8")
        assert load(Named, tmp_path / "config.yaml").name == name


def test_deep_nesting_is_refused_before_it_is_parsed() -> None:
    """PyYAML takes 1.5 s for so many brackets, and every page of the dashboard reads the config."""
    start = time.process_time()
    for text in ("[" * 3000, "[" * 65 + "]" * 65, "{a: " * 65 + "1" + "}" * 65):
        with pytest.raises(yaml.YAMLError, match="it is nested too deeply"):
            load_yaml(text)
    assert time.process_time() - start < 0.5
    assert load_yaml("[" * 64 + "]" * 64) and load_yaml("'" + "[" * 3000 + "'") == "[" * 3000


def test_module_names_what_it_promises() -> None:
    assert config.__doc__
    assert "every problem at once" in config.__doc__
