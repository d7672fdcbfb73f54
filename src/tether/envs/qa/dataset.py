"""Items from rows: the question that is shown, and what its answers are graded against.

A row needs a question, under one of the names below or under the one that `fields` gives; a template may compose it from several columns.
What else it needs depends on the reward: `exact_match` an answer or a list of accepted ones, `math` an answer that holds one label, `code`
tests, a function of the user's nothing. The text of the question (and its picture) decides the split, so one question is never in two splits.

A column may hold a picture: a path (relative to the data file), a data URL or base64, bytes, or the dictionary with `bytes` and `path` that Hugging
Face's data sets have. Heads and checksums of all of them are checked when rows are read; pixels are decoded when a question is asked.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, did_you_mean
from tether.core.images import Image
from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, load_instances, read_packaged
from tether.envs.deepcoder.dataset import read_judged_problem
from tether.envs.deepcoder.problem import Problem
from tether.envs.deepcoder.prompt import opening
from tether.envs.metamathqa.dataset import ANSWER_FIELDS as MATH_FIELDS
from tether.envs.metamathqa.dataset import read_problem

QUESTION_FIELDS = ("question", "prompt", "problem", "query", "input")
"""In the order they are looked for."""
ANSWER_FIELDS = ("answer", "answers", "label", "target", "output")
DEFAULT = "questions about capitals"
IMAGE_COLUMN = "image"
_PLACE = re.compile(r"\{(\w+)\}")
_IN_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk")
"""How PNG, JPEG, GIF, WebP and BMP files begin, in base64."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture of a question, not decoded yet."""

    name: str
    """The path as the row has it, or a digest of the bytes."""
    source: bytes | Path = field(repr=False, compare=False)

    def image(self) -> Image:
        """Decoded; the members of a group ask for the same one."""
        return _decoded(self.source, self.name)


@lru_cache(maxsize=4)
def _decoded(source: bytes | Path, name: str) -> Image:
    return Image.read(source, f"image '{name}'")


@dataclass(frozen=True, slots=True)
class Item:
    """One question. Example: Item("What is 2 + 3?", ("5",))."""

    question: str
    """As it is shown."""
    gold: tuple[str, ...] = ()
    """Accepted answers, for rewards that compare."""
    problem: Problem | None = None
    """The programming problem, for reward `code`."""
    row: dict[str, Any] = field(default_factory=dict, compare=False)
    """Every column, for a reward of the user's own."""
    image: "Picture | None" = None

    @property
    def fingerprint(self) -> str:
        return self.question if self.image is None else f"{self.question}\n{self.image.name}"

    @property
    def summary(self) -> str:
        """In a line, for people."""
        return f"{self.question} -> {' | '.join(self.gold)}" if self.gold else self.question


def read_question(row: Row) -> str:
    """The text of the question."""
    names = row.value if isinstance(row.value, dict) else row.fields("question")
    asked = next((name for name in QUESTION_FIELDS if name in names), None)
    if asked is None:
        raise RowError(
            f"has no question: expected a column named {', '.join(QUESTION_FIELDS)}, got {', '.join(map(str, names)) or 'no columns'}; "
            "name another one with fields={question: COLUMN}, or compose it with template"
        )
    question = row.value[asked]
    if not isinstance(question, str) or not question.strip():
        raise RowError(f"{asked} is {question!r:.80}; expected text")
    return question.strip()


def read_exact(row: Row) -> Item:
    """An item with accepted answers: text, a number, or a list of them, also as JSON text."""
    question = read_question(row)
    told = next((name for name in ANSWER_FIELDS if name in row.value), None)
    if told is None:
        raise RowError(
            f"has no answer: expected a column named {', '.join(ANSWER_FIELDS)}, got {', '.join(map(str, row.value))}; "
            "name another one with fields={answer: COLUMN}"
        )
    value = row.value[told]
    if isinstance(value, str) and value.strip().startswith("["):
        value = _listed(value)
    accepted = tuple(_accepted(told, one) for one in (value if isinstance(value, list | tuple) else [value]))
    if not accepted:
        raise RowError(f"{told} is an empty list; give at least one accepted answer")
    return Item(question, accepted)


def _listed(text: str) -> Any:
    """A list written as JSON, which is how a CSV file holds one; any other text is the answer itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, list) else text


def _accepted(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{name} is {value!r:.80}; expected text, a number, or a list of accepted answers")
    return value.strip()


def read_math(row: Row) -> Item:
    """An item whose label is read as the environment metamathqa reads it: behind ####, in a box, or the whole answer."""
    question = read_question(row)
    told = next((name for name in (*MATH_FIELDS, *ANSWER_FIELDS) if name in row.value), None)
    known = told if told in MATH_FIELDS else "answer"
    columns = {known: row.value[told]} if told is not None else {}
    choices = {name: row.value[name] for name in ("choices", "options") if name in row.value}
    problem = read_problem(Row({"question": question, **columns, **choices}, row.place))
    return Item(problem.question, (problem.label,))


