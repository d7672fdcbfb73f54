"""What the dashboard computes itself: pooled seeds, groups, differences of settings, tokens, search; against known answers."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.core.text import visible
from tether.runs.dashboard.catalogue import Catalogue, LiveRun
from tether.runs.dashboard.charts import Charts, group_name, over_seeds, pooled, seed_groups, shares
from tether.runs.dashboard.episodes import episode, find, neighbours, step_groups
from tether.runs.dashboard.pages import Words, compare_page, runs_page, trajectories_page
from tether.runs.lock import LOCK
from tether.runs.panels import SECTIONS
from tether.runs.reasoning_view import pieces
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

TINY = Path(__file__).parents[4] / "src" / "tether" / "models" / "tiny" / "tokenizer.json"


def _episode(step: int, group: int, member: int, reward: float | None, **other: Any) -> dict[str, Any]:
    solved = bool(reward and reward > 0.5)
    plain = {
        "step": step,
        "split": "train",
        "env": "e",
        "group": group,
        "member": member,
        "seed": group,
        "reward": reward,
        "success": solved,
    }
    turn = {
        "observation": "a board",
        "response": f"move {group}",
        "response_ids": [],
        "logprobs": [],
        "reasoning_span": None,
        "valid": True,
    }
    rest = {"stop_reason": "success" if solved else "failure", "error": None, "measures": {}, "kept": False, "turns": [turn]}
    return {**plain, **rest, **other}


def _run(folder: Path, config: str = "seed: 0\n", about: dict[str, Any] | None = None) -> RunStore:
    return RunStore.create(folder, config, about or {})


def _values(records: list[StepRecord], metric: str) -> dict[int, float]:
    return {record.step: record.metrics[metric] for record in records if metric in record.metrics}


def test_pooled_seeds_are_the_mean_with_students_interval() -> None:
    seeds = [[StepRecord(1, {"validation/success": value}), StepRecord(2, {"update/loss": value})] for value in (0.2, 0.4, 0.6)]
    records = pooled(seeds, share=shares([panel for section in SECTIONS for panel in section.panels]))
    assert _values(records, "validation/success") == {1: pytest.approx(0.4)}
    # sd 0.2, error 0.2/sqrt(3), t(2) = 4.302653
    half = 4.302653 * 0.2 / 3**0.5
    logit, reach = math.log(0.4 / 0.6), half / (0.4 * 0.6)  # of a share, on the logit: it stays between 0 and 1
    ends = [1 / (1 + math.exp(-end)) for end in (logit - reach, logit + reach)]
    assert _values(records, "validation/success low") == {1: pytest.approx(ends[0])}
    assert _values(records, "validation/success high") == {1: pytest.approx(ends[1])}
    assert _values(records, "update/loss low") == {2: pytest.approx(0.4 - half, rel=1e-6)}, "a loss may be"


def test_a_pooled_curve_ends_where_most_seeds_end_and_equal_seeds_have_no_interval() -> None:
    long = [StepRecord(step, {"m": 1.0}) for step in (1, 2, 3)]
    assert _values(pooled([long, long[:2], long[:1]]), "m") == {1: 1.0, 2: 1.0}
    assert _values(pooled([long, long[:1]]), "m") == {1: 1.0}
    assert not _values(pooled([long, long]), "m low")


def test_a_panel_over_seeds_draws_the_interval_over_seeds() -> None:
    panel = over_seeds(SECTIONS[0].panels[0])
    assert panel.series[0].band == ("validation/success low", "validation/success high")
    assert "Wilson" not in panel.reading


def test_a_comparison_ranks_as_the_report_does(tmp_path: Path) -> None:
    """Of one task by the settings, but played on other prompts: side by side."""
    for name, seed, board in (("a", 0, "x"), ("b", 1, "x"), ("c", 0, "y")):
        store = _run(tmp_path / name, f"seed: {seed}\nenv: {{name: frozen_lake}}\n")
        store.append(StepRecord(9, {"validation/success": 0.5, "validation/prompts": 1.0}))
        store.append_trajectories([{**_episode(9, 0, 0, 1.0), "split": "validation", "turns": [{"observation": board}]}])
        store.close()
    catalogue = Catalogue(tmp_path)
    same, other = (compare_page(catalogue, Words([("run", "a"), ("run", name)]))["comparison"] for name in ("b", "c"))
    assert same.is_ranked and [(row.key, row.values, row.is_task) for row in same.differences] == [("seed", ("0", "1"), False)]
    assert not other.is_ranked and "they share 0 of 1" in other.sentence


def test_runs_that_are_seeds_of_each_other(tmp_path: Path) -> None:
    for name, config in {
        "s-0": "seed: 0\nenv: {name: a}\nlr: 1.0e-6",
        "s-1": "seed: 1\nenv: {name: a}\nlr: 1.0e-6\ntags: [x]",
        "other": "seed: 0\nenv: {name: b}\nlr: 1.0e-6",
    }.items():
        _run(tmp_path / name, config)
    runs = list(Catalogue(tmp_path).runs().values())
    groups = seed_groups(runs)
    assert [[run.name for run in group] for group in groups] == [["other"], ["s-0", "s-1"]]
    assert group_name(groups[1]) == "s-* (2 seeds)" and group_name(groups[0]) == "other"


def test_groups_have_the_variance_of_the_filter_and_say_why_they_were_dropped(tmp_path: Path) -> None:
    store = _run(tmp_path / "r", "filter: {strategy: top_p, score: reward_variance}\n")
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.3, 0.3], 2: [1.0, 0.9]}
    rows = [_episode(4, group, n, reward, kept=group == 0) for group, found in rewards.items() for n, reward in enumerate(found)]
    rows.append(_episode(4, 0, 4, 0.0, stop_reason="env_error", error="reset: gone", success=False, kept=True))
    rows.append(_episode(4, 3, 0, 0.0, stop_reason="env_error", error="reset: gone", success=False))
    store.append_trajectories(rows)
    store.close()
    groups = {group.number: group for group in step_groups(LiveRun("r", tmp_path / "r"), 4)}
    assert list(groups) == [0, 2, 1, 3], "most variance first, what has none last"
    assert groups[0].reward_variance == pytest.approx(1 / 3) and groups[0].num_errored == 1 and groups[0].kept
    assert groups[2].reward_variance == pytest.approx(0.005) and groups[2].why == "reward variance below the cut of top_p"
    assert groups[1].reward_variance == 0 and "all rewards are equal" in groups[1].why
    assert groups[3].reward_variance is None and "every member errored" in groups[3].why


def test_episodes_are_found_by_text_and_a_search_says_how_far_it_came(tmp_path: Path) -> None:
    store = _run(tmp_path / "r")
    odd = {"observation": "ein Käfig", "response": 'say "Hi" \x1b[31m', "response_ids": [], "logprobs": []}
    store.append_trajectories([_episode(1, group, 0, 0.0) for group in range(30)])
    store.append_trajectories([_episode(2, 0, 0, 1.0, turns=[odd])])
    store.close()
    run = LiveRun("r", tmp_path / "r")
    for text in ("KÄFIG", 'say "hi"', "\x1b[31m"):
        assert [row.key for row in find(run, text=text).rows] == ["2/train/0/0"], text
    assert not find(run, text="turns").rows, "a word of the file's own is not text of the episode"
    assert list(find(run, text="move 7").excerpts.values()) == ["move 7"]
    first = find(run, text="move", order="oldest", limit=10)
    assert (len(first.rows), first.searched, first.next_start, first.total) == (10, 10, 10, 31)
    rest = find(run, text="move", order="oldest", start=10, limit=100)
    assert (len(rest.rows), rest.next_start) == (20, None)
    late = find(run, text="nowhere", seconds=0.0)
    assert late.searched == 1 and late.next_start == 1, "out of time after one line, and it says where to continue"


def test_filters_orders_and_addresses_of_episodes(tmp_path: Path) -> None:
    store = _run(tmp_path / "r")
    store.append_trajectories([_episode(1, group, 0, reward) for group, reward in enumerate((0.0, 1.0, None, 0.6))])
    store.append(StepRecord(1, {"m": 1.0}, alarms=[{"name": "entropy_collapse", "severity": "warning"}]))
    store.append_trajectories([_episode(1, 9, 0, 0.0)])  # the step again, as a resumed run writes it
    store.append_trajectories([_episode(2, group, 0, reward) for group, reward in enumerate((0.0, 1.0, None, 0.6))])
    store.close()
    run = LiveRun("r", tmp_path / "r")
    assert [row.key for row in find(run, alarm="entropy_collapse").rows] == ["1/train/9/0"]
    assert find(run, step=1).alarms == {1: ("entropy_collapse",)}
    assert [row.reward for row in find(run, step=2, order="reward_high").rows] == [1.0, 0.6, 0.0, None]
    assert [row.reward for row in find(run, step=2, order="reward_low").rows] == [0.0, 0.6, 1.0, None]
    assert [row.group for row in find(run, step=2, success=False).rows] == [2, 0]
    assert neighbours(run, "2/train/1/0") == {"before": "2/train/0/0", "after": "2/train/2/0", "beside": "2/train/2/0"}
    assert episode(run, "2/train/3/0")["reward"] == 0.6
    for key in ("2/train/3", "2/train/x/0", "9/train/0/0"):
        with pytest.raises(BadInput, match=r"episode"):
            episode(run, key)
    with pytest.raises(BadInput, match="outcome is 'lost'"):
        trajectories_page(run, Words([("outcome", "lost")]))


def test_tokens_are_the_sampled_ones_and_carry_their_logprobs() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY))
    ids = tokenizer.encode("I go Left. </think>", add_special_tokens=False).ids
    logprobs = [-0.01 * place for place in range(len(ids))]
    found = pieces(tokenizer, {"response_ids": ids, "logprobs": logprobs, "reasoning_span": [0, 2]})
    assert "".join(piece.text for piece in found) == tokenizer.decode(ids, skip_special_tokens=False)
    assert [number for piece in found for number in piece.ids] == ids
    assert [piece.logprob for piece in found] == pytest.approx(logprobs)
    assert [piece.is_reasoning for piece in found] == [True, True] + [False] * (len(found) - 2)
    levels = pieces(tokenizer, {"response_ids": ids[:5], "logprobs": [0.0, -0.5, -1.0, -3.0, -9.0]})
    assert [piece.level for piece in levels] == [0, 1, 2, 3, 4]
    assert pieces(tokenizer, {"response_ids": ids[:1], "logprobs": [None]})[0].level is None


def test_a_character_of_several_tokens_is_one_piece() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Bytes only: every character beyond ASCII takes several tokens.
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("a€b").ids
    found = pieces(tokenizer, {"response_ids": ids, "logprobs": [-1.0] * 5, "reasoning_span": [0, 2]})
    assert [(piece.text, piece.logprob, len(piece.ids)) for piece in found] == [("a", -1.0, 1), ("€", -3.0, 3), ("b", -1.0, 1)]
    assert [piece.is_reasoning for piece in found] == [True, False, False], "a piece that straddles the border is left out"
    torn = pieces(tokenizer, {"response_ids": ids[:2], "logprobs": [-1.0, -2.0]})
    assert [piece.text for piece in torn] == ["a", "\N{REPLACEMENT CHARACTER}"] and torn[1].logprob == -2.0


def test_runs_are_found_below_and_nothing_else_is(tmp_path: Path) -> None:
    _run(tmp_path / "runs" / "sweep" / "a").close()
    _run(tmp_path / "runs" / "b", "seed: 1\ntags: [best, 7]\n").close()
    _run(tmp_path / "outside").close()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("{", encoding="utf-8")
    catalogue = Catalogue(tmp_path / "runs")
    assert list(catalogue.runs()) == ["b", "sweep/a"] and "bad" in catalogue.unreadable
    assert catalogue.get("b").tags() == ["best", "7"]
    assert list(Catalogue(tmp_path / "outside").runs()) == ["outside"], "a run folder is a folder of one run"
    for name in ("../outside", "/etc", "link", ""):
        with pytest.raises(BadInput, match="there is no run"):
            catalogue.get(name)
    with pytest.raises(BadInput, match="does not exist"):
        Catalogue(tmp_path / "nowhere")


def test_states_of_a_run(tmp_path: Path) -> None:
    store = _run(tmp_path / "r")
    run = LiveRun("r", tmp_path / "r")
    assert run.state() == "training", "its writer holds the lock"
    now = time.time()
    for seconds, state in ((-3600, "stopped"), (3600, "stopped"), (0, "training")):  # left behind; by a clock that was set back since
        os.utime(tmp_path / "r" / LOCK, (now + seconds, now + seconds))
        assert run.state() == state
    store.finish("all done")
    store.close()
    assert run.state() == "finished"


def test_records_are_read_again_when_they_change_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _run(tmp_path / "r")
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    run, charts = LiveRun("r", tmp_path / "r"), Charts()
    first = run.records()
    assert run.records() is first
    drawn = charts.get("success", [run])
    assert charts.get("success", [run]) is drawn
    store.append(StepRecord(2, {"rollout/success": 1.0}))
    assert [record.step for record in run.records()] == [1, 2]
    assert json.loads(charts.get("success", [run]))["figure"]["data"][0]["x"] == [1, 2]
    assert json.loads(charts.get("mi", [run]))["figure"] is None
    with pytest.raises(BadInput, match="did you mean 'success'"):
        charts.get("succes", [run])
    store.close()


def test_a_run_without_records_does_not_shift_the_colours_of_the_others(tmp_path: Path) -> None:
    from tether.runs.figures import RUN_COLOURS

    _run(tmp_path / "a", "seed: 0\nsteps: 1\n").close()
    store = _run(tmp_path / "b", "seed: 0\nsteps: 2\n")
    store.append(StepRecord(1, {"rollout/success": 0.5, "information/h_conditional": 1.0, "information/mi_seq": 1.0}))
    store.close()
    runs = list(Catalogue(tmp_path).runs().values())
    for name in ("success", "plane"):
        (trace,) = json.loads(Charts().get(name, runs, pool=True))["figure"]["data"]
        assert (trace["name"], RUN_COLOURS[1]) == ("b", trace["marker"]["color"] if name == "success" else trace["marker"]["color"][-1])


def test_the_list_of_runs_sorts_what_is_missing_last(tmp_path: Path) -> None:
    for name, value in {"low": 0.1, "high": 0.9, "none": None}.items():
        store = _run(tmp_path / name, "seed: 0\n", {"env": "sokoban", "seed": len(name)})
        if value is not None:
            store.append(StepRecord(1, {"validation/success": value}))
        store.close()
    catalogue = Catalogue(tmp_path)

    def names(**words: str) -> list[str]:
        return [row["name"] for row in runs_page(catalogue, Words(list(words.items())))["rows"]]

    assert names(sort="success") == ["high", "low", "none"]
    assert names(sort="success", order="rising") == ["low", "high", "none"]
    assert names(sort="name") == ["high", "low", "none"] and names(sort="seed") == ["low", "high", "none"]
    assert names(q="HIGH sokoban") == ["high"] and names(q="maze") == [] and names(state="training") == []
    with pytest.raises(BadInput, match="sort is 'size'"):
        names(sort="size")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("\x1b]52;c;eA==\x07", "\\x1b]52;c;eA==\\x07"), ("a\rb\x9b2J", "a\\x0db\\x9b2J"), ("\u202eevil \ud800", "\\u202eevil \\ud800")],
)  # fmt: skip
def test_control_characters_become_visible(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode()
