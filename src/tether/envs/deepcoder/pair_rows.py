"""Rows whose tests are pairs of input and output: DeepCoder-Preview, TACO and APPS, PrimeIntellect's verification_info, LiveCodeBench.

Tests come as a list of {input, output, ...} or as {inputs, outputs, fn_name}, either as they are or as JSON (or a Python literal) in a
text. A pair is a function call if its row or the pair itself names a function (`fn_name`, `metadata.func_name`, a testtype or type
that says so), or if the starter code is a class with one method and the tests are its arguments; else text for standard input. No format but
LiveCodeBench's says which tests are public; the first one is taken as such, it being the sample of the statement as a rule.

A row whose starter code is a class Solution with one method, and which names no function, has the layout of LeetCode and GeeksforGeeks. It asks for
a method, whatever its tests look like: inputs are the arguments, one value a line, or as assignments (`nums = [2,7], target = 9`; `N = 3`,
`arr[] = {1, 2, 3}` in lines). The tests are played as calls if every input gives exactly the method's arguments and every output is a value. Where
one does not, all of them stay what they were, text for standard input.

LiveCodeBench publishes its private tests as base64 of zlib of a pickled JSON text. Unpickling executes whatever the file says. So the pickle
is not loaded: its operations are listed, and only those that put down one text are accepted.
"""

import ast
import base64
import binascii
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tether.envs.dataset import Row, RowError
from tether.envs.deepcoder.assemble import extract, opened
from tether.envs.deepcoder.parsing import NotPython, parse, read_expected, read_json, read_value
from tether.envs.deepcoder.problem import Case, Prints, Problem, Returns, check_arguments, digest_of
from tether.envs.deepcoder.sandbox.jobs import CallTask, StdinTask

_ASSIGNMENT = re.compile(r"(?:^|[,\n])\s*([A-Za-z_]\w*)\s*(?:\[\s*\w*\s*\])*\s*=(?!=)\s*")


