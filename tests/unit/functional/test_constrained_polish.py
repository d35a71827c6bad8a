import constraints
import numpy as np
import oracles
import problems
import pytest
import torch

from datamask_pl.functional import constrained_polish, rounding
from datamask_pl.functional.constrained_polish import polish_within
from datamask_pl.joint_objective import JointObjective

SCALES = torch.ones(2, dtype=torch.float64)


class Solver:
    """A block under a constraint, with what `polish_within` needs."""

    def __init__(self, constraint, kind, *, seed=0, quality_weight=0.3):
        num_samples = constraint.num_samples
        self.features_ND, self.quality_N = (
            problems.unit_rows(num_samples, 3, seed),
            problems.qualities(num_samples, seed),
        )
        self.kind, self.quality_weight = kind, quality_weight
        self.constraint = constraint
        self.ground = problems.ground_set(
            self.features_ND, constraint.typical_size, quality_N=self.quality_N, constraint=constraint
        )
        self.objective = JointObjective(quality_weight=quality_weight, diversity=problems.DIVERSITIES[kind])

    def values(self, masks_RN):
        return self.objective.combine(self.objective.term_values(masks_RN, self.ground), SCALES)

    def gains(self, mask_N):
        return self.objective.linearize(mask_N.double(), self.ground, SCALES)[0].gradient_N

    def oracle(self, mask_N):
        value = oracles.objective(
            self.kind, self.features_ND, self.quality_N, num_selected=int(mask_N.sum()),
            quality_weight=self.quality_weight,
        )  # fmt: skip
        return value(mask_N)

    def polish(self, start_N, **options):
        return polish_within(start_N, self.constraint, values=self.values, gains=self.gains, **options)


def is_full(constraint, mask_N):
    """True if no other sample may be added."""
    more_RN = mask_N.repeat(len(mask_N), 1) | torch.eye(len(mask_N), dtype=torch.bool)
    return not any(constraint.allows(more_N) for more_N in more_RN[~mask_N])


@pytest.mark.parametrize("kind", constraints.KINDS)
@pytest.mark.parametrize("diversity", ["facility_location", "pairwise", "disf"])
def test_a_small_block_is_solved_by_trying_all(kind, diversity):
    for seed in range(2):
        solver = Solver(constraints.make(kind, 8, seed=seed), diversity, seed=seed)
        mask_N, value = solver.polish(solver.ground.top_k(torch.zeros(8)))
        allowed = [mask_N for mask_N in constraints.allowed_masks(solver.constraint) if mask_N.any()]
        best = max(solver.oracle(mask_N) for mask_N in allowed if is_full(solver.constraint, torch.tensor(mask_N)))
        assert solver.constraint.allows(mask_N)
        assert value == pytest.approx(best, abs=1e-9)
        assert value == pytest.approx(solver.oracle(mask_N.numpy()), abs=1e-9)


@pytest.mark.parametrize("kind", constraints.KINDS)
@pytest.mark.parametrize("has_features", [True, False])
def test_exchanges_keep_the_constraint_and_never_lose(kind, has_features):
    num_improved = 0
    for seed in range(4):
        solver = Solver(constraints.make(kind, 30, seed=seed), "disf", seed=seed)
        start_N = solver.ground.top_k(torch.randn(30, generator=torch.Generator().manual_seed(seed)))
        before_N = start_N.clone()
        features = solver.ground.centered if has_features else None
        mask_N, value = solver.polish(start_N, features=features)
        assert torch.equal(start_N, before_N)
        assert solver.constraint.allows(mask_N)
        assert value == pytest.approx(solver.oracle(mask_N.numpy()), abs=1e-9)
        assert value >= solver.oracle(start_N.numpy()) - 1e-12
        num_improved += value > solver.oracle(start_N.numpy()) + 1e-9
    assert num_improved >= 3, "nothing was exchanged: the test shows nothing"


