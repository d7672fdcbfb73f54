"""The wire format: what goes in comes out, what cannot travel is refused, what is broken says so."""

import base64
import io
import json
import math
import sys
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tether.core.errors import BadInput
from tether.core.http import checked_token, is_loopback
from tether.core.types import Observation, Step
from tether.envs.remote.wire import (
    WireError,
    decode,
    encode,
    observation_read,
    observation_written,
    step_read,
    step_written,
)

sys.path.append(str(Path(__file__).parents[1]))
from hostile_images import BOMB, CUT_SHORT

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
_KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3), max_leaves=12)


def _same(left: Any, right: Any) -> bool:
    """Equality that tells -0.0 from 0.0, 1 from 1.0 and True, and finds NaN equal to itself."""
    return repr(left) == repr(right)


@settings(deadline=None)  # a busy machine is no defect
@given(_VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert _same(decode(encode(value)), value)


class _Colour(StrEnum):
    RED = "red"


class _Number(IntEnum):
    SEVEN = 7


@pytest.mark.parametrize(
    ("value", "restored"),
    [
        ((1, (2, "x")), [1, [2, "x"]]),
        (np.int64(7), 7),
        (np.float32(0.1), 0.10000000149011612),
        (np.float64("nan"), math.nan),
        (np.True_, True),
        (np.str_("a"), "a"),
        (_Colour.RED, "red"),
        (_Number.SEVEN, 7),
        ({"$float": "nan"}, {"$float": "nan"}),
        ({"$": 1, "plain": 2}, {"$": 1, "plain": 2}),
        ({(0, 1): "wall", (0, (1, 2)): "nested"}, {(0, 1): "wall", (0, (1, 2)): "nested"}),
        ("\ud800 broken", "\ud800 broken"),
        (10**40, 10**40),
    ],
)
def test_restored_as_documented(value: Any, restored: Any) -> None:
    assert _same(decode(encode(value)), restored)


def test_the_very_bytes() -> None:
    value = {"a": [1, 2.5, True, None, "é"], "b": -math.inf, "c": {3: b"\x00\xff"}}
    assert encode(value) == b'{"a":[1,2.5,true,null,"\\u00e9"],"b":{"$float":"-inf"},"c":{"$dict":[[3,{"$bytes":"AP8="}]]}}'
    array = np.array([[1, 2], [3, 4]], dtype="<i2")
    assert encode({"x": array}) == b'{"x":{"$array":{"dtype":"<i2","shape":[2,2],"data":"AQACAAMABAA="}}}'


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        np.arange(6).reshape(2, 3).T,
        np.array([1.5, math.nan, -math.inf], dtype=">f4"),
        np.zeros((0, 3), dtype=bool),
        np.array(5),
        np.array([1 + 2j]),
    ],
)
def test_arrays_are_exact_and_can_be_written_to(array: Any) -> None:
    restored = decode(encode({"x": array}))["x"]
    assert restored.dtype == array.dtype and restored.shape == array.shape
    assert restored.tobytes() == array.tobytes()
    restored[...] = 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"info": {"board": {1, 2}}}, "info['board'] is a set"),
        ({"info": {"path": [0, object()]}}, "info['path'][1] is a object"),
        ({"info": np.array([object()])}, "info is an array of object"),
        ({"info": {(1, frozenset()): 1}}, "a key of info[1] is a frozenset"),
        (np.longdouble(1), "this is a longdouble"),
        (1j, "this is a complex"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, said: str) -> None:
    with pytest.raises(WireError) as refused:
        encode(value)
    assert str(refused.value).startswith(said) and "cannot travel over HTTP; use text" in str(refused.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not JSON"),
        (b"<html>", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "is not JSON"),
        (b'{"$float": "1.0"}', "unknown form {'$float': ...}"),
        (b'{"$set": [1]}', "unknown form {'$set': ...}"),
        (b'{"$dict": [[1]]}', "unknown form {'$dict': ...}"),
        (b'{"$dict": [[{"a": 1}, 1]]}', "unhashable"),
        (b'{"$bytes": 3}', "a int where base64 text should be"),
        (b'{"$bytes": "a"}', "broken base64"),
        (b'{"$bytes": "\\u00e9"}', "broken base64"),
        (b'{"$array": {"data": ""}}', "without a shape"),
        (b'{"$array": {"shape": [2], "data": "AA=="}}', "does not fit its shape"),
        (b'{"$array": {"shape": [1], "dtype": "O", "data": "AAAAAAAAAAA="}}', "only numbers can travel"),
        (b'{"$array": {"shape": [1], "dtype": "i4,i4", "data": "AAAAAAAAAAA="}}', "only numbers can travel"),
        (b'{"$array": {"shape": [1], "dtype": "nonsense", "data": ""}}', "does not fit"),
        (b'{"$array": {"shape": ["x"], "data": "AA=="}}', "does not fit"),
    ],
)
def test_broken_data_says_so(data: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said.replace("$", r"\$").replace("{", r"\{").replace(".", r"\.")):
        decode(data)


