import pytest
import torch

from datamask_pl.functional.multilinear import inclusion_probabilities
from datamask_pl.learner.policy import LogitAscent, MaskPolicy


class TestMaskPolicy:
    def test_same_starts_with_equal_logits_whatever_was_there(self):
        policy = MaskPolicy(5)
        policy.logits.data.fill_(3.0)
        policy.reset(torch.tensor([0.1, 0.9, 0.4, 0.3]), 2, init="same", is_independent=True)
        assert policy.logits.tolist() == [0.0] * 5

    def test_quality_starts_plackett_luce_with_probabilities_proportional_to_quality(self):
        policy = MaskPolicy(4)
        quality_N = torch.tensor([0.1, 0.2, 0.3, 0.4])
        policy.reset(quality_N, 2, init="quality", is_independent=False)
        assert torch.allclose(policy.logits.softmax(0), quality_N)

    def test_quality_starts_independent_inclusion_with_probabilities_proportional_to_quality(self):
        policy = MaskPolicy(4)
        quality_N = torch.tensor([0.1, 0.2, 0.3, 0.4])
        policy.reset(quality_N, 1, init="quality", is_independent=True)
        assert torch.allclose(inclusion_probabilities(policy.logits.detach(), 1).float(), quality_N, atol=1e-6)

    def test_what_is_behind_a_shorter_block_is_zero(self):
        policy = MaskPolicy(6)
        policy.logits.data.fill_(9.0)
        policy.reset(torch.tensor([0.5, 1.0, 2.0]), 1, init="quality", is_independent=False)
        assert policy.logits[3:].tolist() == [0.0] * 3

    def test_a_module_that_lightning_moves_and_saves(self):
        assert list(MaskPolicy(3).state_dict()) == ["logits"]


class TestLogitAscent:
    def test_it_adds_what_was_staged_to_the_rows_alone(self):
        policy = MaskPolicy(4)
        ascent = LogitAscent(policy.logits)
        ascent.stage(torch.tensor([3, 1]), torch.tensor([1.0, -2.0], dtype=torch.float64))
        ascent.step()
        assert policy.logits.tolist() == [0.0, -2.0, 0.0, 1.0]

    def test_without_rows_it_adds_to_the_first_ones(self):
        policy = MaskPolicy(4)
        ascent = LogitAscent(policy.logits)
        ascent.stage(None, torch.tensor([1.0, 2.0]))
        ascent.step()
        assert policy.logits.tolist() == [1.0, 2.0, 0.0, 0.0]

    def test_nothing_is_added_twice(self):
        ascent = LogitAscent(MaskPolicy(1).logits)
        ascent.stage(None, torch.ones(1))
        ascent.step()
        with pytest.raises(AssertionError, match="stage"):
            ascent.step()

    def test_it_calls_the_closure_that_lightning_hands_it(self):
        ascent = LogitAscent(MaskPolicy(1).logits)
        ascent.stage(None, torch.ones(1))
        called = []
        ascent.step(lambda: called.append(1))
        assert called == [1]
