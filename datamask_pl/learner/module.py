"""MaskLearner: wires policy, objective and estimator into Lightning. No formulas, no files.

Shapes: N samples of the block, M samples of a step.
"""

from __future__ import annotations

import time
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from datamask_pl.data.loader import DEFAULT_PARTIAL
from datamask_pl.data.types import BlockResult, BlockSource, PartialBatch
from datamask_pl.distributed.collectives import RankGroup, raise_on_all_ranks
from datamask_pl.errors import CheckpointError, ConfigError
from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.schedule import linear_rate
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.io.checkpoints import STATE_KEY
from datamask_pl.learner import options
from datamask_pl.learner.ground import check_budgets, make_ground, part_of
from datamask_pl.learner.metrics import StepMetrics
from datamask_pl.learner.policy import LogitAscent, MaskPolicy
from datamask_pl.learner.solve import CALIBRATION, COMPARISON, calibrate_terms, solve
from datamask_pl.learner.state import BlockState, read_dump
from datamask_pl.learner.step import Update, take_step
from datamask_pl.learner.trainer_checks import check_trainer
from datamask_pl.objectives import Objective
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective, WeightedObjective

STATE_VERSION = 1


class MaskLearner(LightningModule):
    """Learns which samples of each block to keep.

    Maximises quality_weight * quality + (1 - quality_weight) * diversity over the subsets of
    round(select_ratio * n) samples of every block, by gradient ascent on one logit per sample. With data.cost_column,
    over the subsets that cost at most select_ratio of the block's cost.

    Args:
        select_ratio: share of each block to keep, above 0 and at most 1.
        group_budget: with data.group_column, how the budget is divided. `proportional` keeps select_ratio of every
            group; ratios by name, such as {code: 0.3, web: 0.05}, from 0 to 1, keep another share of the groups that
            they name; `free` counts what is kept of each group and does not limit it.
        quality_weight: from 0, diversity alone, to 1, quality alone.
        diversity: `facility_location` (every sample of the block has a similar one in the mask), `pairwise` (the mask's
            samples are not similar to each other), `disf` (no direction of the features dominates), an objective of
            your own by class path, or a list of weighted ones.
        calibrate: divide quality and each diversity term by its standard deviation over random masks, so that
            quality_weight means the same on any data. Without it the terms are raw, as in papers.
        estimator: `multilinear` takes exact gradients and needs terms with an expectation, as all built-in ones have.
            `group_relative` (the paper's) and `leave_one_out` (unbiased) draw masks, and work with any objective.
        num_rollouts: masks drawn per step, over all ranks, at least 2; default 16 with a control variate, 128 without.
            Not used by `multilinear`.
        control_variate: for the estimators that draw masks: the part of the reward that is linear in the mask is
            differentiated in closed form; only the remainder is estimated from rollouts, and shrunk by its noise
            (James-Stein). Both rollout estimators then have the same direction. `false` is the paper's estimator. Used
            where every term has an expectation; not used by `multilinear`.
        num_steps: steps per block. Default: 1000 for rollouts without a control variate; else 20, or 8 where `polish`
            is quick, which it is for pairwise similarity and plain DiSF. Set more for a data.partial below 1.
        max_lr: learning rate of a block's first step. Default: 10 for rollouts without a control variate, else 4.
        min_lr: learning rate of its last step, linear between. Default: 1 for rollouts without a control variate, else
            1.5, or max_lr if that is less.
        init: `same` starts with equal logits, `quality` with probabilities proportional to scaled quality; there,
            negative scores are shifted to start at 0, and none counts less than 1/1000 of the mean.
        patience: a block ends early once the mask has changed by less than `min_churn` for this many steps in a row.
            Default: never.
        min_churn: share of the mask that counts as a change, for `patience`; with 0, any change does.
        polish: after the last step, swap samples near the threshold for as long as the objective rises.

    Raises:
        ConfigError: If a value is not allowed, or the estimator cannot train the objective.
    """

    def __init__(
        self,
        *,
        select_ratio: float = 0.1,
        group_budget: Literal["proportional", "free"] | dict[str, float] = "proportional",
        quality_weight: float = 0.5,
        diversity: Literal["facility_location", "pairwise", "disf"]
        | Objective
        | list[WeightedObjective] = "facility_location",
        calibrate: bool = True,
        estimator: Literal["multilinear", "leave_one_out", "group_relative"] = "multilinear",
        num_rollouts: int | None = None,
        control_variate: bool = True,
        num_steps: int | None = None,
        max_lr: float | None = None,
        min_lr: float | None = None,
        init: Literal["same", "quality"] = "same",
        patience: int | None = None,
        min_churn: float = 0.001,
        polish: bool = True,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        options.check(patience is None or patience >= 1, "patience must be at least 1", patience)
        options.check(0 <= min_churn <= 1, "min_churn must be from 0 to 1", min_churn)
        self.spec = BudgetSpec(select_ratio, group_budget)
        self.objective = JointObjective(quality_weight=quality_weight, diversity=diversity)
        self.method = options.make_method(
            self.objective,
            estimator=estimator,
            num_rollouts=num_rollouts,
            control_variate=control_variate,
            num_steps=num_steps,
            max_lr=max_lr,
            min_lr=min_lr,
            init=init,
            calibrate=calibrate,
            polish=polish,
        )
        self.num_steps = self.method.num_steps
        self._has_default_steps = num_steps is None
        self.patience, self.min_churn = patience, min_churn
        self.metrics = StepMetrics()
        self.latest: dict[str, float] = {}
        self.result: BlockResult | None = None
        self._state: BlockState | None = None
        self._restored: dict[str, Any] | None = None

    @property
    def block_index(self) -> int:
        """Index of the block that was begun last."""
        return self._current.block.index

    @property
    def is_block_done(self) -> bool:
        """True once the current block has had all its steps or has converged; False if the run stopped within it."""
        num_steps = min(self.num_steps, int(self.trainer.num_training_batches))
        return self._current.has_converged or self._current.num_steps >= num_steps

    # ---- Lightning's hooks, in the order in which they are called

    def setup(self, stage: str) -> None:
        """Checks every block's budget, and makes room for the logits of the longest.

        Raises:
            BudgetError: If the ratio keeps nothing of a block, or its budget cannot be met.
            ConfigError: If the trainer has no data module, or would compute in half precision or for one step alone, or
                groups are named that are not there.
        """
        source = self._source
        source.prepare()
        groups = source.find_groups() if self.spec.named_ratios else set()
        default_partial = 1.0 if self.method.is_controlled else DEFAULT_PARTIAL
        with raise_on_all_ranks():
            check_trainer(self.trainer)
            step_share = default_partial if source.partial is None else source.partial
            drawn_share = 1.0 if self.method.is_whole_block else step_share
            check_budgets(self.spec, source, groups=groups, step_share=drawn_share)
        if self._has_default_steps and self.method.is_controlled and not self.method.is_whole_block:
            options.warn_of_few_steps(self.num_steps, step_share)
        source.set_steps(
            num_steps=self.num_steps, is_whole_block=self.method.is_whole_block, default_partial=default_partial
        )
        on_cpu = self.trainer.strategy.root_device.type == "cpu"
        source.set_reading(is_ahead=not (on_cpu and self.objective.holds_lists))
        sizes = source.block_sizes
        self.policy = MaskPolicy(max(sizes, default=1))
        self.ranks = RankGroup.current()
        max_epochs = self.trainer.max_epochs
        if max_epochs is None or not 0 <= max_epochs < len(sizes):
            self.trainer.fit_loop.max_epochs = len(sizes)

    def configure_optimizers(self) -> LogitAscent:
        """The one optimizer, of our own."""
        return LogitAscent(self.policy.logits)

    def on_train_epoch_start(self) -> None:
        """Lets go of the block before, which the callbacks have written by now: memory is two blocks."""
        self._state, self.result = None, None

    @torch.no_grad()
    def training_step(self, batch: PartialBatch, batch_idx: int) -> None:
        """One step of ascent on the logits of the batch."""
        state = self._begin_block(batch) if self._is_new(batch) else self._current
        if state.has_converged:
            return
        started_s = time.perf_counter()
        update = self._update(batch, state)
        rate = linear_rate(batch.step, self.num_steps, max_lr=self.method.max_lr, min_lr=self.method.min_lr)
        optimizer = self.optimizers()
        cast(LogitAscent, optimizer.optimizer).stage(batch.rows_M, rate * update.direction_M, rate=rate)  # type: ignore[union-attr]
        optimizer.step()  # type: ignore[union-attr]
        state.record_step(update)
        self.metrics.update(update.metrics)
        self.metrics.update_speed(update.direction_M.numel(), time.perf_counter() - started_s)
        if self.patience is not None or self.is_log_due(batch.step):
            self._record_churn(state)
        if state.has_converged or self.is_log_due(batch.step):
            self._log_step(rate, step=batch.block.index * self.num_steps + batch.step + 1)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        """Rounds the logits of the block to its mask; `result` holds it from here on. Collective.

        Lightning calls this also where trainer.max_steps or max_time end the run within a block: there is no result.
        """
        state = self._current
        if not self.is_block_done:
            return
        logits_N = self._logits(state)
        options.check_logits(logits_N, f"block {state.block.index} after its last step")
        self.check_agreement(f"end of block {state.block.index}")
        self.result = solve(
            state,
            logits_N,
            objective=self.objective,
            is_polished=self.method.polish,
            seed=derive_seed(self._source.seed, state.block.index, COMPARISON),
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what the logits and Lightning's own counters do not tell; tensors and plain types only."""
        checkpoint[STATE_KEY] = {
            "version": STATE_VERSION,
            "plan_hash": self._source.plan_hash,
            "seed": self._source.seed,
            "settings": self.settings(),
            "block": None if self._state is None else self._state.dump(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses Lightning's way of resuming, which knows nothing of blocks.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(
            "trainer.fit(ckpt_path=...) cannot continue a mask; fit again with LogitsCheckpoint and the same folder, "
            "and the block that was begun resumes from its newest checkpoint."
        )

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Takes over the logits and the state of the block that begins next.

        Raises:
            CheckpointError: If they are of other data or other settings, or damaged; see `read_dump`.
        """
        source = self._source
        index = source.next_block
        assert index is not None, "no block is left to restore"
        self._restored = read_dump(
            checkpoint,
            made_with={"version": STATE_VERSION, "plan_hash": source.plan_hash, **self.settings()},
            index=index,
            num_samples=source.block_sizes[source.schedule.index(index)],
            num_terms=len(self.objective.terms),
        )
        source.resume_at(index, self._restored["num_steps"])

    def check_agreement(self, when: str) -> None:
        """Compares the logits of all ranks. Collective.

        Raises:
            AgreementError: If they differ; names the ranks.
        """
        self.ranks.check_agreement(self.policy.logits, when)

    def is_log_due(self, step: int) -> bool:
        """True on a block's first and last step, and every `trainer.log_every_n_steps` between."""
        return step in (0, self.num_steps - 1) or (step + 1) % max(1, self._log_every_n_steps) == 0

    # ---- the parts of a step

    @property
    def _log_every_n_steps(self) -> int:
        return int(self.trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set by Lightning's logger connector

    @property
    def _source(self) -> BlockSource:
        source = getattr(self.trainer, "datamodule", None)
        if source is None:
            raise ConfigError(
                "MaskLearner needs a data module: trainer.fit(learner, datamodule=FeatureDataModule(...))."
            )
        return cast(BlockSource, source)

    @property
    def _current(self) -> BlockState:
        assert self._state is not None, "no block has been begun"
        return self._state

    def _is_new(self, batch: PartialBatch) -> bool:
        return self._state is None or self._state.block.index != batch.block.index

    def _logits(self, state: BlockState) -> Tensor:
        return self.policy.logits.detach()[: state.ground.num_samples]

    def _begin_block(self, batch: PartialBatch) -> BlockState:
        started_s = time.perf_counter()
        block, device = batch.block, self.device
        ground = make_ground(block, self.spec, num_slice_rows=batch.num_slice_rows, ranks=self.ranks, device=device)
        restored, self._restored = self._restored, None
        if restored is None:
            self.policy.reset(
                ground.quality_N, ground.num_selected, init=self.method.init, is_independent=self.method.is_whole_block
            )
        else:
            self.policy.logits.data[: block.num_samples] = restored["logits"][: block.num_samples].to(device)
        scales = self._calibrate(batch, ground) if restored is None else restored["scales"]
        mask_N = ground.budget.fill(self.policy.logits.detach()[: block.num_samples])
        state = BlockState(block, ground, scales.to(device), mask_N, started_s=started_s)
        if restored is not None:
            state.restore(restored)
        self._state = state
        if state.has_converged:
            self._source.skip_rest_of_block()
        return state

    def _calibrate(self, batch: PartialBatch, ground: GroundSet) -> Tensor:
        seed = derive_seed(self._source.seed, batch.block.index, CALIBRATION)
        drawn_from = ground if batch.rows_M is None or not self.method.calibrate else self._part_of(ground, batch)
        # a part of dropped samples alone has no masks
        drawn_from = drawn_from if drawn_from.budget.can_keep_any else ground
        return calibrate_terms(self.objective, drawn_from, self.method, seed=seed)

    def _part_of(self, ground: GroundSet, batch: PartialBatch) -> GroundSet:
        """The batch's rows as a ground set of their own, evaluated by each rank for itself."""
        assert batch.rows_M is not None
        return part_of(ground, batch.rows_M, helpers=self.ranks)

    def _update(self, batch: PartialBatch, state: BlockState) -> Update:
        block, step = batch.block.index, batch.step
        seed, is_whole = self._source.seed, batch.rows_M is None
        return take_step(
            self._logits(state) if is_whole else self.policy.logits.detach()[batch.rows_M],
            objective=self.objective,
            ground=state.ground if is_whole else self._part_of(state.ground, batch),
            scales=state.scales,
            method=self.method,
            seed_of=lambda rollout: derive_seed(seed, block, step, rollout),
            ranks=self.ranks,
            step_name=f"block {block}, step {step}",
        )

    def _record_churn(self, state: BlockState) -> None:
        churn = state.record_churn(self._logits(state), patience=self.patience, min_churn=self.min_churn)
        self.metrics.update({"policy/churn": torch.tensor(churn, dtype=torch.float64)})
        if state.has_converged:
            self._source.skip_rest_of_block()

    def _log_step(self, rate: float, *, step: int) -> None:
        self.latest = {**self.metrics.compute(), "policy/lr": rate}
        self.metrics.reset()
        if self.latest.get("policy/groups_without_spread") and not self.method.is_controlled:
            options.warn_of_equal_rewards()
        for logger in self.trainer.loggers:
            logger.log_metrics(self.latest, step=step)
        # for callbacks that monitor a number; loggers have their own count of steps, over all blocks
        self.log_dict(self.latest, on_step=True, on_epoch=False, logger=False)

    # ---- checkpoints

    def settings(self) -> dict[str, Any]:
        """What decides the mask of given data, by the name of its option."""
        names = ["estimator", "num_steps", "max_lr", "min_lr", "init", "calibrate", "polish"]
        settings: dict[str, Any] = {"model.select_ratio": self.spec.select_ratio}
        settings |= {f"model.{name}": getattr(self.method, name) for name in names}
        settings |= {"model.patience": self.patience, "model.min_churn": self.min_churn}
        if self._source.has_groups:
            settings["model.group_budget"] = self.spec.group_budget
        if not self.method.is_whole_block:
            settings["model.num_rollouts"] = self.method.num_rollouts
            settings["model.control_variate"] = self.method.control_variate
        settings |= {"objective": self.objective.describe(), "data.partial": self._source.partial}
        return {**settings, "data.seed": self._source.seed}
