"""Every setting of a run, typed, with its range and its default, in the sections a config file has.

Parsing a config imports no torch: the command line can refuse a mistake at once. Defaults are the paper's (appendix B.2) where it
gives them; `model`-dependent ones are filled in when the settings are resolved, so a saved config never changes its meaning.
"""

from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, field_validator, model_validator

from tether.algorithms.filters.group_filter import GroupFilter
from tether.algorithms.filters.scores import SPREAD_SCORES
from tether.algorithms.presets import SECTIONS, Algorithm
from tether.core.config import Settings, merge
from tether.core.errors import did_you_mean
from tether.core.protocols import Sampling, server_addresses
from tether.diagnostics.settings import Action, AlarmSettings, DiagnosisSettings
from tether.envs.registry import ENVIRONMENTS, check_name
from tether.models.catalog import SHIPPED, TRAINED_WORDING
from tether.rollout.engines.registry import DEFAULT_ENGINE, ENGINES, SERVERS, engine_entry
from tether.rollout.prompt_memory import PromptMemorySettings
from tether.runs.trackers import TRACKERS
from tether.training.synonyms import WORDS

SCHEDULES = ("constant", "linear", "cosine")
"""Names of training.optim.SCHEDULES, known without torch."""
SHARDINGS = ("zero1", "fsdp")

SERVER_IMPORTANCE_CAP = 2.0
"""The cap of truncated importance sampling where an engine other than native samples, unless it is set."""

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _known(what: str, known: Collection[str], name: str) -> str:
    if name not in known:
        raise ValueError(f"is not a known {what}: {did_you_mean(name, known)}")
    return name


Schedule = Annotated[str, AfterValidator(partial(_known, "schedule", SCHEDULES))]


TASKS = "tether.envs.tasks:Tasks"
"""The environment whose instances are the tasks of an agent."""
MOST_EPISODES = 100_000
"""Episodes of one step: each has an environment and a conversation in memory."""


class EnvSettings(Settings):
    name: Annotated[str, AfterValidator(check_name)]
    """A registered name, "module:Class", or the address of a served environment."""
    options: dict[str, Any] = {}
    """Options of the environment, see `tether envs`; `split` is set by the trainer."""
    step_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a reset or a step may take where environments run beside each other; one that takes longer ends its episode."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, against the other environments of the run."""


class ModelSettings(Settings):
    name: str = "tiny"
    """The model to train: tiny, smollm2, a Hugging Face id or folder, or a .gguf file."""
    device: str | None = None
    """Where the model lives; null takes the GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What it computes in; null: bfloat16 on a GPU, float32 elsewhere. The optimiser's weights are float32 in any case."""


class LoraSettings(Settings):
    """Train low-rank adapters instead of all weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    """0 trains all weights."""
    alpha: Positive = 64
    """The adapters count with alpha / rank."""
    targets: str | list[str] = "all-linear"
    """Names of the layers that get an adapter."""


class TrainedModel(Protocol):
    """Settings that say which model is trained, and which of its weights: those of a run, or of supervised fine-tuning."""

    @property
    def model(self) -> ModelSettings: ...

    @property
    def lora(self) -> LoraSettings: ...

    @property
    def seed(self) -> int: ...

    @property
    def trains_vision(self) -> bool: ...


class CriticSettings(Settings):
    """The critic of algorithms that have one (ppo)."""

    shared: bool = False
    """True: a value head on the policy's own backbone; false: a model of its own."""
    model: str | None = None
    """That model; null: the same as the policy."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the critic. Null: 1e-5 (the paper's), or 1e-3 for the embedded `tiny`."""
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """How far a value may move in an update before its loss is clipped."""
    coef: Annotated[float, Field(gt=0)] = 0.5
    """Weight of the value loss beside the policy's; only on a shared backbone."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which only the critic learns."""


