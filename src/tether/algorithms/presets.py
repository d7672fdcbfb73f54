"""Algorithms as data: a frozen bundle of choices, each made of the functions beside this file. A new variant is a new entry."""

from dataclasses import dataclass

from tether.core.errors import UnknownName, did_you_mean


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What distinguishes one policy-gradient algorithm from another."""

    name: str
    scale_by_std: bool
    """Divide group-relative rewards by their standard deviation."""
    aggregation: str
    """How token losses become one number."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coef: float = 0.001


PRESETS = {
    algorithm.name: algorithm
    for algorithm in (
        # DeepSeekMath, arXiv 2402.03300, equation 3, with the paper's clips (RAGEN-2, appendix B.2) and no KL term
        Algorithm("grpo", scale_by_std=True, aggregation="sequence_mean_token_mean"),
        # Dr. GRPO, arXiv 2503.20783: neither the std nor the length enters
        Algorithm("dr_grpo", scale_by_std=False, aggregation="sequence_mean_token_sum"),
    )
}


def preset(name: str) -> Algorithm:
    """The algorithm of a name."""
    if name not in PRESETS:
        raise UnknownName(f"unknown algorithm '{name}': {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
