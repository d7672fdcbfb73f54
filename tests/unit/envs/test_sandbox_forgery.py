"""Programs that lie about how they went: what they write can be unreadable or untrue, but never more than they could have printed or returned."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core import codec
from tether.envs.deepcoder.sandbox import client, jobs
from tether.envs.deepcoder.sandbox.jobs import CallTask, Limits, Report, ScriptTask, StdinTask, Task
from tether.envs.deepcoder.sandbox.sandbox import Sandbox, describe_isolation

sys.path.append(str(Path(__file__).parent))

from hostile_programs import COMPILER, FORGED_MESSAGES, HEAD, SABOTAGE

SANDBOX = Sandbox(Limits(cpu_seconds=3, wall_seconds=10), isolation=describe_isolation().name or "process")


@pytest.fixture(autouse=True, scope="module")
def well_afterwards() -> Iterator[None]:
    """The one fork server of all these attacks is still there at the end, and well."""
    fork_server = client.running_fork_server(SANDBOX.isolation).process_id
    yield
    assert SANDBOX.run("print(6 * 7)", [StdinTask("")])[0].stdout == "42\n"
    assert client.running_fork_server(SANDBOX.isolation).process_id == fork_server


def run(code: str, task: Task) -> Report:
    [report] = SANDBOX.run(code, [task])
    return report


def written(message: bytes, code: int = 0) -> Report:
    """A call whose program writes this as its message, and ends with this code."""
    return run(f"import os\ndef f():\n    os.write(3, {message!r})\n    os._exit({code})", CallTask("f", ()))


@pytest.mark.parametrize("message", FORGED_MESSAGES)
def test_messages_that_are_none(message: bytes) -> None:
    report = written(message)
    assert (report.ending, report.value) == ("error", None)
    assert len(report.detail) < 200


def test_a_forged_value_is_a_value_like_any_other() -> None:
    report = written(HEAD + b'{"$t": [1, 2]}')
    assert (report.ending, report.value) == ("ok", (1, 2))


def test_a_failure_cannot_be_talked_into_success() -> None:
    assert written(HEAD + b"1", code=1).ending == "error"
    report = run(f"import os\ndef f():\n    os.write(3, {HEAD + b'1'!r})\n    os.kill(os.getpid(), 9)", CallTask("f", ()))
    assert (report.ending, report.detail) == ("killed", "ended by SIGKILL")
    [report] = Sandbox(Limits(wall_seconds=0.2), isolation=SANDBOX.isolation).run(
        f"import os\nos.write(3, {HEAD!r})\nwhile True: pass", [StdinTask("")]
    )
    assert report.ending == "timeout"


def test_a_forged_failure_fails_only_the_forger() -> None:
    report = written(b'{"ending": "memory", "detail": "\\u001b[31mred\\nline", "word": ""}\n', code=3)
    assert (report.ending, report.detail) == ("memory", "[31mred line")


@pytest.mark.parametrize("message", [HEAD, b'{"ending": "ok", "word": "guess"}\n', b""])
def test_a_script_cannot_be_passed_by_a_plain_forgery(message: bytes) -> None:
    report = run(f"import os\ndef f():\n    os.write(3, {message!r})\n    os._exit(0)", ScriptTask("f()\nassert False"))
    assert (report.ending, report.detail) == ("error", "the program ended before " + ("the script did" if message else "it was done"))


def test_what_scripts_cannot_prevent() -> None:
    """In one process with the program, a script takes the program's word; a call compares outside."""
    code = "class Always:\n    def __eq__(self, other): return True\ndef f(): return Always()"
    assert run(code, ScriptTask("assert f() == 42")).ending == "ok"
    report = run(code, CallTask("f", ()))
    assert (report.ending, report.detail) == ("error", "ValueError: a value of type Always cannot be handed back")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("class I(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(): return I(3)", 3),
        ("class L(list):\n    def __eq__(self, other): return True\ndef f(): return L([1])", [1]),
        ("class S(str):\n    def __str__(self): return 'fake'\ndef f(): return S('real')", "real"),
        ("class F(float):\n    def __float__(self): return 9.0\ndef f(): return F(1.5)", 1.5),
    ],
)
def test_subclasses_come_back_plain(code: str, value: Any) -> None:
    report = run(code, CallTask("f", ()))
    assert (report.ending, report.value, type(report.value)) == ("ok", value, type(value))


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_sabotage_from_within_ends_the_program_only(sabotage: str) -> None:
    for task in (StdinTask(""), CallTask("f", ()), ScriptTask("assert f() == 1")):
        report = run(f"def f(): return 1\n{sabotage}", task)
        assert report.ending in ("ok", "error", "killed")
        assert report.value in (None, 1) and len(report.detail) <= 400


def test_nothing_of_another_test_is_in_the_programs_memory() -> None:
    """The program can look at everything of the harness; an earlier test's input is not there, nor what it printed."""
    code = """
import gc, sys
given = sys.stdin.read()
print(given)
word, seen, todo, found = 'sword' + 'fish', set(), [*gc.get_objects(), sys.modules, sys._getframe()], 0
while todo:
    thing = todo.pop()
    if id(thing) not in seen:
        seen.add(id(thing))
        found += isinstance(thing, (str, bytes)) and thing is not word and (word if isinstance(thing, str) else word.encode()) in thing
        todo += gc.get_referents(thing)
print(found > 0)
"""
    alone = Sandbox(Limits(cpu_seconds=10, wall_seconds=30), isolation=SANDBOX.isolation, concurrency=1)
    first, second = alone.run(code, [StdinTask("swordfish"), StdinTask("nothing")])
    assert (first.stdout, second.stdout) == ("swordfish\nTrue\n", "nothing\nFalse\n")


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("import os\nos.write(1, b'a\\x00b\\xff\\xfe\\n')", "a\x00b\ufffd\ufffd\n"),
        ("import sys\nsys.stdout.buffer.write('caf\\u00e9'.encode('latin-1'))", "caf\ufffd"),
        ("print('x' * 500_000)", "x" * 500_000 + "\n"),
    ],
)
def test_output_is_any_bytes(code: str, stdout: str) -> None:
    report = run(code, StdinTask(""))
    assert (report.ending, report.stdout) == ("ok", stdout)


