"""Whether a run fits: sizes counted by hand, held against what a run really takes, and a refusal before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tether.core.config import validate
from tether.core.errors import BadInput, ModelUnavailable
from tether.models.lora import add_lora, save_model
from tether.training import memory
from tether.training.build import Built, build
from tether.training.distributed.ranks import Ranks
from tether.training.memory import MemoryPlan, Shape, counted, measured_shape, plan_memory, shape_of
from tether.training.settings import RunSettings

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
THREE_B = 3_085_938_688
CARD = 24_000_000_000


@pytest.fixture(scope="module")
def three_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of Qwen2.5-3B and no weights."""
    folder = tmp_path_factory.mktemp("three_b")
    config = hf.Qwen2Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shape(three_b: str) -> Shape:
    found = shape_of(three_b)
    assert found is not None
    return found


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _: CARD)


def _settings(name: str = "m", **sections: Any) -> RunSettings:
    model = {"name": name, "device": "cpu", "dtype": "bfloat16", **sections.pop("model", {})}
    return validate(RunSettings, {"env": {"name": "frozen_lake"}, "model": model, **sections})


def _count(shapes: dict[str, Shape], available: int = 10**12, device: torch.device = CUDA, **sections: Any) -> MemoryPlan:
    settings = _settings(**sections)
    return counted(settings, device, available, shapes)


def test_three_billion_parameters(shape: Shape) -> None:
    """All counted by hand from the published shape."""
    assert shape.parameters == shape.backbone == THREE_B
    assert shape.linear == {
        "q_proj": 36 * 4096,
        "k_proj": 36 * 2304,
        "v_proj": 36 * 2304,
        "o_proj": 36 * 4096,
        "gate_proj": 36 * 13056,
        "up_proj": 36 * 13056,
        "down_proj": 36 * 13056,
    }
    assert shape.cached == 2 * 36 * 2 * 128 and shape.positions == 32768


def test_counting_touches_nothing_random(three_b: str) -> None:
    before = torch.random.get_rng_state()
    shape_of(three_b)
    assert torch.equal(before, torch.random.get_rng_state())


def test_needs_in_bfloat16_and_float32(shape: Shape) -> None:
    grpo = _count({"m": shape})
    assert grpo.needs == {
        "weights": 6_171_877_376,
        "optimiser": 37_031_264_256,  # float32 masters and two moments
        "gradients": 12_343_754_752,
        "cache": 132_710_400,  # 18,432 numbers of two bytes for each of 3,600 tokens
        "logits": 2**30,
    }
    assert grpo.total == 56_753_348_608
    assert grpo.words() == "weights 6.2 GB, optimiser 37.0 GB, gradients 12.3 GB, cache 0.1 GB, logits 1.1 GB = 56.8 GB of 1000.0 GB"
    plain = _count({"m": shape}, model={"dtype": "float32"}).needs
    assert (plain["weights"], plain["optimiser"], plain["gradients"]) == (4 * THREE_B, 8 * THREE_B, 4 * THREE_B)
    assert plain["cache"] == 2 * 132_710_400
    assert _count({"m": shape}, model={"dtype": None}).needs == grpo.needs  # a card computes in bfloat16
    assert _count({"m": shape}, device=CPU, model={"dtype": None}).needs["weights"] == 4 * THREE_B


def test_ranks_share_the_optimiser(shape: Shape) -> None:
    """Four ranks hold a quarter of masters and moments each; sixteen as much as the largest parameter has: 151,936 words x 2,048."""
    settings = _settings(algorithm={"name": "ppo"})
    alone, four, sixteen = (counted(settings, CUDA, 10**12, {"m": shape}, num_ranks).needs for num_ranks in (1, 4, 16))
    assert four["optimiser"] == alone["optimiser"] // 4 == 3 * THREE_B
    assert four["critic"] == (2 + 4 + 3) * THREE_B
    assert sixteen["optimiser"] == 12 * 151_936 * 2048
    for name in ("weights", "gradients", "cache", "logits"):
        assert four[name] == alone[name]


