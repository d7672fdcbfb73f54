"""`tether gateway`: a model with sessions over HTTP, for programs that open and finish them themselves."""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.console import SafeConsole
from tether.cli.options import Grace, Host, Port, Token
from tether.cli.serve import until_stopped
from tether.core.http import DRAIN_SECONDS

EXAMPLES = """\b
Examples:
  tether gateway runs/my-run --out runs/collected
  tether gateway path/to/model --port 8031 --set rollout.max_tokens=512 --set agent.tool_format=hermes
"""


def gateway(
    target: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or a run folder (its newest checkpoint).")],
    out: Annotated[Path | None, typer.Option(help="A new run folder for the episodes, for `tether show` and `tether diagnose`.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its newest.")] = False,
    host: Host = "127.0.0.1",
    port: Port = 8030,
    token: Token = None,
    grace: Grace = DRAIN_SECONDS,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as rollout.max_tokens=512.")] = None,
) -> None:
    """Serve sessions at a model: POST /sessions opens one, its base_url speaks OpenAI's chat, POST /sessions/ID/finish takes its reward."""
    from tether.core.http import address_of, bind, make_server, run_server, server_token
    from tether.training.gateway import opened_gateway
    from tether.training.resolve import gateway_settings, overrides

    secret = server_token(token, host)
    settings = gateway_settings(target, best, overrides(set_))
    console = SafeConsole()
    with bind(host, port) as listener, until_stopped(console.say), opened_gateway(settings, out, Path(target).name or target) as server:
        server.url = address_of(listener)
        console.say(f"Sessions at {target} on {server.url} (Ctrl-C stops){', token required' if secret else ''}.")
        console.say(
            f'Open one with POST {server.url}/sessions {{"task": {{...}}}}; finish it with POST {server.url}/sessions/ID/finish {{"reward": 1.0}}.'
        )
        app = server.app(secret)
        app.state.telemetry.draining.seconds = grace
        run_server(make_server(app, server.stop, draining=app.state.telemetry.draining), listener)
