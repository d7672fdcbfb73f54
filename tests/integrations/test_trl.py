"""The filter and the probe inside real TRL trainers: which rows take part in the loss and with which weight, and that nothing else changes."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed here; `make test-trl` runs these tests")

from trl import GRPOTrainer

import tether
from tether.core.errors import BadInput, MissingDependency
from tether.diagnostics.settings import AlarmRules
from tether.integrations.trl import GroupFilter, TetherCallback, TetherGRPOConfig, TetherGRPOTrainer, TetherMixin
from tether.integrations.trl.batch import check_order
from tether.integrations.trl.callback import PolicyScorer
from tether.integrations.trl.config import check_version, filter_of

pytestmark = pytest.mark.filterwarnings("default")
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
Make = Callable[..., Any]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---------------------------------------------------------------------------------------------------------- nothing changes


def test_off_is_bit_for_bit_trl(make_trainer: Make, tmp_path: Path) -> None:
    """A subclass without a filter, one whose filter keeps everything, and one with a probe at every step train exactly as TRL does."""
    plain = make_trainer(GRPOTrainer)
    plain.train()
    probe = TetherCallback(every=1, out=tmp_path / "run", pattern="(.*)", budget=1.0)
    for options in ({}, {"group_filter": "all"}, {"callbacks": [probe]}):
        trainer = make_trainer(TetherGRPOTrainer, **options)  # made right before it trains: making it sets the seeds
        trainer.train()
        apart = {name: float((value - weights(trainer)[name]).abs().max()) for name, value in weights(plain).items()}
        assert not any(apart.values()), (trainer.group_filter, max(apart.values()))
        assert logged(trainer, "loss") == logged(plain, "loss") and logged(trainer, "grad_norm") == logged(plain, "grad_norm")
    # The last one measured; its numbers are in TRL's log and, the same, in the run folder.
    run = tether.Run(tmp_path / "run")
    assert list(run.metrics("information/mi_seq").values()) == logged(trainer, "information/mi_seq")
    assert run.metrics("update/loss") == dict(enumerate(logged(trainer, "loss"), start=1)) and run.finished == "2 steps done"
    assert logged(trainer, "tether/probe_seconds")[0] > 0 and len(list(run.store.trajectories(1))) == 12
    assert run.metrics("groups/rv_mean").keys() == {1, 2} and "rollout/success" not in run.records[0].metrics


def test_ones_own_subclass(make_trainer: Make) -> None:
    class Mine(TetherMixin, GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> torch.Tensor:
            return 2 * super()._calculate_rewards(*args)

    trainer = make_trainer(Mine, group_filter=GroupFilter("top_k", num_groups=1), args={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "groups/kept") == [1.0] and logged(trainer, "groups/sampled") == [3.0]


def test_other_trainers_of_trl_are_refused_by_name(make_trainer: Make) -> None:
    """When the class is made; a mixin of one's own without a trainer is none."""
    from trl import RLOOTrainer
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    class Mixin(TetherMixin): ...

    class OwnRLOO(RLOOTrainer): ...

    for base, message in (
        (RLOOTrainer, "TRL's GRPOTrainer, and RLOOTrainer is none: use TetherGRPOTrainer with scale_rewards='none'"),
        (OwnRLOO, "OwnRLOO is none: use TetherGRPOTrainer with scale_rewards='none'"),
        (AsyncGRPOTrainer, "AsyncGRPOTrainer is none: it scores its completions in a process of its own"),
    ):
        for mixin in (TetherMixin, Mixin):
            with pytest.raises(BadInput, match=message):
                type("Mine", (mixin, base), {})

    for mixin in (TetherMixin, Mixin):
        with pytest.raises(
            BadInput, match="Mine names TetherMixin behind its trainer, whose methods hide the mixin's; put TetherMixin first"
        ):
            type("Mine", (GRPOTrainer, mixin), {})

    class Geometric(Mixin, GMPOTrainer): ...

    with pytest.raises(BadInput, match="does not know how GMPOTrainer normalises its loss"):
        make_trainer(Geometric, config=GMPOConfig, group_filter="top_p:0.9")
    assert make_trainer(Geometric, config=GMPOConfig).group_filter is None


