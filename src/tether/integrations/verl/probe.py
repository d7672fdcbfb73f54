"""The probe inside verl: information and alarms on the unfiltered batch, scored by the actor before it is updated.

    +trainer.v1.sampler.sampler_kwargs.probe.every=5
    +trainer.v1.sampler.sampler_kwargs.probe.out=runs/verl

The sampler remembers the rows before it filters. The scoring itself runs where verl computes the old log-probs: after sampling, when the rollout
replicas have given up their memory, and before the update. There verl's own worker call, `compute_log_prob`, takes the rows.

The rows are read from the TransferQueue. A key is `{uid}_{session}_{index}`: a prompt, one of its rollouts, and the index of an output where a
rollout gave several. The reward of a session is that of its last output. Fields come back as nested tensors, one entry per key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transfer_queue as tq
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tether.core.errors import BadInput
from tether.diagnostics.logger import TetherLogger, generation_metrics
from tether.diagnostics.monitor import Health, Monitor, step_record
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.integrations.rows import Row, rows_as_generations


@dataclass(frozen=True, slots=True)
class Session:
    """One rollout of a prompt."""

    uid: str
    reward: float
    length: int
    """Tokens of its last output."""


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
    return [Session(uid_of(key), float(row.sum()), len(row)) for key, row in zip(keys, _entries(scores), strict=True)]


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


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """The options of `sampler_kwargs.probe`."""

    every: int = 5
    """Steps between two measurements; the alarms are checked at every step."""
    out: str | None = None
    """A run folder to write."""
    budget: float = 0.05
    contexts: int = 32
    pattern: str | None = None
    """Where the reasoning is; None: between think tags."""
    seed: int = 0


class ActorScorer:
    """log p of reasonings after prompts, by verl's actor workers."""

    def __init__(self, worker_group: Any, rows_at_once: int = 64) -> None:
        self._workers, self._rows_at_once = worker_group, rows_at_once

    def score_all(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """[reasonings, prompts]; prompt and reasoning of every pair go through the actor together, at temperature 1."""
        pairs = [(prompt, reasoning) for reasoning in reasonings for prompt in prompts]
        scores: list[float] = []
        for start in range(0, len(pairs), self._rows_at_once):
            scores += self._score(pairs[start : start + self._rows_at_once])
        return np.array(scores, dtype=np.float64).reshape(len(reasonings), len(prompts))

    def _score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        count = len(pairs)
        workers = max(1, int(getattr(self._workers, "world_size", 1)))
        padded = [*pairs, *[pairs[-1]] * (-count % workers)]  # rows must divide by the number of workers
        longest_prompt, longest = (max(len(pair[side]) for pair in padded) for side in (0, 1))
        ids = torch.zeros(len(padded), longest_prompt + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (prompt, reasoning) in enumerate(padded):
            start = longest_prompt - len(prompt)  # prompts are padded on the left, responses on the right
            whole = torch.tensor([*prompt, *reasoning])
            ids[row, start : start + len(whole)], mask[row, start : start + len(whole)] = whole, 1
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
        found = no_padding_2_padding(tu.get(self._workers.compute_log_prob(data), "log_probs"), data)
        inside = mask[:, longest_prompt:]
        sums: list[float] = (found.double().cpu() * inside).sum(1)[:count].tolist()
        return sums


class VerlProbe:
    """Watches a V1 trainer of verl."""

    def __init__(self, trainer: Any, settings: ProbeSettings, scorer: Any = None) -> None:
        self._trainer, self._settings = trainer, settings
        self._scorer = scorer
        self._rule = ReasoningRule(settings.pattern)
        self._rows: list[SessionRow] = []
        self._monitor: Monitor | None = None
        self._logger: TetherLogger | None = None
        self.health: Health | None = None

    def attach(self) -> None:
        """Measure whenever the trainer computes the old log-probs."""
        compute = self._trainer._compute_old_log_prob

        def with_probe(batch: Any, metrics: dict[str, Any]) -> Any:
            done = compute(batch, metrics)
            metrics.update(self.observe(int(self._trainer.global_steps)))
            return done

        self._trainer._compute_old_log_prob = with_probe

    def remember(self, rows: list[SessionRow]) -> None:
        """The rows of the batch before it is filtered."""
        self._rows = rows

    def observe(self, step: int) -> dict[str, float]:
        """Measure the rows of this step; returns the metrics for verl's log, under "tether/"."""
        if not self._rows:
            return {}
        tokenizer = self._trainer.tokenizer
        if self._monitor is None:
            scorer = self._scorer if self._scorer is not None else ActorScorer(self._trainer.actor_rollout_wg)
            chosen = self._settings
            self._monitor = Monitor(
                scorer,
                every=chosen.every,
                budget=chosen.budget,
                contexts=chosen.contexts,
                seed=chosen.seed,
                tokenizer=tokenizer,
                scopes=["trajectory"],
            )
            if chosen.out is not None:
                self._logger = TetherLogger(chosen.out, tokenizer=tokenizer, about={"trainer": "verl"}, resume=True)
        rows, self._rows = self._rows, []
        found = rows_as_generations(
            [each.row for each in rows],
            [each.session.uid for each in rows],
            [each.session.reward for each in rows],
            None,
            lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            self._rule,
        )
        metrics = generation_metrics(found)
        columns: dict[str, Any] = rollout_rows(found.groups)
        columns["successes"] = None
        work = 4 * sum(len(each.row.prompt_ids) + len(each.row.completion_ids) for each in rows)
        self.health = self._monitor.observe(step, **columns, metrics=metrics, work=work)
        record = step_record(step, metrics, self.health)
        if self._logger is not None:
            self._logger.write(found, record)
        return {f"tether/{name}": value for name, value in record.metrics.items()}
