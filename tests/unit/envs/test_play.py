"""`tether play` as a person meets it: keys, pipes, pictures, endings."""

import base64
import os
import pty
import re
import select
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from tether.cli.play import EXAMPLES, inline_picture, play, terminal_protocol
from tether.core.config import Settings
from tether.core.errors import BadInput, ConfigError, EnvironmentFailure, UnknownName
from tether.core.types import Observation, Step
from tether.envs.registry import ENVIRONMENTS

app = typer.Typer(rich_markup_mode=None)
app.command(epilog=EXAMPLES)(play)
LAKE = ["frozen_lake", "--set", "slip=0"]  # seed 0: player (0, 1), goal (3, 1)


def run(arguments: list[str], typed: str) -> str:
    result = CliRunner().invoke(app, arguments, input=typed, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("typed", ["Down || Down\nDown\n", "dd\nd\n", "ss\nS\n", "↓↓\n↓\n", "\x1b[B\x1b[B\nd\n", "d, d\n\nd\n"])
def test_keys_and_words_solve_the_lake(typed: str) -> None:
    assert "Solved after 2 turns with reward 1." in run(LAKE, typed)


def test_capital_d_is_right() -> None:
    assert "Executed: Right, Up." in run(LAKE, "DW\nq\n")


@pytest.mark.parametrize("typed", ["Left\n", "Left\nq\nDown\n", "Left\nquit\n"])
def test_end_of_input_and_q_end_politely(typed: str) -> None:
    assert run(LAKE, typed).endswith("Stopped after 1 turn with reward 0.\n")


def test_what_the_agent_is_told_is_shown() -> None:
    output = run(LAKE, "")
    assert "Actions: Left, Down, Right, Up." in " ".join(output.split())
    assert "Turn 1 of 5, 10 actions left.\n_P__\n__O_\n____\n_G__\n" in output


def test_endings() -> None:
    assert "Failed after 1 turn with reward 0." in run(LAKE, "Right || Down\n")
    assert "Out of turns after 1 turn with reward -0.1." in run(["sokoban", "--set", "max_turns=1"], "Up\n")
    assert "Executed: nothing." in run(LAKE, "sing\n")


def test_pictures_are_saved(tmp_path: Path) -> None:
    run([*LAKE, "--observation", "image", "--save-images", str(tmp_path / "frames")], "Left\n")
    frames = [np.asarray(Image.open(tmp_path / "frames" / f"turn_{turn}.png")) for turn in range(2)]
    assert [frame.shape for frame in frames] == [(64, 64, 3)] * 2
    assert (frames[0] != frames[1]).any()


def test_images_are_files_where_the_terminal_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run([*LAKE, "--images"], "Left\n")
    assert (
        "See the image.\nPicture: play-images/turn_0.png\n" in output and "_P__" not in output
    )  # observation=image, unless another is given
    assert np.asarray(Image.open(tmp_path / "play-images" / "turn_1.png")).shape == (64, 64, 3)
    assert "_P__\n__O_\n____\n_G__\nPicture: other/turn_0.png\n" in run(
        [*LAKE, "--images", "--observation", "grid", "--save-images", "other"], ""
    )


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm2"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"TERM": "screen-256color", "KITTY_WINDOW_ID": "1"}, None),  # would need sequences that screen and tmux pass on
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, None),
        ({}, None),
    ],
)
def test_which_terminals_show_pictures(environ: dict[str, str], protocol: str | None) -> None:
    assert terminal_protocol(environ, is_terminal=True) == protocol
    assert terminal_protocol(environ, is_terminal=False) is None