def test_fsdp_divides_all_but_the_engines_weights(shape: Shape) -> None:
    """By hand: 311,166,976 numbers in the embedding and the last norm, 77,076,992 in each of 36 layers."""
    assert (shape.outside, shape.layer) == (311_166_976, 77_076_992)
    gathered = 2 * (311_166_976 + 2 * 77_076_992) + (2 + 4) * 311_166_976
    settings = _settings(learner={"sharding": "fsdp"}, algorithm={"name": "ppo"})
    alone, four = (counted(settings, CUDA, 10**12, {"m": shape}, num_ranks).needs for num_ranks in (1, 4))
    assert "gathered" not in alone and alone["gradients"] == 4 * THREE_B  # nothing to divide among
    assert (four["weights"], four["optimiser"], four["gradients"]) == (2 * THREE_B, 3 * THREE_B, THREE_B)
    assert four["gathered"] == gathered and four["critic"] == 6 * THREE_B + gathered and "loading" not in four
    grpo = _settings(learner={"sharding": "fsdp"})
    loaded = counted(grpo, CUDA, 10**12, {"m": shape}, 64)
    assert loaded.total == 4 * (THREE_B + THREE_B // 64)  # the float32 weights are whole on every card while they are divided


def test_a_run_that_fsdp_would_fit_is_told_so(three_b: str, little_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    four = Ranks()
    four.size = 4
    settings = _settings(three_b)
    with pytest.raises(BadInput, match=r"does not fit on cpu: .*try lora\.rank=16 .*learner\.sharding=fsdp \(\d+\.\d GB\)"):
        plan_memory(settings, four)
    monkeypatch.setattr(
        memory, "available_memory", lambda _: CARD // 4
    )  # and where nothing would fit, servers that sample are among what needs less
    settings = _settings(three_b, learner={"sharding": "fsdp"}, algorithm={"name": "ppo"})
    words = r"weights 6\.2 GB, .*, learner\.sharding=fsdp with servers that sample \(rollout\.engine\) \(36\.6 GB\)"
    with pytest.raises(BadInput, match=words):
        plan_memory(settings, four)
    served = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"engine": "http://a:1"})})
    with pytest.raises(
        BadInput, match=r"does not fit on cpu: optimiser 9\.3 GB, .*published weights 6\.2 GB.* more ranks, or a smaller model"
    ):
        plan_memory(served, four)


def test_no_rank_holds_whole_weights_where_servers_sample(shape: Shape) -> None:
    """16 bytes a weight on four ranks, and what is gathered; no weights, no cache, and nothing is loaded whole."""
    gathered = 2 * (311_166_976 + 2 * 77_076_992) + (2 + 4) * 311_166_976
    settings = _settings(learner={"sharding": "fsdp"}, rollout={"engine": "http://a:1"}, algorithm={"name": "ppo", "kl_coef": 0.1})
    needs, on_host = (counted(settings, place, 10**12, {"m": shape}, 4).needs for place in (CUDA, CPU))
    assert needs == {
        "optimiser": 3 * THREE_B,
        "gradients": THREE_B,
        "gathered": gathered,
        "critic": 4 * THREE_B + gathered,
        "reference model": THREE_B // 2,
        "cache": 0,
        "logits": 2**30,
    }
    assert on_host["published weights"] == 2 * THREE_B and "checkpoint copy" in on_host
    alone = counted(settings, CUDA, 10**12, {"m": shape}, 1).needs
    assert alone["weights"] == 2 * THREE_B and alone["cache"] == 0  # one rank holds everything


