"""`TetherLogger`: the generation log of any trainer as a Tether run folder, which `tether report` and `tether diagnose` read.

    log = TetherLogger("runs/mine", tokenizer=tokenizer, model="Qwen/Qwen2.5-0.5B-Instruct")
    log.log(step, prompts=prompts, responses=responses, groups=prompt_ids, rewards=rewards)
    log.finish("all steps done")

The folder has the files of Tether's own runs: one record per step, one line per episode. A number that does not follow from what the trainer
gave is left out, never set to zero: without `successes` there is no success rate, without whole responses no response length.
"""

import dataclasses
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tether.algorithms.filters.select import Selection, select_groups
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.metrics import StepMetrics
from tether.core.types import Group
from tether.diagnostics.generations import THINK_TAGS, Generations, read_generations
from tether.diagnostics.pairs import TokensOrText
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.summary import group_summary, rollout_summary
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore

_FROM_ROWS = ("turns", "reasoning_tokens")
_FROM_RESPONSES = ("response_tokens", "response_tokens_max", "tokens_sampled")
_FROM_REWARDS = ("reward_mean", "reward_std")
_FROM_SUCCESSES = ("success",)
_GROUPS_FROM_SUCCESSES = ("all_fail", "mixed", "all_succeed", "fail_but_varied")


class TetherLogger:
    """Writes the steps of another trainer into a run folder."""

    def __init__(
        self,
        out: str | Path,
        *,
        tokenizer: Any = None,
        model: str | None = None,
        about: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        pattern: str | None = None,
        resume: bool = False,
    ) -> None:
        """A new run folder, or an existing one that is continued.

        Args:
            out: the folder; one that holds anything is refused unless `resume`.
            tokenizer: of the model that generates; needed for texts, and to find the reasoning in token ids.
            model: the name of the model that the run starts from, which `tether diagnose` scores with.
            about: what the run is, for the head of its report, such as {"trainer": "mine", "task": "gsm8k"}.
            settings: the trainer's settings, for the record.
            pattern: a regular expression whose one group is the reasoning; None takes the text between think tags.
            resume: continue the folder; steps that are logged again replace the earlier ones.
        """
        self._tokenizer = tokenizer
        self._rule = THINK_TAGS if pattern is None else ReasoningRule(pattern)
        folder = Path(out)
        if resume and (folder / "run.json").is_file():
            self.store = RunStore.open(folder)
            return
        described = {**({"model": model} if model else {}), **dict(about or {}), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        config = {**dict(settings or {}), **({"model": {"name": model}} if model else {})}
        self.store = RunStore.create(folder, yaml.safe_dump(config, sort_keys=False), described)

    def log(
        self,
        step: int,
        *,
        prompts: Sequence[TokensOrText],
        groups: Sequence[Hashable],
        responses: Sequence[TokensOrText] | None = None,
        reasonings: Sequence[TokensOrText | None] | None = None,
        rewards: Sequence[float] | None = None,
        successes: Sequence[bool] | None = None,
        trajectories: Sequence[Hashable] | None = None,
        logprobs: Sequence[Sequence[float] | None] | None = None,
        selection: Selection | None = None,
        metrics: Mapping[str, float] | None = None,
        split: str = "train",
    ) -> StepRecord:
        """Write one step: its episodes and its numbers.

        The rows are those of `tether.Monitor.observe`: one per turn, groups in any order. `selection` is what `select_groups` returned for this
        step, on the same rows. `metrics` are further numbers under their names in docs/metrics.md, such as "update/loss".
        """
        found = read_generations(
            prompts=prompts,
            groups=groups,
            responses=responses,
            reasonings=reasonings,
            rewards=rewards,
            successes=successes,
            trajectories=trajectories,
            logprobs=logprobs,
            tokenizer=self._tokenizer,
            rule=self._rule,
        )
        record = StepRecord(step, {**generation_metrics(found, selection), **dict(metrics or {})})
        self.write(found, record, selection, split=split)
        return record

    def write(self, found: Generations, record: StepRecord, selection: Selection | None = None, *, split: str = "train") -> None:
        """Write episodes and record of a step; the names of the metrics must be catalogued."""
        if split not in (Split.TRAIN, Split.VALIDATION, Split.TEST):
            raise BadInput(f"split is {split!r}; expected train, validation or test")
        checked = StepMetrics()
        for name, value in record.metrics.items():
            section, _, short = name.partition("/")
            checked.put(section, {short: value})
        names = dict(zip((group.index for group in found.groups), found.names, strict=True))
        kept = None if selection is None else set(selection.kept)
        self.store.append_trajectories(
            [
                _known(trajectory_record(trajectory, record.step, split, kept is None or names[group.index] in kept), found)
                for group in found.groups
                for trajectory in (*group.trajectories, *group.errored)
            ]
        )
        self.store.append(dataclasses.replace(record, metrics=dict(checked)))

    def amend(self, record: StepRecord) -> None:
        """Write the record of a step again, with more numbers; its episodes stay."""
        self.store.append(record)

    def finish(self, note: str = "finished") -> None:
        """Record how the run ended."""
        self.store.finish(note)


def generation_metrics(found: Generations, selection: Selection | None = None) -> dict[str, float]:
    """The "rollout/" and "groups/" metrics that follow from the rows; by the functions that Tether's own trainer uses."""
    names = [
        *_FROM_ROWS,
        *(_FROM_RESPONSES if found.has_responses else ()),
        *(_FROM_REWARDS if found.has_rewards else ()),
        *(_FROM_SUCCESSES if found.has_successes else ()),
    ]
    rollout = rollout_summary(found.groups)
    metrics = {f"rollout/{name}": rollout[name] for name in names}
    if found.has_rewards and any(group.trajectories for group in found.groups):
        chosen = selection if selection is not None else _everything(found.groups)
        groups = group_summary(found.groups, chosen)
        if not found.has_successes:
            groups = {name: value for name, value in groups.items() if name not in _GROUPS_FROM_SUCCESSES}
        groups |= {"sampled": len(chosen.scores), "kept": len(chosen.kept)}
        metrics |= {f"groups/{name}": value for name, value in groups.items()}
    return metrics


def _everything(groups: Sequence[Group]) -> Selection:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return select_groups([t.reward for t in trajectories], [t.group for t in trajectories], strategy="all")


def _known(record: dict[str, Any], found: Generations) -> dict[str, Any]:
    """The record of an episode without what the trainer did not say."""
    unknown = {**({} if found.has_rewards else {"reward": None}), **({} if found.has_successes else {"success": None})}
    return {**record, **unknown}
