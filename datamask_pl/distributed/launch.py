"""Compares the processes that were started with those that the trainer was configured for."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.accelerators.mps import MPSAccelerator
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import is_slurm_step
from datamask_pl.errors import ConfigError, LaunchError, warn

MAX_TIMEOUT_S = 30 * 24 * 3600.0


class LaunchOptions:
    """How the processes work together.

    Args:
        ranks_per_block: processes that solve one block together; by default those of a node. Must divide their number;
            the groups then take different blocks.
        timeout_s: seconds that a process waits for the others of its group before it gives up. Must exceed
            the time to read and round one block. Start-up always allows at least 300 s.

    Raises:
        ConfigError: If a value is not allowed.
    """

    def __init__(self, *, ranks_per_block: int | None = None, timeout_s: float = 300.0) -> None:
        if ranks_per_block is not None and ranks_per_block < 1:
            raise ConfigError(f"launch.ranks_per_block must be at least 1, got {ranks_per_block}.")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"launch.timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}, got {timeout_s}.")
        self.ranks_per_block = ranks_per_block
        self.timeout_s = timeout_s


def register_strategy(options: LaunchOptions) -> None:
    """Puts our strategy in the place of `ddp`, which `auto` chooses too where there are several devices."""
    StrategyRegistry.register(
        "ddp",
        BlockGroupStrategy,
        description="DDP in groups of ranks that take different blocks",
        override=True,
        ranks_per_block=options.ranks_per_block,
        timeout_s=options.timeout_s,
    )


def choose_accelerator(asked: Any) -> Any:  # noqa: ANN401
    """What `auto` stands for: an Apple GPU has no float64, in which sums are exact, so there it is the CPU."""
    return "cpu" if asked == "auto" and MPSAccelerator.is_available() else asked


def slurm_plugins(plugins: Any) -> list[ClusterEnvironment]:  # noqa: ANN401
    """Lightning's SLURM environment without its requeueing, which saves inside the signal handler and hangs.

    Raises:
        LaunchError: If SLURM was told the number of tasks, but not of tasks a node.
    """
    given = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    if not SLURMEnvironment.detect() or any(isinstance(plugin, ClusterEnvironment) for plugin in given):
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:
        raise LaunchError(
            f"SLURM_NTASKS is {os.environ['SLURM_NTASKS']}, and SLURM_NTASKS_PER_NODE is not set; ask SLURM for "
            "--nodes and --ntasks-per-node instead of --ntasks."
        ) from error


def check_launch(trainer: Trainer) -> None:
    """Compares, before any process waits for another, what was launched with what the trainer was told.

    Raises:
        ConfigError: If the device is neither a CPU nor a CUDA GPU, or the strategy neither `ddp` nor a single device.
        LaunchError: If the numbers of processes differ.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, (BlockGroupStrategy, SingleDeviceStrategy)):
        raise ConfigError(
            f"trainer.strategy must be auto or ddp, got {type(strategy).__name__}: all ranks hold the same logits, and "
            "exchange a step's sums alone."
        )
    if strategy.root_device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"trainer.accelerator must be cpu or cuda, got a device of type {strategy.root_device.type}: sums are made "
            "exact in float64, which not every device has."
        )
    asked = trainer.num_devices * trainer.num_nodes
    if dist.is_available() and dist.is_torchelastic_launched():
        launched, launcher, hint = int(os.environ["WORLD_SIZE"]), "torchrun started", ""
    elif SLURMEnvironment.detect() and "SLURM_NTASKS" in os.environ:
        launched, launcher = int(os.environ["SLURM_NTASKS"]), "SLURM_NTASKS says"
        hint = " (In an interactive shell, set SLURM_JOB_NAME=interactive to ignore the SLURM job.)"
    else:
        return
    if launched != asked:
        raise LaunchError(
            f"{launcher} {launched} process{'es' * (launched != 1)}, and trainer.devices x trainer.num_nodes is "
            f"{trainer.num_devices} x {trainer.num_nodes} = {asked}; "
            f"make them equal, with --trainer.strategy ddp.{hint}"
        )
    if launcher.startswith("SLURM") and launched > 1 and not is_slurm_step():
        warn(
            f"SLURM_NTASKS is {launched}, but this process does not seem to have been started by srun; if nothing "
            "follows, start it with srun."
        )


def is_broken_collective(error: BaseException) -> bool:
    """True if the error says that another process left or did not answer, rather than what went wrong here."""
    text = str(error)
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )
