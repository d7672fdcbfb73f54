"""`tether`: wires the verbs together and turns errors into one line and an exit code.

Exit codes: 0 success, 2 bad input (what, got, what to do), 1 anything else that went wrong, 130 after Ctrl-C, 143 after SIGTERM, 129 after
SIGHUP, 141 where nobody reads the output any more.
"""

import functools
import os
import signal
import sys
from typing import Any, NoReturn

import typer

from tether import __version__
from tether.cli import (
    dashboard,
    diagnose,
    doctor,
    envs,
    evaluate,
    export,
    gateway,
    leaderboard,
    models,
    play,
    report,
    reproduce,
    serve,
    serve_env,
    serve_search,
    settings,
    sft,
    show,
    sweep,
    train,
    warmstart,
)
from tether.cli.console import SafeConsole, discard_output
from tether.core.child import end_with_parent
from tether.core.errors import BadInput, RankFailure, TetherError, did_you_mean
from tether.core.text import shortened
from tether.runs.remote import address_of, fetched
from tether.training.distributed.slurm import join_slurm
from tether.training.synonyms import WORDS, spelled

# Typer carries its own copy of click in newer versions, an outside one in older: take the class from what it exports.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

LONGEST_MESSAGE = 4_000
"""Characters of an error on the console."""
ONE_PROCESS = ("sft", "warmstart")
"""Verbs that train on one rank alone: several would write the same folder."""
NEED_WEIGHTS = ("doctor", "eval", "export", "serve", "gateway", "diagnose")
READS = ("report", "show", "dashboard", *NEED_WEIGHTS)
"""Verbs that take run folders, which may lie at an address."""

app = typer.Typer(
    name="tether",
    help="Train LLM agents with reinforcement learning and keep their reasoning tied to its input.",
    rich_markup_mode=None,  # rich mode would swallow the line breaks of the examples
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  tether train frozen_lake --steps 20
  tether report runs/my-run
  tether COMMAND --help
""",
)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=sweep.EXAMPLES)(sweep.sweep)
app.command(epilog=sft.EXAMPLES)(sft.sft)
app.command("eval", epilog=evaluate.EXAMPLES)(evaluate.evaluate_model)
app.command(epilog=leaderboard.EXAMPLES)(leaderboard.leaderboard)
app.command(epilog=export.EXAMPLES)(export.export)
app.command(epilog=diagnose.EXAMPLES)(diagnose.diagnose)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=dashboard.EXAMPLES)(dashboard.dashboard)
app.command(epilog=show.EXAMPLES)(show.show)
app.command(epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.command(epilog=envs.EXAMPLES)(envs.envs)
app.command(epilog=settings.EXAMPLES)(settings.settings)
app.add_typer(models.app, name="models")
app.command(epilog=play.EXAMPLES)(play.play)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=gateway.EXAMPLES)(gateway.gateway)
app.command("serve-env", epilog=serve_env.EXAMPLES)(serve_env.serve_env)
app.command("serve-search", epilog=serve_search.EXAMPLES)(serve_search.serve_search)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=warmstart.EXAMPLES)(warmstart.warmstart)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tether {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version.")) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the `tether` command."""
    words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for number, word in enumerate(words, start=1):
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # bytes that are no UTF-8 come as halves of characters
            _fail(f"argument {number} is not UTF-8 text: '{shortened(word, 60)}'; write it in UTF-8", 2)
    end_with_parent()
    try:
        join_slurm()
        _check_verb(words[0])
        words = _with_copies(words)
        code = _command()(args=words, prog_name="tether", standalone_mode=False, obj=words)
    except TetherError as error:
        rank = int(os.environ.get("RANK") or 0)
        if rank and error.common:  # rank 0 says it
            sys.exit(error.exit_code)
        _fail(f"rank {rank}: {error}" if rank else str(error), error.exit_code)
    except RankFailure as error:
        _fail(str(error), error.exit_code)
    except UsageError as error:
        _fail(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # `tether envs | head -1`: whoever read has seen enough
        discard_output(sys.stdout)
        discard_output(sys.stderr)
        sys.exit(128 + signal.SIGPIPE)
    else:
        sys.exit(code if isinstance(code, int) else 0)


@functools.cache
def _command() -> Any:
    """All verbs with their options, read once: that takes typer some hundredths of a second."""
    return typer.main.get_command(app)


def _check_verb(word: str) -> None:
    """An unknown verb gets the nearest one suggested; typer would only say that it does not exist."""
    verbs = _command().commands
    if not word.startswith("-") and word not in verbs:
        _fail(f"unknown command '{word}': {did_you_mean(word, verbs)}", 2)
    if word in ONE_PROCESS and os.environ.get("WORLD_SIZE", "1") != "1":
        _fail(f"`tether {word}` trains in one process, and WORLD_SIZE is {os.environ['WORLD_SIZE']}; start it without torchrun", 2)


def _with_copies(words: list[str]) -> list[str]:
    """The arguments with folders in the place of runs on object storage, for verbs that read them."""
    verb, found = words[0], list[str]()
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if verb == "train" or address_of(value) is None or (equals and option != "--out"):
            found.append(word)
        elif "--out" in (before, option):
            raise BadInput(
                f"`tether {verb}` writes to a folder of this machine, and --out is '{value}'; only `tether train` takes an address"
            )
        else:
            found.append(str(fetched(value, weights=verb in NEED_WEIGHTS)) if verb in READS else word)
    return found


def _usage(error: Any) -> str:
    """A mistake in the arguments, in one line, with where to look."""
    where = f"; see: {error.ctx.command_path} --help" if error.ctx else ""
    meant = WORDS.get(spelled(str(getattr(error, "option_name", "")).lstrip("-")), ())
    how = f"; did you mean {' or '.join(key if key.startswith('--') else f'--set {key}=...' for key in meant)}?" if meant else ""
    return f"{error.format_message().rstrip('.')}{how}{where}"


def _fail(message: str, code: int) -> NoReturn:
    message = shortened(message, LONGEST_MESSAGE)
    SafeConsole(stderr=True, soft_wrap=True, markup=False, highlight=False).print(f"tether: {message}", style="red")
    sys.exit(code)
