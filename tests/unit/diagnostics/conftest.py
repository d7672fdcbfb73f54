"""Builders of trajectories from token ids, and a scorer that is a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tether import Group, StopReason, Trajectory, Turn
from tether.core.enums import FinishReason
from tether.diagnostics.monitor import Health, Monitor
from tether.diagnostics.pairs import Rows, read_rows, rollout_rows

Ids = tuple[int, ...]


@dataclass
class TableScorer:
    """log p(z | x) looked up; remembers what it was asked."""

    table: Mapping[tuple[Ids, Ids], float]
    calls: list[tuple[Ids, Ids]] = field(default_factory=list)

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        self.calls.append((tuple(prompt), tuple(reasoning)))
        return self.table[tuple(prompt), tuple(reasoning)]


def _turn(context: Ids, response: Ids, span: tuple[int, int] | None) -> Turn:
    return Turn(context, response, (-0.5,) * len(response), FinishReason.STOP_TEXT, "", span)


def _group(index: int, members: Sequence[Sequence[Turn]]) -> Group:
    return Group(index, index, [Trajectory(index, member, index, list(turns), StopReason.FAILURE) for member, turns in enumerate(members)])


@pytest.fixture(name="turn")
def turn_fixture() -> Callable[..., Turn]:
    return _turn


@pytest.fixture(name="group")
def group_fixture() -> Callable[..., Group]:
    return _group


@pytest.fixture(name="table_scorer")
def table_scorer_fixture() -> type[TableScorer]:
    return TableScorer


def _rows(groups: Sequence[Group]) -> Rows:
    found = rollout_rows(groups)
    return read_rows(found["prompts"], found["reasonings"], found["groups"], found["trajectories"])


@pytest.fixture(name="rows")
def rows_fixture() -> Callable[[Sequence[Group]], Rows]:
    """The rows of Tether's own groups."""
    return _rows


@pytest.fixture
def observe() -> Callable[..., Health]:
    """`observe(monitor, step, groups, scorer, work)`: one step of Tether's own groups, scored by this scorer."""

    def call(monitor: Monitor, step: int, groups: Sequence[Group], scorer: Any, work: float = float("inf")) -> Health:
        monitor.scorer = scorer
        return monitor.observe(step, **rollout_rows(groups), work=work)

    return call
