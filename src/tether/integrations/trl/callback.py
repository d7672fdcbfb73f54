"""`TetherCallback`: information, regime and alarms inside TRL, on the policy's own forward passes.

    trainer = TetherGRPOTrainer(..., callbacks=[TetherCallback(every=5, out="runs/mine", stop_on=["critical"])])

Measured on the unfiltered rows of a generation batch, before the update, so the model that scores the reasoning is the one that wrote it; no second
model is loaded. The numbers go into TRL's log (and so to every tracker of `report_to`) under their names in docs/metrics.md, and, with
`out`, into a Tether run folder. All processes share the scoring and come to the same result, so that all of them stop together.
"""

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from tether.algorithms.filters.select import Selection
from tether.core.alarms import AlarmName, Severity
from tether.core.enums import Scope
from tether.core.errors import BadInput, did_you_mean
from tether.diagnostics.alarms.repetition import rollout_repetition
from tether.diagnostics.logger import Generations, TetherLogger, generation_metrics
from tether.diagnostics.monitor import LEARNING_PASSES, Health, Monitor, step_record
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.settings import AlarmRules
from tether.integrations.trl.batch import GenerationBatch, as_generations, plain_forward, policy_module
from tether.models.scoring.local import PrefixScorer
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

_LOG = logging.getLogger(__name__)
POLICY = "policy"
STATE = "tether_monitor.json"
"""In a checkpoint of TRL: what the monitor keeps between steps."""

FROM_TRL = {
    "loss": "update/loss",
    "grad_norm": "update/grad_norm",
    "learning_rate": "update/learning_rate",
    "entropy": "update/entropy",
    "kl": "update/kl_reference",
    "clip_ratio/low_mean": "update/clip_low",
    "clip_ratio/high_mean": "update/clip_high",
}
"""Numbers of TRL's log that Tether's catalogue has, too."""


