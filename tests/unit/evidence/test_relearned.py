"""What is learned again is what the run learned."""

import pytest
import torch
from fits import fit, parts, run_folder, write_shards

from datamask_pl.commands.finished_run import find_mask, ground_set, open_run, read_block
from datamask_pl.evidence.relearned import relearn


@pytest.mark.parametrize("diversity", ["facility_location", "disf"])
@pytest.mark.parametrize("options", [("--model.polish", "false"), ("--model.init", "quality")], ids=" ".join)
def test_learned_again_for_the_whole_block_it_is_the_mask_of_the_run(workplace, diversity, options):
    fit("--data.path", write_shards(workplace / "shards", [200]), "--model.diversity", diversity, *options)
    run = open_run(*find_mask(str(run_folder()), None, None), source=None)
    block, mask_N = read_block(run, 0)
    learner = run.learner
    scales = torch.tensor([*run.manifest.blocks[0]["scales"].values()], dtype=torch.float64)
    found_N = relearn(
        ground_set(block, int(mask_N.sum())),
        objective=run.objective,
        scales=scales,
        num_steps=learner.num_steps,
        max_lr=learner.max_lr,
        min_lr=learner.min_lr,
        init=learner.init,
        is_polished=learner.polish,
    )
    assert parts(run_folder())[0]["selected"].to_pylist() == found_N.tolist()
