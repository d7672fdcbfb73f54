"""Environments of other packages: played for real where the package is installed, and what is said where it is not."""

import random
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tether.core.errors import BadInput, EnvironmentFailure, MissingDependency, UnknownName
from tether.core.types import Step
from tether.envs.adapters import catalog
from tether.envs.adapters.json_actions import read_object, without_titles, written
from tether.envs.checker.checks import check_env
from tether.envs.registry import check_name, check_received, env_factory, make_env
from tether.envs.remote.vector import VectorEnv

pytestmark = pytest.mark.filterwarnings("ignore")  # what the packages' own code warns of

# ------------------------------------------------------------------------------------------------------------------- names


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency) as error:
        make_env("reasoning_gym:leg_counting")
    line = "environment 'reasoning_gym:leg_counting' needs reasoning-gym, which is not installed; run: pip install \"tether-agents[reasoning-gym]\""
    assert str(error.value) == line


def test_a_package_without_a_name_is_told_the_form() -> None:
    with pytest.raises(UnknownName, match="did you mean 'reasoning_gym:NAME'"):
        check_name("reasoning_gym")


def test_a_command_that_only_a_file_names_is_not_started() -> None:
    with pytest.raises(BadInput, match="starts a program for it; if that is what you want, name it yourself"):
        check_received("mcp:python server.py", "'config.yaml'")
    for harmless in ("mcp:http://127.0.0.1:1/mcp", "reasoning_gym:leg_counting", "openenv:http://127.0.0.1:1", "textarena:Nim-v0"):
        check_received(harmless, "'config.yaml'")


def test_json_actions() -> None:
    assert read_object('{"a": {"b": [1, "\\ud800"]}}') == {"a": {"b": [1, "?"]}}
    for text, why in (("7", "it is int"), ("[1]", "it is list"), ("[" * 100_000, "nested too deeply"), ("x", "Expecting value")):
        with pytest.raises(ValueError, match=why):
            read_object(text)
    assert written({"said": "hi", "left": 0, "metadata": {}, "seen": [1, None]}) == "said: hi\nleft: 0\nseen: [1, null]"
    schema = {"title": "T", "properties": {"title": {"title": "Title", "type": "string"}, "metadata": {"type": "object"}}}
    assert without_titles(schema, "metadata") == {"properties": {"title": {"type": "string"}}}


# ----------------------------------------------------------------------------------------------------------- reasoning_gym


@pytest.fixture
def reasoning_gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


@pytest.mark.parametrize("task", ["leg_counting", "gcd", "maze", "word_ladder", "propositional_logic", "prime_factorization"])
def test_a_task_shows_its_question_and_scores_as_the_package_does(task: str, reasoning_gym: Any) -> None:
    env: Any = make_env(f"reasoning_gym:{task}")
    for seed in range(3):
        shown = env.reset(seed).text
        entry = env.item.row
        assert entry["question"] in shown and make_env(f"reasoning_gym:{task}").reset(seed).text == shown
        entries = reasoning_gym.create_dataset(task, seed=0, size=10_000)
        again = entries[entry["metadata"]["source_index"]]
        assert again["question"] == entry["question"]
        wrong = env.step("surely wrong")
        assert wrong.reward < 1 and not wrong.success and wrong.done
        if entry["answer"] is not None:
            env.reset(seed)
            right = env.step(entry["answer"].strip())
            assert (right.reward, right.success, right.done) == (1.0, True, True)


def test_splits_share_no_question(reasoning_gym: Any) -> None:
    seen = {split: {_instance(env, seed) for seed in range(60)} for split in ("train", "validation", "test") for env in [_coins(split)]}
    assert not (seen["train"] & seen["validation"] or seen["train"] & seen["test"] or seen["validation"] & seen["test"])


def _coins(split: str) -> Any:
    return make_env("reasoning_gym:coin_flip", split=split)  # a task with few questions: seeds alone would not keep them apart


