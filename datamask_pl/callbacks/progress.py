"""What a person sees of a run on the terminal: a bar while it runs, a table at its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_only

from datamask_pl.callbacks.checkpoint import run_folder
from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.data.types import BlockSource
from datamask_pl.mask_file import Manifest


class Watched(Protocol):
    """What the bar asks of the learner."""

    latest: dict[str, float]


class MaskProgressBar(TQDMProgressBar):
    """A bar a block, with the objective, its terms, and the share of the mask that still moves."""

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

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:  # noqa: ANN401
        """Names the block."""
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(f"block {trainer.current_epoch + 1} of {trainer.max_epochs}")


class RunSummary(Callback):
    """Prints, at the end, what the mask is worth beside a random one and the one of highest quality."""

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says what is about to be done, and on what."""
        sizes = cast(BlockSource, trainer.datamodule).block_sizes  # type: ignore[attr-defined]
        begun = f", from block {trainer.current_epoch + 1}" if trainer.current_epoch else ""
        print(
            f"{sum(sizes):,} samples in {len(sizes)} block{'s' * (len(sizes) > 1)}{begun}, "
            f"{trainer.world_size} process{'es' * (trainer.world_size > 1)} on {pl_module.device.type}",
            flush=True,
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the table, where the mask is, and what to type next. Collective: the run's folder is."""
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        export = next((callback for callback in trainer.callbacks if isinstance(callback, MaskExport)), None)  # type: ignore[attr-defined]
        if export is None or export.manifest is None:
            print("nothing was left to do: all blocks are finished, or trainer.max_epochs, max_steps or max_time is 0")
            return
        print(describe_run(export.manifest))
        num_done, num_blocks = len(export.manifest.blocks), export.manifest.num_blocks
        whole = f"{num_blocks} part{'s' * (num_blocks > 1)}"
        parts = f"{num_done} of {num_blocks} blocks" if num_done < num_blocks else whole
        print(f"mask    {export.folder} ({parts})")
        if num_done < num_blocks:
            print("more    the same command, without what made it stop, with --ckpt_path last")
        print(f"watch   tensorboard --logdir {folder}")


def describe_run(manifest: Manifest) -> str:
    """The closing table: means over the blocks, weighted by their samples."""
    blocks = list(manifest.blocks.values())
    if not blocks:
        return "no block was finished"
    num_samples = sum(block["num_samples"] for block in blocks)
    num_selected = sum(block["num_selected"] for block in blocks)
    num_dropped = sum(block["num_dropped"] for block in blocks)
    seconds = sum(block["seconds"] for block in blocks)
    names = list(blocks[0]["mask"]["terms"])
    lines = [
        "",
        f"kept {num_selected:,} of {num_samples:,} samples in {len(blocks)} block{'s' * (len(blocks) > 1)}, "
        f"{seconds:.1f} s" + (f"; {num_dropped:,} bad rows left out" if num_dropped else ""),
        _row(["", "f", *names]),
    ]
    for label, key in (("mask", "mask"), ("random", "random"), ("top quality", "top_quality")):
        f = _weighted_mean((block[key]["f"], block["num_samples"]) for block in blocks)
        terms = [
            _weighted_mean((block[key]["terms"][name], block["num_samples"]) for block in blocks) for name in names
        ]
        lines.append(_row([label, f"{f:.6g}", *(f"{value:.6g}" for value in terms)]))
    return "\n".join(lines)


def _weighted_mean(pairs: Iterable[tuple[float, int]]) -> float:
    values = list(pairs)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _row(cells: list[str]) -> str:
    return f"{cells[0]:<12}" + "".join(f"{cell:>{max(14, len(cell) + 2)}}" for cell in cells[1:])
