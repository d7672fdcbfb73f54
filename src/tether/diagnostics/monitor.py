"""`Monitor`: measures a run's reasoning every few steps and checks its alarms every step, inside any training loop.

    monitor = Monitor(model, every=5, tokenizer=tokenizer)
    health = monitor.observe(step, prompts=prompts, reasonings=reasonings, groups=prompt_ids, rewards=rewards)
    for alarm in health.new_alarms:
        print(alarm.sentence())

The monitor takes the unfiltered batch, before the update, as plain sequences with one row per turn. The first turn is always measured: its
columns are the step's prompts. Other scopes (pairs.py) are measured in addition. A budget bounds the cost: it is a share of the work of the
steps between two measurements. Both are counted in tokens computed, not in seconds, because the same seed must give the same numbers on a
slow day. A token that diagnosis computes is the cheapest kind (many at a time, no gradient), so a share of the tokens bounds the share of
the time. Where the budget is short, fewer reasonings are scored (all prompts stay columns, so means over reasonings stay unbiased), or fewer
contexts in the other scopes.

A fixed probe takes the place of the step's own prompts in the first turn: the same prompts at every measurement, sampled by the caller when
the monitor asks for it. Its sampling counts into the budget, and the change since its first measurement has a paired interval (probe.py).

Kept between steps and handed over for the checkpoint: the running spread of the z-scores, the run's start on the regime plane, the number of
contexts of the other scopes and of reasonings of the probe, so that their numbers compare over the run, and the probe's first measurement.
The alarm history is not part of it; a resumed run rebuilds it from its records with `replay`. A measurement that fails is on the record with
its cause.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tether.algorithms.filters.scores import sample_variance
from tether.algorithms.filters.select import Selection
from tether.core.alarms import Alarm, Severity
from tether.core.enums import Regime, Scope
from tether.core.errors import BadInput, TetherError
from tether.core.evidence import FEWEST_PROMPTS, FEWEST_REASONINGS, Start, recorded_evidence
from tether.core.reasoning import Verdict, judge
from tether.core.seeding import derive_seed, generator
from tether.core.types import Group
from tether.diagnostics.alarms.repetition import repetition_metrics
from tether.diagnostics.alarms.tracker import AlarmTracker
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.image_dependence import ImageDependence, measure_images
from tether.diagnostics.information import Information, measure_information
from tether.diagnostics.logger import TetherLogger, agreed_value, generation_metrics, read_generations
from tether.diagnostics.pairs import (
    Pairs,
    ProbeRows,
    Rows,
    TokensOrText,
    encoded,
    first_turn_pairs,
    probe_pairs,
    read_rows,
    rollout_rows,
    trajectory_pairs,
    turn_pairs,
)
from tether.diagnostics.probe import FixedProbe
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.sampling import sample_reasonings, sampling_error
from tether.diagnostics.scorer import resolve_scorer
from tether.diagnostics.settings import AlarmRules
from tether.models.hardware import memory_boundary
from tether.runs.schema import StepRecord

NO_MEMORY = "lower diagnosis.budget or set diagnosis.every=0"
RESAMPLES = 1000
"""Of the intervals and of the p-values; they cost milliseconds."""
FEWEST_PER_PROMPT, FEWEST_CONTEXTS = 2, 8
"""Measured whatever the budget is: below this the numbers mean nothing. The first turn also scores as many as a verdict needs."""
LEARNING_PASSES = 3
"""A forward pass, and a backward pass of twice its cost."""
FOREVER = 2**40
"""More steps than any run has."""

SECTIONS = {Scope.FIRST_TURN: "information", Scope.TRAJECTORY: "information_trajectory", Scope.TURN: "information_turn"}
"""The section in which the metrics of a scope are logged."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the measurements of a step: the reasoning, or the tool calls, of the turns of a scope."""

    scope: Scope
    of_calls: bool = False

    @property
    def name(self) -> str:
        return f"calls_{self.scope}" if self.of_calls else str(self.scope)

    @property
    def section(self) -> str:
        return SECTIONS[self.scope].replace("information", "information_calls") if self.of_calls else SECTIONS[self.scope]


