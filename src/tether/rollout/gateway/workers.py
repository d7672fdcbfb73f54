"""Processes that play the episodes of an agent: each has a gateway of its own and runs its share of the programs, this process has the engine.

A reply costs some milliseconds of Python: the client's, HTTP, messages to tokens and back. In one process these would take turns with the thread that
drives the device, which then waits for most of a rollout. An episode lives in one worker; what passes between the processes are prompts and replies as
tokens, and trajectories. Which worker plays what changes no token.

A worker that ends (an agent may crash its process) errors the episodes that it was playing, and another is started in its place. Workers end with
this process, however that ends.
"""

import asyncio
import itertools
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

from tether.core.child import Child, signal_name
from tether.core.enums import StopReason
from tether.core.errors import BadInput, EnvironmentFailure, TetherError
from tether.core.importing import in_one_line
from tether.core.protocols import Sampling
from tether.core.types import Completion, Trajectory
from tether.models.chat import ChatFormat
from tether.models.messages import AgentChat
from tether.rollout.episode import EpisodeRules, EpisodeSeeds, Follow
from tether.rollout.gateway.agents import Agent
from tether.rollout.gateway.episodes import LABEL, AgentRules, EpisodePlayer
from tether.rollout.serving.response import ResponseRequest, Submits

DEATHS = 3
"""Workers that may end in one rollout for each that was started; then the rollout ends."""


class NotSendable(Exception):
    """The agent cannot be sent to another process."""


class _Worker:
    """One process, seen from here. A thread reads what it says and another writes, so that the engine's thread never waits for it."""

    def __init__(self, made: bytes, heard: "queue.SimpleQueue[tuple[_Worker, Any]]") -> None:
        self.child = Child([sys.executable, "-P", "-c", f"from {__name__} import main; main()"], "descriptor", stdout=None, stderr=None)
        self._pipe = Connection(self.child.connection.detach())
        self._heard = heard
        self.playing: dict[int, EpisodeSeeds] = {}
        """Episodes by their number in the plan."""
        self._to_send: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send(sys.path)
        self.send(made)
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True, name="agent worker").start()

    def send(self, message: Any) -> None:
        self._to_send.put(message)

    def close(self) -> None:
        self._to_send.put(None)
        self.child.kill()

    def _write(self) -> None:
        with suppress(OSError, ValueError):  # it has ended: the reader says so
            while (message := self._to_send.get()) is not None:
                self._pipe.send(message)

    def _read(self) -> None:
        try:
            while True:
                self._heard.put((self, self._pipe.recv()))
        except (OSError, EOFError, ValueError):
            self._heard.put((self, None))


