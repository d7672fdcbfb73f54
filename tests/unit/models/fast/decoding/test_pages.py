"""Pages: who owns them, who shares them, and when they are free."""

import numpy as np

from tether.models.fast.decoding.pages import Pages
from tether.models.fast.decoding.protocol import NO_SHARING


def test_pages_are_given_as_they_are_needed() -> None:
    pages = Pages(num_pages=6, num_slots=3, page=16, most_positions=40)
    assert pages.num_free == 5, "page 0 belongs to nobody"
    assert pages.tables.shape == (3, 3)
    assert pages.reserve({0: 16, 1: 17}, NO_SHARING) and pages.num_free == 2
    assert pages.reserve({0: 10}, NO_SHARING) and pages.num_free == 2, "there already"
    assert pages.reserve({0: 33}, NO_SHARING) and pages.num_free == 0
    owned = [page for row in pages.tables for page in row if page]
    assert sorted(owned) == [1, 2, 3, 4, 5]
    assert (pages.tables[2] == 0).all()


def test_nothing_changes_where_memory_does_not_suffice() -> None:
    pages = Pages(num_pages=4, num_slots=3, page=16, most_positions=64)
    assert pages.reserve({0: 20}, NO_SHARING)
    before = pages.tables.copy()
    assert not pages.reserve({1: 16, 2: 16}, NO_SHARING)
    assert np.array_equal(pages.tables, before) and pages.num_free == 1
    pages.release(0)
    assert pages.reserve({1: 16, 2: 16}, NO_SHARING) and pages.num_free == 1
    assert (pages.tables[0] == 0).all()


def test_a_shared_beginning_lives_as_long_as_anyone_needs_it() -> None:
    """40 positions are two full pages and eight in a third, which each will write to."""
    pages = Pages(num_pages=10, num_slots=3, page=16, most_positions=64)
    assert pages.reserve(dict.fromkeys(range(3), 41), NO_SHARING) and pages.num_free == 0
    copies = pages.share(0, [1, 2], 40)
    assert pages.num_free == 4, "two followers gave two pages back each"
    tables = pages.tables
    assert (tables[0, :2] == tables[1, :2]).all() and (tables[0, :2] == tables[2, :2]).all()
    assert copies == [(tables[0, 2], tables[1, 2]), (tables[0, 2], tables[2, 2])]
    assert len({tables[slot, 2] for slot in range(3)}) == 3
    pages.release(0)
    assert pages.num_free == 5, "only its last page was its own"
    pages.release(1)
    assert pages.num_free == 6
    pages.release(2)
    assert pages.num_free == 9
    assert pages.reserve({0: 64, 1: 64}, NO_SHARING) and len(set(pages.tables[:2].ravel())) == 8


def test_who_will_begin_alike_shares_from_the_start() -> None:
    """Three slots of 40 positions: five pages instead of nine, and one copy of the third page for each follower."""
    pages = Pages(num_pages=6, num_slots=4, page=16, most_positions=64)
    assert not pages.reserve(dict.fromkeys(range(3), 40), NO_SHARING) and pages.num_free == 5
    assert pages.reserve({2: 40, 0: 40, 1: 40}, {2: 0, 1: 0}) and pages.num_free == 0
    tables = pages.tables.copy()
    assert (tables[0, :2] == tables[1, :2]).all() and (tables[0, :2] == tables[2, :2]).all()
    assert len({tables[slot, 2] for slot in range(3)}) == 3
    assert pages.share(0, [1, 2], 40) == [(tables[0, 2], tables[1, 2]), (tables[0, 2], tables[2, 2])]
    assert np.array_equal(pages.tables, tables), "what is shared already stays"
    for slot, free in ((0, 1), (2, 2), (1, 5)):
        pages.release(slot)
        assert pages.num_free == free
    assert pages.reserve({3: 64}, NO_SHARING) and pages.num_free == 1


def test_a_beginning_of_whole_pages_leaves_nothing_to_copy() -> None:
    pages = Pages(num_pages=10, num_slots=2, page=16, most_positions=64)
    assert pages.reserve({0: 33, 1: 33}, NO_SHARING)
    assert pages.share(0, [1], 32) == []
    assert pages.tables[0, 2] != pages.tables[1, 2]


def test_a_beginning_is_adopted_page_by_page() -> None:
    pages = Pages(num_pages=6, num_slots=3, page=16, most_positions=64)
    assert pages.reserve({0: 40}, NO_SHARING) and pages.num_free == 2
    tables = pages.tables
    assert pages.adopt(1, 0, 36) == (36, (tables[0, 2], tables[1, 2])) and pages.num_free == 1
    assert (tables[0, :2] == tables[1, :2]).all() and len({0, tables[0, 2], tables[1, 2]}) == 3
    assert pages.reserve({1: 48}, NO_SHARING) and pages.num_free == 1, "the copied page is its own"
    pages.release(0)
    assert pages.num_free == 2, "the pages that it shares live on"
    assert pages.adopt(2, 1, 32) == (32, None) and pages.num_free == 2, "whole pages need no copy"
    pages.release(2)
    assert pages.reserve({0: 32}, NO_SHARING) and pages.num_free == 0
    assert pages.adopt(2, 1, 36) == (32, None), "no page is free for the copy"
    for slot, free in ((1, 1), (2, 3), (0, 5)):
        pages.release(slot)
        assert pages.num_free == free


def test_rows_of_nobody_fill_up_a_batch() -> None:
    pages = Pages(num_pages=4, num_slots=2, page=16, most_positions=32)
    assert pages.reserve({0: 16, 1: 32}, NO_SHARING)
    rows = pages.rows([1, 0], 4)
    assert np.array_equal(rows[0], pages.tables[1]) and np.array_equal(rows[1], pages.tables[0]) and not rows[2:].any()
