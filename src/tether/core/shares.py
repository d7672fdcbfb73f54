"""Shares and their intervals in words, the same on every page: a share is never rounded to nothing, an interval never to a point.

An estimate of exactly 0 or 1 has no spread, so a bootstrap gives it the interval "0% to 0%", although the next prompt may differ. Such an
interval is replaced by Wilson's, with as many trials as there are independent units, and said as a bound: "0 of 8; at most 32%".
"""

from tether.core.metrics import wilson_interval

POINT = 1e-9
"""Ends that are no further apart than this are one point."""


def percent(value: float) -> str:
    """A share in whole percent, never rounding something to nothing or almost all to all.

    >>> percent(0.3125), percent(0.001), percent(0.999), percent(1.0)
    ('31%', 'under 1%', 'over 99%', '100%')
    """
    if 0 < value < 0.005:
        return "under 1%"
    return "over 99%" if 0.995 <= value < 1 else f"{100 * value:.0f}%"


def exact_percent(value: float) -> str:
    """A share to three digits, for those that are read against chance.

    >>> exact_percent(0.125)
    '12.5%'
    """
    return f"{100 * value:.3g}%"


def share_interval(value: float, low: float, high: float, units: float) -> tuple[float, float]:
    """The 95% interval of a share; Wilson's over `units` independent units where the given one is a point.

    >>> share_interval(0.5, 0.3, 0.7, 8)
    (0.3, 0.7)
    >>> [round(end, 3) for end in share_interval(0.0, 0.0, 0.0, 8)]
    [0.0, 0.324]
    """
    return (low, high) if high - low > POINT else wilson_interval(value * units, units)


def interval_words(value: float, low: float, high: float, units: float | None = None) -> str:
    """The interval of a share in words; `units`: how many independent units it was measured on, None if unknown.

    >>> interval_words(0.5, 0.3, 0.7), interval_words(0.0, 0.0, 0.0, 8), interval_words(1.0, 0.8, 1.0, 40)
    ('95% interval 30% to 70%', '0 of 8; at most 32%', 'all of 40; at least 80%')
    >>> interval_words(0.4001, 0.40001, 0.40021)
    '95% interval 40.00% to 40.02%'
    """
    if units is not None:
        low, high = share_interval(value, low, high, units)
        if value <= POINT:
            return f"0 of {units:.0f}; at most {_bound(high)}"
        if value >= 1 - POINT:
            return f"all of {units:.0f}; at least {_bound(low)}"
    return f"95% interval {range_words(low, high)}"


def range_words(low: float, high: float) -> str:
    """Two ends of a range of shares, with as many digits as tell them apart.

    >>> range_words(0.3, 0.7), range_words(0.0, 0.0007), range_words(0.998, 0.999), range_words(0.5, 0.5)
    ('30% to 70%', '0% to 0.1%', '99.8% to 99.9%', '50%')
    """
    if high - low <= POINT:
        return percent(low)
    first, last, digits = percent(low), percent(high), 1
    while first == last or "r" in first + last:  # "under 1%" and "over 99%" hide how far the ends are apart
        first, last, digits = f"{low:.{digits}%}", f"{high:.{digits}%}", digits + 1
    return f"{'0%' if low == 0 else first} to {last}"


def _bound(value: float) -> str:
    """A bound in percent, never rounded to 0% or 100%."""
    return f"{value:.0%}" if 0.005 <= value < 0.995 else f"{value:.2%}"
