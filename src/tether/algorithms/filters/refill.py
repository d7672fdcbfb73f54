"""Refill: sample more prompts until a filtered batch is full (DAPO's dynamic sampling, arXiv 2503.14476, equation 11), in few rounds."""


def groups_to_sample(kept: int, sampled: int, wanted: int) -> int:
    """How many more prompts to try: the missing groups over the share kept so far, rounded up.

    At least as many as are missing, at most a whole batch (`wanted`), which is also the answer where nothing was kept; 0 when full.
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    expected = -(-missing * sampled // kept) if kept else wanted
    return min(max(expected, missing), wanted)
