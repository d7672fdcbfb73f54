"""Problems from the public data sets: the format of a row is told by its fields.

Loading is done once per process and options, since a trainer builds hundreds of environments that share them.
"""

from collections.abc import Callable
from functools import lru_cache

from tether.envs.dataset import BadRows, Pool, Row, RowError, load_instances
from tether.envs.deepcoder.formats.functions import humaneval, mbpp
from tether.envs.deepcoder.formats.livecodebench import livecodebench
from tether.envs.deepcoder.formats.pairs import deepcoder, input_output, verification_info
from tether.envs.deepcoder.problem import Problem

DEFAULT = "the built-in problems"

_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row], Problem]], ...] = (
    (("question_content", "public_test_cases"), livecodebench),
    (("prompt", "entry_point", "test"), humaneval),
    (("test_list",), mbpp),
    (("problem", "tests"), deepcoder),
    (("question", "input_output"), input_output),
    (("prompt", "verification_info"), verification_info),
)
"""The fields that tell a format; the first that a row has all fields of."""


def read_problem(row: Row) -> Problem:
    """The problem of a row in any known format."""
    present = row.value if isinstance(row.value, dict) else row.fields("problem", "tests")
    for names, read in _FORMATS:
        if all(name in present for name in names):
            return read(row)
    known = "; ".join(", ".join(names) for names, _ in _FORMATS)
    raise RowError(f"is of no known format: it has the fields {', '.join(map(str, present)) or '(none)'}; a format is told by {known}")


@lru_cache(maxsize=8)
def load_pool(source: str, bad_rows: BadRows, max_tests: int | None) -> Pool[Problem]:
    """The problems of a file or named data set, by split."""
    problems = load_instances(
        source, lambda row: read_problem(row).limited_to(max_tests), env="deepcoder", default=DEFAULT, bad_rows=bad_rows
    )
    return Pool(problems, env="deepcoder", source=source)
