"""The speed benchmarks: what they count is right, and each of them runs and says what it measured."""

import importlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = ["--model", "tiny", "--device", "cpu", "--prompt", "12", "--response", "5", "--turns", "2", "--observed", "4"]
MODULES = (
    "shapes",
    "workloads",
    "synthetic_env",
    "rollout",
    "learner",
    "iteration",
    "growth",
    "cross_score",
    "simulate_scaling",
    "memory_table",
    "data_loading",
    "against_transformers",
    "real_run",
    "vision",
    "vllm_peer",
)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """The scripts import each other as modules beside them; they leave no trace for other tests."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    for name in MODULES:
        sys.modules.pop(name, None)


def module(name: str) -> Any:
    return importlib.import_module(name)


def run(name: str, arguments: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of a script, as it wrote them."""
    path = tmp_path / "rows.json"
    module(name).main([*arguments, "--json", str(path)])
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def size(**changes: int) -> Any:
    made = {"layer_weights": 10, "head_weights": 3, "attention_width": 2, "num_layers": 1, "weight_bytes": 100, "cache_bytes": 5}
    return module("shapes").ModelSize(**{**made, **changes})


# --- data files ---


def test_data_loading_says_how_many_rows_and_what_they_take(capsys: pytest.CaptureFixture[str]) -> None:
    module("data_loading").main(["--rows", "30", "--format", "jsonl"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "30 rows, 0 MiB of jsonl"
    assert lines[1].startswith("loaded in ") and lines[2].startswith("peak memory ")


# --- simulation ---


def test_a_simulated_engine_by_hand() -> None:
    """A step takes 1 ms, a feed 10 ms, whatever the rows: 3 tokens, half a second in the environment, 2 tokens. A second row ends with the first."""
    simulation = module("simulate_scaling")
    machine = simulation.Machine(bandwidth=math.inf, launch=1e-3, feed=10e-3)
    engine = simulation.Engine(machine, simulation.Model(), simulation.Work())
    engine.queue.extend([simulation.Conversation(0, [3, 2], [0.5, 9.0]), simulation.Conversation(0, [3], [9.0])])
    over = []
    while engine.has_work():
        over += [(round(engine.now, 6), len(done)) for done in [engine.advance(0)] if done]
    assert over == [(0.013, 1), (0.525, 1)]  # 10 + 3 ms; then 500 + 10 + 2 ms
    assert engine.tokens == 8 and engine.busy == pytest.approx(0.025)


def test_memory_and_rates_by_hand() -> None:
    """7.62e9 weights on 8 cards: 2 + 4 + 12/8 bytes each with zero1, 2 + 16/8 with fsdp, beside cache, logits and what is gathered."""
    table = module("memory_table")
    sizes = table.shape("7B")
    assert sizes.parameters == 7_615_616_512
    zero1, fsdp = (table.plan(sizes, 8, sharding).needs for sharding in ("zero1", "fsdp"))
    for needs, bytes_each in ((zero1, 7.5), (fsdp, 4.0)):
        assert sum(needs[what] for what in ("weights", "optimiser", "gradients")) == pytest.approx(bytes_each * sizes.parameters, rel=1e-9)
    machine = module("simulate_scaling").Machine(bandwidth=1e12, flops=6e12, launch=0.0, network=1e9)
    found = table.rates(sizes, machine)
    cache = 128 * 1000 * 2 * sizes.cached
    assert found.decoded == pytest.approx(128 / ((2 * sizes.parameters + cache) / 1e12))
    assert found.trained == pytest.approx(1e12 / sizes.parameters)
    assert found[2:] == pytest.approx([n * sizes.parameters / 1e9 for n in (6, 8, 4)])
    page = (BENCHMARKS.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    for line in (*table.memory_table({"7B": sizes}, 80.0), *table.rate_table({"7B": sizes}, module("simulate_scaling").Machine())):
        assert line in page


def test_a_simulated_update_by_hand() -> None:
    simulation = module("simulate_scaling")
    machine, model = simulation.Machine(flops=1e12, network=1e9), simulation.Model(parameters=1e9)
    assert simulation.update_seconds(machine, model, 1000, 1) == pytest.approx(6.0)  # 6 x 1e9 x 1000 / 1e12
    assert simulation.update_seconds(machine, model, 1000, 4) == pytest.approx(1.5 + 3.0)  # a quarter, and 4 bytes x 1e9 x 3/4 / 1e9


def test_a_divided_update_and_a_server_of_several_gpus_by_hand() -> None:
    simulation = module("simulate_scaling")
    machine, model = (
        simulation.Machine(flops=1e12, network=1e9, bandwidth=1e12, all_reduce=1e-3, launch=0.0),
        simulation.Model(1e9, 0, 5, 4),
    )
    one = simulation.MICRO_TOKENS  # of each of two ranks: 6 x 1e9 x 16,384 / 1e12 s hide 8 bytes x 1e9 / 1e9; then 4 bytes
    assert simulation.divided_update_seconds(machine, model, 2 * one, 2) == pytest.approx(98.304 + 4.0)
    assert simulation.divided_update_seconds(machine, model, 200, 2) == pytest.approx(8.0 + 4.0)  # hides nothing
    engine = simulation.Engine(machine, model, simulation.Work())
    assert engine.step_seconds() == pytest.approx(2 * 5 * 1e-3 + 2e9 / 4e12)
    work = simulation.Work(batch=8, group_size=4)
    quick, slow = (simulation.simulate(8, 0, 0.5, work, simulation.Machine(publish=rate), model, divided=True) for rate in (math.inf, 1e9))
    assert slow.step_seconds - quick.step_seconds == pytest.approx(2.0) and quick.samplers == 4  # 2 bytes x 1e9 / 1e9


def test_a_simulated_publish_reaches_one_server_after_the_other_and_batches_are_trained_on_in_their_order() -> None:
    """So no step is shorter than one publish to all servers, however far ahead they sample: 4 x 2 bytes x 1e9 / 1e9."""
    simulation = module("simulate_scaling")
    work = simulation.Work(batch=16, group_size=4, straggler=0.2, env_seconds=0.02)
    for seed in range(4):
        found = simulation.simulate(
            8, 2, 0.5, work, simulation.Machine(publish=1e9), simulation.Model(1e9, 0, 5), batches=9, seed=seed, divided=True
        )
        assert found.step_seconds > 8.0


def test_the_simulated_engine_is_near_the_measured_ones() -> None:
    rows = [line.split("|") for line in module("simulate_scaling").beside_measured()][2:]
    ratios = {row[1].strip(): float(row[4]) for row in rows}
    assert all(0.9 < ratio < (1.1 if name.startswith("vLLM") else 1.4) for name, ratio in ratios.items()), ratios


def test_staleness_is_counted_and_a_simulation_repeats() -> None:
    simulation = module("simulate_scaling")
    work = simulation.Work(groups=1, group_size=4)
    together, apart = (simulation.simulate(4, staleness, 0.5, work, simulation.Machine(), simulation.Model()) for staleness in (0, 2))
    assert (together.samplers, together.mean_staleness) == (4, 0.0)
    assert apart.samplers == 2 and 0 < apart.mean_staleness <= 2
    assert apart == simulation.simulate(4, 2, 0.5, work, simulation.Machine(), simulation.Model())


# --- counting ---


def test_tokens_see_all_before_them_and_themselves() -> None:
    for start, count in ((0, 1), (0, 4), (3, 2), (5, 0)):
        assert module("shapes").seen_by(start, count) == sum(start + n + 1 for n in range(count))


def test_flops_are_those_that_torch_counts(tiny_model: Any) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    num = 24
    tiny_model.set_attn_implementation("eager")  # written as products, which torch counts; without regard to the mask
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        tiny_model(input_ids=torch.arange(num)[None], use_cache=False)
    expected = module("shapes").size_of(tiny_model).forward_flops(num, num, num * num)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)  # torch also counts the angles of the positions


def test_size_counts_bytes_of_weights_and_cache(tiny: Any) -> None:
    config, found = tiny.model.config, module("shapes").size_of(tiny.model)
    layer = 4 * 192 * 192 + 3 * 192 * 512
    assert found.layer_weights == config.num_hidden_layers * layer
    assert found.weight_bytes == 4 * (found.layer_weights + 578 * 192)
    assert found.cache_bytes == 4 * 2 * 4 * 48 * config.num_hidden_layers


def test_floor_of_a_rollout_by_hand() -> None:
    """One prompt of 3 tokens for two conversations, 2 out, 1 observed, 2 out."""
    work = module("workloads")
    groups = work.written_groups(work.Conversations(groups=1, group_size=2, prompt=3, response=2, turns=2, observed=1), 50)
    slow_memory, slow_products = module("shapes").Machine("m", 1e9, 1.0), module("shapes").Machine("m", 1.0, 1e9)
    fed, seen_fed = 3 + 2 * 1, (1 + 2 + 3) + 2 * 6
    seen = 2 * (4 + 5 + 7 + 8)
    floor = work.rollout_floor(groups, size(), slow_memory)
    assert floor.decode == pytest.approx(4 * 100 + seen * 5)
    floor = work.rollout_floor(groups, size(), slow_products)
    assert floor.decode == pytest.approx(2 * 8 * 10 + 2 * 8 * 3 + 4 * seen * 2)
    assert floor.prefill == pytest.approx(2 * fed * 10 + 4 * seen_fed * 2)


def test_training_costs_three_forward_passes() -> None:
    work = module("workloads")
    groups = work.written_groups(work.Conversations(groups=2, group_size=1, prompt=3, response=2), 50)
    one_row = 2 * 5 * 10 + 4 * 15 * 2
    assert work.train_flops(groups, size(), all_predicted=False) == 3 * 2 * (one_row + 2 * 2 * 3)
    assert work.train_flops(groups, size(), all_predicted=True) == 3 * 2 * (one_row + 2 * 5 * 3)


def test_growth_of_the_work_it_counts() -> None:
    growth, work = module("growth"), module("workloads").Conversations(groups=2, group_size=3, prompt=4, response=2, turns=2, observed=1)
    bench = type("Bench", (), {"size": size()})
    groups = module("workloads").written_groups(work, 50)
    floor = module("workloads").rollout_floor(groups, size(), module("shapes").Machine("m", 1.0, 1e12))
    assert growth.rollout_flops(work, bench) == pytest.approx(floor.prefill + floor.decode)
    pairs = 2 * 6
    seen = 2 * (1 + 2 + 3 + 4) + pairs * (5 + 6)
    assert growth.cross_score_flops(work, bench) == 2 * (2 * 4 + pairs * 2) * 10 + 2 * pairs * 2 * 3 + 4 * seen * 2


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7])
def test_exponent_of_a_power_law(power: float) -> None:
    sizes = [1.0, 2.0, 4.0, 8.0]
    assert module("growth").exponent(sizes, [3.0 * s**power for s in sizes]) == pytest.approx(power)


