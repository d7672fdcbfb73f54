"""Loading the original's files: what is cleaned, what becomes a goal, and what is said about files that cannot be used."""

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.dataset import Pool
from tether.envs.registry import make_env
from tether.envs.webshop.dataset import load_catalogue, load_goals
from tether.envs.webshop.products import NO_LIMIT, Goal, Product, synthetic_goals

BASE = {
    "category": "beauty",
    "query": " Body Wash ",
    "product_category": "A › B › C",
    "full_description": "Good.",
    "small_description": ["one", "two"],
    "images": ["i"],
    "seller_name": "not read",
}
ITEMS: list[Any] = [
    BASE | {
        "asin": "B000000001", "name": "Alpha Wash", "pricing": "$5.99",
        "customization_options": {"Color": [{"value": " Red/Blue ", "image": None}, {"value": "GREEN"}], "Size": None},
    },
    BASE | {"asin": "nan", "name": "no code", "pricing": "", "customization_options": {}},
    BASE | {"asin": "B00000000123", "name": "long code", "pricing": "", "customization_options": {}},
    BASE | {"asin": "B000000001", "name": "the same code", "pricing": "$9", "customization_options": None},
    BASE | {"asin": "B000000002", "name": "Beta", "pricing": "$1,005.99 - $1,299.00", "customization_options": None, "small_description": "single"},
    BASE | {"asin": "B000000003", "name": "Gamma", "pricing": None, "customization_options": {"size": [{"value": "8 oz"}, {"value": "16 oz"}]}},
    BASE | {"asin": "B000000004", "name": "Delta", "pricing": "$3.00 - $4.00 - $5.00", "customization_options": {}, "full_description": None},
    BASE | {"asin": "B000000005", "name": "Eps", "pricing": "$985", "customization_options": {"color": [{"value": "a"}]}},
    BASE | {"asin": "B000000006", "name": "Unlisted", "pricing": "$1", "customization_options": {}},
]  # fmt: skip
INSTRUCTIONS: dict[str, Any] = {
    "B000000001": {"attributes": ["x y"], "instruction": "Find me wash", "instruction_attributes": ["x y"]},
    "B000000002": {"attributes": [], "instruction": "Find me beta", "instruction_attributes": ["q"]},
    "B000000003": {"attributes": ["z"], "instruction": "Find me gamma", "instruction_attributes": ["z"]},
    "B000000004": {"attributes": ["z"], "instruction": None},
    "B000000005": {"attributes": ["z"], "instruction": "Find me eps", "instruction_attributes": ["z"]},
}
WRITTEN: dict[str, Any] = {
    "B000000001": [
        {"instruction": "i want a wash.", "instruction_attributes": ["x y"], "instruction_options": ["red"], "worker_id": "w"},
        {"instruction": "left out", "instruction_attributes": [], "instruction_options": []},
        {"instruction": "pairs", "instruction_attributes": ["x y"], "instruction_options": {"color": "green"}},
    ],
    "B000000005": [{"instruction": "..dear eps...", "instruction_attributes": ["z"], "instruction_options": []}],
    "B0NOTHERE1": [{"instruction": "no such product", "instruction_attributes": ["z"], "instruction_options": []}],
}


def write(folder: Path, items: Any = ITEMS, instructions: Any = INSTRUCTIONS, written: Any = WRITTEN, size: str = "") -> str:
    """The three files, one product a line."""
    lines = ",\n".join(json.dumps(item) for item in items)
    (folder / f"items_shuffle{size}.json").write_text(f"[\n{lines}\n]", encoding="utf-8")
    (folder / f"items_ins_v2{size}.json").write_text(json.dumps(instructions), encoding="utf-8")
    (folder / "items_human_ins.json").write_text(json.dumps(written), encoding="utf-8")
    return str(folder)


def products(data: str) -> dict[str, Product]:
    return {product.asin: product for product in load_catalogue(data, "error").products}


def goals(pool: Pool[Goal]) -> list[Goal]:
    return [pool(index, Split.ALL) for index in range(len(pool))]


def test_products_are_cleaned_as_in_the_original(tmp_path: Path) -> None:
    found = products(write(tmp_path))
    assert list(found) == [f"B00000000{n}" for n in range(1, 7)]
    alpha = found["B000000001"]
    assert alpha.title == "Alpha Wash"  # the first of two with one code
    assert alpha.query == "body wash"
    assert alpha.options == {"color": ("red | blue", "green")}
    assert alpha.attributes == ("x y",)
    assert alpha.search_text == "alpha wash good. one color: red | blue, green"
    assert found["B000000002"].bullets == ("single",)
    assert found["B000000004"].description == ""
    assert found["B000000006"].attributes == ("DUMMY_ATTR",)
    assert found["B000000006"].instruction is None


