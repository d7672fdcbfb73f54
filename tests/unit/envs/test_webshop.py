"""What an answer does and what an episode pays, on a small shop written by hand; options, splits, determinism."""

import json
import math
import random
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.types import Step
from tether.envs.registry import make_env
from tether.envs.splits import split_of
from tether.envs.webshop.env import NOTHING_DONE, WebShop, WebShopOptions, read_action
from tether.envs.webshop.products import Catalogue, Goal, Product

LAMP = Product(
    asin="B0LAMP0001",
    title="Elmorra Reading Lamp",
    category="garden",
    query="desk lamps",
    product_category="Home › Lighting › Desk Lamps",
    description="A lamp with touch control.",
    prices=(29.99,),
    options={"color": ("black", "honey oak"), "size": ("small", "large")},
    attributes=("touch control", "height adjustable"),
    instruction="Find me height adjustable desk lamps with touch control",
    instruction_attributes=("height adjustable", "touch control"),
)
TEA = Product("B0TEA00001", "Herbal Tea", "grocery", "herbal tea", "Food › Tea", prices=(4.0,))
SHOP = Catalogue([LAMP, TEA])
GOAL = Goal(LAMP, "Find me a lamp", ("height adjustable", "touch control"), (("color", "honey oak"), ("size", "large")), 40.0)
HEAD = "Instruction: [SEP] Find me a lamp [SEP] Back to Search"


def shop(**options: object) -> WebShop:
    env = WebShop(WebShopOptions(**{"max_turns": 20} | options), catalogue=SHOP, generator=lambda seed, split: GOAL)
    env.reset(0)
    return env


def play(env: WebShop, *actions: str) -> Step:
    for action in actions:
        step = env.step(action)
    return step


def page(step: Step) -> str:
    """The page without turn line and actions."""
    return step.observation.text.partition("\n")[2].partition("\nAvailable actions:")[0]


# --- actions that do nothing ---


@pytest.mark.parametrize(
    "answer",
    ["", "buy now", "click", "click[]", "search[]", "Click[features]", "SEARCH[lamp]", "click[search]", "click[b0lamp0001]", "click[ features]",
     "click[attributes]", "click[next >]", "search[a\nb]", "go search[lamp]", "search[a[b]]", "click[sm]", "\ud800"],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(answer: str) -> None:
    env = shop()
    before = play(env, "search[lamp]", "click[b0lamp0001]", "click[large]")
    step = env.step(answer)
    assert step.info["valid"] is False
    assert step.reward == 0
    assert step.observation.text == before.observation.text.replace("Turn 4 of 20.", f"Turn 5 of 20.\n{NOTHING_DONE}")
    assert env.step("click[buy now]").info["r_option"] == 0.5


def test_the_search_button_cannot_be_clicked() -> None:
    assert shop().step("click[search]").info["valid"] is False


@pytest.mark.parametrize("answer", ["  search[lamp] ", "search[lamp] please", "search[LAMP]", "search[the lamp + (rug OR) -x ~ \"q' \\]"])
def test_what_is_read_as_a_search(answer: str) -> None:
    step = play(shop(), answer)
    assert step.info["valid"] is True
    assert "B0LAMP0001" in page(step)


def test_a_search_without_words() -> None:
    for words in (" ", "the", "!!!", "\ud800", "zzzz"):
        step = play(shop(), f"search[{words}]")
        assert step.info["valid"] is True
        assert page(step) == HEAD + " [SEP] Page 1 (Total results: 0) [SEP] Next >"


def test_an_answer_of_megabytes_takes_no_time() -> None:
    env = shop()
    begun = time.monotonic()
    for answer in ("search[" * 500_000, "[" * 3_000_000, "search[lamp]" * 300_000, "search[" + "[" * 3_500_000 + "]"):
        env.reset(0)
        assert play(env, answer).info["valid"] is False
    assert time.monotonic() - begun < 5


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab[]\n \u2028", max_size=14))
def test_actions_are_read_as_the_originals_expression_reads_them(answer: str) -> None:
    match = re.match(r"(.+)\[(.+)\]", answer.strip())
    assert read_action(answer) == ((match[1], match[2]) if match else ("", ""))


def test_a_very_long_search() -> None:
    assert "B0LAMP0001" in page(play(shop(), f"search[{'lamp ' * 5000}]"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.text(), st.text().map(lambda text: f"search[{text}]"), st.text().map(lambda text: f"click[{text}]")), max_size=8)
)
def test_no_text_raises(answers: list[str]) -> None:
    env = shop(max_turns=8)
    for answer in answers:
        step = env.step(answer)
        assert step.reward == 0
        assert not step.success
        assert step.done == (step.info["truncated"])


# --- buying ---


