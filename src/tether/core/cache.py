"""Where Tether keeps what it made or fetched once: converted models, search indexes."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder of one kind of thing ("models", "search") below TETHER_CACHE, or else the platform's cache folder."""
    base = os.environ.get("TETHER_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tether")
    return Path(base) / kind
