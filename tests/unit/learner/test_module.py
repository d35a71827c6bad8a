"""MaskLearner under a Trainer, without the command line."""

import math
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping

from datamask_pl.data.module import FeatureDataModule
from datamask_pl.errors import BudgetError, CheckpointError, ConfigError, ObjectiveError
from datamask_pl.learner.module import MaskLearner
from datamask_pl.objectives import DiSF, PairwiseSimilarity
from datamask_pl.objectives.joint import WeightedObjective
from tests.support.fits import write_shards
from tests.support.objectives import ConstantValue, EvenRows, LogExpectation, NotANumberAfter

ROLLOUTS = {"estimator": "leave_one_out", "num_rollouts": 4, "num_steps": 5}


class Results(Callback):
    """Every block's result, and what was logged of every step."""

    def __init__(self):
        self.results = []
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.steps.append(dict(pl_module.latest))

    def on_train_epoch_start(self, trainer, pl_module):
        self._take(pl_module)

    def on_train_end(self, trainer, pl_module):
        self._take(pl_module)

    def _take(self, pl_module):
        if pl_module.result is not None:
            self.results.append(pl_module.result)


def train(learner, path="shards", *, trainer=None, **options):
    """Fits, and returns the blocks' results and the steps' logs."""
    seen = Results()
    settings = {"log_every_n_steps": 1, "max_epochs": -1, **(trainer or {})}
    Trainer(
        accelerator="cpu", logger=False, callbacks=[seen], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **settings,
    ).fit(learner, datamodule=FeatureDataModule(path=path, **options))  # fmt: skip
    return seen


@pytest.fixture(autouse=True)
def shards(workplace):
    """60 rows."""
    return write_shards("shards", [60], dim=8)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "rule"),
        [
            ({"estimator": "guess"}, "model.estimator must be one of multilinear, leave_one_out, group_relative"),
            ({"init": "random"}, "model.init must be one of same, quality, got 'random'"),
            ({"num_rollouts": 1}, "model.num_rollouts must be at least 2, or there is nothing to compare, got 1"),
            ({"num_steps": 0}, "model.num_steps must be at least 1, got 0"),
            ({"min_lr": -1.0}, "model.min_lr must not be negative, got -1.0"),
            ({"max_lr": 1.0, "min_lr": 2.0}, r"model.max_lr must be at least min_lr \(2.0\), got 1.0"),
            ({"max_lr": math.nan}, "model.max_lr must be finite, got nan"),
            ({"max_lr": math.inf}, "model.max_lr must be finite, got inf"),
            ({"min_lr": math.nan}, "model.min_lr must not be negative, got nan"),
            ({"patience": 0}, "model.patience must be at least 1, got 0"),
            ({"min_churn": 1.5}, "model.min_churn must be from 0 to 1, got 1.5"),
            ({"quality_weight": -0.1}, "model.quality_weight must be from 0 to 1, got -0.1"),
            ({"quality_weight": math.nan}, "model.quality_weight must be from 0 to 1, got nan"),
            ({"diversity": "variety"}, "model.diversity must be one of facility_location, pairwise, disf"),
            ({"diversity": []}, "model.diversity needs finite weights"),
            ({"diversity": EvenRows()}, "EvenRows gives only `value`; use model.estimator: group_relative or leave_on"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_value_that_is_not_allowed_is_named_with_the_rule(self, options, rule):
        with pytest.raises(ConfigError, match=rule):
            MaskLearner(**options)

    @pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, math.nan])
    def test_a_ratio_out_of_range(self, ratio):
        with pytest.raises(BudgetError, match="select_ratio must be above 0 and at most 1"):
            MaskLearner(select_ratio=ratio)

    def test_a_term_without_expectation_that_does_not_count_is_no_obstacle(self):
        diversity = [WeightedObjective("pairwise"), WeightedObjective(EvenRows(), weight=0.0)]
        MaskLearner(diversity=diversity)
        MaskLearner(diversity=EvenRows(), quality_weight=1.0)

    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
    def test_a_precision_that_is_not_single(self, precision):
        with pytest.raises(ConfigError, match=f"trainer.precision must be 32-true, got {precision}"):
            train(MaskLearner(), trainer={"precision": precision})

    def test_a_part_of_the_block_too_small_for_the_ratio(self):
        with pytest.raises(BudgetError, match=r"data\.partial: a step draws masks in 0.05 of a block of 60 samples"):
            train(MaskLearner(**ROLLOUTS), partial=0.05)


