"""LiveCodeBench rows: public tests as JSON, private ones as JSON or compressed, the function's name in the metadata.

LiveCodeBench publishes the private tests as base64 of zlib of a pickled JSON text. Unpickling runs whatever the file says, so the
pickle is not loaded: its operations are listed, and only those that put down one text are accepted.
"""

import base64
import binascii
import pickletools
import zlib
from typing import Any

from tether.envs.dataset import Row, RowError
from tether.envs.deepcoder.formats.pairs import decoded, problem_of, read_pairs, text_field
from tether.envs.deepcoder.parsing import read_json
from tether.envs.deepcoder.problem import Problem

_MAX_BYTES = 2**30
"""Of private tests unpacked; more is refused, not unpacked."""
_TEXT_OPERATIONS = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_OTHER_OPERATIONS = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def livecodebench(row: Row) -> Problem:
    """{question_content, public_test_cases, private_test_cases?, starter_code?, metadata?, question_title?, ...}."""
    content, public = row.fields("question_content", "public_test_cases")
    title = text_field(row, "question_title").strip()
    statement = f"{title}\n\n{content}" if title and isinstance(content, str) and content.strip() else content
    starter = text_field(row, "starter_code")
    metadata = decoded(row.value.get("metadata") or {}, "metadata")
    function = str(metadata.get("func_name") or "") if isinstance(metadata, dict) else ""
    shown = decoded(public, "public_test_cases")
    hidden = private_tests(row.value.get("private_test_cases"))
    if not isinstance(shown, list) or not isinstance(hidden, list):
        raise RowError("has test cases that are not lists")
    pairs = read_pairs([*shown, *hidden], function=function, starter=starter)
    return problem_of(row, "livecodebench", statement, starter, pairs, num_public=len(shown))


def private_tests(value: Any) -> Any:
    """The private tests, in whichever of the published encodings."""
    if value is None or value == "":
        return []
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return _unpacked(value)


def _unpacked(text: str) -> Any:
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text.encode("ascii"), validate=True), _MAX_BYTES)
    except (binascii.Error, UnicodeEncodeError, zlib.error) as error:
        raise RowError(f"has private_test_cases that are neither JSON nor base64 of zlib ({error})") from error
    if not unpacker.eof:
        raise RowError(f"has private_test_cases that are cut short or unpack to more than {_MAX_BYTES} bytes")
    try:
        return read_json(_pickled_text(data))
    except ValueError as error:
        raise RowError(f"has private_test_cases that do not hold a JSON text ({error})") from error


def _pickled_text(data: bytes) -> str:
    """The text of a pickle that holds a text and nothing else; ValueError otherwise."""
    texts: list[str] = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in _TEXT_OPERATIONS:
            texts.append(str(argument))
        elif operation.name not in _OTHER_OPERATIONS:
            raise ValueError(f"the pickle does more than hold a text: {operation.name}")
    if len(texts) != 1:
        raise ValueError(f"the pickle holds {len(texts)} texts")
    return texts[0]
