"""The checker finds what it is for: each broken environment is caught by the check it fails and by no other, sound ones by none."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput, UnknownName
from tether.core.types import Observation, Step
from tether.envs.checker import CheckReport, CheckResult, check_env, checks, episodes
from tether.envs.checker.episodes import HUGE, ODD_ANSWERS, Answers, canonical, difference, play, replay, transcript
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.remote.http_server import serving

sys.path.append(str(Path(__file__).parent))

from broken_environments import BROKEN, Doors, LeansOnHashes

CHECK_NAMES = [check.name for check in checks.CHECKS]


@pytest.fixture
def here_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check that starts another process, which takes half a second each time, and with fewer instances of each split."""
    monkeypatch.setattr(checks, "SPLIT_SEEDS", 50)
    monkeypatch.setattr(checks, "CHECKS", [check for check in checks.CHECKS if check.name != "another process"])


def _violations(report: CheckReport, check: str) -> tuple[str, ...]:
    return next(result.violations for result in report.results if result.check == check)


@pytest.mark.parametrize(("cls", "check", "said"), BROKEN, ids=[cls.__name__ for cls, _, _ in BROKEN])
def test_each_broken_environment_fails_its_check_and_no_other(
    cls: type[Doors], check: str, said: str, request: pytest.FixtureRequest
) -> None:
    if check != "another process":
        request.getfixturevalue("here_only")
    report = check_env(cls, episodes=100)
    assert report.failed == [check], str(report)
    assert not report.ok
    assert any(said in violation for violation in _violations(report, check)), str(report)


def test_every_law_is_broken_by_somebody() -> None:
    assert {check for _, check, _ in BROKEN} == set(CHECK_NAMES)


def test_sound_environments_break_none() -> None:
    for source in (Doors, "broken_environments:Doors"):
        report = check_env(source)
        assert report.ok, str(report)
        assert [result.check for result in report.results] == CHECK_NAMES
        assert not any(result.skipped for result in report.results)
        assert str(report) == f"{report.env}: all {len(CHECK_NAMES)} checks pass"


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"episodes": 30}, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
@pytest.mark.parametrize("name", ENVIRONMENTS.names())
def test_the_whole_registry_passes_the_checks(name: str, more: dict[str, int]) -> None:
    report = check_env(name, **more)
    assert report.ok, str(report)
    assert {result.check for result in report.results if result.skipped} <= (set() if name == "frozen_lake" else {"pictures"})


@pytest.mark.usefixtures("here_only")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("frozen_lake", {"slip": 1.0, "size": 2, "observation": "coordinates", "max_turns": 1}),
        ("frozen_lake", {"observation": "image"}),
        ("sokoban", {"boxes": 2, "height": 7, "width": 7, "observation": "grid_coordinates", "actions_per_turn": 1}),
    ],
)
def test_options_reach_the_environment(name: str, options: dict[str, Any]) -> None:
    report = check_env(name, episodes=60, **options)
    assert report.ok, str(report)


@pytest.mark.usefixtures("here_only")
def test_pictures_of_a_served_environment_are_checked() -> None:
    with serving("frozen_lake", allow="*") as url:
        results = {result.check: result for result in check_env(url, episodes=8).results}
    assert results["pictures"].ok and not results["pictures"].skipped


def test_a_callable_is_checked_as_far_as_its_options_are_known() -> None:
    report = check_env(lambda: Doors(), episodes=30)
    assert report.ok
    skipped = {result.check: result.skipped for result in report.results if result.skipped}
    unknown = "its options are not known here; check it by name or by class"
    assert skipped.pop("another process").startswith("environment '<lambda>' cannot be built in another process")
    assert skipped == {"options": unknown, "splits": unknown, "pictures": unknown}


def test_a_law_that_rests_on_a_broken_one_is_not_held() -> None:
    report = check_env(next(cls for cls, check, _ in BROKEN if check == "construction"))
    assert report.failed == ["construction"]
    assert all(result.skipped.startswith("requires ") for result in report.results[1:])