def test_growth_is_fitted_to_the_larger_half() -> None:
    growth = module("growth")
    points = [growth.Point("turns", "rollout", s, max(8.0, float(s * s)), float(s)) for s in (8, 1, 4, 2)]  # 8, 8, 16, 64 seconds
    [row] = growth.rows_of(points)
    assert (row["sizes"], row["first, s"], row["last, s"]) == ("1 to 8", 8.0, 64.0)
    assert row["exponent of seconds"] == pytest.approx(1.5)
    assert row["exponent of products"] == pytest.approx(1.0)


def test_table() -> None:
    rows = [{"who": "a", "rate": 12345.6}, {"who": "b", "share": 0.12345}]
    assert module("shapes").markdown(rows) == "| who | rate | share |\n|---|---|---|\n| a | 12,346 | - |\n| b | - | 0.123 |"


# --- workloads ---


def test_conversations_have_their_lengths_on_the_real_engine(tiny: Any) -> None:
    from tether.core.protocols import Sampling

    work = module("workloads")
    sizes = work.Conversations(groups=2, group_size=2, prompt=9, response=6, turns=2, observed=3)
    tokenizer = work.endless(tiny.tokenizer)
    assert tokenizer.eos_token_id >= tiny.model.config.vocab_size and tiny.tokenizer.eos_token_id != tokenizer.eos_token_id
    played = work.make_conversations(sizes, 578)
    work.engine_for(tiny.model, tiny.tokenizer, sizes).run(played, Sampling(1.0, sizes.response))
    groups = work.grouped(played)
    assert work.num_sampled(groups) == 4 * 2 * 6
    for group in groups:
        assert len({t.turns[0].context_ids for t in group.trajectories}) == 1
        for trajectory in group.trajectories:
            assert [len(turn.context_ids) for turn in trajectory.turns] == [9, 3]
            assert len(trajectory.sequences) == 1 and len(trajectory.sequences[0].token_ids) == sizes.longest
    assert groups[0].trajectories[0].turns[0].context_ids != groups[1].trajectories[0].turns[0].context_ids


