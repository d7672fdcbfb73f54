"""One episode at the gateway: the calls that an agent made, which of them continue which, and the trajectory that they are.

A call is a request and its reply, with the very tokens that the model saw and sampled. A request **continues** the longest recorded conversation
that it extends: its prompt is that conversation's tokens and the joint behind them (`AgentChat.joint`). What a client sends back is compared
by meaning (`Message.key`): a framework may drop the reasoning, send null for empty content or order the arguments of a call anew. A request that
extends nothing recorded begins a new context, and says why:

first      the session had no call
other      nothing recorded is its beginning: another conversation, such as that of a sub-agent
edited     it begins like a recorded conversation and then differs: history that was edited, summarised or cut
tools      the same messages with other tools
forked     the reply that it continues has another continuation: this one holds that reply as context, so that it is trained once
template   the template does not show what follows a reply, so everything was rendered again

Draws follow from the episode's seed, the prompt's tokens and how often this prompt was asked, not from the order in which requests arrive.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tether.core.enums import StopReason
from tether.core.grammar import THINK_CLOSE
from tether.core.images import Image, check_sent, image_digests, markers
from tether.core.seeding import generator
from tether.core.types import Completion, Trajectory, Turn
from tether.models.messages import AgentChat, Message, assistant_message
from tether.models.tool_formats import Reply, Tool
from tether.rollout.gateway.agents import Result
from tether.rollout.gateway.trained import CallView, TrainRule

CONTINUES, FIRST, TEMPLATE = "continues", "first", "template"
REASONS = ("other", "edited", "tools", "forked", TEMPLATE)
"""Why contexts after the first began."""


@dataclass(slots=True, eq=False)
class Call:
    """One request and, once it is there, its reply."""

    number: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    prompt: tuple[int, ...]
    """Every token that the model saw."""
    parent: "Call | None"
    """The call whose reply this one continues, on its very tokens."""
    reason: str
    """`continues`, or why a context began."""
    thinking: bool
    """The prompt ended with an opening think tag."""
    completion: Completion | None = None
    reply: Reply | None = None
    message: Message | None = None
    """The reply as the message that the agent sends back."""
    text: str = ""

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for message in self.messages for image in message.images)

    @property
    def has_begun_context(self) -> bool:
        return self.reason != CONTINUES

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what was sampled behind it."""
        return self.prompt + (self.completion.token_ids if self.completion is not None else ())


@dataclass(slots=True)
class Budgets:
    """What a session may use."""

    max_calls: int
    max_tokens: int | None
    """Sampled tokens of all of its calls; None for any number."""
    max_context: int
    max_reply: int
    """Tokens of one reply."""


