"""The `fit` command: LightningCLI over MaskLearner and FeatureDataModule."""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback

from datamask_pl.callbacks.checkpoint import LogitsCheckpoint, run_folder
from datamask_pl.callbacks.figures import RunFigures
from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.callbacks.preemption import Preemption
from datamask_pl.callbacks.progress import MaskProgressBar, RunSummary
from datamask_pl.compat import launched_processes, option_names
from datamask_pl.data.module import FeatureDataModule
from datamask_pl.distributed.collectives import drop_group, leave_group, raise_on_all_ranks
from datamask_pl.distributed.launch import (
    LaunchOptions,
    check_launch,
    choose_accelerator,
    is_broken_collective,
    register_strategy,
    slurm_plugins,
)
from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import World, set_world, world
from datamask_pl.errors import (
    CheckpointError,
    ConfigError,
    DatamaskError,
    PreemptedError,
    RankFailedError,
    launched_rank,
    program,
)
from datamask_pl.io.atomic import atomic_path, check_replaceable, has_mark
from datamask_pl.io.checkpoints import parse_name, read_checkpoint
from datamask_pl.io.paths import AnyPath, redact
from datamask_pl.learner.module import MaskLearner
from datamask_pl.learner.trainer_checks import check_trainer, is_over

ENV_PREFIX = "DATAMASK"
TRAINER_DEFAULTS = {
    "max_epochs": -1,  # one a block: the learner sets it when the blocks are known
    "logger": {"class_path": "datamask_pl.callbacks.logger.RunLogger"},
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # all ranks read the same batches
}


CONFIG_MARK = "# written by datamask_pl fit\n"