class AgentWorkers:
    """The processes of a run. Close them."""

    def __init__(self, agent: Agent, rules: AgentRules, chat: ChatFormat) -> None:
        """NotSendable where the agent holds what cannot be sent."""
        import cloudpickle

        try:
            eyes = None if chat.vision is None else (chat.vision.module.config, chat.vision.image_processor)
            self._made: bytes = cloudpickle.dumps((agent, rules, chat.tokenizer, chat.end_of_turn_ids, eyes))
        except (PicklingError, TypeError, AttributeError) as error:
            raise NotSendable(str(error)) from error
        self._rules = rules
        self._heard: queue.SimpleQueue[tuple[_Worker, Any]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._notes: dict[str, None] = {}
        self._num_plays = 0

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def take_notes(self) -> list[str]:
        notes, self._notes = list(self._notes), {}
        return notes

    def play(
        self,
        thread: Submits,
        tasks: Callable[[EpisodeSeeds], dict[str, Any]],
        plan: Sequence[EpisodeSeeds],
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None,
        follow: Follow | None,
    ) -> list[Trajectory]:
        """An episode for every entry of the plan, in its order, and what `follow` says behind them."""
        plan, waiting, found = list(plan), deque(range(len(plan))), dict[int, Trajectory]()
        deaths, self._num_plays = 0, self._num_plays + 1
        try:
            while len(found) < len(plan):
                self._workers += [_Worker(self._made, self._heard) for _ in range(self._rules.workers - len(self._workers))]
                while waiting and sum(len(worker.playing) for worker in self._workers) < self._rules.concurrency:
                    worker, number = min(self._workers, key=lambda worker: len(worker.playing)), waiting.popleft()
                    worker.playing[number] = plan[number]
                    worker.send(("play", number, tasks(plan[number]), plan[number], sampling, rules))
                worker, message = self._heard.get()
                ended: dict[int, Trajectory] = {}
                if message is None:
                    if worker in self._workers:  # else it was closed here
                        self._workers.remove(worker)
                        cause, deaths = self._cause_of_death(worker), deaths + 1
                        if deaths > DEATHS * self._rules.workers:
                            raise EnvironmentFailure(f"the processes that play the agent end again and again; the last one {cause}")
                        ended = {number: _errored(seeds, cause) for number, seeds in worker.playing.items()}
                elif message[0] == "ask":
                    self._ask(thread, worker, *message[1:])
                elif message[0] == "failed":
                    if message[2] in (None, self._num_plays):  # else a request that outlived its episode, and then its engine
                        raise message[1]
                elif message[0] == "played":
                    _, number, trajectory, notes = message
                    if worker.playing.pop(number, None) is not None:
                        ended[number] = trajectory
                    self._notes |= dict.fromkeys(notes)
                found |= ended
                for trajectory in ended.values():
                    if on_finished is not None:
                        on_finished()
                    if follow is not None:
                        plan += (more := follow(trajectory))
                        waiting.extend(range(len(plan) - len(more), len(plan)))
        except BaseException:
            self.close()  # they play on what nobody waits for
            raise
        return [found[number] for number in range(len(plan))]

    def _ask(self, thread: Submits, worker: _Worker, number: int, request: tuple[Any, ...]) -> None:
        play = self._num_plays

        def answer(done: "Future[Completion]") -> None:
            error = done.exception()
            worker.send(("reply", number, done.result() if error is None else None))
            if error is not None:
                self._heard.put((worker, ("failed", error, play)))

        thread.submit(ResponseRequest(*request)).add_done_callback(answer)

    def _cause_of_death(self, worker: _Worker) -> str:
        code = worker.child.wait()
        worker.close()
        return f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def _errored(seeds: EpisodeSeeds, cause: str) -> Trajectory:
    error = f"the process that played the agent {cause}"
    return Trajectory(seeds.group, seeds.member, seeds.instance, [], StopReason.ENV_ERROR, env=LABEL, error=error)


# ----------------------------------------------------------------------------------------------------------------- in a worker


def main() -> None:
    """What a worker does: play what it is sent, until its socket closes."""
    import cloudpickle

    pipe = Connection(int(sys.argv[-1]))
    sys.path[:] = pipe.recv()
    try:
        agent, rules, tokenizer, end_of_turn_ids, eyes = cloudpickle.loads(pipe.recv())
    except Exception as error:  # whatever the agent's module raises where it is imported
        advice = "see that its module can be imported there, or set agent.workers=0"
        pipe.send(("failed", BadInput(f"the agent cannot be loaded in another process: {in_one_line(error)}; {advice}"), None))
        raise
    vision = None
    if eyes is not None:  # it makes tokens, and no features; only then is torch needed here, which takes seconds and half a GiB
        from tether.models.vision import Vision

        vision = Vision(SimpleNamespace(config=eyes[0]), tokenizer, eyes[1])
    player = EpisodePlayer(agent, rules, AgentChat(ChatFormat(tokenizer, end_of_turn_ids, vision), rules.tool_format))
    asyncio.run(_play_sent(pipe, player))


async def _play_sent(pipe: Connection, player: EpisodePlayer) -> None:
    loop, sending = asyncio.get_running_loop(), threading.Lock()
    asked: dict[int, Future[Completion]] = {}
    numbers = itertools.count()
    episodes: set[asyncio.Task[None]] = set()
    over = asyncio.Event()

    def send(message: Any) -> None:
        with sending, suppress(OSError):  # nobody is there any more: the reader ends this process
            pipe.send(message)

    def submit(request: ResponseRequest) -> "Future[Completion]":
        number = next(numbers)
        asked[number] = request.done
        send(("ask", number, (request.prompt, request.sampling, request.uniforms, request.closing_tags, request.images)))
        return request.done

    async def play(number: int, *given: Any) -> None:
        trajectory = await player.play(*given)
        player.gateway.forget()
        send(("played", number, trajectory, player.take_notes()))

    def begin(message: tuple[Any, ...]) -> None:
        task = loop.create_task(play(*message))
        episodes.add(task)
        task.add_done_callback(end)

    def end(task: "asyncio.Task[None]") -> None:
        episodes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # no fault of the agent's: it ends the rollout
            send(("failed", error if isinstance(error, TetherError) else RuntimeError(in_one_line(error)), None))

    def read() -> None:
        with suppress(OSError, EOFError):
            while True:
                kind, *message = pipe.recv()
                if kind == "play":
                    loop.call_soon_threadsafe(begin, tuple(message))
                elif (done := asked.pop(message[0], None)) is not None:
                    if message[1] is None:
                        done.set_exception(RuntimeError("the engine failed"))
                    else:
                        done.set_result(message[1])
        loop.call_soon_threadsafe(over.set)

    player.gateway.submit = submit
    threading.Thread(target=read, daemon=True, name="replies").start()
    await over.wait()
