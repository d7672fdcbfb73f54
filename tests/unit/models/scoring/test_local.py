"""PrefixScorer: equal to a plain pass over prompt and reasoning in double precision, whichever way a model takes, and in every batch."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tether.core.errors import BadInput
from tether.models.fast.prefix_attention import NAME
from tether.models.policy import Policy
from tether.models.scoring import shared_prefix
from tether.models.scoring.local import PrefixScorer, check_ids, cuts, tokens_per_call
from tether.models.scoring.make import make_scorer
from tether.models.scoring.shared_prefix import attention_reach

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = 97
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def texts(lengths: list[int], seed: int, words: int = WORDS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, words, size).tolist() for size in lengths]


PROMPTS = texts([11, 3, 1, 24, 11], seed=0)
REASONINGS = texts([6, 1, 17, 2, 9, 9, 1], seed=1)


def plain(model: Any, prompts: list[list[int]] = PROMPTS, reasonings: list[list[int]] = REASONINGS, double: bool = True) -> np.ndarray:
    """One pair at a time, no cache, double precision from the weights on."""
    exact = copy.deepcopy(model).double().eval() if double else model
    scores = np.empty((len(reasonings), len(prompts)))
    with torch.inference_mode():
        for n, z in enumerate(reasonings):
            for j, x in enumerate(prompts):
                logprobs = exact(torch.tensor([x + z], device=exact.device), use_cache=False).logits[0].double().log_softmax(-1)
                scores[n, j] = sum(float(logprobs[len(x) - 1 + t, token]) for t, token in enumerate(z))
    return scores


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # large enough that who sees whom changes every number
    return model.to(DEVICE)


# ----------------------------------------------------------------------------------------------------------------- exact


def test_tiny_is_exact(tiny_on_device: Any) -> None:
    prompts, reasonings = texts([40, 7, 7, 150], seed=2, words=500), texts([12, 1, 70, 3], seed=3, words=500)
    prompts.append(prompts[1])
    scorer = PrefixScorer(tiny_on_device.model)
    assert (scorer.backend, scorer.precision, scorer.vocabulary_size) == ("shared", "float32", 578)
    scores = scorer.score_all(prompts, reasonings)
    assert scores.shape == (4, 5) and scores.dtype == np.float64
    np.testing.assert_allclose(scores, plain(tiny_on_device.model, prompts, reasonings), rtol=1e-6, atol=1e-4)  # scores reach -1,000
    assert scores[:, 4].tolist() == pytest.approx(scores[:, 1].tolist(), abs=1e-4)


@pytest.mark.long  # `tiny` and small models of every architecture are scored exactly, too
def test_smollm2_is_exact(smollm2: Any) -> None:
    loaded = smollm2
    prompts = [loaded.tokenizer(text)["input_ids"] for text in ("Solve the puzzle: #P_# #XO#. Think first.", "What is 3 + 4? Think first.")]
    reasonings = [
        loaded.tokenizer(text)["input_ids"] for text in ("The box is left of the goal, so I push it to the right.", "3 + 4 is 7.", "So")
    ]
    scores = PrefixScorer(loaded.model).score_all(prompts, reasonings)
    assert np.abs(scores - plain(loaded.model, prompts, reasonings)).max() < 1e-4


@pytest.mark.parametrize("budget", [1, 5, 20, 60, 1000])
def test_any_token_budget(budget: int) -> None:
    model = random_model(hf.LlamaConfig(**SMALL))
    scores = PrefixScorer(model, budget).score_all(PROMPTS, REASONINGS)
    assert np.abs(scores - plain(model)).max() < 1e-4


@pytest.mark.parametrize("budget", [7, 30, 1000])
def test_texts_of_one_length(budget: int) -> None:
    model = random_model(hf.LlamaConfig(**SMALL))
    prompts, reasonings = texts([7, 7, 7], seed=8), texts([5, 5, 5, 5], seed=9)
    scores = PrefixScorer(model, budget).score_all(prompts, reasonings)
    assert np.abs(scores - plain(model, prompts, reasonings)).max() < 1e-4


def test_a_double_precision_model_is_scored_in_double_precision() -> None:
    model = random_model(hf.Qwen2Config(**SMALL)).double()
    scorer = PrefixScorer(model)
    assert scorer.precision == "float64"
    assert np.abs(scorer.score_all(PROMPTS, REASONINGS) - plain(model)).max() < 1e-10


def test_a_large_batch_is_one_pass_over_the_prompts_and_one_over_the_rest() -> None:
    model = random_model(hf.LlamaConfig(**SMALL))
    scorer = PrefixScorer(model, 10_000)
    shapes: list[tuple[int, ...]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    scorer.score_all([PROMPTS[0], PROMPTS[3], PROMPTS[4]], texts([9, 9, 9, 1], seed=5))
    hook.remove()
    assert list(map(math.prod, shapes)) == [11 + 24 + 11, 3 * 3 * 8]  # as one row on a CPU, flat on a GPU


def test_scores_do_not_depend_on_their_company() -> None:
    scorer = PrefixScorer(random_model(hf.LlamaConfig(**SMALL)))
    together = scorer.score_all(PROMPTS, REASONINGS)
    for n, reasoning in enumerate(REASONINGS):
        for j, prompt in enumerate(PROMPTS):
            assert scorer.score(prompt, reasoning) == pytest.approx(together[n, j], abs=2e-5)


def test_the_same_every_time() -> None:
    scorer = PrefixScorer(random_model(hf.LlamaConfig(**SMALL)))
    assert scorer.score_all(PROMPTS, REASONINGS).tolist() == scorer.score_all(PROMPTS, REASONINGS).tolist()


# ------------------------------------------------------------------------------------------------------------------ ways

ARCHITECTURES: dict[str, tuple[Any, str]] = {
    "grouped queries": (lambda: hf.LlamaConfig(**SMALL), "shared"),
    "one key head": (lambda: hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 1}), "shared"),
    "all key heads": (lambda: hf.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}), "shared"),
    "learned positions": (lambda: hf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=128), "shared"),
    "values of another width": (
        lambda: hf.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            first_k_dense_replace=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        ),
        "shared",
    ),
    "windows that the texts leave": (lambda: hf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=16), "shared"),
    "a window in every layer": (lambda: hf.MistralConfig(**SMALL, sliding_window=12), "shared"),
    "a window shorter than the probe": (lambda: hf.MistralConfig(**SMALL, sliding_window=5), "whole"),
    "soft caps": (lambda: hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=64), "copied"),
    "attention sinks": (lambda: hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4, sliding_window=64), "copied"),
    "its own attention": (lambda: hf.MptConfig(vocab_size=WORDS, d_model=32, n_layers=2, n_heads=4), "copied"),
    "biases by distance": (lambda: hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4), "whole"),
    "recurrent": (lambda: hf.MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2), "whole"),
}
SINGLE_PRECISION = {"attention sinks"}
"""Compared in float32: it has parts that take no other."""
TOLERANCE = {"recurrent": 5e-4}
"""In float32 a scan drifts from double precision by up to 3e-4 on some processors, whatever the way; the others stay within 1e-4."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_scored_exactly(name: str) -> None:
    config, backend = ARCHITECTURES[name]
    model = random_model(config())
    expected = plain(model, double=name not in SINGLE_PRECISION)
    for budget in (None, 30):
        scorer = PrefixScorer(model, budget)
        assert scorer.backend == backend
        assert np.abs(scorer.score_all(PROMPTS, REASONINGS) - expected).max() < TOLERANCE.get(name, 1e-4)