# ------------------------------------------------------------------------------------------------------------- the loss


def micro_batches(trainer: Any) -> list[dict[str, Any]]:
    """The micro-batches of one generation batch, as the training loop would take them."""
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    parts = []
    for step in range(trainer.args.steps_per_generation):
        trainer._step = step
        parts.append(trainer._prepare_inputs(batch))
    return parts


LENGTHS = (5, 21, 9, 13, 28, 3, 17, 11, 7, 24, 15, 19)
"""Of the twelve completions of a generation batch: three groups of four, all different, so that every way to average gives another number."""


def sampled_places(row: int) -> list[int]:
    return [0 if row % 3 == 0 and 1 < place < 4 else 1 for place in range(LENGTHS[row])]


def written(prompts: Any, trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: completions of given lengths in place of generated ones; every third has a stretch that no model wrote."""
    rng = np.random.default_rng(7)
    ids = [rng.integers(5, 60, LENGTHS[row]).tolist() for row in range(len(prompts))]
    masks = [sampled_places(row) for row in range(len(prompts))]
    tokens = [trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"] for prompt in prompts]
    return {"prompt_ids": tokens, "completion_ids": ids, "env_mask": masks, "logprobs": None}


def by_row(completions: Any, **columns: Any) -> list[float]:
    """The second group varies most, the first less, the third not at all."""
    return [(0.0, 0.5, 0.0, 0.5, 0.0, 1.0, 1.0, 0.2, 1.0, 1.0, 1.0, 1.0)[row] for row in range(len(completions))]


def brute_force(trainer: Any, parts: list[dict[str, Any]], kept: list[list[bool]], advantages: list[torch.Tensor]) -> torch.Tensor:
    """TRL's loss of the kept rows alone, from the definitions: logits of the model, one row at a time."""
    kind, beta, coefficient = trainer.loss_type, trainer.beta, trainer.entropy_coef
    rows, bonuses, means = [], [], []
    for part, flags, row_advantages in zip(parts, kept, advantages, strict=True):
        inside, entropies = [], []
        for row in (number for number, flag in enumerate(flags) if flag):
            prompt = part["prompt_ids"][row][part["prompt_mask"][row].bool()]
            tokens = part["completion_ids"][row][part["completion_mask"][row].bool()]
            ids = torch.cat([prompt, tokens])[None]
            span = slice(len(prompt) - 1, ids.shape[1] - 1)
            logp = torch.log_softmax(trainer.model(input_ids=ids).logits[0, span].double(), -1)
            with torch.no_grad():
                reference = torch.log_softmax(trainer.ref_model(input_ids=ids).logits[0, span].double(), -1)
            at = torch.arange(len(tokens))
            new, ref = logp[at, tokens], reference[at, tokens]
            ratio, kl = torch.exp(new - new.detach()), torch.exp(ref - new) - (ref - new) - 1
            # TRL's `use_bias_correction_kl`: the ratio is 1 here and changes the gradient of the KL term alone.
            token_loss = -row_advantages[row].double() * ratio + beta * kl * (ratio if trainer.args.use_bias_correction_kl else 1.0)
            sampled = torch.tensor(sampled_places(int(part["row_number"][row]))).bool()
            inside.append(token_loss[sampled])
            entropies.append(-(logp.exp() * logp).sum(-1)[sampled])
        rows += inside
        if inside:
            bonuses.append(torch.cat(entropies).mean())
            means.append(torch.cat(inside).mean())
    if kind == "dapo":
        loss = torch.cat(rows).mean()
    elif kind == "grpo":
        loss = torch.stack([row.mean() for row in rows]).mean()
    elif kind == "dr_grpo":
        loss = torch.stack([row.sum() for row in rows]).sum() / (len(rows) * trainer.max_completion_length)
    else:
        loss = torch.stack(means).mean()
    return loss - coefficient * torch.stack(bonuses).mean()


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize(
    ("scale", "beta", "corrected", "accumulated"),
    [("none", 0.0, True, 6), ("kept_ratio", 0.5, True, 6), ("none", 0.5, False, 6), ("none", 0.5, True, 3)],
    ids=["plain", "kl_and_kept_ratio", "uncorrected_kl", "two_updates"],
)
def test_the_loss_is_that_of_the_kept_rows(
    make_trainer: Make, kind: str, scale: str, beta: float, corrected: bool, accumulated: int
) -> None:
    """Loss, gradient and the rows with a gradient, against brute force, with the entropy bonus, over a whole generation batch: six micro-batches of two
    rows, accumulated to one or two updates. One of three groups is kept, so some micro-batches mix kept and dropped rows, some hold none."""
    args = {
        "loss_type": kind, "beta": beta, "entropy_coef": 0.02, "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulated,
        "steps_per_generation": 6, "temperature": 1.0, "max_completion_length": 28, "use_bias_correction_kl": corrected,
    }  # fmt: skip
    given = {"group_filter": GroupFilter("top_k", num_groups=1, loss_scale=scale), "reward_funcs": by_row, "rollout_func": written}
    trainer = make_trainer(TetherGRPOTrainer, args=args, **given)
    if beta == 0.0:
        trainer.ref_model = trainer.model
    with torch.no_grad():  # else the KL term is zero
        for parameter in trainer.model.parameters():
            parameter.mul_(1.03)
    seen: dict[str, Any] = {}
    score = TetherGRPOTrainer._tether_mask

    def watch(self: Any, batch: Any, selection: Any, output: dict[str, Any]) -> None:
        output["row_number"] = torch.arange(len(output["completion_ids"]))  # TRL shuffles it with the rows
        seen.update(advantages=output["advantages"].clone())
        score(self, batch, selection, output)

    trainer._tether_mask = watch.__get__(trainer)
    parts = micro_batches(trainer)
    assert logged_now(trainer, "groups/kept") == [1.0]
    rows = [part["row_number"].tolist() for part in parts]
    kept = [[row // 4 == 1 for row in part] for part in rows]  # by hand: the second group has the largest variance
    assert any(any(part) and not all(part) for part in kept) and any(not any(part) for part in kept)
    logprobs: list[torch.Tensor] = []
    forward = trainer._get_per_token_logps_and_entropies

    def keep_gradients(*given: Any, **options: Any) -> Any:
        found = forward(*given, **options)
        found[0].retain_grad()
        logprobs.append(found[0])
        return found

    trainer._get_per_token_logps_and_entropies = keep_gradients
    trainer.model.zero_grad()
    loss = sum(trainer.compute_loss(trainer.model, part) for part in parts)
    loss.backward()
    took_part = [[bool(row.any()) for row in values.grad] for values in logprobs]
    assert took_part == kept, "which rows took part in the loss"
    mine = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    trainer.model.zero_grad()
    expected = brute_force(trainer, parts, kept, [seen["advantages"][part] for part in rows])
    expected = expected * (1 / 3 if scale == "kept_ratio" else 1.0) * (6 / accumulated)  # one such mean for each update
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    theirs = {name: parameter.grad for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((mine[name] - gradient).norm()) < 1e-4 * float(gradient.norm()), name


def logged_now(trainer: Any, name: str) -> list[float]:
    values: list[float] = trainer._metrics["train"][name]
    return values


def test_an_update_without_a_kept_row_changes_nothing(make_trainer: Make) -> None:
    """Adam has momentum from the first step and weight decay; the second step's rewards are all equal."""
    calls = []

    def first_only(completions: Any, **columns: Any) -> list[float]:
        calls.append(0)
        return [float(row % 4) if len(calls) == 1 else 1.0 for row in range(len(completions))]

    trainer = make_trainer(TetherGRPOTrainer, group_filter="top_p:0.9", reward_funcs=first_only, args={"weight_decay": 0.1, "max_steps": 1})
    trainer.train()
    after_one = weights(trainer)
    calls.clear()
    again = make_trainer(
        TetherGRPOTrainer, group_filter="top_p:0.9", reward_funcs=first_only, args={"weight_decay": 0.1, "lr_scheduler_type": "constant"}
    )
    again.train()
    assert logged(again, "update/skipped") == [0.0, 1.0] and logged(again, "groups/kept") == [3.0, 0.0]
    assert all(torch.equal(value, weights(again)[name]) for name, value in after_one.items())


def test_evaluation_is_not_filtered(make_trainer: Make) -> None:
    results = []
    for cls, options in (
        (GRPOTrainer, {}),
        (TetherGRPOTrainer, {"group_filter": GroupFilter("top_k", num_groups=1), "callbacks": [TetherCallback()]}),
    ):
        from datasets import Dataset

        rows = [{"prompt": [{"role": "user", "content": f"Number {n}. Up or left?"}]} for n in range(2)]
        trainer = make_trainer(cls, eval_dataset=Dataset.from_list(rows), args={"per_device_eval_batch_size": 4}, **options)
        torch.manual_seed(0)
        results.append(
            {name: value for name, value in trainer.evaluate().items() if not any(word in name for word in ("time", "per_second"))}
        )
    assert results[0] == results[1] and not any("groups/" in name for name in results[1])


@pytest.mark.parametrize("score", ["outcome_variance", "entropy", "entropy_variance", "length", "reward_std", "reward_sum"])
def test_every_score(make_trainer: Make, score: str) -> None:
    def solved(completions: Any, **columns: Any) -> list[float]:
        return [float(row % 4 == 0) if row >= 4 else 0.0 for row in range(len(completions))]

    solved.__name__ = "solved"
    config = {"reward_variance_filtering": "top_k", "reward_variance_top_k": 1, "reward_variance_filtering_include_zero": True,
              "tether_filter_score": score, "tether_success_reward": "solved", "gradient_accumulation_steps": 2}  # fmt: skip
    trainer = make_trainer(TetherGRPOTrainer, config=TetherGRPOConfig, args=config, reward_funcs=[uneven_lengths, solved])
    seen: list[Any] = []
    select = trainer._tether_select
    trainer._tether_select = lambda *given: seen.append((given, select(*given))) or seen[-1][1]
    (batch, _, _), selection = (micro_batches(trainer), seen[0])[1]
    by_hand = {
        "outcome_variance": [0.0, 0.25],
        "reward_std": list(np.array(batch.rewards).reshape(2, 4).std(axis=1, ddof=1)),
        "reward_sum": list(np.array(batch.rewards).reshape(2, 4).sum(axis=1)),
        "length": list(np.array([len(row.completion_ids) for row in batch.rows]).reshape(2, 4).mean(axis=1)),
    }
    if score in by_hand:
        assert list(selection.scores.values()) == pytest.approx(by_hand[score])
    else:
        rows = []
        for row in batch.rows:
            ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
            with torch.no_grad():
                logp = torch.log_softmax(trainer.model(input_ids=ids).logits[0, :-1].double(), -1)
            own = logp.gather(1, ids[0, 1:, None])[len(row.prompt_ids) - 1 :, 0]
            rows.append(-float(own.mean()))
        grouped = np.array(rows).reshape(2, 4)
        expected = grouped.mean(axis=1) if score == "entropy" else grouped.var(axis=1, ddof=1)
        assert list(selection.scores.values()) == pytest.approx(list(expected), rel=1e-4)


def uneven_lengths(completions: Any, **columns: Any) -> list[float]:
    return [len(completion[0]["content"]) / 10 + row % 3 for row, completion in enumerate(completions)]


def test_rows_without_a_reward_are_no_evidence(make_trainer: Make) -> None:
    def some(completions: Any, **columns: Any) -> list[float | None]:
        return [None if row < 4 or row == 5 else float(row % 2) for row in range(len(completions))]

    trainer = make_trainer(
        TetherGRPOTrainer,
        reward_funcs=some,
        group_filter=GroupFilter("top_k", keep=1.0),
        args={"max_steps": 1},
        callbacks=[TetherCallback(pattern="(.*)")],
    )
    trainer.train()
    assert logged(trainer, "rollout/errors") == [5.0] and logged(trainer, "groups/sampled") == [2.0]
    with pytest.raises(BadInput, match="none of 12 completions has a reward"):
        make_trainer(TetherGRPOTrainer, reward_funcs=lambda completions, **c: [None] * len(completions), group_filter="top_p:0.9").train()


# ----------------------------------------------------------------------------------------------------------- the probe


def test_the_policy_scores_its_own_text(make_trainer: Make) -> None:
    """Tether's scorer and TRL's own forward agree, before and after the weights change."""
    trainer = make_trainer(TetherGRPOTrainer)
    scorer = PolicyScorer(trainer)
    prompts, reasonings = [[1, 2, 3, 4], [5, 6, 7]], [[8, 9], [10, 11, 12], [13]]
    for _ in range(2):
        trainer.model.train()
        by_prefix, by_forward = scorer.score_all(prompts, reasonings), scorer.by_forward(prompts, reasonings)
        assert trainer.model.training and by_prefix == pytest.approx(by_forward, abs=1e-4)
        assert by_prefix == pytest.approx(tether.cross_score(trainer.model, prompts, reasonings), abs=1e-6)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.1)


def test_an_alarm_stops_training(make_trainer: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fading(completions: Any, **columns: Any) -> list[float]:
        calls.append(0)
        return [float(row % 4) if len(calls) <= 3 else 0.0 for row in range(len(completions))]

    rules = AlarmRules(start_steps=3, recent_steps=2, step_p=0.11)
    probe = TetherCallback(every=0, out=tmp_path / "run", rules=rules, stop_on=["reward_variance_collapse"])
    trainer = make_trainer(
        TetherGRPOTrainer,
        reward_funcs=fading,
        callbacks=[probe],
        args={"max_steps": 9, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 100},
    )
    trainer.train()
    assert trainer.state.global_step == 5 and probe.stopped is not None and "reward_variance_collapse" in probe.stopped
    assert "training stops after this step" in caplog.text
    run = tether.Run(tmp_path / "run")
    assert run.finished is not None and run.finished.startswith("stopped early after step 5") and run.records[-1].alarms
    assert logged(trainer, "alarms/critical")[-1] + logged(trainer, "alarms/warning")[-1] > 0
    saved = json.loads((tmp_path / "trl" / "checkpoint-5" / "tether_monitor.json").read_text())
    assert saved.keys() == {"sigma_ema", "start", "contexts", "probe"}


def test_a_resumed_run_continues_its_folder(make_trainer: Make, tmp_path: Path) -> None:
    # Eight prompts and sixteen reasonings are enough for a start to be kept.
    args = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 4, "num_generations": 2}
    make_trainer(TetherGRPOTrainer, args=args, callbacks=[TetherCallback(every=1, out=tmp_path / "run", pattern="(.*)")]).train()
    again = TetherCallback(every=1, out=tmp_path / "run", pattern="(.*)")
    make_trainer(TetherGRPOTrainer, args=args, callbacks=[again]).train(resume_from_checkpoint=str(tmp_path / "trl" / "checkpoint-2"))
    records = tether.Run(tmp_path / "run").records
    assert [record.step for record in records] == [1, 2, 3]
    assert again.monitor is not None and again.monitor.state()["start"]["mi_seq"] == records[0].metrics["information/mi_seq"]


def test_a_plain_trainer_is_refused(make_trainer: Make) -> None:
    with pytest.raises(BadInput, match=r"use tether\.integrations\.trl\.TetherGRPOTrainer in place of"):
        make_trainer(GRPOTrainer, callbacks=[TetherCallback()]).train()


# ------------------------------------------------------------------------------------------------------------ bad input


def test_rows_out_of_order() -> None:
    check_order(list("aabb"), 2)
    for keys, size, message in (
        ("abab", 2, "completions 0 and 1 belong to one group of 2"),
        ("aab", 2, "3 completions are no whole number"),
        ("ab", 1, "a group of one"),
    ):
        with pytest.raises(BadInput, match=message):
            check_order(list(keys), size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_filter": "top_q:0.9"}, "did you mean 'top_k'|did you mean 'top_p'"),
        ({"group_filter": "top_p:x"}, "'x' is no number"),
        ({"group_filter": "top_p:0"}, "key 'keep': got 0.0"),
        ({"group_filter": GroupFilter(refill=2)}, "sets refill, which only Tether's own trainer has"),
        ({"success_reward": "unevn"}, "did you mean 'uneven'"),
        ({"group_filter": "top_p:0.9", "args": {"use_adaptive_entropy": True}}, "adaptive entropy"),
    ],
)
def test_wrong_options(make_trainer: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_trainer(TetherGRPOTrainer, **options)


def test_an_unknown_alarm() -> None:
    with pytest.raises(BadInput, match="stop_on holds 'critcal'"):
        TetherCallback(stop_on=["critcal"])


def test_the_names_of_the_authors_pull_request() -> None:
    common: dict[str, Any] = {"output_dir": "x", "bf16": False, "use_cpu": True}
    assert filter_of(TetherGRPOConfig(**common)) is None
    asked = filter_of(
        TetherGRPOConfig(
            **common, reward_variance_filtering="top_p", reward_variance_top_p=0.8, reward_variance_filtering_selection_eps=0.02
        )
    )
    assert asked == GroupFilter("top_p", keep=0.8, include_zero=False, eps=0.02, loss_scale="none")
    chosen = filter_of(
        TetherGRPOConfig(**common, reward_variance_filtering="top_k", reward_variance_top_k=2, reward_variance_filtering_include_zero=True)
    )
    assert chosen is not None
    assert chosen.select([0, 1, 0, 0, 0, 0.5], list("aabbcc")).kept == ["a", "c"], "a number of groups"
    with pytest.raises(BadInput, match="without reward_variance_top_k"):
        filter_of(TetherGRPOConfig(**common, reward_variance_filtering="top_k"))


def test_versions() -> None:
    assert check_version() is None
    remark = check_version("1.18.2", GRPOTrainer)
    assert remark is not None and "TRL 1.18.2 is outside the tested range 1.16 to below 1.17" in remark and "tether.Monitor" in remark

    class Other:
        def _compute_loss(self, model: Any) -> None: ...

    with pytest.raises(
        MissingDependency,
        match=r"TRL 0\.9\.0 .* has no _calculate_rewards, _generate_and_score_completions, _prepare_inputs, _compute_loss",
    ):
        check_version("0.9.0", Other)


def test_the_example(tmp_path: Path, float32_tiny: Path) -> None:
    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 16,
        "disable_tqdm": True,
    }
    trainer = module.main(str(float32_tiny), 2, str(tmp_path / "run"), output_dir=str(tmp_path / "trl"), **small)
    assert len(logged(trainer, "groups/kept_ratio")) == 2 and logged(trainer, "rollout/success")
    assert all(math.isfinite(value) for value in logged(trainer, "groups/rv_mean"))
    assert tether.Run(tmp_path / "run").finished == "2 steps done"
    assert EXAMPLE.read_text().count("# tether") == 2, "two lines are added to a script of TRL's"
