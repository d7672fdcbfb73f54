"""Where the time of a real run goes: `tether train` on a real model and environment, stage by stage, beside fixed lengths and the floor.

    python benchmarks/real_run.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --env frozen_lake
    python benchmarks/real_run.py --model smollm2 --env frozen_lake --groups 2 --group 4 --steps 2
    python benchmarks/real_run.py --config qwen2.5-1.5b/frozen_lake --steps 50 --set seed=3       # a whole run

A benchmark with fixed lengths cannot show what real responses cost: they end at different times, so that few rows decode for most of a
rollout, and every turn has to be read, given to its environment and answered. This is the trainer of `tether train`, with settings from
`--set` as there. The first step is not counted: kernels are compiled and graphs recorded in it.

First table, the rollout, means of the counted steps:
- a real run: tokens a second, and the seconds of decoding by how many rows decoded (up to 16, up to 64, more), of prefill for which no row that
  decodes was waited for, and of the host alone (the device waits). Reading responses and playing environments happens while the device decodes; `overlapped` says how much of it.
- fixed lengths: the same number of conversations, turns and tokens, all responses of the mean length, and no environment.
- floor: what no program can leave out for the very tokens of the last step (workloads.rollout_floor).

Second table: the seconds of every stage of the step.

With `--config` it is the command `tether train` that runs, with everything that config asks for: validations, checkpoints, diagnosis. Its one
table holds the seconds of every stage over all steps, as the run recorded them, from the start of the command to its end; `rest` is what no
record counts: the interpreter's start, the report, and what stands between the stages. Under it: tokens sampled in a second of rollout, the
update's share of peak (the mean of the steps, as the report has it, and over all seconds of updates), and the most that the run folder took on
disk, looked at four times a second. With `--vllm-python PATH` vLLM plays the recorded episodes of some steps afterwards: the same tokens shown,
as many sampled, turn by turn; beside it our rate in those steps, environments and all.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_peer
from shapes import Row, add_json_option, measure_machine, precision, publish, say, size_of, timed
from workloads import Conversations, engine_for, grouped, make_conversations, num_sampled, rollout_floor

from tether.core.config import merge, parse_overrides
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.fast.decoding.protocol import Decoder, Sampled, SampleOutput
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.training.api import grow_allocator_segments, open_run
from tether.training.loop import Trainer
from tether.training.resolve import named_settings

LAST_STEP = 1_000_000
"""So far away that neither checkpoints nor evaluations are due."""
ROWS = (16, 64)
ROW_CLASSES = ("1-16", "17-64", "over 64")
"""Of decode calls, and their borders."""


@dataclass
class RolloutTimes:
    """Seconds of one rollout, by what the device did."""

    decode: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    """Of a row, in the mean of the rows that decoded."""
    prefill: float = 0.0
    overlapped: float = 0.0
    calls: int = 0


class TimedDecoder:
    """A decoder that takes its own time; everything else is the decoder's."""

    def __init__(self, decoder: Decoder, times: RolloutTimes) -> None:
        self._decoder, self.times = decoder, times
        self._decodes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def prefill(self, *arguments: Any) -> Sampled:
        began = time.perf_counter()
        wait = self._decoder.prefill(*arguments)
        if not self._decodes:  # beside a step of decoding, its launch takes none of the device's time
            self.times.prefill += time.perf_counter() - began

        def waited() -> SampleOutput:
            asked = time.perf_counter()
            output = wait()
            self.times.prefill += time.perf_counter() - asked
            return output

        return waited

    def decode(self, slots: Sequence[int], *arguments: Any) -> Sampled:
        return self._timed(self._decoder.decode, slots, *arguments)

    def speculate(self, slots: Sequence[int], *arguments: Any) -> Sampled:
        return self._timed(self._decoder.speculate, slots, *arguments)

    def _timed(self, call: Callable[..., Sampled], slots: Sequence[int], *arguments: Any) -> Sampled:
        began = time.perf_counter()
        wait = call(slots, *arguments)
        launched = time.perf_counter()
        self._decodes = True

        def waited() -> SampleOutput:
            asked = time.perf_counter()
            output = wait()
            rows = row_class(len(slots))
            self.times.decode[rows] = self.times.decode.get(rows, 0.0) + time.perf_counter() - began
            sampled = output.ids_BK.shape[1] if output.counts_B is None else float(output.counts_B.mean())
            self.times.tokens[rows] = self.times.tokens.get(rows, 0) + sampled
            self._decodes = False
            self.times.overlapped += asked - launched
            self.times.calls += 1
            return output

        return waited


