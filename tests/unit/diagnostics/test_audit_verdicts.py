"""Verdicts on rollouts whose kind is known, because they are generated: prompts of real environments, reasonings that do or do not depend on
them. A scorer that knows nothing makes the model-free evidence stand alone; the embedded model scores a few.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tether import make_env
from tether.core.errors import BadInput
from tether.core.reasoning import VerdictCode
from tether.core.seeding import generator
from tether.diagnostics.audit import Audit, AuditOptions, AuditScorer, audit_sample, collect, load_scorer, to_document
from tether.diagnostics.rollouts import open_rollouts

Rng = np.random.Generator
Write = Callable[[str, Rng], str]

WAYS = ("Left", "Down", "Right", "Up")
OPENINGS = ("Okay.", "Let me see.", "Hmm.", "First,", "Right,", "So,", "Well,", "Now,")
LOOKS = ("careful", "simple", "quick", "clever", "safe", "direct", "patient", "bold")
STEPS = ("check the options", "look at the state", "weigh the risks", "plan ahead", "try the best move", "think twice", "compare ways")
GENERIC = (
    "I should think step by step.", "This needs some care.", "Let me consider what is asked.", "There may be a simple way.",
    "I will check the result at the end.", "It is best not to rush.", "One idea is to start from the end.", "Another idea is to guess.",
    "I have seen something like this before.", "The rules matter here.", "Let me write down what I know.", "That looks right to me.",
    "I can also try the opposite.", "A good plan saves time.", "The answer must have the right form.", "I am fairly sure now.",
)  # fmt: skip


def env_prompts(env: str, count: int) -> list[str]:
    played = make_env(env, instructions="plain")  # an example would be found in place of the task's own numbers
    return [f"{played.instructions}\n\n{played.reset(1000 + index).text}" for index in range(count)]


def near_alike(count: int) -> list[str]:
    """Prompts that differ in one number."""
    return [re.sub(r"Target: \d+", f"Target: {20 + index}", env_prompts("countdown", 1)[0]) for index in range(count)]


def _pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def sums(prompt: str, rng: Rng) -> str:
    """Tied: tries the numbers of the prompt in an order of its own."""
    found = re.search(r"Target: (\d+), nums: \[(.*)\]", prompt)
    assert found is not None
    target, listed = found.groups()
    numbers = [int(part) for part in listed.split(",")]
    tries = []
    for _ in range(int(rng.integers(2, 4))):
        a, b = (numbers[index] for index in rng.permutation(len(numbers))[:2])
        indicator, value = _pick(rng, (("+", a + b), ("-", a - b)))
        tries.append(f"{a} {indicator} {b} = {value}")
    return f"{_pick(rng, OPENINGS)} I need {target}. {_pick(rng, ('Try', 'Take', 'Maybe'))} {', then '.join(tries)}. {_pick(rng, GENERIC)}"


def places(prompt: str, rng: Rng) -> str:
    """Tied without a shared word: where the player and the goal stand on a drawn board."""
    rows = [row for row in prompt.splitlines() if row and set(row) <= set("P_OG#")]
    found = {indicator: (y, row.index(indicator)) for y, row in enumerate(rows) for indicator in "PG" if indicator in row}
    (y, x), (gy, gx) = found["P"], found["G"]
    ways = [way for way, wanted in (("Up", gy < y), ("Down", gy > y), ("Left", gx < x), ("Right", gx > x)) if wanted]
    return f"{_pick(rng, OPENINGS)} I am at ({y},{x}), goal at ({gy},{gx}). {_pick(rng, ('So', 'It is', 'I go'))} {_pick(rng, ways)}."


def terse(prompt: str, rng: Rng) -> str:
    """Tied and compressed: a few words that the prompt decides."""
    return re.sub(r"^\S+ ", "", places(prompt, generator("fixed"))).partition("goal")[0]


def topical(prompt: str, rng: Rng) -> str:
    """Tied: takes up words of the question among generic ones."""
    words = re.findall(r"\w+", prompt.splitlines()[-1])
    start = int(rng.integers(0, max(1, len(words) - 4)))
    return f"{_pick(rng, GENERIC)} {_pick(rng, OPENINGS)} {' '.join(words[start : start + 5])}. {_pick(rng, GENERIC)}"


def copied(prompt: str, rng: Rng) -> str:
    """Tied: the question again, and nothing else."""
    return prompt.splitlines()[-1]


def slots(prompt: str, rng: Rng) -> str:
    """Collapsed: a skeleton with noise in its slots."""
    return f"I take a {_pick(rng, LOOKS)} approach. First I {_pick(rng, STEPS)}, then I {_pick(rng, STEPS)}. So I go {_pick(rng, WAYS)}."


def invented(prompt: str, rng: Rng) -> str:
    """Collapsed: numbers that nobody gave."""
    a, b = (int(value) for value in rng.integers(2, 90, 2))
    return f"Let me try {a} + {b} = {a + b}. That is {_pick(rng, LOOKS)}, so I {_pick(rng, STEPS)} and use {b}."


def chatter(prompt: str, rng: Rng) -> str:
    """Collapsed without a skeleton: sentences that fit everywhere, in any order."""
    return " ".join(GENERIC[index] for index in rng.permutation(len(GENERIC))[: int(rng.integers(3, 7))])


def guess(prompt: str, rng: Rng) -> str:
    """Collapsed and short."""
    return f"I go {_pick(rng, WAYS)}."


def fixed(prompt: str, rng: Rng) -> str:
    """Low entropy: one text, now and then with another ending."""
    return "I think about it step by step and then I answer." + (" Done." if rng.random() < 0.05 else "")


def half(tied: Write, loose: Write, share: float = 0.5) -> Write:
    return lambda prompt, rng: tied(prompt, rng) if rng.random() < share else loose(prompt, rng)


def records(prompts: list[str], write: Write, samples: int, *, step: int | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generic records, rewards at random."""
    rng = generator("made rollouts", seed, write.__name__, str(step))
    for prompt in prompts:
        for _ in range(samples):
            record = {"prompt": prompt, "response": f"<think>{write(prompt, rng)}</think> <answer> 1 </answer>"}
            success = bool(rng.random() < 0.4)
            yield {**record, "reward": float(success), "success": success} | ({} if step is None else {"step": step})