class TetherCallback(TrainerCallback):
    """Watches a `TetherGRPOTrainer` (or a subclass of one's own with `TetherMixin`)."""

    def __init__(
        self,
        *,
        every: int = 5,
        out: str | Path | None = None,
        scorer: Any = POLICY,
        scopes: Sequence[Scope | str] = (Scope.TRAJECTORY,),
        budget: float = 0.05,
        contexts: int = 32,
        rules: AlarmRules | None = AlarmRules(),  # noqa: B008  (immutable)
        stop_on: Iterable[str] = (),
        pattern: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """The defaults are those of Tether's own trainer.

        Args:
            every: generation batches between two measurements of information; the alarms are checked at each.
            out: a run folder to write, for `tether report` and `tether diagnose`; None writes none.
            scorer: `policy`, or anything that `tether.Monitor` takes: a frozen model, the name of one, a server.
            scopes: measured beside the first turn.
            budget: the largest share of the work, in tokens computed, that measuring may take.
            contexts: columns of the other scopes, at most.
            rules: the parameters of the alarms; None raises none.
            stop_on: names or severities of alarms that end training, with a checkpoint.
            pattern: a regular expression whose one group is the reasoning of a completion; None takes the text between think tags.
            about: what the run is, for its report.
        """
        known = [*AlarmName, *Severity]
        self._stop_on = set(stop_on)
        for name in self._stop_on:
            if name not in known:
                raise BadInput(f"stop_on holds '{name}', which is no alarm: {did_you_mean(str(name), known)}")
        self._every, self._out, self._scorer, self._scopes = every, None if out is None else Path(out), scorer, tuple(scopes)
        self._budget, self._contexts, self._rules, self._about = budget, contexts, rules, dict(about or {})
        self._rule = ReasoningRule(pattern)
        self._trainer: Any = None
        self._logger: TetherLogger | None = None
        self.monitor: Monitor | None = None
        self.health: Health | None = None
        """Of the latest generation batch."""
        self.stopped: str | None = None
        """The alarm that ended training, in words."""
        self._records: dict[int, StepRecord] = {}
        self._steps_between = 1
        self._told: set[str] = set()

    def attach(self, trainer: Any) -> None:
        """Called by the trainer before it trains."""
        self._trainer = trainer

    # ----------------------------------------------------------------------------------------------- what TRL calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise BadInput(
                "TetherCallback needs a trainer that shows it the completions: use tether.integrations.trl.TetherGRPOTrainer in place of "
                "GRPOTrainer, or put TetherMixin before your own class"
            )
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        updates = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps
        self._steps_between = int(updates) if updates >= 1 and updates == int(updates) else 1
        scorer = PolicyScorer(trainer) if isinstance(self._scorer, str) and self._scorer == POLICY else self._scorer
        self.monitor = Monitor(
            scorer,
            every=self._every * self._steps_between,
            scopes=self._scopes,
            budget=self._budget,
            contexts=self._contexts,
            seed=args.seed,
            tokenizer=tokenizer,
            rules=self._rules,
        )
        self.stopped, self._records = None, {}
        if state.global_step:
            self._continue(args, state)
        if self._out is not None and state.is_world_process_zero:
            name = str(getattr(trainer.model.config, "_name_or_path", "") or "") or None
            about = {"trainer": f"TRL {type(trainer).__name__}", "algorithm": trainer.loss_type, "seed": args.seed, **self._about}
            settings = {"trl": json.loads(args.to_json_string())}
            resume = bool(state.global_step)
            self._logger = TetherLogger(self._out, tokenizer=tokenizer, model=name, about=about, settings=settings, resume=resume)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None and state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if folder.is_dir():
                (folder / STATE).write_text(json.dumps(self.monitor.state()), encoding="utf-8")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped is not None:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add TRL's own numbers to the record of the step, where a logged step has one."""
        record = self._records.get(state.global_step)
        if record is None or self._logger is None or not logs:
            return
        known = {
            FROM_TRL[name]: float(value) for name, value in logs.items() if name in FROM_TRL and value is not None and np.isfinite(value)
        }
        if known:
            self._records[state.global_step] = record = StepRecord(
                record.step, {**record.metrics, **known}, record.regime, record.notes, record.alarms
            )
            self._logger.amend(record)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._logger is not None:
            ended = f"stopped early after step {state.global_step}: {self.stopped}" if self.stopped else f"{state.global_step} steps done"
            self._logger.finish(ended)

    # --------------------------------------------------------------------------------------------- what the trainer calls

    def observe(self, trainer: Any, batch: GenerationBatch, selection: Selection | None) -> None:
        """Measure and check one generation batch, before the filter and before the update."""
        assert self.monitor is not None
        step = trainer.state.global_step + 1
        if step in self._records:
            self._tell(
                "several generation batches make one optimiser step here (steps_per_generation is below gradient_accumulation_steps): "
                "the first of each step is observed"
            )
            return
        start = time.perf_counter()
        found = as_generations(batch, self._decode, self._rule)
        metrics = generation_metrics(found, selection)
        metrics["rollout/errors"] = sum(len(group.errored) for group in found.groups)
        if self._rules is not None:
            metrics |= {f"rollout/{name}": value for name, value in rollout_repetition(found.groups, self._rules.repeated_part).items()}
        rows: dict[str, Any] = rollout_rows(found.groups)
        if not found.has_successes:
            rows["successes"] = None
        tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in batch.rows)
        work = tokens * (1 + LEARNING_PASSES * trainer.num_iterations) / self._steps_between
        health = self.health = self.monitor.observe(step, **rows, metrics=metrics, work=work)
        self._records = {step: step_record(step, metrics, health)}
        seconds = time.perf_counter() - start
        for name, value in {**self._records[step].metrics, "tether/probe_seconds": seconds}.items():
            trainer._metrics["train"][name].append(float(value))
        self._report(trainer, step, found, selection, health, seconds)

    def _report(self, trainer: Any, step: int, found: Generations, selection: Selection | None, health: Health, seconds: float) -> None:
        """Write the run folder, say what is new, and remember an alarm that ends training."""
        for text in (*health.notes, *(alarm.sentence() for alarm in health.new_alarms)):
            self._tell(text)
        ending = next((alarm for alarm in health.alarms if {str(alarm.name), str(alarm.severity)} & self._stop_on), None)
        if ending is not None and self.stopped is None:
            self.stopped = ending.sentence()
            self._tell(f"training stops after this step: {self.stopped}")
        if self._logger is not None:
            self._logger.write(found, self._records[step], selection)
            self._logger.store.append_timings(step, {"seconds": {"diagnosis": seconds}})

    def _tell(self, text: str) -> None:
        """Say it once, on the main process."""
        if text not in self._told and self._trainer.accelerator.is_main_process:
            _LOG.warning(text)
        self._told.add(text)

    def _decode(self, ids: tuple[int, ...]) -> str:
        return str(self._trainer.processing_class.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _continue(self, args: Any, state: Any) -> None:
        """Take up the monitor of the checkpoint that training continues from, and the alarm history of the run folder."""
        assert self.monitor is not None
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE
        if path.is_file():
            self.monitor.restore(json.loads(path.read_text(encoding="utf-8")))
        else:
            self._tell(f"'{path}' is missing: regimes and z-scores compare with the first measurement from here on")
        if self._out is not None and (self._out / "run.json").is_file():
            earlier = [record for record in RunStore.open(self._out).steps() if record.step <= state.global_step]
            self.monitor.replay((record.step, record.metrics) for record in earlier)


class PolicyScorer:
    """Scores with the model that is trained; the reasonings are divided between the processes.

    A model that is whole on every process is read by Tether's scorer, which computes a prompt once for all reasonings. One that is sharded
    (FSDP, DeepSpeed ZeRO-3) is asked through TRL's own forward, by every process alike.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._prefix: PrefixScorer | None = None

    @property
    def sharded(self) -> bool:
        trainer = self._trainer
        return bool(trainer.is_fsdp_enabled) or (
            trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3
        )

    def score_all(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after every prompt, [reasonings, prompts], at temperature 1."""
        if self.sharded:
            return self.by_forward(prompts, reasonings)
        accelerator = self._trainer.accelerator
        mine = list(range(accelerator.process_index, len(reasonings), accelerator.num_processes))
        module = policy_module(self._trainer)
        with plain_forward(module):
            if self._prefix is None:
                self._prefix = PrefixScorer(module)
            own = self._prefix.score_all(prompts, [reasonings[row] for row in mine]).tolist() if mine else []
        scores = np.empty((len(reasonings), len(prompts)), dtype=np.float64)
        for row, values in gather_object(list(zip(mine, own, strict=True))):
            scores[row] = values
        return scores

    @torch.no_grad()
    def by_forward(self, prompts: Sequence[Sequence[int]], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """The same through TRL's forward, prompt and reasoning together; it computes at the training temperature, which must be 1."""
        trainer = self._trainer
        if trainer.temperature != 1.0:
            raise BadInput(
                f"the temperature is {trainer.temperature}: TRL's forward of a sharded model divides by it, and the scores would not be "
                "log-probs; train at temperature 1 or give the callback a frozen scorer"
            )
        device, batch_size = trainer.accelerator.device, trainer.args.per_device_train_batch_size
        longest = max(map(len, reasonings))
        scores = np.empty((len(reasonings), len(prompts)), dtype=np.float64)
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            for column, prompt in enumerate(prompts):
                ids = torch.zeros(len(reasonings), len(prompt) + longest, dtype=torch.long, device=device)
                mask = torch.zeros_like(ids)
                for row, reasoning in enumerate(reasonings):
                    whole = torch.tensor([*prompt, *reasoning], device=device)
                    ids[row, : len(whole)], mask[row, : len(whole)] = whole, 1
                logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, longest, batch_size=batch_size)
                inside = mask[:, len(prompt) :]
                scores[:, column] = (logps.double() * inside).sum(1).cpu().numpy()
        finally:
            trainer.model.train(was_training)
        return scores
