"""Environments that do on command what environments must not do; importable by worker processes.

The answer is the command: "sleep 0.2", "exit 3", "signal 11", "loop", "raise", "raise unpicklable", "send unpicklable", "quit"; anything
else is echoed. The reward counts the steps of the episode.
"""

import asyncio
import os
import threading
import time

from tether.core.types import Observation, Step
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work


class TroubledOptions(TurnOptions):
    max_turns: int = 3
    work: Work = "process"
    build_seconds: float = 0
    refuse_to_build: bool = False


class Unpicklable(Exception):
    """Cannot be pickled, and its constructor cannot be called with its args."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


class Troubled(TextEnv[TroubledOptions]):
    name = "troubled"
    Options = TroubledOptions

    def __init__(self, options: TroubledOptions | None = None) -> None:
        super().__init__(options or TroubledOptions())
        time.sleep(self.options.build_seconds if threading.current_thread() is not threading.main_thread() else 0)
        if self.options.refuse_to_build:
            raise RuntimeError("refused to be built")

    @property
    def task(self) -> str:
        return "Behave."

    @property
    def work(self) -> Work:
        return self.options.work

    def generate(self, seed: int) -> None:
        if seed < 0:
            time.sleep(-seed)
        self.seed = seed
        self.steps = 0

    def opening(self) -> str:
        return f"seed {self.seed}, process {os.getpid()}"

    def take(self, answer: str) -> Outcome:
        self.steps += 1
        verb, _, argument = answer.partition(" ")
        info = {}
        if verb == "sleep":
            time.sleep(float(argument))
        elif verb == "exit":
            os._exit(int(argument))
        elif verb == "signal":
            os.kill(os.getpid(), int(argument))
        elif verb == "quit":
            raise SystemExit(7)
        elif verb == "loop":
            while True:
                pass
        elif answer == "raise":
            raise KeyError("no such shelf")
        elif answer == "raise unpicklable":
            raise Unpicklable("one", "two")
        elif answer == "send unpicklable":
            info["lock"] = threading.Lock()
        return Outcome(f"seed {self.seed} heard {answer}", reward=float(self.steps), done=answer == "end", info=info)


class WrongReply(Troubled):
    """Gives back something that is no step."""

    def step(self, answer: str) -> Step:
        return "done"  # type: ignore[return-value]


class Awaiting:
    """The bare protocol, with coroutines; `stubborn` will not be cancelled."""

    name = "awaiting"
    max_turns = 3
    instructions = "Wait."
    work = "wait"
    closed = 0

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        raise AssertionError("the coroutines are to be used")

    step = reset

    async def areset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        await asyncio.sleep(0)
        self.instructions = f"Wait for {seed}."
        return Observation(f"seed {seed}, env_seed {env_seed}")

    async def astep(self, answer: str) -> Step:
        verb, _, argument = answer.partition(" ")
        if verb == "sleep":
            await asyncio.sleep(float(argument))
        while verb == "stubborn":
            try:
                await asyncio.sleep(float(argument))
                break
            except asyncio.CancelledError:
                continue
        if verb == "raise":
            raise KeyError("no such shelf")
        return Step(Observation(f"heard {answer}"), 1.0, False, False, {"valid": True, "truncated": False})

    def close(self) -> None:
        type(self).closed += 1


class Curious(Troubled):
    """Looks around in the process it lives in."""

    def opening(self) -> str:
        return f"{os.environ.get('TETHER_TEST_HERE')} {os.getcwd()}"


class Silent(Troubled):
    """Says nothing about where it runs."""

    work = TextEnv.work


class Printing(Troubled):
    """Prints and writes megabytes, with what clears a screen."""

    def take(self, answer: str) -> Outcome:
        os.write(1, b"raw \x1b[2J\n")
        for _ in range(50):
            print("x" * 100_000)
        return super().take("right")
