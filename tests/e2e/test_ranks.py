"""A run on two ranks is the run of one: same turns, same weights, whatever happens on one of them: no memory, no finite gradient, Ctrl-C, a kill.

The ranks are processes that talk over gloo, on a CPU. They are forked from one driver after its imports, which cost more than the runs: this file
run as a program. `scripts/compare_ranks.py` does the same on any number of ranks, with kills at random. The launcher has its own test at the end.
"""

import copy
import gc
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
QUICK = [
    "diagnosis.every=9",
    "env.options.max_turns=1",
    "evaluation.prompts=1",
    "rollout.max_tokens=16",
    "rollout.group_size=2",
    "learner.update_batch=2",
]
LONGER = ["rollout.max_tokens=24"]
"""Long enough for rewards to differ, which a filter needs."""

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------------------ the driver


def _compare_ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_ranks", ROOT / "scripts" / "compare_ranks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Driver:
    """Runs the trials one after the other, each on processes of its own; what they found goes into a dictionary by their name."""

    def __init__(self, folder: Path) -> None:
        from tether.models.load import load_model

        self.ranks, self.folder = _compare_ranks(), folder
        self.ranks.KINDS["both"] = self.ranks.KINDS["filtered"] + " --also countdown rollout.prompt_memory.candidates=4"
        load_model("tiny", device="cpu")  # what a first load prepares is inherited by every rank

    def run(self, name: str, size: int, words: list[str], prepare: Callable[[int], None] = lambda rank: None) -> list[int]:
        """`tether` with these words; `prepare` may break something first, in each rank."""
        tether = self.ranks.tether(words)

        def work(rank: int) -> None:
            prepare(rank)
            tether(rank)

        return self.ranks.launch(work, size, self.folder / f"{name}.log")

    def new(self, name: str, size: int, kind: str, *settings: str, prepare: Callable[[int], None] = lambda rank: None) -> Path:
        out = self.folder / name
        codes = self.run(name, size, self.ranks.words_of(kind, out, [*QUICK, *settings]), prepare)
        assert not any(codes), (name, codes, self.log(name))
        return out

    def resume(self, name: str, size: int, *words: str, prepare: Callable[[int], None] = lambda rank: None) -> None:
        codes = self.run(name, size, ["train", "--resume", "--out", str(self.folder / name), *words], prepare)
        assert not any(codes), (name, codes, self.log(name))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def equal(self, reference: Path, run: Path, size: int) -> dict[str, Any]:
        store = self.ranks.RunStore.open(run)
        updates = sum(record.metrics.get("update/num_updates", 0) for record in store.steps())
        different = self.ranks.differences(reference, run, size)
        for name in ("metrics.jsonl", "trajectories.jsonl"):  # one rank writes
            if len({len((folder / name).read_text().splitlines()) for folder in (reference, run)}) > 1:
                different.append(f"lines of {name}")
        timed = (run / "timings.jsonl").read_text().splitlines()
        if (
            len(timed) > len({json.loads(line)["step"] for line in timed}) + 1
        ):  # those of the last step are written again after a checkpoint
            different.append("lines of timings.jsonl")
        return {"differences": different, "updates": updates, "ranks": store.machine()["ranks"]}

    # The trials.

    def same(self, kind: str) -> dict[str, Any]:
        longer = ["steps=3", *LONGER] if kind == "filtered" else []
        return self.equal(self.new(f"{kind}-1", 1, kind, *longer), self.new(f"{kind}-2", 2, kind, *longer), 2)

    def sharded(self) -> dict[str, Any]:
        """PPO with FSDP of policy and critic, beside one rank."""
        return self.equal(self.folder / "ppo-1", self.new("ppo-fsdp", 2, "ppo", "learner.sharding=fsdp"), 2)

    def resumed(self) -> dict[str, Any]:
        """The killed run, on two ranks with FSDP, from its checkpoint on one rank, beside one that was never stopped."""
        name = "resumed"
        straight, run = self.folder / "both-1", self.folder / name
        self.resume(name, 1)
        stores = [self.ranks.RunStore.open(folder) for folder in (straight, run)]
        turns = [self.ranks.turns_of(store, "train") for store in stores]
        return {"same turns": turns[0] == turns[1], "apart": self.ranks.distances(*stores)}

    def troubled(self) -> dict[str, Any]:
        """A rollout, updates and a diagnosis that fail on one rank of two in step 1, and Ctrl-C that reaches this rank alone in step 2."""
        run, alone = self.folder / "troubled", self.new("mixed-1", 1, "mixed")
        codes = self.run("troubled", 2, self.ranks.words_of("mixed", run, QUICK), _trouble)
        records = {record.step: record for record in self.ranks.RunStore.open(run).steps()}
        numbers = {name: records[1].metrics[f"update/{name}"] for name in ("nonfinite", "num_updates", "memory_retries")}
        turns = [self.ranks.turns_of(self.ranks.RunStore.open(folder), "train") for folder in (alone, run)]
        return {
            **numbers,
            "notes": [note for record in records.values() for note in record.notes],
            "same turns": turns[0][: len(turns[1])] == turns[1],
            "digests": len(self.digests("troubled")),
            "codes": codes,
            "log": self.log("troubled"),
            "checkpoints": [path.name for path in self.ranks.list_checkpoints(run / "checkpoints")],
        }

    def digests(self, name: str) -> set[str]:
        """What the ranks hold at the end."""
        return {(self.folder / f"{name}.rank{rank}").read_text() for rank in range(2)}

    def killed(self) -> dict[str, Any]:
        """A rank of a run with FSDP, a filter and two environments dies in the first update of step 2; then the run goes on with ZeRO-1, as
        tasks of Slurm."""
        out, alone = self.folder / "killed", self.new("both-1", 1, "both", *LONGER)
        start = time.monotonic()
        codes = self.run("killed", 2, self.ranks.words_of("both", out, [*QUICK, *LONGER, "learner.sharding=fsdp"]), _dying)
        seconds, log = time.monotonic() - start, self.log("killed")
        shutil.copytree(out, self.folder / "resumed")
        self.resume("killed", 2, "--set", "learner.sharding=zero1", prepare=_as_task_of_slurm)
        return {"codes": codes, "seconds": seconds, "log": log, **self.equal(alone, out, 2)}

    def served(self) -> dict[str, Any]:
        """Two ranks that sample from two `tether serve`, beside one rank with one server."""
        with _Server() as first, _Server() as second:
            one = self.new("served-1", 1, "mixed", f"rollout.engine={first.address}")
            return self.equal(one, self.new("served-2", 2, "mixed", f"rollout.engine={first.address},{second.address}"), 2)

    def served_ahead(self) -> dict[str, Any]:
        """Asynchronous rollouts on two ranks, beside one; validation and the fixed probe need the engine in between."""
        chosen = ("rollout.max_staleness=1", "steps=3", "diagnosis.every=1", "diagnosis.probe_prompts=2", "diagnosis.probe_samples=2")
        with _Server() as server:
            chosen = (*chosen, f"rollout.engine={server.address}", "rollout.prompt_memory.candidates=3")
            one, two = (self.new(f"ahead-{size}", size, "mixed", *chosen) for size in (1, 2))
            divided = self.new("ahead-fsdp", 2, "mixed", *chosen, "learner.sharding=fsdp")
        stale = [record.metrics["rollout/staleness"] for record in self.ranks.RunStore.open(two).steps()[1:]]
        return {**self.equal(one, two, 2), "staleness": stale, "divided": self.equal(one, divided, 2)}

    def served_divided(self) -> dict[str, Any]:
        """No rank of two holds whole weights: with a filter, the fixed probe, a reference, and a frozen scorer, beside one rank; and two ranks,
        then one, then two."""
        name = "served-resumed"
        with _Server() as server:
            chosen = [*LONGER, f"rollout.engine={server.address}", "learner.sharding=fsdp", "diagnosis.gradients.every=0"]
            chosen += ["diagnosis.every=1", "diagnosis.scorer=reference", "algorithm.kl_coef=0.01", "algorithm.importance_cap=2"]
            one = self.new("served-filtered-1", 1, "filtered", *chosen, "steps=3")
            two = self.new("served-filtered-2", 2, "filtered", *chosen, "steps=3", prepare=self.counted_weights)
            resumed = self.new(name, 2, "filtered", *chosen, "steps=1")
            for size, steps in ((1, "2"), (2, "3")):
                self.resume(name, size, "--steps", steps)
        stores = [self.ranks.RunStore.open(folder) for folder in (one, resumed)]
        turns = [self.ranks.turns_of(store, "train") for store in stores]
        held = [float((self.folder / f"census.{rank}").read_text()) for rank in range(2)]
        return {
            **self.equal(one, two, 2),
            "held": held,
            "resumed": {"same turns": turns[0] == turns[1], "apart": self.ranks.distances(*stores)},
        }

    def counted_weights(self, rank: int) -> None:
        """Count the weights that a rank holds in a diagnosis and in the updates of step 1, as a share of what its models have. There are three:
        policy, reference and scorer."""
        from tether.diagnostics import scorer
        from tether.training.learner import Learner
        from tether.training.loop import Trainer

        census, real = _Census(), Trainer.run

        def watched(real: Any, *args: Any) -> Any:
            with census:
                return real(*args)

        def run(trainer: Any) -> None:
            real(trainer)
            self.rolled_back(trainer)
            whole = 3 * sum(parameter.numel() * 4 for parameter in trainer.policy.module.parameters())
            (self.folder / f"census.{rank}").write_text(str(census.most / whole))

        _counted(scorer, "cross_score", {1: watched})
        _counted(Learner, "_backward", {1: watched})
        Trainer.run = run  # type: ignore[method-assign, assignment]

    def served_killed(self) -> dict[str, Any]:
        """Two ranks with FSDP, whose only server is killed in step 2 and started again, beside one rank."""
        with _Server() as server:
            chosen = ("learner.sharding=fsdp", f"rollout.engine={server.address}")
            run = self.new("served-killed", 2, "mixed", *chosen, prepare=server.dies_in_step_2)
            return {**self.equal(self.folder / "served-1", run, 2), "starts": server.starts()}

    def rolled_back(self, trainer: Any) -> None:
        """Put the weights of step 1 in place of those of the last step."""
        import torch
        from safetensors.torch import load_file

        from tether.training.checkpoint import rollback

        checkpoint = self.ranks.list_checkpoints(trainer.store.checkpoints)[0]
        before = trainer.policy.divided.gathered(torch.float32)
        rollback(checkpoint, trainer.learner)
        after = trainer.policy.divided.gathered(torch.float32)
        if trainer.ranks.rank == 0:
            saved = load_file(checkpoint / "model" / "model.safetensors")
            assert checkpoint.name == "step_000001" and not _same(before, after)
            assert all(torch.equal(after[name], saved[name]) for name in after)

    def optimizer(self) -> dict[str, Any]:
        """Both optimisers of two ranks, without a run around them."""

        def work(rank: int) -> None:
            found = {"by hand": _literal_update(rank), "twin": _update_of_a_twin(rank), "alone": _divided_alone(rank)}
            (self.folder / f"optimizer-{rank}.json").write_text(json.dumps(found))

        codes = self.ranks.launch(work, 2, self.folder / "optimizer.log")
        assert codes == [0, 0], self.log("optimizer")
        return {str(rank): json.loads((self.folder / f"optimizer-{rank}.json").read_text()) for rank in range(2)}


