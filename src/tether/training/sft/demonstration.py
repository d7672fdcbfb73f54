"""A demonstration: an episode whose responses are to be imitated, in the very token layout of a rollout.

Prompts come from `ChatFormat`, as in a rollout: they end with the opening think tag, and a response begins with the reasoning. Responses are
trained on, prompts are not. A rollout ends a response at the closing answer tag. The token that ends a turn stands behind it either way: the
template puts it in front of the next prompt. Where it is taught (`end_of_turn`) it belongs to the response, so the token sequence is the
same and one more token of every turn is in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.seeding import derive_seed
from tether.core.types import Exchanges, Trajectory, Turn

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
        return max(len(sequence.token_ids) for sequence in self.trajectory.sequences)


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
        turns.append(Turn(context, written, (0.0,) * len(written), finish, response, None, observation=shown, new_context=not turns))
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
