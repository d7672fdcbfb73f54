"""A mistake is one line that says what, got and what to do, exit code 2, nothing on disk; and mistakes are found without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.cli.main import main
from tether.core.config import dump_yaml, validate
from tether.models.catalog import reads_text_only
from tether.runs.store import RunStore
from tether.training.settings import RunSettings

sys.path.append(str(Path(__file__).parents[1]))
from hostile_images import GOOD


def _refused(capsys: pytest.CaptureFixture[str], words: list[str], lines: int = 1) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2, err
    assert err.startswith("tether: ") and len(err.splitlines()) == lines and "Traceback" not in err, err
    assert out == ""
    return err


IMAGE = "shows images, and model 'tiny' reads text only; choose a model that reads images, or text: env.options.observation=grid"
TRAIN = [
    (["train", "frozenlake"], "did you mean 'frozen_lake'"),
    (["train"], "no environment given; name one"),
    (["train", "frozen_lake", "--model", "tinny"], "unknown model 'tinny': did you mean 'tiny'"),
    (["train", "frozen_lake", "--model", "missing.gguf"], "model file 'missing.gguf' does not exist"),
    (["train", "frozen_lake", "--algo", "grop"], "did you mean 'grpo'"),
    (["train", "frozen_lake", "--filter", "top_q:0.9"], "did you mean 'top_p'"),
    (["train", "frozen_lake", "--filter", "top_p:much"], "write it as strategy:share, for example top_p:0.9"),
    (["train", "frozen_lake", "--filter", "top_p:1.5"], "filter.keep': got 1.5"),
    (["train", "frozen_lake", "--filter", "top_p:0"], "filter.keep': got 0"),
    (["train", "frozen_lake", "--filter", "top_p:-0.5"], "filter.keep': got -0.5"),
    (["train", "frozen_lake", "--filter", "band"], "band"),
    (["train", "frozen_lake", "--set", "algorithm.advantages=gea"], "did you mean 'gae'"),
    (["train", "frozen_lake", "--set", "algorithm.aggregation=token_meen"], "did you mean 'token_mean'"),
    (["train", "frozen_lake", "--set", "algorithm.divergence=k33"], "did you mean 'k3'"),
    (["train", "frozen_lake", "--set", "learner.schedule=cosin"], "did you mean 'cosine'"),
    (["train", "frozen_lake", "--set", "filter.score=reward_varience"], "did you mean 'reward_variance'"),
    (["train", "frozen_lake", "--set", "rollout.num_groups=0"], "rollout.num_groups': got 0; it should be greater than or equal to 1"),
    (["train", "frozen_lake", "--set", "rollout.num_groups=-2"], "rollout.num_groups': got -2"),
    (["train", "frozen_lake", "--algo", "dapo", "--set", "rollout.group_size=1"], "needs at least 2 trajectories per prompt"),
    (["train", "frozen_lake", "--also", "frozen_lake"], "the run has an environment twice (frozen_lake, frozen_lake); give each once"),
    (["train", "frozen_lake", "--also", "sokobann"], "did you mean 'sokoban'"),
    (["train", "frozen_lake", "--also", "sokoban=much"], "write it as ENV or ENV=WEIGHT, for example frozen_lake=0.5"),
    (["train", "frozen_lake", "--also", "sokoban=0"], "weight"),
    (["train", "--resume", "--smoke", "--out", "run"], "--smoke starts a run of its own; leave it out with --resume"),
    (["train", "frozen_lake", "--set", "rollout.group_sise=8"], "did you mean 'rollout.group_size'"),
    (["train", "frozen_lake", "--set", "group_sise=8"], "unknown config key 'group_sise'"),
    (["train", "frozen_lake", "--set", "rollout.group_size"], "write it as key=value"),
    (["train", "frozen_lake", "--set", "rollout.group_size=0"], "rollout.group_size': got 0; it should be greater than or equal to 1"),
    (["train", "frozen_lake", "--set", "rollout.group_size=1"], "needs at least 2 trajectories per prompt"),
    (["train", "frozen_lake", "--set", "env.options.size=99"], "frozen_lake option key 'size': got 99"),
    (["train", "frozen_lake", "--set", "env.options.sise=4"], "did you mean 'size'"),
    (["train", "frozen_lake", "--steps", "0"], "steps"),
    (["train", "frozen_lake", "--steps", "many"], "--steps"),
    (["train", "frozen_lake", "--seed", "-1"], "seed"),
    (["train", "--config", "missing.yaml"], "config file 'missing.yaml' does not exist; check the path"),
    (["train", "frozen_lake", "--stepz", "2"], "--stepz"),
    (["train", "--resume"], "--resume needs to know which run; add --out FOLDER"),
    (["train", "--resume", "--out", "nowhere"], "run folder 'nowhere' does not exist"),
    (["trian"], "unknown command 'trian': did you mean 'train'"),
    (["train", "frozen_lake", "--set", "env.options.observation=image"], IMAGE),
    (["eval", "tiny", "--env", "sokoban", "--set", "env.options.observation=grid_image"], IMAGE),
    (["eval", "tiny"], "which environment should 'tiny' play? add --env"),
    (["eval", "runs/nope"], "run folder 'runs/nope' does not exist; check the path, or, where it is a model, add --env"),
    (["eval", "runs/nope", "--env", "sokoban"], "model folder 'runs/nope' does not exist; check the path"),
    (["serve", "runs/nope"], "model folder 'runs/nope' does not exist; check the path"),
    (["train", "nope"], "config key 'env.name': unknown environment 'nope': known: countdown"),
    (["eval", "tinny", "--env", "frozen_lake"], "did you mean 'tiny'"),
    (["eval", "tiny", "--env", "sokobann"], "did you mean 'sokoban'"),
    (["eval", "tiny", "--env", "sokoban", "--prompts", "0"], "prompts"),
    (["eval", "tiny", "--env", "sokoban", "--temperature", "-1"], "temperature"),
    (["report", "nowhere"], "run folder 'nowhere' does not exist"),
    (["report"], "RUN"),
    (["models", "get", "smollm3"], "did you mean 'smollm2'"),
    (["envs", "sokobann"], "did you mean 'sokoban'"),
    (["play", "sokobann"], "did you mean 'sokoban'"),
    (["warmstart"], "--out"),
    (["warmstart", "--out", "new", "--set", "steps=50"], "unknown warmstart setting key 'steps': did you mean 'skill.steps'"),
    (["sft", "--out", "new"], "SOURCE"),
    (["sft", "frozen_lake"], "--out"),
    (["sft", "frozenlake", "--out", "new"], "unknown source 'frozenlake': did you mean 'frozen_lake'"),
    (["sft", "deepcoder", "--out", "new"], "environment 'deepcoder' has no expert; experts play frozen_lake, sokoban, countdown"),
    (["sft", "frozen_lake", "--out", "new", "--model", "tinny"], "unknown model 'tinny': did you mean 'tiny'"),
    (["sft", "frozen_lake", "--out", "new", "--steps", "0"], "sft setting key 'steps': got 0"),
    (["sft", "frozen_lake", "--out", "new", "--set", "lerner.beta1=0"], "did you mean 'learner'"),
    (["sft", "talks.jsonl", "--out", "new"], "cannot read 'talks.jsonl': No such file or directory; check the path"),
]


@pytest.mark.parametrize(("words", "said"), TRAIN, ids=[" ".join(words) for words, _ in TRAIN])
def test_one_line_and_nothing_left_behind(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in _refused(capsys, words)
    assert list(tmp_path.iterdir()) == []


def test_every_problem_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    error = _refused(capsys, ["train", "frozenlake", "--algo", "grop", "--set", "seed=-1"], lines=3)
    assert "frozen_lake" in error and "grpo" in error and "seed" in error
    assert list(tmp_path.iterdir()) == []


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.yaml").write_text("env: [")
    Path("list.yaml").write_text("- 1")
    Path("odd.txt").write_text("env: 1")
    Path("image.yaml").write_text("env: {name: countdown}\nalso: [{name: sokoban, options: {observation: image}}]")
    Path("keys.toml").write_text('steps = 2\n[env]\nname = "frozen_lake"\n[rolout]\nnum_groups = 2\n')
    assert "does not parse" in _refused(capsys, ["train", "--config", "torn.yaml"])
    assert "holds a list" in _refused(capsys, ["train", "--config", "list.yaml"])
    assert "use .toml, .yaml or .yml" in _refused(capsys, ["train", "--config", "odd.txt"])
    assert "did you mean 'rollout'" in _refused(capsys, ["train", "--config", "keys.toml"])
    assert f"'sokoban' {IMAGE}" in _refused(capsys, ["train", "--config", "image.yaml"])
    Path("a.png").write_bytes(GOOD)
    Path("rows.jsonl").write_text('{"question": "What?", "answer": "a", "image": "a.png"}')
    assert f"'qa' {IMAGE}" in _refused(capsys, ["train", "qa", "--data", "rows.jsonl"])
    Path("config.json").write_text('{"model_type": "qwen2_5_vl", "vision_config": {}}')
    assert not reads_text_only(".") and not reads_text_only("Qwen/Qwen2.5-VL-3B-Instruct"), (
        "only what is known to be blind is refused so early"
    )


def test_an_existing_folder_is_never_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for verb in (["train", "frozen_lake"], ["sft", "frozen_lake"], ["warmstart"]):
        error = _refused(capsys, [*verb, "--out", str(tmp_path)])
        assert "exists; " in error and "choose another --out" in error
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "more", [["--seed", "1"], ["--set", "rollout.num_groups=2"], ["sokoban"], ["--config", "x.yaml"], ["--model", "tiny"]]
)
def test_a_resumed_run_keeps_its_settings(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}})
    RunStore.create(tmp_path / "run", dump_yaml(settings), {})
    error = _refused(capsys, ["train", "--resume", "--out", str(tmp_path / "run"), *more])
    assert error.strip() == (
        "tether: --resume continues with the run's own settings; only --steps, --track, and --set of learner.micro_tokens, "
        "learner.gradient_checkpointing, learner.share_prompts, learner.sharding, rollout.max_rows, rollout.cache_gb, rollout.speculative_tokens, rollout.error_retries, rollout.engine, rollout.precision, server.*, diagnosis.every, checkpoint.every, checkpoint.keep, checkpoint.last, checkpoint.moments, agent.target, agent.command, agent.tasks, agent.timeout, agent.concurrency, agent.workers, may be given with it"
    )


def test_what_is_only_known_on_loading_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is not cached, or cannot hold a response: the folder made for the run is gone again, whatever was beside it stays."""
    beside = tmp_path / "runs"
    beside.mkdir()
    for number, (more, said) in enumerate(
        [
            (["--model", "nobody/nothing-0b"], "neither cached here nor reachable"),
            (["--set", "rollout.max_tokens=5000"], "lower rollout.max_tokens"),
            (
                ["--algo", "ppo", "--set", "critic.model=nobody/nothing-0b"],
                "critic.model: Hugging Face model 'nobody/nothing-0b' is neither",
            ),
            (
                ["--set", "algorithm.kl_coef=0.1", "--set", "algorithm.reference=nobody/nothing-0b"],
                "algorithm.reference: Hugging Face model",
            ),
            (["--set", "model.device=gpu"], "device 'gpu'"),
        ]
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["train", "frozen_lake", "--out", str(beside / f"run{number}"), *more])
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and said in err and len(err.splitlines()) == 1
        assert list(beside.iterdir()) == []


