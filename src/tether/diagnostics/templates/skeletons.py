"""Which word sequences reasonings share: texts as words, and a greedy search for skeletons around typical reasonings.

A word is a run of letters and digits (a number with its decimals, a word with its apostrophe), or one sign of a script written without
spaces; other signs are punctuation, which anchors alignments and is printed but never counted. Every token becomes one character, so
that whole reasonings can be compared by rapidfuzz's bit-parallel string routines. Words too rare to belong to any template that is
asked for become one RARE character. Prompts are numbered by the reasonings they have, not by their names, and texts are sorted: the result
depends on neither the order of the reasonings, nor the type of the prompts, nor Python's hash seed.

The search takes one seed at a time: the reasoning with the most common word pairs. The other reasonings are ranked by the longest common
subsequence with it. For each of a few levels of similarity, the words of the seed that at least nine in ten reasonings of that level
have in the same place make a skeleton; the best one has the largest n K^2, with K words and n reasonings that hold them in order. With
n K alone two templates that share more words at their start than they differ in would become one; squared, a skeleton that fits half as
many reasonings is preferred if it is longer by the square root of two, while four directions in a one-word slot stay one slot. Reasonings of a
skeleton are set aside and the search continues with the rest, until enough are found or too many seeds in a row give no skeleton.

Alignment is by edit distance with a wild card at every slot, so that a word stands in a slot rather than shifting its neighbours.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import LCSseq, Levenshtein
from rapidfuzz.process import cdist

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
    common = sorted(token for token, count in frequency.items() if count >= max(2.0, rare_below * len(traces)))
    words, signs = ([token for token in common if is_word(token) is wanted] for wanted in (True, False))
    codes = {token: chr(code) for code, token in (*enumerate(words, FIRST_WORD), *enumerate(signs, FIRST_PUNCTUATION))}
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


def _text(matches: list[re.Match[str]], code_of: dict[str, str]) -> Text:
    tokens = tuple(match.group() for match in matches)
    glued = tuple(match.start() > 0 and not match.string[match.start() - 1].isspace() for match in matches)
    codes = "".join(code_of.get(token, RARE) for token in tokens)
    plain = "".join(code for code, token in zip(codes, tokens, strict=True) if is_word(token))
    return Text(tokens, glued, codes, plain, words_of(codes), len(plain))


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SUPPORT = 0.9
"""Share of a template's traces that must have a word for it to be fixed, and of the fixed words a trace must have to follow it."""
SPARE_ONE = 5
"""From this many fixed words on, a trace may lack one and still follow the template."""
COVERAGE = 0.4
"""Least share of a trace's words that the skeleton must account for. Unrelated prose shares its articles, which is less than this."""
PHRASE, PHRASE_COVERAGE = 5, 0.1
"""The smaller share is enough for a trace that has the skeleton's longest phrase unbroken, if it is this many words: no accident."""
LEVELS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
SAME_FAMILY = 0.7
"""A reasoning that has this share of its words, rare ones included, in common with a seed that led nowhere is not tried as a seed."""
MAX_FAILURES = 20
MAX_REFINEMENTS = 5


@dataclass(frozen=True, slots=True)
class Candidates:
    """M distinct reasonings of the sample."""

    texts: list[Text]
    weights: Floats
    """[M] traces of each."""
    prompts: list[frozenset[int]]
    """The prompts each came from."""

    def subset(self, chosen: Bools) -> "Candidates":
        index = np.flatnonzero(chosen).tolist()
        return Candidates([self.texts[m] for m in index], self.weights[chosen], [self.prompts[m] for m in index])


def find_skeletons(candidates: Candidates, min_traces: float, max_templates: int) -> list[str]:
    """Skeletons as codes with WILD at the slots, each held by at least `min_traces` of the sample under two prompts or more."""
    found: list[str] = []
    failures = 0
    untried = np.array([bool(text.words) for text in candidates.texts])
    typical = _typicality(candidates)
    while untried.any() and len(found) < max_templates and failures < MAX_FAILURES:
        first = int(np.argmax(np.where(untried, typical, -1.0)))
        seed = candidates.texts[first]
        common = _lcs(seed.words, candidates.texts)
        similar = common / np.array([max(len(seed.words), len(text.words)) for text in candidates.texts])
        skeleton = _grow(seed, similar, candidates, min_traces)
        if skeleton is None:
            failures += 1
            untried &= common / np.array([max(seed.num_words, text.num_words) for text in candidates.texts]) < SAME_FAMILY
            untried[first] = False
            continue
        found.append(skeleton)
        failures = 0
        left = ~follows(skeleton, candidates.texts)
        candidates, untried, typical = candidates.subset(left), untried[left], typical[left]
    return found


def follows(skeleton: str, texts: Sequence[Text]) -> Bools:
    """Which texts hold nearly all of the skeleton's words, in order, and little enough else."""
    return shared_words(skeleton, texts) > 0


def shared_words(skeleton: str, texts: Sequence[Text]) -> Floats:
    """Words of the skeleton that each text holds in order; 0 for texts that do not follow it."""
    words = words_of(skeleton)
    lcs = _lcs(words, texts)
    least = min(SUPPORT * len(words), len(words) - (len(words) >= SPARE_ONE))
    phrase = max((words_of(run) for run in skeleton.split(WILD)), key=lambda run: (len(run), run))
    coverage = [PHRASE_COVERAGE if len(phrase) >= PHRASE and phrase in text.plain else COVERAGE for text in texts]
    enough = (lcs >= least) & (lcs >= np.array(coverage) * np.array([text.num_words for text in texts]))
    return np.where(enough, lcs, 0.0)


