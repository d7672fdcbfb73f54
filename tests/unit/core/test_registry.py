"""Registries: names resolve on use, unknown names get a suggestion."""

import sys
from fractions import Fraction

import pytest

from tether.core.errors import BadInput, UnknownName
from tether.core.registry import Registry


def _registry() -> Registry:
    return Registry("environment", {"sokoban": "fractions:Fraction", "countdown": "no_such_module_anywhere:Env"})


def test_names_are_sorted_and_import_nothing() -> None:
    assert _registry().names() == ["countdown", "sokoban"]
    assert "no_such_module_anywhere" not in sys.modules


def test_entry_is_imported_when_asked_for() -> None:
    assert _registry().get("sokoban") is Fraction


def test_missing_module_shows_only_when_asked_for() -> None:
    with pytest.raises(ImportError, match="no_such_module_anywhere"):
        _registry().get("countdown")


def test_a_module_missing_inside_an_installed_package_is_not_something_to_install() -> None:
    registry = Registry("environment", {"lake": "tether.envs.bases:Lake"})
    with pytest.raises(
        BadInput, match=r"^environment 'lake': there is no module 'tether\.envs\.bases': did you mean 'tether\.envs\.base'\?"
    ):
        registry.get("lake")


def test_unknown_name() -> None:
    with pytest.raises(UnknownName) as caught:
        _registry().get("sokobann")
    assert str(caught.value) == "unknown environment 'sokobann': did you mean 'sokoban'? (known: countdown, sokoban)"


def test_objects_and_paths_can_be_registered() -> None:
    registry = _registry()
    thing = object()
    registry.register("mine", thing)
    registry.register("later", "fractions:Fraction")
    assert registry.get("mine") is thing
    assert registry.get("later") is Fraction
    assert registry.names() == ["countdown", "later", "mine", "sokoban"]


def test_existing_name_is_refused_and_kept() -> None:
    registry = _registry()
    with pytest.raises(ValueError, match="environment 'sokoban' is registered already; choose another name"):
        registry.register("sokoban", object())
    assert registry.get("sokoban") is Fraction


def test_registries_do_not_share_entries() -> None:
    entries = {"a": "fractions:Fraction"}
    first = Registry("thing", entries)
    first.register("b", 1)
    assert entries == {"a": "fractions:Fraction"}
    assert Registry("thing", entries).names() == ["a"]
