"""`tether serve`: a model or a run's best checkpoint over HTTP, for OpenAI clients and for training through `--engine http://...`.

Errors (the model, the port, a missing token) are reported before the first client can connect.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.console import SafeConsole
from tether.cli.options import Grace, Host, Port, Token, ToolFormat
from tether.core.errors import BadInput
from tether.core.http import DRAIN_SECONDS

EXAMPLES = """\b
Examples:
  tether serve runs/my-run
  tether serve smollm2 --port 8001
  TETHER_TOKEN=$(openssl rand -hex 24) tether serve runs/my-run --host 0.0.0.0
  tether train frozen_lake --engine http://127.0.0.1:8000
"""


@contextmanager
def until_stopped(say: Callable[[str], None]) -> Iterator[None]:
    """Around a server that runs until Ctrl-C or SIGTERM, which is the way to stop it; everything is closed by then."""
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped.")
    except SystemExit:
        say("Stopped.")
        raise


def serve(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its best checkpoint, or its last) or a model's name.")
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. [default: its name here]")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model lives. [default: the GPU if there is one]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16. [default: bfloat16 on a GPU, float32 elsewhere]")] = None,
    max_rows: Annotated[int, typer.Option(help="Requests decoded at a time; others wait.", min=1)] = 64,
    max_context: Annotated[int | None, typer.Option(help="Most tokens of a text. [default: the model's own limit]", min=2)] = None,
    cache_gb: Annotated[float | None, typer.Option(help="Memory of the key/value cache in GiB. [default: half of what is free]")] = None,
    tool_format: ToolFormat = "auto",
    grace: Grace = DRAIN_SECONDS,
) -> None:
    """Serve a model over HTTP: OpenAI's completions and chat with tools, token ids with log-probs, weight updates."""
    from tether.core.http import address_of, bind, server_token

    secret = server_token(token, host)
    source = _model_of(target)
    with bind(host, port) as listener:  # before the model is loaded: a taken port is said at once
        from tether.models.hardware import default_device
        from tether.models.load import load_model
        from tether.rollout.serving.app import run
        from tether.rollout.serving.served import ServedModel

        on_gpu = (device or default_device()).startswith("cuda")
        loaded = load_model(source, device=device, dtype=dtype or ("bfloat16" if on_gpu else "float32"))
        called = name or Path(target).name or target
        served = ServedModel(
            called,
            loaded,
            max_rows=max_rows,
            max_context=max_context,
            cache_gb=cache_gb,
            as_trained=_plays_environments(source),
            tool_format=tool_format,
        )
        url = address_of(listener)
        console = SafeConsole()
        console.say(f"Serving {called} at {url} (Ctrl-C stops){', token required' if secret else ''}.")
        console.say(f"Use it with any OpenAI client at {url}/v1, or: tether train ENV --model {target} --engine {url}")
        with until_stopped(console.say):
            run(served, listener, secret, grace)


def _plays_environments(source: str) -> bool:
    """Whether a model was trained on environments, so that it is asked with a think tag and answers between tags; others chat as their template
    has it, and so does one that was trained as the model of somebody's agent."""
    from tether.models.catalog import TRAINED_WORDING
    from tether.training.agent import Agent
    from tether.training.settings import TASKS

    agent = Agent.read(source)
    return source in TRAINED_WORDING if agent is None else any(name != TASKS for name in agent.environments)


def _model_of(target: str) -> str:
    """The model's name, or the folder of a run's best checkpoint; its last where none was evaluated."""
    from tether.models.catalog import check_name
    from tether.runs.checkpoints import MODEL, best_checkpoint, find_checkpoint
    from tether.runs.store import RunStore

    if "://" in target:
        raise BadInput(f"'{target}' is an address; give a model's name, a folder, a .gguf file or a run folder")
    if (Path(target) / "run.json").is_file():
        checkpoints = RunStore.open(Path(target)).checkpoints
        return str(find_checkpoint(checkpoints, best=best_checkpoint(checkpoints) is not None)[0] / MODEL)
    check_name(target)
    return target
