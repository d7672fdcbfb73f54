"""`TetherEnvironment`: Tether's environments in TRL, multi-turn, with the members of a group on one instance.

    lake = TetherEnvironment("frozen_lake", tokenizer, num_prompts=256)
    trainer = TetherGRPOTrainer(model, args=args, processing_class=tokenizer, **lake.arguments)

`rollout` is TRL's `rollout_func`: it plays whole episodes with the code of Tether's own sampler and returns the tokens that were sampled, with a mask
that tells them from observations. TRL hands a rollout function the prompts alone, so the instance is found by its prompt: a data set never holds two
instances that look alike. An episode that an environment error ended has no reward (None), which TRL leaves out of the baselines.

`factory` is TRL's `environment_factory`, for models that call tools: the tool `act` takes an answer and returns the next observation. There TRL
runs the conversation, and only a tool call moves the episode on.

TRL trains one sequence per rollout, so the context is always the full history.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from tether.core.enums import StopReason
from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.protocols import (
    Conversation,
    Engine,
    EngineCapabilities,
    EngineStatistics,
    Sampling,
    checked_observation,
    checked_step,
    settled,
)
from tether.core.seeding import derive_seed, env_seed, sampling_seed, validation_seed
from tether.core.types import Trajectory
from tether.envs.registry import make_env
from tether.integrations.rows import cut_response, distinct_instances, flatten, opening_messages, opening_roles
from tether.integrations.trl.batch import SPANS, SUCCESS, plain_forward, policy_module
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.stop_rule import StopRule
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan

ENGINES = ("native", "trl")
REWARD = "tether_reward"
"""The column of the episodes' returns."""


