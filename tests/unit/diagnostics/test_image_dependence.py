"""Whether the reasoning depends on the image: by hand, with scorers that look at the ids of images."""

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tether import Group, Turn
from tether.core.images import Image, image_digests, image_of, patch_ids
from tether.core.metrics import StepMetrics
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.image_dependence import measure_images
from tether.diagnostics.monitor import Monitor, step_record
from tether.diagnostics.pairs import ProbeRows, first_turn_pairs, probe_rows
from tether.runs.verdict import reasoning_words, tiles

Ids = tuple[int, ...]


def picture(shade: int, size: int = 4) -> Image:
    pixels = np.full((size, size, 3), shade, dtype=np.uint8)
    pixels[0] = 255 - shade
    return Image.of(pixels)


def prompt(image: Image, patches: int = 2) -> Ids:
    return (1, *patch_ids(image.digest, patches), 3)


class Seeing:
    """log p(z | x) by the image of x: `own` a token for the image that z names, `blank` for none of the known ones, `other` else."""

    def __init__(self, images: Sequence[Image], own: float, other: float, blank: float) -> None:
        self.names = {image.digest: number for number, image in enumerate(images)}
        self.own, self.other, self.blank = own, other, blank
        self.held: list[bool] = []

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        (digest,) = image_digests(prompt)
        self.held.append(image_of(digest) is not None)
        shown = self.names.get(digest)
        return len(reasoning) * (self.blank if shown is None else self.own if shown == reasoning[0] else self.other)


def test_by_hand() -> None:
    images = [picture(10), picture(60)]
    prompts, reasonings, source = [prompt(image) for image in images], [(0, 0), (0, 0, 0, 0), (1,)], [0, 0, 1]
    table = Seeing(images, own=-0.5, other=-2.0, blank=-1.25)
    own = cross_score(table, prompts, reasonings)[[0, 1, 2], source]
    found = measure_images(table, prompts, reasonings, source, own, resamples=200, seed=1)
    assert found.levels == {"image_swapped": 1.5, "image_blank": 0.75} and found.num_prompts == 2
    assert found.intervals == {"image_swapped": (1.5, 1.5), "image_blank": (0.75, 0.75)}, "all prompts agree: a point"
    assert all(table.held)
    assert found.metrics["image_swapped_low"] == 1.5 and found.metrics["image_prompts"] == 2.0


def test_the_mean_is_over_reasonings_and_the_interval_over_prompts() -> None:
    images = [picture(shade) for shade in (10, 60, 120)]
    lost = {0: 0.3, 1: 0.6, 2: 1.2}

    def score(x: Sequence[int], z: Sequence[int]) -> float:
        is_own = image_digests(x) == [images[z[0]].digest]
        return -1.0 * len(z) - (0.0 if is_own else lost[z[0]] * len(z))

    prompts, reasonings, source = [prompt(image) for image in images], [(0,), (0, 0), (1,), (2,)], [0, 0, 1, 2]
    found = measure_images(score, prompts, reasonings, source, [-1.0, -2.0, -1.0, -1.0], resamples=500, seed=3)
    assert found.levels["image_swapped"] == pytest.approx((0.3 + 0.3 + 0.6 + 1.2) / 4)
    low, high = found.intervals["image_swapped"]
    assert low < 0.3 and high > 1.0, "three prompts tell little"
    again = measure_images(score, prompts, reasonings, source, [-1.0, -2.0, -1.0, -1.0], resamples=500, seed=3)
    assert again == found


def test_images_are_swapped_for_those_of_the_same_size_and_all_together() -> None:
    small, large = [picture(shade) for shade in (10, 60)], [picture(shade, 8) for shade in (20, 90)]
    asked: list[Ids] = []

    def score(x: Sequence[int], z: Sequence[int]) -> float:
        asked.append(tuple(x))
        return -1.0

    def both(first: Image, second: Image, word: int) -> Ids:
        return (word, *patch_ids(first.digest, 2), *patch_ids(second.digest, 4), *patch_ids(first.digest, 2))

    prompts = [both(small[0], large[0], 5), both(small[1], large[1], 6), (7, *patch_ids(picture(200).digest, 3))]
    last = picture(200)
    found = measure_images(score, prompts, [(1,), (1,), (1,)], [0, 1, 2], [-1.0] * 3, resamples=50, seed=0)
    assert asked[:2] == [both(small[1], large[1], 5), both(small[0], large[0], 6)], "the text stays, every place of an image is replaced"
    assert found.num_prompts == 2 and len(asked) == 2 + 3, "nothing lends three patches; blank ones are there for all"
    assert image_digests(asked[-1]) == [last.blank().digest]


