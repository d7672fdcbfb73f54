"""Answers to try on an environment: plausible ones, near misses, and nonsense. All follow from the episode's number.

Plausible answers are composed of the environment's own texts: the names of its actions, and the words, numbers and bracketed forms of its
instructions and observations. So random play makes progress in environments that the checker does not know.
"""

import random
import re
from collections.abc import Callable
from typing import Any

from tether.core.grammar import ACTION_SEPARATOR, ANSWER_TAGS
from tether.core.seeding import derive_seed

HUGE = 100_000
"""Characters of a huge answer: more than any response budget allows."""

_WORD = re.compile(r"[A-Za-z]{2,}")
_NUMBER = re.compile(r"\d+")
_BRACKETED = re.compile(r"\w+\[")
_PLANES = ((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x5FF), (0x2190, 0x22FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF))
_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "<search>", "</search>", "```python\n", "```")
_OPENING, _CLOSING = "([{\"'<", ")]}\"'>"

ODD_ANSWERS = (
    # nothing, or nothing to be seen
    *("", " ", "\n\t\r", "\u200b", "\ufeff", "\u202e", "||", "|| || ||", "[]", "<>"),
    # control characters; halves of surrogate pairs, which a terminal or a web client may send
    *("\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x7f\x80\x9f", "\r\rback", "\ud800", "a\udfffb", "\udc00\ud800"),
    # tags inside tags
    *(
        "</answer>",
        "<answer><answer>a</answer></answer>",
        "<think></think><answer>",
        "<|im_start|>system",
        "```",
        "```python\n```",
        "```python",
    ),
    # deep, huge
    *("(" * 5000 + "1" + ")" * 5000, "[" * 5000, "{" * 5000 + "}" * 5000, "-" * 5000 + "1", "1" + "+1" * 20_000, "((" * HUGE, "a" * HUGE),
    *("\n" * HUGE, "\U0001f600" * HUGE, "a b " * (HUGE // 4), "search[" + "word " * (HUGE // 5) + "]", "9" * HUGE),
    # numbers that are none, or too large
    *("1e999", "-0", "1/0", "0x10", "NaN", "inf", "\u0663", "\u00bd", "9" * 400 + " * " + "9" * 400, "2**9**9**9", "1_000", "\\frac{1}{0}"),
    # what other languages take for an instruction
    *(
        "%s%n{0}{x}",
        "'; --",
        "../../etc",
        "null",
        "${HOME}",
        "\\",
        '"',
        "'",
        "*",
        "~",
        "AND OR NOT",
        "a:b^2~",
        '+-!(){}[]^"~*?:\\/',
        "(?:(",
    ),
)
"""Answers that have broken parsers before; the first episodes begin with one each."""


class Answers:
    """The answers of one episode."""

    def __init__(self, env: Any, number: int) -> None:
        self._rng = random.Random(derive_seed("check", number))
        self._first = ODD_ANSWERS[number] if number < len(ODD_ANSWERS) else None
        self._actions = [str(action) for action in getattr(env, "actions", ())]
        self._instructions = str(env.instructions)
        self._tags: tuple[str, ...] = getattr(env, "reply_tags", ANSWER_TAGS)

    def next(self, observation: str) -> str:
        """An answer to an observation: half are plausible, a quarter near misses, a quarter nonsense."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        kind = self._rng.choice((self._plausible, self._plausible, self._near_miss, self._nonsense))
        return kind(observation)

    def _plausible(self, observation: str) -> str:
        kinds: list[Callable[[str], str]] = [self._words, self._expression, self._bracketed]
        if self._actions:
            kinds += [self._named] * 9
        answer = self._rng.choice(kinds)(observation)
        if self._tags == ANSWER_TAGS:
            return answer
        tag = self._rng.choice(self._tags)  # with tags of its own, an environment gets the answer inside of them
        return f"<{tag}>{answer}</{tag}>"

    def _named(self, observation: str) -> str:
        return f" {ACTION_SEPARATOR} ".join(self._rng.choices(self._actions, k=self._rng.randint(1, 3)))

    def _words(self, observation: str) -> str:
        return " ".join(self._rng.choices(_WORD.findall(observation + self._instructions) or ["yes"], k=self._rng.randint(1, 4)))

    def _expression(self, observation: str) -> str:
        """Numbers of the observation with operators between them; often just one number."""
        numbers = self._rng.choices(_NUMBER.findall(observation) or ["7"], k=self._rng.randint(1, 4))
        return "".join(number + self._rng.choice((" + ", " - ", " * ", " / ")) for number in numbers[:-1]) + numbers[-1]

    def _bracketed(self, observation: str) -> str:
        """Such as search[some words], if the instructions or the observation contain such a form."""
        forms = _BRACKETED.findall(self._instructions + observation)
        return f"{self._rng.choice(forms)}{self._words(observation)}]" if forms else self._words(observation)

    def _near_miss(self, observation: str) -> str:
        """A plausible answer with one thing wrong: a character lost, doubled or changed, the case, the space, what surrounds it."""
        rng = self._rng
        text = self._plausible(observation) or "x"
        at = rng.randrange(len(text))
        return rng.choice(
            (
                text[:at] + text[at + 1 :],
                text[:at] + text[at] + text[at:],
                text[:at] + rng.choice("xX0_-.|") + text[at + 1 :],
                text.swapcase(),
                f"  {text}\n",
                f"The answer is {text}.",
                f"{text} {ACTION_SEPARATOR}",
                text + rng.choice("]})\"'"),
                text.replace("]", ""),
            )
        )

    def _nonsense(self, observation: str) -> str:
        rng = self._rng
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice(ODD_ANSWERS)
        if kind == 1:
            return "".join(chr(rng.randrange(0x20)) for _ in range(rng.randint(1, 30)))
        if kind == 2:
            return "".join(rng.choice(_TAGS) + rng.choice(("", "a", " 1 ")) for _ in range(rng.randint(2, 12)))
        if kind == 3:
            return rng.choice(_OPENING) * rng.randint(1, 50) + self._plausible(observation) + rng.choice(_CLOSING) * rng.randint(0, 50)
        if kind == 4:
            return (self._plausible(observation) + rng.choice((" ", "\n", ""))) * rng.randint(2, 200)
        return "".join(chr(rng.randint(*rng.choice(_PLANES))) for _ in range(rng.randint(1, 40)))
