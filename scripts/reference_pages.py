"""Writes the lists that documents share with the code: verbs and their options, settings, metrics, alarms,
options of environments, layers.

    python scripts/reference_pages.py            # or: make reference

A document marks the place with `<!-- generated: NAME ARGUMENT -->` and `<!-- end -->`; what stands between is replaced. `BLOCKS` has a function for
each name. The descriptions are those of the code: help texts, the text under a setting, the catalogue of metrics. A test
(tests/unit/test_docs.py) fails while a document is out of date.
"""

import ast
import inspect
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from tether.cli.main import app
from tether.core.alarms import AlarmName
from tether.core.metrics import CATALOGUE
from tether.core.setting_docs import SettingDoc, setting_docs
from tether.envs.registry import ENVIRONMENTS
from tether.training.settings import RunSettings
from tether.training.sft.settings import SftSettings

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

COMMON_OPTIONS = {"max_turns", "split", "instructions", "examples", "few_shot", "actions_per_turn", "lenient", "data", "bad_rows", "fields"}

_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A document with its generated blocks as the code has them now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]](found[3])}\n\n{found[4]}", text)


def verbs(_: str) -> str:
    """Every verb with the first clause of its help, as a list."""
    return "\n".join(
        f"- [`{name}`](docs/cli.md#{name}): {re.split(r'[.;:](?= |$)', _line(command.help))[0]}" for name, command in _commands().items()
    )


def help_of(verb: str) -> str:
    """One verb: what it does, its examples and the names of its options, which `--help` explains."""
    command = _commands()[verb]
    below = getattr(command, "commands", {})
    examples = dict.fromkeys(line for part in (command, *below.values()) for line in _examples(part))
    options = " ".join(dict.fromkeys(f"`{name}`" for part in (command, *below.values()) for name in _options(part)))
    return "\n\n".join([_line(command.help), "\n".join(examples), f"Options: {options}"])


def settings(section: str) -> str:
    """The settings of one section of a run, or of the run itself where no section is named."""
    return _settings_table("key", [row for row in setting_docs(RunSettings) if _section(row.key) == section])


def sft_settings(_: str) -> str:
    """The settings of `tether sft`."""
    return _settings_table("key", setting_docs(SftSettings))


def options(env: str) -> str:
    """The options that an environment has beside those of every environment, which docs/environments/README.md lists."""
    return _settings_table("option", [row for row in setting_docs(ENVIRONMENTS.get(env).Options) if row.key not in COMMON_OPTIONS])


def metrics(section: str) -> str:
    """The metrics of one section; "env" are those of single environments."""
    rows = [(f"`{name}`", meaning) for name, meaning in CATALOGUE.items() if _metric_section(name) == section]
    return _table(("metric", "meaning"), rows)


def alarms(_: str) -> str:
    """Every alarm and what it means; the likely cause and what to change are printed with the alarm."""
    meanings = _texts_below(AlarmName)
    return _table(("alarm", "meaning"), [(f"`{alarm}`", meanings[alarm.name]) for alarm in AlarmName])


def layers(_: str) -> str:
    """The layers of the import contract, highest first, and what each package holds."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    order = [[name.strip(" ()").removeprefix("tether.") for name in line.split("|")] for line in lines]
    drawn = [f"    L{len(order) - number}  {' | '.join(names)}" for number, names in enumerate(order, start=1)]
    described = [f"- `{name}`: {_first_sentence(_docstring(name))}" for names in order for name in names]
    return "\n".join([*drawn, "", *described])


BLOCKS: dict[str, Callable[[str], str]] = {
    "verbs": verbs,
    "help": help_of,
    "settings": settings,
    "sft-settings": sft_settings,
    "metrics": metrics,
    "alarms": alarms,
    "layers": layers,
    "options": options,
}


def _commands() -> dict[str, Any]:
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    return commands


def _examples(command: Any) -> Iterator[str]:
    for line in (command.epilog or "").partition("Examples:")[2].splitlines():
        if line.strip():
            yield f"    {line.strip()}"


def _options(command: Any) -> Iterator[str]:
    for param in command.params:
        if param.param_type_name == "option" and param.name != "help" and not getattr(param, "hidden", False):
            yield param.opts[0]


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else key if key == "also" else ""


def _metric_section(name: str) -> str:
    section = name.partition("/")[0]
    return "env" if "/env/" in name else re.sub(r"^information_\w+", "information", section)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table without spaces around the bars: it is read as a page, and nobody aligns it by hand."""
    lines = [head, ("---",) * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def _settings_table(head: str, docs: Iterable[SettingDoc]) -> str:
    rows = [(f"`{row.key}`", _code(row.default), _short(row.allowed), row.meaning) for row in docs]
    return _table((head, "default", "allowed", "meaning"), rows)


def _short(allowed: str) -> str:
    """What a setting may be, in signs: "whole number, at least 1" is "int≥1"."""
    for words, sign in (("whole number", "int"), ("number", "float"), ("true or false", "bool"), ("text", "str")):
        allowed = re.sub(rf"\b{words}\b", sign, allowed)
    for words, sign in ((", at least ", "≥"), (", above ", ">"), (", at most ", "≤"), (", below ", "<")):
        allowed = allowed.replace(words, sign)
    return allowed


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=[.?!])\s", _line(text))[0]


def _docstring(package: str) -> str:
    source = (ROOT / "src" / "tether" / package / "__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def _texts_below(members: type) -> dict[str, str]:
    """The text under each member of an enumeration, by the member's name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(members)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        member.targets[0].id: _line(below.value.value)
        for member, below in pairwise(body)
        if isinstance(member, ast.Assign)
        and isinstance(member.targets[0], ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def main() -> None:
    """Rewrite every document whose blocks differ from the code."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
