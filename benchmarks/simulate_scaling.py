"""What sampling, stragglers and staleness cost on 8 to 512 GPUs: a simulation, with its assumptions stated; nothing is measured here.

    python benchmarks/simulate_scaling.py                         # the figures of docs/scaling.md
    python benchmarks/simulate_scaling.py --check                 # one GPU beside rollouts that were measured
    python benchmarks/simulate_scaling.py --size 7B 32B 70B       # vLLM servers and an FSDP learner: the best split of 8 to 512 GPUs
    python benchmarks/simulate_scaling.py --gpus 64 --staleness 0 1 2 --turn-tokens 800 --env-seconds 2

Engines and learners are simulated event by event. An engine decodes all of its conversations together; a step takes as long as its weights and
caches need to be read, and a conversation that comes back from its environment costs one feed. A batch is trained on when all of its
conversations are over, because the filter ranks whole batches.

- together (staleness 0): all GPUs sample, then all GPUs update. Sampling waits for the slowest conversation of all.
- with --size: servers and learners are always apart. A server is a vLLM on as many GPUs as a model needs; the learner's weights are divided (FSDP), and what
  it exchanges is hidden behind its computation; every update is published by rank 0, to one server after the other as the engine does it, over NCCL
  (`Machine.network`) or HTTP (HTTP_RATE, measured).
- apart (staleness s): a share of the GPUs samples while the others update. Batch j may be sampled by weights that lack up to s updates
  (`rollout.max_staleness`), so an engine begins the next batch while others, or the learner, are still busy.

Assumptions (all in `Machine`, `Model` and `Work`): the bandwidth, the launch cost and the feed cost of an H200 as measured for one 1.5B model
(docs/benchmarks.md); response lengths are lognormal and cut at their budget, turns are drawn until an episode ends, environments take a lognormal
time and now and then a hundred times as long; an update reaches a fixed share of peak; gradients and weights cross a network of fixed
bandwidth once per update; nothing fails.
"""

import argparse
import dataclasses
import heapq
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

MAX_TURNS = 5
ROWS_PER_ENGINE = 128
MICRO_TOKENS = 16_384
"""Of a rank of the FSDP learner, for each exchange of the weights."""
HTTP_RATE = 3.55e9 / 12.7
"""Bytes a second of a publish over HTTP, as measured (docs/benchmarks.md)."""
CARD = 141e9
ROOM = 0.6
"""Share of a learner's card for weights, gradients and moments; the rest is for activations."""


@dataclass(frozen=True)
class Machine:
    """One GPU and its network."""

    bandwidth: float = 4.8e12 * 0.8
    """Bytes a second that decoding reads."""
    flops: float = 790e12 * 0.4
    """A second, in an update: the learner reaches about 60% of peak on long rows, 40% on the short ones of agents."""
    launch: float = 1.0e-3
    """Seconds of a decoding step that do not depend on bytes: kernels, gaps, sampling."""
    feed: float = 10e-3
    """Seconds of a call that feeds observations."""
    network: float = 50e9
    """Bytes a second between machines, for each GPU."""
    all_reduce: float = 15e-6
    """Seconds of one exchange between the GPUs of a server; two for each layer and step."""
    publish: float = math.inf
    """Bytes a second of a publish to one server."""


VLLM = Machine(launch=6.4e-3)
"""vLLM is bound by its host-side work at this batch: 1.5B and 3B decode alike."""


@dataclass(frozen=True)
class Model:
    """The sizes that matter."""

    parameters: float = 1.54e9
    cache_bytes: int = 28_672
    """Of one token: 2 x layers x key heads x width x 2 bytes."""
    layers: int = 28
    tensor_parallel: int = 1
    """GPUs of one server."""


SIZES = {
    "7B": Model(7.62e9, 57_344, 28, 1),
    "32B": Model(32.8e9, 262_144, 64, 2),
    "70B": Model(70.6e9, 327_680, 80, 4),
}


@dataclass(frozen=True)
class Work:
    """A batch of episodes."""

    groups: int = 8
    """For each GPU: the batch grows with the machine."""
    batch: int = 0
    """Conversations of a batch, whatever the number of GPUs; 0: `groups` for each GPU."""
    group_size: int = 16
    turn_tokens: float = 53.0
    """Mean length of a response."""
    spread: float = 0.45
    """Of the logarithm of a length."""
    max_tokens: int = 160
    go_on: float = 0.73
    """Chance that a turn is followed by another, up to five."""
    context: int = 450
    """Tokens of a conversation that a step reads, on average."""
    env_seconds: float = 0.005
    straggler: float = 0.002
    """Share of the environment steps that take a hundred times as long."""


