"""Probes: a few tokens through a model in two ways, to find out whether the faster one computes the same.

What an architecture's code does cannot be read off its config. So each fast implementation is tried once per model against the module, and
is used only where the two agree to within rounding. A probe never ends a run: whatever it raises becomes the reason why the slower
implementation is used (`attempt`); only running out of memory is raised again.

In float32 the two are compared with each other. In half precision that comparison says little: the module itself, with the real weights of
SmolLM2-135M in bfloat16, is 0.02 (relative root mean square) away from its own float32 computation over ordinary words, and 0.43 over
the special tokens that begin its vocabulary. So there both are held against the module's computation in float32, and the fast one may not
be clearly worse than the module (`disagreement`). Now and then a model has a token whose hidden state is huge, and one rounding on the way decides
where it ends: one such token can be farther off than all others together, in either computation, so the worst eighth of the tokens does not count.
The float32 computation needs no second copy of the model: `float32_parts` widens the weights of one part at a time.

Positions are spread up to the last one that the run may use (`probe_positions`): some architectures change their attention only past the
length they were first trained with.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PROBE_TOKENS = 24
"""Enough for positions and attention to matter."""
EXACT = 1e-3
"""In float32, the largest difference that is taken for rounding, as a share of the largest value."""
WORSE, FLOOR = 2.0, 0.01
"""In half precision the fast implementation's error may be WORSE times the module's own, plus FLOOR: see `disagreement`."""
NOT_COUNTED = 8
"""One token in so many, those with the largest errors. What a mistake in half precision spoils is more: a part of the positions, or a kernel's tile."""
HALF_TYPES = (torch.bfloat16, torch.float16)
PROBE_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,  # NotImplementedError and CUDA errors are subclasses
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,  # triton is missing
)
"""What a model, a kernel or a compiler raises that does not fit; triton's own errors are added where triton is loaded."""

T = TypeVar("T")


def attempt(compute: Callable[[], T]) -> tuple[T | None, str]:
    """What a probe returns and no reason, or None and the error in words. Running out of memory says nothing about a model: it is raised."""
    try:
        return compute(), ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        errors: Any = sys.modules.get("triton.errors")  # only a process that has loaded triton can see one of them
        if not isinstance(error, PROBE_ERRORS) and not (errors is not None and isinstance(error, errors.TritonError)):
            raise
        return None, error_in_words(error)


def reason_against(probe: Callable[[], str]) -> str:
    """The reason that a probe gives, or what it raised; "" where there is none."""
    reason, raised = attempt(probe)
    return raised or reason or ""


def error_in_words(error: BaseException) -> str:
    """Example: "RuntimeError: Expected query, key, and value to have the same dtype"."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__


def probe_ids(model: PreTrainedModel, count: int) -> Tensor:
    """A short text [1, count] of words from all over the model's vocabulary; the first words are often special tokens."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return ((torch.arange(count, device=model.device) * max(1, vocabulary // count) + vocabulary // 3) % vocabulary)[None]


def probe_positions(max_positions: int) -> list[int]:
    """Ascending positions from 0 to the last one: the first third are neighbours, the last third too, the others are spread between them.

    >>> probe_positions(5), probe_positions(1000)[7:11], probe_positions(1000)[-9:-6]
    ([0, 1, 2, 3, 4], [7, 8, 148, 289], [991, 992, 993])
    """
    count = min(PROBE_TOKENS, max_positions)
    if count < PROBE_TOKENS:
        return list(range(count))
    third = PROBE_TOKENS // 3
    first, last = third, max_positions - third - 1
    spread = [first + round(n * (last - first) / (third - 1)) for n in range(third)]
    return [*range(third), *spread, *range(max_positions - third, max_positions)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout inside the block, as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def widened(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block the weights of some modules are float32 copies; afterwards the very tensors from before are back.

    Only `.data` changes: optimisers keep their parameters, and memory that others refer to by address stays where it was.
    """
    kept = [
        (tensor, tensor.data)
        for part in parts
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if tensor.dtype in HALF_TYPES
    ]
    try:
        for tensor, data in kept:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def float32_parts(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes in float32, whatever its weights are stored in.

    The weights of each part are widened for the length of its own call, so the extra memory is that of the largest part. An embedding is a
    lookup, which is exact in any precision: only its output is widened, because its table may be the largest part of a model.
    """
    handles = []
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            handles.append(part.register_forward_hook(lambda module, inputs, output: output.float()))
        elif any(tensor.dtype in HALF_TYPES for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            open_blocks: list[Any] = []

            def widen(module: nn.Module, inputs: Any, blocks: list[Any] = open_blocks) -> None:
                blocks.append(widened([module]))
                blocks[-1].__enter__()

            def restore(module: nn.Module, inputs: Any, output: Any, blocks: list[Any] = open_blocks) -> None:
                blocks.pop().__exit__(None, None, None)

            handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def disagreement(fast: Tensor, module: Tensor, exact: Callable[[], Tensor], dtype: torch.dtype) -> str:
    """Why two results are not the same up to rounding; "" where they are.

    Args:
        fast: what the fast implementation computed.
        module: what the module's own code computed, in its own precision.
        exact: computes what the module's code gives in float32; asked only in half precision.
        dtype: the precision.
    """
    if fast.shape != module.shape:
        return f"gives shape {tuple(fast.shape)} where the module gives {tuple(module.shape)}"
    if dtype not in HALF_TYPES:
        return float32_disagreement(fast, module)
    reference = exact().float()
    ours, theirs = _relative_rms(fast, reference), _relative_rms(module, reference)
    # Twice: two ways to round the same formula have errors of the same size (on a CPU, where both do the same operations, SmolLM2-135M and
    # random Llama, Qwen2 and Qwen3 shapes have a ratio of 1.00). Wrong rotations or missing ones are 9 to 40 times as far off in bfloat16. A small
    # mistake (a scale off by 2%: 1.85 times) would pass here; `probe_backbone` finds it, because it compares the formula in float32 first.
    # The floor is for models whose own error is near zero.
    if ours <= WORSE * theirs + FLOOR:
        return ""
    return f"differs from float32 by {ours:.2g} where the module differs by {theirs:.2g}"


def disagreement_with(model: nn.Module, fast: Tensor, compute: Callable[[], Tensor], dtype: torch.dtype) -> str:
    """`disagreement` of a fast result with what `compute` makes of the model's own code."""

    def in_float32() -> Tensor:
        with float32_parts(model):
            return compute()

    return disagreement(fast, compute(), in_float32, dtype)


def float32_disagreement(fast: Tensor, module: Tensor) -> str:
    """Why two float32 results are not the same up to rounding; "" where they are."""
    fast, module = fast.float(), module.float()
    # Against the largest value: what rounding does to one of them depends on the size of all.
    difference = float((fast - module).abs().max()) / max(1.0, float(module.abs().max()))
    return "" if difference <= EXACT else f"differs from the module by {difference:.2g} in float32"


def _relative_rms(found: Tensor, reference: Tensor) -> float:
    """Of the tokens that count; not a number where any error is none."""
    squares_S = (found.float() - reference).square().flatten(end_dim=-2).mean(dim=1)
    if not bool(squares_S.isfinite().all()):
        return float("nan")
    counted_S = squares_S.sort().values[: len(squares_S) - len(squares_S) // NOT_COUNTED]
    return float(counted_S.mean().sqrt()) / max(float(reference.square().mean().sqrt()), 1e-30)
