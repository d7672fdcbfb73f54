"""The shortest walk over the ice, for demonstrations and worked examples."""

from collections import deque

ACTIONS = ("Left", "Down", "Right", "Up")


def shortest_walk(tiles: str, size: int, start: int, goal: int) -> list[str]:
    """The fewest steps from one tile to another around the holes, by breadth-first search; of several walks the first in the order of actions.

    >>> shortest_walk("SFHFFFFFG", 3, 0, 8)
    ['Down', 'Down', 'Right', 'Right']
    """
    walks: dict[int, list[str]] = {start: []}
    queue = deque([start])
    while queue and goal not in walks:
        tile = queue.popleft()
        for action, after in steps(tile, size):
            if after not in walks and tiles[after] != "H":
                walks[after] = [*walks[tile], action]
                queue.append(after)
    return walks[goal]


def steps(tile: int, size: int) -> list[tuple[str, int]]:
    """The steps that stay on the board, each with its tile, in the order of the actions."""
    row, column = divmod(tile, size)
    stays = (column > 0, row + 1 < size, column + 1 < size, row > 0)
    tiles = (tile - 1, tile + size, tile + 1, tile - size)
    return [(action, after) for action, inside, after in zip(ACTIONS, stays, tiles, strict=True) if inside]
