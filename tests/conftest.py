import gc
import os

import pytest
import torch as th


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` the tests are those of machines that have none."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """What was imported stays. Whole garbage collections, as after each trial of a search, need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The networks of the tests are too small for more."""
    th.set_num_threads(1)