def read_code(row: Row) -> Item:
    """A programming problem: a row of any format of the environment deepcoder, or a question with `tests`: assertions, or pairs of input and
    output."""
    if isinstance(row.value, dict) and "tests" in row.value:
        question, tests = read_question(row), row.value["tests"]
        if isinstance(tests, str) and tests.strip().startswith("["):
            tests = _listed(tests)
        assertions = isinstance(tests, list) and bool(tests) and all(isinstance(test, str) for test in tests)
        row = row.plus({"text": question, "test_list": tests} if assertions else {"problem": question})
    problem = read_judged_problem(row)
    return Item(opening(problem), problem=problem)


def read_any(row: Row) -> Item:
    """An item for a reward of the user's own, which gets every column."""
    question = read_question(row)
    return Item(question, row={name: row.value[name] for name in row.value})


READERS: dict[str, Callable[[Row], Item]] = {"exact_match": read_exact, "math": read_math, "code": read_code}


def with_picture(read: Callable[[Row], Item], column: str | None = IMAGE_COLUMN) -> Callable[[Row], Item]:
    """A reader whose items have the picture of a column. Rows may lack the default one, and any may be empty: a question without a picture."""

    def read_both(row: Row) -> Item:
        item = read(row)
        if column is None or not isinstance(row.value, dict) or (column not in row.value and column == IMAGE_COLUMN):
            return item
        if column not in row.value:
            raise RowError(f"has no column '{column}', which image_column names: {did_you_mean(column, map(str, row.value))}")
        picture = read_picture(row.value[column], column, row.folder)
        if picture is None:
            return item
        # Data sets mark the place of the picture; here it stands in front of the question, and the mark would be read as text.
        return replace(item, question=item.question.replace("<image>", "").strip(), image=picture)

    return read_both


def read_picture(value: Any, column: str, folder: Path | None) -> Picture | None:
    """The picture of a cell, checked without decoding it; None where the cell is empty."""
    if isinstance(value, list | tuple) and len(value) <= 1:
        value = value[0] if value else None
    if isinstance(value, dict) and {"bytes", "path"} & set(value):
        value = value.get("bytes") or value.get("path")
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _unpacked(value.strip(), column)
    if isinstance(value, bytes):
        picture = Picture(hashlib.blake2b(value, digest_size=8).hexdigest(), value)
    elif isinstance(value, str):
        path = (folder or Path()) / Path(value).expanduser()
        if not path.is_file():  # nor is a pipe opened, which would wait for ever
            raise RowError(f"{column} is '{value:.120}', and there is no file '{path}'; give a path relative to the data file, or base64")
        picture = Picture(value, path)
    else:
        many = f"{len(value)} pictures" if isinstance(value, list | tuple) else f"{value!r:.80}"
        raise RowError(f"{column} is {many}; expected one: a path, a data URL, base64, or bytes")
    try:
        Image.check(picture.source, f"{column} '{picture.name}'")
    except BadInput as error:
        raise RowError(str(error)) from error
    return picture


def _unpacked(text: str, column: str) -> bytes | str:
    """The bytes of a data URL or of an image in base64; any other text is a path."""
    if text.startswith(("http://", "https://")):
        raise RowError(f"{column} is the address '{text:.80}'; pictures are not fetched: download it and give the path")
    url = text.startswith("data:")
    packed = text.partition(",")[2] if url else text
    if url or packed.startswith(_IN_BASE64):
        try:
            return base64.b64decode(packed, validate=True)
        except binascii.Error as error:
            if url:
                raise RowError(f"{column} is a data URL whose base64 is broken ({error})") from error
    return text


@lru_cache(maxsize=8)
def has_pictures(items: Pool[Item]) -> bool:
    return any(item.image is not None for item in items)


@lru_cache(maxsize=8)
def load(
    source: str | None, reward: str, bad_rows: BadRows, fields: Fields, template: str | None, image_column: str | None = IMAGE_COLUMN
) -> Pool[Item]:
    """The items of a file or a named data set, or those that are built in; read once per process."""
    read = with_picture(READERS.get(reward, read_any), image_column)
    if source is None and reward == "code":
        raise BadInput("qa: reward=code needs problems with tests; give data=FILE, or play the environment deepcoder")
    if source is None:
        rows = read_packaged("tether.envs.qa", "capitals.toml")["capital"]
        return Pool(
            [read(Row({"question": f"What is the capital of {country}?", "answer": city}, country)) for country, city in rows.items()],
            env="qa",
            source="built-in",
        )

    def parse(row: Row) -> Item:
        return read(row if template is None else _composed(row, template))

    items = load_instances(source, parse, env="qa", default=DEFAULT, bad_rows=bad_rows, fields=fields)
    return Pool(items, env="qa", source=source)


def _composed(row: Row, template: str) -> Row:
    """The row with its question made from a template: {name} stands for a column."""

    def filled(place: "re.Match[str]") -> str:
        name = place[1]
        if not isinstance(row.value, dict) or name not in row.value:
            columns = row.value if isinstance(row.value, dict) else ()
            raise RowError(f"has no column '{name}', which the template names: {did_you_mean(name, map(str, columns))}")
        return str(row.value[name])

    return row.plus({"question": _PLACE.sub(filled, template)})
