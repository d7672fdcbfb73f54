"""Reasonings as sequences of words, in an order that does not depend on the order they came in.

A word is a run of letters and digits (a number with its decimals, a word with its apostrophe), or one sign of a script written without
spaces; other signs are punctuation, which anchors alignments and is printed but never counted. Every token becomes one character, so
that whole reasonings can be compared by rapidfuzz's bit-parallel string routines. Words too rare to belong to any template that is
asked for become one RARE character. Prompts are numbered by the reasonings they have, not by their names: the result depends on
neither their type nor Python's hash seed.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.seeding import derive_seed

Ints = npt.NDArray[np.int64]

UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
TOKEN = re.compile(rf"\d+(?:[.,]\d+)*(?![^\W{UNSPACED}])|[{UNSPACED}]|[^\W{UNSPACED}]+(?:['’][^\W{UNSPACED}]+)*|[^\w\s]")

RARE = "\ue000"
WILD = "\ue001"
"""Stands for a slot in a skeleton; equal to no token."""
FIRST_WORD, FIRST_PUNCTUATION = 0x10000, 0xF0000


@dataclass(frozen=True, slots=True)
class Text:
    """One distinct reasoning, e.g. "go left." with codes of three characters and words of two."""

    tokens: tuple[str, ...]
    glued: tuple[bool, ...]
    """Whether each token follows the one before it without a space."""
    codes: str
    """One character per token."""
    plain: str
    """The codes without punctuation."""
    words: str
    """The codes that are words and not rare."""
    num_words: int
    """Words, rare ones included."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """All traces with a word of reasoning, T of them, sorted by text and prompt."""

    texts: list[Text]
    text_of_T: Ints
    prompt_of_T: Ints
    num_prompts: int
    num_empty: int

    def sample(self, size: int) -> Ints:
        """The first `size` traces in the order of a hash of their text, so a share of the sample estimates a share of the whole."""
        copy_T = np.arange(len(self.text_of_T)) - np.searchsorted(self.text_of_T, self.text_of_T)
        keys = [
            derive_seed("template sample", " ".join(self.texts[text].tokens), copy)
            for text, copy in zip(self.text_of_T.tolist(), copy_T.tolist(), strict=True)
        ]
        return np.sort(np.argsort(np.array(keys), kind="stable")[:size])


def read_corpus(reasonings: Sequence[str], prompts: Sequence[Hashable], rare_below: float) -> Corpus:
    """Distinct texts in sorted order; `rare_below` is the share of traces under which a word is rare."""
    lines = [" ".join(reasoning.split()) for reasoning in reasonings]
    cut = {line: list(TOKEN.finditer(line)) for line in set(lines)}
    spoken = sorted(line for line, tokens in cut.items() if any(is_word(token.group()) for token in tokens))
    number = {line: index for index, line in enumerate(spoken)}
    traces = [(number[line], prompt) for line, prompt in zip(lines, prompts, strict=True) if line in number]

    texts_of: dict[Hashable, list[int]] = {}
    for text, prompt in sorted(traces, key=lambda trace: trace[0]):
        texts_of.setdefault(prompt, []).append(text)
    # prompts with the very same reasonings are interchangeable, so their order among themselves changes nothing
    order = sorted(texts_of.values())
    pairs = sorted((text, prompt) for prompt, texts in enumerate(order) for text in texts)

    frequency: Counter[str] = Counter()
    for text, count in Counter(text for text, _ in traces).items():
        for token in {match.group() for match in cut[spoken[text]]}:
            frequency[token] += count
    codes = _codes(frequency, max(2.0, rare_below * len(traces)))
    return Corpus(
        [_text(cut[line], codes) for line in spoken],
        np.array([text for text, _ in pairs], dtype=np.int64),
        np.array([prompt for _, prompt in pairs], dtype=np.int64),
        len(order),
        len(lines) - len(traces),
    )


def is_word(token: str) -> bool:
    """Whether a token counts as a word; all others are punctuation."""
    return token[0] == "_" or token[0].isalnum()


def words_of(codes: str) -> str:
    """Only the characters that stand for words: no punctuation, no RARE, no WILD."""
    return "".join(code for code in codes if FIRST_WORD <= ord(code) < FIRST_PUNCTUATION)


def _codes(frequency: Counter[str], least: float) -> dict[str, str]:
    common = sorted(token for token, count in frequency.items() if count >= least)
    words = [token for token in common if is_word(token)]
    signs = [token for token in common if not is_word(token)]
    numbered = [*enumerate(words, FIRST_WORD), *enumerate(signs, FIRST_PUNCTUATION)]
    return {token: chr(code) for code, token in numbered}


def _text(matches: list[re.Match[str]], code_of: dict[str, str]) -> Text:
    tokens = tuple(match.group() for match in matches)
    glued = tuple(match.start() > 0 and not match.string[match.start() - 1].isspace() for match in matches)
    codes = "".join(code_of.get(token, RARE) for token in tokens)
    plain = "".join(code for code, token in zip(codes, tokens, strict=True) if is_word(token))
    return Text(tokens, glued, codes, plain, words_of(codes), len(plain))
