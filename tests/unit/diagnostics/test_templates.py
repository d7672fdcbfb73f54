"""find_templates on corpora whose skeletons, slots, shares and ties are known because they were generated from them."""

import random
from collections.abc import Callable, Hashable

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.templates import SlotKind, Template, Templates, find_templates
from tether.diagnostics.templates.skeletons import WILD, align, fit, read_corpus

WAYS = ("Left", "Right", "Up", "Down")


def written(num_prompts: int, members: int, write: Callable[[int, random.Random], str], seed: int = 0) -> tuple[list[str], list[int]]:
    """`members` reasonings for each prompt, by a function of the prompt and of chance."""
    rng = random.Random(seed)
    prompts = [prompt for prompt in range(num_prompts) for _ in range(members)]
    return [write(prompt, rng) for prompt in prompts], prompts


def prose(rng: random.Random, length: int = 12) -> str:
    """Words that no other text has."""
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=9)) for _ in range(length))


def skeletons(found: Templates) -> list[str]:
    return [template.skeleton for template in found.templates]


def only(found: Templates) -> Template:
    (template,) = found.templates
    return template


def test_tied_and_noise_slots_of_one_template() -> None:
    """Six fixed words and three slots of one word: 6/9 template, 2/9 tied, 1/9 noise."""
    found = find_templates(*written(24, 8, lambda p, rng: f"I am at {p % 7}, goal at {p % 5 + 20}. So {rng.choice(WAYS)}"))
    template = only(found)
    assert template.skeleton == "I am at ⟨1⟩, goal at ⟨2⟩. So ⟨3⟩"
    assert (template.num_words, template.num_traces, template.share, template.num_prompts, template.prompt_share) == (6, 192, 1.0, 24, 1.0)
    assert [slot.agreement.kind for slot in template.slots] == [SlotKind.TIED, SlotKind.TIED, SlotKind.NOISE]
    assert [slot.number for slot in template.slots] == [1, 2, 3]
    assert [slot.num_fillers for slot in template.slots] == [7, 5, 4]
    assert [slot.mean_words for slot in template.slots] == [1.0, 1.0, 1.0]
    assert template.slots[0].agreement.strength == template.slots[1].agreement.strength == pytest.approx(1, abs=1e-9)
    assert abs(template.slots[2].agreement.strength) < 0.1
    words = found.words
    assert (words.template, words.tied, words.noise) == pytest.approx((6 / 9, 2 / 9, 1 / 9), abs=1e-9)
    assert words.unknown == 0 and words.rest == pytest.approx(0, abs=1e-9)


