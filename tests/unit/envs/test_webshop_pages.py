"""The shop's pages and the ways between them, on a small shop written by hand."""

from tether.core.types import Step
from tether.envs.webshop.env import WebShop, WebShopOptions
from tether.envs.webshop.products import Catalogue, Goal, Product

LAMP = Product(
    asin="B0LAMP0001",
    title="Elmorra Reading Lamp",
    category="garden",
    query="desk lamps",
    product_category="Home › Lighting › Desk Lamps",
    description="A lamp with touch control.",
    bullets=("Made of oak.", "", "Five feet of cord. "),
    prices=(29.99,),
    options={"color": ("black", "honey oak"), "size": ("small", "large")},
    attributes=("touch control", "height adjustable"),
    instruction="Find me height adjustable desk lamps with touch control",
    instruction_attributes=("height adjustable", "touch control"),
)
RUG = Product("B0RUG00001", "Tovarra Woven Rug", "garden", "area rugs", "Home › Rugs", "A rug.", ("Jute.",), (50.0, 80.0))
TEAS = [Product(f"B0TEA{n:05}", f"Herbal Tea number {n}", "grocery", "herbal tea", "Food › Tea", prices=(n + 1.0,)) for n in range(23)]
SHOP = Catalogue([LAMP, RUG, *TEAS])
GOAL = Goal(LAMP, "Find me a lamp", ("height adjustable", "touch control"), (("color", "honey oak"), ("size", "large")), 40.0)
HEAD = "Instruction: [SEP] Find me a lamp [SEP] Back to Search"
ITEM = (
    HEAD + " [SEP] < Prev [SEP] color [SEP] black [SEP] honey oak [SEP] size [SEP] small [SEP] large [SEP] Elmorra Reading Lamp [SEP] "
    "Price: $29.99 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
)


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


def actions(step: Step) -> list[str]:
    return step.observation.text.partition("Available actions:\n")[2].splitlines()


# --- pages ---


def test_search_page() -> None:
    first = WebShop(WebShopOptions(), catalogue=SHOP, generator=lambda seed, split: GOAL).reset(0)
    assert first.text == (
        "Turn 1 of 9.\nWebShop [SEP] Instruction: [SEP] Find me a lamp [SEP] Search\nAvailable actions:\nsearch[keywords]"
    )


def test_results_page() -> None:
    step = play(shop(), "search[reading lamp]")
    assert page(step) == HEAD + " [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] B0LAMP0001 [SEP] Elmorra Reading Lamp [SEP] $29.99"
    assert actions(step) == ["click[back to search]", "click[next >]", "click[b0lamp0001]"]
    assert step.info == {"valid": True, "truncated": False, "page": "results"}
    assert "$50.0 to $80.0" in page(play(shop(), "search[rug]"))


def test_ten_products_a_page() -> None:
    env = shop()
    first = play(env, "search[herbal tea]")
    assert "Page 1 (Total results: 23) [SEP] Next > [SEP]" in page(first)
    assert len([action for action in actions(first) if action.startswith("click[b0tea")]) == 10
    second = env.step("click[next >]")
    assert "Page 2 (Total results: 23) [SEP] < Prev [SEP] Next > [SEP]" in page(second)
    third = env.step("click[Next >]")
    assert len([action for action in actions(third) if action.startswith("click[b0tea")]) == 3
    beyond = env.step("click[next >]")
    assert page(beyond) == HEAD + " [SEP] Page 4 (Total results: 23) [SEP] < Prev [SEP] Next >"
    assert page(env.step("click[< prev]")) == page(third)
    seen = {action for step in (first, second, third) for action in actions(step) if "b0tea" in action}
    assert len(seen) == 23


def test_no_more_than_fifty_hits() -> None:
    many = Catalogue([Product(f"B{n:09}", f"mug {n}", "c", "mugs", "a") for n in range(70)])
    env = WebShop(catalogue=many, generator=lambda seed, split: GOAL)
    env.reset(0)
    assert "Page 1 (Total results: 50)" in page(env.step("search[mug]"))


def test_item_page_and_its_sub_pages() -> None:
    env = shop()
    step = play(env, "search[lamp]", "click[b0lamp0001]")
    assert page(step) == ITEM
    assert actions(step) == [
        f"click[{text}]"
        for text in ("back to search", "< prev", "description", "features", "reviews", "buy now", "black", "honey oak", "small", "large")
    ]
    description = env.step("click[description]")
    assert page(description) == HEAD + " [SEP] < Prev [SEP] A lamp with touch control."
    assert actions(description) == ["click[back to search]", "click[< prev]"]
    assert page(play(env, "click[< prev]")) == ITEM
    # An empty bullet is a string of one space in the original's page, and so leaves an empty place.
    assert page(env.step("click[features]")) == HEAD + " [SEP] < Prev [SEP] Made of oak. [SEP]  [SEP] Five feet of cord."
    env.step("click[< prev]")
    reviews = env.step("click[reviews]")
    assert page(reviews) == HEAD + " [SEP] < Prev"
    assert reviews.info["page"] == "reviews"
    assert page(env.step("click[< prev]")) == ITEM
    assert not env.step("click[attributes]").info["valid"]


