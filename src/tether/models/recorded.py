"""Passes through a model's layers with gradient, recorded as CUDA graphs: what a small update spends on launching kernels is spent once.

A pass over few tokens launches dozens of kernels a layer, each of which takes the host longer than the card. Recorded, forward and backward are one
launch each. A recording has fixed sizes, so rows get room: padding behind the shared prompts, behind what continues them and behind everything
else, each a text of its own that nothing else sees and that no loss looks at. Sizes come in large steps, the larger the shorter a row is, so that few of
them serve a run; and only passes get room that are so short that launching them takes longer than computing them. A size is recorded when it comes for the second time. The first time its kernels are
launched one by one, on the same row: so what is computed does not depend on what was recorded when, and a resumed run computes the same.

What is recorded are the layers, from embedded tokens to the last norm, with the hooks that move gradients to the optimiser's float32 ones. So these must
keep their places (`prepare`), as the weights do; where one has moved, everything is recorded again. Embedding, head and loss are not recorded. All
recordings share their memory: a backward pass follows its forward pass before another begins.

Shape legend: S tokens of the row with its room, N selected tokens, D width.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.packed_attention import PackedAttention, PackedLengths
from tether.models.hardware import available_memory, sent
from tether.models.logprobs import kept_bytes
from tether.models.packing import FlatBatch
from tether.models.policy import Policy
from tether.models.probing import HALF_TYPES
from tether.models.vision import Embedded

MOST_PRODUCTS = 8e12
"""Tokens x weights of the layers; beyond, a card computes longer than the host launches."""
MOST_RECORDINGS = 64
MEMORY_SHARE = 4
"""Recordings are made where so many times their memory is free."""
SMALLEST, COARSE = 256, 4096
"""Tokens: the smallest size, and up to where sizes are two an octave; beyond they are four."""
ERROR_MODE = "thread_local"
"""Other threads, such as one that writes a checkpoint, may use the card while a pass is recorded."""


class Room(NamedTuple):
    """The sizes of a recorded row; equal sizes share a recording."""

    prompts: int
    """Tokens of shared prompts; 0 where nothing is shared."""
    followers: int
    others: int
    texts: int
    runs: int
    longest: int
    """Bound on the length of a text."""

    @property
    def tokens(self) -> int:
        return self.prompts + self.followers + self.others

    @staticmethod
    def of(micro: FlatBatch) -> "Room":
        """Room for a micro-batch. Shared prompts and what continues them have some left over: padding continues padding."""
        layout = micro.layout
        shared = sum(layout.prompt_lengths), sum(layout.follower_lengths)
        others = micro.num_tokens - sum(shared)
        prompts, followers = (_power_of_2(shared[0] + 1, SMALLEST), rounded_up(shared[1] + 1)) if shared[0] else (0, 0)
        others = rounded_up(others) if others else 0
        longest = max(*layout.text_lengths, prompts - shared[0], followers - shared[1], others)
        texts, runs = len(layout.text_lengths) + 3, len(layout.prompt_lengths) + 1
        return Room(prompts, followers, others, _power_of_2(texts, 64), _power_of_2(runs, 8), _power_of_2(longest, 2048))


def rounded_up(size: int) -> int:
    """The next of 256, 384, 512, 768, ..., 4096, 5120, 6144, 7168, 8192, ...

    >>> [rounded_up(size) for size in (1, 257, 500, 513, 4096, 4097)]
    [256, 384, 512, 768, 4096, 5120]
    """
    step = _power_of_2(size, SMALLEST) // (4 if size <= COARSE else 8)
    return max(SMALLEST, -(-size // step) * step)


def _power_of_2(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


class Row(NamedTuple):
    """A micro-batch with its room, on the host."""

    ids_S: Tensor
    positions_S: Tensor
    texts: list[int]
    """Lengths, padding included."""
    prompts: list[int]
    followers: list[int]
    shift: Callable[[Tensor], Tensor]
    """From places in the row without room to places in this one."""


def laid_out(micro: FlatBatch, ids_BT: Tensor, room: Room) -> Row:
    """A micro-batch in a row of these sizes."""
    layout = micro.layout
    prompts, followers = sum(layout.prompt_lengths), sum(layout.follower_lengths)
    gaps = room.prompts - prompts, room.followers - followers

    def shift(places: Tensor) -> Tensor:
        return places + gaps[0] * (places >= prompts) + gaps[1] * (places >= prompts + followers)

    ids_S, positions_S = (torch.zeros(room.tokens, dtype=torch.long) for _ in range(2))
    places = shift(torch.arange(micro.num_tokens))
    ids_S[places], positions_S[places] = (part.cpu() for part in micro.to_flat(ids_BT))
    waiting, texts, end = iter(layout.text_lengths), [], 0
    for border, gap in ((prompts, gaps[0]), (prompts + followers, gaps[1]), (micro.num_tokens, room.tokens - micro.num_tokens - sum(gaps))):
        while end < border:
            texts.append(next(waiting))
            end += texts[-1]
        texts += [gap] if gap else []
    runs = ([*layout.prompt_lengths, gaps[0]], [*layout.follower_lengths, gaps[1]]) if room.prompts else ([], [])
    return Row(ids_S, positions_S, texts, *runs, shift)


class Recording:
    """Forward and backward pass over rows of one size."""

    def __init__(self, backbone: LlamaBackbone, room: Room, stream: torch.cuda.Stream, pool: Any) -> None:
        """Rows of this size were computed before: their kernels are compiled, loaded and chosen."""
        device, dtype = backbone.model.device, backbone.model.dtype

        def lengths(count: int, longest: int, total: int) -> PackedLengths:
            return PackedLengths((), torch.zeros(count + 1, dtype=torch.int32, device=device), longest, total)

        self._texts = lengths(room.texts, room.longest, room.tokens)
        self._runs = (
            (lengths(room.runs, room.followers, room.followers), lengths(room.runs, room.prompts, room.prompts)) if room.prompts else None
        )
        width = int(backbone.model.config.get_text_config().hidden_size)
        self.states_SD = torch.zeros(room.tokens, width, dtype=dtype, device=device, requires_grad=True)
        self.by_features_SD = torch.zeros_like(self.states_SD, requires_grad=False)
        self._positions_S = torch.zeros(room.tokens, dtype=torch.long, device=device)
        attend = PackedAttention([room.tokens], scale=backbone.scale, device=device)
        attend.texts, attend.shared = self._texts, self._runs
        compute = partial(backbone.features, Embedded(self.states_SD), self._positions_S, attend)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):  # the library takes its memory for this stream before anything is recorded
            small = torch.zeros(16, 16, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.linear(small, small, small[0]).sum().backward()
        torch.cuda.synchronize(device)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.forward.capture_begin(pool=pool, capture_error_mode=ERROR_MODE)
            try:
                features_SD = compute()
            finally:
                self.forward.capture_end()
            self.backward.capture_begin(pool=self.forward.pool(), capture_error_mode=ERROR_MODE)
            try:
                features_SD.backward(self.by_features_SD)
            finally:
                self.backward.capture_end()
        self.features_SD = features_SD.detach()  # the nodes of the pass go: others must not meet them on this stream
        assert self.states_SD.grad is not None
        self.by_states_SD: Tensor = self.states_SD.grad
        self.states_SD.requires_grad_(False).grad = None

    def _lay_out(self, row: Row) -> None:
        self._set(self._texts, row.texts)
        for part, lengths in zip(self._runs or (), (row.followers, row.prompts), strict=False):
            self._set(part, lengths)
        self._positions_S.copy_(row.positions_S.pin_memory(), non_blocking=True)

    @staticmethod
    def _set(part: PackedLengths, lengths: Sequence[int]) -> None:
        """Stretches of these lengths, and empty ones up to the number that was recorded."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        more = ends[-1:].expand(len(part.cumulative) - len(ends))
        part.cumulative.copy_(torch.cat([ends, more]).pin_memory(), non_blocking=True)

    def features(self, backbone: LlamaBackbone, row: Row) -> Tensor:
        """[S, D] with gradient: the last hidden state of every token of a row of this size."""
        self._lay_out(row)
        features_SD: Tensor = _Replayed.apply(backbone.words(sent(row.ids_S, self.states_SD.device)), self)
        return features_SD


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_SD: Tensor, recording: Recording) -> Tensor:
        ctx.recording = recording
        recording.states_SD.copy_(states_SD)
        recording.forward.replay()
        return recording.features_SD.view_as(recording.features_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        recording: Recording = ctx.recording
        recording.by_features_SD.copy_(grads[0])
        recording.backward.replay()
        return recording.by_states_SD, None


class RecordedPasses:
    """The recordings of one model."""

    def __init__(self, policy: Policy, prepare: Callable[[], Sequence[Tensor]]) -> None:
        """`prepare` gives the float32 gradients places that they keep, and returns them; it is called before each recording."""
        self._policy, self._prepare = policy, prepare
        self._recordings: dict[Room, Recording] = {}
        self._seen: Counter[Room] = Counter()
        self._addresses: tuple[int, ...] = ()
        self._stream: torch.cuda.Stream | None = None
        self._num_weights = 0
        self._reason: str | None = None
        self.failure = ""
        """What recording failed with, until somebody says it."""

    @property
    def reason(self) -> str:
        """Why nothing is recorded; "" where passes are."""
        if self._reason is None:
            self._reason = _reason_against(self._policy)
        return self._reason

    def forget(self, reason: str) -> None:
        """Record nothing more, and give back the memory of what was recorded."""
        self._recordings, self._reason = {}, reason

    def features(self, micro: FlatBatch, ids_BT: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """As `logprobs.Passes`; None where a pass is not worth a recording."""
        backbone, device = self._policy.backbone, self._policy.device
        if self.reason or backbone is None or not torch.is_grad_enabled():
            return None
        self._num_weights = self._num_weights or sum(p.numel() for layer in backbone.layers for p in layer.module.parameters())
        room = Room.of(micro)
        if room.tokens * self._num_weights > MOST_PRODUCTS:
            return None
        row = laid_out(micro, ids_BT, room)
        self._seen[room] += 1
        recording = self._recording(backbone, room) if self._seen[room] > 1 else None
        if recording is not None:
            return recording.features(backbone, row), row.shift
        attend = PackedAttention(row.texts, row.prompts, row.followers, scale=backbone.scale, device=device)
        return backbone.features(sent(row.ids_S, device), sent(row.positions_S, device), attend), row.shift

    def _recording(self, backbone: LlamaBackbone, room: Room) -> Recording | None:
        # Where weights and gradients lie; a recording reads and writes there.
        addresses = tuple(tensor.data_ptr() for tensor in (*self._policy.module.parameters(), *self._prepare()))
        if addresses != self._addresses:
            self._recordings, self._addresses = {}, addresses
        if room in self._recordings:
            return self._recordings[room]
        free, needed = available_memory(self._policy.device), kept_bytes(self._policy.module, room.tokens, fused=True)
        if len(self._recordings) == MOST_RECORDINGS or (free is not None and free < MEMORY_SHARE * needed):
            return None
        self._stream = self._stream or torch.cuda.Stream(self._policy.device)  # always the same: the library keeps memory for each
        pool = next((one.forward.pool() for one in self._recordings.values()), None)
        try:
            self._recordings[room] = Recording(backbone, room, self._stream, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's answer to what cannot be recorded
            self.failure = f"updates launch their kernels one by one: a pass could not be recorded ({str(error).splitlines()[0][:120]})"
            self.forget(self.failure)
            return None
        return self._recordings[room]


def _reason_against(policy: Policy) -> str:
    if policy.device.type != "cuda":
        return "not on a card"
    if policy.backbone is None or policy.backbone.through_modules or policy.vision is not None:
        return "the layers are not computed by the family's forward pass alone"
    parameters = [parameter for layer in policy.backbone.layers for parameter in layer.module.parameters()]
    if not all(parameter.requires_grad and parameter.dtype in HALF_TYPES for parameter in parameters):
        return "not all weights of the layers are trained in half precision"
    return ""
