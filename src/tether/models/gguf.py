"""Reading .gguf files: quantised weights become plain tensors of the matching Hugging Face architecture, once.

Converting takes a minute for a model of 1.5 billion parameters, so the result is kept in the user's cache as a Hugging Face folder
(`gguf_folder`) and read from there at every later load. The weights are kept in float32: dequantised values are products of integers and
scales, which neither bfloat16 nor float16 can hold exactly. A folder belongs to a file by the file's size, time of change and the
content of its head and tail, so a changed file is converted again, and a file that was moved is not. A folder appears only when it is complete.

Converting needs the packages `gguf` and `accelerate` (the extra named gguf); reading a converted folder does not.
"""

import functools
import hashlib
import importlib.util
import logging
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from tether.core.config import cache_folder
from tether.core.errors import MissingDependency, ModelUnavailable
from tether.core.temporary import temporary_folder

HASHED_BYTES = 2**20
"""Of the head, which holds the metadata, and of the tail, which holds weights."""

UNREADABLE = (ValueError, KeyError, IndexError, struct.error)
"""What transformers raises for a file that it cannot read or an architecture that it does not know."""

_LOG = logging.getLogger(__name__)


def gguf_folder(path: Path, *, rebuild: bool = False) -> Path:
    """The folder with a .gguf file as safetensors; the file is converted where there is none, or where it is to be built again.

    Raises OSError where the cache cannot be written.
    """
    folder = _folder(path)
    if rebuild:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "config.json").is_file():
        _LOG.warning("converting '%s' to safetensors; this is done once", path.name)
        convert_gguf(path, folder)
        _LOG.warning("converted '%s' to safetensors, cached in %s", path.name, folder)
    return folder


def gguf_config(path: Path) -> Any:
    """The configuration of a .gguf file: of its converted folder where there is one, else of its header. No weights are read, nothing is written.

    Raises OSError, ModelUnavailable or ImportError where there is none to be had.
    """
    folder = _folder(path)
    try:
        return _configuration(folder if (folder / "config.json").is_file() else path, folder.name)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


@functools.lru_cache(maxsize=8)
def _configuration(place: Path, content: str) -> Any:
    """Kept by the file's content: the header holds every word of the tokenizer, which takes seconds to read, and every plan asks for it."""
    if place.is_dir():
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    return AutoConfig.from_pretrained(str(place.parent), gguf_file=place.name, trust_remote_code=False)


def _folder(path: Path) -> Path:
    """Where a file's conversion is kept."""
    return cache_folder("models") / f"gguf-{path.stem[:60]}-{_fingerprint(path)}"


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
    with temporary_folder(f".{folder.name}-", folder.parent) as place:
        model.save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        if not folder.exists():  # another process may have been faster
            (place / "model").rename(folder)
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
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    # The loaded module remembers that it was quantised and would refuse to be trained or saved.
    model.config.quantization_config = None
    model.is_quantized = False
    model.hf_quantizer = None
    return model, tokenizer


def _unreadable(path: Path, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"cannot read '{path}' as GGUF: {' '.join(str(error).split())[:200]}")
