"""Every setting of a run, typed, with its range and its default, in the sections a config file has.

Parsing a config imports no torch: the command line can refuse a mistake at once. Defaults are the paper's (appendix B.2) where it
gives them; `model`-dependent ones are filled in when the settings are resolved, so a saved config never changes its meaning.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tether.algorithms.filters.auto import AUTO
from tether.algorithms.filters.scores import SCORES, SPREAD_SCORES
from tether.algorithms.filters.select import ORDERS, STRATEGIES, check_band
from tether.algorithms.presets import PRESETS
from tether.core.config import Settings
from tether.core.errors import did_you_mean
from tether.core.protocols import Sampling
from tether.envs.registry import check_name

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _known(what: str, name: str, known: Any) -> str:
    if name not in known:
        raise ValueError(f"is not a known {what}: {did_you_mean(name, known)}")
    return name


class EnvSettings(Settings):
    name: str
    """A registered name, "module:Class", or the address of a served environment."""
    options: dict[str, Any] = {}
    """Options of the environment, see `tether envs`; `split` is set by the trainer."""
    step_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds a reset or a step may take where environments run beside each other; one that takes longer ends its episode."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)


class ModelSettings(Settings):
    name: str = "tiny"
    device: str | None = None
    """Where the model lives; null takes the GPU if there is one."""


class AlgorithmSettings(Settings):
    """A preset and, where given, departures from it."""

    name: str = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_high: Annotated[float, Field(gt=0)] | None = None
    entropy_coef: Annotated[float, Field(ge=0)] | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _known("algorithm", name, PRESETS)


class FilterSettings(Settings):
    strategy: str = "top_p"
    keep: Share = 0.9
    score: str = "reward_variance"
    order: str = "largest"
    include_zero: bool = True
    eps: Annotated[float, Field(ge=0)] = 0.01
    band: tuple[float, float] | None = None
    loss_scale: Literal["kept_ratio", "sqrt", "none"] = "kept_ratio"
    auto_ratio: Annotated[float, Field(gt=0)] = 0.75
    """Strategy `auto` filters where Std(RV) / Mean(RV) is at least this, on average over the recent steps."""
    auto_steps: Positive = 5
    """How many recent steps, the present one included."""

    @field_validator("strategy", "score", "order")
    @classmethod
    def _names(cls, name: str, info: Any) -> str:
        known: dict[str, Any] = {"strategy": [*STRATEGIES, AUTO], "score": SCORES, "order": ORDERS}
        return _known(f"filter {info.field_name}", name, known[info.field_name])

    @model_validator(mode="after")
    def _band_is_given(self) -> "FilterSettings":
        if self.strategy == "band":
            check_band(self.band)
        return self


class RolloutSettings(Settings):
    num_groups: Positive = 8
    """Prompts per step, P."""
    group_size: Positive = 16
    """Trajectories per prompt, G."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    max_tokens: Positive = 400
    """Budget of one response."""
    max_context: Positive = 3600
    """Budget of one conversation; the model's own limit also holds."""
    max_rows: Positive = 128
    """Episodes decoded at a time."""
    format_penalty: Annotated[float, Field(le=0)] = -0.1


class LearnerSettings(Settings):
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Null: 1e-6 (the paper's), or 1e-4 for the embedded `tiny`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    update_batch: Positive = 32
    """Trajectories per optimiser update."""
    micro_tokens: Positive = 8192
    """Padded tokens per forward pass; lower it if memory runs out, the update stays the same."""


class DiagnosisSettings(Settings):
    every: Annotated[int, Field(ge=0)] = 5
    """Steps between measurements of the information proxies; 0 turns them off."""


class EvaluationSettings(Settings):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 evaluates at the start and at the end only."""
    prompts: Positive = 512
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.5


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


class CheckpointSettings(Settings):
    every: Positive = 20
    keep: Positive = 2
    """How many of the newest checkpoints stay on disk."""


class RunSettings(Settings):
    """A whole run."""

    env: EnvSettings
    model: ModelSettings = ModelSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    filter: FilterSettings = FilterSettings()
    rollout: RolloutSettings = RolloutSettings()
    learner: LearnerSettings = LearnerSettings()
    diagnosis: DiagnosisSettings = DiagnosisSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    early_stop: EarlyStopSettings = EarlyStopSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    steps: Positive = 100
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_learning_rate(cls, data: Any) -> Any:
        """The default learning rate depends on the model; fill it in so that the saved config states it."""
        if not isinstance(data, dict):
            return data
        sections = [data.get(key, {}) for key in ("learner", "model")]
        learner, model = (section.model_dump() if isinstance(section, Settings) else section for section in sections)
        if isinstance(learner, dict) and isinstance(model, dict) and learner.get("learning_rate") is None:
            rate = 1e-4 if model.get("name", "tiny") == "tiny" else 1e-6
            data = {**data, "learner": {**learner, "learning_rate": rate}}
        return data

    @model_validator(mode="after")
    def _groups_can_vary(self) -> "RunSettings":
        if self.filter.strategy != "all" and self.filter.score in SPREAD_SCORES and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size is {self.rollout.group_size} but filter.score is '{self.filter.score}', which needs at least 2 "
                "trajectories per prompt; raise group_size or set filter.strategy=all"
            )
        return self

    def sampling(self) -> Sampling:
        return Sampling(self.rollout.temperature, self.rollout.max_tokens)

    def evaluation_sampling(self) -> Sampling:
        return Sampling(self.evaluation.temperature, self.rollout.max_tokens)