def test_words_depend_on_the_run_and_on_nothing_else() -> None:
    work = module("workloads")
    sizes = work.Conversations(groups=1, group_size=2, prompt=9, response=6)
    first, again, other = (work.make_conversations(sizes, 500, run) for run in (0, 0, 1))
    assert [d.begin() for d in first] == [d.begin() for d in again] != [d.begin() for d in other]
    assert first[0].uniforms.random() == again[0].uniforms.random() != first[1].uniforms.random()


def test_ragged_batches_are_ragged_within_bounds() -> None:
    work = module("workloads")
    sizes = work.Conversations(groups=4, group_size=8, prompt=9, response=20, turns=2, observed=3)
    lengths = [len(turn.response_ids) for g in work.written_groups(sizes, 500, 0.35) for t in g.trajectories for turn in t.turns]
    assert (min(lengths), max(lengths)) == (13, 20)
    even = [t for g in work.written_groups(sizes, 500) for t in g.trajectories]
    assert {t.reward for t in even} == {0.0, 1.0} and {t.num_sampled for t in even} == {40}
    assert even[0].turns[0].logprobs == pytest.approx([-math.log(500)] * 20)


def test_synthetic_environment_is_lawful_and_its_groups_differ() -> None:
    env_module = module("synthetic_env")
    env = env_module.FixedTask(env_module.FixedOptions(max_turns=2, first_words=3, words=1))
    assert env.reset(7).text == "000007 go go go"
    step = env.step("anything")
    assert (step.observation.text, step.reward, step.done) == ("000007 go", 0.0, False)
    shares = []
    for seed in range(24):
        rewards = []
        for env_seed in range(16):
            env.reset(seed, env_seed=env_seed)
            env.step("")
            last = env.step("")
            assert last.done and last.reward == float(last.success)
            rewards.append(last.reward)
        shares.append(statistics.mean(rewards))
    assert sum(share in (0.0, 1.0) for share in shares) >= 4 and any(0.2 < share < 0.8 for share in shares)


