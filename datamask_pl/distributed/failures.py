"""Which rank failed, and why: a board in the store that all processes share.

A rank that meets an error posts it. The others notice that a collective broke, or took too long, and look there; where
nothing was posted, a process was killed, and the board says which of those on this machine is gone.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

# How long a rank may take to post after it broke a collective.
PATIENCE_S = 5.0
# How much later than rank 0 another may notice that a collective broke.
NOTICE_S = 5.0
_POSTED = "datamask-failure"


class FailureBoard:
    """What the ranks tell each other of their ends.

    Args:
        store: shared by all processes.
        rank: this process's rank, over all groups.
        world_size: number of processes.
        group: ranks of this process's group; by default it alone.
    """

    def __init__(self, store: Store, rank: int, world_size: int, group: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = [rank] if group is None else list(group)
        self._store = store
        self._processes: dict[int, tuple[str, int]] = {}
        store.set(f"datamask-process-{rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def post(self, reason: str) -> None:
        """Says why this rank ends; the first to post is heard. Never raises."""
        with suppress(Exception):  # the rank that holds the store may be gone
            self._store.compare_set(_POSTED, "", json.dumps([self.rank, reason]))

    def find(self) -> str | None:
        """Who failed, and why, as text; None if that cannot be known. Never raises."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            self._store.set(f"datamask-noticed-{self.rank}", "")
            while time.monotonic() < deadline:
                if (reason := self._look()) is not None:
                    return reason
                time.sleep(0.2)
            silent = [rank for rank in self.group if rank != self.rank and not self._is_set("noticed", rank)]
        except Exception:
            return "rank 0, which hosts the rendezvous store, exited"
        return f"rank {silent[0]} did not answer" if silent else None

    def leave(self) -> None:
        """Says that this rank has found out, and ends. Never raises.

        Rank 0, which may hold the store, stays until the others of its group have found out, too.
        """
        with suppress(Exception):
            self._store.set(f"datamask-noticed-{self.rank}", "")
            self._store.set(f"datamask-leaving-{self.rank}", "")
            begun_s = time.monotonic()
            while self.rank == 0 and (seconds := time.monotonic() - begun_s) < NOTICE_S + PATIENCE_S:
                gone = self._gone()
                waiting = [rank for rank in self.group if rank not in gone and not self._is_set("leaving", rank)]
                if not any(seconds < NOTICE_S or self._is_set("noticed", rank) for rank in waiting):
                    return
                time.sleep(0.05)

    def finish(self) -> str | None:
        """Says that this rank has done its part. The group of rank 0, which may hold the store, waits for all others.

        Returns:
            Who failed meanwhile, and why, as text; None if all have done their part. Never raises.
        """
        try:
            self._store.set(f"datamask-finished-{self.rank}", "")
            waiting = list(range(self.world_size)) if 0 in self.group else []
            while waiting := [rank for rank in waiting if not self._is_set("finished", rank)]:
                if (reason := self._look()) is not None:
                    return reason
                time.sleep(0.2)
        except Exception:
            return "rank 0, which hosts the rendezvous store, exited" if self.rank else None
        return None

    def _look(self) -> str | None:
        """What was posted, or who is gone."""
        if self._store.check([_POSTED]):
            rank, reason = json.loads(self._store.get(_POSTED))
            return f"rank {rank} ended: {reason}"
        if gone := self._gone():
            return f"rank {gone[0]} was killed without reporting an error (out of memory?)"
        return None

    def _is_set(self, word: str, rank: int) -> bool:
        return bool(self._store.check([f"datamask-{word}-{rank}"]))

    def _gone(self) -> list[int]:
        """Ranks of this machine whose process is no more, without having said that it ends."""
        for rank in range(self.world_size):
            if rank not in self._processes and self._is_set("process", rank):
                host, pid = json.loads(self._store.get(f"datamask-process-{rank}"))
                self._processes[rank] = host, pid
        here = socket.gethostname()
        gone = [rank for rank, (host, pid) in self._processes.items() if host == here and not _is_alive(pid)]
        return [rank for rank in gone if not (self._is_set("finished", rank) or self._is_set("leaving", rank))]


def _is_alive(pid: int) -> bool:
    """False for a process that is gone, or that has ended and waits for its parent to notice."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()  # without /proc nothing is known
    except OSError:
        return True
    return state not in "ZX"
