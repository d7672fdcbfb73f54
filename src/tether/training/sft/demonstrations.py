"""Demonstrations: episodes whose responses are to be imitated, in the very token layout of a rollout.

Prompts come from `ChatFormat`, as in a rollout: they end with the opening think tag, and a response begins with the reasoning. Responses are
trained on, prompts are not. A rollout ends a response at the closing answer tag. The token that ends a turn stands behind it either way: the
template puts it in front of the next prompt. Where it is taught (`end_of_turn`) it belongs to the response, so the token sequence is the
same and one more token of every turn is in the loss.

They come from experts (experts.py), from a file of conversations, or from the successful episodes of a run.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput, did_you_mean
from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.core.images import MARKER, image_of, markers
from tether.core.seeding import derive_seed
from tether.core.types import Exchanges, Trajectory, Turn
from tether.runs.images import read_image
from tether.runs.schema import recorded_context, recorded_digests
from tether.runs.store import RunStore
from tether.training.sft.settings import TrajectorySettings

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat  # transformers: not before the source was checked

Exchange = tuple[str, str]
"""What was shown, and the response to it: what follows the opening think tag."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode to imitate."""

    prompt: str
    """What it is a demonstration of; those of one prompt are held out together."""
    trajectory: Trajectory

    @property
    def num_tokens(self) -> int:
        """Of its longest sequence."""
        return max(sequence.num_tokens for sequence in self.trajectory.sequences)


def demonstrate_turns(
    chat: "ChatFormat", system: str | None, exchanges: Sequence[Exchange], end_of_turn: bool, few_shot: Exchanges = ()
) -> list[Turn]:
    """The turns of a conversation as a rollout would have recorded them. Nothing was sampled: their log-probs are 0 and are not read."""
    turns: list[Turn] = []
    written: tuple[int, ...] = ()
    closing = (turn_end(chat),) if end_of_turn else ()
    for shown, response in exchanges:
        context = chat.next_prompt(shown, written) if turns else chat.first_prompt(system, shown, few_shot)
        written = chat.encode(response) + closing
        finish = FinishReason.END_OF_TURN if end_of_turn else FinishReason.STOP_TEXT
        turn = Turn(context, written, (0.0,) * len(written), finish, response, None, observation=shown, new_context=not turns)
        turn.images = tuple(image_of(digest) for digest in markers(shown))
        turns.append(turn)
    return turns


def turn_end(chat: "ChatFormat") -> int:
    """The token that the template puts behind a response; the tokenizer's own where the template has none of the model's."""
    first = chat.next_prompt("u", ())[0]
    return first if first in chat.end_of_turn_ids else chat.end_of_turn


def demonstration(prompt: str, turns: list[Turn]) -> Demonstration:
    return Demonstration(prompt, Trajectory(0, 0, 0, turns, StopReason.SUCCESS, success=True))


def fitting(demonstrations: Sequence[Demonstration], max_tokens: int) -> list[Demonstration]:
    """Those that the model can hold."""
    fit = [each for each in demonstrations if each.num_tokens <= max_tokens]
    if demonstrations and not fit:
        shortest = min(each.num_tokens for each in demonstrations)
        raise BadInput(
            f"every demonstration is longer than the {max_tokens} tokens that fit: the shortest has {shortest}; "
            "raise max_context, or take a model with more positions"
        )
    return fit


def hold_out(demonstrations: Sequence[Demonstration], share: float, seed: int) -> tuple[list[Demonstration], list[Demonstration]]:
    """Demonstrations to train on, and those of held-out prompts: a share of the prompts, one at least. A single prompt is not held out.

    Which prompts are held out follows from their hash, so more demonstrations change little about it.
    """
    prompts = sorted({each.prompt for each in demonstrations}, key=lambda prompt: (derive_seed("sft-held-out", seed, prompt), prompt))
    count = min(max(1, round(share * len(prompts))), len(prompts) - 1) if share else 0
    chosen = set(prompts[:count])
    return [d for d in demonstrations if d.prompt not in chosen], [d for d in demonstrations if d.prompt in chosen]


