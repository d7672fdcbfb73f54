"""`TetherGRPOTrainer`: TRL's GRPO trainer with Tether's filter, and the place where its callbacks see the rows.

**What the filter does to the loss.** A dropped group takes no part: its tokens leave the policy, KL and entropy terms together. The loss of a
generation batch is then TRL's own loss of the kept rows alone:

- `dapo`, `cispo`, `vespo` divide by the active tokens of the generation batch: that count is taken over the kept rows.
- `grpo`, `sapo`, `dr_grpo`, `luspo` divide by rows: every kept row weighs (rows / kept rows) times what it weighs in TRL's unfiltered batch.
- `bnpo` averages micro-batches by their own tokens: every one with a kept row weighs (micro-batches / those with a kept row) times as much.

The weight of a row is the same in all accumulation windows of its generation batch, as TRL's own token count is. `loss_scale` multiplies all of
it. Rows are masked, not deleted: TRL splits a generation batch into equal parts, and every process must make the same number of forwards.
An optimiser step without a kept row changes nothing: its gradients are removed, so that neither momentum nor weight decay moves the weights.

Rows of dropped groups are masked by `tool_mask`, because the completion mask is the attention mask, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer

from tether.algorithms.filters.group_filter import GroupFilter
from tether.algorithms.filters.select import Selection, loss_scale
from tether.core.errors import BadInput, did_you_mean
from tether.integrations.trl.batch import GenerationBatch, gather_batch, row_keys
from tether.integrations.trl.callback import TetherCallback
from tether.integrations.trl.config import INDEPENDENT, filter_of

BY_TOKENS, BY_ROWS, BY_MICRO_BATCH = ("dapo", "cispo", "vespo"), ("grpo", "sapo", "dr_grpo", "luspo"), ("bnpo",)
INSTEAD = {
    "RLOOTrainer": "use TetherGRPOTrainer with scale_rewards='none', whose advantages are RLOO's times (num_generations - 1) / num_generations",
    "AsyncGRPOTrainer": f"it scores its completions in a process of its own, away from the weights; use TetherGRPOTrainer, or know that {INDEPENDENT}",
}
"""What to do where a trainer is refused."""
KEPT, WEIGHTS = "tether_kept", "tether_weights"
"""Keys of a micro-batch: which of its rows are kept, and the weights of its terms."""


@dataclass(frozen=True, slots=True)
class TermWeights:
    """What the terms of a micro-batch's loss are multiplied by."""

    policy: float
    """Of the policy and KL terms."""
    entropy: float
    """Of the entropy bonus, which TRL averages by micro-batch whatever the loss type."""
    kept_rows: int
    """Over all processes; 0: the micro-batch gives no gradient."""


