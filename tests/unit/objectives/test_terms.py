import warnings

import numpy as np
import pytest
import torch

from datamask_pl.errors import ConfigError
from datamask_pl.functional.neighbors import exact, inverted_file
from datamask_pl.functional.terms import facility_location as facility_location_functions
from datamask_pl.objectives import (
    DiSF,
    Expectation,
    FacilityLocation,
    Objective,
    PairwiseSimilarity,
    Quality,
    disf,
    feature_sums,
    neighbor_table,
)
from datamask_pl.objectives import ground_set as ground_set_module
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective
from datamask_pl.objectives.swap_support import SupportsCoverage, SupportsInteractions
from tests.support import oracles, problems
from tests.support.pretended_ranks import on_ranks
from tests.support.problems import DIVERSITIES, ground_set, qualities, random_masks, unit_rows, value_of

EXACT = ["facility_location", "pairwise", "disf"]


def set_function(kind, features_ND, num_selected):
    quality_N = np.zeros(len(features_ND))
    return oracles.objective(kind, features_ND, quality_N, num_selected=num_selected, quality_weight=0.0)


def degenerate_rows(name):
    same_ND = np.tile(unit_rows(1, 4, 0), (8, 1))
    return {
        "identical": same_ND,
        "opposite": same_ND * np.where(np.arange(8) % 2, -1.0, 1.0)[:, None],
        "two-groups-of-copies": unit_rows(2, 4, 1)[np.arange(8) % 2],
        "constant-dimensions": np.pad(unit_rows(8, 2, 2) * 0.6, ((0, 0), (0, 2)), constant_values=0.8 / 2**0.5),
        "one-dimension": np.where(np.arange(8) < 3, -1.0, 1.0)[:, None],
    }[name]


# ---- coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_coverage_of_candidates_gives_the_value_of_every_choice_among_them(num_ranks):
    """The same entries in the same order on any number of ranks."""
    features_ND = unit_rows(40, 4, 0)
    value = set_function("facility_location", features_ND, 10)
    objective, rows_P = FacilityLocation(num_neighbors=40), torch.tensor([7, 2, 30, 0, 39, 21])
    mask_N = random_masks(1, 40, 10, 1)[0]

    def entries(ranks):
        ground = ground_set(features_ND, 10, num_slice_rows=7, ranks=ranks)
        return objective.coverage(torch.tensor(mask_N), rows_P, ground)

    for sample_E, candidate_E, worth_E in on_ranks(num_ranks, entries):
        assert (sample_E.diff() >= 0).all()
        assert (worth_E > 0).all()
        without_N = mask_N.copy()
        without_N[rows_P] = False
        for choice_P in random_masks(4, 6, 3, 2):
            chosen_N = without_N.copy()
            chosen_N[rows_P[choice_P]] = True
            best_N = np.zeros(40)
            for sample, candidate, worth in zip(sample_E, candidate_E, worth_E, strict=True):
                best_N[sample] = max(best_N[sample], float(worth) * choice_P[candidate])
            assert value(chosen_N) == pytest.approx(value(without_N) + best_N.sum(), abs=1e-9)
    ours, others = on_ranks(1, entries)[0], on_ranks(num_ranks, entries)
    assert all(
        torch.equal(one, other) for other_entries in others for one, other in zip(ours, other_entries, strict=True)
    )


# ---- interactions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairwise", "disf"])
@pytest.mark.parametrize("num_selected", [1, 4])
def test_interactions_are_second_differences_of_the_value(kind, num_selected):
    """In any set, also of another size: f(S + i + j) - f(S + i) - f(S + j) + f(S), with k as it is."""
    features_ND = unit_rows(9, 4, 0)
    ground, value = ground_set(features_ND, num_selected), set_function(kind, features_ND, num_selected)
    assert DIVERSITIES[kind].has_interactions
    assert Quality().has_interactions
    assert not DiSF(standardize=True).has_interactions
    assert not isinstance(FacilityLocation(), SupportsInteractions)
    supports = [isinstance(DIVERSITIES[name], SupportsCoverage) for name in ("facility_location", "pairwise", "disf")]
    assert supports == [True, False, False]
    rows, others = [7, 2, 3, 0], [5, 2, 8]
    interaction_CO = DIVERSITIES[kind].interactions(torch.tensor(rows), torch.tensor(others), ground)
    of_slice_CO = DIVERSITIES[kind].interactions(slice(1, 9), torch.tensor(others), ground)
    np.testing.assert_allclose(of_slice_CO[[6, 1, 2]], interaction_CO[:3], rtol=1e-12)
    for mask_N in random_masks(3, 9, 3, 1):
        for a, i in enumerate(rows):
            for b, j in enumerate(others):
                if i != j:
                    mask_N[[i, j]] = False
                    sets = np.stack([mask_N] * 4)
                    sets[[0, 1], i] = sets[[0, 2], j] = True
                    both, first, second, neither = map(value, sets)
                    assert float(interaction_CO[a, b]) == pytest.approx(both - first - second + neither, abs=1e-9)


