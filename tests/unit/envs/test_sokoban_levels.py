"""Sokoban levels: the generator's promises, the solver against plain search, and XSB files."""

from collections import deque
from pathlib import Path

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.registry import make_env
from tether.envs.sokoban.env import Sokoban
from tether.envs.sokoban.generator import ReversePlay
from tether.envs.sokoban.levels import FileLevels, Level, bits, load_levels
from tether.envs.sokoban.solver import SearchLimit, push_distances, solve
from tether.envs.splits import split_of

BOXOBAN = Path(__file__).resolve().parents[4] / "shared" / "data" / "boxoban"


def plain_search(level: Level) -> int | None:
    """Shortest solution by breadth-first search over single moves, written without the solver's tricks."""
    start = (level.player, frozenset(bits(level.boxes)))
    walls, targets = set(bits(level.walls)), frozenset(bits(level.targets))
    lengths, queue = {start: 0}, deque([start])
    while queue:
        player, boxes = queue.popleft()
        if boxes == targets:
            return lengths[player, boxes]
        for delta in (-level.width, level.width, -1, 1):
            ahead, pushed = player + delta, boxes
            if ahead in boxes:
                pushed = boxes - {ahead} | {ahead + delta}
                if ahead + delta in walls or ahead + delta in boxes:
                    continue
            if ahead not in walls and (ahead, pushed) not in lengths:
                lengths[ahead, pushed] = lengths[player, boxes] + 1
                queue.append((ahead, pushed))
    return None


def test_generated_levels_keep_their_promises() -> None:
    lengths = []
    for seed in range(300):
        level = ReversePlay()(seed, Split.TRAIN)
        solution = solve(level)
        assert solution is not None
        lengths.append(len(solution))
        assert not level.boxes & level.targets
        assert not level.boxes >> level.player & 1
        assert (level.boxes | level.targets | 1 << level.player) & level.walls == 0
        assert level.boxes.bit_count() == level.targets.bit_count() == 1
    assert max(lengths) <= 10
    assert 3.5 < sum(lengths) / 300 < 6


@pytest.mark.parametrize(
    ("height", "width", "boxes", "min_pushes", "max_moves"), [(5, 5, 2, 1, 16), (6, 6, 1, 4, 10), (8, 8, 2, 5, 28), (6, 9, 3, 3, 39)]
)
def test_other_sizes_keep_them_too(height: int, width: int, boxes: int, min_pushes: int, max_moves: int) -> None:
    generator = ReversePlay(height, width, boxes, min_pushes, 4 * boxes, max_moves)
    for seed in range(25):
        level = generator(seed, Split.TRAIN)
        solution = solve(level)
        assert solution is not None
        assert min_pushes <= sum(push_distances(level)[box] for box in bits(level.boxes))
        assert len(solution) <= max_moves
        assert not level.boxes & level.targets
        assert (level.height, level.width, level.boxes.bit_count()) == (height, width, boxes)


def test_levels_are_varied() -> None:
    levels = {ReversePlay()(seed, Split.TRAIN).fingerprint for seed in range(1000)}
    assert len(levels) > 980


def test_a_seed_makes_the_same_level_whatever_was_made_before() -> None:
    generator = ReversePlay()
    once = generator(5, Split.TRAIN)
    for seed in range(5):
        generator(seed, Split.TEST)
    assert generator(5, Split.TRAIN) == once


def test_solver_agrees_with_plain_search() -> None:
    for seed in range(60):
        level = ReversePlay()(seed, Split.TRAIN)
        solution = solve(level)
        assert solution is not None
        assert len(solution) == plain_search(level)
    for seed in range(40):
        level = ReversePlay(6, 6, 2, 4, 8, 30)(seed, Split.TRAIN)
        solution = solve(level)
        assert solution is not None
        assert len(solution) == plain_search(level)


def test_solver_knows_the_known() -> None:
    assert solve(Level.of(["#####", "#@$.#", "#####"])) == ["Right"]
    assert solve(Level.of(["#####", "#@* #", "#####"])) == []
    assert solve(Level.of(["#####", "#@ .#", "#  $#", "#####"])) is None  # a box on the edge with nobody below it
    assert solve(Level.of(["######", "#$  @#", "#  . #", "######"])) is None  # a box in a corner