def test_critic_reference_scorer_and_float8(shape: Shape) -> None:
    other = Shape(parameters=1000, backbone=900, linear={}, cached=1, positions=64, kept=1)
    both = {"m": shape, "other": other}
    assert _count(both, algorithm={"name": "ppo"}).needs["critic"] == 18 * THREE_B
    assert "critic" not in _count(both, algorithm={"name": "ppo"}, critic={"shared": True}).needs
    assert _count(both, algorithm={"name": "ppo"}, critic={"model": "other"}).needs["critic"] == 18 * 900 + 4 * 100
    assert _count(both, algorithm={"kl_coef": 0.1}).needs["reference model"] == 2 * THREE_B
    assert _count(both, algorithm={"kl_coef": 0.1, "reference": "other"}).needs["reference model"] == 2000
    assert _count(both, diagnosis={"scorer": "reference"}).needs["scorer"] == 2 * THREE_B
    assert _count(both, diagnosis={"scorer": "other"}).needs["scorer"] == 2000
    assert _count(both, rollout={"precision": "fp8"}).needs["weights in float8"] == THREE_B - both["m"].outside
    for none in ({"scorer": "http://localhost:1"}, {"scorer": "other", "every": 0}, {"scorer": "policy"}):
        assert "scorer" not in _count(both, diagnosis=none).needs


def test_adapters(shape: Shape) -> None:
    """Rank 16 beside 1,870,848 rows and columns; reference and scorer are the model without them."""
    adapters = 16 * 1_870_848
    found = _count({"m": shape}, lora={"rank": 16}, algorithm={"kl_coef": 0.1}, diagnosis={"scorer": "reference"}).needs
    assert found == {
        "weights": 2 * THREE_B + 4 * adapters,
        "optimiser": 8 * adapters,
        "gradients": 4 * adapters,
        "cache": 132_710_400,
        "logits": 2**30,
    }
    few = _count({"m": shape}, lora={"rank": 2, "targets": ["q_proj", "o_proj"]}).needs
    assert few["gradients"] == 4 * 2 * 36 * 2 * 4096
    assert _count({"m": shape}, lora={"rank": 2, "targets": "q_proj"}).needs["gradients"] == 4 * 2 * 36 * 4096
    ppo = _count({"m": shape}, lora={"rank": 16}, algorithm={"name": "ppo"}).needs
    assert ppo["critic"] == 16 * THREE_B, "beside adapters it trains in float32"


def test_what_is_left_is_shared_by_cache_and_activations(shape: Shape) -> None:
    needed = 56_753_348_608
    plenty = _count({"m": shape}, needed + 100 * 10**9)
    assert plenty.cache == 132_710_400 + 25 * 10**9 and plenty.notes == []
    tight = _count({"m": shape}, needed + 30 * 10**9)
    (note,) = tight.notes
    assert note.startswith("little memory is left for updates (weights 6.2 GB, ") and "= 56.8 GB of 86.8 GB)" in note
    assert note.endswith("; they are computed again, which takes a third more time")
    (warning,) = _count({"m": shape}, needed + 30 * 10**9, learner={"gradient_checkpointing": False}).notes
    assert warning.endswith("; leave learner.gradient_checkpointing at null")
    assert _count({"m": shape}, needed + 30 * 10**9, learner={"gradient_checkpointing": True}).notes == []
    assert _count({"m": shape}, needed + 30 * 10**9, learner={"micro_tokens": 1024}).notes == []
    assert _count({"m": shape}, needed - 1).cache == 132_710_400


def test_on_a_card_the_cache_takes_its_share_at_once(shape: Shape) -> None:
    """48 GB are left and activations take 37: beside a cache of 128 rows they do not fit, beside one of a few rows they do."""
    spare = 48 * 10**9
    assert len(_count({"m": shape}, 56_753_348_608 + spare).notes) == 1
    assert _count({"m": shape}, 56_753_348_608 + spare, rollout={"max_rows": 8}).notes == []
    assert _count({"m": shape}, 56_753_348_608 + spare, device=CPU).notes == [
        "checkpoints are written in the foreground: a copy of 43.2 GB would not fit beside training"
    ]


