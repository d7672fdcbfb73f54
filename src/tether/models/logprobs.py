"""Log-probabilities and entropies of the tokens a mask selects, with gradient: what the learner trains on.

A micro-batch goes through the backbone once; only the features that predict selected tokens go on, through the vocabulary and, where there is
one, a value head. Models of the Llama family compute a flat row without padding (`Policy.backbone`), others padded rows: padding is on the
right, where causal attention hides it from every real token, so no attention mask is needed. Results of a micro-batch are in the order of its
rows of the batch, token by token: they line up with `field_BT[micro.index_M][mask_BT[micro.index_M]]`.

A batch may lie in host memory while the model is on a card. What a micro-batch needs of it is then chosen on the host and sent, and nothing waits
for the card: choosing tokens by a mask on the card would, because their number has to be known here.

Gradient checkpointing: layers keep only their input during an update and are computed again in the backward pass. The transformers switch for
this works only in training mode, where dropout is on and the gradient is another one. Here every layer's forward is wrapped for the length of
a block (`checkpointed`) and the model stays as it is: the same gradients in less memory, and an engine that runs outside the block notices
nothing. Models of the Llama family have a forward pass of their own that does the same (`LlamaBackbone.features`). What keeping everything
would cost is estimated from the shape of the layers (`kept_bytes`), so that it is done where it fits.

Shape legend: B rows of the batch, M of a micro-batch, T tokens, N selected tokens, D width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.algorithms.batch import Batch
from tether.algorithms.objective import PolicyTokens
from tether.algorithms.presets import Algorithm
from tether.core.errors import BadInput
from tether.core.images import IMAGE_IDS
from tether.models.fast.linear_logprobs import linear_logprobs
from tether.models.hardware import sent
from tether.models.packing import FlatBatch, MicroBatch, flat_batches, micro_batches
from tether.models.policy import Policy

AnyMicroBatch = MicroBatch | FlatBatch
"""Padded rows for the module itself, or a flat row for the family's own forward pass."""
UNFUSED = 1.7
"""Plain torch keeps about so many times what fused kernels keep: copies in float32, and the inputs of every small step."""


class Selected(NamedTuple):
    """The selected tokens of a micro-batch."""

    features_ND: Tensor
    """The last hidden state before each token: it predicts the token, and is the state whose value a critic estimates."""
    targets_N: Tensor
    """The tokens themselves."""


