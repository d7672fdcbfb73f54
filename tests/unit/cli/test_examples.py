"""Every example of every --help: it parses, its settings resolve, and it runs, in small, unless it needs a network, a server or hours.

An example is run in process as it is written, with arguments appended that make it small (`SMALL`; the last value of an option counts). The folder
has what the examples name: a finished run, a file of conversations, a data file, a module. `NOT_RUN` says why an example is only parsed.
"""

import io
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tether.cli.main import app, main
from tether.core.config import merge, parse_overrides
from tether.training.resolve import named_settings, resolve_settings

NETWORK, SERVER, HOURS, WAITS = "needs the network", "needs a server that runs", "takes hours", "serves until Ctrl-C"
SHOWN = "the run of the examples has no such episode; tests/unit/dashboard/test_verbs.py"
SMALL_SETTINGS = ("rollout.max_tokens=16", "rollout.group_size=2", "evaluation.prompts=2", "filter.refill=0", "env.options.max_turns=2")
SMALL_RUN = ["--smoke", "--model", "tiny", "--steps", "1", *(word for pair in SMALL_SETTINGS for word in ("--set", pair))]
TINY_LESSON = [f"{lesson}.{key}={value}" for lesson in ("skill", "habit") for key, value in (("steps", 1), ("episodes", 8))]
TINY_SHAPE = ["batch=2", "width=32", "hidden=32", "layers=1", "heads=2"]
SMALL: dict[str, list[str]] = {
    "train": SMALL_RUN,
    "sft": ["--model", "tiny", "--episodes", "8", "--steps", "1", "--set", "max_context=1000"],
    "eval": ["--prompts", "2", "--samples", "1", "--set", "rollout.max_tokens=16"],
    "warmstart": [word for pair in (*TINY_LESSON, *TINY_SHAPE) for word in ("--set", pair)],
    "diagnose": ["--bootstrap", "100"],
    "envs": ["--episodes", "20"],
}
NOT_RUN = {
    "tether train sokoban --out s3://bucket/runs/sokoban": "needs a bucket; tests/unit/runs/test_remote.py",
    "tether train --resume --out runs/sokoban": "the run of another example; tests/e2e/test_train.py resumes",
    "tether train sokoban --gpus 8 --restarts 5 --out runs/sokoban": "needs GPUs",
    "tether train --agent my_module:my_agent --tasks tasks.jsonl --model smollm2": "tests/unit/rollout/gateway runs agents",
    "tether train sokoban --ray head:6379 --topology topology.yaml --out /shared/run": "needs a cluster; tests/ray has one",
    "tether train frozen_lake --track tensorboard --track wandb": "wandb is an extra",
    "tether train sokoban --model smollm2 --engine http://127.0.0.1:8000": SERVER,
    "tether train frozen_lake --engine http://127.0.0.1:8000": SERVER,
    "tether train http://127.0.0.1:8010": SERVER,
    "tether train sokoban --model smollm2 --filter top_p:0.9 --out runs/sokoban": "as the others, which take less time",
    "tether sweep frozen_lake --seeds 0-4 --set learner.learning_rate=1e-5,1e-4 --steps 20": "tests/unit/training/test_sweep.py runs one",
    "tether sweep tiny/frozen_lake --seeds 0-2 --set filter.strategy=top_p,all --set rollout.group_size=4,8 --out runs/filters": HOURS,
    'tether sweep my_config.yaml --seeds 0,1 --jobs 2 --metric "peak validation/success" --json': HOURS,
    "tether sft frozen_lake,sokoban,countdown --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out models/warm": NETWORK,
    "tether sft conversations.jsonl --model smollm2 --out models/talk --lora": "the extra lora, and a model that is fetched",
    "tether sft runs/first --model runs/first/checkpoints/best/model --out models/better --set trajectories.max_per_prompt=4": (
        "needs a run with successes; tests/e2e/test_sft.py makes one"
    ),
    "tether eval smollm2 --env sokoban --prompts 64 --temperature 0 --json": "a model that is fetched",
    "tether eval smollm2 --data questions.jsonl": "a model that is fetched",
    "tether eval http://localhost:8000#my-model --env sokoban --concurrency 16 --out results": SERVER,
    "tether eval runs/a runs/b smollm2 --env frozen_lake --out results": "a model that is fetched; tests/unit/training/test_remote_evaluation.py",
    "tether eval my-tiny --env frozen_lake --prompts 256": "the model of another example",
    "tether export runs/my-run --out my-agent --push-to-hub me/my-agent": NETWORK,
    "tether export runs/my-run --out early --step 20": "the run has no such step; tests/unit/cli/test_export.py does it",
    "tether diagnose rollouts.jsonl --model smollm2 --out report.html": "a model that is fetched; tests/unit/cli/test_diagnose.py",
    "tether diagnose outputs/rollouts --model Qwen/Qwen2.5-0.5B-Instruct --split eval": NETWORK,
    "tether diagnose completions/ --model Qwen/Qwen2.5-0.5B-Instruct --json": NETWORK,
    "tether diagnose dump.jsonl --model smollm2 --fields prompt=input,response=output,reward=score --pattern 'Thought:(.*?)Action:'": (
        "a model that is fetched; tests/unit/cli/test_diagnose.py"
    ),
    "tether diagnose requests.jsonl --model smollm2 --group request.metadata.task_id": (
        "a model that is fetched; tests/unit/diagnostics/test_rollouts_logs.py"
    ),
    "tether doctor --model Qwen/Qwen2.5-3B-Instruct --set lora.rank=16 --out /data/runs": NETWORK,
    "tether doctor": "tests/unit/cli/test_doctor.py",
    "tether envs --check reasoning_gym:leg_counting": "the extra reasoning-gym; tests/unit/envs/test_adapters.py",
    "tether envs --check --env metamathqa --data test.parquet --fields question=Question,answer=Answer": "the extra data",
    "tether models get smollm2": NETWORK,
    "tether play searchqa --set retriever=http://127.0.0.1:8020": SERVER,
    "tether reproduce --list": "tests/unit/cli/test_reproduce.py",
    "tether reproduce table_4 --smoke": "two minutes; tests/e2e/test_reproduce.py",
    "tether reproduce table_4 --jobs 12": HOURS,
    "tether reproduce all --max-minutes 25": HOURS,
    "tether reproduce figure_5_14 --scale qwen-1.5b --seeds 0": HOURS,
    "tether reproduce table_6 --again --seeds 3-5": HOURS,
    "tether gateway runs/my-run --out runs/collected": WAITS,
    "tether gateway path/to/model --port 8031 --set rollout.max_tokens=512 --set agent.tool_format=hermes": WAITS,
    "tether serve runs/my-run": WAITS,
    "tether serve smollm2 --port 8001": WAITS,
    "tether serve runs/my-run --host 0.0.0.0": WAITS,
    "tether serve-env sokoban": WAITS,
    "tether serve-env frozen_lake --port 8011 --set slip=0.1 --set size=6": WAITS,
    "tether serve-env deepcoder --host 0.0.0.0 --allow-option difficulty": WAITS,
    "tether show runs/my-run --step 40 --failed": SHOWN,
    "tether show runs/my-run --step 40 --group 3": SHOWN,
    "tether show runs/my-run --step 40 --group 3 --member 0": SHOWN,
    'tether show runs/my-run --text "no box" --limit 5 --turns': SHOWN,
    "tether dashboard": WAITS,
    "tether dashboard runs/sweep --port 8100": WAITS,
    "tether dashboard runs/my-run": WAITS,
    "tether dashboard runs --host 0.0.0.0": WAITS,
    "tether serve-search": WAITS,
    "tether serve-search --host 0.0.0.0": WAITS,
    "tether serve-search --corpus wiki-18.jsonl --port 9000": WAITS,
    "tether warmstart --out my-tiny": "as the other, which takes less time",
    "tether COMMAND --help": "a pattern; tests/unit/cli/test_help.py asks every verb",
    "tether train frozen_lake --steps 20": "as the others",
}


