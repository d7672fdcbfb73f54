"""The generated catalogue: what it holds, that it is the same everywhere, and that shopping in it rewards care."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from tether.core.enums import Split
from tether.core.types import Step
from tether.envs.webshop.dataset import load_catalogue, load_goals
from tether.envs.webshop.env import WebShop, WebShopOptions
from tether.envs.webshop.generator import SISTERS, departments, generated_products
from tether.envs.webshop.products import Goal, Product, TextIndex
from tether.envs.webshop.reward import LightNouns, likeness, score_purchase

PRODUCTS = generated_products()
KINDS = [(department, kind) for department in departments() for kind in department.kinds]


def test_size() -> None:
    assert len(PRODUCTS) == 2520
    assert len({product.asin for product in PRODUCTS}) == 2520
    assert len(KINDS) == 42
    assert Counter(product.query for product in PRODUCTS) == Counter({kind.query: 60 for _, kind in KINDS})
    assert {product.category for product in PRODUCTS} == {"fashion", "beauty", "electronics", "garden", "grocery"}
    assert len({product.product_category for product in PRODUCTS}) == 42
    assert len({product.title for product in PRODUCTS}) > 2400
    assert len(load_goals(None, "synthetic", "error")) == 17641


def test_products_are_shuffled() -> None:
    assert sum(one.query == other.query for one, other in pairwise(PRODUCTS)) < 200


@pytest.mark.parametrize("product", PRODUCTS[::97], ids=lambda product: product.asin)
def test_a_product_is_whole(product: Product) -> None:
    assert re.fullmatch(r"B0[0-9A-Z]{8}", product.asin)
    assert set(product.instruction_attributes) < set(product.attributes)
    assert product.instruction is not None
    assert all(attribute in product.instruction for attribute in product.instruction_attributes)
    assert product.query in product.instruction
    assert len(product.bullets) == 5
    assert all(1 <= price < 500 for price in product.prices)
    assert re.fullmatch(r"\$\d+\.\d{1,2}( to \$\d+\.\d{1,2})?", product.price_tag)
    assert len(product.prices) == 1 or product.prices[0] < product.prices[1]
    assert all(values for values in product.choices.values())
    assert LightNouns()(product.title)


def test_texts_name_the_attributes_a_product_has_and_no_others() -> None:
    features = {kind.query: kind.features for _, kind in KINDS}
    for product in PRODUCTS:
        text = " ".join([product.title, product.description, *product.bullets]).lower()
        assert {name for name in features[product.query] if name in text} == set(product.attributes), product


@pytest.mark.parametrize(("department", "kind"), KINDS, ids=[kind.query for _, kind in KINDS])
def test_features_of_a_kind_cannot_be_taken_for_one_another(department, kind) -> None:  # type: ignore[no-untyped-def]
    assert len(set(kind.features)) == len(kind.features) >= 8
    for one in kind.features:
        assert one in department.features[one].sentence.lower()
        assert not [other for other in kind.features if other != one and likeness(one, other) > 85]


def test_a_product_has_five_features_that_go_together() -> None:
    rivals = {department.category: department.rivals for department in departments()}
    for product in PRODUCTS:
        assert len(set(product.attributes)) == 5
        assert all(len(set(group) & set(product.attributes)) <= 1 for group in rivals[product.category]), product


def test_no_feature_is_unused() -> None:
    for department in departments():
        assert {name for kind in department.kinds for name in kind.features} == set(department.features)


def test_sisters_differ() -> None:
    families: dict[tuple[str, ...], list[Product]] = {}
    for product in PRODUCTS:
        families.setdefault((product.query, product.title.partition(",")[0]), []).append(product)
    whole = [sisters for sisters in families.values() if len(sisters) == SISTERS]
    assert len(whole) > 700
    for sisters in whole:
        assert len({frozenset(product.attributes) for product in sisters}) == SISTERS
        assert len({product.prices for product in sisters}) > 1
        for product in sisters:  # each is asked for by something its sisters lack
            others = {attribute for sister in sisters if sister is not product for attribute in sister.attributes}
            assert set(product.instruction_attributes) - others


def test_every_goal_can_be_met() -> None:
    pool = load_goals(None, "synthetic", "error")
    nouns = LightNouns()
    for index in range(0, len(pool), 7):
        goal = pool(index, Split.ALL)
        assert score_purchase(goal, goal.product, dict(goal.options), nouns).full, goal  # type: ignore[arg-type]


def test_every_option_value_can_be_met() -> None:
    """The original reduces a chosen value to the colour word in it: a value such as "bluetooth" could never be met."""
    for department, kind in KINDS:
        for axis in kind.axes:
            for value in axis.values:
                wanted = Product("B0", "t", department.category, kind.query, kind.path)
                goal = Goal(wanted, "t", ("a",), ((axis.name, value),), 1.0)
                assert score_purchase(goal, wanted, {axis.name: value}, LightNouns()).r_option == 1.0, (kind.query, value)


# --- shoppers ---


def careful(env: WebShop, seed: int) -> Step:
    """Searches what the instruction says, opens the right product, chooses the right options."""
    env.reset(seed)
    goal = env.goal
    step = env.step(f"search[{goal.text}]")
    while f"click[{goal.product.asin.lower()}]" not in step.observation.text and not step.done:
        step = env.step("click[next >]")
    for action in (f"click[{goal.product.asin.lower()}]", *(f"click[{value}]" for _, value in goal.options), "click[buy now]"):
        step = step if step.done else env.step(action)
    return step


def hasty(env: WebShop, seed: int, *, with_options: bool) -> Step:
    """Searches what the instruction says and buys the first result, with the options where it has them."""
    env.reset(seed)
    first = env.step(f"search[{env.goal.text}]").observation.text.partition("click[next >]\n")[2].splitlines()[0]
    env.step(first)
    for _, value in env.goal.options if with_options else ():
        env.step(f"click[{value}]")
    return env.step("click[buy now]")


def test_care_is_rewarded() -> None:
    env = WebShop(WebShopOptions(split=Split.ALL))
    seeds = range(200)
    bought = [careful(env, seed) for seed in seeds]
    assert sum(step.success for step in bought) >= 196
    assert sum(step.reward for step in bought) / len(seeds) > 0.98
    first = [hasty(env, seed, with_options=False).reward for seed in seeds]
    assert 0.4 < sum(first) / len(seeds) < 0.7
    with_options = [hasty(env, seed, with_options=True).success for seed in seeds]
    assert 0.2 < sum(with_options) / len(seeds) < 0.5


# --- the same everywhere ---

_DIGEST = """
import hashlib
from tether.envs.webshop.dataset import load_catalogue, load_goals
from tether.envs.webshop.env import WebShop
from tether.core.enums import Split
env = WebShop()
pool = load_goals(None, "synthetic", "error")
texts = [repr(product) for product in load_catalogue(None, "error").products]
texts += [pool(index, Split.ALL).fingerprint for index in range(0, len(pool), 50)]
for seed in range(20):
    texts.append(env.reset(seed).text)
    texts.append(env.step("search[" + env.goal.text + "]").observation.text)
    texts.append(env.step("search[<r>]").observation.text)
