"""The rotary positions of conversations with images, which are fewer than their tokens (`Vision.places`).

A word stands where what precedes it ends. So for every position of a row the place of what would follow is remembered: a conversation may go on from
any of them, also inside an image.

Shape legend: B rows of a call, S tokens fed to all of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tether.models.vision import PlacesOf

Ints = npt.NDArray[np.int64]


class Places:
    """Of some rows."""

    def __init__(self, num_rows: int, num_positions: int = 0) -> None:
        self._next: npt.NDArray[np.int32] = np.zeros((num_rows, num_positions), dtype=np.int32)
        """[rows, positions]: the rotary position of what follows each token."""

    def resize(self, num_rows: int, num_positions: int) -> None:
        """Rows and positions that there are before and after keep what they hold."""
        kept = self._next[:num_rows, :num_positions]
        self._next = np.pad(kept, ((0, num_rows - len(kept)), (0, num_positions - kept.shape[1])))

    def of_texts(self, places_of: PlacesOf, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Ints:
        """[3, S]: of texts that are fed to rows, one behind the other."""
        found = [np.zeros((3, 0), dtype=np.int64)]
        for row, start, text in zip(rows, starts, texts, strict=True):
            places_3T, after_T = places_of(text, int(self._next[row, start - 1]) if start else 0)
            self._next[row, start : start + len(text)] = after_T
            found.append(places_3T)
        return np.concatenate(found, axis=1)

    def of_words(self, rows: Sequence[int], starts: Sequence[int], count: int = 1) -> Ints:
        """[B]: of the first of so many words for each row; there may be fewer of them than were announced."""
        rows_B, starts_B = np.asarray(rows), np.asarray(starts)
        places_B = np.where(starts_B > 0, self._next[rows_B, np.maximum(starts_B - 1, 0)], 0)
        numbers_K, last = np.arange(count), self._next.shape[1] - 1  # nothing follows the last position, whatever is written there
        self._next[rows_B[:, None], np.minimum(starts_B[:, None] + numbers_K, last)] = places_B[:, None] + numbers_K + 1
        return places_B

    def copy(self, source: int, target: slice | int | Sequence[int], length: int) -> None:
        """Let rows begin like another one."""
        self._next[target, :length] = self._next[source, :length]

    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange what two rows begin with."""
        self._next[[first, second], :length] = self._next[[second, first], :length]
