"""Runs a function in the processes of a torch.distributed group."""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch as th
import torch.distributed as dist


class Raised(Exception):  # noqa: N818
    """What a rank raised, as text."""


def on_ranks(function: Callable[[int], Any], n_ranks: int = 2, timeout: float = 120) -> list[Any]:
    """
    :param function: called with the rank in a process of each
    :param n_ranks: number of ranks
    :param timeout: seconds until all must have returned
    :return: what the function returned on each rank, or :class:`Raised`; None where the process was killed
    """
    context = multiprocessing.get_context("fork")  # a new interpreter would import everything again
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(n_ranks)]
        processes = [
            context.Process(target=_run, args=(function, rank, n_ranks, f"file://{folder}/store", pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return [_received(receiver, timeout) for receiver, _ in pipes]
        finally:
            for process in processes:
                process.join(5)
                process.kill()


def _run(function: Callable[[int], Any], rank: int, n_ranks: int, store: str, sender: Any) -> None:
    th.set_num_threads(1)
    np.random.seed()  # else a copy of the parent's numbers
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_ranks)
    try:
        result = function(rank)
    except BaseException as error:
        traceback.print_exc()
        result = Raised(f"{type(error).__name__}: {error}")
    sender.send_bytes(pickle.dumps(result))  # send would leave tensors in memory that ends with this process
    sender.close()


def _received(receiver: Any, timeout: float) -> Any:
    if not receiver.poll(timeout):
        raise TimeoutError("a rank has not returned")
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None
