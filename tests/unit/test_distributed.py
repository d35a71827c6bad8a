import pytest
import torch
from pretended_ranks import on_ranks

from datamask_pl.distributed import RankGroup, failing_together, gather_objects, rank_and_world, share_failure
from datamask_pl.errors import ConfigError


class TestRankGroup:
    @pytest.mark.parametrize("size", range(1, 9))
    @pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 100])
    def test_shares_are_contiguous_cover_everything_once_and_differ_by_one_at_most(self, size, count):
        shares = [RankGroup(rank, size).share(count) for rank in range(size)]
        assert [piece for share in shares for piece in share] == list(range(count))
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1

    def test_one_process_is_a_world_of_its_own(self):
        assert rank_and_world() == (0, 1)
        assert RankGroup.world() == RankGroup(0, 1)
        assert gather_objects("x") == ["x"]

    def test_the_sum_of_one_rank_is_its_own_tensor(self):
        tensor = torch.ones(3)
        assert RankGroup().sum_(tensor) is tensor

    def test_every_rank_gets_the_sum(self):
        totals = on_ranks(3, lambda ranks: ranks.sum_(torch.tensor([1.0 + ranks.rank])))
        assert [total.item() for total in totals] == [6.0, 6.0, 6.0]


class TestFailingTogether:
    def test_an_error_is_marked_as_everyones(self):
        with pytest.raises(ConfigError, match="wrong") as caught, failing_together():
            raise ConfigError("wrong")
        assert caught.value.is_on_all_ranks

    def test_an_error_of_another_kind_passes_as_it_is(self):
        with pytest.raises(ZeroDivisionError), failing_together():
            1 / 0  # noqa: B018

    def test_without_an_error_nothing_happens(self):
        with failing_together():
            pass
        share_failure(None)
