"""Ranks of `fit` as forks of a process that has imported everything: a start takes a tenth of a second, not six.

Each is a process of its own, that can be signalled and killed, and that runs the same command as any other start.
"""

import multiprocessing
import os
import sys
import time
import traceback
from typing import ClassVar

from tests.support.fits import QUIET, without_pictures
from tests.support.ranks import free_port, on


def fork_context():
    """Starts processes as forks of one that has imported what a fit needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datamask_pl.commands.fit", "torch.utils.tensorboard"])
    return context


class Ranks:
    """The processes of one start of a run.

    Args:
        num_ranks: how many.
        args: of `fit`.
        folder: current folder of the processes, where their output goes too.
        more: arguments of fits that follow, in the same processes.
    """

    _num_starts = 0
    _started: ClassVar[list["Ranks"]] = []

    def __init__(self, num_ranks, *args, folder, more=()):
        Ranks._num_starts += 1
        self.logs = [folder / f"start-{Ranks._num_starts:03d}-rank-{rank}.txt" for rank in range(num_ranks)]
        launched = on(num_ranks) if num_ranks > 1 else ()
        fits = [(free_port(), ["fit", *QUIET, *launched, *fit]) for fit in (args, *more)]
        self.processes = [
            fork_context().Process(target=_run, args=(rank, num_ranks, fits, str(folder), str(log)))
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()
        Ranks._started.append(self)

    @classmethod
    def kill_all(cls):
        """Ends what a test has left: a stopped process would keep pytest from ending."""
        while cls._started:
            cls._started.pop().kill()

    def wait_for(self, text, *, timeout_s=300):
        """Waits until rank 0 has printed the text, or has ended."""
        deadline = time.monotonic() + timeout_s
        while self.processes[0].is_alive():
            if self.logs[0].exists() and text in self.logs[0].read_text():
                return
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def signal(self, number, *ranks):
        """Sends a signal to ranks that are still there."""
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def end(self, *, timeout_s):
        """Exit codes; if a process does not end in time, all are killed and the test fails."""
        deadline = time.monotonic() + timeout_s
        try:
            for rank, process in enumerate(self.processes):
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, f"rank {rank} did not end:\n{self.output()}"
        finally:
            self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self):
        """Ends what is left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def output(self):
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs if log.exists())


def launch(num_ranks, fits, *, folder, timeout_s=300):
    """Runs the fits, one after the other, in as many processes; all must end well. Returns what rank 0 printed."""
    ranks = Ranks(num_ranks, *fits[0], folder=folder, more=fits[1:])
    assert ranks.end(timeout_s=timeout_s) == [0] * num_ranks, ranks.output()
    return ranks.logs[0].read_text()


def _run(rank, num_ranks, fits, folder, log):
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    import torch

    from datamask_pl.cli import main

    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith("DATAMASK_")]:
        del os.environ[name]
    try:
        for port, arguments in fits:
            if num_ranks > 1:  # Lightning removes some of them at the end of a fit
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
                os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with without_pictures():
                main(arguments)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
