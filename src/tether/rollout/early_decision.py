"""Early decision: the first members of a prompt show whether the others are worth playing (`rollout.first_members`).

Every group that a step wants has a place. In a place, prompts are tried one after the other, `oversample` of them at a time: the first members of
each are played, and the first prompt, in their order, that is worth it is played whole and ends the place. A prompt that is not worth it is played
whole all the same by a share of exploration, beside the place's own group. The rows of the others go to the next prompts at once; nothing waits for
other places.

**Worth** is the posterior mean of the filter's score, a spread such as the reward variance, against what the same episodes would show of a new
prompt. S is the score of k first members of G, with k - 1 degrees of freedom. V, the mean of S over the prompts of recent steps, is the prior and
weighs w = 1/2 of one: E[score | S] = ((k - 1) S + w V) / (k - 1 + w). This is the linear posterior of credibility theory (Bühlmann 1967), which
needs no family of distributions. A new prompt shows V for G episodes, this one E[score | S] for G - k more. So it is worth them where
E[score | S] / (G - k) >= V / G, and E[score | S] > 0.

**Determinism.** What is played in a place follows from the outcomes of its own prompts, in their order, and from earlier steps: not from which
episode ended first, and not from other places. So the same seed gives the same run, on any number of ranks (which divide the places). A place has
one environment, so a mixed run keeps its shares.

What the choice does to the gradient: docs/early-decision.md.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tether.algorithms.filters.scores import ZERO
from tether.core.enums import ERRORED, Decision, StopReason
from tether.core.seeding import generator
from tether.core.types import Group, Trajectory
from tether.rollout.episode import EpisodeSeeds

PRIOR_WEIGHT = 0.5
"""What recent steps count, in degrees of freedom of a variance. With 1 and more, a prompt whose 2 first members are equal would be continued in groups of 4."""


@dataclass(frozen=True, slots=True)
class EarlyRules:
    """How a round of a step decides."""

    num_places: int
    """Groups that are wanted. A plan lists the prompts of all places, try by try."""
    group_size: int
    first_members: int
    oversample: int
    explore: float
    """The share of prompts that are not worth it and are played whole all the same."""
    seed: int
    step: int
    score: Callable[[Group], float]
    mean_scores: Mapping[str, float] = field(default_factory=dict)
    """By environment, the mean score of first members in recent steps; 0 where none is known."""

    @property
    def num_open(self) -> int:
        """Episodes of a place that are in play at a time."""
        return max(self.group_size, self.oversample * self.first_members)

    def decide(self, group: Group) -> Decision:
        """What becomes of a prompt whose first members are these; they may have errored."""
        score = self.score(group) if group.trajectories else 0.0
        if is_worth(score, self.mean_scores.get(group.env, 0.0), self.first_members, self.group_size):
            return Decision.CONTINUED
        explores = generator("explore", self.seed, self.step, group.index).random() < self.explore
        return Decision.EXPLORED if explores else Decision.NOT_CONTINUED


def is_worth(score: float, mean_score: float, first_members: int, group_size: int) -> bool:
    """Whether a further episode of this prompt is expected to show as much as an episode of a new one; see the module docstring."""
    freedom = first_members - 1
    expected = (freedom * score + PRIOR_WEIGHT * mean_score) / (freedom + PRIOR_WEIGHT)
    return expected > ZERO and expected * group_size >= mean_score * (group_size - first_members)


class Place:
    """The prompts that are tried for one group, in order. It says what to play, and takes what was played."""

    def __init__(self, tries: Sequence[Sequence[EpisodeSeeds]], rules: EarlyRules, error_retries: int) -> None:
        """`tries`: the members of every prompt that may be tried."""
        self._tries, self._rules, self._error_retries = tries, rules, error_retries
        self._played: list[dict[int, Trajectory]] = []
        """Of every prompt that was started: the trajectories of members that have ended."""
        self._decisions: list[Decision] = []
        """Of the first prompts that were started."""

    def begin(self) -> list[EpisodeSeeds]:
        """What is played first."""
        return self._next()

    def take(self, number: int, trajectory: Trajectory) -> list[EpisodeSeeds]:
        """Take an episode of a prompt that has ended; returns what is to be played after it."""
        before = self._played[number].get(trajectory.member)
        trajectory.retries = 0 if before is None else before.retries + 1
        self._played[number][trajectory.member] = trajectory
        return [self._tries[number][trajectory.member]] if self._fails(trajectory) else self._next()

    def groups(self) -> list[Group]:
        """The prompts that were started."""
        decisions = [*self._decisions, *[Decision.SURPLUS] * (len(self._played) - len(self._decisions))]
        return [
            as_group([played[member] for member in sorted(played)], decision)
            for played, decision in zip(self._played, decisions, strict=True)
        ]

    def _fails(self, trajectory: Trajectory) -> bool:
        """Whether an episode is played again."""
        return trajectory.stop_reason is StopReason.ENV_ERROR and trajectory.retries < self._error_retries

    def _next(self) -> list[EpisodeSeeds]:
        """Decide on the prompts whose turn it is, and start others in the place of those that end."""
        rules, wanted = self._rules, list[EpisodeSeeds]()
        first_members = range(rules.first_members)
        while Decision.CONTINUED not in self._decisions and len(self._decisions) < len(self._played):
            number = len(self._decisions)
            played = self._played[number]
            if not all(member in played and not self._fails(played[member]) for member in first_members):
                break
            decision = rules.decide(as_group([played[member] for member in first_members]))
            self._decisions.append(decision)
            if decision in (Decision.CONTINUED, Decision.EXPLORED):
                wanted += self._tries[number][rules.first_members :]
        # Also where a prompt was continued: whether others had been decided on before it, or with it, depends on what ended first.
        num_ended = sum(decision is not Decision.CONTINUED for decision in self._decisions)
        for members in self._tries[len(self._played) : num_ended + rules.oversample]:
            self._played.append({})
            wanted += members[: rules.first_members]
        return wanted


class Places:
    """All places of a plan."""

    def __init__(self, plan: Sequence[EpisodeSeeds], rules: EarlyRules, error_retries: int) -> None:
        """`plan`: the prompts of these places, try by try, each with all its members."""
        prompts: dict[int, list[EpisodeSeeds]] = {}
        for seeds in plan:
            prompts.setdefault(seeds.group, []).append(seeds)
        first = min(prompts, default=0)
        tries: dict[int, list[list[EpisodeSeeds]]] = {}
        for group, members in prompts.items():
            tries.setdefault((group - first) % rules.num_places, []).append(members)
        self.num_open = Counter(own[0][0].env_index for own in tries.values() for _ in range(rules.num_open))
        """By environment, the episodes that are in play at a time, at most; where exploration asks for more, they wait."""
        self._places = [Place(own, rules, error_retries) for own in tries.values()]
        self._place_of = {
            members[0].group: (place, number)
            for place, own in zip(self._places, tries.values(), strict=True)
            for number, members in enumerate(own)
        }

    def begin(self) -> list[EpisodeSeeds]:
        """What is played first."""
        return [seeds for place in self._places for seeds in place.begin()]

    def take(self, trajectory: Trajectory) -> list[EpisodeSeeds]:
        """Take an episode that has ended; returns what is to be played after it."""
        place, number = self._place_of[trajectory.group]
        return place.take(number, trajectory)

    def groups(self) -> list[Group]:
        """The prompts that were started, once all that was asked for has been played."""
        return [group for place in self._places for group in place.groups()]


def as_group(trajectories: Sequence[Trajectory], decision: Decision | None = None) -> Group:
    """The group of these members of one prompt; errored ones apart."""
    first = trajectories[0]
    group = Group(first.group, first.seed, [], env=first.env, decision=decision)
    for trajectory in trajectories:
        (group.errored if trajectory.stop_reason in ERRORED else group.trajectories).append(trajectory)
    return group


def first_members_of(group: Group, first_members: int) -> Group:
    """A group with its first members alone: they were played whatever was decided, so that no choice is in them."""
    played = (*group.trajectories, *group.errored)
    first = as_group(sorted((t for t in played if t.member < first_members), key=lambda t: t.member))
    return replace(first, choice=group.choice)
