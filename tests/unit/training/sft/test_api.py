"""`tether.sft` end to end on a small model: the folder, its record, the same again, adapters, Ctrl-C, and nothing left by a mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.errors import BadInput, ConfigError
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.lora import is_lora
from tether.models.policy import Policy
from tether.training.resolve import evaluation_settings, resolve_settings, run_settings
from tether.training.sft.api import SftResult, demonstrations_of, find_source
from tether.training.sft.demonstrations import hold_out, read_conversations
from tether.training.sft.settings import SftLearnerSettings, SftSettings
from tether.training.sft.trainer import SupervisedLearner

SMALL: dict[str, Any] = {"steps": 4, "episodes": 40, "evaluate_every": 2, "learner": {"update_batch": 8, "learning_rate": 1e-2}}


def _sft(folder: str, out: Path, **more: Any) -> SftResult:
    return tether.sft("frozen_lake", {"name": folder, "device": "cpu"}, out, **{**SMALL, **more})


def test_the_folder_holds_the_best_weights_and_how_they_were_made(small_policy: Callable[[int], str], tmp_path: Path) -> None:
    folder, out, reports = small_policy(2), tmp_path / "new" / "model", []
    result = _sft(folder, out, progress=lambda *said: reports.append(said))
    record = json.loads((out / "sft.json").read_text())
    assert record == json.loads(json.dumps(result.record)) and result.folder == out and result.environments == ("frozen_lake",)
    assert record["source"] == {"kind": "experts", "names": ["frozen_lake"]} and record["model"] == folder
    assert record["demonstrations"] + record["held_out"] == 40 and record["held_out"] >= 2 and record["left_out"] == 0
    assert (record["steps"], record["ended"], record["learning_rate"]) == (4, "all steps done", 1e-2)
    assert set(record["losses"]) == {"1", "2", "3", "4"} and set(record["held_out_losses"]) == {"0", "2", "4"}
    assert record["held_out_losses"]["4"] < record["held_out_losses"]["0"] - 0.05
    assert SftSettings(**record["settings"]).steps == 4
    assert list(dict.fromkeys(stage for stage, *_ in reports)) == ["loading the model", "episodes", "training"]
    assert reports[-1][:3] == ("training", 4, 4) and reports[-1][3].startswith("loss ")
    loaded = load_model(str(out), device="cpu")
    settings = SftSettings(**record["settings"])
    chat = ChatFormat(loaded.tokenizer, Policy(loaded.model, loaded.tokenizer).end_of_turn_ids)
    every = demonstrations_of(find_source(["frozen_lake"], settings), settings, chat, lambda *_: None)
    held_out = hold_out(every, settings.held_out, settings.seed)[1]
    loss = SupervisedLearner(Policy(loaded.model), SftLearnerSettings(), None).loss_of(held_out)
    assert loss == pytest.approx(record["held_out_losses"][str(record["best_step"])], abs=1e-5)


@pytest.mark.parametrize(("taught", "asked"), [({}, 0), ({"few_shot": 2}, 2), ({"few_shot": None}, None)])
def test_a_model_is_asked_as_it_was_taught(
    taught: dict[str, Any], asked: int | None, small_policy: Callable[[int], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With as many examples in the prompt as the demonstrations had, said once an environment; a number that is given counts, and other environments have theirs."""
    folder = str(_sft(small_policy(1), tmp_path / "model", steps=1, experts={"options": {"frozen_lake": taught}}).folder)
    caplog.clear()
    named = {"env": {"name": "frozen_lake"}, "also": [{"name": "sokoban"}], "model": {"name": folder}}
    assert resolve_settings(None, named, {}).env.options["few_shot"] == asked and not caplog.messages, "said where a run is made"
    trained = run_settings(None, None, named, resume=False, smoke=False)
    assert [chosen.options["few_shot"] for chosen in trained.environments()] == [asked, None]
    evaluated = evaluation_settings(folder, "frozen_lake", False, {})
    assert evaluated.env.options.get("few_shot") == asked
    said = f"is asked as it was trained: frozen_lake with few_shot={asked}"
    assert [said in line for line in caplog.messages] == [True] * (0 if asked is None else 2)
    assert evaluation_settings(folder, "frozen_lake", False, {"env": {"options": {"few_shot": 3}}}).env.options["few_shot"] == 3
    (Path(folder) / "agent.json").unlink()  # a folder of an earlier version has its record alone
    assert evaluation_settings(folder, "frozen_lake", False, {}).env.options.get("few_shot") == asked
    (Path(folder) / "sft.json").write_text('{"source": []}')
    with pytest.raises(BadInput, match=r"sft\.json' is not what tether sft writes"):
        evaluation_settings(folder, "frozen_lake", False, {})


