"""Stacks of frames, stored frame by frame: equal to the bit to stacks that are stored as they come."""

import io
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize

from sb3_acer import ACER, SequenceReplayBuffer
from sb3_acer.columns import Column, FrameColumn
from sb3_acer.frames import FrameStack, find_frame_stack, make_frame_stack
from sb3_acer.ring import Ring
from sb3_acer.sequences import SequenceBatch, by_key
from tests.helpers import Recorder

ACTIONS = spaces.Discrete(3)
EMPTY: dict[str, Any] = {}


class Case(NamedTuple):
    n_frames: int = 4
    n_channels: int = 1
    axis: int = 0
    padding: str = "zeros"
    n_steps: int = 5
    n_envs: int = 3
    buffer_size: int = 20
    static: float = 0.2
    """share of frames that repeat the one before"""
    in_dict: bool = False


CASES = [
    Case(),
    Case(padding="repeated"),
    Case(padding="other"),
    Case(padding="other", axis=-1, n_channels=3, n_frames=2),
    Case(padding="repeated", axis=-1),
    Case(n_steps=2, buffer_size=6, padding="other"),
    Case(n_steps=1, buffer_size=3, padding="other"),
    Case(n_steps=3, n_frames=6, buffer_size=9, n_envs=1),
    Case(static=1.0, padding="repeated"),
    Case(static=0.9, padding="zeros"),
    Case(in_dict=True, padding="other"),
    Case(in_dict=True, padding="other", n_frames=6, n_steps=2, buffer_size=6),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class Game:
    """Environments that show random frames, stacked."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.frames = np.zeros((case.n_envs, case.n_frames, case.n_channels, 7, 6), np.uint8)
        self.count = 0
        for env in range(case.n_envs):
            self.reset(env)

    def space(self) -> spaces.Space[Any]:
        shape = self.observe().shape[1:] if not self.case.in_dict else self.observe()["image"].shape[1:]
        image = spaces.Box(0, 255, shape, np.uint8)
        if self.case.in_dict:
            small = spaces.Box(0, 255, (2, 7, 6), np.uint8)
            return spaces.Dict({"image": image, "vector": spaces.Box(-1, 1, (2,)), "small": small})
        return image

    def observe(self) -> Any:
        stacks = self.frames.reshape(self.case.n_envs, -1, 7, 6)
        if self.case.axis == -1:
            stacks = np.ascontiguousarray(np.moveaxis(stacks, 1, -1))
        if self.case.in_dict:
            vectors, two = np.ones((self.case.n_envs, 2), np.float32), stacks[:, -2:] // 2
            return {"image": stacks.copy(), "vector": vectors, "small": two}
        return stacks.copy()

    def draw(self) -> np.ndarray:
        return self.rng.integers(1, 255, (self.case.n_channels, 7, 6), np.uint8)

    def reset(self, env: int) -> None:
        self.frames[env, -1] = self.draw()
        for frame in range(self.case.n_frames - 1):
            padding = {"zeros": 0, "repeated": self.frames[env, -1]}.get(self.case.padding)
            self.frames[env, frame] = self.draw() if padding is None else padding

    def play(self, n_steps: int, *buffers: SequenceReplayBuffer) -> None:
        n = self.case.n_envs
        for _ in range(n_steps):
            obs = self.observe()
            self.frames = np.roll(self.frames, -1, 1)
            for env in range(n):
                still = self.rng.random() < self.case.static
                self.frames[env, -1] = self.frames[env, -2] if still else self.draw()
            following = self.observe()
            done, cut = self.rng.random((2, n)) < 0.15
            for env in np.flatnonzero(done).tolist():
                self.reset(env)
            infos = [{"TimeLimit.truncated": bool(each)} for each in cut]
            numbers = np.arange(n) + self.count * n
            self.count += 1
            for buffer in buffers:
                actions = numbers[:, np.newaxis] % 3
                behaviour = np.ones((n, 3), np.float32)
                buffer.add(obs, following, actions, numbers.astype(np.float32), done, infos, behaviour=behaviour)
            np.logical_not(done, out=done)  # an environment may fill the same arrays again
            for array in (*by_key(obs).values(), *by_key(following).values()):
                array.fill(0)
            if self.rng.random() < 0.05:
                for env in range(n):
                    self.reset(env)
                for buffer in buffers:
                    buffer.end_episodes()


def buffers(case: Case) -> tuple[SequenceReplayBuffer, SequenceReplayBuffer]:
    """One that stores stacks as they come, and one that stores frames."""
    space = Game(case).space()
    frame_stack: Any = {"image": case.n_frames, "small": 2} if case.in_dict else case.n_frames
    whole, frames = (
        SequenceReplayBuffer(
            case.buffer_size, space, ACTIONS, "cpu", case.n_envs, n_steps=case.n_steps, frame_stack=each
        )
        for each in (1, frame_stack)
    )
    return whole, frames


def meaningful(rows: th.Tensor, batch: SequenceBatch) -> th.Tensor:
    rows = rows.clone()
    rows[-1][batch.ends[-1].bool()] = 0
    return rows


def assert_equal(left: SequenceBatch, right: SequenceBatch) -> None:
    one: Any
    other: Any
    for name, one, other in zip(SequenceBatch._fields, left, right, strict=True):
        if name == "slots":
            continue  # the rings have slots for the past of frames, and so may differ in length
        if name == "observations":  # where an episode ended with the last step, the last row belongs to another one
            one, other = ({key: meaningful(rows, left) for key, rows in by_key(each).items()} for each in (one, other))
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            assert all(th.equal(one[key], other[key]) for key in one), name
        else:
            assert np.array_equal(one, other), name


def assert_alike(whole: SequenceReplayBuffer, frames: SequenceReplayBuffer) -> None:
    assert whole.size() == frames.size()
    if whole.size():
        assert_equal(whole.latest(), frames.latest())
        left, right = (each.sample(60, None, np.random.default_rng(0)) for each in (whole, frames))
        assert_equal(left, right)


@every_case
def test_frames_stored_once_come_out_as_the_stacks_that_went_in(case: Case) -> None:
    game, (whole, frames) = Game(case), buffers(case)
    for _ in range(40):
        game.play(3, whole, frames)
        assert_alike(whole, frames)
    assert whole.full


@every_case
def test_a_saved_buffer_of_frames_goes_on(case: Case) -> None:
    game, (whole, frames) = Game(case), buffers(case)
    game.play(4 * case.n_steps + 1, whole, frames)
    frames = pickle.loads(pickle.dumps(frames))
    game.play(6 * case.n_steps, whole, frames)
    assert_alike(whole, frames)


@every_case
def test_frames_move_to_another_number_of_environments(case: Case) -> None:
    game, (whole, frames) = Game(case), buffers(case)
    game.play(9 * case.n_steps, whole, frames)
    assert_alike(whole.with_envs(2), frames.with_envs(2))


@every_case
def test_a_step_that_ctrl_c_interrupts_is_not_stored_and_changes_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    game, (whole, frames), rng = Game(case), buffers(case), np.random.default_rng(0)
    write, n_left, n_interrupted = Column.write, [0], 0

    def interrupted(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        n_left[0] -= 1
        if n_left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Column, "write", interrupted)
    for _ in range(60):
        game.play(3, whole, frames)
        n_left[0], same_game, before = int(rng.integers(1, 14)), deepcopy(game), (frames.pos, frames.step)
        with suppress(KeyboardInterrupt):
            game.play(1, frames)
        n_left[0] = 0
        if before == (frames.pos, frames.step):
            n_interrupted += 1
        else:
            same_game.play(1, whole)
        for env in range(case.n_envs):
            game.reset(env)
        for buffer in (whole, frames):
            buffer.end_episodes()
        assert_alike(whole, frames)
        assert frames.step == whole.step
    assert n_interrupted > 20


def test_a_buffer_that_was_loaded_goes_on_with_each_frame_stored_once() -> None:
    case = Case(padding="other")
    game, (_, saved), (_, loaded) = Game(case), buffers(case), buffers(case)
    game.play(7, saved)
    loaded.load_state_dict(saved.state_dict())
    game.play(1, saved, loaded)
    columns = [buffer.state_dict()["columns"]["observations"][""] for buffer in (saved, loaded)]
    for name in ("ages", "pasts"):
        np.testing.assert_array_equal(columns[1][name]["ring"], columns[0][name]["ring"])


def test_a_reset_after_a_buffer_was_loaded_ends_the_last_step_with_what_followed_it() -> None:
    case = Case()
    game, (saved, _), (loaded, _) = Game(case), buffers(case), buffers(case)
    game.play(case.n_steps + 2, saved)
    loaded.load_state_dict(saved.state_dict())
    for buffer in (saved, loaded):
        buffer.end_episodes()
    game.play(case.n_steps, saved, loaded)
    assert_alike(saved, loaded)


def older_frames(buffer: SequenceReplayBuffer) -> th.Tensor:
    rows: th.Tensor = buffer.state_dict()["columns"]["observations"][""]["older"]["rows"]["frames"]
    return rows


def stored_shape(buffer: SequenceReplayBuffer) -> tuple[int, ...]:
    """Of what is stored of one observation of one environment."""
    column = buffer.state_dict()["columns"]["observations"][""]
    shape: th.Size = column.get("frames", column)["ring"].shape[2:]
    return shape


def n_bytes(buffer: SequenceReplayBuffer) -> int:
    def of(value: Any) -> int:
        if isinstance(value, dict):
            return sum(map(of, value.values()))
        return value.nbytes if isinstance(value, (np.ndarray, th.Tensor)) else 0

    return of(buffer.state_dict())


@pytest.mark.parametrize("n_frames", [2, 3, 4, 6])
def test_any_stack_of_images_is_taken_apart(n_frames: int) -> None:
    for shape, axis in (((12, 40, 40), 0), ((40, 40, 12), -1)):
        stack = make_frame_stack(spaces.Box(0, 255, shape, np.uint8), n_frames, strict=True)
        assert stack == FrameStack(n_frames, axis)


@pytest.mark.parametrize("padding", ["zeros", "repeated"])
def test_a_step_of_atari_takes_hardly_more_than_a_frame(padding: str) -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = SequenceReplayBuffer(5000, space, spaces.Discrete(6), "cpu", 2, frame_stack=4)
    rng = np.random.default_rng(0)
    frames = np.zeros((2, 4, 84, 84), np.uint8)
    for step in range(6000):
        obs = frames
        frames = np.roll(frames, -1, 1)
        frames[:, -1] = rng.integers(0, 255, (2, 84, 84), np.uint8)
        following, done = frames, np.full(2, step % 100 == 99)
        if done.any():
            frames = frames.copy()
            frames[:, :-1] = 0 if padding == "zeros" else frames[:, -1:]
        one = np.ones((2, 6), np.float32)
        buffer.add(obs, following, np.zeros((2, 1), int), one[:, 0], done, [EMPTY, EMPTY], behaviour=one)
    behaviour_and_the_rest = 6 * 4 + 8 + 4 + 2 + 8
    assert n_bytes(buffer) / (2 * 5000) <= 1.05 * 7056 + behaviour_and_the_rest


def test_pasts_of_overwritten_slots_are_forgotten() -> None:
    case = Case(padding="other")
    game, (_, frames) = Game(case), buffers(case)
    game.play(200, frames)
    places = len(older_frames(frames))
    game.play(2000, frames)
    assert len(older_frames(frames)) == places


def test_a_number_of_frames_that_does_not_divide_the_channels_is_an_error() -> None:
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    with pytest.raises(ValueError, match=r"frame_stack must divide the 4 channels of .*, got 3"):
        SequenceReplayBuffer(10, space, ACTIONS, frame_stack=3)
    with pytest.raises(ValueError, match="frame_stack must be an integer of at least 1, got 0"):
        SequenceReplayBuffer(10, space, ACTIONS, frame_stack=0)
    with pytest.raises(ValueError, match=r"frame_stack must be a dict with keys of Dict\('img': .*, got {'image': 4}"):
        SequenceReplayBuffer(10, spaces.Dict(img=space), ACTIONS, frame_stack={"image": 4})


def test_a_claim_of_stacks_where_there_are_none_is_an_error_before_anything_wrong_is_stored() -> None:
    case = Case(n_steps=2)
    space = Game(case).space()
    buffer = SequenceReplayBuffer(20, space, ACTIONS, "cpu", 3, n_steps=2, frame_stack=4)
    rng, one = np.random.default_rng(0), np.ones((3, 3), np.float32)

    def add() -> None:
        obs, following = rng.integers(0, 255, (2, 3, *(space.shape or ())), np.uint8)
        buffer.add(obs, following, np.zeros((3, 1), int), one[:, 0], one[:, 0] < 0, [EMPTY] * 3, behaviour=one)

    add()
    with pytest.raises(
        ValueError, match=r"frame_stack must be the number of frames of an observation, got 4: .* environment 0"
    ):
        add()
    assert buffer.step == 1
    assert buffer.size() == 0


def test_a_refused_step_leaves_no_part_of_the_observations_behind() -> None:
    image = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    space = spaces.Dict({"first": image, "second": image})
    buffer = SequenceReplayBuffer(20, space, ACTIONS, "cpu", 1, n_steps=4, frame_stack=4)
    frames = np.random.default_rng(0).integers(0, 255, (7, 36, 36), np.uint8)
    one = np.ones((1, 3), np.float32)

    def add(first: int, second: int) -> None:
        rows = {"first": frames[first : first + 4][None], "second": frames[second : second + 4][None]}
        buffer.add(rows, rows, np.zeros((1, 1), int), one[:, 0], one[:, 0] < 0, [EMPTY], behaviour=one)

    add(0, 0)
    with pytest.raises(ValueError, match="frame_stack"):
        add(1, 3)  # only the second skips frames
    add(1, 1)
    assert buffer.step == 2


def test_a_storage_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="storage_device must be a device of this machine, got 'nowhere'"):
        SequenceReplayBuffer(10, spaces.Box(0, 1, (2,)), ACTIONS, storage_device="nowhere")


def image_env() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=True), 6)


def by_vec_frame_stack() -> VecEnv:
    return VecFrameStack(DummyVecEnv([image_env] * 2), 4)


def by_observation(padding: str) -> VecEnv:
    class Gray(gym.ObservationWrapper[Any, Any, Any]):
        def __init__(self) -> None:
            super().__init__(image_env())
            self.observation_space = spaces.Box(0, 255, (36, 36), np.uint8)

        def observation(self, observation: Any) -> Any:
            return observation.squeeze()

    return DummyVecEnv([lambda: FrameStackObservation(Gray(), 4, padding_type=padding)] * 2)


class Watch(BaseCallback):
    """Keeps what the policy acts on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[np.ndarray] = []

    def _on_step(self) -> bool:
        assert isinstance(self.model, ACER)
        self.seen.append(np.array(self.model._last_obs))
        return True


@pytest.mark.parametrize(
    ("env", "n_frames"),
    [
        (by_vec_frame_stack, 4),
        (lambda: by_observation("reset"), 4),
        (lambda: by_observation("zero"), 4),
        (lambda: DummyVecEnv([image_env] * 2), 1),
        (lambda: VecNormalize(by_vec_frame_stack(), norm_obs=False), 4),
        (lambda: VecFrameStack(VecNormalize(DummyVecEnv([image_env] * 2), norm_obs=False), 4), 4),
    ],
    ids=["VecFrameStack", "repeated", "zeros", "none", "VecNormalize over it", "VecNormalize under it"],
)
def test_stacks_are_found_and_what_is_replayed_is_what_the_policy_saw(env: Any, n_frames: int) -> None:
    kwargs: dict[str, Any] = {"n_steps": 5, "replay_start": 10, "buffer_size": 25, "replay_ratio": 1, "seed": 0}
    model, watch = ACER("CnnPolicy", env(), **kwargs), Watch()
    model.learn(2 * 23, callback=watch)
    model.learn(2 * 17, callback=watch)
    buffer = model.replay_buffer
    assert math.prod(stored_shape(buffer)) * n_frames == int(np.prod(model.observation_space.shape or ()))
    assert buffer.size() == 25
    seen = np.stack(watch.seen)
    for age in range(5):
        batch = buffer.gather(np.full(2, buffer.pos - 1 - age), np.arange(2))
        assert isinstance(batch.observations, th.Tensor)
        last = len(seen) - 5 * age
        np.testing.assert_array_equal(batch.observations[:-1].numpy(), seen[last - 5 : last])


def test_stacks_of_more_frames_than_a_byte_counts_are_restored() -> None:
    n_steps, n_rows, stack = 5, 150, FrameStack(130, 0)
    frames = np.random.default_rng(0).integers(0, 255, (n_rows + 1 + stack.n_frames, 2, 3), np.uint8)
    stacks = [frames[row : row + stack.n_frames].swapaxes(0, 1) for row in range(n_rows + 1)]
    column = FrameColumn(n_rows + n_steps, stack, stacks[0], "cpu")
    for row in range(n_rows):
        column.write(row, stacks[row])
        if row % n_steps == n_steps - 1:
            column.write(row + 1, stacks[row + 1], provisional=True)
    restored = column.take(np.arange(n_rows * 2).reshape(n_rows, 2))
    np.testing.assert_array_equal(restored.numpy(), stacks[:-1])


def test_frames_are_stored_as_they_come_by_choice() -> None:
    model = ACER("CnnPolicy", by_vec_frame_stack(), n_steps=5, replay_buffer_kwargs={"frame_stack": 1})
    model.learn(20)
    assert stored_shape(model.replay_buffer) == (4, 36, 36)


def test_normalised_frames_under_a_stack_are_replayed_as_the_policy_saw_them() -> None:
    env = VecFrameStack(VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2), gamma=0.9), 3)
    model, watch = ACER("MlpPolicy", env, n_steps=5, replay_start=10, seed=0), Watch()
    model.learn(100, callback=watch)
    batch = model.replay_buffer.latest()
    assert isinstance(batch.observations, th.Tensor)
    np.testing.assert_array_equal(batch.observations[:-1].numpy(), np.stack(watch.seen)[-5:])