def test_pictures_in_the_terminal_are_whole_files() -> None:
    """As kitty and iTerm2 document it: base64 of the file, in chunks of 4096 or at once."""
    png = bytes(range(256)) * 20
    chunks = re.findall(r"\x1b_G(?:a=T,f=100,q=2,r=12,)?m=([01]);([^\x1b]{1,4096})\x1b\\", inline_picture(png, "kitty"))
    assert [more for more, _ in chunks] == ["1", "0"] and base64.b64decode("".join(chunk for _, chunk in chunks)) == png
    shown = re.fullmatch(
        r"\x1b\]1337;File=inline=1;size=5120;height=12;preserveAspectRatio=1:([^\x07]+)\x07\n", inline_picture(png, "iterm2")
    )
    assert shown is not None and base64.b64decode(shown[1]) == png


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["sokobn"], UnknownName, "did you mean 'sokoban'"),
        (["sokoban", "--observation", "grd"], ConfigError, "got 'grd'"),
        (["sokoban", "--split", "val"], ConfigError, "got 'val'"),
        (["sokoban", "--set", "boxs=2"], ConfigError, "did you mean 'boxes'"),
        (["sokoban", "--set", "boxes"], ConfigError, "write it as key=value"),
        (["sokoban", "--observation", "image"], BadInput, "add --images to see them, or --save-images DIR"),
        (["countdown", "--images"], BadInput, "environment 'countdown' has no picture of its state; leave out --images"),
    ],
)
def test_mistakes_are_raised_as_errors_of_ours(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_help_ends_with_examples_line_by_line() -> None:
    lines = run(["--help"], "").rstrip().split("\n")
    assert '    echo "@solution.py" | tether play deepcoder' in lines[-1]
    assert "tether play sokoban" in lines[-10]


def test_an_answer_may_have_several_lines(tmp_path: Path) -> None:
    """A fence goes on to its end; a file is read; both reach the environment whole, as one answer."""
    assert "Out of turns after 1 turn" in run(["sokoban", "--set", "max_turns=1"], "```\nUp ||\nDown\n```\n")
    (tmp_path / "answer.txt").write_text("Down || Down")
    (tmp_path / "last.txt").write_text("Down")
    assert "Solved after 2 turns" in run(LAKE, f"@{tmp_path}/answer.txt\n@{tmp_path}/last.txt\n")
    assert "Cannot read 'nothing.py': No such file" in run(LAKE, "@nothing.py\nq\n")
    assert "Stopped after 1 turn" in run(LAKE, "```\nnever closed\n")


class Fragile:
    """A bare environment whose code breaks."""

    class Options(Settings):
        pass

    name, max_turns, instructions = "fragile", 2, "Say anything."

    def __init__(self, options: Options) -> None:
        pass

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        if seed == 7:
            raise BadInput("seed 7 has no instance; choose another")
        return Observation("Go on.")

    def step(self, answer: str) -> Step:
        raise KeyError("lost")


def test_an_error_in_an_environments_code_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "fragile": Fragile})
    with pytest.raises(EnvironmentFailure, match=r"^step 1: KeyError: 'lost'$"):
        run(["fragile"], "hello\n")
    with pytest.raises(BadInput, match=r"^seed 7 has no instance; choose another$"):
        run(["fragile", "--seed", "7"], "")


def _played_in_a_terminal(keys: bytes, *words: str) -> str:
    """What `tether play` shows in a terminal of its own where these keys are pressed."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", "from tether.cli.main import main; main()", "play", *words])
    shown, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if keys and re.search(rb">[ \x1b\[0-9;m]*$", shown):
            os.write(terminal, keys)
            keys = b""
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the end
            break
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    return shown.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="terminals differ")
def test_arrow_keys_play_in_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Right, a key too many, taken back, Down in the other form of the keys; then q. The terminal says that it shows pictures."""
    monkeypatch.setenv("TERM", "xterm-kitty")
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.chdir(tmp_path)
    shown = _played_in_a_terminal(b"\x1b[C\x1b[A\x7f\x1bOB\nq\n", "frozen_lake", "--seed", "1", "--images")
    assert shown.count("See the image.\r\n\x1b_Ga=T,f=100,q=2,") == 2 and not list(tmp_path.iterdir())
    assert "Executed: Right, Down." in shown and "Stopped after 1 turn" in shown
