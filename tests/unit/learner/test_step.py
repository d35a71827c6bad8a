"""One step, on ground sets small enough for the oracles."""

import numpy as np
import pytest
import torch

from datamask_pl.distributed.collectives import RankGroup
from datamask_pl.errors import ObjectiveError
from datamask_pl.functional.fixed_size import FixedSize
from datamask_pl.functional.multilinear import inclusion_probabilities
from datamask_pl.functional.seeding import derive_seed
from datamask_pl.learner import step
from datamask_pl.learner.step import MAX_ROLLOUTS_OF_CHUNK, multilinear_update, rollout_update
from datamask_pl.objectives import Expectation, Objective, PairwiseSimilarity
from datamask_pl.objectives.joint import JointObjective
from tests.support import oracles
from tests.support.pretended_ranks import on_ranks
from tests.support.problems import DIVERSITIES, ground_set, qualities, unit_rows
from tests.support.tiers import only

N, K = 6, 2
FEATURES_ND, QUALITY_N = unit_rows(N, 3, 0), qualities(N, 0)
LOGITS_N = np.array([0.3, -0.2, 0.8, 0.0, -0.5, 0.1])
RAW = torch.ones(2, dtype=torch.float64)
KINDS = ["facility_location", "pairwise", "disf"]


def joint(kind):
    return JointObjective(quality_weight=0.3, diversity=DIVERSITIES[kind])


def set_function(kind):
    return oracles.objective(kind, FEATURES_ND, QUALITY_N, num_selected=K, quality_weight=0.3)


def ground(ranks=None):
    return ground_set(FEATURES_ND, K, quality_N=QUALITY_N, ranks=ranks)


def rollouts(objective, *, step=0, num_rollouts=8, estimator="leave_one_out", ranks=None, logits_N=LOGITS_N, **kwargs):
    options = {
        "control_variate": False,
        "ground": ground(),
        "scales": RAW,
        "seed_of": lambda rollout: derive_seed(1, 0, step, rollout),
        "step_name": f"block 0, step {step}",
        **kwargs,
    }
    return rollout_update(
        torch.tensor(logits_N), objective=objective, estimator=estimator, num_rollouts=num_rollouts,
        ranks=ranks or RankGroup(), **options,
    )  # fmt: skip


def leave_unbiased(monkeypatch):
    """Takes out what biases a controlled direction."""
    monkeypatch.setattr(step, "shrinkage", lambda *_: 1.0)
    monkeypatch.setattr(FixedSize, "controlled_direction", lambda *_, linear_N, rest_N: linear_N + rest_N)


