"""One sampling server, as an engine sees it: what it serves, whether it lives, which weights it holds, and how it is asked.

The first contact finds the dialect and refuses a server that cannot serve the policy: another tokenizer, too little room, no log-probs. The
weights are checked by a fixed probe, before the first rollout and after every publish: the same text, scored token by token on the server and by the
learner.

A server that answers 200 to new weights may still hold old ones, in whole or in part (vLLM's reload in place leaves a tied head stale on a
CPU). Two things end a run: a difference above the tolerance, and a server that is nearer to the weights before the update than to those after it,
where the update moved the probe by more than rounding. The learner's side is computed once for each publish. A server that is checked later (it was
replaced) is compared with these numbers and not with the policy, which an asynchronous run has trained on meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.core.child import this_attempt
from tether.core.errors import BadInput, EngineUnavailable, ModelUnavailable
from tether.core.http import token_for
from tether.core.protocols import Sampling
from tether.models.endpoint import Conflict, ModelEndpoint, NoSuchRoute, ServerUnreachable
from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy
from tether.models.policy import Policy
from tether.models.scoring.server import ServerScorer
from tether.rollout.engines.dialects import (
    LINES,
    Dialect,
    Malformed,
    SampledTokens,
    TetherDialect,
    TokenRequest,
    find_dialect,
)
from tether.rollout.engines.publish import Publisher, TetherPublisher, VllmPublisher
from tether.rollout.engines.vllm_plugin import sizes_of

TOKEN_VARIABLES = ("TETHER_TOKEN", "OPENAI_API_KEY")
"""Where the token of a server comes from; it is never part of the settings."""
SEND_DELAYS = (0.2, 0.5)
"""Seconds before each further attempt of a request, before its server counts as lost."""
PROBE_SAMPLES = 8
PROBE_TEMPERATURE = 0.7


PROBE_TEXT = (
    "You are on a frozen lake, P is you and G is the goal. <think> The goal is two rows down and one column to the right, and the hole at "
    "(1, 2) is in the way, so I go Down, Down, then Right. </think> <answer> Down || Down || Right </answer> Turn 2 of 5: 37 + 25 = 62, and "
    "7 * (8 - 3) = 35. Search for the book of which she wrote the second half in 1893; then click buy."
)
MOST_TOKENS = 128
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Mean absolute difference of a log-prob on the probe, by what the learner computes in."""
MOVED = 4.0
"""An update moved the probe measurably where the mean change is so many times the difference before the update."""

NUM_PREFIXES = 8
"""Beginnings of the probe behind which a server samples a token, to see which log-probs it returns."""

Scores = npt.NDArray[np.float64]


class ProbeScores(NamedTuple):
    """What the learner's weights say about the probe."""

    tokens: Scores
    """Log-probs of its tokens but the first."""
    next_logits: npt.NDArray[np.float32]
    """[NUM_PREFIXES, V]: logits of the token behind each of `Probe.prefixes`."""


NO_SCORES = ProbeScores(np.zeros(0), np.zeros((0, 0), dtype=np.float32))
"""Of a rank that verifies no server."""