def test_prices(tmp_path: Path) -> None:
    found = products(write(tmp_path))
    tags = [product.price_tag for product in found.values()]
    assert tags == ["$5.99", "$1005.99 to $1299.0", "$100.0", "$3.0 to $4.0", "$985.0", "$1.0"]
    assert found["B000000003"].price == 100.0
    drawn = found["B000000004"].price
    assert 3.0 <= drawn <= 4.0
    assert drawn == found["B000000004"].price
    assert drawn - 3.0 != pytest.approx((found["B000000002"].price - 1005.99) / (1299.0 - 1005.99))  # a draw for each product


def test_synthetic_goals(tmp_path: Path) -> None:
    found = goals(load_goals(write(tmp_path), "synthetic", "error"))
    assert len(found) == 6
    by_text = {goal.text: goal for goal in found}
    assert by_text["Find me beta"].price_limit == NO_LIMIT  # nothing above 1005.99
    assert by_text["Find me eps with color: a"].price_limit == NO_LIMIT  # 990 alone is above 985
    (gamma,) = (goal for goal in found if "16 oz" in goal.text)
    assert gamma.price_limit in (120.0, 130.0, 140.0)  # the larger of two of 110, 120, 130, 140
    assert gamma.text == f"Find me gamma with size: 16 oz, and price lower than {gamma.price_limit:.2f} dollars"
    assert gamma.options == (("size", "16 oz"),)
    assert gamma.attributes == ("z",)
    assert {goal.price_limit for goal in found if "gamma" in goal.text} == {gamma.price_limit}  # one limit a product


def test_option_names_are_in_order_and_all_combinations_occur() -> None:
    two = Product("B0", "t", "c", "q", "p", prices=(5.0,), options={"size": ("s", "m"), "color": ("red", "tan", "teal")}, instruction="Find me t",
                  instruction_attributes=("a",))  # fmt: skip
    found = synthetic_goals([two])
    assert len(found) == 6
    assert {goal.options for goal in found} == {
        (("color", color), ("size", size)) for color in ("red", "tan", "teal") for size in ("s", "m")
    }
    assert all(
        goal.text.startswith(f"Find me t with color: {goal.options[0][1]}, and size: {goal.options[1][1]}, and price") for goal in found
    )


@pytest.mark.parametrize(
    ("price", "limits"), [(9.99, {20.0, 30.0, 40.0}), (10.0, {30.0, 40.0, 50.0}), (975.0, {990.0}), (980.0, {NO_LIMIT})]
)
def test_price_limits(price: float, limits: set[float]) -> None:
    """The larger of two of the first four tens strictly above the price."""
    many = [Product(f"B{n:09}", "t", "c", "q", "p", prices=(price,), instruction="i", instruction_attributes=("a",)) for n in range(60)]
    assert {goal.price_limit for goal in synthetic_goals(many)} == limits


def test_goals_do_not_depend_on_the_order_of_products() -> None:
    many = [Product(f"B{n:09}", "t", "c", "q", "p", prices=(n + 0.5,), instruction="i", instruction_attributes=("a",)) for n in range(40)]
    shuffled = random.Random(0).sample(many, len(many))
    assert synthetic_goals(shuffled) == synthetic_goals(many)
    assert [goal.product.asin for goal in synthetic_goals(many)] != [product.asin for product in many]


def test_human_goals(tmp_path: Path) -> None:
    data = write(tmp_path)
    found = {goal.text.partition(", and price")[0]: goal for goal in goals(load_goals(data, "human", "error"))}
    assert set(found) == {"i want a wash", "pairs", "dear eps"}
    assert found["i want a wash"].options == ("red",)
    assert found["i want a wash"].price_limit in (20.0, 30.0, 40.0)
    assert found["i want a wash"].text.endswith(f", and price lower than {found['i want a wash'].price_limit:.2f} dollars")
    assert found["pairs"].options == (("color", "green"),)
    assert found["dear eps"].options == ()
    env = make_env("webshop", data=data, goals="human", split="all")
    assert {"i want a wash", "pairs", "dear eps"} == {
        env.reset(seed).text.split(" [SEP] ")[2].partition(", and price")[0] for seed in range(3)
    }


