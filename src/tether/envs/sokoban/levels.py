"""A Sokoban level as four integers, and levels from XSB files (the format of Boxoban and of most collections).

Cells are numbered row by row; a set of cells is an int with those bits set. The outermost ring is always wall, so shifting a set by
1 or by the width never carries a cell around an edge: floods and pushes are a few integer operations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tether.core.errors import BadInput
from tether.envs.dataset import Pool, Row, RowError, with_progress

LEVEL_ENDINGS = (".txt", ".xsb", ".sok")
_BOARD = frozenset("#@+$*. -_")


@dataclass(frozen=True, slots=True)
class Level:
    """A starting position. Example: Level.of(["#####", "#@$.#", "#####"]) has player 6, boxes 1 << 7, targets 1 << 8."""

    height: int
    width: int
    walls: int
    targets: int
    boxes: int
    player: int
    """Number of the player's cell (not a bit)."""

    @property
    def fingerprint(self) -> str:
        return f"{self.height}x{self.width} {self.walls:x} {self.targets:x} {self.boxes:x} {self.player}"

    @property
    def summary(self) -> str:
        """In a line, for people."""
        count = self.boxes.bit_count()
        return f"{self.height} x {self.width}, {count} box{'' if count == 1 else 'es'}"

    @property
    def deltas(self) -> tuple[int, int, int, int]:
        """What Up, Down, Left, Right add to a cell's number."""
        return -self.width, self.width, -1, 1

    @classmethod
    def of(cls, rows: Sequence[str]) -> "Level":
        """From XSB rows: # wall, @ player, + player on target, $ box, * box on target, . target, space - _ floor."""
        height, width = len(rows), max(map(len, rows), default=0)
        board = "".join(row.ljust(width) for row in rows)
        if strange := set(board) - _BOARD:
            raise BadInput(f"the level has the symbol {min(strange)!r}; use # @ + $ * . and space")
        walls, boxes, targets = _cells(board, "#"), _cells(board, "$*"), _cells(board, ".+*")
        players = [cell for cell, symbol in enumerate(board) if symbol in "@+"]
        if len(players) != 1:
            raise BadInput(f"the level has {len(players)} players; give exactly one @ or +")
        if not targets or boxes.bit_count() != targets.bit_count():
            raise BadInput(
                f"the level has {boxes.bit_count()} boxes and {targets.bit_count()} targets; give as many of one as of the other"
            )
        ring = border(height, width)
        reach = _reach_inside(1 << players[0], ((1 << height * width) - 1) & ~walls, ring, width)
        if reach & ring or (boxes | targets) & ring:
            raise BadInput("the level is open at its edge; close it with walls")
        # What lies outside the walls is drawn as floor in XSB; it is wall for us, unless something stands there.
        walls = ((1 << height * width) - 1) & ~(reach | boxes | targets)
        return cls(height, width, walls, targets, boxes, players[0])


def move(walls: int, boxes: int, player: int, delta: int) -> tuple[int, int]:
    """Boxes and player after one step; into a box it is a push; against a wall or two boxes it is nothing."""
    ahead = player + delta
    if walls >> ahead & 1:
        return boxes, player
    if boxes >> ahead & 1:
        beyond = ahead + delta
        if (walls | boxes) >> beyond & 1:
            return boxes, player
        boxes ^= 1 << ahead | 1 << beyond
    return boxes, ahead


def bits(cells: int) -> Iterator[int]:
    """The numbers of the cells in a set, in ascending order."""
    while cells:
        low = cells & -cells
        yield low.bit_length() - 1
        cells ^= low


def flood(start: int, free: int, width: int) -> int:
    """Every cell of `free` that can be walked to from the set `start`."""
    reach = start
    while True:
        wider = (reach | reach << 1 | reach >> 1 | reach << width | reach >> width) & free
        if wider == reach:
            return reach
        reach = wider


@lru_cache(maxsize=64)
def border(height: int, width: int) -> int:
    """The outermost ring of cells."""
    return sum(1 << cell for cell in range(height * width) if cell // width in (0, height - 1) or cell % width in (0, width - 1))


@lru_cache(maxsize=8)
def load_levels(path: Path) -> tuple[Level, ...]:
    """Every level of an XSB file, or of the files of a folder and the folders in it, in the order of their paths."""
    levels: list[Level] = []
    for row in with_progress(level_rows(path), f"sokoban: reading {path}", "levels"):
        try:
            levels.append(read_level(row))
        except RowError as error:
            raise BadInput(f"{row.place}: {error}") from None
    if not levels:
        raise BadInput(f"levels file '{path}' holds no level; give a text file in XSB format")
    return tuple(levels)


def read_level(row: Row) -> Level:
    """The level of some rows of a board."""
    try:
        return Level.of(row.value)
    except BadInput as error:
        raise RowError(str(error)) from None


def level_rows(path: Path) -> Iterator[Row]:
    """The boards of a file or a folder as they are written. Lines that are no part of a board (numbers, titles, blanks) separate them."""
    for file in _level_files(path):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read levels file '{file}' ({error.__class__.__name__}); give a text file in XSB format") from error
        rows: list[str] = []
        for number, line in enumerate([*lines, ""], start=1):
            if "#" in line and not set(line.rstrip()) - _BOARD:
                rows.append(line.rstrip())
            elif rows:
                yield Row(rows, f"levels file '{file}', line {number - len(rows)}")
                rows = []


def _level_files(path: Path) -> list[Path]:
    """The file itself, or the level files of a folder. Boxoban's folders hold nothing else but a README."""
    if not path.is_dir():
        return [path]
    files = sorted((file for file in path.rglob("*") if file.suffix.lower() in LEVEL_ENDINGS and file.is_file()), key=Path.as_posix)
    if not files:
        raise BadInput(f"levels folder '{path}' holds no file that ends with {' or '.join(LEVEL_ENDINGS)}; give a folder of XSB files")
    return files


@lru_cache(maxsize=8)
def file_levels(path: Path) -> Pool[Level]:
    """A generator that takes its levels from a file or a folder: seeds run through the levels of the split in the order of the files."""
    return Pool(load_levels(path), env="sokoban", source=str(path))


def _cells(board: str, symbols: str) -> int:
    return sum(1 << cell for cell, symbol in enumerate(board) if symbol in symbols)


def _reach_inside(start: int, free: int, ring: int, width: int) -> int:
    """The flood from `start`, stopped at the ring: beyond it shifts would carry around the edge."""
    inner = flood(start & ~ring, free & ~ring, width)
    touched = (inner | start) << 1 | (inner | start) >> 1 | (inner | start) << width | (inner | start) >> width
    return inner | (start & ring) | (touched & ring & free)
