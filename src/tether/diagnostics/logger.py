"""`TetherLogger`: the generation log of any trainer as a Tether run folder, which `tether report` and `tether diagnose` read.

    log = TetherLogger("runs/mine", tokenizer=tokenizer, model="Qwen/Qwen2.5-0.5B-Instruct")
    log.log(step, prompts=prompts, responses=responses, groups=prompt_ids, rewards=rewards)
    log.finish("all steps done")

The folder has the files of Tether's own runs: one record per step, one line per episode. A number that does not follow from what the trainer
gave is left out, never set to zero: without `successes` there is no success rate, without whole responses no response length.

A row is one turn, and `read_generations` makes groups of rows, so that everything downstream reads them as it reads those of Tether's own sampler.
Token ids are used as they are; a text is encoded with the tokenizer, its parts (before the reasoning, the reasoning, the rest) apart from each
other, so that the borders lie where the text has them. The reasoning of a response is what stands between its think tags, or what a pattern of the
caller matches. A trainer that knows the reasonings may give them alone; the responses are then the reasonings.
"""

import dataclasses
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tether.algorithms.filters.select import Selection, select_groups
from tether.core.enums import FinishReason, Split, StopReason
from tether.core.errors import BadInput
from tether.core.grammar import THINK_CLOSE
from tether.core.metrics import StepMetrics
from tether.core.seeding import derive_seed
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.pairs import Ids, TokensOrText, encoded
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.summary import group_summary, rollout_summary
from tether.models.chat import tokens_before
from tether.runs.schema import StepRecord, images_of, trajectory_record
from tether.runs.store import RunStore

THINK_TAGS = ReasoningRule()


@dataclass(frozen=True, slots=True)
class Generations:
    """The generations of one step as groups, and which of their fields the trainer gave."""

    groups: list[Group]
    names: list[Hashable]
    """The caller's id of each group."""
    has_rewards: bool
    has_successes: bool
    has_responses: bool
    """Whole responses, not reasonings alone."""


def read_generations(
    *,
    prompts: Sequence[TokensOrText],
    groups: Sequence[Hashable],
    responses: Sequence[TokensOrText] | None = None,
    reasonings: Sequence[TokensOrText | None] | None = None,
    rewards: Sequence[float] | None = None,
    successes: Sequence[bool] | None = None,
    trajectories: Sequence[Hashable] | None = None,
    logprobs: Sequence[Sequence[float] | None] | None = None,
    tokenizer: Any = None,
    rule: ReasoningRule = THINK_TAGS,
) -> Generations:
    """Rows as groups.

    Args:
        prompts: everything the model saw before each response, as token ids or text.
        groups: the id of each row's group: rows with the same first prompt, in any order.
        responses: what the model wrote, as token ids or text; or None, with `reasonings`.
        reasonings: the reasoning alone, where the caller has cut it out; empty or None where there is none.
        rewards, successes: of each row's trajectory.
        trajectories: which rows are turns of one episode, in order; by default every row is an episode of its own.
        logprobs: of the sampled tokens of each row, for responses that are token ids.
        tokenizer: needed for texts, and to find the reasoning in token ids.
        rule: where the reasoning is in a response.
    """
    if (responses is None) == (reasonings is None):
        got = "neither" if responses is None else "both"
        raise BadInput(f"give responses or reasonings, got {got}; responses are cut at their think tags")
    columns = {"groups": groups, "responses": responses, "reasonings": reasonings, "rewards": rewards, "successes": successes}
    for name, values in {**columns, "trajectories": trajectories, "logprobs": logprobs}.items():
        if values is not None and len(values) != len(prompts):
            raise BadInput(f"one row per turn: got {len(prompts)} prompts and {len(values)} {name}; give equally many")
    if not len(prompts):
        raise BadInput("the batch is empty; give at least one row")
    reader = _Reader(tokenizer, rule)
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, {}).setdefault(row if trajectories is None else trajectories[row], []).append(row)
    found = []
    for index, episodes in enumerate(members.values()):
        seed = derive_seed("prompt", *reader.prompt(prompts[next(iter(episodes.values()))[0]], "prompts"))
        group_record = Group(index, seed, [])
        for member, rows in enumerate(episodes.values()):
            turns: list[Turn] = []
            for row in rows:
                written = (responses if responses is not None else reasonings)[row]  # type: ignore[index]
                turns.append(
                    reader.turn(turns, prompts[row], written, responses is not None, row, None if logprobs is None else logprobs[row])
                )
            if rewards is not None:
                turns[-1].reward = agreed_value(rewards, rows, "rewards")
            success = successes is not None and bool(agreed_value(successes, rows, "successes"))
            stop = StopReason.UNKNOWN if successes is None else StopReason.SUCCESS if success else StopReason.FAILURE
            group_record.trajectories.append(Trajectory(index, member, seed, turns, stop, success))
        found.append(group_record)
    return Generations(found, list(members), rewards is not None, successes is not None, responses is not None)


def agreed_value(values: Sequence[float], rows: Sequence[int], name: str) -> float:
    """The one value of a trajectory; all of its rows must agree."""
    got = [math.nan if values[row] is None else float(values[row]) for row in rows]
    if not math.isfinite(got[0]) or any(value != got[0] for value in got):
        raise BadInput(f"{name} of the rows {list(rows)} are {got}; give every turn of a trajectory the same finite value")
    return got[0]


