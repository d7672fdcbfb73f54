"""Environments that are not Tether's own: from installed distributions, and by module:Class. None can harm the built-in ones.

The distributions are real: a package and its dist-info folder on the search path, as an installer leaves them.
"""

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tether.core.errors import BadInput, ConfigError, EnvironmentFailure, MissingDependency, UnknownName
from tether.envs import registry
from tether.envs.registry import ENVIRONMENTS, check_name, find_class, make_env
from tether.envs.remote import VectorEnv

SOURCE = """
    from tether.envs.base import TextEnv
    from tether.envs.base import Outcome, TurnOptions

    class EchoOptions(TurnOptions):
        loud: bool = False

    class Echo(TextEnv[EchoOptions]):
        name = "echo"
        Options = EchoOptions

        @property
        def work(self):
            return "process"

        @property
        def task(self):
            return "Say the number."

        def generate(self, seed):
            self.seed = seed

        def opening(self):
            return f"{self.seed}!" if self.options.loud else str(self.seed)

        def take(self, answer):
            right = answer.strip() == str(self.seed)
            return Outcome("Right." if right else "Wrong.", float(right), True, right)

    class Refuses(Echo):
        def __init__(self, options):
            raise RuntimeError("no licence,\\nno play")

    class NoOptions:
        pass

    not_a_class = 3
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: its name, its entry points, and the source of its one module (named after it)."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    before = set(sys.modules)

    def put(name: str, offers: dict[str, str], source: str = SOURCE, version: str = "1.2") -> Path:
        package, info = site / name, site / f"{name}-{version}.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").write_text(textwrap.dedent(source))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[tether.environments]\n" + "".join(f"{key} = {value}\n" for key, value in offers.items()))
        registry._offers_on.cache_clear()  # what is installed while Tether runs is seen by the next process; here it is to be seen now
        importlib.invalidate_caches()
        return site

    yield put
    registry._offers_on.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


BUILT_IN = ["countdown", "deepcoder", "frozen_lake", "metamathqa", "qa", "searchqa", "sokoban", "webshop"]


def test_an_installed_environment_is_found_by_its_name(install: Install) -> None:
    assert ENVIRONMENTS.names() == BUILT_IN
    install("echoing", {"echo": "echoing:Echo"})
    assert ENVIRONMENTS.names() == sorted([*BUILT_IN, "echo"])
    assert "echoing" not in sys.modules  # listing imports nothing
    assert check_name("echo") == "echo"
    env = make_env("echo", loud=True)
    assert env.reset(7).text == "Turn 1 of 1.\n7!"
    assert env.step(" 7 ").success
    with pytest.raises(ConfigError, match="unknown echo option key 'laud': did you mean 'loud'"):
        make_env("echo", laud=True)
    with pytest.raises(UnknownName, match="did you mean 'echo'"):
        make_env("ecco")
    assert ENVIRONMENTS.clashes() == []


def test_it_plays_in_processes(install: Install) -> None:
    install("echoing", {"echo": "echoing:Echo"})
    with VectorEnv("echo", 2) as vector:
        vector.reset([1, 2])
        assert [step.success for step in vector.step(["1", "1"])] == [True, False]  # type: ignore[union-attr]


def test_a_built_in_is_never_overridden(install: Install) -> None:
    install("usurper", {"sokoban": "usurper:Echo"})
    assert make_env("sokoban").name == "sokoban"
    assert ENVIRONMENTS.names() == BUILT_IN
    assert ENVIRONMENTS.clashes() == [
        "environment 'sokoban' of distribution 'usurper 1.2' is not used: the name is taken; use it as usurper:Echo, or rename its entry point"
    ]
    assert "usurper" not in sys.modules
    assert make_env("usurper:Echo").name == "echo"


def test_a_registered_environment_comes_before_an_installed_one(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("echoing", {"echo": "echoing:Echo"})
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "echo": find_class("sokoban")})
    assert make_env("echo").name == "sokoban"
    assert len(ENVIRONMENTS.clashes()) == 1


def test_two_distributions_with_one_name(install: Install) -> None:
    install("first", {"echo": "first:Echo", "other": "first:Echo"})
    install("second", {"echo": "second:Echo"}, version="3.0")
    with pytest.raises(BadInput) as caught:
        make_env("echo")
    message = str(caught.value)
    assert message.startswith("environment 'echo' is offered by distribution '")
    assert "'first 1.2'" in message and "'second 3.0'" in message and "\n" not in message
    assert make_env("other").name == "echo"
    assert make_env("second:Echo").name == "echo"


@pytest.mark.parametrize(
    ("offer", "source", "said"),
    [
        ("broken:Echo", "import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("broken:Echo", "1 / 0", "ZeroDivisionError: division by zero"),
        ("broken:Echo", "def", "SyntaxError: invalid syntax"),
        ("broken:Eco", SOURCE, "AttributeError: module 'broken' has no attribute 'Eco'"),
        ("borken:Echo", SOURCE, "ModuleNotFoundError: No module named 'borken'"),
    ],
)
def test_a_broken_one_is_named_in_one_line_and_harms_nobody(install: Install, offer: str, source: str, said: str) -> None:
    install("broken", {"bad": offer}, source)
    install("echoing", {"echo": "echoing:Echo"})
    with pytest.raises(BadInput) as caught:
        make_env("bad")
    message = str(caught.value)
    assert message.startswith(f"environment 'bad' of distribution 'broken 1.2' cannot be loaded from '{offer}': {said}")
    assert message.endswith("; fix or uninstall that distribution") and "\n" not in message
    assert make_env("echo").name == "echo" and make_env("sokoban").name == "sokoban"
    assert "bad" in ENVIRONMENTS.names()


def test_one_that_cannot_be_built_or_is_none(install: Install) -> None:
    install("odd", {"refuses": "odd:Refuses", "bare": "odd:NoOptions", "number": "odd:not_a_class"})
    with pytest.raises(EnvironmentFailure, match=r"^environment 'refuses' cannot be built: RuntimeError: no licence, no play$"):
        make_env("refuses")
    for name in ("bare", "number"):
        with pytest.raises(BadInput, match=f"environment '{name}' has no Options; give its class an attribute Options"):
            make_env(name)


def test_a_new_process_sees_it_too(install: Install) -> None:
    site = install("echoing", {"echo": "echoing:Echo"})
    code = "from tether.envs.registry import make_env; print(make_env('echo').reset(3).text)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(site)}
    )
    assert done.stdout.endswith("\n3\n")


# --- module:Class ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    others = [entry for entry in sys.path if entry != "" and not Path(entry, "my_env.py").exists()]  # of tests before
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.delitem(sys.modules, "my_env", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_class_of_the_current_folder(folder: Path) -> None:
    (folder / "my_env.py").write_text(textwrap.dedent(SOURCE))
    path = list(sys.path)
    assert make_env("my_env:Echo", loud=True).reset(4).text.endswith("4!")
    assert sys.path == [*path, str(folder)]  # last: it hides nothing that is installed
    assert check_name("my_env:Echo") == "my_env:Echo"


def test_a_class_of_a_package_of_the_current_folder(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "envs.py").write_text(textwrap.dedent(SOURCE))
    assert make_env("pack.envs:Echo").name == "echo"
    with VectorEnv("pack.envs:Echo", 1) as vector:  # and the worker finds it as well
        assert vector.members[0].reset(1).text.endswith("1")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("nowhere:Echo", BadInput, "environment 'nowhere:Echo': there is no module 'nowhere', neither installed nor in this folder;"),
        (
            "my_env.more:Echo",
            BadInput,
            "environment 'my_env.more:Echo': there is no module 'my_env.more': 'my_env' is a module, not a package",
        ),
        ("my_env:Eco", UnknownName, "module 'my_env' has no environment 'Eco': did you mean 'Echo'? (known: Echo, Refuses)"),
        ("my_env:", UnknownName, "module 'my_env' has no environment ''"),
        ("my_env:NoOptions", BadInput, "environment 'my_env:NoOptions' has no Options; give its class an attribute Options"),
        ("my_env.py:Echo", BadInput, "environment 'my_env.py:Echo' is written as a file; write it as a module, 'my_env:Echo'"),
        ("./sub/my_env.py:Echo", BadInput, "write it as a module, 'sub.my_env:Echo'"),
        ("needy:Echo", MissingDependency, "environment 'needy:Echo' needs the package 'no_such_package_at_all', which is not installed"),
        (
            "outdated:Echo",
            BadInput,
            "environment 'outdated:Echo': importing 'outdated' failed: there is no module 'tether.envs.bases': did you",
        ),
        (
            "tether.envs.bases:Echo",
            BadInput,
            "environment 'tether.envs.bases:Echo': there is no module 'tether.envs.bases': did you mean 'tether.envs.base'",
        ),
        (
            "json.nothing:Echo",
            BadInput,
            "environment 'json.nothing:Echo': there is no module 'json.nothing': known: json.decoder, json.encoder",
        ),
        ("crashing:Echo", BadInput, "environment 'crashing:Echo': importing 'crashing' failed: ZeroDivisionError: division by zero"),
        (":Echo", BadInput, "environment ':Echo': importing '' failed"),
        ("my_env:Refuses", EnvironmentFailure, "environment 'my_env:Refuses' cannot be built: RuntimeError: no licence, no play"),
    ],
)
def test_mistakes_are_one_clear_line(folder: Path, name: str, error: type[Exception], said: str) -> None:
    (folder / "my_env.py").write_text(textwrap.dedent(SOURCE))
    (folder / "needy.py").write_text("import no_such_package_at_all")
    (folder / "outdated.py").write_text("from tether.envs.bases import TextEnv")
    (folder / "crashing.py").write_text("1 / 0")
    with pytest.raises(error) as caught:
        make_env(name)
    assert type(caught.value) is error
    assert str(caught.value).startswith(said) or said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_in_which_nothing_was_found_is_not_searched_from_then_on(folder: Path) -> None:
    path = list(sys.path)
    with pytest.raises(BadInput):
        make_env("nowhere_to_be_found:Echo")
    assert sys.path == path


def test_an_address_goes_to_the_client() -> None:
    from tether.envs.remote.http_client import HttpEnvError

    with pytest.raises(HttpEnvError, match=r"127\.0\.0\.1:9"):
        make_env("http://127.0.0.1:9", timeout=1.0)
    assert check_name("https://example.org/env") == "https://example.org/env"
