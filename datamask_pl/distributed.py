"""The only collectives of the project. Every function here is called by every rank, or by none.

Sums over ranks are exact: what is added lies on a fixed grid (`functional.exact_sum`), so float64 addition does not
round and any number of ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from datamask_pl.errors import DatamaskError


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(value: object) -> list[Any]:
    """Gathers one small picklable value a rank, in rank order."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, value)
    return gathered


def share_failure(error: Exception | None) -> None:
    """Raises on every rank the first error that any rank met, so that none waits for one that left.

    Args:
        error: what went wrong on this rank, or None.

    Raises:
        Exception: The lowest failing rank's error; a DatamaskError is marked as raised on all ranks.
    """
    for shared in gather_objects(error):
        if shared is not None:
            if isinstance(shared, DatamaskError):
                shared.is_on_all_ranks = True
            raise shared


def leave_group() -> None:
    """Ends the process group, if there is one, once all ranks are done. Collective.

    A process that ends with its group open now and then aborts, when gloo's threads outlive the interpreter.
    """
    if rank_and_world()[1] > 1:
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def failing_together() -> Iterator[None]:
    """What any rank raises within, every rank raises at the end. Collective.

    Raises:
        Exception: See `share_failure`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    share_failure(error)


@dataclass(frozen=True)
class RankGroup:
    """The ranks that solve one block together.

    Attributes:
        rank: this process's place in the group.
        size: number of ranks in the group.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def world(cls) -> RankGroup:
        """The group of all processes."""
        return cls(*rank_and_world())

    def share(self, count: int) -> range:
        """This rank's contiguous share of `count` pieces of work; shares differ by at most one piece."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds the tensors of all ranks, in place, and returns the sum.

        Exact, hence the same on any number of ranks, if the addends lie on one grid or their supports are disjoint.
        """
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor
