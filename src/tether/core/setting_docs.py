"""Settings classes as a list for people: every dotted key with its default, what it may be, and its meaning.

The meaning is the text under the field in the source, so that code and listing cannot differ.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "null", "Any": "any"}
_BOUNDS = (("gt", "above {}"), ("ge", "at least {}"), ("lt", "below {}"), ("le", "at most {}"))


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """One setting. Example: SettingDoc("rollout.group_size", "16", "whole number, at least 1", "Trajectories per prompt, G.")."""

    key: str
    default: str
    """As YAML, or "required"."""
    allowed: str
    """The type and the bounds in words."""
    meaning: str


def setting_docs(model: type[BaseModel], prefix: str = "") -> Iterator[SettingDoc]:
    """Every setting of a class, sections in depth."""
    meanings = field_meanings(model)
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            yield from setting_docs(field.annotation, f"{prefix}{name}.")
        else:
            allowed = ", ".join([_type_words(field.annotation), *_bounds(field.metadata)])
            yield SettingDoc(prefix + name, _default(field), allowed, meanings.get(name, ""))


@lru_cache(maxsize=64)
def field_meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a class and of the classes it is derived from, in one line."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):  # a class typed into a session has no source, and so no texts
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[field.target.id] = " ".join(below.value.value.split())
    return {name: text for name, text in found.items() if name in model.model_fields}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}))
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _bounds(metadata: typing.Iterable[Any]) -> list[str]:
    said = []
    for constraint in metadata:
        inner = constraint.metadata if isinstance(constraint, FieldInfo) else ()
        said += _bounds(inner)
        for name, form in _BOUNDS:
            if isinstance(getattr(constraint, name, None), int | float):
                said.append(form.format(f"{getattr(constraint, name):g}"))
    return said


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return ", ".join([_type_words(arguments[0]), *_bounds(arguments[1:])])
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(argument) for argument in arguments)
    if origin is list or origin is tuple or annotation in (list, tuple):
        return "list"
    if origin is dict or annotation is dict:
        return "key: value"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    if inspect.isclass(annotation) and hasattr(annotation, "__members__"):
        return ", ".join(str(member.value) for member in annotation)  # type: ignore[attr-defined]
    name = getattr(annotation, "__name__", str(annotation))
    return _WORDS.get(name, name)