@pytest.mark.parametrize("kind", constraints.KINDS)
def test_at_the_end_no_single_exchange_is_better(monkeypatch, kind):
    monkeypatch.setattr(constrained_polish, "MAX_ENUMERATED_SAMPLES", 0)
    monkeypatch.setattr(rounding, "NUM_SINGLES", 24)
    for seed in range(4):
        solver = Solver(constraints.make(kind, 14, seed=seed), "disf", seed=seed)
        mask_N, value = solver.polish(solver.ground.top_k(torch.zeros(14)))
        for added in (~mask_N).nonzero().squeeze(1).tolist():
            for removed in mask_N.nonzero().squeeze(1).tolist():
                trial_N = mask_N.clone()
                trial_N[added], trial_N[removed] = True, False
                if solver.constraint.allows(trial_N) and is_full(solver.constraint, trial_N):
                    assert solver.oracle(trial_N.numpy()) <= value + 1e-12


def test_up_to_twelve_free_samples_all_are_tried_and_gains_not_asked_for():
    solver = Solver(constraints.make("groups", 12), "disf")
    mask_N = solver.ground.top_k(torch.zeros(12))
    polish_within(mask_N, solver.constraint, values=solver.values, gains=lambda mask_N: pytest.fail("not needed"))


def test_of_candidates_with_the_same_features_the_best_alone_is_looked_at():
    solver = Solver(constraints.make("groups", 20), "disf")
    mask_N, asked = solver.ground.top_k(torch.zeros(20)), []

    def features(rows):
        asked.append(rows.tolist())
        return torch.eye(5)[rows % 5]

    gain_N = torch.randn(20, generator=torch.Generator().manual_seed(0)).double()
    everyone = constrained_polish._candidates(mask_N, solver.constraint, gain_N, None)
    for among, chosen in zip(
        everyone, constrained_polish._candidates(mask_N, solver.constraint, gain_N, features), strict=True
    ):
        first = [row for place, row in enumerate(among.tolist()) if row % 5 not in (among[:place] % 5).tolist()]
        assert chosen.tolist() == first
    asked.clear()
    solver.polish(mask_N, features=features)
    assert asked


@pytest.mark.parametrize("kind", ["costs", "groups and costs", "forced and costs"])
@pytest.mark.parametrize("diversity", ["facility_location", "pairwise"])
def test_nothing_that_fits_is_left_out(kind, diversity):
    for seed in range(3):
        solver = Solver(constraints.make(kind, 24, seed=seed), diversity)
        mask_N, _ = solver.polish(solver.ground.top_k(torch.zeros(24)), features=solver.ground.centered)
        assert is_full(solver.constraint, mask_N)


def test_any_proxy_of_the_gains_is_safe(monkeypatch):
    monkeypatch.setattr(constrained_polish, "MAX_ENUMERATED_SAMPLES", 0)
    solver = Solver(constraints.make("groups and costs", 16), "disf")
    start_N = solver.ground.top_k(torch.zeros(16))
    for proxy in (lambda mask_N: torch.zeros(16, dtype=torch.float64), lambda mask_N: -solver.gains(mask_N)):
        mask_N, value = polish_within(start_N, solver.constraint, values=solver.values, gains=proxy)
        assert solver.constraint.allows(mask_N)
        assert value >= solver.oracle(start_N.numpy()) - 1e-12


def test_matched_pairs_may_be_exchanged_from_the_first_on_as_many_as_one_likes():
    constraint = constraints.make("groups and costs", 40, seed=2)
    rng = np.random.default_rng(0)
    mask_N = constraint.fill(torch.tensor(rng.normal(size=40)))
    gain_N = torch.tensor(rng.normal(size=40))
    added = (~mask_N).nonzero().squeeze(1)
    pairs = constrained_polish.match(
        added[gain_N[added].argsort(descending=True)], mask_N.nonzero().squeeze(1), constraint,
        gain_N=gain_N, room_G=constraint.room_left(mask_N),
    )  # fmt: skip
    assert len(pairs) > 3
    for one, other in pairs.tolist():
        assert gain_N[one] > gain_N[other]
        mask_N[one], mask_N[other] = True, False
        assert constraint.allows(mask_N)