class _Server:
    """`tether serve tiny` on one port, started again whenever it is killed; forked like the ranks."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._pids = Path(tempfile.mkstemp(prefix="tether-served-")[1])
        self._keeper = os.fork()
        if self._keeper == 0:
            self._keep(port)

    def _keep(self, port: int) -> None:
        """In a process of its own, until it is told to stop."""
        while True:
            server = os.fork()
            if server == 0:
                self._serve(port)
            with self._pids.open("a") as started:
                started.write(f"{server}\n")
            signal.signal(signal.SIGTERM, lambda *_, server=server: (os.kill(server, signal.SIGKILL), os._exit(0)))
            os.waitpid(server, 0)

    def _serve(self, port: int) -> None:
        from tether.cli.main import main

        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            main(["serve", "tiny", "--port", str(port), "--max-rows", "8", "--device", "cpu"])
        finally:
            os._exit(1)

    def dies_in_step_2(self, rank: int) -> None:
        """Kill the server when the second rank begins its rollout of step 2."""
        from tether.rollout import sampler

        def kill(real: Any, *args: Any, **kwargs: Any) -> Any:
            os.kill(int(self._pids.read_text().split()[-1]), signal.SIGKILL)
            return real(*args, **kwargs)

        if rank == 1:
            _counted(sampler, "play_plan", {3: kill})  # after the validation of step 0 and the rollout of step 1

    def starts(self) -> int:
        return len(self._pids.read_text().split())

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._keeper, signal.SIGTERM)
        os.waitpid(self._keeper, 0)
        self._pids.unlink()


def _counted(owner: Any, name: str, numbers: dict[int, Callable[..., Any]]) -> None:
    """Replace the calls of a function with these numbers, from 1; the others stay as they are."""
    real, calls = getattr(owner, name), itertools.count(1)

    def patched(*args: Any, **kwargs: Any) -> Any:
        act = numbers.get(next(calls))
        return real(*args, **kwargs) if act is None else act(real, *args, **kwargs)

    setattr(owner, name, patched)


def _no_memory(real: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("made up by a test")


def _trouble(rank: int) -> None:
    """Of step 1, on rank 1: the rollout, the diagnosis and the third minibatch fail, the gradient of the first minibatch is infinite, and so is
    the loss of the second. Ctrl-C comes in the rollout of step 2."""
    from tether.core.errors import BadInput
    from tether.diagnostics import scorer
    from tether.rollout import sampler
    from tether.training.learner import Learner

    def infinite(real: Any, learner: Any, *args: Any) -> None:
        real(learner, *args)
        next(p for p in learner.policy.module.parameters() if p.grad is not None).grad.fill_(math.inf)

    def lossy(real: Any, learner: Any, minibatch: Any, loss_scale: float, totals: Any) -> None:
        real(learner, minibatch, loss_scale, totals)
        totals.losses = [math.inf]

    def refuse(real: Any, *args: Any) -> Any:
        raise BadInput("no scores here")

    def press(real: Any, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    if rank == 1:
        _counted(sampler, "play_plan", {2: _no_memory, 4: press})  # after the validation of step 0; the rollout of step 1 is played twice
        _counted(scorer, "cross_score", {1: refuse})
        _counted(Learner, "_backward", {1: infinite, 2: lossy, 3: _no_memory})


def _as_task_of_slurm(rank: int) -> None:
    """One of two tasks of srun on one node: Slurm's variables in place of torchrun's, the port aside, which must be free."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    task = {
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": 0,
        "NTASKS": 2,
        "STEP_NUM_TASKS": 2,
        "STEP_ID": 0,
        "STEP_TASKS_PER_NODE": 2,
        "JOB_ID": 7,
    }
    os.environ.update({f"SLURM_{name}": str(value) for name, value in task.items()}, SLURM_JOB_NODELIST="127.0.0.1")


