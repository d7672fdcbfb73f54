"""A sound environment, and one that fails each check and no other; importable by other processes.

Behind one of two doors is a prize: name the door. `BROKEN` lists every broken one with the check it breaks and a part of what is said.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from tether.core.enums import Split
from tether.core.grammar import FORMAT_RULE
from tether.core.types import Observation, Step
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.splits import split_of


class DoorOptions(TurnOptions):
    max_turns: int = 3
    observation: str = "text"


class Doors(TextEnv[DoorOptions]):
    """Passes every check. env_seed decides where the wind blows from, which is said at every step."""

    name = "doors"
    Options = DoorOptions
    actions = ("left", "right")

    def __init__(self, options: DoorOptions | None = None) -> None:
        super().__init__(options or DoorOptions())

    @property
    def task(self) -> str:
        return "Behind one of two doors is a prize: answer left or right."

    @property
    def reward_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def instance(self) -> str:
        return f"house {self.house}"

    def generate(self, seed: int) -> None:
        stream = random.Random(seed)
        split = self.options.split
        self.house = next(house for house in iter(lambda: stream.randrange(10**6), None) if split_of(f"house {house}") is split)

    def seed_randomness(self, env_seed: int) -> None:
        self.wind = random.Random(env_seed)

    def opening(self) -> str:
        return f"You stand before house {self.house}."

    def take(self, answer: str) -> Outcome:
        blow = f"The wind blows from {self.wind.choice(['north', 'south', 'east', 'west'])}."
        if answer.strip() not in self.actions:
            return Outcome(f"There is no such door. {blow}", valid=False)
        right = self.actions[self.house % 2] == answer.strip()
        return Outcome(f"The door opens. {blow}", float(right), done=True, success=right)

    def observe(self, head: str, body: str | None = None) -> Observation:
        image = np.full((2, 2, 3), self.house % 251, np.uint8) if self.options.observation == "image" else None
        return Observation(super().observe(head, body).text, image)


BROKEN: list[tuple[type[Doors], str, str]] = []


def breaks(check: str, said: str) -> Any:
    def note(cls: type[Doors]) -> type[Doors]:
        BROKEN.append((cls, check, said))
        return cls

    return note


@breaks("construction", "environment 'doors' cannot be built: RuntimeError: no wood")
class CannotBeBuilt(Doors):
    def __init__(self, options: Any = None) -> None:
        raise RuntimeError("no wood")


@breaks("construction", "environment 'doors': the parameter 'luck' of reset is now called 'env_seed'; rename it in reset's signature")
class OldParameter(Doors):
    def reset(self, seed: int, *, luck: int | None = None) -> Observation:  # type: ignore[override]
        return super().reset(seed, env_seed=luck)


@breaks("attributes", "max_turns is 0; it has to be a whole number, at least 1")
class NoTurns(Doors):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = 0


@breaks("attributes", "name is None; it has to be a text")
class Nameless(Doors):
    name = None  # type: ignore[assignment]


@breaks("attributes", "instructions is None; it has to be a text")
class Speechless(Doors):
    instructions = None  # type: ignore[assignment]


@breaks("attributes", "reset cannot be called as reset(seed, env_seed=None): got an unexpected keyword argument 'env_seed'")
class NoEnvSeed(Doors):
    def reset(self, seed: int) -> Observation:  # type: ignore[override]
        return super().reset(seed)


@breaks("attributes", "work is 'elsewhere'; it has to be one of inline, process, wait")
class WorksElsewhere(Doors):
    work = "elsewhere"  # type: ignore[assignment]


@breaks("attributes", "reward_range is (1, 0); it has to be (least, most)")
class UpsideDown(Doors):
    reward_range = (1, 0)  # type: ignore[assignment]


@breaks("instructions", "the instructions are empty")
class EmptyInstructions(Doors):
    instructions = " \n"  # type: ignore[assignment]


@breaks("instructions", "do not state the reply format (</answer> missing)")
class NoReplyFormat(Doors):
    instructions = f"Open a door. {FORMAT_RULE.replace('</answer>', '')}"  # type: ignore[assignment]


@breaks("instructions", "few_shot is 'a door'; it has to be pairs of texts")
class ExamplesAreAText(Doors):
    few_shot = "a door"


@breaks("instructions", "few_shot holds 'Left', which is no reply in the form <think> ... </think> <answer> ... </answer>")
class ExamplesAreAnswers(Doors):
    few_shot = (("Two doors.", "Left"),)


@breaks("instructions", "do not state the reply format (<search>, </search> missing)")
class OtherTags(Doors):
    """Takes its answers in tags of its own, and does not tell."""

    reply_tags = ("search", "answer")


class LaxOptions(BaseModel):
    max_turns: int = 3
    split: Split = Split.TRAIN
    observation: str = "text"


@breaks("options", "option 'observationn' is accepted; derive Options from tether.core.config.Settings")
class TakesAnyOption(Doors):
    Options = LaxOptions  # type: ignore[assignment]


class CurtOptions(DoorOptions):
    def __init__(self, **values: Any) -> None:
        from tether.core.errors import BadInput

        if set(values) - set(DoorOptions.model_fields):
            raise BadInput("no")
        super().__init__(**values)

    @classmethod
    def model_validate(cls, data: Any, **more: Any) -> Any:
        return cls(**data)


@breaks("options", "option 'instructionss' is refused without a word about 'instructions': no")
class RefusesWithoutAWord(Doors):
    Options = CurtOptions


@breaks("order of calls", "step before reset gave Step(")
class StepsBeforeReset(Doors):
    def step(self, answer: str) -> Step:
        if not hasattr(self, "house"):
            self.reset(0)
        return super().step(answer)


@breaks("order of calls", "a step after the end gave Step(")
class StepsAfterTheEnd(Doors):
    def step(self, answer: str) -> Step:
        from tether.envs.base import EpisodePhase

        if self._phase is EpisodePhase.OVER:
            return self.last
        self.last = super().step(answer)
        return self.last


@breaks("order of calls", "step before reset raised AttributeError: 'UnclearOrder' object has no attribute 'nothing', which does not say")
class UnclearOrder(Doors):
    def step(self, answer: str) -> Step:
        if not hasattr(self, "house"):
            self.nothing  # type: ignore[attr-defined]  # noqa: B018
        return super().step(answer)


@breaks("types", "reset returned 'You stand")
class ResetGivesText(Doors):
    def reset(self, seed: int, *, env_seed: int | None = None) -> Any:
        return super().reset(seed, env_seed=env_seed).text.partition("\n")[2]


@breaks("types", "an observation whose text is ''; it has to be a text that is not empty")
class ShowsNothing(Doors):
    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        super().reset(seed, env_seed=env_seed)
        return Observation("")


@breaks("types", "an observation whose image is uint8 [2, 2, 4]; it has to be uint8 [height, width, 3], or None")
class TransparentPicture(Doors):
    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(super().reset(seed, env_seed=env_seed).text, np.zeros((2, 2, 4), np.uint8))


@breaks("types", "an observation whose image is uint8 [0, 2, 3]; it has to be uint8 [height, width, 3], or None")
class EmptyPicture(Doors):
    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(super().reset(seed, env_seed=env_seed).text, np.zeros((0, 2, 3), np.uint8))


@breaks("types", "an observation whose image is float64 [2, 2, 3]; it has to be uint8 [height, width, 3], or None")
class FloatPicture(Doors):
    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        return Observation(super().reset(seed, env_seed=env_seed).text, np.zeros((2, 2, 3)))  # type: ignore[arg-type]


@breaks("types", "instance is 7; it has to be a text")
class NumberedInstance(Doors):
    instance = 7  # type: ignore[assignment]


def _changed(name: str, change: Any) -> Any:
    """A Doors whose steps are changed."""

    def step(self: Doors, answer: str) -> Any:
        return change(Doors.step(self, answer))

    return type(name, (Doors,), {"step": step, "__module__": __name__})


def _with(step: Step, **changes: Any) -> Step:
    parts = {name: getattr(step, name) for name in ("observation", "reward", "done", "success", "info")}
    return Step(**(parts | changes))


STEPS: list[tuple[str, Any, str, str]] = [
    ("GivesTuples", lambda s: (s.observation, s.reward), "types", "instead of a Step"),
    ("RewardsWithNothing", lambda s: _with(s, reward=None), "types", "the reward None; it has to be a number"),
    ("RewardsWithTruth", lambda s: _with(s, reward=True), "types", "the reward True; it has to be a number"),
    ("DoneIsOne", lambda s: _with(s, done=int(s.done)), "types", "done as "),
    ("SuccessIsOne", lambda s: _with(s, success=int(s.success)), "types", "success as "),
    ("NoTruncated", lambda s: _with(s, info={"valid": True}), "types", "info['truncated'] as None"),
    ("NoValid", lambda s: _with(s, info={"truncated": s.info["truncated"]}), "types", "info['valid'] as None"),
    ("InfoIsNone", lambda s: _with(s, info=None), "types", "info['valid'] as None"),
    ("ObservesText", lambda s: _with(s, observation="text"), "types", "'text' instead of an Observation"),
    ("PaysInfinity", lambda s: _with(s, reward=float("inf")), "rewards", "pays inf"),
    ("PaysNaN", lambda s: _with(s, reward=float("nan")), "rewards", "pays nan"),
    ("PaysTooMuch", lambda s: _with(s, reward=1.5), "rewards", "pays 1.5, outside of reward_range (0.0, 1.0)"),
    ("PaysTooLittle", lambda s: _with(s, reward=-0.1), "rewards", "pays -0.1, outside of reward_range (0.0, 1.0)"),
    ("SuccessGoesOn", lambda s: _with(s, success=s.success or not s.done), "success", "is a success, but not done"),
    (
        "TruncatedGoesOn",
        lambda s: _with(s, info=s.info | {"truncated": s.info["truncated"] or not s.done}),
        "truncation",
        "is truncated, but not done",
    ),
    ("TwoEndings", lambda s: _with(s, info=s.info | {"truncated": s.done}), "stop reason", "is both a success and truncated"),
    ("RingsTheBell", lambda s: _with(s, observation=Observation("\a ping")), "rendering", r"the observation holds '\x07', which cannot"),
]
for _name, _change, _law, _said in STEPS:
    globals()[_name] = _changed(_name, _change)
    BROKEN.append((globals()[_name], _law, _said))


@breaks("never raises", "step('')")
class RaisesOnNothing(Doors):
    def take(self, answer: str) -> Outcome:
        if not answer:
            raise ValueError("say something")
        return super().take(answer)


@breaks("never raises", "step: UnicodeEncodeError")
class RaisesOnHalfAPair(Doors):
    def take(self, answer: str) -> Outcome:
        answer.encode()
        return super().take(answer)


@breaks("never raises", "step: RecursionError")
class RaisesOnDepth(Doors):
    def take(self, answer: str) -> Outcome:
        def depth(text: str) -> int:
            return 1 + depth(text[1:]) if text[:1] in ("(", "[", "{") else 0

        depth(answer)
        return super().take(answer)


@breaks("never raises", "characters): step: ValueError: too long")
class RaisesOnLength(Doors):
    def take(self, answer: str) -> Outcome:
        if len(answer) > 20_000:
            raise ValueError("too long")
        return super().take(answer)


@breaks("never raises", "reset(13, env_seed=")
class RaisesOnASeed(Doors):
    def generate(self, seed: int) -> None:
        if seed == 13:
            raise KeyError("unlucky")
        super().generate(seed)


@breaks("turns", "not done after 3 steps; max_turns is 3")
class NeverEnds(Doors):
    def step(self, answer: str) -> Step:
        if not hasattr(self, "house"):
            raise RuntimeError("reset first")
        return Step(Observation("go on"), 0.0, False, False, {"valid": True, "truncated": False})


@breaks("repeatability", "in a fresh instance: step 1 gave")
class RollsDice(Doors):
    dice = random.Random()  # salted by the clock

    def take(self, answer: str) -> Outcome:
        outcome = super().take(answer)
        return Outcome(f"{outcome.text} {self.dice.random()}", outcome.reward, outcome.done, outcome.success, outcome.valid)


@breaks("repeatability", "in the same instance again: reset gave")
class Remembers(Doors):
    """An instance has its own memory, and so the second episode is not like the first; the checker's own first episode is one."""

    visits = 0

    def opening(self) -> str:
        self.visits += 1
        return f"{super().opening()} Visit {min(self.visits, 2)}."

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if seed > 0:
            self.visits = 0
        return super().reset(seed, env_seed=env_seed)


