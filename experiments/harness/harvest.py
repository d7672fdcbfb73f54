"""From a run folder to the numbers that are kept of it: curves of metrics, and what only the trajectories tell.

Metrics of evaluations and of measured steps are kept at their steps. Metrics of every step are kept as means over blocks of steps, which
stand at the last step of their block. Values have six digits.
"""

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.cells import Cell, CellRecord
from harness.spending import SECONDS, TOKENS, TRAINED_SHARE
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.grammar import parse_response
from tether.core.intervals import spearman
from tether.runs.quantities import SUCCESS
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

BLOCK = 10
"""Steps whose mean is kept of a metric that is logged at every step."""
DIGITS = 6

VARIANCE_QUANTILES = (10, 25, 50, 75, 90)
DERIVED_METRICS: dict[str, str] = {
    "exploration/states": "distinct observations in the episodes of a prompt, mean over prompts",
    "exploration/states_trained": "distinct observations in the episodes that were trained on, a step",
    "exploration/answers": "distinct first answers to a prompt, mean over prompts",
    "exploration/solved_prompts": "share of the training prompts that some episode solved",
    "exploration/solved_ever": "share of the validation prompts that were solved in any evaluation so far",
    **{f"variance/quantile_{q}": f"the {q}% quantile of the reward variance over the training prompts" for q in VARIANCE_QUANTILES},
    "variance/with_reward": "Spearman's correlation of a prompt's reward variance with its mean reward, over the training prompts",
    "variance/with_length": "the same with the mean length of its responses, in tokens",
    "variance/with_entropy": "the same with the mean surprisal (- log p) of its sampled tokens",
}
"""Metrics that are computed here from a run's trajectories."""

EVERY_STEP = (
    "rollout/success",
    "rollout/reward_mean",
    "rollout/response_tokens",
    "rollout/reasoning_tokens",
    "rollout/format_valid",
    "groups/rv_mean",
    "groups/rv_std",
    "groups/rv_ratio",
    "groups/kept_ratio",
    "groups/zero_variance",
    "groups/all_fail",
    "groups/mixed",
    "groups/all_succeed",
    "update/entropy",
    "update/grad_norm",
    "update/tokens_trained",
    "update/skipped",
)
MEASURED = re.compile(
    r"validation/(success|reward_mean|response_tokens|format_valid)"
    r"|gradients/(rv_mean|task_norm|kl_norm|entropy_norm|regulariser_norm|dominance|snr)_\d+"
    r"|(information|information_trajectory)/"
    r"(retrieval_acc|chance|recall_[248]|mi|mi_seq|mi_zscore|mi_zscore_ema|h_conditional|h_marginal)"
    r"|information/((retrieval_acc|mi_seq|h_conditional)_change(_low|_high)?|image_(swapped|blank)(_low|_high)?|image_prompts"
    r"|num_prompts|num_reasonings|probe_tokens_(sampled|scored))"
)
NO_PART_OF_A_STEP = ("validation", "diagnosis", "probe", "gradients", "checkpoint")
"""Stages of the clock that measure a run or save it; how often they come is a setting of its own."""
_STATUS_LINE = re.compile(r"^Turn \d+ of \d+[^\n]*\n")


def harvest(cell: Cell, run: Path, *, commit: str) -> CellRecord:
    """The record of a finished run."""
    store = RunStore.open(run)
    finished = store.finished
    if finished is None:
        raise BadInput(f"run '{run}' is not finished; continue it with: tether train --resume --out {run}")
    records = store.steps()
    timings = store.timings()
    curves = metric_curves(records) | spent_curves(records, timings) | trajectory_curves(store.trajectories())
    seconds = math.fsum(float(value) for record in timings for value in record.get("seconds", {}).values())
    about = {
        "settings": cell.identity,
        "tether": store.version,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": str(store.machine().get("device", "unknown")),
        "peak_memory_gb": round(
            max((max(record["peak_memory"].values()) for record in timings if record.get("peak_memory")), default=0) / 1e9, 2
        ),
    }
    rounded = {name: {step: _rounded(value) for step, value in curve.items()} for name, curve in curves.items() if curve}
    return CellRecord(cell.id, cell.seed, cell.steps, finished, round(seconds, 1), rounded, about)


def metric_curves(records: Sequence[StepRecord]) -> dict[str, dict[int, float]]:
    """Curves of the metrics that are kept."""
    curves: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            if MEASURED.fullmatch(name):
                curves.setdefault(name, {})[record.step] = value
    for name in EVERY_STEP:
        curves[name] = blocks({record.step: record.metrics[name] for record in records if name in record.metrics})
    return curves


