"""The environment checker: every requirement of an environment, tested on any environment.

`check_env(name_or_class, **options)` returns a report of every check. The checks are in `checks`, and `runner` runs them. The episodes they
look at are played by `episodes` with answers from `answers`. All answers follow from seeds, so every finding can be reproduced.
"""

from tether.envs.checker.checks import CheckReport, CheckResult, check_env

__all__ = ["CheckReport", "CheckResult", "check_env"]