class Counting(io.BytesIO):
    """Knows the largest piece that was written."""

    largest = 0

    def write(self, piece: Any) -> int:
        self.largest = max(self.largest, memoryview(piece).nbytes)
        return super().write(piece)


def test_a_buffer_is_written_without_a_second_copy() -> None:
    space, file = spaces.Box(0, 255, (84, 84), np.uint8), Counting()
    buffer = SequenceReplayBuffer(10_000, space, ACTIONS)
    image, one = np.ones((1, 84, 84), np.uint8), np.ones((1, 1), np.float32)
    for _ in range(10_000):
        buffer.add(image, image, np.zeros((1, 1), int), one[0], np.zeros(1, bool), [EMPTY], behaviour=one)
    buffer.write(file)
    assert n_bytes(buffer) > 7e7
    assert file.largest <= 2**24


@every_case
def test_a_buffer_that_was_written_is_read_as_it_was(case: Case) -> None:
    game, (whole, frames) = Game(case), buffers(case)
    game.play(7 * case.n_steps + 1, whole, frames)
    file = io.BytesIO()
    frames.write(file)
    file.seek(0)
    read = SequenceReplayBuffer.read(file, frames.observation_space, frames.action_space)
    game.play(3 * case.n_steps, whole, read)
    assert_alike(whole, read)


