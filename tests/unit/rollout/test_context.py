"""Each context mode shows literally what it promises, with the very tokens that were sampled, and the learner scores what was sampled."""

from typing import Any

import pytest
import torch

import tether
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import UnknownName
from tether.core.protocols import ContextReset, Sampling
from tether.core.types import Completion, Observation, Step, Turn
from tether.diagnostics.pairs import first_turn_pairs, read_rows, rollout_rows
from tether.models.logprobs import token_logprobs
from tether.models.policy import Policy
from tether.rollout.context import SUMMARY_CHARS, SUMMARY_TURNS, make_context
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.pack import pack
from tether.rollout.sampler import group_trajectories, training_plan

SEEDS = EpisodeSeeds(group=0, member=0, instance=1, env_seed=2, sampling=3)
OPENING = "<|im_start|>system\nWalk to the door.<|im_end|>\n<|im_start|>user\nYou are in the hall."
REPLY = "<|im_end|>\n<|im_start|>assistant\n<think>"
NEXT = "<|im_end|>\n<|im_start|>user\n"


class Walk:
    """Five rooms; an answer of one letter goes on and pays, another one is not valid."""

    name, max_turns, instructions = "walk", 5, "Walk to the door."

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self.turn = 0
        return Observation("You are in the hall.")

    def step(self, answer: str) -> Step:
        self.turn += 1
        valid = len(answer) == 1
        info = {"valid": valid, "truncated": self.turn == 5}
        return Step(Observation(f"You are in room {self.turn}."), 0.5 if valid else -0.0, self.turn == 5, False, info)


SAID = [f" {thought} </think> <answer> {answer} </answer>" for thought, answer in [("a", "A"), ("bb", "and  B"), ("c", "C"), ("d", "D")]]


def _prompts(chat: Any, mode: str, last_k: int = 1, env: Any = None) -> tuple[list[str], list[bool]]:
    """The whole text before the model at each of five turns, and whether it began anew; every token is the one that was given."""
    episode = Episode(env or Walk(), chat, SEEDS, EpisodeRules(900, 20, -0.1, context=mode, last_k=last_k))
    feed: Any = episode.begin()
    behind: tuple[int, ...] = ()
    texts, anew = [], []
    for said in [*SAID, SAID[0]]:
        context = feed if isinstance(feed, ContextReset) else behind + feed
        texts.append(chat.decode(context))
        anew.append(isinstance(feed, ContextReset))
        ids = chat.encode(said)
        feed = episode.receive(Completion(ids, (-1.0,) * len(ids), FinishReason.STOP_TEXT))
        behind = context + ids
    assert feed is None
    assert [turn.new_context for turn in episode.trajectory.turns] == anew
    last = episode.trajectory.sequences[-1]
    assert tuple(last.token_ids) == behind, "what is trained on is what stood before the model"
    return texts, anew


def test_full_history(chat: Any) -> None:
    texts, anew = _prompts(chat, "full")
    assert anew == [True, False, False, False, False]
    assert texts[0] == OPENING + REPLY
    for n in range(1, 5):
        assert texts[n] == f"{texts[n - 1]}{SAID[n - 1]}{NEXT}You are in room {n}.{REPLY}"


def test_last_two_turns(chat: Any) -> None:
    texts, anew = _prompts(chat, "last_k", 2)
    assert anew == [True, False, False, True, True]
    assert texts[:3] == _prompts(chat, "full")[0][:3]
    assert texts[3] == (
        f"{OPENING}\n\n[1 turn left out here.]\n\nYou are in room 1.{REPLY}{SAID[1]}{NEXT}You are in room 2.{REPLY}{SAID[2]}"
        f"{NEXT}You are in room 3.{REPLY}"
    )
    assert texts[4] == (
        f"{OPENING}\n\n[2 turns left out here.]\n\nYou are in room 2.{REPLY}{SAID[2]}{NEXT}You are in room 3.{REPLY}{SAID[3]}"
        f"{NEXT}You are in room 4.{REPLY}"
    )


def test_as_many_turns_as_there_are_is_full_history(chat: Any) -> None:
    assert _prompts(chat, "last_k", 4) == _prompts(chat, "full")
    assert _prompts(chat, "last_k", 3)[1] == [True, False, False, False, True]


def test_single_turn_with_a_summary(chat: Any) -> None:
    texts, anew = _prompts(chat, "single_turn")
    assert anew == [True] * 5
    assert texts[0] == OPENING + REPLY, "the first observation is the present one: nothing is said twice"
    assert texts[1] == f"{OPENING}\n\nTurns so far:\n1. A: reward 0.5\n\nYou are in room 1.{REPLY}"
    assert texts[3] == (
        f"{OPENING}\n\nTurns so far:\n1. A: reward 0.5\n2. and B (not valid): reward 0\n3. C: reward 0.5\n\nYou are in room 3.{REPLY}"
    )


