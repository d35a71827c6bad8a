"""Which rank failed, and why: a board in the store that all processes share.

A rank that meets an error posts it. The others notice that a collective broke, or took too long, and look there; where
nothing was posted, a process was killed, and the board says which of those on this machine is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

# How long a rank may take to post after it broke a collective.
PATIENCE_S = 5.0
_POSTED = "datamask-failure"
_FINISHED = "datamask-finished"


class FailureBoard:
    """What the ranks tell each other of their ends.

    Args:
        store: shared by all processes.
        rank: this process's rank, over all groups.
        world_size: number of processes.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        store.set(f"datamask-process-{rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def post(self, reason: str) -> None:
        """Says why this rank ends; the first to post is heard. Never raises."""
        text = json.dumps([self.rank, reason])
        try:
            self._store.compare_set(_POSTED, "", text)
        except Exception:  # the rank that holds the store may be gone
            return

    def find(self) -> str | None:
        """Who failed, and why, in words; None if that cannot be known. Never raises."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if self._store.check([_POSTED]):
                    rank, reason = json.loads(self._store.get(_POSTED))
                    return f"rank {rank} ended: {reason}"
                if gone := self._gone():
                    return f"rank {gone[0]} ended without a word; it was killed, perhaps for want of memory"
            except Exception:
                return "rank 0, through which the others find each other, ended"
            time.sleep(0.2)
        return None

    def finish(self) -> None:
        """Says that this rank has done its part. Rank 0, which may hold the store, waits for all, or for a failure."""
        try:
            self._store.add(_FINISHED, 1)
            while self.rank == 0 and self._store.add(_FINISHED, 0) < self.world_size:
                if self._store.check([_POSTED]) or self._gone():
                    return
                time.sleep(0.2)
        except Exception:  # the rank that holds the store may be gone
            return

    def _gone(self) -> list[int]:
        """Ranks of this machine whose process is no more."""
        gone = []
        for rank in range(self.world_size):
            key = f"datamask-process-{rank}"
            if rank == self.rank or not self._store.check([key]):
                continue
            host, pid = json.loads(self._store.get(key))
            if host == socket.gethostname() and not _is_alive(pid):
                gone.append(rank)
        return gone


def _is_alive(pid: int) -> bool:
    """False for a process that is gone, or that has ended and waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # without /proc nothing is known
    except OSError:
        return True
    return state not in "ZX"
