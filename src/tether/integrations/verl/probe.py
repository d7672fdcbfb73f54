"""The probe inside verl: information and alarms on the unfiltered batch, scored by the actor before it is updated.

    +trainer.v1.sampler.sampler_kwargs.probe.every=5
    +trainer.v1.sampler.sampler_kwargs.probe.out=runs/verl

The sampler remembers the rows before it filters. The scoring itself runs where verl computes the old log-probs: after sampling, when the rollout
replicas have given up their memory, and before the update. There verl's own worker call, `compute_log_prob`, takes the rows. Where a step is made of
several updates (`parameter_sync_step`), the batch of the first is observed: the actor then still has the weights that it last gave to the servers.

The asynchronous trainers sample with earlier weights than those that score. By how many versions is `rollout/staleness`, from the tags of the rows.

The probe never ends a run: whatever fails in it is logged with its cause and counted in `tether/probe/failed`.

The rows are read from the TransferQueue. A key is `{uid}_{session}_{index}`: a prompt, one of its rollouts, and the index of an output where a
rollout gave several. The reward of a session is that of its last output. Fields come back as nested tensors, one entry per key.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from pydantic import Field
from ray.exceptions import RayError
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tether.core.config import Settings
from tether.core.errors import BadInput, TetherError
from tether.diagnostics.logger import TetherLogger, generation_metrics
from tether.diagnostics.monitor import Health, Monitor, step_record
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.settings import AlarmRules
from tether.integrations.rows import Row, rows_as_generations

_LOG = logging.getLogger(__name__)
FAILURES = (
    TetherError,
    RayError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What reading, scoring or writing may raise. Observing must not end somebody's run, so all of it is caught, here alone."""
FAILED, STALENESS = "tether/probe/failed", "rollout/staleness"


@dataclass(frozen=True, slots=True)
class Session:
    """One rollout of a prompt."""

    uid: str
    reward: float
    length: int
    """Tokens of its last output."""
    version: int | None
    """Of the weights that began it; None where verl does not say."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One rollout with its tokens."""

    session: Session
    row: Row


def uid_of(key: str) -> str:
    """The prompt of a key."""
    return key.rsplit("_", 2)[0]


def last_outputs(keys: list[str]) -> list[int]:
    """The place of each session's last output among the keys, in the order in which sessions first appear."""
    found: dict[str, tuple[int, int]] = {}
    for place, key in enumerate(keys):
        parts = key.rsplit("_", 2)
        if len(parts) != 3 or not parts[2].isdigit():
            raise BadInput(f"'{key}' is not a key of verl's trajectories; expected uid_session_index")
        session, index = f"{parts[0]}_{parts[1]}", int(parts[2])
        if session not in found or index > found[session][0]:
            found[session] = index, place
    return [place for _, place in found.values()]


def read_rewards(batch: Any) -> list[Session]:
    """The reward of every session of a batch; a batch without rewards is refused."""
    places = last_outputs(list(batch.keys))
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])
    scores = data.get("rm_scores", None)
    if scores is None:
        raise BadInput(
            "the trajectories have no rm_scores when the batch is sampled: the reward must be computed in the rollout "
            "(an agent loop that sets reward_score, or verl's reward loop), not after sampling"
        )
    versions = [batch.tags[place].get("min_global_steps") for place in places]
    found = zip(keys, _entries(scores), versions, strict=True)
    return [Session(uid_of(key), float(row.sum()), len(row), version) for key, row, version in found]


def read_rows(batch: Any) -> list[SessionRow]:
    """The tokens of every session of a batch."""
    sessions = read_rewards(batch)
    places = last_outputs(list(batch.keys))
    keys = [batch.keys[place] for place in places]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["prompts", "responses", "response_mask"])
    columns = (_entries(data[name]) for name in ("prompts", "responses", "response_mask"))
    rows = []
    for session, prompt, response, mask in zip(sessions, *columns, strict=True):
        row = Row(session.uid, tuple(prompt.tolist()), tuple(response.tolist()), tuple(bool(flag) for flag in mask.tolist()), None, None)
        rows.append(SessionRow(session, row))
    return rows


def _entries(tensor: Any) -> list[Any]:
    """One tensor per key, whatever form the queue gave them: nested, a list, or equally long rows."""
    if getattr(tensor, "is_nested", False):
        return list(tensor.unbind())
    return list(tensor)