# ---- value -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DIVERSITIES)
@pytest.mark.parametrize("num_selected", [1, 2, 9, 30])
@pytest.mark.parametrize("num_slice_rows", [16_384, 7])
def test_values_are_those_of_the_oracles(kind, num_selected, num_slice_rows):
    features_ND = unit_rows(30, 4, 0)
    ground = ground_set(features_ND, num_selected, num_slice_rows=num_slice_rows)
    masks_RN = random_masks(5, 30, num_selected, 0)
    value_R = DIVERSITIES[kind].value(torch.tensor(masks_RN), ground)
    expected_R = [set_function(kind, features_ND, num_selected)(mask_N) for mask_N in masks_RN]
    assert value_R.dtype == torch.float64
    # two samples are perfectly correlated: nothing cancels, but the variances may be small
    np.testing.assert_allclose(value_R, expected_R, rtol=1e-8 if kind == "disf_standardized" else 1e-12, atol=1e-12)


def test_pairwise_sums_reached_by_differences_have_the_bits_of_a_pass_over_all_rows(monkeypatch):
    monkeypatch.setattr(feature_sums, "MIN_SAMPLES_OF_DIFFERENCES", 1)
    monkeypatch.setattr(feature_sums, "SAMPLES_PER_CHANGE", 20)
    features_ND = unit_rows(600, 5, 0)
    masks_RN = torch.tensor(random_masks(3, 600, 60, 0))
    swapped_RN = masks_RN.clone()
    for mask_N in swapped_RN:
        mask_N[mask_N.nonzero()[:2, 0]], mask_N[(~mask_N).nonzero()[-2:, 0]] = False, True
    trials_RN = torch.stack([masks_RN[0], swapped_RN[0], masks_RN[1], masks_RN[0], swapped_RN[2], masks_RN[2]])
    term, ground = PairwiseSimilarity(), ground_set(features_ND, 60, num_slice_rows=70)
    passes, exact = [], feature_sums._exact
    monkeypatch.setattr(feature_sums, "_exact", lambda masks, of: passes.append(len(masks)) or exact(masks, of))
    together_R = term.value(trials_RN, ground)
    assert passes == [1, 3]
    alone_R = torch.cat([term.value(mask_N[None], ground_set(features_ND, 60)) for mask_N in trials_RN])
    in_turn_R = torch.cat([term.value(mask_N[None], ground) for mask_N in trials_RN])
    assert torch.equal(together_R, alone_R)
    assert torch.equal(in_turn_R, alone_R)
    np.testing.assert_allclose(alone_R, [set_function("pairwise", features_ND, 60)(mask_N) for mask_N in trials_RN])
    at_mask = term.value_and_gradient(trials_RN[1].double(), ground)
    assert at_mask.value == alone_R[1]


@pytest.mark.parametrize("kind", DIVERSITIES)
@pytest.mark.parametrize(
    "rows", ["identical", "opposite", "two-groups-of-copies", "constant-dimensions", "one-dimension"]
)
@pytest.mark.parametrize("num_selected", [1, 2, 5, 8])
def test_degenerate_sets_have_the_value_of_the_oracle_and_a_finite_gradient(kind, rows, num_selected):
    features_ND = degenerate_rows(rows)
    ground = ground_set(features_ND, num_selected)
    for mask_N in random_masks(4, 8, num_selected, 1):
        expected = set_function(kind, features_ND, num_selected)(mask_N)
        assert value_of(DIVERSITIES[kind], mask_N, ground) == pytest.approx(expected, abs=1e-9)
        result = DIVERSITIES[kind].value_and_gradient(torch.tensor(mask_N).double(), ground)
        assert float(result.value) == pytest.approx(expected, abs=1e-9)
        assert torch.isfinite(result.gradient_N).all()


