"""What pages show of the reasoning: turns, sample episodes side by side, and the templates that reasonings share.

A turn is shown in the grammar of its environment and, where a tokenizer is at hand, token by token. The record of an episode holds token ids, not
their texts. Ids are decoded one after the other by the `DecodeStream` of the `tokenizers` package, without torch, so that a character of several
tokens is one piece with the log-probs of all of them.

A reader should see whether the reasoning differs between prompts in content. No count of words can tell: a collapsed run varies its wording
too. Episodes are not picked by hand: the first member of the first few prompts, at the first and the last recorded step. Where validation was
recorded at both, it is shown, because it plays the same prompts each time.

Templates are found by `tether.diagnostics.templates`, which does not know run folders. The command line passes them on as the dictionary
form of `Templates`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.enums import Split
from tether.core.grammar import THINK_CLOSE, parse_response
from tether.runs.images import EmbeddedPictures, Picture, Pictures, parts
from tether.runs.store import RunStore

NUM_PROMPTS = 4
LEVELS = tuple(math.log(chance) for chance in (0.9, 0.5, 0.1, 0.01))
"""Log-probs between the colours of tokens."""
_REPLY_TAG = re.compile(r"</think>\s*<(\w+)>")
MOST_TEMPLATES = 5
MOST_FILLERS = 4
LONGEST_FILLER = 48
LONGEST_SKELETON = 600
_SLOT = re.compile(r"⟨(\d+)⟩")


# ------------------------------------------------------------------------------------------------------------------- turns


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text that one token, or several where a character needs them, wrote."""

    text: str
    logprob: float | None
    """The sum over its tokens; None where one is not on record."""
    is_reasoning: bool
    ids: tuple[int, ...]

    @property
    def level(self) -> int | None:
        """0 for the most certain tokens to 4 for the least; None without a log-prob."""
        return None if self.logprob is None else sum(self.logprob < bound for bound in LEVELS)


@dataclass(frozen=True, slots=True)
class TurnView:
    """One exchange."""

    number: int
    observation: str
    """With the names of its pictures."""
    seen: list[str | Picture]
    """The same cut at its pictures."""
    response: str
    reasoning_end: int
    """Characters of the response up to the end of its reasoning."""
    reasoning: str
    """Empty if the think tag was never closed; the whole response is then in `answer`."""
    answer: str
    """What follows the reasoning: the answer, or the raw rest of a malformed response."""
    well_formed: bool
    valid: bool
    reward: float | None
    penalty: float | None
    finish: str
    num_tokens: int
    is_new_context: bool
    """The model was given nothing else: the first turn, or one that begins a new context."""
    pieces: list[Piece]
    """The sampled tokens; empty without a tokenizer, and where the turn has no token ids."""
    context: str
    """What the model was given before this response and after its last one, special tokens included; empty without a tokenizer."""


_FACTS: dict[str, Any] = {
    "group": -1,
    "member": -1,
    "success": None,
    "reward": None,
    "stop_reason": "",
    "kept": False,
    "error": None,
    "measures": {},
}


def episode_view(record: Mapping[str, Any], pictures: Pictures, tokenizer: Any | None = None) -> dict[str, Any]:
    """An episode's record with the views of its turns; what it does not say is unknown."""
    return {**_FACTS, **record, "turns": turn_views(record, pictures, tokenizer)}


def turn_views(record: Mapping[str, Any], pictures: Pictures, tokenizer: Any | None = None) -> list[TurnView]:
    """The turns of an episode's record; with a tokenizer token by token."""
    return [_turn_view(number, turn, pictures, tokenizer) for number, turn in enumerate(record.get("turns") or [], start=1)]


def _turn_view(number: int, turn: Mapping[str, Any], pictures: Pictures, tokenizer: Any | None) -> TurnView:
    seen = parts(str(turn.get("observation") or ""), pictures)
    response, valid = str(turn.get("response") or ""), bool(turn.get("valid"))
    parsed = parse_response(response)
    tag = _REPLY_TAG.search(response)
    if valid and not parsed.well_formed and tag:
        # The record does not name the reply tags of the environment. A valid response with another tag than <answer>, such as Search-R1's
        # <search>, is read with the tag that follows its reasoning.
        parsed = parse_response(response, (tag.group(1),))
    rest = response if parsed.reasoning_end is None else response[parsed.reasoning_end + len(THINK_CLOSE) :]
    return TurnView(
        number=number,
        observation="".join(map(str, seen)),
        seen=seen,
        response=response,
        reasoning_end=parsed.reasoning_end or 0,
        reasoning=parsed.reasoning or "",
        answer=rest.strip() if parsed.answer is None else parsed.answer,
        well_formed=parsed.well_formed or valid,
        valid=valid,
        reward=turn.get("reward"),
        penalty=turn.get("penalty"),
        finish=str(turn.get("finish") or "").replace("_", " "),
        num_tokens=len(turn.get("response_ids") or []),
        is_new_context=bool(turn.get("fresh", number == 1)),
        pieces=pieces(tokenizer, turn) if tokenizer is not None else [],
        context="" if tokenizer is None else _context(tokenizer, turn),
    )