def test_fillers_and_their_shares() -> None:
    """Of 80 traces 40 go left, 20 right, 10 up, then four of two and two of one: the five most common are shown, equal ones by name."""
    endings = ["left"] * 40 + ["right"] * 20 + ["up"] * 10 + ["d1"] * 2 + ["d2"] * 2 + ["d3"] * 2 + ["d4"] * 2 + ["d5", "d6"]
    random.Random(1).shuffle(endings)
    (slot,) = only(find_templates([f"Now I will go {end}" for end in endings], [n // 8 for n in range(80)])).slots
    assert slot.num_fillers == 9
    assert slot.fillers == (("left", 0.5), ("right", 0.25), ("up", 0.125), ("d1", 0.025), ("d2", 0.025))


def test_shares_of_several_templates_and_of_the_rest() -> None:
    """Of every ten traces five follow one template, three another, two are prose: 5 * 5 and 3 * 4 fixed words of 5 * 6 + 3 * 6 + 2 * 12."""
    rng = random.Random(3)
    kinds = [
        lambda: f"Let me think first: {rng.choice(WAYS)} please",
        lambda: f"{rng.randint(1, 9)} boxes remain near {rng.choice(WAYS)} wall.",
        lambda: prose(rng),
    ]
    texts = [kinds[0 if n % 10 < 5 else 1 if n % 10 < 8 else 2]() for n in range(400)]
    found = find_templates(texts, [n // 10 for n in range(400)])
    assert skeletons(found) == ["Let me think first: ⟨1⟩ please", "⟨1⟩ boxes remain near ⟨2⟩ wall."]
    assert [template.share for template in found.templates] == [0.5, 0.3]
    assert [template.num_words for template in found.templates] == [5, 4]
    assert found.explained == pytest.approx(0.8)
    assert (found.words.template, found.words.noise, found.words.rest) == pytest.approx((37 / 72, 11 / 72, 24 / 72))


def test_templates_that_share_a_prefix_are_two() -> None:
    def write(_: int, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return f"Let me think. The box is next to {rng.choice(WAYS)} so I push it {rng.choice(WAYS)}"
        return f"Let me think. There must be a wall {rng.choice(WAYS)}; turn round towards {rng.choice(WAYS)}"

    found = find_templates(*written(20, 10, write))
    assert sorted(skeletons(found)) == [
        "Let me think. The box is next to ⟨1⟩ so I push it ⟨2⟩",
        "Let me think. There must be a wall ⟨1⟩; turn round towards ⟨2⟩",
    ]
    assert found.explained == 1


def test_a_long_shared_prefix_does_not_join_two_templates() -> None:
    """Seven words in common and four of each one's own."""
    tails = ("the box goes {} now", "a wall stands {} here")
    found = find_templates(
        *written(20, 10, lambda _, rng: "Let me think about the next step: " + rng.choice(tails).format(rng.choice(WAYS)))
    )
    assert sorted(skeletons(found)) == [f"Let me think about the next step: {tail.format('⟨1⟩')}" for tail in sorted(tails)]


def test_values_of_a_slot_are_not_templates() -> None:
    """Even where the filler is most often the same, one word more does not make a template of its own."""
    found = find_templates(*written(20, 10, lambda _, rng: f"I just try a way and see: {rng.choices(WAYS, (6, 2, 1, 1))[0]} then Up."))
    assert skeletons(found) == ["I just try a way and see: ⟨1⟩ then Up."]


def test_swapped_fillers_keep_the_word_between_them() -> None:
    """Up then Down against Down then Up: the word between stays fixed."""
    found = find_templates(*written(20, 10, lambda _, rng: "See: " + " then ".join(rng.sample(WAYS, 2)) + "."))
    assert skeletons(found) == ["See: ⟨1⟩ then ⟨2⟩."]


def test_long_and_optional_fillers() -> None:
    """A slot may hold several words that also occur in the skeleton, or none: then the empty filler is one of them."""
    places = ("", "with the key", "from the far end", "once again")
    found = find_templates(*written(30, 10, lambda _, rng: f"I must open {rng.choice(places)} the door and then leave now"))
    template = only(found)
    assert template.skeleton == "I must open ⟨1⟩ the door and then leave now"
    assert {filler for filler, _ in template.slots[0].fillers} == set(places)
    assert template.slots[0].num_fillers == 4


@pytest.mark.parametrize(
    ("opening", "length", "found"),
    [("we know", 3, 1), ("we know", 4, 0), ("now let us see", 7, 0), ("now let us see what", 45, 1), ("now let us see what", 46, 0)],
)
def test_long_slots(opening: str, length: int, found: int) -> None:
    """Two fixed words must be two in five of a trace; an unbroken phrase of five is enough where it is one in ten."""
    texts, prompts = written(20, 8, lambda _, rng: f"{opening} {prose(rng, length)}")
    assert skeletons(find_templates(texts, prompts)) == [f"{opening} ⟨1⟩"] * found


def test_long_slots_need_the_phrase_unbroken() -> None:
    """Each trace has the same five words in order, far apart: the one in ten of a phrase does not hold for them."""
    texts, prompts = written(20, 8, lambda _, rng: "".join(f"{word} {prose(rng, 4)} " for word in ("now", "let", "us", "see", "what")))
    assert find_templates(texts, prompts).templates == ()


def test_a_broken_phrase_does_not_count_as_one() -> None:
    """Ten of 170 traces have the words of the phrase, in order but apart, in 25 words."""
    texts, prompts = written(20, 8, lambda _, rng: f"now let us see what {prose(rng, 12)}")
    rng = random.Random(9)
    broken = ["".join(f"{word} {prose(rng, 4)} " for word in ("now", "let", "us", "see", "what")) for _ in range(10)]
    assert only(find_templates(texts + broken, prompts + list(range(10)))).num_traces == 160


def test_alignment_puts_words_into_the_slot_rather_than_beside_a_missing_word() -> None:
    assert align(f"ab{WILD}c", "axyc") == ([0, -1, 3], [[], [], [1, 2], []])
    assert align(f"{WILD}ab", "xyab") == ([2, 3], [[0, 1], [], []])
    assert align("abc", "abxc") == ([0, 1, 3], [[], [], [2], []])


def test_fit_asks_for_nine_in_ten() -> None:
    short, long = read_corpus(["go on now"] * 5 + ["go on then now"] * 5, [0, 1] * 5, 0.1).texts
    assert fit(long.codes, [short, long], [1, 9]) == fit(short.codes, [short, long], [1, 9]) == long.codes
    slot = f"{short.codes[:2]}{WILD}{short.codes[2]}"
    assert fit(long.codes, [short, long], [2, 8]) == fit(short.codes, [short, long], [2, 8]) == slot


def test_the_search_samples_traces_and_not_texts() -> None:
    """Half of 4000 traces have one text: so has about half of a sample of 1000 (standard deviation 14)."""
    corpus = read_corpus(["same"] * 2000 + [f"x{n}" for n in range(2000)], [n % 7 for n in range(4000)], 0.01)
    chosen = corpus.sample(1000)
    assert len(set(chosen.tolist())) == 1000
    assert sum(corpus.texts[text].tokens == ("same",) for text in corpus.text_of_T[chosen].tolist()) == pytest.approx(500, abs=56)


@pytest.mark.parametrize(
    ("text", "num_words"), [("don't stop", 2), ("it’s 3.5, or 1,000!", 4), ("snake_case _x", 2), ("我在 b", 3), ("x=-2;", 2)]
)
def test_what_is_a_word(text: str, num_words: int) -> None:
    template = only(find_templates([text] * 4, [0, 0, 1, 1]))
    assert (template.skeleton, template.num_words) == (text, num_words)


def test_equal_texts_have_no_slot() -> None:
    found = find_templates(["Go left, then (maybe) stop!"] * 30, [n // 5 for n in range(30)])
    assert only(found).skeleton == "Go left, then (maybe) stop!"
    assert only(found).slots == ()
    assert found.words.template == 1 and found.words.rest == 0
    assert found.explained == 1


def test_different_texts_have_no_template() -> None:
    found = find_templates(*written(30, 10, lambda _, rng: prose(rng)))
    assert found.templates == () and found.explained == 0
    assert found.words.rest == 1 and found.words.template == 0


def test_common_words_are_no_template() -> None:
    """Unrelated sentences over a small vocabulary of unequal frequencies share words in order, but too few of them."""
    vocabulary = [f"w{rank}" for rank in range(300)]
    weights = [1 / rank for rank in range(1, 301)]
    assert skeletons(find_templates(*written(40, 10, lambda _, rng: " ".join(rng.choices(vocabulary, weights, k=30))))) == []


def test_a_text_repeated_under_one_prompt_is_no_template() -> None:
    """Each prompt has its own text, always the same: that is reasoning tied to its input."""
    texts = [prose(random.Random(prompt)) for prompt in range(8) for _ in range(16)]
    assert find_templates(texts, [n // 16 for n in range(128)]).templates == ()
    spread = find_templates(texts, [n % 16 for n in range(128)])
    assert len(spread.templates) == 8 and all(template.share == 1 / 8 for template in spread.templates)


def test_texts_of_single_prompts_do_not_hide_a_template() -> None:
    """Eight prompts have a text of their own 24 times and the template twice: one is asked for, and it is the template."""
    own = [prose(random.Random(prompt)) for prompt in range(8) for _ in range(24)]
    shared = [f"well then we go {way} at once" for way in WAYS for _ in range(4)]
    found = find_templates(own + shared, [n // 24 for n in range(192)] + [n % 8 for n in range(16)], max_templates=1)
    assert [(template.skeleton, template.num_traces) for template in found.templates] == [("well then we go ⟨1⟩ at once", 16)]


def test_one_word_texts() -> None:
    found = find_templates(["yes", "no"] * 20, [n // 4 for n in range(40)])
    assert skeletons(found) == ["no", "yes"]
    assert [template.share for template in found.templates] == [0.5, 0.5]


def test_punctuation_alone_is_no_template() -> None:
    found = find_templates(*written(20, 5, lambda _, rng: f"{prose(rng, 1)}."))
    assert found.templates == ()


def test_near_duplicates_follow_their_template() -> None:
    """Each of 30 words is mangled with chance 2%: nearly half of the texts have a slip, the skeleton has none and explains nearly all."""
    clean = prose(random.Random(5), 30).split()

    def write(_: int, rng: random.Random) -> str:
        return " ".join(word if rng.random() > 0.02 else prose(rng, 1) for word in clean)

    found = find_templates(*written(25, 8, write))
    assert skeletons(found) == [" ".join(clean)]
    assert found.explained >= 0.99
    assert only(found).slots == ()


def test_strays_are_neither_template_nor_slot() -> None:
    """One trace in 20 has an extra word: 20 traces have 8 * 20 + 1 words, the odd one is the rest."""
    texts = ["one two three four " + ("oops " if n % 20 == 7 else "") + "five six seven eight" for n in range(200)]
    found = find_templates(texts, [n // 4 for n in range(200)])
    assert only(found).slots == () and only(found).share == 1
    assert (found.words.template, found.words.rest) == pytest.approx((160 / 161, 1 / 161))


@pytest.mark.parametrize("missing_every", [20, 4])
def test_one_word_may_be_missing(missing_every: int) -> None:
    """A word that one trace in twenty lacks is fixed, and those that lack it follow the template still; one trace in four: it is a slot."""
    texts = [f"take box number {n % 3} and put it {'' if n % missing_every == 0 else 'back '}home" for n in range(300)]
    template = only(find_templates(texts, [n // 6 for n in range(300)]))
    assert template.skeleton == f"take box number ⟨1⟩ and put it {'back' if missing_every == 20 else '⟨2⟩'} home"
    assert template.share == 1


def test_a_word_that_the_first_seed_lacks_joins_the_skeleton() -> None:
    """The seed is the most common text, which lacks a word that nine in ten of all have, with other fillers."""
    texts = ["take box one and put it home"] * 20 + [f"take box {prose(random.Random(n), 1)} and put it back home" for n in range(180)]
    assert skeletons(find_templates(texts, [n % 25 for n in range(200)])) == ["take box ⟨1⟩ and put it back home"]


@pytest.mark.parametrize(
    ("text", "skeleton"),
    [
        ("我在{0}，目标在{1}。所以向左", "我在⟨1⟩，目标在⟨2⟩。所以向左"),
        ("Я стою у {0}, цель у {1} 🎯", "Я стою у ⟨1⟩, цель у ⟨2⟩ 🎯"),
        ("don't panic; it costs {0}.5 and ({1}) more", "don't panic; it costs ⟨1⟩ and (⟨2⟩) more"),
        ("über_{0} naïve café  at\n\n {1}%", "⟨1⟩ naïve café at ⟨2⟩%"),
    ],
)
def test_scripts_and_spacing(text: str, skeleton: str) -> None:
    found = find_templates(*written(12, 10, lambda _, rng: text.format(rng.randint(1, 9), rng.randint(1, 9))))
    assert skeletons(found) == [skeleton]


def test_shares_are_of_all_traces_though_the_search_samples() -> None:
    """Of 3000 traces, more than the search looks at, 180 follow a template: exactly 6%. At a least share of 7% it is not reported."""
    rng = random.Random(2)
    texts = [f"I am stuck here with {rng.choice(WAYS)} again" if n % 50 < 3 else prose(rng, 6) for n in range(3000)]
    prompts = [n // 50 for n in range(3000)]
    assert [(t.skeleton, t.share) for t in find_templates(texts, prompts).templates] == [("I am stuck here with ⟨1⟩ again", 0.06)]
    assert find_templates(texts, prompts, min_share=0.06).templates != ()
    assert find_templates(texts, prompts, min_share=0.07).templates == ()


def test_max_templates() -> None:
    texts = [f"{'alpha beta gamma' if n % 3 else 'delta epsilon zeta'} {n % 4}" for n in range(120)]
    prompts = [n // 6 for n in range(120)]
    assert len(find_templates(texts, prompts).templates) == 2
    assert skeletons(find_templates(texts, prompts, max_templates=1)) == ["alpha beta gamma ⟨1⟩"]


def test_empty_reasoning_is_counted_and_left_out() -> None:
    texts = ["go on", "", "go on", " \n", "go on", "...", "go on", "go on"]
    found = find_templates(texts, [0, 0, 0, 1, 1, 1, 1, 2])
    assert (found.num_traces, found.num_empty, found.num_prompts) == (5, 3, 3)
    assert only(found).share == 1


@pytest.mark.parametrize("members", [8, 60])
def test_order_of_traces_and_names_of_prompts_do_not_matter(members: int) -> None:
    """Also where the search takes a sample of the traces (1440 of them) and the tie a sample of the prompts."""

    def write(prompt: int, rng: random.Random) -> str:
        if rng.random() < 0.3:
            return prose(rng, 3)
        return f"{rng.choice(('so', 'hm'))} box {prompt % 5} goes {rng.choice(WAYS)}" + rng.choice((" again we see", " now", ""))

    texts, prompts = written(24, members, write)
    expected = find_templates(texts, prompts)
    assert expected.templates
    names: dict[int, Hashable] = {prompt: f"prompt {prompt * 7919 % 24}" if prompt % 2 else (prompt, "x") for prompt in range(24)}
    for seed in range(2):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        assert find_templates([texts[n] for n in order], [names[prompts[n]] for n in order]) == expected


def test_prompts_that_share_texts_may_come_in_any_order() -> None:
    """Four texts in all, so most prompts begin with the same one."""
    texts, prompts = written(24, 4, lambda _, rng: f"let us go {rng.choice(WAYS)} now")
    expected = find_templates(texts, prompts)
    for seed in range(5):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        assert find_templates([texts[n] for n in order], [prompts[n] for n in order]) == expected


def test_choice_of_template_may_follow_the_prompt() -> None:
    by_prompt = find_templates(*written(12, 8, lambda p, _: "the box is stuck" if p % 2 else "we see a wall"))
    assert by_prompt.choice.kind is SlotKind.TIED and by_prompt.choice.strength == pytest.approx(1)
    by_chance = find_templates(*written(12, 8, lambda _, rng: rng.choice(("the box is stuck", "we see a wall"))))
    assert by_chance.choice.kind is SlotKind.NOISE


def test_partial_tie_divides_the_words() -> None:
    """Each prompt has two words of its own, used in turn: two of one prompt agree with chance 3/7, two of different prompts never."""
    texts = [f"the answer is w{prompt}{'xy'[member % 2]}" for prompt in range(20) for member in range(8)]
    found = find_templates(texts, [n // 8 for n in range(160)])
    (slot,) = only(found).slots
    assert slot.agreement.kind is SlotKind.TIED and slot.agreement.strength == pytest.approx(3 / 7)
    assert (found.words.tied, found.words.noise) == pytest.approx((3 / 28, 4 / 28))


def test_one_trace_per_prompt_cannot_tell() -> None:
    found = find_templates([f"we turn {WAYS[n % 4]} here" for n in range(60)], range(60))
    assert only(found).slots[0].agreement.kind is SlotKind.UNKNOWN
    assert found.words.unknown == pytest.approx(1 / 4) and found.words.noise == 0
    assert "25% in slots too rare to classify" in found.describe()


def test_description() -> None:
    """The choice: 12 of 108 pairs within prompts disagree, 180 of 2103 across, so the agreement is 1 - (12/108) / (180/2103) = -0.30."""
    texts, prompts = written(16, 4, lambda p, _: f"I go {WAYS[p % 4]} now")
    texts, prompts = [*texts, *["zzz"] * 3], [*prompts, 0, 1, 2]
    assert find_templates(texts, prompts).describe().splitlines() == [
        "1 template explains 96% of 67 traces under 16 prompts.",
        "Of the words 74% are template, 25% follow the prompt, 0% vary regardless of it, 1% belong to no template.",
        "Which template is used: noise (agreement -0.30, p 1.000).",
        "",
        " 95.5%  I go ⟨1⟩ now    (64 traces; 16 prompts, 100% of them)",
        "        ⟨1⟩ tied (agreement 1.00, p 0.005); 4 fillers: Down 25%, Left 25%, Right 25%, Up 25%",
    ]
    optional = find_templates(["so we go home", "we go home"] * 20, [n // 4 for n in range(40)]).describe()
    assert "(nothing) 50%" in optional and "Which template" not in optional
    long = find_templates(*written(9, 9, lambda _, rng: "one two three four five six " + prose(rng, 7))).describe()
    assert max(len(filler) for filler in long.splitlines()[-1].split("81 fillers: ")[1].split(" 1%, ")) == 40


@pytest.mark.parametrize(
    ("reasonings", "prompts", "options", "message"),
    [
        ([], [], {}, "at least one text; got nothing"),
        ("abc", [1, 2, 3], {}, "got one string"),
        (["a", "b"], [1], {}, "2 reasonings but 1 prompts"),
        (["a", None], [1, 2], {}, "reasoning 1 is NoneType"),
        (["a", "b"], [1, [2]], {}, "prompt 1 is list"),
        (["", " .. "], [1, 2], {}, "none of the 2 reasonings holds a word"),
        (["a", "b", ""], [1, 1, 2], {}, "one prompt"),
        (["a", "b"], [1, 2], {"min_share": 0}, "min_share is 0"),
        (["a", "b"], [1, 2], {"min_share": 1.5}, "min_share is 1.5"),
        (["a", "b"], [1, 2], {"min_share": float("nan")}, "min_share is nan"),
        (["a", "b"], [1, 2], {"max_templates": 0}, "max_templates is 0"),
    ],
)
def test_bad_input(reasonings: list[str], prompts: list[Hashable], options: dict[str, float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        find_templates(reasonings, prompts, **options)  # type: ignore[arg-type]
