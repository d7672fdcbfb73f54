"""`auto`: filter only where the spread of reward variance over prompts says that filtering will help.

Where a few prompts hold the signal (Std(RV) / Mean(RV) about 1.2 in the paper) filtering gained 4 points; where all prompts vary alike
(0.33) it lost 5, because it mostly discards data. The decision looks at the mean ratio of the recent batches, the present one included.
"""

from collections.abc import Sequence

from tether.algorithms.filters.scores import ZERO
from tether.algorithms.filters.select import Selection

AUTO = "auto"
FILTERED = "top_p"
"""What `auto` does where filtering helps; elsewhere it keeps all."""


def auto_strategy(unfiltered: Selection, earlier_ratios: Sequence[float], threshold: float) -> str:
    """The strategy for a batch: `unfiltered` is its selection by `all`, `earlier_ratios` are the rv_ratio of the batches before it."""
    if unfiltered.rv_mean <= ZERO:
        return FILTERED  # no prompt varies: it keeps nothing, where `all` would train on regularisation alone
    ratios = [*earlier_ratios, unfiltered.rv_ratio]
    return FILTERED if sum(ratios) / len(ratios) >= threshold else "all"