class _Reader:
    """Rows to turns, with one tokenizer and one rule."""

    def __init__(self, tokenizer: Any, rule: ReasoningRule) -> None:
        self._tokenizer, self._rule = tokenizer, rule

    def prompt(self, prompt: TokensOrText, where: str) -> Ids:
        ids = encoded(prompt, self._tokenizer, where, beginning=True)
        if not ids:
            raise BadInput(f"{where} is empty; give everything the model saw before the response")
        return ids

    def turn(
        self,
        earlier: Sequence[Turn],
        prompt: TokensOrText,
        written: TokensOrText | None,
        whole: bool,
        row: int,
        logprobs: Sequence[float] | None,
    ) -> Turn:
        context = self.prompt(prompt, f"prompts[{row}]")
        start = max((index for index, turn in enumerate(earlier) if turn.new_context), default=0)
        seen = tuple(token for turn in earlier[start:] for token in (*turn.context_ids, *turn.response_ids))
        appended = bool(seen) and context[: len(seen)] == seen
        if whole:
            ids, text, span = self._response(written if written is not None else (), f"responses[{row}]")
        else:
            ids = encoded(written if written is not None else (), self._tokenizer, f"reasonings[{row}]")
            # The tag is not among the ids: only readers of the text need to see where the reasoning ends.
            text = f"{written if isinstance(written, str) else self._decode(ids)}{THINK_CLOSE}" if ids else ""
            span = (0, len(ids)) if ids else None
        if logprobs is not None and len(logprobs) != len(ids):
            raise BadInput(f"logprobs[{row}] has {len(logprobs)} values for {len(ids)} tokens; give one for each token of the response")
        return Turn(
            context_ids=context[len(seen) :] if appended else context,
            response_ids=ids,
            logprobs=tuple(float(value) for value in logprobs) if logprobs is not None else (),
            finish=FinishReason.END_OF_TURN,
            text=text,
            reasoning_span=span,
            valid=span is not None,
            observation=prompt if isinstance(prompt, str) else self._decode(context[len(seen) :] if appended else context),
            new_context=not appended,
        )

    def _response(self, written: TokensOrText, where: str) -> tuple[Ids, str, tuple[int, int] | None]:
        """Token ids, text, and the span of the reasoning in the ids."""
        if isinstance(written, str):
            cut = self._rule.cut(written)
            if cut.missing is not None:
                return encoded(written, self._tokenizer, where), written, None
            parts = [
                encoded(part, self._tokenizer, where) for part in (written[: cut.start], written[cut.start : cut.end], written[cut.end :])
            ]
            start = len(parts[0])
            return (*parts[0], *parts[1], *parts[2]), written, (start, start + len(parts[1]))
        ids = encoded(written, self._tokenizer, where)
        if self._tokenizer is None:
            raise BadInput(f"{where} is token ids; give the tokenizer, which finds the reasoning in them, or give reasonings")
        text = self._decode(ids)
        return ids, text, reasoning_span(self._decode, ids, text, self._rule)

    def _decode(self, ids: Ids) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def reasoning_span(decode: Any, ids: Ids, text: str, rule: ReasoningRule = THINK_TAGS) -> tuple[int, int] | None:
    """Start and end of the reasoning in sampled token ids; None where there is none.

    A token that straddles a border belongs to neither side of it: the one that ends the opening tag counts to x, the one that begins the
    closing tag is left out.
    """
    cut = rule.cut(text)
    if cut.missing is not None:
        return None
    start = tokens_before(decode, ids, cut.start)
    if len(decode(ids[:start])) < cut.start:
        start += 1
    end = tokens_before(decode, ids, cut.end)
    return (start, end) if start < end else None


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
        unknown = {**({} if found.has_rewards else {"reward": None}), **({} if found.has_successes else {"success": None})}
        self.store.append_trajectories(
            [
                trajectory_record(trajectory, record.step, split, kept is None or names[group.index] in kept) | unknown
                for group in found.groups
                for trajectory in (*group.trajectories, *group.errored)
            ],
            images=images_of(trajectory for group in found.groups for trajectory in group.trajectories),
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
    names = ["turns", "reasoning_tokens"]
    names += ["response_tokens", "response_tokens_max", "tokens_sampled"] if found.has_responses else []
    names += ["reward_mean", "reward_std"] if found.has_rewards else []
    names += ["success"] if found.has_successes else []
    rollout = rollout_summary(found.groups)
    metrics = {f"rollout/{name}": rollout[name] for name in names}
    if found.has_rewards and any(group.trajectories for group in found.groups):
        chosen = selection
        if chosen is None:
            trajectories = [trajectory for group in found.groups for trajectory in group.trajectories]
            chosen = select_groups([t.reward for t in trajectories], [t.group for t in trajectories], strategy="all")
        groups = group_summary(found.groups, chosen)
        if not found.has_successes:
            groups = {name: value for name, value in groups.items() if name not in _GROUPS_FROM_SUCCESSES}
        groups |= {"sampled": len(chosen.scores), "kept": len(chosen.kept)}
        metrics |= {f"groups/{name}": value for name, value in groups.items()}
    return metrics
