"""What is wrong with replies, in words; and runs that say it after their first step and stop where no reply is ever valid."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tether.core.config import dump_yaml, merge, validate
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.models.catalog import shipped_folder
from tether.runs.checkpoints import list_checkpoints
from tether.runs.store import RunStore
from tether.training.callbacks import Callback
from tether.training.loop import Trainer
from tether.training.replies import Fault, few_valid_note, replies_note, reply_fault
from tether.training.settings import RunSettings

LENGTH, TEXT, END = FinishReason.LENGTH, FinishReason.STOP_TEXT, FinishReason.END_OF_TURN


def _turn(text: str, finish: FinishReason = END, *, valid: bool = False) -> Turn:
    return Turn((1,), (2, 3), (0.0, 0.0), finish, text, None, valid=valid)


def _group(*turns: Turn) -> Group:
    return Group(0, 0, [Trajectory(0, 0, 0, list(turns), StopReason.TURN_LIMIT)])


@pytest.mark.parametrize(
    ("turn", "fault"),
    [
        (_turn(" right </think> <answer> Right </answer>", TEXT, valid=True), None),
        (_turn(" right is best. Right."), Fault.UNCLOSED_THINK),
        (_turn(" right is best and then", LENGTH), Fault.UNCLOSED_THINK),
        (_turn(" <answer> Right </answer>", TEXT), Fault.UNCLOSED_THINK),
        (_turn(" right </think> <answer> Right || Right || Ri", LENGTH), Fault.CUT),
        (_turn(" right </think> I would", LENGTH), Fault.CUT),
        (_turn(" right </think> I would go right."), Fault.NO_ANSWER),
        (_turn(" right </think> So: <answer> Right </answer>", TEXT), Fault.NO_ANSWER),
        (_turn(" right </think> <answer> Rihgt"), Fault.NOT_AN_ACTION),  # the end of the turn closes the answer
        (_turn(" right </think> <answer> your answer </answer>", TEXT), Fault.NOT_AN_ACTION),
        (_turn(" right </think>\n<search> </search>", TEXT), Fault.NOT_AN_ACTION),
        (_turn(" right </think> <answer> Rihgt </answer> or so", LENGTH), Fault.NOT_AN_ACTION),
    ],
)
def test_what_is_wrong_with_a_reply(turn: Turn, fault: Fault | None) -> None:
    assert reply_fault(turn) is fault


def _note(*turns: Turn, first: bool = True) -> str | None:
    return replies_note([_group(*turns)], first=first, env="frozen_lake", model="smollm2", max_tokens=400)


GOOD = _turn(" a </think> <answer> Up </answer>", TEXT, valid=True)
TEACH = (
    "teach the model the form first (tether sft frozen_lake --model smollm2), show it more worked examples (env.options.few_shot), "
    "or word the instructions for it (env.options.instructions)"
)


def test_the_command_that_helps_is_one_that_works() -> None:
    """There is no expert for WebShop: `tether sft webshop` would be refused."""
    note = replies_note([_group(_turn(" no"))], first=True, env="webshop", model="smollm2", max_tokens=400)
    assert note is not None and "tether sft FILE.jsonl --model smollm2, with conversations of yours" in note
    note = replies_note([_group(_turn(" no"))], first=True, env="webshop", model="tiny", max_tokens=400)
    assert note is not None and note.endswith(
        "`tiny` has learned frozen_lake, sokoban, countdown and nothing else; use a model that reads English, such as --model smollm2"
    )


def test_a_model_behind_an_endpoint_cannot_be_taught() -> None:
    note = few_valid_note([_group(_turn("Down || Right"))], env="frozen_lake", model="http://host:8000#m", max_tokens=400)
    assert note is not None and "'Down || Right'" in note and "env.options.few_shot" in note and "sft" not in note
    assert few_valid_note([_group(GOOD)], env="frozen_lake", model="tiny", max_tokens=400) is None
    assert few_valid_note([], env="frozen_lake", model="tiny", max_tokens=400) is None


def test_the_first_step_says_the_share() -> None:
    assert _note(GOOD, GOOD, GOOD, _turn("no")) == "75% of 4 replies were valid"
    assert _note(GOOD, _turn("no")) == "50% of 2 replies were valid"
    said = _note(GOOD, *[_turn("no")] * 2)
    assert said == f"only 1 of 3 replies was valid: 2 never close the think tag, for example 'no'; {TEACH}"
    assert _note(GOOD, first=False) is None and _note() is None


def test_a_low_share_comes_with_the_commonest_fault_an_example_and_advice() -> None:
    parrot = _turn(" your thoughts </think> <answer> your\nanswer </answer>", TEXT)
    assert _note(GOOD, *[parrot] * 10, _turn("no")) == (
        "only 1 of 12 replies was valid: 10 have an answer that is no valid action, "
        f"for example 'your thoughts </think> <answer> your answer </answer>'; {TEACH}"
    )
    assert _note(GOOD, *[parrot] * 10, first=False) is None
    said = _note(*[parrot] * 2, first=False)
    assert said is not None and said.startswith("none of 2 replies was valid: 2 have an answer that is no valid action")


def test_episodes_that_cannot_begin_say_why() -> None:
    def stopped(reason: StopReason) -> Group:
        return Group(0, 0, [Trajectory(0, member, 0, [], reason) for member in range(2)])

    said = replies_note([stopped(StopReason.CONTEXT_FULL)], first=False, env="countdown", model="smollm2", max_tokens=400)
    assert said == (
        "none of 2 episodes could begin: the first prompt and a response of 400 tokens do not fit into the context; raise rollout.max_context where the "
        "model allows it, lower rollout.max_tokens, or show fewer examples (env.options.few_shot=0)"
    )
    assert replies_note([stopped(StopReason.ENV_ERROR)], first=True, env="countdown", model="smollm2", max_tokens=400) is None
    assert replies_note([], first=True, env="countdown", model="smollm2", max_tokens=400) is None


def test_cut_replies_need_more_tokens() -> None:
    long = _turn("word " * 50, LENGTH)
    assert _note(long, long, _turn("short")) == (
        "none of 3 replies was valid: 3 never close the think tag (2 at the limit of 400 tokens), for example "
        f"'{'word ' * 10} ... {' word' * 10}'; raise rollout.max_tokens (now 400); where that does not help, {TEACH}"
    )
    ended = _note(long, *[_turn("short")] * 2)
    assert ended is not None and ended.endswith(f"; {TEACH}") and "rollout.max_tokens" not in ended
    cut = _note(_turn(" a </think> <answer> Up || Up", LENGTH))
    assert cut is not None and "1 are cut off at rollout.max_tokens" in cut and "raise rollout.max_tokens (now 400)" in cut


# In a run: random weights never write a valid reply.

SMALL: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 1}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 20, "max_rows": 4},
    "learner": {"update_batch": 4},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 1},
    "steps": 5,
}


@pytest.mark.parametrize(("changes", "skipped"), [({"filter": {"strategy": "all"}}, 0), ({"filter": {"include_zero": False}}, 1)])
def test_a_run_without_a_valid_reply_stops(changes: dict[str, Any], skipped: int, small_policy: Any, tmp_path: Path) -> None:
    """Also where the filter skips every update; with a checkpoint, an evaluation and the advice."""
    settings = validate(RunSettings, merge(SMALL, {"model": {"name": small_policy(1)}, **changes}))
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}))
    trainer.run()
    records = trainer.store.steps()
    assert [record.metrics.get("update/skipped") for record in records] == [None, skipped, skipped, skipped]
    assert all(any(note.startswith("none of 4 replies was valid: ") for note in record.notes) for record in records[1:])
    assert trainer.store.finished is not None
    assert trainer.store.finished.startswith(
        "stopped early after step 3: no reply was valid for 3 steps in a row; in the last one none of 4"
    )
    assert "tether sft frozen_lake" in trainer.store.finished
    assert [path.name for path in list_checkpoints(trainer.store.checkpoints)] == ["step_000003"]
    assert "validation/success" in records[-1].metrics


def test_the_rule_can_be_turned_off(small_policy: Any, tmp_path: Path) -> None:
    changes = {"model": {"name": small_policy(1)}, "early_stop": {"invalid_steps": 0}, "steps": 4}
    settings = validate(RunSettings, merge(SMALL, changes))
    trainer = Trainer(settings, RunStore.create(tmp_path / "run", dump_yaml(settings), {}))
    trainer.run()
    assert trainer.store.finished == "all 4 steps done"


class _Heard(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def test_a_model_without_a_template_trains_and_the_run_says_so(tmp_path: Path) -> None:
    """Before the first step; and its checkpoint is resumed with the same words."""
    shutil.copytree(shipped_folder("tiny"), tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    for steps in (1, 2):
        settings = validate(RunSettings, merge(SMALL, {"model": {"name": str(tmp_path / "bare")}, "steps": steps}))
        folder, heard = tmp_path / "run", _Heard()
        store = RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {})
        trainer = Trainer(settings, store, [heard])
        trainer.run()
        assert trainer.step == steps and heard.notes[-1].startswith("the model has no chat template: prompts are plain lines")