def test_mistakes_of_the_caller() -> None:
    with pytest.raises(UnknownName, match="did you mean 'sokoban'"):
        check_env("sokobn")
    with pytest.raises(BadInput, match="takes no options, but got slip"):
        check_env(lambda: Doors(), slip=1)
    report = check_env("sokoban", boxs=2)
    assert report.failed == ["construction"] and "did you mean 'boxes'" in str(report)


@pytest.mark.usefixtures("here_only")
def test_two_mistakes_are_two_failed_checks() -> None:
    class Both(Doors):
        def step(self, answer: str) -> Step:
            step = super().step(answer)
            return Step(
                step.observation, 0.0, step.done, not step.done, {"valid": True, "truncated": not step.done or step.info["truncated"]}
            )

    assert check_env(Both, episodes=100).failed == ["success", "truncation"]


@pytest.mark.usefixtures("here_only")
def test_at_most_three_violations_of_a_law_are_told() -> None:
    report = check_env(next(cls for cls, _, _ in BROKEN if cls.__name__ == "PaysNaN"), episodes=30)
    assert len(_violations(report, "rewards")) == 3
    assert str(report).splitlines()[0] == f"doors fails 1 of {len(CHECK_NAMES) - 1} checks"
    assert len(str(report).splitlines()) == 4


def test_a_check_that_the_environment_interrupts_has_failed() -> None:
    class Explodes(Doors):
        @property
        def reward_range(self) -> tuple[float, float]:
            raise OSError("boom")

    report = check_env(Explodes, episodes=5)
    assert report.failed == ["attributes"] and "attributes: OSError: boom" in str(report)


def test_the_report_of_a_script(tmp_path: Path) -> None:
    """As a user's own script, with the class in the script itself; and without the guard, where the other process says what to do."""
    body = "print(check_env(Mine, episodes=30))\n"
    source = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from broken_environments import Doors\nfrom tether.envs.checker import check_env\n"
        "class Mine(Doors):\n    name = 'mine'\n"
    )
    guarded, open_ = tmp_path / "guarded.py", tmp_path / "unguarded.py"
    guarded.write_text(f"{source}if __name__ == '__main__':\n    {body}")
    open_.write_text(source + body)
    done = subprocess.run([sys.executable, guarded], capture_output=True, text=True, check=True)
    assert done.stdout == f"mine: all {len(CHECK_NAMES)} checks pass\n"
    done = subprocess.run([sys.executable, open_], capture_output=True, text=True, check=True)
    assert "exit code 1" in done.stdout and "run a script from a file, with its work under: if __name__ == '__main__':" in done.stdout
    assert done.stdout.count("mine fails 1") == 1  # the other process says nothing of its own


# --- the other process ---


def test_the_other_process_salts_its_hashes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process was started with; and this one's environment is as it was."""
    for value in (None, "0", "1"):
        if value is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        with episodes._another_hash_seed():
            assert os.environ["PYTHONHASHSEED"] not in (value, "0")
        assert os.environ.get("PYTHONHASHSEED") == value


def test_hash_dependence_is_found_whatever_this_process_was_started_with() -> None:
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from broken_environments import LeansOnHashes\nfrom tether.envs.checker import check_env\n"
        "if __name__ == '__main__':\n    print(check_env(LeansOnHashes, episodes=30).failed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    assert done.stdout == "['another process']\n"
    assert LeansOnHashes.__module__ == "broken_environments"


class _Elsewhere(Doors):
    """Not to be found where it claims to be."""


def _portable(monkeypatch: pytest.MonkeyPatch, cls: type[Doors]) -> type[Doors]:
    """As if it had been defined in the module that other processes can import, where it is not."""
    module = sys.modules["broken_environments"]
    monkeypatch.setattr(cls, "__module__", module.__name__)
    monkeypatch.setattr(module, cls.__name__, cls, raising=False)
    return cls


def test_one_that_the_other_process_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_env(_portable(monkeypatch, _Elsewhere), episodes=20)
    assert report.failed == ["another process"]
    assert "in another process: AttributeError: Can't get attribute '_Elsewhere'" in str(report)