def test_on_a_cpu_the_copy_of_a_checkpoint_counts_where_it_fits(shape: Shape) -> None:
    """14 bytes a parameter: bfloat16 weights, float32 ones and two moments. It must fit beside the activations, 1.3 x 1,732,608 x 2 bytes x 8192 tokens."""
    copied, activations = 14 * THREE_B, 36_903_164_313
    plan = _count({"m": shape}, device=CPU)
    assert plan.background and plan.needs["checkpoint copy"] == copied == 43_203_141_632
    enough = plan.total + activations
    assert _count({"m": shape}, enough, device=CPU).background
    short = _count({"m": shape}, enough - 1, device=CPU)
    assert not short.background and "checkpoint copy" not in short.needs and short.total == plan.total - copied
    assert "checkpoint copy" not in _count({"m": shape}, enough - 1).needs  # on a card it lies in the host's memory
    assert _count({"m": shape}, enough - 1).background
    adapters = _count({"m": shape}, device=CPU, lora={"rank": 16})
    assert adapters.needs["checkpoint copy"] == 12 * 16 * sum(shape.linear.values())
    critic = _count({"m": shape}, device=CPU, algorithm={"name": "ppo"})
    assert critic.needs["checkpoint copy"] == (14 + 14) * THREE_B  # both also as they compute, in bfloat16


