"""Which cases of a test are in the first tier."""

import pytest


def only(*first, of):
    """Cases of a parametrized test; all but `first` are in the second tier.

    Example:
        >>> [case.values for case in only(1, of=[1, 2])]
        [(1,), (2,)]
    """
    return [pytest.param(case, marks=() if case in first else pytest.mark.slow) for case in of]
