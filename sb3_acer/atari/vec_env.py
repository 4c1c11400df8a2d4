"""Atari games as a vectorised environment of SB3. ale-py steps and preprocesses them in C++ threads."""

import re
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from sb3_acer.checks import check_boolean, check_integer, check_number, check_seed, require
from sb3_acer.extras import how_to_install

NEEDED = f"Atari games need ale-py 0.12.1 or later: {how_to_install('atari')}"

try:
    import ale_py.roms
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise ImportError(NEEDED) from error
if [int(number) for number in re.findall(r"\d+", ale_py.__version__)[:3]] < [0, 12, 1]:
    raise ImportError(f"{NEEDED} (here: {ale_py.__version__})")  # older versions cannot reset single games

GAMES_OF_A_SEED = 100
# What get_state copies, besides the seeds and actions that lead to the present states.
_COPIED = ("lives", "observations", "_scores", "_revived", "_blanks")


class AtariId(NamedTuple):
    """What an environment's id stands for."""

    game: str
    """name of the ROM"""
    frame_skip: int
    """frames for which an action is repeated"""
    sticky: float
    """probability that a frame repeats the previous frame's action (sticky actions)"""


def parse_atari_id(env_id: str) -> AtariId:
    """
    The game, the frame skip and the sticky actions that an id stands for.

    - ``*NoFrameskip-v4``: frame skip 4, as with the usual wrappers; no sticky actions
    - ``*Deterministic-v4``, which ale-py no longer has: frame skip 4, in Space Invaders 3; no sticky actions
    - ``*NoFrameskip-v0``, ``*Deterministic-v0``: the same with sticky actions, probability 0.25
    - ``ALE/*-v5``: as registered: frame skip 4 and sticky actions, probability 0.25
    - the name of a ROM, such as ``ms_pacman``: like its NoFrameskip-v4

    :param env_id: id of an environment, or name of a ROM
    :return: what it stands for
    :raises ValueError: for all other ids, including ``Pong-v4`` and ``Pong-v0``, whose frame skip is random
    """
    require(isinstance(env_id, str), "env_id", "the id of an Atari game", env_id)
    known = {name: spec.kwargs for name, spec in gym.registry.items() if str(spec.entry_point).startswith("ale_py")}
    roms = {kwargs["game"] for kwargs in known.values()}
    if env_id in roms:
        return AtariId(env_id, 4, 0.0)
    deterministic = "Deterministic-" in env_id
    kwargs = known.get(env_id.replace("Deterministic-", "NoFrameskip-"))
    if kwargs is None:
        fixed = [name for name, kwargs in known.items() if isinstance(kwargs["frameskip"], int)]
        similar = get_close_matches(env_id, [*fixed, *roms], 1, 0)[0]
        raise ValueError(f"env_id must be the id of an Atari game, such as {similar}, got {env_id!r}")
    if not isinstance(kwargs["frameskip"], int):
        with_fixed = env_id.replace("-v", "NoFrameskip-v")
        raise ValueError(f"env_id must have a fixed frame skip, such as {with_fixed}, got {env_id!r}")
    frame_skip = 4 if kwargs["frameskip"] == 1 else kwargs["frameskip"]
    if deterministic and kwargs["game"] == "space_invaders":
        frame_skip = 3
    return AtariId(kwargs["game"], frame_skip, kwargs["repeat_action_probability"])


class Game:
    """One of the games, as ``get_attr``, ``set_attr`` and ``env_method`` see it.

    :param env: the environment that the game belongs to
    :param index: index of the game
    :param action_meanings: names of the actions
    """

    render_mode = "rgb_array"

    def __init__(self, env: "AtariVecEnv", index: int, action_meanings: list[str]) -> None:
        self._env = env
        self._index = index
        self._action_meanings = action_meanings
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.spec = gym.registry.get(env.env_id)

    @property
    def lives(self) -> int:
        return int(self._env.lives[self._index])

    def get_action_meanings(self) -> list[str]:
        return self._action_meanings

    def render(self) -> np.ndarray:
        """
        :return: the newest frame, RGB, ``[height, width, 3]``: grey and small, as the agent sees it
        """
        return np.repeat(self._env.observations[self._index, -1, :, :, None], 3, axis=-1)