class TestSteps:
    @pytest.mark.parametrize(
        ("interval", "due"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 2, 5, 6]), (7, [0, 6]), (100, [0, 6]), (0, range(7))]
    )
    def test_first_and_last_step_are_logged_and_every_so_many_between(self, interval, due):
        learner = MaskLearner(num_steps=7)
        learner.trainer = Trainer(accelerator="cpu", logger=False, log_every_n_steps=interval)
        assert [step for step in range(7) if learner.is_log_due(step)] == list(due)

    @pytest.mark.filterwarnings("ignore:all rollouts of a step:UserWarning")  # in parts of six rows it happens
    @pytest.mark.parametrize("estimator", ["multilinear", "leave_one_out", "group_relative"])
    @pytest.mark.parametrize("block_size", [60, 23, 7])
    def test_every_block_keeps_exactly_its_budget(self, estimator, block_size):
        learner = MaskLearner(**{**ROLLOUTS, "estimator": estimator}, select_ratio=0.3, diversity="pairwise")
        seen = train(learner, block_size=block_size, partial=0.9)
        assert sum(result.block.num_samples for result in seen.results) == 60
        for result in seen.results:
            assert result.mask_N.dtype == torch.bool
            expected = math.floor(0.3 * result.block.num_samples + 0.5)
            assert int(result.mask_N.sum()) == result.num_selected == expected
            assert result.logits_N.shape == result.probability_N.shape == result.mask_N.shape

    def test_the_step_count_is_lightnings_own(self):
        """lightning #17167: global_step stays 0 and nothing is saved."""
        learner = MaskLearner(num_steps=5)
        train(learner, block_size=30)
        assert learner.global_step == 10

    def test_a_settled_block_ends_early_and_the_next_begins(self):
        seen = train(MaskLearner(num_steps=200, patience=3), block_size=30)
        assert len(seen.results) == 2
        assert all(3 <= result.num_steps < 200 for result in seen.results)

    def test_only_the_rows_of_the_steps_part_move(self):
        learner = MaskLearner(**{**ROLLOUTS, "num_steps": 1}, quality_weight=1.0)
        train(learner, partial=0.5)
        assert int((learner.policy.logits != 0).sum()) <= 30
        assert int((learner.policy.logits != 0).sum()) > 10

    @pytest.mark.parametrize(("control_variate", "num_moved"), [(True, 60), (False, 6)])
    def test_masks_are_of_the_whole_block_with_a_control_variate_and_of_a_tenth_without(
        self, control_variate, num_moved
    ):
        options = {**ROLLOUTS, "num_steps": 1, "select_ratio": 0.5, "control_variate": control_variate}
        learner = MaskLearner(**options, diversity="pairwise")
        train(learner, partial=None)
        assert int((learner.policy.logits != 0).sum()) == num_moved

    @pytest.mark.parametrize(
        ("options", "partial", "is_said"),
        [
            ({}, 0.4, True),
            ({}, 1.0, False),
            ({}, None, False),
            ({"num_steps": 4}, 0.4, False),
            ({"control_variate": False, "num_steps": 4}, 0.4, False),
            ({"estimator": "multilinear"}, 0.4, False),
        ],
    )
    def test_that_the_default_steps_are_few_for_parts_of_a_block_is_said_with_how_many_to_give(
        self, options, partial, is_said
    ):
        learner = MaskLearner(**{"estimator": "leave_one_out", "num_rollouts": 4, **options}, select_ratio=0.5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train(learner, partial=partial)
        said = [str(warning.message) for warning in seen if "data.partial 0.4" in str(warning.message)]
        assert len(said) == is_said
        assert not said or "here each sample is seen in only about 8 of them" in said[0]
        assert not said or said[0].endswith("or set model.num_steps: 50.")

    def test_the_best_rollout_of_a_whole_block_is_never_lost(self):
        learner = MaskLearner(**ROLLOUTS, max_lr=0.0, min_lr=0.0, polish=False, diversity="disf", calibrate=False)
        seen = train(learner, partial=1.0)
        best = max(step["objective/f_best"] for step in seen.steps)
        assert seen.results[0].mask.f == pytest.approx(best, rel=1e-6)

    def test_rollouts_of_a_part_are_no_masks_of_the_block(self):
        seen = train(MaskLearner(**ROLLOUTS), partial=0.5)
        assert seen.results[0].mask_N.sum() == 6

    def test_polish_never_lowers_the_objective(self):
        values = [train(MaskLearner(num_steps=3, polish=polish)).results[0].mask.f for polish in (False, True)]
        assert values[1] >= values[0]

    def test_init_quality_starts_at_the_best_qualities(self):
        learner = MaskLearner(num_steps=1, max_lr=0.0, min_lr=0.0, init="quality", polish=False)
        (result,) = train(learner).results
        best = np.argsort(-result.block.quality_N.numpy())[:6]
        assert set(result.mask_N.nonzero().squeeze(1).tolist()) == set(best.tolist())
        assert result.mask == result.top_quality

    def test_a_second_fit_gives_the_same_mask(self):
        masks = [train(MaskLearner(**ROLLOUTS), partial=0.5).results[0] for _ in range(2)]
        assert torch.equal(masks[0].mask_N, masks[1].mask_N)
        assert torch.equal(masks[0].logits_N, masks[1].logits_N)

    def test_another_seed_gives_other_rollouts(self):
        logits = [train(MaskLearner(**ROLLOUTS), partial=0.5, seed=seed).results[0].logits_N for seed in (0, 1)]
        assert not torch.equal(*logits)


class TestObjectives:
    def test_rewards_without_spread_are_counted_warned_of_once_and_move_nothing(self):
        """NeMo-RL #4161: a zero spread gives NaN advantages."""
        learner = MaskLearner(**ROLLOUTS, quality_weight=0.0, diversity=ConstantValue())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            seen = train(learner, block_size=30, partial=1.0)
        told = [warning for warning in caught if "same reward" in str(warning.message)]
        assert len(told) == 1
        assert seen.steps[-1]["policy/groups_without_spread"] == 10
        assert all(torch.equal(result.logits_N, torch.zeros(30)) for result in seen.results)
        assert all(int(result.mask_N.sum()) == 3 for result in seen.results)

    @pytest.mark.parametrize(("num_masks", "when"), [(0, "in calibration"), (64 + 8, "at block 0, step 2")])
    def test_a_value_that_is_not_finite_is_an_error_that_names_objective_and_step(self, num_masks, when):
        """trl #5775: one NaN reward poisons its group."""
        learner = MaskLearner(**ROLLOUTS, diversity=NotANumberAfter(num_masks=num_masks))
        with pytest.raises(ObjectiveError, match=f"NotANumberAfter returned nan for mask 0 {when}"):
            train(learner, partial=1.0)

    def test_so_is_one_of_the_finished_mask(self):
        learner = MaskLearner(**ROLLOUTS, diversity=NotANumberAfter(num_masks=64 + 20))
        with pytest.raises(ObjectiveError, match="NotANumberAfter returned nan for mask 0 after the last step"):
            train(learner, partial=1.0)

    def test_so_is_an_expectation(self):
        with pytest.raises(ObjectiveError, match=r"LogExpectation has an expectation of .* at block 0, step 0"):
            train(MaskLearner(diversity=LogExpectation()))

    def test_one_of_a_term_that_does_not_count_is_no_error(self):
        diversity = [WeightedObjective("pairwise"), WeightedObjective(NotANumberAfter(), weight=0.0)]
        (result,) = train(MaskLearner(**ROLLOUTS, diversity=diversity), partial=1.0).results
        assert math.isfinite(result.mask.f)

    def test_logits_beyond_float32_are_an_error(self):
        with pytest.raises(ConfigError, match=r"beyond the range of float32; lower model\.max_lr"):
            train(MaskLearner(max_lr=1e38, min_lr=1e38))

    def test_the_scales_are_those_of_random_masks(self):
        (result,) = train(MaskLearner(num_steps=1, diversity="pairwise")).results
        assert set(result.scales) == {"quality", "pairwise"}
        # of a mean of 6 of 60 uniform ranks, without replacement
        assert result.scales["quality"] == pytest.approx(0.29 / math.sqrt(6) * math.sqrt(54 / 59), rel=0.3)


class TestSettings:
    def settings(self, **options):
        learner = MaskLearner(**options)
        learner.trainer = Trainer(accelerator="cpu", logger=False)
        data = FeatureDataModule(path="shards")
        learner.trainer.datamodule = data
        data.trainer = learner.trainer
        data.setup()
        return learner, learner.settings()

    def test_they_tell_apart_what_decides_the_mask(self):
        _, base = self.settings()
        for options in (
            {"select_ratio": 0.2},
            {"quality_weight": 0.4},
            {"diversity": "disf"},
            {"diversity": DiSF(standardize=True)},
            {"diversity": [WeightedObjective(PairwiseSimilarity(), 2.0), WeightedObjective("disf")]},
            {"calibrate": False},
            {"estimator": "group_relative"},
            {"num_steps": 19},
            {"max_lr": 3.0},
            {"min_lr": 0.1},
            {"init": "quality"},
            {"patience": 3},
            {"min_churn": 0.1},
            {"polish": False},
        ):
            assert self.settings(**options)[1] != base, options

    def test_a_control_variate_decides_where_masks_are_drawn(self):
        schedule = {"estimator": "leave_one_out", "num_steps": 9, "max_lr": 1.0, "min_lr": 0.1}
        assert self.settings(**schedule)[1] != self.settings(**schedule, control_variate=False)[1]

    @pytest.mark.parametrize(
        ("options", "schedule"),
        [
            ({}, (20, 4.0, 1.5)),
            ({"control_variate": False}, (20, 4.0, 1.5)),
            ({"diversity": "disf"}, (8, 4.0, 1.5)),
            ({"estimator": "leave_one_out"}, (20, 4.0, 1.5)),
            ({"estimator": "group_relative"}, (20, 4.0, 1.5)),
            ({"estimator": "group_relative", "control_variate": False}, (1000, 10.0, 1.0)),
            ({"estimator": "leave_one_out", "diversity": EvenRows()}, (1000, 10.0, 1.0)),
        ],
    )
    def test_the_schedule_defaults_by_how_the_gradient_is_found(self, options, schedule):
        method = MaskLearner(**options).method
        assert (method.num_steps, method.max_lr, method.min_lr) == schedule

    def test_and_nothing_else(self):
        _, base = self.settings()
        assert self.settings(num_rollouts=7, control_variate=False)[1] == base  # multilinear draws none
        assert self.settings(diversity="facility_location", num_steps=20)[1] == base

    def test_a_checkpoint_of_other_settings_or_data_is_refused_with_both_values(self):
        learner, settings = self.settings(select_ratio=0.2)
        plan_hash = learner.trainer.datamodule.plan_hash
        block = {
            "index": 0, "scales": torch.ones(2, dtype=torch.float64), "num_steps": 3, "seconds": 1.0,
            "best_mask": None, "best_reward": 0.0, "num_unchanged": 0, "is_settled": False,
        }  # fmt: skip
        saved = {"version": 1, "plan_hash": plan_hash, "settings": settings, "block": block}

        def restore(**changes):
            state_dict = {"policy.logits": torch.zeros(60)}
            learner.restore({"datamask_pl": {**saved, **changes}, "state_dict": state_dict})

        expected = r"model\.max_lr is 7\.0 there and 4\.0 here\. Pass the data and options"
        with pytest.raises(CheckpointError, match=expected):
            restore(settings={**settings, "model.max_lr": 7.0})
        with pytest.raises(CheckpointError, match="version is 99 there and 1 here"):
            restore(version=99)
        with pytest.raises(CheckpointError, match="plan_hash is 0000 there and "):
            restore(plan_hash="0000")
        with pytest.raises(CheckpointError, match=r"not written by datamask_pl"):
            restore(block=None)
        restore()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"index": 1}, "it is of block 1, and block 0 begins"),
            ({"index": None}, "index is NoneType"),
            ({"num_steps": 0}, "num_steps is 0 of 20"),
            ({"num_steps": 20}, "num_steps is 20 of 20"),
            ({"scales": torch.ones(3, dtype=torch.float64)}, "scales is not 2 finite numbers"),
            ({"scales": torch.full((2,), torch.nan, dtype=torch.float64)}, "scales is not 2 finite numbers"),
            ({"best_mask": torch.ones(59, dtype=torch.bool)}, "best_mask is not 60 finite numbers of torch.bool"),
            ({"best_mask": torch.ones(60)}, "best_mask is not 60 finite numbers of torch.bool"),
            ({"seconds": "1"}, "seconds is str"),
            ({"logits": torch.zeros(59)}, "policy.logits is not 60 finite numbers of torch.float32"),
            ({"logits": torch.zeros(60).double()}, "policy.logits is not 60 finite numbers"),
            ({"logits": torch.full((60,), torch.inf)}, "policy.logits is not 60 finite numbers"),
            ({"logits": torch.zeros(())}, "policy.logits is not 60 finite numbers"),
            ({"logits": None}, "policy.logits is not 60 finite numbers"),
        ],
        ids=str,
    )
    def test_a_checkpoint_with_an_entry_of_another_kind_is_refused_before_any_is_used(self, changes, words):
        learner, settings = self.settings(select_ratio=0.2)
        block = {
            "index": 0, "scales": torch.ones(2, dtype=torch.float64), "num_steps": 3, "seconds": 1.0,
            "best_mask": None, "best_reward": 0.0, "num_unchanged": 0, "is_settled": False,
        }  # fmt: skip
        logits_M = changes.get("logits", torch.zeros(60))
        saved = {"version": 1, "plan_hash": learner.trainer.datamodule.plan_hash, "settings": settings}
        saved["block"] = {**block, **changes}
        with pytest.raises(CheckpointError, match=f"cannot be used .{words}.*delete it to go on without it"):
            learner.restore({"datamask_pl": saved, "state_dict": {"policy.logits": logits_M}})

    def test_lightnings_own_way_of_resuming_is_refused(self):
        learner, _ = self.settings()
        with pytest.raises(CheckpointError, match="fit again with LogitsCheckpoint and the same folder"):
            learner.on_load_checkpoint({})


