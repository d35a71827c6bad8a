"""From blocks to the batches of training steps; the next block is read while one is learned.

Shape suffixes: N samples of a block, M samples of a step's batch, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from datamask_pl.data.types import Block, PartialBatch
from datamask_pl.functional.budget import share_of
from datamask_pl.functional.seeding import derive_seed

DEFAULT_PARTIAL = 0.1
DEFAULT_SLICE_ROWS = 16_384


def draw_rows(num_samples: int, num_drawn: int, *, seed: int, block: int, step: int) -> Tensor:
    """Rows of a step's batch: different, ascending, and decided by the arguments alone.

    The generator is seeded with derive_seed(seed, block, step), so that a resumed run and every rank draw the same.

    Args:
        num_samples: N, at least 1.
        num_drawn: M in [1, N].
        seed: seed of the run.
        block: index of the block.
        step: step within the block.

    Returns:
        int64 (M,).

    Example:
        >>> draw_rows(5, 5, seed=0, block=0, step=0)
        tensor([0, 1, 2, 3, 4])
    """
    if num_drawn == num_samples:
        return torch.arange(num_samples)
    generator = torch.Generator().manual_seed(derive_seed(seed, block, step))
    return torch.randperm(num_samples, generator=generator)[:num_drawn].sort().values


class BlockQueue:
    """Hands out blocks, and reads the one after in a thread if it may. Two blocks are in memory at most.

    A thread, not a process: a fork after parquet's threads have started hangs.

    Args:
        read: reads the block of an index.
        follower: index of the block that comes after one, None after the last.

    Attributes:
        is_ahead: whether the block after is read meanwhile, or when it is asked for.
    """

    def __init__(self, read: Callable[[int], Block], follower: Callable[[int], int | None]) -> None:
        self._follower = follower
        self._read = read
        self.is_ahead = True
        self._executor: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[Block]] | None = None

    def put(self, block: Block) -> None:
        """Gives a block that has been read already, to be handed out first."""
        future: Future[Block] = Future()
        future.set_result(block)
        self._next = (block.index, future)

    def take(self, index: int) -> Block:
        """Waits for a block, and starts to read the one after it, if it may.

        Raises:
            Exception: What reading the block raised.
        """
        if self._next is None or self._next[0] != index:
            self._start(index)
        assert self._next is not None
        # The queue must not hold on to the block, which lives as long as the caller needs it.
        future, self._next = self._next[1], None
        block = future.result()
        if self.is_ahead and (follower := self._follower(index)) is not None:
            self._start(follower)
        return block

    def close(self) -> None:
        """Drops what was read ahead and ends the thread; a later `take` starts another."""
        self._next = None
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _start(self, index: int) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="datamask-reader")
        self._next = (index, self._executor.submit(self._read, index))


class StepLoader:
    """Yields the batches of one block an epoch.

    Every iterator asks for its block when its first batch is wanted, not before: Lightning may make an iterator and
    drop it unused.

    Args:
        take_block: returns the block of an index.
        begin: returns the index of the epoch's block, and the step to begin with; called once an epoch.
        num_steps: batches a block.
        is_whole_block: True for batches that stand for the whole block, False for a random part of it.
        partial: share of the block that a step reads at once, or None for `default_partial` of it (random part), or
            16,384 rows at a time (whole block).
        seed: seed of the random parts.
        default_partial: size of a random part where none is asked for.
    """

    def __init__(
        self,
        *,
        take_block: Callable[[int], Block],
        begin: Callable[[], tuple[int, int]],
        num_steps: int,
        is_whole_block: bool,
        partial: float | None,
        seed: int,
        default_partial: float = DEFAULT_PARTIAL,
    ) -> None:
        self.num_steps = num_steps
        self.is_whole_block = is_whole_block
        self.partial = partial
        self.default_partial = default_partial
        self.seed = seed
        self._take_block = take_block
        self._begin = begin
        self._is_skipping = False

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[PartialBatch]:
        index, first_step = self._begin()
        self._is_skipping = False
        block = self._take_block(index)
        for step in range(first_step, self.num_steps):
            yield self._make_batch(block, step)
            if self._is_skipping:
                return

    def skip_rest_of_block(self) -> None:
        """Ends the block after the batch that was yielded last, and with it Lightning's epoch."""
        self._is_skipping = True

    def _make_batch(self, block: Block, step: int) -> PartialBatch:
        num_samples = block.num_samples
        if self.is_whole_block:
            num_slice_rows = DEFAULT_SLICE_ROWS if self.partial is None else share_of(self.partial, num_samples)
            return PartialBatch(block, step, min(num_slice_rows, num_samples))
        num_drawn = share_of(self.default_partial if self.partial is None else self.partial, num_samples)
        rows_M = draw_rows(num_samples, num_drawn, seed=self.seed, block=block.index, step=step)
        num_slice_rows = num_drawn if num_drawn < num_samples else min(DEFAULT_SLICE_ROWS, num_samples)
        return PartialBatch(block, step, num_slice_rows, rows_M)