_VALUES = (
    "retrieval_acc",
    "chance",
    "mi",
    "mi_seq",
    "mi_token_mean",
    "mi_zscore",
    "mi_zscore_ema",
    "h_conditional",
    "h_marginal",
    "h_conditional_seq",
    "h_marginal_seq",
    "retrieval_p_value",
    "mi_p_value",
)
_WITH_INTERVAL = ("retrieval_acc", "mi", "mi_seq", "h_conditional")


@dataclass(frozen=True, slots=True)
class Health:
    """The result of one observation. Where a scope could not be measured, a note says why."""

    information: dict[Scope, Information] = field(default_factory=dict)
    """Empty where no measurement was due."""
    regime: Regime | None = None
    """Of the first turn; None where the verdict gives none: too few prompts to tell, above all."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Section to values, for the step's metrics: what was measured, what was computed for the alarms, and the number of alarms."""
    notes: list[str] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    """The alarms that stand at this step, earliest first."""
    new_alarms: list[Alarm] = field(default_factory=list)
    """Those of them that begin at this step."""
    verdict: Verdict | None = None
    """Whether the reasoning depends on its prompt (tether.core.reasoning), by the first turn; None where it was not measured."""
    calls: dict[Scope, Information] = field(default_factory=dict)
    """As `information`, of tool calls in the place of the reasoning; empty where there are none."""


def step_record(step: int, metrics: Mapping[str, float], health: Health) -> StepRecord:
    """The record of a step: its numbers, and in words what was out of the ordinary."""
    values = {**metrics, **{f"{section}/{name}": value for section, named in health.metrics.items() for name, value in named.items()}}
    notes = [*health.notes, *(alarm.sentence() for alarm in health.new_alarms)]
    regime = None if health.regime is None else str(health.regime)
    return StepRecord(step, values, regime, notes, [alarm.to_json() for alarm in health.alarms])


def step_work(sampled: Sequence[Group], trained: Sequence[Group], epochs: int) -> int:
    """The work of a step in tokens through the model: once in the rollout, three times per epoch for what is trained on."""
    return _tokens(sampled) + LEARNING_PASSES * epochs * _tokens(trained)


