"""The templates of a run's reasoning, as plain data that the page shows: skeletons, their share, and what fills their slots.

They are found by `tether.diagnostics.templates`, which knows nothing of run folders; a run's files know nothing of how templates are found.
The command line brings the two together and hands them over as the dictionary form of `Templates`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_TEMPLATES = 5
MOST_FILLERS = 4
LONGEST_FILLER = 48
LONGEST_SKELETON = 600
_SLOT = re.compile(r"⟨(\d+)⟩")


@dataclass(frozen=True, slots=True)
class StepTemplates:
    """What was found in the first-turn reasonings of one step."""

    step: int
    split: str
    num_left_out: int
    """Reasonings beyond the sample that was searched."""
    found: Mapping[str, Any] | None
    """`dataclasses.asdict` of the `Templates`; None where there was nothing to search."""
    missing: str = ""
    """Why nothing was found."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot: ⟨number⟩, whether it follows the prompt, and its most common fillers."""

    number: int
    kind: str
    strength: str
    """How far its filler follows the prompt, 1 where the prompt decides; empty where that is unknown."""
    fillers: list[tuple[str, float]]
    num_more: int


@dataclass(frozen=True, slots=True)
class TemplateView:
    """One skeleton, cut into fixed text and slots."""

    share: float
    num_traces: int
    num_prompts: int
    parts: list[tuple[str, str]]
    """Text and its kind: "" for fixed words, else that of the slot."""
    slots: list[SlotView]


@dataclass(frozen=True, slots=True)
class TemplatesView:
    """What the page says of one step."""

    step: int
    split: str
    summary: str
    templates: list[TemplateView]
    num_more: int


def views(found: Sequence[StepTemplates]) -> list[TemplatesView]:
    """The templates of some steps, ready for the page."""
    return [_view(each) for each in found]


def _view(each: StepTemplates) -> TemplatesView:
    if each.found is None:
        return TemplatesView(each.step, each.split, each.missing, [], 0)
    templates = each.found["templates"]
    return TemplatesView(
        each.step,
        each.split,
        _summary(each.found, each.num_left_out),
        [_template(template) for template in templates[:MOST_TEMPLATES]],
        max(0, len(templates) - MOST_TEMPLATES),
    )


def _summary(found: Mapping[str, Any], num_left_out: int) -> str:
    templates, words = found["templates"], found["words"]
    among = f"{_counted(found['num_traces'], 'reasoning')} under {_counted(found['num_prompts'], 'prompt')}"
    among += f" (a sample; {num_left_out} more were not searched)" if num_left_out else ""
    if not templates:
        return f"No text is shared across prompts by enough of {among}."
    verb = "explains" if len(templates) == 1 else "explain"
    unknown = f", {_percent(words['unknown'])} stand in slots too rare to judge" if words["unknown"] else ""
    return (
        f"{_counted(len(templates), 'template')} {verb} {_percent(found['explained'])} of {among}. "
        f"Of all words {_percent(words['template'])} are fixed, {_percent(words['tied'])} follow the prompt, "
        f"{_percent(words['noise'])} vary regardless of it{unknown}, {_percent(words['rest'])} belong to no template."
    )


def _template(template: Mapping[str, Any]) -> TemplateView:
    slots = [_slot(slot) for slot in template["slots"]]
    kinds = {slot.number: slot.kind for slot in slots}
    return TemplateView(template["share"], template["num_traces"], template["num_prompts"], _parts(template["skeleton"], kinds), slots)


def _parts(skeleton: str, kinds: Mapping[int, str]) -> list[tuple[str, str]]:
    """A skeleton cut at its slots."""
    parts: list[tuple[str, str]] = []
    for place, text in enumerate(_SLOT.split(_shortened(skeleton, LONGEST_SKELETON))):
        if place % 2:
            parts.append((f"⟨{text}⟩", kinds.get(int(text), "unknown")))
        elif text:
            parts.append((text, ""))
    return parts


def _slot(slot: Mapping[str, Any]) -> SlotView:
    fillers = [(f"“{_shortened(text, LONGEST_FILLER)}”" if text else "nothing", share) for text, share in slot["fillers"][:MOST_FILLERS]]
    kind = str(slot["tie"]["kind"])
    strength = "" if kind == "unknown" else f"{max(0.0, slot['tie']['strength']):.2f}"  # a little below 0 is chance
    return SlotView(slot["number"], kind, strength, fillers, slot["num_fillers"] - len(fillers))


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