class ProbeSettings(Settings):
    """The options of `sampler_kwargs.probe`."""

    every: Annotated[int, Field(ge=0)] = 5
    """Steps between two measurements; the alarms are checked at every step."""
    out: str | None = None
    """A run folder to write."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.05
    contexts: Annotated[int, Field(ge=1)] = 32
    pattern: str | None = None
    """Where the reasoning is; None: between think tags."""
    seed: int = 0


class ActorScorer:
    """log p of reasonings after prompts, by verl's actor workers, in micro-batches no larger than those of verl's own log-probs.

    verl divides rows equally between its data-parallel ranks and, without dynamic batches, into whole micro-batches, so the last row is repeated until
    it can. With dynamic batches a row that exceeds the token limit would raise on one rank while the others wait for it: it is refused here.
    """

    def __init__(self, worker_group: Any, config: Any, rows_at_once: int = 64) -> None:
        """`config` is verl's `actor_rollout_ref`."""
        self._workers, self._rows_at_once = worker_group, rows_at_once
        rollout = config.rollout
        self._micro = None if config.actor.use_dynamic_bsz else int(rollout.log_prob_micro_batch_size_per_gpu)
        self._longest = int(rollout.log_prob_max_token_len_per_gpu) if config.actor.use_dynamic_bsz else None

    def score_all(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """[reasonings, prompts]; prompt and reasoning of every pair go through the actor together, at temperature 1."""
        longest = max(map(len, prompts)) + max(map(len, reasonings))
        if self._longest is not None and longest > self._longest:
            raise BadInput(
                f"a prompt and a reasoning of the probe have {longest} tokens together; verl's actor takes {self._longest}: raise "
                "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
            )
        pairs = [(prompt, reasoning) for reasoning in reasonings for prompt in prompts]
        whole = self._ranks() * (self._micro or 1)
        at_once = whole * math.ceil(self._rows_at_once / whole)
        scores: list[float] = []
        for start in range(0, len(pairs), at_once):
            scores += self._score(pairs[start : start + at_once], whole)
        return np.array(scores, dtype=np.float64).reshape(len(reasonings), len(prompts))

    def _ranks(self) -> int:
        """Data-parallel ranks of the actor; verl asks its workers once, too."""
        known = self._workers._dispatch_info
        if "actor" not in known:
            known["actor"] = self._workers._query_dispatch_info("actor")
        return int(max(known["actor"])) + 1

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], whole: int) -> list[float]:
        """`whole`: rows of one micro-batch on every rank."""
        count = len(pairs)
        padded = [*pairs, *[pairs[-1]] * (-count % whole)]
        longest_prompt, longest = (max(len(pair[side]) for pair in padded) for side in (0, 1))
        ids = torch.zeros(len(padded), longest_prompt + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, reasoning) in enumerate(padded):
            start = longest_prompt - len(prompt)  # prompts are padded on the left, responses on the right
            tokens = torch.tensor([*prompt, *reasoning])
            ids[row, start : start + len(tokens)], mask[row, start : start + len(tokens)] = tokens, 1
        data = tu.get_tensordict(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "prompts": ids[:, :longest_prompt],
                "responses": ids[:, longest_prompt:],
                "response_mask": mask[:, longest_prompt:],
            }
        )
        data = left_right_2_no_padding(data)
        tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0)
        try:
            output = self._workers.compute_log_prob(data)
        except Exception as failure:  # whatever a worker raised: this measurement fails, with its cause
            raise TetherError(f"verl's actor could not score {len(padded)} rows: {_cause(failure)}") from failure
        found = no_padding_2_padding(tu.get(output, "log_probs"), data)
        inside = mask[:, longest_prompt:]
        sums: list[float] = (found.double().cpu() * inside).sum(1)[:count].tolist()
        return sums


def _cause(failure: Exception) -> str:
    """What failed, in a line; Ray wraps what a worker raised into its traceback."""
    origin = getattr(failure, "cause", None) or failure
    return f"{type(origin).__name__}: {str(origin).strip().splitlines()[0] if str(origin).strip() else 'no message'}"


