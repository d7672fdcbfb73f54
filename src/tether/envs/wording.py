"""The wording of instructions: presets by name, a text file of the user's in their place, and examples of a state with its reply.

Every environment has the presets `example` (the default: its rules, one reply in exactly the expected form, and what is not accepted) and
`plain` (its rules and the form of a reply in general terms, the wording of tether 0.1). The built-in ones also have `paper`, the frame that the
paper's code puts around its tasks. The option `instructions` names a preset or a file. The texts of an environment live in its `prompt.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.grammar import ACTION_SEPARATOR
from tether.core.seeding import derive_seed

Preset = Literal["example", "plain", "paper"]
EXAMPLE, PLAIN, PAPER = "example", "plain", "paper"

MAX_FILE_CHARS = 100_000
"""A larger file is surely not a text of instructions."""

DRAWS_PER_EXAMPLE = 20
"""Instances tried for each worked example: some repeat, some have no solution at hand."""
DRAWS_IN_VAIN = 16
"""Instances in a row without a solution at hand after which there are no more examples: a file of hard levels has none."""


@dataclass(frozen=True, slots=True)
class Example:
    """A state, and a good reply to it."""

    state: str
    """What the agent would be shown."""
    reasoning: str
    answer: str
    tag: str = "answer"
    """The tag around the answer."""
    instance: str | None = None
    """The instance that the state belongs to, as `Env.instance` gives it: an example is never about the instance being asked."""
    turn: int = 1
    """The turn at which an agent would be shown the state."""

    @property
    def reply(self) -> str:
        around = "\n" if "\n" in self.answer else " "
        return f"<think> {self.reasoning} </think> <{self.tag}>{around}{self.answer}{around}</{self.tag}>"


def unlike(examples: Sequence[Example], instance: str | None) -> list[Example]:
    """The examples that are not about this instance."""
    return [example for example in examples if instance is None or example.instance != instance]


def draw_examples(count: int, make: Callable[[int], Sequence[Example]]) -> list[Example]:
    """Examples of generated instances, at least `count` without those of any one instance; `make` gives the examples of a seed's instance.

    So there are enough left where one of the instances is the one being asked.
    """
    drawn: dict[str | None, Sequence[Example]] = {}
    in_vain = 0
    for number in range(DRAWS_PER_EXAMPLE * (count + 1)):
        examples = make(derive_seed("worked example", number))
        in_vain = 0 if examples else in_vain + 1
        if examples:
            drawn.setdefault(examples[0].instance, examples)
        sizes = [len(each) for each in drawn.values()]
        if sum(sizes) - max(sizes, default=0) >= count or in_vain == DRAWS_IN_VAIN:
            break
    return [example for examples in drawn.values() for example in examples]


def way(down: int, right: int) -> str:
    """A distance on a grid in words. Example: way(2, -1) is "2 down, 1 left"."""
    parts = [f"{abs(down)} {'down' if down > 0 else 'up'}"] * bool(down) + [f"{abs(right)} {'right' if right > 0 else 'left'}"] * bool(
        right
    )
    return ", ".join(parts) or "here"


def in_words(coordinates: str) -> str:
    """A state in an example where the agent is shown pictures: examples are text, and must not pass for what observations look like."""
    return f"(In the place of an image, what it would show, with positions as (row, column) from 0 at the top left.)\n{coordinates}"


THINK_BRIEFLY = "Think in one or two short sentences about the task you are given, then answer."
"""How to think, where an environment says nothing else: small models lose the thread in long thoughts."""


def with_example(rules: str, example: Example, refused: str, how_to_think: str = THINK_BRIEFLY) -> str:
    """The wording of the preset `example`: the rules, one reply to another state, what is not accepted."""
    introduction = f"{how_to_think} Another task, and a reply to it in exactly the form to use:"
    return "\n".join([rules, introduction, example.state, example.reply, refused])


def with_worked(instructions: str, examples: Sequence[Example]) -> str:
    """Instructions, then worked examples."""
    parts = [f"Example {number}:\n{example.state}\n{example.reply}" for number, example in enumerate(examples, 1)]
    return "\n\n".join([instructions, *parts])


PAPERS_FORM = (
    "Always output: <think> [Your thoughts] </think> <answer> [your answer] </answer> with no extra text. Strictly follow this format."
)


def in_papers_frame(task: str, symbols: str = "", actions: Sequence[str] = (), max_actions: int = 0, form: str = PAPERS_FORM) -> str:
    """The system message of the paper's code, with the form of a reply, which it repeats before every turn."""
    parts = [f"You're a helpful assistant. {task}"]
    if symbols:
        parts.append(f"The meaning of each symbol in the state is:\n{symbols}")
    if actions:
        parts.append(f"Your available actions are:\n{', '.join(actions)}")
        parts.append(f'You can make up to {max_actions} actions, separated by the action separator " {ACTION_SEPARATOR} "')
    return "\n".join([*parts, form])


def replacement(env: str, chosen: str, presets: Sequence[str]) -> str | None:
    """The text of the file that the option `instructions` names; None where it names one of the presets."""
    if chosen in presets:
        return None
    path = Path(chosen).expanduser()
    if not path.is_file():
        if path.suffix or "/" in chosen or path.exists():
            state = "is a folder" if path.is_dir() else "does not exist"
            raise BadInput(f"{env}: instructions='{chosen}' {state}; give the path of a text file, or one of {', '.join(presets)}")
        raise UnknownName(f"{env}: unknown instructions '{chosen}', and no such file: {did_you_mean(chosen, presets)}")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BadInput(f"{env}: cannot read instructions='{chosen}': {error.strerror}; check the file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{env}: instructions='{chosen}' is not UTF-8 text; save it as UTF-8") from error
    if not text or len(text) > MAX_FILE_CHARS:
        raise BadInput(f"{env}: instructions='{chosen}' has {len(text)} characters; give a text of 1 to {MAX_FILE_CHARS}")
    return text