def test_the_same_seed_gives_the_same_weights(small_policy: Callable[[int], str], tmp_path: Path) -> None:
    folder = small_policy(1)
    weights = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        _sft(folder, tmp_path / name, seed=seed)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_adapters_are_saved_alone_and_load(small_policy: Callable[[int], str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder, out = small_policy(1), tmp_path / "adapters"
    result = _sft(folder, out, lora=True)
    assert result.record["settings"]["lora"]["rank"] == 32
    assert (out / "adapter_model.safetensors").is_file() and not (out / "model.safetensors").exists()
    loaded = load_model(str(out), device="cpu")
    assert is_lora(loaded.model) and any(bool(p.any()) for name, p in loaded.model.named_parameters() if ".lora_B." in name)
    # They are trained further, not put beside new ones; and a run takes the folder as its model.
    more = tether.sft("frozen_lake", {"name": str(out), "device": "cpu"}, tmp_path / "more", **SMALL)
    assert more.record["held_out_losses"][0] == pytest.approx(result.record["held_out_losses"][result.record["best_step"]], abs=1e-5)
    tether.train(
        "frozen_lake",
        {"name": str(out), "device": "cpu"},
        out=tmp_path / "run",
        steps=1,
        filter="all",
        rollout={"num_groups": 1, "group_size": 2, "max_tokens": 8, "max_context": 512},
        evaluation={"prompts": 1},
        options={"max_turns": 1},
        diagnosis={"every": 0},
    )
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "model" / "adapter_model.safetensors").is_file()


def test_after_an_interrupt_what_was_learned_is_kept(small_policy: Callable[[int], str], tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int, remark: str) -> None:
        if stage == "training" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _sft(small_policy(1), tmp_path / "kept", progress=interrupt)
    record = json.loads((tmp_path / "kept" / "sft.json").read_text())
    assert (record["ended"], record["steps"], record["best_step"]) == ("interrupted", 3, 3)
    assert set(record["held_out_losses"]) == {"0", "2", "3"}
    assert (tmp_path / "kept" / "model.safetensors").is_file()

    def at_once(stage: str, done: int, total: int, remark: str) -> None:
        if stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _sft(small_policy(1), tmp_path / "nothing", progress=at_once)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("source", "settings", "said"),
    [
        ([], {}, "no source of demonstrations given"),
        (["frozen_lake,sokobann"], {}, "unknown source 'sokobann': did you mean 'sokoban'"),
        (["nowhere.jsonl"], {}, "cannot read 'nowhere.jsonl': No such file"),
        (["runs/nowhere"], {}, "cannot read 'runs/nowhere'"),
        (["frozen_lake", "nowhere.jsonl"], {}, "give one file, one run folder, or environments alone"),
        (["frozen_lake"], {"held_out": 1}, "held_out': got 1; it should be less than 1"),
        (["frozen_lake"], {"patiense": 1}, "unknown sft setting key 'patiense': did you mean 'patience'"),
        (["frozen_lake"], {"learning_rate": 1}, "did you mean 'learner.learning_rate'"),
        (["frozen_lake"], {"learner": {"schedule": "cosin"}}, "did you mean 'cosine'"),
        (["frozen_lake"], {"experts": {"options": {"frozenlake": {}}}}, "did you mean 'frozen_lake'"),
        (["frozen_lake"], {"experts": {"options": {"frozen_lake": {"split": "validation"}}}}, "always come from the training split"),
        (["frozen_lake"], {"experts": {"weaknesses": {"habit": 2}}}, "experts.weaknesses.habit': got 2"),
        (["frozen_lake"], {"model": "tinny"}, "unknown model 'tinny': did you mean 'tiny'"),
    ],
    ids=str,
)
def test_a_mistake_is_found_before_anything_is_loaded(source: list[str], settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, ConfigError)) as refused:
        tether.sft(source, out=tmp_path / "never", **settings)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "never").exists()


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="exists; choose another --out"):
        tether.sft("frozen_lake", out=tmp_path)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.training.memory.available_memory", lambda device: 10_000_000)
    with pytest.raises(BadInput, match=r"model 'tiny' does not fit on cpu: weights .* = .* of 0\.0 GB; train adapters \(lora\.rank=16\)"):
        tether.sft("frozen_lake", {"name": "tiny", "device": "cpu"}, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_example_file_is_read(tmp_path: Path) -> None:
    example = Path(__file__).parents[4] / "examples" / "conversations.jsonl"
    assert [len(each.exchanges) for each in read_conversations(example)] == [2, 1, 1]
    result = tether.sft(example, {"name": "tiny", "device": "cpu"}, tmp_path / "talk", steps=1)
    assert (result.record["source"]["kind"], result.record["demonstrations"], result.record["held_out"]) == ("conversations", 2, 1)
    assert result.environments == ()
