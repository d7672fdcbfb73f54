"""From sampled rollouts to token ids: x and z of each rollout, columns of equal x, and counts of what was cut or replaced.

Token ids of the file are used where it has them, and must then be the model's own: an id outside its vocabulary, or ids that decode to another
text than the one beside them, end the audit with a clear line. Where a file has the ids of the whole response, those of the reasoning are found
within them; a token that reaches over the border of the reasoning belongs to neither. All other text is tokenised here, x apart from z, so that the border lies where
the reader put it. A prompt that is longer than the model's context loses its beginning, a long reasoning loses its end; both are counted.

The part of a response before its reasoning belongs to x. Where the members of a group differ there, the most common beginning is used for all
of them: a column is a prompt, not a beginning of a response.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from tether.core.errors import BadInput
from tether.core.grammar import THINK_OPEN
from tether.core.images import IMAGE_IDS, MARKER, Image, digest_of, find_runs, image_digests
from tether.diagnostics.pairs import beginning_ids, most_common
from tether.diagnostics.rollouts import Rollout
from tether.models.chat import ChatFormat
from tether.runs.images import read_image

REASONING_TOKENS = 1024
"""Of a reasoning at most so many tokens are scored, its beginning."""
SHOWN = 40
FOREIGN_SHARE = 0.5
"""Ids are called foreign where more than this share of the reasonings that can be compared decode to another text."""

CHARS_PER_TOKEN = 64
"""Far more than a token has, but for runs of spaces."""
BORDER_CHARS = 16
"""So much of the text's end may be missing from its ids: the token that joins it with the closing tag."""

Ids = tuple[int, ...]


@dataclass(slots=True)
class EncodedPairs:
    """Reasonings and the prompts they answer, as ids and as text. `source[n]` is the column of reasoning n."""

    prompts: list[Ids] = field(default_factory=list)
    prompt_texts: list[str] = field(default_factory=list)
    reasonings: list[Ids] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    drawn: list[Rollout] = field(default_factory=list)
    images: dict[str, Image] = field(default_factory=dict)
    """The pictures of the prompts, by digest: held until all is scored and shown."""