@breaks("repeatability", "the instance gave")
class InstanceWithClock(Doors):
    clock = 0

    @property
    def instance(self) -> str:
        InstanceWithClock.clock += 1
        return f"house {self.house} at {InstanceWithClock.clock}"


@breaks("another process", "in another process: reset gave")
class LeansOnHashes(Doors):
    def opening(self) -> str:
        return f"{super().opening()} It is number {hash(str(self.house)) % 1000}."


@breaks("seeds", "seeds 0 to 49 all give the same instance")
class OneHouse(Doors):
    def generate(self, seed: int) -> None:
        super().generate(0)


@breaks("env_seed", "reset(1, env_seed=1) is not the instance of reset(1)")
class HouseByEnvSeed(Doors):
    def seed_randomness(self, env_seed: int) -> None:
        super().seed_randomness(env_seed)
        offset = env_seed % 7
        while split_of(f"house {self.house + offset}") is not self.options.split:
            offset += 7
        self.house += offset


@breaks("splits", "seed 0 of train and seed 0 of validation are the same: 'house ")
class OneSplit(Doors):
    def generate(self, seed: int) -> None:
        self.house = random.Random(seed).randrange(10**6)


class NoSplitOptions(DoorOptions):
    split: None = None  # type: ignore[assignment]


NoSplitOptions.model_fields.pop("split")
NoSplitOptions.model_rebuild(force=True)


