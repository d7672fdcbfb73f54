"""Rewards that are about the response and not about the task."""


def overlong_penalty(length: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, then linear, -factor at max_tokens.

    A response that is cut off at the limit is punished as one, but those shortly before it hear of it in time. Without a buffer there is
    no punishment.
    """
    overlong = min(max(length - (max_tokens - buffer), 0), buffer)
    return -factor * overlong / buffer if overlong else 0.0
