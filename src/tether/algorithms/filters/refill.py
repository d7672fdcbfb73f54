"""Refill: sample more prompts until a filtered batch is full (DAPO's dynamic sampling, arXiv 2503.14476, equation 11), in few rounds."""


def groups_to_sample(kept: int, sampled: int, wanted: int) -> int:
    """How many more prompts to try: the missing groups over the share kept so far, rounded up.

    That is at least as many as are missing. At most a whole batch (`wanted`), which is also the answer where nothing was kept; 0 when full.
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    if kept == 0:
        return wanted
    return min(-(-missing * sampled // kept), wanted)  # the quotient rounded up, in whole numbers