def test_quality_is_the_mean_of_the_kept():
    quality_N = qualities(10, 0)
    ground = ground_set(unit_rows(10, 2, 0), 4, quality_N=quality_N)
    for mask_N in random_masks(3, 10, 4, 0):
        assert value_of(Quality(), mask_N, ground) == pytest.approx(quality_N[mask_N].mean(), rel=1e-14)


def test_disf_by_gram_matrix_and_by_moments_agree(monkeypatch):
    features_ND, masks_RN = unit_rows(60, 5, 0), torch.tensor(random_masks(4, 60, 12, 0))
    by_gram_R = DiSF().value(masks_RN, ground_set(features_ND, 12))
    monkeypatch.setattr(disf, "MAX_GRAM_SAMPLES", 59)
    by_moments_R = DiSF().value(masks_RN, ground_set(features_ND, 12, num_slice_rows=13))
    np.testing.assert_allclose(by_gram_R, by_moments_R, rtol=1e-11)


@pytest.mark.parametrize("kind", DIVERSITIES)
def test_float32_values_are_close_to_those_of_float64(kind):
    features_ND, masks_RN = unit_rows(3000, 16, 0), torch.tensor(random_masks(3, 3000, 300, 0))
    values = [
        DIVERSITIES[kind].value(masks_RN, ground_set(features_ND, 300, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    np.testing.assert_allclose(*values, rtol=2e-6)


@pytest.fixture
def has_bfloat16(monkeypatch):
    """Quick products, also on a processor on which they are none."""
    monkeypatch.setattr(ground_set_module, "multiplies_bfloat16", lambda device: True)


@pytest.mark.usefixtures("has_bfloat16")
@pytest.mark.parametrize("num_selected", [300, 2000])
def test_quick_products_leave_a_mask_alone_and_the_gradient_elsewhere_nearly(monkeypatch, num_selected):
    monkeypatch.setattr(disf, "MAX_GRAM_SAMPLES", 0)
    features_ND, masks_RN = unit_rows(3000, 16, 0), torch.tensor(random_masks(2, 3000, num_selected, 0))
    quick, exact = (ground_set(features_ND, num_selected, dtype=dtype) for dtype in (torch.float32, torch.float64))
    np.testing.assert_allclose(DiSF().value(masks_RN, quick), DiSF().value(masks_RN, exact), rtol=2e-6)
    for p_N, precision in ((masks_RN[0].double(), 1e-4), (torch.tensor(qualities(3000, 0)), 1 / 20)):
        found, expected = (DiSF().value_and_gradient(p_N, ground) for ground in (quick, exact))
        error, spread = (found.gradient_N - expected.gradient_N).abs().max(), expected.gradient_N.std()
        assert error <= precision * spread
        assert float(found.value) == pytest.approx(float(expected.value), rel=2e-6 if precision == 1e-4 else 1e-3)
    assert error > 1e-4 * spread, "products were not quick"


@pytest.mark.usefixtures("has_bfloat16")
@pytest.mark.parametrize("size", [2, 3])
def test_quick_products_give_the_same_bits_on_any_number_of_ranks(monkeypatch, size):
    monkeypatch.setattr(disf, "MAX_GRAM_SAMPLES", 0)
    features_ND, p_N = unit_rows(3000, 24, 0), torch.tensor(qualities(3000, 0))
    mask_N = torch.tensor(random_masks(1, 3000, 300, 0)[0])

    def job(ranks):
        ground = ground_set(features_ND, 300, dtype=torch.float32, num_slice_rows=700, ranks=ranks)
        found = [DiSF().value_and_gradient(p, ground) for p in (p_N, mask_N.double())]
        return torch.cat([torch.cat([part.value[None], part.gradient_N]) for part in found])

    alone = on_ranks(1, job)[0]
    for shared in on_ranks(size, job):
        assert torch.equal(shared, alone)


def test_what_disf_was_asked_before_does_not_show(monkeypatch):
    """The moment of the last mask is kept."""
    monkeypatch.setattr(disf, "MAX_GRAM_SAMPLES", 0)
    features_ND, masks_RN = unit_rows(300, 6, 0), torch.tensor(random_masks(3, 300, 40, 0))
    used = ground_set(features_ND, 40, dtype=torch.float32)
    for mask_N in masks_RN[[0, 1, 0, 0, 2]]:
        for p_N in (mask_N.double(), torch.tensor(qualities(300, 1)), mask_N.double()):
            fresh = ground_set(features_ND, 40, dtype=torch.float32)
            assert torch.equal(
                DiSF().value_and_gradient(p_N, used).gradient_N, DiSF().value_and_gradient(p_N, fresh).gradient_N
            )
        mask_N = mask_N.clone()
        assert torch.equal(DiSF().value(mask_N[None], used), DiSF().value(mask_N[None], fresh))
        mask_N[:] = ~mask_N  # what is kept must not follow
        assert torch.equal(DiSF().value(masks_RN[:1], used), DiSF().value(masks_RN[:1], fresh))


def test_standardized_disf_of_float32_features_knows_a_constant_dimension():
    """In float32 moments, what the subtraction leaves of a constant dimension looks like a variance."""
    for seed in range(12):
        features_ND = 0.3 * unit_rows(1000, 6, seed).astype(np.float32)
        mask_N = random_masks(1, 1000, 330, seed)[0]
        features_ND[mask_N, :2] = np.random.default_rng(seed).uniform(-0.6, 0.6, size=2)
        expected = oracles.disf_standardized(mask_N, features_ND.astype(np.float64))
        ground = ground_set(features_ND, 330, dtype=torch.float32)
        assert value_of(DiSF(standardize=True), mask_N, ground) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("num_neighbors", [1, 2, 5, 30])
@pytest.mark.parametrize("num_selected", [1, 6])
def test_facility_location_by_lists_of_any_length_is_exact(num_neighbors, num_selected):
    features_ND = unit_rows(30, 3, 0)
    ground = ground_set(features_ND, num_selected, num_slice_rows=11)
    objective = FacilityLocation(num_neighbors=num_neighbors)
    masks_RN = torch.tensor(random_masks(40, 30, num_selected, 0))
    by_lists_R = objective.value(masks_RN, ground)
    assert ground.shares.is_cached(objective._key(ground))
    expected_R = [oracles.facility_location(mask_N, features_ND) for mask_N in masks_RN.numpy()]
    np.testing.assert_allclose(by_lists_R, expected_R, rtol=1e-12)


def test_facility_location_of_a_single_mask_builds_no_lists():
    features_ND = unit_rows(30, 3, 0)
    ground = ground_set(features_ND, 3, num_slice_rows=11)
    mask_N = random_masks(1, 30, 3, 0)[0]
    value = value_of(FacilityLocation(), mask_N, ground)
    assert not ground.shares.is_cached(FacilityLocation()._key(ground))
    assert value == pytest.approx(oracles.facility_location(mask_N, features_ND), rel=1e-12)


def clustered(num_samples):
    rng = np.random.default_rng(0)
    features_ND = rng.normal(size=(20, 6))[rng.integers(20, size=num_samples)] + 0.5 * rng.normal(size=(num_samples, 6))
    return features_ND / np.linalg.norm(features_ND, axis=1, keepdims=True)


def test_values_by_approximate_lists_are_lower_bounds_close_to_the_exact_ones(monkeypatch):
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 20)
    features_ND = clustered(800)
    masks_RN = torch.tensor(random_masks(6, 800, 80, 0))
    objective = FacilityLocation(neighbors="approximate", recall=0.9)
    value_R = objective.value(masks_RN, ground_set(features_ND, 80))
    exact_R = [oracles.facility_location(mask_N, features_ND) for mask_N in masks_RN.numpy()]
    # the table's float16 rounds each similarity by 2^-12 of itself at most, up or down
    assert all(value < exact * (1 + 2**-12) for value, exact in zip(value_R.tolist(), exact_R, strict=True))
    np.testing.assert_allclose(value_R, exact_R, rtol=0.01)


@pytest.mark.filterwarnings("ignore:.*a recall of")
def test_one_mask_alone_has_the_value_that_it_has_among_many_where_lists_are_approximate(monkeypatch):
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 20)
    masks_RN, features_ND = torch.tensor(random_masks(30, 300, 5, 0)), clustered(300)
    objective = FacilityLocation(num_neighbors=4, neighbors="approximate", recall=0.5)
    together_R = objective.value(masks_RN, ground_set(features_ND, 5))
    alone_R = [float(objective.value(mask_N[None], ground_set(features_ND, 5))[0]) for mask_N in masks_RN]
    assert together_R.tolist() == alone_R


def test_recall_is_logged_where_lists_are_approximate_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(neighbor_table, "MAX_EXACT_SAMPLES", 100)
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 20)

    def logged(num_samples, **options):
        ground = ground_set(clustered(num_samples), 5)
        p_N = torch.full((num_samples,), 5 / num_samples, dtype=torch.float64)
        return FacilityLocation(**options).value_and_gradient(p_N, ground).diagnostics

    assert 0.9 <= float(logged(300)["recall"]) <= 1.0
    assert 0.9 <= float(logged(80, neighbors="approximate")["recall"]) <= 1.0
    assert "recall" not in logged(80)
    assert "recall" not in logged(300, neighbors="exact")