class Passes(Protocol):
    """Passes through a model that were prepared before (recorded.py)."""

    def features(self, micro: FlatBatch, ids_BT: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """The last hidden states of a micro-batch's row, and from places in the row to places among them; None where there is no such pass."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatchTokens:
    """The selected tokens of a micro-batch, to look up fields of its minibatch by."""

    batch: Batch
    positions_N: Tensor
    """Their positions in a flattened [B, T] field."""
    device: torch.device
    """Where the model is."""

    @staticmethod
    def select(batch: Batch, micro: AnyMicroBatch, device: torch.device) -> "MicroBatchTokens":
        index_M = micro.index_M.to(batch.ids_BT.device)
        sequence_N, column_N = batch.loss_mask_BT[index_M].nonzero(as_tuple=True)
        return MicroBatchTokens(batch, index_M[sequence_N] * batch.ids_BT.shape[1] + column_N, device)

    def policy_tokens(self, algorithm: Algorithm, logprobs_N: Tensor, entropy_N: Tensor) -> PolicyTokens:
        """What the loss looks at, for the selected tokens. Old log-probs that a correction asks for and nobody computed are those of this pass."""
        batch = self.batch
        is_old = algorithm.importance_cap is not None and batch.old_logprobs_BT is None
        return PolicyTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            old_N=logprobs_N.detach() if is_old else self.gather(batch.old_BT),
            behavior_N=self.gather(batch.behavior_logprobs_BT),
            advantages_N=self.gather(batch.advantages_BT),
            reference_N=None if batch.reference_BT is None else self.gather(batch.reference_BT),
        )

    def gather(self, field_BT: Tensor | None) -> Tensor:
        """The selected tokens' part of a [B, T] field."""
        assert field_BT is not None  # the estimator of advantages has filled it in
        return sent(field_BT.flatten()[self.positions_N], self.device)


def cut_batch(
    policy: Policy, ids_BT: Tensor, lengths_B: Tensor, max_tokens: int, *, packing: bool = True, share_prompts: bool = True
) -> list[AnyMicroBatch]:
    """Cut a batch into micro-batches in the way that costs the model least.

    Args:
        policy: the model.
        ids_BT: the batch.
        lengths_B: tokens of each row, padding excluded.
        max_tokens: the budget of a micro-batch; one sequence is allowed more.
        packing: False gives every sequence a row of its own, padded to the longest.
        share_prompts: compute what several sequences begin with once, where the model allows it.
    """
    # The probe covered the backbone's positions. A longer sequence goes to the module, which may compute other things there.
    if packing and policy.backbone is not None and max(lengths_B.tolist(), default=0) <= policy.backbone.num_positions:
        return [*flat_batches(ids_BT, lengths_B, max_tokens, share=share_prompts)]
    return [*micro_batches(lengths_B, max_tokens, together=packing and policy.supports_packing)]


def forward(
    policy: Policy,
    ids_BT: Tensor,
    mask_BT: Tensor,
    micro: AnyMicroBatch,
    *,
    recompute: bool = False,
    after_last: bool = False,
    passes: "Passes | None" = None,
) -> Selected:
    """One pass through the backbone over a micro-batch of the batch ids_BT; mask_BT selects tokens.

    The first token of a row has nothing before it and cannot be selected. With `recompute` the backward pass computes the layers again
    instead of keeping what they put out. With `after_last` the place behind a row's last token may be selected too, for its state alone. `passes` that
    are recorded are taken where they fit.
    """
    index_M = micro.index_M.to(ids_BT.device)
    sequence_N, column_N = mask_BT[index_M].nonzero(as_tuple=True)
    if bool((column_N == 0).any()):
        raise ValueError("the mask selects the first token of a row, which nothing predicts")
    if bool((column_N >= torch.tensor(micro.lengths_M, device=ids_BT.device)[sequence_N] + after_last).any()):
        raise ValueError("the mask selects padding: a token beyond the length of its row")
    if isinstance(micro, MicroBatch):
        features_ND = _row_features(policy, ids_BT, micro, (sequence_N, column_N - 1), recompute)
    elif policy.backbone is None:
        raise ValueError(f"models of type '{policy.model_type}' have no pass over flat tokens; cut micro-batches by `cut_batch`")
    elif passes is not None and not recompute and (recorded := passes.features(micro, ids_BT)) is not None:
        features_SD, shift = recorded
        features_ND = rows_at(features_SD, sent(shift(micro.row_positions(sequence_N, column_N - 1)), policy.device))
    else:
        attend = micro.attention(policy.backbone.scale, policy.device)
        places_of = policy.places
        places = None if places_of is None else lambda ids: places_of(ids)[0]
        ids_S, positions_S = (sent(part, policy.device) for part in micro.to_flat(ids_BT, places))
        features_SD = policy.backbone.features(ids_S, positions_S, attend, recompute=recompute)
        features_ND = rows_at(features_SD, sent(micro.row_positions(sequence_N, column_N - 1), policy.device))
    return Selected(features_ND, sent(ids_BT[index_M[sequence_N], column_N], policy.device))


def rows_at(states_SD: Tensor, index_N: Tensor) -> Tensor:
    """Rows, some of them several times, whose gradients are summed in one order always: of the two ways to write it torch has a backward pass that
    sums in the order in which threads come, of an index on a CPU, of index_select on a GPU."""
    return states_SD.index_select(0, index_N) if states_SD.device.type == "cpu" else states_SD[index_N]


def _row_features(policy: Policy, ids_BT: Tensor, micro: MicroBatch, tokens: tuple[Tensor, Tensor], recompute: bool) -> Tensor:
    """Features at (sequence, column), by the module itself, over padded rows."""
    if micro.shares_rows and not policy.supports_packing:
        raise ValueError(f"models of type '{policy.model_type}' do not take shared rows; cut micro-batches with together=False")
    ids_RW, positions_RW = (sent(part, policy.device) for part in micro.to_padded(ids_BT))
    rows_M, starts_M = torch.tensor([part[1:3] for part in micro.slices], device=ids_BT.device).unbind(1)
    # Positions are given only where they say something: a model then builds the general mask, which is slower than the causal one.
    positions = {"position_ids": positions_RW} if micro.shares_rows else {}
    with checkpointed(policy.module) if recompute else nullcontext():  # layers remember for themselves how to be computed again
        features_RWD = policy.features(input_ids=ids_RW, use_cache=False, **positions)
    sequence_N, column_N = tokens
    return rows_at(features_RWD.flatten(0, 1), sent(rows_M[sequence_N] * micro.width + starts_M[sequence_N] + column_N, policy.device))


def logprobs_and_entropy(policy: Policy, features_ND: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log p of each token and entropy of the distribution it came from, at the sampling temperature, in float32."""
    if policy.linear_head is not None:  # the logits of all tokens at once are never held
        return linear_logprobs(features_ND, targets_N, policy.linear_head.weight, policy.linear_head.bias, temperature=temperature)
    logits_NV = policy.logits(features_ND).float() / temperature
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0], entropy_N


@torch.no_grad()
def over_batch(
    policy: Policy,
    ids_BT: Tensor,
    mask_BT: Tensor,
    lengths_B: Tensor,
    max_tokens: int,
    function: Callable[[Selected], Tensor],
    *,
    after_last: bool = False,
) -> Tensor:
    """A number for every selected token of a whole batch, in row order, without gradient: `function` of each micro-batch's selection. Of a
    divided policy all ranks call it at the same time, each with its rows. `after_last` as in `forward`."""

    def compute() -> Tensor:
        result_BT = torch.zeros(ids_BT.shape, device=ids_BT.device)
        for micro in cut_batch(policy, ids_BT, lengths_B, max_tokens):
            index_M = micro.index_M.to(ids_BT.device)
            part_MT = torch.zeros(len(index_M), ids_BT.shape[1], device=ids_BT.device)
            values_N = function(forward(policy, ids_BT, mask_BT, micro, after_last=after_last)).float()
            result_BT[index_M] = part_MT.masked_scatter(mask_BT[index_M], values_N)
        return result_BT[mask_BT]

    return policy.in_step(compute)


def token_logprobs(policy: Policy, ids_BT: Tensor, mask_BT: Tensor, lengths_B: Tensor, temperature: float, *, max_tokens: int) -> Tensor:
    """log p of every selected token of a batch, in row order, without gradient."""
    return over_batch(policy, ids_BT, mask_BT, lengths_B, max_tokens, lambda chosen: logprobs_and_entropy(policy, *chosen, temperature)[0])


def score_tokens(policy: Policy, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log p of every token of one text but the first; 0 for the patches of images, which nothing predicts."""
    if len(ids) < 2:
        return []
    ids_1T = torch.tensor([list(ids)], device=policy.device)
    mask_1T = ids_1T < IMAGE_IDS
    mask_1T[0, 0] = False
    lengths_1 = torch.tensor([len(ids)], device=policy.device)
    scores_N = token_logprobs(policy, ids_1T, mask_1T, lengths_1, temperature, max_tokens=len(ids))
    scores: list[float] = torch.zeros_like(ids_1T, dtype=torch.float32).masked_scatter(mask_1T, scores_N)[0, 1:].tolist()
    return scores


def check_same_vocabulary(model: Policy, policy: Policy, what: str) -> None:
    """Refuse a second model that does not read the policy's tokens."""
    got, want = (int(each.config.vocab_size) for each in (model, policy))
    if got != want:
        raise BadInput(f"{what} has a vocabulary of {got} tokens, the policy one of {want}; take a model with the policy's tokenizer")


def can_recompute(model: PreTrainedModel) -> bool:
    """Whether the model says which layers may be computed again."""
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def kept_bytes(model: PreTrainedModel, tokens: int, *, fused: bool) -> int:
    """About how much memory the layers keep for the backward pass over so many tokens, through the family's fused kernels or without them.

    Per layer, fused: four times the width (the stream and its norms, twice), queries and outputs, keys and values, each once more where they are
    normed, and three times the width of the MLP.
    """
    config = model.config.get_text_config()
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_width = int(getattr(config, "head_dim", None) or width // heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    elements = 4 * width + 3 * heads * head_width + 3 * key_heads * head_width + 3 * inner
    return int(tokens * int(config.num_hidden_layers) * elements * model.dtype.itemsize * (1 if fused else UNFUSED))


@contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, backward passes compute the model's layers again instead of keeping what they put out."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise BadInput(f"models of type '{model.config.model_type}' do not say which layers to recompute; turn gradient checkpointing off")
    for layer in layers:
        # Nothing random happens in a layer: dropout is off. So there is no random state to keep.
        vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