class TetherMixin:
    """Put before a `GRPOTrainer` class: `class Mine(TetherMixin, MyGRPOTrainer)`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Other trainers of TRL have other methods and another loss: they are refused when the class is made."""
        super().__init_subclass__(**kwargs)
        if issubclass(cls, Trainer) and not issubclass(cls, GRPOTrainer):
            base = next(each for each in cls.__mro__ if issubclass(each, Trainer) and not issubclass(each, TetherMixin))
            instead = next((INSTEAD[each.__name__] for each in cls.__mro__ if each.__name__ in INSTEAD), INDEPENDENT)
            raise BadInput(f"TetherMixin extends TRL's GRPOTrainer, and {base.__name__} is none: {instead}")
        if issubclass(cls, GRPOTrainer) and cls.__mro__.index(TetherMixin) > cls.__mro__.index(GRPOTrainer):
            raise BadInput(f"{cls.__name__} names TetherMixin behind its trainer, whose methods hide the mixin's; put TetherMixin first")

    def __init__(self, *args: Any, group_filter: GroupFilter | str | None = None, success_reward: str | None = None, **kwargs: Any) -> None:
        """TRL's arguments, and:

        Args:
            group_filter: which groups take part in the loss, as a `GroupFilter` or a text such as "top_p:0.9"; None: what the config says
                (`TetherGRPOConfig`), and without that every group.
            success_reward: the name of the reward function whose value of 1 or more means that the task is solved; for score
                `outcome_variance`, and for success rates. Tether's environments say so themselves.
        """
        super().__init__(*args, **kwargs)
        trainer: Any = self
        asked = filter_of(trainer.args)
        if group_filter is not None and asked is not None:
            raise BadInput("the filter is given twice, as group_filter and as reward_variance_filtering of the config; leave one out")
        self.group_filter = GroupFilter.parse(group_filter) if isinstance(group_filter, str) else group_filter or asked
        if self.group_filter is not None and (foreign := self.group_filter.model_fields_set & {"members", "reweight", "refill"}):
            raise BadInput(f"group_filter sets {', '.join(sorted(foreign))}, which only Tether's own trainer has; leave it out")
        self._tether_ratios: list[float] = []
        name, rewards = success_reward or getattr(trainer.args, "tether_success_reward", None), trainer.reward_func_names
        if name is not None and name not in rewards:
            raise BadInput(f"success_reward is '{name}', which is no reward function here: {did_you_mean(name, rewards)}")
        self._tether_success: int | None = None if name is None else rewards.index(name)
        self._tether_rewards: torch.Tensor | None = None
        self._tether_window: list[int] = []
        self._tether_scale = 1.0
        if self.group_filter is not None:
            owner = next(each for each in type(self).__mro__ if "_compute_loss" in vars(each) and each is not TetherMixin)
            if owner is not GRPOTrainer and owner.__module__.startswith("trl."):
                raise BadInput(
                    f"the filter does not know how {owner.__name__} normalises its loss; leave the filter out, or use GRPOTrainer"
                )
            known = (*BY_TOKENS, *BY_ROWS, *BY_MICRO_BATCH)
            if trainer.loss_type not in known:
                raise BadInput(f"the filter does not know how loss type '{trainer.loss_type}' is normalised; it knows {', '.join(known)}")
            if trainer.use_adaptive_entropy:
                raise BadInput(
                    "the filter does not work with TRL's adaptive entropy: its controller would count dropped rows; set entropy_coef instead"
                )
            trainer.add_callback(_EmptyUpdates(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        for callback in self._tether_callbacks():
            callback.attach(self)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _tether_callbacks(self) -> list[TetherCallback]:
        trainer: Any = self
        return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, TetherCallback)]

    # ------------------------------------------------------------------------------------------------- what TRL calls

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        self._tether_rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        trainer: Any = self
        probes = self._tether_callbacks() if trainer.model.training else []
        active = trainer.model.training and (self.group_filter is not None or bool(probes))
        keys = row_keys(inputs) if active else []
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if not active:
            return output
        assert self._tether_rewards is not None
        batch = gather_batch(
            keys, inputs, output, self._tether_rewards, trainer.reward_weights, self._tether_success, trainer.num_generations
        )
        selection = None
        if self.group_filter is not None:
            selection = self._tether_select(batch, output, self.group_filter)
        for probe in probes:
            probe.observe(trainer, batch, selection)
        if selection is not None:
            self._tether_log(selection, bool(probes))
            self._tether_mask(batch, selection, output)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        trainer: Any = self
        before = trainer._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self.group_filter is not None and trainer.model.training and trainer._buffered_inputs is not before:
            self._tether_weigh(trainer._buffered_inputs)
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        trainer: Any = self
        weights: TermWeights | None = inputs.get(WEIGHTS)
        if weights is None:
            unweighted: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
            return unweighted
        self._tether_window.append(weights.kept_rows)
        # The policy term is weighted through the advantages; these two coefficients reach the other terms. TRL reads them nowhere else.
        beta, coefficient = trainer.beta, trainer.entropy_coef
        trainer.beta, trainer.entropy_coef = beta * weights.policy, coefficient * weights.entropy
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        finally:
            trainer.beta, trainer.entropy_coef = beta, coefficient
        if trainer._metrics["train"].get("entropy_coef"):
            trainer._metrics["train"]["entropy_coef"][-1] = coefficient
        return loss

    # ----------------------------------------------------------------------------------------------------- the filter

    def _tether_select(self, batch: GenerationBatch, output: dict[str, Any], chosen: GroupFilter) -> Selection:
        """Rank the groups of all processes by the rows that have a reward."""
        rows, ids = batch.scored, batch.group_ids
        columns: dict[str, list[float]] = {}
        if chosen.column == "successes":
            if batch.successes is None:
                raise BadInput(
                    f"score {chosen.score} needs to know which completions solve the task; name that reward function with success_reward"
                )
            columns["successes"] = [float(batch.successes[row]) for row in rows]
        elif chosen.column == "lengths":
            columns["lengths"] = [float(sum(batch.rows[row].sampled)) for row in rows]
        elif chosen.column == "entropies":
            everything = self._tether_nll(output)
            columns["entropies"] = [everything[row] for row in rows]
        rewards, groups = [batch.rewards[row] for row in rows], [ids[row] for row in rows]
        selection = chosen.select(rewards, groups, columns, earlier_ratios=self._tether_ratios)
        self._tether_ratios = [*self._tether_ratios, selection.rv_ratio][-chosen.auto_steps :]
        return selection

    def _tether_nll(self, output: dict[str, Any]) -> list[float]:
        """Mean of -log p over the sampled tokens of every row of every process, at the sampling temperature; Tether's estimate of entropy."""
        trainer: Any = self
        logps = output.get("sampling_per_token_logps", output.get("old_per_token_logps"))
        if logps is None:
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            with torch.no_grad():
                logps, _, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, output["completion_ids"].size(1), batch_size=trainer.args.per_device_train_batch_size
                )
        mask = output["completion_mask"] * output.get("tool_mask", torch.ones_like(output["completion_mask"]))
        means = -(torch.nan_to_num(logps) * mask).sum(1) / mask.sum(1).clamp(min=1)
        gathered: list[float] = trainer.accelerator.gather(means.double()).tolist()
        return gathered

    def _tether_log(self, selection: Selection, probed: bool) -> None:
        """The filter's numbers, in TRL's log; the probe's callback logs those of the groups already."""
        trainer: Any = self
        named: dict[str, float] = {"groups/keep": self.group_filter.keep if self.group_filter else 1.0}
        if not probed:
            named |= {
                f"groups/{name}": getattr(selection, name) for name in ("rv_mean", "rv_std", "rv_ratio", "kept_ratio", "zero_variance")
            }
            named |= {"groups/kept": len(selection.kept), "groups/sampled": len(selection.scores)}
        for name, value in named.items():
            trainer._metrics["train"][name].append(float(value))

    def _tether_mask(self, batch: GenerationBatch, selection: Selection, output: dict[str, Any]) -> None:
        """Take the rows of dropped groups out of the loss mask, on this process."""
        trainer: Any = self
        kept = set(selection.kept)
        everywhere = [group in kept for group in batch.group_ids]
        count = len(output["completion_ids"])
        start = trainer.accelerator.process_index * count
        kept_B = torch.tensor(everywhere[start : start + count], device=output["completion_ids"].device)
        output[KEPT] = kept_B
        # Without a word from the user the loss stays the mean over what is kept, as TRL's pull request has it.
        asked = self.group_filter is not None and "loss_scale" in self.group_filter.model_fields_set
        name = self.group_filter.loss_scale if self.group_filter is not None and asked else "none"
        self._tether_scale = loss_scale(name, sum(everywhere) / len(everywhere))
        if all(everywhere):
            return
        tool_mask = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
        output["tool_mask"] = tool_mask * kept_B.unsqueeze(1).to(tool_mask.dtype)
        loss_mask = output["completion_mask"] * output["tool_mask"]
        output["num_items_in_batch"] = trainer.accelerator.gather(loss_mask.sum()).sum()

    def _tether_weigh(self, parts: list[dict[str, Any]]) -> None:
        """Weigh the micro-batches of a new generation batch; TRL has shuffled and split its rows by now."""
        trainer: Any = self
        kept_M = torch.stack([part[KEPT].sum() for part in parts])
        sizes_M = torch.tensor([len(part[KEPT]) for part in parts], device=kept_M.device)
        gathered_WM = trainer.accelerator.gather(kept_M.unsqueeze(0))
        num_kept, num_rows = int(gathered_WM.sum()), int(sizes_M.sum()) * len(gathered_WM)
        filled = gathered_WM.numel() / max(1, int((gathered_WM > 0).sum()))
        by_rows = num_rows / max(1, num_kept)
        kind = trainer.loss_type
        policy = self._tether_scale * (by_rows if kind in BY_ROWS else filled if kind in BY_MICRO_BATCH else 1.0)
        for number, part in enumerate(parts):
            del part[KEPT]
            if policy != 1.0:
                part["advantages"] = part["advantages"] * policy
            part[WEIGHTS] = TermWeights(policy, self._tether_scale * filled, int(gathered_WM[:, number].sum()))


class TetherGRPOTrainer(TetherMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with Tether's filter and callbacks."""


class _EmptyUpdates(TrainerCallback):
    """Removes the gradients of an optimiser step in which no row was kept, so that it changes nothing; the learning rate moves on."""

    def __init__(self, trainer: TetherMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        window, self._trainer._tether_window = self._trainer._tether_window, []
        empty = bool(window) and not any(window)
        trainer: Any = self._trainer
        trainer._metrics["train"]["update/skipped"].append(float(empty))
        if empty:
            for group in kwargs["optimizer"].param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
