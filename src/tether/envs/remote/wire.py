"""The JSON between an environment server and its clients; decoding gives back what was encoded.

The plain form of `core/codec.py`, with {"$array": {dtype, shape, data}} for arrays of numbers; numpy scalars become Python numbers. Any other
value is refused, never turned into its printed form. docs/environments/http.md is the specification for other languages.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tether.core import codec
from tether.core.codec import CodecError as WireError
from tether.core.errors import BadInput
from tether.core.images import Image
from tether.core.types import Observation, Step

PROTOCOL = 1
"""Grows when an old client would no longer understand the server; also the v1 of the paths."""
ENV_SEED: Final = "env_seed"
OLD_ENV_SEED: Final = "luck"
"""The field that seeds the randomness inside an episode. Until tether 0.1 it was called `luck`. A server that knows the new name says so in
its description (`seed_field`) and accepts the old one for one release; a client sends the name that the server knows."""

_ARRAY_KINDS = "biufc"
"""Booleans, integers and floats: arrays that are nothing but numbers."""
_MAX_CHARACTERS = 1 << 40


def encode(value: Any) -> bytes:
    """A value as JSON. Only ASCII: any text survives, broken surrogate pairs included."""
    try:
        return codec.encode(value, _MAX_CHARACTERS, plain=True, other=_written).encode("ascii")
    except WireError as error:
        raise WireError(f"{error.where or 'this'} {error}") from None


def decode(data: bytes) -> Any:
    """The value of JSON that `encode`, or a server in another language, has written."""
    try:
        return codec.restored(json.loads(data), _BUILDERS)
    except RecursionError:
        raise WireError("is nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise WireError(str(error) if isinstance(error, WireError) else f"is not JSON ({error})") from None


def _written(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return codec.Tagged({"$array": _array_written(value)})
    if isinstance(value, Mapping):
        return dict(value)
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, np.generic | complex) or plain is value:  # a long double, say, which Python has no number for
        raise _unwritable(f"a {type(plain).__name__}")
    return plain


def _unwritable(kind: str) -> WireError:
    return WireError(f"is {kind}, which cannot travel over HTTP; use text, numbers, lists, dictionaries, bytes or arrays of numbers")


def _array_written(array: npt.NDArray[Any]) -> dict[str, Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise _unwritable(f"an array of {array.dtype}")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode("ascii")}


def _array_read(value: Any, _: object = None) -> npt.NDArray[Any]:
    """An array from its dtype (uint8 by default), shape and bytes."""
    if not isinstance(value, dict) or not isinstance(value.get("shape"), list):
        raise WireError("holds an array without a shape")
    try:
        dtype = np.dtype(str(value.get("dtype", "uint8")))
        if dtype.kind not in _ARRAY_KINDS:
            raise WireError(f"holds an array of {dtype}; only numbers can travel")
        return np.frombuffer(codec.unpacked(value.get("data")), dtype).reshape(value["shape"]).copy()
    except (TypeError, ValueError) as error:
        raise WireError(str(error) if isinstance(error, WireError) else f"holds an array that does not fit its shape ({error})") from None


_BUILDERS = {**codec.PLAIN, "$array": _array_read}


# --- the records of the Env protocol ---


def observation_written(observation: Observation) -> dict[str, Any]:
    """A picture as a PNG file, a tenth of its bytes. One that is no picture travels as it is: the client, who checks it, has to see it."""
    image: Any = observation.image
    try:
        written = None if image is None else {"png": base64.b64encode(Image.of(image).png).decode("ascii")}
    except TypeError:
        try:
            written = _array_written(np.asarray(image))
        except WireError as error:
            raise WireError(f"the image {error}") from None
    return {"text": str(observation.text), "image": None if written is None else codec.Tagged(written)}


def observation_read(value: Any) -> Observation:
    """An observation, whose picture is nothing, {"png": base64}, or {"shape": [height, width, 3], "data": base64 of the bytes}."""
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise WireError("has no observation with a text")
    image = value.get("image")
    if image is None or not isinstance(image, dict) or "png" not in image:
        return Observation(value["text"], None if image is None else _array_read(image))
    try:
        return Observation(value["text"], Image.read(codec.unpacked(image["png"]), "its picture").pixels)
    except BadInput as error:
        raise WireError(f"is refused: {error}") from None


def step_written(step: Step) -> dict[str, Any]:
    if not isinstance(step.info, Mapping):
        raise WireError(f"info is a {type(step.info).__name__}; it must be a dictionary")
    fields = {name: getattr(step, name) for name in ("reward", "done", "success", "info")}
    return {"observation": observation_written(step.observation), **fields}


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
