"""The cost of a step, measured: seconds and peak memory of every stage, tokens per second, and the share of the device's peak.

Stages may be nested; time and memory count for the innermost one only, so the seconds add up to no more than the step took. A stage ends
with a wait for the device, because queued work would otherwise count for the next stage. Operations are those that the work requires
(6 x parameters x tokens in training, 2 x in sampling, and attention on top): the head counts for tokens whose log-probs are computed, a prompt
that several sequences share counts once where it is computed once, and recomputation and padding, which count for nothing, lower the share. No
stage can be faster than the device: one that is shows that the peak was measured on a busy machine, and is the peak from then on.
"""

import dataclasses
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tether.core.protocols import EngineStatistics
from tether.core.types import Group
from tether.models.critic import Critic
from tether.models.hardware import measured_peak, synchronise
from tether.runs.timings import StepTimings
from tether.training.totals import UpdateWork

UNUSED_SHARE = 0.1
"""Of a card: cached blocks beyond this are given back before an update, where less than this is free."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of models of which a token meets only some parameters."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What it takes to put tokens through a model."""

    multiplied: int
    """Parameters that every token is multiplied with: all but the head, and a table of words that is only looked up."""
    trained: int
    """Those of them that get a gradient."""
    attention: int
    """Layers x query heads x width of a head."""
    head: int = 0
    """Parameters of the language head, which only tokens are multiplied with whose log-probs are asked for."""
    trains_head: bool = True

    def forward(self, spans: Iterable[tuple[int, int]], targets: int) -> int:
        """Operations of a forward pass over stretches of texts, each from one position up to another: two for each product."""
        tokens = pairs = 0  # pairs: positions that the tokens look at, their own included
        for start, end in spans:
            tokens += end - start
            pairs += (end * (end + 1) - start * (start + 1)) // 2
        return 2 * self.multiplied * tokens + 2 * self.head * targets + 4 * self.attention * pairs

    def training(self, work: UpdateWork) -> int:
        """Operations of a forward and a backward pass: the backward pass multiplies once for what came in, and once for every weight that
        is trained."""
        head = (6 if self.trains_head else 4) * self.head * work.targets
        return (4 * self.multiplied + 2 * self.trained) * work.tokens + head + 12 * self.attention * work.pairs


