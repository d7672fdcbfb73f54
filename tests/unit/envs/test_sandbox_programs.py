"""Ordinary programs run in the sandbox as they would anywhere: input, output, values, exits, threads, deep recursion."""

import subprocess
import sys
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.envs.deepcoder.sandbox.jobs import CallTask, Limits, Report, ScriptTask, StdinTask
from tether.envs.deepcoder.sandbox.sandbox import Sandbox

SANDBOX = Sandbox(Limits(cpu_seconds=5, wall_seconds=20))


def run(code: str, stdin: str = "") -> Report:
    [report] = SANDBOX.run(code, [StdinTask(stdin)])
    return report


def printed(code: str, stdin: str = "") -> str:
    report = run(code, stdin)
    assert (report.ending, report.detail) == ("ok", "")
    return report.stdout


def called(code: str, *args: Any, function: str = "f") -> Report:
    [report] = SANDBOX.run(code, [CallTask(function, args)])
    return report


def scripted(code: str, script: str) -> Report:
    [report] = SANDBOX.run(code, [ScriptTask(script)])
    return report


@pytest.mark.parametrize(
    "code",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nprint(sum(int(word) for line in sys.stdin for word in line.split()))",
        "import sys\nsys.stdout.buffer.write(b'%d\\n' % sum(map(int, sys.stdin.buffer.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import os\nos.write(1, b'%d\\n' % sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "import mmap\nprint(sum(map(int, mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:].split())))",
        "if __name__ == '__main__':\n    print(sum(map(int, input().split())))",
    ],
)
def test_ways_to_read_and_write(code: str) -> None:
    assert printed(code, "20 22\n") == "42\n"


FAST_IO = """
import os, sys
from io import BytesIO, IOBase

BUFSIZE = 8192

class FastIO(IOBase):
    newlines = 0

    def __init__(self, file):
        self._fd = file.fileno()
        self.buffer = BytesIO()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.write = self.buffer.write if self.writable else None

    def read(self):
        while True:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            if not b:
                break
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines = 0
        return self.buffer.read()

    def readline(self):
        while self.newlines == 0:
            b = os.read(self._fd, max(os.fstat(self._fd).st_size, BUFSIZE))
            self.newlines = b.count(b"\\n") + (not b)
            ptr = self.buffer.tell()
            self.buffer.seek(0, 2), self.buffer.write(b), self.buffer.seek(ptr)
        self.newlines -= 1
        return self.buffer.readline()

    def flush(self):
        if self.writable:
            os.write(self._fd, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)

class IOWrapper(IOBase):
    def __init__(self, file):
        self.buffer = FastIO(file)
        self.flush = self.buffer.flush
        self.writable = self.buffer.writable
        self.write = lambda s: self.buffer.write(s.encode("ascii"))
        self.read = lambda: self.buffer.read().decode("ascii")
        self.readline = lambda: self.buffer.readline().decode("ascii")

sys.stdin, sys.stdout = IOWrapper(sys.stdin), IOWrapper(sys.stdout)
input = lambda: sys.stdin.readline().rstrip("\\r\\n")
print(sum(map(int, input().split())))
"""
"""The input and output that fast programs of Codeforces open with: it asks the streams for their `mode`."""


def test_the_fast_input_and_output_of_contest_programs() -> None:
    assert printed(FAST_IO, "20 22\n") == "42\n"


def test_the_streams_have_what_pythons_own_have() -> None:
    code = """
import io, sys
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.mode, stream.name, stream.fileno(), stream.encoding, type(stream.buffer).__name__, stream.buffer.raw.mode, stream.errors)
print(sys.stdin.buffer.readline(), sys.stdin.buffer.peek(1)[:1], sys.stdin.isatty(), sys.__stdin__ is sys.stdin)
"""
    ours = printed(code, "one\ntwo\n")
    theirs = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", code],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONIOENCODING": "utf-8"},
    ).stdout
    assert ours == theirs


def test_a_program_finds_an_ordinary_interpreter_and_an_empty_folder() -> None:
    code = """
import os, sys, __main__
print(__name__, __file__, sys.argv, __main__.x is x if (x := 1) else 0, dict(os.environ), os.listdir())
print(sys.stdin.encoding, sys.stdout.encoding, exit, quit)
"""
    expected = "__main__ solution.py ['solution.py'] True {} []\nutf-8 utf-8 Use exit() or Ctrl-D (i.e. EOF) to exit Use quit() or Ctrl-D"
    assert printed(code).startswith(expected)