def test_step_there_and_back() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    step = Step(Observation("two\nlines √", image), np.float64(-0.1), np.bool_(True), False, {"valid": True, "player": (1, 2)})  # type: ignore[arg-type]
    back = step_read(decode(encode(step_written(step))))
    assert back.observation.text == "two\nlines √"
    assert back.observation.image is not None and back.observation.image.dtype == np.uint8
    assert np.array_equal(back.observation.image, image)
    assert (back.reward, back.done, back.success, back.info) == (-0.1, True, False, {"valid": True, "player": [1, 2]})
    assert type(back.reward) is float and type(back.done) is bool
    assert observation_read(observation_written(Observation("x"))) == Observation("x")


def test_rewards_that_are_no_number_travel_too() -> None:
    back = step_read(decode(encode(step_written(Step(Observation(""), math.nan, False, False)))))
    assert math.isnan(back.reward) and back.info == {}
    with pytest.raises(WireError, match="info is a list; it must be a dictionary"):
        step_written(Step(Observation(""), 0.0, False, False, []))  # type: ignore[arg-type]


def test_servers_in_other_languages_may_be_terse() -> None:
    """A PNG for the picture, a whole number for the reward, no info."""
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    png = base64.b64encode(file.getvalue()).decode()
    step = step_read({"observation": {"text": "t", "image": {"png": png}}, "reward": 1, "done": False, "success": False})
    assert np.array_equal(np.asarray(step.observation.image), image) and step.observation.image is not None
    assert step.observation.image.dtype == np.uint8 and type(step.reward) is float and step.info == {}
    for mode in ("RGBA", "P", "L", "1", "I;16"):  # what other programs write
        other = io.BytesIO()
        Image.fromarray(np.zeros((5, 4), np.uint16) if mode == "I;16" else image).convert(mode).save(other, "PNG")
        read = observation_read({"text": "t", "image": {"png": base64.b64encode(other.getvalue()).decode()}}).image
        assert read is not None and (read.shape, read.dtype) == ((5, 4, 3), np.uint8)
    raw = {"shape": [5, 4, 3], "data": base64.b64encode(image.tobytes()).decode()}
    assert np.array_equal(np.asarray(observation_read({"text": "t", "image": raw}).image), image)


GOOD: dict[str, Any] = {"observation": {"text": "t", "image": None}, "reward": 0.0, "done": False, "success": False, "info": {}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"observation": "t"}, "no observation"),
        ({"observation": {"text": 3}}, "no observation"),
        ({"observation": {"text": "t", "image": 3}}, "without a shape"),
        ({"observation": {"text": "t", "image": {"png": "AAAA"}}}, "is refused: its picture cannot be read as an image: it is none of PNG"),
        ({"observation": {"text": "t", "image": {"png": base64.b64encode(CUT_SHORT).decode()}}}, "its picture cannot be read as an image"),
        (
            {"observation": {"text": "t", "image": {"png": base64.b64encode(BOMB).decode()}}},
            "its picture has 20000 x 4000 pixels; at most 67108864 are read",
        ),
        ({"reward": None}, "the reward None"),
        ({"reward": True}, "the reward True"),
        ({"reward": "1"}, "the reward '1'"),
        ({"done": 1}, "done 1"),
        ({"success": None}, "success None"),
        ({"info": [1]}, "info that is a list"),
    ],
)
def test_steps_of_the_wrong_form(change: dict[str, Any], said: str) -> None:
    assert step_read(GOOD) == Step(Observation("t"), 0.0, False, False, {})
    with pytest.raises(WireError, match=said):
        step_read({**GOOD, **change})


def test_json_is_plain_ascii_for_any_parser() -> None:
    data = encode({"text": "√ 日本 \u2028", "number": 0.1})
    assert data.isascii() and json.loads(data) == {"text": "√ 日本 \u2028", "number": 0.1}


def test_which_hosts_are_this_machine() -> None:
    assert all(is_loopback(host) for host in ("localhost", "LocalHost", "127.0.0.1", "127.8.9.1", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "", "example.org", "10.0.0.1", "localhost.example.org"))


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "é", "\x7f"])
def test_tokens_that_do_not_fit_a_header(token: str) -> None:
    assert checked_token("aB3-_.~+/=") == "aB3-_.~+/="
    with pytest.raises(BadInput, match="without spaces"):
        checked_token(token)
