"""`tether.sft`: supervised fine-tuning from a source of demonstrations to a model folder. The command line calls the same functions.

The source and the settings are checked before torch is loaded. The folder appears whole or not at all, with a record of how it was made.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.config import merge, validate
from tether.core.errors import BadInput
from tether.core.protocols import Env
from tether.core.version import __version__
from tether.models.catalog import check_name
from tether.runs.store import RunStore
from tether.training.agent import Agent
from tether.training.resolve import nested_settings
from tether.training.sft.settings import LORA_RANK, RECORD, SftSettings, default_learning_rate

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat
    from tether.models.policy import Policy
    from tether.training.sft.demonstrations import Conversation, Demonstration
    from tether.training.sft.trainer import SupervisedTrainer

Progress = Callable[[str, int, int, str], None]
"""Called with stage, done, total, and a short remark."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where demonstrations come from; one of the three is given."""

    names: tuple[str, ...]
    """As the user wrote them."""
    envs: tuple[Env, ...] = ()
    conversations: tuple["Conversation", ...] = ()
    records: tuple[dict[str, Any], ...] = ()
    """Trajectories of a run folder."""
    environments: tuple[str, ...] = ()
    """What the model can be trained on next, where that is known."""

    @property
    def kind(self) -> str:
        return "experts" if self.envs else "conversations" if self.conversations else "trajectories"


@dataclass(frozen=True, slots=True)
class SftResult:
    """What came of it."""

    folder: Path
    record: dict[str, Any]
    """The contents of sft.json."""
    environments: tuple[str, ...]
    """What the model can be trained on next, where that is known."""


def sft(
    source: str | Path | Sequence[str | Path],
    model: str | Mapping[str, Any] = "tiny",
    out: Path | str = "sft",
    *,
    lora: bool = False,
    steps: int | None = None,
    epochs: int | None = None,
    episodes: int | None = None,
    seed: int | None = None,
    progress: Progress = lambda stage, done, total, remark: None,
    **settings: Any,
) -> SftResult:
    """Fine-tune a model on demonstrations: the same as `tether sft`, without the progress bar.

    Args:
        source: one or several environments with an expert, a .jsonl file of conversations, or a run folder.
        model: tiny, smollm2, a Hugging Face id or folder, or a .gguf file; or the settings of that section.
        out: folder for the new model; must not exist yet.
        lora: train adapters instead of all weights.
        steps: optimiser updates; by default as many as the epochs take.
        epochs: passes over the demonstrations.
        episodes: episodes that the experts play.
        seed: seed of everything.
        progress: called with stage, done, total, and a short remark.
        settings: any other setting by section, such as learner={"learning_rate": 1e-5}, or dotted.
    """
    given = merge(named_settings(model, lora, steps, epochs, episodes, seed), nested_settings(settings))
    names = [source] if isinstance(source, str | Path) else source
    chosen, found = resolve([str(name) for name in names], Path(out), given)
    return run_sft(found, chosen, Path(out), progress)


def named_settings(
    model: str | Mapping[str, Any], lora: bool, steps: int | None, epochs: int | None, episodes: int | None, seed: int | None
) -> dict[str, Any]:
    """The arguments that have a name of their own, as nested settings."""
    nested: dict[str, Any] = {"model": dict(model) if isinstance(model, Mapping) else {"name": model}}
    nested |= {"lora": {"rank": LORA_RANK}} if lora else {}
    nested |= {"experts": {"episodes": episodes}} if episodes is not None else {}
    return nested | {key: value for key, value in (("steps", steps), ("epochs", epochs), ("seed", seed)) if value is not None}


def resolve(names: Sequence[str], out: Path, given: Mapping[str, Any]) -> tuple[SftSettings, Source]:
    """Settings and source, checked as far as that goes without torch."""
    if out.exists():
        raise BadInput(f"folder '{out}' exists; choose another --out")
    settings = validate(SftSettings, given, what="sft setting")
    check_name(settings.model.name)
    return settings, find_source(names, settings)


def find_source(names: Sequence[str], settings: SftSettings) -> Source:
    """A run folder, a file of conversations, or environments whose expert plays."""
    from tether.training.sft.demonstrations import read_conversations, select_trajectories
    from tether.training.sft.experts import make_expert_envs

    names = [part.strip() for name in names for part in ([name] if Path(name).exists() else name.split(",")) if part.strip()]
    if not names:
        raise BadInput("no source of demonstrations given; name an environment, a .jsonl file of conversations or a run folder")
    files = [Path(name) for name in names if Path(name).suffix in (".jsonl", ".json") or "/" in name or Path(name).exists()]
    if files and len(names) > 1:
        raise BadInput(f"the source is {', '.join(names)}; give one file, one run folder, or environments alone")
    if not files:
        return Source(tuple(names), envs=tuple(make_expert_envs(names, settings.experts.options)), environments=tuple(names))
    if files[0].is_dir():
        records = select_trajectories(files[0], settings.trajectories)
        played = dict.fromkeys(str(record.get("env") or RunStore.open(files[0]).about().get("env", "")) for record in records)
        return Source(tuple(names), records=tuple(records), environments=tuple(name for name in played if name))
    return Source(tuple(names), conversations=tuple(read_conversations(files[0])))


