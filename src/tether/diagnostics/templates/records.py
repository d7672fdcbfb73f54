"""The results of the template finder: templates, their slots, and the shares of the words of all reasonings among them."""

from dataclasses import dataclass
from enum import StrEnum

SHOWN_LENGTH = 40
"""Characters of a filler in the description; the record holds all of it."""


class SlotKind(StrEnum):
    """Whether the filler of a slot follows the prompt."""

    TIED = "tied"
    """Reasonings of one prompt agree on the filler more than reasonings of different prompts, beyond chance."""
    NOISE = "noise"
    """The filler varies, and no more with the prompt than chance allows."""
    UNKNOWN = "unknown"
    """Too few reasonings share a prompt to tell the two apart."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a varying text follows the prompt: agreement within prompts against agreement across prompts."""

    strength: float
    """(W - B) / (1 - B), W and B being the mean agreement within and across prompts. 1: the prompt decides, 0: it has no influence; may fall
    below 0 by chance. Both means are over pairs of distinct reasonings, so few samples do not lift it."""
    p_value: float
    """Share of shuffles of the prompts that agree at least as well within prompts."""
    kind: SlotKind


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a template whose words vary, such as ⟨2⟩."""

    number: int
    num_fillers: int
    """Distinct fillers, nothing at all being one of them."""
    fillers: tuple[tuple[str, float], ...]
    """The most common fillers and the share of the template's traces that have each; "" where the slot is left empty."""
    mean_words: float
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Template:
    """One skeleton, e.g. "I am at ⟨1⟩, goal at ⟨2⟩. So ⟨3⟩", and the traces that follow it."""

    skeleton: str
    num_words: int
    """Fixed words of the skeleton; punctuation does not count."""
    num_traces: int
    share: float
    """Of all traces that have reasoning."""
    num_prompts: int
    prompt_share: float
    """Share of the prompts under which it occurs."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class TextShares:
    """Where the words of all reasonings go; the five add up to 1."""

    template: float
    """Fixed words of a template: the same whatever the prompt."""
    tied: float
    """Words in tied slots, times the strength of their agreement."""
    noise: float
    """Words in noise slots, and the remaining part of tied slots."""
    unknown: float
    """Words in slots of unknown kind."""
    rest: float
    """Words of traces that follow no template, and strays between the words of a skeleton."""


@dataclass(frozen=True, slots=True)
class Templates:
    """Everything that was found, the most common template first."""

    templates: tuple[Template, ...]
    num_traces: int
    """Traces with at least one word of reasoning; all shares are of these."""
    num_prompts: int
    num_empty: int
    """Traces without a word of reasoning; left out."""
    explained: float
    """Share of traces that follow some template."""
    words: TextShares
    choice: Agreement
    """Does the prompt decide which template (or none) is followed?"""

    def describe(self) -> str:
        """The finding in plain text, a few lines per template."""
        words = self.words
        unknown = f", {words.unknown:.0%} in slots too rare to classify" if words.unknown else ""
        lines = [
            f"{_counted(len(self.templates), 'template')} explain{'s' * (len(self.templates) == 1)} {self.explained:.0%} of "
            f"{_counted(self.num_traces, 'trace')} under {_counted(self.num_prompts, 'prompt')}.",
            f"Of the words {words.template:.0%} are template, {words.tied:.0%} follow the prompt, {words.noise:.0%} vary regardless of it"
            f"{unknown}, {words.rest:.0%} belong to no template.",
        ]
        if len(self.templates) > 1 or 0 < self.explained < 1:
            lines.append(f"Which template is used: {_in_words(self.choice)}.")
        for template in self.templates:
            where = f"{template.num_prompts} prompts, {template.prompt_share:.0%} of them"
            lines += ["", f"{template.share:6.1%}  {template.skeleton}    ({_counted(template.num_traces, 'trace')}; {where})"]
            for slot in template.slots:
                common = ", ".join(f"{_shortened(text) or '(nothing)'} {share:.0%}" for text, share in slot.fillers)
                more = ", ..." if slot.num_fillers > len(slot.fillers) else ""
                lines.append(f"        ⟨{slot.number}⟩ {_in_words(slot.agreement)}; {_counted(slot.num_fillers, 'filler')}: {common}{more}")
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _shortened(filler: str) -> str:
    return filler if len(filler) <= SHOWN_LENGTH else f"{filler[: SHOWN_LENGTH - 1].rstrip()}…"


def _in_words(found: Agreement) -> str:
    return f"{found.kind} (agreement {found.strength:.2f}, p {found.p_value:.3f})"