@pytest.mark.parametrize("code", COMPILER.values(), ids=COMPILER)
def test_programs_made_to_break_the_compiler(code: str) -> None:
    assert run(code, StdinTask("")).ending in ("ok", "error", "memory", "killed", "timeout")


@pytest.mark.parametrize("value", ["'x' * 65_536", "[[]] * 40_000", "list(range(20_000))", "shared"])
def test_values_that_are_too_large(value: str) -> None:
    code = f"shared = []\nfor _ in range(60): shared = [shared, shared]\ndef f(): return {value}"
    [report] = Sandbox(Limits(output_kib=64), isolation=SANDBOX.isolation).run(code, [CallTask("f", ())])
    assert (report.ending, report.detail, report.value) == ("output", "the value is too large", None)


def test_a_value_up_to_the_limit() -> None:
    [report] = Sandbox(Limits(output_kib=64), isolation=SANDBOX.isolation).run("def f(): return 'x' * 65_534", [CallTask("f", ())])
    assert (report.ending, report.value) == ("ok", "x" * 65_534)


# ------------------------------------------------------------------------------------------------------------------- codec


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_depth() -> None:
    assert codec.decode(codec.encode(nested(99), 10_000)) == nested(99)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        codec.encode(nested(100), 10_000)
    chain: Any = {}
    for key in range(97):
        chain = {(key, frozenset({key})): chain}
    assert codec.decode(codec.encode(chain, 100_000)) == chain


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["0x1f", "ff", "nan"])
)
TAGGED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$t", "$s", "$f", "$dict", "$i", "$bytes", "$c", "$float", "$x", "x"]), inner, max_size=2)
        | st.tuples(inner, inner)
    ),
)


@settings(max_examples=60, deadline=None)
@given(TAGGED)
def test_whatever_is_tagged_is_a_value_or_a_value_error(tagged: Any) -> None:
    with contextlib.suppress(ValueError):
        codec.decode(json.dumps(tagged))


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='[]{}",:\\\\ tsd0.e-N"', max_size=40))
def test_whatever_is_text_is_json_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        codec.decode(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_values_survive(value: Any) -> None:
    back = codec.decode(codec.encode(value, 10**6))
    assert back == value and repr(back) == repr(value)


def test_depth_holds_where_the_recursion_limit_was_lifted() -> None:
    code = """
import sys
from tether.core import codec
sys.setrecursionlimit(10**9)
for text in ("[" * 10**6, '{"$t":' * 10**6, "[" * 10**6 + "]" * 10**6):
    try: codec.decode(text)
    except ValueError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "is nested too deeply\n" * 3)


def test_colliding_keys_do_not_hold_us_up() -> None:
    keys = [number * (2**61 - 1) for number in range(30_000)]
    began = time.monotonic()
    for text in (json.dumps({"$s": keys}), json.dumps({"$dict": [[key, 1] for key in keys]})):
        with pytest.raises(ValueError, match="too many keys with the same hash"):
            codec.decode(text)
    assert time.monotonic() - began < 5


def test_sizes_are_in_characters() -> None:
    assert codec.encode("ab", 4) == '"ab"'
    with pytest.raises(codec.TooLarge):
        codec.encode("ab", 3)
    with pytest.raises(codec.TooLarge):
        codec.encode([0] * 10, 9)


def test_paths_of_this_machine_are_not_told() -> None:
    report = run("from math import nothing", StdinTask(""))
    assert report.ending == "error" and "cannot import name 'nothing' from 'math'" in report.detail
    assert sys.base_prefix not in report.detail
    report = run("import os\nraise SystemExit(os.path.dirname(os.__file__) + '/x')", StdinTask(""))
    assert report.detail == "SystemExit: <python>/x (solution.py, line 2)"


def test_a_cell_that_could_not_be_prepared_says_why() -> None:
    facts = json.dumps({"limit": None, "started": False, "seconds": 0.1, "code": 113, "signal": 0, "cpu_seconds": 0.1}).encode()
    report = jobs.read_report(StdinTask(""), "", [facts, b"", b"making a work folder: No space left on device"])
    assert (report.ending, report.detail) == ("killed", "the sandbox could not be prepared (making a work folder: No space left on device)")
    assert jobs.read_report(StdinTask(""), "", [facts, b"", b""]).detail.endswith("(exit code 113, signal 0)")


def test_every_fact_of_the_supervisor_is_plain_json() -> None:
    facts = json.dumps({"limit": None, "started": True, "seconds": 0.1, "code": 0, "signal": 64, "cpu_seconds": 0.1}).encode()
    report = jobs.read_report(StdinTask(""), "", [facts, b"out", b"+"])
    assert (report.ending, report.detail, report.stdout) == ("killed", "ended by SIGRTMAX", "out")
