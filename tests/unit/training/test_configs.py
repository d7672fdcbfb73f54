"""Every config that is checked in parses to settings."""

from pathlib import Path

import pytest

from tether.core.config import load
from tether.training.settings import RunSettings

CONFIGS = sorted((Path(__file__).parents[3] / "configs").rglob("*.*"))


def test_there_are_configs() -> None:
    assert [path.name for path in CONFIGS if path.suffix == ".yaml"], "configs/ holds no YAML file"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_parses(path: Path) -> None:
    settings = load(RunSettings, path)
    assert settings.env.name and path.read_text().startswith("# ")
