"""The one record that every reader makes: a single response of a model, with what it saw and what it was paid.

An episode of several turns is several records that share `trajectory` and count up in `turn`, so first-turn and whole-trajectory scopes
both follow from the stream. Token ids are given where the file holds them and are then what counts; text is re-tokenised only where
there are none.
"""

import dataclasses
import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.grammar import THINK_OPEN


class BadRecord(ValueError):
    """A record that cannot be used; the reader adds file and line to the message."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response.

    Example: Rollout(step=3, group="p1", trajectory="a.jsonl line 7", turn=0, where="a.jsonl line 7", prompt="2+2?", reward=1.0,
    response="<think>easy</think>4", reasoning="easy", lead="<think>").
    """

    step: int | None
    """Training step; None where the file does not say."""
    group: Hashable
    """Which prompt the rollout answers, as the file names it, or a hash of the first prompt. Unique within a step, not across steps."""
    trajectory: Hashable
    """Which episode it belongs to: equal for the turns of one episode."""
    turn: int
    """Place in the episode, from 0."""
    where: str
    """The place in the file, such as "rollouts.jsonl line 7"."""
    prompt: str | None = None
    """The prompt as text, ready for the tokenizer; of Tether's own files only the observation, the ids say the rest."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as chat messages, where the file holds those instead: to be rendered with the model's chat template."""
    prompt_ids: tuple[int, ...] | None = None
    """Everything the model saw, up to its response."""
    response: str | None = None
    response_ids: tuple[int, ...] | None = None
    reasoning: str | None = None
    """The thoughts, exactly as written, tags excluded; None where there are none, and `missing` says why."""
    reasoning_ids: tuple[int, ...] | None = None
    lead: str = ""
    """What the response says before the reasoning, such as "<think>": part of x, not of z."""
    think_implied: bool = False
    """The reasoning follows a think tag that is not in the response: the prompt or the chat template opened it, or a server cut it off."""
    missing: str | None = None
    """Why there is no reasoning: a key of tally.MISSING."""
    reward: float | None = None
    """Of the whole episode; None where the file has none, or one that is not finite."""
    success: bool | None = None

    @property
    def has_reasoning(self) -> bool:
        return bool(self.reasoning_ids) or bool(self.reasoning and self.reasoning.strip())

    def context(self, rendered: str | None = None) -> str:
        """x as text: the prompt and what the response says before the reasoning, up to and including the opening think tag.

        Args:
            rendered: `messages` through the chat template, with the generation prompt; left out where `prompt` is text.
        """
        prompt = self.prompt if rendered is None else rendered
        if prompt is None:
            raise BadRecord(f"{self.where} holds messages; render them with the model's chat template first")
        text = prompt + self.lead
        return text + THINK_OPEN if self.think_implied and not text.rstrip().endswith(THINK_OPEN) else text

    def at(self, *, trajectory: Hashable, turn: int) -> "Rollout":
        """The same response at another place of its episode."""
        return dataclasses.replace(self, trajectory=trajectory, turn=turn)


def prompt_group(prompt: str | Sequence[Mapping[str, Any]] | Sequence[int]) -> str:
    """The id of a group that has no name: equal prompts have equal ids, whatever the file, and the prompt need not be kept."""
    canonical = prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True, ensure_ascii=False, default=str)
    return "prompt:" + hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