class Session:
    """The calls of one episode. The gateway's threads and the player's share it: every method takes its lock."""

    def __init__(self, chat: AgentChat, seed: int, budgets: Budgets, *, exact: bool = True) -> None:
        """`exact`: continue on the sampled tokens; else render every request whole, as a server in use does."""
        self._chat, self._seed, self.budgets, self._exact = chat, seed, budgets, exact
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self._by_conversation: dict[tuple[object, ...], Call] = {}
        """Answered calls by their tools, messages and reply."""
        self._asked: Counter[tuple[int, ...]] = Counter()
        self.is_open = True
        self.stop: StopReason | None = None
        """Set where a budget ended the conversation."""
        self.failure: Exception | None = None
        """What the engine failed with on one of its calls."""
        self.num_late = 0
        """Requests after the end."""

    # -------------------------------------------------------------------------------------------------------------- a call

    def begin(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Call:
        """The call of a request, with its prompt."""
        with self._lock:
            parent, length, reason = self._find_parent(messages, tools)
            prompt = self._prompt(messages, tools, parent, length)
            if prompt is None:
                parent, reason, prompt = None, TEMPLATE, self._chat.prompt(messages, tools)
            elif not self._exact and parent is not None and prompt[: len(parent.tokens)] != parent.tokens:
                parent, reason = None, TEMPLATE
            call = Call(len(self.calls), messages, tools, prompt, parent, reason, self._chat.opens_thinking(prompt))
            check_sent(prompt, call.images)
            self.calls.append(call)
            return call

    def draws(self, prompt: tuple[int, ...]) -> np.random.Generator:
        """The generator of a reply: the same for the same prompt, whatever else was asked meanwhile."""
        with self._lock:
            self._asked[prompt] += 1
            times = self._asked[prompt]
        digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()
        return generator("agent", self._seed, int.from_bytes(digest[:8], "big"), times)

    def finish(self, call: Call, completion: Completion, text: str) -> None:
        """Record the reply of a call."""
        with self._lock:
            call.completion, call.text = completion, text
            call.reply = self._chat.read(text, call.tools, thinking=call.thinking)
            # The same ids in every run of the same episode; nine letters and digits, which is what some templates insist on.
            call.message = assistant_message(call.reply, [f"c{call.number:04d}{n:04d}" for n in range(len(call.reply.calls))])
            if self.is_open:
                self._by_conversation[_key(call.tools, (*call.messages, call.message))] = call

    def withdraw(self, call: Call) -> None:
        """Forget a call whose reply never came."""
        with self._lock:
            self.calls.remove(call)

    def refusal(self, prompt: tuple[int, ...]) -> tuple[StopReason, str] | None:
        """Which budget a further call would exceed, and the sentence that says so."""
        with self._lock:
            sampled = sum(len(call.completion.token_ids) for call in self.calls if call.completion is not None)
            if len(self.calls) > self.budgets.max_calls:
                return StopReason.TURN_LIMIT, f"the episode has made its {self.budgets.max_calls} calls (agent.max_calls)"
            if self.budgets.max_tokens is not None and sampled >= self.budgets.max_tokens:
                return StopReason.TURN_LIMIT, f"the episode has sampled its {self.budgets.max_tokens} tokens (agent.max_tokens)"
            if len(prompt) + 1 > self.budgets.max_context:
                most = self.budgets.max_context
                return (
                    StopReason.CONTEXT_FULL,
                    f"the prompt has {len(prompt)} tokens, and a conversation may have {most} (rollout.max_context)",
                )
            return None

    def _find_parent(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> tuple[Call | None, int, str]:
        """The answered call that a request extends and how many messages it holds with its reply, or why there is none."""
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1].role == "assistant":
                found = self._by_conversation.get(_key(tools, messages[:length]))
                if found is not None:
                    return found, length, CONTINUES
        if not self.calls:
            return None, 0, FIRST
        if any(_key((), call.messages) == _key((), messages[: len(call.messages)]) and call.tools != tools for call in self.calls):
            return None, 0, "tools"
        shared = max((_common(call.messages, messages) for call in self.calls), default=0)
        return None, 0, "edited" if shared > 1 or (shared == 1 and messages[0].role != "system") else "other"

    def _prompt(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], parent: Call | None, length: int) -> tuple[int, ...] | None:
        if parent is None or not self._exact:
            return self._chat.prompt(messages, tools)
        assert parent.completion is not None
        joint = self._chat.joint(messages[: length - 1], messages[length:], tools, parent.completion.token_ids)
        return None if joint is None else parent.tokens + joint

    # ------------------------------------------------------------------------------------------------------- the trajectory

    def close(self) -> None:
        """No further call; one that is still open is left out."""
        with self._lock:
            self.is_open = False
            # Calls that run beside each other arrive in any order: from here on nothing depends on it.
            self.calls = sorted((call for call in self.calls if call.completion is not None), key=_place)
            continued: set[Call] = set()
            for call in self.calls:
                if call.parent in continued:
                    call.parent, call.reason = None, "forked"
                elif call.parent is not None:
                    continued.add(call.parent)

    def turns(self, is_trained: TrainRule | None = None) -> list[Turn]:
        """The calls as turns: each context with its continuations in order, contexts with tools before the others."""
        trained = dict.fromkeys(self.calls, True)
        if is_trained is not None:
            views = [
                CallView(n, tuple(m.for_template() for m in call.messages), call.tools, call.text) for n, call in enumerate(self.calls)
            ]
            trained = dict(zip(self.calls, is_trained(views), strict=True))
        following = {call.parent: call for call in self.calls if call.parent is not None}
        chains = [self._chain(call, following) for call in self.calls if call.parent is None]
        chains.sort(key=lambda chain: not any(call.tools for call in chain))
        return [self._turn(call, trained[call]) for chain in chains for call in chain]

    def _chain(self, call: Call, following: dict[Call, Call]) -> list[Call]:
        chain = [call]
        while (after := following.get(chain[-1])) is not None:
            chain.append(after)
        return chain

    def _turn(self, call: Call, is_trained: bool) -> Turn:
        assert call.completion is not None and call.reply is not None
        reasoning, calls = self._spans(call.completion.token_ids, call.text, call.reply)
        context = call.prompt if call.parent is None else call.prompt[len(call.parent.tokens) :]
        known, shown = {image.digest: image for image in call.images}, _shown(call)
        return Turn(
            context_ids=context,
            response_ids=call.completion.token_ids,
            logprobs=call.completion.logprobs,
            finish=call.completion.finish,
            text=call.text,
            reasoning_span=reasoning,
            valid=not call.reply.unparsed,
            observation=shown,
            images=tuple(known[digest] for digest in dict.fromkeys((*image_digests(context), *markers(shown))) if digest in known),
            new_context=call.parent is None,
            versions=call.completion.versions,
            calls_span=calls,
            trained=is_trained,
        )

    def _spans(self, ids: tuple[int, ...], text: str, reply: Reply) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """The tokens of the reasoning (what stands between think tags, or else the text before the first tool call), and those of the calls."""
        begin = 0 if reply.reasoning is None else text.index(THINK_CLOSE) + len(THINK_CLOSE)
        first, last = _calls_place(text, begin, reply.content)
        calls = self._span(ids, first, last) if reply.calls else None
        if reply.reasoning:
            end = len(text[: text.index(THINK_CLOSE)].rstrip())
            return self._span(ids, end - len(reply.reasoning), end), calls
        said = text[begin:first].rstrip()
        return (self._span(ids, begin, begin + len(said)) if reply.calls and said else None), calls

    def _span(self, ids: tuple[int, ...], start: int, end: int) -> tuple[int, int] | None:
        """The tokens of some characters of a reply; one that straddles a border is left out."""
        first, last = (self._chat.tokens_before(ids, place) for place in (start, end))
        if len(self._chat.decode(ids[:first])) < start:
            first += 1
        return (first, last) if last > first else None

    def measures(self) -> dict[str, float]:
        """Numbers of the episode, for its record."""
        reasons = Counter(call.reason for call in self.calls)
        # A request that sends replies back should continue one, unless the run asked for the template's rendering.
        follow_ups = [
            call
            for call in self.calls
            if any(message.role == "assistant" for message in call.messages)
            and call.reason != FIRST
            and (self._exact or call.reason != TEMPLATE)
        ]
        replies = [call.reply for call in self.calls if call.reply is not None]
        return {
            "calls": float(len(self.calls)),
            "contexts": float(len(self.calls) - reasons[CONTINUES]),
            **{f"contexts_{reason}": float(reasons[reason]) for reason in REASONS},
            "follow_ups": float(len(follow_ups)),
            "continued": float(sum(call.reason == CONTINUES for call in follow_ups)),
            "with_tools": float(sum(bool(call.tools) for call in self.calls)),
            "tool_calls": float(sum(len(reply.calls) for reply in replies)),
            "unparsed_calls": float(sum(reply.unparsed for reply in replies)),
            "late_calls": float(self.num_late),
        }