class SaveConfigAtStart(SaveConfigCallback, Checkpoint):
    """Writes config.yaml once everything has been checked: a run that fails its checks leaves no folder behind.

    A Checkpoint, so that Lightning calls it after MaskExport, which checks the mask's folder.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a folder with a config.yaml of someone else; writes nothing yet. Collective.

        Raises:
            ConfigError: If there is one.
        """
        path = run_folder(trainer) / self.config_filename
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                check_replaceable("--run_name", path, _is_config_of_run)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the resolved configuration, once where several groups of ranks share the folder. Collective."""
        if world().group > 0:
            return
        path = run_folder(trainer) / self.config_filename
        with raise_on_all_ranks():
            if trainer.is_global_zero:
                text = CONFIG_MARK + self.parser.dump(self.config, skip_none=False)
                with atomic_path(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")


class FitCLI(LightningCLI):
    """Learns a mask from feature parquet files.

    Options of data, model, mask and checkpoint are this project's, those of trainer are Lightning's. Each may also be
    set in a YAML file (--config) or in a variable: --model.num_steps is DATAMASK_FIT__MODEL__NUM_STEPS.
    """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only `fit`; the other commands are functions."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds this project's options before Lightning's: `fit --help` keeps this order."""
        parser.add_argument(
            "--run_name",
            type=str | None,
            help="name of the run's folder; the same command continues a run of this name. Default: version_N.",
        )
        parser.add_lightning_class_args(FeatureDataModule, "data")
        parser.add_lightning_class_args(MaskLearner, "model")
        # in the order in which Lightning is to call them
        parser.add_lightning_class_args(MaskExport, "mask")
        parser.add_lightning_class_args(Preemption, "preemption")
        parser.add_lightning_class_args(LogitsCheckpoint, "checkpoint")
        parser.add_class_arguments(LaunchOptions, "launch")
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in TRAINER_DEFAULTS.items()})

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Checks the variables, and finds the run to continue, if one is named by --run_name or --ckpt_path."""
        try:
            super().parse_arguments(parser, args)
        except ArgumentError:
            _check_variables(parser, self._parser("fit"))  # what is missing may stand under a wrong name
            raise
        _check_variables(parser, self._parser("fit"))
        config = self.config[self.config.subcommand]
        for group in ("data", "model", "mask", "preemption", "checkpoint", "launch", "trainer"):
            if not isinstance(config[group], Namespace):
                raise ConfigError(f"{group} must be options by name, such as {{name: value}}, got {config[group]!r}.")
        _check_run_is_local(config)
        self.resume_from: Path | None = None
        if not config.run_name and not config.ckpt_path:
            return
        logger = config.trainer.logger
        options = logger.init_args if logger and hasattr(logger, "init_args") else None
        if options is None or "save_dir" not in options:
            raise ConfigError(
                "--run_name and --ckpt_path need a trainer.logger with a folder, such as the default one."
            )
        if config.run_name and config.ckpt_path:
            raise ConfigError("--run_name continues by itself; give either --run_name or --ckpt_path.")
        if config.run_name:
            if Path(config.run_name).name != config.run_name or config.run_name == "..":
                raise ConfigError(
                    f"--run_name must be the name of a folder, got {config.run_name!r}; trainer.logger has its path."
                )
            _set_run(options, config.run_name)
            return
        runs = Path(options.save_dir) / options.name
        path = find_last_run(runs, options.get("version")) if config.ckpt_path == "last" else Path(config.ckpt_path)
        if os.path.isdir(path):  # unlike Path's, False for a name that is too long
            run = path.resolve()
        else:
            read_checkpoint(path)
            run, self.resume_from = path.resolve().parent.parent, path.resolve()
            if path.resolve().parent.name != "checkpoints" or parse_name(path) is None:
                raise CheckpointError(
                    f"{path} is not in a run's checkpoints folder under the name it was written with; put it back, or "
                    "pass the run's folder."
                )
        options.save_dir, options.name = str(run.parent.parent), run.parent.name
        _set_run(options, run.name)
        # the learner resumes block by block; Lightning must not load anything
        config.ckpt_path = None

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Adds the bar, the summary and our strategy, and compares what was launched with what was asked for."""
        config = self.config_init[self.subcommand].trainer
        shown: list[Any] = [RunSummary()]
        if config.enable_progress_bar is not False:
            shown.append(MaskProgressBar())
        config.callbacks = [*_as_list(config.callbacks), *shown]
        launch: LaunchOptions = self.config_init[self.subcommand].launch
        register_strategy(launch)
        config.accelerator = choose_accelerator(config.accelerator)
        config.plugins = [*_as_list(config.plugins), *slurm_plugins(config.plugins)]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except DatamaskError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error
        check_launch(trainer)
        return trainer

    def before_fit(self) -> None:
        """Hands on the resolved configuration and the checkpoint to continue from, and adds the figures.

        They come last, for they may wait: by then a block's mask and checkpoint are on disk.
        """
        check_trainer(self.trainer)  # Lightning refuses some of these options later, in other words
        self.trainer.callbacks.append(RunFigures())  # type: ignore[attr-defined]
        parser = self._parser(self.subcommand)
        dumped = parser.dump(self.config[self.subcommand], skip_none=False, format="json")
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MaskExport):
                callback.config = json.loads(dumped)
            if isinstance(callback, LogitsCheckpoint):
                callback.resume_from = self.resume_from

    def fit(self, model: MaskLearner, **options: Any) -> None:  # noqa: ANN401
        """Fits, and says in words why a rank failed.

        Raises:
            RankFailedError: If another rank ended, so that this one cannot go on.
        """
        strategy = self.trainer.strategy
        try:
            self.trainer.fit(model, **options)
            if isinstance(strategy, BlockGroupStrategy) and strategy.lost:
                raise RankFailedError(
                    f"{strategy.lost}; its blocks are not done. Rerun the same command to solve them."
                )
            leave_group()
        except Exception as error:
            failure = self._explain(error)
            self._end_children(patience_s=3.0)
            if failure is error:
                raise
            raise failure from error
        finally:
            set_world(World())
        self._end_children(patience_s=self._launch.timeout_s)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        preemptions = [callback for callback in callbacks if isinstance(callback, Preemption)]
        if any(callback.is_interrupted for callback in preemptions) and launched_rank() == 0:
            raise KeyboardInterrupt
        if any(callback.is_preempted for callback in preemptions):
            raise PreemptedError(
                "a signal ended the run, and the current block is saved. Rerun the same command, with --run_name or "
                "--ckpt_path last, to continue."
            )
        source = self.datamodule
        is_unfinished = source.schedule and (model.result is None or source.next_block is not None)
        if is_unfinished and is_over(self.trainer):
            raise PreemptedError(
                "trainer.max_time ended the run before its last block was finished; what was reached is saved. Rerun "
                "the same command, with --run_name or --ckpt_path last, to continue."
            )

    def _explain(self, error: Exception) -> Exception:
        """The error itself, once the others can read of it; or, if another rank broke a collective, which and why."""
        strategy = self.trainer.strategy
        board = strategy.board if isinstance(strategy, BlockGroupStrategy) else None
        if board is None or isinstance(error, RankFailedError):
            return error
        if not is_broken_collective(error):
            board.post(f"{type(error).__name__}: {' '.join(str(error).split())}")
            drop_group()
            board.leave()
            return error
        reason = board.find() or "a rank did not answer"
        drop_group()
        board.leave()
        if reason.endswith("did not answer"):
            reason += f" within launch.timeout_s, {self._launch.timeout_s:g} s"
        return RankFailedError(f"{reason}; this rank cannot continue without it.")

    @property
    def _launch(self) -> LaunchOptions:
        options: LaunchOptions = self.config_init[self.subcommand].launch
        return options

    def _end_children(self, *, patience_s: float) -> None:
        """Waits for the processes that Lightning started, and kills what does not end: nobody else would."""
        deadline = time.monotonic() + patience_s
        for process in launched_processes(self.trainer):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


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
    parser_kwargs = {"default_env": True, "env_prefix": ENV_PREFIX, "exit_on_error": False, "allow_abbrev": False}
    return FitCLI(
        MaskLearner,
        FeatureDataModule,
        args=None if args is None else ["fit", *args],
        seed_everything_default=False,
        auto_configure_optimizers=False,
        save_config_callback=SaveConfigAtStart,
        parser_kwargs={**parser_kwargs, "fit": dict(parser_kwargs)},
    )


