"""MLPs in float8: rounding worked by hand, kernels against their definitions, a decoder against the plain pass over rounded weights and activations."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import silu

from tether.core.protocols import Sampling
from tether.core.seeding import derive_seed
from tether.models.fast.decoding.protocol import PrefillRequest
from tether.models.fast.layers import _layer
from tether.models.policy import probe_backbone

pytest.importorskip("triton")

from tether.models.fast.decoding import paged
from tether.models.fast.float8 import Float8Mlps, quantise
from tether.models.fast.kernels import attention
from tether.models.fast.kernels.float8 import Float8Rows, float8_product, float8_product_parts, norm_float8, swiglu_float8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = Sampling(temperature=0)
TEXT = [3, 7, 1, 4, 9, 20, 11]
DECODED = 4 if DEVICE == "cuda" else 1
"""Tokens, each of which takes the interpreter seconds."""
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="float8 needs compute capability 8.9"
)


@pytest.fixture(autouse=True)
def _rounding_that_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds 31.4 to 16: it loses what is carried into the exponent. Torch rounds in its place."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if wanted.name != "fp8e4nv" or given.name != "fp32":
            return convert(values, given, wanted, rounding)
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    torch.manual_seed(derive_seed("test", "float8"))


def plain(rows: Float8Rows) -> Tensor:
    return rows.values_MK.float() * rows.scale_M[:, None]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_rounding_worked_by_hand() -> None:
    """Three bits of mantissa: steps of 2 from 16 to 32, of 1/32 from 1/4 to 1/2, of 2**-9 below 2**-6; ties to even."""
    found = quantise(torch.tensor([[448.0, 17, 19, -0.3, 0.001], [2.24, -0.085, 0.1, 0, -2.24], [0, 0, 0, 0, 0]]))
    assert found.scale_M.tolist() == pytest.approx([1.0, 0.005, 1e-12 / 448])
    assert found.values_MK.float().tolist() == [[448, 16, 20, -0.3125, 0.001953125], [448, -16, 20, 0, -448], [0, 0, 0, 0, 0]]


def test_norm_and_swiglu() -> None:
    x, delta, weight, both = random(5, 592), random(5, 592), random(592), random(5, 96)
    found, total = norm_float8(delta, x, weight, 1e-5)
    torch.testing.assert_close(total, x + delta)
    expected = weight * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    _assert_rounded(found, expected)
    gate, up = both.chunk(2, dim=1)
    _assert_rounded(swiglu_float8(both), silu(gate) * up)


def _assert_rounded(found: Float8Rows, expected: Tensor) -> None:
    """Half a step off at most, a sixteenth of the value, or 2**-10 of the unit."""
    torch.testing.assert_close(found.scale_M, quantise(expected).scale_M, rtol=1e-5, atol=0)
    off = (plain(found) - expected).abs()
    assert bool((off <= 1.001 * torch.maximum(expected.abs() / 16, found.scale_M[:, None] * 2**-10)).all())


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_products(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that no block divides; parts of the depth that add up to the whole."""
    monkeypatch.setattr("tether.models.fast.kernels.float8.LEAST_DEPTH", 256)
    x, weight = quantise(random(num_tokens, 592)), quantise(random(72, 592))
    expected = plain(x) @ plain(weight).T
    close = {"rtol": 2e-3, "atol": 2e-3 * float(expected.abs().max())}  # the card's sums hold 14 bits
    torch.testing.assert_close(float8_product(x, weight, torch.float32), expected, **close)
    parts = float8_product_parts(x, weight, torch.float32)
    assert parts.shape == (2, num_tokens, 72)
    torch.testing.assert_close(parts.sum(dim=0), expected, **close)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> hf.PreTrainedModel:
    monkeypatch.setattr(paged, "BATCH_SIZES", (1, 3, 512))
    monkeypatch.setattr(paged, "PAGE", 16)
    monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", 12)  # every program takes the interpreter its time
    return _made()


def _made() -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    return hf.AutoModelForCausalLM.from_config(config).eval().to(DEVICE)


