"""Options that several verbs share, and what the shell completes after `tether --install-completion`.

A completer gets what was typed so far and returns the names that begin with it. The shell waits for it, so none of them loads torch.
"""

from collections.abc import Iterable
from typing import Annotated

import typer


def _beginning(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]


def complete_env(incomplete: str) -> list[str]:
    from tether.envs.registry import ENVIRONMENTS

    return _beginning(ENVIRONMENTS.names(), incomplete)


def complete_model(incomplete: str) -> list[str]:
    from tether.models.catalog import EMBEDDED

    return _beginning(EMBEDDED, incomplete)


def complete_algorithm(incomplete: str) -> list[str]:
    from tether.algorithms.presets import PRESETS

    return _beginning(PRESETS, incomplete)


def complete_filter(incomplete: str) -> list[str]:
    from tether.algorithms.filters.select import AUTO, STRATEGIES

    return _beginning([*STRATEGIES, AUTO], incomplete)


def complete_config(incomplete: str) -> list[str]:
    from tether.core.config import config_names

    return _beginning(config_names(), incomplete)


def complete_config_or_env(incomplete: str) -> list[str]:
    return [*complete_config(incomplete), *complete_env(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    from tether.core.config import known_keys
    from tether.training.settings import RunSettings

    return _beginning(known_keys(RunSettings), incomplete)


def complete_override(incomplete: str) -> list[str]:
    """A setting with its equals sign, for --set."""
    return [f"{key}=" for key in complete_setting(incomplete)]


AlgorithmName = Annotated[str | None, typer.Option(help="ppo, grpo, dapo or dr_grpo.", autocompletion=complete_algorithm)]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")]
EnvOptions = Annotated[list[str] | None, typer.Option("--set", help="An option of the environment as key=value; may be repeated.")]
Jobs = Annotated[int | None, typer.Option(help="Runs side by side; by default as many as the device takes, measured.")]
ModelName = Annotated[
    str | None, typer.Option(help="tiny, smollm2, a Hugging Face id or folder, or a .gguf file.", autocompletion=complete_model)
]

# Of every server.
Host = Annotated[str, typer.Option(help="Address to serve on; 0.0.0.0 is every address of this machine, and needs a token.")]
Port = Annotated[int, typer.Option(help="Port to serve on; 0 takes a free one.", min=0, max=65535)]
Token = Annotated[
    str | None, typer.Option(envvar="TETHER_TOKEN", show_envvar=False, help="Secret that clients must send; better set as TETHER_TOKEN.")
]
Grace = Annotated[
    float, typer.Option(help="Seconds that requests and episodes in progress get after SIGTERM, while nothing new is taken.", min=0)
]
ToolFormat = Annotated[
    str,
    typer.Option(
        help="How the model writes tool calls: auto finds it in the chat template; or hermes, xml, llama3, mistral, schema, module:function."
    ),
]
