"""`tether serve-search`: a full-text index over HTTP, for SearchQA and for other clients of the two public retrieval formats.

Everyone who can reach the port can read the corpus, so a token is required beyond this machine. Imports no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import Host, Port, Token
from tether.cli.serve import until_stopped
from tether.core.errors import BadInput

EXAMPLES = """\b
Examples:
  tether serve-search
  tether serve-search --corpus wiki-18.jsonl --port 9000
  TETHER_TOKEN=$(openssl rand -hex 24) tether serve-search --host 0.0.0.0
  tether play searchqa --set retriever=http://127.0.0.1:8020
"""


def serve_search(
    corpus: Annotated[Path | None, typer.Option(help="File of documents. [default: the built-in encyclopedia]")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8020,
    token: Token = None,
    bad_rows: Annotated[str, typer.Option(help="What to do with a malformed document: error or skip.")] = "error",
) -> None:
    """Serve a search index over HTTP, in the formats of Search-R1 and rllm."""
    from tether.core.http import address_of, bind, server_token
    from tether.envs.searchqa.corpus import of_file
    from tether.envs.searchqa.dataset import world_corpus
    from tether.envs.searchqa.index import open_index
    from tether.envs.searchqa.server import serve

    if bad_rows not in ("error", "skip"):
        raise BadInput(f"--bad-rows got '{bad_rows}'; use error or skip")
    secret = server_token(token, host)
    with bind(host, port) as listener:
        index = open_index(world_corpus() if corpus is None else of_file(str(corpus), "skip" if bad_rows == "skip" else "error"))
        typer.echo(f"Serving {len(index):,} documents at {address_of(listener)} (Ctrl-C stops){', token required' if secret else ''}.")
        with until_stopped(typer.echo):
            serve(index, listener, secret)
