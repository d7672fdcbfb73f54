"""Templates in the report: found in the trajectories of a run, bounded in cost, and shown with what fills their slots."""

from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from tether.cli import report as command
from tether.cli.report import full_report, run_templates
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Trajectory, Turn
from tether.runs.reasoning_view import StepTemplates, template_views
from tether.runs.report import write_report
from tether.runs.schema import trajectory_record
from tether.runs.store import RunStore

COLOURS = ("red", "green", "blue", "white", "black", "grey")


def episode(prompt: int, member: int, thought: str, step: int, split: str = "train") -> dict[str, Any]:
    turns = [
        Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, text, (0, 1), 1.0, valid=True, observation=f"board {prompt}, turn {turn}")
        for turn, text in enumerate(
            (f" {thought} </think> <answer> Up </answer>", " a later turn, not looked at </think> <answer> Up </answer>")
        )
    ]
    return trajectory_record(Trajectory(prompt, member, prompt, turns, StopReason.SUCCESS, True, env="maze"), step, split, kept=True)


def tied(prompt: int, member: int) -> str:
    return f"I look at the board and see the {COLOURS[prompt]} door, so I go up"


def loose(prompt: int, member: int) -> str:
    return f"I look at the board and see the {COLOURS[(prompt + member) % 6]} door, so I go up"


def make_run(folder: Path, prompts: int = 6, members: int = 6) -> RunStore:
    store = RunStore.create(folder, "", {})
    for step, thought in ((1, tied), (2, tied), (3, loose)):
        store.append_trajectories([episode(p, m, thought(p, m), step) for p in range(prompts) for m in range(members)])
    store.append_trajectories([episode(p, 0, "a validation text", 3, "validation") for p in range(prompts)])
    return store


def test_the_first_and_the_last_training_step_are_searched(tmp_path: Path) -> None:
    first, last = run_templates(make_run(tmp_path / "run"))
    assert [(each.step, each.split, each.num_left_out) for each in (first, last)] == [(1, "train", 0), (3, "train", 0)]
    assert first.found is not None and last.found is not None
    for each, kind in ((first.found, "tied"), (last.found, "noise")):
        assert (each["num_traces"], each["num_prompts"], len(each["templates"])) == (36, 6, 1)
        template = each["templates"][0]
        assert template["skeleton"] == "I look at the board and see the ⟨1⟩ door, so I go up" and template["share"] == 1.0
        assert [slot["agreement"]["kind"] for slot in template["slots"]] == [kind]
    assert run_templates(RunStore.create(tmp_path / "empty", "", {})) == []