# --- each script ---


def test_rollout_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(
        "rollout", [*SIZES, "--rows", "4", "--group", "2", "--repeats", "1", "--peer-tokens", "3", "--vllm-python", "none"], tmp_path
    )
    ours, generate, vllm, floor = rows
    assert ours["who"].startswith("tether, ") and ours["tokens"] == 4 * 2 * 5
    assert ours["sampled tokens/s"] == pytest.approx(40 / ours["seconds"])
    assert generate["who"] == "transformers generate (3 tokens a turn timed)" and generate["seconds"] > 0
    assert generate["tether is faster by"] == pytest.approx(generate["seconds"] / ours["seconds"])
    assert vllm["who"] == "vLLM: left out" and floor["who"] == "floor"
    assert ours["share of the floor"] == pytest.approx(floor["seconds"] / ours["seconds"])
    printed = capsys.readouterr().out
    assert printed.startswith("| model | device, precision | workload | who |") and len(printed.splitlines()) == 6


def test_rollout_of_a_shape_names_what_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    monkeypatch.setitem(module("shapes").SHAPES, "nano", config)
    monkeypatch.setitem(sys.modules, "vllm", None)  # the way to say that it cannot be imported
    arguments = ["--model", "shape:nano", "--device", "cpu", "--dtype", "float32", "--rows", "2", "--prompt", "5", "--response", "3"]
    ours, generate, vllm, _ = run("rollout", [*arguments, "--repeats", "1", "--peer-tokens", "0"], tmp_path)
    assert ours["device, precision"].endswith("float32") and ours["workload"] == "2, 5 in, 3 out"
    assert (generate["who"], vllm["who"]) == ("transformers generate: left out", "vLLM: not installed")