def write_records(path: Path, made: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in made), encoding="utf-8")
    return path


class Ignorant:
    """A scorer that finds every text equally likely under every prompt."""

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        return -2.0 * len(reasoning)


@pytest.fixture(scope="module")
def tiny_judge() -> AuditScorer:
    return load_scorer("tiny", device="cpu")


@pytest.fixture
def blind(tiny_judge: AuditScorer) -> AuditScorer:
    return dataclasses.replace(tiny_judge, scorer=Ignorant())


def _audited(path: Path, judge: AuditScorer, **options: Any) -> Audit:
    chosen = AuditOptions(**{"bootstrap": 200, **options})
    return audit_sample(collect(open_rollouts(path), chosen), judge, chosen)


TIED, WEAK = VerdictCode.TIED, VerdictCode.WEAKLY_TIED
TEMPLATE, FIXED = VerdictCode.TEMPLATE_COLLAPSE, VerdictCode.LOW_ENTROPY_COLLAPSE
CASES = [
    ("countdown", sums, TIED),
    ("near alike", sums, TIED),
    ("frozen_lake", places, TIED),
    ("frozen_lake", terse, TIED),
    ("metamathqa", topical, TIED),
    ("searchqa", topical, TIED),
    ("searchqa", copied, TIED),
    ("frozen_lake", slots, TEMPLATE),
    ("metamathqa", slots, TEMPLATE),
    ("countdown", invented, TEMPLATE),
    ("near alike", invented, TEMPLATE),
    ("searchqa", chatter, TEMPLATE),
    ("sokoban", guess, TEMPLATE),
    ("metamathqa", fixed, FIXED),
    ("countdown", half(sums, slots), WEAK),
    ("frozen_lake", half(places, slots), WEAK),
    ("metamathqa", half(topical, fixed), WEAK),
]