class RolloutSettings(Settings):
    num_groups: Annotated[int, Field(ge=1, le=MOST_EPISODES)] = 8
    """Prompts per step, P."""
    group_size: Annotated[int, Field(ge=1, le=MOST_EPISODES)] = 16
    """Trajectories per prompt, G."""
    first_members: Annotated[int, Field(ge=0)] = 0
    """Early decision: play so many trajectories of a prompt, and the others only where they are worth it; else try another prompt. 0 turns it off."""
    oversample: Positive = 1
    """Early decision: prompts that are tried at a time for each group wanted. 1 tries none in vain, more fill rows that would be idle."""
    max_tries: Positive = 8
    """Early decision: prompts that are tried for each group wanted, at most; without one that is worth it the batch is smaller."""
    explore: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Early decision: the share of prompts not worth it that are played whole all the same."""
    reweight_explored: bool = False
    """Early decision: weigh these by 1 / explore, so that the expected gradient is that of a run without early decision; its variance grows."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature of training."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from so many most likely tokens; 0 for all."""
    top_p: Share = 1.0
    """Of these, from the fewest that together have this share of their probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of these, from tokens with at least this share of the most likely one's probability."""
    max_tokens: Positive = 400
    """Budget of one response."""
    stop_ids: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] = []
    """Sequences of token ids that end a response, beside the end of the turn and the closing tags."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, beside the closing tags."""
    engine: str = DEFAULT_ENGINE
    """What samples responses: `native` decodes on the learner's own weights; `vllm` starts vLLM on this machine; `ray`: the
    engines of `tether train --ray`; or the address of a server, or several with commas between."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """How many updates the weights that sample a batch are behind: 0 samples with the newest, above 0 while the learner updates."""
    error_retries: Annotated[int, Field(ge=0)] = 1
    """How often an episode that an environment error ended is played again with the same seeds; one that fails again is left out."""
    max_context: Positive = 3600
    """Budget of one conversation; the model's own limit also holds."""
    max_rows: Positive = 128
    """Episodes decoded at a time."""
    cache_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory for keys and values, in GiB; null takes a quarter of what training leaves free. Where it runs out, episodes wait for others to end."""
    speculative_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    """Tokens of an episode that the native engine guesses from the other episodes and samples behind in one call, where few decode; 0 for none.
    Trajectories stay the same."""
    precision: Literal["fp8"] | None = None
    """fp8: the native engine samples with a copy of the MLPs in float8, rounded anew after every update, and importance sampling corrects the difference;
    null: with the learner's own weights."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1
    """Added to the reward of a turn whose response is malformed or whose action is unknown."""
    context: Literal["full", "last_k", "single_turn", "markov"] = "full"
    """What the agent sees of the turns before: all, the last k, a summary, or (markov) nothing."""
    last_k: Positive = 2
    """How many turns, in context mode `last_k`."""
    overlong_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The last part of `max_tokens`, as a share, in which a response is punished for its length; 0 turns it off."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """The punishment at the full length."""
    prompt_memory: PromptMemorySettings = PromptMemorySettings()

    @field_validator("engine")
    @classmethod
    def _engine(cls, name: str) -> str:
        for address in server_addresses(name):
            if not address.startswith(("http://", "https://")) or "@" in address:
                raise ValueError(
                    f"holds '{address}', which is not a server's address; write http://HOST:PORT, and the token into TETHER_TOKEN"
                )
        return name if server_addresses(name) else _known("engine", tuple(ENGINES), name)

    @model_validator(mode="after")
    def _samples_elsewhere(self) -> "RolloutSettings":
        entry = engine_entry(self.engine)
        if self.max_staleness and entry.shares_weights:
            raise ValueError(
                f"has max_staleness {self.max_staleness}, but engine is {self.engine}, which decodes on the learner's own weights and device, in turn "
                "with it; start 'tether serve MODEL' on another device and give its address as rollout.engine, or set max_staleness=0"
            )
        if self.speculative_tokens and not entry.speculates:
            raise ValueError(
                f"has speculative_tokens {self.speculative_tokens}, but engine is {self.engine}, and only the native engine guesses tokens; set "
                "speculative_tokens=0, and tell the server itself if it can do so"
            )
        if self.precision is not None and not entry.quantises:
            raise ValueError(
                f"has precision {self.precision}, but engine is {self.engine}, and only the native engine rounds weights for sampling; leave precision "
                "out, and tell the server itself if it can do so"
            )
        return self

    @model_validator(mode="after")
    def _decides_early(self) -> "RolloutSettings":
        if not self.first_members:
            return self
        if self.first_members == 1:
            raise ValueError("has first_members 1, and one trajectory shows no variance; give 2 or more, or 0 for no early decision")
        if self.first_members > self.group_size:
            raise ValueError(
                f"has first_members {self.first_members}, more than group_size {self.group_size}; give at most {self.group_size}, "
                "or raise group_size"
            )
        if self.reweight_explored and not self.explore:
            raise ValueError("has reweight_explored, but explore is 0: no explored prompt can stand for the others; raise explore")
        return self

    @property
    def most_members(self) -> int:
        """Episodes for each group wanted, at most, but for explored prompts."""
        return self.group_size + (self.max_tries - 1) * self.first_members

    @property
    def uses_servers(self) -> bool:
        """Whether servers sample, on devices of their own."""
        return engine_entry(self.engine).uses_servers

    @property
    def samples_with_copy(self) -> bool:
        """Whether what samples are not the learner's own weights."""
        return self.precision is not None or not engine_entry(self.engine).shares_weights

    def sampling(self, temperature: float) -> Sampling:
        """How responses are drawn at a temperature."""
        return Sampling(
            temperature, self.max_tokens, self.top_k, self.top_p, self.min_p, tuple(map(tuple, self.stop_ids)), tuple(self.stop_strings)
        )