def spent_curves(records: Sequence[StepRecord], timings: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Tokens and seconds that were spent so far, at every evaluation and at the end of every block, and the share of the tokens of a block that were
    trained on."""
    sampled = {record.step: record.metrics.get("rollout/tokens_sampled", 0.0) for record in records}
    trained = {record.step: record.metrics["groups/tokens_trained"] for record in records if "groups/tokens_trained" in record.metrics}
    if not trained:
        return {}
    clock = {
        int(record["step"]): math.fsum(value for name, value in record.get("seconds", {}).items() if name not in NO_PART_OF_A_STEP)
        for record in timings
    }
    shown = {record.step for record in records if SUCCESS in record.metrics} | blocks(trained).keys()
    played = blocks({step: sampled[step] for step in trained})
    return {
        TOKENS: _so_far(sampled, shown),
        SECONDS: _so_far(clock, shown),
        TRAINED_SHARE: {step: value / played[step] for step, value in blocks(trained).items() if played[step]},
    }


def _so_far(values: Mapping[int, float], steps: Iterable[int]) -> dict[int, float]:
    """The sum of the values up to and with each of some steps."""
    return {step: math.fsum(value for at, value in values.items() if at <= step) for step in sorted(steps)}


def blocks(values: Mapping[int, float]) -> dict[int, float]:
    """Means over blocks of steps 1 to 10, 11 to 20, ..., at the last step of each block that has a value.

    >>> blocks({1: 1.0, 2: 3.0, 11: 5.0})
    {2: 2.0, 11: 5.0}
    """
    parts: dict[int, dict[int, float]] = defaultdict(dict)
    for step, value in values.items():
        parts[(step - 1) // BLOCK][step] = value
    return {max(part): math.fsum(part.values()) / len(part) for _, part in sorted(parts.items())}


# ------------------------------------------------------------------------------------------------------------ trajectories


@dataclass(slots=True)
class _Prompt:
    """The episodes of one prompt of a step."""

    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    surprisals: list[float] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    kept: bool = False

    def add(self, episode: Mapping[str, Any]) -> None:
        self.rewards.append(float(episode["reward"]))
        self.successes.append(bool(episode["success"]))
        self.kept |= bool(episode["kept"])
        for number, turn in enumerate(episode["turns"]):
            self.states.add(_STATUS_LINE.sub("", turn["observation"]))
            self.tokens.append(len(turn["response_ids"]))
            self.surprisals += [-value for value in turn["logprobs"] if value is not None]
            if number == 0:
                self.answers.add(parse_response(turn["response"]).answer or "")

    @property
    def variance(self) -> float:
        return float(np.var(self.rewards, ddof=1)) if len(self.rewards) > 1 else 0.0


def trajectory_curves(episodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """What only the trajectories tell: exploration, and the distribution of the reward variance. Errored episodes are left out."""
    prompts: dict[int, dict[int, _Prompt]] = defaultdict(lambda: defaultdict(_Prompt))
    solved: dict[int, dict[int, bool]] = defaultdict(dict)
    for episode in episodes:
        if episode["error"] is not None or episode["reward"] is None:
            continue
        step, group = int(episode["step"]), int(episode["group"])
        if episode["split"] == Split.VALIDATION:
            solved[step][group] = solved[step].get(group, False) or bool(episode["success"])
        elif episode["split"] == Split.TRAIN:
            prompts[step][group].add(episode)
    return _exploration(prompts) | _solved_ever(solved) | _variances(prompts)


def _exploration(prompts: Mapping[int, Mapping[int, _Prompt]]) -> dict[str, dict[int, float]]:
    per_step: dict[str, dict[int, float]] = defaultdict(dict)
    for step, groups in prompts.items():
        chosen = list(groups.values())
        per_step["states"][step] = sum(len(prompt.states) for prompt in chosen) / len(chosen)
        per_step["states_trained"][step] = len(set().union(*(prompt.states for prompt in chosen if prompt.kept)))
        per_step["answers"][step] = sum(len(prompt.answers) for prompt in chosen) / len(chosen)
        per_step["solved_prompts"][step] = sum(any(prompt.successes) for prompt in chosen) / len(chosen)
    return {f"exploration/{name}": blocks(values) for name, values in per_step.items()}


def _solved_ever(solved: Mapping[int, Mapping[int, bool]]) -> dict[str, dict[int, float]]:
    ever: set[int] = set()
    curve = {}
    for step in sorted(solved):
        ever |= {group for group, success in solved[step].items() if success}
        curve[step] = len(ever) / len(solved[step])
    return {"exploration/solved_ever": curve}


def _variances(prompts: Mapping[int, Mapping[int, _Prompt]]) -> dict[str, dict[int, float]]:
    """Quantiles of the reward variance by block, and its rank correlations over all prompts of the run, at the last step."""
    parts: dict[int, list[float]] = defaultdict(list)
    last: dict[int, int] = {}
    for step, groups in sorted(prompts.items()):
        parts[(step - 1) // BLOCK] += [prompt.variance for prompt in groups.values()]
        last[(step - 1) // BLOCK] = step
    curves: dict[str, dict[int, float]] = {
        f"variance/quantile_{q}": {last[part]: float(np.quantile(values, q / 100)) for part, values in parts.items()}
        for q in VARIANCE_QUANTILES
    }
    every = [prompt for groups in prompts.values() for prompt in groups.values() if prompt.tokens and prompt.surprisals]
    if len(every) > 1:
        variances, end = [prompt.variance for prompt in every], max(prompts)
        for name, values in (
            ("with_reward", [float(np.mean(prompt.rewards)) for prompt in every]),
            ("with_length", [float(np.mean(prompt.tokens)) for prompt in every]),
            ("with_entropy", [float(np.mean(prompt.surprisals)) for prompt in every]),
        ):
            curves[f"variance/{name}"] = {end: spearman(variances, values)}
    return curves


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
