"""Environments by name: near misses are suggested, options are checked, users can add their own."""

import subprocess
import sys
from fractions import Fraction

import pytest

from tether.core.errors import BadInput, ConfigError, UnknownName
from tether.core.protocols import Env
from tether.core.types import Observation, Step
from tether.envs import registry
from tether.envs.base import ActionEnv, Outcome, TextEnv, TurnOptions
from tether.envs.registry import ENVIRONMENTS, EnvRegistry, env_factory, make_env, register_env
from tether.envs.sokoban.env import Sokoban


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_made_environment_fits_the_protocol(name: str) -> None:
    env = make_env(name, max_turns=3)
    assert isinstance(env, Env)
    assert isinstance(env, ActionEnv)
    assert (env.name, env.max_turns) == (name, 3)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"^unknown environment 'frozenlake': did you mean 'frozen_lake'\?"):
        make_env("frozenlake")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("frozen_lake", {"slp": 0.1}, "unknown frozen_lake option key 'slp': did you mean 'slip'?"),
        ("frozen_lake", {"slip": 1.5}, "frozen_lake option key 'slip': got 1.5; it should be less than or equal to 1"),
        ("frozen_lake", {"observation": "grd"}, "frozen_lake option key 'observation': got 'grd'; it should be 'grid',"),
        ("sokoban", {"boxs": 2}, "unknown sokoban option key 'boxs': did you mean 'boxes'?"),
        ("sokoban", {"max_turns": 0}, "sokoban option key 'max_turns': got 0; it should be greater than or equal to 1"),
        ("sokoban", {"boxes": 5}, "sokoban option: boxes: got 5 for 6 x 6; use at most 4 or a larger board"),
        ("sokoban", {"min_pushes": 5}, "sokoban option: min_pushes: got 5, this board allows 4; use fewer or a larger board"),
        ("sokoban", {"min_pushes": 3, "max_pushes": 2}, "sokoban option: min_pushes: got 3, above max_pushes 2; raise max_pushes"),
        ("sokoban", {"min_pushes": 3, "max_moves": 2}, "sokoban option: min_pushes: got 3, above max_moves 2; raise max_moves"),
    ],
)
def test_bad_option_is_one_clear_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env(name, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_several_bad_options_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("frozen_lake", size=1, slp=0)
    assert len(str(caught.value).splitlines()) == 2


def test_user_environment_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Warehouse(Sokoban):
        name = "warehouse"

    monkeypatch.setattr(registry, "ENVIRONMENTS", EnvRegistry({}))
    register_env("warehouse", Warehouse)
    assert make_env("warehouse", boxes=2).name == "warehouse"
    with pytest.raises(BadInput, match="registered already"):
        register_env("warehouse", Warehouse)


def test_listing_names_imports_no_environment() -> None:
    code = (
        "import sys; from tether.envs.registry import ENVIRONMENTS; print(*ENVIRONMENTS.names());"
        "assert not {'torch', 'gymnasium', 'tether.envs.sokoban.env'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ENVIRONMENTS.names()


# --- names of tether 0.1 ---


def test_a_reset_that_takes_luck_is_refused_when_the_environment_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        name, max_turns, instructions, Options = "old", 1, "Say anything.", TurnOptions

        def __init__(self, options: TurnOptions) -> None:
            pass

        def reset(self, seed: int, *, luck: int | None = None) -> Observation:
            raise AssertionError("never called")

        def step(self, answer: str) -> Step:
            raise AssertionError("never called")

    said = r"environment 'old': the parameter 'luck' of reset is now called 'env_seed'; rename it in reset's signature"
    monkeypatch.setattr(ENVIRONMENTS, "_entries", dict(ENVIRONMENTS._entries))
    register_env("old", Old)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=said):
        make_env("old")
    with pytest.raises(BadInput, match="environment '<lambda>': the parameter 'luck'"):
        env_factory(lambda: Old(TurnOptions())).make()  # type: ignore[arg-type, return-value]


def test_methods_with_their_old_names_are_refused_when_the_class_is_defined() -> None:
    with pytest.raises(
        BadInput,
        match=r"^environment class Old overrides methods that were renamed: _generate is now generate, _take is now take; rename them$",
    ):

        class Old(TextEnv[TurnOptions]):
            def _generate(self, seed: int) -> None: ...

            def _take(self, answer: str) -> Outcome:
                return Outcome("")

    class Present(TextEnv[TurnOptions]):
        """Has a helper with an old name, which is its own business."""

        name, task = "present", "Say anything."

        def generate(self, seed: int) -> None: ...

        def opening(self) -> str:
            return "Go."

        def take(self, answer: str) -> Outcome:
            return self._take(answer)

        def _take(self, answer: str) -> Outcome:
            return Outcome("Done.", done=True)

    with pytest.raises(BadInput, match="environment class Dice overrides methods that were renamed: _seed_luck is now seed_randomness"):

        class Dice(Present):
            def _seed_luck(self, luck: int) -> None: ...

    env = Present(TurnOptions())
    env.reset(0)
    assert env.step("x").done


# ------------------------------------------------------------------------------------------------- the table of names


def _registry() -> EnvRegistry:
    return EnvRegistry({"sokoban": "fractions:Fraction", "countdown": "no_such_module_anywhere:Env"})


def test_names_are_sorted_and_import_nothing() -> None:
    assert _registry().names() == ["countdown", "sokoban"]
    assert "no_such_module_anywhere" not in sys.modules


def test_entry_is_imported_when_asked_for() -> None:
    assert _registry().get("sokoban") is Fraction


def test_missing_module_shows_only_when_asked_for() -> None:
    with pytest.raises(ImportError, match="no_such_module_anywhere"):
        _registry().get("countdown")


def test_a_module_missing_inside_an_installed_package_is_not_something_to_install() -> None:
    table = EnvRegistry({"lake": "tether.envs.bases:Lake"})
    with pytest.raises(
        BadInput, match=r"^environment 'lake': there is no module 'tether\.envs\.bases': did you mean 'tether\.envs\.base'\?"
    ):
        table.get("lake")


def test_unknown_name_of_a_registry() -> None:
    with pytest.raises(UnknownName) as caught:
        _registry().get("sokobann")
    assert str(caught.value) == "unknown environment 'sokobann': did you mean 'sokoban'? (known: countdown, sokoban)"


def test_objects_and_paths_can_be_registered() -> None:
    table = _registry()
    thing = object()
    table.register("mine", thing)
    table.register("later", "fractions:Fraction")
    assert table.get("mine") is thing
    assert table.get("later") is Fraction
    assert table.names() == ["countdown", "later", "mine", "sokoban"]


def test_existing_name_is_refused_and_kept() -> None:
    table = _registry()
    with pytest.raises(ValueError, match="environment 'sokoban' is registered already; choose another name"):
        table.register("sokoban", object())
    assert table.get("sokoban") is Fraction


def test_registries_do_not_share_entries() -> None:
    entries = {"a": "fractions:Fraction"}
    first = EnvRegistry(entries)
    first.register("b", 1)
    assert entries == {"a": "fractions:Fraction"}
    assert EnvRegistry(entries).names() == ["a"]