@dataclass(slots=True)
class Encoder:
    """Turns samples into pairs for one model; the counters grow over all calls."""

    tokenizer: Any
    """A Hugging Face tokenizer."""
    vocabulary: int
    """Ids from here on are not the model's."""
    positions: int | None
    """Tokens the model can see; None where it has no limit of its own."""
    writer: str = "the model that wrote the rollouts"
    """Whose token ids the rollouts hold, for messages."""
    vision: Any = None
    """How the model sees (tether.models.vision); None for one that reads text only."""
    model: str = "the model"
    """Its name, for messages."""
    num_prompts_cut: int = 0
    num_reasonings_cut: int = 0
    num_leads_replaced: int = 0
    num_repeats: int = 0
    num_from_ids: int = 0
    num_from_text: int = 0
    _added: Ids = ()
    _checked: int = 0
    _foreign: list[tuple[str, str, str]] = field(default_factory=list)
    _images: dict[str, Image] = field(default_factory=dict)
    """Of the window that is being encoded."""

    def __post_init__(self) -> None:
        self._added = beginning_ids(self.tokenizer)

    def pairs(self, drawn: Sequence[Rollout]) -> EncodedPairs:
        """The pairs of one window."""
        pairs = EncodedPairs()
        self._images = pairs.images
        columns: dict[Ids, int] = {}
        leads: dict[tuple[Any, Any], list[str]] = {}
        for member in drawn:
            leads.setdefault((member.step, member.group), []).append(member.lead)
        common = {group: most_common(found, default="") for group, found in leads.items()}
        seen: dict[tuple[int, str], Any] = {}
        encoded = [self._reasoning(member) for member in drawn]
        longest = max((len(ids) for ids, _ in encoded), default=0)
        for member, (reasoning, text) in zip(drawn, encoded, strict=True):
            lead = common[member.step, member.group]
            self._hold_images(member)
            prompt = self._prompt(member, lead, longest)
            column = columns.get(prompt, len(columns))
            if seen.setdefault((column, text), member.step) != member.step:
                self.num_repeats += 1  # a batch that was written again in a later step, not a second sample
                continue
            if column == len(columns):
                columns[prompt] = column
                pairs.prompts.append(prompt)
                pairs.prompt_texts.append(self._decoded(prompt))
            self.num_leads_replaced += lead != member.lead
            pairs.reasonings.append(reasoning)
            pairs.texts.append(text)
            pairs.source.append(column)
            pairs.drawn.append(member)
        if self._checked and len(self._foreign) > FOREIGN_SHARE * self._checked:
            where, decoded, written = self._foreign[0]
            raise BadInput(
                f"{where}: tokens do not fit the model's tokenizer: they decode to {_shown(decoded)}, the text beside them is "
                f"{_shown(written)}; give --model {self.writer}"
            )
        return pairs

    def notes(self) -> list[str]:
        """What a reader of the result should know."""
        total = self.num_from_ids + self.num_from_text
        found = [
            (self.num_from_text and self.num_from_ids, f"{self.num_from_text} of {total} reasonings had no token ids and were tokenised"),
            (self.num_prompts_cut, f"{self.num_prompts_cut} of {total} prompts are longer than the model can see and lost their beginning"),
            (self.num_reasonings_cut, f"of {self.num_reasonings_cut} of {total} reasonings only the beginning was scored"),
            (
                self.num_leads_replaced,
                f"{self.num_leads_replaced} of {total} responses begin otherwise than most of their group before the reasoning; "
                "the common beginning was taken",
            ),
            (self.num_repeats, f"{self.num_repeats} reasonings were repeats of an earlier step's (same prompt, same words) and left out"),
        ]
        return [words for holds, words in found if holds]

    def _reasoning(self, member: Rollout) -> tuple[Ids, str]:
        if member.reasoning_ids is not None:
            self.num_from_ids += 1
            ids = tuple(member.reasoning_ids)
            self._check_vocabulary(ids, member.where)
            text = self._decoded(ids)
            if member.reasoning is not None:
                self._checked += 1
                ours, theirs = "".join(text.split()), "".join(member.reasoning.split())
                both = min(
                    len(ours), len(theirs)
                )  # the span of ids may end a token before the text, and of a long text only a part is kept
                if ours[:both] != theirs[:both] or len(ours) + BORDER_CHARS < len(theirs):
                    self._foreign.append((member.where, text, member.reasoning))
        elif member.response_ids is not None and (found := self._within(tuple(member.response_ids), member)):
            self.num_from_ids += 1
            text, ids = member.reasoning or "", found
        else:
            self.num_from_text += 1
            text = member.reasoning or ""
            ids = self._encoded(text)
        most = min(REASONING_TOKENS, self.positions // 2) if self.positions else REASONING_TOKENS
        if len(ids) > most:
            self.num_reasonings_cut += 1
            ids = ids[:most]
        return ids, text

    def _within(self, response: Ids, member: Rollout) -> Ids:
        """The ids of the reasoning within those of the response; none where the response decodes to another text, which is counted as foreign."""
        self._check_vocabulary(response, member.where)
        decoded, reasoning = self._decoded(response), member.reasoning or ""
        start = decoded.find(reasoning)
        self._checked += 1
        if start < 0:
            self._foreign.append((member.where, decoded, reasoning))
            return ()
        places = range(len(response) + 1)
        first = bisect.bisect_left(places, start, key=lambda place: len(self._decoded(response[:place])))
        last = bisect.bisect_right(places, start + len(reasoning), key=lambda place: len(self._decoded(response[:place]))) - 1
        return response[first:last]

    def _prompt(self, member: Rollout, lead: str, longest: int) -> Ids:
        """x; the room for it is what the longest reasoning of the window leaves, the same for every prompt, so that equal ones stay equal."""
        if member.prompt_ids is not None:
            ids = tuple(member.prompt_ids)
            self._check_vocabulary(ids, member.where)
            tail = _opened(lead, member.think_implied and not lead, "" if lead else self._decoded(ids[-8:]))
            ids += self._encoded(tail) if tail else ()
        else:
            text = self._rendered(member.messages) if member.messages is not None else member.prompt or ""
            if self.positions:  # a prompt of megabytes would be tokenised for minutes, and all but its end cut off
                text = text[-CHARS_PER_TOKEN * self.positions :]
            ids = self._encoded(text + _opened(lead, member.think_implied, text + lead))
            if self._added and ids[:1] != self._added:
                ids = self._added + ids
        if self.positions and len(ids) > self.positions - longest:
            self.num_prompts_cut += 1
            ids = ids[longest - self.positions :]
            while (runs := find_runs(ids)) and runs[0].patch:  # an image is whole or not there
                ids = ids[runs[0].start + runs[0].length :]
        return ids or self._encoded("\n")

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        if self._images:  # the template writes what stands around a picture
            return ChatFormat(self.tokenizer, (), self.vision).rendered(messages)
        if not self.tokenizer.chat_template:
            return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages) + "\n\nassistant: "
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadInput(
                f"the model's chat template refuses the messages of a prompt ({' '.join(str(error).split())[:120]}); "
                "use the model that wrote the rollouts, or give prompts as text"
            ) from error

    def _hold_images(self, member: Rollout) -> None:
        """Keep the pictures of a rollout; a model without eyes is refused."""
        digests = image_digests(member.prompt_ids or ()) if member.image_folder is not None else []
        if not digests and not member.images:
            return
        if self.vision is None:
            raise BadInput(
                f"{member.where}: the prompt holds images, and {self.model} reads text only; give a --model that sees, such as "
                "Qwen/Qwen2.5-VL-3B-Instruct, or measure the text alone with --text-only (text_only=True in Python)"
            )
        for image in member.images:
            self._images[image.digest] = image
        for digest in digests:
            if digest not in self._images:
                assert member.image_folder is not None  # there are no digests without
                self._images[digest] = read_image(member.image_folder, digest)

    def _encoded(self, text: str) -> Ids:
        """A text as tokens; a picture of the window in it as the model's processor writes it."""
        if not self._images:
            return self._words(text)
        ids: Ids = ()
        for place, part in enumerate(MARKER.split(text)):
            ids += tuple(self.vision.expand(self._images[part])) if part in self._images and place % 2 else self._words(part)
        return ids

    def _words(self, text: str) -> Ids:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _decoded(self, ids: Ids) -> str:
        """Tokens as text, a picture as its marker."""
        text, start = "", 0
        for run in find_runs(ids):
            text += self._plain(ids[start : run.start]) + ("" if run.patch else f"<image:{run.digest}>")
            start = run.start + run.length
        return text + self._plain(ids[start:])

    def _plain(self, ids: Ids) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _check_vocabulary(self, ids: Ids, where: str) -> None:
        ids = tuple(token for token in ids if token < IMAGE_IDS or digest_of(token) not in self._images)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            worst = max(ids) if min(ids) >= 0 else min(ids)
            raise BadInput(
                f"{where}: tokens do not fit the model's tokenizer: id {worst}, but the model knows ids from 0 to {self.vocabulary - 1}; "
                f"give --model {self.writer}"
            )


def _opened(lead: str, implied: bool, before: str) -> str:
    """What follows the prompt up to the reasoning: the lead, and the think tag where it is implied and not yet there."""
    return lead + THINK_OPEN if implied and not before.rstrip().endswith(THINK_OPEN) else lead


def _shown(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= SHOWN else short[: SHOWN - 1] + "…")