@breaks("splits", "it has no option 'split', which the trainer sets; derive Options from tether.envs.base.TurnOptions")
class NoSplit(Doors):
    Options = NoSplitOptions

    def generate(self, seed: int) -> None:
        self.house = seed


@breaks("splits", "KeyError: 'no tests'")
class NoTests(Doors):
    def generate(self, seed: int) -> None:
        if self.options.split is Split.TEST:
            raise KeyError("no tests")
        super().generate(seed)


@breaks("rendering", r"the observation holds '\ud")
class Echoes(Doors):
    def take(self, answer: str) -> Outcome:
        outcome = super().take(answer)
        return Outcome(f"You said {answer}.", outcome.reward, outcome.done, outcome.success, outcome.valid)


@breaks("pictures", "seeds 0 to 9 are 10 instances that all have the same picture; draw what differs")
class SamePicture(Doors):
    def observe(self, head: str, body: str | None = None) -> Observation:
        shown = super().observe(head, body)
        return Observation(shown.text, None if shown.image is None else np.zeros((2, 2, 3), np.uint8))


@breaks("pictures", "gives one picture here and another one in a second environment")
class MoodyPicture(Doors):
    made = 0

    def __init__(self, options: DoorOptions | None = None) -> None:
        super().__init__(options)
        type(self).made += 1
        self.mood = self.made

    def observe(self, head: str, body: str | None = None) -> Observation:
        shown = super().observe(head, body)
        return Observation(shown.text, None if shown.image is None else shown.image + np.uint8(self.mood))


@breaks("pictures", "with observation='image', the picture is the same after all of ")
class StillPicture(Doors):
    def take(self, answer: str) -> Outcome:
        outcome = super().take(answer)
        return replace(outcome, info={"executed": [answer]})

    def observe(self, head: str, body: str | None = None) -> Observation:
        shown = super().observe(head, body)
        return shown if body is None or shown.image is None else Observation(shown.text, np.zeros((2, 2, 3), np.uint8))


@breaks("pictures", "with observation='image', reset(0) gives the image None")
class NoPicture(Doors):
    def observe(self, head: str, body: str | None = None) -> Observation:
        return Observation(super().observe(head, body).text)
