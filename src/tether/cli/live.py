"""The live view of a run: a bar over the steps with the time left, a bar over the current stage, and the latest numbers.

On a terminal it redraws in place; piped into a file it writes one line per step, and one a minute while a step takes longer (`Heartbeat`, which
`tether eval` has too). The number of standing alarms is red. A separate line shows the cost of the last step: where its
time went, tokens per second, share of the device's peak, memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tether.cli.report import begun_report
from tether.core.protocols import EngineStatistics
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import GB, StepTimings
from tether.runs.verdict import reasoning_label
from tether.training.callbacks import Callback

ROWS = 12
STAGES = {
    "rollout": "sampling",
    "advantages": "estimating advantages",
    "update": "updating",
    "publish": "publishing weights",
    "probe": "sampling the probe",
    "diagnosis": "diagnosing",
    "gradients": "decomposing gradients",
    "validation": "validating",
    "checkpoint": "saving",
}
SAMPLING = ("rollout", "probe", "validation")
COLUMNS = (
    ("success", "rollout/success", "{:.0%}"),
    ("valid", "rollout/format_valid", "{:.0%}"),
    ("reward var", "groups/rv_mean", "{:.3f}"),
    ("kept", "groups/kept_ratio", "{:.0%}"),
    ("tokens", "rollout/response_tokens", "{:.0f}"),
    ("retrieval", "information/retrieval_acc", "{:.0%}"),
    ("MI", "information/mi_seq", "{:.2f}"),
    ("H(Z|X)", "information/h_conditional", "{:.3f}"),
    ("validation", "validation/success", "{:.1%}"),
)

PACE_SECONDS = 24 * 3600.0
"""The time left is estimated from the steps of this time. A shorter one than a step (rich has 30 s) would never see two of them."""
HEARTBEAT_SECONDS = 60.0
"""Piped, a run says at least this often that it lives, and what it does."""

ALARM_STYLE = "bold red"
SHOWN_SHARE = 0.02
"""A stage with less than this share of the time is not named."""


class TokensColumn(ProgressColumn):
    """Tokens of the episodes that are being played, as they come: an episode of a large model takes minutes on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics: Callable[[], EngineStatistics] | None = None
        self._before: EngineStatistics | None = None

    def begin(self, name: str) -> None:
        """A stage begins; what was counted before is another's."""
        self._before = self.statistics() if self.statistics is not None and name in SAMPLING else None

    def words(self) -> str:
        """Example: "1,024 tokens"; empty where nothing is sampled."""
        if self.statistics is None or self._before is None or (now := self.statistics()) is self._before:
            return ""
        return f"{now.sampled_tokens:,} tokens" if now.sampled_tokens else f"{now.fed_tokens:,} tokens of prompts read"

    def render(self, task: Task) -> Text:
        return Text(self.words() if task.total is not None and not task.finished else "", style="dim")


class Heartbeat:
    """Where nothing is drawn, a line now and then from a thread of its own, so that a stage without progress is seen too."""

    def __init__(self, console: Console, words: Callable[[], str]) -> None:
        self._console, self._words = console, words
        self.said = time.monotonic()
        """When something was said last; whoever says anything else sets it."""

    @contextmanager
    def beating(self) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(HEARTBEAT_SECONDS / 10):
                if time.monotonic() - self.said >= HEARTBEAT_SECONDS:
                    self.said = time.monotonic()
                    self._console.print(self._words(), highlight=False, markup=False, soft_wrap=True)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def stage_words(task: Task, tokens: TokensColumn) -> str:
    """How far a stage is. Example: "sampling 12/128, 4,096 tokens, 95 s"."""
    done = f" {task.completed:.0f}/{task.total:.0f}" if task.total else ""
    sampled = f", {words}" if (words := tokens.words()) else ""
    return f"{task.description}{done}{sampled}, {task.elapsed or 0:.0f} s"


