"""Groups of ranks: each solves blocks of its own, and is a world of its own to everything above.

`world = num_groups * ranks_per_block`. Consecutive ranks form a group. Only the store through which processes find each
other is shared; every collective, barrier and broadcast, Lightning's own included, stays within the group, so groups
never wait for each other, and may take different numbers of steps.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.rendezvous import rendezvous

from datamask_pl.compat import set_rank_zero
from datamask_pl.distributed.failures import FailureBoard
from datamask_pl.distributed.world import World, set_world
from datamask_pl.errors import LaunchError
from datamask_pl.functional.device import backend

# How long, at least, the processes may take to start: one may import everything while another waits for its node.
START_S = 300.0


def group_size(world_size: int, ranks_of_node: int, ranks_per_block: int | None) -> int:
    """Ranks of a group.

    Args:
        world_size: processes, over all nodes.
        ranks_of_node: processes of a node.
        ranks_per_block: what was asked for; None for the ranks of a node.

    Raises:
        LaunchError: If groups of this size do not add up to the world.

    Example:
        >>> group_size(16, 8, None), group_size(16, 8, 4)
        (8, 4)
    """
    size = ranks_of_node if ranks_per_block is None else ranks_per_block
    if size < 1 or world_size % size:
        divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise LaunchError(
            f"launch.ranks_per_block must divide the number of processes, {world_size}, got {size}; "
            f"give one of {', '.join(map(str, divisors))}."
        )
    return size


class BlockGroupStrategy(DDPStrategy):
    """DDP within groups of ranks that take different blocks.

    Args:
        ranks_per_block: ranks of a group; by default those of a node. Must divide the number of processes.
        timeout_s: seconds that a rank waits for the others of its group in one collective; for all to start, at least
            `START_S`.
        options: see Lightning's DDPStrategy.

    Attributes:
        board: where the ranks say why they ended.
        lost: after `finish`, which rank of another group failed, and why; None if none did.
    """

    strategy_name = "ddp"

    def __init__(self, *, ranks_per_block: int | None = None, timeout_s: float = 300.0, **options: Any) -> None:  # noqa: ANN401
        options["timeout"] = timedelta(seconds=timeout_s)
        super().__init__(**options)
        self.ranks_per_block = ranks_per_block
        self.board: FailureBoard | None = None
        self.lost: str | None = None
        self._place: tuple[int, int] | None = None

    @property
    def global_rank(self) -> int:
        """Rank within the group, once the group is known."""
        return super().global_rank if self._place is None else self._place[0]

    @property
    def world_size(self) -> int:
        """Ranks of the group, once the group is known."""
        return super().world_size if self._place is None else self._place[1]

    def setup_distributed(self) -> None:
        """Finds the other processes, and joins those of the group.

        Raises:
            LaunchError: If ranks_per_block does not divide the number of processes, the port is taken, or not all
                processes come.
        """
        environment = self.cluster_environment
        assert environment is not None
        self.set_world_ranks()
        rank, world_size = environment.global_rank(), environment.world_size()
        size = group_size(world_size, self.num_processes, self.ranks_per_block)
        group = rank // size
        self._process_group_backend = self._process_group_backend or backend(self.root_device)
        patience = max(self._timeout or timedelta(0), timedelta(seconds=START_S))
        store = _connect(environment.main_address, environment.main_port, rank, world_size, patience)
        store.set_timeout(self._timeout or patience)
        dist.init_process_group(
            self._process_group_backend,
            store=PrefixStore(f"group-{group}", store),
            rank=rank % size,
            world_size=size,
            timeout=self._timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        self._place = rank % size, size
        set_world(World(rank, world_size, group, world_size // size, store, environment.local_rank()))
        self.board = FailureBoard(store, rank, world_size, range(group * size, (group + 1) * size))
        set_rank_zero(rank % size)

    def finish(self) -> None:
        """Says that this rank has done its part; rank 0 of all, and its group, wait for the other groups."""
        if self.board is not None:
            self.lost = self.board.finish()


def _connect(address: str, port: int, rank: int, world_size: int, patience: timedelta) -> Store:
    """The store that all processes share, once they have come; rank 0, or torchrun's agent, holds it."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
        store.set(f"datamask-started-{rank}", "")
        store.wait([f"datamask-started-{other}" for other in range(world_size)], patience)
    except dist.DistStoreError as error:
        raise LaunchError(
            f"rank {rank} has waited {patience.total_seconds():g} s for all {world_size} processes to start, and some "
            "have not come; look at what they printed, and start as many as trainer.devices x trainer.num_nodes."
        ) from error
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise LaunchError(
                f"port {port} of {address} is taken, by another run perhaps; set MASTER_PORT to a free port, or leave "
                "it unset to have one chosen."
            ) from error
        raise LaunchError(
            f"rank {rank} cannot reach rank 0 at {address}:{port}; check MASTER_ADDR, MASTER_PORT and that all "
            f"{world_size} processes were started."
        ) from error
    result: Store = store
    return result
