"""The JSON between an environment server and its clients; decoding gives back what was encoded.

JSON cannot hold everything that an environment may put into `info`. So an object with one key that begins with "$" stands for another
value: {"$float": "nan"}, {"$bytes": base64}, {"$array": {dtype, shape, data}} and {"$dict": [[key, value], ...]} for dictionaries with keys
that are not plain text. numpy scalars become Python numbers and tuples become lists. Any other value is refused, never turned into its
printed form. docs/environments/http.md is the specification for other languages.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.types import Observation, Step

PROTOCOL = 1
"""Grows when an old client would no longer understand the server; also the v1 of the paths."""
ENV_SEED, OLD_ENV_SEED = "env_seed", "luck"
"""The field that seeds the randomness inside an episode. Until tether 0.1 it was called `luck`. A server that knows the new name says so in
its description (`seed_field`) and accepts the old one for one release; a client sends the name that the server knows."""

_ARRAY_KINDS = "biufc"
"""Booleans, integers and floats: arrays that are nothing but numbers."""


class WireError(ValueError):
    """Something that is not of the form it should have; the message says what."""


def encode(value: Any) -> bytes:
    """A value as JSON. Only ASCII: any text survives, broken surrogate pairs included."""
    return json.dumps(_written(value, ""), allow_nan=False, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Any:
    """The value of JSON that `encode`, or a server in another language, has written."""
    try:
        return _read(json.loads(data))
    except RecursionError:
        raise WireError("is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise WireError(str(error) if isinstance(error, WireError) else f"is not JSON ({error})") from None


def _written(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, np.generic):
        plain = value.item()
        if isinstance(plain, np.generic):  # a long double, which Python has no number for
            raise _unwritable(value, where)
        return _written(plain, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray):
        return {"$array": _array_written(value, where)}
    if isinstance(value, Mapping):
        return _mapping_written(value, where)
    if isinstance(value, list | tuple):
        return [_written(item, _inside(where, place)) for place, item in enumerate(value)]
    raise _unwritable(value, where)


def _unwritable(value: Any, where: str) -> WireError:
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    return WireError(
        f"{where or 'this'} is {kind}, which cannot travel over HTTP; use text, numbers, lists, dictionaries, bytes or arrays of numbers"
    )


def _inside(where: str, key: object) -> str:
    """Where an item stands, such as info['board'][2]."""
    return f"{where}[{key!r}]" if where else str(key)


def _mapping_written(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _written(item, _inside(where, key)) for key, item in value.items()}
    pairs = ([_written(key, f"a key of {where or 'this'}"), _written(item, _inside(where, key))] for key, item in value.items())
    return {"$dict": list(pairs)}


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if len(value) == 1 and key.startswith("$"):
        return _stand_in(key, value[key])
    return {key: _read(item) for key, item in value.items()}


def _stand_in(key: str, value: Any) -> Any:
    """What an object with one "$" key stands for."""
    if key == "$float" and value in ("nan", "inf", "-inf"):
        return float(value)
    if key == "$bytes":
        return _unpacked(value)
    if key == "$array":
        return _array_read(value)
    if key == "$dict" and isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return {_hashable(_read(name)): _read(item) for name, item in value}
    raise WireError(f"holds the unknown form {{'{key}': ...}}")


def _hashable(key: Any) -> Any:
    """A key as it was: among keys, what has become a list can only have been a tuple."""
    return tuple(_hashable(item) for item in key) if isinstance(key, list) else key


def _array_written(array: npt.NDArray[Any], where: str) -> dict[str, Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise _unwritable(array, where)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode("ascii")}


def _array_read(value: Any) -> npt.NDArray[Any]:
    """An array from its dtype (uint8 by default), shape and bytes."""
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        raise WireError("holds an array without a shape")
    try:
        dtype = np.dtype(str(value.get("dtype", "uint8")))
        if dtype.kind not in _ARRAY_KINDS:
            raise WireError(f"holds an array of {dtype}; only numbers can travel")
        return np.frombuffer(_unpacked(value.get("data")), dtype).reshape(value["shape"]).copy()
    except (TypeError, ValueError) as error:
        raise WireError(str(error) if isinstance(error, WireError) else f"holds an array that does not fit its shape ({error})") from None


def _unpacked(text: Any) -> bytes:
    if not isinstance(text, str):
        raise WireError(f"holds a {type(text).__name__} where base64 text should be")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"holds broken base64 ({error})") from None


# --- the records of the Env protocol ---


def observation_written(observation: Observation) -> dict[str, Any]:
    image = observation.image
    return {"text": str(observation.text), "image": None if image is None else _array_written(np.asarray(image), "the image")}


def observation_read(value: Any) -> Observation:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise WireError("has no observation with a text")
    return Observation(value["text"], _image_read(value.get("image")))


def _image_read(value: Any) -> npt.NDArray[np.uint8] | None:
    """A picture: nothing, {"png": base64}, or {"shape": [height, width, 3], "data": base64 of the bytes}."""
    if value is None:
        return None
    if not isinstance(value, dict) or "png" not in value:
        return _array_read(value)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(_unpacked(value["png"])), formats=["PNG"]) as picture:
            return np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise WireError(f"holds a picture that is no PNG ({error})") from None


def step_written(step: Step) -> dict[str, Any]:
    if not isinstance(step.info, Mapping):
        raise WireError(f"info is a {type(step.info).__name__}; it must be a dictionary")
    return {
        "observation": observation_written(step.observation),
        "reward": float(step.reward),
        "done": bool(step.done),
        "success": bool(step.success),
        "info": step.info,
    }


def step_read(value: Any) -> Step:
    observation = observation_read(value.get("observation"))
    reward, done, success, info = value.get("reward"), value.get("done"), value.get("success"), value.get("info", {})
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise WireError(f"has the reward {reward!r}, which is no number")
    if not isinstance(done, bool) or not isinstance(success, bool):
        raise WireError(f"has done {done!r} and success {success!r}; both must be true or false")
    if not isinstance(info, dict):
        raise WireError(f"has an info that is a {type(info).__name__}, not an object")
    return Step(observation, float(reward), done, success, info)
