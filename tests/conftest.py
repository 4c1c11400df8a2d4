import pytest
import torch as th


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The networks of the tests are too small for more."""
    th.set_num_threads(1)