def _instance(env: Any, seed: int) -> str:
    env.reset(seed)
    return str(env.instance)


def test_an_answer_that_the_scorer_fails_at_is_worth_nothing_and_on_record(reasoning_gym: Any) -> None:
    env = make_env("reasoning_gym:prime_factorization")
    env.reset(0)
    step = env.step("two times three")
    assert (step.reward, step.info["valid"]) == (0.0, False)
    assert step.info["grading_error"].startswith("ValueError: invalid literal for int()")


@pytest.mark.parametrize(
    ("task", "answer"),
    [("complex_arithmetic", "NaN"), ("n_queens", "open('made', 'w')"), ("puzzle24", "2**9**9**9"), ("countdown", "1" + "+1" * 20_000)],
)
def test_what_would_harm_or_fool_a_scorer_is_not_given_to_it(
    task: str, answer: str, reasoning_gym: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = make_env(f"reasoning_gym:{task}")
    env.reset(1)
    step = env.step(answer)
    assert (step.reward, step.success, step.info["valid"]) == (0.0, False, False)
    assert step.info["grading_error"] == "the answer was not given to the scorer" and not list(tmp_path.iterdir())


def test_a_scorer_that_takes_everything_is_refused(reasoning_gym: Any) -> None:
    with pytest.raises(BadInput, match="takes any answer for right"):
        make_env("reasoning_gym:game_of_life_halting").reset(0)


def test_options_are_those_of_the_dataset(reasoning_gym: Any) -> None:
    env: Any = make_env("reasoning_gym:leg_counting", min_animals=1, max_animals=1, seed=7, size=100)
    env.reset(0)
    assert len(env.item.row["metadata"]["animals"]) == 1
    mixed = make_env(
        "reasoning_gym:composite", datasets=[{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 1, "config": {}}]
    )
    assert {"Common" in mixed.reset(seed).text for seed in range(20)} == {True}
    with pytest.raises(BadInput, match="did you mean 'min_animals'"):
        make_env("reasoning_gym:leg_counting", min_animal=1)
    with pytest.raises(BadInput, match="shows its options"):
        make_env("reasoning_gym:leg_counting", min_animals=9, max_animals=2)
    with pytest.raises(UnknownName, match="did you mean 'leg_counting'"):
        make_env("reasoning_gym:leg_countin")


@pytest.mark.slow
def test_the_checker_passes_a_task_and_it_runs_in_processes(reasoning_gym: Any) -> None:
    report = check_env("reasoning_gym:leg_counting", episodes=80)
    assert report.ok, str(report)
    with VectorEnv("reasoning_gym:leg_counting", 2) as vector:
        assert vector.work == "process"
        vector.reset([0, 1])
        assert all(isinstance(step, Step) for step in vector.step(["4", "5"]))


# --------------------------------------------------------------------------------------------------------------- textarena


@pytest.fixture
def textarena() -> Any:
    return pytest.importorskip("textarena", reason="textarena is not installed")


def test_a_game_for_one_player(textarena: Any) -> None:
    env: Any = make_env("textarena:GuessTheNumber-v0", max_turns=10)
    outside = random.getstate()
    first = env.reset(1).text
    assert "between" in first.lower() and env.reset(1).text == first
    secret = env._game.state.game_state["game_number"]
    miss = env.step(str(secret % 20 + 1))
    assert miss.info["valid"] and not miss.done
    step = env.step(f"[{secret}]")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert random.getstate() == outside
    env.reset(1)
    assert not env.step("a number").info["valid"] and not env.step("9" * 5000).info["valid"]


def test_no_game_remembers_the_one_before(textarena: Any) -> None:
    env = make_env("textarena:KuhnPoker-v0")
    seen = [env.reset(seed).text for seed in range(6)]
    assert [env.reset(seed).text for seed in range(6)] == seen and len(set(seen)) > 1


def test_a_game_for_two_against_the_random_opponent(textarena: Any) -> None:
    def played(env_seed: int, player: int = 0) -> tuple[str, ...]:
        env = make_env("textarena:TicTacToe-v0", player=player)
        seen = [env.reset(3, env_seed=env_seed).text]
        for cell in range(9):
            step = env.step(f"[{cell}]")
            seen.append(step.observation.text)
            if step.done:
                break
        return tuple(seen)

    assert played(1) == played(1) and len({played(seed) for seed in range(4)}) > 1
    assert "Player 0" in played(1, player=1)[0]


def test_an_opponent_that_breaks_the_rules_is_no_evidence(textarena: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_opponents.py").write_text("def fool(shown, rng):\n    return 'I resign'\n\ndef first(shown, rng):\n    return '[8]'\n")
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("textarena:TicTacToe-v0", opponent="my_opponents:fool")
    env.reset(0)
    with pytest.raises(EnvironmentFailure, match="made an invalid move, which ends the game; give opponent=module:function"):
        env.step("[0]")
    env = make_env("textarena:TicTacToe-v0", opponent="my_opponents:first")
    env.reset(0)
    assert not env.step("[0]").done


@pytest.mark.parametrize(
    ("game", "said"),
    [
        ("Wordl-v0", "did you mean 'Wordle-v0'"),
        ("Snake-v0", "is no game for one player or for two"),
        ("GuessWho-v0", "cannot make this game: ValueError: OpenRouter API key not found"),
    ],
)
def test_what_cannot_be_played_of_textarena_is_one_line(game: str, said: str, textarena: Any) -> None:
    with pytest.raises(BadInput, match=said) as error:
        make_env(f"textarena:{game}")
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------------------------------- openenv

OPENENV_SERVER = """
import random, sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Told(Observation):
    text: str = ""

class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, most=1000, **more):
        self.number = random.Random(seed).randint(1, most)
        return Told(text=f"Its square ends in {self.number**2 % 1000}.")

    def step(self, action):
        if action.number == 13:
            raise RuntimeError("an unlucky number")
        right = action.number == self.number
        return Told(text="right" if right else "wrong", done=right, reward=float(right))

uvicorn.run(create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=2), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def openenv_address(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "server.py"
    program.write_text(OPENENV_SERVER)
    server = subprocess.Popen([sys.executable, str(program), str(port)])
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{port}/schema")
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_an_openenv_server_is_played_by_json_actions(openenv_address: str) -> None:
    name = f"openenv:{openenv_address}"
    env: Any = make_env(name, reset={"most": 9}, task="Guess.", max_turns=20)
    assert '"number": {"type": "integer"}' in env.instructions and "metadata" not in env.instructions
    first = env.reset(1).text
    assert "Its square ends in" in first and env.reset(1).text == first
    for wrong in ("7", '{"nummer": 7}', '{"number": "x"}'):
        step = env.step(wrong)
        assert not step.info["valid"] and "schema" in step.observation.text
    steps = []
    while not steps or not steps[-1].done:
        steps.append(env.step(f'{{"number": {len(steps) + 1}}}'))
    assert (steps[-1].reward, steps[-1].success, steps[-1].info["truncated"]) == (1.0, True, False)
    env.reset(2)
    with pytest.raises(EnvironmentFailure, match="an unlucky number"):
        env.step('{"number": 13}')
    assert env.reset(1).text == first  # it has connected again
    others = [make_env(name), make_env(name)]
    others[0].reset(0)
    with pytest.raises(EnvironmentFailure, match="if it is full, start it with a larger max_concurrent_envs"):
        others[1].reset(0)
    env.close()
    with VectorEnv(env_factory(name).make, 1) as vector:
        assert isinstance(vector.reset([1])[0].text, str)


def test_an_openenv_address_where_nobody_answers() -> None:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    with pytest.raises(BadInput, match="no OpenEnv server answers there"):
        make_env("openenv:http://127.0.0.1:1")
    with pytest.raises(BadInput, match="write the server's address"):
        make_env("openenv:localhost:8000")


# --------------------------------------------------------------------------------------------------------------------- mcp

MCP_SERVER = '''
import os
from mcp.server import MCPServer

app = MCPServer("shop")

@app.tool()
def price(code: str) -> str:
    """The price of an article."""
    if code == "crash":
        os._exit(3)
    return {"A-1": "12 dollars", "A-2": "7 dollars"}.get(code, f"unknown to {os.getpid()}")

app.run()
'''


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.replace("'", '"')


@pytest.mark.slow
def test_the_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    program, rows = tmp_path / "server.py", tmp_path / "rows.jsonl"
    program.write_text(MCP_SERVER)
    rows.write_text('{"question": "What does A-1 cost?", "answer": ["12", "12 dollars"]}\n{"question": "And A-2?", "answer": 7}\n')
    name = f"mcp:{shlex.quote(sys.executable)} {shlex.quote(str(program))}"
    env: Any = make_env(name, data=str(rows), split="all", env=["PYTHONPATH"])
    try:
        assert '{"name": "price", "description": "The price of an article.", "parameters":' in env.instructions
        assert env.reset(0).text == "Turn 1 of 5.\nWhat does A-1 cost?" and env.reset(2).text == env.reset(0).text
        assert env.step(call("price", code="A-1")).observation.text == "Turn 2 of 5.\n12 dollars"
        for wrong, said in ((call("prize"), "did you mean 'price'"), ("<tool_call>price</tool_call>", "no JSON object"), ("", "No answer")):
            step = env.step(wrong)
            assert not step.info["valid"] and said in step.observation.text
        step = env.step("<answer>12</answer>")
        assert (step.reward, step.done, step.success, step.info["calls"]) == (1.0, True, True, 1)
        env.reset(1)
        first = env.step(call("price", code="?")).observation.text
        with pytest.raises(EnvironmentFailure, match="Connection closed"):
            env.step(call("price", code="crash"))
        env.reset(1)
        assert env.step(call("price", code="?")).observation.text != first  # another process
        assert not env.step("<answer>8</answer>").success
    finally:
        env.close()
    with pytest.raises(EnvironmentFailure, match="the server does not start"):
        make_env("mcp:no-such-program")


# --------------------------------------------------------------------------------------------------------------- verifiers

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData]):
    NEEDS_CONTAINER = {container}

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

class SumsConfig(vf.TasksetConfig):
    most: int = 60

class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(self.config.most):
            yield SumTask(SumData(prompt=f"What is {{number}} + {{number + 1}}?", system_prompt="Compute.", answer=2 * number + 1), self.config.task)
"""


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_scored_by_its_own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    (tmp_path / "my_sums.py").write_text(TASKSET.format(container=False))
    (tmp_path / "my_boxes.py").write_text(TASKSET.format(container=True))
    monkeypatch.syspath_prepend(tmp_path)
    env: Any = make_env("verifiers:my-sums", split="all", config={"most": 7})
    assert env.num_instances == 7 and env.reset(3).text == "Turn 1 of 1.\nCompute.\n\nWhat is 3 + 4?"
    right = env.step("7")
    assert (right.reward, right.success, right.done) == (1.0, True, True)
    env.reset(3)
    assert env.step("8\ud800").reward == 0.0
    with pytest.raises(BadInput, match="need a container, so it is no single-turn taskset; run it against `tether serve`"):
        make_env("verifiers:my-boxes")
    with pytest.raises(UnknownName, match="verifiers has no taskset 'my-sumz'"):
        make_env("verifiers:my-sumz")
    with pytest.raises(BadInput, match="mosst Extra inputs are not permitted"):
        make_env("verifiers:my-sums", config={"mosst": 7})