LINKED = {
    "an empty folder": ("empty", "neither cached here nor reachable"),
    "a folder in the empty folder": ("empty/new/run", "neither cached here nor reachable"),
    "a folder with a file": ("full", "exists; resume it with --resume or choose another --out"),
    "a file": ("file", "exists; resume it with --resume or choose another --out"),
    "nothing": ("nothing", "is a symbolic link to nothing; make the folder that it names, or choose another --out"),
    "a folder in nothing": ("nothing/run", "is a symbolic link to nothing; make the folder that it names, or choose another --out"),
    "itself": ("itself", "is a symbolic link to nothing; make the folder that it names, or choose another --out"),
}


@pytest.mark.parametrize(("out", "said"), LINKED.values(), ids=LINKED)
def test_out_behind_a_link_when_the_model_is_not_there(out: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the link leads to, and the link, are the user's: they stay as they were, and nothing is made where the link leads."""
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    (tmp_path / "mine" / "full").mkdir()
    for name in ("full/notes.txt", "file"):
        (tmp_path / "mine" / name).write_text("of the user")
    (tmp_path / "links").mkdir()
    for name in ("empty", "full", "file", "nothing"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "mine" / name)
    (tmp_path / "links" / "itself").symlink_to(tmp_path / "links" / "itself")
    before = _tree(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "frozen_lake", "--model", "nobody/nothing-0b", "--out", str(tmp_path / "links" / out)])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith("tether: ") and said in err and len(err.splitlines()) == 1
    assert _tree(tmp_path) == before


