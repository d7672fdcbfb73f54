"""The engines that a run can name, with what is known of each before it is built.

A new engine is a class with the `Engine` protocol (core/protocols.py) in a file of its own, a function that builds it, and an entry in ENGINES.
Settings, memory planning and training ask the entry, never the name.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tether.core.errors import UnknownName, did_you_mean
from tether.core.protocols import Communicator, Engine, server_addresses

if TYPE_CHECKING:
    from tether.models.policy import Policy
    from tether.rollout.engines.server import ServerOptions

DEFAULT_ENGINE = "native"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine: how it is built, and what it is like."""

    builder: str
    """MODULE:FUNCTION, imported when an engine is built; called with the arguments of `make_engine`."""
    shares_weights: bool = False
    """It decodes on the learner's own tensors and device, in turn with it. Others hold a copy: sampler and learner are two models, and sampling may
    go on while the learner updates."""
    uses_servers: bool = False
    """Its memory is not the learner's: servers sample on devices of their own."""
    starts_programs: bool = False
    """It may start a program that the settings name."""
    serves_ranks: bool = True
    """The ranks of a run can sample with it together."""
    speculates: bool = False
    """It can guess tokens (`speculative_tokens`)."""
    quantises: bool = False
    """It can decode in another precision than the model's (`precision`)."""


ENGINES: dict[str, EngineEntry] = {
    "native": EngineEntry("tether.rollout.engines.native:build", shares_weights=True, speculates=True, quantises=True),
    "vllm": EngineEntry("tether.rollout.engines.server:build_vllm", starts_programs=True, serves_ranks=False),
    "ray": EngineEntry("tether.rollout.engines.server:build_placed", uses_servers=True, starts_programs=True),
}
SERVERS = EngineEntry("tether.rollout.engines.server:build", uses_servers=True)
"""Of the address of a server, or several with commas between, in place of a name."""


def engine_entry(name: str) -> EngineEntry:
    """The entry of an engine by its name or its addresses."""
    if server_addresses(name):
        return SERVERS
    if name not in ENGINES:
        raise UnknownName(f"unknown engine '{name}': {did_you_mean(name, tuple(ENGINES))}")
    return ENGINES[name]


def make_engine(
    name: str,
    policy: "Policy",
    *,
    max_rows: int = 128,
    max_context: int | None = None,
    cache_gb: float | None = None,
    speculative_tokens: int = 0,
    precision: Literal["fp8"] | None = None,
    keeps_slots: bool = False,
    server: "ServerOptions | None" = None,
    ranks: Communicator | None = None,
) -> Engine:
    """The engine that training and evaluation sample with.

    Args:
        name: `native`: the learner's own weights; `vllm`: vLLM on this machine; `ray`: the engines that Ray placed; or the address of a server, or several with commas between.
        policy: the model with its tokenizer.
        max_rows: conversations decoded at a time, or requests in flight.
        max_context: most tokens of a conversation; None: as many as the model allows.
        cache_gb: memory of the key/value cache in GiB; None: half of what is free.
        speculative_tokens: how many tokens of a conversation the native engine guesses where few conversations decode; 0 for none.
        precision: fp8 decodes with a copy of the MLPs in float8, in the native engine; None: with the learner's own weights.
        keeps_slots: requests continue conversations that have ended, as those of agents do; the native engine then keeps what it computed for them.
        server: how servers are used.
        ranks: of a run on several, which sample from the same servers.
    """
    module, _, function = engine_entry(name).builder.partition(":")
    engine: Engine = getattr(importlib.import_module(module), function)(
        name,
        policy,
        max_rows=max_rows,
        max_context=max_context,
        cache_gb=cache_gb,
        speculative_tokens=speculative_tokens,
        precision=precision,
        keeps_slots=keeps_slots,
        server=server,
        ranks=ranks,
    )
    return engine
