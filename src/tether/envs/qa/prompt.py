"""What an agent is told about a question: the task, examples of replies, and the paper's frame, by how answers are graded.

A reward of the user's own may ask for anything; its example is a plain question all the same, because small models that are only told the
form of a reply in general terms copy the terms.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tether.envs.deepcoder import prompt as code
from tether.envs.metamathqa import prompt as math
from tether.envs.wording import Example, in_papers_frame

EXAMPLE = Example("How many legs does a spider have?", "Spiders are arachnids, which have eight legs.", "8")
AGAIN = " A wrong answer is told as such, and you may answer again."


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts for one way of grading."""

    task: Callable[[int], str]
    """From the number of turns."""
    example: Example
    worked: tuple[Example, ...]
    refused: str


def _task(text: str) -> Callable[[int], str]:
    return lambda turns: f"{text}{AGAIN}" if turns > 1 else text


WORDINGS: dict[str, Wording] = {
    "exact_match": Wording(
        _task("Answer the question. Answer with a name, a number or a few words."),
        EXAMPLE,
        (
            Example(
                "Which gas do plants take in from the air?", "Photosynthesis uses carbon dioxide and gives off oxygen.", "carbon dioxide"
            ),
            Example("Who wrote the play Hamlet?", "Hamlet is a tragedy by William Shakespeare.", "William Shakespeare"),
            Example("In which month does a leap day fall?", "A leap year adds the 29th of February.", "February"),
        ),
        "Between the answer tags write only the answer, without a sentence around it. Stop after </answer>.",
    ),
    "math": Wording(
        _task("Solve the problem. Answer with the result alone: a number such as 72, 3/4 or 2.5, or an expression in LaTeX."),
        math.EXAMPLE,
        math.WORKED,
        math.REFUSED,
    ),
    "code": Wording(code.task, code.EXAMPLE, code.WORKED, code.REFUSED),
}
OWN = Wording(
    _task("Answer the question."),
    EXAMPLE,
    WORDINGS["exact_match"].worked,
    "Between the answer tags write only the answer. Stop after </answer>.",
)
"""For a reward of the user's own."""


def wording_of(reward: str) -> Wording:
    return WORDINGS.get(reward, OWN)


def paper(reward: str, max_turns: int) -> str:
    return in_papers_frame(wording_of(reward).task(max_turns))