# ------------------------------------------------------------------------------------------------------- a file of conversations
#
#     {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
#     {"prompt": "...", "response": "..."}
#
# The system message is optional; user and assistant take turns, and the assistant has the last word. Every assistant message is a response to
# be imitated. Models that Tether trains reason between tags, and the prompt of a rollout ends with the opening think tag: so a response must
# close it, and an opening tag that it begins with is the prompt's. Other keys of a line are ignored.

ROLES = ("system", "user", "assistant")
KEYS = ("messages", "prompt", "response")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of the file."""

    system: str | None
    exchanges: list[Exchange]


def read_conversations(path: Path) -> list[Conversation]:
    """Every conversation of a file; the first line that is none is refused with its number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"'{path}' is not UTF-8 text; save it as UTF-8") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_conversation(line))
            except ValueError as error:
                raise BadInput(f"line {number} of '{path}': {error}") from None
    if not found:
        raise BadInput(f"'{path}' holds no conversation; write one JSON object a line, with messages or with prompt and response")
    return found


def tokenized(conversations: Sequence[Conversation], chat: "ChatFormat", end_of_turn: bool) -> list[Demonstration]:
    """The conversations in the token layout of a rollout. Those with the same system message and first question are of one prompt."""
    return [
        demonstration(
            f"{each.system}\n{each.exchanges[0][0]}",
            demonstrate_turns(chat, each.system, each.exchanges, end_of_turn),
        )
        for each in conversations
    ]


def _conversation(line: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}; write an object with messages, or with prompt and response")
    if "messages" in row:
        if not isinstance(row["messages"], list) or not row["messages"]:
            raise ValueError("messages is not a list of messages; write [{'role': ..., 'content': ...}, ...]")
        return _of_messages([_message(number, message) for number, message in enumerate(row["messages"], start=1)])
    if "prompt" in row and "response" in row:
        return Conversation(None, [(_text("prompt", row["prompt"]), _response("response", row["response"]))])
    strange = next((key for key in row if key not in KEYS), "nothing")
    raise ValueError(f"neither messages nor prompt and response, but '{strange}': {did_you_mean(strange, KEYS)}")


def _message(number: int, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise ValueError(f"message {number} has no role and content; write {{'role': ..., 'content': ...}}")
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"message {number} has the unknown role {role!r}: {did_you_mean(str(role), ROLES)}")
    content = message["content"]
    return role, _response(f"message {number}", content) if role == "assistant" else _text(f"message {number}", content)


def _of_messages(messages: list[tuple[str, str]]) -> Conversation:
    system = messages[0][1] if messages[0][0] == "system" else None
    rest = messages if system is None else messages[1:]
    roles = [role for role, _ in rest]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(
            f"the roles are {', '.join(role for role, _ in messages)}; after an optional system message, user and assistant alternate"
        )
    texts = [text for _, text in rest]
    return Conversation(system, list(zip(texts[::2], texts[1::2], strict=True)))


def _text(what: str, content: Any) -> str:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{what} is {'empty' if isinstance(content, str) else 'no text'}; write it as a string")
    return content


def _response(what: str, content: Any) -> str:
    """What follows the opening think tag, which the prompt ends with."""
    text = _text(what, content)
    if THINK_CLOSE not in text:
        raise ValueError(f"{what} has no {THINK_CLOSE}; write the response as {THINK_OPEN} reasoning {THINK_CLOSE} and then the answer")
    return text.lstrip().removeprefix(THINK_OPEN) if text.lstrip().startswith(THINK_OPEN) else text


# ---------------------------------------------------------------------------------------------------------------- a run folder
#
# The run's own successful episodes (rejection sampling), by the very token ids that were sampled. Nothing is tokenised again: that the ids mean
# the same to the model that is trained is checked on every turn. Validation episodes are never used.