FAKE_VLLM = """
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **options): self.options = options
class Output:
    def __init__(self, ids): self.outputs = [type("Sequence", (), {"token_ids": ids})]
class LLM:
    def __init__(self, **options):
        print("a log line on stdout")
        assert options["load_format"] == "dummy" and options["max_num_seqs"] == 4
    def generate(self, prompts, sampling, use_tqdm):
        self.lengths = getattr(self, "lengths", []) + [len(p["prompt_token_ids"]) for p in prompts]
        assert self.lengths[-1] in (12, 12 + 5 + 4) and sampling.options["ignore_eos"]
        return [Output([0] * sampling.options["max_tokens"]) for _ in prompts]
"""


@pytest.mark.long
def test_vllm_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is not here; something that is called as it is called answers."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = [*SIZES, "--rows", "4", "--group", "2", "--repeats", "1", "--peer-tokens", "0", "--vllm-python", sys.executable]
    _, _, vllm, _ = run("rollout", arguments, tmp_path)
    assert vllm["who"] == "vLLM 0.0" and vllm["sampled tokens/s"] == pytest.approx(40 / vllm["seconds"])
    (tmp_path / "vllm.py").write_text("raise SystemExit(3)", encoding="utf-8")
    assert run("rollout", arguments, tmp_path)[2]["who"] == "vLLM: failed, exit code 3"


@pytest.mark.long
def test_learner_of_both_algorithms_and_batches(tmp_path: Path) -> None:
    batches = ["--even-rows", "2", "--even-response", "6", "--groups", "2", "--group", "2"]
    rows = run("learner", [*SIZES, *batches, "--repeats", "1", "--plain-rows", "2"], tmp_path)
    assert [row["who"] for row in rows[:4]] == ["tether grpo", "tether grpo", "tether ppo", "tether ppo"]
    assert [row["batch"].split(":")[0] for row in rows] == ["even", "ragged"] * 3
    for row in rows[:4]:
        assert row["updates left out"] == 0 and 0 < row["needed"] < row["share of peak"]
        assert row["forward and backward"] > row["tokens/s"]
    assert rows[0]["batch"] == "even: 2 rows, 28 to 28 tokens" and rows[0]["tokens/s"] == pytest.approx(56 / rows[0]["seconds"])
    assert rows[5]["who"] == "transformers, checkpointing (2 of 4 rows timed)"


def test_learner_step_is_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = module("workloads").Conversations(groups=2, group_size=2, prompt=6, response=4)
    monkeypatch.setattr(module("learner"), "GRPO_STEP", small)
    ours, trl = run("learner", ["--model", "tiny", "--device", "cpu", "--step", "--repeats", "1", "--trl-python", "none"], tmp_path)
    assert ours["step"] == "2 prompts x 2, 6 in, 4 out" and trl["who"] == "TRL: left out"
    assert ours["seconds"] == pytest.approx(ours["sampling"] + ours["learning"])


@pytest.mark.long
def test_iteration_trains_with_and_without_the_filter(tmp_path: Path) -> None:
    sizes = ["--model", "tiny", "--device", "cpu", "--prompt", "50", "--response", "8", "--turns", "2", "--observed", "30"]
    everything, filtered = run("iteration", [*sizes, "--groups", "2", "--group", "3", "--steps", "1"], tmp_path)
    assert everything["tokens sampled"] == filtered["tokens sampled"] == 2 * 3 * 2 * 8
    assert everything["groups kept"] == 1.0 and filtered["groups kept"] < 1.0
    for row in (everything, filtered):
        assert row["rollout"] > 0 and row["diagnosis"] > 0
        assert row["seconds"] >= row["rollout"] + row["diagnosis"] + row["update"]
    assert filtered["saved"] == pytest.approx(1 - filtered["seconds"] / everything["seconds"])