def _dying(rank: int) -> None:
    from tether.training.learner import Learner
    from tether.training.loop import Trainer

    def die_in_the_update(real: Any, *args: Any, **kwargs: Any) -> Any:
        _counted(Learner, "_backward", {1: lambda *_: os.kill(os.getpid(), signal.SIGKILL)})
        return real(*args, **kwargs)

    if rank == 1:
        _counted(Trainer, "train_step", {2: die_in_the_update})


def _literal_update(rank: int) -> dict[str, Any]:
    """One update of three parameters, whose gradients the ranks hold in parts; bfloat16, so that masters are told from parameters."""
    import torch
    from torch import nn

    from tether.training.distributed.process_group import ProcessGroup
    from tether.training.optim import FP32MasterAdamW

    ranks = ProcessGroup()
    sizes, parts = (4, 3, 1), ((1.0, 0.0, 4.0), (2.0, 0.0, 8.0))  # 4 owned by rank 0, 3 and 1 by rank 1; the second has no gradient at all
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = FP32MasterAdamW(
        parameters, learning_rate=0.25, beta1=0.9, beta2=0.99, weight_decay=0.0, compute_dtype=torch.bfloat16, ranks=ranks
    )
    for place, value in enumerate(parts[rank]):
        if value and not (rank == 0 and place == 2):  # rank 0 has none for the third: it takes part with zeros
            (parameters[place] * torch.tensor([value, *[0.0] * (sizes[place] - 1)])).sum().backward()
    held = sum(holder.grad.numel() for holder in optimizer._holders if holder.grad is not None)
    norms = [float(optimizer.clip(bound)) for bound in (100.0, 1.0)]  # (1 + 2, 8): sqrt(9 + 64)
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.state_dict()
    return {
        "owners": optimizer._owners,
        "held": held,
        "norms": norms,
        "weights": [parameter.tolist() for parameter in parameters],
        "masters": sorted(optimizer._masters),
        "own state": sum(tensor.numel() for kept in optimizer._adam.state.values() for tensor in kept.values() if tensor.ndim),
        "saved": {n: kept["exp_avg"].tolist() for n, kept in state["adam"]["state"].items()} if state else None,
        "saved masters": [len(master) for master in state["masters"]] if state else None,
    }


