"""The report of an audit: one self-contained HTML page, made from the plain JSON object that `tether diagnose --json` prints.

The page starts with the answer: the verdict with its numbers. The curves over training follow, the templates and their slots, sample
reasonings of different prompts side by side, then what was read, dropped and noted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.core.shares import exact_percent, interval_words, percent, range_words
from tether.runs.figures import curve
from tether.runs.page import Chart, figure_html, write_page
from tether.runs.panels import GREY, PALE_ORANGE, Panel, Series, Style
from tether.runs.schema import StepRecord
from tether.runs.verdict import Tile, number

Document = Mapping[str, Any]

MARKS = {"tied": "good", "weakly_tied": "unsure", "cannot_be_told": "unsure"}
"""How a verdict is coloured; the others are bad news."""

EVIDENCE = {
    "retrieval": ("Retrieval by the model", "the own prompt explains the reasoning best among all prompts"),
    "adjusted_retrieval": ("Adjusted retrieval", "the same, after what each prompt gives to any text is taken away"),
    "information": ("Information", "MI-Seq-Est as a share of log P"),
    "agreement": ("Agreement", "reasonings of one prompt agree more than those of different prompts; 1: the prompt decides the text"),
    "neighbours": ("Neighbours", "the reasoning is most similar to others of its own prompt"),
    "prompt_overlap": ("Prompt overlap", "the reasoning uses words that only its own prompt holds"),
    "recorded_retrieval": ("Retrieval, as the run recorded it", "the same as retrieval, by the run's own scorer at this step"),
    "recorded_information": ("Information, as the run recorded it", "the same as information, by the run's own scorer at this step"),
}

PANELS = (
    Panel(
        "dependence",
        "Dependence on the prompt",
        "The clearest indicator of dependence, as a share of the way from chance to certainty, with its 95% interval. At zero the reasoning says "
        "nothing about its input.",
        (Series("indicator", "dependence", band=("indicator_low", "indicator_high")),),
    ),
    Panel(
        "retrieval",
        "Can the model tell the prompt from the reasoning?",
        "Share of reasonings that their own prompt explains best. At the dashed line the reasoning says nothing about its input.",
        (
            Series("retrieval_acc", "retrieval", band=("retrieval_acc_low", "retrieval_acc_high")),
            Series("chance", "chance", Style.REFERENCE, GREY),
        ),
        percent=True,
    ),
    Panel(
        "information",
        "Information per reasoning, nats",
        "MI-Seq-Est under the model that scored; the dashed line is log P, the most it can be. A model that did not write the text may see less.",
        (
            Series("mi_seq", "MI", band=("mi_seq_low", "mi_seq_high")),
            Series("mi_ceiling", "log P", Style.REFERENCE, GREY),
        ),
    ),
    Panel(
        "entropy",
        "Diversity of the reasoning, nats per token",
        "H(Z|X) is variety within one prompt, H(Z) over all prompts. High lines with no gap look healthy and are not.",
        (
            Series("h_conditional", "H(Z|X)", band=("h_conditional_low", "h_conditional_high")),
            Series("h_marginal", "H(Z)", Style.LIGHT, PALE_ORANGE),
        ),
    ),
    Panel(
        "success",
        "Success",
        "Share of episodes solved, with its 95% Wilson interval. Dependence on the input often falls before it does.",
        (Series("success", "success", band=("success_low", "success_high")),),
        percent=True,
    ),
    Panel(
        "reward_variance",
        "Reward variance within a prompt",
        "The mean over prompts: what policy gradients learn from. Near zero the regularisers steer.",
        (Series("rv_mean", "mean"),),
    ),
    Panel("length", "Tokens per reasoning", "Of those that were scored.", (Series("reasoning_tokens", "tokens"),)),
    Panel(
        "empty",
        "Responses without reasoning",
        "Share of the responses in scope that hold none, or never close it.",
        (Series("empty", "empty"),),
        percent=True,
    ),
)


def write_audit_report(document: Document, out: Path) -> Path:
    """Write the page and return its path."""
    last = next(window for window in document["windows"] if window["name"] == document["verdict_step"])
    return write_page(
        "audit_template.html",
        out,
        document=document,
        last=last,
        mark=MARKS.get(document["verdict"]["code"], "bad"),
        tiles=_tiles(last),
        evidence=[(*EVIDENCE[item["name"]], item) for item in document["verdict"]["evidence"]],
        charts=_charts(document),
    )


def _tiles(window: Document) -> list[Tile]:
    measured = window["measured"]
    information, lexical = measured["information"], measured["lexical"]
    ends = information["intervals"]
    low, high = ends.get("retrieval_acc", (0.0, 1.0))
    mi = ends.get("mi_seq", (0.0, information["mi_ceiling"]))
    rewards = window["rewards"]
    tiles = [
        Tile(
            "Retrieval accuracy",
            exact_percent(information["retrieval_acc"]),
            f"{interval_words(information['retrieval_acc'], low, high, measured['prompts'])}; {exact_percent(information['chance'])} is chance",
        ),
        Tile(
            "Information (MI), nats",
            number(information["mi_seq"]),
            f"{number(mi[0])} to {number(mi[1])}; at most {number(information['mi_ceiling'])}",
        ),
        Tile("Diversity H(Z|X), nats", number(information["h_conditional"]), "per token, under the model that scored"),
        Tile(
            "Different reasonings",
            str(lexical["distinct"]),
            f"of {measured['reasonings']}; the most common is {percent(lexical['top_share'])}",
        ),
        Tile("Scored", f"{measured['reasonings']} × {measured['prompts']}", "reasonings under every prompt"),
        Tile(
            "Without reasoning",
            percent(window["empty"] / window["in_scope"]) if window["in_scope"] else "—",
            f"of {window['in_scope']} responses",
        ),
    ]
    if rewards is not None:
        ratio = "no prompt varies" if rewards["rv_ratio"] is None else f"std / mean over prompts {number(rewards['rv_ratio'])}"
        tiles.append(
            Tile("Reward variance", number(rewards["rv_mean"]), f"zero in {percent(rewards['zero_share'])} of the prompts; {ratio}")
        )
    if window["success"] is not None:
        low, high = window["success_interval"]
        tiles.append(Tile("Success", percent(window["success"]), range_words(low, high)))
    return tiles


def _charts(document: Document) -> list[Chart]:
    """The curves; none where the rollouts are of one window."""
    records = _records(document)
    if len(records) < 2:
        return []
    charts = [Chart(panel.title, panel.reading, figure_html(curve(panel, {"audit": records}), panel.key)) for panel in PANELS]
    return [chart for chart in charts if chart.html]


def _records(document: Document) -> list[StepRecord]:
    points = {point["name"]: point for point in (document["trend"] or {"points": []})["points"]}
    records = []
    for window in document["windows"]:
        values: dict[str, float | None] = {"success": window["success"], "rv_mean": (window["rewards"] or {}).get("rv_mean")}
        if window["in_scope"]:
            values["empty"] = window["empty"] / window["in_scope"]
        if window["success_interval"] is not None:
            values["success_low"], values["success_high"] = window["success_interval"]
        if (measured := window["measured"]) is not None:
            information = measured["information"]
            values |= {
                name: information[name] for name in ("retrieval_acc", "chance", "mi_seq", "mi_ceiling", "h_conditional", "h_marginal")
            }
            values["reasoning_tokens"] = measured["reasoning_tokens"]
            for name, ends in information["intervals"].items():
                values[f"{name}_low"], values[f"{name}_high"] = ends
        if (point := points.get(window["name"])) is not None:
            values |= {"indicator": point["value"], "indicator_low": point["low"], "indicator_high": point["high"]}
        records.append(StepRecord(window["step"] or 0, {name: value for name, value in values.items() if value is not None}))
    return records


def slot_words(slots: Sequence[Document]) -> str:
    """How many slots of a template are tied, noise or unknown. Example: "2 tied, 1 noise"; empty without slots."""
    kinds = [str(slot["agreement"]["kind"]) for slot in slots]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("tied", "noise", "unknown") if kind in kinds)