def test_how_far_attention_reaches() -> None:
    model = random_model(hf.LlamaConfig(**SMALL, max_position_embeddings=128))
    assert attention_reach(Policy(model), 2**31) == 128
    assert attention_reach(Policy(model), 50) == 50, "a window that only the layers know of"
    model.config.attention_chunk_size = 16
    assert attention_reach(Policy(model), 50) == 16


def test_a_wrong_shared_pass_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts off by one position: the probe must not let that through."""
    model = random_model(hf.LlamaConfig(**SMALL)).cpu()  # a GPU reads the row by other code
    row = shared_prefix._RegistryRow
    features = row.features
    monkeypatch.setattr(row, "features", lambda self, lengths, spans, ids, at: features(self, lengths, spans, ids, at + bool(spans)))
    scorer = PrefixScorer(model)
    assert scorer.backend == "copied"
    assert np.abs(scorer.score_all(PROMPTS, REASONINGS) - plain(model)).max() < 1e-4


def test_the_model_is_left_as_it_was() -> None:
    model = random_model(hf.LlamaConfig(**SMALL, attention_dropout=0.5)).train()
    model.set_attn_implementation("eager")
    scores = PrefixScorer(model).score_all(PROMPTS, REASONINGS)
    assert model.training and model.config._attn_implementation == "eager"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert np.abs(scores - plain(model)).max() < 1e-4


def test_the_model_is_left_as_it_was_after_a_failure() -> None:
    model = random_model(hf.LlamaConfig(**SMALL)).cpu()  # on a GPU the module's own layers are not called
    before = model.config._attn_implementation
    scorer = PrefixScorer(model)
    hook = model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError):
        scorer.score(PROMPTS[0], REASONINGS[0])
    hook.remove()
    assert model.config._attn_implementation == before != NAME
    assert np.isfinite(scorer.score(PROMPTS[0], REASONINGS[0]))


# -------------------------------------------------------------------------------------------------------------- adapters


def test_a_model_wrapped_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    base = random_model(hf.LlamaConfig(**SMALL))
    without = plain(base)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False))
    scorer = PrefixScorer(wrapped)
    assert scorer.backend == "shared"
    expected = plain(wrapped)
    assert np.abs(scorer.score_all(PROMPTS, REASONINGS) - expected).max() < 1e-4
    assert np.abs(expected - without).max() > 0.1, "the adapters count"


def test_a_learned_prompt_is_refused() -> None:
    peft = pytest.importorskip("peft")
    base = random_model(hf.LlamaConfig(**SMALL))
    wrapped = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(BadInput, match="PROMPT_TUNING cannot score"):
        PrefixScorer(wrapped)


# ------------------------------------------------------------------------------------------------------- half precision


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 computes it all the same
def test_half_precision_keeps_the_head_in_float32() -> None:
    """The layers round, the head and the sum do not: the score is the float32 head's over the half-precision features."""
    model = random_model(hf.LlamaConfig(**SMALL)).bfloat16()
    scorer = PrefixScorer(model)
    assert scorer.precision == "bfloat16"
    with torch.inference_mode():
        last = model.model(torch.tensor([PROMPTS[0]], device=DEVICE), use_cache=False).last_hidden_state[0, -1].double()
        logprobs = (model.lm_head.weight.double() @ last).log_softmax(-1)
    for word in (0, 50, 96):
        # A GPU's layers round in other places than the module's, a CPU's in the same ones.
        assert scorer.score(PROMPTS[0], [word]) == pytest.approx(float(logprobs[word]), abs=1e-4 if DEVICE == "cpu" else 0.03)
    assert np.abs(scorer.score_all(PROMPTS, REASONINGS) - plain(model)).max() < 2.0


