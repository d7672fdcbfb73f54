"""An agent of one's own, trained on a CPU through the gateway, gets better at what it is rewarded for."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_agent.py"


def test_an_agent_learns(tmp_path: Path) -> None:
    success = runpy.run_path(str(EXAMPLE))["train"](tmp_path / "run", steps=3).metrics("validation/success")
    assert success[0] < 0.6 and success[3] > success[0] + 0.25, f"from {success[0]} to {success[3]}"