class TetherEnvironment:
    """One environment: its prompts as a data set, its episodes as a rollout function, its returns as a reward function."""

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        *,
        num_prompts: int = 256,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        format_penalty: float = -0.1,
        engine: str = "native",
        validation: bool = False,
    ) -> None:
        """
        Args:
            name: any environment of Tether: a name, "module:Class", or the address of a served one.
            tokenizer: of the model that is trained.
            num_prompts: instances of the data set.
            seed: which instances.
            options: of the environment.
            max_tokens: budget of one response; None: all that `max_completion_length` leaves.
            format_penalty: added for each turn that is malformed or holds an illegal action.
            engine: `native` samples with Tether's engine on the trainer's own weights; `trl` with TRL's generation (vLLM, sharded models).
            validation: Tether's fixed validation instances in place of training ones, for `eval_dataset`.
        """
        if engine not in ENGINES:
            raise UnknownName(f"unknown engine '{engine}' of a TRL environment: {did_you_mean(engine, ENGINES)}")
        if num_prompts < 1:
            raise BadInput(f"num_prompts is {num_prompts}; give 1 or more")
        self.name, self._tokenizer, self._options = name, tokenizer, dict(options or {})
        self._num_prompts, self._seed, self._validation = num_prompts, seed, validation
        self._max_tokens, self._format_penalty, self._engine_name = max_tokens, format_penalty, engine
        self._pool: EnvPool | None = None
        self._engines: dict[int, tuple[Engine, ChatFormat]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """What a trainer needs of the environment: `GRPOTrainer(..., **lake.arguments)`."""
        return {"train_dataset": self.dataset, "reward_funcs": self.reward, "rollout_func": self.rollout}

    # ----------------------------------------------------------------------------------------------------------- data

    @cached_property
    def instances(self) -> dict[tuple[str, ...], int]:
        """The texts of each instance's first prompt to its seed: instructions, examples as turns, first observation."""

        def seed_of(number: int) -> int:
            return validation_seed(number) if self._validation else derive_seed("instance", "trl", self._seed, number)

        return distinct_instances(self.name, self._options, self._num_prompts, seed_of)

    @cached_property
    def dataset(self) -> Dataset:
        """The prompts for `rollout`: system message and first observation, and the seed of the instance."""
        return Dataset.from_list([{"prompt": opening_messages(texts), "seed": str(seed)} for texts, seed in self.instances.items()])

    @cached_property
    def tool_dataset(self) -> Dataset:
        """The prompts for `factory`, whose `reset` adds the first observation."""
        return Dataset.from_list(
            [{"prompt": opening_messages([texts[0], ""]), "seed": str(seed)} for texts, seed in self.instances.items()]
        )

    def reward(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The return of each episode; None where an environment error ended it."""
        if REWARD not in columns:
            raise BadInput(f"the reward of environment '{self.name}' comes with its rollouts; give the trainer rollout_func=... as well")
        returns: list[float | None] = columns[REWARD]
        return returns

    # -------------------------------------------------------------------------------------------------------- episodes

    def rollout(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: one episode for each prompt."""
        if trainer.mask_truncated_completions:
            raise BadInput(
                "mask_truncated_completions would mask every episode: their responses end with the answer tag, not with the end-of-turn token; "
                "set it to False"
            )
        plan = self._plan(prompts, trainer)
        module = policy_module(trainer)
        with plain_forward(module):  # the engine is probed against the module when it is made
            engine, chat = self._engine(trainer, module)
        length = int(trainer.max_completion_length)
        max_tokens = min(self._max_tokens or length, length)
        longest = max(len(_first_prompt(chat, self._texts(prompt))) for prompt in prompts)
        # The longest prompt decides, so that each has room for max_completion_length; a shorter one has its difference more.
        rules = EpisodeRules(longest + length, max_tokens, self._format_penalty)
        args = trainer.args
        sampling = Sampling(
            temperature=float(args.temperature),
            max_tokens=max_tokens,
            top_k=int(args.top_k or 0),
            top_p=float(args.top_p),
            min_p=float(args.min_p or 0.0),
        )
        self._pool = self._pool or EnvPool([EnvSpec(self.name, self._options)])
        with plain_forward(module):
            groups = play_plan(self._pool, plan, engine, chat, sampling, rules)
        done = {(t.group, t.member): t for group in groups for t in (*group.trajectories, *group.errored)}
        return _columns([done[seeds.group, seeds.member] for seeds in plan], chat, self._engine_name == "native")

    def _plan(self, prompts: Sequence[Any], trainer: Any) -> list[EpisodeSeeds]:
        """The seeds of this process's rows. A group may lie on two processes, so rows are numbered over all of them."""
        training = trainer.model.training
        size = int(trainer.num_generations if training else trainer.num_generations_eval)
        run, step = int(trainer.args.seed), int(trainer.state.global_step) if training else -1
        first = trainer.accelerator.process_index * len(prompts)
        plan = []
        for row, prompt in enumerate(prompts, start=first):
            group, member = divmod(row, size)
            instance = self._instance(prompt)
            plan.append(EpisodeSeeds(group, member, instance, env_seed(run, step, group, member), sampling_seed(run, step, group, member)))
        return plan

    def _texts(self, prompt: Any) -> tuple[str, ...]:
        roles = [message.get("role") for message in prompt] if isinstance(prompt, list) else []
        if len(roles) < 2 or roles != opening_roles(len(roles)):
            raise BadInput(
                f"a prompt is not of environment '{self.name}': expected a system message, then user and assistant in turn, the user last; "
                "train on its .dataset"
            )
        return tuple(str(message["content"]) for message in prompt)

    def _instance(self, prompt: Any) -> int:
        texts = self._texts(prompt)
        if texts not in self.instances:
            raise BadInput(f"no instance of environment '{self.name}' begins with the prompt {texts[-1][:60]!r}; train on its .dataset")
        return self.instances[texts]

    def _engine(self, trainer: Any, module: Any) -> tuple[Engine, ChatFormat]:
        if id(trainer) not in self._engines:
            policy = Policy(module, self._tokenizer)
            chat = ChatFormat(self._tokenizer, policy.end_of_turn_ids, policy.vision)
            engine: Engine = (
                NativeEngine(policy)
                if self._engine_name == "native"
                else TrainerEngine(trainer, self._tokenizer, StopRule(self._tokenizer, policy.end_of_turn_ids))
            )
            self._engines[id(trainer)] = engine, chat
        return self._engines[id(trainer)]

    # ----------------------------------------------------------------------------------------------------------- tools

    def factory(self) -> "ToolEnvironment":
        """TRL's `environment_factory`: one environment with the tool `act`."""
        return ToolEnvironment(self.name, self._options, self._format_penalty)


class ToolEnvironment:
    """An environment whose step is a tool. TRL makes its public methods tools, but for `reset` and `get_reward`."""

    def __init__(self, name: str, options: Mapping[str, Any], format_penalty: float) -> None:
        self._env = make_env(name, **options)
        self._format_penalty = format_penalty
        self._total, self._done, self._episodes = 0.0, False, 0

    def reset(self, seed: str | int, **row: Any) -> str:
        """Start the instance of the data row; members of a group have the same row, so they start alike."""
        self._total, self._done = 0.0, False
        return checked_observation(self._env.reset(int(seed))).text

    def act(self, answer: str) -> str:
        """
        Answer the environment.

        Args:
            answer: The answer, in the form that the instructions ask for, without any tags.

        Returns:
            What the environment shows next.
        """
        if self._done:
            return "The episode is over."
        step = checked_step(self._env.step(answer))
        self._total += step.reward + (0.0 if step.info.get("valid", True) and answer else self._format_penalty)
        self._done = step.done
        return step.observation.text

    def get_reward(self) -> float:
        """The return of the episode so far."""
        return self._total


class TrainerEngine:
    """An engine over TRL's own generation: all live conversations take one turn, then the next.

    Every process makes the same number of calls, as vLLM and sharded models need. TRL's sampling parameters apply. Tokens after the end of a
    response are dropped. TRL's config ends a response at the end of a turn or after the tokens of a whole episode; for transformers' `generate` the
    budget of a turn and the closing tags end it, else most of what is computed would be dropped.
    """

    capabilities = EngineCapabilities(per_conversation_uniforms=False, prefix_sharing=False, weight_sync=True, logprobs=False)
    backend = "trl"

    def __init__(self, trainer: Any, tokenizer: Any, stop: StopRule) -> None:
        self._trainer, self._tokenizer, self._stop = trainer, tokenizer, stop
        self.statistics = EngineStatistics()

    def run(self, conversations: Sequence[Conversation], sampling: Sampling, on_finished: Any = None, follow_up: Any = None) -> None:
        self.statistics = EngineStatistics()
        live: list[tuple[Conversation, list[int]]] = []
        filler: list[int] = []
        for conversation in conversations:
            first = settled(conversation.begin())
            if first is not None:
                live.append((conversation, list(first)))
                filler = filler or list(first)
            elif on_finished is not None:
                on_finished()
        while any(gather_object([len(live)])):
            asked = [tokens for _, tokens in live] or [filler or [int(self._trainer.processing_class.eos_token_id)]]
            with self._ending(sampling, {tag for conversation, _ in live for tag in conversation.closing_tags}):
                written, logprobs = self._trainer._generate_single_turn(asked, None, {}, 1)
            following: list[tuple[Conversation, list[int]]] = []
            for row, (conversation, tokens) in enumerate(live):
                completion = cut_response(
                    self._stop, written[row], None if logprobs is None else logprobs[row], sampling, conversation.closing_tags
                )
                self.statistics.sampled_tokens += len(completion.token_ids)
                self.statistics.dropped_tokens += len(written[row]) - len(completion.token_ids)
                fed = settled(conversation.receive(completion))
                if fed is not None:
                    following.append((conversation, [*tokens, *completion.token_ids, *fed]))
                elif on_finished is not None:
                    on_finished()
            live = following

    @contextmanager
    def _ending(self, sampling: Sampling, tags: set[str]) -> Iterator[None]:
        """transformers' `generate` ends a response where the episode does."""
        trainer = self._trainer
        if trainer.use_vllm or trainer.use_transformers_continuous_batching:
            yield
            return
        config, module = trainer.generation_config, policy_module(trainer)
        held = config.max_new_tokens, config.stop_strings
        config.max_new_tokens, config.stop_strings = sampling.max_tokens, sorted(tags) or None
        module.generate = partial(module.generate, tokenizer=self._tokenizer)  # needed for the strings; TRL does not pass it
        try:
            yield
        finally:
            del module.generate
            config.max_new_tokens, config.stop_strings = held

    def sync(self, version: int | None = None) -> dict[str, float]:
        """Nothing to do: TRL gives its generation the current weights."""
        return {}

    def free(self) -> None:
        """Nothing to do: the memory is TRL's."""


def _first_prompt(chat: ChatFormat, texts: tuple[str, ...]) -> tuple[int, ...]:
    system, *turns, user = texts
    return chat.first_prompt(system, user, tuple(zip(turns[::2], turns[1::2], strict=True)))


def _columns(played: Sequence[Trajectory], chat: ChatFormat, with_logprobs: bool) -> dict[str, list[Any]]:
    """Episodes as the columns that TRL takes: the first prompt, everything after it, and which of that was sampled."""
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs", REWARD, SUCCESS, SPANS)}
    for trajectory in played:
        prompt, ids, mask, logprobs = flatten(trajectory)
        failed = trajectory.stop_reason is StopReason.ENV_ERROR or not ids
        if not ids:  # TRL needs a token in every completion; the mask leaves this one out
            prompt, ids, mask, logprobs = prompt or [chat.end_of_turn], [chat.end_of_turn], [0], [0.0]
        row = (prompt, ids, mask, logprobs, None if failed else trajectory.reward, trajectory.success)
        for values, value in zip(columns.values(), (*row, [turn.reasoning_span for turn in trajectory.turns]), strict=True):
            values.append(value)
    if not with_logprobs:
        columns["logprobs"] = None  # type: ignore[assignment]
    return columns