class TestRollouts:
    @pytest.mark.parametrize("kind", KINDS)
    def test_leave_one_out_is_the_gradient_of_the_expected_objective_on_average(self, kind):
        updates = np.stack([rollouts(joint(kind), step=step).direction_M.numpy() for step in range(400)])
        expected_N = oracles.policy_gradient(LOGITS_N, K, set_function(kind))
        error_N = updates.std(axis=0, ddof=1) / np.sqrt(len(updates))
        assert (np.abs(updates.mean(axis=0) - expected_N) < 4 * error_N).all()

    def test_group_relative_is_its_own_target_on_average(self):
        features_ND, quality_N, logits_N = unit_rows(3, 2, 1), qualities(3, 1), LOGITS_N[:3]
        value = oracles.objective("disf", features_ND, quality_N, num_selected=1, quality_weight=0.3)
        small = ground_set(features_ND, 1, quality_N=quality_N)
        options = {"ground": small, "num_rollouts": 3, "estimator": "group_relative", "logits_N": logits_N}
        updates = np.stack([rollouts(joint("disf"), step=step, **options).direction_M.numpy() for step in range(400)])
        expected_N = oracles.group_relative_gradient(logits_N, 1, 3, value, eps=1e-8)
        error_N = updates.std(axis=0, ddof=1) / np.sqrt(len(updates))
        assert (np.abs(updates.mean(axis=0) - expected_N) < 4 * error_N).all()

    @pytest.mark.parametrize("control_variate", [False, True])
    @pytest.mark.parametrize("estimator", ["leave_one_out", "group_relative"])
    @pytest.mark.parametrize("num_rollouts", [2, MAX_ROLLOUTS_OF_CHUNK, 9 * MAX_ROLLOUTS_OF_CHUNK + 1])
    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_any_number_of_ranks_gives_the_same_bits(self, estimator, num_rollouts, size, control_variate):
        options = {"control_variate": control_variate, "num_rollouts": num_rollouts, "estimator": estimator}
        expected = rollouts(joint("disf"), **options)
        for update in on_ranks(size, lambda ranks: rollouts(joint("disf"), ranks=ranks, **options)):
            assert torch.equal(update.direction_M, expected.direction_M)
            assert torch.equal(update.best_mask_M, expected.best_mask_M)
            assert update.metrics == expected.metrics

    @pytest.mark.parametrize("kind", only("pairwise", of=KINDS))
    def test_with_a_control_variate_it_is_the_same_gradient_with_less_noise(self, kind, monkeypatch):
        leave_unbiased(monkeypatch)
        plain, controlled = (
            np.stack(
                [
                    rollouts(joint(kind), step=step, control_variate=control_variate).direction_M.numpy()
                    for step in range(400)
                ]
            )
            for control_variate in (False, True)
        )
        expected_N = oracles.policy_gradient(LOGITS_N, K, set_function(kind))
        error_N = controlled.std(axis=0, ddof=1) / np.sqrt(len(controlled))
        assert (np.abs(controlled.mean(axis=0) - expected_N) < 4 * error_N).all()
        assert controlled.var(axis=0).sum() < 0.8 * plain.var(axis=0).sum()

    def test_a_wrong_expectation_makes_noise_but_no_bias(self, monkeypatch):
        class Misjudged(PairwiseSimilarity):
            def value_and_gradient(self, p_N, ground):
                return Expectation(torch.zeros(()), torch.linspace(-1.0, 1.0, N, dtype=torch.float64))

        leave_unbiased(monkeypatch)
        objective = JointObjective(quality_weight=0.3, diversity=Misjudged())
        updates = np.stack(
            [rollouts(objective, step=step, control_variate=True).direction_M.numpy() for step in range(400)]
        )
        expected_N = oracles.policy_gradient(LOGITS_N, K, set_function("pairwise"))
        error_N = updates.std(axis=0, ddof=1) / np.sqrt(len(updates))
        assert (np.abs(updates.mean(axis=0) - expected_N) < 4 * error_N).all()

    @pytest.mark.parametrize("num_rollouts", [2, 8])
    def test_with_a_control_variate_both_estimators_give_one_direction_of_unit_size(self, num_rollouts):
        first, second = (
            rollouts(joint("disf"), num_rollouts=num_rollouts, estimator=estimator, control_variate=True).direction_M
            for estimator in ("leave_one_out", "group_relative")
        )
        assert torch.equal(first, second)
        assert float(first.square().mean()) == pytest.approx(1.0, rel=1e-12)

    def test_a_reward_that_is_linear_leaves_the_policy_gradient_without_a_score(self):
        objective = JointObjective(quality_weight=1.0, diversity="disf")
        update = rollouts(objective, control_variate=True, num_rollouts=300)
        expected_N = oracles.policy_gradient(LOGITS_N, K, lambda mask_N: QUALITY_N[mask_N].mean())
        # the derivative of p = 1 - exp(-exp(logit) t), t where p adds up to K
        times_T = np.linspace(0.0, 2.0, 100_001)
        num_rung_T = -np.expm1(-np.exp(LOGITS_N) * times_T[:, None]).sum(1)
        time = times_T[np.abs(num_rung_T - K).argmin()]
        expected_N /= np.exp(LOGITS_N) * time * np.exp(-np.exp(LOGITS_N) * time)
        direction_N = expected_N / np.sqrt(np.mean(expected_N**2))
        assert update.direction_M.numpy() == pytest.approx(direction_N, abs=0.1)
        assert update.metrics["policy/advantage_spread"] < 1e-12 < update.metrics["policy/reward_spread"]

    def test_an_objective_with_a_value_alone_is_trained_without_a_control_variate(self):
        class FirstRows(Objective):
            def value(self, masks_RN, ground):
                return masks_RN[:, :2].sum(1)

        objective = JointObjective(quality_weight=0.3, diversity=FirstRows())
        with_it, without = (rollouts(objective, control_variate=wanted) for wanted in (True, False))
        assert torch.equal(with_it.direction_M, without.direction_M)

    def test_the_best_mask_is_the_rollout_of_the_highest_reward(self):
        update = rollouts(joint("pairwise"), num_rollouts=20)
        assert int(update.best_mask_M.sum()) == K
        value = set_function("pairwise")(update.best_mask_M.numpy())
        assert float(update.metrics["objective/f_best"]) == pytest.approx(value, rel=1e-9)
        assert update.metrics["objective/f_best"] >= update.metrics["objective/f"]

    def test_a_term_is_divided_by_its_scale_and_one_of_scale_zero_counts_nothing(self):
        scales = torch.tensor([0.5, 0.0], dtype=torch.float64)
        update = rollouts(joint("disf"), scales=scales)
        quality = float(update.metrics["objective/quality"])
        assert float(update.metrics["objective/f"]) == pytest.approx(0.3 * quality / 0.5, rel=1e-12)

    def test_rewards_without_spread_move_nothing_and_are_counted(self):
        update = rollouts(joint("disf"), scales=torch.zeros(2, dtype=torch.float64), estimator="group_relative")
        assert torch.equal(update.direction_M, torch.zeros(N, dtype=torch.float64))
        assert update.metrics["policy/groups_without_spread"] == 1

    def test_a_reward_that_is_not_finite_is_an_error_on_every_rank(self):
        class OneIsInfinite(Objective):
            def value(self, masks_RN, ground):
                return torch.where(masks_RN[:, 0], torch.inf, 1.0)

        objective = JointObjective(quality_weight=0.0, diversity=OneIsInfinite())

        def failed(ranks):
            with pytest.raises(
                ObjectiveError, match=r"OneIsInfinite returned inf for mask .* at block 0, step 7"
            ) as error:
                rollouts(objective, num_rollouts=24, ranks=ranks, step=7)
            return error.value.is_on_all_ranks

        assert on_ranks(3, failed) == [True] * 3


