import numpy as np
import pytest

from datamask_pl.functional.schedule import NUM_STEPS_BEFORE_EXCHANGES, default_schedule, linear_rate


@pytest.mark.parametrize(
    ("estimator", "has_control_variate", "is_polish_quick", "expected"),
    [
        ("multilinear", False, False, (20, 4.0, 1.5)),
        ("multilinear", False, True, (8, 4.0, 1.5)),
        ("leave_one_out", True, False, (20, 4.0, 1.5)),
        ("leave_one_out", True, True, (8, 4.0, 1.5)),
        ("group_relative", False, False, (1000, 10.0, 1.0)),
        ("leave_one_out", False, True, (1000, 10.0, 1.0)),
    ],
)
def test_normalized_directions_take_twenty_steps_fewer_before_exchanges_and_plain_rollouts_a_thousand(
    estimator, has_control_variate, is_polish_quick, expected
):
    found = default_schedule(estimator, is_polish_quick=is_polish_quick, has_control_variate=has_control_variate)
    assert found == expected
    assert NUM_STEPS_BEFORE_EXCHANGES == 8


def test_a_control_variate_is_not_assumed():
    assert default_schedule("leave_one_out", is_polish_quick=False).num_steps == 1000


@pytest.mark.parametrize("num_steps", [1, 2, 3, 20])
def test_rates_are_evenly_spaced_from_the_first_to_the_last(num_steps):
    rates = [linear_rate(step, num_steps, max_lr=4.0, min_lr=1.5) for step in range(num_steps)]
    np.testing.assert_allclose(rates, np.linspace(4.0, 1.5, num_steps), rtol=1e-12)
    assert rates[0] == 4.0
