"""The Hugging Face hub, asked once whether it is there: its client would try every file for half a minute, and say so in a dozen lines."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from huggingface_hub import constants

ASK_SECONDS = 10.0
FORGET_SECONDS = 60.0
"""After this time it is asked again: a network may come back."""

_LOG = logging.getLogger(__name__)
_silent: dict[str, float] = {}
"""Address to the time at which nothing answered there."""


@contextmanager
def hub_asked() -> Iterator[None]:
    """Inside the block a hub that does not answer is not asked for any file: what is cached here is used, and the rest fails at once."""
    offline = constants.HF_HUB_OFFLINE
    if not offline and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline


def _answers(address: str) -> bool:
    if time.monotonic() - _silent.get(address, -FORGET_SECONDS) < FORGET_SECONDS:
        return False
    try:
        httpx.head(address, timeout=ASK_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _silent[address] = time.monotonic()
        _LOG.warning("%s cannot be reached (%s): only models that are cached here can be used", address, " ".join(str(error).split())[:100])
        return False
    return True