class TestMultilinear:
    @pytest.mark.parametrize("kind", KINDS)
    def test_f_is_the_multilinear_extension_and_the_direction_its_centred_gradient(self, kind):
        p_N = inclusion_probabilities(torch.tensor(LOGITS_N), K).numpy()
        update = multilinear_update(torch.tensor(LOGITS_N), objective=joint(kind), ground=ground(), scales=RAW)
        assert update.best_mask_M is None
        value = oracles.multilinear_extension(p_N, set_function(kind))
        assert float(update.metrics["objective/f"]) == pytest.approx(value, rel=1e-7)
        gradient_N = oracles.multilinear_gradient(p_N, set_function(kind))
        centred_N = gradient_N - np.average(gradient_N, weights=p_N * (1 - p_N))
        expected_N = centred_N / np.sqrt(np.mean(centred_N**2))
        assert update.direction_M.numpy() == pytest.approx(expected_N, rel=1e-5, abs=1e-6)

    def test_a_term_that_does_not_count_is_not_logged(self):
        objective = JointObjective(quality_weight=1.0, diversity="disf")
        update = multilinear_update(torch.zeros(N), objective=objective, ground=ground(), scales=RAW)
        assert "objective/quality" in update.metrics
        assert "objective/disf" not in update.metrics
        constant = torch.tensor([0.0, 1.0], dtype=torch.float64)
        update = multilinear_update(torch.zeros(N), objective=joint("disf"), ground=ground(), scales=constant)
        assert "objective/quality" not in update.metrics