def _prompts(env: str, count: int) -> list[str]:
    return near_alike(count) if env == "near alike" else env_prompts(env, count)


@pytest.mark.parametrize(("env", "write", "code"), CASES)
def test_words_alone_tell(env: str, write: Write, code: VerdictCode, blind: AuditScorer, tmp_path: Path) -> None:
    path = write_records(tmp_path / "rollouts.jsonl", records(_prompts(env, 12), write, 6))
    found = _audited(path, blind)
    unseen = code is TEMPLATE and found.verdict.code is VerdictCode.CANNOT_BE_TOLD and "with this judge" in found.verdict.reasons[0]
    assert found.verdict.code is code or unseen, found.verdict  # 72 reasonings leave a fifth possible now and then
    assert found.last.measurement is not None
    assert found.last.measurement.information.retrieval_acc == pytest.approx(1 / 12)  # total ties: exactly chance


@pytest.mark.parametrize(
    ("env", "write", "code"),
    [("countdown", sums, TIED), ("frozen_lake", guess, TEMPLATE), ("countdown", copied, TIED), ("frozen_lake", terse, TIED)],
)
def test_the_embedded_model_scores(env: str, write: Write, code: VerdictCode, tiny_judge: AuditScorer, tmp_path: Path) -> None:
    # Ten prompts leave an interval too wide for a collapse.
    count = 16 if code is TEMPLATE else 6
    found = _audited(write_records(tmp_path / "rollouts.jsonl", records(env_prompts(env, count), write, 4)), tiny_judge)
    assert found.verdict.code is code, found.verdict
    assert found.precision == "float32"


@pytest.mark.long
def test_one_sample_per_prompt_is_judged_and_said(tiny_judge: AuditScorer, tmp_path: Path) -> None:
    found = _audited(write_records(tmp_path / "r.jsonl", records(env_prompts("countdown", 24), copied, 1)), tiny_judge)
    assert found.verdict.code is TIED
    assert any("one reasoning per prompt" in note for note in found.notes)
    loose = _audited(write_records(tmp_path / "g.jsonl", records(env_prompts("frozen_lake", 30), guess, 1)), tiny_judge)
    assert loose.verdict.code is TEMPLATE and any("one reasoning per prompt" in reason for reason in loose.verdict.reasons)


def test_too_few_cannot_be_told(blind: AuditScorer, tmp_path: Path) -> None:
    few = _audited(write_records(tmp_path / "few.jsonl", records(env_prompts("frozen_lake", 3), slots, 3)), blind)
    assert few.verdict.code is VerdictCode.CANNOT_BE_TOLD and "Only 9 reasonings under 3 prompts" in few.verdict.reasons[0]
    single = _audited(write_records(tmp_path / "one.jsonl", records(env_prompts("frozen_lake", 20), slots, 1)), blind)
    assert single.verdict.code is VerdictCode.CANNOT_BE_TOLD and "one for each prompt" in single.verdict.reasons[0]


def test_nothing_at_all_is_refused_with_the_reason(blind: AuditScorer, tmp_path: Path) -> None:
    prompt = env_prompts("countdown", 1)
    with pytest.raises(BadInput, match="all 8 sampled reasonings answer one prompt"):
        _audited(write_records(tmp_path / "one.jsonl", records(prompt * 2, sums, 4)), blind)
    silent = [{"prompt": f"p{n}", "response": "Left"} for n in range(4)]
    with pytest.raises(BadInput, match=r"no response in scope holds reasoning: 4 of 4 responses hold no <think>.*pattern"):
        _audited(write_records(tmp_path / "silent.jsonl", silent), blind)


def test_a_weak_model_is_named_as_such(blind: AuditScorer, tmp_path: Path) -> None:
    found = _audited(write_records(tmp_path / "r.jsonl", records(env_prompts("countdown", 8), sums, 4)), blind)
    assert any("the model is a weak scorer of this text" in note for note in found.notes)