# ------------------------------------------------------------------------------------------------------------- bad input


def test_texts_that_do_not_fit_the_positions() -> None:
    scorer = PrefixScorer(random_model(hf.LlamaConfig(**SMALL, max_position_embeddings=20)))
    assert np.isfinite(scorer.score(list(range(15)), list(range(6))))  # the last token is not fed: 20 positions
    with pytest.raises(BadInput, match=r"prompt 1 and reasoning 0 are 21 tokens together, more than the model's 20 positions; leave out"):
        scorer.score_all([[1], list(range(15))], [list(range(7)), [1]])


@pytest.mark.parametrize(("prompts", "reasonings"), [([], [[1]]), ([[1]], []), ([[1], []], [[1]]), ([[1]], [[], [1]])])
def test_nothing_to_score(prompts: Any, reasonings: Any) -> None:
    scorer = PrefixScorer(random_model(hf.LlamaConfig(**SMALL)))
    with pytest.raises(BadInput, match="at least one token in each"):
        scorer.score_all(prompts, reasonings)


@pytest.mark.parametrize("wrong", [-1, 97, 5000])
@pytest.mark.parametrize("where", ["prompt", "reasoning"])
def test_ids_of_another_vocabulary(wrong: int, where: str) -> None:
    scorer = PrefixScorer(random_model(hf.LlamaConfig(**SMALL)))
    pair = ([1, wrong, 2], [3]) if where == "prompt" else ([1], [2, wrong])
    with pytest.raises(
        BadInput, match=rf"tokens do not fit the scorer: found token id {wrong}, its vocabulary holds token ids 0 to 96; score"
    ):
        scorer.score(*pair)