def select_trajectories(folder: Path, chosen: TrajectorySettings) -> list[dict[str, Any]]:
    """The records of the episodes to imitate, in the order of the run."""
    store = RunStore.open(folder)
    of_training = list(store.trajectories(split="train"))
    records = [record for record in of_training if _is_wanted(record, chosen)]
    if not records:
        raise BadInput(
            f"none of the {len(of_training)} training episodes in '{folder}' is {_wanted_words(chosen)}; "
            "train for longer, or loosen the settings under trajectories"
        )
    return records if chosen.max_per_prompt is None else _best_of_prompts(records, chosen.max_per_prompt)


def demonstrated(records: list[dict[str, Any]], chat: "ChatFormat", folder: Path, model: str) -> list[Demonstration]:
    """The episodes with their own token ids; a tokenizer that reads them differently is refused."""
    found = []
    for record in records:
        turns = list(_turns(record, folder))
        for turn, written in zip(turns, record["turns"], strict=True):
            # Some templates strip a message, so the ends of an observation may be missing. A picture has no text.
            read, context = chat.decode(turn.response_ids), chat.decode(tuple(written["context_ids"]))
            if read != turn.text or any(part.strip() not in context for part in MARKER.split(turn.observation)[::2]):
                raise BadInput(
                    f"the tokenizer of '{model}' does not read the token ids of '{folder}': it reads {read[:60]!r} "
                    f"where the run wrote {turn.text[:60]!r}; give --model the model of that run, or a checkpoint of it"
                )
        trajectory = Trajectory(0, 0, int(record["seed"]), turns, StopReason(record["stop_reason"]), success=bool(record["success"]))
        found.append(Demonstration(f"{record.get('env', '')} {record['seed']}", trajectory))
    return found


def _is_wanted(record: dict[str, Any], chosen: TrajectorySettings) -> bool:
    reward, step = record["reward"], int(record["step"])
    return (
        not record.get("error")
        and any(turn["response_ids"] for turn in record["turns"])
        and (bool(record["success"]) or not chosen.success_only)
        and (chosen.min_reward is None or (reward is not None and reward >= chosen.min_reward))
        and chosen.first_step <= step <= (chosen.last_step or step)
    )


def _wanted_words(chosen: TrajectorySettings) -> str:
    words = ["a success" if chosen.success_only else "without an error"]
    words += [] if chosen.min_reward is None else [f"with a return of at least {chosen.min_reward:g}"]
    words += [f"from step {chosen.first_step}"] if chosen.first_step > 1 else []
    words += [f"up to step {chosen.last_step}"] if chosen.last_step is not None else []
    return ", ".join(words)


def _best_of_prompts(records: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many episodes of a prompt: those with the highest return, earlier ones first; in the order of the run."""
    kept: set[int] = set()
    prompts: dict[tuple[Any, ...], list[int]] = {}
    for index, record in enumerate(records):
        prompts.setdefault((record.get("env"), record["seed"]), []).append(index)
    for indices in prompts.values():
        kept.update(sorted(indices, key=lambda index: (-(records[index]["reward"] or 0.0), index))[:most])
    return [record for index, record in enumerate(records) if index in kept]


def _turns(record: dict[str, Any], folder: Path) -> Iterator[Turn]:
    for turn in record["turns"]:
        yield Turn(
            context_ids=recorded_context(turn),
            response_ids=tuple(turn["response_ids"]),
            logprobs=tuple(turn["logprobs"]),
            finish=FinishReason(turn["finish"]),
            text=turn["response"],
            reasoning_span=None,
            observation=turn["observation"],
            new_context=bool(turn.get("fresh")),
            trained=bool(turn.get("trained", True)),
            images=tuple(read_image(folder, digest) for digest in recorded_digests(turn)),
        )
