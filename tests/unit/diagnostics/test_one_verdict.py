"""Monitor, report and audit say the same of one run: the same function judges what each of them measured, on real scores of tiny."""

from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.reasoning import COLLAPSES, VerdictCode
from tether.runs.report import write_report
from tether.runs.store import RunStore
from tether.runs.verdict import verdict

ENV = tether.make_env("frozen_lake", instructions="plain")


def board(seed: int) -> tuple[str, str]:
    """A prompt that tiny can read, and where the player and the goal stand on it."""
    text = ENV.reset(seed).text
    rows = [row for row in text.splitlines() if row and set(row) <= set("P_OG")]
    (y, x), (gy, gx) = ((y, row.index(mark)) for mark in "PG" for y, row in enumerate(rows) if mark in row)
    return f"{ENV.instructions}\n\n{text}", f"I am at ({y},{x}), goal at ({gy},{gx})."


@pytest.fixture(scope="module")
def tiny() -> Any:
    return tether.load_model("tiny", device="cpu")


def observed(tiny: Any, folder: Path, prompts: int, samples: int, tied: bool) -> tether.Health:
    """One step of a run folder: boards as prompts, reasonings that say what stands where, or that vary without it."""
    rows = [(*board(seed), n) for seed in range(prompts) for n in range(samples)]
    ways = ("Left", "Right", "Up", "Down")
    monitor = tether.Monitor(tiny.model, tokenizer=tiny.tokenizer, out=folder, about={"model": "tiny"})
    return monitor.observe(
        1,
        prompts=[prompt for prompt, _, _ in rows],
        responses=[f"<think> {place if tied else 'I guess'} {ways[n % 4]} then {ways[n // 2 % 4]}. </think> done" for _, place, n in rows],
        groups=[prompt for prompt, _, _ in rows],
        rewards=[float(n % 2) for _, _, n in rows],
    )


@pytest.mark.parametrize(
    ("prompts", "samples", "tied", "codes"),
    [
        (2, 8, False, {VerdictCode.CANNOT_BE_TOLD}),
        (6, 4, True, {VerdictCode.TIED, VerdictCode.WEAKLY_TIED}),
        (12, 4, False, {VerdictCode.CANNOT_BE_TOLD, *COLLAPSES}),
    ],
)
def test_monitor_report_and_audit_agree(tiny: Any, tmp_path: Path, prompts: int, samples: int, tied: bool, codes: set[VerdictCode]) -> None:
    health = observed(tiny, tmp_path / "run", prompts, samples, tied)
    store = RunStore.open(tmp_path / "run")
    (record,) = store.steps()
    assert health.verdict is not None and health.verdict.code in codes
    assert record.regime == (None if health.regime is None else str(health.regime))
    headline = verdict([record])[1]
    assert headline.startswith(health.verdict.headline) and (str(health.regime) in headline) == (health.regime is not None)
    page = write_report([store], tmp_path / "report.html").read_text()
    assert health.verdict.headline in page
    found = tether.audit(tmp_path / "run", model=tiny, bootstrap=100)
    assert found.verdict.code in codes
    if health.verdict.code is not VerdictCode.CANNOT_BE_TOLD:
        assert found.verdict.code in (health.verdict.code, VerdictCode.TIED if tied else VerdictCode.CANNOT_BE_TOLD)
        assert {"recorded_retrieval", "recorded_information"} <= {item.name for item in found.verdict.evidence}
    found.report(tmp_path / "audit.html")
    for words in (headline, page, (tmp_path / "audit.html").read_text()):
        assert "0% to 0%" not in words