def test_check_ids() -> None:
    check_ids([[0, 9], np.array([5]), []], 10)
    check_ids([[10**9]], None)
    with pytest.raises(BadInput, match="found token id -3, its vocabulary holds token ids from 0;"):
        check_ids([[2, -3]], None)
    with pytest.raises(BadInput, match="found token id 10,"):
        check_ids([[0], [10, 1]], 10)


# ------------------------------------------------------------------------------------------------------------- the rest


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_make_scorer(tiny: Any) -> None:
    scorer, tokenizer, size = make_scorer("tiny", device="cpu")
    assert size == 578 and tokenizer is not None and isinstance(scorer, PrefixScorer)
    assert tokenizer.get_vocab() == tiny.tokenizer.get_vocab()
    assert scorer.score([5, 6], [7]) == PrefixScorer(tiny.model).score([5, 6], [7])
    assert make_scorer("tiny", device="cpu", dtype="bfloat16").scorer.precision == "bfloat16"
    served = make_scorer("https://example.org/v1#name")
    assert served.tokenizer is None and served.vocabulary_size is None and served.scorer.precision == "as served"
    with pytest.raises(BadInput, match="is a server, which computes where and how it was started"):
        make_scorer("http://localhost:1", dtype="bfloat16")
    with pytest.raises(BadInput, match="did you mean 'tiny'"):
        make_scorer("tinny")


@pytest.mark.parametrize(
    ("lengths", "budget", "padded", "expected"),
    [
        ([], 5, False, []),
        ([9], 5, False, [(0, 1)]),
        ([2, 2, 3, 3], 7, False, [(0, 3), (3, 4)]),
        ([2, 2, 3, 3], 7, True, [(0, 2), (2, 4)]),
        ([2, 2, 3, 3], 10, False, [(0, 4)]),
        ([1, 1, 1, 4], 99, False, [(0, 3), (3, 4)]),  # 16 padded for 7 tokens
        ([1, 2, 3], 99, False, [(0, 3)]),  # 9 padded for 6
        ([8, 8], 5, True, [(0, 1), (1, 2)]),
    ],
)
def test_cuts(lengths: list[int], budget: int, padded: bool, expected: list[tuple[int, int]]) -> None:
    assert [(part.start, part.stop) for part in cuts(lengths, budget, padded)] == expected


def test_tokens_per_call_on_a_cpu(tiny: Any) -> None:
    assert tokens_per_call(Policy(tiny.model)) == 4096
    unsplit = random_model(hf.GraniteConfig(**{**SMALL, "vocab_size": 262144}, logits_scaling=4.0)).cpu()
    assert tokens_per_call(Policy(unsplit)) == 512  # of 262,144 logits of four bytes


def test_a_cut_begins_to_count_anew() -> None:
    assert list(cuts([3, 3, 3, 3, 3], budget=6)) == [range(0, 2), range(2, 4), range(4, 5)]
