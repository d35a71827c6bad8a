"""What is learned again is what the run learned."""

import pyarrow.parquet as pq
import pytest
import torch

from datamask_pl.data.scaling import scale_quality
from datamask_pl.evidence.run import find_mask, ground_set, open_run, read_block
from datamask_pl.functional.budget import BudgetSpec
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.holdings import Holdings
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.learner.loop import learn, learn_block
from datamask_pl.learner.options import make_method
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective
from tests.support.fits import fit, parts, run_folder, write_shards


@pytest.mark.parametrize("diversity", ["facility_location", "disf"])
@pytest.mark.parametrize("options", [("--model.polish", "false"), ("--model.init", "quality")], ids=" ".join)
def test_learned_again_for_the_whole_block_it_is_the_mask_of_the_run(workplace, diversity, options):
    fit("--data.path", write_shards(workplace / "shards", [200]), "--model.diversity", diversity, *options)
    run = open_run(*find_mask(str(run_folder()), None, None), source=None)
    block, mask_N = read_block(run, 0)
    scales = torch.tensor([*run.manifest.blocks[0].scales.values()], dtype=torch.float64)
    found_N = run.relearn(ground_set(block, int(mask_N.sum())), scales)
    assert parts(run_folder())[0]["selected"].to_pylist() == found_N.tolist()


def test_it_shows_the_logits_of_every_step_the_last_of_which_make_the_mask():
    generator = torch.Generator().manual_seed(0)
    features_ND = torch.nn.functional.normalize(torch.randn(60, 5, generator=generator))
    ground = GroundSet.of(features_ND=features_ND, quality_N=torch.rand(60, generator=generator), budget=7)
    objective = JointObjective(quality_weight=0.3, diversity="disf")
    seen = {}

    def masks_of(num_steps):
        return learn(
            ground,
            objective=objective,
            scales=torch.ones(2, dtype=torch.float64),
            method=make_method(objective, num_steps=num_steps, max_lr=2.0, min_lr=2.0, polish=False),
            on_step=lambda step, logits_N: seen.update({(num_steps, step): logits_N.clone()}),
        )

    mask_N = masks_of(3)
    masks_of(2)
    assert list(seen) == [(3, 0), (3, 1), (3, 2), (2, 0), (2, 1)]
    assert torch.equal(seen[3, 1], seen[2, 1])
    assert not torch.equal(seen[3, 2], seen[3, 1])
    assert torch.equal(top_k_mask(seen[3, 2], 7), mask_N)


SEED = 11


@pytest.mark.parametrize(
    ("estimator", "diversity"),
    [("multilinear", "facility_location"), ("group_relative", "disf"), ("leave_one_out", "pairwise")],
)
def test_from_tensors_it_is_the_mask_that_fit_learns_for_one_block(workplace, estimator, diversity):
    path = write_shards(workplace / "shards", [80])
    options = {"select_ratio": 0.2, "diversity": diversity, "estimator": estimator, "num_steps": 6}
    if estimator != "multilinear":
        options |= {"num_rollouts": 8, "control_variate": estimator == "leave_one_out"}
    given = [text for name, value in options.items() for text in (f"--model.{name}", str(value))]
    fit("--data.path", path, "--data.seed", str(SEED), "--data.partial", "1", *given)
    table = pq.read_table(path)
    features_ND = torch.tensor(table["feature_arr"].to_pylist())
    quality_N = torch.tensor(scale_quality(table["quality_score"].to_numpy(), "rank"))
    mask_N = learn_block(features_ND, quality_N, seed=SEED, **options)
    assert mask_N.tolist() == parts(run_folder())[0]["selected"].to_pylist()


def test_a_budget_takes_the_place_of_the_ratio():
    generator = torch.Generator().manual_seed(1)
    features_ND, quality_N = torch.randn(30, 4, generator=generator), torch.rand(30, generator=generator)
    forced_N = torch.zeros(30, dtype=torch.int8)
    forced_N[:2], forced_N[2:4] = 1, -1
    budget = Constrained(Holdings.of(30, forced_N=forced_N), BudgetSpec(0.2))
    mask_N = learn_block(features_ND, quality_N, budget=budget)
    assert mask_N[:2].all()
    assert not mask_N[2:4].any()
    assert int(mask_N.sum()) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "adam"}, "model.estimator must be one of"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"select_ratio": 0.001}, "select_ratio keeps 0 of 30 samples"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        learn_block(torch.ones(30, 4), torch.ones(30), **options)
