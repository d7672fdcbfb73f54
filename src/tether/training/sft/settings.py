"""Every setting of `tether sft` and of its recipe `tether warmstart`, typed, with its range and its default. Nothing here imports torch: a mistake is refused at once."""

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from tether.core.config import Settings, merge
from tether.core.errors import did_you_mean
from tether.training.settings import LearnerSettings, LoraSettings, ModelSettings, Positive, Schedule

RECORD = "sft.json"
"""Of a model folder that `tether sft` has written: how it was made."""
LORA_RANK = 32
"""Of `--lora`."""
EXPERTS = ("frozen_lake", "sokoban", "countdown")
"""Environments that have an expert."""
SMALL_MODEL = 500_000_000
"""Parameters below which a model takes the larger of the two default learning rates."""


Probability = Annotated[float, Field(ge=0, le=1)]


class Weaknesses(Settings):
    """How often an expert fails, and in which way; by default never."""

    habit: Probability = 0.0
    """Chance of a thought that fits every task, followed by a try at random."""
    confusion: Probability = 0.0
    """Chance of mixing up opposite directions."""
    indecision: Probability = 0.0
    """Chance of a second step that takes back the first."""
    sloppiness: Probability = 0.0
    """Chance of an answer that names no action."""


class ExpertSettings(Settings):
    """Demonstrations by experts, where the source is an environment."""

    episodes: Positive = 1000
    """Episodes of all environments together, in turn."""
    weaknesses: Weaknesses = Weaknesses()
    """How often an expert fails; never by default."""
    tries: Annotated[int, Field(ge=0, le=20)] = 6
    """Countdown: expressions that miss the target, at most, which an expert computes before the right one; how many is drawn."""
    options: dict[str, dict[str, Any]] = {}
    """Options of the environments, by environment."""

    @field_validator("options")
    @classmethod
    def _of_known_environments(cls, options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, values in options.items():
            if name not in EXPERTS:
                raise ValueError(f"name an environment with an expert: {did_you_mean(name, EXPERTS)}")
            if "split" in values:
                raise ValueError("hold a split; demonstrations always come from the training split")
        return options


class TrajectorySettings(Settings):
    """Rejection sampling, where the source is a run folder."""

    success_only: bool = True
    """Only episodes that solved their task."""
    min_reward: float | None = None
    """Only episodes with at least this return."""
    max_per_prompt: Positive | None = None
    """At most so many episodes of a prompt, those with the highest return."""
    first_step: Positive = 1
    """Only episodes of this training step and later."""
    last_step: Positive | None = None
    """Only episodes of this training step and earlier."""


class SftLearnerSettings(Settings):
    """How the demonstrations are learned; names and meanings of a run's `learner` section."""

    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Null: 1e-4 for models of less than half a billion parameters, 2e-5 for larger ones, 2e-4 for adapters."""
    update_batch: Positive = 16
    """Demonstrations per optimiser update."""
    schedule: Schedule = "cosine"
    """How the learning rate goes on after the warm-up: constant, linear or cosine."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the steps in which the learning rate rises to its value."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of the learning rate at the last step."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of AdamW."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """Of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to this norm."""
    micro_tokens: Positive = 8192
    """Tokens per forward pass; halved where memory runs out, the update stays the same."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of keeping them. Null: as needed."""
    train_vision: bool = False
    """Train the vision tower of a model that sees, too."""

    def learner(self) -> LearnerSettings:
        """The same as settings of the learner, which is given the rate of every step."""
        return LearnerSettings(**self.model_dump(exclude={"learning_rate", "schedule", "warmup_ratio", "min_lr_ratio"}))


class SftSettings(Settings):
    """A whole supervised fine-tuning."""

    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    experts: ExpertSettings = ExpertSettings()
    trajectories: TrajectorySettings = TrajectorySettings()
    learner: SftLearnerSettings = SftLearnerSettings()
    epochs: Positive = 2
    """Passes over the demonstrations."""
    steps: Positive | None = None
    """Optimiser updates; null: as many as the epochs take."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the prompts whose demonstrations are not trained on, to stop by their loss; 0 for none."""
    evaluate_every: Positive = 10
    """Steps between evaluations of the held-out loss."""
    patience: Positive = 3
    """Stop after so many evaluations in a row without a lower held-out loss."""
    end_of_turn: bool = True
    """Teach the token that ends a turn after every demonstrated response."""
    max_context: Positive = 3600
    """Demonstrations with more tokens are left out; the model's own limit also holds."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of everything that is drawn."""

    @property
    def trains_vision(self) -> bool:
        return self.learner.train_vision


def default_learning_rate(num_parameters: int, adapters: bool) -> float:
    """The learning rate where none was given."""
    if adapters:
        return 2e-4
    return 1e-4 if num_parameters < SMALL_MODEL else 2e-5


# ------------------------------------------------------------------------------------------------------- the recipe of tiny

LESSONS: dict[str, Any] = {
    "skill": {
        "weaknesses": {"habit": 0.6, "confusion": 0.3, "indecision": 0.6, "sloppiness": 0.03},
        "steps": 3300,
        "episodes": 50_000,
        "learning_rate": 1.5e-3,
    },
    "habit": {
        "weaknesses": {"habit": 0.7, "confusion": 0.1, "indecision": 0.3, "sloppiness": 0.03},
        "steps": 400,
        "episodes": 8_000,
        "learning_rate": 4e-4,
    },
}
"""The lessons of `tiny`; what is not configured stays as here."""


class Lesson(Settings):
    """Experts to imitate, and for how long."""

    weaknesses: Weaknesses
    steps: Positive
    episodes: Positive
    """Demonstrated episodes of all environments; training goes round them as often as the steps need."""
    turns: Positive | None = None
    """Only the first turns of an episode, so many; null: all."""
    learning_rate: Annotated[float, Field(gt=0)]


class WarmstartSettings(Settings):
    """What `tiny` is made of."""

    skill: Lesson
    habit: Lesson
    batch: Positive = 64
    width: Positive = 192
    hidden: Positive = 512
    layers: Positive = 5
    heads: Positive = 4
    positions: Positive = 1024
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        return _filled_in(LESSONS, data)


EYE_LESSONS: dict[str, Any] = {
    "skill": {
        "weaknesses": {"habit": 0.2, "confusion": 0.05, "indecision": 0.2, "sloppiness": 0.03},
        "steps": 1400,
        "episodes": 12_000,
        "learning_rate": 1.5e-3,
    },
    "habit": {
        "weaknesses": {"habit": 0.75, "confusion": 0.1, "indecision": 0.3, "sloppiness": 0.03},
        "steps": 120,
        "episodes": 3_840,
        "learning_rate": 3e-4,
    },
}
"""The lessons of `tiny-vl`."""


class EyesSettings(Settings):
    """What `tiny-vl` is made of: `tiny`, and a small tower of Qwen2.5-VL's kind."""

    word_steps: Positive = 200
    """Updates in which the tower learns the symbols of the grids."""
    skill: Lesson
    habit: Lesson
    batch: Positive = 32
    width: Positive = 64
    hidden: Positive = 128
    layers: Positive = 2
    heads: Positive = 2
    patch: Positive = 8
    """Pixels of a patch's side; four patches become a token, so one of 8 makes a token of a grid's cell."""
    max_pixels: Positive = 192 * 192
    """Larger images are made smaller."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        return _filled_in(EYE_LESSONS, data)


def _filled_in(lessons: dict[str, Any], data: Any) -> Any:
    """A lesson that is configured in part is that of the recipe for the rest."""
    if not isinstance(data, dict):
        return data
    return merge(lessons, {key: value.model_dump() if isinstance(value, Settings) else value for key, value in data.items()})
