"""How many samples a ratio keeps."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction

from datamask_pl.errors import BudgetError


def budget(select_ratio: float, num_samples: int) -> int:
    """Number of samples to keep: floor(select_ratio * num_samples + 1/2), exact in decimal.

    The ratio is taken as the decimal number that Python prints for it, so that 0.29 of 100 is 29 although the
    binary product is 28.999999999999996.

    Args:
        select_ratio: share to keep, in (0, 1].
        num_samples: size of the block, at least 1.

    Returns:
        k in [1, num_samples].

    Raises:
        BudgetError: If the ratio is outside (0, 1], or keeps no sample, or there is none.

    Example:
        >>> budget(0.29, 100), budget(0.1, 25), budget(1.0, 7)
        (29, 3, 7)
    """
    if not 0.0 < select_ratio <= 1.0:
        raise BudgetError(f"select_ratio must be above 0 and at most 1, got {select_ratio}.")
    if num_samples < 1:
        raise BudgetError(f"a block must have at least 1 sample, got {num_samples}; give longer input.")
    num_selected = _round_half_up(Fraction(repr(float(select_ratio))) * num_samples)
    if num_selected == 0:
        # rounded up: the number in the message has to work
        needed = Context(prec=6, rounding=ROUND_CEILING).divide(Decimal(1), Decimal(2 * num_samples))
        raise BudgetError(
            f"select_ratio keeps 0 of {num_samples} samples ({select_ratio}); "
            f"raise it to at least {float(needed):g} or give larger blocks."
        )
    return num_selected


def share_of(fraction: float, num_samples: int) -> int:
    """Number of rows in a fraction of a block, rounded half up and at least 1.

    Example:
        >>> share_of(0.1, 12), share_of(0.1, 4)
        (1, 1)
    """
    return min(num_samples, max(1, _round_half_up(Fraction(repr(float(fraction))) * num_samples)))


def _round_half_up(value: Fraction) -> int:
    return int((value + Fraction(1, 2)) // 1)
