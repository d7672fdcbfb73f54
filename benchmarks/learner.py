"""How many tokens a second the learner trains on, beside a plain transformers pass, and what share of the machine that is.

    python benchmarks/learner.py --model shape:3b                                   # GPU
    python benchmarks/learner.py --model smollm2 --even-rows 4 --groups 2 --group 4 --plain-rows 2
    python benchmarks/learner.py --model smollm2 --step --trl-python PATH           # one whole GRPO step beside TRL's

Ours is `Learner.update` as a run calls it, one optimiser update for the whole batch, with GRPO and with PPO (a critic with a trunk of its own),
on two batches: `even`, 8 rows of 1,280 tokens that share nothing, and `ragged`, 8 prompts of 200 tokens x 16 rows of 975 to 1,220 tokens.
Every row is a prompt and five responses with observations between them, all random words; the sampled log-probs say that each word is as likely
as any other. Tokens are those of the rows, prompts in every row, padding in none. The first update is not timed. "Forward and backward"
leaves out the time of an update on eight tokens, which is that of the optimiser.

The share of peak counts 6 x weights x tokens and attention, the head for every token, recomputation never, at the rate of a large product
measured here; "needed" counts the head only where a token was sampled. PPO counts both models, the critic's without a head. Both count the
tokens of every row, so shared prompts are worth more than 100%. "As a run counts" is `share_of_peak` of `tether train`: what did go through the
policy, shared prompts once, and the optimiser's time too.

The plain way: transformers' own loss on padded rows with full logits and gradient checkpointing, forward and backward only, `--plain-batch`
rows at a time, on `--plain-rows` of the rows and scaled by their tokens. Its memory holds neither masters nor moments.

`--step` times one GRPO step of 8 prompts x 4 responses, 136 tokens in and 64 out, sampling included, and TRL's GRPOTrainer on the same sizes in
a process of its own (benchmarks/trl_peer.py, which imports nothing of Tether): with this Python where TRL is installed, or another's by
`--trl-python`. Both leave out their first step.
"""

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shapes import (
    SHAPE,
    Machine,
    Row,
    add_json_option,
    add_model_options,
    best_of,
    forget_peak,
    measure_machine,
    measured_model,
    peak_gib,
    precision,
    publish,
    say,
    size_of,
    timed,
)
from workloads import Conversations, engine_for, grouped, make_conversations, pay, train_flops, written_groups

from tether.algorithms.batch import Batch
from tether.algorithms.presets import preset
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.critic import Critic
from tether.models.load import DTYPES, LoadedModel
from tether.models.policy import Policy
from tether.rollout.pack import pack
from tether.training.estimate import AdvantageEstimator
from tether.training.learner import Learner, Rates
from tether.training.settings import LearnerSettings
from tether.training.throughput import arithmetic_of

RATES = Rates(1e-6, 1e-5)
GRPO_STEP = Conversations(groups=8, group_size=4, prompt=136, response=64)


class Training(NamedTuple):
    """A model and what trains it."""

    loaded: LoadedModel
    learner: Learner
    estimator: AdvantageEstimator

    @property
    def model(self) -> Any:
        return self.loaded.model

    def completed(self, groups: Sequence[Group], *, one_group: bool = False) -> Batch:
        """A batch with advantages; `one_group` compares all trajectories with each other, whatever their prompts."""
        batch = pack([t for group in groups for t in group.trajectories], self.model.device)
        if one_group:
            batch = dataclasses.replace(batch, groups_B=torch.zeros_like(batch.groups_B))
        return self.estimator.complete(batch)[0]

    def update(self, batch: Batch) -> dict[str, float]:
        """One pass over a batch."""
        order = torch.arange(batch.num_trajectories, device=batch.ids_BT.device)
        return self.learner.update(batch, [order], 1.0, RATES)


