"""Names built from syllables by rule, in several styles, so that names of one people sound alike and no name is used twice.

A word is onset + vowel + middle (+ vowel + middle) + ending, where middles stand between vowels and endings begin with one: whatever is
drawn can be pronounced. People share given names and family names, as people do, but no two have the same full name.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from tether.envs.dataset import read_packaged
from tether.envs.searchqa.world.schema import PACKAGE


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How the words of one people sound."""

    onsets: tuple[str, ...]
    vowels: tuple[str, ...]
    middles: tuple[str, ...]
    places: tuple[str, ...]
    """Endings of towns and lands."""
    families: tuple[str, ...]
    """Endings of family names."""
    men: tuple[str, ...]
    women: tuple[str, ...]
    things: tuple[str, ...]
    """Endings of rivers, mountains, instruments and beasts."""


_NAMES = read_packaged(PACKAGE, "names.toml")
STYLES = tuple(NameStyle(**{part: tuple(syllables) for part, syllables in style.items()}) for style in _NAMES["styles"])
UNFIT = tuple(_NAMES["unfit"])
"""Strings of letters that no name may contain."""
WORDS: Mapping[str, tuple[str, ...]] = {name: tuple(words) for name, words in read_packaged(PACKAGE, "words.toml").items()}
"""Plain words by topic: what towns make, what ships are called after, what beasts eat."""

LONGER = 0.2
"""Share of words with one more syllable."""


class Namer:
    """Hands out names, each once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        pairs = [(adjective, noun) for adjective in WORDS["adjectives"] for noun in WORDS["nouns"]]
        rng.shuffle(pairs)
        self._pairs = iter(pairs)
        self._given = {(style, sex): self._pool(style, sex, 34) for style in STYLES for sex in ("men", "women")}
        self._family = {style: self._pool(style, "families", 110) for style in STYLES}

    def word(self, style: NameStyle, endings: str, form: str = "{}") -> str:
        """A new word of a style, put into a form such as "Lake {}"."""
        while True:
            word = self._spell(style, endings)
            if word.lower() not in self._taken and not any(letters in word.lower() for letters in UNFIT):
                self._taken.add(word.lower())
                return form.format(word)

    def pair(self) -> tuple[str, str]:
        """An adjective and a noun that no other thing is called after."""
        return next(self._pairs)

    def person(self, style: NameStyle, sex: str) -> str:
        """A new full name."""
        while True:
            name = f"{self._rng.choice(self._given[style, sex])} {self._rng.choice(self._family[style])}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _pool(self, style: NameStyle, endings: str, size: int) -> list[str]:
        return [self.word(style, endings) for _ in range(size)]

    def _spell(self, style: NameStyle, endings: str) -> str:
        rng = self._rng
        syllables = [rng.choice(style.onsets), rng.choice(style.vowels), rng.choice(style.middles)]
        if rng.random() < LONGER:
            syllables += [rng.choice(style.vowels), rng.choice(style.middles)]
        return "".join(syllables) + rng.choice(getattr(style, endings))
