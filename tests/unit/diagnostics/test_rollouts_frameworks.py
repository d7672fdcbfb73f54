"""Records with exactly the keys and shapes of each framework's own writer come out as rollouts, from files that lie as the framework lays them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.core.errors import BadInput
from tether.diagnostics.audit import audit
from tether.diagnostics.rollouts import Rollout, RolloutReader, open_rollouts


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read(source: Any, **options: Any) -> tuple[RolloutReader, list[Rollout]]:
    reader = open_rollouts(source, **options)
    return reader, list(reader)


# ------------------------------------------------------------------------------------------------------------------- SkyRL


def skyrl_line(prompt: str, response: str, score: Any) -> dict[str, Any]:
    return {
        "input_prompt": f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
        "output_response": response + "<|im_end|>",
        "score": score,
        "stop_reason": "stop",
        "env_class": "gsm8k",
        "env_extras": {"extra_info": {"index": 3}, "reward_spec": {"ground_truth": "4"}},
        "data_source": "openai/gsm8k",
    }


def test_skyrl_a_folder_of_evaluations(tmp_path: Path) -> None:
    for step in (10, 9):
        folder = tmp_path / "exports" / "dumped_evals" / f"global_step_{step}_evals"
        lines = [skyrl_line("2+2?", f"<think>{step}</think>4", [0.0, 0.25, 0.5]), skyrl_line("2+2?", "<think>b</think>5", 1.0)]
        write(folder / "openai_gsm8k.jsonl", lines)
        write(folder / "aggregated_results.jsonl", [{"eval/openai_gsm8k/avg_score": 0.5, "eval/all/pass_at_2": 1.0}])
    reader, rollouts = read(tmp_path / "exports")
    assert reader.format.name == "skyrl"
    assert [(rollout.step, rollout.reward, rollout.reasoning) for rollout in rollouts] == [
        (9, 0.75, "9"), (9, 1.0, "b"), (10, 0.75, "10"), (10, 1.0, "b"),
    ]  # fmt: skip
    assert len({rollout.group for rollout in rollouts}) == 1 and rollouts[0].prompt is not None
    assert rollouts[0].prompt.endswith("<|im_start|>assistant\n")
    assert reader.notes() == [
        "passed over (metrics): aggregated_results.jsonl, aggregated_results.jsonl",
        "the records hold no step; that of 4 of 4 responses was taken from the names of files or folders",
        "the responses have no group id: responses to equal prompts are taken as one group",
    ]


def test_skyrl_training_batches_are_pickles_and_named(tmp_path: Path) -> None:
    (tmp_path / "dumped_data").mkdir()
    (tmp_path / "dumped_data" / "global_step_1_training_input.pkl").write_bytes(b"\x80\x04\x95\x00")
    with pytest.raises(
        BadInput, match=r"holds no rollouts; .*global_step_1_training_input.pkl was passed over: a pickle, which can run code"
    ):
        open_rollouts(tmp_path)
    write(tmp_path / "dumped_evals" / "eval_only" / "a.jsonl", [skyrl_line("q", "<think>a</think>", None)])
    reader, rollouts = read(tmp_path)
    assert rollouts[0].reward is None and rollouts[0].step is None
    assert reader.notes()[0].startswith("dumped_data/global_step_1_training_input.pkl was passed over: a pickle")
    assert "the responses have no step: they are measured together" in reader.notes()
    assert "1 of 1 responses have no finite reward" in reader.notes()


# ---------------------------------------------------------------------------------------------------------------- OpenRLHF


def test_openrlhf_batch_inference(tmp_path: Path) -> None:
    scored = write(tmp_path / "rm.jsonl", [{"input": "Q", "output": "<think>a</think>b", "reward": -1.5}] * 2)
    reader, rollouts = read(scored)
    assert reader.format.name == "openrlhf" and [rollout.reward for rollout in rollouts] == [-1.5, -1.5]
    assert rollouts[0].prompt == "Q" and rollouts[0].group == rollouts[1].group
    generated = write(tmp_path / "generated.jsonl", [{"input": "Q", "output": "<think>a</think>b"}])
    reader, rollouts = read(generated)
    assert reader.format.name == "openrlhf" and rollouts[0].reward is None
    with pytest.raises(
        BadInput, match="no rollout of a known format"
    ):  # a data set for fine-tuning, where input is only a part of the prompt
        open_rollouts(write(tmp_path / "alpaca.jsonl", [{"instruction": "Do", "input": "Q", "output": "a"}]))


# ------------------------------------------------------------------------------------------------------------------- AReaL


def areal_line(task: int, sample: int, version: int, prompt: str = "<|user|>Q") -> dict[str, Any]:
    return {
        "task_id": task,
        "sample_idx": sample,
        "seqlen": 12,
        "prompt_len": 4,
        "head_version": version - 1,
        "tail_version": version,
        "reward": float(sample),
        "prompt": prompt,
        "completion": f"<think>z{sample}</think>a<|im_end|>",
    }


def test_areal_nested_folders_of_versions(tmp_path: Path) -> None:
    for version in (10, 9):
        for task in (0, 1):
            write(tmp_path / "logs" / "rollout" / str(version) / f"{task}.jsonl", [areal_line(task, sample, version) for sample in (0, 1)])
    write(tmp_path / "logs" / "eval-rollout" / "9" / "0.jsonl", [areal_line(0, 0, 9)])
    reader, rollouts = read(tmp_path / "logs")
    assert reader.format.name == "areal" and [rollout.step for rollout in rollouts] == [9] * 4 + [10] * 4
    assert [rollout.reward for rollout in rollouts[:2]] == [0.0, 1.0] and rollouts[0].group == rollouts[1].group != rollouts[2].group
    assert reader.notes() == ["1 files of evaluation were passed over; --split eval reads them"]
    _, evaluated = read(tmp_path / "logs", split="eval")
    assert [rollout.where.rpartition("/")[2] for rollout in evaluated] == ["0.jsonl line 1"]


def test_areal_two_ranks_with_one_task_number_are_two_groups(tmp_path: Path) -> None:
    path = write(tmp_path / "3" / "0.jsonl", [areal_line(0, 0, 3, "Q1"), areal_line(0, 0, 3, "Q2")])
    _, rollouts = read(path)
    assert rollouts[0].group != rollouts[1].group


# ------------------------------------------------------------------------------------------------------------------- slime


def slime_sample(group: int | None, index: int, **more: Any) -> dict[str, Any]:
    """`Sample.to_dict()` of slime 0.3.1, key by key."""
    return {
        "group_index": group, "index": index, "rollout_id": None, "prompt": f"<|user|>Q{group}", "tokens": [1, 2, 3, 10, 11, 12],
        "multimodal_inputs": None, "multimodal_train_inputs": None, "multimodal_train_input_id": None, "apply_chat_template_kwargs": {},
        "response": f"<think>t{index}</think>a", "response_length": 3, "label": "4", "reward": float(index % 2), "loss_mask": [1, 1, 1],
        "weight_versions": ["1"], "rollout_log_probs": [-0.5, -0.5, -0.5], "rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None,
        "rollout_routed_experts": torch.zeros(5, 2, 1), "remove_sample": False, "teacher_log_probs": None, "status": "completed",
        "metadata": {"level": 1}, "generate_function_path": None, "custom_rm_path": None, "train_metadata": None, "session_id": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0, "completion_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
    } | more  # fmt: skip


def slime_dump(path: Path, rollout_id: int, samples: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def test_slime_archives_give_the_sampled_ids(tmp_path: Path) -> None:
    data = tmp_path / "details" / "rollout_data"
    slime_dump(data / "7.pt", 7, [slime_sample(0, 0), slime_sample(0, 1), slime_sample(1, 2, status="aborted")])
    slime_dump(data / "eval_7.pt", 7, [slime_sample(None, 0)])
    torch.save({"weight": torch.zeros(3)}, tmp_path / "details" / "model.pt")
    reader, rollouts = read(tmp_path / "details")
    assert reader.format.name == "slime" and [(rollout.step, rollout.group) for rollout in rollouts] == [(7, 0), (7, 0)]
    assert (rollouts[0].prompt_ids, rollouts[0].response_ids, rollouts[0].reasoning) == ((1, 2, 3), (10, 11, 12), "t0")
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    assert "1 files of evaluation were passed over; --split eval reads them" in reader.notes()
    assert "1 episodes were left out because an error ended them" in reader.notes()
    assert "passed over (no records): model.pt" in reader.notes()


def test_the_model_that_wrote_a_dump_is_named_where_the_file_names_it(tmp_path: Path) -> None:
    samples = [slime_sample(0, 0, metadata={"model": "Qwen/Qwen3-4B"})], [slime_sample(0, 0)]
    for number, (sample, words) in enumerate(zip(samples, ("Qwen/Qwen3-4B, which the file names", "the file does not name"), strict=True)):
        path = slime_dump(tmp_path / f"{number}.pt", number, sample)
        with pytest.raises(BadInput, match=rf"which model should score the rollouts\?.*{words}"):
            audit(path)
        reader = open_rollouts(path)
        list(reader)
        assert words in reader.tally.writer


def test_slime_rewards_lists_and_converted_files(tmp_path: Path) -> None:
    kept = [name for name in slime_sample(0, 0) if name != "rollout_routed_experts"]
    samples = [
        slime_sample(0, 0, reward={"score": 0.5, "acc": True}), slime_sample(0, 1, reward={"pass": 1.0}),
        slime_sample(0, 2, reward={"a": 1, "b": 2}), slime_sample(0, 3, reward=None, prompt=[{"role": "user", "content": "Q"}]),
    ]  # fmt: skip
    path = write(tmp_path / "5.pt.jsonl", [{**{name: sample[name] for name in kept}, "step": 5} for sample in samples])
    reader, rollouts = read(path)
    assert reader.format.name == "slime" and [rollout.reward for rollout in rollouts] == [0.5, 1.0, None, None]
    assert {rollout.step for rollout in rollouts} == {5} and rollouts[3].messages == [{"role": "user", "content": "Q"}]
    broken = write(tmp_path / "bad.jsonl", [{**{name: samples[0][name] for name in kept}, "response_length": 9}])
    with pytest.raises(BadInput, match="response_length is 9; expected at most the 6 tokens"):
        list(open_rollouts(broken))


def test_slime_archive_with_classes_is_refused_with_the_conversion(tmp_path: Path) -> None:
    path = slime_dump(tmp_path / "1.pt", 1, [slime_sample(0, 0, metadata={"path": Path("x")})])
    with pytest.raises(
        BadInput, match=r"holds objects that can run code when they are loaded .*; if you trust the file, convert it: python -c"
    ):
        open_rollouts(path)
    with pytest.raises(BadInput, match="can run code"):
        open_rollouts(tmp_path)
    other = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(3)}, other)
    with pytest.raises(BadInput, match="is a zip archive"):
        open_rollouts(other)


def test_slime_rollout_buffer(tmp_path: Path) -> None:
    item = {
        "prompt": [{"role": "user", "content": "Q"}], "label": "4", "instance_id": 12, "uid": "a-b", "rollout_index": 1, "reward": -0.7,
        "raw_reward": 0.0, "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>z</think>4"}],
        "extra_info": {}, "timestamp": "1.5", "round_number": 1, "finish_reason": "stop",
    }  # fmt: skip
    reader, rollouts = read(write(tmp_path / "buffer.jsonl", [item]))
    assert reader.format.name == "slime" and (rollouts[0].group, rollouts[0].reward, rollouts[0].reasoning) == ("12", 0.0, "z")


# --------------------------------------------------------------------------------------------------------------- verifiers


def verifiers_line(example: int, completion: Any, **more: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Q{example}"}]
    return {
        "example_id": example, "prompt": prompt, "completion": completion, "answer": "4", "reward": 0.5, "error": None,
        "timing": {"generation": {"start": 0.0, "end": 1.0}}, "is_completed": True, "is_truncated": False, "stop_condition": None,
        "metrics": {"correct": 1.0}, "tool_defs": None, "token_usage": {"input_tokens": 5.0, "output_tokens": 7.0}, "correct": 1.0,
    } | more  # fmt: skip


def test_verifiers_results(tmp_path: Path) -> None:
    call = json.dumps({"id": "c1", "name": "search", "arguments": '{"q": "x"}'})
    talk = [
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "<think>so it is 4</think>4"},
    ]
    lines = [verifiers_line(0, talk), verifiers_line(1, [], error={"error": "Timeout", "error_chain_repr": "x", "error_chain_str": "x"})]
    folder = tmp_path / "outputs" / "evals" / "gsm8k--model" / "1234abcd"
    write(folder / "results.jsonl", [*lines, verifiers_line(2, [])])
    (folder / "metadata.json").write_text(json.dumps({"env_id": "gsm8k", "model": "m"}, indent=2))
    reader, rollouts = read(tmp_path / "outputs")
    assert reader.format.name == "verifiers" and [rollout.turn for rollout in rollouts] == [0, 1]
    assert [rollout.reasoning for rollout in rollouts] == ["look it up", "so it is 4"] and {rollout.group for rollout in rollouts} == {"0"}
    assert rollouts[1].messages is not None
    assert rollouts[1].messages[2]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"q": "x"}'}
    assert [rollout.reward for rollout in rollouts] == [0.5, 0.5]
    assert reader.notes()[0] == "passed over (no records): metadata.json"
    assert {"1 episodes were left out because an error ended them", "1 episodes hold no response"} <= set(reader.notes())


def test_verifiers_text_completions_and_several_tasks(tmp_path: Path) -> None:
    lines = [verifiers_line(0, "<think>a</think>", prompt="Q: 2+2 A:", task=task, step=3) for task in ("gsm8k", "math")]
    reader, rollouts = read(write(tmp_path / "step_4" / "results.jsonl", lines))
    assert reader.format.name == "verifiers" and [rollout.group for rollout in rollouts] == ["gsm8k/0", "math/0"]
    assert rollouts[0].prompt == "Q: 2+2 A:" and rollouts[0].step == 4  # `step` is a metric of that name here


# ---------------------------------------------------------------------------------------------------------------- prime-rl


def node(parent: int | None, role: str, content: str, ids: list[int], sampled: int = 0, **more: Any) -> dict[str, Any]:
    found = {
        "message": {"role": role, "content": content, **more}, "sampled": bool(sampled), "timestamp": 1.0, "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled, "is_content": [], "logprobs": [-0.5] * sampled,
    }  # fmt: skip
    return found if parent is None else {"parent": parent, **found}


def trace(nodes: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "version": 1, "id": "t1", "verifiers": {"version": "0.3.0"}, "task": {"type": "Task", "data": {"idx": 5}, "key": "k"},
        "agent": {"config": {}, "name": "solver", "trainable": True}, "tools": [], "nodes": nodes, "calls": [], "request_rewrites": [],
        "response_rewrites": [], "rewards": {"correct": {"score": 1.0, "weight": 2.0}, "format": {"score": 0.5, "weight": 0.5}, "late": None},
        "metrics": {}, "info": {}, "extra_usage": [], "is_completed": True, "ok": True, "errors": [], "timing": {"start": 1.0},
    } | more  # fmt: skip


def episode(traces: list[dict[str, Any]], group: str | None = "g", step: int | None = 12, **more: Any) -> dict[str, Any]:
    work = {"type": "train", "step": step, "policy": {"start": 11, "end": 12}}
    return (
        {
            "id": "e1",
            "env": {"id": "gsm8k", "name": "math"},
            "task": {"type": "Task", "data": {"idx": 5}, "key": "k"},
            "ok": True,
            "errors": [],
        }
        | ({} if group is None else {"group": {"id": group}})
        | ({} if step is None else {"run": {"type": "train", "id": "r", "work": work}})
        | {"traces": traces}
        | more
    )


TWO_TURNS = [
    node(None, "user", "Q", [1, 2]),
    node(0, "assistant", "7", [3, 10, 11], sampled=2, reasoning_content="first"),
    node(1, "user", "again", [4]),
    node(2, "assistant", "<think>second</think>8", [3, 12], sampled=1),
]


def test_prime_rl_traces_of_every_step(tmp_path: Path) -> None:
    judge = trace([node(None, "user", "judge", [1]), node(0, "assistant", "ok", [2], 1)], agent={"name": "judge", "trainable": False})
    failed = trace(TWO_TURNS, ok=False, errors=[{"type": "ProviderError", "message": "503"}])
    rollouts_folder = tmp_path / "run" / "rollouts"
    for step in (10, 9):
        everything = rollouts_folder / f"step_{step}" / "train" / "all" / "traces.jsonl"
        write(everything, [episode([trace(TWO_TURNS), judge], step=step), episode([failed], step=step)])
        write(rollouts_folder / f"step_{step}" / "train" / "effective" / "traces.jsonl", [episode([trace(TWO_TURNS)], step=step)])
        write(rollouts_folder / f"step_{step}" / "eval" / "all" / "traces.jsonl", [episode([trace(TWO_TURNS)], step=step)])
    write(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "time": 1.5, "reward/mean": 0.5}])
    export = {
        "schema_version": 1,
        "step": 9,
        "rank": 0,
        "env_name": "math",
        "token_ids": [1],
        "loss_mask": [True],
        "trainer_logprobs": [-1.0],
    }
    write(tmp_path / "run" / "token_exports" / "step_9" / "rank_0.jsonl", [export])
    reader, rollouts = read(tmp_path / "run")
    assert reader.format.name == "prime_rl" and [(rollout.step, rollout.turn) for rollout in rollouts] == [(9, 0), (9, 1), (10, 0), (10, 1)]
    first, second = rollouts[:2]
    assert (first.prompt_ids, first.response_ids, first.reasoning) == ((1, 2, 3), (10, 11), "first")
    assert (second.prompt_ids, second.response_ids, second.reasoning) == ((1, 2, 3, 10, 11, 4, 3), (12,), "second")
    assert first.think_implied and (first.group, first.reward, first.trajectory) == ("g", 2.25, second.trajectory)
    assert second.messages is not None and [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert {
        "2 files of folders named effective were passed over: the folders named all beside them hold the same episodes and more",
        "2 files of evaluation were passed over; --split eval reads them",
        "passed over (metrics): metrics.jsonl",
        "passed over (prime-rl's token export: no text, no rewards; its rollouts/ folder has both): rank_0.jsonl",
        "2 episodes were left out because an error ended them",
    } == set(reader.notes())


def test_prime_rl_branches_relays_and_what_is_missing(tmp_path: Path) -> None:
    relay = [
        node(None, "user", "Q", []),
        node(0, "assistant", "<think>z</think>", []) | {"sampled": True},
        node(0, "assistant", "y", []) | {"sampled": True},
    ]
    _, rollouts = read(write(tmp_path / "step_3" / "traces.jsonl", [episode([trace(relay, rewards={})], group=None, step=None)]))
    assert [rollout.messages for rollout in rollouts] == [[{"role": "user", "content": "Q"}]] * 2  # two branches of one root
    assert [(rollout.step, rollout.group, rollout.reward, rollout.prompt_ids) for rollout in rollouts] == [(3, "gsm8k/k", None, None)] * 2
    for broken, cause in (
        ([node(None, "user", "Q", [1]), node(7, "assistant", "a", [2], 1)], "has the parent 7"),
        ([node(None, "assistant", "a", [2], 1)], "without a message before it"),
        ([node(None, "user", "Q", [1]), node(0, "assistant", "a", [2, 3], 1) | {"mask": [True]}], "has 2 token ids and a mask of 1"),
    ):
        with pytest.raises(BadInput, match=cause):
            list(open_rollouts(write(tmp_path / "b.jsonl", [episode([trace(broken)])])))
    with pytest.raises(BadInput, match="holds no rollouts"):
        list(open_rollouts(write(tmp_path / "c.jsonl", [episode([], ok=False, errors=[{"type": "EnvError", "message": "x"}])])))


def test_prime_rl_uploads_hold_the_episode(tmp_path: Path) -> None:
    row = {
        "run_id": "r", "step": 4, "tag": "", "problem_id": 5, "sample_id": 0, "prompt": "", "completion": "[]", "answer": "",
        "trajectory": json.dumps([{"messages": [n["message"] for n in TWO_TURNS], "num_input_tokens": 3, "num_output_tokens": 3}]),
        "env_name": "gsm8k", "task": "{}", "info": json.dumps({"native_wrapper": episode([trace(TWO_TURNS)], step=None)}), "reward": 0.5,
        "advantage": 0.1, "metrics": "{}", "timing": "{}", "num_input_tokens": 3, "num_output_tokens": 3, "created_at": None,
    }  # fmt: skip
    reader, rollouts = read([row])  # the rows of a table, as pyarrow gives them
    assert reader.format.name == "prime_rl" and [rollout.step for rollout in rollouts] == [4, 4]
    assert rollouts[0].prompt_ids == (1, 2, 3) and rollouts[0].reward == 2.25
    _, projected = read([{**row, "info": "null"}])
    assert [rollout.reasoning for rollout in projected] == ["first", "second"]
    assert (projected[0].group, projected[0].reward, projected[0].prompt_ids) == ("gsm8k/5", 0.5, None)


# ------------------------------------------------------------------------------------------------- folders, arrays and rows


def generic_line(index: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"p{index}", "response": f"<think>z{index}</think>", **more}


def test_the_most_frequent_format_wins_and_the_others_are_named(tmp_path: Path) -> None:
    for index in range(2):
        write(tmp_path / f"{index}.jsonl", [{"input": "Q", "output": "<think>a</think>", "score": 1.0, "step": index}])
    write(tmp_path / "odd.jsonl", [generic_line(0)])
    write(tmp_path / ".cache" / "x.jsonl", [generic_line(0)])
    reader, rollouts = read(tmp_path)
    assert reader.format.name == "verl" and len(rollouts) == 2
    assert reader.notes()[0] == "passed over (generic records): odd.jsonl"
    reader, rollouts = read(tmp_path, format="generic")
    assert len(rollouts) == 1 and reader.notes()[0] == "passed over (no rollouts: fields input, output, score, step): 0.jsonl, 1.jsonl"
    mapped = {"prompt": "input", "response": "output"}
    reader, rollouts = read(tmp_path, fields=mapped)
    assert [rollout.prompt for rollout in rollouts] == ["Q", "Q"] and "odd.jsonl" in reader.notes()[0]


def test_several_runs_of_tether_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "trajectories.jsonl", [{"step": 1}])
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(BadInput, match=r"holds 2 runs of Tether \(a, b\); name one of them"):
        open_rollouts(tmp_path)


def test_arrays_of_records_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.diagnostics.rollouts.containers.READ_BYTES", 7)
    path = tmp_path / "rollouts.json"
    path.write_text(
        "\ufeff" + json.dumps([generic_line(index, note="é ] , {") for index in range(3)], indent=1, ensure_ascii=False), encoding="utf-8"
    )
    _, rollouts = read(path)
    assert [(rollout.prompt, rollout.where) for rollout in rollouts] == [(f"p{index}", f"{path} item {index + 1}") for index in range(3)]
    _, in_folder = read(tmp_path)
    assert len(in_folder) == 3
    for text, cause in (
        ('[{"prompt": "a", "response": "b"}, 5]', "item 2: begins with '5]'"),
        ("[", "the array is not closed"),
        ('[{"a', "is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(BadInput, match=cause):
            list(open_rollouts(path))


def test_rows_in_memory(tmp_path: Path) -> None:
    rows = [generic_line(index, reward=torch.tensor(0.5), step=1) | {"prompt_ids": torch.tensor([1, 2])} for index in range(2)]
    reader, rollouts = read(iter(rows))
    assert (
        reader.format.name == "generic"
        and reader.names == ["rows in memory"]
        and [rollout.where for rollout in reader] == ["row 1", "row 2"]
    )
    assert rollouts[0].reward == 0.5 and rollouts[0].prompt_ids == (1, 2)
    with pytest.raises(BadInput, match="row 2: is a int; expected a mapping"):
        list(open_rollouts([rows[0], 5]))  # type: ignore[list-item]
    assert len(read([rows[0], 5], bad_lines="skip")[1]) == 1
    for source, cause in ((rows[0], "one mapping"), (5, "are a int"), ([5], "there are no rows"), ([], "no rollout file was given")):
        with pytest.raises(BadInput, match=cause):
            open_rollouts(source)  # type: ignore[arg-type]
