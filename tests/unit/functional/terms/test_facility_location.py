import numpy as np
import pytest
import torch

from datamask_pl.functional.kernels import pack_bits
from datamask_pl.functional.terms.facility_location import (
    OTHER,
    OTHER_KEPT,
    WalkBuffers,
    candidate_entries,
    expected_coverage,
    nearest_kept_similarity,
)
from tests.support import oracles


def sorted_similarities(num_neighbors: int, num_samples: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(num_neighbors, num_samples, generator=source, dtype=torch.float64).sort(0, descending=True).values


def nearest_of_list(similarity_T, mask_T):
    """Similarity of the first kept neighbour; 0 if there is none."""
    kept_T = np.flatnonzero(mask_T)
    return float(similarity_T[kept_T[0]]) if len(kept_T) else 0.0


@pytest.mark.parametrize("num_neighbors", [1, 2, 5, 8])
def test_expected_coverage_is_the_sum_over_all_masks(num_neighbors):
    similarity_TV = sorted_similarities(num_neighbors, 3)
    p_TV = torch.rand(num_neighbors, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    coverage = expected_coverage(similarity_TV, p_TV)
    for v in range(3):
        similarity_T, p_T = similarity_TV[:, v].numpy(), p_TV[:, v].numpy()

        def nearest(mask_T, similarity_T=similarity_T):
            return nearest_of_list(similarity_T, mask_T)

        assert float(coverage.value_V[v]) == pytest.approx(oracles.multilinear_extension(p_T, nearest), abs=1e-12)
        np.testing.assert_allclose(coverage.gain_TV[:, v], oracles.multilinear_gradient(p_T, nearest), atol=1e-12)
        assert float(coverage.left_out_V[v]) == pytest.approx(similarity_T[-1] * np.prod(1 - p_T), abs=1e-12)


def test_expected_coverage_at_a_mask_is_the_nearest_kept_and_its_marginal_gains():
    similarity_T = sorted_similarities(6, 1)
    for mask_T in oracles.all_masks(6):
        coverage = expected_coverage(similarity_T, torch.tensor(mask_T, dtype=torch.float64)[:, None])

        def nearest(kept_T):
            return nearest_of_list(similarity_T[:, 0].numpy(), kept_T)

        assert float(coverage.value_V[0]) == nearest(mask_T)
        np.testing.assert_allclose(coverage.gain_TV[:, 0], oracles.marginal_gains(mask_T, nearest), atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_similarities_of_any_type_are_taken_as_those_of_the_probabilities(dtype):
    similarity_TV = sorted_similarities(9, 20)
    p_TV = torch.rand(9, 20, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for given_TV in (similarity_TV, similarity_TV.float()):
        found = expected_coverage(given_TV, p_TV)
        expected = expected_coverage(given_TV.to(dtype), p_TV)
        for name in ("value_V", "gain_TV", "left_out_V"):
            assert getattr(found, name).dtype == dtype
            assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expected_coverage_of_a_sample_is_the_same_bits_in_any_chunk_and_in_used_memory(dtype):
    similarity_TV = sorted_similarities(9, 101).to(dtype)
    p_TV = torch.rand(9, 101, generator=torch.Generator().manual_seed(1), dtype=dtype)
    whole = expected_coverage(similarity_TV, p_TV)
    buffers = WalkBuffers(9, 60, dtype=dtype, device=p_TV.device)
    for start, stop in ((0, 60), (60, 61), (61, 101), (7, 40)):
        matrices = buffers.of_size(stop - start)
        p_TC = matrices.p_TV.copy_(p_TV[:, start:stop])
        part = expected_coverage(similarity_TV[:, start:stop], p_TC, scale=2.0**30, matrices=matrices)
        assert torch.equal(part.value_V, whole.value_V[start:stop])
        assert torch.equal(part.gain_TV, whole.gain_TV[:, start:stop] * 2.0**30)
        assert torch.equal(part.left_out_V, whole.left_out_V[start:stop] * 2.0**30)
        assert part.gain_TV.data_ptr() == matrices.after_TV.data_ptr()


@pytest.mark.parametrize(("dtype", "left"), [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_neighbours_behind_many_that_are_all_but_kept_have_gains_of_zero_and_no_subnormal_ones(dtype, left):
    similarity_TV = sorted_similarities(60, 1).to(dtype)
    gain_TV = expected_coverage(similarity_TV, torch.full_like(similarity_TV, 1 - left), scale=2.0**35).gain_TV
    assert gain_TV[0, 0] > 0
    assert (gain_TV[8:] == 0).all()
    assert (gain_TV[gain_TV != 0].abs() >= torch.finfo(dtype).tiny).all()


@pytest.mark.parametrize("num_masks", [3, 8, 17])
@pytest.mark.parametrize("num_neighbors", [1, 4, 16, 17, 40, 256])
def test_the_walk_along_the_lists_finds_the_first_kept_neighbour(num_neighbors, num_masks):
    num_samples = max(num_neighbors, 20)
    source = torch.Generator().manual_seed(num_neighbors)
    similarity_TV = sorted_similarities(num_neighbors, num_samples).float()
    neighbor_TV = torch.stack(
        [torch.randperm(num_samples, generator=source)[:num_neighbors] for _ in range(num_samples)], dim=1
    ).int()
    masks_NR = torch.rand(num_samples, num_masks, generator=source) < 2 / num_neighbors
    masks_NR[:, 0] = False
    masks_NR[:, 1] = True
    nearest_VR, is_open_VR = nearest_kept_similarity(similarity_TV, neighbor_TV, pack_bits(masks_NR), num_masks)
    for v in range(num_samples):
        for r in range(num_masks):
            kept_T = masks_NR[neighbor_TV[:, v].long(), r].numpy()
            assert float(nearest_VR[v, r]) == nearest_of_list(similarity_TV[:, v].numpy(), kept_T)
            assert bool(is_open_VR[v, r]) == (not kept_T.any())


@pytest.mark.parametrize("num_left_out", range(13, 21))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_lists_that_end_late_are_walked_to_their_end_also_where_it_is_one_alone(num_left_out, dtype):
    """Of samples on a circle the first few are left out: of each, and of those before it, the nearest kept is told."""
    rows_T, rows_V = torch.arange(18)[:, None], torch.arange(40)
    neighbor_TV = ((rows_T + rows_V) % 40).int()
    similarity_TV = (1 - rows_T / 32).expand(18, 40).to(dtype)
    mask_N1 = (rows_V >= num_left_out)[:, None]
    nearest_VR, is_open_VR = nearest_kept_similarity(similarity_TV, neighbor_TV, pack_bits(mask_N1), 1)
    distance_V = [max(num_left_out - v, 0) for v in range(40)]
    assert nearest_VR.flatten().tolist() == [1 - t / 32 if t < 18 else 0.0 for t in distance_V]
    assert is_open_VR.flatten().tolist() == [t >= 18 for t in distance_V]
    assert nearest_VR.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("num_levels", [3, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidates_cover_more_than_the_first_other_kept_one_as_a_loop_finds(num_levels, dtype):
    """Also where no other is kept, where the nearest is, where candidates come behind it, and where all are equal."""
    rng = np.random.default_rng(num_levels)
    similarity_TV = (torch.tensor(np.floor(rng.uniform(size=(6, 200)) * num_levels)) / num_levels).to(dtype)
    similarity_TV = similarity_TV.sort(0, descending=True).values
    candidate_TV = torch.tensor(rng.choice([OTHER_KEPT, OTHER, OTHER, 0, 1, 2], size=(6, 200)), dtype=torch.int32)
    expected = []
    for v in range(200):
        for t in range(6):
            candidates_T = candidate_TV[:, v].tolist()
            others = [float(similarity_TV[u, v]) for u in range(6) if candidates_T[u] == OTHER_KEPT]
            more = float(similarity_TV[t, v]) - max(others, default=0.0)
            if candidates_T[t] >= 0 and more > 0:
                expected.append((v, candidates_T[t], more))
    sample_E, candidate_E, more_E = candidate_entries(similarity_TV, candidate_TV)
    assert (sample_E.dtype, candidate_E.dtype, more_E.dtype) == (torch.int64, torch.int64, torch.float64)
    assert list(zip(sample_E.tolist(), candidate_E.tolist(), more_E.tolist(), strict=True)) == expected
