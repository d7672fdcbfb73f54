"""`tether dashboard`: a local web page over a folder of runs, live while they train.

Templates are searched for here, because the dashboard and diagnosis do not know each other. Errors (the folder, the port, a missing token) are
reported before the first page is served. Imports no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.console import SafeConsole
from tether.cli.options import Host, Port
from tether.cli.serve import until_stopped

EXAMPLES = """\b
Examples:
  tether dashboard
  tether dashboard runs/sweep --port 8100
  tether dashboard runs/my-run
  TETHER_TOKEN=$(openssl rand -hex 24) tether dashboard runs --host 0.0.0.0
"""


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A folder of run folders, or one run folder.")] = Path("runs"),
    host: Host = "127.0.0.1",
    port: Port = 8050,
    token: Annotated[
        str | None,
        typer.Option(envvar="TETHER_TOKEN", show_envvar=False, help="Secret that the page asks for; better set as TETHER_TOKEN."),
    ] = None,
) -> None:
    """Show a folder of runs in the browser, live while they train: curves, alarms, every trajectory, comparisons."""
    from tether.core.http import address_of, bind, server_token
    from tether.runs.dashboard.catalogue import Catalogue

    secret = server_token(token, host)
    catalogue = Catalogue(folder)
    with bind(host, port) as listener:
        from tether.cli.report import step_templates
        from tether.runs.dashboard.app import run

        found = len(catalogue.runs())
        runs = f"{found} run{'s' * (found != 1)} in {folder}"
        console = SafeConsole()
        console.say(f"Dashboard of {runs} at {address_of(listener)} (Ctrl-C stops){', token required' if secret else ''}.")
        with until_stopped(console.say):
            run(catalogue, step_templates, listener, secret)
