"""What a report shows of the reasoning: sample episodes side by side, and the templates that reasonings share.

A reader should see whether the reasoning differs between prompts in content. No count of words can tell: a collapsed run varies its wording
too. Episodes are not picked by hand: the first member of the first few prompts, at the first and the last recorded step. Where validation was
recorded at both, it is shown, because it plays the same prompts each time.

Templates are found by `tether.diagnostics.templates`, which does not know run folders. The command line passes them on as the dictionary
form of `Templates`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.enums import Split
from tether.core.grammar import THINK_CLOSE, ParsedResponse, parse_response
from tether.runs.store import RunStore

NUM_PROMPTS = 4
LONGEST_TEXT = 1200
"""Characters of an observation or a response that are shown; the store holds the rest."""
_REPLY_TAG = re.compile(r"</think>\s*<(\w+)>")
MOST_TEMPLATES = 5
MOST_FILLERS = 4
LONGEST_FILLER = 48
LONGEST_SKELETON = 600
_SLOT = re.compile(r"⟨(\d+)⟩")


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One exchange as it is shown."""

    observation: str
    reasoning: str
    """Empty if the think tag was never closed; the whole response is then in `answer`."""
    answer: str
    """What follows the reasoning: the answer, or the raw rest of a malformed response."""
    well_formed: bool
    reward: float | None
    penalty: float | None
    valid: bool


@dataclass(frozen=True, slots=True)
class SampleEpisode:
    """One episode as it is shown."""

    prompt: int
    """The number of its group."""
    seed: int
    success: bool
    stop_reason: str
    error: str | None
    reward: float | None
    turns: list[SampleTurn]


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Episodes of different prompts at one step."""

    step: int
    split: str
    episodes: list[SampleEpisode]


def sample_steps(store: RunStore) -> list[SampleStep]:
    """Samples at the first and the last recorded step; fewer where fewer were recorded."""
    steps_of: dict[str, list[int]] = {}
    for step, split in store.trajectory_blocks():
        steps_of.setdefault(split, []).append(step)
    if not steps_of:
        return []
    # Validation is shown only where it has two points in time; a single validation would hide how training began.
    most = max(steps_of, key=lambda split: (len(steps_of[split]), split == Split.TRAIN))
    split = Split.VALIDATION.value if len(steps_of.get(Split.VALIDATION, [])) > 1 else most
    ends = dict.fromkeys((steps_of[split][0], steps_of[split][-1]))
    return [
        SampleStep(step, split, [_episode(record) for record in _first_of_each_prompt(store.trajectories(step, split))]) for step in ends
    ]


def _first_of_each_prompt(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first trajectory of each of the first few distinct instances; reading stops as soon as they are found."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        found.setdefault(record["seed"], record)
        if len(found) == NUM_PROMPTS:
            break
    return list(found.values())


def _episode(record: dict[str, Any]) -> SampleEpisode:
    return SampleEpisode(
        prompt=record["group"],
        seed=record["seed"],
        success=record["success"],
        stop_reason=record["stop_reason"].replace("_", " "),
        error=record["error"],
        reward=record["reward"],
        turns=[_turn(turn) for turn in record["turns"]],
    )


def _turn(turn: dict[str, Any]) -> SampleTurn:
    response, valid = turn["response"], bool(turn["valid"])
    parsed = _parsed(response, valid)
    rest = response if parsed.reasoning_end is None else response[parsed.reasoning_end + len(THINK_CLOSE) :]
    return SampleTurn(
        observation=_cut(turn["observation"]),
        reasoning=_cut(parsed.reasoning or ""),
        answer=_cut(rest.strip() if parsed.answer is None else parsed.answer),
        well_formed=parsed.well_formed or valid,
        reward=turn["reward"],
        penalty=turn["penalty"],
        valid=valid,
    )


def _parsed(response: str, valid: bool) -> ParsedResponse:
    """A response in the grammar of its environment. The record does not name the reply tags, but it says that the response was valid.

    An environment may accept other tags than <answer>, such as Search-R1's <search>: the tag after the reasoning is then the reply's.
    """
    parsed = parse_response(response)
    tag = _REPLY_TAG.search(response)
    return parse_response(response, (tag.group(1),)) if valid and not parsed.well_formed and tag else parsed


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT].rstrip()} … ({len(text) - LONGEST_TEXT} more characters)"


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


def template_views(found: Sequence[StepTemplates]) -> list[TemplatesView]:
    """The templates of some steps, ready for the page."""
    return [_templates_view(each) for each in found]


def _templates_view(each: StepTemplates) -> TemplatesView:
    if each.found is None:
        return TemplatesView(each.step, each.split, each.missing, [], 0)
    templates = each.found["templates"]
    return TemplatesView(
        each.step,
        each.split,
        _summary(each.found, each.num_left_out),
        [_template_view(template) for template in templates[:MOST_TEMPLATES]],
        max(0, len(templates) - MOST_TEMPLATES),
    )


def _summary(found: Mapping[str, Any], num_left_out: int) -> str:
    templates, words = found["templates"], found["words"]
    among = f"{_counted(found['num_traces'], 'reasoning')} under {_counted(found['num_prompts'], 'prompt')}"
    among += f" (a sample; {num_left_out} more were not searched)" if num_left_out else ""
    if not templates:
        return f"No text is shared across prompts by enough of {among}."
    verb = "explains" if len(templates) == 1 else "explain"
    unknown = f", {_percent(words['unknown'])} stand in slots too rare to classify" if words["unknown"] else ""
    return (
        f"{_counted(len(templates), 'template')} {verb} {_percent(found['explained'])} of {among}. "
        f"Of all words {_percent(words['template'])} are fixed, {_percent(words['tied'])} follow the prompt, "
        f"{_percent(words['noise'])} vary regardless of it{unknown}, {_percent(words['rest'])} belong to no template."
    )


def _template_view(template: Mapping[str, Any]) -> TemplateView:
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
    kind = str(slot["agreement"]["kind"])
    strength = "" if kind == "unknown" else f"{max(0.0, slot['agreement']['strength']):.2f}"  # a little below 0 is chance
    return SlotView(slot["number"], kind, strength, fillers, slot["num_fillers"] - len(fillers))


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
