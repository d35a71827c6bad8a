"""The only collectives of the project. Every function here is called by every rank, or by none.

Sums over ranks are exact: what is added lies on a fixed grid (`functional.exact_sum`), so float64 addition does not
round and any number of ranks gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from datamask_pl.errors import AgreementError, DatamaskError


def gather_objects(value: object) -> list[Any]:
    """Gathers one small picklable value a rank, in rank order."""
    size = RankGroup.current().size
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
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
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1:
            dist.barrier()
        dist.destroy_process_group()


def drop_group() -> None:
    """Closes this process's connections to its group, so that ranks that wait for it notice. Not a collective."""
    if RankGroup.current().size > 1:
        with suppress(Exception):  # it is broken already
            dist.group.WORLD.abort()  # type: ignore[union-attr]
            if "nccl" not in dist.get_backend():  # of gloo it closes nothing
                dist.destroy_process_group()


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raises at its end, on every rank, what any rank raised within. Collective.

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
    """The ranks that solve one block together, which is all that collectives reach; see `world`.

    Attributes:
        rank: of this process, in the group.
        size: number of ranks in the group.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> RankGroup:
        """The group of this process; of one rank without a process group."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def share(self, count: int) -> range:
        """This rank's contiguous share of `count` pieces of work; shares differ by at most one piece."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def shares(self, count: int) -> list[range]:
        """Every rank's share of `count` pieces of work, in rank order."""
        return [RankGroup(rank, self.size).share(count) for rank in range(self.size)]

    def any(self, is_true: bool) -> bool:
        """True on every rank if it is on any. Through the host: a GPU does not wait for it."""
        if self.size == 1:
            return is_true
        flag = torch.tensor([int(is_true)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def check_agreement(self, values: Tensor, what: str) -> None:
        """Compares a checksum of the values over the ranks, which all hold the same if nothing went wrong.

        Raises:
            AgreementError: If they differ; names the ranks. On every rank.
        """
        if self.size == 1:
            return
        digest = hashlib.sha256(values.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
        digests = gather_objects(digest)
        differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if differing:
            error = AgreementError(
                f"{what}: ranks {', '.join(map(str, differing))} hold other values than rank 0 "
                f"({digests[differing[0]][:12]} against {digests[0][:12]}). Hardware, library versions or numbers of "
                "threads may differ; the run stops, its checkpoints so far are whole."
            )
            error.is_on_all_ranks = True
            raise error

    def sum_(self, tensor: Tensor) -> Tensor:
        """Adds the tensors of all ranks, in place, and returns the sum.

        Exact, hence the same on any number of ranks, if the addends lie on one grid or their supports are disjoint.
        """
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def concatenate(self, columns: Tensor) -> Tensor:
        """Puts the columns of all ranks side by side, in rank order, on every rank.

        Args:
            columns: float64 (C, E), E different on each rank.
        """
        if self.size == 1:
            return columns
        num_columns = torch.zeros(self.size, dtype=torch.int64, device=columns.device)
        num_columns[self.rank] = columns.shape[1]
        ends = self.sum_(num_columns).cumsum(0).tolist()
        whole = columns.new_zeros(columns.shape[0], ends[-1])
        whole[:, ends[self.rank] - columns.shape[1] : ends[self.rank]] = columns
        return self.sum_(whole)

    def complete_(self, tensor: Tensor, rows_of: list[range]) -> Tensor:
        """Gives every rank the rows that the others have filled in, in place, and returns the tensor.

        Args:
            tensor: of any type, (N, ...), contiguous; this rank's rows are filled in.
            rows_of: each rank's rows.
        """
        if self.size > 1:
            works = [
                dist.broadcast(tensor[rows.start : rows.stop], src=rank, async_op=True)
                for rank, rows in enumerate(rows_of)
                if len(rows)
            ]
            for work in works:
                work.wait()
        return tensor
