"""DeepCoder: write a program; tests run it in a sandbox, and the reward is the fraction of tests that pass.

By default one answer decides. With more turns, a failed attempt is shown the first public test it failed, and another attempt may follow.
Only the attempt that ends the episode has a reward, so that failing first never pays more than solving at once. An answer without a
program (nothing, or prose that is no Python) is invalid and uses its turn. A program in a code fence that does not compile is a valid
answer and a wrong one. There is no randomness in an episode: `env_seed` changes nothing.
"""

import os
import textwrap
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Self

from pydantic import Field, model_validator

from tether.core.enums import Split
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work
from tether.envs.dataset import BadRows
from tether.envs.deepcoder import prompt
from tether.envs.deepcoder.assemble import assemble, extract
from tether.envs.deepcoder.dataset import LEVELS, JudgingRules, SpecialJudge, builtin_pool, load_pool, read_judged_problem
from tether.envs.deepcoder.parsing import NotPython
from tether.envs.deepcoder.problem import FractionPassed, Problem, Reward, SuiteResult, grade, idle, is_arithmetic, reject
from tether.envs.deepcoder.sandbox.client import Isolation, running_fork_server
from tether.envs.deepcoder.sandbox.jobs import Limits, ProgramRunner
from tether.envs.deepcoder.sandbox.sandbox import Sandbox
from tether.envs.wording import Example

Generator = Callable[[int, Split], Problem]

_MOST_CONCURRENT = 16
_SPARED_CORES = 2
"""Left to the engine and the trainer, on machines that have more than `_WAVE`."""
_WAVE = 4
"""Tests of an answer that are begun at a time; after each wave it is seen how long they took. A larger machine begins no more, so that it grades alike."""
_OUTPUT_KIB = 4096
_CLOCK_FACTOR, _CLOCK_SECONDS = 5, 5


