"""95% intervals of numbers measured on P prompts with several reasonings each: a studentised bootstrap over whole prompts.

The unit is the prompt: reasonings of one prompt are not independent, and a prompt is both the rows it wrote and a column that every other
reasoning is compared with. Drawing a prompt twice would put its column twice into every mixture, which biases information and halves
retrieval. So a prompt's effect is taken from the sample without it (a delete-one jackknife of rows and column), and the P effects are
resampled, not the matrix:

    effect_i   = (P - 1) (mean over k of estimate without k - estimate without i), the influence of prompt i on the estimate
    error      = sqrt(sum effect^2 / (P (P - 1)))
    T*         = resampled mean of the effects / its own error            over bootstrap draws of P prompts
    interval   = estimate - error * upper quantile of T*  ..  estimate - error * lower quantile of T*

Studentising lets the interval lean to the side of the skew (information near its ceiling). With few prompts the quantiles of T* are
rough, so neither is taken nearer to zero than Student's t with as many degrees of freedom as there are prompts with reasonings, less one.
The randomness of single reasonings reaches both the prompt that wrote them and the columns that attract them; the part of the column effects
that this randomness explains, estimated by the spread within prompts, is removed so that it counts once. Coverage over repeated sampling is
measured by benchmarks/coverage.py.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tether.core.intervals import Interval, student_t

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNBOUNDED: Interval = (-math.inf, math.inf)
LEAST_RESAMPLED_ERROR = 0.2
"""Of the error itself: a resample that is nearly one prompt over and over has no spread of its own to divide by."""
ROUNDING = 1e-12
"""An error below this share of the estimate's size is rounding: all prompts agree, and the interval is a point."""


def prompt_effects(values: Floats, change_without: Floats | None, own: Ints, num_prompts: int) -> Floats:
    """[P] the effect of every prompt on the mean of `values`; the effects sum to zero.

    Args:
        values: [N] one per reasoning; the estimate is their mean.
        change_without: [N, P] by how much values[n] changes if the column of prompt i is left out; None if no column enters.
        own: [N] prompt of each reasoning, at least two different ones.
        num_prompts: P, prompts without a reasoning included.
    """
    counts = np.bincount(own, minlength=num_prompts)
    others = len(own) - counts
    means_without = (values.sum() - np.bincount(own, weights=values, minlength=num_prompts)) / others
    effects: Floats = (num_prompts - 1) * (means_without.mean() - means_without)
    if change_without is None or num_prompts < 3:  # without one of two prompts nothing is left to compare with
        return effects
    change = change_without / others
    change[np.arange(len(own)), own] = 0.0  # they leave together with their prompt
    return effects + _column_effects(change, own, num_prompts)


def _column_effects(change: Floats, own: Ints, num_prompts: int) -> Floats:
    """Effects of the columns, shrunk by the share of their spread that the randomness of single reasonings explains."""
    totals = change.sum(axis=0)
    effects: Floats = (num_prompts - 1) * (totals.mean() - totals)
    spread = float((effects**2).sum())
    if spread == 0.0:
        return effects
    order = np.argsort(own, kind="stable")
    starts = np.flatnonzero(np.diff(own[order], prepend=-1))
    counts = np.diff(starts, append=len(own))[:, None]
    sums, squares = (np.add.reduceat(part[order], starts, axis=0) for part in (change, change**2))
    within = np.where(counts > 1, counts / np.maximum(counts - 1, 1) * (squares - sums**2 / counts), 0.0)
    chance = float(within.sum()) * (num_prompts - 1) ** 3 / num_prompts
    return effects * math.sqrt(max(0.0, 1.0 - chance / spread))


def studentised_intervals(
    estimates: Mapping[str, float],
    effects: Mapping[str, Floats],
    limits: Mapping[str, Interval],
    *,
    degrees: int,
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, Interval]:
    """The interval of every estimate from the same draws of prompts.

    Args:
        estimates: by name.
        effects: for each name, the effects of the units (prompts, at least two) on it.
        limits: the range a quantity cannot leave; an end beyond it is set to it. Names without an entry have no limits.
        degrees: of freedom of Student's t.
        resamples: draws of the bootstrap.
        rng: of the draws.
    """
    units = np.stack([effects[name] for name in estimates], axis=1)
    num = len(units)
    draws = rng.multinomial(num, np.full(num, 1 / num), size=resamples).astype(np.float64)
    errors = np.sqrt((units**2).sum(axis=0) / (num * (num - 1)))
    means = draws @ units / num
    resampled = np.sqrt(np.maximum(draws @ units**2 / num - means**2, 0.0) / (num - 1))
    least = student_t(degrees)
    found = {}
    for column, (name, estimate) in enumerate(estimates.items()):
        error = float(errors[column])
        if error <= ROUNDING * max(1.0, abs(estimate)):
            found[name] = (estimate, estimate)
            continue
        ratios = means[:, column] / np.maximum(resampled[:, column], LEAST_RESAMPLED_ERROR * error)
        lower, upper = np.quantile(ratios, (0.025, 0.975))
        low, high = estimate - error * max(float(upper), least), estimate - error * min(float(lower), -least)
        floor, ceiling = limits.get(name, UNBOUNDED)
        found[name] = (max(low, min(floor, estimate)), min(high, max(ceiling, estimate)))  # rounding may put the estimate itself outside
    return found
