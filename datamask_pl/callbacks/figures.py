"""RunFigures: pictures, histograms and hyper-parameters for TensorBoard, beside the scalars that the learner logs.

Shapes: N samples of a block.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from datamask_pl.callbacks.mask_export import MaskExport
from datamask_pl.data.types import BlockResult, Learner, PartialBatch, learner_of, source_of
from datamask_pl.distributed.world import world
from datamask_pl.errors import warn
from datamask_pl.evidence.histograms import finite_range, histogram
from datamask_pl.learner.policy import MaskPolicy
from datamask_pl.mask.summary import summarize
from datamask_pl.objectives.joint import JointObjective

NUM_BINS = 64
# Of more blocks than this, so many, evenly spread, are shown.
MAX_BLOCKS = 20


class ShownLearner(Learner, Protocol):
    """A learner whose policy and objective the figures show."""

    policy: MaskPolicy
    objective: JointObjective


class RunFigures(Checkpoint):
    """Shows in TensorBoard what a mask looks like: after a block's first step, and at its end.

    Histograms of logits and inclusion probabilities; pictures of the same, and of the quality of kept samples and all,
    where matplotlib is installed; a layout that puts together what belongs together; and the options of the run beside
    its results. On rank 0 of each group. Nothing that goes wrong here ends a run: it is said once, and left out.

    A Checkpoint, so that Lightning calls it after the learner has rounded the block.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._has_complained = False

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: PartialBatch,
        batch_idx: int,
    ) -> None:
        """Shows the logits after the first step of a block."""
        if batch.step == 0:
            self._guard(trainer, lambda writer: self._show_start(writer, trainer, cast(ShownLearner, pl_module), batch))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shows the mask of a block that is done."""
        result = learner_of(pl_module).result
        if result is not None and _is_shown(trainer, result.block.index):
            num_steps = learner_of(pl_module).num_steps
            self._guard(trainer, lambda writer: self._show_result(writer, result, num_steps))
            # matplotlib leaves cycles that hold the frames above, and with them the block, until they are looked for
            gc.collect()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the options of the run beside what its mask is worth."""
        export = next((item for item in trainer.callbacks if isinstance(item, MaskExport)), None)  # type: ignore[attr-defined]
        manifest = None if export is None else export.manifest
        if not self._has_begun or manifest is None or not manifest.blocks or world().group > 0:
            return
        mask = summarize(manifest.blocks).values["mask"]
        results = {"result/f": mask.f, **{f"result/{name}": value for name, value in mask.terms.items()}}
        settings = learner_of(pl_module).settings()
        for logger in _tensorboards(trainer):
            # with numbers, or TensorBoard would list no run; into the run's own events, not a folder of their own
            self._guard(trainer, lambda _, logger=logger: logger.log_hyperparams(settings, results))  # type: ignore[misc]

    def _show_start(self, writer: Any, trainer: Trainer, learner: ShownLearner, batch: PartialBatch) -> None:  # noqa: ANN401
        if not self._has_begun:
            self._has_begun = True
            writer.add_custom_scalars(layout([term.name for term in learner.objective.terms]))
            if find_spec("matplotlib") is None:
                warn("TensorBoard gets no pictures without matplotlib; pip install 'datamask_pl[report]'.")
        if _is_shown(trainer, batch.block.index):
            logits_N = learner.policy.logits.detach()[: batch.block.num_samples]
            add_histogram(writer, "policy/logits", logits_N, step=batch.block.index * learner.num_steps + 1)

    def _show_result(self, writer: Any, result: BlockResult, num_steps: int) -> None:  # noqa: ANN401
        step = result.block.index * num_steps + result.num_steps
        add_histogram(writer, "policy/logits", result.logits_N, step=step)
        add_histogram(writer, "policy/inclusion_probability", result.probability_N, step=step, bounds=(0.0, 1.0))
        if find_spec("matplotlib") is None:
            return
        from datamask_pl.evidence import figures  # here, for it needs matplotlib

        for name, draw in _draws(result).items():
            writer.add_image(f"figures/{name}", figures.to_image(draw), step, dataformats="HWC")

    def _guard(self, trainer: Trainer, show: Callable[[Any], object]) -> None:
        """Calls `show` with the writer of each TensorBoard of the run, on rank 0; says of what goes wrong, once."""
        if not trainer.is_global_zero:
            return
        for logger in _tensorboards(trainer):
            try:
                show(logger.experiment)
            except Exception as error:
                if not self._has_complained:
                    warn(f"some figures for TensorBoard failed ({type(error).__name__}: {error}).")
                self._has_complained = True


def add_histogram(
    writer: Any,  # noqa: ANN401
    name: str,
    values_N: Tensor,
    *,
    step: int,
    bounds: tuple[float, float] | None = None,
) -> None:
    """Adds a histogram that was counted on the device of its values; those that are not finite are left out.

    Args:
        writer: SummaryWriter.
        name: what TensorBoard calls it.
        values_N: float (N,).
        step: at which they were taken.
        bounds: where the first bin begins and the last ends; of the values, if left out.
    """
    finite_N = values_N[values_N.isfinite()]
    if not finite_N.numel():
        return
    low, high = finite_range(finite_N) if bounds is None else bounds
    counted = histogram(finite_N, num_bins=NUM_BINS, low=low, high=high)
    finite64_N = finite_N.double()
    writer.add_histogram_raw(
        name,
        min=float(finite64_N.min()),
        max=float(finite64_N.max()),
        num=finite_N.numel(),
        sum=float(finite64_N.sum()),
        sum_squares=float(finite64_N.square().sum()),
        bucket_limits=counted.edges[1:].tolist(),
        bucket_counts=counted.count_B.tolist(),
        global_step=step,
    )


def layout(terms: list[str]) -> dict[str, dict[str, list[Any]]]:
    """What TensorBoard's custom scalars show, by category and chart.

    Example:
        >>> layout(["quality"])["mask"]["quality"]
        ['Multiline', ['objective/quality$']]
    """
    mask = {"f": ["objective/f$", "objective/f_best$"], **{name: [f"objective/{name}$"] for name in terms}}
    policy = {"what still moves": ["policy/churn$", "policy/undecided$"], "learning rate": ["policy/lr$"]}
    charts = {"mask": mask, "policy": policy, "speed": {"samples per second": ["speed/samples_per_second$"]}}
    return {
        category: {title: ["Multiline", tags] for title, tags in shown.items()} for category, shown in charts.items()
    }


def _draws(result: BlockResult) -> dict[str, Callable[[], Any]]:
    """The pictures of a block by name."""
    from datamask_pl.evidence import figures

    quality_N = result.block.quality_N.cpu()
    low, high = finite_range(quality_N)
    everything, kept = (
        histogram(values_N, num_bins=NUM_BINS, low=low, high=high) for values_N in (quality_N, quality_N[result.mask_N])
    )
    probability = histogram(result.probability_N, num_bins=NUM_BINS, low=0.0, high=1.0)
    return {
        "quality": lambda: figures.draw_quality(everything, kept),
        "inclusion_probability": lambda: figures.draw_probability(probability),
    }


def _is_shown(trainer: Trainer, block: int) -> bool:
    num_blocks = source_of(trainer).num_blocks
    return block % -(-num_blocks // MAX_BLOCKS) == 0


def _tensorboards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
