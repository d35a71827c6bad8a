"""Tasks on the CPU's threads, and the memory that threads keep."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Start(Protocol):
    """Starts a task; returns what waits for its result."""

    def __call__(self, function: Callable[..., T], *arguments: object) -> Callable[[], T]:
        """See `one_thread_each`."""


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
