"""The server engine: conversations over HTTP, sampled by one or several servers.

Conversations are driven as driver.py says. A conversation stays on its server, which has its prefix cached, as long as that server lives. The draw of a request
is fixed before it is sent (the state of the conversation's generator, or a seed taken from it), so a request that is sent again, to the same
server or to another, samples the same. A response ends by the engine's own stop rule on the returned ids; where a server stopped earlier,
the conversation is sent again from there. Where a server takes many requests at once, those that wait are sent together, once; what is not answered well is
then sent alone, and only that is judged and tried again.

A server that cannot be reached is left out, and its conversations continue elsewhere. When none is left, the engine waits for one to come
back; after `patience` seconds it gives up with an error that the trainer turns into a checkpoint. A server that comes back, or that answers
with another version of the weights than the published one (it was restarted), gets the weights again before it is used.

Of several ranks each samples its own conversations from all servers. The first rank alone publishes and verifies; the others take over what it
found, and leave out a server whose answers carry other weights. A rank that has none left asks for the weights (`OutdatedEngine`): all ranks then
publish again together, and play again.

Where no rank holds whole weights (training/distributed/fsdp.py), all ranks gather them into the first one's host memory at each publish, and it keeps
them there for servers that are restarted.

With asynchronous rollouts another thread drives the engine while the learner trains: weights are then published, also to a server that was
restarted, from a snapshot, and the policy is not looked at.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tether.core.enums import FinishReason
from tether.core.errors import BadInput, EngineUnavailable, OutdatedEngine
from tether.core.images import has_images
from tether.core.protocols import (
    Communicator,
    Conversation,
    EngineCapabilities,
    EngineStatistics,
    FollowUp,
    Sampling,
    SingleProcess,
    server_addresses,
)
from tether.core.types import Completion
from tether.models.endpoint import ServerUnreachable
from tether.models.policy import Policy
from tether.rollout.engines.connection import NO_SCORES, Probe, ProbeScores, ServerConnection, default_tolerance
from tether.rollout.engines.dialects import MOST_LINES, UNVERSIONED, Malformed, SampledTokens, TokenRequest
from tether.rollout.engines.driver import ConversationDriver, Track
from tether.rollout.engines.publish import named_weights, with_head
from tether.rollout.engines.stop_rule import StopRule
from tether.rollout.engines.vllm_server import VllmOptions, VllmServer

_LOG = logging.getLogger(__name__)

MALFORMED_ATTEMPTS = 3
"""How often a request is sent whose answer lacks ids or log-probs, before the server is refused."""
LOST_ATTEMPTS = 8
"""How often a request is sent to another server, or to one that came back, before the request itself is taken for the cause."""
REPUBLISH_ATTEMPTS = 3
"""How often one rollout may find a server with other weights than the published ones."""
LONGEST_WAIT = 10.0
"""Seconds between two looks at servers that are all unreachable; the first wait is much shorter."""
MOST_TOGETHER = 500_000
"""Tokens of the prompts that one HTTP request holds: some 3 MB, of which `tether serve` takes 16."""
OUTDATED_SECONDS = 10.0
"""How long a rank that publishes nothing waits for weights on a server that it needs, before all ranks are asked to publish again."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a run uses its servers."""

    timeout: float = 600.0
    """Seconds that one request may take."""
    patience: float = 120.0
    """Seconds to wait for a server to come back when none can be reached."""
    tolerance: float | None = None
    """Most that the log-probs of a server and of the learner may differ on the probe, on average; None: by the learner's precision."""
    weights_folder: Path | None = None
    """A folder that learner and servers see, for weights by disk; None sends them over the network."""
    vllm: VllmOptions = field(default_factory=VllmOptions)
    """How vLLM is started, where the run starts it."""
    find: Callable[[], list[str | None]] | None = None
    """Where the servers are now, in their order, if that may change: asked when one cannot be reached. None stands for one that is being started."""


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """Weights to publish, and what the learner says about the probe with them."""

    version: int
    scores: ProbeScores
    weights: Mapping[str, Tensor] | None
    """A copy in main memory; None: the policy's own, which must not change while they are published or sampled from."""


@dataclass(frozen=True, slots=True)
class _Published:
    """What the rank that published tells the others."""

    name: str
    """Of the engine, in the labels of versions."""
    difference: float
    servers: list[tuple[bool, str]]
    """Of each server: whether it has the weights, and why it cannot be used."""