def test_a_low_recall_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 10)
    ground = ground_set(unit_rows(300, 6, 0), 5)
    objective = FacilityLocation(num_neighbors=30, neighbors="approximate", recall=0.3)
    masks_RN = torch.tensor(random_masks(1, 300, 5, 0))
    with pytest.warns(UserWarning, match=r"recall of only 0\.[0-8]\d \(< 0\.9\).*raise `recall`"):
        objective.value(masks_RN, ground)
    objective.value(masks_RN, ground)  # a warning is an error here


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recall": 0.0}, "recall must be above 0"),
        ({"recall": 1.1}, "recall must be above 0"),
        ({"neighbors": "faiss"}, "neighbors must be one of auto, exact, approximate, got 'faiss'"),
    ],
)
def test_options_of_facility_location_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        FacilityLocation(**options)


@pytest.mark.parametrize("neighbors", ["exact", "approximate"])
def test_helpers_build_the_table_of_one_process(monkeypatch, neighbors):
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 20)
    monkeypatch.setattr(facility_location_functions, "LIST_ROWS", 64)
    features_ND, masks_RN = clustered(700), torch.tensor(random_masks(20, 700, 70, 0))
    objective = FacilityLocation(neighbors=neighbors)

    def job(helpers):
        ground = GroundSet.of(
            features_ND=torch.tensor(features_ND).float(),
            quality_N=torch.zeros(700),
            budget=70,
            num_slice_rows=90,
            helpers=helpers,
        )
        return objective.value(masks_RN, ground), objective.value_and_gradient(masks_RN[0].double(), ground).gradient_N

    (expected,) = on_ranks(1, job)
    for size in (2, 5, 13):
        for results in on_ranks(size, job):
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize(("num_rollouts", "num_selected"), [(20, 40), (20, 5), (3, 40)])
def test_values_of_prepared_sets_do_not_depend_on_how_the_masks_are_shared_out(num_rollouts, num_selected):
    """Lists and brute force differ in the last bits of float32: which of them is used must not depend on the chunk."""
    features_ND = unit_rows(200, 32, 0)
    masks_RN = torch.tensor(random_masks(num_rollouts, 200, num_selected, 0))
    joint = JointObjective(quality_weight=0.0, diversity="facility_location")

    def values_of_share(masks_of_share):
        ground = ground_set(features_ND, num_selected, dtype=torch.float32)
        joint.prepare(ground, num_masks=num_rollouts)
        return torch.cat([joint.term_values(chunk, ground)[1] for chunk in masks_of_share])

    chunks = masks_RN.split(8)
    one_rank_R = values_of_share(chunks)
    a_rank_a_chunk_R = torch.cat([values_of_share([chunk]) for chunk in chunks])
    assert torch.equal(one_rank_R, a_rank_a_chunk_R)