def find_last_run(runs: Path, version: int | str | None = None) -> Path:
    """The folder of the newest run that has begun a block.

    Args:
        runs: folder of the runs of one name.
        version: the run, instead of the newest.

    Raises:
        CheckpointError: If there is none.
    """
    name = "*" if version is None else glob.escape(version) if isinstance(version, str) else f"version_{version}"
    traces = [trace for run in runs.glob(name) for trace in _traces(run)]
    if not traces:
        raise CheckpointError(
            f"--ckpt_path last: no run in {runs} has a checkpoint; start without --ckpt_path, or pass the path of a "
            ".ckpt file."
        )
    return max(traces, key=lambda path: path.stat().st_mtime).parent.parent


def _is_config_of_run(path: AnyPath) -> bool:
    """Whether a config.yaml was written by a run; before they had a mark, only a run's folder says so."""
    return has_mark(path, CONFIG_MARK) or bool(_traces(Path(str(path)).parent))


def _traces(run: Path) -> list[Path]:
    """What a run has written of its blocks."""
    return [*run.glob("checkpoints/*.ckpt"), *run.glob("mask/part-*.parquet")]


def _check_variables(main: LightningArgumentParser, fit: LightningArgumentParser) -> None:
    """Refuses variables of the environment that are meant for us and would be ignored.

    That is those that begin as our options do, and those whose name is near to that of an option. Others that begin
    with our prefix may be a user's own.

    Raises:
        ConfigError: If there is one.
    """
    options = [_variable(fit, name) for name in option_names(fit)]
    known = {*options, *(_variable(main, name) for name in option_names(main))}
    for name in sorted(name for name in os.environ if name.upper().startswith(f"{ENV_PREFIX}_")):
        if name in known:
            continue
        nearest = difflib.get_close_matches(name.upper(), options, n=1, cutoff=0.85)
        if nearest or name.upper().startswith(f"{ENV_PREFIX}_FIT_"):
            hint = f"the nearest is {nearest[0]}" if nearest else f"{program()} fit --help lists them"
            raise ConfigError(
                f"the environment has {name}, which is not an option of fit; {hint}; correct its name or unset it."
            )


def _variable(parser: LightningArgumentParser, dest: str) -> str:
    """The variable of an option, as jsonargparse names it."""
    return f"{parser.env_prefix}_{dest}".replace(".", "__").upper()


def _check_run_is_local(config: Any) -> None:  # noqa: ANN401
    """Refuses a run's folder in an object store: checkpoints and events are written on this machine.

    Raises:
        ConfigError: If an option names one.
    """
    logger = config.trainer.logger
    options = logger.init_args if logger and hasattr(logger, "init_args") else {}
    if options.get("save_dir") is not None and config.trainer.default_root_dir is not None:
        raise ConfigError(
            "trainer.default_root_dir has no effect, for the run goes where the logger writes; set "
            "trainer.logger.init_args.save_dir instead, or trainer.logger: false."
        )
    given = {
        "trainer.logger.save_dir": options.get("save_dir"),
        "trainer.default_root_dir": config.trainer.default_root_dir,
        "--ckpt_path": config.ckpt_path,
    }
    for option, value in given.items():
        if value is not None and "://" in str(value):
            raise ConfigError(
                f"{option} must be a path on this machine, got {redact(str(value))!r}: checkpoints and TensorBoard "
                "events cannot be in an object store, the mask can; give mask.output for it."
            )


def _set_run(options: Any, name: str) -> None:  # noqa: ANN401
    """Sets the run's folder in the options of the logger; one that is not ours takes a name of digits for a number."""
    options["run_name" if "run_name" in options else "version"] = name


def _as_list(callbacks: Any) -> list[Any]:  # noqa: ANN401
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
