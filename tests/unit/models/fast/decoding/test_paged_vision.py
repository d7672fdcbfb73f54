"""The paged decoder over models that see, against transformers over pixels: by Triton's interpreter where there is no CUDA device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.models.sighted import logprobs_by_transformers, play, some_pictures, write_model

from tether.core.images import Image
from tether.core.protocols import Sampling
from tether.models.fast.decoding.protocol import DraftPlan, PrefillRequest
from tether.models.load import load_model
from tether.models.policy import Policy

pytest.importorskip("triton")

from tether.models.fast.decoding import paged
from tether.models.fast.kernels import attention
from tether.models.fast_path import DecoderChoice, fast_path_report

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5
SIZES = (3, 3, 7) if DEVICE == "cuda" else (1, 2, 5)
"""Groups, turns and tokens of a turn."""


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    monkeypatch.setattr(DecoderChoice, "_paged_head", property(lambda choice: choice._policy.linear_head))
    for module, name, value in (
        (paged, "PAGE", 32),
        (paged, "BATCH_SIZES", (2, 4)),
        (paged, "FEED_SIZES", ()),
        (attention, "ENOUGH_PROGRAMS", 4),
        (torch.backends.cudnn, "allow_tf32", False),  # of the tower: its rounding is seen by the last comparison otherwise
    ):
        monkeypatch.setattr(module, name, value)
    # The interpreter takes as long as there are layers; qwen3_vl adds its pictures to the output of two.
    layers = 2 if DEVICE == "cuda" or request.param == "qwen3_vl" else 1
    return Policy(*load_model(str(write_model(request.param, tmp_path, num_hidden_layers=layers, num_key_value_heads=1)), device=DEVICE))


@pytest.mark.parametrize(
    ("policy", "drafted"),
    [
        ("qwen2_5_vl", 2),
        pytest.param("qwen3_vl", 0, marks=pytest.mark.long),
        *(pytest.param(family, drafted, marks=pytest.mark.long) for family in ("qwen2_vl", "idefics3", "smolvlm") for drafted in (0, 2)),
        pytest.param("qwen2_5_vl", 0, marks=pytest.mark.long),
        pytest.param("qwen3_vl", 2, marks=pytest.mark.long),
    ],
    indirect=["policy"],
)
def test_sampled_log_probs_are_those_of_transformers(policy: Policy, drafted: int) -> None:
    """Conversations that share their first prompt, with a picture a turn: keys of patches by their three places, words behind them by theirs."""
    talks = play(policy, some_pictures(), sizes=SIZES, speculative_tokens=drafted)
    assert policy.vision is not None and fast_path_report(policy).decoder == "paged"
    for talk in talks:
        places = [place for place, _ in talk.sampled]
        theirs_TV = logprobs_by_transformers(policy, talk.ids, talk.images, 0.7)
        theirs = theirs_TV[[place - 1 for place in places], [talk.ids[place] for place in places]]
        assert torch.allclose(theirs, torch.tensor([value for _, value in talk.sampled]), atol=TOLERANCE)
        assert not {talk.ids[place] for place in places} & set(policy.vision.never_sampled)


@pytest.mark.parametrize("policy", ["qwen3_vl"], indirect=True)
def test_a_call_with_drafts_takes_in_an_image_of_which_another_slot_has_the_beginning(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot begins with the first three patches of six that another holds, and is fed the rest beside the steps of that one; the feed is filled up."""
    monkeypatch.setattr(paged, "MIXED_SIZES", (32,))
    first, second = (Image.of(np.full((16, side, 3), side, dtype=np.uint8)) for side in (24, 16))
    assert policy.vision is not None
    patches, others = policy.vision.expand(first), policy.vision.expand(second)
    decoder = DecoderChoice(policy).make(2, 64, 10**8)
    decoder.start_drafts(1)
    texts = [[5, 6, *patches, 7, 8], [5, 6, *patches, 9, *others, 4]]
    greedy, zeros = Sampling(temperature=0), np.zeros((1, 4), dtype=np.float32)
    assert decoder.reserve({0: 40})
    token = decoder.prefill([PrefillRequest((0,), 0, texts[0])], greedy, zeros[:, 0])()
    assert decoder.adopt(1, 0, 5) == 5 and decoder.reserve({1: 40})
    call = decoder.speculate([0], [10], token.ids_BK[0].tolist(), DraftPlan(2, 1), greedy, zeros)
    fed = decoder.prefill([PrefillRequest((1,), 5, texts[1][5:])], greedy, zeros[:, 0])
    found = call()
    assert found.counts_B is not None and isinstance(decoder, paged.PagedDecoder) and decoder._mixed
    more = decoder.decode([1], [14], fed().ids_BK[0].tolist(), greedy, zeros[:, :2])()
    sampled = [(token, found, int(found.counts_B[0])), (fed(), more, 2)]
    for text, images, (begun, rest, count) in zip(texts, ([first], [first, second]), sampled, strict=True):
        ids = [*begun.ids_BK[0].tolist(), *rest.ids_BK[0, :count].tolist()]
        theirs_TV = logprobs_by_transformers(policy, [*text, *ids], images)[len(text) - 1 : -1]
        ours = torch.tensor([*begun.logprobs_BK[0], *rest.logprobs_BK[0, :count]])
        assert torch.allclose(theirs_TV[range(len(ids)), ids], ours, atol=TOLERANCE)
