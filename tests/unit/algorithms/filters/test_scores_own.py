"""Scores of the user's own: by module:function, by entry point, and what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tether.algorithms.filters import scores
from tether.algorithms.filters.group_filter import GroupFilter
from tether.algorithms.filters.scores import find_score, score_names
from tether.algorithms.filters.select import select_groups, select_within
from tether.core.config import validate
from tether.core.errors import BadInput, ConfigError
from tether.training.settings import RunSettings

REWARDS, GROUPS = [1.0, 0.0, 3.0, 3.0, 5.0], ["a", "a", "b", "b", "b"]
SOURCE = """
def spread(group):
    return group.rewards.max() - group.rewards.min()

def long(group):
    return group.lengths.mean()

def changes(group):
    group.rewards[:] = 0  # its own copy
    return 1

def raises(group):
    raise RuntimeError("no\\nscore")

def returns_text(group):
    return "high"

def returns_nan(group):
    return float("nan")

def two(group, other):
    return 1

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_scores.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("own_scores", None)
    find_score.cache_clear()


def test_a_function_ranks_groups() -> None:
    chosen = select_groups(REWARDS, GROUPS, score="own_scores:spread", strategy="top_k", keep=0.5)
    assert (chosen.kept, chosen.scores) == (["b"], {"a": 1.0, "b": 2.0})
    assert chosen.rv_mean == pytest.approx((0.5 + 4 / 3) / 2)  # reward variance is measured whatever ranks
    long = select_groups(REWARDS, GROUPS, score="own_scores:long", strategy="top_k", keep=0.5, lengths=[9, 9, 1, 1, 1])
    assert long.kept == ["a"]
    mixed = select_within(REWARDS, GROUPS, ["x", "x", "y", "y", "y"], score="own_scores:spread", keep=1.0)
    assert set(mixed.kept) == {"a", "b"}
    select_groups(REWARDS, GROUPS, score="own_scores:changes")
    assert REWARDS[0] == 1.0 and select_groups(REWARDS, GROUPS, score="own_scores:changes").rv_mean > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reward_varience", "unknown score 'reward_varience': did you mean 'reward_variance'?"),
        ("own_scores:sprea", "module 'own_scores' has no score 'sprea': did you mean 'spread'?"),
        ("no_scores:spread", "score 'no_scores:spread': there is no module 'no_scores'"),
        ("own_scores:number", "score 'own_scores:number' is a int; name a function"),
        ("own_scores:two", "score 'own_scores:two' cannot be called with a group"),
        ("own_scores:raises", "score 'own_scores:raises' raised RuntimeError: no score on a group of 2 trajectories"),
        ("own_scores:returns_text", "score 'own_scores:returns_text' returned 'high'; return a finite number"),
        ("own_scores:returns_nan", "returned nan; return a finite number"),
        ("own_scores:long", "score 'own_scores:long' raised AttributeError"),  # no lengths were given
    ],
)
def test_mistakes_are_one_line(name: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        select_groups(REWARDS, GROUPS, score=name)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_installed_distribution_offers_scores(module: Path) -> None:
    info = module / "extra_scores-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-scores\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{scores.ENTRY_POINTS}]\nspread = own_scores:spread\nbroken = own_scores:nothing\n")
    sys.path.append(str(module))
    assert score_names()[-2:] == ["broken", "spread"]
    assert select_groups(REWARDS, GROUPS, score="spread").scores == {"a": 1.0, "b": 2.0}
    with pytest.raises(BadInput, match="score 'broken' cannot be loaded from 'own_scores:nothing'"):
        find_score("broken")


def test_settings_and_plug_ins_take_it() -> None:
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}, "filter": {"score": "own_scores:spread"}})
    assert settings.filter.score == "own_scores:spread" and "own_scores" not in sys.modules  # reading a config imports nothing
    with pytest.raises(ConfigError, match=r"config key 'filter\.score': unknown score 'lenght': did you mean 'length'\?"):
        validate(RunSettings, {"env": {"name": "frozen_lake"}, "filter": {"score": "lenght"}})
    assert GroupFilter(strategy="top_k", keep=0.5, score="own_scores:spread").select(REWARDS, GROUPS).kept == ["b"]
