"""
Othello on six by six squares against random play: at any time most actions are invalid. Importing this registers
`Othello-v0`, which has masks, and `OthelloUnmasked-v0`, which has none.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIZE = 6
N_SQUARES = SIZE * SIZE
# A board is a number with one bit for each square. Going east or west must not leave the row.
BOARD = (1 << N_SQUARES) - 1
NOT_WEST = sum(1 << square for square in range(N_SQUARES) if square % SIZE)
NOT_EAST = sum(1 << square for square in range(N_SQUARES) if square % SIZE < SIZE - 1)
DIRECTIONS = [
    *((step, BOARD) for step in (SIZE, -SIZE)),
    *((step, NOT_WEST) for step in (1, SIZE + 1, 1 - SIZE)),
    *((step, NOT_EAST) for step in (-1, SIZE - 1, -SIZE - 1)),
]


def shifted(board: int, step: int, allowed: int) -> int:
    return (board << step if step > 0 else board >> -step) & allowed & BOARD


def moves(own: int, other: int) -> int:
    """The empty squares on which a disc encloses some of the other's."""
    found = 0
    for direction in DIRECTIONS:
        line = shifted(own, *direction) & other
        while line:
            line = shifted(line, *direction)
            found |= line & ~(own | other)
            line &= other
    return found


def enclosed(own: int, other: int, move: int) -> int:
    """The discs that a move turns over."""
    turned = 0
    for direction in DIRECTIONS:
        line, passed = shifted(move, *direction), 0
        while line & other:
            passed |= line
            line = shifted(line, *direction)
        turned |= passed if line & own else 0
    return turned


def squares(board: int) -> np.ndarray:
    return (board >> np.arange(N_SQUARES)) & 1


class UnmaskedOthello(gym.Env[np.ndarray, int]):
    """
    The agent has the first move in every other game. Reward 1 for a game won, -1 for one lost. An invalid action does
    nothing and costs 0.01; after 150 actions the episode is truncated.
    """

    observation_space = spaces.Box(0, 1, (3 * N_SQUARES,), np.float32)  # own discs, the other's, valid moves
    action_space: spaces.Space[Any] = spaces.Discrete(N_SQUARES)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        super().reset(seed=seed)
        first, middle = self.np_random.random() < 0.5, SIZE * (SIZE // 2 - 1) + SIZE // 2 - 1
        self.own, self.other = 2 << middle | 1 << middle + SIZE, 1 << middle | 2 << middle + SIZE
        self.n_actions = 0
        if not first:
            self._reply()
        return self._look(), {}

    def _look(self) -> np.ndarray:
        boards = (self.own, self.other, moves(self.own, self.other))
        return np.concatenate([squares(board) for board in boards], dtype=np.float32)

    def _reply(self) -> None:
        """Random moves of the other until the agent has a move or the game is over."""
        while valid := moves(self.other, self.own):
            move = 1 << int(self.np_random.choice(np.flatnonzero(squares(valid))))
            turned = enclosed(self.other, self.own, move)
            self.own, self.other = self.own & ~turned, self.other | turned | move
            if moves(self.own, self.other):
                return

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.n_actions += 1
        move, truncated = 1 << int(action), self.n_actions == 150
        if not moves(self.own, self.other) & move:
            return self._look(), -0.01, False, truncated, {}
        turned = enclosed(self.own, self.other, move)
        self.own, self.other = self.own | turned | move, self.other & ~turned
        self._reply()
        over = not moves(self.own, self.other)
        lead = self.own.bit_count() - self.other.bit_count()
        return self._look(), float(np.sign(lead)) if over else 0.0, over, truncated, {}


class Othello(UnmaskedOthello):
    """With masks."""

    def action_masks(self) -> np.ndarray:
        return squares(moves(self.own, self.other)).astype(bool)


gym.register("Othello-v0", f"{__name__}:Othello")
gym.register("OthelloUnmasked-v0", f"{__name__}:UnmaskedOthello")
