"""Sokoban levels: the generator's promises, the solver against plain search, and XSB files."""

from collections import deque
from pathlib import Path

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.registry import make_env
from tether.envs.sokoban.env import Sokoban
from tether.envs.sokoban.generator import ReversePlay
from tether.envs.sokoban.levels import Level, bits, file_levels, load_levels
from tether.envs.sokoban.solver import ActionBudget, SearchLimit, action_budget, fewest_pushes, push_distances, solve
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
    assert file_levels(path)(7, split_of(level.fingerprint)) == level
    other = next(split for split in (Split.TRAIN, Split.TEST) if split is not split_of(level.fingerprint))
    with pytest.raises(BadInput, match=f"none of the 1 rows of .* is a {other} instance"):
        file_levels(path)(7, other)


@pytest.mark.skipif(not BOXOBAN.exists(), reason="the Boxoban sample files are not beside this checkout")
def test_real_boxoban_files() -> None:
    levels = [level for name in ("unfiltered_valid_000.txt", "medium_valid_000.txt") for level in load_levels(BOXOBAN / name)]
    assert len(levels) == 2000
    assert {(level.height, level.width, level.boxes.bit_count(), level.targets.bit_count()) for level in levels} == {(10, 10, 4, 4)}
    env = make_env("sokoban", levels=BOXOBAN / "medium_valid_000.txt", max_turns=40)
    assert isinstance(env, Sokoban)
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        level = file_levels(BOXOBAN / "medium_valid_000.txt")(3, split)
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


# --- folders, and turns that fit ---

SHORT = "#####\n#@$.#\n#####\n"
LONG = "############\n#@$       .#\n#          #\n############\n"


def test_a_folder_of_levels_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "001.txt").write_text(f"; 0\n{LONG}\n; 1\n{SHORT}")
    (tmp_path / "train" / "000.txt").write_text(f"; 0\n{SHORT}")
    (tmp_path / "valid.xsb").write_text(LONG)
    (tmp_path / "README.md").write_text("# no level\n###\n")
    assert [level.width for level in load_levels(tmp_path)] == [5, 12, 5, 12]
    env = make_env("sokoban", levels=tmp_path, split="all")
    assert env.num_instances == 4
    (tmp_path / "train" / "002.txt").write_text("###\n#@#\n###\n")
    load_levels.cache_clear()
    with pytest.raises(BadInput, match=r"train/002\.txt', line 1: the level has 0 boxes"):
        load_levels(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no file that ends with \.txt or \.xsb or \.sok"):
        load_levels(tmp_path / "empty")


def test_the_least_number_of_pushes() -> None:
    assert fewest_pushes(Level.of(SHORT.split())) == 1
    assert fewest_pushes(Level.of(LONG.splitlines())) == 8
    assert fewest_pushes(Level.of(["#####", "#$ .#", "# @ #", "#####"])) is None  # in a corner


def test_turns_fit_the_levels_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text(SHORT)
    long.write_text(f"{LONG}\n{SHORT}")
    assert action_budget(long) == ActionBudget(usual=18, enough=40)
    assert make_env("sokoban", levels=short).max_turns == 5  # the default is enough
    assert make_env("sokoban", levels=long).max_turns == 20
    assert make_env("sokoban", levels=long, actions_per_turn=5).max_turns == 8
    assert make_env("sokoban", levels=long, split="all").reset(0).text.startswith("Turn 1 of 20, 40 actions left.")
    env = make_env("sokoban", levels=long)
    assert isinstance(env, Sokoban) and env.options.max_turns == 20  # what is recorded of it plays the same
    assert make_env("sokoban", **env.options.model_dump()).max_turns == 20
    assert not caplog.messages
    for _ in range(2):
        assert make_env("sokoban", levels=long, max_turns=5).max_turns == 5  # what the user says holds
    assert caplog.messages == [
        f"sokoban: an episode has 10 actions (max_turns=5, actions_per_turn=2), but the levels of {long} take about 18, and up to 40; "
        "leave max_turns out for 20 turns, or raise actions_per_turn"
    ]
    assert make_env("sokoban", levels=long, max_turns=9).max_turns == 9
    assert len(caplog.messages) == 1


@pytest.mark.skipif(not BOXOBAN.exists(), reason="the Boxoban sample is not beside the checkout")
def test_boxoban_levels_can_be_solved_in_the_turns_they_get() -> None:
    env = make_env("sokoban", levels=BOXOBAN, split="all")
    assert isinstance(env, Sokoban) and env.num_instances == 2000
    assert 50 <= env.max_turns <= 90
    solved = 0
    for seed in range(0, 2000, 40):
        env.reset(seed)
        try:
            solution = solve(env.level, max_nodes=2000)
        except SearchLimit:
            continue
        assert solution is not None and 10 < len(solution) <= 2 * env.max_turns
        for place in range(0, len(solution), 2):
            step = env.step(" || ".join(solution[place : place + 2]))
        assert step.success
        solved += 1
    assert solved >= 3