def _update_of_a_twin(rank: int) -> dict[str, Any]:
    """One update of a small Llama in bfloat16 by FSDP, each rank one row, beside the same update of both rows in this process alone."""
    import torch
    import transformers as hf

    from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy
    from tether.models.policy import Policy
    from tether.training.distributed.fsdp import ShardedAdamW, ShardedModel, local_part
    from tether.training.distributed.process_group import ProcessGroup
    from tether.training.distributed.ranks import Ranks
    from tether.training.optim import FP32MasterAdamW

    shape = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=32, tie_word_embeddings=True)).eval()
    ids = torch.arange(2 * 12).view(2, 12) * 5 % 53
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 4:] = True
    lengths, ranks = torch.tensor([12, 12]), ProcessGroup()

    def loss(policy: Policy, rows: slice, *, packing: bool, recompute: bool) -> Any:
        # Cut by the full policy: a twin has no weights outside a call.
        (micro,) = cut_batch(full, ids[rows], lengths[rows], 999, packing=packing, share_prompts=False)
        selected = forward(policy, ids[rows], mask[rows], micro, recompute=recompute)
        return -logprobs_and_entropy(policy, selected.features_ND, selected.targets_N, 1.0)[0].sum()

    chosen: dict[str, Any] = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    alone, full = (Policy(copy.deepcopy(model)) for _ in range(2))
    by_one = FP32MasterAdamW(alone.module.parameters(), compute_dtype=torch.bfloat16, ranks=Ranks(), **chosen)
    twin = ShardedModel.beside(full, torch.bfloat16, ranks)
    by_two = ShardedAdamW(twin, full.module.parameters(), ranks=ranks, **chosen)
    gradients = []
    for packing, recompute in (
        (True, True),
        (False, False),
        (True, False),
    ):  # the fast path computed again, the module's own, the fast path
        by_two.zero_grad()
        twin(lambda p=packing, r=recompute: loss(twin.policy, slice(rank, rank + 1), packing=p, recompute=r)).backward()
        gradients.append(torch.cat([shard.grad.full_tensor().flatten() for shard in by_two._shards]))
    for row in range(2):
        loss(alone, slice(row, row + 1), packing=True, recompute=False).backward()
    reference = torch.cat([holder.grad.flatten() for holder in by_one._holders])
    apart = [float((gradient - reference).norm() / reference.norm()) for gradient in gradients]
    norms = [float(optimizer.clip(0.5)) for optimizer in (by_one, by_two)]
    for optimizer in (by_one, by_two):
        optimizer.step()
        optimizer.zero_grad()
    twin.publish()
    with by_two.full_precision():
        exact = {parameter.dtype for parameter in full.module.parameters()} if rank == 0 else set()
    states = [optimizer.state_dict() for optimizer in (by_one, by_two)]
    rounded = all(torch.equal(p, s.full_tensor().to(torch.bfloat16)) for p, s in zip(by_two._parameters, by_two._shards, strict=True))
    found = {
        "apart": apart,
        "norms": norms,
        "held": sum(local_part(shard).numel() for shard in by_two._shards) / sum(p.numel() for p in full.module.parameters()),
        "published": rounded,
        "exact": exact == {torch.float32},
        "saved": bool(states[1]),
    }
    # The state of one optimiser goes into the other, and what it then saves is the same.
    if rank == 0:
        torch.save(states, (path := Path(os.environ["TETHER_STATES"])))
    ranks.all_gather(None)
    ours, theirs = torch.load(Path(os.environ["TETHER_STATES"]))
    by_two.load_state_dict(ours)
    by_one.load_state_dict(theirs)
    swapped = [by_two.state_dict(), by_one.state_dict()]
    if rank == 0:
        found["interchanged"] = [_same(before, after) for before, after in zip((ours, theirs), swapped, strict=True)]
        path.unlink()
    return found


