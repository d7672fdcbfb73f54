"""The one loss: its terms by hand, the three kinds of log-probs told apart, truncated importance sampling, and a further term."""

import math

import pytest
import torch

from tether.algorithms import objective
from tether.algorithms.objective import PolicyTokens, Term, active_terms, importance_weights, loss_terms, token_weights
from tether.algorithms.presets import preset

LOG2 = math.log(2)


def tokens(**changes: list[float] | None) -> PolicyTokens:
    """Two tokens: ratio 1.1 with advantage 1, ratio 0.5 with advantage -1 (below the lower clip of 0.8, so the bound decides)."""
    fields: dict[str, list[float] | None] = {
        "logprobs_N": [math.log(0.55), math.log(0.1)],
        "entropy_N": [0.3, 0.6],
        "old_N": [math.log(0.5), math.log(0.2)],
        "behavior_N": [math.log(0.25), math.log(0.4)],
        "advantages_N": [1.0, -1.0],
        "reference_N": None,
    }
    fields |= changes
    made = {name: None if values is None else torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return PolicyTokens(**made)  # type: ignore[arg-type]


def test_task_and_entropy_by_hand() -> None:
    """-1.1 * 1; for the second max(0.5, 0.8) * 1 = 0.8; entropy enters with -0.001."""
    found = loss_terms(preset("grpo"), tokens())
    assert list(found.terms) == ["task", "entropy"]
    assert found.terms["task"].tolist() == pytest.approx([-1.1, 0.8])
    assert found.terms["entropy"].tolist() == pytest.approx([-0.0003, -0.0006])
    assert found.total_N.tolist() == pytest.approx([-1.1003, 0.7994])
    assert found.policy.clipped_low_N.tolist() == [False, True]


def test_the_ratio_is_against_the_old_policy_and_not_against_the_sampler() -> None:
    found = loss_terms(preset("grpo"), tokens())
    assert found.policy.ratio_N.tolist() == pytest.approx([1.1, 0.5])
    moved = loss_terms(preset("grpo"), tokens(behavior_N=[-9.0, -9.0]))
    assert moved.total_N.tolist() == found.total_N.tolist()


def test_truncated_importance_sampling_by_hand() -> None:
    """old / behavior is 2 and 0.5; capped at 1.5 the task terms are 1.5 * -1.1 and 0.5 * 0.8. The entropy term is not weighted."""
    corrected = preset("grpo").model_copy(update={"importance_cap": 1.5})
    found = loss_terms(corrected, tokens())
    assert found.terms["task"].tolist() == pytest.approx([-1.65, 0.4])
    assert found.terms["entropy"].tolist() == pytest.approx([-0.0003, -0.0006])
    assert found.metrics["importance_weight"].tolist() == pytest.approx([1.5, 0.5])
    uncapped = loss_terms(preset("grpo").model_copy(update={"importance_cap": 100.0}), tokens())
    assert uncapped.terms["task"].tolist() == pytest.approx([-2.2, 0.4])


def test_importance_weights_carry_no_gradient() -> None:
    old = torch.tensor([0.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([-LOG2]), 10.0)
    assert weights is not None and not weights.requires_grad and weights.item() == pytest.approx(2.0)
    assert importance_weights(old, old, None) is None


def test_kl_is_in_the_loss_only_where_configured() -> None:
    """k3 with log r = log 2: 2 - 1 - log 2."""
    with_kl = preset("grpo").model_copy(update={"kl_coef": 0.1})
    reference = [math.log(0.55) + LOG2, math.log(0.1)]
    found = loss_terms(with_kl, tokens(reference_N=reference))
    assert found.terms["kl"].tolist() == pytest.approx([0.1 * (1 - LOG2), 0.0])
    assert found.metrics["kl_reference"].tolist() == pytest.approx([1 - LOG2, 0.0])
    in_reward = loss_terms(with_kl.model_copy(update={"kl_mode": "reward"}), tokens(reference_N=reference))
    assert "kl" not in in_reward.terms and "kl_reference" in in_reward.metrics
    assert "kl" not in loss_terms(with_kl, tokens()).terms


@pytest.mark.parametrize(
    ("changes", "has_reference", "expected"),
    [
        ({}, False, ("task", "entropy")),
        ({"entropy_coef": 0.0}, True, ("task",)),
        ({"kl_coef": 0.1}, True, ("task", "kl", "entropy")),
        ({"kl_coef": 0.1}, False, ("task", "entropy")),
        ({"kl_coef": 0.1, "kl_mode": "reward"}, True, ("task", "entropy")),
    ],
)
def test_active_terms(changes: dict[str, object], has_reference: bool, expected: tuple[str, ...]) -> None:
    assert active_terms(preset("grpo").model_copy(update={**changes}), has_reference=has_reference) == expected  # type: ignore[arg-type]


def test_a_further_term_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that is registered is in the total and in the metrics; learner and gradient decomposition read both from here."""
    extra = Term(active=lambda algorithm, has_reference: True, loss=lambda algorithm, tokens: 0.5 * tokens.logprobs_N.square())
    monkeypatch.setitem(objective.TERMS, "confidence", extra)
    before = loss_terms(preset("grpo").model_copy(update={"entropy_coef": 0.0}), tokens())
    expected = [0.5 * math.log(0.55) ** 2, 0.5 * math.log(0.1) ** 2]
    assert before.metrics["loss_confidence"].tolist() == pytest.approx(expected)
    assert before.total_N.tolist() == pytest.approx([-1.1 + expected[0], 0.8 + expected[1]])


def test_token_weights_use_the_budget_only_where_the_length_is_constant() -> None:
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    index_B = torch.tensor([0, 1])
    assert token_weights(preset("dr_grpo"), mask_BT, index_B, 10).sum().item() == pytest.approx(3 / 10 / 2)
    assert token_weights(preset("grpo"), mask_BT, index_B, 10).sum().item() == pytest.approx(1.0)
