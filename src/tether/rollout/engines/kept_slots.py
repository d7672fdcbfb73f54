"""Slots of conversations that have ended, kept for the request that continues them.

A client of `tether serve` sends a conversation turn by turn, each time from its beginning. What the turns before left in the cache is found
again by their tokens. Slots are given up in the order in which they were last used.
"""


class KeptSlots:
    """The tokens that each kept slot holds."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        """Of each slot; the one last used is at the end."""

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, slot: object) -> bool:
        return slot in self._tokens

    def keep(self, slot: int, tokens: list[int]) -> None:
        """A slot holds these tokens, and its conversation has ended."""
        self._tokens[slot] = tokens

    def take(self, prompt: list[int]) -> tuple[int, int] | None:
        """The slot that holds the longest beginning of a prompt, and how long that is. At least one token is left to be computed."""
        # The last token is compared first: it tells most conversations apart that begin with the same instructions.
        slots = [
            slot
            for slot, tokens in self._tokens.items()
            if len(tokens) < len(prompt) and tokens[-1] == prompt[len(tokens) - 1] and tokens == prompt[: len(tokens)]
        ]
        if not slots:
            return None
        slot = max(slots, key=lambda slot: len(self._tokens[slot]))
        return slot, len(self._tokens.pop(slot))

    def give_up(self) -> int:
        """The slot that was not used for longest; the caller releases it."""
        slot = next(iter(self._tokens))
        del self._tokens[slot]
        return slot