class Monitor:
    """Information at a cadence, and alarms at every step."""

    def __init__(
        self,
        scorer: Any,
        *,
        every: int = 1,
        scopes: Sequence[Scope | str] = (),
        budget: float = 1.0,
        contexts: int = 32,
        probe_prompts: int = 0,
        probe_samples: int = 4,
        seed: int = 0,
        tokenizer: Any = None,
        rules: AlarmRules | None = AlarmRules(),  # noqa: B008  (immutable)
        pattern: str | None = None,
        out: str | Path | None = None,
        about: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        """A monitor at the start of a run.

        Args:
            scorer: anything that `tether.cross_score` takes: a Hugging Face causal LM, an object with `.score(prompt, reasoning)`, a function of
                both; or a name: of a model that `tether.load_model` knows, or the address of an OpenAI-compatible server.
            every: steps between two measurements of information; 0 measures never and checks the alarms only.
            scopes: measured in addition to the first turn: `trajectory`, `turn`.
            budget: the largest share of the steps' work that measuring may take; see `observe(work=...)`.
            contexts: columns of the other scopes, at most.
            probe_prompts: prompts of a fixed probe, on which the first turn is measured, see `observe(probe=...)`; 0: the step's own prompts.
            probe_samples: reasonings for each prompt of the probe, at most.
            seed: of everything that is drawn.
            tokenizer: needed where prompts or reasonings are texts, and to find repeated text in token ids.
            rules: the parameters of the alarms; None raises no alarms.
            pattern: where the reasoning is in `observe(responses=...)`: a regular expression with one group; None takes the think tags.
            out: a run folder to write, with the files of Tether's own runs, for `tether report` and `tether diagnose`.
            about: what the run is, for its report; "model" names the model that `tether diagnose` scores with.
            resume: continue an existing run folder, its alarm history included; restore the rest with `restore`.
        """
        if every < 0 or not 0 < budget <= 1 or contexts < 1:
            raise BadInput(f"every is {every}, budget {budget}, contexts {contexts}; give every >= 0, 0 < budget <= 1, contexts >= 1")
        self.scorer, tokenizer = resolve_scorer(scorer, tokenizer)
        self._every, self._budget, self._seed, self._tokenizer = every, budget, seed, tokenizer
        self._rule = ReasoningRule(pattern)
        others = [Scope(scope) for scope in scopes]
        self._scopes = [Scope.FIRST_TURN, *(scope for scope in others if scope is not Scope.FIRST_TURN)]
        self._most_contexts = contexts
        self._contexts = {str(scope): contexts for scope in self._scopes}
        self._probe = FixedProbe(probe_prompts, probe_samples, FEWEST_PER_PROMPT) if probe_prompts else None
        self._sigma_ema: dict[str, float] = {}
        self._start: Start | None = None
        self._tracker = None if rules is None else AlarmTracker(rules)
        self._resumed = False
        self.logger: TetherLogger | None = None
        if out is not None:
            described = dict(about or {})
            model = str(described.pop("model", "") or getattr(getattr(scorer, "config", None), "name_or_path", "") or "") or None
            self.logger = TetherLogger(out, tokenizer=tokenizer, model=model, about=described, pattern=pattern, resume=resume)
            records = self.logger.store.steps()
            self._resumed = bool(records)
            self.replay((record.step, record.metrics) for record in records)

    def is_due(self, step: int) -> bool:
        """Whether information is measured: at the first step, and every `every` steps after it."""
        return self._every > 0 and (step - 1) % self._every == 0

    def observe(
        self,
        step: int,
        *,
        prompts: Sequence[TokensOrText],
        reasonings: Sequence[TokensOrText | None] | None = None,
        responses: Sequence[TokensOrText] | None = None,
        groups: Sequence[Hashable],
        rewards: Sequence[float] | None = None,
        successes: Sequence[bool] | None = None,
        trajectories: Sequence[Hashable] | None = None,
        selection: Selection | None = None,
        metrics: Mapping[str, float] | None = None,
        work: float = math.inf,
        probe: Callable[[int], ProbeRows] | None = None,
        calls: Sequence[TokensOrText | None] | None = None,
    ) -> Health:
        """Observe one step: measure information if it is due, place the run on the regime plane, and check the alarms.

        Call it at every step, with the whole batch before any filter, one row per turn.

        Args:
            step: its number, from 1.
            prompts: everything the model saw before each reasoning, as token ids or as text.
            reasonings: the reasoning of each row, as token ids or as text; empty or None where there is none.
            responses: in place of reasonings: whole responses, which are cut at their think tags (or by `pattern`).
            groups: the id of each row's group: rows with the same first prompt.
            rewards: the return of each row's trajectory.
            successes: whether each row's trajectory solved its task.
            trajectories: which rows are turns of one episode, in order; by default every row is an episode of its own.
            selection: what `select_groups` made of these rows, for the run folder and the metrics of the groups.
            metrics: numbers of the step that are known already, under their names in core/metrics.toml, such as "rollout/response_tokens". The
                alarms read them; what is missing is computed from the rows where it can be.
            work: the tokens that the step computes without the monitor, which `budget` is a share of: those of the rollout, and three times
                those trained on. By default there is no bound.
            probe: samples the fixed probe with the current policy, so many reasonings for each of its prompts. It is called only where a
                measurement is due, with the number that the budget allows; needed where the monitor has `probe_prompts`.
            calls: the tool calls of each row, beside its reasoning; empty or None where there are none. Measured like the reasoning, in
                `Health.calls` and the sections "information_calls...".
        """
        if calls is not None and (responses is not None or len(calls) != len(prompts)):
            got = "responses" if responses is not None else f"{len(prompts)} prompts and {len(calls)} calls"
            raise BadInput(f"calls stand beside reasonings, one for each row; got {got}")
        if (probe is None) != (self._probe is None):
            got = "Monitor has no probe_prompts" if self._probe is None else "observe has no probe"
            raise BadInput(f"{got}; give probe_prompts to Monitor and probe to every observe, or neither")
        if self._resumed:  # steps from here on are made again
            self.forget(step, step + FOREVER)
            self._resumed = False
        known, found = dict(metrics or {}), None
        if responses is not None or self.logger is not None:
            found = read_generations(
                prompts=prompts,
                groups=groups,
                responses=responses,
                reasonings=reasonings,
                rewards=rewards,
                successes=successes,
                trajectories=trajectories,
                tokenizer=self._tokenizer,
                rule=self._rule,
            )
            known = generation_metrics(found, selection) | known
        if found is not None and responses is not None:
            read: dict[str, Any] = rollout_rows(found.groups)
            prompts, reasonings, groups, trajectories = (read[name] for name in ("prompts", "reasonings", "groups", "trajectories"))
            rewards, successes = (read["rewards"] if rewards is not None else None), (read["successes"] if successes is not None else None)
        if reasonings is None:
            raise BadInput("give reasonings or responses; responses are cut at their think tags")
        rows = read_rows(prompts, reasonings, groups, trajectories, self._tokenizer)
        health = Health()
        if self.is_due(step):
            called = None
            if calls is not None:
                ids = [() if text is None else encoded(text, self._tokenizer, f"calls[{row}]") for row, text in enumerate(calls)]
                called = dataclasses.replace(rows, reasonings=ids)
            verdict = self._measure_all(step, rows, called, work, health, probe, known)
            health = dataclasses.replace(health, verdict=verdict, regime=verdict.regime if verdict else None)
        if self._tracker is not None:
            for name, value in self._computed(rows, known, prompts, reasonings, rewards, successes).items():
                section, _, short = name.partition("/")
                health.metrics.setdefault(section, {})[short] = value
            measured = {f"{section}/{name}": value for section, values in health.metrics.items() for name, value in values.items()}
            alarms = self._tracker.add(step, known | measured)
            health.metrics["alarms"] = {str(severity): sum(alarm.severity is severity for alarm in alarms) for severity in Severity}
            health = dataclasses.replace(health, alarms=alarms, new_alarms=self._tracker.new_alarms)
        if found is not None and self.logger is not None:
            self.logger.write(found, step_record(step, known, health), selection)
        return health

    def replay(self, records: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Rebuild the alarm history of a resumed run from the (step, metrics) that it recorded; leave out steps that were rolled back."""
        if self._tracker is not None:
            self._tracker.replay(records)

    def forget(self, first: int, last: int) -> None:
        """Remove the rolled-back steps `first` to `last`, both included, from the alarm history."""
        if self._tracker is not None:
            self._tracker.forget(first, last)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {
            "sigma_ema": dict(self._sigma_ema),
            "start": dataclasses.asdict(self._start) if self._start else None,
            "contexts": dict(self._contexts),
            "probe": self._probe.state() if self._probe else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self._sigma_ema = {str(name): float(value) for name, value in state["sigma_ema"].items()}
        self._start = Start(**state["start"]) if state["start"] else None
        self._contexts |= {str(name): min(self._most_contexts, int(count)) for name, count in state["contexts"].items()}
        if self._probe is not None and state.get("probe"):  # checkpoints of before there was a probe hold none
            self._probe.restore(state["probe"])

    def _measure_all(
        self,
        step: int,
        rows: Rows,
        calls: Rows | None,
        work: float,
        health: Health,
        probe: Callable[[int], ProbeRows] | None,
        known: Mapping[str, float],
    ) -> Verdict | None:
        """Measure every scope into `health`, the calls after the reasoning; returns the verdict on the reasoning of the first turn."""
        left, verdict = self._budget * self._every * work, None
        parts = [(_Part(scope), rows) for scope in self._scopes]
        parts += [(_Part(scope, of_calls=True), calls) for scope in self._scopes if calls is not None]
        for place, (part, measured) in enumerate(parts):
            budget = max(0.0, left) / (len(parts) - place)  # an unspent share passes on to those that follow
            values: dict[str, float] = {"num_reasonings": 0, "num_prompts": 0, "num_empty": 0, "failed": 0}
            health.metrics[part.section] = values
            is_verdict = part == _Part(Scope.FIRST_TURN)
            # What the machine or an environment fails at is on the record, with its cause; rows that make no sense are the caller's, and raise.
            sampled: ProbeRows | None = None
            try:
                if self._probe is not None and probe is not None and is_verdict:
                    sampled = probe(self._probe.affordable_samples(rows, known.get("rollout/response_tokens"), budget, health.notes))
            except TetherError as failure:
                _fail(part, failure, health)
                continue
            pairs = self._affordable(part, step, measured, budget) if sampled is None else self._read_probe(sampled, values, health.notes)
            left -= values.get("probe_tokens_sampled", 0)
            values.update(num_reasonings=len(pairs.reasonings), num_prompts=len(pairs.prompts), num_empty=pairs.num_empty)
            if not pairs.reasonings:
                what = "a tool call" if part.of_calls else "reasoning"
                health.notes.append(f"diagnosis ({part.name}): none of {pairs.num_empty} responses holds {what}; nothing to measure")
                continue
            if len(set(pairs.source)) < 2:  # a probe has further columns, but one prompt says nothing about how prompts differ
                what = "every tool call" if part.of_calls else "all reasoning"
                missing = f"{what} of the step comes from one prompt; there is no other prompt to compare with"
                health.notes.append(f"diagnosis ({part.name}): {missing}")
                continue
            left -= pairs.cost
            try:
                information, error, seen = self._measure(part, step, pairs)
            except TetherError as failure:
                _fail(part, failure, health)
                continue
            (health.calls if part.of_calls else health.information)[part.scope] = information
            values.update({**_metrics(information), **seen.metrics}, sampling_error=error)
            if is_verdict:
                # From the metrics that go on record: a report reads the same verdict from them.
                evidence = recorded_evidence({f"information/{name}": value for name, value in values.items()}, "The scorer")
                if evidence is not None:
                    self._start = self._start or evidence.start
                    verdict = judge(evidence, self._start)
                if self._probe is not None:
                    rng = generator("diagnosis", self._seed, step, "change")
                    values.update(self._probe.change(step, pairs, information, RESAMPLES, rng, health.notes))
        return verdict

    def _read_probe(self, sampled: ProbeRows, values: dict[str, float], notes: list[str]) -> Pairs:
        """The pairs of the probe; its errors and its cost go into `values`."""
        notes.extend(sampled.notes)
        rows = read_rows(sampled.prompts, sampled.reasonings, range(len(sampled.prompts)), tokenizer=self._tokenizer)
        pairs, tokens = probe_pairs(rows), sampled.tokens_sampled
        if tokens is None:
            tokens = sum(map(len, (*rows.prompts, *rows.reasonings)))
        scored = pairs.cost if pairs.reasonings else 0
        values.update(probe_errors=sampled.errors, probe_tokens_sampled=tokens, probe_tokens_scored=scored)
        return pairs

    def _affordable(self, part: _Part, step: int, rows: Rows, budget: float) -> Pairs:
        """The pairs of a measurement, as many as the budget allows."""
        if part.scope is not Scope.FIRST_TURN:
            return self._draw_contexts(part, step, rows, budget)
        pairs = first_turn_pairs(rows)
        if pairs.cost <= budget:
            return pairs
        affordable = (budget - sum(map(len, pairs.prompts))) / (len(pairs.prompts) * float(np.mean(pairs.lengths)))
        fewest = FEWEST_PER_PROMPT * len(pairs.prompts)
        if len(pairs.prompts) >= FEWEST_PROMPTS:  # else there is no verdict, however many reasonings there are
            fewest = max(fewest, FEWEST_REASONINGS)
        count = min(len(pairs.reasonings), max(fewest, int(affordable)))
        return pairs.only(sample_reasonings(pairs.source, count, self._rng(part, step)))

    def _draw_contexts(self, part: _Part, step: int, rows: Rows, budget: float) -> Pairs:
        """Draw contexts; where they cost too much, draw fewer, now and at every later step, so that the steps compare."""
        draw = trajectory_pairs if part.scope is Scope.TRAJECTORY else turn_pairs
        most = self._contexts.setdefault(part.name, self._most_contexts)
        pairs = draw(rows, most, self._rng(part, step))
        if pairs.cost <= budget:
            return pairs
        # k contexts of a tokens and k x k reasonings of b tokens: k a + k^2 b = budget
        a, b = float(np.mean([len(prompt) for prompt in pairs.prompts])), float(np.mean(pairs.lengths))
        count = max(FEWEST_CONTEXTS, int((math.sqrt(a * a + 4 * b * budget) - a) / (2 * b)))
        self._contexts[part.name] = min(count, most)
        return draw(rows, self._contexts[part.name], self._rng(part, step))

    def _rng(self, part: _Part, step: int) -> np.random.Generator:
        return generator("diagnosis", self._seed, step, part.name)

    def _measure(self, part: _Part, step: int, pairs: Pairs) -> tuple[Information, float, ImageDependence]:
        """The information of these pairs, the standard error that leaving reasonings out adds to MI-Seq-Est, and what the images tell."""
        with memory_boundary("diagnosis", NO_MEMORY):
            scores = cross_score(self.scorer, pairs.prompts, pairs.reasonings)
            own = scores[np.arange(len(scores)), pairs.source]
            # Not by step: a probe is compared with itself, so the same other images are lent every time.
            seed = derive_seed("images", self._seed, part.name)
            seen = measure_images(self.scorer, pairs.prompts, pairs.reasonings, pairs.source, own, resamples=RESAMPLES, seed=seed)
        information = measure_information(
            scores,
            pairs.lengths,
            pairs.source,
            sigma_ema=self._sigma_ema.get(part.name),
            bootstrap=RESAMPLES,
            permutations=RESAMPLES,
            seed=derive_seed("resampling", self._seed, step, part.name),
        )
        self._sigma_ema[part.name] = information.sigma_ema
        return information, sampling_error(own - np.logaddexp.reduce(scores, axis=1), pairs.population), seen

    def _computed(
        self,
        rows: Rows,
        known: Mapping[str, float],
        prompts: Sequence[TokensOrText],
        reasonings: Sequence[TokensOrText | None],
        rewards: Sequence[float] | None,
        successes: Sequence[bool] | None,
    ) -> dict[str, float]:
        """The metrics that the alarms read, that are not known, and that follow from the rows."""
        found: dict[str, float] = {}
        if rewards is not None and "groups/rv_mean" not in known and rows.trajectories:
            by_group: dict[Hashable, list[float]] = {}
            for group, reward in zip(rows.groups, _per_trajectory(rewards, rows, "rewards"), strict=True):
                by_group.setdefault(group, []).append(reward)
            found["groups/rv_mean"] = float(np.mean([sample_variance(np.array(members)) for members in by_group.values()]))
        if successes is not None and "rollout/success" not in known and rows.trajectories:
            found["rollout/success"] = float(np.mean(_per_trajectory(successes, rows, "successes")))
        written = [row for row, reasoning in enumerate(rows.reasonings) if reasoning]
        if written and "rollout/reasoning_tokens" not in known:
            found["rollout/reasoning_tokens"] = float(np.mean([len(rows.reasonings[row]) for row in written]))
        readable = self._tokenizer is not None or all(isinstance(reasonings[row], str) for row in written)
        if self._tracker is not None and readable and "rollout/repeated_text" not in known:
            texts = ((self._text(reasonings[row]), self._text(prompts[row])) for row in written)
            counted = repetition_metrics(texts, self._tracker.rules.repeated_part)
            found |= {f"rollout/{name}": value for name, value in counted.items()}
        return found

    def _text(self, value: TokensOrText | None) -> str:
        if isinstance(value, str):
            return value
        if self._tokenizer is None or value is None:
            return ""
        return str(self._tokenizer.decode(list(value), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _fail(part: _Part, failure: TetherError, health: Health) -> None:
    """Put a measurement that failed on the record, with its cause."""
    health.metrics[part.section]["failed"] = 1
    health.notes.append(f"diagnosis ({part.name}) failed: {failure}")


def _metrics(information: Information) -> dict[str, float]:
    values = {name: getattr(information, name) for name in _VALUES}
    values.update({f"recall_{k}": value for k, value in information.recall.items()})
    for name in _WITH_INTERVAL:
        values[f"{name}_low"], values[f"{name}_high"] = information.intervals[name]
    return values


def _per_trajectory(values: Sequence[float], rows: Rows, name: str) -> list[float]:
    """One value per trajectory; all of its rows must agree."""
    if len(values) != len(rows.prompts):
        raise BadInput(f"one row per turn: got {len(rows.prompts)} prompts and {len(values)} {name}; give equally many")
    return [agreed_value(values, turns, name) for turns in rows.trajectories]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(sequence.num_tokens for group in groups for trajectory in group.trajectories for sequence in trajectory.sequences)
