"""Rows with room compute what rows without it do; on a GPU, what was recorded computes what was launched, for every row of its size."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.models import recorded
from tether.models.fast.packed_attention import PackedAttention
from tether.models.logprobs import forward
from tether.models.packing import FlatBatch, flat_batches
from tether.models.policy import Policy
from tether.models.recorded import RecordedPasses, Room, laid_out, rounded_up
from tether.models.vision import Embedded
from tether.training.optim import FP32MasterAdamW


def _batch(kind: str, seed: int = 0) -> tuple[Tensor, Tensor, FlatBatch]:
    """Rows of 90 to 120 tokens, of which groups begin with the same 80, or with nothing in common."""
    source = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, 400, (7, 120), generator=source)
    lengths_B = torch.randint(90, 121, (7,), generator=source)
    if kind != "alone":
        ids_BT[0:3, :80], ids_BT[3:6, :80] = ids_BT[0, :80].clone(), ids_BT[3, :80].clone()
    if kind == "shared":
        ids_BT[6, :80] = ids_BT[3, :80]
    (micro,) = flat_batches(ids_BT, lengths_B, 10_000)
    return ids_BT, lengths_B, micro


@pytest.mark.parametrize("kind", ["alone", "shared", "both"])
def test_room_changes_nothing(tiny: Any, kind: str) -> None:
    ids_BT, _, micro = _batch(kind)
    room = Room.of(micro)
    assert (bool(room.prompts), bool(room.others)) == (kind != "alone", kind != "shared")
    row = laid_out(micro, ids_BT, room)
    assert len(row.ids_S) == room.tokens == sum(row.texts) and len(row.texts) <= room.texts and max(row.texts) <= room.longest
    assert (sum(row.prompts), sum(row.followers), len(row.prompts) <= room.runs) == (room.prompts, room.followers, True)
    backbone = Policy(copy.deepcopy(tiny.model)).backbone
    assert backbone is not None
    found = []
    plain = micro.to_flat(ids_BT)
    for ids_S, positions_S, attend, places in (
        (*plain, micro.attention(backbone.scale, ids_BT.device), torch.arange(micro.num_tokens)),
        (
            row.ids_S,
            row.positions_S,
            PackedAttention(row.texts, row.prompts, row.followers, scale=backbone.scale, device=ids_BT.device),
            row.shift(torch.arange(micro.num_tokens)),
        ),
    ):
        backbone.model.zero_grad()
        features_ND = backbone.features(Embedded(backbone.words(ids_S)), positions_S, attend)[places]
        (features_ND * torch.linspace(-1, 1, features_ND.numel()).view_as(features_ND)).sum().backward()
        found.append((features_ND.detach(), [parameter.grad.clone() for parameter in backbone.model.base_model.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-4)
    for with_room, without in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(with_room, without, rtol=1e-3, atol=1e-3 * float(without.abs().max()))


def test_sizes_are_few() -> None:
    assert [rounded_up(size) for size in (1, 256, 257, 500, 513, 1000, 5000, 9000)] == [256, 256, 384, 512, 768, 1024, 5120, 10240]
    assert all(size <= rounded_up(size) <= max(256, 1.5 * size) for size in range(1, 9000))
    assert len({rounded_up(size) for size in range(1, 16385)}) == 1 + 8 + 8


def test_nothing_is_recorded_without_a_card(tiny: Any) -> None:
    passes = RecordedPasses(Policy(tiny.model), list)
    ids_BT, _, micro = _batch("shared")
    assert passes.features(micro, ids_BT) is None and passes.features(micro, ids_BT) is None
    assert passes.reason == "not on a card"


@pytest.mark.parametrize("kind", ["alone", "shared", "both"])
def test_selected_tokens_are_found_in_a_row_with_room(tiny: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, but that nothing is recorded; a pass that is too long for a recording gets no room."""
    monkeypatch.setattr(recorded, "_reason_against", lambda policy: "")
    monkeypatch.setattr(RecordedPasses, "_recording", lambda *given: None)
    ids_BT, lengths_B, micro = _batch(kind)
    mask_BT = (torch.arange(120) >= 75) & (torch.arange(120) < lengths_B[:, None])
    policy = Policy(tiny.model)
    passes = RecordedPasses(policy, list)
    plain, with_room = (forward(policy, ids_BT, mask_BT, micro, passes=given) for given in (None, passes))
    torch.testing.assert_close(with_room.features_ND, plain.features_ND, rtol=1e-4, atol=1e-4)
    assert torch.equal(with_room.targets_N, plain.targets_N) and sum(passes._seen.values()) == 1
    monkeypatch.setattr(recorded, "MOST_PRODUCTS", 1)
    assert passes.features(micro, ids_BT) is None


def test_kept_gradients_are_emptied_and_stay_where_they_are() -> None:
    weights = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FP32MasterAdamW([weights], learning_rate=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    (kept,) = optimizer.keep_gradients()
    for factor in (2.0, 3.0):
        (factor * weights).sum().backward()
    assert kept.tolist() == [5.0] * 3
    optimizer.zero_grad()
    assert kept.tolist() == [0.0] * 3 and optimizer.keep_gradients()[0] is kept and weights.grad is None


@pytest.mark.parametrize("kind", ["alone", "shared", "both"])
def test_recorded_passes_are_those_that_are_launched(tiny: Any, kind: str, gpu: str) -> None:
    policies = [Policy(copy.deepcopy(tiny.model).to(gpu)) for _ in range(2)]
    optimizers = [
        FP32MasterAdamW(
            policy.module.parameters(), learning_rate=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0, compute_dtype=torch.bfloat16
        )
        for policy in policies
    ]
    passes = RecordedPasses(policies[1], optimizers[1].keep_gradients)
    for seed in (0, 0, 1, 2, 0):  # the same size; lengths and words differ
        ids_BT, lengths_B, micro = _batch(kind, seed)
        mask_BT = (torch.arange(120) >= 85) & (torch.arange(120) < lengths_B[:, None])
        found = []
        for policy, optimizer, given in zip(policies, optimizers, (None, passes), strict=True):
            features_ND = forward(policy, ids_BT, mask_BT, micro, passes=given).features_ND
            (features_ND * torch.linspace(-1, 1, features_ND.numel(), device=gpu).view_as(features_ND)).sum().backward()
            gradients = {n: holder.grad.clone() for n, holder in enumerate(optimizer._holders) if holder.grad is not None}
            optimizer.step((norm := optimizer.clip(1.0)).isfinite())
            optimizer.zero_grad()
            found.append((features_ND.detach().float(), gradients, float(norm)))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=0.05, atol=0.05)
        assert found[1][2] == pytest.approx(found[0][2], rel=0.02)
        for n, wanted in found[0][1].items():
            assert float((found[1][1][n] - wanted).norm()) <= 0.03 * float(wanted.norm()) + 1e-6, n
    assert not passes.reason and len(passes._recordings) >= 1
