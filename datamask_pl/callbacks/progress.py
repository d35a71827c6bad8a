"""What a person sees of a run on the terminal: a bar while it runs, a table at its end."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from datamask_pl.callbacks.checkpoint import run_folder
from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.compat import close_bar
from datamask_pl.data.types import source_of
from datamask_pl.distributed.strategy import BlockGroupStrategy
from datamask_pl.distributed.world import world
from datamask_pl.errors import program
from datamask_pl.io.paths import AnyPath, redact
from datamask_pl.mask.limits import DEFAULT_ID_COLUMN
from datamask_pl.mask.manifest import Manifest
from datamask_pl.mask.summary import COMPARED, describe_budgets, format_table, summarize

# Seconds between two drawings of the bar.
DRAW_EVERY_S = 0.1
PIP_REPORT = "pip install 'datamask_pl[report]' && "


class Watched(Protocol):
    """What the bar asks of the learner."""

    latest: dict[str, float]


class MaskProgressBar(TQDMProgressBar):
    """A bar a block, with the objective, its terms, and the share of the mask that still moves.

    It is drawn ten times a second at most: drawing takes longer than a small step.
    """

    _drawn_s = -math.inf

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        latest = cast(Watched, pl_module).latest
        shown: dict[str, int | str | float | dict[str, float]] = {}
        for name, value in latest.items():
            kind, _, label = name.partition("/")
            if kind == "objective" and "/" not in label and label != "f_best":
                shown[label] = f"{value:.5g}"
        if "policy/churn" in latest:
            shown["moving"] = f"{latest['policy/churn']:.2%}"
        return shown

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Shows the blocks of the first group of ranks alone: bars of several would write over each other."""
        super().setup(trainer, pl_module, stage)
        if world().group > 0:
            self.disable()

    def init_train_tqdm(self) -> Tqdm:
        """A bar on stderr: whoever reads stdout may end before the run does."""
        return Tqdm(
            desc=self.train_description,
            position=2 * self.process_position,
            disable=self.is_disabled,
            leave=True,
            dynamic_ncols=True,
            file=sys.stderr,
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Draws the bar, unless it has just been drawn and is not full."""
        now = time.monotonic()
        if now - self._drawn_s < DRAW_EVERY_S and batch_idx + 1 < self.total_train_batches:
            return
        self._drawn_s = now
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:  # noqa: ANN401
        """Names the block."""
        super().on_train_epoch_start(trainer)
        source = source_of(trainer)
        if source.next_block is not None:
            self.train_progress_bar.set_description(f"block {source.next_block + 1} of {source.num_blocks}")

    def on_exception(self, *_: Any) -> None:  # noqa: ANN401
        """Ends the line of the bar, so that the error's message begins a new one."""
        close_bar(self)


class RunSummary(Callback):
    """Prints, at the end, the values of the mask, of a random one and of the one of highest quality."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says what is about to be done, and on what."""
        here = world()
        if here.rank > 0:
            return
        source, export = source_of(trainer), _export(trainer)
        sizes = source.block_sizes
        before = 0 if export is None else export.num_finished_before
        words = [f"{sum(sizes):,} samples in {_count(len(sizes), 'block')}"]
        if here.num_groups > 1:
            words = [f"{_count(source.num_blocks, 'block')} for {here.num_groups} groups of {trainer.world_size}"]
        elif len(sizes) + before < source.num_blocks:
            words.append(f"of {source.num_blocks} in all")
        if before:
            words.append(f"after {before} finished before")
        processes = here.size if here.num_groups > 1 else trainer.world_size
        print(f"{' '.join(words)}, {_count(processes, 'process')} on {pl_module.device.type}", flush=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table, where the mask is, and what to type next. Collective: the run's folder is."""
        folder, export = run_folder(trainer), _export(trainer)
        if isinstance(trainer.strategy, BlockGroupStrategy):
            trainer.strategy.finish()
        if world().rank > 0 or not trainer.is_global_zero or export is None or export.manifest is None:
            return
        if world().num_groups == 1 and not source_of(trainer).schedule:
            print("nothing was left to do")
        manifest = (None if export.folder is None else Manifest.read(export.folder)) or export.manifest
        print(describe_run(manifest))
        num_done, num_blocks = len(manifest.blocks), manifest.num_blocks
        parts = _count(num_blocks, "part") if num_done == num_blocks else f"{num_done} of {num_blocks} parts so far"
        print(f"mask    {export.folder} ({parts})")
        if num_done < num_blocks:
            print(f"more    rerun the same command with --run_name {shlex.quote(folder.name)} to continue")
        print(f"watch   tensorboard --logdir {shlex.quote(str(folder))}")
        if num_done == num_blocks:
            print(f"next    {_apply_command(source_of(trainer), export.folder, folder / 'filtered')}")
        if num_done == num_blocks and export.folder == folder / "mask":
            shown = shlex.quote(str(folder))
            print(f"compare {program()} compare --run {shown}")
            print(f"report  {report_command(shown)}")


def report_command(run: str) -> str:
    """The command that makes the report of a run, after the installation of packages that it needs and lacks."""
    is_ready = find_spec("matplotlib") is not None and find_spec("jinja2") is not None
    return f"{'' if is_ready else PIP_REPORT}{program()} report --run {run}"


def _apply_command(source: Any, mask: AnyPath | None, output: Path) -> str:  # noqa: ANN401
    """The command that makes the filtered data set; the user's own data module may not say where its files are."""
    path = getattr(source, "path", None)
    given = "SHARDS" if path is None else json.dumps([redact(item) for item in path])
    given = redact(path) if isinstance(path, str) else given
    words = [*program().split(), "apply", "--mask", str(mask), "--source", given, "--output", str(output)]
    id_column = getattr(getattr(source, "columns", None), "id_column", DEFAULT_ID_COLUMN)
    if id_column != DEFAULT_ID_COLUMN:
        words += ["--id_column", id_column]
    return shlex.join(words)


def _count(number: int, noun: str) -> str:
    plural = noun if number == 1 else noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {plural}"


def _export(trainer: Trainer) -> MaskExport | None:
    return next((callback for callback in trainer.callbacks if isinstance(callback, MaskExport)), None)  # type: ignore[attr-defined]


def describe_run(manifest: Manifest) -> str:
    """The closing table: means over the blocks, weighted by their samples."""
    if not manifest.blocks:
        return "no block was finished"
    run = summarize(manifest.blocks)
    names = list(run.values["mask"].terms)
    dropped = f"; {_count(run.num_dropped, 'bad row')} dropped" if run.num_dropped else ""
    head = (
        f"kept {run.num_selected:,} of {run.num_samples:,} samples in {_count(run.num_blocks, 'block')}, "
        f"{run.seconds:.1f} s{dropped}"
    )
    rows = [["", "f", *names]]
    for key, label in COMPARED.items():
        values = run.values[key]
        rows.append([label, f"{values.f:.6g}", *(f"{values.terms[name]:.6g}" for name in names)])
    return "\n".join(["", head, *format_table(rows), *describe_budgets(manifest.blocks.values())])