def align(skeleton: str, codes: str) -> tuple[list[int], list[list[int]]]:
    """Where a text has each of the F fixed tokens (-1: nowhere), and the positions of the tokens in each of the F + 1 gaps around them."""
    rank, fixed = [], 0
    for code in skeleton:
        rank.append(fixed)
        fixed += code != WILD
    rank.append(fixed)
    places = [-1] * fixed
    gaps: list[list[int]] = [[] for _ in range(fixed + 1)]
    for step in Levenshtein.opcodes(skeleton, codes):
        start, end, low, high = step.src_start, step.src_end, step.dest_start, step.dest_end
        if step.tag == "equal":
            places[rank[start] : rank[start] + end - start] = range(low, high)
        elif low < high:
            wild = skeleton.find(WILD, start, end)
            gaps[rank[start if wild < 0 else wild]].extend(range(low, high))
    return places, gaps


def _grow(seed: Text, similar: Floats, candidates: Candidates, min_traces: float) -> str | None:
    """The best skeleton around a seed, or None if no level gives one that enough traces follow."""
    near = similar >= LEVELS[-1]
    near_similar, near_weights = similar[near], candidates.weights[near]
    frame = seed.codes.replace(RARE, WILD)
    texts = candidates.subset(near).texts
    has_MF = np.array([[place >= 0 for place in align(frame, text.codes)[0]] for text in texts])
    best, best_score = None, 0.0
    for skeleton in dict.fromkeys(
        _masked(frame, near_weights[level] @ has_MF[level] / near_weights[level].sum())
        for level in (near_similar >= least for least in LEVELS)
        if level.any()
    ):
        score = _score(skeleton, candidates, min_traces)
        if score > best_score:
            best, best_score = skeleton, score
    return best and _refine(best, candidates, min_traces)


def _score(skeleton: str, candidates: Candidates, min_traces: float) -> float:
    if not words_of(skeleton):
        return 0.0
    members = follows(skeleton, candidates.texts)
    num_traces = float(candidates.weights[members].sum())
    prompts = frozenset().union(*(candidates.prompts[m] for m in np.flatnonzero(members)))
    return num_traces * len(words_of(skeleton)) ** 2 if num_traces >= min_traces and len(prompts) >= 2 else 0.0


def _refine(skeleton: str, candidates: Candidates, min_traces: float) -> str | None:
    """Fit the skeleton to the traces that follow it: words few of them have go, words nearly all have and the seed had not come in."""
    for _ in range(MAX_REFINEMENTS):
        members = candidates.subset(follows(skeleton, candidates.texts))
        fitted = fit(skeleton, members.texts, members.weights.tolist())
        if fitted == skeleton:
            break
        if not _score(fitted, candidates, min_traces):
            return None
        skeleton = fitted
    return skeleton


def fit(skeleton: str, texts: Sequence[Text], weights: Sequence[float]) -> str:
    """The skeleton with the words that enough of the weighted texts have: those few have become slots, those nearly all have join it."""
    aligned = [align(skeleton, text.codes) for text in texts]
    enough = SUPPORT * sum(weights)
    fixed = skeleton.replace(WILD, "")
    pieces = []
    for gap in range(len(fixed) + 1):
        fillers: defaultdict[str, float] = defaultdict(float)
        for text, weight, (_, gaps) in zip(texts, weights, aligned, strict=True):
            fillers["".join(text.codes[place] for place in gaps[gap])] += weight
        filler, count = max(fillers.items(), key=lambda item: (item[1], item[0]))
        pieces.append(filler if count >= enough and RARE not in filler else WILD)
        if gap < len(fixed):
            support = sum(weight for weight, (places, _) in zip(weights, aligned, strict=True) if places[gap] >= 0)
            pieces.append(fixed[gap] if support >= enough else WILD)
    return _joined(pieces)


def _masked(frame: str, support: Floats) -> str:
    """The frame with its words of low support turned into slots."""
    shares = iter(support.tolist())
    return _joined([WILD if code == WILD or next(shares) < SUPPORT else code for code in frame])


def _joined(pieces: list[str]) -> str:
    """Neighbouring slots are one."""
    joined = ""
    for piece in pieces:
        joined += "" if piece == WILD and joined.endswith(WILD) else piece
    return joined


def _lcs(words: str, texts: Sequence[Text]) -> Floats:
    lengths: Floats = cdist([words], [text.words for text in texts], scorer=LCSseq.similarity, dtype=np.float64)[0]
    return lengths


def _typicality(candidates: Candidates) -> Floats:
    """[M] mean number of traces that share a pair of neighbouring words with each text; its ends count as words, rare words as unshared."""
    pairs = [set(zip(WILD + text.plain, text.plain + WILD, strict=True)) for text in candidates.texts]
    shared: Counter[tuple[str, str]] = Counter()
    for own, weight in zip(pairs, candidates.weights.tolist(), strict=True):
        for pair in own:
            shared[pair] += weight
    return np.array([sum(shared[pair] for pair in own if RARE not in pair) / len(own) for own in pairs])
