"""What `compare` shows is what the formulas say, and what the optimiser maximised."""

import numpy as np
import pytest
import torch

from datamask_pl.evidence import measures
from tests.support import oracles
from tests.support.problems import DIVERSITIES, ground_set, random_masks, unit_rows

FEATURES_ND = unit_rows(40, 6, seed=1)
MASKS_RN = random_masks(5, 40, 8, seed=2)
MEASURES = {
    "facility_location": measures.facility_location,
    "pairwise": measures.pairwise_similarity,
    "disf": measures.disf,
}
ORACLES = {
    "facility_location": oracles.facility_location,
    "pairwise": lambda mask_N, features_ND: oracles.pairwise(mask_N, features_ND, num_selected=8),
    "disf": lambda mask_N, features_ND: oracles.disf(mask_N, features_ND, num_selected=8),
}


@pytest.mark.parametrize("chunk_rows", [3, 4096])
@pytest.mark.parametrize("kind", MEASURES)
def test_a_measure_is_its_formula(monkeypatch, kind, chunk_rows):
    monkeypatch.setattr(measures, "_CHUNK_ROWS", chunk_rows)
    for mask_N in MASKS_RN:
        value = MEASURES[kind](torch.tensor(mask_N), torch.tensor(FEATURES_ND))
        assert value == pytest.approx(ORACLES[kind](mask_N, FEATURES_ND), abs=1e-12)


@pytest.mark.parametrize("kind", MEASURES)
def test_a_measure_is_what_the_objective_of_its_name_maximises(kind):
    ground = ground_set(FEATURES_ND, 8, dtype=torch.float32)
    values_R = DIVERSITIES[kind].value(torch.tensor(MASKS_RN), ground)
    features_ND = torch.tensor(FEATURES_ND, dtype=torch.float32)
    found = [MEASURES[kind](torch.tensor(mask_N), features_ND) for mask_N in MASKS_RN]
    assert values_R.tolist() == pytest.approx(found, abs=1e-6)


def test_the_pairwise_term_of_one_sample_is_0():
    assert measures.pairwise_similarity(torch.tensor([True, False]), torch.eye(2)) == 0.0


@pytest.mark.parametrize("chunk_rows", [3, 4096])
def test_near_duplicates_are_kept_samples_with_another_kept_one_above_the_cosine(monkeypatch, chunk_rows):
    monkeypatch.setattr(measures, "_CHUNK_ROWS", chunk_rows)
    features_ND = np.concatenate([FEATURES_ND, FEATURES_ND[:10]])
    mask_N = np.random.default_rng(3).random(50) < 0.6
    kept = np.flatnonzero(mask_N)
    expected = np.mean([any(features_ND[i] @ features_ND[j] > 0.7 for j in kept if j != i) for i in kept])
    assert 0 < expected < 1
    found = measures.near_duplicate_share(torch.tensor(mask_N), torch.tensor(features_ND), cosine=0.7)
    assert found == pytest.approx(expected)


def test_overlap_counts_each_sample_once():
    one, other = {1, 2, 3, 5}, {2, 3, 8}
    masks = [torch.tensor([row in kept for row in range(10)]) for kept in (one, other)]
    assert measures.jaccard(*masks) == pytest.approx(len(one & other) / len(one | other))
    assert measures.jaccard(torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)) == 1.0
