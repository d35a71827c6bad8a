"""One seed out of several integers, so that every random draw depends on what it is for and on nothing else."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1
_MASK_63 = (1 << 63) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def derive_seed(*integers: int) -> int:
    """Mixes non-negative integers, in their order and number, into one seed.

    The state starts as the number of integers and passes splitmix64's finaliser once for each of them, after the
    integer was added. (1, 2), (2, 1), (1,) and (1, 2, 0) therefore give unrelated seeds. Plain integer arithmetic:
    the result is the same on every machine and with every library version.

    Source: Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators".

    Args:
        integers: each in [0, 2^64).

    Returns:
        A seed in [0, 2^63), which torch.Generator.manual_seed takes as it is.

    Example:
        >>> derive_seed(0, 3, 7), derive_seed(0, 7, 3)
        (8529600443053731364, 752344374401999976)
    """
    assert all(0 <= integer <= _MASK_64 for integer in integers), integers
    state = _mix(len(integers))
    for integer in integers:
        state = _mix(state + integer)
    return state & _MASK_63


def _mix(value: int) -> int:
    """Splitmix64: a bijection of 64-bit integers, every output bit depending on every input bit."""
    value = (value + _GOLDEN_GAMMA) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
