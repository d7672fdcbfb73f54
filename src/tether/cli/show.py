"""`tether show`: the episodes of a run in the terminal: a list, or turn by turn.

Whatever a model wrote is printed with its control characters made visible, so it cannot move the cursor, colour the screen or write to the
clipboard. Imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tether.cli.console import SafeConsole, plain_table
from tether.core.errors import BadInput
from tether.core.text import visible

if TYPE_CHECKING:
    from tether.runs.dashboard.catalogue import LiveRun
    from tether.runs.dashboard.episodes import EpisodeList
    from tether.runs.index import IndexRow
    from tether.runs.reasoning_view import TurnView

EXAMPLES = """\b
Examples:
  tether show runs/my-run
  tether show runs/my-run --step 40 --failed
  tether show runs/my-run --step 40 --group 3
  tether show runs/my-run --step 40 --group 3 --member 0
  tether show runs/my-run --text "no box" --limit 5 --turns
"""

_LEVELS = ("", "blue", "bold blue", "yellow", "red")
"""The look of tokens by their log-prob, the most certain first: tether.runs.reasoning_view.LEVELS."""


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step. [default: all, the newest first]", show_default=False)] = None,
    group: Annotated[int | None, typer.Option(help="Only this group (prompt) of a step.", show_default=False)] = None,
    member: Annotated[int | None, typer.Option(help="Only this member of its group; shown turn by turn.", show_default=False)] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not solve their task.")] = False,
    solved: Annotated[bool, typer.Option("--solved", help="Only episodes that did.")] = False,
    stop_reason: Annotated[
        str, typer.Option(help="Only episodes that ended so, such as turn_limit or env_error.", show_default=False)
    ] = "",
    split: Annotated[str, typer.Option(help="train or validation. [default: both]", show_default=False)] = "",
    text: Annotated[str, typer.Option(help="Only episodes with this text in an observation or a response.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(help="At most so many episodes.", min=1)] = 20,
    turns: Annotated[bool, typer.Option("--turns", help="Turn by turn; by default where there is one episode.")] = False,
) -> None:
    """Show a run's episodes: outcome, reward, why each ended, alarms and notes of its step; or turn by turn."""
    from tether.runs.dashboard.catalogue import LiveRun
    from tether.runs.dashboard.episodes import find
    from tether.runs.files import as_written

    if failed and solved:
        raise BadInput("--failed and --solved leave no episode; give one of them")
    if member is not None and group is None:
        raise BadInput("--member is the number within a group; give --group as well")
    wanted: dict[str, Any] = {"step": step, "split": split, "group": group, "member": member, "stop_reason": stop_reason}
    console = SafeConsole(highlight=False)
    with as_written(run):
        live = LiveRun(run.resolve().name, run)
        # A terminal can wait: the text is searched for in all of them.
        found = find(live, text=text, limit=limit, seconds=float("inf"), success=solved if failed or solved else None, **wanted)
        if not found.rows:
            raise BadInput(_nothing_found(live))
        if turns or member is not None or len(found.rows) == 1:
            for row in found.rows:
                _print_episode(console, live, row, found.alarms.get(row.step, ()))
            return
    console.print(_table(found))
    shown = {row.step for row in found.rows}
    for note in (f"step {record.step}: {note}" for record in live.records() if record.step in shown for note in record.notes):
        console.print(Text(visible(note), "dim"))
    more = f" of {found.total} that fit" if not text else f", {found.searched} of {found.total} read for the text"
    console.print(f"{len(found.rows)} shown{more}. Turn by turn: --turns, or --step S --group G --member M", style="dim")


def _nothing_found(run: "LiveRun") -> str:
    """One line on what there is, for a filter that left nothing."""
    blocks = sorted(run.index().attempts())
    if not blocks:
        return f"run '{run.folder}' has no episodes on record yet"
    steps = [step for step, _ in blocks]
    splits = ", ".join(sorted({split for _, split in blocks}))
    return f"no episode of '{run.folder}' fits; it has steps {steps[0]} to {steps[-1]} ({splits})"


def _table(found: "EpisodeList") -> Table:
    titles = ("step", "split", "group", "member", "outcome", "reward", "stop reason", "kept", "alarms of the step")
    table = plain_table(*titles, right=("step", "group", "member", "reward"), header_style="dim")
    if found.excerpts:
        table.add_column("text", overflow="fold")
    for row in found.rows:
        cells: list[str | Text] = [str(row.step), row.split, str(row.group), str(row.member), _outcome(row.success), _number(row.reward)]
        cells += [visible(row.stop_reason.replace("_", " ")), "kept" if row.kept else ""]
        cells += [visible(", ".join(name.replace("_", " ") for name in found.alarms.get(row.step, ())))]
        table.add_row(*cells, *([visible(found.excerpts[row.key]).replace("\n", " ")] if found.excerpts else []))
    return table


def _number(reward: float | None) -> str:
    return "—" if reward is None else f"{reward:.3g}"


def _outcome(success: bool | None) -> Text:
    return Text("unknown", "dim") if success is None else Text("success", "green") if success else Text("failure", "red")


def _print_episode(console: SafeConsole, run: "LiveRun", row: "IndexRow", alarms: Sequence[str]) -> None:
    from tether.runs.dashboard.pages import Words, episode_page
    from tether.runs.schema import choice_words

    page = episode_page(run, Words([("key", row.key)]))
    shown = page["episodes"][0]
    head = Text.assemble((f"Step {row.step}, {row.split}, group {row.group}, member {row.member}", "bold"), "  ", _outcome(row.success))
    console.print(head)
    facts = [f"return {_number(row.reward)}", f"ended by {visible(row.stop_reason.replace('_', ' '))}"]
    facts += ["kept" if row.kept else "not in an update", *(visible(f"alarm: {name.replace('_', ' ')}") for name in alarms)]
    console.print(Text(", ".join(facts), "dim"))
    if decision := shown["record"].get("decision"):
        console.print(Text(visible(f"early decision: {str(decision).replace('_', ' ')}"), "dim"))
    if choice := shown["record"].get("choice"):
        console.print(Text(visible(choice_words(choice)), "dim"))
    if shown["record"].get("error"):
        console.print(Text(visible(str(shown["record"]["error"])), "red"))
    for turn in shown["record"]["turns"]:
        _print_turn(console, turn, run.folder)
    if page["no_tokens"]:
        console.print(Text(visible(f"Tokens are not coloured: {page['no_tokens']}."), "dim"))
    console.print()


def _print_turn(console: SafeConsole, turn: "TurnView", folder: Path) -> None:
    from tether.runs.images import image_path

    parts = [f"turn {turn.number}", f"{turn.num_tokens} tokens", turn.finish, *([] if turn.valid else ["not valid"])]
    parts += [f"reward {turn.reward:.3g}"] if turn.reward is not None else []
    parts += [f"penalty {turn.penalty:.3g}"] if turn.penalty else []
    console.print(Text(f"── {', '.join(parts)}", "dim"))
    console.print(Text(visible(turn.observation)))
    for part in turn.seen:
        if not isinstance(part, str) and part.size:
            console.print(Text(visible(str(image_path(folder, part.digest))), "dim"))
    response = Text("▸ ", "dim")
    if turn.pieces:
        for piece in turn.pieces:
            look = _LEVELS[piece.level] if piece.level is not None else ""
            response.append(visible(piece.text), f"{look} italic".strip() if piece.is_reasoning else look)
    else:
        response.append(visible(turn.response[: turn.reasoning_end]), "italic").append(visible(turn.response[turn.reasoning_end :]))
    console.print(response)
