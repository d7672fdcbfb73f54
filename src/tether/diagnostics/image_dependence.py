"""Does the reasoning depend on the image? The same reasoning scored with other images in the place of its own.

For a pair (x, z) with images in x, in nats per token:

    image_swapped = (log p(z | x) - log p(z | x with the images of another episode)) / |z|
    image_blank   = (log p(z | x) - log p(z | x with blank images of the same size)) / |z|

The text of x stays. Both are 0 where the reasoning does not depend on the image. A blank image is unlike all that a model has seen, so its number also
holds how strange it is; the swapped one does not, and is what alarms and verdicts read. Other prompts of the sample lend their images, all of one prompt together,
with as many patches as those that they replace. A prompt for which there is no such other is left out of the swapped number.
Intervals resample whole prompts (tether.diagnostics.intervals).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.images import find_runs, has_images, image_of, with_other_images
from tether.core.intervals import Interval
from tether.core.seeding import generator
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.intervals import prompt_effects, studentised_intervals

Ids = tuple[int, ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ImageDependence:
    """By name, `image_swapped` and `image_blank`: the mean over reasonings, and its 95% interval. A name is missing where fewer than two prompts have it."""

    levels: dict[str, float]
    intervals: dict[str, Interval]
    num_prompts: int
    """Prompts whose images were swapped."""

    @property
    def metrics(self) -> dict[str, float]:
        """As a step records them."""
        found: dict[str, float] = dict(self.levels)
        for name, (low, high) in self.intervals.items():
            found[f"{name}_low"], found[f"{name}_high"] = low, high
        return {**found, "image_prompts": self.num_prompts} if found else {}


NO_IMAGES = ImageDependence({}, {}, 0)


def measure_images(
    scorer: Any, prompts: Sequence[Ids], reasonings: Sequence[Ids], source: Sequence[int], own: Any, *, resamples: int, seed: int
) -> ImageDependence:
    """Score the reasonings of every prompt that holds images with other images.

    Args:
        scorer: anything that `cross_score` takes.
        prompts: P distinct ones; somebody holds their images.
        reasonings: N of them.
        source: [N] the prompt of each reasoning.
        own: [N] log p of each reasoning under its own prompt.
        resamples: of the intervals.
        seed: of the draw of other prompts, and of the resampling.
    """
    rows = {column: [row for row, own_column in enumerate(source) if own_column == column] for column in set(source)}
    seeing = [column for column in sorted(rows) if has_images(prompts[column])]
    rng = generator("images of another episode", seed)
    blanks = {digest: image_of(digest).blank() for column in seeing for digest in _patches(prompts[column])}  # held until all is scored
    mappings = {
        "image_swapped": {column: other for column in seeing if (other := _other_images(column, prompts, rng)) is not None},
        "image_blank": {column: {digest: blanks[digest].digest for digest in _patches(prompts[column])} for column in seeing},
    }
    levels, intervals = {}, {}
    for name, others in mappings.items():
        if len(others) < 2:
            continue
        values, unit = [], []
        for place, (column, mapping) in enumerate(others.items()):
            members = rows[column]
            scores = cross_score(scorer, [with_other_images(prompts[column], mapping)], [reasonings[row] for row in members])[:, 0]
            values += [(float(own[row]) - score) / len(reasonings[row]) for row, score in zip(members, scores.tolist(), strict=True)]
            unit += [place] * len(members)
        levels[name] = float(np.mean(values))
        effects = {name: prompt_effects(np.array(values), None, np.array(unit), len(others))}
        draws = generator("images", "bootstrap", seed)
        found = studentised_intervals({name: levels[name]}, effects, {}, degrees=len(others) - 1, resamples=resamples, rng=draws)
        intervals[name] = found[name]
    return ImageDependence(levels, intervals, len(mappings["image_swapped"]))


def _patches(prompt: Ids) -> dict[str, int]:
    """The images of a prompt in order, each once, and their numbers of patches."""
    found: dict[str, int] = {}
    for run in find_runs(prompt):
        found[run.digest] = max(found.get(run.digest, 0), run.patch + run.length)
    return found


def _other_images(column: int, prompts: Sequence[Ids], rng: np.random.Generator) -> dict[str, str] | None:
    """Which image takes the place of each, from one other prompt, drawn among those that can lend one of the same size for each; None without any.

    A prompt with fewer images lends them in turn. One that would lend an image to itself is of the same episode, or shows the same.
    """
    own = _patches(prompts[column])
    found = []
    for other, prompt in enumerate(prompts):
        lent = list(_patches(prompt).items()) if other != column else []
        pairs = [(digest, count, *lent[place % len(lent)]) for place, (digest, count) in enumerate(own.items())] if lent else []
        if pairs and all(count == size and digest != taken for digest, count, taken, size in pairs):
            found.append({digest: taken for digest, _, taken, _ in pairs})
    return found[int(rng.integers(len(found)))] if found else None
