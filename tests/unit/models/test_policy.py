"""One handle on a model: what it says about the model, that everything is probed once, and what it reports."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from tether.core.errors import BadInput
from tether.models.critic import Critic
from tether.models.fast import backbone as backbone_module
from tether.models.fast_path import DecoderChoice, FastPathReport, decoder_for, fast_path_report
from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy
from tether.models.policy import Policy
from tether.models.scoring.local import PrefixScorer, scorer_for

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
LENGTHS = torch.tensor([4, 3])
MASK = torch.tensor([[False, False, True, True], [False, True, True, False]])


def _use(policy: Policy) -> None:
    """What a learner, an engine, a critic and a scorer ask of a model before they compute anything with it."""
    cut_batch(policy, IDS, LENGTHS, 64)
    assert policy.linear_head is not None or not policy.separable_head
    DecoderChoice(policy).make(2, None, 2**24)
    PrefixScorer(policy)
    assert scorer_for(policy) is scorer_for(policy) and decoder_for(policy) is decoder_for(policy)
    if policy.separable_head:
        Critic(policy, shared=True)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma2"])
def test_one_probe_for_all_who_use_a_model(name: str, small_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(name)
    passes, builds = [], []
    model.base_model.register_forward_hook(lambda *_: passes.append(1))
    init = backbone_module.LlamaBackbone.__init__
    monkeypatch.setattr(backbone_module.LlamaBackbone, "__init__", lambda self, *args: (builds.append(1), init(self, *args))[1])
    policy = Policy(model)
    assert not passes, "nothing is probed before it is asked for"
    _use(policy)
    fast_path_report(policy)
    first = len(passes)
    assert first and len(builds) == (1 if name in ("llama", "qwen2") else 0)
    _use(policy)
    fast_path_report(policy)
    assert len(passes) == first and len(builds) <= 1, "every probe has been run"


def test_a_change_of_the_number_type_is_probed_again(small_model: Callable[..., Any]) -> None:
    """A learner decides what the policy computes in after the handle was made."""
    model = small_model("llama")
    policy = Policy(model)
    first = policy.backbone
    model.double()
    assert first is not None and policy.backbone is not None and policy.backbone is not first
    model.float()
    assert policy.backbone is first


def test_what_a_policy_knows(tiny: Any) -> None:
    policy = Policy(tiny.model, tiny.tokenizer)
    config = tiny.model.config
    assert (policy.device.type, policy.dtype, policy.model_type, policy.config) == ("cpu", torch.float32, "llama", config)
    assert policy.width == config.hidden_size and policy.max_positions == config.max_position_embeddings == 1024
    width = config.hidden_size // config.num_attention_heads
    assert decoder_for(policy).position_bytes == 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * width


def test_the_positions_that_a_run_may_use(small_model: Callable[..., Any]) -> None:
    model = small_model("llama")  # 128 positions
    assert [Policy(model, max_positions=wanted).max_positions for wanted in (None, 40, 128, 500)] == [128, 40, 128, 128]
    assert Policy(small_model("mistral")).max_positions == 7, "a window, inside which full attention is the same"
    policy = Policy(model, max_positions=40)
    assert policy.backbone is not None and policy.backbone.num_positions == len(policy.backbone.angles[0]) == 40
    assert decoder_for(policy).make(1, None, None).max_positions == 40


def test_a_sequence_past_the_probed_positions_is_the_modules(small_model: Callable[..., Any]) -> None:
    """The fast path is only known to be right where it was probed."""
    model = small_model("llama")
    policy = Policy(model, max_positions=30)
    ids, lengths = torch.arange(50)[None] % 97, torch.tensor([50])
    (micro,) = cut_batch(policy, ids, lengths, 100)
    mask = torch.arange(50)[None] > 40
    logprobs, _ = logprobs_and_entropy(policy, *forward(policy, ids, mask, micro), 1.0)
    expected = model(ids).logits[0].log_softmax(-1)[torch.arange(40, 49), ids[0, 41:]]
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [(None, (1,)), (1, (1,)), (7, (1, 7)), ([7, 1, 9], (1, 7, 9)), ([7], (1, 7))],
)
def test_every_token_that_ends_a_turn(tiny: Any, tiny_model: Any, configured: Any, expected: tuple[int, ...]) -> None:
    """The tokenizer's first; Llama 3, Gemma and Phi list theirs in the generation config."""
    tiny_model.generation_config.eos_token_id = configured
    assert tiny.tokenizer.eos_token_id == 1
    assert Policy(tiny_model, tiny.tokenizer).end_of_turn_ids == expected
    alone = configured if isinstance(configured, list) else [] if configured is None else [configured]
    assert Policy(tiny_model).end_of_turn_ids == tuple(alone)


def test_a_fast_model_takes_one_line(tiny: Any) -> None:
    report = fast_path_report(Policy(tiny.model, tiny.tokenizer, max_positions=512))
    assert report.is_fast and report.max_positions == 512
    assert report.lines() == [
        "fast path (llama, float32 on cpu): decoder contiguous, learner attention flash kernel of torch, scorer shared, "
        "head linear, fused log-probs"
    ]
    assert FastPathReport(**json.loads(json.dumps(report.to_json()))) == report


def test_slow_parts_are_named_with_their_reasons(small_model: Callable[..., Any]) -> None:
    report = fast_path_report(Policy(small_model("gemma2")))
    assert (report.decoder, report.learner_attention, report.scorer, report.head) == ("generic", "padded module", "copied", "module's own")
    assert set(report.reasons) == {"decoder", "learner_attention", "scorer", "head"}
    assert report.reasons["head"] == "logits are more than one product of the last hidden states with the head"
    assert report.reasons["scorer"] == "NotShared: Gemma2Attention asks for softcap"
    lines = report.lines()
    assert len(lines) == 5 and lines[0].startswith("partly slow path (gemma2, float32 on cpu): decoder generic")
    assert lines[1] == f"decoder is slow (generic): {report.reasons['decoder']}" and all("\n" not in line for line in lines)


def test_a_model_that_cannot_be_decoded_has_a_report(small_model: Callable[..., Any]) -> None:
    policy = Policy(small_model("bloom"))
    with pytest.raises(BadInput, match="models of type 'bloom' cannot be decoded"):
        _ = decoder_for(policy)
    report = fast_path_report(policy)
    assert report.decoder == "none" and report.scorer == "whole" and "bloom" in report.reasons["decoder"]


def test_a_broken_flash_kernel_is_on_the_report(small_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Quadratic attention is never used without a word."""
    from tether.models.fast import packed_attention

    class Changed:
        def forward(self, *_: Any) -> Any:
            raise RuntimeError("aten::_flash_attention_forward() got an unexpected argument")

        backward = forward

    monkeypatch.setitem(packed_attention.FUSED, "cpu", Changed())
    packed_attention.packed_kernel.cache_clear()
    try:
        report = fast_path_report(Policy(small_model("llama")))
    finally:
        packed_attention.packed_kernel.cache_clear()
    assert report.learner_attention == "by definition"
    assert report.reasons == {"learner_attention": "RuntimeError: aten::_flash_attention_forward() got an unexpected argument"}


def test_a_rotation_that_depends_on_the_length_is_named() -> None:
    config = hf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )  # fmt: skip
    assert Policy(hf.AutoModelForCausalLM.from_config(config)).backbone_reason == "rotary type 'dynamic' is not static"


def test_a_probe_warns_of_nothing(small_model: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Policy(small_model("qwen2")).backbone is not None