def test_a_buffer_that_holds_steps_goes_on_storing_them_as_before() -> None:
    game, (whole, frames) = Game(Case()), buffers(Case())
    late = SequenceReplayBuffer(20, game.space(), ACTIONS, "cpu", 3, n_steps=5)
    game.play(17, whole, frames, late)
    late.expect_frame_stack(4)
    assert stored_shape(late) == stored_shape(whole) != stored_shape(frames)
    file = io.BytesIO()
    late.write(file)
    read = SequenceReplayBuffer.read(file, late.observation_space, late.action_space, "cpu")
    game.play(10, whole, late, read)
    assert_alike(whole, late)
    assert_alike(whole, read)


def test_a_file_that_ends_too_soon_is_an_error() -> None:
    game, (_, frames) = Game(Case()), buffers(Case())
    game.play(30, frames)
    file = io.BytesIO()
    frames.write(file)
    with pytest.raises(ValueError, match="the replay buffer must be a whole file"):
        SequenceReplayBuffer.read(io.BytesIO(file.getvalue()[:-5]), frames.observation_space, frames.action_space)


class Refusing(DummyVecEnv):
    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        raise NotImplementedError


class Lacking(DummyVecEnv):
    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        raise AttributeError

    def has_attr(self, attr_name: str) -> bool:
        raise AttributeError


