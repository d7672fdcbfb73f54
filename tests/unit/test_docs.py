"""The documents do not rot: their examples run, their links lead somewhere, their tables say what the code says.

Every python block of a document is run in order, each pasted alone, in an empty folder for each document. A block below "Save this as
`NAME.py`" is also saved as that file, which later blocks may import. A line that ends with
`# -> text` prints that text. The tutorials are run by test_tutorials.py, with their commands.
"""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tether
from tether.algorithms.filters.scores import SCORES
from tether.algorithms.filters.select import AUTO, LOSS_SCALES, ORDERS, STRATEGIES
from tether.algorithms.objective import AGGREGATIONS
from tether.algorithms.presets import DIVERGENCES, ESTIMATORS, PRESETS, SECTIONS, preset
from tether.core.metrics import CATALOGUE
from tether.core.setting_docs import setting_docs
from tether.envs import registry
from tether.training.optim import SCHEDULES
from tether.training.settings import RunSettings

ROOT = Path(__file__).parents[2]
TINY = ROOT / "src" / "tether" / "models" / "tiny"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")),
    TINY / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SAVED = re.compile(r"^Save this as `(\w+\.py)`.*?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PRINTS = re.compile(r"# -> (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```|^    .*?$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\|(.*)\|$", re.MULTILINE)
_CELL = re.compile(r"(?<!\\)\|")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _cells(page: Path) -> list[list[str]]:
    """The cells of every table row of a page."""
    return [[cell.strip().replace("\\|", "|") for cell in _CELL.split(row)] for row in _ROW.findall(_text(page))]


def _rows(page: Path) -> list[list[str]]:
    """The cells of every table row whose first cell is one name in backticks."""
    return [row for row in _cells(page) if re.fullmatch(r"`[^`]+`", row[0])]


def _slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    return {_slug(heading) for heading in re.findall(r"^#+ (.*)$", _FENCED.sub("", _text(page)), re.MULTILINE)}


@pytest.fixture(scope="module")
def reference() -> Any:
    """scripts/reference_pages.py, which writes the lists of the documents."""
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = [page for page in PAGES if _BLOCK.search(_text(page)) and page.parent.name != "tutorials"]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry.ENVIRONMENTS, "_entries", dict(registry.ENVIRONMENTS._entries))  # examples may register their own
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, block in _SAVED.findall(_text(page)):
        (tmp_path / name).write_text(block, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    for number, block in enumerate(_BLOCK.findall(_text(page)), start=1):
        exec(compile(block, f"{page.name}, python block {number}", "exec"), {"__name__": "example"})
        printed = capsys.readouterr().out.splitlines()
        expected = _PRINTS.findall(block)
        if expected:
            assert printed == expected, f"block {number} prints something else than it says"


def test_links_lead_somewhere() -> None:
    broken = [f"{page.relative_to(ROOT)}: {problem}" for page in PAGES for problem in _broken_links(page)]
    assert not broken, "\n".join(broken)


def _broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(_FENCED.sub("", _text(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link} does not exist"
        elif anchor and anchor not in _anchors(target):
            yield f"{link}: {target.name} has no such heading"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(_text(index))}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} <= linked


def test_every_page_is_in_the_site() -> None:
    class Loader(yaml.SafeLoader):
        """Reads the tags of mkdocs.yml that name Python objects as nothing."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    site = yaml.load(_text(ROOT / "mkdocs.yml"), Loader)
    named = set(re.findall(r"[\w./-]+\.md", json.dumps(site["nav"])))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} <= named


def test_api_page_is_the_public_surface() -> None:
    listed = re.findall(r"^::: tether\.(\w+)$", _text(ROOT / "docs" / "api.md"), re.MULTILINE)
    assert sorted(listed) == sorted(set(tether.__all__) - {"__version__"})


def test_generated_lists_are_up_to_date(reference: Any) -> None:
    """Verbs, options, settings, metrics, alarms and layers are written from the code."""
    old = [str(page.relative_to(ROOT)) for page in reference.PAGES if reference.filled(_text(page)) != _text(page)]
    assert not old, f"run `make reference`, which renews {', '.join(old)}"


def test_a_list_that_is_out_of_date_is_seen(reference: Any) -> None:
    page = _text(ROOT / "docs" / "metrics.md")
    assert reference.filled(page.replace("share of training episodes solved", "share of episodes")) == page


@pytest.mark.parametrize(
    ("page", "block", "wanted"),
    [
        ("docs/cli.md", "help", lambda reference: reference._commands()),
        ("docs/configuration.md", "settings", lambda reference: [reference._section(row.key) for row in setting_docs(RunSettings)]),
        ("docs/metrics.md", "metrics", lambda reference: [reference._metric_section(name) for name in CATALOGUE]),
        ("docs/alarms.md", "alarms", lambda _: [""]),
        ("docs/sft.md", "sft-settings", lambda _: [""]),
        ("README.md", "verbs", lambda _: [""]),
        ("CONTRIBUTING.md", "layers", lambda _: [""]),
    ],
)
def test_every_list_is_on_its_page(page: str, block: str, wanted: Any, reference: Any) -> None:
    found = re.findall(rf"^<!-- generated: {block} ?([\w-]*) -->$", _text(ROOT / page), re.MULTILINE)
    assert sorted(found) == sorted(set(wanted(reference)))


def test_names_that_settings_accept_are_documented() -> None:
    """The text under a setting names every value that the setting accepts by name."""
    named = {row.key: set(re.findall(r"[\w:]+", f"{row.allowed} {row.meaning}")) for row in setting_docs(RunSettings)}
    assert named["algorithm.name"] >= set(PRESETS)
    assert named["filter.strategy"] >= {*STRATEGIES, AUTO}
    assert named["filter.score"] >= {*SCORES, "module:function"}
    assert named["filter.order"] >= set(ORDERS)
    assert named["filter.loss_scale"] >= set(LOSS_SCALES)
    assert named["algorithm.advantages"] >= set(ESTIMATORS)
    assert named["algorithm.aggregation"] >= set(AGGREGATIONS)
    assert named["algorithm.divergence"] >= set(DIVERGENCES)
    assert named["learner.schedule"] >= set(SCHEDULES)
    described = {row[0].strip("`") for row in _rows(ROOT / "docs" / "algorithms.md")}
    assert described >= set(STRATEGIES) | set(SCORES) | set(AGGREGATIONS)
    listed = {re.sub(r"\W+", " ", row[0]).split()[0] for row in _link_rows(ROOT / "docs" / "environments" / "README.md")}
    assert listed == set(registry.ENVIRONMENTS.names())


def _link_rows(page: Path) -> list[list[str]]:
    return [row for row in _cells(page) if row[0].startswith("[`")]


def test_presets_are_as_documented() -> None:
    table = {row[0]: row[1:] for row in _cells(ROOT / "docs" / "algorithms.md")}
    for column, name in enumerate(PRESETS):
        algorithm = preset(name)
        yes_no = {True: "yes", False: "no"}
        assert table["advantages"][column] == f"`{algorithm.advantages}`"
        assert table["critic"][column] == yes_no[algorithm.has_critic]
        assert table["divides by std"][column] == yes_no[algorithm.normalize_std]
        assert table["whitens"][column] == yes_no[algorithm.whiten]
        assert table["aggregation"][column] == f"`{algorithm.aggregation}`"
        assert table["constant length"][column] == yes_no[algorithm.constant_length]
        assert table["`clip_low`, `clip_high`"][column] == f"{algorithm.clip_low}, {algorithm.clip_high}"
        assert table["`dual_clip`"][column] == str(algorithm.dual_clip).lower()
        assert table["`entropy_coef`"][column] == str(algorithm.entropy_coef)
        assert table["`kl_coef`"][column] == str(algorithm.kl_coef)
        assert table["`kl_mode`, `divergence`"][column] == f"{algorithm.kl_mode}, `{algorithm.divergence}`"
        if algorithm.has_critic:
            assert (
                table["`gamma`, `gae_lambda`, `turn_gamma`"][column] == f"{algorithm.gamma}, {algorithm.gae_lambda}, {algorithm.turn_gamma}"
            )
            assert table["`reward_placement`"][column] == algorithm.reward_placement
        for section in ("filter", "rollout"):
            cell = table[f"`{section}`"][column].replace("`", "")
            assert (yaml.safe_load(f"{{{cell}}}") if cell != "-" else {}) == SECTIONS.get(name, {}).get(section, {})


def test_model_card_is_about_the_weights_beside_it(tiny: Any) -> None:
    card = _text(TINY / "README.md")
    config = json.loads(_text(TINY / "config.json"))
    facts = dict(re.findall(r"^\| ([a-z ]+) \| ([\d,]+)", card, re.MULTILINE))
    numbers = {name: int(value.replace(",", "")) for name, value in facts.items()}
    assert numbers["layers"] == config["num_hidden_layers"]
    assert numbers["width"] == config["hidden_size"]
    assert numbers["heads"] == config["num_attention_heads"]
    assert numbers["vocabulary"] == config["vocab_size"]
    assert numbers["positions"] == config["max_position_embeddings"]
    assert numbers["parameters"] == sum(parameter.numel() for parameter in tiny.model.parameters())
    digest = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert digest in card, "the weights are new: measure them again, then put the numbers and the new sha256 into the model card"


def test_no_page_names_this_machine() -> None:
    for page in PAGES:
        assert not re.search(r"/(root|tmp|work|home)/", _text(page)), f"{page.name} holds a path of somebody's machine"
