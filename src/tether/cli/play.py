"""`tether play`: a person plays an environment in the terminal and sees exactly the observations and rewards of an agent.

Answers go to the environment as typed ("Right || Up"); where it knows the four directions, letters and arrows are short for them. An
answer of several lines, such as a program, stands between two lines of ``` or comes from a file (@solution.py). Pictures are shown in terminals
that can, and are files elsewhere.
Input may be piped: when it ends, so does the game. Imports no torch.
"""

import base64
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from tether.cli.console import SafeConsole
from tether.cli.options import EnvOptions, complete_env
from tether.core.config import parse_overrides
from tether.core.errors import BadInput, EnvironmentFailure, StorageError, TetherError, environment_boundary
from tether.core.grammar import ACTION_SEPARATOR
from tether.core.images import Image
from tether.core.protocols import Env, checked_observation, checked_step
from tether.core.types import Observation
from tether.envs.base import ActionEnv
from tether.envs.registry import make_env

EXAMPLES = """\b
Examples:
  tether play sokoban
  tether play sokoban --seed 7 --set boxes=2 --set height=8 --set width=8
  tether play frozen_lake --observation coordinates --set slip=0.3
  tether play frozen_lake --images
  tether play sokoban --images --save-images frames --set style=sprites --set tile=48
  echo "Right || Up" | tether play frozen_lake
  tether play countdown --seed 3
  tether play searchqa
  tether play webshop --split validation
  echo "@solution.py" | tether play deepcoder
"""

FENCE = "```"
FOLDER = Path("play-images")
"""For pictures, where the terminal shows none and no other folder is given."""
PICTURE_LINES = 12
"""Lines of the terminal that a picture is high."""
_KITTY_CHUNK = 4096
"""Characters of base64 that one escape sequence may carry."""
T = TypeVar("T")

_SHORT = {
    **dict.fromkeys(["u", "U", "w", "W", "↑", "\x1b[A"], "Up"),
    **dict.fromkeys(["d", "s", "S", "↓", "\x1b[B"], "Down"),
    **dict.fromkeys(["l", "L", "a", "A", "←", "\x1b[D"], "Left"),
    # A small d is Down, a capital D is the D of WASD.
    **dict.fromkeys(["r", "R", "D", "→", "\x1b[C"], "Right"),
}
_ARROW_KEYS = {
    b"\x1b" + form + letter: arrow for form in (b"[", b"O") for letter, arrow in zip((b"A", b"B", b"C", b"D"), "↑↓→←", strict=True)
}
_BEGINNINGS = (b"\x1b", b"\x1b[", b"\x1bO")
_SHORT_RUN = re.compile(r"(?:\x1b\[[ABCD]|[uUwWdDsSlLaArR↑↓←→]|[\s,|])+")
_KEY = re.compile(r"\x1b\[[ABCD]|[^\s,|]")

_GRID_LINE = re.compile(r"[#_OXPSG√]+")
_STYLES = {
    "frozen_lake": {"P": "bold yellow", "_": "cyan", "O": "bold blue", "G": "bold green", "X": "bold red", "√": "bold green"},
    "sokoban": {"#": "dim", "_": "dim", "O": "red", "X": "bold magenta", "√": "bold green", "P": "bold yellow", "S": "bold yellow"},
}


def play(
    env: Annotated[
        str, typer.Argument(help="Environment to play; `tether envs` lists them.", show_default=False, autocompletion=complete_env)
    ],
    seed: Annotated[int, typer.Option(help="Which instance to play.")] = 0,
    observation: Annotated[
        str | None, typer.Option(help="What is shown: grid, coordinates, grid_coordinates, image or grid_image. [default: grid]")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Pool of instances: train, validation or test. [default: train]")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="See pictures: in the terminal (kitty, iTerm2), else as PNG files in play-images.")
    ] = False,
    save_images: Annotated[Path | None, typer.Option(help="Folder for a PNG of every state.")] = None,
    options: EnvOptions = None,
) -> None:
    """Play an environment yourself: what the agent sees, in your terminal."""
    chosen = parse_overrides(options or [])
    chosen |= {key: value for key, value in (("observation", observation), ("split", split)) if value is not None}
    if chosen.get("observation") == "image" and save_images is None and not images:
        raise BadInput("observation=image shows pictures only; add --images to see them, or --save-images DIR to have them as PNG files")
    made = make_env(env, **chosen)
    if images and "observation" not in chosen and not getattr(made, "shows_images", False):
        known: Any = getattr(made, "options", {})  # a dictionary, where a server plays
        if "observation" in (known if isinstance(known, Mapping) else getattr(type(known), "model_fields", ())):
            made = make_env(env, observation="image", **chosen)
    terminal = terminal_protocol(os.environ, sys.stdout.isatty()) if images else None
    folder = FOLDER if images and terminal is None and save_images is None else save_images
    _play(made, seed, Pictures(folder, terminal), SafeConsole(highlight=False))


