"""One evaluation from settings to record: a model that is loaded here, or one behind a chat endpoint.

With a folder to write to, three files of one name are left there: the record (.json), its page (.html) and, of an endpoint, the conversations
(.conversations.jsonl), from which the same command continues.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from tether.core.errors import EnvironmentFailure
from tether.models.chat_endpoint import is_endpoint
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.sampler import EnvSpec, error_note
from tether.runs.evaluations import file_stem, prepare_folder, write_result
from tether.runs.pages import write_result_page
from tether.training.build import build_sampler, compute_dtype, env_specs
from tether.training.callbacks import Callback, CallbackList
from tether.training.evaluate import Evaluation, evaluate, validation_specs
from tether.training.evaluation_record import Price, evaluation_record, identity
from tether.training.remote_evaluation import EndpointOptions, evaluate_endpoint
from tether.training.replies import few_valid_note
from tether.training.settings import RunSettings

CONVERSATIONS = ".conversations.jsonl"


def run_evaluation(
    settings: RunSettings,
    target: str,
    callbacks: Sequence[Callback] = (),
    *,
    endpoint: EndpointOptions | None = None,
    price: Price | None = None,
    out: Path | None = None,
) -> Evaluation:
    """Play the validation prompts.

    Args:
        settings: of the evaluation.
        target: the model or run as the user named it, for the record.
        callbacks: follow the progress.
        endpoint: how a model behind an endpoint is asked.
        price: of a million tokens of prompts and of completions.
        out: the folder that record, page and conversations are written to.
    """
    specs, options, began = evaluated_specs(settings), endpoint or EndpointOptions(), time.monotonic()
    identified = identity(settings, specs, target, options.body if is_endpoint(target) else {})
    stem = file_stem(identified)
    if out is not None:
        prepare_folder(out)
    if is_endpoint(target):
        journal = out / f"{stem}{CONVERSATIONS}" if out is not None else None
        result, precision = evaluate_endpoint(settings, specs, options, CallbackList(callbacks), journal), None
    else:
        result, precision = _evaluate_here(settings, specs, callbacks), compute_dtype(settings)
    if not any(group.trajectories for group in result.groups):
        raise EnvironmentFailure(f"nothing was measured: {error_note(result.groups)}")
    env = "+".join(spec.name for spec in specs)
    if note := few_valid_note(result.groups, env=env, model=settings.model.name, max_tokens=settings.rollout.max_tokens):
        result.notes.append(note)
    record = evaluation_record(result, identified, target, precision=precision, seconds=time.monotonic() - began, price=price)
    if out is not None:
        write_result(record, out / f"{stem}.json")
        write_result_page(record, out / f"{stem}.html")
    return dataclasses.replace(result, record=record, files=out / stem if out is not None else None)


def _evaluate_here(settings: RunSettings, specs: Sequence[EnvSpec], callbacks: Sequence[Callback]) -> Evaluation:
    loaded = load_model(settings.model.name, device=settings.model.device, dtype=compute_dtype(settings))
    policy = Policy(loaded.model, loaded.tokenizer, max_positions=settings.rollout.max_context)
    sampler = build_sampler(settings, policy, CallbackList(callbacks))
    evaluation = settings.evaluation
    return evaluate(sampler, evaluation.prompts, settings.evaluation_sampling(), samples=evaluation.samples, specs=specs)


def evaluated_specs(settings: RunSettings) -> list[EnvSpec]:
    """The environments of an evaluation: a split that was asked for is played, otherwise it is the validation split."""
    if settings.evaluation.env is not None:
        return env_specs([settings.evaluation.env])
    return [spec if "split" in spec.options else validation_specs([spec])[0] for spec in env_specs(settings.environments())]