def test_growth_measures_what_it_doubles(tmp_path: Path) -> None:
    arguments = [
        "--axes",
        "turns",
        "prompts",
        "--device",
        "cpu",
        "--doublings",
        "1",
        "--repeats",
        "1",
        "--scale",
        "0.1",
        "--out",
        str(tmp_path / "out"),
    ]
    rows = run("growth", arguments, tmp_path)
    found = [(row["doubled"], row["stage"]) for row in rows]
    assert found[:2] == [("turns", "rollout"), ("turns", "update")] and len(found) == 2 + 3
    assert "plotly" in (tmp_path / "out" / "growth.html").read_text(encoding="utf-8")
    [scoring] = [row["exponent of products"] for row in rows if row["stage"] == "cross-scoring"]
    assert 1.7 < scoring < 2  # pairs are prompts x prompts x group; the prompts themselves are few


def test_cross_score_prints_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "2", "--group", "2", "--prompt-tokens", "9", "--reasoning-tokens", "4", "--plain-pairs", "2"]
    module("cross_score").main(["--model", "tiny", "--device", "cpu", *sizes, "--header"])
    assert "| 2 x 2, 9, 4 |" in capsys.readouterr().out.splitlines()[-1]


def test_the_engine_samples_what_transformers_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--model", "tiny", "--device", "cpu", "--dtype", "float32", "--prompts", "2", "--tokens", "12", "--guesses", "0", "3"]
    plain, guessed = run("against_transformers", sizes, tmp_path)
    assert plain["greedy tokens equal"] == guessed["greedy tokens equal"] == "24 of 24"
    assert plain["log-probs, greedy: mean (largest)"] == guessed["log-probs, temperature 1: mean (largest)"] == "0.00000 (0.0000)"
    # One token too few before the first log-prob: the comparison has to notice.
    right = module("against_transformers").logprobs
    monkeypatch.setattr(module("against_transformers"), "logprobs", lambda model, prompt, ids: right(model, prompt[1:], ids))
    [row] = run("against_transformers", [*sizes[:-2], "0"], tmp_path)
    assert row["log-probs, greedy: mean (largest)"] != "0.00000 (0.0000)"


def test_tokens_before_the_first_that_differs() -> None:
    num_equal = module("against_transformers").num_equal
    assert [num_equal((1, 2, 3), other) for other in ((1, 2, 3), (1, 9, 3), (1, 2), (4,), ())] == [3, 1, 2, 0, 0]


