"""Demonstrations by experts: they play environments of the training split, and what they see, think and do is written down."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tether.core.errors import BadInput, did_you_mean
from tether.core.grammar import parse_response
from tether.core.protocols import Env, few_shot_of
from tether.core.seeding import derive_seed
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.training.sft.demonstration import Demonstration, Exchange, demonstrate_turns, demonstration
from tether.training.sft.demonstrators import EXPERTS, Weaknesses, demonstrate

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat  # transformers: not before the source was checked

REPORT_EVERY = 50


def make_expert_envs(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[Env]:
    """The environments, in which instances of the validation and test splits never turn up.

    They show no examples as turns unless `options` say so: who is taught the form needs none, and prompts are shorter without them.
    """
    for name in names:
        if name not in EXPERTS:
            known = name in ENVIRONMENTS.names()
            said = f"environment '{name}' has no expert" if known else f"unknown source '{name}': {did_you_mean(name, EXPERTS)}"
            raise BadInput(f"{said}; experts play {', '.join(EXPERTS)}; or give a .jsonl file of conversations or a run folder")
    if unused := sorted(options.keys() - set(names)):
        raise BadInput(f"experts.options are given for {', '.join(unused)}, but the source is {', '.join(names)}; leave them out")
    return [make_env(name, **{"few_shot": 0, **options.get(name, {})}) for name in names]


def play_expert(env: Env, seed: int, rng: random.Random, weaknesses: Weaknesses, tries: int = 0) -> list[Exchange]:
    """An expert's episode."""
    shown, exchanges = env.reset(seed).text, []
    while True:
        thought = demonstrate(env, rng, weaknesses, tries)
        exchanges.append((shown, thought.text))
        step = env.step(parse_response(thought.text).answer or "")
        if step.done:
            return exchanges
        shown = step.observation.text


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of some environments, and how their episodes are written down."""

    envs: Sequence[Env]
    chat: "ChatFormat"
    weaknesses: Weaknesses
    end_of_turn: bool
    tries: int = 0
    """Expressions that miss the target, at most, before the right one (Countdown)."""
    stream: str = "sft"
    """First part of the names of the seeds."""

    def record(self, seed: int, episodes: range, progress: Callable[[int, int, str], None]) -> list[Demonstration]:
        """The episodes of these numbers, from one environment after the other. An episode follows from the seed and its number alone."""
        recorded = []
        for index in episodes:
            env = self.envs[index % len(self.envs)]
            rng = random.Random(derive_seed(f"{self.stream}-expert", seed, index))
            exchanges = play_expert(env, derive_seed(f"{self.stream}-instance", seed, index), rng, self.weaknesses, self.tries)
            turns = demonstrate_turns(self.chat, env.instructions, exchanges, self.end_of_turn, few_shot_of(env))
            # The same instance may come from two seeds: held out together, no held-out board is trained on.
            recorded.append(demonstration(f"{type(env).__name__} {getattr(env, 'instance', index)}", turns))
            if len(recorded) % REPORT_EVERY == 0 or len(recorded) == len(episodes):
                progress(len(recorded), len(episodes), "")
        return recorded
