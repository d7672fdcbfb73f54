"""Our index behind HTTP, in both public shapes of a retrieval server; the body of the request says which.

    GET  /health    -> {"status", "corpus_size", "index_type", "index_loaded"}
    POST /retrieve  {"queries": [q, ...], "topk": 3, "return_scores": true} -> {"result": [[{"document", "score"}, ...], ...]}
    POST /retrieve  {"query": q, "top_k": 10} -> {"query", "method", "results": [{"id", "content", "score"}, ...], "num_results"}

A request that cannot be served gets {"error": one line}: 400 for a bad body, 401 or 403 for a missing token, 413 for a body that is too large.
"""

import socket
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, InstanceOf, StrictBool, StrictInt
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tether.core.config import validate
from tether.core.errors import BadInput
from tether.core.http import Refusal, json_object, make_server, read_body, run_server, status_of
from tether.core.telemetry import Telemetry
from tether.envs.searchqa.corpus import Hit, readable
from tether.envs.searchqa.index import SearchIndex

MAX_BODY_BYTES = 4_000_000
MAX_QUERIES = 4096
MAX_TOP_K = 1000
MAX_HITS = 50_000
"""Of one request, queries times topk: their documents are in memory at once."""
TopK = Annotated[StrictInt, Field(ge=1, le=MAX_TOP_K)]
Text = InstanceOf[str]
"""Any text of JSON, also one with half a character, which pydantic's own would refuse."""


class BatchBody(BaseModel):
    """Search-R1's shape. Fields of other servers are left alone, here and in the other shape."""

    queries: Annotated[list[Text], Field(max_length=MAX_QUERIES)]
    topk: TopK = 3
    return_scores: StrictBool = False


class QueryBody(BaseModel):
    """The shape of rllm and upstream."""

    query: Text
    top_k: TopK = 10


def create_app(index: SearchIndex, token: str | None = None) -> FastAPI:
    """The server as an ASGI application."""

    async def refused(_: Request, error: Exception) -> JSONResponse:
        status, said = status_of(error)
        return JSONResponse({"error": said}, status, getattr(error, "headers", None))

    handlers: Any = dict.fromkeys((Refusal, BadInput, HTTPException), refused)
    app = FastAPI(title="tether serve-search", docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        body = json_object(await read_body(request, MAX_BODY_BYTES), "the body")
        return JSONResponse(await run_in_threadpool(_answer, index, body))

    telemetry = Telemetry()
    telemetry.gauge("tether_documents", "Documents of the index.", lambda: len(index))
    telemetry.add_to(app, token, lambda: {"status": "healthy", "corpus_size": len(index), "index_type": "bm25", "index_loaded": True})
    return app


def serve(index: SearchIndex, listener: socket.socket, token: str | None) -> None:
    """Serve until the process is stopped (Ctrl-C raises KeyboardInterrupt once everything is closed)."""
    app = create_app(index, token)
    run_server(make_server(app, draining=app.state.telemetry.draining), listener)


def _answer(index: SearchIndex, body: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    if "queries" in given:
        batch = validate(BatchBody, given, "request")
        if len(batch.queries) * batch.topk > MAX_HITS:
            raise Refusal(
                400, f"{len(batch.queries)} queries with topk {batch.topk} ask for more than {MAX_HITS} documents; send fewer at a time"
            )
        return {"result": [[_item(hit, batch.return_scores) for hit in index.search(query, batch.topk)] for query in batch.queries]}
    if "query" not in given:
        raise Refusal(400, "missing 'queries' (a list) or 'query' (a text) in the request")
    single = validate(QueryBody, given, "request")
    results = [
        {"id": hit.document.id, "content": hit.document.contents, "score": hit.score} for hit in index.search(single.query, single.top_k)
    ]
    return {"query": readable(single.query), "method": "bm25", "results": results, "num_results": len(results)}


def _item(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.document.id, "contents": hit.document.contents}
    return {"document": document, "score": hit.score} if with_score else document
