from itertools import product

from datamask_pl.functional.seeding import _mix, derive_seed


def test_the_finaliser_is_splitmix64():
    """The first three outputs of the published generator, seeded with 0."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [_mix(step * gamma) for step in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_seed_is_the_finaliser_of_each_integer_added_to_what_came_before():
    """Of other seeds a saved run would draw other masks."""
    for integers in [(), (5,), (5, 0), (2**64 - 1, 1, 3), (1, 2**63)]:
        state = _mix(len(integers))
        for integer in integers:
            state = _mix((state + integer) % 2**64)
        assert derive_seed(*integers) == state % 2**63


def test_seeds_fit_what_a_torch_generator_takes():
    assert all(0 <= derive_seed(seed, 5) < 2**63 for seed in (0, 1, 2**63 - 1, 2**64 - 1))


def test_order_number_and_value_of_the_integers_all_matter():
    tuples = [t for length in range(1, 4) for t in product(range(12), repeat=length)]
    assert len({derive_seed(*t) for t in tuples}) == len(tuples)


def test_neighbouring_integers_differ_in_about_half_of_the_bits():
    flips = [(derive_seed(0, 0, step) ^ derive_seed(0, 0, step + 1)).bit_count() for step in range(500)]
    assert 30 < sum(flips) / len(flips) < 33
