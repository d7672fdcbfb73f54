"""A run on a GPU: paged decoding, packed updates in bfloat16, diagnosis and evaluation, through the public door."""

import json
import math
from pathlib import Path

import pytest

import tether


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_short_run_on_a_gpu(algo: str, gpu: str, tmp_path: Path) -> None:
    run = tether.train(
        "frozen_lake",
        algo=algo,
        steps=2,
        out=tmp_path / "run",
        model={"name": "tiny", "device": gpu},
        algorithm={"kl_coef": 0.01},
        rollout={"num_groups": 4, "group_size": 4, "speculative_tokens": 4},
        evaluation={"prompts": 8},
        filter={"strategy": "all"},
    )
    update = run.records[-1].metrics
    assert update["update/num_updates"] >= 1 and update["update/nonfinite"] == 0
    assert update["update/mismatch"] < 0.05, "sampler and learner compute in bfloat16, by other kernels"
    assert math.isfinite(update["update/kl_reference"])


def test_a_short_run_with_rollouts_in_float8(gpu: str, tmp_path: Path) -> None:
    """The copy is refreshed after every update, the correction is on, and the difference stays one of rounding."""
    run = tether.train(
        "frozen_lake",
        steps=3,
        out=tmp_path / "run",
        model={"name": "tiny", "device": gpu},
        rollout={"num_groups": 4, "group_size": 4, "speculative_tokens": 4, "precision": "fp8"},
        evaluation={"prompts": 8},
        filter={"strategy": "all"},
    )
    assert run.settings["algorithm"]["importance_cap"] == 2.0
    assert json.loads((run.path / "run.json").read_text())["machine"]["engine"] == "paged, fp8"
    for record in [record for record in run.records if record.step]:
        # How small it may be follows from how sure the sampled texts are: 0.0012 was seen where it is mostly above 0.002.
        assert 0.0 < record.metrics["update/mismatch"] < 0.1, "stale or wrong weights are above"