def _divided_alone(rank: int) -> dict[str, Any]:
    """A small Llama that no rank holds whole, scored by two ranks with unlike work and updated, beside the same model in this process alone."""
    import torch
    import transformers as hf

    from tether.core.errors import BadInput
    from tether.diagnostics.cross_score import cross_score
    from tether.diagnostics.scorer import SharedScorer
    from tether.models.load import LoadedModel
    from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy, token_logprobs
    from tether.models.policy import Policy
    from tether.models.scoring.local import scorer_for
    from tether.rollout.engines.publish import named_weights, with_head
    from tether.training.distributed.fsdp import ShardedAdamW, divided_policy
    from tether.training.distributed.process_group import ProcessGroup
    from tether.training.distributed.ranks import Ranks
    from tether.training.optim import FP32MasterAdamW

    shape = {"vocab_size": 53, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 6, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, max_position_embeddings=32, tie_word_embeddings=True)).eval()
    whole, ranks, cpu = Policy(copy.deepcopy(model)), ProcessGroup(), torch.device("cpu")
    whole_bytes, census = sum(p.nbytes for p in model.parameters()), _Census()

    def load() -> LoadedModel:
        assert rank == 0  # the others read nothing
        return LoadedModel(copy.deepcopy(model), None)

    policy = divided_policy(load, cpu, torch.float32, ranks)
    divided: Any = policy.divided
    ids = torch.arange(4 * 12).view(4, 12) * 5 % 53
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 4:] = True
    lengths = torch.full((4,), 12)
    rows = slice(0, 3) if rank == 0 else slice(3, 4)  # in passes of one row: three, and one
    with census:
        ours = token_logprobs(policy, ids[rows], mask[rows], lengths[rows], 0.7, max_tokens=12)
    theirs = token_logprobs(whole, ids[rows], mask[rows], lengths[rows], 0.7, max_tokens=12)
    prompts, reasonings = [[7, 8, 9], [3, 4], [11, 5, 6, 2]], [[1, 2, 3, 4], [5]]
    scores = SharedScorer(scorer_for(policy), ranks, "").score_all(prompts, reasonings)
    only_first = SharedScorer(scorer_for(policy), ranks, "").score_all(prompts[:1], reasonings)  # nothing for the second rank
    expected = cross_score(scorer_for(whole), prompts, reasonings)

    def refuse() -> None:
        if rank == 1:
            raise BadInput("no rows here")
        token_logprobs(policy, ids, mask, lengths, 1.0, max_tokens=12)

    try:
        ranks.share(lambda: policy.in_step(refuse))
        refused = ""
    except BadInput as error:
        refused = str(error)

    def loss(on: Policy, rows: slice) -> Any:
        (micro,) = cut_batch(on, ids[rows], lengths[rows], 999)
        selected = forward(on, ids[rows], mask[rows], micro)
        return -logprobs_and_entropy(on, selected.features_ND, selected.targets_N, 1.0)[0].sum()

    chosen: dict[str, Any] = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    by_one = FP32MasterAdamW(whole.module.parameters(), ranks=Ranks(), **chosen)
    by_two = ShardedAdamW(divided, policy.module.parameters(), ranks=ranks, **chosen)
    with census:
        divided(lambda: loss(policy, slice(2 * rank, 2 * rank + 2))).backward()
    loss(whole, slice(0, 4)).backward()
    norms = [float(optimizer.clip(0.5)) for optimizer in (by_one, by_two)]
    for optimizer in (by_one, by_two):
        optimizer.step()
        optimizer.zero_grad()
    named = dict(whole.module.named_parameters())
    weights = divided.gathered(torch.float32)
    after = token_logprobs(policy, ids, mask, lengths, 1.0, max_tokens=99) - token_logprobs(whole, ids, mask, lengths, 1.0, max_tokens=99)
    state = by_two.state_dict()
    sent = with_head(named_weights(policy), policy)
    found = {
        "scores": float((ours - theirs).abs().max()),
        "cross-scores": float(max(abs(scores - expected).max(), abs(only_first - expected[:, :1]).max())),
        "refused": refused,
        "norms": norms,
        "after": float(after.abs().max()),
        "held": census.most / whole_bytes,
        "gathered": None if weights is None else max(float((weights[name] - named[name]).abs().max()) for name in named),
        "saved": None
        if weights is None
        else [
            _same(dict((saved := divided.filled(weights)).named_parameters()), weights),
            saved.lm_head.weight is saved.model.embed_tokens.weight,
        ],
        "head": len(sent) == len(named) + 1 and _same(sent["lm_head.weight"], weights["model.embed_tokens.weight"])
        if weights
        else sent == {},
        "state": [len(state["adam"]["state"]), state["masters"]] if state else None,
    }
    divided.load(dict(model.named_parameters()) if rank == 0 else None)  # a rollback
    again = divided.gathered(torch.float32)
    found["loaded"] = again is None or _same(again, dict(model.named_parameters()))
    found["half"] = _divided_in_bfloat16(rank, load)
    return found


