"""What the shell completes after `tether --install-completion`: names of environments, models, algorithms, configs and settings.

A completer gets what was typed so far and returns the names that begin with it. The shell waits for it, so none of them loads torch.
"""

from collections.abc import Iterable


def _beginning(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]


def complete_env(incomplete: str) -> list[str]:
    from tether.envs.registry import ENVIRONMENTS

    return _beginning(ENVIRONMENTS.names(), incomplete)


def complete_model(incomplete: str) -> list[str]:
    from tether.models.catalog import EMBEDDED

    return _beginning(EMBEDDED, incomplete)


def complete_algorithm(incomplete: str) -> list[str]:
    from tether.algorithms.presets import PRESETS

    return _beginning(PRESETS, incomplete)


def complete_filter(incomplete: str) -> list[str]:
    from tether.algorithms.filters.select import AUTO, STRATEGIES

    return _beginning([*STRATEGIES, AUTO], incomplete)


def complete_config(incomplete: str) -> list[str]:
    from tether.core.config import config_names

    return _beginning(config_names(), incomplete)


def complete_config_or_env(incomplete: str) -> list[str]:
    return [*complete_config(incomplete), *complete_env(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    from tether.core.config import known_keys
    from tether.training.settings import RunSettings

    return _beginning(known_keys(RunSettings), incomplete)


def complete_override(incomplete: str) -> list[str]:
    """A setting with its equals sign, for --set."""
    return [f"{key}=" for key in complete_setting(incomplete)]
