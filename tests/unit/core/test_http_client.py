"""Connections to a server: one request at a time uses each, they are kept, and closing them ends what waits."""

import threading

import httpx
import pytest

from tether.core import http_client
from tether.core.http_client import Connections, HttpClient, Unanswered

NOWHERE = "http://127.0.0.1:9"


def test_requests_at_the_same_time_have_a_client_each_and_the_next_ones_use_them_again() -> None:
    connections = Connections(NOWHERE)
    with connections.one(1) as first, connections.one(1) as second:
        assert first is not second
    with connections.one(1) as again:
        assert again is first, "the last one that was given back"
    connections.close()
    assert first.is_closed and second.is_closed


def test_no_more_requests_at_a_time_than_wanted() -> None:
    connections = Connections(NOWHERE, most=1)
    with connections.one(1), pytest.raises(httpx.PoolTimeout), connections.one(0.01):
        pass
    waited: list[httpx.Client] = []

    def wait() -> None:
        with connections.one(30) as client:
            waited.append(client)

    with connections.one(1) as first:
        thread = threading.Thread(target=wait)
        thread.start()
        assert not waited
    thread.join()
    assert waited == [first]
    connections.close()


def test_more_connections_than_are_kept_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_KEPT", 1)
    connections = Connections(NOWHERE)
    with connections.one(1) as first, connections.one(1) as second:
        pass
    assert not second.is_closed and first.is_closed  # the second one was given back before
    connections.close()


def test_a_closed_client_says_so() -> None:
    with HttpClient(NOWHERE, timeout=1, parallel=2) as client:
        pass
    with pytest.raises(Unanswered) as caught:
        client.request("GET", "/health", delays=())
    assert caught.value.kind == "closed"