class Shrugging(VecEnv):
    """A vectorised environment of one's own making, with None for whatever it is asked."""

    frame_stack = None

    def __init__(self, env_fns: list[Any]) -> None:
        self.venv = DummyVecEnv(env_fns)
        super().__init__(1, self.venv.observation_space, self.venv.action_space)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        return self.venv.step_wait()

    def close(self) -> None:
        self.venv.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        return False


class Strict(Shrugging):
    """Another one, with an exception of its own for what it does not know."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":  # asked by SB3 when it is made
            return [None]
        raise KeyError(attr_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(("found", "expected"), [(4, 4), (0, 1), (-2, 1), ("four", 1), (True, 1), (None, 1)])
def test_an_attribute_frame_stack_counts_if_it_is_a_number_of_frames(found: Any, expected: int) -> None:
    env = DummyVecEnv([Recorder])
    env.frame_stack = found  # type: ignore[attr-defined]
    assert find_frame_stack(VecNormalize(env)) == expected


@pytest.mark.parametrize("vec_env", [Refusing, Lacking, Shrugging, Strict])
def test_an_environment_that_does_not_tell_its_wrappers_is_learnt(vec_env: Callable[[list[Any]], VecEnv]) -> None:
    env = vec_env([Recorder])
    assert find_frame_stack(env) == 1
    ACER("MlpPolicy", env, n_steps=5, device="cpu").learn(10)


@pytest.mark.parametrize("n_frames", [1, 4])
def test_the_last_step_of_a_rollout_touches_no_sequence_that_can_still_be_sampled(
    n_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come between the write and the moment from which the oldest rollout counts as replaced."""
    space = spaces.Box(0, 255, (4, 6, 6), np.uint8)
    buffer = SequenceReplayBuffer(9, space, spaces.Discrete(2), "cpu", n_steps=3, frame_stack=n_frames)
    frames = np.random.default_rng(0).integers(1, 255, (60, 6, 6), np.uint8)

    def add(t: int) -> None:
        obs, following = frames[np.newaxis, t : t + 4], frames[np.newaxis, t + 1 : t + 5]
        step = np.zeros((1, 1), np.int64), np.ones(1, np.float32), np.zeros(1, bool)
        buffer.add(obs, following, *step, [{}], behaviour=np.ones((1, 2), np.float32))

    for t in range(41):
        add(t)
    slots = np.arange(buffer.pos - 3, buffer.pos)
    before = th.as_tensor(buffer.gather(slots, np.zeros(3, int)).observations)
    write = Ring.write

    def interrupted(*args: Any) -> None:
        write(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Ring, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add(41)
    assert th.equal(before, th.as_tensor(buffer.gather(slots, np.zeros(3, int)).observations))


def test_stacks_of_colour_images_are_taken_apart_along_their_first_axis() -> None:
    for n_frames in (3, 4):  # as FrameStackObservation makes them
        space = spaces.Box(0, 255, (n_frames, 36, 36, 3), np.uint8)
        assert make_frame_stack(space, n_frames, strict=True) == FrameStack(n_frames, 0)
