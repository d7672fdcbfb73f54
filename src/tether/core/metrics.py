"""Every number a run logs, named and explained once.

`CATALOGUE` is the single list of metric names: `StepMetrics` refuses a name that is not in it, and a test compares it with
docs/metrics.md. Rates carry a Wilson interval, because success over a few hundred episodes is not exact.
"""

import math
import re
from collections.abc import Mapping

from tether.core.errors import UnknownName, did_you_mean

CATALOGUE: dict[str, str] = {
    "rollout/success": "share of training episodes solved",
    "rollout/reward_mean": "mean episode return, format penalties included",
    "rollout/reward_std": "standard deviation of the episode return over the batch",
    "rollout/turns": "mean turns per episode",
    "rollout/response_tokens": "mean sampled tokens per response",
    "rollout/response_tokens_max": "tokens of the longest response",
    "rollout/overlong": "share of responses punished for their length",
    "rollout/reasoning_tokens": "mean reasoning tokens per response that closed its think tag",
    "rollout/format_valid": "share of turns that were well formed with legal actions only",
    "rollout/lenient": "share of turns that are valid only by the lenient reading of named actions, or because the end of the turn closed the answer",
    "rollout/reasonings": "responses with reasoning in them",
    "rollout/repeated_text": "share of them that mostly repeat one character, word or phrase",
    "rollout/tokens_sampled": "tokens sampled in the step",
    "rollout/turn_limit": "share of episodes that ran out of turns",
    "rollout/context_full": "share of episodes that ran out of context",
    "rollout/episodes": "episodes that enter these numbers; those that an environment error ended do not",
    "rollout/errors": "episodes ended by an environment error, after retries; they enter no other number",
    "rollout/retries": "episodes played again because an environment error had ended them",
    "rollout/mismatch_before": "update/mismatch of the step before, which the alarms read; logged where a server samples",
    "rollout/staleness": "by how many updates of the weights the sampled tokens were behind, on average; logged where a server samples",
    "groups/rv_mean": "mean over prompts of the reward variance within a prompt (ddof 1)",
    "groups/rv_std": "standard deviation over prompts of the reward variance",
    "groups/rv_ratio": "rv_std / rv_mean; filtering helps where it is large",
    "groups/sampled": "groups sampled, rounds of refill included",
    "groups/kept": "groups trained on",
    "groups/keep": "share that the filter keeps: filter.keep, or what an alarm's action made of it",
    "groups/kept_ratio": "groups trained on / groups sampled",
    "groups/rounds": "rounds of sampling; more than 1 is refill",
    "groups/tokens_discarded": "sampled tokens that were not trained on: of dropped groups, and of members left out",
    "groups/zero_variance": "groups whose rewards are all equal",
    "groups/all_fail": "share of groups without a success",
    "groups/mixed": "share of groups with both successes and failures",
    "groups/all_succeed": "share of groups in which every member succeeded",
    "groups/fail_but_varied": "share of groups that all fail yet vary in reward: a variance filter ranks these up",
    "update/loss": "mean training loss over the step's optimiser updates",
    "update/policy_loss": "clipped policy-gradient loss, plain mean over the trained tokens",
    "update/advantage_std": "standard deviation of the advantages over the sampled tokens of the kept groups",
    "update/return_mean": "mean return that the critic is taught, over the sampled tokens of the kept groups",
    "update/value_mean": "mean value that the critic expected of them before the update",
    "update/explained_variance": "1 - Var(return - value) / Var(return): how much of the returns the critic foresaw",
    "update/value_loss": "clipped value loss, plain mean over the trained tokens",
    "update/value_clip": "share of trained tokens whose value loss is the clipped one",
    "update/critic_grad_norm": "mean gradient norm of the critic (of its head alone, on a shared backbone) before clipping",
    "update/loss_{term}": "a term of the loss beside the task (kl, entropy), coefficient included, plain mean over the trained tokens",
    "update/importance_weight": "mean weight of truncated importance sampling, min(old / behavior, algorithm.importance_cap)",
    "update/entropy": "mean entropy of the policy over the trained tokens, in nats",
    "update/ratio_mean": "mean importance ratio new / old over the trained tokens",
    "update/ratio_std": "standard deviation of the importance ratio over the trained tokens",
    "update/ratio_max": "largest importance ratio",
    "update/ratio_min": "smallest importance ratio",
    "update/clip_low": "share of trained tokens clipped at the lower bound",
    "update/clip_high": "share of trained tokens clipped at the upper bound",
    "update/clip_dual": "share of trained tokens with negative advantage whose ratio is above algorithm.dual_clip",
    "update/kl_reference": "estimated KL(policy || reference) over the trained tokens, by algorithm.divergence",
    "update/kl_sampled": "k3 estimate of KL(old || new) over the trained tokens",
    "update/mismatch": "mean |log-prob of the learner - log-prob of the sampler| before the first update of the step",
    "update/mismatch_ratio_mean": "mean of exp(log-prob of the learner - log-prob of the sampler) before the first update of the step",
    "update/mismatch_ratio_max": "largest of these ratios",
    "update/probe_difference": "mean |log-prob of the server - log-prob of the learner| on the fixed probe after the weights were published",
    "update/grad_norm": "mean gradient norm before clipping",
    "update/learning_rate": "learning rate of the step",
    "update/num_updates": "optimiser updates made",
    "update/nonfinite": "updates left out because their gradient was not finite",
    "update/nonfinite_streak": "how many updates in a row were left out by the end of the step",
    "update/tokens_trained": "sampled tokens that entered the loss, counted once per epoch",
    "update/padding": "share of the places of the forward passes that held padding",
    "update/tokens_shared": "tokens that were not computed because another sequence of the forward pass begins with them",
    "update/micro_tokens": "most tokens per forward pass",
    "update/recompute": "1 if activations are computed again in the backward pass",
    "update/memory_retries": "how often a minibatch of this step was done again because memory ran out",
    "update/skipped": "1 if nothing was kept and the step made no update",
    "information/retrieval_acc": "share of reasonings whose own prompt explains them best",
    "information/chance": "retrieval accuracy of input-agnostic reasoning, 1 / prompts",
    "information/recall_2": "share of reasonings whose own prompt is among the best 2",
    "information/recall_4": "the same for the best 4",
    "information/recall_8": "the same for the best 8",
    "information/mi": "MI-Est: nats per token that the reasoning tells about its prompt",
    "information/mi_seq": "MI-Seq-Est: nats per reasoning, at most log(prompts)",
    "information/mi_zscore": "mi over the batch's spread of the marginal",
    "information/mi_zscore_ema": "mi over the running spread of the marginal",
    "information/h_conditional": "H(Z|X): diversity of reasoning within a prompt, nats per token",
    "information/h_marginal": "H(Z): diversity of reasoning over all prompts, nats per token",
    "information/mi_token_mean": "MI with the mixture over per-token means, as upstream RAGEN logs it: for comparison only",
    "information/h_conditional_seq": "H(Z|X) in nats per reasoning",
    "information/h_marginal_seq": "H(Z) in nats per reasoning",
    "information/retrieval_acc_low": "lower end of the 95% interval of retrieval_acc, over prompts",
    "information/retrieval_acc_high": "its upper end",
    "information/mi_low": "lower end of the 95% interval of mi, over prompts",
    "information/mi_high": "its upper end",
    "information/mi_seq_low": "lower end of the 95% interval of mi_seq, over prompts",
    "information/mi_seq_high": "its upper end",
    "information/h_conditional_low": "lower end of the 95% interval of h_conditional, over prompts",
    "information/h_conditional_high": "its upper end",
    "information/retrieval_p_value": "how often shuffled reasonings retrieve as well: small means tied to the prompt",
    "information/mi_p_value": "the same for the mean own score, which a weak scorer shows sooner",
    "information/sampling_error": "standard error that scoring only some of the reasonings adds to mi_seq; 0 where all were scored",
    "information/num_reasonings": "reasonings cross-scored",
    "information/num_prompts": "distinct prompts they were scored against",
    "information/num_empty": "reasonings left out because empty or never closed",
    "information/mi_seq_change": "mi_seq less mi_seq of the first measurement on the same probe",
    "information/mi_seq_change_low": "lower end of its 95% interval, paired by prompt",
    "information/mi_seq_change_high": "its upper end",
    "information/retrieval_acc_change": "retrieval_acc less retrieval_acc of the first measurement on the same probe",
    "information/retrieval_acc_change_low": "lower end of its 95% interval, paired by prompt",
    "information/retrieval_acc_change_high": "its upper end",
    "information/h_conditional_change": "h_conditional less h_conditional of the first measurement on the same probe",
    "information/h_conditional_change_low": "lower end of its 95% interval, paired by prompt",
    "information/h_conditional_change_high": "its upper end",
    "information/probe_tokens_sampled": "tokens of the prompts and responses of the probe that were put through the model to sample it",
    "information/probe_tokens_scored": "tokens that cross-scoring the probe computed",
    "information/probe_errors": "episodes of the probe that an environment error ended, after retries",
    "information/failed": "1 if the measurement was due and failed; a note has the cause",
    "information_trajectory/{name}": "the information metrics over trajectories drawn uniformly, then one of their turns each",
    "information_turn/{name}": "the information metrics over turns drawn uniformly from all trajectories",
    "alarms/warning": "alarms of severity warning that stand at this step",
    "alarms/critical": "alarms of severity critical that stand at this step",
    "gradients/rv_mean_{k}": "mean reward variance of the prompts of bucket k, 1 the lowest",
    "gradients/task_norm_{k}": "norm of the task gradient of bucket k",
    "gradients/kl_norm_{k}": "norm of its KL gradient, coefficient included",
    "gradients/entropy_norm_{k}": "norm of its entropy gradient, coefficient included",
    "gradients/regulariser_norm_{k}": "norm of its KL and entropy gradients together",
    "gradients/dominance_{k}": "regulariser_norm / (task_norm + regulariser_norm) of bucket k",
    "gradients/task_cosine_{k}": "cosine of the task gradient of bucket k with the total gradient of the batch",
    "gradients/kl_cosine_{k}": "cosine of its KL gradient with the total gradient of the batch",
    "gradients/entropy_cosine_{k}": "cosine of its entropy gradient with the total gradient of the batch",
    "gradients/task_with_regulariser_{k}": "cosine of the task and the regulariser gradient of bucket k; below 0 they work against each other",
    "gradients/snr_{k}": "signal-to-noise ratio of the task gradient of bucket k, from independent halves",
    "gradients/bound_used_{k}": "share of the Cauchy-Schwarz bound that the task gradient of bucket k uses",
    "gradients/bound_broken": "buckets in which the bound does not hold: anything but 0 is a defect",
    "gradients/failed": "1 if the decomposition was due and failed; a note has the cause",
    "validation/success": "share of the fixed validation prompts solved",
    "validation/success_low": "lower end of its 95% interval over instances",
    "validation/success_high": "upper end of its 95% interval over instances",
    "validation/reward_mean": "mean episode return on validation",
    "validation/turns": "mean turns per validation episode",
    "validation/response_tokens": "mean sampled tokens per validation response",
    "validation/format_valid": "share of valid turns on validation",
    "validation/lenient": "share of validation turns that are valid only by the lenient reading",
    "validation/errors": "validation episodes ended by an environment error",
    "validation/prompts": "validation prompts played",
    "validation/instances": "different instances among them",
    "validation/pass_at_{k}": "chance that at least one of k samples of a prompt solves it; where evaluation.samples is more than 1",
    "rollout/env/{env}/{name}": "success, mean return or a number of its own of one environment, over its training episodes",
    "validation/env/{env}/{name}": "the same over its validation episodes",
}

_FAMILIES = [re.compile(re.sub(r"\{\w+\}", "[^/]+", name)) for name in CATALOGUE if "{" in name]


def is_catalogued(name: str) -> bool:
    """Whether a metric's name is in the catalogue, or belongs to a family of it such as validation/pass_at_{k}."""
    return name in CATALOGUE or any(family.fullmatch(name) for family in _FAMILIES)


class StepMetrics(dict[str, float]):
    """The numbers of one step; only catalogued names and finite values go in."""

    def put(self, section: str, values: Mapping[str, float]) -> None:
        """Add `values` under "section/"."""
        for name, value in values.items():
            key = f"{section}/{name}"
            if not is_catalogued(key):
                raise UnknownName(f"metric '{key}' is not in core/metrics.py: {did_you_mean(key, CATALOGUE)}")
            if not math.isfinite(value):
                raise ValueError(f"metric '{key}' is {value}; a step must not log what it could not compute")
            self[key] = float(value)


def wilson_interval(successes: float, trials: float, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a rate (95% by default); (0, 1) where nothing was tried."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = (rate + z * z / (2 * trials)) / (1 + z * z / trials)
    margin = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return max(0.0, centre - margin), min(1.0, centre + margin)
