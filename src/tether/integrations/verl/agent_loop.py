"""`TetherAgentLoop`: one episode of a Tether environment as an agent loop of verl.

    actor_rollout_ref.rollout.agent.default_agent_loop=tether       or a data column `agent_name`

A data row names the environment: columns `env`, `seed` and, as JSON, `env_options` (`write_prompts` makes such a file). Sessions of a prompt have the
same row, so the members of a group start alike. verl's server samples; Tether's episode renders prompts, reads answers and steps the environment.
The context is the full history. An environment error is raised: verl marks the group as failed.
"""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from tether.core.enums import StopReason
from tether.core.errors import BadInput, EnvironmentFailure
from tether.core.protocols import Sampling, settled
from tether.core.seeding import derive_seed
from tether.envs.registry import make_env
from tether.integrations.rows import cut_response, distinct_instances, flatten, opening_messages
from tether.models.chat import ChatFormat
from tether.rollout.engines.stop_rule import StopRule
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds

FORMAT_PENALTY = -0.1


class TetherAgentLoop(AgentLoopBase):
    """Plays one episode."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play the episode of a data row."""
        for name in ("env", "seed"):
            if name not in row:
                raise BadInput(f"the data row has no column '{name}'; make the file with tether.integrations.verl.agent_loop.write_prompts")
        env = make_env(str(row["env"]), **json.loads(str(row.get("env_options") or "{}")))
        seed, session = int(row["seed"]), int(row.get("session_id") or 0)
        length = int(self.rollout_config.response_length)
        budget = int(row.get("max_tokens") or length)
        chat, stop = ChatFormat(self.tokenizer), StopRule(self.tokenizer)
        seeds = EpisodeSeeds(0, session, seed, derive_seed("luck", "verl", seed, session), 0)
        rules = EpisodeRules(int(self.rollout_config.prompt_length) + length, budget, float(row.get("format_penalty", FORMAT_PENALTY)))
        episode = Episode(env, chat, seeds, rules, str(row["env"]))
        sampling = Sampling(max_tokens=budget)
        request = uuid.uuid4().hex  # one server for all turns: its prefix cache holds the earlier ones
        fed = await self.loop.run_in_executor(None, lambda: settled(episode.begin()))
        tokens: list[int] = []
        versions: list[int] = []
        while fed is not None:
            tokens += fed
            room = int(self.rollout_config.prompt_length) + length - len(tokens)
            asked = {**sampling_params, "max_tokens": min(budget, room), "stop": list(episode.closing_tags)}
            written = await self.server_manager.generate(request_id=request, prompt_ids=list(tokens), sampling_params=asked)
            versions += [each for name in ("min_global_steps", "max_global_steps") if (each := written.extra_fields.get(name)) is not None]
            completion = cut_response(stop, written.token_ids, written.log_probs, sampling, episode.closing_tags)
            tokens += completion.token_ids
            fed = await self.loop.run_in_executor(None, lambda done=completion: settled(episode.receive(done)))
        return self._output(episode, length, versions)

    def _output(self, episode: Episode, length: int, versions: list[int]) -> AgentLoopOutput:
        trajectory = episode.trajectory
        if trajectory.stop_reason is StopReason.ENV_ERROR or not trajectory.turns:
            raise EnvironmentFailure(trajectory.error or "the first prompt leaves no room for a response; raise rollout.prompt_length")
        flat = flatten(trajectory)
        has_logprobs = all(len(turn.logprobs) == len(turn.response_ids) for turn in trajectory.turns)
        extra: dict[str, Any] = {"reward_extra_info": {"acc": float(trajectory.success), "success": float(trajectory.success)}}
        if versions:  # of the weights that wrote the episode: verl's metrics and its control of staleness read them
            extra |= {"min_global_steps": min(versions), "max_global_steps": max(versions)}
        return AgentLoopOutput(
            prompt_ids=flat.prompt_ids,
            response_ids=flat.completion_ids[:length],
            response_mask=flat.mask[:length],
            response_logprobs=flat.logprobs[:length] if has_logprobs else None,
            reward_score=float(trajectory.reward),
            num_turns=2 * len(trajectory.turns),
            metrics={},
            extra_fields={**extra, "turn_scores": [], "tool_rewards": []},
        )


def write_prompts(path: str | Path, env: str, num_prompts: int, *, seed: int = 0, options: Mapping[str, Any] | None = None) -> Path:
    """A parquet file of prompts for verl's `data.train_files`: different first observations of one environment."""
    import pyarrow
    import pyarrow.parquet

    instances = distinct_instances(env, options or {}, num_prompts, lambda number: derive_seed("instance", "verl", seed, number))
    rows = [
        {"prompt": opening_messages(texts), "agent_name": "tether", "data_source": f"tether/{env}", "env": env, "seed": instance,
         "env_options": json.dumps(dict(options or {})), "reward_model": {"style": "rule", "ground_truth": ""}}
        for texts, instance in instances.items()
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    return Path(path)
