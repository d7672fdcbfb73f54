"""Export: one checkpoint of a run as a plain Hugging Face folder, with a card that says where it comes from.

Adapters are merged, weights cast, and the folder appears whole or not at all. Every number of the card is read from the run's records.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, StorageError
from tether.core.temporary import temporary_folder
from tether.core.version import __version__
from tether.models.load import DTYPES
from tether.models.lora import is_lora, merged
from tether.runs.store import RunStore
from tether.runs.verdict import Rate, validation
from tether.training.agent import AGENT, Agent
from tether.training.checkpoint import load_checkpoint, write_model

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- tether
- reinforcement-learning
---

# {env}: {model} trained with {algorithm}

An agent trained by reinforcement learning with Tether. It reasons between `<think>` and `</think>` and acts between `<answer>` and
`</answer>`.

| | |
|---|---|
| environment | {env} |
| starting model | {model} |
| algorithm | {algorithm} |
| steps | {step} of {steps} |
| seed | {seed} |
| validation success | {success} |
| validation success before training | {start} |
| weights | {dtype}{adapters} |
| Tether | {trained_by}, exported with {exported_by} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

`{agent}` holds how it was asked in training: options of its environments, context and lengths. `tether eval {folder}` asks in the same way.

The licence of the starting model holds for this one as well.
"""


def export_checkpoint(store: RunStore, checkpoint: Path, step: int, out: Path, dtype: str) -> None:
    """Write the model of a checkpoint, its tokenizer and its card to a new folder."""
    check_new(out)
    loaded = load_checkpoint(checkpoint, "cpu")
    adapters = is_lora(loaded.model)
    model: Any = merged(loaded.model) if adapters else loaded.model
    with new_folder(out) as draft:
        write_model(draft, model.to(DTYPES[dtype]), loaded.tokenizer, Agent.of_config(store.config()))
        (draft / "README.md").write_text(model_card(store, step, out.name, dtype, adapters), encoding="utf-8")


def check_repository(name: str) -> None:
    """Refuse what cannot be a repository of the hub before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(f"--push-to-hub got '{name}'; write it as OWNER/NAME ({_one_line(error)})") from error
    if name.count("/") != 1:
        raise BadInput(f"--push-to-hub got '{name}'; write it as OWNER/NAME, for example me/frozen-lake-agent")


def push(folder: Path, repository: str) -> str:
    """Upload a folder to the Hugging Face hub, as a private repository where there is none yet; returns its address."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Exported with Tether")
    except (OSError, httpx.HTTPError, HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise StorageError(
            f"'{folder}' is written, but could not be uploaded to '{repository}': {_one_line(error)}; log in with `hf auth login`, check the "
            f"network, then: hf upload {repository} {folder}"
        ) from error
    return str(address)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A place to write a folder in, which becomes `out` at the end of the block; where anything fails, nothing is left behind."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{out.name}.unfinished-", out.parent) as unfinished:
            yield unfinished / out.name
            (unfinished / out.name).rename(out)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(f"cannot write '{out}': {_one_line(error)}; {'free some space or ' * full}choose another --out") from error


def check_new(out: Path) -> None:
    """Refuse a place that holds anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"'{out}' exists and is not overwritten; choose another --out")


def model_card(store: RunStore, step: int, folder: str, dtype: str, adapters: bool) -> str:
    """The facts of a run and of one of its steps, as the README.md of a model."""
    about, config = store.about(), store.config()
    model = str(about.get("model", "unknown"))
    rates = {rate.step: rate for rate in validation(store.steps())}
    return CARD.format(
        env=", ".join(_environments(about, config)),
        model=Path(model).name if Path(model).expanduser().exists() or Path(model).is_absolute() else model,  # a card is there to be shared
        algorithm=about.get("algorithm", "unknown"),
        step=step,
        steps=config.get("steps", "unknown"),
        seed=about.get("seed", "unknown"),
        success=_words(rates.get(step)),
        start=_words(rates.get(0)),
        dtype=dtype,
        adapters=", adapters merged" if adapters else "",
        trained_by=store.version,
        exported_by=__version__,
        folder=folder,
        agent=AGENT,
    )


def _environments(about: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """The environments of a run, each once; the settings name them, and the record of the run where they do not."""
    sections = [config.get("env") or {}, *(config.get("also") or [])]
    names = [str(section["name"]) for section in sections if section.get("name")]
    return names or [str(about.get("env", "unknown"))]


def _words(rate: Rate | None) -> str:
    if rate is None:
        return "not measured"
    prompts = f", {rate.count} prompts" if rate.count else ""
    return f"{rate.value:.1%} (95% interval {rate.low:.1%} to {rate.high:.1%}{prompts})"
