"""Which processes there are: rank, size and group of this one, from one place.

- **node**: one machine. **rank**: one process, numbered from 0 over all nodes; a node runs one per device.
- **group**: consecutive ranks that solve one block together, by default those of a node. Lightning and every collective
  see the group alone; only the store is shared by all ranks.
- **worker**: a thread of one rank that reads or writes files. Workers are not part of the world.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class World:
    """All processes of a command, and the position of this one among them.

    Attributes:
        rank: over all groups.
        size: processes of all groups.
        group: the group it belongs to.
        num_groups: groups, each of which solves blocks of its own.
        store: torch's store, which all processes share; None where there is one process.
        local_rank: rank within the node.
    """

    rank: int = 0
    size: int = 1
    group: int = 0
    num_groups: int = 1
    store: Any = None
    local_rank: int = 0

    @classmethod
    def launched(cls, environ: Mapping[str, str] = os.environ) -> World:
        """The processes that torchrun or srun started, each of them a group; one process if neither did.

        Example:
            >>> world = World.launched({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
            >>> world.rank, world.size, world.local_rank
            (3, 8, 1)
            >>> World.launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).size  # a batch script, not started by srun
            1
        """
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if "RANK" in environ and "WORLD_SIZE" in environ:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        elif not is_slurm_step(environ) or environ.get("SLURM_JOB_NAME") == "interactive" or names[0] not in environ:
            return cls()
        size = environ.get(names[1], environ.get("SLURM_NTASKS"))
        if size is None:
            return cls()
        rank = int(environ[names[0]])
        return cls(rank, int(size), rank, int(size), local_rank=int(environ.get(names[2], "0")))

    def broadcast_from_first(self, key: str, decide: Callable[[], str]) -> str:
        """Text that rank 0 of all groups decides on, on every rank. Every group's rank 0 calls it, once per key."""
        if self.num_groups == 1:
            return decide()
        if self.rank == 0:
            self.store.set(key, decide())
        return str(self.store.get(key).decode())

    def publish(self, key: str) -> None:
        """Sets a flag that every process of every group can see. Not a collective."""
        if self.store is not None:
            self.store.set(key, "")

    def is_published(self, key: str) -> bool:
        """True if any process of any group has set the flag; False where there is one process. Not a collective."""
        return self.store is not None and bool(self.store.check([key]))


_world = World()


def world() -> World:
    """The world of this process, as the strategy set it."""
    return _world


def set_world(new: World) -> None:
    """Sets the world of this process; called by the strategy alone."""
    global _world  # one process has one world, as it has one default process group
    _world = new


def is_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """True if srun started this process; False for a batch script, which SLURM starts once per job."""
    return bool({"SLURM_STEP_ID", "SLURM_STEPID"} & set(environ))