Protocol = Literal["kitty", "iterm2"]
"""How a terminal is told to show a picture."""


def terminal_protocol(environ: Mapping[str, str], is_terminal: bool) -> Protocol | None:
    """How the terminal shows pictures, by what it says of itself; None where it is not known to show any, or something stands in between."""
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if not is_terminal or "TMUX" in environ or term.startswith(("screen", "tmux", "dumb")):
        return None
    if "KITTY_WINDOW_ID" in environ or term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return "kitty"
    return "iterm2" if program in ("iTerm.app", "WezTerm") or environ.get("LC_TERMINAL") == "iTerm2" else None


def inline_picture(png: bytes, protocol: Protocol) -> str:
    """The characters that make a terminal show a picture."""
    data = base64.b64encode(png).decode("ascii")
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(png)};height={PICTURE_LINES};preserveAspectRatio=1:{data}\x07\n"
    chunks = [data[at : at + _KITTY_CHUNK] for at in range(0, len(data), _KITTY_CHUNK)]
    # q=2: the terminal must not answer, its answer would be taken for typing
    heads = [f"a=T,f=100,q=2,r={PICTURE_LINES},", *[""] * (len(chunks) - 1)]
    parts = [
        f"\x1b_G{head}m={int(number < len(chunks))};{chunk}\x1b\\"
        for number, (head, chunk) in enumerate(zip(heads, chunks, strict=True), 1)
    ]
    return "".join(parts) + "\n"


class Pictures(NamedTuple):
    """Where pictures go."""

    folder: Path | None
    terminal: Protocol | None

    def show(self, env: Env, observation: Observation, turn: int, console: Console) -> None:
        pixels: Any = observation.image
        if self.folder is None and self.terminal is None:
            return
        if pixels is None and isinstance(env, ActionEnv):
            pixels = env.state_image()
        if pixels is None:
            if turn == 0:
                raise BadInput(f"environment '{env.name}' has no picture of its state; leave out --images and --save-images")
            return
        image = _in_one_line("the picture", lambda: Image.of(pixels))
        if self.terminal is not None:
            sys.stdout.write(inline_picture(image.png, self.terminal))
            sys.stdout.flush()
        if self.folder is not None:
            path = self.folder / f"turn_{turn}.png"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image.png)
            except OSError as error:
                raise StorageError(
                    f"cannot write picture '{path}': {error.strerror or error}; choose another --save-images folder"
                ) from error
            console.print(Text(f"Picture: {path}", style="dim"))


def _play(env: Env, seed: int, pictures: Pictures, console: Console) -> None:
    observation = _in_one_line("reset", lambda: checked_observation(env.reset(seed)))
    console.print(Text(env.instructions), end="\n\n")
    short = " Short: the arrow keys, u d l r, or WASD in capitals, as in 'ru' for Right || Up." if _has_directions(env) else ""
    keys = f"Type what would stand between the answer tags.{short} Several lines: between two lines of {FENCE}, or @file. q quits."
    console.print(Text(keys, style="dim"), end="\n\n")
    total, turn = 0.0, 0
    _show(env, observation, turn, pictures, console)
    arrows = _has_directions(env) and sys.stdin.isatty() and importlib.util.find_spec("termios") is not None
    while (answer := _ask(console, arrows)) is not None:
        answer = _whole_answer(answer, console)
        if not answer.strip():
            continue
        turn += 1
        spelled = _spell_out(answer, env)
        step = _in_one_line(f"step {turn}", lambda: checked_step(env.step(spelled)))  # noqa: B023 - called at once
        total += step.reward
        _show(env, step.observation, turn, pictures, console)
        executed = step.info.get("executed")
        did = f"Executed: {', '.join(executed) or 'nothing'}. " if executed is not None else ""
        console.print(Text(f"{did}Reward {step.reward:g}, {total:g} so far.", style="dim"), end="\n\n")
        if step.done:
            ending = "Solved" if step.success else "Out of turns" if step.info.get("truncated") else "Failed"
            console.print(Text(f"{ending}{_after(turn, total)}", style="bold green" if step.success else "bold red"))
            return
    console.print(Text(f"Stopped{_after(turn, total)}", style="dim"))


