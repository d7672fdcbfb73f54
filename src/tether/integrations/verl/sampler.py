"""`TetherReplayBuffer`: verl's sampler with Tether's group filter, and the place where the probe is attached.

    trainer.v1.sampler.custom_sampler.path=pkg://tether.integrations.verl.sampler
    trainer.v1.sampler.custom_sampler.name=TetherReplayBuffer
    +trainer.v1.sampler.sampler_kwargs.reward_variance_filtering.strategy=top_p
    +trainer.v1.sampler.sampler_kwargs.reward_variance_filtering.top_p=0.9

verl gives a custom sampler neither `algorithm.filter_groups` (DAPO's filter, which samples again) nor `sync_refill_failed_groups`; this one takes both
from the trainer's config, so they work as without it: what they leave is what Tether's filter ranks.

verl samples a batch of finished groups; the filter ranks them by the rewards of their sessions, removes the dropped ones from the TransferQueue and
hands on the rest. A shorter batch is padded by verl with rows of zero loss. verl cannot train on an empty batch: where the filter would keep nothing
(no group varies), every group is kept and `tether/groups/nothing_kept` says so; GRPO's advantages are then zero by themselves. Validation is
never filtered. The option names are those of verl's pull request 7894 by the paper's author, and those of `GroupFilter`.
"""

import logging
from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.config import validate
from tether.core.errors import BadInput, did_you_mean
from tether.integrations.verl.probe import ProbeSettings, VerlProbe, read_rewards, uid_of

_LOG = logging.getLogger(__name__)
FILTER, PROBE = "reward_variance_filtering", "probe"
_OPTIONS = ("enable", "strategy", "top_p", "top_k", "include_zero", "ddof", "selection_eps", "score", "order", "band")


def filter_of(options: Mapping[str, Any] | None) -> GroupFilter | None:
    """The filter that `sampler_kwargs.reward_variance_filtering` asks for."""
    if options is None or not options.get("enable", True):
        return None
    for name in options:
        if name not in _OPTIONS:
            raise BadInput(f"unknown option '{name}' of {FILTER}: {did_you_mean(str(name), _OPTIONS)}")
    if int(options.get("ddof", 1)) != 1:
        raise BadInput(f"ddof of {FILTER} is {options['ddof']}; Tether ranks by the sample variance, ddof 1")
    strategy = str(options.get("strategy", "top_p"))
    band = options.get("band")
    if strategy == "top_k" and options.get("top_k") is None:
        raise BadInput(f"strategy top_k of {FILTER} needs top_k, the number of groups to keep")
    asked = {
        "strategy": strategy,
        "keep": float(options.get("top_p", 0.9)),
        "num_groups": int(options["top_k"]) if strategy == "top_k" else None,
        "include_zero": bool(options.get("include_zero", False)),
        "eps": float(options.get("selection_eps", 0.01)),
        "score": str(options.get("score", "reward_variance")),
        "order": str(options.get("order", "largest")),
        "band": None if band is None else (float(band[0]), float(band[1])),
    }
    return validate(GroupFilter, asked, "filter")


def _own_options(trainer: Any) -> dict[str, Any]:
    """What verl's trainer gives its own samplers and not a custom one."""
    if trainer is None:
        return {}
    metric = trainer._resolve_filter_groups_metric()
    refill = bool(trainer.config.trainer.v1.sampler.get("sync_refill_failed_groups", False))
    if metric is None and not refill:
        return {}
    return {
        "filter_groups_metric": metric,
        "sync_refill_failed_groups": refill,
        "train_batch_size": trainer.config.data.train_batch_size,
        "gen_batch_size": 1,  # so verl's data loader, too, where groups are replaced
        "max_inflight_gen_batches": trainer.config.algorithm.filter_groups.get("max_inflight_gen_batches", 1) if metric else 1,
    }


class _Filtering:
    """What both samplers do after verl's own has chosen a batch."""

    modes: tuple[str, ...]
    """The values of `trainer_mode` that the sampler is for."""

    def __init__(self, *args: Any, trainer_mode: str, **kwargs: Any) -> None:
        if trainer_mode not in self.modes:
            right = TetherReplayBuffer if trainer_mode in TetherReplayBuffer.modes else TetherReplayBufferAsync
            raise BadInput(
                f"{type(self).__name__} is not the sampler of trainer_mode '{trainer_mode}'; set custom_sampler.name={right.__name__}"
            )
        trainer = getattr(kwargs.get("refill_fn"), "__self__", None)
        super().__init__(*args, **{"trainer_mode": trainer_mode, **_own_options(trainer), **kwargs})
        options = dict(getattr(self, "sampler_kwargs", None) or {})
        self.group_filter = filter_of(options.get(FILTER))
        self._ratios: list[float] = []
        if self.group_filter is not None and self.group_filter.column not in (None, "lengths"):
            raise BadInput(f"score {self.group_filter.score} is not known to verl's sampler; use one of the rewards, or length")
        self.probe: VerlProbe | None = None
        if options.get(PROBE) is not None:
            if trainer is None:
                raise BadInput("the probe needs verl's trainer, which hands the sampler its refill_fn; this verl does not")
            self.probe = VerlProbe(trainer, validate(ProbeSettings, dict(options[PROBE]), PROBE))
            self.probe.attach()

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's batch without the dropped groups."""
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val" or (self.group_filter is None and self.probe is None):
            return batch, metrics
        if self.probe is not None:
            self.probe.remember(global_steps, batch)
        if self.group_filter is None:
            return batch, metrics
        sessions = read_rewards(batch)
        uids = [session.uid for session in sessions]
        lengths = {"lengths": [float(session.length) for session in sessions]} if self.group_filter.column == "lengths" else {}
        rewards = [session.reward for session in sessions]
        selection = self.group_filter.select(rewards, uids, lengths, earlier_ratios=self._ratios)
        self._ratios = [*self._ratios, selection.rv_ratio][-self.group_filter.auto_steps :]
        metrics = {
            **metrics,
            "tether/groups/rv_mean": selection.rv_mean,
            "tether/groups/rv_ratio": selection.rv_ratio,
            "tether/groups/kept_ratio": selection.kept_ratio,
            "tether/groups/zero_variance": selection.zero_variance,
            "tether/groups/nothing_kept": float(not selection.kept),
        }
        if not selection.kept:
            _LOG.warning(
                "no group of step %s has reward variance: all %s groups are kept, their advantages are zero", global_steps, len(set(uids))
            )
            return batch, metrics
        kept = set(selection.kept)
        dropped = [key for key in batch.keys if uid_of(key) not in kept]
        if dropped:
            tq.kv_clear(partition_id=partition_id, keys=dropped)
        staying = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if uid_of(key) in kept]
        return KVBatchMeta(partition_id=partition_id, keys=[key for key, _ in staying], tags=[tag for _, tag in staying]), metrics


class TetherReplayBuffer(_Filtering, ReplayBuffer):
    """The sampler of `trainer_mode: sync`."""

    modes = ("sync",)


class TetherReplayBufferAsync(_Filtering, ReplayBufferAsync):
    """The sampler of the asynchronous trainers."""

    modes = ("colocate_async", "separate_async")
