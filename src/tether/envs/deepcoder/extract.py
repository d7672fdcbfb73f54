"""The program in an answer: its last code fence, or else the whole of it.

A fence is a line of at least three backticks or tildes with any language tag; it ends at a line of as many of the same or at the
end of the answer. Models are careless with the closing one: it may stand at the end of the last line of code, or be missing.
A fence with nothing in it is passed over.
"""

import re
from dataclasses import dataclass

_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<tag>[^`\n]*)")
_ONE_LINE = re.compile(r"[ \t]*`{3,}(?:python[0-9.]*\b|py\b)?(?P<code>[^`]+)`{3,}[ \t]*")


@dataclass(frozen=True, slots=True)
class Extracted:
    """A program taken out of an answer."""

    code: str
    fenced: bool
    """It stood in a code fence, so it is meant as a program."""


def extract(answer: str) -> Extracted:
    """The last non-empty code fence of an answer, or the whole answer."""
    blocks = [block for block in _blocks(answer.replace("\r\n", "\n").split("\n")) if block.strip()]
    return Extracted(blocks[-1], True) if blocks else Extracted(_unfenced(answer), False)


def _blocks(lines: list[str]) -> list[str]:
    """The contents of every fence, in order."""
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        one_line, opening = _ONE_LINE.fullmatch(lines[at]), _OPENING.fullmatch(lines[at])
        at += 1
        if one_line:
            blocks.append(one_line["code"].strip())
        elif opening:
            block, at = _fenced(lines, at, opening["fence"], opening["indent"])
            blocks.append(block)
    return blocks


def _fenced(lines: list[str], at: int, fence: str, indent: str) -> tuple[str, int]:
    """The lines from `at` to the closing fence without the fence's own indentation, and the line after it."""
    block: list[str] = []
    while at < len(lines):
        line = lines[at].removeprefix(indent)
        opening = _OPENING.fullmatch(line)
        if opening and opening["tag"].strip() and opening["fence"][0] == fence[0]:  # the fence before was never closed
            break
        at += 1
        bare = line.rstrip()
        rest = bare.rstrip(fence[0])
        if len(bare) - len(rest) >= len(fence):
            block += [rest] if rest.strip() else []
            break
        block.append(line)
    return "\n".join(block), at


def _unfenced(answer: str) -> str:
    """An answer without a fence that holds anything; stray fence lines are no code."""
    lines = answer.replace("\r\n", "\n").split("\n")
    return "\n".join(line for line in lines if not _OPENING.fullmatch(line))