def test_a_full_purchase() -> None:
    env = shop()
    step = play(env, "search[lamp]", "click[b0lamp0001]", "click[honey oak]", "click[large]", "click[buy now]")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.observation.text == "Solved.\nThank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1.0"
    assert step.info == {
        "valid": True,
        "truncated": False,
        "page": "done",
        "asin": "B0LAMP0001",
        "score": 1.0,
        "r_type": 1.0,
        "r_att": 1.0,
        "r_option": 1.0,
        "r_price": True,
        "query_match": True,
        "category_match": True,
        "title_score": 1.0,
        "noun_test": "light",
    }
    json.dumps(step.info)
    with pytest.raises(BadInput, match="is over"):
        env.step("search[lamp]")


@pytest.mark.parametrize(("reward", "paid"), [("graded", 0.8), ("binary", 0.0)])
def test_a_purchase_that_falls_short(reward: str, paid: float) -> None:
    step = play(shop(reward=reward), "search[lamp]", "click[b0lamp0001]", "click[large]", "click[Buy Now]")
    assert step.reward == pytest.approx(paid)  # (2 attributes + 1 option + price) / 5
    assert (step.done, step.success, step.info["truncated"]) == (True, False, False)
    assert step.info["score"] == pytest.approx(0.8)
    assert step.observation.text.startswith("Failed.\n")


def test_the_binary_reward_of_a_full_purchase() -> None:
    assert (
        play(shop(reward="binary"), "search[lamp]", "click[b0lamp0001]", "click[honey oak]", "click[large]", "click[buy now]").reward == 1.0
    )


def test_the_wrong_thing_pays_nothing() -> None:
    assert play(shop(), "search[herbal tea]", "click[b0tea00001]", "click[buy now]").reward == 0.0


def test_turns_run_out() -> None:
    step = play(shop(max_turns=2), "search[lamp]", "click[b0lamp0001]")
    assert (step.done, step.success, step.info["truncated"]) == (True, False, True)
    assert step.observation.text.startswith("No turns left.\n")
    bought = play(shop(max_turns=3), "search[lamp]", "click[b0lamp0001]", "click[buy now]")
    assert (bought.done, bought.info["truncated"]) == (True, False)


# --- options and parts of the class ---


def test_reward_range_and_work() -> None:
    assert shop().reward_range == (0.0, 1.0)
    assert shop().work == "inline"
    env = WebShop(catalogue=SHOP, generator=lambda seed, split: GOAL, reward=lambda score: 10 * score.total)
    assert env.reward_range == (-math.inf, math.inf)
    env.reset(0)
    assert play(env, "search[lamp]", "click[b0lamp0001]", "click[buy now]").reward == pytest.approx(6.0)


def test_a_noun_test_of_ones_own() -> None:
    class NoNouns:
        name = "none"

        def __call__(self, title: str) -> list[str]:
            return []

    env = WebShop(catalogue=SHOP, generator=lambda seed, split: GOAL, nouns=NoNouns())
    env.reset(0)
    info = play(env, "search[lamp]", "click[b0lamp0001]", "click[buy now]").info
    assert (info["noun_test"], info["title_score"]) == ("none", 0.2)


def test_a_catalogue_of_ones_own_has_its_own_goals() -> None:
    env = WebShop(WebShopOptions(split=Split.ALL), catalogue=SHOP)
    texts = {env.reset(seed).text for seed in range(8)}
    assert len(texts) == 4  # two colours, two sizes
    assert all("Find me height adjustable desk lamps with touch control with color: " in text for text in texts)


@pytest.mark.parametrize(
    ("option", "value"),
    [("goals", "mine"), ("nouns", "nltk"), ("reward", "dense"), ("observation", "html"), ("max_turns", 0), ("hints", True)],
)
def test_bad_options(option: str, value: object) -> None:
    with pytest.raises(BadInput, match=f"webshop option.*{option}"):
        make_env("webshop", **{option: value})


def test_the_instance_is_the_goal() -> None:
    env = shop()
    assert env.instance == "Find me a lamp\nB0LAMP0001\n(('color', 'honey oak'), ('size', 'large'))\n40.0"


@pytest.mark.parametrize("split", [Split.TRAIN, Split.VALIDATION, Split.TEST])
def test_splits(split: Split) -> None:
    env = make_env("webshop", split=split)
    instances = set()
    for seed in range(40):
        env.reset(seed)
        instances.add(env.instance)
    assert len(instances) == 40
    assert {split_of(instance) for instance in instances} == {split}


def test_an_episode_is_the_same_every_time() -> None:
    def transcript(make: Callable[[], WebShop]) -> list[str]:
        env, rng, texts = make(), random.Random(3), []
        texts.append(env.reset(11, env_seed=4).text)
        for _ in range(9):
            options = texts[-1].partition("Available actions:\n")[2].splitlines()
            step = env.step(rng.choice([option.replace("keywords", "soft cotton") for option in options]))
            texts.append(step.observation.text)
            if step.done:
                break
        return texts

    one = transcript(lambda: make_env("webshop"))  # type: ignore[arg-type, return-value]
    assert len(one) > 3
    assert one == transcript(lambda: make_env("webshop"))  # type: ignore[arg-type, return-value]