def row_class(num_rows: int) -> str:
    return next((name for border, name in zip(ROWS, ROW_CLASSES, strict=False) if num_rows <= border), ROW_CLASSES[-1])


@dataclass
class Measured:
    """What the counted steps took."""

    times: list[RolloutTimes]
    timings: list[StepTimings]
    groups: list[Group]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.config is not None:
        publish(_whole_run(options), options.json)
        return
    options.model, options.env, options.steps = options.model or "smollm2", options.env or "frozen_lake", options.steps or 4
    rollout = {"num_groups": options.groups, "group_size": options.group, "max_rows": options.groups * options.group}
    sizes = {"rollout": rollout, "steps": LAST_STEP}
    given = merge(named_settings(options.env, options.model, None, None, None, None), parse_overrides(options.set or []))
    grow_allocator_segments()
    with tempfile.TemporaryDirectory() as folder:
        store, settings = open_run(Path(folder) / "run", None, merge(sizes, given), resume=False, smoke=False)
        trainer = Trainer(settings, store)
        with trainer.sampler.pool:
            measured = _measure(trainer, options.steps)
        model, tokenizer = trainer.policy.module, trainer.policy.tokenizer
        machine, size = measure_machine(model), size_of(model)
        trainer.sampler.engine.free()
        fixed, seconds = _fixed(model, tokenizer, measured.groups)
    floor = rollout_floor(measured.groups, size, machine)
    sampled = num_sampled(measured.groups)
    best = floor.prefill + floor.decode
    titles = {"model": options.model, "device, precision": f"{machine.name}, {precision(model)}"}
    rows: list[Row] = [
        {**titles, "who": f"real run, {options.env}", **_rollout_row(measured)},
        {
            **titles,
            "who": f"fixed lengths: {fixed}",
            "sampled tokens/s": fixed.rows * fixed.turns * fixed.response / seconds,
            "rollout, s": seconds,
        },
        {**titles, "who": "floor of the last step", "sampled tokens/s": sampled / best, "rollout, s": best},
    ]
    publish(rows, options.json)
    publish([_stage_row(measured.timings)], None)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a whole run of this config, as for tether train; --model, --env and --steps then replace its own")
    parser.add_argument("--out", type=Path, help="with --config: a run folder that is kept; else a temporary one")
    parser.add_argument("--model", help="any name that tether train takes; smollm2 if not given")
    parser.add_argument("--env", help="frozen_lake if not given")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--steps", type=int, help="counted steps, after one that is not: 4; with --config all of them")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="a setting of the run, as for tether train")
    parser.add_argument(
        "--vllm-python",
        default="none",
        metavar="PATH",
        help="with --config: Python of an environment that has vLLM, which plays the same episodes",
    )
    add_json_option(parser)
    return parser.parse_args(arguments)


REPLAYED = 9
"""Steps that vLLM plays again; the first of them is not timed."""
DISK_LOOK = 0.25
NAMES = {"checkpoint": "checkpoints waited for"}


def _whole_run(options: argparse.Namespace) -> list[Row]:
    """The seconds of a whole `tether train`, from what it recorded."""
    with tempfile.TemporaryDirectory() as place:
        folder = options.out or Path(place) / "run"
        words = [
            sys.executable,
            "-m",
            "tether",
            "train",
            *([options.env] if options.env else []),
            "--config",
            options.config,
            "--out",
            str(folder),
        ]
        for option in ("model", "steps"):
            words += [f"--{option}", str(getattr(options, option))] if getattr(options, option) is not None else []
        words += [word for setting in options.set or [] for word in ("--set", setting)]
        began, disk = time.perf_counter(), 0
        with subprocess.Popen(words, stdout=sys.stderr) as run:
            while run.poll() is None:
                time.sleep(DISK_LOOK)
                disk = max(disk, _bytes_on_disk(folder))
        wall = time.perf_counter() - began
        if run.returncode:
            raise SystemExit(f"tether train ended with {run.returncode}: nothing to report")
        store = RunStore.open(folder)
        return [*_whole_rows(store, wall, disk), *(_vllm_rows(store, options.vllm_python) if options.vllm_python != "none" else [])]


