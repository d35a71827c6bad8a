import pytest
import torch

import datamask_pl.distributed.collectives as distributed
from datamask_pl.distributed.collectives import (
    RankGroup,
    gather_objects,
    raise_on_all_ranks,
    share_failure,
)
from datamask_pl.distributed.world import World, set_world, world
from datamask_pl.errors import AgreementError, ConfigError
from tests.support.pretended_ranks import on_ranks


class TestRankGroup:
    @pytest.mark.parametrize("size", range(1, 9))
    @pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 100])
    def test_shares_are_contiguous_cover_everything_once_and_differ_by_one_at_most(self, size, count):
        shares = [RankGroup(rank, size).share(count) for rank in range(size)]
        assert [piece for share in shares for piece in share] == list(range(count))
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1

    def test_one_process_is_a_world_of_its_own(self):
        assert RankGroup.current() == RankGroup(0, 1)
        assert gather_objects("x") == ["x"]

    def test_the_sum_of_one_rank_is_its_own_tensor(self):
        tensor = torch.ones(3)
        assert RankGroup().sum_(tensor) is tensor

    def test_every_rank_gets_the_sum(self):
        totals = on_ranks(3, lambda ranks: ranks.sum_(torch.tensor([1.0 + ranks.rank])))
        assert [total.item() for total in totals] == [6.0, 6.0, 6.0]


class TestFailingTogether:
    def test_an_error_is_marked_as_everyones(self):
        with pytest.raises(ConfigError, match="wrong") as caught, raise_on_all_ranks():
            raise ConfigError("wrong")
        assert caught.value.is_on_all_ranks

    def test_an_error_of_another_kind_passes_as_it_is(self):
        with pytest.raises(ZeroDivisionError), raise_on_all_ranks():
            1 / 0  # noqa: B018

    def test_without_an_error_nothing_happens(self):
        with raise_on_all_ranks():
            pass
        share_failure(None)


class TestAgreement:
    def check(self, monkeypatch, values_of_ranks):
        """What every rank meets."""
        met = []
        digests = []
        for values in values_of_ranks:  # what each would give to the others
            monkeypatch.setattr(distributed, "gather_objects", lambda digest: digests.append(digest) or [digest])
            RankGroup(0, 2).check_agreement(values, "before")
        monkeypatch.setattr(distributed, "gather_objects", lambda _: digests)
        for rank, values in enumerate(values_of_ranks):
            try:
                RankGroup(rank, len(values_of_ranks)).check_agreement(values, "checkpoint of block 3, step 7")
                met.append(None)
            except AgreementError as error:
                met.append(error)
        return met

    def test_the_same_values_agree(self, monkeypatch):
        assert self.check(monkeypatch, [torch.arange(9.0)] * 4) == [None] * 4

    @pytest.mark.parametrize(("altered", "named"), [((2,), "ranks 2 hold"), ((1, 3), "ranks 1, 3 hold")])
    def test_one_bit_that_differs_is_an_error_on_all_ranks_that_names_the_ranks(self, monkeypatch, altered, named):
        """lightning #9237, #18086: manual optimisation leaves ranks out of step."""
        values = [torch.arange(9.0) for _ in range(4)]
        for rank in altered:
            values[rank].view(torch.int32)[5] ^= 1
        met = self.check(monkeypatch, values)
        for error in met:
            assert str(error).startswith(f"checkpoint of block 3, step 7: {named} other values than rank 0 (")
            assert error.is_on_all_ranks

    def test_alone_there_is_nothing_to_compare(self):
        RankGroup().check_agreement(torch.tensor([torch.nan]), "")


class TestWorld:
    @pytest.fixture(autouse=True)
    def afterwards(self):
        yield
        set_world(World())

    def test_one_process_is_all_there_is(self):
        assert world() == World(rank=0, size=1, group=0, num_groups=1, store=None)
        assert world().broadcast_from_first("a", lambda: "b") == "b"
        world().publish("word")
        assert not world().is_published("word")

    def test_rank_0_decides_for_the_groups(self):
        store = torch.distributed.HashStore()
        for group in range(3):
            set_world(World(group, 3, group, 3, store))
            assert world().broadcast_from_first("version", lambda group=group: f"decided by {group}") == "decided by 0"

    def test_a_word_reaches_every_group(self):
        store = torch.distributed.HashStore()
        set_world(World(0, 2, 0, 2, store))
        assert not world().is_published("word")
        set_world(World(1, 2, 1, 2, store))
        world().publish("word")
        set_world(World(0, 2, 0, 2, store))
        assert world().is_published("word")
