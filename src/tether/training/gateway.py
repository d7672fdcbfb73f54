"""`tether.gateway` and `tether gateway`: sessions at a model for programs that open them themselves, and a run folder of their episodes.

with tether.gateway("runs/my-run", out="runs/collected") as gateway:
    session = gateway.open({"id": "1", "question": "..."})
    reward = my_agent(session.base_url, session.api_key)
    trajectory = session.finish(reward=reward)
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.config import dump_yaml
from tether.core.http import serving_app
from tether.core.types import Trajectory
from tether.runs.schema import images_of, trajectory_record
from tether.runs.store import RunStore, append_records
from tether.training.resolve import KNOWN, gateway_settings, nested_settings, without_secrets
from tether.training.settings import RunSettings
from tether.training.synonyms import own_names

if TYPE_CHECKING:
    from tether.models.policy import Policy
    from tether.rollout.gateway.driver import GatewayServer

TASKS_FILE = "tasks.jsonl"
"""The task of every group, in the run folder."""


@contextmanager
def gateway(model_or_run: Path | str, *, out: Path | str | None = None, best: bool = False, **settings: Any) -> Iterator["GatewayServer"]:
    """Sessions at a model, for drivers of your own: `open(task)`, then `finish(reward=...)` and `trajectory` of what it returns.

    Args:
        model_or_run: anything `load_model` takes, or a run folder (its newest checkpoint).
        out: a new run folder for the episodes, which `tether show` and `tether diagnose` read.
        best: the run's best checkpoint instead of its newest.
        settings: any setting, as in `train`; those of the sections `rollout` and `agent` matter.
    """
    resolved = gateway_settings(str(model_or_run), best, own_names(nested_settings(settings), KNOWN))
    with opened_gateway(resolved, None if out is None else Path(out)) as server, serving_app(server.app(), "gateway") as url:
        server.url = url
        yield server


@contextmanager
def opened_gateway(settings: RunSettings, out: Path | None = None, name: str = "policy") -> Iterator["GatewayServer"]:
    """What opens sessions, once something serves its `app` and has set its `url`."""
    store = _store(settings, out) if out is not None else None
    try:
        from tether.models.chat import ChatFormat
        from tether.models.load import load_model
        from tether.models.policy import Policy
        from tether.rollout.engines.native import NativeEngine
        from tether.rollout.gateway.driver import GatewayServer
        from tether.training.build import agent_rules, compute_dtype, episode_rules

        loaded = load_model(settings.model.name, device=settings.model.device, dtype=compute_dtype(settings))
        policy, rollout = Policy(loaded.model, loaded.tokenizer, max_positions=settings.rollout.max_context), settings.rollout
        rules = episode_rules(settings, policy)
        engine = NativeEngine(policy, max_rows=rollout.max_rows, max_context=rules.max_context, cache_gb=rollout.cache_gb, keeps_slots=True)
        server = GatewayServer(
            engine,
            ChatFormat(loaded.tokenizer, policy.end_of_turn_ids, policy.vision),
            settings.sampling(),
            rules,
            agent_rules(settings.agent),
            name=name,
            seed=settings.seed,
            on_ended=_recorder(store, policy) if store is not None else lambda trajectory, task: None,
        )
        try:
            yield server
        finally:
            server.close()
    finally:
        if store is not None:
            store.finish("gateway closed")
            store.close()


def _store(settings: RunSettings, out: Path) -> RunStore:
    about = {"env": "agent", "model": settings.model.name, "seed": settings.seed, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return RunStore.create(out, dump_yaml(without_secrets(settings)), about)


def _recorder(store: RunStore, policy: "Policy") -> Callable[[Trajectory, Mapping[str, Any]], None]:
    """What writes an episode down when it has ended, and its task with the first of its group."""
    from tether.rollout.gateway.driver import STEP

    written: set[int] = set()

    def record(trajectory: Trajectory, task: Mapping[str, Any]) -> None:
        if trajectory.group not in written:
            append_records(store.folder / TASKS_FILE, [{"group": trajectory.group, "task": dict(task)}])
            written.add(trajectory.group)
        line = trajectory_record(trajectory, STEP, "train", trajectory.error is None, policy.placeholder_id)
        store.append_trajectories([line], joins=True, images=images_of([trajectory]))

    return record