class LiveView(Callback):
    """A callback that draws on the terminal; `done` of the steps were made before."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        self._console = console
        self._records: deque[StepRecord] = deque(maxlen=ROWS)
        self._regime = "-"
        self._alarms = ""
        self._cost = ""
        self._tokens = TokensColumn()
        self._bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            self._tokens,
            console=console,
            speed_estimate_period=PACE_SECONDS,
        )
        self._run = self._bars.add_task("run", total=steps, completed=done)
        self._stage = self._bars.add_task("starting", total=1)
        self._live: Live | None = None
        self._heart = Heartbeat(console, self._heartbeat)

    def on_sampling_ready(self, statistics: Callable[[], EngineStatistics]) -> None:
        self._tokens.statistics = statistics

    def on_stage_begin(self, name: str, total: int) -> None:
        self._tokens.begin(name)
        self._bars.reset(self._stage, total=total, description=STAGES.get(name, name))

    def on_stage_progress(self) -> None:
        self._bars.advance(self._stage)

    def on_note(self, text: str) -> None:
        self._console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=self._live is None)

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        self._records.append(record)
        self._cost = cost_words(timings)
        self._regime = reasoning_label(record) or self._regime
        self._alarms = _alarms(record)
        self._bars.update(self._run, completed=record.step)
        for note in record.notes:
            style = ALARM_STYLE if note.startswith("critical:") else "yellow"
            # A note may quote anything, square brackets too; piped, it stays on one line.
            piped = self._live is None
            self._console.print(f"step {record.step}: {note}", style=style, highlight=False, markup=False, soft_wrap=piped)
        if self._live is not None:
            self._live.update(self._view())
        else:
            self._heart.said = time.monotonic()
            self._console.print(self._line(record), highlight=False, soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw in place while the run goes on, where there is a terminal to draw on."""
        if not self._console.is_terminal:
            with self._heart.beating():
                yield
            return
        with Live(self._view(), console=self._console, refresh_per_second=4) as self._live:
            yield

    def _heartbeat(self) -> str:
        """Example: "step 3/20: sampling 12/128, 4,096 tokens, 95 s"."""
        run, stage = self._bars.tasks[0], self._bars.tasks[1]
        begun = bool(self._records) or run.completed > 0  # step 0 is over
        step = min(int(run.completed) + begun, int(run.total or 0))
        left = f", about {run.time_remaining / 60:.0f} min left" if run.time_remaining else ""
        return f"step {step}/{run.total:.0f}: {stage_words(stage, self._tokens)}{left}"

    def _view(self) -> Group:
        return Group(self._table(), Text(self._cost, style="dim"), self._bars)

    def _table(self) -> Table:
        heading = Text.assemble(f"regime: {self._regime}", (f"   {self._alarms}", ALARM_STYLE) if self._alarms else "")
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False)
        table.add_column("step", justify="right")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        for record in self._records:
            table.add_row(str(record.step), *(_cell(record, key, form) for _, key, form in COLUMNS))
        return table

    def _line(self, record: StepRecord) -> Text:
        parts = [f"{title} {_cell(record, key, form)}" for title, key, form in COLUMNS if key in record.metrics]
        line = Text(f"step {record.step}/{int(self._bars.tasks[0].total or 0)}  " + "  ".join(parts))
        if label := reasoning_label(record):
            line.append(f"  [{label}]")
        if self._alarms:
            line.append(f"  {self._alarms}", ALARM_STYLE)
        if self._cost:
            line.append(f"  ({self._cost})")
        return line


class Notes(Callback):
    """The view of --quiet: what is worth knowing, and nothing about steps that go well."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_note(self, text: str) -> None:
        self._console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        for note in record.notes:
            self.on_note(f"step {record.step}: {note}")


class ReportAhead(Callback):
    """Begins the report while the last checkpoint is on its way to the disk."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.write: Callable[[Path], Path] | None = None
        """Writes it, once the run is over."""

    def on_trained(self) -> None:
        self.write = begun_report([self._store])


def _alarms(record: StepRecord) -> str:
    """How many alarms stand, by severity; empty where none does. Example: "alarms: 1 critical, 2 warning"."""
    counts = [(round(record.metrics.get(f"alarms/{severity}", 0)), severity) for severity in ("critical", "warning")]
    standing = [f"{count} {severity}" for count, severity in counts if count]
    return f"alarms: {', '.join(standing)}" if standing else ""


def cost_words(timings: StepTimings) -> str:
    """What a step cost. Example: "8.1 s: rollout 38% at 900 tokens/s, update 61% at 4,100 tokens/s, 31% of peak; 12.5 GB"."""
    whole = sum(timings.seconds.values())
    if not whole:
        return ""
    stages = []
    rates = {"rollout": timings.tokens_per_second, "update": timings.update_tokens_per_second}
    for stage, seconds in sorted(timings.seconds.items(), key=lambda item: -item[1]):
        rate, peak = rates.get(stage), timings.share_of_peak.get(stage)
        if rate is not None or seconds >= SHOWN_SHARE * whole:
            said = f" at {rate:,.0f} tokens/s" if rate is not None else ""
            on_card = timings.unused_memory is not None  # the peak of a CPU is that of a moment, and other work shares it
            said += f", {peak:.0%} of peak" if stage == "update" and peak is not None and on_card else ""
            stages.append(f"{stage} {seconds / whole:.0%}{said}")
    memory = f"; {max(timings.peak_memory.values()) / GB:.3g} GB" if timings.peak_memory else ""
    return f"{whole:.3g} s: {', '.join(stages)}{memory}"


def _cell(record: StepRecord, key: str, form: str) -> str:
    value = record.metrics.get(key)
    return "" if value is None else form.format(value)