def test_a_model_that_sees_and_the_work_that_vllm_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is a stand-in that makes 4 tokens of a picture of 32 x 32 pixels, as the model does, and samples the placeholder."""
    prompts: list[dict[str, Any]] = []

    def generate(inputs: list[dict[str, Any]], sampling: Any, use_tqdm: bool) -> list[Any]:
        prompts.extend(inputs)
        read = [[token for token in one["prompt_token_ids"] for _ in range(4 if token == 578 else 1)] for one in inputs]
        return [SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=(578,) * 3)]) for ids in read]

    asked: dict[str, Any] = {}

    def ask(python: str | None, folder: str, work: dict[str, Any]) -> dict[str, Any]:
        assert python == "other" and {"config.json", "preprocessor_config.json", "tokenizer.json"} <= {
            path.name for path in Path(folder).iterdir()
        }
        asked.update(work)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
        workloads = module("vllm_peer").workloads(work)
        played = {name: module("vllm_peer").play(SimpleNamespace(generate=generate), each, 0) for name, each in workloads.items()}
        return {"version": "0", "start": 1.0, **{name: {"sampled": sampled, "seconds": 2.0} for name, (sampled, _) in played.items()}}

    monkeypatch.setattr(module("vllm_peer"), "ask", ask)
    sizes = ["--side", "32", "--groups", "2", "--group", "2", "--prompt", "9", "--response", "3", "--turns", "2", "--images", "2"]
    [row] = run("vision", ["speed", "--model", "tiny-vl", "--device", "cpu", *sizes, "--repeats", "1", "--vllm-python", "other"], tmp_path)
    assert row["tokens a picture"] == 4 and row["vLLM tokens/s with pictures"] == row["vLLM tokens/s in words"] == 12.0
    assert row["faster than vLLM with pictures by"] == pytest.approx(row["tokens/s with pictures"] / 12)
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [34] * 4 + [62] * 4 + [37] * 4 + [68] * 4
    named = [prompt["multi_modal_uuids"]["image"] for prompt in prompts[:8]]
    assert [len(names) for names in named] == [1] * 4 + [2] * 4 and len({name for names in named for name in names}) == 2 + 4
    assert named[0] == named[1] != named[2] and [names[0] for names in named[4:]] == [names[0] for names in named[:4]]
    assert asked["longest"] == 68 + 3 + 1
    with pytest.raises(
        SystemExit, match=r"vLLM read prompts of \(tokens, patches of pictures\) \[\(60, 6\)\], and the model here reads \(68, 8\)"
    ):
        module("vllm_peer").check_prompts([[578] * 6 + [0] * 54], asked)


# --- bad input ---


def test_a_group_that_does_not_divide_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module("rollout").main(["--rows", "5", "--group", "2"])
    assert "--rows 5 is no multiple of --group 2" in capsys.readouterr().err


def test_conversations_that_are_too_long(tiny: Any) -> None:
    work = module("workloads")
    with pytest.raises(SystemExit, match=r"conversations of 1030 tokens .* are longer than the model's 1024"):
        work.engine_for(tiny.model, tiny.tokenizer, work.Conversations(1, 1, prompt=1000, response=30))


def test_an_unknown_shape() -> None:
    with pytest.raises(SystemExit, match=r"there is no shape 'huge'; there are 3b, 1\.5b, 135m"):
        module("shapes").measured_model("shape:huge")


# --- a whole run ---


def test_the_table_of_a_whole_run_sums_to_its_wall_time(tmp_path: Path) -> None:
    """By hand: 2 s of start, 10 s of stages, 13 s in all; 600 tokens in 3 s of rollout; files with two names count once."""
    from tether.runs.schema import StepRecord
    from tether.runs.store import RunStore

    store = RunStore.create(tmp_path / "run", "", {})
    store.computed_on({"start": {"imports": 1.5, "model": 0.5}})
    timings: list[dict[str, Any]] = [
        {"seconds": {"validation": 2.0}},
        {"seconds": {"rollout": 1.0, "update": 3.0}, "tokens_per_second": 400.0, "share_of_peak": {"rollout": 0.5, "update": 0.1}},
        {"seconds": {"rollout": 2.0, "update": 1.0, "checkpoint": 1.0}, "tokens_per_second": 100.0, "share_of_peak": {"update": 0.5}},
    ]
    for step, line in enumerate(timings):
        store.append(StepRecord(step, {} if step == 1 else {"validation/success": 0.25 * step}, None, []))
        store.append_timings(step, line)
    rows = {row["what"]: row["value"] for row in module("real_run")._whole_rows(store, 13.0, 5_000_000_000)}
    store.close()
    stages = {"update": 4.0, "rollout": 3.0, "start": 2.0, "validation": 2.0, "checkpoints waited for": 1.0, "rest": 1.0}
    rates = {"sampled in the rollouts": 200.0, "update, mean of the steps": 30.0, "update, over all its seconds": 20.0}
    known = {"whole run, 2 steps, validation 0.0%, 50.0%": 13.0, **stages, **rates, "run folder at its largest": 5.0}
    assert rows == pytest.approx(known)
    (tmp_path / "run" / "big").write_bytes(b"x" * 1_000_000)
    before = module("real_run")._bytes_on_disk(tmp_path / "run")
    (tmp_path / "run" / "linked").hardlink_to(tmp_path / "run" / "big")
    assert module("real_run")._bytes_on_disk(tmp_path / "run") == before >= 1_000_000