AGENTS = Work(batch=1024, turn_tokens=300, max_tokens=2048, context=4000, env_seconds=0.2)
"""What --size assumes of agents with models of that size; nothing of it was measured."""


@dataclass
class Conversation:
    """Its future, drawn in advance."""

    batch: int
    lengths: list[int]
    pauses: list[float]
    turn: int = 0
    begun: int = 0
    """The version of the weights that its first token was sampled by."""


@dataclass
class Engine:
    """One GPU that samples: rows that decode together, and conversations that wait."""

    machine: Machine
    model: Model
    work: Work
    now: float = 0.0
    rows: list[tuple[int, Conversation]] = field(default_factory=list)
    """Tokens that each row still has to write."""
    queue: deque[Conversation] = field(default_factory=deque)
    away: list[tuple[float, int, Conversation]] = field(default_factory=list)
    """Conversations in their environment, by when they come back."""
    tokens: int = 0
    busy: float = 0.0

    def step_seconds(self) -> float:
        """Of one token for every row."""
        read = 2 * self.model.parameters + len(self.rows) * self.work.context * self.model.cache_bytes
        together = self.model.tensor_parallel
        exchanges = 2 * self.model.layers * self.machine.all_reduce if together > 1 else 0.0
        return self.machine.launch + exchanges + read / (self.machine.bandwidth * together)

    def has_work(self) -> bool:
        return bool(self.rows or self.queue or self.away)

    def advance(self, version: int) -> list[Conversation]:
        """Go on to the next event; returns the conversations that are over then."""
        back = []
        while self.away and self.away[0][0] <= self.now:
            back.append(heapq.heappop(self.away)[2])
        while self.queue and len(self.rows) + len(back) + len(self.away) < ROWS_PER_ENGINE:
            begun = self.queue.popleft()
            begun.begun = version
            back.append(begun)
        if back:
            self.now += self.machine.feed
            self.busy += self.machine.feed
            self.rows += [(conversation.lengths[conversation.turn], conversation) for conversation in back]
        if not self.rows:
            if self.away:
                self.now = self.away[0][0]
            return []
        count = min(left for left, _ in self.rows)
        seconds = count * self.step_seconds()
        self.now += seconds
        self.busy += seconds
        self.tokens += count * len(self.rows)
        over, rows = [], []
        for left, conversation in self.rows:
            if left > count:
                rows.append((left - count, conversation))
                continue
            pause = conversation.pauses[conversation.turn]
            conversation.turn += 1
            if conversation.turn == len(conversation.lengths):
                over.append(conversation)
            else:
                heapq.heappush(self.away, (self.now + pause, id(conversation), conversation))
        self.rows = rows
        return over


def draw(work: Work, batch: int, count: int, rng: np.random.Generator) -> Iterator[Conversation]:
    """The conversations of a batch."""
    for _ in range(count):
        turns = min(MAX_TURNS, int(rng.geometric(1 - work.go_on)))
        mean = math.log(work.turn_tokens) - work.spread**2 / 2
        lengths = np.clip(np.round(rng.lognormal(mean, work.spread, turns)), 1, work.max_tokens).astype(int)
        pauses = rng.lognormal(math.log(work.env_seconds), 0.5, turns) * np.where(rng.random(turns) < work.straggler, 100.0, 1.0)
        yield Conversation(batch, lengths.tolist(), pauses.tolist())


def update_seconds(machine: Machine, model: Model, tokens: float, gpus: int) -> float:
    """An update: three passes over the tokens, and gradients and weights over the network (ZeRO-1: reduce, then gather, in bfloat16)."""
    compute = 6 * model.parameters * tokens / (machine.flops * gpus)
    traffic = 2 * 2 * model.parameters * (gpus - 1) / gpus / machine.network if gpus > 1 else 0.0
    return compute + traffic