def _in_one_line(what: str, call: Callable[[], T]) -> T:
    """The result of a call of the environment; an error of its code becomes one line, like Tether's own errors."""
    try:
        with environment_boundary(what):
            return call()
    except EnvironmentFailure as failure:
        if isinstance(failure.__cause__, TetherError):
            raise failure.__cause__ from None
        raise


def _ask(console: Console, arrows: bool) -> str | None:
    """The next line typed; None if the player quits or the input ends."""
    try:
        if arrows:
            line = _line_with_arrows(console)
        else:
            line = console.input("[bold]> [/bold]", markup=True)
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line.strip().lower() in ("q", "quit") else line


def _line_with_arrows(console: Console) -> str:
    """A line from the terminal, in which an arrow key is an arrow; `input` would take it for a walk through earlier lines."""
    import termios
    import tty

    terminal, line, waiting = sys.stdin.fileno(), "", b""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSADRAIN)  # keys that were pressed meanwhile are kept
    try:
        console.print("[bold]> [/bold]", end="", markup=True)
        sys.stdout.flush()
        while True:
            waiting += os.read(terminal, 1)
            for keys, arrow in _ARROW_KEYS.items():
                waiting = waiting.replace(keys, arrow.encode())
            if not waiting or waiting == b"\x04":
                raise EOFError
            if waiting in _BEGINNINGS or (waiting[0] >= 0xC0 and not waiting.decode("utf-8", "ignore")):
                continue  # the rest of the key, or of the character, comes next
            typed, waiting = waiting.decode("utf-8", "replace"), b""
            if typed in "\r\n":
                sys.stdout.write("\n")
                return line
            if typed in "\x7f\b":
                sys.stdout.write("\b \b" if line else "")
                line = line[:-1]
            elif typed.isprintable():
                sys.stdout.write(typed)
                line += typed
            sys.stdout.flush()
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _whole_answer(line: str, console: Console) -> str:
    """The answer a line opens: the file it names, the lines up to the closing fence, or the line itself."""
    if line.startswith("@"):
        try:
            return Path(line[1:].strip()).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            console.print(Text(f"Cannot read '{line[1:].strip()}': {getattr(error, 'strerror', None) or error}", style="red"))
            return ""
    if not line.startswith(FENCE):
        return line
    lines = [line]
    with suppress(EOFError):
        while len(lines) == 1 or lines[-1].strip() != FENCE:
            lines.append(input())
    return "\n".join(lines)


def _spell_out(line: str, env: Env) -> str:
    """Letters and arrows as the names of actions; anything else as it was typed."""
    if not _has_directions(env) or not _SHORT_RUN.fullmatch(line):
        return line
    return f" {ACTION_SEPARATOR} ".join(_SHORT[key] for key in _KEY.findall(line))


def _has_directions(env: Env) -> bool:
    return isinstance(env, ActionEnv) and set(env.actions) == {"Up", "Down", "Left", "Right"}


def _after(turns: int, total: float) -> str:
    return f" after {turns} turn{'' if turns == 1 else 's'} with reward {total:g}."


def _show(env: Env, observation: Observation, turn: int, pictures: Pictures, console: Console) -> None:
    styles = _STYLES.get(env.name, {})
    for line in observation.text.split("\n"):
        if styles and _GRID_LINE.fullmatch(line):
            console.print(Text.assemble(*((symbol, styles.get(symbol, "")) for symbol in line)))
        else:
            console.print(Text(line))
    pictures.show(env, observation, turn, console)