@dataclass(slots=True, eq=False)
class _Row(Track):
    """One conversation and its request in flight."""

    response: list[int] = field(default_factory=list)
    """In progress: `tokens` does not hold it yet."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    request: TokenRequest | None = None
    server: ServerConnection | None = None
    malformed: int = 0
    lost: int = 0
    """How often the server of this request could not be used."""
    sent_after: int = 0
    """How many publishes its server had received when the request was sent."""


class ServerEngine:
    """Samples with servers; at most `max_rows` requests are in flight."""

    def __init__(
        self,
        addresses: Sequence[str],
        policy: Policy,
        *,
        max_rows: int = 128,
        max_context: int | None = None,
        options: ServerOptions | None = None,
        started: VllmServer | None = None,
        ranks: Communicator | None = None,
    ) -> None:
        """Connects to every server and refuses one that cannot serve this policy. A server that was started for this engine ends with it.
        `ranks` sample from the same servers; by default there is one."""
        self._started = started
        self._ranks: Communicator = ranks or SingleProcess()
        if policy.tokenizer is None:
            raise BadInput("the server engine needs a policy with its tokenizer; build it as Policy(model, tokenizer)")
        self.options = options or ServerOptions()
        self._policy, self._max_rows = policy, max_rows
        self.tokenizer = policy.tokenizer
        self.vision = policy.vision
        self.stop_rule = StopRule(policy.tokenizer, policy.end_of_turn_ids)
        self._probe = Probe(policy, self.options.tolerance if self.options.tolerance is not None else default_tolerance(policy))
        self._max_context = max_context or policy.max_positions
        self._name = secrets.token_hex(4)
        self._published: WeightsSnapshot | None = None
        self._cancelled = threading.Event()
        self._left_out: dict[ServerConnection, float] = {}
        """Servers that cannot be reached, and since when (time.monotonic)."""
        self._notes: list[str] = []
        self.statistics = EngineStatistics()
        self.servers = [
            ServerConnection(
                address,
                parallel=max_rows,
                timeout=self.options.timeout,
                folder=self.options.weights_folder,
                device=policy.module.device,
            )
            for address in addresses
        ]
        with self._connections():
            for server in self.servers:
                server.connect(self._probe, self._max_context)

    @property
    def capabilities(self) -> EngineCapabilities:
        """What all servers can do."""
        dialects = [server.dialect for server in self.servers]
        return EngineCapabilities(
            per_conversation_uniforms=all(dialect.draws_natively for dialect in dialects),
            prefix_sharing=all(not dialect.draws_natively for dialect in dialects),  # vLLM and llama.cpp cache prefixes between requests
            weight_sync=all(dialect.weights is not None for dialect in dialects),
            logprobs=all(dialect.has_logprobs for dialect in dialects),
        )

    @property
    def backend(self) -> str:
        names = sorted({server.dialect.name for server in self.servers})
        return f"server ({', '.join(names)})"

    def free(self) -> None:
        """There is no memory to release."""

    # -------------------------------------------------------------------------------------------------------------- weights

    @property
    def label(self) -> str:
        """The version of the published weights, as servers report it; UNVERSIONED before the first publish."""
        return UNVERSIONED if self._published is None else f"{self._name}-{self._published.version}"

    @property
    def version(self) -> int | None:
        return None if self._published is None else self._published.version

    def sync(self, version: int | None = None) -> dict[str, float]:
        """Publish the policy's weights to every server that can be reached, and score the probe there."""
        if version is None:
            version = 0 if self._published is None else self._published.version + 1
        if self._policy.divided is None:
            return self.publish(WeightsSnapshot(version, self._probe.score() if self._ranks.rank == 0 else NO_SCORES, None))
        if self._published is not None:  # the copy of the weights before would take as much host memory again
            self._published = replace(self._published, weights=None)
        return self.publish(self.snapshot(version))

    def snapshot(self, version: int) -> WeightsSnapshot:
        """The policy's weights as they are now, copied; on a rank that publishes nothing without them. Of a divided policy all ranks call it."""
        if self._policy.divided is not None:
            scores, weights = self._probe.score(), self._named(None)  # gathered: copies already
            return WeightsSnapshot(version, *((NO_SCORES, None) if self._ranks.rank else (scores, weights)))
        if self._ranks.rank:
            return WeightsSnapshot(version, NO_SCORES, None)
        weights = self._named(None)
        return WeightsSnapshot(version, self._probe.score(), {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()})

    def adopt(self, snapshot: WeightsSnapshot) -> None:
        """Take a copy of the weights that the servers hold already in place of the policy's own, which may change from now on."""
        assert self._published is not None and self._published.version == snapshot.version
        self._published = snapshot

    def publish(self, snapshot: WeightsSnapshot) -> dict[str, float]:
        """Publish weights to every server that can be reached, and score the probe there; of several ranks the first does, for all."""
        self._published = snapshot
        self._probe.adopt(snapshot.scores)
        for server in self.servers:
            server.is_current = False

        def publish() -> _Published | None:
            """The part of this rank."""
            if self._ranks.rank:
                return None
            with self._connections():
                difference = self.recover()
            return _Published(self._name, difference, [(server.is_alive and server.is_current, server.problem) for server in self.servers])

        found = self._ranks.share(publish)[0]
        assert found is not None  # the first rank's
        if self._ranks.rank:
            self._name = found.name
            for server, (has_weights, problem) in zip(self.servers, found.servers, strict=True):
                server.is_alive = server.is_current = has_weights
                server.num_published += has_weights
                server.problem = problem
        return {"probe_difference": found.difference}

    def republish(self) -> dict[str, float]:
        """Give every server the weights again that were published last."""
        assert self._published is not None  # a run publishes before it samples
        return self.publish(self._published)

    def cancel(self) -> None:
        """End what another thread does with this engine at its next look; requests that it waits for fail."""
        self._cancelled.set()
        for server in self.servers:
            server.endpoint.close()

    def check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise EngineUnavailable("the rollout was given up, as the run ends")

    def _named(self, snapshot: WeightsSnapshot | None) -> Mapping[str, Tensor]:
        """Weights by name, a tied head under its own name too where a vLLM needs it."""
        if snapshot is not None and snapshot.weights is not None:
            return snapshot.weights
        weights = named_weights(self._policy)
        return with_head(weights, self._policy) if any(server.dialect.weights == "vllm" for server in self.servers) else weights

    def recover(self) -> float:
        """Give every server that can be reached the present weights, if it has others; returns the largest difference on the probe.

        Where none can be reached, waits for one, and gives up after `patience`.
        """
        deadline = time.monotonic() + self.options.patience
        outdated_until, wait = math.inf, 0.1
        while True:
            if self.options.find is not None and not all(server.is_alive for server in self.servers):
                for server, address in zip(self.servers, self.options.find(), strict=True):
                    if address is not None and address != server.address:  # the server was replaced
                        server.move(address)
            for server in self.servers:
                if not server.is_alive or not server.is_current:
                    self._bring_back(server)
            if any(server.is_alive for server in self.servers):
                return max(server.difference for server in self.servers if server.is_alive)
            if self._started is not None:
                self._started.check_lives()
            if (
                self.options.find is not None and None in self.options.find()
            ):  # somebody starts a server, and decides how long that may take
                deadline = time.monotonic() + wait + self.options.patience
            if any(server.is_outdated for server in self.servers):  # the rank that publishes may be about to
                outdated_until = min(outdated_until, deadline, time.monotonic() + OUTDATED_SECONDS)
                if time.monotonic() + wait > outdated_until:
                    raise OutdatedEngine(self._nobody_there())
            if time.monotonic() + wait > deadline:
                raise EngineUnavailable(self._nobody_there())
            self._cancelled.wait(wait)
            self.check_cancelled()
            wait = min(2 * wait, LONGEST_WAIT)

    def _bring_back(self, server: ServerConnection) -> None:
        try:
            server.check_health()
            if not server.is_known:
                server.inspect(self._probe, self._max_context)
            if self._ranks.rank:
                server.take_over(self._probe, self.label)
                return
            if self._published is not None:
                server.publish(self._named(self._published), self.label)
            server.verify(self._probe, self.label)
        except ServerUnreachable as error:
            self.lose(server, error)
        else:
            if (since := self._left_out.pop(server, None)) is not None:
                self._note(f"the server at {server.address} is used again, after {time.monotonic() - since:.1f} s")

    def lose(self, server: ServerConnection, error: ServerUnreachable) -> None:
        """Leave a server out that cannot be reached, and say so once."""
        server.lose(str(error))
        if server not in self._left_out:
            self._left_out[server] = time.monotonic()
            others = any(other.is_alive for other in self.servers)
            then = "its conversations continue on the others" if others else f"waiting for up to {self.options.patience:g} s"
            self._note(f"the server at {server.address} is left out ({error.cause}); {then}")

    def _note(self, note: str) -> None:
        """For the console and the record; of servers that somebody else starts again, they tell the console."""
        self._notes.append(note)
        if self.options.find is None:
            _LOG.warning("%s", note)

    def take_notes(self) -> list[str]:
        """Servers that were left out, and that came back, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _nobody_there(self) -> str:
        said = "; ".join(server.problem for server in self.servers)
        return f"no server of rollout.engine could be used for {self.options.patience:g} s (server.patience): {said}"

    # -------------------------------------------------------------------------------------------------------------- sampling

    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[], None] | None = None,
        follow_up: FollowUp | None = None,
    ) -> None:
        """Drive every conversation to its end."""
        self.statistics = EngineStatistics()
        with self._connections():
            self.recover()
            _Run(self, sampling, on_finished, self._max_rows, follow_up).drive(
                partial(_Row, conversation) for conversation in conversations
            )

    def least_loaded(self) -> ServerConnection:
        """The server that works on the fewest requests of this rank; of equal ones each rank begins with another."""
        first = self._ranks.rank % len(self.servers)
        alive = [server for server in (*self.servers[first:], *self.servers[:first]) if server.is_alive]
        return min(alive, key=lambda server: server.load)

    def number_of(self, label: str) -> int | None:
        """Which step's weights a label stands for; None for the weights of somebody else."""
        if self._published is None or label == UNVERSIONED:
            return 0 if self._published is None else self._published.version
        name, _, number = label.rpartition("-")
        return int(number) if name == self._name and number.isdigit() else None

    @contextmanager
    def _connections(self) -> Iterator[None]:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server.connected())
            yield


