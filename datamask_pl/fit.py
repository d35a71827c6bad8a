"""The `fit` command: LightningCLI over MaskLearner and FeatureDataModule."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from datamask_pl.callbacks.checkpoint import LogitsCheckpoint
from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.callbacks.progress import MaskProgressBar, RunSummary
from datamask_pl.checkpoint_io import list_checkpoints, newest_whole_checkpoint, read_checkpoint
from datamask_pl.datamodule import FeatureDataModule
from datamask_pl.distributed import leave_group
from datamask_pl.errors import CheckpointError, ConfigError, DatamaskError
from datamask_pl.module import MaskLearner

ENV_PREFIX = "DATAMASK"
TRAINER_DEFAULTS = {
    "max_epochs": -1,  # one a block: the learner sets it when the blocks are known
    "logger": {"class_path": "datamask_pl.run_logger.RunLogger"},
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # all ranks read the same batches
}


class SaveConfigAtStart(SaveConfigCallback, Checkpoint):
    """Writes config.yaml once everything has been checked: a run that fails its checks leaves no folder behind.

    A Checkpoint, so that Lightning calls it after MaskExport, which checks the mask's folder.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Does nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the resolved configuration."""
        super().setup(trainer, pl_module, "fit")


class FitCLI(LightningCLI):
    """`fit` alone, with the callbacks that a run cannot do without, whatever `trainer.callbacks` says."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only `fit`; the other commands are functions."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds our options before Lightning's, so that `fit --help` begins with what is particular to a mask."""
        parser.usage = "python cli.py fit [--config FILE.yaml] --data.path PATH [options]"
        parser.description = (
            "Learns a mask from feature parquet files. Options of --data, --model, --mask and --checkpoint are this "
            "project's, those of --trainer are Lightning's."
        )
        parser.add_lightning_class_args(FeatureDataModule, "data")
        parser.add_lightning_class_args(MaskLearner, "model")
        # in the order in which Lightning is to call them
        parser.add_lightning_class_args(MaskExport, "mask")
        parser.add_lightning_class_args(LogitsCheckpoint, "checkpoint")
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Finds the checkpoint to continue from, and continues in its run's folder.

        Here, for next Lightning reads the file itself, and shows a traceback if it is damaged.
        """
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        if not config.ckpt_path:
            return
        logger = config.trainer.logger
        options = logger.init_args if logger and hasattr(logger, "init_args") else None
        if config.ckpt_path == "last":
            if options is None:
                raise CheckpointError(
                    "--ckpt_path last needs trainer.logger to find the run; give the path of a .ckpt file."
                )
            path = find_last_checkpoint(Path(options.save_dir) / options.name, version=options.get("version"))
        else:
            path = Path(config.ckpt_path)
            read_checkpoint(path)
        config.ckpt_path = str(path)
        run = path.resolve().parent.parent
        if options is not None and path.parent.name == "checkpoints":
            options.save_dir, options.name, options.version = str(run.parent.parent), run.parent.name, run.name

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Adds the bar and the summary."""
        config = self.config_init[self.subcommand].trainer
        shown: list[Any] = [RunSummary()]
        if config.enable_progress_bar is not False:
            shown.append(MaskProgressBar())
        config.callbacks = [*_as_list(config.callbacks), *shown]
        try:
            return super().instantiate_trainer(**kwargs)
        except DatamaskError:
            raise
        except ValueError as error:
            raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error

    def before_fit(self) -> None:
        """Hands the resolved configuration to the manifest."""
        parser = self._parser(self.subcommand)
        dumped = parser.dump(self.config[self.subcommand], skip_none=False, format="json")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MaskExport):
                callback.config = json.loads(dumped)

    def after_fit(self) -> None:
        """Parts from the other processes."""
        leave_group()


def run_fit(args: list[str] | None) -> FitCLI:
    """Parses the command line, and fits.

    Args:
        args: arguments after `fit`; None to take them from sys.argv, where `fit` comes first.
    """
    # Of Lightning's messages only the warnings: what a user needs to know, RunSummary says.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning 2.6 calls a part of torch that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # First and last step of a block are always logged.
    warnings.filterwarnings("ignore", message=r"The number of training batches .* is smaller than the logging interval")
    # Whoever calls `main` with arguments has a command line of his own.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    parser_kwargs = {"default_env": True, "env_prefix": ENV_PREFIX, "exit_on_error": False}
    return FitCLI(
        MaskLearner,
        FeatureDataModule,
        args=None if args is None else ["fit", *args],
        seed_everything_default=False,
        auto_configure_optimizers=False,
        save_config_callback=SaveConfigAtStart,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={**parser_kwargs, "fit": dict(parser_kwargs)},
    )


def find_last_checkpoint(runs: Path, *, version: int | str | None = None) -> Path:
    """The newest whole checkpoint of the newest run that has any.

    Args:
        runs: folder of the runs of one name.
        version: the run, instead of the newest.

    Raises:
        CheckpointError: If there is none.
    """
    if version is not None:
        name = version if isinstance(version, str) else f"version_{version}"
        return newest_whole_checkpoint(runs / name / "checkpoints")
    folders = [folder for folder in runs.glob("*/checkpoints") if list_checkpoints(folder)]
    if not folders:
        raise CheckpointError(
            f"--ckpt_path last: no run in {runs} has a checkpoint; start without --ckpt_path, or give the path of a "
            ".ckpt file."
        )
    newest = max(folders, key=lambda folder: list_checkpoints(folder)[-1].stat().st_mtime)
    return newest_whole_checkpoint(newest)


def _as_list(callbacks: Any) -> list[Any]:  # noqa: ANN401
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