def arithmetic_of(model: PreTrainedModel, *, with_head: bool = True) -> Arithmetic | None:
    """What the model's own numbers say; without the language head for a critic's backbone. None for mixtures of experts."""
    config = model.config.get_text_config()
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not heads or not width or any(getattr(config, name, None) for name in EXPERTS):
        return None
    looked_up, head = (getattr(module, "weight", None) for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    kept = [parameter for parameter in model.parameters() if parameter is not looked_up and parameter is not head]
    head = head if with_head else None
    head_dim = getattr(config, "head_dim", None) or width // heads
    return Arithmetic(
        multiplied=sum(parameter.numel() for parameter in kept),
        trained=sum(parameter.numel() for parameter in kept if parameter.requires_grad),
        attention=config.num_hidden_layers * heads * head_dim,
        head=0 if head is None else head.numel(),
        trains_head=head is not None and head.requires_grad,
    )


def fed_spans(groups: Iterable[Group]) -> list[tuple[int, int]]:
    """The stretches of text that sampling these groups puts through a model; members that begin with the same prompt share it."""
    spans = []
    for group in groups:
        begun: set[tuple[int, ...]] = set()
        for trajectory in group.trajectories:
            for number, sequence in enumerate(trajectory.sequences):
                prompt = tuple(trajectory.turns[0].context_ids) if number == 0 else ()
                spans.append((len(prompt) if prompt in begun else 0, sequence.num_tokens))
                begun |= {prompt} if prompt else set()
    return spans


class StartTimer:
    """Measures the parts of a run's start, up to its first rollout."""

    def __init__(self, **seconds: float) -> None:
        """`seconds`: parts that were measured before."""
        self.seconds = seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The time of the block counts for this part."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


class StepTimer:
    """Measures the stages of a run's steps, one step after the other."""

    def __init__(
        self, model: PreTrainedModel, critic: Critic | None = None, *, num_devices: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        """`num_devices`: the ranks that share the work. Tokens and operations are those of all; seconds and memory are this rank's. `dtype`: what
        the model computes in, where its weights are held in another."""
        self._device = model.device
        self.peak = num_devices * measured_peak(model.device, dtype or model.dtype)
        self._policy = arithmetic_of(model)
        self._critic = arithmetic_of(critic.policy.module, with_head=False) if critic is not None and not critic.shared else None
        self._open: list[str] = []
        self._since = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self._seconds: dict[str, float] = {}
        self._memory: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._operations: dict[str, int] = {}
        self._engine: dict[str, float] = {}
        self._background: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time and memory of the block count for this stage."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def count_background(self, name: str, seconds: float) -> None:
        """Work that was done beside the stages and ended in this step."""
        if seconds:
            self._background[name] = self._background.get(name, 0.0) + seconds

    def count_engine(self, statistics: EngineStatistics) -> None:
        """Add what the engine counted in a round of the rollout."""
        for name, value in dataclasses.asdict(statistics).items():
            self._engine[name] = self._engine.get(name, 0) + value

    def count_rollout(self, groups: Sequence[Group]) -> None:
        """The rollout of the step sampled these, in all its rounds."""
        self._tokens["rollout"] = sum(t.num_sampled for group in groups for t in group.trajectories)
        if self._policy is not None:
            self._operations["rollout"] = self._policy.forward(fed_spans(groups), self._tokens["rollout"])

    def count_update(self, num_tokens: int, work: UpdateWork) -> None:
        """The update learned from sequences of so many tokens, and put this through the policy for that; a critic gets the same."""
        self._tokens["update"] = num_tokens
        if self._policy is not None:
            parts = [self._policy, *([self._critic] if self._critic is not None else [])]
            self._operations["update"] = sum(part.training(work) for part in parts)

    def timings(self) -> StepTimings:
        """What the step cost so far."""
        seconds = self._background | self._seconds  # with asynchronous rollouts, sampling is no stage
        rates = {stage: tokens / seconds[stage] for stage, tokens in self._tokens.items() if seconds.get(stage)}
        speeds = {stage: operations / self._seconds[stage] for stage, operations in self._operations.items() if self._seconds.get(stage)}
        self.peak = max(self.peak, *speeds.values()) if speeds else self.peak
        shares = {stage: speed / self.peak for stage, speed in speeds.items()}
        return StepTimings(
            seconds=dict(self._seconds),
            tokens_per_second=rates.get("rollout"),
            update_tokens_per_second=rates.get("update"),
            share_of_peak=shares,
            peak_memory=dict(self._memory),
            unused_memory=unused_memory(self._device),
            engine=dict(self._engine),
            background=dict(self._background),
        )

    def _settle(self) -> None:
        """Put down what came since the last border to the stage that it belongs to."""
        synchronise(self._device)
        now = time.perf_counter()
        if self._open:
            stage = self._open[-1]
            self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._since
            self._memory[stage] = max(self._memory.get(stage, 0), _peak_memory(self._device))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._since = now


def _peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on a card since the last border; elsewhere the most the process ever took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return taken if sys.platform == "darwin" else 1024 * taken


def unused_memory(device: torch.device) -> int | None:
    """Bytes that torch has taken from a card and that no tensor uses: cached blocks and the gaps between tensors. None elsewhere."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def release_unused_memory(device: torch.device) -> None:
    """Empty torch's cache where it holds much of a card that is nearly full, so that what does not come from torch finds room too."""
    unused = unused_memory(device)
    if unused is None:
        return
    free, total = torch.cuda.mem_get_info(device)
    if unused > UNUSED_SHARE * total and free < UNUSED_SHARE * total:
        torch.cuda.empty_cache()