def test_strings_of_white_space_are_shown_as_a_browser_shows_them() -> None:
    blank = Product("B0BLANK001", "Blank", "c", "q", "a", description=" \n ", bullets=("", "\n", "two\nlines"))
    env = WebShop(catalogue=Catalogue([blank]), generator=lambda seed, split: GOAL)
    env.reset(0)
    assert page(play(env, "search[blank]", "click[b0blank001]", "click[description]")) == HEAD + " [SEP] < Prev"
    assert page(play(env, "click[< prev]", "click[features]")) == HEAD + " [SEP] < Prev [SEP]  [SEP] two\nlines"


def test_attributes_page() -> None:
    env = shop(show_attributes=True)
    step = play(env, "search[lamp]", "click[b0lamp0001]")
    assert "Reviews [SEP] Attributes [SEP] Buy Now" in page(step)
    assert page(env.step("click[attributes]")) == (
        HEAD + " [SEP] < Prev [SEP] touch control [SEP] height adjustable [SEP] garden [SEP] desk lamps [SEP] Home › Lighting › Desk Lamps"
    )


def test_rich_text() -> None:
    env = shop(observation="text_rich")
    results = play(env, "search[lamp]")
    assert page(results) == (
        "Instruction:\nFind me a lamp\n[button] Back to Search [button_]\nPage 1 (Total results: 1)\n[button] Next > [button_]\n"
        "\n[button] B0LAMP0001 [button_]\nElmorra Reading Lamp\n$29.99"
    )
    item = play(env, "click[b0lamp0001]", "click[large]", "click[black]")
    assert page(item).startswith("You have clicked large.\nYou have clicked black.\nInstruction:\n")
    assert "color\n  [clicked button] black [clicked button_]\n  [button] honey oak [button_]\nsize\n" in page(item)
    assert "\n[clicked button] B0LAMP0001 [clicked button_]\n" in page(env.step("click[< prev]"))


# --- moving about ---


def test_back_to_the_results_clears_the_options() -> None:
    env = shop()
    play(env, "search[herbal tea]", "click[next >]", "search[lamp]", "click[b0lamp0001]", "click[large]", "click[honey oak]")
    assert "Page 1 (Total results: 1)" in page(env.step("click[< prev]"))
    assert play(env, "click[b0lamp0001]", "click[buy now]").info["r_option"] == 0.0


def test_a_sub_page_keeps_the_options() -> None:
    step = play(
        shop(),
        "search[lamp]",
        "click[b0lamp0001]",
        "click[large]",
        "click[features]",
        "click[< prev]",
        "click[honey oak]",
        "click[buy now]",
    )
    assert step.info["r_option"] == 1.0


def test_the_last_click_on_an_option_counts() -> None:
    step = play(shop(), "search[lamp]", "click[b0lamp0001]", "click[large]", "click[small]", "click[buy now]")
    assert step.info["r_option"] == 0.0


def test_the_item_goes_back_to_the_page_of_results_it_came_from() -> None:
    env = shop()
    second = play(env, "search[herbal tea]", "click[next >]")
    back = play(env, actions(second)[3], "click[< prev]")
    assert page(back) == page(second)


def test_search_works_on_any_page_and_back_to_search_opens_the_first() -> None:
    env = shop()
    step = play(env, "search[lamp]", "click[b0lamp0001]", "search[rug]")
    assert "B0RUG00001" in page(step)
    assert page(env.step("click[Back to Search]")) == "WebShop [SEP] Instruction: [SEP] Find me a lamp [SEP] Search"


def test_an_option_value_of_two_options_belongs_to_the_last() -> None:
    twice = Product("B0TWICE001", "Twice", "c", "q", "a", options={"width": ("one",), "height": ("one", "two")})
    env = WebShop(catalogue=Catalogue([twice]), generator=lambda seed, split: Goal(twice, "t", ("x",), (("width", "one"),), 1.0))
    env.reset(0)
    play(env, "search[twice]", "click[b0twice001]", "click[one]", "click[two]")
    assert env.step("click[buy now]").info["r_option"] == 0.0  # "two" replaced "one", both being heights


# --- special words ---


def test_special_searches() -> None:
    env = shop()
    assert "Page 1 (Total results: 23)" in page(env.step("search[<c> grocery]"))
    assert "Page 1 (Total results: 0)" in page(env.step("search[<c>]"))
    assert "Page 1 (Total results: 1) [SEP] Next > [SEP] B0RUG00001" in page(env.step("search[<q> area rugs]"))
    assert "Page 1 (Total results: 1) [SEP] Next > [SEP] B0LAMP0001" in page(env.step("search[<a> touch control]"))
    assert "Page 1 (Total results: 0)" in page(env.step("search[<a> no such]"))
    random_page = env.step("search[<r>]")
    assert "Page 1 (Total results: 25)" in page(random_page)  # fewer than fifty: all of them
    assert page(play(env, "click[next >]", "click[< prev]")) == page(random_page)


def test_a_random_listing_follows_env_seed() -> None:
    def listing(env_seed: int) -> str:
        env = shop()
        env.reset(0, env_seed=env_seed)
        return page(env.step("search[<r>]"))

    assert listing(1) == listing(1)
    assert listing(1) != listing(2)