def _tree(folder: Path) -> dict[Path, str]:
    """What lies under a folder: where links lead, what files hold, and the rights of folders."""
    return {
        path: str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else oct(path.stat().st_mode)
        for path in folder.rglob("*")
    }


SHORT = ["rollout.num_groups=2", "rollout.group_size=2", "rollout.max_tokens=4", "evaluation.prompts=1", "diagnosis.every=0"]


@pytest.mark.long
def test_running_out_of_memory_loses_nothing_and_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update of step 2 asks for more than any machine has; with the setting that was named, the run goes on."""
    import torch

    from tether.training import learner

    folder, real, calls = tmp_path / "run", learner.forward, []

    def hungry(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return real(*arguments, **named) if len(calls) == 1 else torch.empty(2**50, dtype=torch.uint8)

    words = ["train", "frozen_lake", "--out", str(folder), "--steps", "2", "--filter", "all", "--set", "checkpoint.every=1"]
    monkeypatch.setattr(learner, "forward", hungry)
    with pytest.raises(SystemExit) as stopped:
        main([*words, *(word for pair in SHORT for word in ("--set", pair))])
    monkeypatch.setattr(learner, "forward", real)
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and len(error.splitlines()) == 1
    assert error.startswith("tether: out of memory in the update ") and "lora.rank" in error
    assert error.endswith("; nothing already written is lost: --resume continues from step_000001\n")
    before = (folder / "metrics.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in before.splitlines()] == [0, 1]
    assert (folder / "checkpoints" / "step_000001" / "state.pt").is_file()
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", "--out", str(folder), "--set", "learner.micro_tokens=256"])
    assert stopped.value.code == 0
    assert (folder / "metrics.jsonl").read_bytes().startswith(before)
    assert RunStore.open(folder).finished == "all 2 steps done" and RunStore.open(folder).config()["learner"]["micro_tokens"] == 256


def test_a_failed_resume_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run stopped before its first record has a checkpoint and no steps; if that cannot be read, it is still the user's."""
    settings = validate(RunSettings, {"env": {"name": "frozen_lake"}})
    folder = tmp_path / "run"
    store = RunStore.create(folder, dump_yaml(settings), {})
    store.finish("stopped early")
    store.close()
    (folder / "checkpoints" / "step_000000").mkdir()
    (folder / "checkpoints" / "step_000000" / "state.pt").write_bytes(b"")
    config = (folder / "config.yaml").read_bytes()
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resume", "--out", str(folder), "--steps", "300", "--set", "learner.micro_tokens=256"])
    assert stopped.value.code == 1 and "step_000000" in capsys.readouterr().err
    assert (folder / "config.yaml").read_bytes() == config
    assert (folder / "checkpoints" / "step_000000" / "state.pt").exists()
    assert RunStore.open(folder).finished == "stopped early"


def test_mistakes_are_found_without_torch(tmp_path: Path) -> None:
    commands = [words for words, _ in TRAIN]
    code = (
        "import contextlib, io, json, sys\nfrom tether.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):\n        main(words)\n"
        "    if 'torch' in sys.modules:\n        sys.exit('torch: ' + ' '.join(words))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["sft", "warmstart"])
def test_verbs_of_one_process(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f"`tether {verb}` trains in one process, and WORLD_SIZE is 2; start it without torchrun" in _refused(
        capsys, [verb, "frozen_lake"]
    )


def test_gpus_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "--gpus starts the ranks itself; leave it out under torchrun" in _refused(capsys, ["train", "frozen_lake", "--gpus", "2"])
