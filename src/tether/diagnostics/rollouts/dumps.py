"""The rollout dumps of SkyRL, OpenRLHF, AReaL and slime: one response a record, prompt and response as text, token ids only in slime's.

None of them splits an episode into turns: what tools or environments said stands inside the response, and the first reasoning of it is taken.
"""

import math
from collections.abc import Iterator

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, Rollout, prompt_group
from tether.diagnostics.rollouts.values import conversation_turns, split_conversation

_SLIME_FAILED = ("aborted", "failed")


def is_skyrl(record: values.Record) -> bool:
    return {"input_prompt", "output_response", "score"} <= record.keys()


def skyrl_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The response of one line of SkyRL's evaluation dump, dumped_evals/global_step_N_evals/DATASET.jsonl under trainer.export_path (skyrl 0.3.0,
    a956457, skyrl/train/utils/trainer_utils.py, `dump_per_dataset_eval_results`).

    A line has input_prompt, output_response, score, stop_reason, env_class, env_extras, data_source. Prompt and response are decoded with their
    special tokens. The score is a number, or one per token of the response; those are summed, as SkyRL itself does. There are no group ids, so
    prompts are compared, and no step: it is in the name of the folder. The training batches that SkyRL dumps (dump_data_batch) are pickles.
    """
    return conversation_turns(
        record["input_prompt"],
        record["output_response"],
        where,
        names=("input_prompt", "output_response"),
        reward=values.total(record["score"], "score"),
    )


def is_openrlhf(record: values.Record) -> bool:
    named = {"input", "output"}
    return named <= record.keys() and ("reward" in record or record.keys() == named) and "instruction" not in record


def openrlhf_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The response of one line of OpenRLHF's batch inference (OpenRLHF to 0.9.6, openrlhf/cli/batch_inference.py: `batch_generate_vllm`,
    `batch_generate`, `batch_rm_inference`; later versions write no rollouts).

    A line has input, output, and reward once a reward model has scored it. --best_of_n responses of a prompt stand apart from each other and have no
    group id, so prompts are compared. There is no step: the file is one evaluation, or one iteration of rejection sampling.
    """
    return conversation_turns(
        record["input"],
        record["output"],
        where,
        names=("input", "output"),
        reward=values.number(record.get("reward"), "reward"),
    )


def is_areal(record: values.Record) -> bool:
    return {"task_id", "sample_idx", "head_version", "tail_version", "prompt", "completion"} <= record.keys()


def areal_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The response of one line of AReaL's rollout dump, rollout/VERSION/TASK.jsonl with rollout.dump_to_file=true (areal 1.0.4, 4aef98d,
    areal/infra/workflow_executor.py, `_dump_trajectory`).

    A line has task_id, sample_idx, seqlen, prompt_len, head_version, tail_version, reward, prompt, completion, the texts with their special tokens.
    The step is tail_version, the newest weights that wrote a part of the task, and the name of the folder. A group is the responses of a task to one
    prompt: a task of several turns holds several prompts, and two data-parallel ranks may write tasks of one number into one file.
    """
    prompt = values.text(record["prompt"], "prompt")
    return conversation_turns(
        prompt,
        record["completion"],
        where,
        names=("prompt", "completion"),
        step=values.step(record["tail_version"], "tail_version"),
        group=f"{record['task_id']}/{prompt_group(prompt or '').partition(':')[2]}",
        reward=values.number(record.get("reward"), "reward"),
    )


def is_slime(record: values.Record) -> bool:
    return {"group_index", "prompt", "tokens", "response", "response_length"} <= record.keys() or _is_buffer_item(record)


def _is_buffer_item(record: values.Record) -> bool:
    return {"instance_id", "messages", "reward", "round_number"} <= record.keys()


def slime_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The response of one sample of slime's debug rollout data, PATH.format(rollout_id) with --save-debug-rollout-data or --dump-details
    (slime 0.3.1, 624b824, slime/observability/rollout_data_utils.py, `save_debug_rollout_data`; slime/utils/types.py, `Sample.to_dict`); or of one item
    of its rollout buffer (slime_plugins/rollout_buffer/generator/base_generator.py, `worker_process`), saved as JSON Lines.

    A sample has the tokens of prompt and response in one list, of which the last response_length are the response. The step is the rollout_id of
    the archive, not the field of the same name. A reward may be an object; its `score`, or its only number, counts. Samples with status aborted or
    failed are left out. An item of the buffer has instance_id, messages, reward, and no token ids.
    """
    if _is_buffer_item(record):
        prompt, answers = split_conversation(values.messages(record["messages"], "messages"), "messages")
        reward = values.number(record.get("raw_reward", record["reward"]), "reward")
        names = ("messages", "messages after the prompt")
        yield from conversation_turns(prompt, answers, where, names=names, group=str(record["instance_id"]), reward=reward)
        return
    if record.get("status") in _SLIME_FAILED:
        raise ErroredEpisode
    tokens = values.token_ids(record["tokens"], "tokens") or ()
    length = values.step(record["response_length"], "response_length") or 0
    if not 0 <= length <= len(tokens):
        raise BadRecord(f"response_length is {length}; expected at most the {len(tokens)} tokens")
    prompt = record["prompt"]
    shown = (
        {"messages": values.messages(prompt, "prompt")} if isinstance(prompt, list) else {"prompt": values.text(prompt, "prompt") or None}
    )
    before, after = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    group = record["group_index"]
    yield Rollout(
        step=values.step(record.get("step")),
        group=prompt_group(prompt or before) if group is None else group,
        trajectory=where,
        turn=0,
        where=where,
        **shown,
        prompt_ids=before or None,
        response=values.text(record["response"], "response") or "",
        response_ids=after or None,
        reward=_slime_reward(record.get("reward")),
    )


def _slime_reward(reward: object) -> float | None:
    if not isinstance(reward, dict):
        return values.number(reward, "reward")
    numbers = [value for value in reward.values() if isinstance(value, int | float) and math.isfinite(value)]
    chosen = reward.get("score", numbers[0] if len(numbers) == 1 else None)
    return values.number(chosen, "reward.score")