def _divided_in_bfloat16(rank: int, load: Callable[[], Any]) -> dict[str, Any]:
    """The same model computed in bfloat16, trained and frozen, beside a full one; and a state that one process saved."""
    import torch

    from tether.models.logprobs import token_logprobs
    from tether.models.policy import Policy
    from tether.training.distributed.fsdp import ShardedAdamW, divided_policy, local_part
    from tether.training.distributed.process_group import ProcessGroup
    from tether.training.distributed.ranks import Ranks
    from tether.training.masters import low_bits
    from tether.training.optim import FP32MasterAdamW

    ranks, cpu = ProcessGroup(), torch.device("cpu")
    path = Path(os.environ["TETHER_STATES"])
    chosen: dict[str, Any] = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    ids = torch.arange(12).view(1, 12) * 5 % 53
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    if rank == 0:
        whole = Policy(load()[0])
        by_one = FP32MasterAdamW(whole.module.parameters(), compute_dtype=torch.bfloat16, ranks=Ranks(), **chosen)
        start = token_logprobs(whole, ids, mask, torch.tensor([12]), 1.0, max_tokens=12)
        torch.stack([parameter.sum() for parameter in whole.module.parameters()]).sum().backward()
        by_one.step()
        torch.save((start, by_one.state_dict()), path)
    ranks.all_gather(None)
    start, state = torch.load(path)
    trained = divided_policy(load, cpu, torch.bfloat16, ranks)
    frozen = divided_policy(lambda: load()._replace(model=load()[0].bfloat16()), cpu, torch.bfloat16, ranks, is_trained=False)
    apart = [
        float((token_logprobs(policy, ids, mask, torch.tensor([12]), 1.0, max_tokens=12) - start).abs().max())
        for policy in (trained, frozen)
    ]
    divided: Any = trained.divided
    by_two = ShardedAdamW(divided, trained.module.parameters(), ranks=ranks, **chosen)
    by_two.load_state_dict(state)
    moments = sum(local_part(kept["exp_avg"]).untyped_storage().nbytes() for kept in by_two._adam.state.values())
    ours = by_two.state_dict()
    divided.load(divided.gathered(torch.bfloat16))  # as a checkpoint holds them
    by_two.load_state_dict({**state, "masters": [low_bits(master) for master in state["masters"]]})
    joined = by_two.state_dict()
    return {
        "apart": apart,
        "held in": [str(next(policy.module.parameters()).dtype) for policy in (trained, frozen)],
        "computes in": [str(policy.dtype) for policy in (trained, frozen)],
        "same state": _same(ours, state) if rank == 0 else ours == {},
        "exact": _same(joined, state) if rank == 0 else joined == {},
        "moments": moments / sum(master.nbytes for master in state["masters"]),
    }


class _Census:
    """Counts bytes of weights that this process holds in the middle of passes: all parameters, gathered ones too, that came into being since."""

    def __init__(self) -> None:
        self.known, self.most = {id(parameter) for parameter in self._parameters()}, 0

    @staticmethod
    def _parameters() -> list[Any]:
        import torch

        tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
        return [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter) and tensor.device.type != "meta"]

    def look(self, *_: Any) -> None:
        from torch.distributed.tensor import DTensor

        new = [parameter for parameter in self._parameters() if id(parameter) not in self.known]
        held = [(parameter.to_local() if isinstance(parameter, DTensor) else parameter).untyped_storage() for parameter in new]
        self.most = max(self.most, sum({storage.data_ptr(): storage.nbytes() for storage in held}.values()))

    def __enter__(self) -> None:
        from tether.models.fast.backbone import LlamaBackbone

        self._real = real = LlamaBackbone._layer

        def layer(backbone: Any, index: int, *args: Any, **kwargs: Any) -> Any:
            delta, residual = real(backbone, index, *args, **kwargs)
            if index == 3 and backbone.through_modules:
                self.look()
                if delta.requires_grad:  # the layer before is being fetched when this one computes its gradient
                    delta.register_hook(self.look)
            return delta, residual

        LlamaBackbone._layer = layer  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from tether.models.fast.backbone import LlamaBackbone

        LlamaBackbone._layer = self._real  # type: ignore[method-assign]