def test_validation_stands_in_where_no_training_was_recorded_and_one_step_is_told_once(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    store.append_trajectories([episode(p, 0, "", 0, "validation") for p in range(3)])
    (found,) = run_templates(store)
    assert (found.step, found.split, found.found) == (0, "validation", None)
    assert found.missing.startswith("Nothing to search for templates: none of the 3 reasonings holds a word")


def test_equal_boards_are_one_prompt(tmp_path: Path) -> None:
    """The seed of a board does not matter, what the model reads does."""
    store = RunStore.create(tmp_path / "run", "", {})
    same = [episode(p, 0, tied(0, 0), 1) for p in range(4)]
    for record in same:
        record["turns"][0]["observation"] = "one board"
    store.append_trajectories(same)
    assert "one prompt" in run_templates(store)[0].missing


def test_the_search_is_bounded_and_takes_whole_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_REASONINGS", 20)
    store = make_run(tmp_path / "run")
    first = run_templates(store)[0]
    assert first.found is not None
    # 6 members each: three whole prompts, and two members of a fourth.
    assert (first.found["num_traces"], first.found["num_prompts"], first.num_left_out) == (20, 4, 16)
    assert run_templates(store)[0] == first
    assert "20 reasonings under 4 prompts (a sample; 16 more were not searched)." in template_views([first])[0].summary


def test_a_prompt_with_too_many_reasonings_leaves_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MOST_REASONINGS", 10)
    first = run_templates(make_run(tmp_path / "run", prompts=2, members=30))[0]
    assert first.found is not None and (first.found["num_traces"], first.found["num_prompts"]) == (10, 2)


def test_a_long_reasoning_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LONGEST_REASONING", len("I look at the board and see"))
    first = run_templates(make_run(tmp_path / "run"))[0]
    assert first.found is not None and first.found["templates"][0]["skeleton"] == "I look at the board and see"


def page(path: Path) -> str:
    return path.read_text().replace(get_plotlyjs(), "")


def test_the_page_shows_skeletons_slots_and_fillers(tmp_path: Path) -> None:
    text = page(full_report([make_run(tmp_path / "run")], tmp_path / "report.html"))
    assert "1 template explains 100% of 36 reasonings under 6 prompts." in text
    assert 'I look at the board and see the <span class="slot tied">⟨1⟩</span> door, so I go up' in text
    assert '<span class="slot noise">⟨1⟩</span> door' in text
    assert "</span> tied (1.00): “" in text and "“blue” 17%" in text and ", 2 more</li>" in text
    assert text.index('slot tied">⟨1⟩</span> door') < text.index('slot noise">⟨1⟩</span> door')


def test_what_models_write_is_escaped(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    store.append_trajectories(
        [episode(p, m, f"Look at the <script>alert({COLOURS[m]})</script> board and go up there", 1) for p in range(6) for m in range(6)]
    )
    text = page(full_report([store], tmp_path / "report.html"))
    assert "&lt;script&gt;alert(" in text and "<script>alert" not in text


def test_a_report_without_templates_says_so(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run")
    assert "Templates were not searched for" in page(write_report([store], tmp_path / "report.html"))
    empty = RunStore.create(tmp_path / "empty", "", {})
    assert "No trajectories were recorded to search for templates." in page(full_report([empty], tmp_path / "report.html"))


def test_several_runs_have_templates_each(tmp_path: Path) -> None:
    text = page(full_report([make_run(tmp_path / "a"), make_run(tmp_path / "b")], tmp_path / "report.html"))
    assert text.count("1 template explains 100% of 36 reasonings") == 4


def found(templates: list[dict[str, Any]], unknown: float = 0.0) -> StepTemplates:
    words = {"template": 0.5, "tied": 0.2, "noise": 0.1, "unknown": unknown, "rest": 0.2 - unknown}
    return StepTemplates(
        3, "train", 0, {"templates": templates, "num_traces": 40, "num_prompts": 8, "num_empty": 0, "explained": 0.75, "words": words}
    )


def slot(number: int, kind: str, strength: float, fillers: list[tuple[str, float]], num_fillers: int) -> dict[str, Any]:
    return {
        "number": number,
        "num_fillers": num_fillers,
        "fillers": fillers,
        "mean_words": 1.0,
        "agreement": {"strength": strength, "p_value": 0.5, "kind": kind},
    }


def test_views_cut_what_is_long_and_count_what_is_left_out() -> None:
    fillers = [("x" * 60, 0.4), ("", 0.3), ("c", 0.1), ("d", 0.1), ("e", 0.05)]
    template = {
        "skeleton": "⟨1⟩ go ⟨2⟩. " + "w" * 700, "num_words": 2, "num_traces": 30, "share": 0.75, "num_prompts": 8, "prompt_share": 1.0,
        "slots": [slot(1, "noise", -0.2, fillers, 9), slot(2, "unknown", 0.9, [("a", 1.0)], 1)],
    }  # fmt: skip
    (view,) = template_views([found([template] * 7, unknown=0.1)])
    assert (len(view.templates), view.num_more) == (5, 2)
    shown = view.templates[0]
    assert shown.parts[:4] == [("⟨1⟩", "noise"), (" go ", ""), ("⟨2⟩", "unknown"), (". " + "w" * 587 + "…", "")]
    assert shown.slots[0].fillers == [("“" + "x" * 47 + "…”", 0.4), ("nothing", 0.3), ("“c”", 0.1), ("“d”", 0.1)]
    assert (shown.slots[0].strength, shown.slots[0].num_more) == ("0.00", 5)
    assert (shown.slots[1].strength, shown.slots[1].num_more) == ("", 0)
    assert view.summary == (
        "7 templates explain 75% of 40 reasonings under 8 prompts. Of all words 50% are fixed, 20% follow the prompt, 10% vary regardless of "
        "it, 10% stand in slots too rare to classify, 10% belong to no template."
    )
    assert template_views([found([])])[0].summary == "No text is shared across prompts by enough of 40 reasonings under 8 prompts."
