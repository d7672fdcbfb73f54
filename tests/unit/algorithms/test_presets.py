"""The algorithms as data: the values of the design and of the papers, departures from them, and names that are checked."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from tether.algorithms import presets
from tether.algorithms.advantages import ESTIMATORS
from tether.algorithms.filters.scores import SCORES
from tether.algorithms.filters.select import LOSS_SCALES, STRATEGIES
from tether.algorithms.objective import AGGREGATIONS, DIVERGENCES
from tether.algorithms.presets import PRESETS, SECTIONS, Algorithm, own_changes, preset
from tether.training.settings import RunSettings


def test_ppo() -> None:
    """RAGEN-2, appendix B.2: GAE with gamma and lambda 1, clips 0.2 and 0.28, entropy 0.001."""
    ppo = preset("ppo")
    assert (ppo.advantages, ppo.aggregation, ppo.whiten) == ("gae", "token_mean", True)
    assert (ppo.gamma, ppo.gae_lambda, ppo.turn_gamma, ppo.reward_placement) == (1, 1, 1, "turn")
    assert (ppo.clip_low, ppo.clip_high, ppo.entropy_coef) == (0.2, 0.28, 0.001)
    assert ppo.has_critic and not ppo.has_reference


def test_grpo() -> None:
    """GRPO scales by the std and averages within a sequence first; clips and entropy are RAGEN-2's."""
    grpo = preset("grpo")
    assert (grpo.advantages, grpo.aggregation, grpo.normalize_std) == ("group_relative", "sequence_mean_token_mean", True)
    assert (grpo.clip_low, grpo.clip_high, grpo.entropy_coef, grpo.kl_coef) == (0.2, 0.28, 0.001, 0)
    assert not grpo.has_critic and not grpo.has_reference


def test_dapo() -> None:
    """Clip-higher, dynamic sampling, a token-level loss, overlong shaping; neither KL nor entropy."""
    dapo = preset("dapo")
    assert (dapo.advantages, dapo.aggregation, dapo.normalize_std) == ("group_relative", "token_mean", True)
    assert (dapo.clip_low, dapo.clip_high, dapo.entropy_coef, dapo.kl_coef, dapo.dual_clip) == (0.2, 0.28, 0, 0, None)
    chosen = SECTIONS["dapo"]["filter"]
    assert (chosen["strategy"], chosen["include_zero"], chosen["score"], chosen["loss_scale"]) == ("all", False, "outcome_variance", "none")
    assert chosen["refill"] > 0
    assert SECTIONS["dapo"]["rollout"] == {"overlong_share": 0.2}  # 4,096 of 20,480 tokens in the paper


def test_dr_grpo() -> None:
    """Neither the std nor the length of a response enters."""
    dr_grpo = preset("dr_grpo")
    assert (dr_grpo.advantages, dr_grpo.aggregation, dr_grpo.normalize_std) == ("group_relative", "sequence_mean_token_sum", False)
    assert dr_grpo.constant_length


def test_every_preset_is_named_after_itself_and_can_be_computed() -> None:
    assert list(PRESETS) == ["ppo", "grpo", "dapo", "dr_grpo"]
    for name in PRESETS:
        algorithm = preset(name)
        assert algorithm.name == name
        assert algorithm.aggregation in AGGREGATIONS
        assert algorithm.advantages in ESTIMATORS
        assert algorithm.divergence in DIVERGENCES
        assert algorithm.constant_length == (algorithm.aggregation == "sequence_mean_token_sum")
        assert algorithm.kl_mode in ("loss", "reward") and algorithm.reward_placement in ("turn", "trajectory")
        assert 0 < algorithm.clip_low <= algorithm.clip_high < 1


def test_the_names_that_need_no_torch_are_those_of_the_functions() -> None:
    assert tuple(ESTIMATORS) == presets.ESTIMATORS
    assert tuple(AGGREGATIONS) == presets.AGGREGATIONS
    assert tuple(DIVERGENCES) == presets.DIVERGENCES
    for algorithm, sections in SECTIONS.items():
        assert algorithm in PRESETS
        rule = sections.get("filter", {})
        assert rule.get("strategy", "all") in STRATEGIES
        assert rule.get("score", "length") in SCORES
        assert rule.get("loss_scale", "none") in LOSS_SCALES


def test_changes_to_a_preset() -> None:
    changes = {
        "advantages": "bilevel_gae",
        "aggregation": "sequence_mean_token_sum",
        "divergence": "k1",
        "turn_gamma": 0.95,
        "kl_coef": 0.01,
    }
    changed = preset("grpo", **changes)
    assert (changed.advantages, changed.aggregation, changed.divergence) == ("bilevel_gae", "sequence_mean_token_sum", "k1")
    assert (changed.turn_gamma, changed.kl_coef) == (0.95, 0.01)
    assert changed.has_critic and changed.has_reference
    assert preset("grpo").advantages == "group_relative"
    assert preset("grpo") == preset("grpo")


def test_null_is_the_presets_value_and_former_names_count() -> None:
    """A saved config of tether 0.1 has null for everything that its preset decides."""
    stored = {"name": "ppo", "advantages": None, "lam": 0.5, "whiten": None, "clip_high": None, "dual_clip": None, "kl_coef": 0.1}
    assert Algorithm(**stored) == preset("ppo", gae_lambda=0.5, kl_coef=0.1)
    assert preset("dapo", entropy_coef=0.01) == Algorithm(name="dapo", entropy_coef=0.01, aggregation=None)


def test_what_a_section_says_beyond_its_preset() -> None:
    stored = preset("grpo", kl_coef=0.1).model_dump()
    assert own_changes(stored) == {"kl_coef": 0.1} and own_changes({"name": "nope", "gamma": 0.9}) == {"gamma": 0.9}


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        preset("grpo").clip_low = 0.5


@pytest.mark.parametrize(("name", "near"), [("GRPO", "'grpo'"), ("dr-grpo", "'dr_grpo'"), ("drgrpo", "'dr_grpo'"), ("dap", "'dapo'")])
def test_near_miss(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown algorithm '{name}': did you mean {near}"):
        preset(name)


def test_far_miss_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="known: dapo, dr_grpo, grpo, ppo"):
        preset("xyz")


def test_sections_hold_known_settings() -> None:
    for sections in SECTIONS.values():
        for section, values in sections.items():
            known = RunSettings.model_fields[section].annotation
            assert known is not None and set(values) <= set(known.model_fields)


def test_no_torch() -> None:
    code = "import sys, tether.algorithms.presets, tether.training.settings, tether.training.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
