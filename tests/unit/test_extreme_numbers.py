"""Numbers at the edge of what their types hold: the right answer, or an error that says what is wrong."""

import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from datamask_pl.data.loader import draw_rows
from datamask_pl.data.scaling import ConstantQualityWarning, MergedQualityWarning
from datamask_pl.errors import DatamaskWarning
from datamask_pl.functional.budget import num_to_keep
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.functional.multilinear import ascent_direction, inclusion_probabilities, solve_threshold
from datamask_pl.learner.policy import LogitAscent, MaskPolicy
from tests.support.fits import ESTIMATORS, fit, manifest, parts, run_folder
from tests.support.shards import make_table, write

BEYOND_FLOAT32 = 2**24 + 1  # float32 counts no further than 2^24


class TestMoreSamplesThanFloat32Counts:
    """torch #2576: multinomial stops at 2^24 categories."""

    def test_the_budget(self):
        assert num_to_keep(1.0, BEYOND_FLOAT32) == BEYOND_FLOAT32
        assert num_to_keep(0.5, BEYOND_FLOAT32) == 2**23 + 1
        assert num_to_keep(1e-6, BEYOND_FLOAT32) == 17

    @pytest.mark.parametrize("num_selected", [1, 2**23 + 1, 2**24])
    def test_top_k(self, num_selected):
        mask_N = top_k_mask(torch.zeros(BEYOND_FLOAT32), num_selected)
        assert int(mask_N.sum()) == num_selected
        assert bool(mask_N[:num_selected].all())

    def test_top_k_of_different_logits(self):
        logits_N = torch.zeros(BEYOND_FLOAT32)
        logits_N[-1], logits_N[2**24 - 1] = 2.0, 1.0
        assert top_k_mask(logits_N, 2).nonzero().flatten().tolist() == [2**24 - 1, 2**24]

    def test_the_threshold_and_the_probabilities(self):
        logits_N = torch.linspace(-3, 3, BEYOND_FLOAT32)
        p_N = inclusion_probabilities(logits_N, 2**23 + 1)
        assert float(p_N.sum()) == pytest.approx(2**23 + 1, rel=1e-11)

    def test_the_policy_moves_its_last_logit_and_no_other(self):
        policy = MaskPolicy(BEYOND_FLOAT32)
        ascent = LogitAscent(policy.logits)
        ascent.stage(torch.tensor([BEYOND_FLOAT32 - 1]), torch.tensor([0.5]))
        ascent.step()
        assert policy.logits.detach().nonzero().flatten().tolist() == [BEYOND_FLOAT32 - 1]

    def test_a_part_of_them_is_drawn(self):
        rows_M = draw_rows(BEYOND_FLOAT32, 1000, seed=0, block=0, step=0)
        assert rows_M.unique().numel() == 1000
        assert 0 <= int(rows_M.min()) <= int(rows_M.max()) < BEYOND_FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [120.0, 1000.0])
def test_probabilities_of_logits_that_exp_cannot_hold(dtype, gap):
    """torch #48841: with a logit gap of 120, multinomial drew items of probability zero."""
    logits_N = torch.full((1000,), -gap, dtype=dtype)
    logits_N[::10] = gap
    for num_selected, expected in [(50, (0.5, 0.0)), (100, (1.0, 0.0)), (550, (1.0, 0.5)), (1000, (1.0, 1.0))]:
        p_N = inclusion_probabilities(logits_N, num_selected)
        assert float(p_N.sum()) == pytest.approx(num_selected, rel=1e-9)
        np.testing.assert_allclose(p_N[::10], expected[0], atol=1e-6)
        np.testing.assert_allclose(p_N[1::10], expected[1], atol=1e-6)
        assert bool(ascent_direction(logits_N.double(), p_N).isfinite().all())
    assert bool(solve_threshold(logits_N, 1).isfinite())


def write_rows(num_rows, features_ND, quality_N):
    column = pa.FixedSizeListArray.from_arrays(pa.array(features_ND.ravel()), features_ND.shape[1])
    table = pa.table({"chunk_id": np.arange(num_rows), "quality_score": quality_N, "feature_arr": column})
    return write(Path("shard.parquet"), table)


def kept():
    (table,) = parts(run_folder())
    return table["source_row"].filter(table["selected"]).to_numpy()


def best(quality_N, num_selected):
    return np.sort(np.argsort(-quality_N, kind="stable")[:num_selected])