digest = hashlib.sha256("".join(texts).encode()).hexdigest()
"""


def test_the_same_in_another_process() -> None:
    here: dict = {}
    exec(_DIGEST, here)
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", _DIGEST + "print(digest)"], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == here["digest"], done.stderr


def test_the_catalogue_is_the_documented_one() -> None:
    """Changes of the tables or of the generator change every goal; this number makes them deliberate."""
    text = "".join(repr(product) for product in load_catalogue(None, "error").products)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "001ff9dde7f49d8e"


# --- search ---


def test_search_stems_and_ignores_case_and_stop_words() -> None:
    index = TextIndex(["running shoes for men", "a shoe", "the red carpet", ""])
    assert index.search("Run SHOE") == [0, 1]
    assert index.search("carpets the") == [2]
    assert index.search("the") == []
    assert index.search("") == []
    assert index.search("nothing here fits") == []


def test_search_ranks_rare_words_and_short_texts_higher() -> None:
    index = TextIndex(["lamp oak", "lamp", "lamp brass", "lamp lamp lamp and a very long tale about quite other things, told slowly"])
    assert index.search("oak lamp")[0] == 0
    assert index.search("brass")[0] == 2


def test_equal_scores_are_in_the_order_of_the_texts() -> None:
    index = TextIndex(["same words"] * 80)
    assert index.search("words") == list(range(50))


def test_a_repeated_word_weighs_more() -> None:
    index = TextIndex(["oak", "brass"] + ["filler"] * 5)
    assert index.search("oak brass brass")[0] == 1
    assert index.search("oak oak brass")[0] == 0
