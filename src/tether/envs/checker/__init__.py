"""The public conformance checker: what every environment has to keep to, held against any environment.

`check_env(name_or_class, **options)` answers with a report of every law. The laws are in `laws`; the episodes they look at are played
by `episodes` with answers from `answers`, all of it by seed, so that whatever is found can be found again.
"""

from tether.envs.checker.examination import CheckReport, Verdict, check_env

__all__ = ["CheckReport", "Verdict", "check_env"]