@pytest.mark.parametrize("diversity", ["pairwise", "disf", "facility_location"])
def test_of_identical_vectors_exactly_the_budget_is_kept_and_quality_decides(workplace, diversity):
    num_rows = 100_000
    quality_N = np.random.default_rng(0).permutation(num_rows).astype(np.float32)
    path = write_rows(num_rows, np.tile(np.float32([0.3, -0.1, 0.7, 0.2]), (num_rows, 1)), quality_N)
    fit("--data.path", path, "--model.diversity", diversity, "--model.num_steps", "8")
    assert np.array_equal(kept(), best(quality_N, num_rows // 10))
    values = manifest(run_folder())["blocks"]["0"]["mask"]
    expected = {"pairwise": -1.0, "disf": 0.0, "facility_location": 1.0}[diversity]
    assert values["terms"][diversity] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scaling", ["rank", "minmax", "zscore", "none"])
def test_a_constant_quality_is_said_and_diversity_decides(workplace, scaling):
    features_ND = np.random.default_rng(1).normal(size=(200, 8)).astype(np.float32)
    path = write_rows(200, features_ND, np.full(200, 1e9))
    with pytest.warns(ConstantQualityWarning, match=r"all 200 samples of block 0 is 1e\+09"):
        fit("--data.path", path, "--data.quality_scaling", scaling, "--model.num_steps", "8")
    block = manifest(run_folder())["blocks"]["0"]
    assert block["scales"]["quality"] == 0
    assert block["mask"]["terms"]["facility_location"] > block["random"]["terms"]["facility_location"]
    assert np.isfinite(block["mask"]["f"])


@pytest.mark.parametrize("scaling", ["rank", "minmax", "zscore", "none"])
@pytest.mark.parametrize("outlier", [1e9, -1e9])
def test_quality_alone_keeps_the_best_in_spite_of_outliers_or_says_that_scores_were_merged(workplace, scaling, outlier):
    rng = np.random.default_rng(2)
    quality_N = rng.random(1000).astype(np.float32)
    quality_N[rng.choice(1000, 20, replace=False)] = outlier
    path = write_rows(1000, rng.normal(size=(1000, 8)).astype(np.float32), quality_N)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit("--data.path", path, "--data.quality_scaling", scaling, "--model.quality_weight", "1")
    merged = [warning for warning in seen if warning.category is MergedQualityWarning]
    assert len(kept()) == 100
    assert bool(merged) == (scaling == "zscore" or (scaling == "minmax" and outlier < 0))
    if merged:
        assert f"data.quality_scaling: {scaling} leaves " in str(merged[0].message)
        assert outlier < 0 or set(np.flatnonzero(quality_N == outlier)) <= set(kept())
    else:
        assert np.array_equal(kept(), best(quality_N, 100))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_ratio_of_one_keeps_everything(workplace, estimator):
    path = write(workplace / "shard.parquet", make_table(30))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all rollouts of a step had the same reward")
        fit("--data.path", path, "--model.select_ratio", "1", *ESTIMATORS[estimator])
    (table,) = parts(run_folder())
    assert table["selected"].to_pylist() == [True] * 30
    assert table["probability"].to_pylist() == [1.0] * 30


def test_a_ratio_that_keeps_none_is_an_error_that_says_which_does(workplace, capsys):
    path = write(workplace / "shard.parquet", make_table(30))
    with pytest.raises(SystemExit) as ended:
        fit("--data.path", path, "--model.select_ratio", "1e-6")
    assert ended.value.code == 2
    assert "select_ratio keeps 0 of 30 samples (1e-06); raise it to at least 0.0166667" in capsys.readouterr().err
    assert num_to_keep(1e-6, 1_000_000) == 1


def test_a_millionth_of_half_a_million_is_the_one_that_is_best(workplace):
    """Of one sample the pairwise diversity is 0, so quality decides; the best is neither the first nor the last."""
    features_ND = np.random.default_rng(0).normal(size=(500_000, 2)).astype(np.float32)
    quality_N = np.arange(500_000, dtype=np.float32) * 3 % 500_000
    path = write_rows(500_000, features_ND, quality_N)
    options = ("--model.diversity", "pairwise", "--model.num_steps", "1")
    fit("--data.path", path, "--model.select_ratio", "1e-6", *options)
    assert kept().tolist() == [int(quality_N.argmax())] == [333_333]


@pytest.mark.parametrize("diversity", ["facility_location", "pairwise", "disf"])
def test_of_two_samples_the_better_one_is_kept(workplace, diversity):
    path = write(workplace / "shard.parquet", make_table(2, quality_score=[0.1, 0.9]))
    fit("--data.path", path, "--model.select_ratio", "0.5", "--model.diversity", diversity)
    assert kept().tolist() == [1]


def test_a_single_sample_is_kept(workplace):
    path = write(workplace / "shard.parquet", make_table(1))
    fit("--data.path", path, "--model.select_ratio", "0.5")
    assert kept().tolist() == [0]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_infinite_float16_feature_is_a_bad_row(workplace, capsys, value):
    features_ND = np.random.default_rng(3).normal(size=(40, 4)).astype(np.float16)
    features_ND[7, 2] = value
    path = write_rows(40, features_ND, np.arange(40.0))
    with pytest.raises(SystemExit) as ended:
        fit("--data.path", path)
    assert ended.value.code == 2
    assert f"row 7: feature column 'feature_arr': every element must be a finite float16, element 2 is {value}" in (
        capsys.readouterr().err
    )
    with pytest.warns(DatamaskWarning, match="dropped 1 of 40 rows"):
        fit("--data.path", path, "--data.on_bad_row", "drop", "--model.num_steps", "3")
    (table,) = parts(run_folder())
    assert table["source_row"].to_pylist() == [row for row in range(40) if row != 7]