def test_steps_of_one_prompt_are_pooled_and_repeats_left_out(blind: AuditScorer, tmp_path: Path) -> None:
    prompts = env_prompts("countdown", 16)
    made = [record for step, prompt in enumerate(prompts) for record in records([prompt], sums, 4, step=step)]
    again = [
        {**record, "step": record["step"] + 1} for record in made if record["step"] == 3
    ]  # TRL writes a batch again when it is used twice
    found = _audited(write_records(tmp_path / "r.jsonl", [*made, *again]), blind)
    assert [window.window.name for window in found.windows] == ["0-7", "8-15"]
    assert found.verdict.code is TIED and any("4 reasonings were repeats" in note for note in found.notes)


def test_the_decline_is_dated(blind: AuditScorer, tmp_path: Path) -> None:
    prompts = env_prompts("countdown", 12)
    course = [sums, sums, sums, slots, slots, slots]
    made = [record for step, write in enumerate(course) for record in records(prompts, write, 4, step=10 * step)]
    found = _audited(write_records(tmp_path / "r.jsonl", made), blind)
    assert found.verdict.code is TEMPLATE
    assert found.trend is not None and found.trend.information is not None
    assert found.trend.information.began.window.name == "30" and found.trend.information.last_good.window.name == "20"
    assert found.trend.success is None
    document = to_document(found)
    assert document["trend"]["change_point"]["began"]["step"] == 30
    assert document["trend"]["regimes"][0] == "diverse reasoning" and document["trend"]["regimes"][-1] == "template collapse"
    json.dumps(document, allow_nan=False)


def test_same_every_time(blind: AuditScorer, tmp_path: Path) -> None:
    path = write_records(tmp_path / "r.jsonl", records(env_prompts("countdown", 40), sums, 3))
    first, second = (to_document(_audited(path, blind, prompts=6, samples=2)) for _ in range(2))
    assert first == second
    assert first["windows"][0]["measured"]["reasonings"] == 12
    assert to_document(_audited(path, blind, prompts=6, samples=2, seed=1))["samples"] != first["samples"]
    (tmp_path / "moved").mkdir()
    moved = to_document(_audited(path.rename(tmp_path / "moved" / "other.jsonl"), blind, prompts=6, samples=2))
    assert moved["windows"] == first["windows"], "what is drawn and shuffled depends on where the file lies"


def test_pictures_of_the_numbers_are_complete(tiny_judge: AuditScorer, tmp_path: Path) -> None:
    found = _audited(write_records(tmp_path / "r.jsonl", records(env_prompts("frozen_lake", 6), guess, 4)), tiny_judge)
    (window,) = to_document(found)["windows"]
    assert window["step"] is None and window["name"] == "all"
    assert {"mi_p_value", "retrieval_p_value", "mi_token_mean", "intervals"} <= window["measured"]["information"].keys()
    assert window["measured"]["information"]["mi_ceiling"] == pytest.approx(np.log(6))
    assert window["rewards"]["num_groups"] == 6 and 0 <= window["success"] <= 1


def test_a_third_in_an_empty_template_is_a_partial_collapse(blind: AuditScorer, tmp_path: Path) -> None:
    prompts = env_prompts("countdown", 12)
    made = [record for prompt in prompts for record in [*records([prompt], sums, 4), *records([prompt], slots, 2, seed=len(prompt))]]
    rng = generator("slots of each prompt")
    for record in made:
        if "I take a" in record["response"]:
            record["response"] = f"<think>{slots('', rng)}</think>"
    found = _audited(write_records(tmp_path / "r.jsonl", made), blind)
    assert found.verdict.effect is not None and 0.6 <= found.verdict.effect < 0.8
    assert found.verdict.code is WEAK and found.verdict.reasons[0].startswith("Partial collapse: 33% of the reasonings")


# ------------------------------------------------------------------------------- what a signal of dependence alone does not tell


@pytest.mark.parametrize("seed", range(4))
def test_a_tied_quarter_over_grids_is_no_collapse_whoever_judges(seed: int, blind: AuditScorer, tmp_path: Path) -> None:
    """Three quarters template, one quarter tied: the nearest reasoning shows it, whatever the judge can read. The same without that quarter is a
    collapse, or cannot be told."""
    for share, codes in ((0.25, {WEAK, VerdictCode.CANNOT_BE_TOLD}), (0.0, {TEMPLATE, VerdictCode.CANNOT_BE_TOLD})):
        made = records(env_prompts("frozen_lake", 16), half(places, slots, share), 8, seed=seed)
        found = _audited(write_records(tmp_path / "r.jsonl", made), blind)
        nearest = next(item for item in found.verdict.evidence if item.name == "nearest")
        assert found.verdict.code in codes and nearest.counts == (share > 0), found.verdict