def _vllm_rows(store: RunStore, python: str) -> list[Row]:
    """vLLM's rate on the episodes of some steps, and ours."""
    seconds = {line["step"]: line["seconds"] for line in store.timings()}
    steps = [record.step for record in store.steps() if record.step]
    steps = sorted({steps[round(n * (len(steps) - 1) / (REPLAYED - 1))] for n in range(REPLAYED)})
    found = {step: [_lengths(t["turns"]) for t in store.trajectories(step, "train") if t["turns"]] for step in steps}
    model = next((path.parent for path in sorted(store.checkpoints.glob("*/model/config.json"))), None)
    if model is None or len(steps) < 2:
        return [{"what": "vLLM: left out, it needs two steps and a checkpoint of a whole model, for its config", "value": None, "unit": ""}]
    longest = max(sum(len(turn["context"]) + turn["response"] for turn in turns) for episodes in found.values() for turns in episodes)
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "episodes.json"
        recorded.write_text(json.dumps(list(found.values())), encoding="utf-8")
        asked = {
            "dtype": store.machine()["dtype"],
            "rows": max(map(len, found.values())),
            "longest": longest + 1,
            "recorded": str(recorded),
        }
        answer = vllm_peer.ask(python, str(model), asked)
    if isinstance(answer, str):
        return [{"what": f"vLLM: {answer}", "value": None, "unit": ""}]
    timed = steps[1:]
    sampled = sum(turn["response"] for step in timed for turns in found[step] for turn in turns)
    ours = sampled / sum(seconds[step]["rollout"] for step in timed)
    peer = answer["recorded"]["sampled"] / answer["recorded"]["seconds"]
    which = ", ".join(map(str, timed))
    return [
        {"what": f"sampled in the rollouts of steps {which}", "value": ours, "unit": "tokens/s"},
        {"what": f"vLLM {answer['version']} on the same episodes, no environment", "value": peer, "unit": "tokens/s"},
        {"what": "tether is faster by", "value": ours / peer, "unit": ""},
    ]


def _lengths(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{"fresh": turn["fresh"], "context": turn["context_ids"], "response": len(turn["response_ids"])} for turn in turns]


def _whole_rows(store: RunStore, wall: float, disk: int) -> list[Row]:
    steps = [StepTimings.from_json(line) for line in store.timings()]
    seconds = {"start": sum(store.machine().get("start", {}).values())}
    for step in steps:
        for stage, spent in step.seconds.items():
            seconds[NAMES.get(stage, stage)] = seconds.get(NAMES.get(stage, stage), 0.0) + spent
    seconds["rest"] = wall - sum(seconds.values())
    sampled = [
        (step.tokens_per_second * spent, spent) for step in steps if step.tokens_per_second and (spent := step.seconds.get("rollout"))
    ]
    shares = [(step.share_of_peak["update"], step.seconds["update"]) for step in steps if "update" in step.share_of_peak]
    success = [f"{record.metrics['validation/success']:.1%}" for record in store.steps() if "validation/success" in record.metrics]
    rows: list[Row] = [{"what": f"whole run, {len(store.steps()) - 1} steps, validation {', '.join(success)}", "value": wall, "unit": "s"}]
    rows += [{"what": stage, "value": spent, "unit": "s"} for stage, spent in sorted(seconds.items(), key=lambda item: -item[1])]
    if sampled:
        rate = sum(tokens for tokens, _ in sampled) / sum(spent for _, spent in sampled)
        rows.append({"what": "sampled in the rollouts", "value": rate, "unit": "tokens/s"})
    if shares:
        over_all = sum(share * spent for share, spent in shares) / sum(spent for _, spent in shares)
        rows.append(
            {"what": "update, mean of the steps", "value": 100 * statistics.fmean(share for share, _ in shares), "unit": "% of peak"}
        )
        rows.append({"what": "update, over all its seconds", "value": 100 * over_all, "unit": "% of peak"})
    return [*rows, {"what": "run folder at its largest", "value": disk / 1e9, "unit": "GB"}]


