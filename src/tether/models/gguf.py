"""Reading .gguf files: quantised weights become plain tensors of the matching Hugging Face architecture, once.

Converting takes a minute for a model of 1.5 billion parameters, so the result is kept in the user's cache as a Hugging Face folder
(`gguf_folder`) and read from there at every later load. The weights are kept in float32: dequantised values are products of integers and
scales, which neither bfloat16 nor float16 can hold exactly. A folder belongs to a file by the file's size, time of change and the
content of its head and tail, so a changed file is converted again, and a file that was moved is not. A folder appears only when it is complete.

Converting needs the packages `gguf` and `accelerate` (the extra named gguf); reading a converted folder does not.
"""

import hashlib
import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from tether.core.config import cache_folder
from tether.core.errors import MissingDependency, ModelUnavailable

HASHED_BYTES = 2**20
"""Of the head, which holds the metadata, and of the tail, which holds weights."""

_LOG = logging.getLogger(__name__)


def gguf_folder(path: Path, *, rebuild: bool = False) -> Path:
    """The folder with a .gguf file as safetensors; the file is converted where there is none, or where it is to be built again.

    Raises OSError where the cache cannot be written.
    """
    folder = cache_folder("models") / f"gguf-{path.stem[:60]}-{_fingerprint(path)}"
    if rebuild:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "config.json").is_file():
        _LOG.warning("converting '%s' to safetensors; this is done once", path.name)
        convert_gguf(path, folder)
        _LOG.warning("converted '%s' to safetensors, cached in %s", path.name, folder)
    return folder


def _fingerprint(path: Path) -> str:
    """What tells a file from another one, without reading gigabytes."""
    facts = path.stat()
    found = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode())
    with path.open("rb") as file:
        found.update(file.read(HASHED_BYTES))
        file.seek(max(0, facts.st_size - HASHED_BYTES))
        found.update(file.read(HASHED_BYTES))
    return found.hexdigest()[:16]


def convert_gguf(path: Path, folder: Path) -> Path:
    """Write a .gguf file as a Hugging Face folder, which appears only when it is complete."""
    model, tokenizer = read_gguf(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.exists():  # another process may have been faster
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model and tokenizer of a .gguf file, dequantised, without the cache."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingDependency(f"reading '{path.name}' needs {' and '.join(missing)}; install with: pip install 'tether-agents[gguf]'")
    folder = str(path.parent)
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype, trust_remote_code=False
        )
    except (ValueError, KeyError) as error:  # what transformers raises for a file it cannot read or an architecture it does not know
        raise ModelUnavailable(f"cannot read '{path}' as GGUF: {' '.join(str(error).split())[:200]}") from error
    # The loaded module remembers that it was quantised and would refuse to be trained or saved.
    model.config.quantization_config = None
    model.is_quantized = False
    model.hf_quantizer = None
    return model, tokenizer