def _context(tokenizer: Any, turn: Mapping[str, Any]) -> str:
    """What the model was given, as text, with the names of its pictures in the place of their patches."""
    ids, text, start = list(turn.get("context_ids") or []), "", 0
    for first, length, digest, patch in turn.get("images") or []:
        text += str(tokenizer.decode(ids[start:first], skip_special_tokens=False)) + ("" if patch else f"[image {digest}]")
        start = first + length
    return text + str(tokenizer.decode(ids[start:], skip_special_tokens=False))


def pieces(tokenizer: Any, turn: Mapping[str, Any]) -> list[Piece]:
    """The response of a turn, token by token; empty where its token ids are not on record."""
    from tokenizers.decoders import DecodeStream

    ids = list(turn.get("response_ids") or [])
    logprobs = list(turn.get("logprobs") or [])
    first, last = turn.get("reasoning_span") or (0, 0)
    stream = DecodeStream(skip_special_tokens=False)
    found: list[Piece] = []
    pending: list[int] = []
    for place, token in enumerate(ids):
        pending.append(place)
        try:
            text = stream.step(tokenizer, token)
        except Exception as error:
            if type(error) is not Exception:
                raise
            return []  # the tokenizers package raises this class itself: the ids are of another tokenizer
        if text is None and place < len(ids) - 1:
            continue
        chances = [logprobs[each] if each < len(logprobs) else None for each in pending]
        known = [chance for chance in chances if chance is not None]
        found.append(
            Piece(
                text if text is not None else "\N{REPLACEMENT CHARACTER}",
                sum(known) if len(known) == len(chances) else None,
                all(first <= each < last for each in pending),
                tuple(ids[each] for each in pending),
            )
        )
        pending = []
    return found


# ----------------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Episodes of different prompts at one step."""

    step: int
    split: str
    episodes: list[dict[str, Any]]
    """The records, with the views of their turns."""


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
    samples, pictures = [], EmbeddedPictures(store.folder)
    for step in ends:
        first_of_prompt: dict[Any, dict[str, Any]] = {}
        for record in store.trajectories(step, split):
            first_of_prompt.setdefault(record.get("seed", record.get("group")), record)
            if len(first_of_prompt) == NUM_PROMPTS:  # the rest of the step need not be read
                break
        samples.append(SampleStep(step, split, [episode_view(record, pictures) for record in first_of_prompt.values()]))
    return samples


# --------------------------------------------------------------------------------------------------------------- templates


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
    views = []
    for each in found:
        templates = each.found["templates"] if each.found is not None else []
        summary = each.missing if each.found is None else _summary(each.found, each.num_left_out)
        shown = [_template_view(template) for template in templates[:MOST_TEMPLATES]]
        views.append(TemplatesView(each.step, each.split, summary, shown, len(templates) - len(shown)))
    return views


def _summary(found: Mapping[str, Any], num_left_out: int) -> str:
    templates, words = found["templates"], found["words"]
    among = f"{_counted(found['num_traces'], 'reasoning')} under {_counted(found['num_prompts'], 'prompt')}"
    among += f" (a sample; {num_left_out} more were not searched)" if num_left_out else ""
    if not templates:
        return f"No text is shared across prompts by enough of {among}."
    verb = "explains" if len(templates) == 1 else "explain"
    unknown = f", {words['unknown']:.0%} stand in slots too rare to classify" if words["unknown"] else ""
    return (
        f"{_counted(len(templates), 'template')} {verb} {found['explained']:.0%} of {among}. "
        f"Of all words {words['template']:.0%} are fixed, {words['tied']:.0%} follow the prompt, "
        f"{words['noise']:.0%} vary regardless of it{unknown}, {words['rest']:.0%} belong to no template."
    )


def _template_view(template: Mapping[str, Any]) -> TemplateView:
    slots = [_slot(slot) for slot in template["slots"]]
    kinds = {slot.number: slot.kind for slot in slots}
    parts: list[tuple[str, str]] = []
    for place, text in enumerate(_SLOT.split(_shortened(template["skeleton"], LONGEST_SKELETON))):
        if place % 2:
            parts.append((f"⟨{text}⟩", kinds.get(int(text), "unknown")))
        elif text:
            parts.append((text, ""))
    return TemplateView(template["share"], template["num_traces"], template["num_prompts"], parts, slots)


def _slot(slot: Mapping[str, Any]) -> SlotView:
    fillers = [(f"“{_shortened(text, LONGEST_FILLER)}”" if text else "nothing", share) for text, share in slot["fillers"][:MOST_FILLERS]]
    kind = str(slot["agreement"]["kind"])
    strength = "" if kind == "unknown" else f"{max(0.0, slot['agreement']['strength']):.2f}"  # a little below 0 is chance
    return SlotView(slot["number"], kind, strength, fillers, slot["num_fillers"] - len(fillers))


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip()}…"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
