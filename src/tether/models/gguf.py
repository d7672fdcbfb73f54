"""Reading .gguf files: quantised weights become plain tensors of the matching Hugging Face architecture.

Reading needs the packages `gguf` and `accelerate` (the extra named gguf).
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from tether.core.errors import MissingDependency, ModelUnavailable


def load_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer of a .gguf file, dequantised."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependency(f"reading '{path.name}' needs {' and '.join(missing)}; install with: pip install 'tether-agents[gguf]'")
    folder = str(path.parent)
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
    except (ValueError, KeyError) as error:  # what transformers raises for a file it cannot read or an architecture it does not know
        raise ModelUnavailable(f"cannot read '{path}' as GGUF: {' '.join(str(error).split())[:200]}") from error
    # The loaded module remembers that it was quantised and would refuse to be trained or saved.
    model.config.quantization_config = None
    model.is_quantized = False
    model.hf_quantizer = None
    return model, tokenizer