@dataclass(slots=True)
class Probe:
    """The probe of one policy, with the learner's scores at the latest publish."""

    policy: Policy
    tolerance: float
    ids: tuple[int, ...] = field(init=False)
    _scores: ProbeScores | None = field(default=None, init=False)
    _before: ProbeScores | None = field(default=None, init=False)
    _noise: float = field(default=0.0, init=False)
    """The largest difference that a right server has shown."""

    def __post_init__(self) -> None:
        self.ids = tuple(encode(self.policy.tokenizer, PROBE_TEXT)[:MOST_TOKENS])

    @property
    def prefixes(self) -> list[tuple[int, ...]]:
        """Beginnings of the probe, the last half of it in equal steps."""
        ends = np.linspace(len(self.ids) // 2, len(self.ids) - 1, NUM_PREFIXES).astype(int)
        return [self.ids[:end] for end in ends]

    def score(self) -> ProbeScores:
        """The probe under the learner's present weights. Of a divided policy all ranks call it."""
        with torch.no_grad():
            return self.policy.in_step(self._score)

    def _score(self) -> ProbeScores:
        ids_1T = torch.tensor([self.ids], device=self.policy.device)
        mask_1T = torch.ones_like(ids_1T, dtype=torch.bool)
        mask_1T[0, 0] = False
        (micro,) = cut_batch(self.policy, ids_1T, torch.tensor([len(self.ids)], device=self.policy.device), len(self.ids))
        features_ND, targets_N = forward(self.policy, ids_1T, mask_1T, micro)  # feature n predicts token n + 1
        logprobs_N, _ = logprobs_and_entropy(self.policy, features_ND, targets_N, 1.0)
        next_logits = self.policy.logits(features_ND[[len(prefix) - 1 for prefix in self.prefixes]]).float()
        return ProbeScores(logprobs_N.double().cpu().numpy(), next_logits.cpu().numpy())

    def next_logprob(self, prefix: int, token: int, temperature: float) -> float:
        """The learner's log-prob of a token behind one of the prefixes."""
        logits_V = self._learner().next_logits[prefix].astype(np.float64) / temperature
        highest = logits_V.max()
        return float(logits_V[token] - highest - np.log(np.exp(logits_V - highest).sum()))

    def adopt(self, scores: ProbeScores) -> None:
        """Compare with these scores from now on; those of the weights before them are kept for comparison."""
        self._before, self._scores = self._scores, scores

    def difference(self, served: list[float]) -> float:
        """Mean absolute difference between a server's scores and the learner's."""
        return _distance(self._learner().tokens, np.array(served))

    def complaint(self, served: list[float]) -> str | None:
        """What is wrong with a server's scores, in words, or None."""
        scores, answer = self._learner().tokens, np.array(served)
        difference = _distance(scores, answer)
        if not difference <= self.tolerance:
            return f"its log-probs on the probe differ from the learner's by {difference:.2g} on average, more than {self.tolerance:g}"
        if self._before is not None and len(self._before.tokens) == len(scores):
            moved, stale = _distance(scores, self._before.tokens), _distance(answer, self._before.tokens)
            if moved > MOVED * self._noise and stale < difference and difference > moved / 2:
                return (
                    f"it still answers with the weights before the update: the probe is {stale:.2g} from those and {difference:.2g} from "
                    "the new ones"
                )
        self._noise = max(self._noise, difference)
        return None

    def _learner(self) -> ProbeScores:
        if self._scores is None:
            self.adopt(self.score())
        assert self._scores is not None
        return self._scores


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    """Tokens of a text, nothing added."""
    assert tokenizer is not None  # engines have a policy with its tokenizer
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def default_tolerance(policy: Policy) -> float:
    """What rounding explains, by the precision that the learner computes in."""
    return TOLERANCES.get(policy.dtype, TOLERANCES[torch.bfloat16])


def _distance(first: Scores, second: Scores) -> float:
    return float(np.abs(first - second).mean()) if first.shape == second.shape else float("inf")


class ServerConnection:
    """A server at an address; `load` is how many requests it works on."""

    def __init__(self, address: str, *, parallel: int, timeout: float, folder: Path | None, device: torch.device) -> None:
        """`address` may name one of several models behind a hash sign: http://host:8000#model. `device`: the learner's."""
        self.address, _, name = address.partition("#")
        self._wanted = name or None
        self._token = next((token for variable in TOKEN_VARIABLES if (token := token_for(self.address, variable))), None)
        self._timeout, self._folder, self._device, self._parallel = timeout, folder, device, parallel
        self.endpoint = self._endpoint()
        self.dialect: Dialect = TetherDialect()
        self.model = ""
        self.load = 0
        self.is_alive = True
        self.is_current = False
        """Its weights are the policy's: verified since the last publish."""
        self.num_published = 0
        self.difference = 0.0
        """On the probe, when it was last verified."""
        self.problem = ""
        """Why it cannot be used, where it cannot."""
        self.is_known = False
        """It was found to serve the policy's model."""
        self.is_outdated = False
        """It answers, but not with the weights that this run published, and it is for another rank to publish them."""
        self._publisher: Publisher | None = None
        self._end_of_turn: tuple[int, ...] = ()
        self._vocabulary_size = 0
        self._sizes: dict[str, int] = {}
        self._sampling_checked = False

    @property
    def advice(self) -> str:
        """What a server needs that answers without ids or log-probs."""
        return "use tether serve, or vLLM (0.10.2 or newer) with --logprobs-mode processed_logprobs and a log-prob for every token"

    def _endpoint(self) -> ModelEndpoint:
        source = f"set {TOKEN_VARIABLES[0]} to the server's token"
        return ModelEndpoint(self.address, token=self._token, token_source=source, timeout=self._timeout, parallel=self._parallel)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connections live as long as the block, to wherever the server is then."""
        self.endpoint.__enter__()
        try:
            yield
        finally:
            self.endpoint.close()

    def move(self, address: str) -> None:
        """The server was replaced by another at this address, which has still to be inspected; inside `connected`."""
        self.lose(f"the server at {self.address} was replaced by one at {address}")
        self.endpoint.close()
        self.address, self.is_known, self._sampling_checked = address, False, False
        self.endpoint = self._endpoint()
        self.endpoint.__enter__()

    def connect(self, probe: Probe, max_context: int) -> None:
        """Find out what the server is; refuse one that cannot serve the policy, and one that is not there."""
        try:
            self.inspect(probe, max_context)
        except ServerUnreachable as error:
            kind = EngineUnavailable if this_attempt().number > 1 else ModelUnavailable  # it was there before: worth a further attempt
            raise kind(f"{error}; start one with: tether serve MODEL") from error

    def inspect(self, probe: Probe, max_context: int) -> None:
        """Find out what the server is; refuse one that cannot serve the policy."""
        self._end_of_turn = tuple(probe.policy.end_of_turn_ids)
        self._vocabulary_size = int(probe.policy.config.vocab_size)
        self._sizes = sizes_of(probe.policy.config)
        entry = self.endpoint.find_model(self._wanted)
        self.model = str(entry["id"])
        meta = entry.get("meta") or {}  # of llama.cpp: what a slot holds, where it says so
        room = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
        if isinstance(room, int) and room < max_context:
            raise BadInput(
                f"the server at {self.address} has room for {room} tokens, but rollout.max_context is {max_context}; "
                "lower rollout.max_context, or start the server with more"
            )
        self._check_not_paused(str(entry.get("owned_by", "")))
        self.dialect = find_dialect(self.endpoint, entry)
        tokens, own = self.dialect.tokenize(self.endpoint, self.model, PROBE_TEXT), encode(probe.policy.tokenizer, PROBE_TEXT)
        if tokens is not None and tokens != own:
            raise BadInput(
                f"the server at {self.address} serves '{self.model}', whose tokenizer is another than the policy's ({len(tokens)} tokens of a "
                f"text that has {len(own)} here, or other ids); serve the model that is trained"
            )
        self._sample_probe(self._probe_request(probe.prefixes[0], 1.0, PROBE_SAMPLES))
        self.is_known = True

    def _check_not_paused(self, owner: str) -> None:
        """A vLLM whose weight update was cut off lets every request wait: refused before one does."""
        if owner != "vllm":
            return
        try:
            paused = self.endpoint.call("GET", "/is_paused").get("is_paused")
        except NoSuchRoute:  # vLLM without VLLM_SERVER_DEV_MODE=1 cannot be paused
            return
        if paused:
            raise BadInput(f"the server at {self.address} waits for a weight update that was cut off; start it again")

    def _probe_request(self, ids: tuple[int, ...], temperature: float, max_tokens: int) -> TokenRequest:
        state: Any = np.random.PCG64(1).state
        return TokenRequest(ids, Sampling(temperature, max_tokens), max_tokens, (), self._end_of_turn, 1, state)

    def _sample_probe(self, request: TokenRequest) -> SampledTokens:
        try:
            return self.generate(request)
        except Malformed as error:
            raise BadInput(f"the server at {self.address} answers with {error}; {self.advice}") from error

    # ---------------------------------------------------------------------------------------------------------------- life

    def check_health(self) -> None:
        """Raises ServerUnreachable where nothing answers."""
        self.is_outdated = False
        self.endpoint.call("GET", "/health", delays=(), timeout=min(10.0, self._timeout))
        self.is_alive = True

    def lose(self, problem: str) -> None:
        """The server cannot be reached; whatever it holds when it comes back must be checked."""
        self.is_alive, self.is_current, self.problem = False, False, problem
        self._publisher = None  # its connection to the server's workers is gone too

    def generate(self, request: TokenRequest) -> SampledTokens:
        """Sample the next tokens of a conversation."""
        answer = self.endpoint.call("POST", self.dialect.path, self.dialect.body(self.model, request), delays=SEND_DELAYS)
        return self._read(request, answer)

    def generate_many(self, requests: Sequence[TokenRequest], take: Callable[[int, SampledTokens], None]) -> None:
        """Sample for several conversations by one HTTP request, once; `take` gets the number of each that is answered well, as soon as it is."""

        def on_data(data: bytearray) -> None:
            *lines, rest = data.split(b"\n")
            data[:] = rest
            for line in lines:
                with suppress(ValueError, LookupError, TypeError, RecursionError):  # also of what is malformed: asked alone, it is judged
                    answer = json.loads(line)
                    number = int(answer["request_id"])
                    take(number, self._read(requests[number], answer))

        bodies = [{**self.dialect.line(self.model, request), "request_id": str(number)} for number, request in enumerate(requests)]
        content = "\n".join(json.dumps(body, separators=(",", ":")) for body in bodies).encode()
        self.endpoint.call("POST", self.dialect.path, content=content, content_type=LINES, delays=(), on_data=on_data)

    def _read(self, request: TokenRequest, answer: Mapping[str, Any]) -> SampledTokens:
        try:
            self.dialect.check_prompt(request, answer)
            sampled = self.dialect.read(answer)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:
            raise Malformed(f"something in another form ({type(error).__name__}: {error})") from error
        if max(sampled.ids, default=0) >= self._vocabulary_size:
            raise Malformed(f"token {max(sampled.ids)}, but the policy has {self._vocabulary_size}")
        return sampled

    # ------------------------------------------------------------------------------------------------------------- weights

    def publish(self, weights: Mapping[str, Tensor], version: str) -> None:
        """Give the server new weights."""
        refusal = BadInput if self.num_published == 0 else EngineUnavailable  # what never fitted is not worth a further attempt
        try:
            if self._publisher is None and self.dialect.weights is None:
                raise refusal(f"the server at {self.address} ({self.dialect.name}) cannot take weights; train with rollout.engine=native")
            if self._publisher is None:
                by_http = self.dialect.weights == "tether"
                self._publisher = TetherPublisher(self._folder) if by_http else VllmPublisher(self._folder, self._device, self._sizes)
            self._publisher.publish(self.endpoint, weights, version)
            self.num_published += 1
        except NoSuchRoute as error:
            raise refusal(
                f"the server at {self.address} takes no weights ({error}); start tether serve, or vLLM with VLLM_SERVER_DEV_MODE=1 and "
                '--weight-transfer-config \'{"backend": "tether"}\''
            ) from error
        except ServerUnreachable:
            raise
        except BadInput as error:  # another model: names or shapes differ; or another publisher
            advice = "" if self.dialect.weights == "tether" else "; the server must serve the model that is trained"
            raise (EngineUnavailable if isinstance(error, Conflict) else refusal)(f"{error}{advice}") from error

    def verify(self, probe: Probe, label: str) -> None:
        """Score the probe on the server; what differs from the learner ends the run."""
        scores = self._scores(probe)
        if scores is not None:
            complaint = probe.complaint(scores)
            if complaint is not None:
                raise EngineUnavailable(
                    f"the server at {self.address} does not hold the learner's weights{f' after publish {label}' if label else ''}: {complaint}; "
                    "serve the model that is trained (untied, if its head is tied and the server is vLLM), or raise server.tolerance"
                )
            self.difference = probe.difference(scores)
        self._check_sampling(probe)
        self.is_current = True

    def take_over(self, probe: Probe, label: str) -> None:
        """On a rank that publishes nothing: use the server if it answers with the weights of this label, else leave it out."""
        sampled = self._sample_probe(self._probe_request(probe.prefixes[0], 1.0, PROBE_SAMPLES))
        if set(sampled.versions) == {label}:
            self.is_current = True
        else:
            self.lose(f"the server at {self.address} answers with weights '{sampled.versions[0]}', and '{label}' were published")
            self.is_outdated = True

    def _scores(self, probe: Probe) -> list[float] | None:
        """The server's log-probs of the probe; None where it has none to give and is only sampled from."""
        try:
            return ServerScorer(f"{self.address}", self.model, api_key=self._token, timeout=self._timeout).token_logprobs(probe.ids)
        except ServerUnreachable:
            raise
        except BadInput:
            if self.dialect.weights is None:
                return None
            raise

    def _check_sampling(self, probe: Probe) -> None:
        """Log-probs of sampled tokens must be those of the sampling temperature: vLLM returns those of temperature 1 unless told otherwise."""
        if self._sampling_checked or not self.dialect.has_logprobs:
            return
        far = {PROBE_TEMPERATURE: 0.0, 1.0: 0.0}
        for number, prefix in enumerate(probe.prefixes):
            sampled = self._sample_probe(self._probe_request(prefix, PROBE_TEMPERATURE, 1))
            for t in far:
                far[t] += abs(sampled.logprobs[0] - probe.next_logprob(number, sampled.ids[0], t)) / len(probe.prefixes)
        if far[PROBE_TEMPERATURE] > probe.tolerance:
            raised = far[1.0] <= probe.tolerance
            why = "they are those of temperature 1" if raised else "they are of another model"
            raise EngineUnavailable(
                f"the server at {self.address} returns log-probs that differ from the learner's by {far[PROBE_TEMPERATURE]:.2g} at temperature "
                f"{PROBE_TEMPERATURE:g}: {why}; {'start vLLM with --logprobs-mode processed_logprobs' if raised else 'serve the model that is trained'}"
            )
        self._sampling_checked = True