class ServerSettings(Settings):
    """How servers are used, where `rollout.engine` is not native."""

    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one request may take."""
    patience: Annotated[float, Field(ge=0)] = 120.0
    """Seconds to wait for a server to come back when none can be reached; then the run stops with a checkpoint."""
    tolerance: Annotated[float, Field(gt=0)] | None = None
    """Most that log-probs of server and learner may differ on the probe, on average; null: 0.001 in float32, 0.05 in bfloat16."""
    weights_folder: str | None = None
    """A folder that learner and servers see: weights go through it; null: shared memory to `tether serve` on the same machine, else the network."""
    vllm_command: str = "vllm"
    """The command that starts vLLM, for `rollout.engine` vllm; a path where vLLM has an environment of its own."""
    vllm_args: list[str] = []
    """Further arguments of `vllm serve`."""
    vllm_start_timeout: Annotated[float, Field(gt=0)] = 900.0
    """Seconds until vLLM must answer."""


class LearnerSettings(Settings):
    renamed = {"final_share": "min_lr_ratio"}

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Learning rate of the policy. Null: 1e-6 (the paper's), or 1e-4 for the embedded `tiny`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the mean of the gradient."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay of the mean of its square."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to this norm."""
    update_batch: Positive = 32
    """Trajectories per optimiser update."""
    epochs: Positive = 1
    """Passes over the batch of a step."""
    micro_tokens: Positive = 8192
    """Tokens per forward pass; halved for the rest of the run where memory runs out, the update stays the same."""
    train_vision: bool = False
    """Train the vision tower of a model that sees, too; else it stays as it is, and the features of an image are computed once."""
    packing: bool = True
    """Let sequences stand behind one another in a forward pass instead of padding them."""
    share_prompts: bool = True
    """Compute what several sequences of a forward pass begin with once, where the model allows it."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them: less memory, more time, the same update. Null: as needed."""
    sharding: Annotated[str, AfterValidator(partial(_known, "sharding", SHARDINGS))] = "zero1"
    """What several ranks divide: zero1 the optimiser's state, fsdp also weights and gradients of the update, and where servers sample no rank holds whole weights."""
    schedule: Schedule = "constant"
    """How the learning rate changes after the warm-up: constant, linear or cosine, to `min_lr_ratio` of it in the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to its value."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of the learning rate at the last step, for schedules that fall."""


