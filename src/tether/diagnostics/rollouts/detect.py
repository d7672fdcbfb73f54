"""Which format a file has, by its first records: the first of them that any format recognises decides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.diagnostics.rollouts import generic, ragen, tether_jsonl, trl, values, verl
from tether.diagnostics.rollouts.record import Rollout

NUM_TRIED = 8


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write rollouts down."""

    name: str
    title: str
    """For people."""
    expects: str
    """The fields that give it away."""
    recognises: Callable[[values.Record], bool]
    rollouts: Callable[[values.Record, str], Iterator[Rollout]]
    """The turns of a record; the second argument is its place in the file."""


FORMATS = {
    found.name: found
    for found in (
        Format(
            "tether", "Tether's trajectories.jsonl", "step, split, group, member, turns", tether_jsonl.recognises, tether_jsonl.rollouts
        ),
        Format("ragen", "RAGEN's evaluation JSONL", "custom_id, messages, metadata.group_id", ragen.recognises, ragen.rollouts),
        Format("verl", "verl's rollout dump", "input, output, score", verl.recognises, verl.rollouts),
        Format("trl", "TRL's completions", "step, prompt, completion", trl.recognises, trl.rollouts),
        Format(
            "generic", "generic records", "prompt or messages, response or reasoning", generic.recognises, generic.GenericFormat().rollouts
        ),
    )
}


def named_format(name: str | None, fields: Mapping[str, str] | None) -> Format | None:
    """The format the user asked for; None leaves it to detection. A field map means generic records."""
    if name is not None and name not in FORMATS:
        raise UnknownName(f"rollout format '{name}' is not known; {did_you_mean(name, FORMATS)}")
    if not fields:
        return FORMATS[name] if name is not None else None
    if name not in (None, "generic"):
        raise BadInput(f"a field map is for generic records, but format '{name}' was asked for; leave one of them out")
    plain = FORMATS["generic"]
    return Format(plain.name, plain.title, plain.expects, plain.recognises, generic.GenericFormat(fields).rollouts)


def detect(records: Sequence[values.Record], where: str) -> Format:
    """The format of a file's first records.

    Args:
        where: the place of the first record, for the message when no format recognises any.
    """
    for record in records:
        for candidate in FORMATS.values():
            if candidate.recognises(record):
                return candidate
    known = "; ".join(f"{candidate.title} ({candidate.expects})" for candidate in FORMATS.values())
    guess = {name: path for name, path in generic.suggestions(records[0]).items() if name != path}
    remedy = f"try the field map {','.join(f'{name}={path}' for name, path in guess.items())}" if guess else "give a field map"
    got = ", ".join(sorted(map(str, records[0]))) or "none"
    raise BadInput(f"{where} is no rollout of a known format: its fields are {got}; known: {known}; {remedy}")
