"""An episode writes down the exact tokens, the span of the reasoning and why it ended; whatever its environment does stays its own affair."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tether
from tether.core.enums import FinishReason, StopReason
from tether.core.protocols import Sampling
from tether.core.types import Completion, Group, Observation, Step
from tether.envs.remote import make_envs
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.sampler import group_trajectories, training_plan, validation_plan

RULES = EpisodeRules(max_context=900, max_tokens=50, format_penalty=-0.25)
SEEDS = EpisodeSeeds(group=3, member=1, instance=11, env_seed=12, sampling=13)
GOOD = " Go right. </think> <answer> Right </answer>"


class Counter:
    """Pays 1 for "Right", is solved by the third answer, and can be told to break."""

    name = "counter"
    max_turns = 5
    instructions = "Say Right."

    def __init__(self, **broken: Any) -> None:
        self.broken = broken
        self.answers: list[str] = []
        self.seeds: tuple[int, int | None] | None = None

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if self.broken.get("reset"):
            raise RuntimeError("no such level")
        self.seeds = (seed, env_seed)
        return Observation("begin")

    def step(self, answer: str) -> Any:
        self.answers.append(answer)
        number = len(self.answers)
        if self.broken.get("step") == number:
            raise KeyError("lost")
        if "return" in self.broken:
            return self.broken["return"]
        reward = self.broken.get("reward", float(answer == "Right"))
        info = {"valid": answer == "Right", "truncated": False, "steps": number, "late": number > 1, **self.broken.get("info", {})}
        return Step(Observation(f"shown {number}"), reward, number == 3, number == 3, info)


def _completion(chat: Any, text: str, finish: FinishReason = FinishReason.STOP_TEXT) -> Completion:
    ids = chat.encode(text)
    return Completion(ids, tuple(-0.5 - n for n in range(len(ids))), finish)


def _collect(envs: list[Any], chat: Any, plan: list[EpisodeSeeds], engine: NativeEngine, sampling: Sampling) -> list[Group]:
    episodes = [Episode(env, chat, seeds, RULES) for env, seeds in zip(envs, plan, strict=True)]
    engine.run(episodes, sampling)
    return group_trajectories(episode.trajectory for episode in episodes)


def test_a_whole_episode(chat: Any) -> None:
    env = Counter()
    episode = Episode(env, chat, SEEDS, RULES)
    contexts = [episode.begin()]
    assert env.seeds == (11, 12)
    assert chat.decode(contexts[0]).endswith("<|im_start|>user\nbegin<|im_end|>\n<|im_start|>assistant\n<think>")
    given = [_completion(chat, text) for text in (GOOD, " Hm </think> <answer> Left </answer>", GOOD)]
    contexts += [episode.receive(completion) for completion in given]
    assert contexts[3] is None
    trajectory = episode.trajectory
    assert (trajectory.group, trajectory.member, trajectory.seed) == (3, 1, 11)
    assert (trajectory.stop_reason, trajectory.success, trajectory.error) == (StopReason.SUCCESS, True, None)
    assert env.answers == ["Right", "Left", "Right"]
    assert [turn.context_ids for turn in trajectory.turns] == contexts[:3]
    assert [(turn.response_ids, turn.logprobs, turn.finish) for turn in trajectory.turns] == [
        (c.token_ids, c.logprobs, c.finish) for c in given
    ]
    assert [turn.observation for turn in trajectory.turns] == ["begin", "shown 1", "shown 2"]
    assert [(turn.reward, turn.penalty, turn.valid) for turn in trajectory.turns] == [
        (1.0, 0.0, True),
        (0.0, -0.25, False),
        (1.0, 0.0, True),
    ]
    assert trajectory.reward == 1.75
    assert [turn.new_context for turn in trajectory.turns] == [True, False, False]
    assert [turn.overlong for turn in trajectory.turns] == [0, 0, 0]
    assert (trajectory.env, trajectory.measures) == ("", {})
    assert [chat.decode(turn.reasoning_ids) for turn in trajectory.turns] == [" Go right. ", " Hm ", " Go right. "]


def test_a_turn_that_was_read_leniently(chat: Any) -> None:
    """The environment says so; a turn that is not valid never counts as read leniently."""
    for text, lenient in ((GOOD, True), (" Hm </think> <answer> Left </answer>", False)):
        episode = Episode(Counter(info={"lenient": True}), chat, SEEDS, RULES)
        episode.begin()
        episode.receive(_completion(chat, text))
        assert episode.trajectory.turns[0].lenient is lenient


def test_the_end_of_a_turn_closes_an_answer(chat: Any) -> None:
    """Without its closing tag, but ended by the model: valid, and counted as lenient. Cut at the budget it is malformed."""
    ids = chat.encode(" to the right </think> <answer> Right")
    for last, finish, valid in (((chat.end_of_turn,), FinishReason.END_OF_TURN, True), ((), FinishReason.LENGTH, False)):
        episode = Episode(tether.make_env("frozen_lake"), chat, SEEDS, RULES)
        episode.begin()
        episode.receive(Completion((*ids, *last), (0.0,) * (len(ids) + len(last)), finish))
        turn = episode.trajectory.turns[0]
        assert (turn.valid, turn.lenient) == (valid, valid)
        assert turn.text.endswith("<|im_end|>") == valid, "the text is what was sampled"


@pytest.mark.parametrize(
    ("text", "answer", "reasoning"),
    [
        (" no tags at all", "", None),
        (" thought </think> no answer", "", " thought "),
        (" thought </think> <answer> Right", "", " thought "),
        ("</think> <answer> Right </answer>", "Right", ""),
        (" a </think> b </think> <answer> Right </answer>", "Right", " a </think> b "),
    ],
)
def test_malformed_and_odd_responses(chat: Any, text: str, answer: str, reasoning: str | None) -> None:
    env = Counter()
    episode = Episode(env, chat, SEEDS, RULES)
    episode.begin()
    assert episode.receive(_completion(chat, text)) is not None  # the episode goes on
    turn = episode.trajectory.turns[0]
    assert env.answers == [answer]
    assert turn.text == text
    assert (turn.valid, turn.penalty) == (bool(answer), 0.0 if answer else -0.25)
    assert (turn.reasoning_span is None) == (reasoning is None)
    assert reasoning is None or chat.decode(turn.reasoning_ids) == reasoning


def test_context_full(chat: Any) -> None:
    probe = Episode(Counter(), chat, SEEDS, RULES)
    first = probe.begin()
    completion = _completion(chat, GOOD)
    second = probe.receive(completion)
    assert first and second
    fits = len(first) + len(completion.token_ids) + len(second) + 50
    for room, stops in ((fits, False), (fits - 1, True)):
        episode = Episode(Counter(), chat, SEEDS, EpisodeRules(room, 50, 0.0))
        assert episode.begin() == first
        assert (episode.receive(completion) is None) is stops
        assert len(episode.trajectory.turns) == 1
        assert (episode.trajectory.stop_reason is StopReason.CONTEXT_FULL) is stops


def test_a_prompt_that_does_not_fit_is_never_begun(chat: Any) -> None:
    episode = Episode(Counter(), chat, SEEDS, EpisodeRules(60, 50, 0.0))
    assert episode.begin() is None
    assert (episode.trajectory.stop_reason, episode.trajectory.turns) == (StopReason.CONTEXT_FULL, [])


def test_running_out_of_turns_is_not_failing(chat: Any) -> None:
    for truncated, reason in ((True, StopReason.TURN_LIMIT), (False, StopReason.FAILURE)):
        env = Counter(**{"return": Step(Observation("over"), 0.0, True, False, {"valid": True, "truncated": truncated})})
        episode = Episode(env, chat, SEEDS, RULES)
        episode.begin()
        assert episode.receive(_completion(chat, GOOD)) is None
        assert episode.trajectory.stop_reason is reason


def test_an_environment_that_breaks_ends_its_own_episode(tiny: Any, chat: Any) -> None:
    envs = [Counter(reset=True), Counter(), Counter(step=2), Counter()]
    plan = [EpisodeSeeds(n // 2, n % 2, 5, 5, n) for n in range(4)]
    groups = _collect(envs, chat, plan, NativeEngine(Policy(tiny.model, tiny.tokenizer), max_rows=2), Sampling(0.0, 45))
    whole, also_whole = [t for group in groups for t in group.trajectories]
    broken, late = [t for group in groups for t in group.errored]
    assert (broken.stop_reason, broken.error, broken.turns) == (StopReason.ENV_ERROR, "reset: RuntimeError: no such level", [])
    assert (late.stop_reason, late.error, len(late.turns)) == (StopReason.ENV_ERROR, "step 2: KeyError: 'lost'", 2)
    for trajectory in (whole, also_whole):
        assert (trajectory.stop_reason, trajectory.error, len(trajectory.turns)) == (StopReason.SUCCESS, None, 3)


@pytest.mark.parametrize(
    "broken",
    [{"reward": math.nan}, {"reward": math.inf}, {"reward": None}, {"return": None}],
    ids=["nan", "infinite", "no reward", "no step"],
)
def test_an_answer_that_is_no_step_is_an_environment_error(chat: Any, broken: dict[str, Any]) -> None:
    episode = Episode(Counter(**broken), chat, SEEDS, RULES)
    episode.begin()
    assert episode.receive(_completion(chat, GOOD)) is None
    assert episode.trajectory.stop_reason is StopReason.ENV_ERROR
    assert episode.trajectory.error is not None and episode.trajectory.error.startswith("step 1: ")
    assert math.isfinite(episode.trajectory.reward)


def test_numbers_of_the_environment_are_those_of_its_last_step(chat: Any) -> None:
    """Truth values count as 0 and 1, and what the environment has not told as 0."""
    for broken, stop, measures in (
        ({}, StopReason.SUCCESS, {"steps": 3.0, "late": 1.0, "nowhere": 0.0}),
        ({"step": 2}, StopReason.ENV_ERROR, {"steps": 1.0, "late": 0.0, "nowhere": 0.0}),
        ({"reset": True}, StopReason.ENV_ERROR, {"steps": 0.0, "late": 0.0, "nowhere": 0.0}),
    ):
        episode = Episode(Counter(**broken), chat, SEEDS, RULES, "counter", ("steps", "late", "nowhere"))
        feed = episode.begin()
        while feed is not None:
            feed = episode.receive(_completion(chat, GOOD))
        assert (episode.trajectory.env, episode.trajectory.stop_reason, episode.trajectory.measures) == ("counter", stop, measures)


@pytest.mark.parametrize("value", [math.nan, "many", None])
def test_a_number_that_is_none_is_an_environment_error(chat: Any, value: Any) -> None:
    episode = Episode(Counter(info={"steps": value}), chat, SEEDS, RULES, "counter", ("steps",))
    episode.begin()
    assert episode.receive(_completion(chat, GOOD)) is None
    assert episode.trajectory.stop_reason is StopReason.ENV_ERROR
    assert episode.trajectory.error is not None and episode.trajectory.error.startswith("step 1: ")


def test_a_response_near_its_budget_is_penalised(chat: Any) -> None:
    """Budget 50, buffer 20: nothing up to 30 tokens, then a twentieth of 0.5 for each."""
    rules = EpisodeRules(2000, 50, -0.25, overlong_buffer=20, overlong_factor=0.5)
    for length, penalty in ((30, 0.0), (31, -0.025), (40, -0.25), (50, -0.5)):
        episode = Episode(Counter(), chat, SEEDS, rules)
        episode.begin()
        episode.receive(Completion((5,) * length, (-1.0,) * length, FinishReason.LENGTH))
        (turn,) = episode.trajectory.turns
        assert (turn.overlong, turn.penalty) == (pytest.approx(penalty), -0.25)
        assert episode.trajectory.reward == pytest.approx(penalty - 0.25)


def test_reasoning_spans_of_sampled_responses(tiny: Any, chat: Any) -> None:
    plan = training_plan(run=0, step=1, num_groups=2, group_size=2)
    envs = [tether.make_env("frozen_lake", max_turns=2) for _ in plan]
    groups = _collect(envs, chat, plan, NativeEngine(Policy(tiny.model, tiny.tokenizer)), Sampling(1.0, 60))
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    closed = [turn for turn in turns if "</think>" in turn.text]
    assert closed
    for turn in closed:
        assert chat.decode(turn.reasoning_ids) == turn.text.split("</think>")[0]
        assert chat.decode(turn.response_ids) == turn.text


def test_groups_come_back_in_order_whatever_ends_first(tiny: Any, chat: Any) -> None:
    envs = [Counter(step=3), Counter(reset=True), Counter(step=1), Counter(reset=True), Counter(), Counter(step=2)]
    plan = [EpisodeSeeds(group, member, 70 + group, 0, 0) for group in (4, 0, 2) for member in (0, 1)]
    groups = _collect(envs, chat, plan, NativeEngine(Policy(tiny.model, tiny.tokenizer), max_rows=2), Sampling(0.0, 45))
    assert [(group.index, group.seed) for group in groups] == [(4, 74), (0, 70), (2, 72)]
    assert [[(t.group, t.member, len(t.turns)) for t in group.trajectories] for group in groups] == [[], [], [(2, 0, 3)]]
    assert [[(t.group, t.member, len(t.turns)) for t in group.errored] for group in groups] == [
        [(4, 0, 3), (4, 1, 0)],
        [(0, 0, 1), (0, 1, 0)],
        [(2, 1, 2)],
    ]


def test_a_group_shares_its_instance_and_nothing_else() -> None:
    plan = training_plan(run=1, step=2, num_groups=3, group_size=4)
    assert [(seeds.group, seeds.member) for seeds in plan] == [(g, m) for g in range(3) for m in range(4)]
    assert len({seeds.instance for seeds in plan}) == 3
    assert all(len({seeds.instance for seeds in plan if seeds.group == g}) == 1 for g in range(3))
    assert len({seeds.env_seed for seeds in plan} | {seeds.sampling for seeds in plan} | {seeds.instance for seeds in plan}) == 27
    for other in (training_plan(2, 2, 3, 4), training_plan(1, 3, 3, 4)):
        assert not {seeds.instance for seeds in plan} & {seeds.instance for seeds in other}
        assert not {seeds.sampling for seeds in plan} & {seeds.sampling for seeds in other}
    assert training_plan(1, 2, 3, 4) == plan
    assert {seeds.env_index for seeds in plan} == {0}


def test_a_further_round_goes_on_where_the_last_one_ended() -> None:
    whole = training_plan(run=1, step=2, num_groups=5, group_size=2)
    assert training_plan(1, 2, 3, 2) + training_plan(1, 2, 2, 2, first_group=3) == whole
    assert len({seeds.sampling for seeds in whole}) == 10


def test_validation_is_the_same_for_every_run_and_a_longer_one_begins_alike() -> None:
    plan = validation_plan(5)
    assert len({seeds.instance for seeds in plan}) == 5
    assert validation_plan(9)[:5] == plan
    for run in range(3):
        assert not {seeds.instance for seeds in plan} & {seeds.instance for seeds in training_plan(run, 0, 5, 1)}


class Beside(Counter):
    """The same, at work in a thread of its own."""

    def __init__(self, **broken: Any) -> None:
        super().__init__(**broken)
        self.pool = ThreadPoolExecutor(1)

    def submit_reset(self, seed: int, env_seed: int | None = None) -> Any:
        return self.pool.submit(self.reset, seed, env_seed=env_seed)

    def submit_step(self, answer: str) -> Any:
        return self.pool.submit(self.step, answer)


def test_no_property_is_computed_to_see_whether_an_environment_works_beside_others(chat: Any) -> None:
    asked: list[str] = []

    class Slow(Counter):
        @property
        def instructions(self) -> str:
            asked.append("instructions")
            return "Say Right."

    episode = Episode(Slow(), chat, SEEDS, RULES)
    assert not asked
    episode.begin()
    assert asked == ["instructions"]


def test_an_environment_beside_others_gives_the_same_trajectory(chat: Any) -> None:
    plain, beside = Episode(Counter(), chat, SEEDS, RULES), Episode(Beside(), chat, SEEDS, RULES)
    later: Any = beside.begin()
    assert plain.begin() == later()
    for _ in range(3):
        later = beside.receive(_completion(chat, GOOD))
        assert plain.receive(_completion(chat, GOOD)) == later()
    assert plain.trajectory == beside.trajectory
    assert plain.trajectory.stop_reason is StopReason.SUCCESS


@pytest.mark.parametrize(
    ("broken", "message"), [({"reset": True}, "reset: RuntimeError: no such level"), ({"step": 1}, "step 1: KeyError: 'lost'")]
)
def test_a_failure_beside_others_is_on_the_record(chat: Any, broken: Any, message: str) -> None:
    episode = Episode(Beside(**broken), chat, SEEDS, RULES)
    later: Any = episode.begin()
    if later() is not None:
        later = episode.receive(_completion(chat, GOOD))
        assert later() is None
    assert (episode.trajectory.stop_reason, episode.trajectory.error) == (StopReason.ENV_ERROR, message)


def test_an_environment_with_its_own_tags_gets_the_tagged_text(chat: Any) -> None:
    env: Any = Counter()
    env.reply_tags = ("search", "answer")
    episode = Episode(env, chat, SEEDS, RULES)
    episode.begin()
    assert episode.closing_tags == ("</search>", "</answer>")
    episode.receive(_completion(chat, " hm </think> <search> who </search>"))
    assert env.answers == ["<search>who</search>"]


def test_a_retriever_that_is_down_ends_the_trajectory_with_its_reason(chat: Any) -> None:
    with make_envs("searchqa", {"retriever": "http://127.0.0.1:9"}, 1) as pool:
        episode = Episode(pool.envs[0], chat, SEEDS, EpisodeRules(max_context=4000, max_tokens=50, format_penalty=-0.25))
        later: Any = episode.begin()
        assert later() is not None
        later = episode.receive(_completion(chat, " hm </think> <answer> search[anything] </answer>"))
        assert later() is None
    assert episode.trajectory.stop_reason is StopReason.ENV_ERROR
    assert episode.trajectory.error is not None and "step 1: " in episode.trajectory.error
    assert "cannot be reached" in episode.trajectory.error
