"""Names built from syllables by rule, in several styles, so that names of one people sound alike and no name is used twice.

A word is onset + vowel + middle (+ vowel + middle) + ending, where middles stand between vowels and endings begin with one: whatever is
drawn can be pronounced. People share given names and family names, as people do, but no two have the same full name.
"""

import random
from dataclasses import dataclass

from tether.envs.searchqa.world.words import ADJECTIVES, NOUNS


@dataclass(frozen=True, slots=True)
class Style:
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


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.split())


STYLES = (
    Style(
        onsets=_parts("V L M S R N D C Th Fl Al El Cal"),
        vowels=_parts("a e i o"),
        middles=_parts("l r n v s m ss nd lv rr"),
        places=_parts("iel ova anthe ossa ireth emia avelle"),
        families=_parts("anti elli ovar idane essin orel"),
        men=_parts("io an eto is or"),
        women=_parts("ia ena ara elle isa"),
        things=_parts("ine onda iva ume ael"),
    ),
    Style(
        onsets=_parts("K G Br Dr T H Sk Gr B V Tr St"),
        vowels=_parts("a o u e"),
        middles=_parts("rk ld g nd rg lk rn d st gg"),
        places=_parts("holm urg ensk ovik arsk erhus und"),
        families=_parts("ussen ak erk olt ovar ensen"),
        men=_parts("ar ulf ek or und"),
        women=_parts("a hild run ika erta"),
        things=_parts("orn usk and okk err"),
    ),
    Style(
        onsets=_parts("Y Sh Z Q As Iz J Kh Am Ras"),
        vowels=_parts("a i u ee"),
        middles=_parts("m r sh z n q l dh f b"),
        places=_parts("abad ira amun ezh uara oum"),
        families=_parts("ari ouz imi adeen uq avi"),
        men=_parts("im ad eel uf on"),
        women=_parts("a ira een ula iyah"),
        things=_parts("ash ul ima ezar oud"),
    ),
    Style(
        onsets=_parts("P W T Br Pen Gw L M N Tren C Gl"),
        vowels=_parts("e i o y"),
        middles=_parts("n w dd l th rr b d nn g"),
        places=_parts("wick ennow arth eford ynne icombe owan"),
        families=_parts("ock awell ydd enner arrow ewin"),
        men=_parts("en yn oc ard ith"),
        women=_parts("wen a eth ys ora"),
        things=_parts("el ock enth yr och"),
    ),
    Style(
        onsets=_parts("P T Ah M K W H N Kal Tam L R"),
        vowels=_parts("a o u i"),
        middles=_parts("k t m n h p l w nk"),
        places=_parts("apo unga ihiro oaka amura enui"),
        families=_parts("anaka ole oto umai ehua iri"),
        men=_parts("o aki ane uro iko"),
        women=_parts("ani ua emi ole ina"),
        things=_parts("oma iku aro unu ehe"),
    ),
)


UNFIT = ("nig", "fag", "rape", "cunt", "kunt", "fuk", "shit", "dik", "tit", "cum", "slut", "kok", "nazi")
"""Strings of letters no name may hold."""

LONGER = 0.2
"""Share of words with one more syllable."""


class Namer:
    """Hands out names, each once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        pairs = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
        rng.shuffle(pairs)
        self._pairs = iter(pairs)
        self._given = {(style, sex): self._pool(style, sex, 34) for style in STYLES for sex in ("men", "women")}
        self._family = {style: self._pool(style, "families", 110) for style in STYLES}

    def word(self, style: Style, endings: str, form: str = "{}") -> str:
        """A new word of a style, put into a form such as "Lake {}"."""
        while True:
            word = self._spell(style, endings)
            if word.lower() not in self._taken and not any(letters in word.lower() for letters in UNFIT):
                self._taken.add(word.lower())
                return form.format(word)

    def pair(self) -> tuple[str, str]:
        """An adjective and a noun that no other thing is called after."""
        return next(self._pairs)

    def person(self, style: Style, sex: str) -> str:
        """A new full name."""
        while True:
            name = f"{self._rng.choice(self._given[style, sex])} {self._rng.choice(self._family[style])}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _pool(self, style: Style, endings: str, size: int) -> list[str]:
        return [self.word(style, endings) for _ in range(size)]

    def _spell(self, style: Style, endings: str) -> str:
        rng = self._rng
        syllables = [rng.choice(style.onsets), rng.choice(style.vowels), rng.choice(style.middles)]
        if rng.random() < LONGER:
            syllables += [rng.choice(style.vowels), rng.choice(style.middles)]
        return "".join(syllables) + rng.choice(getattr(style, endings))
