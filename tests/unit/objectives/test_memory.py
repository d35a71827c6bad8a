"""What is held of a block's temporaries."""

import sys
import weakref
from pathlib import Path

import pytest
import torch

from datamask_pl.functional.device import multiplies_bfloat16
from datamask_pl.functional.kernels import multiply_bfloat16
from datamask_pl.functional.threads import give_back_memory
from datamask_pl.learner import solve as solve_module
from datamask_pl.learner.solve import calibrate, draw_uniform_masks, solve
from datamask_pl.learner.state import BlockState
from datamask_pl.objectives import FacilityLocation
from datamask_pl.objectives.joint import JointObjective
from datamask_pl.objectives.neighbor_table import NeighborTable
from tests.support.problems import ground_set, unit_rows


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone")
def test_freed_memory_goes_back_to_the_system():
    # small enough to come from the heap, and every hundredth one stays, so that its end cannot simply be lowered
    tensors = [torch.ones(4096) for _ in range(8000)]
    kept = tensors[::100]
    before = resident_bytes()
    del tensors
    give_back_memory()
    assert before - resident_bytes() > 0.8 * 8000 * 4 * 4096
    assert all(bool((tensor == 1).all()) for tensor in kept)


@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason="this processor has no products of bfloat16")
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read on Linux alone")
def test_quick_products_of_many_shapes_leave_nothing_behind():
    rows_PD = torch.ones(1024, 128)
    multiply_bfloat16(rows_PD, rows_PD)
    before = resident_bytes()
    for number in range(150):  # a program for each shape would be 0.7 MB
        multiply_bfloat16(rows_PD[: 1023 - 3 * number], rows_PD[: 301 + 4 * number])
    give_back_memory()
    assert resident_bytes() - before < 40e6


def test_what_was_derived_from_a_block_is_gone_when_its_mask_is_written():
    ground = ground_set(unit_rows(50, 4, 0), 5)
    objective = JointObjective(quality_weight=0.5, diversity=FacilityLocation(num_neighbors=8))
    state = BlockState(
        block=None, ground=ground, scales=calibrate(objective, ground, seed=3), mask_N=torch.zeros(50).bool()
    )
    table = weakref.ref(next(found for found in ground.shares._cache.values() if isinstance(found, NeighborTable)))
    solve(state, torch.zeros(50), objective=objective, is_polished=True, seed=3)
    assert table() is None


@pytest.mark.parametrize("masks_at_once", [1, 24, 64, 1000])
def test_scales_do_not_depend_on_how_many_masks_are_valued_at_once(monkeypatch, masks_at_once):
    ground = ground_set(unit_rows(50, 4, 0), 5)
    objective = JointObjective(quality_weight=0.5, diversity=FacilityLocation(num_neighbors=8))
    expected = objective.term_values(draw_uniform_masks(64, ground, seed=3), ground).std(dim=1)
    monkeypatch.setattr(solve_module, "MAX_MASK_ELEMENTS", 50 * masks_at_once)
    torch.testing.assert_close(calibrate(objective, ground_set(unit_rows(50, 4, 0), 5), seed=3), expected)