def run_sft(source: Source, settings: SftSettings, out: Path, progress: Progress) -> SftResult:
    """Load the model, make the demonstrations, train, and write the folder. Ctrl-C writes what was learned by then and is raised again."""
    from tether.core.seeding import seed_everything
    from tether.models.chat import ChatFormat
    from tether.models.load import DTYPES
    from tether.models.lora import is_lora
    from tether.training.build import compute_dtype, load_policy
    from tether.training.memory import check_fits
    from tether.training.sft.demonstrations import fitting, hold_out
    from tether.training.sft.trainer import SupervisedTrainer

    progress("loading the model", 0, 1, "")
    seed_everything(settings.seed)
    check_fits(settings)
    policy = load_policy(settings, settings.max_context)
    progress("loading the model", 1, 1, "")
    assert policy.tokenizer is not None  # loaded with the model
    made = demonstrations_of(source, settings, ChatFormat(policy.tokenizer, policy.end_of_turn_ids, policy.vision), progress)
    fit = fitting(made, policy.max_positions)
    learned, held_out = hold_out(fit, settings.held_out, settings.seed)
    adapters, size = is_lora(policy.module), sum(parameter.numel() for parameter in policy.module.parameters())
    rate = settings.learner.learning_rate or default_learning_rate(size, adapters)
    dtype = None if adapters else DTYPES[compute_dtype(settings)]
    trainer = SupervisedTrainer(policy, settings.learner, rate=rate, seed=settings.seed, dtype=dtype)
    about = {"demonstrations": len(learned), "held_out": len(held_out), "left_out": len(made) - len(fit), "learning_rate": rate}
    steps = settings.steps or settings.epochs * -(-len(learned) // settings.learner.update_batch)
    started, interrupted = time.monotonic(), False
    try:
        trainer.train(
            learned,
            steps,
            lambda done, total, remark: progress("training", done, total, remark),
            held_out=held_out,
            evaluate_every=settings.evaluate_every,
            patience=settings.patience,
        )
    except KeyboardInterrupt:
        if not trainer.history.steps:
            raise
        interrupted = True
    ended = "interrupted" if interrupted else "stopped early" if trainer.history.stopped_early else "all steps done"
    record = {**make_record(source, settings, policy, trainer), **about, "ended": ended, "seconds": round(time.monotonic() - started, 1)}
    write_folder(out, policy, trainer, record, agent_of(source, settings))
    if interrupted:
        raise KeyboardInterrupt
    return SftResult(out, record, source.environments)


def demonstrations_of(source: Source, settings: SftSettings, chat: "ChatFormat", progress: Progress) -> list["Demonstration"]:
    """The source as demonstrations in this model's tokens."""
    from tether.training.sft.demonstrations import demonstrated, tokenized
    from tether.training.sft.experts import Experts

    if source.envs:
        experts = Experts(source.envs, chat, settings.experts.weaknesses, settings.end_of_turn, settings.experts.tries)
        return experts.record(settings.seed, range(settings.experts.episodes), lambda *said: progress("episodes", *said))
    if source.conversations:
        return tokenized(source.conversations, chat, settings.end_of_turn)
    return demonstrated(list(source.records), chat, Path(source.names[0]), settings.model.name)


def make_record(source: Source, settings: SftSettings, policy: "Policy", trainer: "SupervisedTrainer") -> dict[str, Any]:
    """What sft.json says, apart from the numbers of demonstrations and how the training ended."""
    from tether.models.hardware import device_name

    history = trainer.history
    return {
        "tether": __version__,
        "source": {"kind": source.kind, "names": list(source.names)},
        "model": settings.model.name,
        "settings": settings.model_dump(mode="json"),
        "steps": history.steps,
        "best_step": history.best_step,
        "tokens": history.tokens,
        "losses": history.losses,
        "held_out_losses": history.held_out,
        "device": device_name(policy.device),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "transformers")}},
    }


def agent_of(source: Source, settings: SftSettings) -> Agent:
    """How the model is asked from now on: as in the demonstrations."""
    if source.records:
        return Agent.of_config(RunStore.open(Path(source.names[0])).config())
    shown = {name: {"few_shot": 0, **settings.experts.options.get(name, {})} for name in source.names if source.envs}
    # None is the environment's own number of examples.
    return Agent({name: {key: value for key, value in options.items() if value is not None} for name, options in shown.items()})


def write_folder(out: Path, policy: "Policy", trainer: "SupervisedTrainer", record: Mapping[str, Any], agent: Agent) -> None:
    """Write the best weights in float32, the tokenizer, the record and how the model is asked to a new folder."""
    from tether.training.checkpoint import write_model
    from tether.training.export import new_folder

    assert policy.tokenizer is not None  # loaded with the model
    with new_folder(out) as draft, trainer.best_weights():
        write_model(draft, policy.module, policy.tokenizer, agent)
        (draft / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


__all__ = ["SftResult", "sft"]