class _Run(ConversationDriver[_Row]):
    """The conversations of one run."""

    def __init__(
        self,
        engine: ServerEngine,
        sampling: Sampling,
        on_finished: Callable[[], None] | None,
        num_rows: int,
        follow_up: FollowUp | None,
    ) -> None:
        super().__init__(num_rows)
        self._engine, self._sampling, self._on_finished, self._follow_up = engine, sampling, on_finished, follow_up
        self._republished = 0
        self._held: dict[ServerConnection, list[tuple[_Row, TokenRequest]]] = {}
        """Requests that are sent together when nothing else is to be done."""

    def check_cancelled(self) -> None:
        self._engine.check_cancelled()

    def end(self, track: _Row) -> None:
        super().end(track)
        if self._on_finished is not None:
            self._on_finished()
        if self._follow_up is not None:
            self.add(partial(_Row, conversation) for conversation in self._follow_up(track.conversation))

    def ask(self, track: _Row, num_fed: int) -> None:
        self._engine.statistics.fed_tokens += num_fed
        track.response, track.logprobs, track.versions = [], [], []
        self._ask_more(track)

    def _ask_more(self, track: _Row) -> None:
        """Fix the draw of the next request, then send it."""
        conversation = track.conversation
        state: Any = conversation.uniforms.bit_generator.state
        draws_natively = self._engine.capabilities.per_conversation_uniforms
        track.request = TokenRequest(
            ids=(*track.tokens, *track.response),
            sampling=self._sampling,
            room=self._sampling.max_tokens - len(track.response),
            stops=(*conversation.closing_tags, *self._sampling.stop_strings),
            end_of_turn_ids=self._engine.stop_rule.end_of_turn_ids,
            seed=0 if draws_natively else int(conversation.uniforms.integers(2**31)),
            generator=state,
            vision=self._engine.vision,
        )
        self._send_request(track)

    def _send_request(self, track: _Row) -> None:
        assert track.request is not None  # it was asked for
        if track.server is None or not track.server.is_alive:
            if track.server is not None:
                self._engine.statistics.recomputed_tokens += len(track.request.ids)
            track.server = self._engine.least_loaded()
        if not track.server.dialect.takes_images and has_images(track.request.ids):
            raise BadInput(
                f"the environment shows images, and the server at {track.server.address} ({track.server.dialect.name}) takes token ids alone; "
                "use tether serve, vLLM with --enable-scale-out, or rollout.engine=native"
            )
        track.server.load += 1
        track.sent_after = track.server.num_published
        self._engine.statistics.decode_calls += 1
        if track.server.dialect.takes_many and not (track.request.vision and has_images(track.request.ids)):
            self._held.setdefault(track.server, []).append((track, track.request))
        else:
            self.send(track, partial(track.server.generate, track.request))

    def flush(self) -> None:
        """Ask each server by one HTTP request for all that was held back: what HTTP costs both sides is more than what sampling costs the host."""
        for server, held in self._held.items():
            most = min(MOST_LINES, max(1, MOST_TOGETHER // max(len(request.ids) for _, request in held)))
            for first in range(0, len(held), most):
                tracks, requests = zip(*held[first : first + most], strict=True)
                alone = [partial(server.generate, request) for request in requests]
                self.send_together(tracks, partial(server.generate_many, requests), alone)
        self._held.clear()

    def settle(self, track: _Row, answer: SampledTokens | Exception) -> None:
        """Take an answer, or send its request again."""
        server = track.server
        assert server is not None  # the request was sent to it
        server.load -= 1
        if isinstance(answer, ServerUnreachable):
            self._engine.lose(server, answer)
            track.lost += 1
            if track.lost >= LOST_ATTEMPTS:  # every server that takes it fails: it is the request
                raise EngineUnavailable(f"a request failed on {track.lost} servers in a row: {answer}")
            if not any(other.is_alive for other in self._engine.servers):
                self._engine.recover()
            self._send_request(track)
        elif isinstance(answer, Malformed):
            track.malformed += 1
            if track.malformed >= MALFORMED_ATTEMPTS:
                raise BadInput(f"the server at {server.address} answered {track.malformed} times with {answer}; {server.advice}")
            self._send_request(track)
        elif isinstance(answer, Exception):
            raise answer
        else:
            self._accept(track, server, answer)

    def _accept(self, track: _Row, server: ServerConnection, sampled: SampledTokens) -> None:
        known = {label: self._engine.number_of(label) for label in set(sampled.versions)}
        numbers = [known[label] for label in sampled.versions]
        if any(number is None for number in numbers):
            self._republish(track, server, sampled)
            return
        track.malformed = track.lost = 0
        first = len(track.response)
        track.response += sampled.ids
        track.logprobs += sampled.logprobs
        track.versions += [number for number in numbers if number is not None]
        tags = track.conversation.closing_tags
        used, reason = self._engine.stop_rule.first_end(track.response, first, self._sampling, tags)
        if reason is None and sampled.turn_ended:
            reason = FinishReason.END_OF_TURN
        self._engine.statistics.sampled_tokens += used - first
        self._engine.statistics.dropped_tokens += len(sampled.ids) - (used - first)
        if server.dialect.draws_natively:
            track.conversation.uniforms.random(used - first, dtype="float32")  # what the server drew for the tokens that are kept
        if reason is None:
            self._ask_more(track)
            return
        versions = tuple(track.versions[:used]) if self._engine.label else ()
        self.deliver(track, Completion(tuple(track.response[:used]), tuple(track.logprobs[:used]), reason, versions))

    def _republish(self, track: _Row, server: ServerConnection, sampled: SampledTokens) -> None:
        """The server holds the weights of somebody else: it was restarted, or another run uses it. The request is sent again."""
        if track.sent_after == server.num_published:  # else it has got the weights since
            self._republished += 1
            if self._republished > REPUBLISH_ATTEMPTS * len(self._engine.servers):
                raise EngineUnavailable(
                    f"the server at {server.address} keeps answering with weights '{sampled.versions[0]}', but this run published "
                    f"'{self._engine.label}'; let no other run use it"
                )
            server.is_current = False
            self._engine.recover()
        self._send_request(track)


# ------------------------------------------------------------------------------------------------------------- by name (registry.py)


def build(
    name: str, policy: Policy, *, max_rows: int, max_context: int | None, server: ServerOptions | None, ranks: Communicator | None, **_: Any
) -> ServerEngine:
    """The engine of servers by their addresses."""
    return ServerEngine(server_addresses(name), policy, max_rows=max_rows, max_context=max_context, options=server, ranks=ranks)


def build_placed(
    name: str, policy: Policy, *, max_rows: int, max_context: int | None, server: ServerOptions | None, ranks: Communicator | None, **_: Any
) -> ServerEngine:
    """The engine of the servers that Ray placed."""
    found = server.find() if server is not None and server.find is not None else []
    placed = [address for address in found if address]
    if server is None or not placed or len(placed) < len(found):
        raise BadInput(
            "the engine is 'ray', but Ray has placed no engine for this process; start with tether train --ray, or give --engine"
        )
    return ServerEngine(placed, policy, max_rows=max_rows, max_context=max_context, options=server, ranks=ranks)


def build_vllm(
    name: str, policy: Policy, *, max_rows: int, max_context: int | None, server: ServerOptions | None, **_: Any
) -> ServerEngine:
    """The engine of a vLLM that is started on this machine."""
    options = server or ServerOptions()
    started = VllmServer(policy, max_context or policy.max_positions, options.vllm)
    return ServerEngine([started.address], policy, max_rows=max_rows, max_context=max_context, options=options, started=started)