def _bytes_on_disk(folder: Path) -> int:
    """What a folder's files take; hard links count once, and files may go while they are counted."""
    taken: dict[int, int] = {}
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        taken[found.st_ino] = 512 * found.st_blocks
    return sum(taken.values())


def _measure(trainer: Trainer, steps: int) -> Measured:
    """Train; the times of each counted step, and the groups of the last."""
    engine: Any = trainer.sampler.engine
    make, sample = engine._decoder_for, trainer.rollouts.sample
    current = RolloutTimes()
    played: list[Group] = []

    def timed_decoder(num_slots: int) -> Any:
        return TimedDecoder(make(num_slots), current)

    def keep_groups(*given: Any) -> Any:
        sampled = sample(*given)
        played[:] = sampled.groups
        return sampled

    engine._decoder_for = timed_decoder
    trainer.rollouts.sample = keep_groups  # type: ignore[method-assign]
    measured = Measured([], [], [])
    for step in range(1, steps + 2):
        current = RolloutTimes()
        trainer.train_step(step)
        timings = trainer.timer.timings()
        say(f"step {step}: rollout {timings.seconds['rollout']:.2f} s, {timings.tokens_per_second:,.0f} tokens/s")
        if step > 1:
            measured.times.append(current)
            measured.timings.append(timings)
    measured.groups = played
    return measured


def _rollout_row(measured: Measured) -> dict[str, float | str | None]:
    def mean(values: Any) -> float:
        return statistics.fmean(values)

    seconds = mean(timings.seconds["rollout"] for timings in measured.timings)
    row: dict[str, float | str | None] = {
        "sampled tokens/s": mean(timings.tokens_per_second or 0.0 for timings in measured.timings),
        "rollout, s": seconds,
    }
    decoded = 0.0
    for rows in ROW_CLASSES:
        spent, steps = (sum(getattr(times, what).get(rows, 0) for times in measured.times) for what in ("decode", "tokens"))
        decoded += spent / len(measured.times)
        row[f"decode {rows} rows, s"] = spent / len(measured.times)
        row[f"ms a token, {rows}"] = 1000 * spent / steps if steps else None
    prefill = mean(times.prefill for times in measured.times)
    turns = [turn for group in measured.groups for t in group.trajectories for turn in t.turns]
    return {
        **row,
        "prefill, s": prefill,
        "host alone, s": seconds - decoded - prefill,
        "overlapped, s": mean(times.overlapped for times in measured.times),
        "tokens a response": statistics.fmean(len(turn.response_ids) for turn in turns),
        "longest": float(max(len(turn.response_ids) for turn in turns)),
        "valid turns": statistics.fmean(turn.valid for turn in turns),
    }


def _fixed(model: Any, tokenizer: Any, groups: Sequence[Group]) -> tuple[Conversations, float]:
    """The same amount of work with all lengths alike, and what it takes."""
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    later = [len(turn.context_ids) for t in trajectories for turn in t.turns[1:]]
    work = Conversations(
        groups=len(groups),
        group_size=max(len(group.trajectories) for group in groups),
        prompt=round(statistics.fmean(len(t.turns[0].context_ids) for t in trajectories)),
        response=round(statistics.fmean(len(turn.response_ids) for turn in turns)),
        turns=max(1, round(len(turns) / len(trajectories))),
        observed=round(statistics.fmean(later)) if later else 0,
    )
    engine = engine_for(model, tokenizer, work)
    vocabulary = int(model.config.vocab_size)

    def play(run: int) -> list[Group]:
        conversations = make_conversations(work, vocabulary, run)
        engine.run(conversations, Sampling(1.0, work.response))
        return grouped(conversations)

    play(0)
    seconds = min(timed(model.device, lambda run=run: play(run))[0] for run in (1, 2))
    return work, seconds


def _stage_row(timings: Sequence[StepTimings]) -> dict[str, float | str | None]:
    stages = list(dict.fromkeys(stage for step in timings for stage in step.seconds))
    seconds = {stage: statistics.fmean(step.seconds.get(stage, 0.0) for step in timings) for stage in stages}
    return {"stage": "seconds a step", **seconds, "all": sum(seconds.values())}


if __name__ == "__main__":
    main()