def _commands() -> Iterator[Any]:
    group = typer.main.get_command(app)
    yield group
    for command in group.commands.values():  # type: ignore[attr-defined]
        yield command
        yield from getattr(command, "commands", {}).values()


def _examples() -> dict[str, str]:
    """Every example to what is piped into it."""
    found: dict[str, str] = {}
    for command in _commands():
        for line in (command.epilog or "").partition("Examples:")[2].splitlines():
            before, _, call = line.strip().partition("tether ")
            if call:
                piped = shlex.split(before.removesuffix("| "))[1] if before.startswith("echo ") else ""
                found[f"tether {call}"] = piped
    return found


EXAMPLES = _examples()
FIRST = "tether train frozen_lake --steps 20 --set rollout.group_size=8"
"""Makes the run that other examples read."""
RUN = [example for example in EXAMPLES if example not in NOT_RUN and example != FIRST]


def test_what_is_not_run_is_an_example() -> None:
    assert len(EXAMPLES) > 60 and {FIRST, *NOT_RUN} <= set(EXAMPLES)
    waiting = [example for example in RUN if example.split()[1].startswith(("serve", "gateway", "dashboard"))]
    assert not waiting, "they would be waited for without end"


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "COMMAND" not in example])
def test_an_example_parses(example: str) -> None:
    words = _words(example)
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    params = command.make_context("tether", list(words)).params
    if command.name == "train" and not params["resume"] and not params["agent"] and "://" not in (params["env"] or ""):
        names = [params[name] for name in ("env", "model", "algo", "filter_", "steps", "seed")]
        names[1] = "tiny" if names[1] == "smollm2" else names[1]
        from tether.core.config import find_config

        config = find_config(params["config"]) if params["config"] else None
        resolve_settings(config, merge(named_settings(*names), parse_overrides(params["set_"] or [])), {})


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _call([*shlex.split(FIRST)[1:], *SMALL_RUN, "--set", "rollout.max_tokens=40", "--out", "runs/my-run", "--quiet"])
        _call(["eval", "tiny", "--env", "frozen_lake", *SMALL["eval"], "--out", "results"])
        for copy in ("filtered", "unfiltered"):
            shutil.copytree("runs/my-run", f"runs/{copy}")
        Path("test.jsonl").write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(5)))
        Path("solution.py").write_text("print('no solution')\n")
        shutil.copy(Path(__file__).parents[3] / "examples" / "custom_environment.py", "my_module.py")
        Path("my_module.py").write_text(Path("my_module.py").read_text().replace("SortNumbers", "MyEnv"))
        before, search = set(sys.modules), list(sys.path)
        yield folder
        sys.path[:] = search
        for name in set(sys.modules) - before:
            if name == "my_module":
                del sys.modules[name]


def _words(example: str) -> list[str]:
    """What a shell gives to `tether`."""
    return shlex.split(example.partition(" > ")[0])[1:]


def _call(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code, words


@pytest.mark.long
@pytest.mark.parametrize("example", RUN)
def test_an_example_runs(example: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{EXAMPLES[example]}\n" if EXAMPLES[example] else ""))
    words = _words(example)
    if "--out" in words and (place := workplace / words[words.index("--out") + 1]).is_dir():
        shutil.rmtree(place)  # of another example with the same folder
    _call([*words, *SMALL.get(words[0], [])])
    assert "Traceback" not in capsys.readouterr().err
