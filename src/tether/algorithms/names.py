"""The names that settings may use, known without loading torch, so that the command line can refuse a misspelt one at once.

The functions behind them are in the dictionaries of the same names beside this file; a test compares the two. An algorithm may also ask
for other defaults in the other sections of a run: dynamic sampling and overlong shaping are part of what DAPO is.
"""

from typing import Any

ALGORITHMS = ("ppo", "grpo", "dapo", "dr_grpo")
ESTIMATORS = ("group_relative", "gae", "bilevel_gae")
AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
DIVERGENCES = ("k1", "k2", "k3")

SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv 2503.14476: groups that all succeed or all fail are left out and replaced (eq. 11), long responses are punished (eq. 13)
    "dapo": {
        "filter": {"strategy": "all", "include_zero": False, "score": "outcome_variance", "loss_scale": "none", "refill": 3},
        "rollout": {"overlong_share": 0.2},
    },
}
