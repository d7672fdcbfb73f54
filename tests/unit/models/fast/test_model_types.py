"""Every causal language model type of the installed transformers that is nearly a Llama: whether the fast path takes it, or why not.

A new release of transformers adds types. One that this table does not know fails the test, so that somebody looks at it before it is used.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tether.models.catalog import models_folder
from tether.models.fast.layers import UnsupportedLayout, find_layers
from tether.models.fast_path import fast_path_report
from tether.models.load import load_model
from tether.models.policy import Policy, probe_backbone

TAKEN = ""
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MARKERS = ("pad_token_id", "bos_token_id", "eos_token_id")
BY_REASON: dict[str, str] = {
    TAKEN: "llama ministral3 qwen2 qwen3 seed_oss",
    "a layer has other parts": "apertus cohere emu3 flex_olmo glm4 granitemoe granitemoeshared hyperclovax jetmoe olmo2 phi3 phi4_multimodal",
    "attention has a sliding window": "mistral",
    "attention has other parts": "axk1 bitnet deepseek_v2 deepseek_v3 diffllama doge glm4_moe_lite hunyuan_v1_dense hunyuan_v1_moe minicpm3 youtu",
    "differs from the module": "ernie4_5 granite helium smollm3",
    "is not a root-mean-square norm": "gemma jais2 minimax_m3_vl_text nanochat nemotron olmo phimoe stablelm starcoder2",
    "rotary type": "beam deepseek_v4 gemma3_text gemma4_text gemma4_unified_assistant gemma4_unified_text laguna mellum mimo_v2_flash olmo3 zaya",
    "some layers have indexed_attention": "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    "some layers have linear_attention": "bailing_hybrid granitemoehybrid minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next",
    "some layers have sliding_attention": "afmoe cohere2 cohere2_moe cwm exaone4 exaone_moe flint gemma2 gpt_oss granite_swa granitemoe_swa kolibri1 ministral vaultgemma",
    "the MLP has other parts": "arcee aria_text ernie4_5_moe glm glm4_moe hy_v3 minimax_m2 mixtral olmoe qwen2_moe qwen3_moe solar_open",
    "the config names": "longcat_flash",
}
"""Reason -> model types. A reason is a part of the message."""
TABLE = {name: reason for reason, names in BY_REASON.items() for name in names.split()}


def small_config(kind: Any) -> Any:
    """The type's config with small sizes; some types take fewer of them."""
    for left_out in ((), ("head_dim",), MARKERS, ("head_dim", *MARKERS)):
        try:
            return kind(**{key: value for key, value in SIZES.items() if key not in left_out})
        except (TypeError, ValueError, AttributeError, NotImplementedError, StrictDataclassError):  # how configs refuse a size
            continue
    return None


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def verdict(kind: Any) -> str | None:
    """Why the fast path refuses a type, TAKEN where it does not; None for types that are far from a Llama or not built from sizes alone."""
    config = small_config(kind)
    if config is None:
        return None
    try:
        with torch.device("meta"):  # many are large whatever sizes they are given
            shell = hf.AutoModelForCausalLM.from_config(config)
    except (TypeError, ValueError, AttributeError, KeyError, ImportError, AssertionError):
        return None
    if not all(hasattr(shell.base_model, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return None
    try:
        find_layers(shell)
    except UnsupportedLayout as error:
        return str(error)
    backbone, reason = probe_backbone(model_of(config))
    assert (backbone is None) == bool(reason)
    return reason


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # what configs say about their own defaults
def test_every_model_type_is_known() -> None:
    found = {kind.model_type: verdict(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    near = {name: reason for name, reason in found.items() if reason is not None}
    unknown = sorted(near.keys() - TABLE.keys())
    assert not unknown, f"types that the table does not know: { {name: near[name] for name in unknown} }"
    wrong = {name: reason for name, reason in near.items() if bool(reason) != bool(TABLE[name]) or TABLE[name] not in reason}
    assert not wrong, f"types that are judged otherwise than the table says: {wrong}"


MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}


def test_attention_that_changes_past_the_original_length() -> None:
    """Ministral 3 scales its queries from position 32 on: neighbours from 0 to 23 show nothing of it."""
    model = model_of(hf.Ministral3Config(**SIZES, rope_parameters=MINISTRAL))
    backbone, reason = probe_backbone(model)
    assert backbone is None and reason.startswith("differs from the module by")
    backbone, reason = probe_backbone(model.to(torch.bfloat16))
    assert backbone is None and "float32" in reason
    # A run that stays below is computed right, and the fast path knows no position beyond.
    backbone, reason = probe_backbone(model.float(), 32)
    assert backbone is not None and backbone.num_positions == 32 and not reason


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 computes it all the same
def test_rotations_in_float32_whatever_the_model_computes_in() -> None:
    """ERNIE 4.5 rotates neighbouring coordinates, in float32: it must be refused with a reason in any number type, and must not raise."""
    model = model_of(hf.Ernie4_5Config(**SIZES))
    for dtype in (torch.float32, torch.bfloat16):
        policy = Policy(model.to(dtype))
        assert policy.backbone is None and policy.backbone_reason.startswith("differs from the module by")
        report = fast_path_report(policy)
        assert (report.decoder, report.learner_attention, report.scorer) == ("generic", "padded module", "shared")


def test_what_a_probe_raises_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(hf.LlamaConfig(**SIZES))

    def forward(*_: Any, **__: Any) -> Any:
        raise KeyError("rope")

    model.model.rotary_emb.forward = forward
    assert probe_backbone(model) == (None, "KeyError: 'rope'")


def test_layers_without_positions() -> None:
    """SmolLM3 leaves every fourth layer without rotations, which no part of its layout shows."""
    assert probe_backbone(model_of(hf.SmolLM3Config(**{**SIZES, "num_hidden_layers": 2})))[0] is not None
    backbone, reason = probe_backbone(model_of(hf.SmolLM3Config(**SIZES)))
    assert backbone is None and reason.startswith("differs from the module by")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [hf.LlamaConfig, hf.Qwen2Config, hf.Qwen3Config])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision_is_taken(kind: Any, dtype: torch.dtype) -> None:
    backbone, reason = probe_backbone(model_of(kind(**SIZES)).to(dtype))
    assert backbone is not None, reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["a scale", "other positions"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_small_mistake_is_found_in_any_precision(what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a mistake of a few percent drowns in rounding; the float32 comparison still shows it."""
    from tether.models import policy as module

    class Mistaken(module.LlamaBackbone):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if what == "a scale":
                self.scale *= 1.02

        def _angles_at(self, positions_S: torch.Tensor, dtype: torch.dtype) -> Any:
            return super()._angles_at(positions_S * 2 if what == "other positions" else positions_S, dtype)

    monkeypatch.setattr(module, "LlamaBackbone", Mistaken)
    backbone, reason = probe_backbone(model_of(hf.LlamaConfig(**SIZES)).to(dtype))
    assert backbone is None and "in float32" in reason


@pytest.mark.slow
@pytest.mark.skipif(not (models_folder() / "smollm2" / "config.json").is_file(), reason="smollm2 is not here")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_real_weights_in_half_precision_are_taken() -> None:
    """Large activations of real weights round coarsely: against the module's own bfloat16 the difference says nothing.

    Two layers do: a CPU without bfloat16 takes minutes for all thirty.
    """
    model = load_model("smollm2", device="cpu", dtype="bfloat16").model
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    backbone, reason = probe_backbone(model, 2048)
    assert backbone is not None, reason