def test_the_input_ends() -> None:
    assert run("input()\ninput()", "one line\n").detail == "EOFError: EOF when reading a line (solution.py, line 2)"


def test_text_beyond_ascii_both_ways() -> None:
    assert printed("print(input()[::-1])", "añ中😀\n") == "😀中ña\n"


def test_megabytes_in_and_out_do_not_deadlock() -> None:
    [report] = Sandbox(Limits(output_kib=4096)).run("for line in open(0): print(line, end='')", [StdinTask("0123456789abcdef\n" * 200_000)])
    assert report.ending == "ok" and report.stdout == "0123456789abcdef\n" * 200_000


def test_every_run_is_the_same() -> None:
    """Also in another process: hashes and random numbers are those of seed 0."""
    code = "import random\nprint(random.random(), hash('text'), {'b', 'a', 'c', 'longer'})"
    command = [sys.executable, "-c", f"import random; random.seed(0)\n{code}"]
    elsewhere = subprocess.run(command, env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True).stdout
    assert {printed(code) for _ in range(3)} == {elsewhere}


def test_seconds_are_the_programs_own() -> None:
    assert 0.1 < run("import time\ntime.sleep(0.2)").seconds < 5


@pytest.mark.parametrize(
    ("code", "ending", "detail"),
    [
        ("print(1)", "ok", ""),
        ("print(1); exit()", "ok", ""),
        ("print(1); import sys; sys.exit(0)", "ok", ""),
        ("print(1); import os, sys; sys.stdout.flush(); os._exit(0)", "ok", ""),
        ("print(1); quit(3)", "error", "SystemExit: 3 (solution.py, line 1)"),
        ("print(1); raise SystemExit('bad input')", "error", "SystemExit: bad input (solution.py, line 1)"),
        ("print(1); import os, sys; sys.stdout.flush(); os._exit(7)", "error", "exit code 7"),
        ("print(1)\n1 / 0", "error", "ZeroDivisionError: division by zero (solution.py, line 2)"),
        ("print(1)\nimport numpy", "error", "ModuleNotFoundError: No module named 'numpy' (solution.py, line 2)"),
        ("print(1)\nassert 1 == 2, 'two\\nlines'", "error", "AssertionError: two lines (solution.py, line 2)"),
        ("print(1)\nraise KeyboardInterrupt", "error", "KeyboardInterrupt (solution.py, line 2)"),
        ("print(1); import os, signal, sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", "killed", "ended by SIGTERM"),
        ("print(1); import os, sys; sys.stdout.flush(); os.abort()", "killed", "ended by SIGABRT"),
    ],
)
def test_endings_keep_what_was_printed(code: str, ending: str, detail: str) -> None:
    report = run(code)
    assert (report.ending, report.detail, report.stdout) == (ending, detail, "1\n")


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("x = = 1", "SyntaxError: invalid syntax (solution.py, line 1)"),
        ("print(1", "SyntaxError: '(' was never closed (solution.py, line 1)"),
        ("if 1:\nprint(1)", "IndentationError: expected an indented block after 'if' statement on line 1 (solution.py, line 2)"),
        ("x = '\ud800'", "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 5: surrogates not allowed"),
        ("x = 1\0", "null bytes"),
        ("print('\\ud800')", "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"),
    ],
)
def test_programs_that_are_none(code: str, detail: str) -> None:
    report = run(code)
    assert report.ending == "error" and detail in report.detail


def test_exit_functions_and_threads_are_waited_for() -> None:
    code = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
atexit.register(print, "last")
ThreadPoolExecutor(2).submit(print, "pool")
time.sleep(0.05)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
threading.Thread(target=lambda: (time.sleep(60), print("never")), daemon=True).start()
print("main")
"""
    assert printed(code).splitlines() == ["pool", "main", "thread", "last"]


def test_deep_recursion() -> None:
    assert printed("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(100_000))") == "100000\n"


def test_deep_recursion_in_a_thread_with_a_large_stack() -> None:
    code = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**27)
def f(n): return n and 1 + f(n - 1)
thread = threading.Thread(target=lambda: print(f(50_000)))
thread.start()
thread.join()
"""
    assert printed(code) == "50000\n"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions bound recursion through C by themselves")
