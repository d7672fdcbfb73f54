"""A demonstration has the token layout of a rollout, its prompts are held out whole, and what does not fit is left out."""

import random
from typing import Any

import pytest

import tether
from tether.core.errors import BadInput
from tether.core.protocols import few_shot_of
from tether.core.seeding import instance_seed
from tether.models.chat import ChatFormat
from tether.training.sft.demonstrations import Demonstration, demonstrate_turns, demonstration, fitting, hold_out, turn_end
from tether.training.sft.experts import Experts, make_expert_envs, play_expert
from tether.training.sft.settings import Weaknesses

SURE = Weaknesses()


def _sequence(demonstrated: Demonstration) -> Any:
    (sequence,) = demonstrated.trajectory.sequences
    return sequence


def test_the_tokens_are_those_of_a_rollout(tiny: Any, chat: ChatFormat) -> None:
    """The same texts, played by the scripted engine in the same environment, give the same ids and the same loss mask."""
    seed = instance_seed(0, 1, 0)
    env = tether.make_env("sokoban")
    exchanges = play_expert(env, seed, random.Random(0), SURE).exchanges
    assert len(exchanges) > 1
    engine = tether.ScriptedEngine(lambda text, number, turn: exchanges[min(turn, len(exchanges) - 1)][1], tiny.tokenizer)
    (group,) = tether.play("sokoban", engine, prompts=1, group_size=1)
    (rolled,) = group.trajectories[0].sequences
    few_shot = few_shot_of(env)
    assert len(few_shot) == 3
    plain = _sequence(demonstration("p", demonstrate_turns(chat, env.instructions, exchanges, end_of_turn=False, few_shot=few_shot)))
    assert plain.token_ids == rolled.token_ids and plain.loss_mask == rolled.loss_mask


def test_the_end_of_a_turn_is_one_more_token_in_the_loss_and_none_in_the_text(tiny: Any, chat: ChatFormat) -> None:
    exchanges = [("a", " b </think> <answer> c </answer>"), ("d", " e </think> <answer> f </answer>")]
    plain, taught = (_sequence(demonstration("p", demonstrate_turns(chat, "s", exchanges, end))) for end in (False, True))
    end = tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end(chat) == end
    assert taught.token_ids == [*plain.token_ids, end]
    more = [place for place, (a, b) in enumerate(zip([*plain.loss_mask, False], taught.loss_mask, strict=True)) if a != b]
    assert len(more) == 2 and all(taught.loss_mask[place] and taught.token_ids[place] == end for place in more)
    responses = [taught.token_ids[n] for n, flag in enumerate(taught.loss_mask) if flag]
    assert tiny.tokenizer.decode(responses) == " b </think> <answer> c </answer><|im_end|> e </think> <answer> f </answer><|im_end|>"


def test_experts_play_the_training_split_and_the_same_again(chat: ChatFormat) -> None:
    def record(seed: int) -> list[Demonstration]:
        envs = make_expert_envs(["frozen_lake", "countdown"], {"frozen_lake": {"size": 3}})
        return Experts(envs, chat, SURE, end_of_turn=True).record(seed, range(12), lambda *_: None)

    first = record(0)
    assert [each.trajectory for each in first] == [each.trajectory for each in record(0)]
    assert [each.prompt for each in first] != [each.prompt for each in record(1)]
    assert [each.prompt.split()[0] for each in first[:4]] == ["FrozenLake", "Countdown", "FrozenLake", "Countdown"]
    lakes = {each.prompt.split()[1] for each in first[::2]}
    assert all(len(lake) == 9 for lake in lakes)
    validation = tether.make_env("frozen_lake", size=3, split="validation")
    for seed in range(200):
        validation.reset(seed)
        assert validation.instance not in lakes


def test_demonstrations_hold_no_examples_unless_they_are_asked_for() -> None:
    lake, puzzles = make_expert_envs(["frozen_lake", "countdown"], {"countdown": {"few_shot": 2}})
    lake.reset(0)
    puzzles.reset(0)
    assert (len(few_shot_of(lake)), len(few_shot_of(puzzles))) == (0, 2)


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (["webshop"], {}, "environment 'webshop' has no expert; experts play frozen_lake, sokoban, countdown"),
        (["sokobann"], {}, "unknown source 'sokobann': did you mean 'sokoban'"),
        (["sokoban"], {"frozen_lake": {"size": 3}}, "experts.options are given for frozen_lake, but the source is sokoban"),
        (["sokoban"], {"sokoban": {"sise": 3}}, "sise"),
    ],
)
def test_a_source_without_an_expert(names: list[str], options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make_expert_envs(names, options)


def _short(prompt: str, tokens: int = 2) -> Demonstration:
    from tether.core.enums import FinishReason
    from tether.core.types import Turn

    return demonstration(prompt, [Turn((1,), (2,) * (tokens - 1), (0.0,) * (tokens - 1), FinishReason.STOP_TEXT, "", None)])


def test_prompts_are_held_out_whole() -> None:
    every = [_short(f"prompt {number % 20}") for number in range(60)]
    learned, held_out = hold_out(every, 0.1, seed=0)
    assert (len(learned), len(held_out)) == (54, 6)  # 2 of the 20 prompts, 3 demonstrations each
    assert not {each.prompt for each in learned} & {each.prompt for each in held_out}
    assert [id(each) for each in hold_out(every, 0.1, seed=0)[1]] == [id(each) for each in held_out]
    assert {each.prompt for each in hold_out(every, 0.1, seed=1)[1]} != {each.prompt for each in held_out}


@pytest.mark.parametrize(("prompts", "share", "held"), [(20, 0.0, 0), (1, 0.5, 0), (2, 0.9, 1), (30, 0.01, 1), (10, 0.25, 2)])
def test_how_many_are_held_out(prompts: int, share: float, held: int) -> None:
    learned, held_out = hold_out([_short(str(number)) for number in range(prompts)], share, seed=0)
    assert (len(learned), len(held_out)) == (prompts - held, held)


def test_too_long_is_left_out_and_nothing_left_is_an_error() -> None:
    assert [each.num_tokens for each in fitting([_short("a", 5), _short("b", 6), _short("c", 7)], 6)] == [5, 6]
    with pytest.raises(BadInput, match="longer than the 3 tokens that fit: the shortest has 5; raise max_context"):
        fitting([_short("a", 7), _short("b", 5)], 3)
