"""Questions from rows of the public data sets, identified by the names of their fields.

| fields | data | label |
|---|---|---|
| query, response | MetaMathQA | what follows the last "The answer is:" |
| question, answer | GSM8K | what follows the last "####" |
| problem, solution | MATH | the last \\boxed{...} |
| question or problem, answer | MetaMath's own tests, MATH-500 | the answer itself, where it is a single line |
| question, choices or options, answer or answerKey | MMLU, MMLU-Pro, ARC | the letter of the right choice |

A worked solution may end in any of these marks, whatever its data set usually does. A row without a label cannot be used.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, load_instances
from tether.envs.metamathqa.generator import Problem
from tether.envs.metamathqa.latex import closing_brace

QUESTION_FIELDS = ("query", "question", "problem")
ANSWER_FIELDS = ("answer", "answerKey", "response", "solution")
"""In the order they are looked for: where there are an answer and a solution, the answer is the label."""
CHOICES_FIELDS = ("choices", "options")
LETTERS = "ABCDEFGHIJ"
ACCEPTED = "query and response, question and answer, problem and solution, problem and answer, or question, choices and answer"
ANSWER_PHRASE = "The answer is:"
HASHES = "####"
_COMPUTED_DIGITS = 16
"""Digits of a float that nobody has written by hand."""
_SAME_FLOAT = 5e-16
"""Relative: two units in the last place of a float."""
_EXACT_WHOLE = 2**53
_MAX_DENOMINATOR = 1000
_SPACED_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:, \d{3})+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|\S)")


@lru_cache(maxsize=8)
def load(source: str, bad_rows: BadRows, fields: Fields = ()) -> Pool[Problem]:
    """The problems of a file or a named data set; read once per process."""
    problems = load_instances(source, read_problem, env="metamathqa", default="generated problems", bad_rows=bad_rows, fields=fields)
    return Pool(problems, env="metamathqa", source=source)


def read_problem(row: Row) -> Problem:
    """The problem of a row in any known format."""
    names = row.value if isinstance(row.value, dict) else row.fields("question", "answer")
    asked = next((name for name in QUESTION_FIELDS if name in names), None)
    told = next((name for name in ANSWER_FIELDS if name in names), None)
    if asked is None or told is None:
        raise RowError(
            f"has no {'question' if asked is None else 'answer'}: expected {ACCEPTED}, got "
            f"{', '.join(map(str, names)) or 'no columns'}; name other columns with fields={{question: COLUMN, answer: COLUMN}}"
        )
    question, answer = row.fields(asked, told)
    if not isinstance(question, str) or not question.strip():
        raise RowError(f"{asked} is {question!r:.80}; expected text")
    categories = _categories(names)
    offered = next((name for name in CHOICES_FIELDS if row.value.get(name)), None)
    if offered is not None:
        choices = read_choices(offered, row.value[offered])
        return Problem(f"{question.strip()}\n{choices.text}", choices.letter(told, answer), categories=categories)
    if told in ("answer", "answerKey"):
        return Problem(question.strip(), _plain_label(answer), categories=categories)
    return Problem(question.strip(), _marked_label(told, answer), categories=categories)


def _categories(row: Any) -> dict[str, str]:
    """The subject and the level of a row: MATH has `type` and "Level 5", MATH-500 `subject` and 5."""
    subject, level = row.get("subject") or row.get("type"), row.get("level")
    found = {"subject": subject, "level": str(level).removeprefix("Level ") if isinstance(level, str | int) else None}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _plain_label(answer: Any) -> str:
    """The label of a field that may hold nothing else, or a worked solution."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if isinstance(answer, float):
        return number_label(answer)
    text = _text("answer", answer)
    if HASHES in text or ANSWER_PHRASE in text or _BOX.search(text):
        return _marked_label("answer", text)
    if "\n" in text:
        raise RowError(f"answer has no label: no '{HASHES}', no '{ANSWER_PHRASE}', no box, and it is more than one line")
    return text