def starter_method(starter: str) -> tuple[str, list[str]] | None:
    """Name and parameters of the one method of the starter's class Solution; None if there is not exactly one."""
    tree = opened(starter)
    solution = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Solution"), None) if tree else None
    if solution is None:
        return None
    methods = [node for node in solution.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    if len(methods) != 1 or methods[0].args.vararg or methods[0].args.kwonlyargs or methods[0].args.kwarg:
        return None
    parameters = [argument.arg for argument in methods[0].args.args]
    return (methods[0].name, parameters[1:]) if parameters[:1] == ["self"] and len(parameters) > 1 else None


def call_arguments(given: Sequence[Any], parameters: list[str]) -> list[list[Any]] | None:
    """The arguments of every test; None if some input does not give them."""
    try:
        return [_method_arguments(value, parameters) for value in given]
    except ValueError:
        return None


def are_values(expected: Sequence[Any]) -> bool:
    """Whether every output is a value: not a text, or a text that is one in JSON or Python."""
    try:
        for text in expected:
            if isinstance(text, str):
                read_value(text)
    except ValueError:
        return False
    return True


def _method_arguments(given: Any, parameters: list[str]) -> list[Any]:
    if isinstance(given, list | tuple) and not all(isinstance(line, str) for line in given):
        found = list(given)
    else:
        text = given if isinstance(given, str) else "\n".join(given) if isinstance(given, list) else ""
        found = _assigned(text, parameters) or [read_value(line) for line in text.split("\n") if line.strip()]
    if len(found) != len(parameters):
        raise ValueError(f"{len(found)} arguments for {len(parameters)} parameters")
    return found


def _assigned(text: str, parameters: list[str]) -> list[Any]:
    """The values of `name = value` pairs in the order of the parameters, or in their own where the names are others; [] if there are none."""
    found = list(_ASSIGNMENT.finditer(text))
    if not found or text[: found[0].start()].strip():
        return []
    ends = [following.start() for following in found[1:]] + [len(text)]
    values = {match.group(1).lower(): _value(text[match.end() : end].strip()) for match, end in zip(found, ends, strict=True)}
    wanted = [parameter.lower() for parameter in parameters]
    return [values[name] for name in wanted] if set(wanted) == set(values) else list(values.values())


def _value(text: str) -> Any:
    """A value; an array may be written in braces, as in C."""
    return read_value(text.replace("{", "[").replace("}", "]") if text.startswith("{") and ":" not in text else text)


_FUNCTION_TYPES = ("functional", "function_call")
_IDENTITIES = ("question_id", "problem_id", "task_id", "id")


@dataclass(frozen=True, slots=True)
class Pair:
    """One test of a row."""

    given: Any
    expected: Any
    function: str
    """Empty for a test of standard input."""
    says_stdin: bool = False
    """The row says itself that it is one."""


def deepcoder(row: Row) -> Problem:
    """DeepCoder-Preview: {problem, tests, starter_code?, metadata?, solutions?}."""
    statement, tests = row.fields("problem", "tests")
    starter = text_field(row, "starter_code")
    metadata = decoded(row.value.get("metadata") or {}, "metadata")
    function = str(metadata.get("func_name") or "") if isinstance(metadata, dict) else ""
    pairs = read_pairs(decoded(tests, "tests"), function=function, starter=starter)
    return problem_of(row, "deepcoder", statement, starter, pairs)


def input_output(row: Row) -> Problem:
    """TACO and APPS: {question, input_output, starter_code?, difficulty?, solutions?}."""
    statement, tests = row.fields("question", "input_output")
    starter = text_field(row, "starter_code")
    return problem_of(row, "input_output", statement, starter, read_pairs(decoded(tests, "input_output"), function="", starter=starter))


def verification_info(row: Row) -> Problem:
    """PrimeIntellect and open-r1: {prompt, verification_info: {language, test_cases}}."""
    statement, info = row.fields("prompt", "verification_info")
    info = decoded(info, "verification_info")
    if not isinstance(info, dict) or "test_cases" not in info:
        raise RowError("has a verification_info without test_cases")
    if info.get("language", "python") != "python":
        raise RowError(f"is for the language {info['language']!r}; only python can be run")
    return problem_of(row, "verification_info", statement, "", read_pairs(info["test_cases"], function="", starter=""))


def problem_of(row: Row, source: str, statement: Any, starter: str, pairs: Sequence[Pair], *, num_public: int = 1) -> Problem:
    """The problem of a statement and its tests, the first `num_public` of them public, with what else the row has."""
    if not isinstance(statement, str) or not statement.strip():
        raise RowError("has an empty statement")
    cases = [replace(case, public=at < num_public) for at, case in enumerate(_cases(pairs))]
    return Problem(
        statement=statement.strip(),
        cases=tuple(cases),
        digest=digest_of(cases),
        starter=starter,
        entry_point=next((pair.function for pair in pairs if pair.function), ""),
        solution=_solution(row),
        source=f"{source} {next((row.value[name] for name in _IDENTITIES if row.value.get(name) is not None), '')}".strip(),
        difficulty=text_field(row, "difficulty"),
    )


def read_pairs(tests: Any, *, function: str, starter: str) -> list[Pair]:
    """The tests of a row, in either layout; `function` is what the row says of all of them."""
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise RowError("has inputs and outputs that are not lists of the same length")
        name = str(tests.get("fn_name") or function)
        pairs = [Pair(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]
    elif isinstance(tests, list | tuple):
        pairs = [_from_entry(entry, number, function, starter) for number, entry in enumerate(tests, 1)]
    else:
        raise RowError(f"has tests of an unknown layout ({type(tests).__name__}); expected a list of pairs, or inputs and outputs")
    if not pairs:
        raise RowError("has no tests")
    return _as_calls(pairs, starter)


def _as_calls(pairs: list[Pair], starter: str) -> list[Pair]:
    """The tests as calls of the starter's method, where they can be nothing else; otherwise as they are."""
    method = starter_method(starter) if not any(pair.function or pair.says_stdin for pair in pairs) else None
    if method is None:
        return pairs
    name, parameters = method
    arguments = call_arguments([pair.given for pair in pairs], parameters)
    if arguments is None or not are_values([pair.expected for pair in pairs]):
        return pairs
    return [Pair(given, pair.expected, name) for pair, given in zip(pairs, arguments, strict=True)]


def _cases(pairs: Sequence[Pair]) -> list[Case]:
    """A case per pair."""
    called = [pair.expected for pair in pairs if pair.function]
    wrapped = bool(called) and all(isinstance(expected, list) and len(expected) == 1 for expected in called)
    return [
        _call_case(pair, wrapped)
        if pair.function
        else Case(StdinTask(_lines(pair.given, "input")), Prints(_lines(pair.expected, "output")))
        for pair in pairs
    ]


def decoded(value: Any, what: str) -> Any:
    """A field that may be a text holding JSON or a Python literal."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise RowError(f"has an empty {what}")
    try:
        return read_value(value)
    except ValueError as error:
        raise RowError(f"has a field '{what}' that does not parse: {error}") from error


def text_field(row: Row, name: str) -> str:
    """A field of the row as text; empty where it is missing or null."""
    value = row.value.get(name)
    return "" if value is None else str(value)


def _from_entry(entry: Any, number: int, function: str, starter: str) -> Pair:
    if not isinstance(entry, Mapping) or "input" not in entry or "output" not in entry:
        raise RowError(f"test {number} has no input or no output")
    inner = entry.get("metadata") or {}
    named = str(entry.get("fn_name") or (inner.get("func_name") if isinstance(inner, Mapping) else "") or function)
    said = entry.get("testtype") or entry.get("type")
    kind = said or ("functional" if entry.get("fn_name") else "stdin")
    if kind not in _FUNCTION_TYPES:
        return Pair(entry["input"], entry["output"], "", says_stdin=bool(said))
    named = named or _starter_function(starter)
    if not named:
        raise RowError(f"test {number} calls a function but the row does not name it (metadata.func_name)")
    return Pair(entry["input"], entry["output"], named)


def _starter_function(starter: str) -> str:
    """The one function of the starter code; empty if there is not exactly one."""
    try:
        tree = parse(starter.rstrip() + " pass" if starter.rstrip().endswith(":") else starter)
    except NotPython:
        return ""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]
    return names[0] if len(names) == 1 else ""


def _lines(value: Any, what: str) -> str:
    """A text, or the lines of one."""
    if isinstance(value, list) and all(isinstance(line, str | int | float) for line in value):
        return "\n".join(map(str, value))
    if isinstance(value, str | int | float):
        return str(value)
    raise RowError(f"has a test whose {what} is a {type(value).__name__}; expected a text or its lines")


def _call_case(pair: Pair, wrapped: bool) -> Case:
    if isinstance(pair.given, str):
        arguments = _arguments(pair.given)
    elif isinstance(pair.given, list | tuple):
        # JSON gave the whole-number keys of a dictionary as texts; TACO's own harness takes the numbers back, too.
        arguments = tuple(
            {int(key): value for key, value in argument.items()}
            if isinstance(argument, dict) and all(isinstance(key, str) and key.removeprefix("-").isdecimal() for key in argument)
            else argument
            for argument in pair.given
        )
    else:
        raise RowError(f"has a call whose input is a {type(pair.given).__name__}; expected the list of its arguments")
    try:
        check_arguments(arguments)
    except ValueError as error:
        raise RowError(f"has a call whose arguments cannot be handed to a program: {error}") from error
    return Case(CallTask(pair.function, arguments), Returns(_expected(pair.expected), wrapped))


def _arguments(text: str) -> tuple[Any, ...]:
    """One value per line, or a single one over several lines."""
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        return tuple(read_value(line) for line in lines)
    except ValueError as error:
        try:
            return (read_json(text),)
        except ValueError:
            raise RowError(f"has a call whose input does not parse: {error}") from error


def _expected(value: Any) -> Any:
    """The value of an output; a text that is neither JSON nor a literal is the string itself."""
    if not isinstance(value, str):
        return value
    try:
        return read_expected(value)
    except ValueError:
        return value


def _solution(row: Row) -> str:
    """The first reference solution of the row, without its code fence."""
    value = row.value.get("solutions") or row.value.get("gold_standard_solution") or ""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = read_json(value)
        except ValueError:
            return ""
    first = value[0] if isinstance(value, list) and value else value
    return extract(first).code if isinstance(first, str) else ""


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
