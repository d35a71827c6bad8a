import math
import re

import numpy as np
import pytest
import torch

from datamask_pl.errors import ConfigError, ObjectiveError
from datamask_pl.objectives import DiSF, FacilityLocation, Objective, PairwiseSimilarity, Quality
from datamask_pl.objectives.joint import JointObjective, WeightedObjective, resolve_objective
from tests.support.problems import ground_set, qualities, random_masks, unit_rows


class FirstSample(Objective):
    """A custom objective that gives `value` alone."""

    def value(self, masks_RN, ground):
        return masks_RN[:, 0].float()


class Returns(Objective):
    """Returns what it is told to, right or wrong."""

    def __init__(self, returned):
        self.returned = returned

    def value(self, masks_RN, ground):
        return self.returned


@pytest.fixture
def ground():
    return ground_set(unit_rows(12, 3, 0), 4, quality_N=qualities(12, 0))


MASKS = torch.tensor(random_masks(3, 12, 4, 0))
P = torch.full((12,), 1 / 3, dtype=torch.float64)


def scales(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("quality_weight", [0.0, 0.25, 1.0])
def test_value_is_the_weighted_sum_of_scaled_terms(ground, quality_weight):
    joint = JointObjective(quality_weight=quality_weight, diversity="pairwise")
    terms = joint.term_values(MASKS, ground)
    expected_R = quality_weight * Quality().value(MASKS, ground) / 2.0
    expected_R = expected_R + (1 - quality_weight) * PairwiseSimilarity().value(MASKS, ground) / 0.5
    assert terms.dtype == torch.float64
    torch.testing.assert_close(joint.combine(terms, scales(2.0, 0.5)), expected_R, rtol=1e-14, atol=0)


def test_expectation_is_the_weighted_sum_of_scaled_expectations(ground):
    joint = JointObjective(quality_weight=0.25, diversity=FacilityLocation(num_neighbors=3))
    result, terms = joint.value_and_gradient(P, ground, scales(2.0, 0.5))
    parts = [Quality().value_and_gradient(P, ground), FacilityLocation(num_neighbors=3).value_and_gradient(P, ground)]
    factors = [0.25 / 2.0, 0.75 / 0.5]
    assert float(result.value) == pytest.approx(
        sum(f * float(part.value) for f, part in zip(factors, parts, strict=True))
    )
    expected_N = sum(f * part.gradient_N for f, part in zip(factors, parts, strict=True))
    torch.testing.assert_close(result.gradient_N, expected_N, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(terms, torch.stack([part.value for part in parts]))
    assert list(result.diagnostics) == ["facility_location/truncation_bound"]


def test_interactions_are_the_weighted_sum_and_nothing_between_a_sample_and_itself(ground):
    joint = JointObjective(quality_weight=0.25, diversity=[WeightedObjective("pairwise"), WeightedObjective("disf")])
    rows, others = torch.tensor([3, 0, 7]), torch.tensor([7, 1, 3, 5])
    found_CO = joint.interactions(rows, others, ground, scales(2.0, 0.5, 0.1))
    expected_CO = PairwiseSimilarity().interactions(rows, others, ground) * 0.375 / 0.5
    expected_CO += DiSF().interactions(rows, others, ground) * 0.375 / 0.1
    expected_CO[0, 2] = expected_CO[2, 0] = 0.0
    torch.testing.assert_close(found_CO, expected_CO)
    quality = JointObjective(quality_weight=1.0, diversity="disf").interactions(rows, others, ground, scales(1.0, 1.0))
    assert quality.shape == (3, 4)
    assert not quality.any()


def test_a_weighted_list_is_divided_by_the_sum_of_its_weights(ground):
    joint = JointObjective(
        quality_weight=0.2,
        diversity=[
            WeightedObjective("disf", 3.0),
            WeightedObjective(PairwiseSimilarity()),
            WeightedObjective("disf", 0.0),
        ],
    )
    assert [(term.name, term.weight) for term in joint.terms] == [
        ("quality", 0.2),
        ("disf", pytest.approx(0.6)),
        ("pairwise", pytest.approx(0.2)),
        ("disf_3", 0.0),
    ]
    terms = joint.term_values(MASKS, ground)
    expected_R = 0.2 * terms[0] + 0.6 * DiSF().value(MASKS, ground) + 0.2 * terms[2]
    torch.testing.assert_close(joint.combine(terms, scales(1, 1, 1, 1)), expected_R)


def test_a_term_of_scale_zero_counts_nothing(ground):
    """QuRating: constant scores divide by a zero deviation."""
    joint = JointObjective(quality_weight=0.5, diversity="pairwise")
    combined_R = joint.combine(joint.term_values(MASKS, ground), scales(0.0, 2.0))
    torch.testing.assert_close(combined_R, 0.25 * PairwiseSimilarity().value(MASKS, ground))
    result, terms = joint.value_and_gradient(P, ground, scales(0.0, 2.0))
    torch.testing.assert_close(result.gradient_N, 0.25 * PairwiseSimilarity().value_and_gradient(P, ground).gradient_N)
    assert math.isnan(terms[0])
    assert math.isfinite(terms[1])
    nothing, _ = joint.value_and_gradient(P, ground, scales(0.0, 0.0))
    assert float(nothing.value) == 0.0
    assert not nothing.gradient_N.any()


def test_terms_that_do_not_count_may_be_nan(ground):
    joint = JointObjective(quality_weight=1.0, diversity="pairwise")
    result, terms = joint.value_and_gradient(P, ground, scales(1.0, 1.0))
    assert math.isnan(terms[1])
    assert float(joint.combine(terms[:, None], scales(1.0, 1.0))[0]) == pytest.approx(float(result.value))


def test_what_cannot_be_linearized_is_not_asked_where_it_does_not_count(ground):
    joint = JointObjective(quality_weight=1.0, diversity=FirstSample())
    assert joint.has_expectation
    result, _ = joint.value_and_gradient(P, ground, scales(1.0, 1.0))
    assert float(result.value) == pytest.approx(float(ground.quality_N.mean()))


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("linearize", "rename it to value_and_gradient"),
        ("interactions", "derive it from SupportsInteractions, too"),
        ("coverage", "derive it from SupportsCoverage, too"),
    ],
)
def test_a_method_of_the_old_interface_is_refused_instead_of_silently_ignored(method, remedy):
    kind = type("Older", (FirstSample,), {method: lambda self, p_N, ground: None})
    with pytest.raises(ConfigError, match=rf"Older has a method {method}, which is not called; {remedy}\.$"):
        JointObjective(quality_weight=0.5, diversity=kind())