class EvaluationSettings(Settings):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates at the start and at the end only, and `prompts` 0 never."""
    prompts: Annotated[int, Field(ge=0)] | None = 512
    """Prompts to play; of a data file at most its rows. null: every row of a data file, 512 elsewhere. 0: a run evaluates nothing."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Sampling temperature of evaluation; 0 is greedy."""
    samples: Positive = 1
    """Episodes per prompt; with more than one, pass@k is measured."""
    env: EnvSettings | None = None
    """What is evaluated instead of the validation split of the run's environments, such as a test file; played as it is given."""


class EarlyStopSettings(Settings):
    """When a run ends before its last step; the defaults are the paper's."""

    variance_share: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Stop where the reward variance stays below this share of its mean over the first steps; 0 turns the rule off."""
    baseline_steps: Positive = 10
    """How many first steps that mean is taken over."""
    variance_steps: Positive = 5
    """For how many steps in a row."""
    success_floor: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop where validation success stays below this; 0 turns the rule off."""
    success_evaluations: Positive = 5
    """In how many evaluations in a row."""
    empty_steps: Annotated[int, Field(ge=0)] = 5
    """Stop after so many steps in a row in which the filter kept nothing; 0 turns the rule off."""
    invalid_steps: Annotated[int, Field(ge=0)] = 3
    """Stop after so many steps in a row in which no reply was valid; 0 turns the rule off."""
    nonfinite_updates: Annotated[int, Field(ge=0)] = 10
    """Stop after so many updates in a row whose gradient was not finite; 0 turns the rule off."""


class AgentSettings(Settings):
    """The user's own program as the agent, in the place of an environment; its tasks are rows of a file."""

    target: str | None = None
    """An async function (task, llm), as module:function."""
    command: str | None = None
    """Or a command that is started for every episode."""
    tasks: str | None = None
    """The file or data set of its tasks."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds of an episode; one that takes longer is ended and no evidence."""
    concurrency: Positive = 64
    """Episodes at a time."""
    max_calls: Positive = 64
    """Requests of an episode; a further one is refused."""
    max_tokens: Positive | None = None
    """Tokens sampled in an episode; null for any number."""
    history: Literal["exact", "template"] = "exact"
    """How a request that continues a conversation is read: on the tokens that were sampled, or rendered whole as a server in use does."""
    tool_format: str = "auto"
    """How the model writes tool calls: auto finds it in the chat template; or hermes, xml, llama3, mistral, schema, module:function."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that play the episodes; 0: the one that trains. Null: that on a CPU, beside a GPU eight, or as many as there are cores to spare."""
    train_calls: str = "all"
    """Which calls of an episode are trained: all, with_tools (not those without tools where others have them), or module:function of a call."""
    env: dict[str, str] = {}
    """Further environment variables of the command; {TETHER_BASE_URL}, {TETHER_API_KEY} and {TETHER_MODEL} stand for their values."""

    @property
    def is_given(self) -> bool:
        return self.target is not None or self.command is not None

    @model_validator(mode="after")
    def _is_whole(self) -> "AgentSettings":
        if self.target is not None and self.command is not None:
            raise ValueError("has both target and command; an agent is a function or a command, give one")
        if self.is_given and self.tasks is None:
            raise ValueError("has no tasks; give a file of them, such as agent.tasks=tasks.jsonl")
        return self