class VerlProbe:
    """Watches a V1 trainer of verl."""

    def __init__(self, trainer: Any, settings: ProbeSettings) -> None:
        self._trainer, self._settings = trainer, settings
        self._rule = ReasoningRule(settings.pattern)
        self._step = 0
        self._rows: list[SessionRow] = []
        self._failed: dict[str, float] = {}
        self._monitor: Monitor | None = None
        self._logger: TetherLogger | None = None
        self._told: set[str] = set()
        self.health: Health | None = None

    def attach(self) -> None:
        """Measure whenever the trainer computes the old log-probs."""
        compute = self._trainer._compute_old_log_prob

        def with_probe(batch: Any, metrics: dict[str, Any]) -> Any:
            done = compute(batch, metrics)
            metrics.update(self.observe())
            return done

        self._trainer._compute_old_log_prob = with_probe

    def remember(self, step: int, batch: Any) -> None:
        """The rows of the step's first batch, before it is filtered."""
        if step == self._step:
            self._tell("a step of verl is several updates here (parameter_sync_step): the probe observes the batch of the first")
            return
        self._step, self._rows, self._failed = step, [], {}
        try:
            self._rows = read_rows(batch)
        except FAILURES as failure:
            self._failed = self._fail(failure)

    def observe(self) -> dict[str, float]:
        """Measure the remembered rows, once; returns the metrics for verl's log."""
        rows, self._rows, metrics, self._failed = self._rows, [], self._failed, {}
        if rows:
            try:
                metrics = self._measure(rows)
            except FAILURES as failure:
                metrics = self._fail(failure)
        return metrics

    def _fail(self, failure: Exception) -> dict[str, float]:
        _LOG.warning("the probe failed at step %s, training goes on: %s", self._step, _cause(failure))
        return {FAILED: 1.0}

    def _measure(self, rows: list[SessionRow]) -> dict[str, float]:
        monitor, tokenizer = self._begin(), self._trainer.tokenizer
        found = rows_as_generations(
            [each.row for each in rows],
            [each.session.uid for each in rows],
            [each.session.reward for each in rows],
            None,
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            self._rule,
        )
        metrics = generation_metrics(found)
        versions = [each.session.version for each in rows if each.session.version is not None]
        if versions:
            metrics[STALENESS] = float(np.mean([self._step - 1 - version for version in versions]))
        columns: dict[str, Any] = rollout_rows(found.groups)
        columns["successes"] = None
        work = 4 * sum(len(each.row.prompt_ids) + len(each.row.completion_ids) for each in rows)
        health = self.health = monitor.observe(self._step, **columns, metrics=metrics, work=work)
        if metrics.get(STALENESS, 0.0) > 0 and health.information:
            health.notes.append(
                "the rollouts come from earlier weights than those of the actor, which scores them (an asynchronous trainer): information is that "
                f"of the present policy on older reasoning; {STALENESS} is by how many versions"
            )
        record = step_record(self._step, metrics, health)
        for note in record.notes:
            self._tell(note)
        if self._logger is not None:
            self._logger.write(found, record)
        failed = any(values.get("failed") for values in health.metrics.values())
        return {FAILED: float(failed), **{f"tether/{name}": value for name, value in record.metrics.items()}}

    def _begin(self) -> Monitor:
        """The monitor, made at the first step: the actor's workers are there by then."""
        if self._monitor is None:
            trainer, chosen, threshold = self._trainer, self._settings, self._trainer.config.trainer.v1.sampler.max_off_policy_threshold
            if chosen.out is not None:
                self._logger = TetherLogger(chosen.out, tokenizer=trainer.tokenizer, about={"trainer": "verl"}, resume=True)
            rules = AlarmRules()
            rules = rules.model_copy(update={"staleness": max(rules.staleness, threshold or math.inf)})  # what was asked for is no alarm
            self._monitor = Monitor(
                ActorScorer(trainer.actor_rollout_wg, trainer.config.actor_rollout_ref),
                every=chosen.every,
                budget=chosen.budget,
                contexts=chosen.contexts,
                seed=chosen.seed,
                tokenizer=trainer.tokenizer,
                scopes=["trajectory"],
                rules=rules,
            )
        return self._monitor

    def _tell(self, text: str) -> None:
        """Say it once."""
        if text not in self._told:
            _LOG.warning(text)
        self._told.add(text)
