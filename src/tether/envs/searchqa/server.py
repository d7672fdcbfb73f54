"""Our index behind HTTP, in both public shapes of a retrieval server; the body of the request says which.

    GET  /health    -> {"status", "corpus_size", "index_type", "index_loaded"}
    POST /retrieve  {"queries": [q, ...], "topk": 3, "return_scores": true} -> {"result": [[{"document", "score"}, ...], ...]}
    POST /retrieve  {"query": q, "top_k": 10} -> {"query", "method", "results": [{"id", "content", "score"}, ...], "num_results"}

A request that cannot be served gets {"error": one line}: 400 for a bad body, 401 or 403 for a missing token, 413 for a body that is too large.
"""

import json
import socket
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tether.core.http import AccessControl, Refusal, make_server, read_body, run_server
from tether.envs.searchqa.corpus import Hit, readable
from tether.envs.searchqa.index import SearchIndex

MAX_BODY_BYTES = 4_000_000
MAX_QUERIES = 4096
MAX_TOP_K = 1000
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
        body = await _body(request)
        return JSONResponse(await run_in_threadpool(_answer, index, body))

    app.add_middleware(AccessControl, token=token)
    return app


def serve(index: SearchIndex, listener: socket.socket, token: str | None) -> None:
    """Serve until the process is stopped (Ctrl-C raises KeyboardInterrupt once everything is closed)."""
    run_server(make_server(create_app(index, token)), listener)


async def _body(request: Request) -> dict[str, Any]:
    try:
        content = await read_body(request, MAX_BODY_BYTES)
    except Refusal as refusal:
        raise HTTPException(refusal.status, f"{refusal}; send fewer queries at a time") from None
    try:
        body = json.loads(content)
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
