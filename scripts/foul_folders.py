"""Run folders whose files are not what they should be, and kills of whoever reads or evaluates one; two parts of scripts/torture.py.

folders      files of a finished run are replaced by what a disk, a person or an attacker leaves there: bytes that are no text, numbers of thousands of digits,
             thousands of brackets, aliases that multiply, other types, hostile names, pipes, sockets, devices, folders. Every command on the run must end in
             time with lines and without a traceback, the dashboard must show the other run and answer /health, and nothing may write a raw control
             character to the terminal or a page.
evaluations  `tether eval` and a dashboard that is being read are killed at random moments. The same evaluation again must give the same numbers as one
             that was never stopped, and leave nothing but its result.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from kill_many import KILLED, Trial, attempt
from tether.runs.dashboard.catalogue import RESCAN_SECONDS
from torture_part import Part

COMMAND_SECONDS, PAGE_SECONDS = 40.0, 10.0
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\x9b31m<script>alert(1)</script>[link=file:///]x[/link]\x00\ud800"
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What neither a page nor a terminal may get; line ends and tabs aside."""
COLOUR = re.compile("\x1b\\[[0-9;]*m")
"""What rich itself writes to a terminal that has colours."""


# --- what happens to files ---


def _replaced(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _wrong_texts(random: np.random.Generator, path: Path) -> None:
    """Values of a JSON or YAML file replaced by hostile ones, the rest of the file as it was."""
    values = [
        json.dumps(HOSTILE),
        "9" * 5001,
        "[" * 3000,
        "null",
        "[]",
        "{}",
        '""',
        "-1",
        "1e999",
        ".nan",
        "true",
        '"' + "x" * 100_000 + '"',
    ]
    pattern = re.compile(rb"(?<=: )[^,\n{}\[\]]+")
    content = path.read_bytes()
    found = list(pattern.finditer(content))
    for place in sorted(random.integers(len(found), size=int(random.integers(1, 4))), reverse=True) if found else []:
        start, end = found[place].span()
        content = content[:start] + values[int(random.integers(len(values)))].encode("utf-8", "surrogatepass") + content[end:]
    path.write_bytes(content)


def _alias_bomb(random: np.random.Generator, path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    path.write_text("\n".join(lines))


def _socket(random: np.random.Generator, path: Path) -> None:
    place, here = _replaced(path), os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[np.random.Generator, Path], object]] = {
    "other values": _wrong_texts,
    "not UTF-8": lambda random, path: path.write_bytes(b"\xff\xfe" + random.bytes(200)),
    "many digits": lambda random, path: path.write_text("steps: " + "9" * 5001 + "\n"),
    "brackets": lambda random, path: path.write_text("[" * int(random.integers(1000, 200_000))),
    "braces": lambda random, path: path.write_text('{"a":' * int(random.integers(1000, 100_000))),
    "aliases": _alias_bomb,
    "a list": lambda random, path: path.write_text("[1, 2, 3]\n"),
    "a word": lambda random, path: path.write_text("hello\n"),
    "null": lambda random, path: path.write_text("null\n"),
    "zeros": lambda random, path: path.write_bytes(bytes(int(random.integers(1, 5000)))),
    "empty": lambda random, path: path.write_bytes(b""),
    "cut": lambda random, path: os.truncate(path, int(path.stat().st_size * random.random())),
    "gone": lambda random, path: _replaced(path),
    "pipe": lambda random, path: os.mkfifo(_replaced(path)),
    "socket": _socket,
    "endless device": lambda random, path: os.symlink("/dev/zero", _replaced(path)),
    "terminal": lambda random, path: os.symlink("/dev/tty", _replaced(path)),
    "link to itself": lambda random, path: os.symlink(path.name, _replaced(path)),
    "folder": lambda random, path: _replaced(path).mkdir(),
}