class AtariVecEnv(VecEnv):
    """
    Atari games in parallel, preprocessed like SB3's ``AtariWrapper`` and ``VecFrameStack``, but by ale-py's threads.

    Observations are the last frames, uint8, ``[frame_stack, height, width]``, the oldest first. Frames before the first
    of an episode are zero. Infos contain ``lives``, ``frame_number``, ``episode_frame_number`` and
    ``TimeLimit.truncated``; at the end of an episode also ``terminal_observation``. At the end of a game they contain
    ``episode``, as under ``make_atari_env`` with SB3's Monitor: the score ``r``, the number of frames ``l`` and the
    seconds since the start ``t``.

    The same actions give the same rewards, episode ends, lives and scores as SB3's wrappers, with these differences:

    - A game begins with 0 to ``noop_max`` - 1 frames without action. If the game has the action FIRE, there is at least
      one frame, and the first is FIRE. The score does not include them. SB3 begins with 1 to ``noop_max`` frames and
      then plays FIRE and action 2.
    - After a lost life the next action is FIRE, if the game has it, whatever action is given. SB3 plays NOOP, then FIRE
      and action 2 if the game has FIRE, without showing these frames.
    - Frames become grey before the larger of two frames is taken, in SB3 after. Where the two differ in colour, a few
      pixels differ.
    - If a game ends or is truncated during the frames of an action, the newest frame of ``terminal_observation`` is
      that of the previous step, or a mixture with it.
    - ``max_frames`` counts from the first observation, in SB3 from the start of the game.
    - ``reset`` begins new games. In SB3, games that have lives left go on.

    The environment cannot be pickled, but :meth:`get_state` and :meth:`set_state` continue its games. ``render`` shows
    what the agent sees, since ale-py does not give access to the screen.

    :param env_id: id of an environment, or name of a ROM, see :func:`parse_atari_id`
    :param n_envs: number of games
    :param frame_stack: frames of an observation
    :param frame_skip: frames for which an action is repeated; None: as the id says
    :param sticky: probability that a frame repeats the previous frame's action; None: as the id says
    :param screen_size: height and width of a frame
    :param noop_max: bound on the number of frames without action at the start of a game
    :param fire_reset: whether an episode begins with FIRE, for games that wait for it
    :param episodic_life: whether a lost life ends the episode, though not the game
    :param clip_reward: whether rewards are the sign of the points
    :param max_frames: frames after which a game is truncated
    :param full_action_space: whether to use all 18 actions instead of those that have an effect in the game
    :param num_threads: number of ale-py's threads; 0: one per processor
    :param seed: seed of the first game, the others have the numbers after it; None: no seed
    :raises ValueError: for an argument outside its range, an unknown game and a missing ROM
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int = 16,
        *,
        frame_stack: int = 4,
        frame_skip: int | None = None,
        sticky: float | None = None,
        screen_size: int = 84,
        noop_max: int = 30,
        fire_reset: bool = True,
        episodic_life: bool = True,
        clip_reward: bool = True,
        max_frames: int = 108_000,
        full_action_space: bool = False,
        num_threads: int = 0,
        seed: int | None = None,
    ) -> None:
        game, usual_skip, usual_sticky = parse_atari_id(env_id)
        self.env_id = env_id
        n_envs = check_integer("n_envs", n_envs)
        self.frame_stack = frame_stack = check_integer("frame_stack", frame_stack)
        self.frame_skip = check_integer("frame_skip", usual_skip if frame_skip is None else frame_skip)
        screen_size = check_integer("screen_size", screen_size)
        max_frames = check_integer("max_frames", max_frames)
        noop_max = check_integer("noop_max", noop_max, 0)
        num_threads = check_integer("num_threads", num_threads, 0)
        self.sticky = check_number("sticky", usual_sticky if sticky is None else sticky, 0, 1)
        self.episodic_life = check_boolean("episodic_life", episodic_life)
        self.clip_reward = check_boolean("clip_reward", clip_reward)
        check_boolean("fire_reset", fire_reset)
        check_boolean("full_action_space", full_action_space)
        seed = check_seed("seed", seed)
        _require_rom(game)
        self._ale = AtariVectorEnv(
            game,
            n_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=max_frames,
            repeat_action_probability=self.sticky,
            full_action_space=full_action_space,
            img_height=screen_size,
            img_width=screen_size,
            stack_num=frame_stack,
            frameskip=self.frame_skip,
            noop_max=noop_max,
            use_fire_reset=fire_reset,
            reward_clipping=False,  # the score counts the points
        )
        action_meanings = [action.name for action in self._ale.ale.get_action_set()]
        self._fire = action_meanings.index("FIRE") if fire_reset and "FIRE" in action_meanings else None
        self.observation_space = spaces.Box(0, 255, (frame_stack, screen_size, screen_size), np.uint8)
        self.action_space = spaces.Discrete(len(action_meanings))
        self.games = [Game(self, index, action_meanings) for index in range(n_envs)]
        self.lives = np.zeros(n_envs, np.int32)
        self.observations = np.zeros((n_envs, *self.observation_space.shape), np.uint8)
        self._scores = np.zeros(n_envs, np.int64)
        self._revived = np.zeros(n_envs, bool)  # games at the first step after a lost life
        self._blanks = np.zeros(n_envs, np.int64)  # frames of the next observation from before the episode
        self._game_seeds = np.full(n_envs, -1)  # that ale-py's generators started from last; -1: unknown
        self._n_games = np.zeros(n_envs, np.int64)  # begun since then
        self._played: list[list[int]] = [[] for _ in range(n_envs)]  # actions of the games under way
        self.t_start = time.time()
        self._stepping = False
        super().__init__(n_envs, self.observation_space, self.action_space)
        if seed is not None:
            self.seed(seed)

    def reset(self) -> np.ndarray:
        if self._stepping:
            self._ale.recv()
            self._stepping = False
        # The ALE's seeds are below 2^31; -1: no seed.
        seeds = np.array([-1 if seed is None else seed % 2**31 for seed in self._seeds])
        self.observations, infos = self._begin(np.ones(self.num_envs, bool), seeds)
        self._reset_seeds()
        self._reset_options()
        self.lives = infos["lives"]
        self._scores[:] = 0
        self._revived[:] = False
        self.reset_infos = _infos(infos)
        return self.observations

    def _begin(self, games: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """
        Begin new games.

        :param games: whether to begin each game, ``[n_envs]``
        :param seeds: of all games; -1: the generator goes on
        """
        self._game_seeds = np.where(games & (seeds >= 0), seeds, self._game_seeds)
        self._n_games = np.where(games, np.where(seeds >= 0, 1, self._n_games + 1), self._n_games)
        for game in np.flatnonzero(games):
            self._played[game].clear()
        observations, infos = self._ale.reset(seed=seeds[games], options={"reset_mask": games})
        return observations, infos

    def get_state(self) -> dict[str, Any]:
        """
        The games under way, for :meth:`set_state` of an environment with the same arguments. ale-py does not give
        access to the emulators, so these are the seeds and actions that lead to the present states, and the number of
        games begun. Between two steps only.

        :raises ValueError: if the games were not seeded, or have sticky actions
        """
        if self.sticky or (self._game_seeds < 0).any():
            raise ValueError("the games' state is known only if they have seeds and no sticky actions")
        return {
            "origin": (self._game_seeds, self._n_games, [np.array(actions, np.uint8) for actions in self._played]),
            "attributes": {name: np.copy(getattr(self, name)) for name in _COPIED},
            "others": (self._seeds.copy(), self._options.copy(), self.t_start, list(self.reset_infos)),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """
        Play the games of a state up to it. The infos' ``frame_number``, which ale-py counts from its start, is not
        restored.

        :param state: what :meth:`get_state` returned
        :raises ValueError: if it is of another number of games, and if the games end up at another frame, because the
            environment has other arguments. Arguments that do not change the newest frame, such as ``episodic_life``,
            are not compared.
        """
        seeds, n_games, played = state["origin"]
        require(len(played) == self.num_envs, "games of the state", f"{self.num_envs}", len(played))
        lengths, no_seeds = np.array(list(map(len, played))), np.full(self.num_envs, -1)
        observations, _ = self._begin(np.ones(self.num_envs, bool), no_seeds)
        # Games begin one after another, so that all get to their last action at the same time. Until then they are
        # played for nothing: a seed makes them independent of what was before.
        for remaining in range(lengths.max(), -1, -1):
            begins = lengths == remaining
            if begins.any():
                observations, _ = self._begin(begins, seeds)
                while (lacking := begins & (self._n_games < n_games)).any():
                    observations, _ = self._begin(lacking, no_seeds)
            if remaining:
                actions = [of[-remaining] if len(of) >= remaining else 0 for of in played]
                self._ale.send(np.array(actions, np.int64))
                observations = self._ale.recv()[0]
        if not np.array_equal(observations[:, -1], state["attributes"]["observations"][:, -1]):
            raise ValueError("the games did not get to where they were: the environment has other arguments")
        for name, value in state["attributes"].items():
            setattr(self, name, value.copy())
        self._played = [actions.tolist() for actions in played]
        self._seeds, self._options, self.t_start, reset_infos = state["others"]
        self.reset_infos = list(reset_infos)

    def step_async(self, actions: np.ndarray) -> None:
        actions = np.asarray(actions, np.int64).reshape(self.num_envs)
        if actions.min() < 0 or actions.max() >= self.action_space.n:  # type: ignore[attr-defined]
            # ale-py would wait forever for such an action
            raise ValueError(f"actions must be elements of {self.action_space}, got {actions}")
        if self._fire is not None and self._revived.any():
            actions = np.where(self._revived, self._fire, actions)
        self._ale.send(actions)
        for played, action in zip(self._played, actions.tolist(), strict=True):
            played.append(action)
        self._stepping = True

    def step_wait(self) -> VecEnvStepReturn:
        observations, points, terminated, truncated, ale_infos = self._ale.recv()
        self._stepping = False
        self._scores += points
        lives = ale_infos["lives"]
        over = terminated | truncated
        died = (lives > 0) & (lives < self.lives) if self.episodic_life else np.zeros_like(over)
        dones = over | died
        infos = _infos(ale_infos)
        self.lives, self.observations, self._revived = lives, observations, died & ~over
        for game in np.flatnonzero(self._blanks):
            observations[game, : self._blanks[game]] = 0
            self._blanks[game] -= 1
        if dones.any():
            for game in np.flatnonzero(dones):
                infos[game]["terminal_observation"] = observations[game].copy()
            observations[self._revived, :-1] = 0
            self._blanks[self._revived] = max(self.frame_stack - 2, 0)
            if over.any():
                self._end_games(over, truncated & ~terminated & ~died, infos)
        rewards = (np.sign(points) if self.clip_reward else points).astype(np.float32)
        return observations, rewards, dones, infos

    def _end_games(self, over: np.ndarray, truncated: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Add the reports on finished games to the infos, and begin new games in their places."""
        seconds = round(time.time() - self.t_start, 6)
        # A new seed from time to time bounds the number of games that set_state has to begin.
        is_due = (self._game_seeds >= 0) & (self._n_games >= GAMES_OF_A_SEED)
        seeds = np.where(is_due, (self._game_seeds * 48271 + 11) % 2**31, -1)
        new_observations, ale_infos = self._begin(over, seeds)
        new_infos = _infos(ale_infos)
        for game in np.flatnonzero(over):
            info = infos[game]
            info["TimeLimit.truncated"] = bool(truncated[game])
            score, frames = float(self._scores[game]), info["episode_frame_number"]
            info["episode"] = {"r": score, "l": frames, "t": seconds}
            self.observations[game] = new_observations[game]
            self.reset_infos[game] = new_infos[game]
        self.lives = ale_infos["lives"]
        self._scores[over] = 0

    def close(self) -> None:
        """Stop the games and their threads."""
        if hasattr(self, "_ale"):
            del self._ale

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [game.render() for game in self.games]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self.games[index], attr_name) for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for index in self._get_indices(indices):
            setattr(self.games[index], attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        return [getattr(self.games[i], method_name)(*method_args, **kwargs) for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """True for Monitor: like a Monitor, the environment reports episodes, and SB3 asks whether it does."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def _infos(ale_infos: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    columns = (ale_infos[name].tolist() for name in ("lives", "frame_number", "episode_frame_number"))
    return [
        {"lives": lives, "frame_number": frames, "episode_frame_number": game_frames, "TimeLimit.truncated": False}
        for lives, frames, game_frames in zip(*columns, strict=True)
    ]


def _require_rom(game: str) -> None:
    try:
        ale_py.roms.get_rom_path(game)
    except OSError as error:
        raise ValueError(f"env_id must be the id of a game whose ROM is installed, got {game!r}: {error}") from error


def make_atari_vec_env(env_id: str, n_envs: int = 16, seed: int | None = None, **kwargs: Any) -> AtariVecEnv:
    """
    Games like those of ``VecFrameStack(make_atari_env(env_id, n_envs, seed), 4)``, but faster.

    :param env_id: id of an environment, or name of a ROM, see :func:`parse_atari_id`
    :param n_envs: number of games
    :param seed: seed of the first game, the others have the numbers after it; None: no seed
    :param kwargs: other arguments of :class:`AtariVecEnv`
    :return: the environment
    :raises ValueError: as :class:`AtariVecEnv`
    """
    return AtariVecEnv(env_id, n_envs, seed=seed, **kwargs)