def _same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same numbers."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


LONG = ("filtered", "ppo", "sharded", "troubled", "served", "served_killed", "served_ahead", "served_divided")
"""Trials of the tests that are marked long."""


def drive(folder: Path, with_long: bool) -> None:
    driver = Driver(folder)
    os.environ["TETHER_STATES"] = str(folder / "states.pt")
    trials: dict[str, Callable[[], dict[str, Any]]] = {
        "optimizer": driver.optimizer,
        "filtered": lambda: driver.same("filtered"),
        "ppo": lambda: driver.same("ppo"),
        "sharded": driver.sharded,
        "killed": driver.killed,
        "resumed": driver.resumed,
        "troubled": driver.troubled,
        "served": driver.served,
        "served_killed": driver.served_killed,
        "served_ahead": driver.served_ahead,
        "served_divided": driver.served_divided,
    }
    found = {}
    for name, trial in trials.items():
        if name in LONG and not with_long:
            continue
        start = time.monotonic()
        found[name] = {**trial(), "took": time.monotonic() - start}
        print(name, found[name], flush=True)
    (folder / "found.json").write_text(json.dumps(found))


# -------------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    which = ["--short"] if "not long" in request.config.getoption("-m") else []
    done = subprocess.run([sys.executable, __file__, str(folder), *which], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((folder / "found.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["filtered", "ppo"])
def test_two_ranks_are_one(kind: str, found: dict[str, Any]) -> None:
    """Three groups are uneven shares; PPO has one group, so the second rank plays none."""
    assert found[kind]["differences"] == [] and found[kind]["ranks"] == 2
    assert found[kind]["updates"] >= 2


@pytest.mark.long
def test_fsdp_is_one_rank(found: dict[str, Any]) -> None:
    assert found["sharded"]["differences"] == [] and found["sharded"]["ranks"] == 2 and found["sharded"]["updates"] >= 2


def test_resumed_on_other_numbers_of_ranks_and_with_other_sharding(found: dict[str, Any]) -> None:
    weights, moments = found["resumed"]["apart"]
    assert found["resumed"]["same turns"] and weights < 1e-5 and moments < 1e-4


def test_an_update_by_fsdp(found: dict[str, Any]) -> None:
    """In bfloat16: the gradient is that of one rank through every path, each rank holds half, and the states of both optimisers are one form."""
    for rank in ("0", "1"):
        here = found["optimizer"][rank]["twin"]
        assert max(here["apart"]) < 0.02  # sums in bfloat16, in another order
        assert here["norms"][1] == pytest.approx(here["norms"][0], rel=0.01)
        assert here["held"] == pytest.approx(0.5, abs=0.01) and here["published"]
    first, second = (found["optimizer"][rank]["twin"] for rank in ("0", "1"))
    assert first["exact"] and first["saved"] and not second["saved"] and first["interchanged"] == [True, True]


def test_a_model_that_no_rank_holds_whole(found: dict[str, Any]) -> None:
    """Scores, an update and what is saved are those of the whole model; what a rank fails with is told to the other, which has passes left."""
    first, second = (found["optimizer"][rank]["alone"] for rank in ("0", "1"))
    for here in (first, second):
        assert here["scores"] < 1e-5 and here["cross-scores"] < 1e-5 and here["after"] < 1e-4
        assert here["refused"] == "rank 1: no rows here"
        assert here["norms"][1] == pytest.approx(here["norms"][0], rel=1e-5)
        assert 0.5 < here["held"] < 0.9 and here["loaded"] and here["head"]  # half, the embedding, and the layers that are gathered
    assert first["gathered"] < 1e-6 and first["saved"] == [True, True] and first["state"] == [56, []]
    assert second["gathered"] is None and second["saved"] is None and second["state"] is None
    for half in (first["half"], second["half"]):
        assert max(half["apart"]) < 0.05 and half["held in"] == ["torch.float32", "torch.bfloat16"]
        assert half["computes in"] == 2 * ["torch.bfloat16"]
        assert half["same state"] and half["exact"] and half["moments"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.long
def test_trouble_on_one_rank_is_everybodys(found: dict[str, Any]) -> None:
    trouble = found["troubled"]
    assert trouble["same turns"] and trouble["digests"] == 1
    assert (trouble["nonfinite"], trouble["num_updates"], trouble["memory_retries"]) == (2, 1, 1)
    notes = "\n".join(trouble["notes"])
    assert "out of memory in the rollout with rollout.max_rows=" in notes
    assert "diagnosis (first_turn) failed: rank 1: no scores here" in notes
    assert "2 updates were skipped: their gradient was not finite" in notes


def test_two_ranks_of_which_one_is_killed_and_resumed_are_one(found: dict[str, Any]) -> None:
    """Three groups of two environments, with a filter: the run of two ranks is that of one; a killed rank ends the other with a line. Tasks of
    Slurm resume it."""
    killed = found["killed"]
    assert killed["codes"] == [1, -signal.SIGKILL] and killed["differences"] == [] and killed["updates"] >= 2 and killed["ranks"] == 2
    (line,) = [line for line in killed["log"].splitlines() if line.startswith("tether: ")]
    assert line.startswith("tether: rank 0 of 2: another rank has ended during ") and line.endswith("with --resume")


@pytest.mark.long
def test_two_ranks_that_sample_from_servers_are_one(found: dict[str, Any]) -> None:
    assert found["served"]["differences"] == [] and found["served"]["ranks"] == 2 and found["served"]["updates"] >= 2


@pytest.mark.long
def test_asynchronous_rollouts_on_two_ranks_are_those_of_one(found: dict[str, Any]) -> None:
    ahead = found["served_ahead"]
    assert ahead["differences"] == [] and ahead["updates"] >= 3 and ahead["staleness"] == [0, 1, 1]
    assert ahead["divided"]["differences"] == []


@pytest.mark.long
def test_two_ranks_of_which_none_holds_whole_weights_are_one(found: dict[str, Any]) -> None:
    divided = found["served_divided"]
    assert divided["differences"] == [] and divided["ranks"] == 2 and divided["updates"] >= 2
    weights, moments = divided["resumed"]["apart"]
    assert divided["resumed"]["same turns"] and weights < 1e-5 and moments < 1e-4
    assert all(0.5 < held < 0.7 for held in divided["held"])  # half of three models, and a layer or two of one


@pytest.mark.long
def test_a_server_of_two_ranks_that_is_killed_and_started_again(found: dict[str, Any]) -> None:
    killed = found["served_killed"]
    assert killed["differences"] == [] and killed["updates"] >= 2 and killed["starts"] == 2


@pytest.mark.long
def test_ctrl_c_on_one_rank_stops_all_of_them(found: dict[str, Any]) -> None:
    stopped = found["troubled"]
    assert stopped["codes"] == [130, 130]
    assert stopped["checkpoints"] == ["step_000001"]
    assert "stopped after step 1; the last checkpoint is step_000001" in stopped["log"]


def test_an_update_of_two_ranks_by_hand(found: dict[str, Any]) -> None:
    """Gradients 1 and 2 of the first parameter and 8 of the third: their norm is sqrt(3^2 + 8^2). Adam's first step is one rate down."""
    both = {rank: here["by hand"] for rank, here in found["optimizer"].items() if rank in ("0", "1")}
    for rank, masters, held in (("0", [0], 4), ("1", [1, 2], 5)):
        here = both[rank]
        assert here["owners"] == [0, 1, 1] and here["masters"] == masters and here["held"] == held
        assert here["norms"] == pytest.approx([math.sqrt(73), math.sqrt(73)], rel=1e-7)
        assert here["weights"] == [[-0.25, 0, 0, 0], [0, 0, 0], [-0.25]]
    assert (both["0"]["own state"], both["1"]["own state"]) == (8, 2)  # two moments of what a rank owns and has a gradient for
    assert both["1"]["saved"] is None and both["0"]["saved masters"] == [4, 3, 1]
    # A tenth of the gradient, scaled down to a norm of 1.
    assert both["0"]["saved"] == {"0": pytest.approx([0.3 / math.sqrt(73), 0, 0, 0]), "2": pytest.approx([0.8 / math.sqrt(73)])}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")
def test_the_launcher_says_which_rank_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pairs = ["rollout.num_groups=2", "rollout.group_size=2", "model.device=cpu", "diagnosis.every=0", "checkpoint.every=1", *QUICK]
    words = ["train", "frozen_lake", "--gpus", "2", "--steps", "999", "--filter", "all", "--out", str(out)]
    words += [word for pair in pairs for word in ("--set", pair)]
    (tmp_path / "yaml.py").write_text(
        "raise SystemExit('a file of the current folder was run')"
    )  # ranks find the modules that the command finds
    command = [sys.executable, "-P", "-m", "tether", *words]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while running.poll() is None and not (out / "checkpoints" / "step_000001").exists():
        time.sleep(0.05)
    ranks = [int(pid) for pid in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]
    second = next(pid for pid in ranks if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    printed, said = running.communicate(timeout=60)
    assert running.returncode == 1, said
    assert "2 ranks -> " in printed
    *_, last = said.splitlines()
    assert last.startswith("tether: rank 1 of 2 was killed by SIGKILL (process ") and last.endswith("with --resume")
    assert "Traceback" not in said


if __name__ == "__main__":
    drive(Path(sys.argv[1]), with_long="--short" not in sys.argv)