def test_pushes_to_the_nearest_target() -> None:
    level = Level.of(["######", "#    #", "# $@.#", "#    #", "######"])
    # Only along the target's row, and not from its far end: everywhere else the player does not fit behind the box.
    assert push_distances(level) == {16: 0, 15: 1, 14: 2}


def test_solver_says_when_it_gives_up() -> None:
    with pytest.raises(SearchLimit, match="raise max_nodes"):
        solve(ReversePlay(10, 10, 4, 10, 16, 80)(0, Split.TRAIN), max_nodes=2)


def test_level_as_integers() -> None:
    level = Level.of(["#####", "#@$.#", "#####"])
    assert (level.height, level.width, level.player) == (3, 5, 6)
    assert (level.boxes, level.targets) == (1 << 7, 1 << 8)
    assert list(bits(level.walls)) == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]


def test_fingerprints_tell_every_part_apart() -> None:
    rows = [["#####", "#@$.#", "#####"], ["#####", "#@.$#", "#####"], ["#####", "#$@.#", "#####"], ["######", "#@$. #", "######"]]
    rows.append(["######", "#@$ .#", "######"])  # the one before with another target
    assert len({Level.of(level).fingerprint for level in rows}) == 5


def test_outside_of_the_walls_is_wall() -> None:
    ragged = Level.of(["  ####", "###  #", "#@ $.#", "######"])
    assert ragged.walls & 0b11 == 0b11
    assert solve(ragged) == ["Right", "Right"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["#####", "# $.#", "#####"], "0 players"),
        (["#####", "#@@$.#", "#####"], "2 players"),
        (["#####", "#@$ #", "#####"], "1 boxes and 0 targets"),
        (["#####", "#@$. ", "#####"], "open at its edge"),
        (["#####", "#@$.#", "## ##"], "open at its edge"),
        (["#####", "#@$.x", "#####"], "symbol 'x'"),
    ],
)
def test_broken_levels_are_refused(rows: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Level.of(rows)


def test_file_errors_name_the_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "levels.txt"
    path.write_text("; 0\n#####\n#@$.#\n#####\n\n; 1\n#####\n# $.#\n#####\n")
    with pytest.raises(BadInput, match=r"levels\.txt', line 7: the level has 0 players"):
        load_levels(path)
    (tmp_path / "empty.txt").write_text("nothing here\n")
    with pytest.raises(BadInput, match="holds no level"):
        load_levels(tmp_path / "empty.txt")
    with pytest.raises(BadInput, match=r"cannot read levels file .*missing\.txt' \(FileNotFoundError\)"):
        make_env("sokoban", levels=tmp_path / "missing.txt").reset(0)


def test_one_level_serves_one_split(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("#####\n#@$.#\n#####")
    level = load_levels(path)[0]
    assert FileLevels(path)(7, split_of(level.fingerprint)) == level
    other = next(split for split in (Split.TRAIN, Split.TEST) if split is not split_of(level.fingerprint))
    with pytest.raises(BadInput, match=f"has no level in split '{other}'"):
        FileLevels(path)(7, other)


@pytest.mark.skipif(not BOXOBAN.exists(), reason="the Boxoban sample files are not beside this checkout")
def test_real_boxoban_files() -> None:
    levels = [level for name in ("unfiltered_valid_000.txt", "medium_valid_000.txt") for level in load_levels(BOXOBAN / name)]
    assert len(levels) == 2000
    assert {(level.height, level.width, level.boxes.bit_count(), level.targets.bit_count()) for level in levels} == {(10, 10, 4, 4)}
    env = make_env("sokoban", levels=BOXOBAN / "medium_valid_000.txt", max_turns=40)
    assert isinstance(env, Sokoban)
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        level = FileLevels(BOXOBAN / "medium_valid_000.txt")(3, split)
        assert split_of(level.fingerprint) is split
    env.reset(0)
    assert env.level in load_levels(BOXOBAN / "medium_valid_000.txt")


@pytest.mark.skipif(not BOXOBAN.exists(), reason="the Boxoban sample files are not beside this checkout")
def test_a_real_boxoban_level_is_played_to_its_end() -> None:
    level = load_levels(BOXOBAN / "medium_valid_000.txt")[1]
    solution = solve(level)
    assert solution is not None
    assert len(solution) == 26
    env = Sokoban(Sokoban.Options(max_turns=30, actions_per_turn=1), generator=lambda seed, split: level)
    env.reset(0)
    steps = [env.step(action) for action in solution]
    assert [step.success for step in steps] == [False] * 25 + [True]
