"""Our index behind HTTP, in both public shapes of a retrieval server; the body of the request says which.

    GET  /health    -> {"status", "corpus_size", "index_type", "index_loaded"}
    POST /retrieve  {"queries": [q, ...], "topk": 3, "return_scores": true} -> {"result": [[{"document", "score"}, ...], ...]}
    POST /retrieve  {"query": q, "top_k": 10} -> {"query", "method", "results": [{"id", "content", "score"}, ...], "num_results"}

A request that cannot be served gets {"error": one line}: 400 for a bad body, 401 or 403 for a missing token, 413 for a body that is too large.
"""

import hmac
import json
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tether.core.http import is_loopback
from tether.envs.searchqa.corpus import Hit, readable
from tether.envs.searchqa.index import SearchIndex

MAX_BODY_BYTES = 4_000_000
MAX_QUERIES = 4096
MAX_TOP_K = 1000
SHUTDOWN_GRACE = 3
"""Seconds that searches in progress are waited for when the server stops."""
DEFAULT_TOPK = 3
"""Of Search-R1's shape."""
DEFAULT_TOP_K = 10
"""Of the other."""


def create_app(index: SearchIndex, token: str | None = None) -> FastAPI:
    """The server as an ASGI application."""
    app = FastAPI(title="tether serve-search", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(HTTPException)
    async def refuse(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "healthy", "corpus_size": len(index), "index_type": "bm25", "index_loaded": True})

    @app.post("/retrieve")
    async def retrieve(request: Request) -> JSONResponse:
        _admit(request, token)
        body = await _body(request)
        return JSONResponse(await run_in_threadpool(_answer, index, body))

    return app


def serve(index: SearchIndex, listener: socket.socket, token: str | None) -> None:
    """Serve until the process is stopped (Ctrl-C raises KeyboardInterrupt once everything is closed)."""
    config = uvicorn.Config(
        create_app(index, token), log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=SHUTDOWN_GRACE
    )
    uvicorn.Server(config).run(sockets=[listener])


def _admit(request: Request, token: str | None) -> None:
    """Admit requests with the token; without a token, requests whose Host header names this machine, which a page of another site cannot send."""
    if token is None:
        if not is_loopback(request.url.hostname or ""):
            raise HTTPException(403, "this server has no token, so it answers only to the names of this machine")
        return
    given = request.headers.get("authorization", "")
    # Compared in constant time, so that the time of a refusal says nothing about the token.
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "this server wants its token: send 'Authorization: Bearer TOKEN'", {"WWW-Authenticate": "Bearer"})


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for part in request.stream():  # to the end even if it is too long: a client that is still sending would not read the answer
        if len(content) <= MAX_BODY_BYTES:
            content += part
    if len(content) > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes; send fewer queries at a time")
    try:
        body = json.loads(bytes(content))
    except (ValueError, RecursionError):
        raise HTTPException(400, 'the body is not JSON; send {"queries": [...]} or {"query": "..."}') from None
    if not isinstance(body, dict) or not ("queries" in body or "query" in body):
        raise HTTPException(400, "missing 'queries' (a list) or 'query' (a text) in the request")
    return body


def _answer(index: SearchIndex, body: dict[str, Any]) -> dict[str, Any]:
    if "queries" in body:
        return _batch(index, body)
    query, top_k = body["query"], _count(body, "top_k", DEFAULT_TOP_K)
    if not isinstance(query, str):
        raise HTTPException(400, f"'query' is a {type(query).__name__}; send a text")
    hits = index.search(query, top_k)
    results = [{"id": hit.document.id, "content": hit.document.contents, "score": hit.score} for hit in hits]
    return {"query": readable(query), "method": "bm25", "results": results, "num_results": len(results)}


def _batch(index: SearchIndex, body: dict[str, Any]) -> dict[str, Any]:
    queries, topk, with_scores = body["queries"], _count(body, "topk", DEFAULT_TOPK), body.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(400, "'queries' is not a list of texts")
    if len(queries) > MAX_QUERIES:
        raise HTTPException(400, f"{len(queries)} queries in one request; send at most {MAX_QUERIES}")
    if not isinstance(with_scores, bool):
        raise HTTPException(400, "'return_scores' is neither true nor false")
    return {"result": [[_item(hit, with_scores) for hit in index.search(query, topk)] for query in queries]}


def _item(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.document.id, "contents": hit.document.contents}
    return {"document": document, "score": hit.score} if with_score else document


def _count(body: dict[str, Any], name: str, default: int) -> int:
    count = body.get(name)
    if count is None:
        return default
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_TOP_K:
        raise HTTPException(400, f"'{name}' is {json.dumps(count)[:40]}; send a whole number from 1 to {MAX_TOP_K}")
    return count