def trajectory_of(session: Session, base: Trajectory, is_trained: TrainRule | None = None) -> Trajectory:
    """The record of an episode with the calls of its session."""
    base.turns = session.turns(is_trained)
    base.measures = {**session.measures(), **base.measures}
    return base


def grade(trajectory: Trajectory, session: Session, result: Result, format_penalty: float) -> None:
    """Give an episode its reward, at its last turn that is trained, and say how it ended."""
    success = result.reward >= 1.0 if result.success is None else result.success
    trajectory.success, trajectory.measures = success, {**trajectory.measures, **result.measures}
    if not trajectory.turns:
        trajectory.error = "no reply of the agent's calls was complete"
        return
    trained = [turn for turn in trajectory.turns if turn.trained] or trajectory.turns  # a reward elsewhere would reach no loss
    trained[-1].reward = result.reward
    for turn in trained:
        turn.penalty = 0.0 if turn.valid else format_penalty
    trajectory.stop_reason = StopReason.SUCCESS if success else session.stop or StopReason.FAILURE


def _place(call: Call) -> tuple[object, ...]:
    """The place of a call among those of its session, whatever the order in which they came: shorter conversations first."""
    assert call.completion is not None
    return (len(call.messages), call.prompt, call.completion.token_ids)


def _calls_place(text: str, begin: int, content: str) -> tuple[int, int]:
    """Where the tool calls of a reply begin and end in its text from `begin` on: what the content leaves of it, which stands before and behind them."""
    while begin < len(text) and text[begin].isspace():
        begin += 1
    said, end = content.strip(), len(text.rstrip())
    before = next((n for n, (one, other) in enumerate(zip(text[begin:end], said, strict=False)) if one != other), len(said))
    if text[begin + before : end].endswith(said[before:]):
        end -= len(said) - before
    body = text[begin + before : end]
    return end - len(body.lstrip()), begin + before + len(body.rstrip())


def _key(tools: tuple[Tool, ...], messages: Sequence[Message]) -> tuple[object, ...]:
    return (repr(tools), *(message.key for message in messages))


def _common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """How many messages two conversations begin with alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one.key != other.key:
            break
        count += 1
    return count


def _shown(call: Call) -> str:
    """What the agent put before the model since the last reply, for people."""
    known = len(call.parent.messages) + 1 if call.parent is not None else 0
    parts = [f"[{message.role}] {message.text}" for message in call.messages[known:]]
    return "\n".join(parts)
