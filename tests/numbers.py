"""Random numbers from a seeded generator, and what counts as equal."""

import numpy as np
import torch as th


def close(actual: th.Tensor, expected: th.Tensor, tolerance: float = 1e-10) -> None:
    th.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def normal(rng: np.random.Generator, *shape: int) -> th.Tensor:
    return th.from_numpy(rng.standard_normal(shape))


def uniform(rng: np.random.Generator, *shape: int) -> th.Tensor:
    return th.from_numpy(rng.random(shape))