def test_deep_recursion_through_c() -> None:
    code = """
import sys
from functools import lru_cache
sys.setrecursionlimit(10**6)
@lru_cache(None)
def f(n): return n and 1 + f(n - 1)
print(f(50_000))
"""
    assert printed(code) == "50000\n"


def test_long_integers_can_be_printed() -> None:
    assert printed("print(len(str(10 ** 20_000)))") == "20001\n"


def test_modules_that_need_shared_libraries() -> None:
    code = """
import bz2, ctypes, decimal, hashlib, lzma, sqlite3, uuid, xml.etree.ElementTree as tree, zlib
print(zlib.decompress(zlib.compress(b'z')), bz2.decompress(bz2.compress(b'b')), lzma.decompress(lzma.compress(b'l')))
print(hashlib.sha256(b'').hexdigest()[:8], sqlite3.connect(':memory:').execute('select 40 + 2').fetchone(), tree.fromstring('<a>x</a>').text)
print(ctypes.CDLL(None).abs(-3), decimal.Decimal('0.1') + 1)
"""
    assert printed(code) == "b'z' b'b' b'l'\ne3b0c442 (42,) x\n3 1.1\n"


def test_its_folder_can_be_used() -> None:
    code = """
import os, tempfile
open('notes', 'w').write('kept')
os.rename('notes', 'moved')
print(open('moved').read(), os.listdir())
os.remove('moved')
open('/dev/null', 'w').write('gone')
with tempfile.TemporaryFile(dir='.') as file:
    print(file.write(b'12345'))
"""
    assert printed(code) == "kept ['moved']\n5\n"


def test_tests_of_one_program_share_nothing() -> None:
    code = "import os\nprint(os.listdir())\nopen('left', 'w').write('behind')\nos.environ['LEFT'] = '1'\nprint(len(os.environ))"
    assert [report.stdout for report in SANDBOX.run(code, [StdinTask("")] * 4)] == ["[]\n1\n"] * 4


def test_reports_come_in_order() -> None:
    code = "import time\nn = int(input())\ntime.sleep(0.2 if n == 0 else 0)\nprint(n)"
    assert [report.stdout for report in SANDBOX.run(code, [StdinTask(str(n)) for n in range(5)])] == [f"{n}\n" for n in range(5)]


def test_no_tasks_no_reports() -> None:
    assert SANDBOX.run("print(1)", []) == []


# ------------------------------------------------------------------------------------------------------------------ calls


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        2**63,
        -(10**5000),
        1.5,
        float("inf"),
        "text \ud800 \0 \"'",
        b"\x00\xff",
        1 + 2j,
        [],
        [1, [2, (3, {4, "five"})]],
        {"a": 1, 2: [3], (4, 5): {6: None}, True: False},
        frozenset({1, frozenset({2})}),
        ((),),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_went_in(value: Any) -> None:
    report = called("def f(value): return value", value)
    assert (report.ending, report.value, type(report.value)) == ("ok", value, type(value))


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (
            "from collections import *\ndef f(): return Counter('aab'), defaultdict(int, x=1), OrderedDict(y=2)",
            ({"a": 2, "b": 1}, {"x": 1}, {"y": 2}),
        ),
        ("from collections import namedtuple\ndef f(): return namedtuple('P', 'x y')(1, 2)", (1, 2)),
        ("import enum\nclass E(enum.IntEnum): A = 3\ndef f(): return E.A", 3),
        ("class S(str): pass\ndef f(): return S('s')", "s"),
        ("def f(): return bytearray(b'ab')", b"ab"),
        ("class Solution:\n    def f(self): return 'method'", "method"),
        ("def f(): return 'function'\nclass Solution:\n    def f(self): return 'method'", "function"),
        ("class Solution:\n    @staticmethod\n    def f(): return __name__", "solution"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef f(): return P(3).x", 3),
        ("f = lambda: 5", 5),
    ],
)
def test_calls(code: str, value: Any) -> None:
    report = called(code)
    assert (report.ending, report.value, report.detail) == ("ok", value, "")


