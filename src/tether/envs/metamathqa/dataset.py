"""Questions from rows of the public data sets, identified by the names of their fields.

| fields | data | label |
|---|---|---|
| query, response | MetaMathQA | what follows the last "The answer is:" |
| question, answer | GSM8K | what follows the last "####" |
| problem, solution | MATH | the last \\boxed{...} |
| question or problem, answer | MetaMath's own tests, MATH-500 | the answer itself, where it is a single line |

A worked solution may end in any of these marks, whatever its data set usually does. A row without a label cannot be used.
"""

import re
from functools import lru_cache
from typing import Any

from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, load_instances
from tether.envs.metamathqa.answers.latex import closing_brace
from tether.envs.metamathqa.generator import Problem

QUESTION_FIELDS = ("query", "question", "problem")
ANSWER_FIELDS = ("answer", "response", "solution")
"""In the order they are looked for: where there are an answer and a solution, the answer is the label."""
ANSWER_PHRASE = "The answer is:"
HASHES = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|\S)")


@lru_cache(maxsize=8)
def load(source: str, bad_rows: BadRows, fields: Fields = ()) -> Pool[Problem]:
    """The problems of a file or a named data set; read once per process."""
    problems = load_instances(source, _problem, env="metamathqa", default="generated problems", bad_rows=bad_rows, fields=fields)
    return Pool(problems, env="metamathqa", source=source)


def _problem(row: Row) -> Problem:
    names = row.value if isinstance(row.value, dict) else row.fields("question", "answer")
    asked = next((name for name in QUESTION_FIELDS if name in names), None)
    told = next((name for name in ANSWER_FIELDS if name in names), None)
    if asked is None or told is None:
        raise RowError(
            f"has no {'question' if asked is None else 'answer'}: expected query and response, question and answer, or problem and solution, got "
            f"{', '.join(map(str, names)) or 'no columns'}; name other columns with fields={{question: COLUMN, answer: COLUMN}}"
        )
    question, answer = row.fields(asked, told)
    if not isinstance(question, str) or not question.strip():
        raise RowError(f"{asked} is {question!r:.80}; expected text")
    label = _plain_label(answer) if told == "answer" else _marked_label(told, answer)
    return Problem(question.strip(), label, categories=_categories(names))


def _categories(row: Any) -> dict[str, str]:
    """The subject and the level of a row: MATH has `type` and "Level 5", MATH-500 `subject` and 5."""
    subject, level = row.get("subject") or row.get("type"), row.get("level")
    found = {"subject": subject, "level": str(level).removeprefix("Level ") if isinstance(level, str | int) else None}
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _plain_label(answer: Any) -> str:
    """The label of a field that may hold nothing else, or a worked solution."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    text = _text("answer", answer)
    if HASHES in text or ANSWER_PHRASE in text or _BOX.search(text):
        return _marked_label("answer", text)
    if "\n" in text:
        raise RowError(f"answer has no label: no '{HASHES}', no '{ANSWER_PHRASE}', no box, and it is more than one line")
    return text


def _marked_label(field: str, value: Any) -> str:
    """What a worked solution marks as its answer."""
    text = _text(field, value)
    label: str | None = None
    for mark in (ANSWER_PHRASE, HASHES):
        if mark in text:
            label = text.rpartition(mark)[2].strip()
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
