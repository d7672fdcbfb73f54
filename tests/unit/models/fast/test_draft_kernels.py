"""Drafts on the device: what is guessed, kept and learned, by Triton's interpreter where there is no CUDA device."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.core.seeding import generator

pytest.importorskip("triton")

from tether.models.fast.decoding.drafts import Drafts
from tether.models.fast.kernels.drafts import DraftState, TextTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def learn(table: TextTable, slot: int, start: int, tokens: list[int]) -> None:
    table.learn(numbers(*tokens), numbers(*[slot] * len(tokens)), numbers(*range(start, start + len(tokens))))


def state_of(slots: list[int], lengths: list[int], most_each: int, rounds: int = 2, num_fed: int | None = None) -> DraftState:
    state = DraftState(len(slots), most_each, rounds, 1, DEVICE, num_fed)
    state.slots_B.copy_(numbers(*slots))
    state.lengths_B.copy_(numbers(*lengths))
    return state


def guessed(table: TextTable, slot: int, length: int, num_fed: int) -> list[int]:
    state = state_of([slot], [length], num_fed)
    table.guess(state)
    assert state.fed_starts_B.tolist() == [0] and state.filled_B.tolist() == [length - 1 + int(state.fed_counts_B)]
    return [int(token) for token in state.fed_S]


def test_a_draft_is_what_followed_the_longest_match_and_then_the_latest() -> None:
    table = TextTable(3, 20, DEVICE)
    learn(table, 0, 0, [1, 2, 3, 4, 50, 51, 52])
    learn(table, 1, 0, [7, 3, 4, 60, 61, 62])
    learn(table, 2, 0, [9, 3, 4])
    assert guessed(table, 2, 3, 4) == [4, 60, 61, 62], "two tokens match: of one step, the slot that stands last"
    learn(table, 2, 0, [1, 2, 3, 4])
    assert guessed(table, 2, 4, 3) == [4, 50, 51], "four tokens match"
    learn(table, 0, 7, [3, 4, 70])
    learn(table, 2, 0, [9, 9, 3, 4])
    assert guessed(table, 2, 4, 3) == [4, 70, 0], "the latest; nothing is known behind it"
    learn(table, 2, 0, [4, 3])
    assert guessed(table, 2, 2, 3) == [3, 0, 0], "no match"
    assert guessed(table, 2, 1, 2) == [4, 0], "one token is no run"


def test_patches_are_recognised_and_never_drafted() -> None:
    """They are below zero. Behind the second image stands what stood behind it before, not what stood behind the first one; a draft has words only."""
    table = TextTable(3, 20, DEVICE)
    learn(table, 0, 0, [-11, -12, 50, 51, -21, -22, 60, 61])
    learn(table, 1, 0, [-21, -22])
    assert guessed(table, 1, 2, 3) == [-22, 60, 61], "the last token is what was given"
    learn(table, 2, 0, [50, 51])
    assert guessed(table, 2, 2, 4) == [51, 0, 0, 60]


def test_nothing_is_known_of_what_was_forgotten() -> None:
    table = TextTable(2, 20, DEVICE)
    learn(table, 0, 0, [1, 2, 3])
    table.forget()
    learn(table, 1, 0, [1, 2])
    assert guessed(table, 1, 2, 2) == [2, 0]


def test_a_text_that_was_overwritten_is_not_copied() -> None:
    """The place of a run is compared with the tokens that stand there now."""
    table = TextTable(2, 20, DEVICE)
    learn(table, 0, 0, [1, 2, 3])
    learn(table, 1, 0, [1, 2])
    assert guessed(table, 1, 2, 2) == [2, 3]
    learn(table, 0, 0, [5, 6, 7])
    assert guessed(table, 1, 2, 2) == [2, 0]


def test_texts_that_begin_alike() -> None:
    table = TextTable(3, 20, DEVICE)
    learn(table, 0, 0, [1, 2, 3, 1, 2])
    table.copy(0, torch.tensor([1, 2], device=DEVICE))
    assert guessed(table, 2, 5, 3) == [2, 3, 1]


def test_what_was_sampled_counts_as_far_as_the_draft_agrees() -> None:
    """Three rows of four fed tokens: nothing right, two right, all right; a fourth only fills up the batch."""
    table = TextTable(3, 20, DEVICE)
    for slot, text in enumerate(([1, 2], [3, 4, 5], [6, 7])):
        learn(table, slot, 0, text)
    state = state_of([0, 1, 2, table.unused_slot], [2, 3, 2, 1], 4)
    table.guess(state)
    assert state.fed_counts_B.tolist() == [1] * 4, "no draft for what was never said before"
    state.fed_counts_B.fill_(4)
    state.fed_starts_B.copy_(numbers(0, 4, 8, 12))
    state.fed_S.copy_(numbers(2, 11, 12, 13, 5, 21, 22, 23, 7, 31, 32, 33, 0, 44, 45, 46))
    state.drawn.sampled_BK.copy_(torch.tensor([[19, 11, 12, 13], [21, 22, 29, 24], [31, 32, 33, 34], [44, 45, 46, 47]]).reshape(-1, 1))
    state.drawn.logprobs_BK.copy_(-torch.arange(16.0).reshape(-1, 1))
    table.accept(state)
    assert state.counts_B.tolist() == [1, 3, 4, 4]
    assert state.lengths_B.tolist() == [3, 6, 6, 5]
    assert state.sampled_BK[0, :1].tolist() == [19] and state.logprobs_BK[0, :1].tolist() == [0.0]
    assert state.sampled_BK[1, :3].tolist() == [21, 22, 29] and state.logprobs_BK[1, :3].tolist() == [-4.0, -5.0, -6.0]
    assert state.sampled_BK[2, :4].tolist() == [31, 32, 33, 34] and state.logprobs_BK[2, :4].tolist() == [-8.0, -9.0, -10.0, -11.0]
    learn(table, 0, 3, [6, 7, 31])
    assert guessed(table, 0, 6, 4) == [31, 32, 33, 34], "what was sampled is known from now on"
    state.uniforms_BK.copy_(torch.arange(32.0).reshape(4, 8))
    table.guess(state)
    assert state.fed_counts_B.tolist() == [4, 1, 1, 1] and state.fed_starts_B.tolist() == [0, 4, 5, 6], (
        "the first row's slot goes on behind it"
    )
    assert state.drawn.uniforms_BK[:7, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 11.0, 20.0, 28.0]
    assert state.fed_S.tolist() == [19, 6, 7, 31, 29, 34, 0] + [0] * 9
    state.drawn.sampled_BK.fill_(40)
    table.accept(state)
    assert state.counts_B.tolist() == [2, 4, 5, 5]
    assert state.sampled_BK[1, :4].tolist() == [21, 22, 29, 40]
    learn(table, 0, 0, [44, 45])
    assert guessed(table, 0, 2, 2) == [45, 0], "what a row that fills up the batch says is nobody's text"


def test_what_a_call_gives_and_gets() -> None:
    """Two slots of three rows, two pages each, at most four tokens: what is copied to the device, and what comes back."""
    state = DraftState(3, 2, 2, 2, DEVICE)
    tables, uniforms = np.array([[5, 6], [7, 0], [0, 0]], dtype=np.int32), np.array([[0.5, 0.25, 0.75], [0.1, 0.2, 0.3]], dtype=np.float32)
    given = torch.from_numpy(state.given(tables, [4, 9], [10, 20], uniforms, 30)).to(DEVICE)
    state.counts_B.fill_(8)
    state.memory[: len(given)] = given
    assert state.tables_BX.tolist() == tables.tolist()
    assert (state.slots_B.tolist(), state.lengths_B.tolist(), state.counts_B.tolist()) == ([4, 9, 30], [11, 21, 1], [0, 0, 0])
    torch.testing.assert_close(state.uniforms_BK[:2, :3].cpu(), torch.from_numpy(uniforms))
    assert not state.uniforms_BK[:, 3].any() and not state.uniforms_BK[2].any()
    state.sampled_BK.copy_(torch.arange(12).reshape(3, 4))
    state.logprobs_BK.copy_(-torch.arange(12.0).reshape(3, 4) / 8)
    state.counts_B.copy_(numbers(2, 4, 1))
    sampled, logprobs, counts = state.returned(2)
    assert sampled.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and counts.tolist() == [2, 4]
    assert logprobs.tolist() == [[-0.0, -0.125, -0.25, -0.375], [-0.5, -0.625, -0.75, -0.875]]


@pytest.mark.parametrize(
    ("num_fed", "given"),
    [
        (4, [1, 1, 1, 1]),
        (5, [1, 2, 1, 1]),
        (6, [1, 2, 1, 2]),
        (9, [1, 4, 1, 3]),
        (11, [2, 4, 1, 4]),
        (12, [3, 4, 1, 4]),
        (16, [4, 4, 1, 4]),
    ],
)
def test_tokens_go_where_they_are_most_likely_right(num_fed: int, given: list[int]) -> None:
    """Four rows: the first matches by two tokens, the second and the last by four or more, the third not at all; none gets more than four."""
    table = TextTable(6, 20, DEVICE)
    learn(table, 4, 0, [1, 2, 3, 4, 50, 51, 52])
    for slot, text in enumerate(([9, 3, 4], [1, 2, 3, 4], [8, 8], [1, 2, 3, 4])):
        learn(table, slot, 0, text)
    state = state_of([0, 1, 2, 3], [3, 4, 2, 4], 4, num_fed=num_fed)
    table.guess(state)
    assert state.matches_B.tolist() == [1, 2, 0, 2]
    assert state.fed_counts_B.tolist() == given
    assert state.fed_starts_B.tolist() == [sum(given[:row]) for row in range(4)]
    assert state.filled_B.tolist() == [length - 1 + number for length, number in zip((3, 4, 2, 4), given, strict=True)]
    fed = [[4, 50, 51, 52], [4, 50, 51, 52], [8], [4, 50, 51, 52]]
    wanted = [token for row, number in zip(fed, given, strict=True) for token in row[:number]]
    assert state.fed_S.tolist() == wanted + [0] * (num_fed - len(wanted))


def test_the_device_guesses_what_the_host_guesses() -> None:
    """Texts of few different tokens that grow in turn: runs of every length occur again and again."""
    random = generator("test", "draft kernels")
    table, drafts = TextTable(4, 64, DEVICE), Drafts()
    texts: list[list[int]] = [[] for _ in range(4)]
    num_guessed = 0
    for _ in range(40):
        slot = int(random.integers(4))
        new = random.integers(1, 4, int(random.integers(1, 9))).tolist()
        if len(texts[slot]) + len(new) > 60:
            continue
        learn(table, slot, len(texts[slot]), new)
        drafts.write(slot, len(texts[slot]), new)
        texts[slot] += new
        wanted = drafts.guess(slot, 5)
        num_guessed += bool(wanted)
        assert guessed(table, slot, len(texts[slot]), 6)[: 1 + len(wanted)] == [texts[slot][-1], *wanted]
    assert num_guessed > 20