def test_facility_location_of_a_greedy_mask_is_that_of_apricot_on_the_same_matrix():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # apricot imports deprecated parts of its dependencies
        apricot = pytest.importorskip("apricot")
    features_ND = unit_rows(40, 6, 0)
    similarity_NN = (features_ND @ features_ND.T).clip(min=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba warns that it cannot reflect lists
        selection = apricot.FacilityLocationSelection(6, metric="precomputed").fit(similarity_NN)
    mask_N = oracles.mask_of(list(selection.ranking), 40)
    value = value_of(FacilityLocation(), mask_N, ground_set(features_ND, 6))
    assert value == pytest.approx(float(np.sum(selection.gains)) / 40, rel=1e-9)


# ---- expectation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("num_selected", [1, 2, 4])
@pytest.mark.parametrize("num_slice_rows", [16_384, 3])
def test_expectation_and_gradient_are_the_sums_over_all_masks(kind, num_selected, num_slice_rows):
    features_ND = unit_rows(8, 3, num_selected)
    ground = ground_set(features_ND, num_selected, num_slice_rows=num_slice_rows)
    oracle = set_function(kind, features_ND, num_selected)
    rng = np.random.default_rng(0)
    for p_N in (rng.uniform(size=8), rng.choice([0.0, 0.5, 1.0], size=8), np.full(8, num_selected / 8)):
        result = DIVERSITIES[kind].value_and_gradient(torch.tensor(p_N), ground)
        assert float(result.value) == pytest.approx(oracles.multilinear_extension(p_N, oracle), abs=1e-11)
        np.testing.assert_allclose(result.gradient_N, oracles.multilinear_gradient(p_N, oracle), atol=1e-11)


def test_expectation_of_quality_is_the_sum_over_all_masks():
    quality_N, p_N = qualities(8, 0), np.random.default_rng(0).uniform(size=8)
    ground = ground_set(unit_rows(8, 2, 0), 3, quality_N=quality_N)
    result = Quality().value_and_gradient(torch.tensor(p_N), ground)

    def oracle(mask_N):
        return oracles.quality_mean(mask_N, quality_N, num_selected=3)

    assert float(result.value) == pytest.approx(oracles.multilinear_extension(p_N, oracle), rel=1e-13)
    np.testing.assert_allclose(result.gradient_N, oracles.multilinear_gradient(p_N, oracle), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", DIVERSITIES)
@pytest.mark.parametrize("num_selected", [1, 2, 5, 12])
def test_at_a_mask_the_expectation_is_the_value(kind, num_selected):
    features_ND = unit_rows(12, 4, 0)
    ground = ground_set(features_ND, num_selected)
    for mask_N in random_masks(4, 12, num_selected, 0):
        result = DIVERSITIES[kind].value_and_gradient(torch.tensor(mask_N).double(), ground)
        assert float(result.value) == pytest.approx(value_of(DIVERSITIES[kind], mask_N, ground), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("kind", EXACT)
def test_at_a_mask_the_gradient_is_the_marginal_gain(kind):
    features_ND = unit_rows(12, 4, 0)
    ground, oracle = ground_set(features_ND, 4), set_function(kind, features_ND, 4)
    for mask_N in random_masks(4, 12, 4, 0):
        gradient_N = DIVERSITIES[kind].value_and_gradient(torch.tensor(mask_N).double(), ground).gradient_N
        np.testing.assert_allclose(gradient_N, oracles.marginal_gains(mask_N, oracle), atol=1e-11)


@pytest.mark.parametrize("kind", DIVERSITIES)
@pytest.mark.parametrize("is_mask", [False, True])
def test_the_gradient_is_that_of_finite_differences(kind, is_mask):
    ground = ground_set(unit_rows(10, 3, 0), 4)
    rng = np.random.default_rng(1)
    p_N = rng.uniform(0.2, 0.8, size=10)
    p_N = torch.tensor(random_masks(1, 10, 4, 3)[0].astype(float) if is_mask else p_N * 4 / p_N.sum())
    gradient_N = DIVERSITIES[kind].value_and_gradient(p_N, ground).gradient_N
    step = 1e-5
    for row in range(10):
        above, below = p_N.clone(), p_N.clone()
        above[row] += step
        below[row] -= step
        difference = (
            DIVERSITIES[kind].value_and_gradient(above, ground).value
            - DIVERSITIES[kind].value_and_gradient(below, ground).value
        )
        assert float(gradient_N[row]) == pytest.approx(float(difference) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", DIVERSITIES)
def test_expectation_can_be_differentiated_and_linearize_leaves_no_graph(kind):
    ground = ground_set(unit_rows(10, 3, 0), 4)
    p_N = torch.full((10,), 0.4, dtype=torch.float64, requires_grad=True)
    (gradient_N,) = torch.autograd.grad(3 * DIVERSITIES[kind].expectation(p_N, ground), p_N)
    result = DIVERSITIES[kind].value_and_gradient(p_N.detach(), ground)
    torch.testing.assert_close(gradient_N, 3 * result.gradient_N)
    assert not result.value.requires_grad
    assert not result.gradient_N.requires_grad


@pytest.mark.parametrize("num_neighbors", [1, 2, 4, 8, 20])
def test_what_short_lists_leave_out_is_within_the_logged_bound(num_neighbors):
    features_ND = unit_rows(20, 3, 0)
    rng = np.random.default_rng(0)
    for p_N in (rng.uniform(size=20), rng.uniform(size=20) ** 4, np.full(20, 0.1)):
        ground, p = ground_set(features_ND, 2), torch.tensor(p_N)
        full = FacilityLocation(num_neighbors=20).value_and_gradient(p, ground).value
        short = FacilityLocation(num_neighbors=num_neighbors).value_and_gradient(p, ground)
        left_out = float(full - short.value)
        assert -1e-13 <= left_out <= float(short.diagnostics["truncation_bound"]) + 1e-13
        if num_neighbors < 4:
            assert left_out > 0


def test_the_default_list_is_six_over_the_ratio_within_limits():
    def length(num_samples, num_selected):
        ground = ground_set(np.ones((num_samples, 1)), num_selected)
        return FacilityLocation()._key(ground)[1]

    assert [length(1000, 100), length(1000, 900), length(5, 1), length(5000, 1)] == [60, 60, 5, 512]


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slice_rows", [16_384, 100])
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    "objective",
    [
        Quality(),
        PairwiseSimilarity(),
        DiSF(),
        DiSF(standardize=True),
        FacilityLocation(),
        FacilityLocation(num_neighbors=4),
        FacilityLocation(neighbors="approximate"),
    ],
    ids=["quality", "pairwise", "disf", "disf_standardized", "facility_location", "short_lists", "approximate"],
)
def test_any_number_of_ranks_gives_the_bits_of_one(monkeypatch, objective, num_slice_rows, is_reversed):
    """LESS #33: the result depends on the number of devices."""
    monkeypatch.setattr(disf, "MAX_GRAM_SAMPLES", 0)
    monkeypatch.setattr(facility_location_functions, "LIST_ROWS", 64)
    monkeypatch.setattr(inverted_file, "CLUSTER_ROWS", 20)
    monkeypatch.setattr(exact, "MAX_UNBOUNDED", 0)
    num_samples, num_selected = 1003, 100
    features_ND = unit_rows(num_samples, 37, 0)
    masks_RN = torch.tensor(random_masks(3, num_samples, num_selected, 0))
    p_N = torch.rand(num_samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.2
    quality_N = qualities(num_samples, 0)

    def job(ranks):
        ground = ground_set(
            features_ND,
            num_selected,
            quality_N=quality_N,
            dtype=torch.float32,
            num_slice_rows=num_slice_rows,
            ranks=ranks,
        )
        before_R = objective.value(masks_RN, ground)
        result = objective.value_and_gradient(p_N, ground)
        # facility location has its lists now
        after_R = objective.value(masks_RN, ground)
        return before_R, after_R, result.value, result.gradient_N, *result.diagnostics.values()

    (expected,) = on_ranks(1, job)
    for size in (2, 3, 4, 13):
        for results in on_ranks(size, job, is_reversed=is_reversed):
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


# ---- the default of the base class -----------------------------------------------------------------------------------


class SquaredSize(Objective):
    """A custom objective that gives `value` and a differentiable `expectation`, (sum p)^2 - sum p^2 + sum p."""

    def value(self, masks_RN, ground):
        return masks_RN.double().sum(1).square()

    def expectation(self, p_N, ground):
        return p_N.sum().square() - p_N.square().sum() + p_N.sum()


class ValueAlone(Objective):
    def value(self, masks_RN, ground):
        return masks_RN[:, 0].double()


def test_a_custom_expectation_is_linearized_by_autograd():
    p_N = np.random.default_rng(0).uniform(size=5)
    with torch.no_grad():
        result = SquaredSize().value_and_gradient(torch.tensor(p_N), ground_set(unit_rows(5, 2, 0), 2))

    def oracle(mask_N):
        return float(mask_N.sum() ** 2)

    assert isinstance(result, Expectation)
    assert float(result.value) == pytest.approx(oracles.multilinear_extension(p_N, oracle), rel=1e-12)
    np.testing.assert_allclose(result.gradient_N, oracles.multilinear_gradient(p_N, oracle), rtol=1e-12, atol=1e-13)
    assert not result.gradient_N.requires_grad


def test_who_gives_an_expectation_says_so():
    assert SquaredSize().has_expectation
    assert not ValueAlone().has_expectation
    assert all(objective.has_expectation for objective in [Quality(), *problems.DIVERSITIES.values()])
    with pytest.raises(NotImplementedError, match="ValueAlone has no expectation"):
        ValueAlone().expectation(torch.zeros(2), ground_set(unit_rows(2, 2, 0), 1))