def test_one_that_takes_too_long_in_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "SECONDS", 0.01)
    report = check_env(Doors, episodes=20)
    assert report.failed == ["another process"] and "did not play 20 episodes within 0.01 s" in str(report)


# --- the episodes ---


def test_answers_follow_from_the_number_and_are_varied() -> None:
    env = make_env("sokoban")
    first, second = ([Answers(env, number).next("Turn 1") for number in range(200)] for _ in range(2))
    assert first == second
    assert first[: len(ODD_ANSWERS)] == list(ODD_ANSWERS)
    assert len(set(first)) > 150
    later = [Answers(env, number) for number in range(200)]
    answers = [answer for source in later for answer in (source.next("6 7"), source.next("6 7"), source.next("6 7"))][len(ODD_ANSWERS) :]
    clean = sum(all(part.strip() in env.actions for part in answer.split("||")) for answer in answers)  # type: ignore[attr-defined]
    assert 0.2 < clean / len(answers) < 0.8
    assert max(map(len, first)) >= HUGE


def test_plausible_answers_use_the_environment_s_own_forms() -> None:
    class Env:
        instructions = "Answer search[query] or finish[answer]."

    answers = [Answers(Env(), number).next("3 and 25 make 28") for number in range(100, 400)]
    assert any(answer.startswith("search[") and answer.endswith("]") for answer in answers)
    assert any(set(answer) <= set("0123456789 +-*/") for answer in answers)
    assert "25" in answers or "28" in answers


def test_tags_of_its_own_are_used() -> None:
    class Env:
        instructions = "Search."
        reply_tags = ("search", "answer")

    answers = [Answers(Env(), number).next("Who?") for number in range(100, 200)]
    assert any(answer.startswith("<search>") and answer.endswith("</search>") for answer in answers)
    assert any(answer.startswith("<answer>") for answer in answers)


def test_an_episode_can_be_played_again_from_its_number() -> None:
    """As the documentation says: the seed in a violation is the number of the checker's episode."""
    first, second = play(Doors(), 41), play(Doors(), 41)
    assert first.seed == 41 and first.env_seed is not None and first.answers
    assert difference(transcript(first), transcript(second)) is None
    assert difference(transcript(first), transcript(replay(Doors(), first))) is None
    assert play(Doors(), 40).env_seed is None
    assert str(first).startswith(f"reset(41, env_seed={first.env_seed}), step(")


def test_difference_names_the_place() -> None:
    def told(rewards: list[float]) -> list[tuple[str, str]]:
        episode = play(Doors(), 100)
        episode.steps = [Step(Observation("x"), reward, False, False, {}) for reward in rewards]
        return transcript(episode)

    assert difference(told([0.1]), told([0.1])) is None
    assert difference(told([0.0, 0.1]), told([0.0, 0.1 + 2**-56])) == (
        """step 2 gave "'x' None 0.1 False False {}" and then "'x' None 0.10000000000000002 False False {}\""""
    )
    assert difference(told([0.0]), told([0.0, 1.0])) == "one has step 2, the other has not"


def test_canonical_tells_apart_what_equality_does_not() -> None:
    import numpy as np

    values = [
        1,
        1.0,
        True,
        "1",
        [1],
        (1,),
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        np.array([1]),
        np.array([1], np.uint8),
        np.array([[1]]),
        None,
    ]
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical({"a": [np.zeros(2)]}) == canonical({"a": [np.zeros(2)]})
    changed = np.zeros((60, 60, 3), np.uint8)
    changed[30, 30] = 1  # numpy prints no more than the edges of a large array
    assert canonical(Observation("x", changed)) != canonical(Observation("x", np.zeros((60, 60, 3), np.uint8)))


def test_results() -> None:
    assert CheckResult("check").ok and CheckResult("check", skipped="no").ok and not CheckResult("check", ("bad",)).ok
    report = CheckReport("x", (CheckResult("one"), CheckResult("two", skipped="no"), CheckResult("three", ("bad", "worse"))))
    assert not report.ok and report.failed == ["three"]
    assert str(report) == "x fails 1 of 3 checks\n  three: bad\n  three: worse"
    assert str(CheckReport("x", report.results[:2])) == "x: all 1 checks pass"
