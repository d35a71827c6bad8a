import math
import re
from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamask_pl.errors import BudgetError
from datamask_pl.functional.budget import BudgetSpec, num_to_keep, share_of

RATIOS = st.floats(min_value=0.0, max_value=1.0, exclude_min=True)
# The ratios that people write.
DECIMAL_RATIOS = st.integers(1, 10_000).map(lambda number: number / 10_000)
NUM_SAMPLES = st.integers(1, 10**9)


def half_up(ratio: float, num_samples: int) -> int:
    return int((Decimal(repr(ratio)) * num_samples).quantize(Decimal(1), rounding=ROUND_HALF_UP))


@pytest.mark.parametrize(
    ("ratio", "num_samples", "expected"),
    [(0.29, 100, 29), (0.1, 3, 0), (0.1, 5, 1), (0.1, 15, 2), (0.57, 100, 57), (1.1 - 1.0, 10, 1), (1.0, 7, 7)],
)
def test_a_float_product_just_below_a_whole_number_is_that_number(ratio, num_samples, expected):
    """int(.29 * 100) is 28 and int(.1 * 3) is 0."""
    if expected:
        assert num_to_keep(ratio, num_samples) == expected
    else:
        with pytest.raises(BudgetError):
            num_to_keep(ratio, num_samples)


@pytest.mark.parametrize(("ratio", "num_samples", "expected"), [(0.145, 100, 15), (0.285, 100, 29)])
def test_a_half_whose_binary_number_is_just_below_it_is_rounded_up(ratio, num_samples, expected):
    assert Decimal(ratio) * num_samples < expected - Decimal("0.5") == Decimal(repr(ratio)) * num_samples
    assert num_to_keep(ratio, num_samples) == expected


@given(ratio=DECIMAL_RATIOS, num_samples=NUM_SAMPLES)
def test_budget_is_decimal_half_up(ratio, num_samples):
    """group-mates: a small group's int(ratio * len) is 0. There is one rounding, and 0 is an error."""
    expected = half_up(ratio, num_samples)
    if expected:
        assert num_to_keep(ratio, num_samples) == expected


@given(ratio=RATIOS, num_samples=NUM_SAMPLES)
def test_budget_is_in_range_or_an_error(ratio, num_samples):
    if half_up(ratio, num_samples) == 0:
        with pytest.raises(BudgetError):
            num_to_keep(ratio, num_samples)
    else:
        num_selected = num_to_keep(ratio, num_samples)
        assert 1 <= num_selected <= num_samples
        assert abs(num_selected - ratio * num_samples) <= 0.5 + 1e-9 * num_samples


@given(num_samples=NUM_SAMPLES)
def test_the_ratio_that_the_error_names_keeps_one_sample(num_samples):
    with pytest.raises(BudgetError) as caught:
        num_to_keep(0.49 / num_samples, num_samples)
    needed = float(re.search(r"at least (\S+) or", str(caught.value)).group(1))
    assert num_to_keep(needed, num_samples) == 1


@given(ratio=RATIOS, larger=RATIOS, num_samples=NUM_SAMPLES)
def test_a_larger_ratio_never_keeps_less(ratio, larger, num_samples):
    ratio, larger = sorted((ratio, larger))
    if half_up(ratio, num_samples):
        assert num_to_keep(ratio, num_samples) <= num_to_keep(larger, num_samples)


@given(num_samples=NUM_SAMPLES)
def test_ratio_one_keeps_everything(num_samples):
    assert num_to_keep(1.0, num_samples) == num_samples


def test_the_error_names_ratio_block_and_remedy():
    with pytest.raises(BudgetError, match=re.escape("keeps 0 of 4 samples (0.1); raise it to at least 0.125 or")):
        num_to_keep(0.1, 4)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0000001, math.inf, -math.inf, math.nan])
def test_a_ratio_outside_of_zero_to_one_is_an_error_that_names_it(ratio):
    with pytest.raises(BudgetError, match=re.escape(f"got {ratio}")):
        num_to_keep(ratio, 100)


def test_a_rule_that_keeps_nothing_of_any_block_is_an_error_at_once():
    assert BudgetSpec(0.51 / 2**62).select_ratio > 0
    with pytest.raises(BudgetError, match="keeps 0 of"):
        BudgetSpec(0.49 / 2**62)


def test_an_empty_block_is_an_error():
    with pytest.raises(BudgetError, match="at least 1 sample, got 0"):
        num_to_keep(0.5, 0)


def test_a_budget_error_is_a_value_error():
    assert issubclass(BudgetError, ValueError)


@given(fraction=RATIOS, num_samples=NUM_SAMPLES)
def test_a_share_is_at_least_one_row_and_at_most_all(fraction, num_samples):
    assert share_of(fraction, num_samples) == min(num_samples, max(1, half_up(fraction, num_samples)))


def test_names_of_groups_are_text_or_integers():
    assert BudgetSpec(0.1, {0: 0.5}).ratio("0") == 0.5
    with pytest.raises(BudgetError, match="as False; put names such as 'no'"):
        BudgetSpec(0.1, {False: 0.5})


def test_percent_is_told_as_a_share():
    with pytest.raises(BudgetError, match=r"got 10; 10 % is 0\.1"):
        BudgetSpec(10)
    with pytest.raises(BudgetError, match=r"got 30; 30 % is 0\.3"):
        BudgetSpec(0.1, {"code": 30})
