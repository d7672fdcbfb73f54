"""The model that scores an audit: any name `load_model` takes, a run folder, or the address of an OpenAI-compatible server."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.errors import BadInput
from tether.runs.checkpoints import MODEL, newest_checkpoint
from tether.runs.store import RunStore

if TYPE_CHECKING:
    from tether.models.load import LoadedModel

ANY_ID = 2**31
"""A server does not say how many ids it knows; it refuses unknown ids itself."""


@dataclass(frozen=True, slots=True)
class AuditScorer:
    """A scorer with its tokenizer and limits."""

    name: str
    scorer: Any
    """Something cross_score takes."""
    tokenizer: Any
    vocabulary: int
    positions: int | None
    """Tokens it can see; None where it does not say."""
    precision: str
    vision: Any = None
    """How it sees; None for a model that reads text only, and for a server."""


def is_server(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def resolve_model(name: str) -> tuple[str, str | None]:
    """The model behind a name, and in words which one was taken where the name is a run folder: its last checkpoint, else its start."""
    folder = Path(name)
    if not (folder / "run.json").is_file():
        return name, None
    checkpoint = newest_checkpoint(RunStore.open(folder).checkpoints)
    if checkpoint is None:
        return starting_model(folder)
    return str(checkpoint / MODEL), f"scored by the run's last checkpoint, {checkpoint.name}"


def starting_model(run: Path) -> tuple[str, str]:
    """The model that a run began with, and a sentence that says so: a frozen scorer does not drift with the policy."""
    name = str(RunStore.open(run).config().get("model", {}).get("name", ""))
    if not name:
        raise BadInput(f"run '{run}' names no model; say which one scores it with --model")
    return name, f"scored by the model that the run began with, {name}; --model {run} takes its last checkpoint"


def load_scorer(name: str, *, tokenizer: str | None = None, device: str | None = None) -> AuditScorer:
    """Load the model.

    `tokenizer` names the words of the rollouts' token ids, by a model's name: of a server, which does not hand out its own, or of another
    model than the one that scores, which then reads the text.
    """
    if is_server(name):
        return _server(name, tokenizer, device)
    from tether.models.load import load_model

    return loaded_scorer(load_model(name, device=device), tokenizer=tokenizer, name=name)


def loaded_scorer(loaded: "LoadedModel", *, tokenizer: str | None = None, name: str | None = None) -> AuditScorer:
    """A scorer over a model that is already loaded, with its tokenizer."""
    from tether.models.policy import Policy, model_positions
    from tether.models.scoring.local import PrefixScorer, without_wrapper
    from tether.models.scoring.make import RetokenizedScorer, same_tokens

    model, own = loaded
    scorer = PrefixScorer(Policy(without_wrapper(model), own))
    name = name or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    reach = model_positions(model)
    positions = reach if reach < ANY_ID else None
    written = own if tokenizer is None else _tokenizer(tokenizer)
    if same_tokens(written, own):
        return AuditScorer(name, scorer, own, scorer.vocabulary_size, positions, scorer.precision, scorer.policy.vision)
    return AuditScorer(name, RetokenizedScorer(scorer, written, own), written, len(written), positions, scorer.precision)


def _server(name: str, tokenizer: str | None, device: str | None) -> AuditScorer:
    if tokenizer is None:
        raise BadInput(f"'{name}' is a server, which does not provide its tokenizer; name the model's with --tokenizer")
    from tether.models.scoring.make import make_scorer

    return AuditScorer(name, make_scorer(name, device=device).scorer, _tokenizer(tokenizer), ANY_ID, None, "the server's")


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    from tether.models.catalog import EMBEDDED, check_name, embedded_folder
    from tether.models.load import complete_tokenizer

    check_name(name)
    place = str(embedded_folder(name) if name in EMBEDDED else name)
    try:
        words = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"no tokenizer can be had from '{name}': {' '.join(str(error).split())[:120]}; give a folder or an id") from error
    complete_tokenizer(words)
    return words
