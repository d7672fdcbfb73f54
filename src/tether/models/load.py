"""`load_model`: one door for every model. A name is resolved in this order:

1. an embedded model (`tiny`, `smollm2`),
2. a path that ends in .gguf,
3. a folder in Hugging Face format (a checkpoint of a run included),
4. a Hugging Face id, from the local cache or, when online, from the hub.

The tokenizer that comes back always has an end-of-turn token and a pad token. Pad may equal the end-of-turn token, so nothing
in Tether compares ids with pad: masks are carried from the rollout.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tether.core.errors import ModelUnavailable
from tether.models.catalog import check_name, smollm2_folder, tiny_folder
from tether.models.gguf import load_gguf
from tether.models.hardware import check_device, default_device

CHAT_END = "<|im_end|>"


class LoadedModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(name: str, *, device: str | None = None) -> LoadedModel:
    """Load a model by name, in float32, on the GPU if there is one.

    Args:
        name: tiny, smollm2, a .gguf file, a folder, or a Hugging Face id.
        device: where to put it; None picks the GPU if there is one.
    """
    place = check_device(device or default_device())
    model, tokenizer = _resolve(str(name))
    complete_tokenizer(tokenizer)
    return LoadedModel(model.to(place).eval(), tokenizer)


def _resolve(name: str) -> tuple[Any, Any]:
    check_name(name)
    path = Path(name).expanduser()
    if name == "tiny":
        return _from_folder(tiny_folder())
    if name == "smollm2":
        return _from_folder(smollm2_folder())
    if path.suffix == ".gguf":
        return load_gguf(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"folder '{name}' holds no config.json; point to a Hugging Face model folder or a checkpoint's 'model' folder"
            )
        return _from_folder(path)
    return _from_hub(name)


def _from_folder(folder: Path) -> tuple[Any, Any]:
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:  # a missing, torn or foreign file
        raise ModelUnavailable(
            f"cannot read the model in '{folder}': {' '.join(str(error).split())[:200]}; check or replace its files"
        ) from error


def _from_hub(name: str) -> tuple[Any, Any]:
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
    except OSError as error:  # transformers raises OSError for: offline and not cached, no such repository, no permission
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelUnavailable(
            f"Hugging Face model '{name}' is neither cached here nor reachable{offline}; check the name and the network, "
            "or use an embedded model: tiny, smollm2"
        ) from error


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer an end-of-turn and a pad token where its file forgot them."""
    if tokenizer.eos_token_id is None and CHAT_END in tokenizer.get_vocab():
        tokenizer.eos_token = CHAT_END
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
