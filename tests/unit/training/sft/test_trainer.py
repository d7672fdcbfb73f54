"""The supervised loss by hand, an update that does not depend on how memory cuts it, early stopping, and the best weights."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tether.core.enums import FinishReason
from tether.core.errors import DivergedModel
from tether.core.types import Turn
from tether.models.policy import Policy
from tether.training.sft.demonstrations import Demonstration, demonstration
from tether.training.sft.settings import SftLearnerSettings, default_learning_rate
from tether.training.sft.trainer import SupervisedLearner, SupervisedTrainer

Build = Callable[..., Any]


def _demonstration(*turns: tuple[tuple[int, ...], tuple[int, ...]], prompt: str = "p") -> Demonstration:
    return demonstration(prompt, [Turn(fed, said, (0.0,) * len(said), FinishReason.STOP_TEXT, "", None) for fed, said in turns])


TWO = [_demonstration(((5, 9, 2, 7), (30, 31, 32))), _demonstration(((8, 1), (30, 30)), ((4, 5), (30, 30, 30)))]
OTHERS = [_demonstration(((n, n + 1, 3), (n + 10, 40, 41))) for n in range(12)]


def _constant(model: Any) -> Any:
    """A model that gives every next token the same chances: 1/2 for 30, 1/4 for 31, 1/8 for 32, and 1/8 for the other 58 together."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0  # so the normed features are sqrt(32) in the first place and 0 elsewhere
        chances = torch.full((61,), 1 / 8 / 58)
        chances[30], chances[31], chances[32] = 1 / 2, 1 / 4, 1 / 8
        model.lm_head.weight[:, 0] = chances.log() / math.sqrt(32)
    return model


def _trainer(model: Any, rate: float = 1e-3, **settings: Any) -> SupervisedTrainer:
    return SupervisedTrainer(Policy(model), SftLearnerSettings(**settings), rate=rate, seed=0, dtype=None)


def _train(trainer: SupervisedTrainer, steps: int, **more: Any) -> None:
    trainer.train(TWO + OTHERS, steps, lambda *_: None, **more)


def test_the_loss_by_hand(small_llama: Build) -> None:
    """-log2 of the responses: 1, 2, 3 and five times 1, so 11 ln 2 over 8 tokens = 0.953077. A mean of the rows' means would be 1.039721."""
    learner = SupervisedLearner(Policy(_constant(small_llama())), SftLearnerSettings(), None)
    assert learner.loss_of(TWO) == pytest.approx(0.953077, abs=1e-5)
    trainer = _trainer(_constant(small_llama()))
    trainer.train(TWO, 1, lambda *_: None)
    assert trainer.history.losses == {1: pytest.approx(0.953077, abs=1e-5)}
    assert trainer.history.tokens == 8


def test_the_gradient_is_that_of_cross_entropy(small_llama: Build) -> None:
    """One step of plain torch on padded rows, by the model's own forward pass: the same weights after AdamW."""
    ours, plain = small_llama(), small_llama()
    _trainer(ours, rate=1e-2, max_grad_norm=0.5).train(TWO, 1, lambda *_: None)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    for each in TWO:
        (sequence,) = each.trajectory.sequences
        ids, mask = torch.tensor([sequence.token_ids]), torch.tensor(sequence.loss_mask)
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1], dim=-1)
        losses += [-logprobs[place, ids[0, place + 1]] for place in range(len(mask) - 1) if mask[place + 1]]
    (sum(losses) / 8).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0, msg=name)


def test_micro_batches_do_not_change_the_update(small_llama: Build) -> None:
    whole, cut = small_llama(), small_llama()
    _train(_trainer(whole), 2)
    _train(_trainer(cut, micro_tokens=9), 2)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_weights_and_every_pass_another_order(small_llama: Build) -> None:
    first, again = small_llama(), small_llama()
    one = _trainer(first, update_batch=3)
    _train(one, 12)
    _train(_trainer(again, update_batch=3), 12)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    batches = list(one._minibatches(TWO + OTHERS, 10))
    assert [len(batch) for batch in batches] == [3, 3, 3, 3, 2] * 2
    passes = [[id(each) for batch in part for each in batch] for part in (batches[:5], batches[5:])]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(id(each) for each in TWO + OTHERS) and passes[0] != passes[1]


def test_it_stops_when_the_held_out_loss_no_longer_falls_and_keeps_the_best(small_llama: Build) -> None:
    model = small_llama()
    trainer = _trainer(model, rate=0.3, schedule="constant", warmup_ratio=0.0)
    _train(trainer, 40, held_out=TWO, evaluate_every=2, patience=3)
    history = trainer.history
    assert history.stopped_early and history.steps < 40
    later = [step for step in history.held_out if step > history.best_step]
    assert len(later) == 3 and history.steps == later[-1]
    assert history.held_out[history.best_step] == min(history.held_out.values())
    assert trainer.learner.loss_of(TWO) == pytest.approx(history.held_out[history.steps], abs=1e-5)
    with trainer.best_weights():
        assert trainer.learner.loss_of(TWO) == pytest.approx(history.held_out[history.best_step], abs=1e-5)


def test_the_start_is_the_best_where_training_only_harms(small_llama: Build) -> None:
    model = _constant(small_llama())
    before = copy.deepcopy(model)
    trainer = _trainer(model, rate=0.5)
    trainer.train(OTHERS, 6, lambda *_: None, held_out=[TWO[1]], evaluate_every=1, patience=2)
    assert trainer.history.best_step == 0 and trainer.history.steps == 2
    with trainer.best_weights():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_without_held_out_the_last_weights_are_kept(small_llama: Build) -> None:
    model = small_llama()
    trainer = _trainer(model)
    _train(trainer, 3)
    last = copy.deepcopy(model)
    with trainer.best_weights():
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), last.parameters(), strict=True))
    assert trainer.history.best_step == 3 and trainer.history.held_out == {}


def test_in_bfloat16_the_masters_are_what_is_kept(small_llama: Build) -> None:
    model = small_llama()
    trainer = SupervisedTrainer(Policy(model), SftLearnerSettings(), rate=1e-3, seed=0, dtype=torch.bfloat16)
    _train(trainer, 4, held_out=TWO, evaluate_every=2, patience=9)
    rounded = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(parameter.dtype == torch.bfloat16 for parameter in rounded)
    assert trainer.history.best_step == 4
    with trainer.best_weights():
        exact = [parameter.detach().clone() for parameter in model.parameters()]
    assert all(parameter.dtype == torch.float32 for parameter in exact)
    assert all(torch.equal(one.bfloat16(), other) for one, other in zip(exact, rounded, strict=True))
    assert any(not torch.equal(one, other.float()) for one, other in zip(exact, rounded, strict=True))


def test_numbers_that_are_not_finite_end_it(small_llama: Build) -> None:
    model = small_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(DivergedModel, match=r"not finite in 10 updates in a row; lower learner\.learning_rate"):
        _train(_trainer(model), 12)


def test_the_default_learning_rate() -> None:
    assert default_learning_rate(135_000_000, adapters=False) == 1e-4
    assert default_learning_rate(1_540_000_000, adapters=False) == 2e-5
    assert default_learning_rate(1_540_000_000, adapters=True) == 2e-4