def test_reasoning_for_the_neighbouring_prompt_is_called_misplaced(blind: AuditScorer, tmp_path: Path) -> None:
    for env, write in (("countdown", sums), ("searchqa", copied)):
        prompts = env_prompts(env, 12)
        neighbour = dict(zip(prompts, [*prompts[1:], prompts[0]], strict=True))
        made = list(records(prompts, write, 4))
        for record in made:  # what was written for a prompt stands beside the one before it
            record["prompt"] = next(prompt for prompt, other in neighbour.items() if other == record["prompt"])
        found = _audited(write_records(tmp_path / "r.jsonl", made), blind)
        assert found.verdict.code is VerdictCode.MISPLACED, (env, found.verdict)
        assert "the words show that" in found.verdict.reasons[0] and "fit one and the same other prompt better" in found.verdict.reasons[0]
        assert found.verdict.effect is not None and found.verdict.effect >= 0.6  # it can be predicted from its prompt


class Paired:
    """A scorer that knows which prompt each reasoning stands beside, whatever the words say: a policy that learned the wrong pairs."""

    def __init__(self, pairs: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self._pairs = pairs

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        return (-1.0 if (tuple(prompt), tuple(reasoning)) in self._pairs else -2.0) * len(reasoning)


def test_scores_and_words_that_disagree_are_said(tiny_judge: AuditScorer, tmp_path: Path) -> None:
    prompts = env_prompts("countdown", 12)
    beside = dict(zip(prompts, [prompts[-1], *prompts[:-1]], strict=True))
    made = [{**record, "prompt": beside[record["prompt"]]} for record in records(prompts, sums, 4)]
    path = write_records(tmp_path / "r.jsonl", made)
    encode = tiny_judge.tokenizer.encode
    pairs = {
        (
            tuple(encode(f"{record['prompt']}<think>", add_special_tokens=False)),
            tuple(encode(record["response"][len("<think>") : record["response"].index("</think>")], add_special_tokens=False)),
        )
        for record in made
    }
    found = _audited(path, dataclasses.replace(tiny_judge, scorer=Paired(pairs)))
    assert found.verdict.code is VerdictCode.MISPLACED
    assert found.verdict.reasons[0].startswith("The model's scores tie the reasonings to their prompts, yet the words of 100% fit")
    assert found.information.retrieval_acc == 1.0
    at_home = _audited(write_records(tmp_path / "h.jsonl", records(prompts, sums, 4)), dataclasses.replace(tiny_judge, scorer=Ignorant()))
    assert at_home.verdict.code is TIED and at_home.document()["windows"][0]["measured"]["elsewhere"]["words"]["share"] < 0.1


GERMAN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben")


def german(prompt: str, rng: Rng) -> str:
    """Tied, in a language that the scorer cannot read, without a word of the prompt."""
    rows = [row for row in prompt.splitlines() if row and set(row) <= set("P_OG#")]
    (y, x), (gy, gx) = ((number, row.index(sign)) for sign in "PG" for number, row in enumerate(rows) if sign in row)
    ways = [way for way, wanted in (("oben", gy < y), ("unten", gy > y), ("links", gx < x), ("rechts", gx > x)) if wanted]
    return f"Ich stehe in {GERMAN[y]} {GERMAN[x]}, Ziel {GERMAN[gy]} {GERMAN[gx]}: nach {' und '.join(ways)}."


def shuffled(write: Write) -> Write:
    """The same words in an order of chance."""

    def shuffle(prompt: str, rng: Rng) -> str:
        words = write(prompt, rng).split()
        return " ".join(words[index] for index in rng.permutation(len(words)))

    return shuffle


def ordered(prompt: str, rng: Rng) -> str:
    """Tied by nothing but the order of four words."""
    ways = [WAYS[index] for index in generator("order", prompt).permutation(4)]
    return f"{_pick(rng, OPENINGS)} I go {', then '.join(ways)}."


class Illiterate(Ignorant):
    """A scorer to which every text is a surprise, as a small model is to shuffled words."""

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        return -9.0 * len(reasoning)


@pytest.mark.parametrize(("write", "scorer"), [pytest.param(german, None, marks=pytest.mark.long), (shuffled(places), Illiterate())])
def test_a_scorer_that_cannot_read_does_not_call_it_collapse(
    write: Write, scorer: Illiterate | None, tiny_judge: AuditScorer, tmp_path: Path
) -> None:
    judge = tiny_judge if scorer is None else dataclasses.replace(tiny_judge, scorer=scorer)
    found = _audited(write_records(tmp_path / "r.jsonl", records(env_prompts("frozen_lake", 24), write, 1)), judge, prompts=9, samples=8)
    assert found.verdict.code is VerdictCode.CANNOT_BE_TOLD, found.verdict
    why = "It cannot be told with this judge: under every prompt it finds the text no likelier than counts of its tokens"
    assert any(reason.startswith(why) for reason in found.verdict.reasons), found.verdict
    measured = found.document()["windows"][0]["measured"]
    assert not measured["scorer"]["is_read"] and measured["scorer"]["nats"] > measured["scorer"]["unigram_nats"]


def test_a_scorer_that_reads_may_call_it_collapse(blind: AuditScorer, tmp_path: Path) -> None:
    found = _audited(write_records(tmp_path / "r.jsonl", records(env_prompts("frozen_lake", 26), german, 1)), blind)
    assert found.last.measurement is not None and found.last.measurement.is_read  # 2 nats a token, less than the counts
    assert found.verdict.code is TEMPLATE


@pytest.mark.parametrize(("write", "code"), [(german, TIED), (shuffled(sums), TIED), (ordered, WEAK)])
def test_several_reasonings_of_a_prompt_need_no_reader(write: Write, code: VerdictCode, blind: AuditScorer, tmp_path: Path) -> None:
    prompts = env_prompts("frozen_lake" if write is german else "countdown", 12)
    found = _audited(write_records(tmp_path / "r.jsonl", records(prompts, write, 4)), blind)
    assert found.verdict.code is code, found.verdict


def _emptied(made: list[dict[str, Any]], share: float, response: str) -> list[dict[str, Any]]:
    """So many of every ten responses replaced."""
    return [record if index % 20 >= share * 20 else {**record, "response": response} for index, record in enumerate(made)]


@pytest.mark.parametrize(
    ("share", "response", "code", "words"),
    [
        (0.05, "<think> </think> 1", TIED, None),
        (0.5, "<think> </think> 1", WEAK, "50% of the responses have blank reasoning, which depends on nothing; the others show 100%"),
        (0.9, "<think> </think> 1", WEAK, "90% of the responses have blank reasoning"),
        (0.95, "<think> </think> 1", FIXED, "95% of the responses have blank reasoning"),
        (0.5, "1", TIED, "50% of the responses hold no reasoning that can be read (120 hold no <think> ... </think>)"),
        (
            0.9,
            "<think> on and on",
            VerdictCode.CANNOT_BE_TOLD,
            "90% of the responses hold no reasoning that can be read (216 open a think tag",
        ),
    ],
)
def test_responses_without_reasoning_are_part_of_the_verdict(
    share: float, response: str, code: VerdictCode, words: str | None, blind: AuditScorer, tmp_path: Path
) -> None:
    made = _emptied(list(records(env_prompts("countdown", 12), sums, 20)), share, response)
    found = _audited(write_records(tmp_path / "r.jsonl", made), blind)
    assert found.verdict.code is code, found.verdict
    if words is None:
        assert "The model finds" in found.verdict.reasons[0]
    else:
        assert found.verdict.reasons[0].startswith(words), found.verdict.reasons
    assert sum(found.document()["windows"][0]["missing"].values()) == round(share * 240)
