"""A game of TextArena: `make_env("textarena:GuessTheNumber-v0")`.

Games for one player are played as they are, those for two against an opponent: `random` plays one of the moves in brackets that it is shown,
or a function of the user's, `module:function`, takes what it is shown and a random.Random and returns its move. An opponent whose
invalid move ends the game has not lost to the agent: that episode is an error. The seed of a game follows from split and seed; `env_seed` seeds
what happens in it. Games draw from Python's global generator: its state is kept apart for every environment.
"""

import inspect
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, Literal

import textarena
from pydantic import Field
from textarena.envs.registration import ENV_REGISTRY

from tether.core.errors import BadInput, EnvironmentFailure, MissingDependency, UnknownName, did_you_mean
from tether.core.importing import import_object, in_one_line
from tether.core.seeding import derive_seed
from tether.core.text import visible
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work

Opponent = Callable[[str, random.Random], str]
RANDOM = "random"
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_RESOURCE = re.compile(r"nltk\.download\('(\w+)'\)")
LONGEST = 4000
"""Characters of a move; Python reads no longer numbers."""
MOST_MOVES = 1000
"""Moves of an opponent in a row after which a game does not end any more."""


class TextArenaOptions(TurnOptions):
    """Options of a game."""

    max_turns: int = Field(default=30, ge=1)
    """Answers per episode; a game may end before."""
    make: dict[str, Any] = {}
    """Arguments of the game, such as {max_turns: 20}."""
    opponent: str = RANDOM
    """Who plays the other side of a game for two: random, or a function of yours as module:function."""
    player: Literal[0, 1] = 0
    """The agent's side of a game for two; 0 begins."""


class TextArena(TextEnv[TextArenaOptions]):
    """A game of TextArena; subclasses have an id."""

    id: ClassVar[str]
    Options = TextArenaOptions
    work: Work = "process"
    owner_options = ("opponent",)

    def __init__(self, options: TextArenaOptions) -> None:
        super().__init__(options)
        self._random = random.Random(0).getstate()
        self._opponent = _opponent(options.opponent)
        with self._own_randomness():
            self._players = _players(self.name, self._made())
        self._player = options.player if self._players == 2 else 0
        self._brackets = textarena.wrappers.ActionFormattingWrapper in (ENV_REGISTRY[self.id].default_wrappers or ())

    @property
    def task(self) -> str:
        return "Play the game. Answer with one move, in the form that the game asks for, such as [move]."

    def generate(self, seed: int) -> None:
        self._seed = derive_seed("textarena", self.options.split, seed) % 2**31
        with self._own_randomness():
            self._game = self._made()  # some games keep cards and words of the episode before
            self._game.reset(num_players=self._players, seed=self._seed)

    def seed_randomness(self, env_seed: int) -> None:
        self._moves = random.Random(derive_seed("textarena opponent", env_seed))
        with self._own_randomness():
            random.seed(env_seed)
            if self._until_own_turn():
                raise EnvironmentFailure(f"{self.name}: the game was over before the agent's first move")
            self._shown = self._new_messages()

    @property
    def instance(self) -> str:
        return f"seed {self._seed}"

    def opening(self) -> str:
        return self._shown

    def take(self, answer: str) -> Outcome:
        if len(answer) > LONGEST:
            return Outcome(f"A move has at most {LONGEST} characters.", valid=False)
        state = self._game.state
        with self._own_randomness():
            over, _ = self._game.step(f"[{answer.strip()}]" if self._brackets and "[" not in answer and "]" not in answer else answer)
            valid = not state.error_count and not state.game_info[self._player].get("invalid_move")
            over = over or self._until_own_turn()
            text = self._new_messages()
        reward = float(state.rewards[self._player]) if over else 0.0
        if over and (reason := state.game_info[self._player].get("reason")):
            text = f"{text}\n{visible(str(reason))}".strip()
        return Outcome(text, reward, over, over and reward >= 1, valid)

    def _until_own_turn(self) -> bool:
        """Let the opponent move until it is the agent's turn; whether the game is over."""
        state = self._game.state
        shown = ""
        for _ in range(MOST_MOVES):
            if state.current_player_id == self._player:
                return False
            # A refused move stays on the table: the opponent is shown everything since its last accepted one.
            shown = f"{shown if state.error_count else ''}\n{_joined(state.get_current_player_observation(), state.current_player_id)}"
            over, _ = self._game.step(self._opponent(shown, self._moves))
            if over and state.game_info[1 - self._player].get("invalid_move"):
                raise EnvironmentFailure(
                    f"{self.name}: the opponent '{self.options.opponent}' made an invalid move, which ends the game; give opponent=module:function"
                )
            if over:
                return True
        raise EnvironmentFailure(f"{self.name}: the opponent moved {MOST_MOVES} times, and it is still its turn")

    def _new_messages(self) -> str:
        seen = self._game.state.observations
        new, seen[self._player] = seen[self._player], []
        return _joined(new, self._player) or "(nothing new)"

    def _made(self) -> Any:
        """A new game, without the package's wrappers: a conversation holds the history already."""
        try:
            game = textarena.make(self.id, **self.options.make)
        except LookupError as error:
            needed = _RESOURCE.search(str(error))
            if needed is None:
                raise
            raise MissingDependency(
                f"{self.name} needs nltk's '{needed[1]}', which is not here; run: python -m nltk.downloader {needed[1]}"
            ) from error
        except Exception as error:
            raise BadInput(f"{self.name}: textarena cannot make this game: {in_one_line(error)}") from error
        while isinstance(game, textarena.Wrapper):
            game = game.env
        return game

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Python's global generator as this game left it."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _joined(messages: list[Any], player: int) -> str:
    """The messages for a player, without its own moves, which it knows."""
    return visible("\n".join(text for sender, text, _ in messages if sender != player and isinstance(text, str)).strip())


def _players(name: str, game: Any) -> int:
    """How many play a game: one or two."""
    refused = ""
    for players in (1, 2):
        try:
            game.reset(num_players=players, seed=0)
        except (AssertionError, ValueError) as error:
            refused = in_one_line(error)
            continue
        refused = type(game.state).__name__
        wanted = {1: textarena.SinglePlayerState, 2: textarena.TwoPlayerState}[players]
        if isinstance(game.state, wanted):
            return players
    raise BadInput(f"{name} is no game for one player or for two ({refused}); choose another")


def _opponent(name: str) -> Opponent:
    if name == RANDOM:
        return _random_move
    if ":" not in name:
        raise UnknownName(f"unknown opponent '{name}': {did_you_mean(name, [RANDOM, 'module:function'])}")
    found: Opponent = import_object(name, "opponent", inspect.isfunction)
    return found


def _random_move(shown: str, rng: random.Random) -> str:
    """One of the moves in the last line that shows any in brackets."""
    lines = [moves for line in shown.splitlines() if (moves := _MOVE.findall(line))]
    return rng.choice(lines[-1]) if lines else "[pass]"


@lru_cache(maxsize=256)
def env_class(id: str) -> type[TextArena]:
    """The class of an id."""
    if id not in ENV_REGISTRY:
        raise UnknownName(f"textarena has no game '{id}': {did_you_mean(id, ENV_REGISTRY, 12)}")
    return type(id, (TextArena,), {"name": f"textarena:{id}", "id": id, "__module__": __name__})
