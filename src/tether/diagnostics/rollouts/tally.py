"""What a reading met on its way, counted: bad lines, empty reasoning, missing rewards. Nothing is dropped without standing here."""

import re
from dataclasses import dataclass, field

from tether.diagnostics.rollouts.record import Rollout

MISSING = {
    "untagged": "hold no <think> ... </think>",
    "unclosed": "open a think tag and never close it (cut off by the token limit?)",
    "blank": "have blank reasoning",
    "unmatched": "do not match the pattern",
    "absent": "give neither reasoning nor the text of a response",
}
"""Reasons why a rollout has no reasoning, as the end of a sentence."""

MAX_EXAMPLES = 5

_OTHER_TAGS = re.compile(r"<(reasoning|thinking|thoughts?|reason|scratchpad|analysis)>")
"""What others put around reasoning; counted to suggest a pattern, never taken without being told."""


@dataclass(slots=True)
class Tally:
    """Counts of one pass over the files."""

    num_records: int = 0
    """Lines or rows that were read, bad ones included, blank ones not."""
    num_rollouts: int = 0
    """Responses handed out."""
    num_bad: int = 0
    """Records that could not be used; more than zero only with bad_lines="skip"."""
    bad_examples: list[str] = field(default_factory=list)
    """The first few of them, in words."""
    other_splits: dict[str, int] = field(default_factory=dict)
    """Episodes of a Tether run that were left out, by their split."""
    num_superseded: int = 0
    """Episodes of a Tether run that it played again after resuming."""
    num_without_turns: int = 0
    """Episodes in which the model never answered."""
    num_without_reward: int = 0
    missing: dict[str, int] = field(default_factory=dict)
    """Rollouts without reasoning, by reason."""
    other_tags: dict[str, int] = field(default_factory=dict)
    """Rollouts without think tags that have another kind, by its name."""

    @property
    def num_empty(self) -> int:
        """Rollouts without reasoning."""
        return sum(self.missing.values())

    def add_bad(self, message: str) -> None:
        self.num_bad += 1
        if len(self.bad_examples) < MAX_EXAMPLES:
            self.bad_examples.append(message)

    def add_other_split(self, split: str) -> None:
        self.other_splits[split] = self.other_splits.get(split, 0) + 1

    def add(self, rollout: Rollout) -> None:
        self.num_rollouts += 1
        self.num_without_reward += rollout.reward is None
        if rollout.missing is not None:
            self.missing[rollout.missing] = self.missing.get(rollout.missing, 0) + 1
        if rollout.missing == "untagged" and (tag := _OTHER_TAGS.search(rollout.response or "")):
            self.other_tags[tag[1]] = self.other_tags.get(tag[1], 0) + 1

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
        if self.num_without_turns:
            notes.append(f"{self.num_without_turns} episodes hold no response")
        for split, count in sorted(self.other_splits.items()):
            notes.append(f"{count} episodes of split '{split}' were left out")
        if self.num_superseded:
            notes.append(f"{self.num_superseded} episodes were left out because a resumed run played them again")
        return notes
