"""The parts of a run: what its settings ask for is what is built, in the right precision, and from a checkpoint the policy alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.algorithms.objective import k3
from tether.core.config import validate
from tether.core.errors import BadInput, ModelUnavailable
from tether.models.load import load_model
from tether.models.logprobs import token_logprobs
from tether.models.lora import add_lora
from tether.models.policy import Policy
from tether.rollout.engines.registry import make_engine
from tether.rollout.engines.scripted import ScriptedEngine
from tether.training.agent import Agent
from tether.training.build import Built, build, check_engine_trains
from tether.training.checkpoint import save_checkpoint, write_model
from tether.training.memory import shape_of, trains_adapters
from tether.training.resolve import resolve_settings
from tether.training.settings import RunSettings


def _build(checkpoint: Path | None = None, **sections: Any) -> Built:
    data = {"env": {"name": "frozen_lake"}, **sections, "model": {"device": "cpu", **sections.get("model", {})}}
    return build(validate(RunSettings, data), checkpoint)


def _optimizers(parts: Built) -> set[str]:
    state: Any = parts.learner.state()["optimizers"]
    return set(state)


def test_a_critic_only_where_the_algorithm_has_one() -> None:
    plain = _build()
    assert plain.learner.critic is None and plain.estimator._critic is None and _optimizers(plain) == {"policy"}
    own = _build(algorithm={"name": "ppo"})
    critic = own.learner.critic
    assert critic is not None and critic is own.estimator._critic
    assert not critic.shared and critic.policy.module is not own.policy.module and _optimizers(own) == {"policy", "head", "critic"}
    shared = _build(algorithm={"name": "ppo"}, critic={"shared": True})
    assert shared.learner.critic is not None and shared.learner.critic.policy is shared.learner.policy
    assert _optimizers(shared) == {"policy", "head"}
    assert _build(algorithm={"name": "grpo", "advantages": "bilevel_gae"}).learner.critic is not None


def test_a_reference_only_where_a_divergence_counts() -> None:
    assert _build().estimator._reference is None
    parts = _build(algorithm={"name": "grpo", "kl_coef": 0.1})
    reference = parts.estimator._reference
    assert reference is not None and reference._policy.module is not parts.policy.module
    assert not any(parameter.requires_grad for parameter in reference._policy.module.parameters())


def test_a_resumed_run_compares_with_the_model_it_started_from(tmp_path: Path, tiny: Any, tiny_model: Any) -> None:
    """The policy comes from the checkpoint, the reference does not."""
    with torch.no_grad():
        tiny_model.model.norm.weight.mul_(1.5)
    checkpoint = save_checkpoint(tmp_path, 3, tiny_model, tiny.tokenizer, {}, keep=1)
    parts = _build(checkpoint, algorithm={"name": "grpo", "kl_coef": 0.1})
    assert torch.equal(parts.policy.module.model.norm.weight, tiny_model.model.norm.weight)
    reference = parts.estimator._reference
    assert reference is not None and torch.equal(reference._policy.module.model.norm.weight, tiny.model.model.norm.weight)


def test_float32_masters_of_a_model_in_bfloat16(small_policy: Callable[..., str]) -> None:
    """The masters are what the file holds, which bfloat16 would round."""
    folder = small_policy(1)
    parts = _build(model={"name": folder, "dtype": "bfloat16"}, algorithm={"name": "ppo"})
    assert parts.policy.module.dtype == torch.bfloat16
    critic = parts.learner.critic
    assert critic is not None and critic.policy.module.base_model.dtype == torch.bfloat16
    assert critic.head.linear.weight.dtype == torch.float32
    with parts.learner.full_precision():
        start = load_model(folder, device="cpu").model
        assert all(torch.equal(a, b) for a, b in zip(parts.policy.module.parameters(), start.parameters(), strict=True))
    assert parts.policy.module.dtype == torch.bfloat16
    assert _build(model={"name": folder}).policy.module.dtype == torch.float32  # on a CPU, unless asked otherwise


def test_adapters(tmp_path: Path, tiny: Any, small_policy: Callable[..., str]) -> None:
    pytest.importorskip("peft")
    model = {"name": small_policy(1), "dtype": "bfloat16"}
    parts = _build(lora={"rank": 2, "alpha": 8}, model=model, algorithm={"name": "grpo", "kl_coef": 0.1})
    trained = {name for name, parameter in parts.policy.module.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    types = {parameter.requires_grad: parameter.dtype for parameter in parts.policy.module.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    assert parts.estimator._reference is not None and parts.estimator._reference._policy is parts.learner.policy
    checkpoint = save_checkpoint(tmp_path, 1, parts.policy.module, tiny.tokenizer, {}, keep=1)
    again = _build(checkpoint, lora={"rank": 2, "alpha": 8}, model={"name": small_policy(1)})
    pairs = dict(again.policy.module.named_parameters())
    assert all(torch.equal(parameter, pairs[name]) for name, parameter in parts.policy.module.named_parameters() if name in trained)


def test_a_run_from_adapters_starts_with_no_divergence(tmp_path: Path, tiny: Any, tiny_model: Any) -> None:
    """`tether sft` with lora.rank, then `tether train`: the reference is the model with the adapters of the start, also after a resume."""
    ids, mask, lengths = torch.arange(40, 52).view(1, 12), torch.arange(12)[None] > 0, torch.tensor([12])
    add_lora(tiny_model, 2, 8)
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1)
    write_model(tmp_path / "taught", tiny_model, tiny.tokenizer)
    sections = {"model": {"name": str(tmp_path / "taught")}, "algorithm": {"name": "grpo", "kl_coef": 0.1}}
    parts = _build(**sections)
    start = token_logprobs(parts.policy, ids, mask, lengths, 1.0, max_tokens=100)
    base = token_logprobs(Policy(tiny.model), ids, mask, lengths, 1.0, max_tokens=100)
    assert float(k3(start, base).mean()) > 0.1
    with torch.no_grad():
        for parameter in parts.policy.module.parameters():
            parameter.add_(0.02 * parameter.requires_grad)
    checkpoint = save_checkpoint(tmp_path, 1, parts.policy.module, tiny.tokenizer, {}, keep=1)
    for found in (parts, _build(checkpoint, **sections)):
        assert found.estimator._reference is not None
        reference = found.estimator._reference.logprobs(ids, mask, lengths, 1.0, 100)
        assert float(k3(start, reference).abs().max()) == 0
        assert not torch.equal(token_logprobs(found.policy, ids, mask, lengths, 1.0, max_tokens=100), start)


def test_a_run_from_merged_adapters_trains_all_weights(tmp_path: Path, small_policy: Callable[..., str]) -> None:
    """And counts as such; master weights, reference and critic begin at the same merged weights, and the agent is asked as it was taught."""
    base, tokenizer = load_model(small_policy(1), device="cpu")
    before = base.model.layers[0].mlp.up_proj.weight.clone()
    add_lora(base, 2, 8)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if ".lora_B." in name:
                parameter.add_(0.1)
    write_model(tmp_path / "taught", base, tokenizer, Agent({"frozen_lake": {"few_shot": 3}}))
    name = f"merged:{tmp_path / 'taught'}"
    sections = {"model": {"name": name, "dtype": "bfloat16"}, "algorithm": {"name": "ppo", "kl_coef": 0.1}}
    start = load_model(name, device="cpu").model
    own = start.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(own, before)
    parts = _build(**sections)
    critic, reference = parts.learner.critic, parts.estimator._reference
    assert critic is not None and reference is not None and reference._policy is not parts.learner.policy
    assert all(torch.equal(a, b) for a, b in zip(reference._policy.module.parameters(), parts.policy.module.parameters(), strict=True))
    assert torch.equal(critic.policy.module.base_model.layers[0].mlp.up_proj.weight, own.bfloat16())
    with parts.learner.full_precision():
        assert all(a.requires_grad and torch.equal(a, b) for a, b in zip(parts.policy.module.parameters(), start.parameters(), strict=True))
    settings = resolve_settings(None, {"env": {"name": "frozen_lake"}, **sections}, {})
    assert settings.env.options["few_shot"] == 3
    assert not trains_adapters(settings) and shape_of(name) == shape_of(small_policy(1))


def test_the_token_budget_of_the_run_is_that_of_the_alarms() -> None:
    lengths = [10.0] * 10 + [95.0] * 8
    for max_tokens, rules, alarms in ((100, {}, ["length_explosion"]), (200, {}, []), (200, {"max_tokens": 100}, ["length_explosion"])):
        monitor = _build(rollout={"max_tokens": max_tokens}, alarms={"rules": rules}, diagnosis={"every": 0}).monitor
        for step, length in enumerate(lengths, start=1):
            health = monitor.observe(step, prompts=[], reasonings=[], groups=[], metrics={"rollout/response_tokens": length})
        assert [alarm.name for alarm in health.alarms] == alarms


def test_a_critic_or_reference_that_cannot_be_had() -> None:
    with pytest.raises(ModelUnavailable, match=r"critic\.model: Hugging Face model 'nobody/none' is neither cached here nor reachable"):
        _build(algorithm={"name": "ppo"}, critic={"model": "nobody/none"})
    with pytest.raises(ModelUnavailable, match=r"algorithm\.reference: Hugging Face model 'nobody/none'"):
        _build(algorithm={"name": "grpo", "kl_coef": 0.1, "reference": "nobody/none"})


def test_a_critic_that_reads_other_tokens(tmp_path: Path, tiny: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    tiny.tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(BadInput, match=r"critic\.model '.*other' has a vocabulary of 99 tokens, the policy one of \d+"):
        _build(algorithm={"name": "ppo"}, critic={"model": str(tmp_path / "other")})


def test_an_engine_that_cannot_train_is_refused(tiny: Any) -> None:
    scripted = ScriptedEngine(lambda context, conversation, turn: "", tiny.tokenizer)
    with pytest.raises(ValueError, match="engine 'scripted' returns no log-probs and cannot take the policy's new weights; train with"):
        check_engine_trains(scripted)
    check_engine_trains(make_engine("native", Policy(tiny.model, tiny.tokenizer)))