class DeepCoderOptions(TurnOptions):
    """Options of deepcoder."""

    data: str | None = None
    """A file or data set of problems to use instead of the built-in ones."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row of it."""
    fields: dict[str, str] = {}
    """Columns of it under other names, such as {problem: statement, tests: cases}."""
    special_judge: SpecialJudge = "skip"
    """Problems of `data` whose statement accepts several answers: leave them out, or keep them and accept the listed answer alone."""
    ignore_case: bool | None = None
    """Compare printed text of `data` without regard to case; None: where the statement allows it."""
    difficulty: tuple[int, int] | None = None
    """The easiest and the hardest level of the built-in problems, from 1 to 5."""
    max_tests: int | None = Field(default=None, ge=1)
    """The most tests per problem: the first public one and evenly spaced hidden ones; None for all."""
    time_limit: float = Field(default=10.0, gt=0, le=600)
    """Seconds of CPU for each test."""
    total_limit: float = Field(default=60.0, gt=0)
    """Seconds on the clock that the tests of an answer may run, added up; no test is started after that, nor where the first two run out of time."""
    memory_mib: int = Field(default=512, ge=64)
    """For each test."""
    concurrency: int | None = Field(default=None, ge=1, le=256)
    """Tests that run at a time, of all environments of a process together; None for one per CPU, beyond four CPUs two fewer, at most 16."""
    isolation: Isolation = "kernel"
    """"process" accepts weaker isolation where the machine offers none by the kernel."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.difficulty is not None:
            least, most = self.difficulty
            if not LEVELS[0] <= least <= most <= LEVELS[1]:
                raise ValueError(f"difficulty: got {least}, {most}; give the easiest and the hardest level, such as 1, 3")
            if self.data is not None:
                raise ValueError("difficulty: it is for the built-in problems; leave it out with data")
        return self


class DeepCoder(TextEnv[DeepCoderOptions]):
    """Write a program that passes the tests."""

    name = "deepcoder"
    Options = DeepCoderOptions
    default_few_shot = 2
    metrics = ("passed", "total")
    example, refused = prompt.EXAMPLE, prompt.REFUSED
    work: Work = "wait"
    read_row = staticmethod(read_judged_problem)

    def __init__(
        self,
        options: DeepCoderOptions | None = None,
        *,
        generator: Generator | None = None,
        reward: Reward | None = None,
        runner: ProgramRunner | None = None,
    ) -> None:
        super().__init__(options or DeepCoderOptions())
        self._make: Generator = generator or _pool(self.options)
        self._pay: Reward = reward or FractionPassed()
        self._concurrency = self.options.concurrency or _default_concurrency(os.cpu_count() or 1)
        self._runner: ProgramRunner = runner or _sandbox(
            Limits(
                cpu_seconds=self.options.time_limit,
                # Several times the CPU seconds: a busy machine is no fault of the program, sleeping is.
                wall_seconds=_CLOCK_FACTOR * self.options.time_limit + _CLOCK_SECONDS,
                memory_mib=self.options.memory_mib,
                output_kib=_OUTPUT_KIB,
            ),
            self.options.isolation,
            self._concurrency,
        )

    def generate(self, seed: int) -> None:
        self.problem: Problem = self._make(seed, self.options.split)

    def take(self, answer: str) -> Outcome:
        found = extract(answer)
        try:
            if not found.code.strip():
                raise NotPython("there is no code")
            program = assemble(found.code, self.problem.starter, self.problem.entry_point)
        except NotPython as error:
            if not found.fenced:
                return Outcome(prompt.NO_PROGRAM, valid=False, info={"passed": 0, "total": len(self.problem.cases)})
            return self._outcome(reject(self.problem.cases, str(error)))
        if is_arithmetic(textwrap.dedent(found.code)):
            return self._outcome(idle(self.problem, program))
        wave = min(self._concurrency, _WAVE)
        return self._outcome(grade(program, self.problem.cases, self._runner, wave=wave, total_limit=self.options.total_limit))

    def _outcome(self, results: SuiteResult) -> Outcome:
        done = results.solved or self._turns + 1 >= self.max_turns
        info = {"passed": results.passed, "total": results.total, "failures": results.endings}
        if results.failures:
            info["first_failure"] = prompt.failure_line(results.failures[0])
        return Outcome(prompt.feedback(results), self._pay(results) if done else 0.0, done, results.solved, info=info)

    @property
    def workers(self) -> int:
        """Answers graded at the same time. More of them would wait for each other while their deadlines run."""
        return self._concurrency

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0) if isinstance(self._pay, FractionPassed) else super().reward_range

    @property
    def instance(self) -> str:
        return self.problem.fingerprint

    @property
    def categories(self) -> Mapping[str, str]:
        return {"difficulty": self.problem.difficulty} if self.problem.difficulty else {}

    @property
    def task(self) -> str:
        return prompt.task(self.max_turns)

    @property
    def paper(self) -> str:
        return prompt.paper(self.max_turns)

    def worked_examples(self, count: int) -> tuple[Example, ...]:
        return prompt.WORKED

    def opening(self) -> str:
        return prompt.opening(self.problem)


def _pool(options: DeepCoderOptions) -> Generator:
    if options.data is None:
        return builtin_pool(options.difficulty, options.max_tests)
    rules = JudgingRules(options.special_judge, options.ignore_case)
    return load_pool(options.data, options.bad_rows, options.max_tests, tuple(options.fields.items()), rules)


def _default_concurrency(num_cores: int) -> int:
    """How many tests run at a time.

    >>> [_default_concurrency(cores) for cores in (1, 2, 4, 5, 8, 16, 64)]
    [1, 2, 4, 4, 6, 14, 16]
    """
    return min(max(num_cores - _SPARED_CORES, min(num_cores, _WAVE)), _MOST_CONCURRENT)


@lru_cache(maxsize=8)
def _sandbox(limits: Limits, isolation: Isolation, concurrency: int) -> ProgramRunner:
    """A sandbox. A machine without one is reported here, when the environment is built, not in the middle of a run."""
    running_fork_server(isolation)
    return Sandbox(limits, isolation=isolation, concurrency=concurrency)