def test_the_present_observation_alone(chat: Any) -> None:
    texts, anew = _prompts(chat, "markov")
    assert anew == [True] * 5
    first = "<|im_start|>system\nWalk to the door.<|im_end|>\n<|im_start|>user\n"
    assert texts == [f"{first}You are in {place}.{REPLY}" for place in ("the hall", "room 1", "room 2", "room 3", "room 4")]


class WalkWithExamples(Walk):
    few_shot = (("You are in a cave.", f"<think>{SAID[0]}"), ("You are in a tent.", f"<think>{SAID[2]}"))


SHOWN = f"You are in a cave.{REPLY}{SAID[0]}{NEXT}You are in a tent.{REPLY}{SAID[2]}{NEXT}"


@pytest.mark.parametrize("mode", ["full", "last_k", "single_turn", "markov"])
def test_examples_stand_as_turns_before_the_first_observation(chat: Any, mode: str) -> None:
    """In every context, with their reasoning; everything else is as without them."""
    without, anew = _prompts(chat, mode)
    texts, also_anew = _prompts(chat, mode, env=WalkWithExamples())
    system = "<|im_start|>system\nWalk to the door.<|im_end|>\n<|im_start|>user\n"
    assert texts == [f"{system}{SHOWN}{text.removeprefix(system)}" for text in without] and anew == also_anew


@pytest.mark.parametrize("few_shot", [("a", "b"), ("ab", "cd"), [("a",)], [("a", 1)], 3])
def test_examples_that_are_no_pairs_of_texts_are_the_environments_error(chat: Any, few_shot: Any) -> None:
    walk = Walk()
    walk.few_shot = few_shot  # type: ignore[attr-defined]
    episode = Episode(walk, chat, SEEDS, EpisodeRules(900, 20, -0.1))
    assert episode.begin() is None and episode.trajectory.stop_reason is StopReason.ENV_ERROR
    assert "few_shot is" in episode.trajectory.error and "pairs of texts" in episode.trajectory.error


def _turn(chat: Any, text: str, observation: str, *, reward: float = 0.0, valid: bool = True) -> Turn:
    ids = chat.encode(text)
    return Turn((), ids, (0.0,) * len(ids), FinishReason.STOP_TEXT, text, None, reward=reward, valid=valid, observation=observation)


def test_a_summary_is_bounded(chat: Any) -> None:
    context = make_context("single_turn", 1, chat)
    context.begin("Rules.", "first")
    for number in range(1, SUMMARY_TURNS + 3):
        feed = context.advance(_turn(chat, "", "", reward=number / 7), f"{number} {'x' * 1000}\n\ny", f"state {number}")
    lines = chat.decode(feed).split("\n")
    start = lines.index("Turns so far (2 turns before these):")
    told = lines[start + 1 : start + 1 + SUMMARY_TURNS]
    assert told[0] == f"3. 3 {'x' * (SUMMARY_CHARS - 5)}...: reward 0.429"
    assert told[-1].startswith(f"{SUMMARY_TURNS + 2}. ") and lines[start + 1 + SUMMARY_TURNS] == ""
    assert len(f"3 {'x' * (SUMMARY_CHARS - 5)}...") == SUMMARY_CHARS


def test_a_short_answer_is_told_whole_and_none_as_none(chat: Any) -> None:
    context = make_context("single_turn", 1, chat)
    context.begin("Rules.", "first")
    context.advance(_turn(chat, "", "", reward=-0.1, valid=False), "", "second")
    text = chat.decode(context.advance(_turn(chat, "", "", reward=1.0), "x" * SUMMARY_CHARS, "third"))
    assert f"1. no answer (not valid): reward -0.1\n2. {'x' * SUMMARY_CHARS}: reward 1\n" in text


@pytest.mark.parametrize("mode", ["last_k", "single_turn"])
def test_an_observation_that_repeats_the_first_is_not_said_twice(chat: Any, mode: str) -> None:
    context = make_context(mode, 1, chat)
    context.begin("Rules.", "the same")
    context.advance(_turn(chat, "one", "the same"), "one", "the same")
    text = chat.decode(context.advance(_turn(chat, "two", "the same"), "two", "another"))
    assert text.count("the same") == 1
    assert text.count("another") == 1