class TestMetricsForCallbacks:
    """A callback that monitors a number finds it."""

    @pytest.mark.parametrize("options", [{"num_steps": 5}, ROLLOUTS], ids=["multilinear", "rollouts"])
    def test_lightning_has_the_numbers_of_the_last_log(self, options):
        seen = {}

        class Watch(Callback):
            def on_train_batch_end(self, trainer, pl_module, *_):
                seen.update({name: float(value) for name, value in trainer.callback_metrics.items()})
                assert seen == pytest.approx(pl_module.latest, rel=1e-6)

        trainer = Trainer(
            accelerator="cpu", logger=False, callbacks=[Watch()], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, max_epochs=-1,
        )  # fmt: skip
        trainer.fit(MaskLearner(**options), datamodule=FeatureDataModule(path="shards"))
        assert {"objective/f", "objective/quality", "policy/lr", "policy/undecided"} <= seen.keys()

    def test_early_stopping_finds_what_it_monitors(self):
        stop = EarlyStopping(monitor="objective/f", mode="max", patience=1, check_on_train_epoch_end=True)
        trainer = Trainer(
            accelerator="cpu", logger=False, callbacks=[stop], enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, max_epochs=-1,
        )  # fmt: skip
        trainer.fit(MaskLearner(num_steps=3), datamodule=FeatureDataModule(path="shards", block_size=10))
        assert stop.best_score > 0