def test_the_last_byte_counts(three_b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _settings(three_b, lora={"rank": 16})
    fit = plan_memory(settings)
    assert fit is not None
    monkeypatch.setattr(memory, "available_memory", lambda _: fit.total)
    assert plan_memory(settings) is not None
    monkeypatch.setattr(memory, "available_memory", lambda _: fit.total - 1)
    with pytest.raises(BadInput, match="does not fit on cpu"):
        plan_memory(settings)


def test_a_cache_that_was_asked_for(shape: Shape) -> None:
    asked = _count({"m": shape}, rollout={"cache_gb": 4})
    assert asked.needs["cache"] == asked.cache == 4 * 2**30
    few = _count({"m": shape}, rollout={"cache_gb": 4, "max_rows": 2})
    assert few.needs["cache"] == 2 * 132_710_400, "no more than its rows can fill"
    assert _count({"m": shape}, rollout={"max_context": 10**6}).needs["cache"] == 18432 * 2 * 32768


def test_refused_with_the_sizes_and_what_would_need_less(three_b: str, little_memory: None) -> None:
    with pytest.raises(BadInput) as caught:
        plan_memory(_settings(three_b, algorithm={"name": "ppo"}))
    assert str(caught.value) == (
        f"model '{three_b}' does not fit on cpu: weights 6.2 GB, optimiser 37.0 GB, gradients 12.3 GB, critic 55.5 GB, cache 0.1 GB, "
        "logits 0.1 GB = 111.4 GB of 24.0 GB; try lora.rank=16 with critic.shared=true (6.9 GB), or a smaller model"
    )


@pytest.mark.parametrize(("held", "words"), [(120, ", where other programs hold 120.0 GB (see nvidia-smi)"), (2, "")])
def test_who_has_the_memory_of_a_card(held: int, words: str, three_b: str, little_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 150 GB this process has reserved 5; CUDA itself takes less than 2 GiB for it, which is nobody else's."""
    monkeypatch.setattr(memory, "check_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9 * (145 - held), 150 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 10**9)
    with pytest.raises(BadInput) as caught:
        plan_memory(_settings(three_b, algorithm={"name": "ppo"}))
    assert str(caught.value).startswith(f"model '{three_b}' does not fit on cuda{words}: weights 6.2 GB, ")


def test_refused_where_nothing_helps(three_b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _: 10**9)
    with pytest.raises(BadInput, match=r"= 6.9 GB of 1.0 GB; take a smaller model, or a device with more memory$"):
        plan_memory(_settings(three_b, lora={"rank": 16}))
    with pytest.raises(BadInput, match=r"try model.dtype=bfloat16 \(6.9 GB\), or a smaller model$"):
        plan_memory(_settings(three_b, lora={"rank": 16}, model={"dtype": "float32"}))


def test_nothing_is_loaded_before_it_fits(three_b: str, little_memory: None) -> None:
    """The folder has no weights: loading them would be another error."""
    with pytest.raises(BadInput, match="does not fit on cpu"):
        build(_settings(three_b), None)
    with pytest.raises(ModelUnavailable, match="cannot read the model"):
        build(_settings(three_b, lora={"rank": 1}), None)


def test_models_that_cannot_be_counted(tmp_path: Path, little_memory: None) -> None:
    for name in (str(tmp_path / "x.gguf"), str(tmp_path), "nobody/nothing"):
        assert shape_of(name) is None
        assert plan_memory(_settings(name)) is None
    with pytest.raises(BadInput, match="device 'abacus' cannot be used here"):
        plan_memory(_settings("tiny", model={"device": "abacus"}))


def test_a_device_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda _: None)
    assert plan_memory(_settings("tiny")) is None


def test_a_head_of_its_own_is_no_part_of_the_trunk(small_llama: Any) -> None:
    found = measured_shape(small_llama())
    assert found.parameters - found.backbone == 61 * 32
    assert found.linear["q_proj"] == 2 * 64 and "lm_head" not in found.linear
    assert found.cached == 2 * 2 * 2 * 8


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _really_taken(parts: Built) -> dict[str, int]:
    """What the policy and its optimiser hold, and will once the first update is made."""
    optimizer = parts.learner._optimizers["policy"]
    masters = _bytes(optimizer._masters[n] for n in optimizer._rounded)
    to_come, trained = optimizer.bytes_to_come, _bytes(optimizer._masters.values())
    assert to_come == 3 * trained
    return {"weights": _bytes(parts.policy.module.parameters()), "optimiser": masters + 2 * trained, "gradients": trained}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"model": {"dtype": "float32"}}, marks=pytest.mark.long),
        {},
        pytest.param({"lora": {"rank": 4}}, marks=pytest.mark.long),
        pytest.param({"lora": {"rank": 4, "targets": ["q_proj", "up_proj"]}}, marks=pytest.mark.long),
    ],
    ids=["float32", "bfloat16", "adapters", "some adapters"],
)
def test_counted_is_what_is_taken(sections: dict[str, Any], small_policy: Callable[..., str]) -> None:
    parts = build(_settings(small_policy(2), **sections), None)
    assert parts.plan is not None
    assert {what: parts.plan.needs[what] for what in ("weights", "optimiser", "gradients")} == _really_taken(parts)


def test_counted_is_what_a_critic_takes(small_policy: Callable[..., str]) -> None:
    parts = build(_settings(small_policy(2), algorithm={"name": "ppo"}), None)
    assert parts.plan is not None and parts.learner.critic is not None
    optimizer = parts.learner._optimizers["critic"]
    held = _bytes(parts.learner.critic.policy.module.parameters()) + _bytes(optimizer._masters[n] for n in optimizer._rounded)
    assert parts.plan.needs["critic"] == held + optimizer.bytes_to_come


@pytest.mark.long
def test_a_folder_of_adapters(tmp_path: Path, tiny_model: Any) -> None:
    add_lora(tiny_model, 4, 8)
    tiny_model.name_or_path = "tiny"
    save_model(tiny_model, tmp_path / "mine")
    settings = _settings(str(tmp_path / "mine"))
    found = plan_memory(settings)
    assert found is not None
    adapters = sum(parameter.numel() for parameter in tiny_model.parameters() if parameter.requires_grad)
    header = 16384
    assert 4 * adapters <= found.needs["gradients"] <= 4 * adapters + header
    model = build(settings, None).policy.module
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
