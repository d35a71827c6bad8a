"""Ranks of one group as threads of this process, to test any number of ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from datamask_pl.distributed.collectives import RankGroup

T = TypeVar("T")


class _Meeting:
    """Where the ranks' tensors are added, in rank order or from the last rank back."""

    def __init__(self, size: int, *, is_reversed: bool) -> None:
        self.barrier = threading.Barrier(size, timeout=300)
        self.parts: list[Tensor | None] = [None] * size
        self.is_reversed = is_reversed

    def total(self, rank: int, tensor: Tensor) -> Tensor:
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        parts = self.parts[::-1] if self.is_reversed else self.parts
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        self.barrier.wait()  # nobody goes on to the next sum before all have read this one
        return total


@dataclass(frozen=True)
class _ThreadRank(RankGroup):
    meeting: _Meeting | None = None

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.meeting.total(self.rank, tensor))

    def complete_(self, tensor: Tensor, rows_of: list[range]) -> Tensor:
        own = rows_of[self.rank]
        filled = torch.zeros_like(tensor)
        filled[own.start : own.stop] = tensor[own.start : own.stop]
        return tensor.copy_(self.meeting.total(self.rank, filled))


def on_ranks(size: int, job: Callable[[RankGroup], T], *, is_reversed: bool = False) -> list[T]:
    """Runs the job on every rank of a group of `size`, and returns what each of them returned."""
    meeting = _Meeting(size, is_reversed=is_reversed)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        torch.set_num_threads(1)  # the number of threads decides on the last bits of a product
        try:
            results[rank] = job(_ThreadRank(rank, size, meeting))
        except BaseException as error:  # noqa: BLE001, RUF100
            errors.append(error)
            meeting.barrier.abort()

    num_threads = torch.get_num_threads()
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    if errors:
        raise errors[0]
    return results
