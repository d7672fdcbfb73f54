"""The tokens of a response as they were sampled: the text of each, its log-prob, and whether it belongs to the reasoning.

The record of an episode holds token ids, not their texts. The tokenizer that a run's checkpoints carry turns ids into text; it is read by the
`tokenizers` package, without torch. Ids are decoded one after the other by its `DecodeStream`, so that a character of several tokens is one piece
with the log-probs of all of them. Where no checkpoint holds a tokenizer, the page shows the plain response and says why it has no colours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.dashboard.catalogue import LiveRun
from tether.runs.checkpoints import MODEL

LEVELS = tuple(math.log(chance) for chance in (0.9, 0.5, 0.1, 0.01))
"""Log-probs between the colours."""
TOKENIZER = "tokenizer.json"


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


def run_tokenizer(run: LiveRun) -> Any | None:
    """The tokenizer of the run's checkpoints; None where there is none."""
    return run.once("tokenizer", ("checkpoints",), lambda: _load(run.store.checkpoints))


def _load(checkpoints: Path) -> Any | None:
    from tokenizers import Tokenizer

    for path in sorted(checkpoints.glob(f"*/{MODEL}/{TOKENIZER}")):
        return Tokenizer.from_file(str(path))
    return None


def context_text(tokenizer: Any, turn: Mapping[str, Any]) -> str:
    """What the model was given before this response, special tokens included."""
    return str(tokenizer.decode(list(turn.get("context_ids") or []), skip_special_tokens=False))


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
        text = stream.step(tokenizer, token)
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
