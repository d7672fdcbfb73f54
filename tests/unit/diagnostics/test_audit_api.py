"""`tether.audit`: the same audit as the verb, from paths or from rows in memory."""

import json
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.errors import BadInput, UnknownName

PLACES = ("attic", "cellar", "garden", "harbour", "kitchen")


def _rows(tied: bool = True, steps: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "group": place,
            "prompt": f"Find what is in the {place}.",
            "response": f"<think>I look {f'in the {place}' if tied else 'around'}, way {(index + member * 3) % 4}.</think> done",
            "reward": float(member % 2),
            "success": member % 2 == 0,
        }
        for step in range(steps)
        for index, place in enumerate(PLACES)
        for member in range(4)
    ]


FAST: dict[str, Any] = {"bootstrap": 100, "device": "cpu"}


def test_rows_and_files_give_the_same_result(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(steps=2)), encoding="utf-8")
    from_rows = tether.audit(iter(_rows(steps=2)), model=tiny, bootstrap=100)
    from_file = tether.audit(path, model="tiny", out=tmp_path / "page.html", **FAST)
    assert (
        isinstance(from_rows, tether.Audit)
        and from_rows.verdict.code == from_file.verdict.code == "tied"
        and from_rows.notes == from_file.notes
    )
    assert (
        from_rows.information.retrieval_acc == from_file.information.retrieval_acc
    )  # the order of the sample differs, with the names of the places
    assert from_rows.information.mi_seq == pytest.approx(from_file.information.mi_seq)
    assert from_rows.trend is not None and from_rows.trend.indicator == "neighbours"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!") and from_file.verdict.headline in page
    document = from_rows.document()
    assert document["files"] == ["rows in memory"] and from_file.document()["files"] == [str(path)]
    assert document["verdict"]["headline"] == from_file.verdict.headline and document["model"].endswith("tiny")


def test_options_of_the_verb(tiny: Any) -> None:
    renamed = [{"q": row["prompt"], "a": f"Thought: {row['response']} Action: go", "at": row["step"]} for row in _rows(tied=False, steps=2)]
    found = tether.audit(
        [*renamed, {"q": 1}],
        model=tiny,
        fields="prompt=q,response=a,step=at",
        pattern=r"<think>(.*?)</think>",
        skip_bad=True,
        steps=1,
        scope="trajectory",
        prompts=4,
        samples=2,
        seed=3,
        bootstrap=100,
    )
    assert (
        [window.window.name for window in found.windows] == ["1"] and found.options.seed == 3 and found.document()["scope"] == "trajectory"
    )
    assert any("1 of 41 records could not be read" in note for note in found.notes)
    assert any("no group id" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, "which model should score the rollouts"),
        ({"model": "tinny"}, "did you mean 'tiny'"),
        ({"model": "tiny", "scope": "trajectories"}, "unknown scope 'trajectories'"),
        ({"model": "tiny", "prompts": 1}, "prompts is 1; expected a whole number from 2"),
        ({"model": "tiny", "bootstrap": 5}, "bootstrap is 5; expected a whole number from 100"),
        ({"model": "tiny", "format": "skyrll"}, "did you mean 'skyrl'"),
        ({"model": "tiny", "fields": {"prompts": "q"}}, "did you mean 'prompt'"),
        ({"model": "tiny", "steps": [7]}, "step 7 is not in the rollouts"),
        ({"model": "tiny", "out": "/nowhere/at/all.html"}, "there is no folder '/nowhere/at'"),
        ({"model": "http://127.0.0.1:1/v1"}, "name the model's with --tokenizer"),
    ],
)
def test_bad_input(options: dict[str, Any], cause: str) -> None:
    with pytest.raises((BadInput, UnknownName), match=cause):
        tether.audit(_rows(), **options)


def test_ids_of_a_whole_response_give_the_ids_of_its_reasoning(tiny: Any, chat: Any) -> None:
    rows = [
        {
            "group_index": index, "prompt": f"Go {way}. ", "response": f"<think>{way} then{'!' * member}</think> done", "reward": 1.0,
            "tokens": [*chat.encode(f"Go {way}. "), *chat.encode(f"<think>{way} then{'!' * member}</think> done")],
            "response_length": len(chat.encode(f"<think>{way} then{'!' * member}</think> done")), "status": "completed",
        }
        for index, way in enumerate(("Left", "Right", "Up", "Down"))
        for member in range(3)
    ]  # fmt: skip
    found = tether.audit(rows, model=tiny, bootstrap=100)
    pairs = found.last.pairs
    assert found.document()["format"] == "slime" and len(pairs.prompts) == 4
    for reasoning, drawn in zip(pairs.reasonings, pairs.drawn, strict=True):
        assert drawn.response_ids is not None
        whole = tuple(drawn.response_ids)
        assert any(
            whole[start : start + len(reasoning)] == reasoning for start in range(len(whole))
        )  # the sampled ids, not tokenised again
        assert chat.decode(reasoning) in (drawn.reasoning or "") and len(chat.decode(reasoning)) >= len(drawn.reasoning or "") - 2
    assert not any("tokenised" in note for note in found.notes)
    foreign = [{**row, "response": "<think>something else</think>"} for row in rows]
    with pytest.raises(BadInput, match="tokens do not fit the model's tokenizer: they decode to"):
        tether.audit(foreign, model=tiny, bootstrap=100)