def number_label(value: float) -> str:
    """The label of a floating-point number: what was written, where that can be told from its digits; RowError otherwise.

    A float of 16 or 17 digits was computed: 0.1 + 0.2 is 0.30000000000000004, and no answer equals that. It is read as the short decimal,
    or else the simple fraction, that it stands for.

    >>> number_label(2.5), number_label(0.1 + 0.2), number_label(1 / 3), number_label(72.0)
    ('2.5', '0.3', '1/3', '72')
    """
    if not math.isfinite(value):
        raise RowError(f"answer is {value}, which is no number; give the answer as text")
    if value.is_integer() and abs(value) < _EXACT_WHOLE:
        return str(int(value))
    digits = len(repr(value).partition("e")[0].replace(".", "").replace("-", "").strip("0"))
    if digits < _COMPUTED_DIGITS:
        return repr(value)
    near = _SAME_FLOAT * abs(value)
    short = f"{value:.12g}"
    if abs(float(short) - value) <= near:
        return short
    simple = Fraction(value).limit_denominator(_MAX_DENOMINATOR)
    if abs(float(simple) - value) <= near:
        return f"{simple.numerator}/{simple.denominator}"
    raise RowError(f"answer is the float {value!r}, a rounded value that no exact answer equals; give it as text, such as sqrt(2)")


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a question. Example: Choices(("A", "B"), ("4", "5")) has the text "A. 4", "B. 5" in lines."""

    letters: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    """As the row has them, where they are not the letters: some rows of ARC count 1, 2, 3, 4."""

    @property
    def text(self) -> str:
        lines = [f"{letter}. {text}" for letter, text in zip(self.letters, self.texts, strict=True)]
        return "\n".join([*lines, "Answer with the letter of the right choice."])

    def letter(self, field: str, answer: Any) -> str:
        """The letter of the right choice, which is given as a whole number from 0, as a letter, or as the text of the choice."""
        if isinstance(answer, int) and not isinstance(answer, bool):
            if 0 <= answer < len(self.letters):
                return self.letters[answer]
            raise RowError(f"{field} is {answer}, which is no choice; {len(self.letters)} choices are numbered from 0")
        text = _text(field, answer)
        bare, names = text.strip("().").upper(), self.labels or self.letters
        readings = {letter for letter, name, choice in zip(self.letters, names, self.texts, strict=True) if bare == name or text == choice}
        if len(readings) != 1:
            raise RowError(
                f"{field} is {text!r:.80}, which is {'more than one' if readings else 'no'} choice: expected a letter from {names[0]} to "
                f"{names[-1]}, a number from 0, or the text of one choice"
            )
        return readings.pop()


def read_choices(field: str, value: Any) -> Choices:
    """The choices of MMLU (a list of texts), or of ARC ({"text": [...], "label": [...]})."""
    texts, letters = (value.get("text"), value.get("label")) if isinstance(value, dict) else (value, None)
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS) or not all(isinstance(text, str | int | float) for text in texts):
        raise RowError(f"{field} is {value!r:.80}; expected a list of 2 to {len(LETTERS)} texts")
    labels = tuple(LETTERS[: len(texts)]) if letters is None else tuple(map(str, letters))
    if labels not in (tuple(LETTERS[: len(texts)]), tuple("123456789"[: len(texts)])):
        raise RowError(f"{field} has the labels {letters!r:.80}; expected one letter for each choice, from A on")
    shown = tuple(str(text).strip() for text in texts)
    if all(text[:1] == letter and text[1:2] in (")", ".", ":") for letter, text in zip(LETTERS, shown, strict=False)):
        shown = tuple(text[2:].strip() for text in shown)  # AQuA writes the letters into the texts
    return Choices(tuple(LETTERS[: len(texts)]), shown, labels)


def _marked_label(field: str, value: Any) -> str:
    """What a worked solution marks as its answer."""
    text = _text(field, value)
    label: str | None = None
    for mark in (ANSWER_PHRASE, HASHES):
        if mark in text:
            label = text.rpartition(mark)[2].strip()
            if mark == HASHES and _SPACED_THOUSANDS.fullmatch(label):  # GSM8K's answers are single numbers: 58, 500 is no list there
                label = label.replace(", ", ",")
            break
    else:
        label = last_box(text)
    if label is None:
        raise RowError(f"{field} has no label: no '{ANSWER_PHRASE}', no '{HASHES}' and no closed \\boxed{{...}}")
    if not label:
        raise RowError(f"{field} has an empty label")
    return label


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{field} is {value!r:.80}; expected text")
    return value.strip()


def last_box(text: str) -> str | None:
    r"""What the last \boxed{...} holds, with braces balanced; None if there is no box, or it is never closed.

    >>> last_box(r"so $\boxed{1}$, that is $\boxed{\frac{1}{2}}$")
    '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].start(1)
    if text[start] != "{":  # \boxed 5
        return text[start:].split()[0].strip("$.")
    close = closing_brace(text, start)
    return None if close is None else text[start + 1 : close].strip()
