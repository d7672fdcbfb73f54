"""What a step costs: operations counted by hand, seconds that go to the innermost stage, rates and shares from both."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf

from tether.algorithms.batch import Batch
from tether.algorithms.presets import preset
from tether.core.enums import FinishReason, StopReason
from tether.core.protocols import EngineStatistics
from tether.core.types import Group, Trajectory, Turn
from tether.models.critic import Critic
from tether.models.lora import add_lora
from tether.models.policy import Policy
from tether.training import throughput
from tether.training.learner import Learner, Rates
from tether.training.settings import LearnerSettings
from tether.training.throughput import Arithmetic, StepTimer, arithmetic_of, fed_spans, release_unused_memory, unused_memory
from tether.training.totals import UpdateWork

LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32
"""q; k and v of 2 heads of 8; o; gate, up and down; two norms."""
TABLE = 61 * 32


def _llama(*, tied: bool = False, **changes: Any) -> Any:
    config = hf.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )
    return hf.LlamaForCausalLM(config).eval()


def test_operations_by_hand() -> None:
    """Three tokens from the start look at 1 + 2 + 3 positions; two more at 4 + 5."""
    numbers = Arithmetic(multiplied=100, trained=100, attention=7, head=40)
    assert numbers.forward([(0, 3)], 1) == 2 * 100 * 3 + 2 * 40 + 4 * 7 * 6
    assert numbers.forward([(3, 5)], 2) == 2 * 100 * 2 + 2 * 40 * 2 + 4 * 7 * 9
    assert numbers.forward([(0, 3), (3, 5)], 3) == numbers.forward([(0, 5)], 3)
    assert numbers.training(UpdateWork(5, 6 + 3, 2)) == 6 * 100 * 5 + 6 * 40 * 2 + 3 * 4 * 7 * (6 + 3)
    frozen = Arithmetic(multiplied=100, trained=10, attention=7, head=40, trains_head=False)
    assert frozen.training(UpdateWork(3, 6, 2)) == (4 * 100 + 2 * 10) * 3 + 4 * 40 * 2 + 12 * 7 * 6
    assert numbers.forward([], 0) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_is_only_looked_up_does_not_count(tied: bool) -> None:
    counted = arithmetic_of(_llama(tied=tied))
    assert counted is not None
    assert counted.multiplied == counted.trained == 2 * LAYER + 32
    assert counted.head == TABLE and counted.trains_head  # the head is the table, or one of its own
    assert counted.attention == 2 * 4 * 8
    backbone = arithmetic_of(_llama(tied=tied), with_head=False)
    assert backbone is not None and (backbone.multiplied, backbone.head) == (2 * LAYER + 32, 0)


def test_adapters_are_multiplied_and_the_rest_gets_no_gradient() -> None:
    model = _llama()
    add_lora(model, 4, 8, ["q_proj"])
    counted = arithmetic_of(model)
    assert counted is not None
    adapters = 2 * 4 * (32 + 32)
    assert counted.trained == adapters and counted.multiplied == 2 * LAYER + 32 + adapters
    assert counted.head == TABLE and not counted.trains_head


def test_heads_of_a_width_of_their_own() -> None:
    counted = arithmetic_of(_llama(head_dim=16))
    assert counted is not None and counted.attention == 2 * 4 * 16


def test_experts_are_not_counted() -> None:
    model = _llama()
    model.config.num_local_experts = 8
    assert arithmetic_of(model) is None
    timer = StepTimer(model)
    with timer.stage("rollout"):
        pass
    timer.count_rollout([_group([(5, 2)])])
    assert timer.timings().share_of_peak == {} and timer.timings().tokens_per_second is not None


def _group(sizes: list[tuple[int, int]], *, same: bool = True, new_context: bool = False) -> Group:
    """Trajectories of two turns, each `fed` tokens and then `said`; members begin with the same prompt, unless they do not."""
    trajectories = []
    for member, (fed, said) in enumerate(sizes):
        turns = []
        for number in range(2):
            context = tuple(range(fed)) if same or number else (100 + member, *range(1, fed))
            turns.append(
                Turn(context, (9,) * said, (-1.0,) * said, FinishReason.LENGTH, "", None, 0.0, new_context=new_context or number == 0)
            )
        trajectories.append(Trajectory(0, member, 0, turns, StopReason.TURN_LIMIT))
    return Group(0, 0, trajectories)


def test_members_that_begin_alike_share_their_prompt() -> None:
    assert fed_spans([_group([(5, 2), (5, 3)])]) == [(0, 14), (5, 16)]
    assert fed_spans([_group([(5, 2), (5, 3)], same=False)]) == [(0, 14), (0, 16)]
    assert fed_spans([_group([(5, 2), (6, 2)])]) == [(0, 14), (0, 16)]  # another prompt, though it begins with the same words
    assert fed_spans([_group([(5, 2)]), _group([(5, 2)])]) == [(0, 14), (0, 14)]  # groups do not share
    assert fed_spans([_group([(5, 2), (5, 3)], new_context=True)]) == [(0, 7), (0, 7), (5, 8), (0, 8)]
    assert fed_spans([Group(0, 0, [Trajectory(0, 0, 0, [], StopReason.ENV_ERROR)])]) == []


class _Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    told = _Clock()
    monkeypatch.setattr(throughput, "time", told)
    return told


def test_seconds_go_to_the_innermost_stage(clock: _Clock) -> None:
    timer = StepTimer(_llama())
    clock.now = 100.0
    with timer.stage("select"):
        clock.now += 1
        for _ in range(2):
            with timer.stage("rollout"):
                clock.now += 10
            clock.now += 0.25
    clock.now += 50  # outside every stage
    with timer.stage("update"):
        clock.now += 3
    assert timer.timings().seconds == {"select": 1.5, "rollout": 20.0, "update": 3.0}
    timer.begin()
    assert timer.timings().seconds == {} and timer.timings().tokens_per_second is None and timer.timings().engine == {}


def test_a_stage_that_fails_is_closed(clock: _Clock) -> None:
    timer = StepTimer(_llama())

    def fail() -> None:
        with timer.stage("rollout"):
            clock.now += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    with timer.stage("update"):
        clock.now += 2
    assert timer.timings().seconds == {"rollout": 1.0, "update": 2.0}


def test_rates_and_shares(clock: _Clock) -> None:
    model = _llama()
    critic = Critic(Policy(_llama()), shared=False)
    timer = StepTimer(model, critic)
    timer.peak = 1e9
    with timer.stage("rollout"):
        clock.now += 4
    with timer.stage("update"):
        clock.now += 5
    timer.count_rollout([_group([(5, 2), (5, 3)])])
    timer.count_update(60, UpdateWork(48, 330, 20))
    timer.count_engine(EngineStatistics(decode_calls=3))
    timer.count_engine(EngineStatistics(decode_calls=4, evictions=1))
    found = timer.timings()
    assert found.tokens_per_second == (4 + 6) / 4
    assert found.update_tokens_per_second == 2 * 30 / 5
    body = 2 * LAYER + 32
    pairs = 14 * 15 // 2 + 16 * 17 // 2
    rollout = 2 * body * (14 + 11) + 2 * TABLE * (4 + 6) + 4 * 64 * (pairs - 15)
    update = 6 * 2 * body * 48 + 6 * TABLE * 20 + 2 * 12 * 64 * 330
    assert found.share_of_peak == pytest.approx({"rollout": rollout / 4e9, "update": update / 5e9})
    assert found.engine == {**dict.fromkeys(found.engine, 0), "decode_calls": 7, "evictions": 1}
    assert found.unused_memory is None
    assert 2**20 < found.peak_memory["rollout"] <= found.peak_memory["update"]


def test_no_stage_is_faster_than_the_device(clock: _Clock) -> None:
    """A peak that was measured while others used the machine is raised to what a stage reached: 303% of a peak is no share."""
    timer = StepTimer(_llama())
    timer.peak = 10.0
    for seconds, share in ((2.0, 1.0), (4.0, 0.5), (1.0, 1.0), (2.0, 0.5)):
        timer.begin()
        with timer.stage("update"):
            clock.now += seconds
        timer.count_update(10, UpdateWork(10, 55, 4))
        assert timer.timings().share_of_peak == pytest.approx({"update": share})


@pytest.mark.parametrize("share", [True, False])
def test_what_several_sequences_share_is_work_once(share: bool, small_llama: Any) -> None:
    """Three sequences with one prompt of 80 tokens: its tokens and what they look at count once where it is computed once, and
    the head counts for sampled tokens alone."""
    prompt, ends = torch.arange(80) % 61, (7, 9, 11)
    ids = torch.zeros(3, 100, dtype=torch.long)
    for row, own in enumerate(ends):
        ids[row, :80] = prompt
        ids[row, 80 : 80 + own] = torch.arange(own) + row + 1
    columns = torch.arange(100)
    lengths = torch.tensor([80 + own for own in ends])
    mask = (columns >= 80) & (columns < lengths[:, None])
    zeros = torch.zeros(3, 100)
    rows = torch.arange(3)
    turn_ends = columns == lengths[:, None] - 1
    batch = Batch(ids, mask, zeros, zeros.double(), turn_ends, lengths, rows, torch.zeros(3, dtype=torch.long))
    batch = dataclasses.replace(batch, advantages_BT=mask.float())
    settings = LearnerSettings(learning_rate=1e-3, update_batch=3, share_prompts=share)
    learner = Learner(Policy(small_llama(), max_positions=128), preset("dr_grpo"), settings, temperature=1.0, max_tokens=16)
    learner.update(batch, [rows, rows], 1.0, Rates(1e-3))
    own_pairs = sum(sum(range(81, 81 + own)) for own in ends)
    prompts = 1 if share else 3
    assert learner.work == tuple(2 * number for number in (sum(ends) + 80 * prompts, own_pairs + 3240 * prompts, sum(ends)))


def test_a_shared_critic_costs_next_to_nothing(clock: _Clock) -> None:
    split = Policy(_llama())
    shares = []
    for critic in (None, Critic(split, shared=True)):
        timer = StepTimer(split.module, critic)
        with timer.stage("update"):
            clock.now += 1
        timer.count_update(10, UpdateWork(10, 55, 4))
        shares.append(timer.timings().share_of_peak["update"])
    assert shares[0] == shares[1]


class _Card:
    """torch.cuda of a card of 1,000 bytes."""

    def __init__(self, reserved: int, allocated: int, free: int) -> None:
        self._reserved, self._allocated, self._free = reserved, allocated, free
        self.emptied = 0

    def memory_reserved(self, _: torch.device) -> int:
        return self._reserved

    def memory_allocated(self, _: torch.device) -> int:
        return self._allocated

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self._free, 1000

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.parametrize(
    ("reserved", "allocated", "free", "emptied"),
    [(700, 500, 50, 1), (700, 500, 200, 0), (550, 500, 50, 0)],
    ids=["much unused, little free", "much free", "little unused"],
)
def test_unused_memory_is_released_where_the_card_is_nearly_full(
    reserved: int, allocated: int, free: int, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = _Card(reserved, allocated, free)
    monkeypatch.setattr(torch, "cuda", card)
    assert unused_memory(torch.device("cuda")) == reserved - allocated
    release_unused_memory(torch.device("cuda"))
    assert card.emptied == emptied
    release_unused_memory(torch.device("cpu"))
    assert card.emptied == emptied