def _damage(random: np.random.Generator, run: Path) -> list[str]:
    """Replace one to three files of a run; says which and how."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".pt"))
    done = []
    for path in random.choice(np.array(files, dtype=object), size=int(random.integers(1, 4)), replace=False):
        kind = list(KINDS)[int(random.integers(len(KINDS)))]
        KINDS[kind](random, path)
        done.append(f"{path.relative_to(run)}: {kind}")
    return done


# --- the parts ---


def folders(part: Part) -> None:
    """Damage copies of one run until the time is up."""
    reference = Trial(part.folder, "grpo", int(part.random.integers(2**31)), ()).reference
    runs = part.folder / "runs"
    shutil.copytree(reference, runs / "whole")
    with _dashboard(part, runs) as api:
        time.sleep(RESCAN_SECONDS)  # it has just looked for runs, and does not again so soon
        while part.has_time:
            run = runs / "foul"
            shutil.copytree(reference, run)
            done = "; ".join(_damage(part.random, run))
            _look(part, api, done)
            for words in (
                ["doctor", str(run)],
                ["show", str(run)],
                ["report", str(run)],
                ["diagnose", str(run)],
                ["eval", str(run), "--prompts", "1", "--max-tokens", "4", "--device", "cpu"],
                ["export", str(run), "--out", str(part.folder / "export")],
                ["leaderboard", str(runs)],
                ["train", "--resume", "--out", str(run)],
            ):
                _command(part, words, done)
            part.count("foul folders")
            shutil.rmtree(run)
            shutil.rmtree(part.folder / "export", ignore_errors=True)


def _command(part: Part, words: list[str], done: str) -> None:
    log = part.folder / "command.log"
    log.unlink(missing_ok=True)
    code = attempt(words, log, delay=COMMAND_SECONDS)
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    part.count("commands")
    if code not in (0, 1, 2) or "Traceback" in said:
        part.fail(f"{done}: `tether {' '.join(words)}` ended with {code}: {said[-1000:]}")
    if raw := RAW.search(COLOUR.sub("", said).replace("\r", "")):
        part.fail(f"{done}: `tether {' '.join(words)}` wrote {raw[0]!r}: {said[max(raw.start() - 80, 0) : raw.end() + 80]!r}")


@contextmanager
def _dashboard(part: Part, runs: Path) -> Iterator[httpx.Client]:
    words = [sys.executable, "-m", "tether", "dashboard", str(runs), "--port", "0"]
    with (part.folder / "dashboard.log").open("w") as log:
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    url = ""
    while "http://" not in url:
        url = server.stdout.readline() or sys.exit(f"the dashboard did not start: {(part.folder / 'dashboard.log').read_text()}")
    address = re.search(r"http://[\w.:]+", url)
    assert address is not None
    try:
        with httpx.Client(base_url=address[0], timeout=PAGE_SECONDS, trust_env=False, follow_redirects=True) as api:
            yield api
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def _look(part: Part, api: httpx.Client, done: str) -> None:
    """The list of runs, and every page that it and a run's own page lead to."""
    seen, waiting = set[str](), ["/health", "/", "/?q=foul"]
    while waiting:
        path = waiting.pop(0)
        if path in seen or len(seen) > 60:
            continue
        seen.add(path)
        try:
            reply = api.get(path)
        except httpx.HTTPError as error:
            part.fail(f"{done}: {path}: {type(error).__name__}")
            return
        part.count("pages")
        if reply.status_code >= 500 or (path in ("/health", "/") and reply.status_code != 200):
            part.fail(f"{done}: {path} is answered with {reply.status_code}")
        if path == "/" and ("whole" not in reply.text or "foul" not in reply.text):
            part.fail(f"{done}: the list lacks a run")
        if "text/html" in reply.headers.get("content-type", ""):
            if raw := RAW.search(reply.text.replace("\r", "")):
                part.fail(f"{done}: {path} holds {raw[0]!r}: {reply.text[max(raw.start() - 80, 0) : raw.end() + 80]!r}")
            if "<script>alert" in reply.text:
                part.fail(f"{done}: {path} holds an unescaped script")
            waiting += [link for link in re.findall(r'href="(/[^"#]*)"', reply.text) if "foul" in link]


def evaluations(part: Part) -> None:
    """Kill evaluations and dashboards until the time is up."""
    reference = Trial(part.folder, "grpo", int(part.random.integers(2**31)), ()).reference
    runs, log = part.folder / "runs", part.folder / "eval.log"
    run = runs / "whole"
    shutil.copytree(reference, run)
    words = ["eval", str(run), "--prompts", "8", "--max-tokens", "20", "--device", "cpu", "--out", str(part.folder / "results")]
    begun = time.monotonic()
    attempt(words, log)
    seconds, right = time.monotonic() - begun, _results(part.folder / "results")
    while part.has_time:
        shutil.rmtree(part.folder / "results")
        for _ in range(3):
            if attempt(words, log, delay=float(part.random.uniform(0, seconds))) == KILLED:
                part.count("killed evaluations")
        if attempt(words, log) != 0 or _results(part.folder / "results") != right:
            part.fail(f"after kills an evaluation ended otherwise: {log.read_text()[-800:]}")
        left = [str(path) for place in (run, part.folder / "results") for path in place.rglob("*.part")]
        if left:
            part.fail(f"left after kills: {left}")
        with _dashboard(part, runs) as api:
            reader = threading.Thread(target=_read_until_killed, args=(api,), daemon=True)
            reader.start()
            reader.join(timeout=float(part.random.uniform(0, 2)))
        part.count("dashboards killed while read")
        if attempt(["doctor", str(run)], log) != 0:
            part.fail(f"after a dashboard was killed, doctor says {log.read_text()[-800:]}")


def _read_until_killed(api: httpx.Client) -> None:
    try:
        while True:
            page = api.get("/").text
            for link in re.findall(r'href="(/[^"#]*whole[^"#]*)"', page):
                api.get(link)
    except (httpx.HTTPError, RuntimeError):
        return


def _results(folder: Path) -> dict[str, object]:
    """The metrics of every result, times aside."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[path.name] = {name: value for name, value in record.get("metrics", {}).items() if "seconds" not in name}
    return found
