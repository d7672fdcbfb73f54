"""Our loss against TRL 1.16.0's, which computes it inside `GRPOTrainer._compute_loss`: that method is run on random log-probs.

The method is called with an object that holds the settings it reads and hands out given log-probs instead of a model's. TRL is no
dependency: the tests run where that version is importable and are skipped elsewhere.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tether.algorithms.objective import clipped_policy_loss, k3, sequence_mean_token_mean, sequence_mean_token_sum, token_mean

trl: Any = pytest.importorskip("trl", reason="TRL is not installed; the comparison needs TRL 1.16.0")
if trl.__version__ != "1.16.0":
    pytest.skip(f"TRL is {trl.__version__}; the comparison reads private parts of 1.16.0", allow_module_level=True)
grpo_trainer: Any = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL's GRPO trainer does not import here")

MAX_TOKENS = 40
RULES = {"grpo": sequence_mean_token_mean, "bnpo": token_mean, "dapo": token_mean, "dr_grpo": sequence_mean_token_sum}


def trl_loss(kind: str, logprobs: torch.Tensor, inputs: dict[str, Any], high: float, delta: float | None, beta: float) -> torch.Tensor:
    """`_compute_loss` on log-probs that are given."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    loss: torch.Tensor = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", sorted(RULES))
@pytest.mark.parametrize(("high", "delta", "beta"), [(0.28, None, 0.0), (0.2, None, 0.04), (0.28, 3.0, 0.0)])
def test_loss_and_gradient(kind: str, seed: int, high: float, delta: float | None, beta: float) -> None:
    """TRL's `delta` is our dual clip."""
    generator = torch.Generator().manual_seed(seed)
    sampled, shift, away = (torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    mask = torch.arange(9) < torch.randint(1, 10, (5, 1), generator=generator)
    mine, theirs = ((sampled + shift).requires_grad_() for _ in range(2))
    reference = sampled + away
    ours = clipped_policy_loss(mine, sampled, advantages[:, None].expand(5, 9), 0.2, high, delta).loss_N + beta * k3(mine, reference)
    total = (RULES[kind](mask, torch.arange(5), float(MAX_TOKENS)).double() * ours).sum()
    inputs = {
        "prompt_ids": torch.zeros(5, 1),
        "prompt_mask": torch.ones(5, 1),
        "completion_ids": torch.zeros(5, 9),
        "completion_mask": mask.double(),
        "advantages": advantages,
        "old_per_token_logps": sampled,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = trl_loss(kind, theirs, inputs, high, delta, beta)
    total.backward()
    loss.backward()
    assert mine.grad is not None and theirs.grad is not None
    assert torch.allclose(total, loss, rtol=1e-6, atol=1e-6)
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