def test_a_custom_objective_with_value_alone_is_valued_and_named(ground):
    joint = JointObjective(
        quality_weight=0.5, diversity=[WeightedObjective(FirstSample()), WeightedObjective("pairwise")]
    )
    assert not joint.has_expectation
    assert joint.without_expectation() == ["FirstSample"]
    terms = joint.term_values(MASKS, ground)
    assert terms[1].tolist() == MASKS[:, 0].double().tolist()
    assert JointObjective(quality_weight=0.5, diversity="disf").has_expectation


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        (torch.zeros(()), "shape ()"),
        (torch.zeros(2), "shape (2,)"),
        (torch.zeros(3, 1), "shape (3, 1)"),
        ([0.0, 0.0, 0.0], "list"),
        (1.0, "float"),
        (np.zeros(3), "ndarray"),
        (None, "NoneType"),
    ],
)
def test_a_value_that_is_not_one_number_a_mask_is_an_error(ground, returned, seen):
    joint = JointObjective(quality_weight=0.5, diversity=Returns(returned))
    text = (
        f"objective Returns returned {seen} for 3 masks; `value` must return one number a mask, a tensor of shape (3,)."
    )
    with pytest.raises(ObjectiveError, match=re.escape(text)):
        joint.term_values(MASKS, ground)


def test_values_leave_no_graph(ground):
    joint = JointObjective(quality_weight=0.5, diversity=Returns(torch.ones(3, requires_grad=True) * 2))
    assert not joint.term_values(MASKS, ground).requires_grad


@pytest.mark.parametrize("quality_weight", [-0.1, 1.1, math.nan, math.inf])
def test_a_quality_weight_out_of_range_is_an_error(quality_weight):
    with pytest.raises(ConfigError, match=f"model.quality_weight must be from 0 to 1, got {quality_weight}"):
        JointObjective(quality_weight=quality_weight, diversity="disf")


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -0.5], [math.nan], [math.inf, 1.0]])
def test_weights_that_cannot_be_shares_are_an_error(weights):
    diversity = [WeightedObjective("disf", weight) for weight in weights]
    with pytest.raises(ConfigError, match=re.escape(f"one of them positive; got {weights}.")):
        JointObjective(quality_weight=0.5, diversity=diversity)


@pytest.mark.parametrize("diversity", ["facility", [WeightedObjective("facility")]])
def test_an_unknown_name_is_an_error_that_lists_the_choices(diversity):
    text = "model.diversity must be one of facility_location, pairwise, disf or a class path, got 'facility'."
    with pytest.raises(ConfigError, match=re.escape(text)):
        JointObjective(quality_weight=0.5, diversity=diversity)


def test_names_and_instances_resolve_to_the_same():
    for name in ("facility_location", "pairwise", "disf"):
        resolved, objective = resolve_objective(name)
        assert resolve_objective(objective) == (name, objective)
        assert resolved == name


@pytest.mark.parametrize("num_neighbors", [0, -1])
def test_lists_without_neighbours_are_an_error(num_neighbors):
    with pytest.raises(ConfigError, match=f"num_neighbors must be at least 1, got {num_neighbors}"):
        FacilityLocation(num_neighbors=num_neighbors)
