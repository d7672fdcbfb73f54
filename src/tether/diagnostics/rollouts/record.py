"""`Rollout`, the record that every reader makes: one response of a model, its prompt and its reward; and `Tally`, the counts of a reading.

An episode of several turns is several records that share `trajectory` and count up in `turn`, so first-turn and whole-trajectory scopes
both follow from the stream. Token ids are given where the file holds them and are then what counts; text is re-tokenised only where
there are none. Nothing is dropped without being counted: bad lines, empty reasoning and missing rewards are in the tally.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.grammar import THINK_OPEN
from tether.core.images import Image

BLANK = "blank"
MISSING = {
    "untagged": "hold no <think> ... </think>",
    "unclosed": "open a think tag and never close it (cut off by the token limit?)",
    BLANK: "have blank reasoning",
    "unmatched": "do not match the pattern",
    "absent": "give neither reasoning nor the text of a response",
}
"""Reasons why a rollout has no reasoning, as the end of a sentence."""

MAX_EXAMPLES = 5
PROMPT_GROUP = "prompt:"
"""How the id of a group begins that the file does not name."""

_OTHER_TAGS = re.compile(r"<(reasoning|thinking|thoughts?|reason|scratchpad|analysis)>")
"""Tags that others put around reasoning; counted to suggest a pattern, never used unasked."""


class BadRecord(ValueError):
    """A record that cannot be used; the reader adds file and line to the message."""


class ErroredEpisode(Exception):
    """A record of an episode that an error ended: no evidence about the policy, so it is left out and counted."""


class OtherRecord(Exception):
    """A record of a log that is no call of a model, such as a span of a trace: it is left out and counted."""


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
    prompt_ids: Sequence[int] | None = None
    """Everything the model saw, up to its response."""
    response: str | None = None
    response_ids: Sequence[int] | None = None
    reasoning: str | None = None
    """The reasoning, exactly as written, tags excluded; None where there are none, and `missing` says why."""
    reasoning_ids: Sequence[int] | None = None
    lead: str = ""
    """What the response says before the reasoning, such as "<think>": part of x, not of z."""
    think_implied: bool = False
    """The reasoning follows a think tag that is not in the response: the prompt or the chat template opened it, or a server cut it off."""
    missing: str | None = None
    """Why there is no reasoning: a key of MISSING."""
    reward: float | None = None
    """Of the whole episode; None where the file has none, or one that is not finite."""
    success: bool | None = None
    images: tuple[Image, ...] = ()
    """The pictures that stand as markers in its texts: they are known as long as the rollout holds them."""
    image_folder: Path | None = None
    """Of Tether's own records: where the pictures lie whose patches are among the ids; read by what needs them."""

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


def prompt_group(prompt: str | Sequence[Mapping[str, Any]] | Sequence[int]) -> str:
    """The id of a group that has no name: equal prompts have equal ids, whatever the file, and the prompt need not be kept."""
    canonical = prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True, ensure_ascii=False, default=str)
    return PROMPT_GROUP + hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(slots=True)
class Tally:
    """Counts of one pass over the files."""

    model: str | None = None
    """The model that wrote the rollouts, where their first records name it."""
    num_records: int = 0
    """Lines or rows that were read, bad ones included, blank ones not."""
    num_rollouts: int = 0
    """Responses handed out."""
    num_bad: int = 0
    """Records that could not be used; more than zero only with bad_lines="skip"."""
    bad_examples: list[str] = field(default_factory=list)
    """The first few of them, in words."""
    other_splits: Counter[str] = field(default_factory=Counter)
    """Episodes of a Tether run that were left out, by their split."""
    num_superseded: int = 0
    """Episodes of a Tether run that it played again after resuming."""
    num_errored: int = 0
    """Episodes of a Tether run that an environment error ended: no evidence about the policy."""
    num_others: int = 0
    """Records of a log that are no call of a model."""
    num_without_turns: int = 0
    """Episodes in which the model never answered."""
    num_without_reward: int = 0
    num_without_step: int = 0
    num_steps_named: int = 0
    """Rollouts whose step is that of a file's or folder's name."""
    num_without_group: int = 0
    """Rollouts whose group is the hash of their prompt."""
    missing: Counter[str] = field(default_factory=Counter)
    """Rollouts without reasoning, by reason."""
    other_tags: Counter[str] = field(default_factory=Counter)
    """Rollouts without think tags that have another kind, by its name."""

    @property
    def writer(self) -> str:
        """Which model wrote the rollouts, as the end of a sentence that asks for it."""
        return (
            "the model that wrote the rollouts, which the file does not name"
            if self.model is None
            else f"{self.model}, which the file names"
        )

    @property
    def num_empty(self) -> int:
        """Rollouts without reasoning."""
        return self.missing.total()

    def add_bad(self, message: str) -> None:
        self.num_bad += 1
        if len(self.bad_examples) < MAX_EXAMPLES:
            self.bad_examples.append(message)

    def add(self, rollout: Rollout) -> None:
        self.num_rollouts += 1
        self.num_without_reward += rollout.reward is None
        self.num_without_step += rollout.step is None
        self.num_without_group += isinstance(rollout.group, str) and rollout.group.startswith(PROMPT_GROUP)
        if rollout.missing is not None:
            self.missing[rollout.missing] += 1
        if rollout.missing == "untagged" and (tag := _OTHER_TAGS.search(rollout.response or "")):
            self.other_tags[tag[1]] += 1

    def notes(self) -> list[str]:
        """One sentence for everything a reader of the result should know; none where all was well."""
        notes = []
        if self.num_bad:
            notes.append(f"{self.num_bad} of {self.num_records} records could not be read and were left out; first: {self.bad_examples[0]}")
        for reason, count in sorted(self.missing.items()):
            notes.append(f"{count} of {self.num_rollouts} responses {MISSING[reason]}; they count as empty")
        for tag, count in sorted(self.other_tags.items()):
            notes.append(f"{count} responses hold <{tag}>; to take that as the reasoning, give the pattern '<{tag}>(.*?)</{tag}>'")
        if self.num_rollouts and self.num_empty == self.num_rollouts and not self.other_tags:
            notes.append(
                "no response holds reasoning; give a pattern with one group, such as 'Thought:(.*?)Action:' or '(.*)' for all of it"
            )
        if self.num_without_reward:
            notes.append(f"{self.num_without_reward} of {self.num_rollouts} responses have no finite reward")
        if self.num_errored:
            notes.append(f"{self.num_errored} episodes were left out because an error ended them")
        if self.num_others:
            notes.append(f"{self.num_others} of {self.num_records} records are no call of a model and were left out")
        if self.num_without_turns:
            notes.append(f"{self.num_without_turns} episodes hold no response")
        for split, count in sorted(self.other_splits.items()):
            notes.append(f"{count} episodes of split '{split}' were left out")
        if self.num_superseded:
            notes.append(f"{self.num_superseded} episodes were left out because a resumed run played them again")
        return notes
