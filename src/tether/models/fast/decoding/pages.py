"""The pages of a key/value cache and the slots that own them.

A page holds a fixed number of positions of one conversation, or of several conversations that begin with the same tokens. Page 0 is never
owned: rows that only fill up a batch write there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


class Pages:
    """Pages by slot, with a count of owners for each page."""

    def __init__(self, num_pages: int, num_slots: int, page: int, most_positions: int) -> None:
        self.page = page
        self.tables = np.zeros((num_slots, -(-most_positions // page)), dtype=np.int32)
        """Row s lists the pages of slot s in order, page 0 after its last one."""
        self._owned: list[list[int]] = [[] for _ in range(num_slots)]
        self._owners = np.zeros(num_pages, dtype=np.int64)
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int]) -> bool:
        """Give every slot the pages for so many positions, or none of them any.

        An empty slot that will begin with the same tokens as another one, its leader, shares the leader's full pages; `alike` names the leader.
        """
        # A page may be shared only if all of its positions are common: the last, partly filled page of the leader will also take what
        # the leader samples next. Hence the floor division here, and the rounding up below for what a slot needs in all.
        shared = {slot: positions[leader] // self.page for slot, leader in alike.items()}
        missing = {slot: -(-count // self.page) - max(len(self._owned[slot]), shared.get(slot, 0)) for slot, count in positions.items()}
        # Everything is counted before anything is taken: a reservation that fails must leave the tables as they were.
        if sum(max(0, count) for count in missing.values()) > len(self._free):
            return False
        for slot in sorted(missing, key=alike.__contains__):  # leaders first: a follower takes pages that its leader owns by then
            for page in self._owned[alike[slot]][: shared[slot]] if slot in alike else ():
                self._append(slot, page)
            for _ in range(missing[slot]):
                self._append(slot, self._free.pop())
        return True

    def release(self, slot: int) -> None:
        """Take a slot's pages away; pages without an owner are free."""
        for page in self._owned[slot]:
            self._leave(page)
        self._owned[slot].clear()
        self.tables[slot] = 0

    def share(self, leader: int, followers: Sequence[int], positions: int) -> list[tuple[int, int]]:
        """Let slots begin with another's positions: full pages are shared, the last one, to which all will write, is copied.

        The followers have pages for these positions already, their own or the leader's. Returns the copies to make, (from, to).
        """
        # A follower's own page is given back as it takes the leader's in its stead. A page that it shares already loses an owner and gains
        # one, and is not freed in between only because the leader owns it too.
        full, rest = divmod(positions, self.page)
        for follower in followers:
            for index, page in enumerate(self._owned[leader][:full]):
                self._leave(self._owned[follower][index])
                self._owners[page] += 1
                self._owned[follower][index] = page
                self.tables[follower, index] = page
        return [(self._owned[leader][full], self._owned[follower][full]) for follower in followers] if rest else []

    def adopt(self, slot: int, source: int, positions: int) -> tuple[int, tuple[int, int] | None]:
        """Let an empty slot begin with another's positions: full pages are shared, the last one, to which both may write, is copied.

        Where no page is free for the copy, it has the full ones alone. Returns how many positions it has, and the copy to make, (from, to).
        """
        full, rest = divmod(positions, self.page)
        for page in self._owned[source][:full]:
            self._append(slot, page)
        if not rest or not self._free:
            return full * self.page, None
        self._append(slot, self._free.pop())
        return positions, (self._owned[source][full], self._owned[slot][full])

    def rows(self, slots: Sequence[int], num_rows: int) -> npt.NDArray[np.int32]:
        """The tables of some slots, filled up with rows of page 0."""
        rows = np.zeros((num_rows, self.tables.shape[1]), dtype=np.int32)
        rows[: len(slots)] = self.tables[list(slots)]
        return rows

    def _append(self, slot: int, page: int) -> None:
        self.tables[slot, len(self._owned[slot])] = page
        self._owned[slot].append(page)
        self._owners[page] += 1

    def _leave(self, page: int) -> None:
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)
