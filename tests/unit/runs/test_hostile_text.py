"""Names and texts that would command a terminal, turn the direction of writing or be markup: every page and every verb shows them as text."""

import io
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tether.cli.console import SafeConsole, plain_table
from tether.cli.main import main
from tether.core.text import for_html, for_markdown, visible
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

EVIL = (
    "\x1b]0;t\x07\x1b[2J\u202e\u200b\u200d\x9b1m\ud800\U000e0041[bold]x[/][link=http://e]y[/link]<script>1</script><b onclick=1>|`z`:smile:"
    + "n" * 3000
)
NAME = "r\u202e\x1b[31m[bold]<i>"
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")


def assert_clean(text: str, what: str) -> None:
    raw = RAW.search(text)
    assert raw is None, (what, text[max(0, raw.start() - 100) : raw.start() + 60])
    assert "<script>1" not in text and "<b onclick" not in text and "<i>" not in text, what


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose every text is hostile, in a folder with such a name, beside a second one."""
    for number, name in enumerate((NAME, "other")):
        settings = {
            "env": {"name": EVIL, "options": {EVIL[:120]: EVIL}},
            "steps": 1,
            "seed": number,
            "also": [{"name": EVIL}],
            "filter": {"strategy": EVIL},
        }
        about = {"env": EVIL, "model": EVIL, "algorithm": EVIL, "tags": [EVIL], EVIL: [EVIL], "started": EVIL}
        store = RunStore.create(tmp_path / "runs" / name, json.dumps(settings), about)
        store.computed_on({"device": EVIL, "fast_path": {"decoder": EVIL, "reasons": [EVIL]}})
        store.finish(EVIL)
        evidence = {"metric": EVIL, "value": 1.0, "steps": [0, 1], "test": EVIL}
        alarm = {"name": EVIL, "severity": EVIL, "began": 0, "evidence": [evidence], "cause": EVIL, "remedy": EVIL}
        turn = {
            "observation": EVIL,
            "response": f"<think>{EVIL}</think><answer>{EVIL}</answer>",
            "valid": True,
            "reward": 0.0,
            "finish": EVIL,
        }
        episode = {
            "env": EVIL,
            "group": 0,
            "member": 0,
            "seed": 1,
            "reward": 0.5,
            "stop_reason": EVIL,
            "error": EVIL,
            "measures": {EVIL: 1.0},
        }
        for step in range(2):
            metrics = {"rollout/success": 0.5, "alarms/critical": 1.0, "validation/success": 0.5 * step, "validation/prompts": 4.0}
            store.append(StepRecord(step, metrics, regime=EVIL, notes=[EVIL, f"act for {EVIL}: {EVIL}"], alarms=[alarm]))
            store.append_timings(step, {"seconds": {"rollout": 1.0}})
            for split in ("train", "validation"):
                store.append_trajectories([{**episode, "step": step, "split": split, "group": g, "turns": [turn]} for g in range(2)])
        store.close()
    return tmp_path / "runs"


def test_every_page_of_the_dashboard(hostile: Path) -> None:
    from tether.cli.report import step_templates
    from tether.core.http import serving_app
    from tether.runs.dashboard.app import make_app
    from tether.runs.dashboard.catalogue import Catalogue

    (hostile / "bad\u202e").mkdir()
    (hostile / "bad\u202e" / "run.json").write_text(f'{{"schema": "{visible(EVIL[:9])}"')
    with serving_app(make_app(Catalogue(hostile), step_templates), "dashboard") as url, httpx.Client(base_url=url, timeout=60) as client:
        name = visible(NAME)
        pages: dict[str, dict[str, Any]] = {
            "/": {},
            "/compare": {"run": [name, "other"]},
            "/nowhere": {},
            "/run": {"run": EVIL[:200].replace("\ud800", "")},
        }
        asked = [*pages.items(), *((path, {"run": name, "key": "1/train/0/0", "step": 1}) for path in (
            "/run", "/trajectories", "/trajectory", "/groups", "/templates", "/gradients", "/templates/found"))]  # fmt: skip
        for path, words in asked:
            answer = client.get(path, params=words, headers={"accept": "text/html"})
            assert answer.status_code in ((404, 400) if path == "/nowhere" or len(str(words.get("run"))) > 100 else (200,)), (
                path,
                answer.text[-500:],
            )
            assert_clean(answer.text, path)
        for chart in ("success", "step_groups", "plane"):
            answer = client.get("/figure", params={"name": chart, "run": [name, "other"], "step": 1})
            assert answer.status_code == 200
            assert_clean(json.dumps(answer.json(), ensure_ascii=False), chart)


def test_every_verb_that_shows_a_run(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hostile / NAME
    for words in (["report", str(run)], ["report", str(run), str(hostile / "other"), "--out", str(hostile / "both.html")],
                  ["show", str(run)], ["show", str(run), "--turns"], ["show", str(run), "--text", "onclick"], ["doctor", str(run)]):  # fmt: skip
        with pytest.raises(SystemExit):
            main(words)
        said = "".join(capsys.readouterr())
        assert said and RAW.search(said) is None, (words, ascii(said)[:400])
    for page in (run / "report.html", hostile / "both.html"):
        body = page.read_text(encoding="utf-8")
        assert "[bold]x[/]" in body
        assert_clean(re.sub(r"<script>.*?</script>", "", body, flags=re.DOTALL).replace("<script>1", "raw"), page.name)
        assert RAW.search(body.partition("</main>")[0].rpartition("</head>")[2]) is None


def evaluation(name: str) -> dict[str, Any]:
    example = {
        "env": EVIL,
        "prompt": 0,
        "sample": 0,
        "reward": 1.0,
        "stop_reason": EVIL,
        "turns": [{"observation": EVIL, "response": EVIL, "valid": False}],
    }
    return {
        "kind": "tether evaluation", "schema": 1, "model": {"name": name, "address": EVIL}, "created": EVIL, "seconds": 1.0, "cut_responses": 0,
        "environments": [{"name": EVIL, "options": {"size": 4, EVIL: EVIL}, "data": {EVIL: {"name": EVIL, "sha256": EVIL}}}],
        "protocol": {"prompts": 2, "samples": 1, "temperature": 0.0, "max_tokens": 10},
        "metrics": {"success": 0.5, "reward_mean": 0.5, "errors": 0, "instances": 2, "prompts": 2, "format_valid": 1.0},
        "intervals": {"success": [0.1, 0.9], "reward_mean": None}, "tokens": {"prompt": 1, "completion": 1, "uncounted": 0, "responses": 2, "cost": None},
        "instances": [{"key": str(n), "categories": {EVIL: EVIL + str(n)}, "successes": [n], "rewards": [float(n)]} for n in range(2)],
        "examples": {"successes": [example], "failures": [example]}, "failed": [{"prompt": 0, "sample": 0, "reason": EVIL}], "notes": [EVIL], "versions": {EVIL: EVIL},
    }  # fmt: skip


def test_the_leaderboard_and_the_page_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tether.runs.pages import write_result_page

    for number in range(2):
        (tmp_path / f"{number}.json").write_text(json.dumps(evaluation(f"{EVIL}{number}")))
    with pytest.raises(SystemExit) as end:
        main(["leaderboard", str(tmp_path)])
    assert not end.value.code
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert RAW.search(text) is None
    assert "\\[link=http" in said.out and "\\<script\\>" in said.out and "\\|\\`z\\`" in said.out
    assert max(map(len, said.out.splitlines())) < 6000, "a long name is cut"
    page = write_result_page(evaluation(EVIL), tmp_path / "result.html")
    for path in (page, tmp_path / "leaderboard.html"):
        assert_clean(
            re.sub(r"<script>\n.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).replace("<script></script>", ""),
            path.name,
        )


def test_the_console_takes_no_markup_from_names() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=4000, color_system="truecolor")
    table = plain_table("a[red]")
    table.add_row(EVIL)
    console.print(table)
    console.print(EVIL)
    console.say(EVIL)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert RAW.search(shown) is None and shown.count("[bold]x[/][link=http://e]y[/link]") == 3 and shown.count(":smile:") == 3
    assert "\x1b]8" not in out.getvalue(), "no link"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\u200db", "a\\u200db"), ("\U0001f468\u200d\U0001f469", "\U0001f468\u200d\U0001f469"), ("می\u200cخواهم", "می\u200cخواهم"),
        ("x\u200d", "x\\u200d"), ("\x85\u2028", "\\x85\\u2028"), ("\U000e0041", "\\U000e0041"), ("tab\tline\n", "tab\tline\n"),
    ],
)  # fmt: skip
def test_joiners_stay_where_scripts_need_them(text: str, expected: str) -> None:
    assert visible(text) == for_html(text) == expected


def test_markdown_is_one_line_of_text() -> None:
    assert for_markdown("a\nb | *c* ![d](e)") == "a b \\| \\*c\\* !\\[d\\](e)"
    assert for_markdown("n" * 300) == "n" * 200 + "... (300 characters)"
