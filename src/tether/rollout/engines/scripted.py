"""The scripted engine: responses from a function or a file instead of a model.

It drives the same conversations as any other engine, so environments, contexts, recording and filters can be run end to end where no model
is needed. A response is text; it is tokenised once and its tokens are what the trajectory carries. There are no log-probs (they are 0), so
nothing can be trained on these trajectories.

A file holds one JSON value per line: the list of one conversation's responses, turn by turn, or a single response as a string. Conversation
n takes line n modulo the number of lines; a conversation that outlasts its list repeats the last response.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.core.protocols import ContextReset, Conversation, EngineCapabilities, EngineStatistics, FollowUp, Sampling, settled
from tether.core.types import Completion

Respond = Callable[[str, int, int], str]
"""(the text of the conversation so far, number of the conversation, number of the turn from 0) -> the response."""


class ScriptedEngine:
    """Answers conversations by a script, one after the other."""

    capabilities = EngineCapabilities(per_conversation_uniforms=False, prefix_sharing=False, weight_sync=False, logprobs=False)
    backend = "scripted"

    def __init__(self, respond: Respond | Path | str, tokenizer: PreTrainedTokenizerBase) -> None:
        """`respond` is a function, or the path of a file of responses."""
        self._respond = respond if callable(respond) else read_script(Path(respond))
        self.tokenizer = tokenizer
        self.statistics = EngineStatistics()

    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[], None] | None = None,
        follow_up: FollowUp | None = None,
    ) -> None:
        self.statistics = EngineStatistics()
        queue = deque(conversations)
        for number in itertools.count():
            if not queue:
                break
            self._play(conversation := queue.popleft(), number, sampling)
            if on_finished is not None:
                on_finished()
            queue.extend(follow_up(conversation) if follow_up is not None else ())

    def sync(self, version: int | None = None) -> dict[str, float]:
        """There are no weights."""
        return {}

    def free(self) -> None:
        """There is no memory to release."""

    def _play(self, conversation: Conversation, number: int, sampling: Sampling) -> None:
        seen: list[int] = []
        prompt, turn = settled(conversation.begin()), 0
        while prompt is not None:
            seen = [*prompt] if isinstance(prompt, ContextReset) else [*seen, *prompt]
            self.statistics.fed_tokens += len(prompt)
            text = self._respond(str(self.tokenizer.decode(seen)), number, turn)
            ids = self.tokenizer.encode(text, add_special_tokens=False)[: sampling.max_tokens]
            cut = len(ids) >= sampling.max_tokens
            self.statistics.sampled_tokens += len(ids)
            seen, turn = [*seen, *ids], turn + 1
            finish = FinishReason.LENGTH if cut else FinishReason.STOP_TEXT
            prompt = settled(conversation.receive(Completion(tuple(ids), (0.0,) * len(ids), finish)))


def read_script(path: Path) -> Respond:
    """The responses of a file, as a function."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise BadInput(f"cannot read the script '{path}': {(error.strerror or str(error)).lower()}; check the path") from error
    except ValueError as error:
        raise BadInput(f"the script '{path}' does not parse: {error}; write one JSON list of responses per line") from error
    script = [[line] if isinstance(line, str) else line for line in lines]
    if not script or not all(isinstance(turns, list) and turns and all(isinstance(text, str) for text in turns) for turns in script):
        raise BadInput(f"the script '{path}' must hold at least one line, each a JSON string or a list of strings")

    def respond(context: str, conversation: int, turn: int) -> str:
        turns = script[conversation % len(script)]
        return str(turns[min(turn, len(turns) - 1)])

    return respond
