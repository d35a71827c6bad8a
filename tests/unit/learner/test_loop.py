"""What is learned again is what the run learned."""

import pytest
import torch

from datamask_pl.evidence.run import find_mask, ground_set, open_run, read_block
from datamask_pl.functional.kernels import top_k_mask
from datamask_pl.learner.loop import learn_block
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective
from tests.support.fits import fit, parts, run_folder, write_shards


@pytest.mark.parametrize("diversity", ["facility_location", "disf"])
@pytest.mark.parametrize("options", [("--model.polish", "false"), ("--model.init", "quality")], ids=" ".join)
def test_learned_again_for_the_whole_block_it_is_the_mask_of_the_run(workplace, diversity, options):
    fit("--data.path", write_shards(workplace / "shards", [200]), "--model.diversity", diversity, *options)
    run = open_run(*find_mask(str(run_folder()), None, None), source=None)
    block, mask_N = read_block(run, 0)
    scales = torch.tensor([*run.manifest.blocks[0]["scales"].values()], dtype=torch.float64)
    found_N = run.learn_block(ground_set(block, int(mask_N.sum())), scales)
    assert parts(run_folder())[0]["selected"].to_pylist() == found_N.tolist()


def test_it_shows_the_logits_of_every_step_the_last_of_which_make_the_mask():
    generator = torch.Generator().manual_seed(0)
    features_ND = torch.nn.functional.normalize(torch.randn(60, 5, generator=generator))
    ground = GroundSet.of(features_ND=features_ND, quality_N=torch.rand(60, generator=generator), budget=7)
    objective = JointObjective(quality_weight=0.3, diversity="disf")
    seen = {}

    def learn(num_steps):
        return learn_block(
            ground,
            objective=objective,
            scales=torch.ones(2, dtype=torch.float64),
            num_steps=num_steps,
            max_lr=2.0,
            min_lr=2.0,
            init="same",
            is_polished=False,
            on_step=lambda step, logits_N: seen.update({(num_steps, step): logits_N.clone()}),
        )

    mask_N = learn(3)
    learn(2)
    assert list(seen) == [(3, 0), (3, 1), (3, 2), (2, 0), (2, 1)]
    assert torch.equal(seen[3, 1], seen[2, 1])
    assert not torch.equal(seen[3, 2], seen[3, 1])
    assert torch.equal(top_k_mask(seen[3, 2], 7), mask_N)