def test_text_alone_is_not_scored_again() -> None:
    def score(x: Sequence[int], z: Sequence[int]) -> float:
        raise AssertionError("nothing to score")

    assert measure_images(score, [(1,), (2,)], [(5,), (6,)], [0, 1], [-1.0, -1.0], resamples=10, seed=0).metrics == {}


@pytest.fixture
def seen(turn: Callable[..., Turn], group: Callable[..., Group]) -> tuple[list[Image], list[Group]]:
    """Six groups whose prompts differ by their image alone, two reasonings each."""
    images = [picture(10 + 30 * number) for number in range(6)]
    groups = []
    for number, image in enumerate(images):
        members = []
        for length in (1, 2):
            played = turn(prompt(image), (number,) * length + (90,), (0, length))
            played.images = (image,)
            members.append([played])
        groups.append(group(number, members))
    return images, groups


def test_cross_scores_swap_the_images(seen: Any, observe: Any, rows: Any) -> None:
    images, groups = seen
    pairs = first_turn_pairs(rows(groups))
    assert len(pairs.prompts) == 6, "the image tells the prompts apart"
    monitor = Monitor(None, rules=None)
    health = observe(monitor, 1, groups, Seeing(images, own=-0.1, other=-4.0, blank=-2.1))
    values = health.metrics["information"]
    assert values["retrieval_acc"] == 1.0 and values["image_swapped"] == pytest.approx(3.9) and values["image_blank"] == pytest.approx(2.0)
    assert values["image_prompts"] == 6
    StepMetrics().put("information", values)
    assert health.verdict.reasons[-1].endswith("it depends on the image.") and not health.verdict.image_ignored
    blind = observe(Monitor(None, rules=None), 1, groups, Seeing(images, own=-1.0, other=-1.0, blank=-1.0)).metrics["information"]
    assert blind["retrieval_acc"] == pytest.approx(1 / 6) and blind["mi_seq"] == 0.0
    assert blind["image_swapped"] == blind["image_swapped_high"] == blind["image_blank"] == 0.0


def test_an_agent_that_reads_the_text_and_ignores_the_image(turn: Any, group: Any, observe: Any) -> None:
    images = [picture(10 + 30 * number) for number in range(6)]
    groups = [group(n, [[turn((n, *prompt(image)), (n,) * 2 + (90,), (0, 2))]] * 2) for n, image in enumerate(images)]

    def reads_text(x: Sequence[int], z: Sequence[int]) -> float:
        return -0.1 if x[0] == z[0] else -8.0

    health = observe(Monitor(None), 1, groups, reads_text)
    assert health.verdict.headline == "Tied to the input: the reasoning depends on its prompt. The image is ignored."
    assert health.verdict.image_ignored and "template collapse in what the agent sees" in health.verdict.next_step
    record = step_record(1, {}, health)
    headline, reasons = reasoning_words([record])
    assert "The image is ignored." in headline and "as likely with the images of another episode (0 nats a token, 0 to 0 less)" in reasons
    assert [tile.value for tile in tiles([record]) if tile.label == "Loss with other images, nats"] == ["0"]


def test_the_cost_counts_the_images(seen: Any, rows: Any) -> None:
    pairs = first_turn_pairs(rows(seen[1]))
    assert pairs.cost == 6 * 4 + 6 * 18 + 2 * (6 * 4 + 18)


def test_a_probe_holds_its_images(seen: Any) -> None:
    images, groups = seen
    table = Seeing(images, own=-0.1, other=-4.0, blank=-2.1)
    held = probe_rows(groups)
    monitor = Monitor(table, probe_prompts=6, probe_samples=2, rules=None)
    rows = {"prompts": [(1,), (2,)], "reasonings": [(5,), (6,)], "groups": [0, 1]}
    groups.clear()
    images.clear()
    del seen
    gc.collect()

    def sample(count: int) -> ProbeRows:
        return held

    values = monitor.observe(1, **rows, probe=sample).metrics["information"]
    assert values["image_swapped"] == pytest.approx(3.9) and math.isfinite(values["image_blank"])