def test_the_end_of_turn_is_not_doubled(chat: Any) -> None:
    """A response that ended with its own end-of-turn token keeps it, and gets no second one when the context is rebuilt."""
    context = make_context("last_k", 1, chat)
    context.begin("Rules.", "first")
    end = chat.decode((chat.end_of_turn,))
    context.advance(_turn(chat, f"one{end}", "first"), "", "second")
    rebuilt = context.advance(_turn(chat, f"two{end}", "second"), "", "third")
    assert chat.decode(rebuilt).endswith(f"second{REPLY}two{NEXT}third{REPLY}")


def _ending(chat: Any, mode: str, room: int) -> tuple[StopReason, list[int]]:
    """Why an episode with so much room ends, and the tokens of each context up to its response."""
    episode = Episode(Walk(), chat, SEEDS, EpisodeRules(room, 20, 0.0, context=mode, last_k=1))
    ids = chat.encode(SAID[0])
    feed: Any = episode.begin()
    while feed is not None:
        feed = episode.receive(Completion(ids, (-1.0,) * len(ids), FinishReason.STOP_TEXT))
    prompts = [len(part.token_ids[: end + 1]) - len(ids) for part in episode.trajectory.sequences for end in part.turn_ends]
    return episode.trajectory.stop_reason, prompts


@pytest.mark.parametrize("mode", ["last_k", "single_turn"])
def test_only_the_present_context_has_to_fit(chat: Any, mode: str) -> None:
    _, prompts = _ending(chat, mode, 9999)
    room = max(prompts) + 20
    assert len(prompts) == 5
    assert _ending(chat, mode, room) == (StopReason.TURN_LIMIT, prompts)
    assert _ending(chat, mode, room - 1)[0] is StopReason.CONTEXT_FULL
    if mode == "last_k":
        assert _ending(chat, "full", room)[0] is StopReason.CONTEXT_FULL, "the history does not fit where its last turns do"


def test_an_unknown_mode(chat: Any) -> None:
    with pytest.raises(UnknownName, match="unknown context 'last-k': did you mean 'last_k'"):
        make_context("last-k", 1, chat)


@pytest.fixture(
    scope="module", params=["full", "last_k", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("single_turn", "markov"))]
)
def played(request: Any, deep_tiny: Any, chat: Any) -> Any:
    """Groups of sampled episodes of several turns."""
    plan = training_plan(run=3, step=1, num_groups=2, group_size=2)
    rules = EpisodeRules(1000, 40, -0.1, context=request.param, last_k=2)
    episodes = [Episode(tether.make_env("sokoban", max_turns=5, few_shot=0), chat, seeds, rules) for seeds in plan]
    NativeEngine(Policy(deep_tiny.model, deep_tiny.tokenizer), max_rows=3).run(episodes, Sampling(0.8, 40))
    return request.param, group_trajectories(episode.trajectory for episode in episodes)


def test_the_learner_scores_what_was_sampled(deep_tiny: Any, played: Any) -> None:
    mode, groups = played
    trajectories = [t for group in groups for t in group.trajectories]
    batch = pack(trajectories)
    assert max(len(t.turns) for t in trajectories) == 5
    longest = [t for t in trajectories if len(t.turns) == 5]
    assert {len(t.sequences) for t in longest} == {{"full": 1, "last_k": 3, "single_turn": 5, "markov": 5}[mode]}
    split = Policy(deep_tiny.model)
    with torch.inference_mode():
        found = token_logprobs(split, batch.ids_BT, batch.loss_mask_BT, batch.lengths_B, 0.8, max_tokens=4096)
    sampled = batch.behavior_logprobs_BT[batch.loss_mask_BT]
    assert len(sampled) == sum(t.num_sampled for t in trajectories)
    assert float((found - sampled).abs().max()) < 1e-5


def test_diagnosis_sees_the_same_prompts_in_every_mode(played: Any, chat: Any) -> None:
    """The first turn is not touched by the mode, so measurements of runs in different modes can be compared."""
    _, groups = played
    env = tether.make_env("sokoban", max_turns=5, few_shot=0)
    rows = rollout_rows(groups)
    pairs = first_turn_pairs(read_rows(rows["prompts"], rows["reasonings"], rows["groups"], rows["trajectories"]))
    assert len(pairs.reasonings) == 4
    assert pairs.prompts == [chat.first_prompt(env.instructions, env.reset(group.seed).text) for group in groups]


def test_what_a_turn_saw_is_the_tokens_before_it(played: Any, chat: Any) -> None:
    """In every mode the last tokens of a context show the observation of the turn."""
    _, groups = played
    for turn in [turn for group in groups for t in group.trajectories for turn in t.turns]:
        assert chat.decode(turn.context_ids).endswith(f"{turn.observation}{REPLY}")
