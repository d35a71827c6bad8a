import numpy as np
import pytest
import torch

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.learner.ground import part_of
from datamask_pl.objectives import ground_set as ground_set_module
from datamask_pl.objectives.ground_set import GroundSet
from tests.support import problems
from tests.support.pretended_ranks import on_ranks


def make(num_samples, *, num_selected=1, num_slice_rows=16_384, ranks=None, dtype=torch.float32):
    return problems.ground_set(
        problems.unit_rows(num_samples, 5, 0), num_selected, dtype=dtype, num_slice_rows=num_slice_rows, ranks=ranks
    )


@pytest.mark.parametrize("num_samples", [1, 7, 1023, 2048, 9001])
@pytest.mark.parametrize("num_slice_rows", [1, 100, 16_384])
@pytest.mark.parametrize("size", [1, 2, 3, 13])
def test_the_slices_of_all_ranks_are_every_row_once_whatever_their_number(num_samples, num_slice_rows, size):
    if num_samples > 100 and num_slice_rows == 1:
        num_slice_rows = 50
    whole = [(rows.start, rows.stop) for rows in make(num_samples, num_slice_rows=num_slice_rows).shares.own_slices()]
    shared = []
    for rank in range(size):
        ground = make(num_samples, num_slice_rows=num_slice_rows, ranks=RankGroup(rank, size))
        slices = [(rows.start, rows.stop) for rows in ground.shares.own_slices()]
        own = ground.shares.own_rows()
        assert [row for start, stop in slices for row in range(start, stop)] == list(own)
        shared += slices
    assert shared == whole
    assert [start for start, _ in whole] + [num_samples] == [0] + [stop for _, stop in whole]
    assert all(0 < stop - start <= num_slice_rows for start, stop in whole)


@pytest.mark.parametrize("num_slice_rows", [16_384, 100, 7])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_any_number_of_ranks_gives_the_bits_of_one(num_slice_rows, is_reversed):
    """Ranks 13: with 16,384 rows a slice there is one slice, and most ranks have nothing to add."""
    weights_N = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def job(ranks):
        ground = make(500, num_slice_rows=num_slice_rows, ranks=ranks)
        shares = ground.shares
        return (
            shares.sum_over_slices(lambda rows: (weights_N[rows, None] * ground.features(rows)).sum(0), bound=500.0),
            shares.map_over_slices(lambda rows: ground.features(rows).square().sum(1)),
            shares.stack_over_slices(lambda rows: weights_N[rows].square().sum()),
            ground.mean(),
            ground.centered(slice(None)),
        )

    (expected,) = on_ranks(1, job)
    for size in (2, 3, 4, 13):
        for results in on_ranks(size, job, is_reversed=is_reversed):
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_sums_and_maps_are_those_of_all_rows():
    ground = make(503, num_slice_rows=50, dtype=torch.float64)
    features_ND = problems.unit_rows(503, 5, 0)
    total_D = ground.shares.sum_over_slices(lambda rows: ground.features(rows).sum(0), bound=503.0)
    np.testing.assert_allclose(total_D, features_ND.sum(0), atol=1e-11)
    np.testing.assert_allclose(ground.mean(), features_ND.mean(0), atol=1e-13)
    np.testing.assert_allclose(ground.centered(slice(None)).sum(0), 0.0, atol=1e-11)
    parts = ground.shares.stack_over_slices(lambda rows: ground.features(rows).sum(0))
    np.testing.assert_allclose(parts, [features_ND[rows].sum(0) for rows in ground.shares.own_slices()], atol=1e-12)
    norms_N = ground.shares.map_over_slices(lambda rows: ground.features(rows).norm(dim=1))
    assert norms_N.dtype == torch.float64
    np.testing.assert_allclose(norms_N, 1.0, atol=1e-12)


def test_a_part_that_hands_out_its_own_tensor_keeps_it():
    ground = make(100, num_slice_rows=10)
    part = torch.full((2,), 1 / 3, dtype=torch.float64)
    ground.shares.sum_over_slices(lambda rows: part, bound=1000.0)
    assert part.tolist() == [1 / 3, 1 / 3]


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_part_has_the_features_the_mean_and_the_budget_of_the_whole(monkeypatch, has_copy):
    if not has_copy:
        monkeypatch.setattr(ground_set_module, "CENTERED_COPY_BYTES", 0)
    rows = torch.tensor([17, 3, 4, 11])

    def job(ranks):
        whole = make(20, num_selected=5, num_slice_rows=3, ranks=ranks)
        part = whole.part(rows)
        assert (part.num_samples, part.num_selected, part.shares.ranks.size) == (4, 5, 1)
        assert torch.equal(part.features(slice(1, 3)), whole.features(rows[1:3]))
        assert torch.equal(part.quality_N, whole.quality_N[rows])
        assert [(own.start, own.stop) for own in part.shares.own_slices()] == [(0, 4)]
        return part.centered(slice(None)), whole.centered(rows), part.centered(torch.tensor([2, 0]))

    for of_part_CD, of_whole_CD, chosen_CD in on_ranks(2, job):
        assert torch.equal(of_part_CD, of_whole_CD)
        assert torch.equal(chosen_CD, of_whole_CD[[2, 0]])
        np.testing.assert_allclose(of_whole_CD, make(20).centered(rows), rtol=0, atol=1e-7)


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_features_are_unit_float32_rows_with_and_without_a_copy(monkeypatch, has_copy, dtype):
    if not has_copy:
        monkeypatch.setattr(ground_set_module, "FLOAT32_COPY_BYTES", 0)
        monkeypatch.setattr(ground_set_module, "CENTERED_COPY_BYTES", 0)
    raw_ND = (torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    before_ND = raw_ND.clone()
    ground = GroundSet.of(
        features_ND=raw_ND,
        quality_N=torch.zeros(30),
        budget=3,
        inv_norm_N=1.0 / raw_ND.float().norm(dim=1),
    )
    mask_N = torch.arange(30) % 3 == 0
    expected_ND = torch.nn.functional.normalize(raw_ND.float())
    for rows in (slice(None), slice(4, 9), slice(0, 0), torch.tensor([5, 2]), mask_N):
        assert ground.features(rows).dtype == torch.float32
        torch.testing.assert_close(ground.features(rows), expected_ND[rows])
        torch.testing.assert_close(ground.centered(rows), expected_ND[rows] - expected_ND.mean(0))
    assert torch.equal(raw_ND, before_ND)


def test_what_is_cached_is_built_once():
    ground = make(10)
    assert not ground.shares.is_cached("a")
    assert ground.shares.cached("a", lambda: [1]) is ground.shares.cached("a", lambda: pytest.fail("built twice"))
    assert ground.shares.is_cached("a")


def test_a_part_that_is_the_whole_block_keeps_what_is_derived_from_it():
    ground = make(50, num_selected=5)
    whole = part_of(ground, torch.arange(50), helpers=RankGroup())
    assert whole.shares.cached("derived", lambda: 1) == 1
    again = part_of(ground, torch.arange(50), helpers=RankGroup())
    assert again.shares.cached("derived", lambda: 2) == 1
    assert torch.equal(again.features(slice(None)), ground.features(slice(None)))
    assert again.num_selected == 5
    part = part_of(ground, torch.arange(40), helpers=RankGroup())
    assert part.shares.cached("derived", lambda: 3) == 3
    assert part.num_selected == 4
