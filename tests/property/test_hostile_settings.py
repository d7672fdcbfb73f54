"""Whatever is typed or written into a settings file: it is read, or refused with lines that are not long. Nothing else is ever raised."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.config import load, merge, parse_overrides, validate
from tether.core.errors import BadInput
from tether.core.http_client import growing_delays
from tether.diagnostics.rollouts.record import BadRecord
from tether.diagnostics.rollouts.values import number, step, text, total
from tether.envs.remote.wire import WireError, decode
from tether.runs.timings import StepTimings, as_records
from tether.training.settings import RunSettings

ANY_TEXT = st.text(st.characters(), max_size=40)
NASTY = st.sampled_from(
    [
        "[" * 200,
        "{" * 200,
        "&a [*a]",
        "!!python/object:os.system x",
        "1" * 4400,
        "1e999",
        ".nan",
        "0x" + "f" * 99,
        "2001-99-99",
        "<<: *a",
        "\x00",
    ]
)
KEYS = st.one_of(
    ANY_TEXT, st.sampled_from(["seed", "env.options.name", "env.name", "rollout.group_size", "a." * 80, "model.device", "also"])
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.integers(10**300, 10**310),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def _said(read: Callable[[], object]) -> str:
    """What a reader says about its input; empty if it took it. Anything but a refusal is a failure."""
    try:
        read()
    except (BadInput, BadRecord, WireError) as refusal:
        return str(refusal)
    return ""


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(KEYS, ANY_TEXT | NASTY), max_size=4))
def test_overrides(pairs: list[tuple[str, str]]) -> None:
    def read() -> None:
        found = parse_overrides(f"{key}={value}" for key, value in pairs)
        validate(RunSettings, merge({"env": {"name": "frozen_lake"}}, found))

    assert all(len(line) < 2_000 for line in _said(read).splitlines())


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=80) | ANY_TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")) | NASTY.map(str.encode),
    st.sampled_from(["yaml", "toml"]),
)
def test_files(content: bytes, ending: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"settings.{ending}"
        path.write_bytes(content)
        assert len(_said(lambda: load(RunSettings, path))) < 50_000


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_values_of_rollouts(value: object) -> None:
    for read in (text, number, total, step):
        found: list[object] = []
        assert len(_said(lambda: found.append(read(value, "field")))) < 500  # noqa: B023 - called at once
        assert not found or found[0] is None or isinstance(found[0], str) or abs(found[0]) <= 1e60  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*StepTimings.__dataclass_fields__]), JSON, max_size=4))
def test_timings(line: dict[str, object]) -> None:
    assert len(_said(lambda: as_records([{"step": 1, **line}]))) < 2_000


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"$array": {"shape": [-1]}}', b'{"$dict": [[{}, 1]]}', b"1" * 5000]))
def test_messages_of_servers(data: bytes) -> None:
    _said(lambda: decode(data))


def test_delays_grow_and_end() -> None:
    assert list(growing_delays("http://nobody", 0.0)) == []
