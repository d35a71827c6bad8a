"""All that depends on the device: what fits on it, how tensors get there, and which selection is fastest on it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

# Share of a GPU's free memory that a block's features may take; the rest is for a step's products.
MAX_RESIDENT_SHARE = 0.5
# 16,384 x 32,768 float32 products are 2 GiB.
GPU_FACTOR = 4


class Start(Protocol):
    """Starts a task; returns what waits for its result."""

    def __call__(self, function: Callable[..., T], *arguments: object) -> Callable[[], T]:
        """See `one_thread_each`."""


def fits(num_bytes: int, device: torch.device) -> bool:
    """True if a block's features of this size may live on the device; always on a CPU, where they are already.

    Example:
        >>> fits(2**60, torch.device("cpu"))
        True
    """
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return num_bytes <= MAX_RESIDENT_SHARE * free_bytes


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From the host to a GPU through pinned memory, so that neither waits for the other.

    Example:
        >>> move(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def give_back_memory() -> None:
    """Gives memory that was freed back to the system, on Linux: glibc keeps what each thread has freed, hundreds of MB.

    Example:
        >>> give_back_memory()
    """
    if sys.platform == "linux":
        # other C libraries have no such function, and keep less
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def rows_at_once(rows: int, device: torch.device) -> int:
    """How many rows to take at once where a CPU takes `rows`: more on a GPU, whose kernels are slow to start.

    Example:
        >>> rows_at_once(4096, torch.device("cpu")), rows_at_once(4096, torch.device("cuda"))
        (4096, 16384)
    """
    return rows * GPU_FACTOR if device.type == "cuda" else rows


def smallest(keys_N: Tensor, num_selected: int) -> Tensor:
    """Positions of the smallest keys, smallest first; keys are distinct, or ties fall as they may.

    Args:
        keys_N: float (N,).
        num_selected: K, in [1, N].

    Returns:
        int64 (K,).

    Example:
        >>> smallest(torch.tensor([3.0, 1.0, 2.0]), 2)
        tensor([1, 2])
    """
    if keys_N.device.type != "cpu":
        return keys_N.topk(num_selected, largest=False, sorted=True).indices
    # numpy's introselect and vectorised sort are several times faster than torch's on a CPU
    keys = keys_N.numpy()
    if 2 * num_selected > keys.size:
        return torch.from_numpy(np.argsort(keys)[:num_selected])
    chosen = np.argpartition(keys, num_selected - 1)[:num_selected]
    return torch.from_numpy(chosen[np.argsort(keys[chosen])])


def positions(is_wanted_N: Tensor) -> Tensor:
    """Positions of the True ones, in order.

    Args:
        is_wanted_N: bool (N,).

    Returns:
        int64, as many as there are.

    Example:
        >>> positions(torch.tensor([True, False, True]))
        tensor([0, 2])
    """
    if is_wanted_N.device.type != "cpu":
        return is_wanted_N.nonzero().squeeze(1)
    # three times faster than torch's
    return torch.from_numpy(np.flatnonzero(is_wanted_N.numpy()))


def kth_largest(values_RC: Tensor, rank: int) -> Tensor:
    """The `rank`-th largest of each row.

    Example:
        >>> kth_largest(torch.tensor([[3.0, 1.0, 2.0]]), 2)
        tensor([2.])
    """
    if values_RC.device.type != "cpu":
        return values_RC.topk(rank, dim=1).values[:, -1]
    place = values_RC.shape[1] - rank
    return torch.from_numpy(np.partition(values_RC.numpy(), place, axis=1)[:, place].copy())


def positions_from(values_RC: Tensor, bounds: Tensor) -> Tensor:
    """Where values are at least their bounds, which are few: positions r * C + c, ascending, int64.

    Args:
        values_RC: float (R, C), rows or columns of a larger matrix.
        bounds: float (R, 1) or (1, C).

    Example:
        >>> positions_from(torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.tensor([[2.0], [2.0]]))
        tensor([0, 3])
    """
    if values_RC.device.type != "cpu":
        return (values_RC >= bounds).flatten().nonzero().squeeze(1)
    # numpy compares with vector instructions; eight flags are one integer, of which most are 0
    num_values = values_RC.numel()
    flags = np.empty(-(-num_values // 8) * 8, dtype=np.bool_)
    flags[num_values:] = False
    np.greater_equal(values_RC.numpy(), bounds.numpy(), out=flags[:num_values].reshape(values_RC.shape))
    words = np.flatnonzero(flags.view(np.int64) != 0)
    hits = np.flatnonzero(flags.view(np.int64)[words].view(np.bool_))
    return torch.from_numpy((words[hits >> 3] << 3) + (hits & 7))


def stable_order(labels_E: Tensor, num_labels: int) -> Tensor:
    """The order that sorts int64 labels from 0 to `num_labels` - 1, equal ones as they come: int64 (E,).

    Example:
        >>> stable_order(torch.tensor([1, 0, 1, 0]), 2)
        tensor([1, 3, 0, 2])
    """
    if labels_E.device.type != "cpu":
        return labels_E.argsort(stable=True)
    # of 16 bits: numpy sorts those by counting
    labels = labels_E.numpy().astype(np.uint16 if num_labels <= 2**16 else np.int64)
    return torch.from_numpy(labels.argsort(kind="stable"))


@contextmanager
def one_thread_each(device: torch.device) -> Iterator[Start]:
    """Gives a function that starts tasks, which share the CPU's threads: each task's operations have one.

    Tasks made of large products and of work that torch does not share among threads keep all cores busy, and their bits
    do not depend on the number of threads. On a GPU, and where there is one thread, tasks run when they are started.

    Yields:
        start(function, *arguments), which returns a function that waits for the result and returns it.

    Example:
        >>> with one_thread_each(torch.device("cpu")) as start:
        ...     start(max, 1, 2)()
        2
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu" or num_threads == 1:

        def run(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
            result = function(*arguments)
            return lambda: result

        yield run
        return
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield lambda function, *arguments: pool.submit(function, *arguments).result
        finally:
            pool.shutdown(cancel_futures=True)
            # a thread sets its own number, and that of threads to come
            torch.set_num_threads(num_threads)


def backend(device: torch.device) -> str:
    """Process group backend: objects and flags go through the host, so that a GPU does not wait for them.

    Example:
        >>> backend(torch.device("cpu"))
        'gloo'
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
