"""Replies that are not valid, put into words: what is wrong with most of them, an example, and what to do about it.

A model that cannot write the form of a reply learns nothing, however long it trains. So the first step's record says how many replies were
valid, a step without any says it again, and early stopping ends a run that stays so (early_stop.py), with the words of its last step. The
verdict of the report repeats the note (runs/causes.py, which knows the other causes of a run that cannot learn). An evaluation ends with it.
"""

import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from tether.core.enums import FinishReason, StopReason
from tether.core.grammar import THINK_CLOSE
from tether.core.types import Group, Turn
from tether.models.catalog import SHIPPED
from tether.models.chat_endpoint import is_endpoint
from tether.runs.causes import FEW_VALID
from tether.training.sft.settings import EXPERTS

SHOWN_CHARS = 100
"""Of the example, its beginning and end together."""
ENOUGH_VALID = 0.5
"""Share of valid replies from which on the first step of a run gives no advice."""
NONE_VALID = "none of "
"""How the note on a step without a valid reply begins."""

_COMPLETE = re.compile(rf"{THINK_CLOSE}\s*<(\w+)>.*?</\1>", re.DOTALL)
"""Reasoning and an answer in tags of whatever name; which names an environment reads is its own affair."""
_OPEN = re.compile(rf"{THINK_CLOSE}\s*<\w+>")
"""Reasoning and the beginning of an answer, which the end of the turn closes."""


class Fault(StrEnum):
    """Why a reply is not valid; the first that holds."""

    UNCLOSED_THINK = "never close the think tag"
    CUT = "are cut off at rollout.max_tokens before the answer is complete"
    NO_ANSWER = "have no complete answer tag right behind the thoughts"
    NOT_AN_ACTION = "have an answer that is no valid action"


def reply_fault(turn: Turn) -> Fault | None:
    """What is wrong with a reply; None for a valid one."""
    if turn.valid:
        return None
    if THINK_CLOSE not in turn.text:
        return Fault.UNCLOSED_THINK
    if _COMPLETE.search(turn.text) or (turn.finish is FinishReason.END_OF_TURN and _OPEN.search(turn.text)):
        return Fault.NOT_AN_ACTION
    return Fault.CUT if turn.finish is FinishReason.LENGTH else Fault.NO_ANSWER


def replies_note(groups: Sequence[Group], *, first: bool, env: str, model: str, max_tokens: int) -> str | None:
    """The line on the replies of a step; None for a later step in which some were valid.

    Args:
        groups: what the step played.
        first: whether it is the first step of the run.
        env: the environment, for the command that helps.
        model: the model, likewise.
        max_tokens: the budget of a response.
    """
    turns = _turns(groups)
    num_valid = sum(turn.valid for turn in turns)
    if not turns:
        return not_begun_note(groups, max_tokens)
    if num_valid and not first:
        return None
    few = few_valid_note(groups, env=env, model=model, max_tokens=max_tokens, below=ENOUGH_VALID)
    return few or f"{num_valid / len(turns):.0%} of {len(turns)} replies were valid"


def not_begun_note(groups: Sequence[Group], max_tokens: int) -> str | None:
    """The line on episodes whose very first prompt is too long; None where all began, or something else was in the way of all that did not."""
    played = [trajectory for group in groups for trajectory in group.trajectories]
    began = [t for t in played if t.turns or t.stop_reason is not StopReason.CONTEXT_FULL]
    if len(began) == len(played):
        return None
    some = f"only {len(began)} of " if began else NONE_VALID
    return (
        f"{some}{len(played)} episodes could begin: the first prompt and a response of {max_tokens} tokens do not fit into the context; "
        "raise rollout.max_context where the model allows it, lower rollout.max_tokens, or show fewer examples (env.options.few_shot=0)"
    )


def few_valid_note(groups: Sequence[Group], *, env: str, model: str, max_tokens: int, below: float = FEW_VALID) -> str | None:
    """The line on replies of which fewer than this share is valid; None where there are enough."""
    turns = _turns(groups)
    faults = [(fault, turn) for turn in turns if (fault := reply_fault(turn)) is not None]
    num_valid = len(turns) - len(faults)
    if num_valid >= below * len(turns):
        return None
    fault, count = Counter(fault for fault, _ in faults).most_common(1)[0]
    chosen = [turn for found, turn in faults if found is fault]
    at_limit = sum(turn.finish is FinishReason.LENGTH for turn in chosen)
    begin = NONE_VALID if not num_valid else f"only {num_valid} of "
    limit = f" ({at_limit} at the limit of {max_tokens} tokens)" if fault is Fault.UNCLOSED_THINK and at_limit else ""
    return (
        f"{begin}{len(turns)} replies {'was' if num_valid < 2 else 'were'} valid: {count} {fault}{limit}, for example {_shortened(chosen[0].text)}; "
        f"{_advice(fault, at_limit > count / 2, env, model, max_tokens)}"
    )


def _turns(groups: Sequence[Group]) -> list[Turn]:
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


def _advice(fault: Fault, mostly_cut: bool, env: str, model: str, max_tokens: int) -> str:
    knows = ", ".join(EXPERTS)
    if is_endpoint(model):
        teach = "show the model more worked examples (env.options.few_shot), or word the instructions for it (env.options.instructions)"
    elif env not in EXPERTS and model in SHIPPED:
        return f"`{model}` has learned {knows} and nothing else; use a model that reads English, such as --model smollm2"
    else:
        source = env if env in EXPERTS else "FILE.jsonl"
        of_yours = "" if env in EXPERTS else ", with conversations of yours in that form"
        teach = (
            f"teach the model the form first (tether sft {source} --model {model}{of_yours}), show it more worked examples (env.options.few_shot), "
            "or word the instructions for it (env.options.instructions)"
        )
    if fault is Fault.CUT or (fault is Fault.UNCLOSED_THINK and mostly_cut):
        return f"raise rollout.max_tokens (now {max_tokens}); where that does not help, {teach}"
    return teach


def _shortened(text: str) -> str:
    """A reply on one line, its middle left out where it is long."""
    line = " ".join(text.split())
    half = SHOWN_CHARS // 2
    return repr(line if len(line) <= SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}")