def training(name: str, device: str | None, dtype: str | None, algorithm_name: str, settings: LearnerSettings, max_tokens: int) -> Training:
    """A learner as a run builds it: float32 masters, the model in `dtype` (bfloat16 on a GPU and for shapes, if not given)."""
    shape = name.startswith(SHAPE)
    loaded = measured_model(name, device, dtype if shape else None)
    kind = DTYPES[dtype or ("bfloat16" if shape or loaded.model.device.type == "cuda" else "float32")]
    algorithm = preset(algorithm_name)
    critic = None
    if algorithm.has_critic:
        critic = Critic(Policy(measured_model(name, device, dtype if shape else None).model), shared=False)
    policy = Policy(loaded.model)
    learner = Learner(policy, algorithm, settings, temperature=1.0, max_tokens=max_tokens, critic=critic, dtype=kind)
    estimator = AdvantageEstimator(algorithm, critic, None, temperature=1.0, micro_tokens=settings.micro_tokens)
    return Training(loaded, learner, estimator)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if options.step:
        publish(_step_rows(options), options.json)
        return
    rows: list[Row] = []
    for algorithm in options.algorithms:
        try:
            for row in _algorithm_rows(options, algorithm):
                rows.append(row)  # at once: what was measured before memory ran out counts
        except torch.cuda.OutOfMemoryError:
            rows.append({"model": options.model, "who": f"tether {algorithm}: out of memory"})
        forget_peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if options.plain_rows != 0:
        rows += _plain_rows(options)
    publish(rows, options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--algorithms", nargs="+", default=["grpo", "ppo"], help="any of the presets")
    parser.add_argument("--work", nargs="+", choices=["even", "ragged"], default=["even", "ragged"])
    parser.add_argument("--even-rows", type=int, default=8)
    parser.add_argument("--even-response", type=int, default=152, help="tokens of each of the responses; 152 makes rows of 1,280")
    parser.add_argument("--groups", type=int, default=8, help="prompts of the ragged batch")
    parser.add_argument("--group", type=int, default=16, help="rows of a prompt in it")
    parser.add_argument("--response", type=int, default=140, help="tokens of its longest responses; others are shorter by up to 35%%")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--observed", type=int, default=80)
    parser.add_argument("--micro-tokens", type=int, default=None, help="learner.micro_tokens; its default if not given")
    parser.add_argument("--recompute", action="store_true", help="learner.gradient_checkpointing=true")
    parser.add_argument("--repeats", type=int, default=2, help="timed updates, the best of which counts")
    parser.add_argument(
        "--plain-rows", type=int, default=None, help="rows to time the plain way on, 0 for none; default all on a GPU, else 4"
    )
    parser.add_argument("--plain-batch", type=int, default=8, help="rows of one plain pass")
    parser.add_argument("--step", action="store_true", help="time one whole GRPO step beside TRL's instead")
    parser.add_argument("--trl-python", default=None, help="Python of an environment that has TRL; 'none' leaves it out")
    add_json_option(parser)
    return parser.parse_args(arguments)


def _works(options: argparse.Namespace) -> dict[str, tuple[Conversations, float]]:
    """The batches to train on: lengths, and how ragged they are."""
    both = {
        "even": (Conversations(options.even_rows, 1, options.prompt, options.even_response, options.turns, options.observed), 0.0),
        "ragged": (Conversations(options.groups, options.group, options.prompt, options.response, options.turns, options.observed), 0.35),
    }
    return {name: both[name] for name in options.work}


def _settings(options: argparse.Namespace, update_batch: int) -> LearnerSettings:
    asked: dict[str, Any] = {"update_batch": update_batch}
    if options.micro_tokens is not None:
        asked["micro_tokens"] = options.micro_tokens
    if options.recompute:
        asked["gradient_checkpointing"] = True
    return LearnerSettings(**asked)


def _algorithm_rows(options: argparse.Namespace, algorithm: str) -> Iterator[Row]:
    works = _works(options)
    settings = _settings(options, max(work.rows for work, _ in works.values()))
    own = training(options.model, options.device, options.dtype, algorithm, settings, options.response)
    machine, vocabulary = measure_machine(own.model), int(own.model.config.vocab_size)
    few = own.completed(written_groups(Conversations(1, 2, 2, 2), vocabulary))
    own.update(few)
    optimiser, _ = best_of(options.repeats, own.model.device, lambda: own.update(few))
    for name, (work, ragged) in works.items():
        groups = written_groups(work, vocabulary, ragged)
        batch = own.completed(groups, one_group=work.group_size == 1)
        forget_peak(own.model.device)
        own.update(batch)
        seconds, metrics = best_of(options.repeats, own.model.device, partial(own.update, batch))
        say(f"{algorithm}, {name}: {seconds:.2f} s, the optimiser {optimiser:.3f} s of it")
        yield {
            **_about(options, own.model, machine, name, groups),
            "who": f"tether {algorithm}",
            **_speeds(own.model, groups, seconds, optimiser, machine, critic=own.learner.critic is not None),
            "as a run counts": _run_share(own, seconds, machine),
            "peak GiB": peak_gib(own.model.device),
            "updates left out": metrics["nonfinite"],
        }


def _run_share(own: Training, seconds: float, machine: Machine) -> float:
    counted = [arithmetic_of(own.model)]
    if (critic := own.learner.critic) is not None:
        counted.append(arithmetic_of(critic.policy.module, with_head=False))
    return sum(part.training(own.learner.work) for part in counted if part is not None) / seconds / machine.flops


def _about(options: argparse.Namespace, model: Any, machine: Machine, name: str, groups: Sequence[Group]) -> Row:
    lengths = _lengths(groups)
    batch = f"{name}: {len(lengths)} rows, {min(lengths):,} to {max(lengths):,} tokens"
    return {"model": options.model, "device, precision": f"{machine.name}, {precision(model)}", "batch": batch}


def _speeds(model: Any, groups: Sequence[Group], seconds: float, optimiser: float, machine: Machine, *, critic: bool) -> Row:
    tokens, size, passing = sum(_lengths(groups)), size_of(model), max(seconds - optimiser, 1e-9)
    counted, needed = (train_flops(groups, size, all_predicted=every) for every in (True, False))
    if critic:
        backbone = train_flops(groups, dataclasses.replace(size, head_weights=0), all_predicted=False)
        counted, needed = counted + backbone, needed + backbone
    return {
        "tokens/s": tokens / seconds,
        "forward and backward": tokens / passing,
        "seconds": seconds,
        "share of peak": counted / passing / machine.flops,
        "needed": needed / passing / machine.flops,
    }


def _lengths(groups: Sequence[Group]) -> list[int]:
    return [t.sequences[0].num_tokens for group in groups for t in group.trajectories]


def _plain_rows(options: argparse.Namespace) -> list[Row]:
    shape = options.model.startswith(SHAPE)
    half = shape or (torch.cuda.is_available() and options.device != "cpu")
    model: Any = measured_model(options.model, options.device, options.dtype or ("bfloat16" if half else "float32")).model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    machine, vocabulary = measure_machine(model), int(model.config.vocab_size)
    rows: list[Row] = []
    for name, (work, ragged) in _works(options).items():
        groups = written_groups(work, vocabulary, ragged)
        about = _about(options, model, machine, name, groups)
        trajectories = [t for group in groups for t in group.trajectories]
        asked = options.plain_rows or (len(trajectories) if model.device.type == "cuda" else 4)
        timed_ones = trajectories[: min(asked, len(trajectories))]
        batch = pack(timed_ones, model.device)
        forget_peak(model.device)
        try:
            _plain_pass(model, batch.rows(torch.arange(1, device=model.device)), 1)
            seconds, _ = timed(model.device, partial(_plain_pass, model, batch, options.plain_batch))
        except torch.cuda.OutOfMemoryError:
            rows.append({**about, "who": f"transformers: out of memory at {options.plain_batch} rows a pass"})
            continue
        scaled = seconds * sum(_lengths(groups)) / int(batch.lengths_B.sum())
        say(f"plain, {name}: {seconds:.2f} s for {len(batch)} rows")
        who = f"transformers, checkpointing ({len(batch)} of {len(trajectories)} rows timed)"
        speeds = _speeds(model, groups, scaled, 0.0, machine, critic=False)
        rows.append({**about, "who": who, **speeds, "peak GiB": peak_gib(model.device)})
    return rows


def _plain_pass(model: Any, batch: Batch, at_once: int) -> None:
    """Forward and backward over padded rows, the loss on sampled tokens."""
    for index_M in torch.arange(len(batch), device=batch.ids_BT.device).split(at_once):
        part = batch.rows(index_M)
        mask_MT = torch.arange(part.ids_BT.shape[1], device=part.ids_BT.device) < part.lengths_B[:, None]
        labels_MT = part.ids_BT.masked_fill(~part.loss_mask_BT, -100)
        model(input_ids=part.ids_BT, attention_mask=mask_MT.long(), labels=labels_MT, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)


def _step_rows(options: argparse.Namespace) -> list[Row]:
    """One GRPO step, ours and TRL's."""
    work, settings = GRPO_STEP, _settings(options, GRPO_STEP.rows)
    own = training(options.model, options.device, options.dtype, "grpo", settings, work.response)
    engine = engine_for(own.model, own.loaded.tokenizer, work)
    vocabulary, device = int(own.model.config.vocab_size), own.model.device

    def sample(run: int) -> list[Group]:
        conversations = make_conversations(work, vocabulary, run)
        engine.run(conversations, Sampling(1.0, work.response))
        groups = grouped(conversations)
        pay(groups)
        return groups

    def learn(groups: Sequence[Group]) -> None:
        own.update(own.completed(groups))

    best = (float("inf"), 0.0)
    for run in range(options.repeats + 1):
        sampling, groups = timed(device, partial(sample, run))
        learning, _ = timed(device, partial(learn, groups))
        say(f"step {run + 1}: sampling {sampling:.2f} s, learning {learning:.2f} s")
        if run:
            best = min(best, (sampling + learning, sampling))
    kind = precision(own.model)
    about: Row = {"model": options.model, "device, precision": f"{measure_machine(own.model).name}, {kind}", "step": str(work)}
    ours: Row = {**about, "who": "tether grpo", "seconds": best[0], "sampling": best[1], "learning": best[0] - best[1]}
    return [{**ours, "peak GiB": peak_gib(device)}, {**about, **_trl_row(options, own, kind, best[0])}]


def _trl_row(options: argparse.Namespace, own: Training, kind: str, ours: float) -> Row:
    if options.trl_python == "none":
        return {"who": "TRL: left out"}
    python = options.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    if python is None:
        return {"who": "TRL: not installed"}
    asked = {**dataclasses.asdict(GRPO_STEP), "dtype": kind, "steps": options.repeats + 1, "cpu": own.model.device.type == "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        own.model.save_pretrained(folder)
        own.loaded.tokenizer.save_pretrained(folder)
        command = [python, str(Path(__file__).with_name("trl_peer.py")), folder, json.dumps(asked)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"who": f"TRL: failed, exit code {done.returncode}"}
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return {"who": f"TRL {answer['version']}", "seconds": answer["seconds"], "tether is faster by": answer["seconds"] / ours}


if __name__ == "__main__":
    main()
