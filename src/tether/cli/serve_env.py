"""`tether serve-env`: any environment over HTTP, so that training can run in another process, on another machine or in another language.

Errors (the name, an option, the port, a missing token) are reported before the first client can connect.
"""

import os
from typing import Annotated

import typer

from tether.cli.console import SafeConsole
from tether.cli.options import EnvOptions, Grace, Host, Port, Token, complete_env
from tether.cli.serve import until_stopped
from tether.core.config import parse_overrides
from tether.core.errors import BadInput
from tether.core.http import DRAIN_SECONDS

EXAMPLES = """\b
Examples:
  tether serve-env sokoban
  tether serve-env frozen_lake --port 8011 --set slip=0.1 --set size=6
  TETHER_TOKEN=$(openssl rand -hex 24) tether serve-env deepcoder --host 0.0.0.0 --allow-option difficulty
  tether train http://127.0.0.1:8010
"""


def serve_env(
    env: Annotated[str, typer.Argument(help="Environment to serve, such as sokoban.", show_default=False, autocompletion=complete_env)],
    host: Host = "127.0.0.1",
    port: Port = 8010,
    token: Token = None,
    options: EnvOptions = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow-option", metavar="NAME", help="An option that clients may choose, beside split; * for all. May be repeated."),
    ] = None,
    lock_options: Annotated[bool, typer.Option("--lock-options", hidden=True)] = False,
    max_sessions: Annotated[int, typer.Option(help="Episodes played at the same time, at most.", min=1)] = 1024,
    idle_timeout: Annotated[float, typer.Option(help="Seconds after which an unused session is dropped.", min=0.1)] = 600.0,
    step_timeout: Annotated[float, typer.Option(help="Seconds that a reset or a step may take.", min=0.1)] = 60.0,
    grace: Grace = DRAIN_SECONDS,
) -> None:
    """Serve an environment over HTTP; make_env("http://...") and tether train http://... use it."""
    from tether.core.http import TOKEN_VARIABLE, address_of, bind, server_token
    from tether.envs.remote.http_server import CLIENT_OPTIONS, Service, check, run
    from tether.envs.remote.sessions import SessionLimits

    secret = server_token(token, host)
    os.environ.pop(TOKEN_VARIABLE, None)  # it is for this server's clients: environments, and what they call, must not send it on
    limits = SessionLimits(max_sessions=max_sessions, idle_timeout=idle_timeout, step_timeout=step_timeout, drain_seconds=grace)
    allowed = CLIENT_OPTIONS | {name.strip() for name in allow or []}
    if lock_options and allow:
        raise BadInput("--lock-options is what happens without --allow-option; leave out one of them")
    service = Service(env, parse_overrides(options or []), secret, allowed, limits)
    check(service)
    with bind(host, port) as listener:
        url = address_of(listener)
        console = SafeConsole()
        console.say(f"Serving {env} at {url} (Ctrl-C stops){', token required' if secret else ''}.")
        console.say(f'Use it as make_env("{url}") or: tether train {url}')
        if secret:
            console.say("Clients read the token from TETHER_TOKEN or from the option token.")
        with until_stopped(console.say):
            run(service, listener)