class RoundedMlp(nn.Module):
    """The definition: weights and activations rounded, computed in float32."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = (plain(quantise(linear.weight)) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def forward(self, x: Tensor) -> Tensor:
        rounded = plain(quantise(x.flatten(0, -2)))
        return (plain(quantise(silu(rounded @ self.gate.T) * (rounded @ self.up.T))) @ self.down.T).view_as(x)


def _rounded(model: Any) -> Iterator[float]:
    """Greedy tokens and their log-probs by the module, its MLPs rounded."""
    kept = [layer.mlp for layer in model.model.layers]
    for layer in model.model.layers:
        layer.mlp = RoundedMlp(layer.mlp)
    text = list(TEXT)
    for _ in range(1 + DECODED):
        with torch.no_grad():
            logprobs_V = model(torch.tensor([text], device=DEVICE)).logits[0, -1].log_softmax(-1)
        text.append(int(logprobs_V.argmax()))
        yield from (text[-1], float(logprobs_V.max()))
    for layer, mlp in zip(model.model.layers, kept, strict=True):
        layer.mlp = mlp


def _decoded(decoder: paged.PagedDecoder) -> list[float]:
    decoder.reserve({0: 16})
    first = decoder.prefill([PrefillRequest((0,), 0, TEXT)], GREEDY, np.full(1, 0.5, dtype=np.float32))()
    more = decoder.decode([0], [len(TEXT)], [int(first.ids_BK[0, 0])], GREEDY, np.full((1, DECODED), 0.5, dtype=np.float32))()
    decoder.release(0)
    return [value for out in (first, more) for pair in zip(out.ids_BK[0], out.logprobs_BK[0], strict=True) for value in map(float, pair)]


@torch.no_grad()
def test_an_mlp_and_a_publish() -> None:
    """The MLP of the definition; an update is seen after `refresh` and not before."""
    layer: Any = _made().model.layers[0]
    copied = Float8Mlps([_layer(layer)])
    delta, residual, memory = random(3, 32), random(3, 32), copied.layers[0]._down.values_MK.data_ptr()
    expected = [RoundedMlp(layer.mlp)(layer.post_attention_layernorm(residual + delta))]
    for parameter in layer.mlp.parameters():
        parameter.mul_(-0.5)
    expected.append(RoundedMlp(layer.mlp)(layer.post_attention_layernorm(residual + delta)))
    for wanted in expected:
        found, total = copied.layers[0](delta, residual)
        torch.testing.assert_close(total, residual + delta)
        torch.testing.assert_close(found.sum(dim=0), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
        copied.refresh()
    assert copied.layers[0]._down.values_MK.data_ptr() == memory, "recorded steps read it there"


@pytest.mark.long
def test_decoding_and_a_publish(model: Any) -> None:
    """Tokens and log-probs of the definition; an update is seen after `refresh` and not before, by the steps recorded before it."""
    backbone, _ = probe_backbone(model)
    assert backbone is not None
    float8 = Float8Mlps(backbone.layers)
    decoder = paged.PagedDecoder(backbone, model.get_output_embeddings(), 1, 64, 10**8, float8.layers)
    before = _decoded(decoder)
    assert before == pytest.approx(list(_rounded(model)), abs=0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    assert _decoded(decoder) == pytest.approx(before, abs=1e-4)
    float8.refresh()
    after = _decoded(decoder)
    assert after == pytest.approx(list(_rounded(model)), abs=0.02)
    assert after != pytest.approx(before, abs=0.1)


def test_adapters_are_worked_in() -> None:
    pytest.importorskip("peft")
    from tether.models.lora import add_lora, merged

    model = _made()
    add_lora(model, rank=4, alpha=8, targets="all-linear", seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    (backbone, _), (plain_backbone, _) = probe_backbone(model), probe_backbone(merged(model))
    assert backbone is not None and plain_backbone is not None
    found, expected = (Float8Mlps(each.layers).layers[0] for each in (backbone, plain_backbone))
    for ours, theirs in ((found._gate_up, expected._gate_up), (found._down, expected._down)):
        torch.testing.assert_close(plain(ours), plain(theirs), rtol=0.13, atol=1e-6)
        torch.testing.assert_close(ours.scale_M, theirs.scale_M, rtol=1e-5, atol=0)
