"""`agent.train_calls`: which calls of an episode are trained. All are recorded.

all               every call
with_tools        auxiliary calls are not: those without tools, in an episode where others have them (a title, a summary, a memory)
module:function   a function of the user's says so of each call: it gets a `CallView` and returns True or False
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.errors import BadInput, did_you_mean
from tether.core.importing import import_object, in_one_line, is_import_path

ALL, WITH_TOOLS = "all", "with_tools"


@dataclass(frozen=True, slots=True)
class CallView:
    """One call of an episode that has ended, to look at."""

    number: int
    """Its place among the episode's calls, from 0: shorter conversations come first, whatever the order in which requests arrived."""
    messages: tuple[Mapping[str, Any], ...]
    """Those of the request: role, content, tool_calls with arguments as values."""
    tools: tuple[Mapping[str, Any], ...]
    text: str
    """The reply."""


TrainRule = Callable[[Sequence[CallView]], list[bool]]


def train_rule(name: str) -> TrainRule | None:
    """The rule by its name; None where all calls are trained. A name that is not known is refused."""
    if name == ALL:
        return None
    if name == WITH_TOOLS:
        return lambda calls: [bool(call.tools) or not any(other.tools for other in calls) for call in calls]
    if not is_import_path(name):
        raise BadInput(f"agent.train_calls '{name}' is not known: {did_you_mean(name, (ALL, WITH_TOOLS))}; or give module:function")
    function = import_object(name, "agent.train_calls", callable)
    if not callable(function):
        raise BadInput(f"agent.train_calls '{name}' is a {type(function).__name__}; give a function of one call")

    def asked(call: CallView) -> bool:
        try:
            answer = function(call)
        except Exception as error:
            raise BadInput(f"agent.train_calls '{name}' failed at call {call.number} of an episode: {in_one_line(error)}") from error
        if not isinstance(answer, bool):
            raise BadInput(f"agent.train_calls '{name}' returned {answer!r:.60}; return True or False")
        return answer

    return lambda calls: [asked(call) for call in calls]