def divided_update_seconds(machine: Machine, model: Model, tokens: float, gpus: int) -> float:
    """An update with FSDP: 8 bytes a parameter for every micro-batch, behind which or before which the computation hides, and 4 at the end."""
    compute = 6 * model.parameters * tokens / (machine.flops * gpus)
    exchanges = 8 * model.parameters * math.ceil(tokens / gpus / MICRO_TOKENS) / machine.network
    return max(compute, exchanges) + 4 * model.parameters / machine.network


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did, after its first batches."""

    gpus: int
    samplers: int
    staleness: int
    step_seconds: float
    tokens_per_second: float
    sampler_busy: float
    """Share of the time in which engines decode."""
    mean_staleness: float
    """Updates that the weights of a conversation's first token lacked, on average."""


def simulate(
    gpus: int,
    staleness: int,
    share: float,
    work: Work,
    machine: Machine,
    model: Model,
    batches: int = 8,
    seed: int = 0,
    divided: bool = False,
) -> Outcome:
    """A run of some batches; the first fill the pipeline and are not counted. `divided`: servers, and an FSDP learner apart from them."""
    rng = np.random.default_rng(seed)
    together = staleness == 0 and not divided
    samplers = gpus if together else max(1, round(gpus * share))
    learners = gpus if together else gpus - samplers
    num_engines = max(1, samplers // model.tensor_parallel)
    engines = [Engine(machine, model, work) for _ in range(num_engines)]
    size = work.batch or gpus * work.groups * work.group_size
    publish = num_engines * 2 * model.parameters / machine.publish  # one server after the other
    left, trained_at, ages, tokens = [size] * batches, [math.inf] * batches, [0.0] * batches, [0.0] * batches
    version, released, trained, free_at = 0, 0, 0, 0.0
    next_up: list[tuple[float, int]] = []
    """Engines with work, by their time."""

    def release(time: float) -> None:
        nonlocal released
        for number, conversation in enumerate(draw(work, released, size, rng)):
            tokens[released] += sum(conversation.lengths) + work.context / 2
            place = number % num_engines
            if not engines[place].has_work():
                engines[place].now = max(engines[place].now, time)
                heapq.heappush(next_up, (engines[place].now, place))
            engines[place].queue.append(conversation)
        released += 1

    for _ in range(min(batches, staleness + 1)):
        release(0.0)
    while version < batches:
        # Updates that are over by the time of the engine that is furthest behind come first.
        if trained_at[version] <= (next_up[0][0] if next_up else math.inf):
            time = trained_at[version]
            version += 1
            if released < batches:
                release(time)
            continue
        _, place = heapq.heappop(next_up)
        engine = engines[place]
        over = engine.advance(version)
        if engine.has_work():
            heapq.heappush(next_up, (engine.now, place))
        for conversation in over:
            batch = conversation.batch
            left[batch] -= 1
            ages[batch] += batch - conversation.begun
        while (
            trained < batches and left[trained] == 0
        ):  # in their order: a batch whose slowest conversation is over early waits for the one before
            update = (divided_update_seconds if divided else update_seconds)(machine, model, tokens[trained], learners)
            free_at = max(free_at, engine.now) + update + publish
            trained_at[trained] = free_at
            trained += 1
    first = staleness + 2 if divided else 2
    counted = range(first, batches)
    seconds = trained_at[-1] - trained_at[first - 1]
    sampled = sum(tokens[batch] - size * work.context / 2 for batch in counted)
    return Outcome(
        gpus,
        samplers,
        staleness,
        seconds / len(counted),
        sampled / seconds,
        sum(engine.busy for engine in engines) / (num_engines * trained_at[-1]),
        sum(ages[batch] for batch in counted) / (size * len(counted)),
    )


def check(work: Work, machine: Machine, model: Model) -> dict[str, float]:
    """One rollout on one GPU, to be held against benchmarks/real_run.py."""
    seconds, tokens = [], []
    for seed in range(8):
        engine = Engine(machine, model, work)
        engine.queue.extend(draw(work, 0, work.groups * work.group_size, np.random.default_rng(seed)))
        while engine.has_work():
            engine.advance(0)
        seconds.append(engine.now)
        tokens.append(engine.tokens)
    return {"rollout_s": float(np.mean(seconds)), "tokens": float(np.mean(tokens)), "tokens_per_s": float(np.sum(tokens) / np.sum(seconds))}


FIVE_TURNS = Work(turn_tokens=100, spread=1e-6, max_tokens=100, go_on=1 - 1e-12, context=650, env_seconds=1e-18, straggler=0.0)
MEASURED = {
    "Tether, 1.5B": (Machine(), Model(), 42_616),
    "Tether, 3B": (Machine(), Model(3.09e9, 36_864, 36), 27_158),
    "vLLM, 1.5B": (VLLM, Model(), 15_336),
    "vLLM, 3B": (VLLM, Model(3.09e9, 36_864, 36), 15_096),
}
"""Five turns of 100 tokens, 8 x 16 conversations, tokens a second on one H200 (docs/benchmarks.md, 2026-11-17)."""


def beside_measured() -> Iterator[str]:
    """The engine of the simulation beside what was measured."""
    yield "| engine and shape | simulated tokens/s | measured | ratio |"
    yield "|---|---|---|---|"
    for name, (machine, model, measured) in MEASURED.items():
        found = check(FIVE_TURNS, machine, model)["tokens_per_s"]
        yield f"| {name} | {found:,.0f} | {measured:,} | {found / measured:.2f} |"


def on_split(gpus: int, samplers: int, staleness: int, model: Model, publish: float) -> Outcome:
    """Agents on so many GPUs, of which `samplers` serve."""
    machine = dataclasses.replace(VLLM, publish=publish)
    return simulate(gpus, staleness, samplers / gpus, AGENTS, machine, model, batches=9, divided=True)


def best_split(gpus: int, model: Model) -> Outcome | None:
    """The quickest division of the GPUs into servers and learners, with up to two updates of staleness; None where the model does not fit."""
    shares = {gpus * quarters // 4 // model.tensor_parallel * model.tensor_parallel for quarters in (1, 2, 3)}
    fitting = [samplers for samplers in shares if samplers and (gpus - samplers) * CARD * ROOM >= 16 * model.parameters]
    found = [on_split(gpus, samplers, staleness, model, Machine.network) for samplers in sorted(fitting) for staleness in (0, 1, 2)]
    return min(found, key=lambda outcome: outcome.step_seconds, default=None)


def splits(sizes: Sequence[str], gpus: Sequence[int]) -> Iterator[str]:
    """The table of --size."""
    yield "| model | GPUs | servers x GPUs of each | learner ranks | `rollout.max_staleness` | s a step | sampled tokens/s | servers busy | s a step, published over HTTP |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in sizes:
        model = SIZES[name]
        for count in gpus:
            best = best_split(count, model)
            if best is None:
                yield f"| {name} | {count} | does not fit | | | | | | |"
                continue
            by_http = on_split(count, best.samplers, best.staleness, model, HTTP_RATE)
            yield (
                f"| {name} | {count} | {best.samplers // model.tensor_parallel} x {model.tensor_parallel} | {count - best.samplers} | {best.staleness} "
                f"| {best.step_seconds:.0f} | {best.tokens_per_second:,.0f} | {best.sampler_busy:.0%} | {by_http.step_seconds:.0f} |"
            )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--share", type=float, default=0.5, help="of the GPUs that sample, where sampling and learning are apart")
    parser.add_argument("--turn-tokens", type=float, default=Work.turn_tokens)
    parser.add_argument("--max-tokens", type=int, default=Work.max_tokens)
    parser.add_argument("--env-seconds", type=float, default=Work.env_seconds)
    parser.add_argument("--parameters", type=float, default=Model.parameters)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), help="vLLM servers and an FSDP learner with a model of this size")
    parser.add_argument("--check", action="store_true", help="one rollout on one GPU, beside what was measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(given)
    work = Work(turn_tokens=args.turn_tokens, max_tokens=args.max_tokens, env_seconds=args.env_seconds)
    machine, model = Machine(), Model(parameters=args.parameters)
    if args.check:
        print(json.dumps(check(work, machine, model)))
        print("\n".join(beside_measured()))
        return
    if args.size:
        for line in splits(args.size, args.gpus):
            print(line, flush=True)
        return
    if not args.json:
        print("| GPUs | of them sampling | staleness | seconds a step | sampled tokens/s | engines busy | mean staleness |")
        print("|---|---|---|---|---|---|---|")
    for gpus in args.gpus:
        for staleness in args.staleness:
            found = simulate(gpus, staleness, args.share, work, machine, model)
            if args.json:
                print(json.dumps(asdict(found)), flush=True)
            else:
                print(
                    f"| {found.gpus} | {found.samplers} | {found.staleness} | {found.step_seconds:.2f} | {found.tokens_per_second:,.0f} "
                    f"| {found.sampler_busy:.0%} | {found.mean_staleness:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
