"""Pages of evaluations: one result with its examples, and a leaderboard of many.

A result page holds what a reader needs to judge a number: settings, versions, hashes of the data, sampling, intervals, tables by category, and
conversations that succeeded and that failed. Text of models is escaped like all other text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.runs.evaluations import Board, Difference, Result, categories, task_title
from tether.runs.page import write_page
from tether.runs.verdict import Tile


def rate(value: float | None) -> str:
    """A share with one decimal. Example: "41.4%"."""
    return "-" if value is None else f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """A difference of shares in points. Example: "+12.0"."""
    return f"{100 * value:+.1f}"


def pass_names(results: Sequence[Result]) -> list[str]:
    """The k of pass@k beyond 1 that any of the results measured, as text."""
    names = {name.removeprefix("pass_at_") for result in results for name in result["metrics"] if name.startswith("pass_at_")}
    return sorted(names - {"1"}, key=int)


def spent(result: Result) -> str:
    """Tokens and cost in words. Example: "120,000 prompt + 30,000 completion tokens, 0.05"."""
    tokens = result["tokens"]
    if tokens["uncounted"]:
        return f"tokens of {tokens['uncounted']} of {tokens['responses']} responses were not counted by the server"
    words = f"{tokens['prompt']:,} prompt + {tokens['completion']:,} completion tokens"
    return f"{words}, cost {tokens['cost']:.4g}" if tokens.get("cost") is not None else words


def difference_words(difference: Difference) -> str:
    """Example: "A is 12.0 points above B (+3.0 to +21.0, 120 instances)"."""
    side = "below" if difference.success < 0 else "above"
    ends = f"{signed(difference.low)} to {signed(difference.high)}, {difference.num_instances} instances"
    chance = "beyond chance" if difference.beyond_chance else "within chance"
    return f"{difference.first} is {abs(100 * difference.success):.1f} points {side} {difference.second} ({ends}): {chance}"


def write_result_page(result: Result, out: Path) -> Path:
    """Write the page of one result and return its path."""
    metrics, protocol = result["metrics"], result["protocol"]
    low, high = result["intervals"]["success"]
    tiles = [
        Tile("Success", rate(metrics["success"]), f"95% interval {rate(low)} to {rate(high)}"),
        Tile("Mean reward", f"{metrics['reward_mean']:.3f}", _interval(result["intervals"]["reward_mean"])),
        *(
            Tile(f"pass@{k}", rate(metrics[f"pass_at_{k}"]), f"{rate(ends[0])} to {rate(ends[1])}")
            for k in pass_names([result])
            if (ends := result["intervals"].get(f"pass_at_{k}")) is not None
        ),
        Tile("Instances", f"{metrics['instances']:.0f}", f"{metrics['prompts']:.0f} prompts, {protocol['samples']} samples each"),
        Tile("Failed", f"{metrics['errors']:.0f}", "conversations without a result, left out of every number"),
        Tile("Well formed", rate(metrics["format_valid"]), f"of the turns; {result['cut_responses']} responses were cut at their budget"),
    ]
    return write_page(
        "evaluation_template.html",
        out,
        charts_inside=False,
        result=result,
        title=task_title(result),
        tiles=tiles,
        spent=spent(result),
        categories={kind: rows for kind, rows in categories(result).items() if len(rows) > 1},
        rate=rate,
    )


def write_leaderboard(boards: Sequence[Board], out: Path) -> Path:
    """Write the page of all results and return its path."""
    return write_page(
        "leaderboard_template.html",
        out,
        charts_inside=False,
        boards=[(board, pass_names(board.results)) for board in boards],
        rate=rate,
        spent=spent,
        difference_words=difference_words,
    )


def markdown(boards: Sequence[Board]) -> str:
    """The leaderboard as Markdown."""
    parts = []
    for board in boards:
        ks = pass_names(board.results)
        heading = ["", "model", "success", "95% interval", *(f"pass@{k}" for k in ks), "reward", "failed", "beyond chance from"]
        rows = [heading, ["---:", "---", *["---:"] * (len(heading) - 3), "---"]]
        rows += [_row(board, rank, result, ks) for rank, result in enumerate(board.results, start=1)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {board.title}\n\n{table}")
        if board.differences:
            parts.append("\n".join(f"- {difference_words(difference)}" for difference in board.differences))
    return "\n\n".join(parts)


def _row(board: Board, rank: int, result: dict[str, Any], ks: Sequence[str]) -> list[str]:
    metrics, (low, high) = result["metrics"], result["intervals"]["success"]
    name = str(result["model"]["name"]).replace("|", "\\|")
    return [
        str(rank),
        name,
        rate(metrics["success"]),
        f"{rate(low)} to {rate(high)}",
        *(rate(metrics.get(f"pass_at_{k}")) for k in ks),
        f"{metrics['reward_mean']:.3f}",
        f"{metrics['errors']:.0f}",
        ", ".join(board.beyond(result)) or "none",
    ]


def _interval(ends: Sequence[float] | None) -> str:
    return "no interval: the instances show no spread" if ends is None else f"95% interval {ends[0]:.3f} to {ends[1]:.3f}"