class CheckpointSettings(Settings):
    every: Positive = 20
    """Steps between two checkpoints."""
    keep: Positive = 2
    """How many of the newest checkpoints stay on disk."""
    best: bool = True
    """Keep the weights with the best validation success too."""
    last: bool = True
    """Write one at the last step, whatever `every` is. Runs that are made for their numbers alone need none."""
    moments: Literal["float32", "bfloat16"] | None = None
    """What Adam's moments are saved in: float32 is exact, bfloat16 takes a third off a checkpoint. None: float32, unless only bfloat16 fits on the disk."""


class RunSettings(Settings):
    """A whole run."""

    synonyms = WORDS

    env: EnvSettings
    also: list[EnvSettings] = []
    """Further environments of the same run; prompts are shared out by weight."""
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    algorithm: Algorithm = Algorithm()
    critic: CriticSettings = CriticSettings()
    filter: GroupFilter = GroupFilter()
    rollout: RolloutSettings = RolloutSettings()
    server: ServerSettings = ServerSettings()
    learner: LearnerSettings = LearnerSettings()
    diagnosis: DiagnosisSettings = DiagnosisSettings()
    alarms: AlarmSettings = AlarmSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    early_stop: EarlyStopSettings = EarlyStopSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    agent: AgentSettings = AgentSettings()
    trackers: list[str] = []
    """Experiment trackers that get a copy of the metrics: tensorboard, wandb, trackio, mlflow."""
    steps: Positive = 100
    """Training steps."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything."""

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: list[str]) -> list[str]:
        return [_known("tracker", TRACKERS, name) for name in dict.fromkeys(names)]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Defaults that depend on the model or on the algorithm are filled in, so that the saved config states them."""
        if not isinstance(data, dict):
            return data
        data = {key: value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value for key, value in data.items()}
        agent = data.get("agent")
        env = data.get("env", {})
        is_played = isinstance(agent, dict) and bool(agent.get("target") or agent.get("command")) and bool(agent.get("tasks"))
        if is_played and isinstance(env, dict) and "name" not in env:
            data["env"] = {**env, "name": TASKS, "options": {"data": agent["tasks"], **(env.get("options") or {})}}
        model, algorithm = (_entry(data, section, "name", default) for section, default in (("model", "tiny"), ("algorithm", "grpo")))
        small = model in SHIPPED
        defaults: dict[str, Any] = {
            "learner": {"learning_rate": 1e-4 if small else 1e-6},
            "critic": {"learning_rate": 1e-3 if small else 1e-5},
        }
        wording = TRAINED_WORDING.get(model) if isinstance(model, str) else None
        if wording is not None:
            data |= {"env": _worded(data["env"], wording)} if "env" in data else {}
            if isinstance(data.get("also"), list):
                data["also"] = [_worded(env, wording) for env in data["also"]]
        defaults = merge(defaults, SECTIONS.get(algorithm, {}) if isinstance(algorithm, str) else {})
        for section, values in defaults.items():
            given = data.get(section, {})
            if isinstance(given, dict):
                data[section] = {**values, **{key: value for key, value in given.items() if value is not None or key not in values}}
        chosen = data.get("algorithm", {})
        engine = str(_entry(data, "rollout", "engine", DEFAULT_ENGINE))
        copied = not ENGINES.get(engine, SERVERS).shares_weights or _entry(data, "rollout", "precision", None) is not None
        if copied and isinstance(chosen, dict):  # sampler and learner are two models
            data["algorithm"] = {"importance_cap": SERVER_IMPORTANCE_CAP, **chosen}  # null is a choice: no correction
        return data

    @model_validator(mode="after")
    def _groups_can_vary(self) -> "RunSettings":
        drops = self.filter.strategy != "all" or not self.filter.include_zero
        if drops and self.filter.score in SPREAD_SCORES and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size} but filter.score is '{self.filter.score}', which needs at least 2 "
                "trajectories per prompt; raise group_size or set filter.strategy=all with filter.include_zero=true"
            )
        if self.rollout.prompt_memory.candidates and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size}, and rollout.prompt_memory needs at least 2 trajectories per prompt to see a "
                "variance; raise group_size or set rollout.prompt_memory.candidates=0"
            )
        return self

    @model_validator(mode="after")
    def _decides_as_it_filters(self) -> "RunSettings":
        """Early decision seeks a large spread within the group: refuse a filter that seeks something else."""
        if not self.rollout.first_members:
            return self
        chosen, advice = self.filter, "or set rollout.first_members=0"
        if chosen.score not in SPREAD_SCORES:
            raise ValueError(
                f"rollout.first_members decides by a spread within the group, and filter.score is '{chosen.score}'; "
                f"choose {', '.join(sorted(SPREAD_SCORES))}, {advice}"
            )
        if chosen.order != "largest":
            raise ValueError(f"rollout.first_members seeks large scores, and filter.order is '{chosen.order}'; choose largest, {advice}")
        if chosen.strategy in ("band", "auto"):
            raise ValueError(
                f"filter.strategy '{chosen.strategy}' looks at the scores of all prompts, and rollout.first_members plays the best of them whole; "
                f"choose top_p, top_k, min_p or all, {advice}"
            )
        return self

    @model_validator(mode="after")
    def _alarms_can_act(self) -> "RunSettings":
        fixed = self.filter.strategy in ("all", "band") or self.filter.num_groups is not None
        if fixed and (asked := self.alarms.asks_for(Action.TIGHTEN_FILTER, Action.LOOSEN_FILTER)):
            raise ValueError(
                f"alarms.actions asks for {asked}, but filter.strategy '{self.filter.strategy}' has no share to change; "
                "choose top_p, top_k with a share, min_p or auto"
            )
        return self

    @model_validator(mode="after")
    def _agents_can_learn(self) -> "RunSettings":
        if not self.agent.is_given:
            return self
        if self.algorithm.has_critic:
            raise ValueError(
                f"algorithm.name is '{self.algorithm.name}', whose values run along one conversation, and an agent may hold several at once; "
                "choose grpo, dapo or dr_grpo"
            )
        if not engine_entry(self.rollout.engine).shares_weights:
            raise ValueError(
                f"rollout.engine is {self.rollout.engine}; agents are played with the native engine, set rollout.engine=native"
            )
        return self

    @model_validator(mode="after")
    def _one_of_each_environment(self) -> "RunSettings":
        names = [env.name for env in self.environments()]
        if len(set(names)) < len(names):
            raise ValueError(f"the run has an environment twice ({', '.join(names)}); give each once, with its weight")
        return self

    def environments(self) -> list[EnvSettings]:
        return [self.env, *self.also]

    @property
    def trains_vision(self) -> bool:
        return self.learner.train_vision

    def divides_weights(self, num_ranks: int) -> bool:
        """Whether no rank holds whole weights: they are divided, and servers sample."""
        return self.learner.sharding == "fsdp" and num_ranks > 1 and self.rollout.uses_servers

    def sampling(self) -> Sampling:
        return self.rollout.sampling(self.rollout.temperature)

    def evaluation_sampling(self) -> Sampling:
        return self.rollout.sampling(self.evaluation.temperature)


def _worded(env: Any, wording: str) -> Any:
    """The section of a built-in environment with this wording, where none was chosen; anything else as it is."""
    values = env.model_dump(exclude_unset=True) if isinstance(env, Settings) else env
    options = (values.get("options") or {}) if isinstance(values, dict) else None
    if not isinstance(options, dict) or values.get("name") not in ENVIRONMENTS.names():
        return env
    return {**values, "options": {"instructions": wording, **options}}


def _entry(data: dict[str, Any], section: str, key: str, default: Any) -> Any:
    """A value of a section that may be missing or malformed."""
    values = data.get(section, {})
    return values.get(key, default) if isinstance(values, dict) else default
