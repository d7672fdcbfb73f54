"""Saved rollouts of any framework as one stream of `Rollout` records, for `tether diagnose FILE`.

    reader = open_rollouts("completions/", pattern=None, progress=show)
    for rollout in reader: ...
    reader.notes()                # what was passed over, skipped, empty or without a reward

A folder is searched for files (`folders`). A file goes through three stages, each in modules of its own: the container (JSON Lines, gzip, a JSON
array, parquet, slime's archives) gives plain records, the format (frameworks.toml, `formats`, `traces`) gives rollouts, the
reasoning rule extracts the reasoning. Only the current record is held in memory.
"""

from tether.diagnostics.rollouts.formats import parse_fields
from tether.diagnostics.rollouts.reader import RolloutReader, open_rollouts
from tether.diagnostics.rollouts.reasoning import WHOLE_RESPONSE, ReasoningRule
from tether.diagnostics.rollouts.record import Rollout, Tally

__all__ = ["WHOLE_RESPONSE", "ReasoningRule", "Rollout", "RolloutReader", "Tally", "open_rollouts", "parse_fields"]