def test_what_a_function_prints_is_apart_from_its_value() -> None:
    report = called("def f(x):\n    print('noise', '{\"ending\": \"error\"}')\n    return x", 3)
    assert (report.ending, report.value, report.stdout) == ("ok", 3, 'noise {"ending": "error"}\n')


def test_a_function_may_change_its_arguments() -> None:
    mine = [3, 1, 2]
    assert called("def f(x):\n    x.sort()\n    return x", mine).value == [1, 2, 3]
    assert mine == [3, 1, 2]


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("def g(): pass", "NameError: the program defines no function 'f'"),
        ("class Solution: pass", "NameError: the program defines no function 'f'"),
        ("f = 3", "NameError: the program defines no function 'f'"),
        ("def f(x): pass", "TypeError: f() missing 1 required positional argument: 'x'"),
        ("def f(): return [].x", "AttributeError: 'list' object has no attribute 'x' (solution.py, line 1)"),
        ("def f(): return object()", "ValueError: a value of type object cannot be handed back"),
        ("def f(): yield 1", "ValueError: a value of type generator cannot be handed back"),
        ("def f():\n    x = []\n    x.append(x)\n    return x", "ValueError: the value is nested more than 100 deep, or contains itself"),
        ("import os\ndef f(): os._exit(0)", "the program ended before it was done"),
        ("def f(): exit()", "the program ended before it returned a value"),
        ("exit()", "the program ended before it returned a value"),
    ],
)
def test_calls_that_fail(code: str, detail: str) -> None:
    report = called(code)
    assert (report.ending, report.value, report.detail) == ("error", None, detail)


def test_arguments_that_cannot_be_sent() -> None:
    with pytest.raises(BadInput, match="arguments for f: a value of type object cannot be handed back"):
        called("def f(x): pass", object())


# ---------------------------------------------------------------------------------------------------------------- scripts


def test_scripts_see_the_programs_names() -> None:
    assert (
        scripted("def add(a, b): return a + b", "assert add(1, 2) == 3\ndef check(f):\n    assert f(2, 2) == 4\ncheck(add)").ending == "ok"
    )


@pytest.mark.parametrize(
    ("code", "script", "detail"),
    [
        ("def f(): return 1", "assert f() == 2", "AssertionError (test.py, line 1)"),
        ("def f(): raise ValueError('no')", "x = 1\nf()", "ValueError: no (solution.py, line 1)"),
        ("def f(): exit()", "f()\nassert False", "the program ended before the script did"),
        ("import os\ndef f(): os._exit(0)", "f()\nassert False", "the program ended before it was done"),
        ("raise SystemExit", "pass", "the program ended before the script did"),
        ("def f(:", "pass", "SyntaxError: invalid syntax (solution.py, line 1)"),
        ("", "f(:", "SyntaxError: invalid syntax (test.py, line 1)"),
    ],
)
def test_scripts_that_do_not_reach_their_end(code: str, script: str, detail: str) -> None:
    report = scripted(code, script)
    assert (report.ending, report.detail) == ("error", detail)


# ------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("field", ["cpu_seconds", "wall_seconds", "memory_mib", "output_kib", "file_kib", "threads"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 10**7, "3"])
def test_limits_must_be_positive(field: str, value: float) -> None:
    kind = "a number" if "seconds" in field else "a whole number"
    with pytest.raises(BadInput, match=f"limit {field}: got .*; give {kind} above 0, at most 1000000"):
        Sandbox(Limits(**{field: value}))  # type: ignore[arg-type]


def test_other_bad_arguments() -> None:
    with pytest.raises(BadInput, match=r"limit memory_mib: got 0\.5; give a whole number above 0, at most 1000000"):
        Sandbox(Limits(memory_mib=0.5))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="isolation: got 'none'; give one of kernel, process"):
        Sandbox(isolation="none")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="concurrency: got 0; give a number above 0"):
        Sandbox(concurrency=0)


def test_importing_the_sandbox_starts_nothing() -> None:
    code = "import subprocess; subprocess.Popen = None; import tether.envs.deepcoder.sandbox.sandbox; print('quiet')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("quiet\n", "")