def test_a_table_of_options_already_built(tmp_path: Path) -> None:
    row = BASE | {
        "asin": "B000000001",
        "name": "n",
        "pricing": [5.0, 9.0],
        "options": {"color": ["red | blue"]},
        "Attributes": ["x"],
        "Price": "$",
    }
    (tmp_path / "products_1000.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps(INSTRUCTIONS), encoding="utf-8")
    found = products(str(tmp_path))["B000000001"]
    assert found.options == {"color": ("red | blue",)}
    assert found.prices == (5.0, 9.0)
    assert found.attributes == ("x y",)
    assert products(str(tmp_path / "products_1000.jsonl"))["B000000001"] == found


def test_the_large_files_come_first_and_small_products_go_with_small_attributes(tmp_path: Path) -> None:
    write(tmp_path)
    small = {"B000000001": {"attributes": ["small"]}}
    write(tmp_path, items=ITEMS[:1], instructions=small, size="_1000")
    assert products(str(tmp_path))["B000000001"].attributes == ("x y",)
    assert products(str(tmp_path / "items_shuffle_1000.json"))["B000000001"].attributes == ("small",)


def test_gzipped_files(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("items_shuffle.json", "items_ins_v2.json"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    assert len(products(str(tmp_path))) == 6


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"asin": 5}, "has a int as asin; expected text"),
        ({"name": None}, "has a NoneType as name; expected text"),
        ({"pricing": "$abc"}, "has the price 'abc', which is not a number"),
        ({"pricing": "12.00"}, "has pricing '12.00', which names no price in dollars"),
        ({"pricing": ["x"]}, "has the price 'x', which is not a number"),
        ({"pricing": 5}, "has a int as pricing; expected text"),
        ({"full_description": ["a"]}, "has a list as full_description; expected text"),
        ({"small_description": [1]}, "has small_description that is not a list of texts"),
        ({"customization_options": ["a"]}, "has a list as customization_options; expected an object"),
        ({"customization_options": {"c": ["a"]}}, "has the option 'c', whose contents are not a list of objects with a value"),
        ({"customization_options": {"c": [{"image": "a"}]}}, "has a NoneType as option c; expected text"),
    ],
)
def test_a_malformed_product_is_named_by_file_and_line(tmp_path: Path, change: dict, what: str, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path, items=[ITEMS[0], BASE | {"asin": "B0BAD", "name": "b", "pricing": "", "customization_options": {}} | change])
    with pytest.raises(BadInput) as error:
        load_catalogue(data, "error")
    assert str(error.value) == f"{tmp_path / 'items_shuffle.json'}:3: {what}; fix the row, or skip such rows with bad_rows=skip"
    with caplog.at_level(logging.WARNING):
        assert len(load_catalogue(data, "skip").products) == 1
    assert "skipped 1 of 2 rows" in caplog.text


def test_a_product_without_a_field(tmp_path: Path) -> None:
    data = write(tmp_path, items=[{key: value for key, value in ITEMS[0].items() if key != "query"}])
    with pytest.raises(BadInput, match=r"items_shuffle.json:2: has no field 'query'"):
        make_env("webshop", data=data)


@pytest.mark.parametrize(
    ("instructions", "what"),
    [
        ({"B1": []}, "'B1': is a list; expected an object with attributes"),
        ({"B1": {"attributes": "x"}}, "'B1': has attributes that is not a list of texts"),
        ({"B1": {"attributes": [], "instruction": "i"}}, "'B1': has instruction_attributes that is not a list of texts"),
        (
            {"B1": {"attributes": [], "instruction": "i", "instruction_attributes": []}},
            "'B1': has an instruction but no instruction_attributes",
        ),
        ({"B1": {"attributes": [], "instruction": 5, "instruction_attributes": ["a"]}}, "'B1': has a int as instruction; expected text"),
        ([{"attributes": []}], "items_ins_v2.json:1: is not an object of entries by product code"),
    ],
)
def test_malformed_instructions(tmp_path: Path, instructions: Any, what: str) -> None:
    with pytest.raises(BadInput) as error:
        load_catalogue(write(tmp_path, instructions=instructions), "error")
    assert what in str(error.value)


@pytest.mark.parametrize(
    "entry", ["x", ["x"], [{"instruction": "i"}], [{"instruction": "i", "instruction_attributes": ["a"], "instruction_options": "red"}],
              [{"instruction": "i", "instruction_attributes": ["a"], "instruction_options": {"color": 5}}]]
)  # fmt: skip
def test_malformed_human_instructions(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(BadInput, match=r"items_human_ins.json: 'B000000001': .*bad_rows=skip"):
        load_goals(write(tmp_path, written={"B000000001": entry}), "human", "error")


def test_missing_data() -> None:
    with pytest.raises(
        BadInput, match=r"data='/no/such' does not exist; .*items_shuffle_1000.json.*leave it out for the generated catalogue"
    ):
        make_env("webshop", data="/no/such")
    with pytest.raises(BadInput, match=r"goals=human needs items_human_ins.json; give data the folder"):
        make_env("webshop", goals="human")


@pytest.mark.parametrize("name", ["items_shuffle.json", "items_ins_v2.json"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    data = write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(BadInput, match=rf"has no {name} or .*leave data out for the generated catalogue"):
        make_env("webshop", data=data)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no product with a code of at most 10 characters"):
        load_catalogue(write(tmp_path, items=ITEMS[1:3]), "error")
    for folder, kind, files in (("a", "synthetic", {"instructions": {"B0": {"attributes": []}}}), ("b", "human", {"written": {"B0": []}})):
        (tmp_path / folder).mkdir()
        with pytest.raises(BadInput, match=rf"has a {kind} instruction"):
            load_goals(write(tmp_path / folder, **files), kind, "error")  # type: ignore[arg-type]


def test_data_are_read_once(tmp_path: Path) -> None:
    data = write(tmp_path)
    first = load_catalogue(data, "error")
    (tmp_path / "items_shuffle.json").unlink()
    assert load_catalogue(data, "error") is first
    assert load_goals(data, "synthetic", "error") is load_goals(data, "synthetic", "error")
