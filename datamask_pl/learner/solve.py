"""The scales of a block's terms before the first step, and its mask after the last.

Shapes: R masks, N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from datamask_pl.data.types import BlockResult
from datamask_pl.errors import warn
from datamask_pl.functional.constraint import Constrained
from datamask_pl.functional.swaps.coverage import CandidateCoverage
from datamask_pl.functional.swaps.polish import polish
from datamask_pl.functional.swaps.pooled import Interactions
from datamask_pl.functional.threads import give_back_memory
from datamask_pl.functional.values import Values
from datamask_pl.learner.options import Method
from datamask_pl.learner.state import BlockState
from datamask_pl.objectives.ground_set import GroundSet
from datamask_pl.objectives.joint import JointObjective
from datamask_pl.objectives.quality import Quality

# Third integers of seeds, next to the steps of a block.
CALIBRATION, COMPARISON = 2**62, 2**62 + 1
NUM_CALIBRATION_MASKS = 64
# Elements of masks that are valued in one call.
MAX_MASK_ELEMENTS = 2**24
# A spread below this share of a term's size is rounding: the term is constant.
RELATIVE_SPREAD = 1e-7
# Quality above this share of its size varies, though it is taken for constant, which is warned of.
WARNED_SPREAD = 1e-10


def draw_uniform_masks(num_masks: int, ground: GroundSet, *, seed: int) -> Tensor:
    """Random masks of the ground set's budget, the same on any device: bool (R, N)."""
    return ground.budget.uniform_masks(num_masks, generator=torch.Generator().manual_seed(seed), device=ground.device)


def calibrate(objective: JointObjective, ground: GroundSet, *, seed: int) -> Tensor:
    """Standard deviation of every term over 64 random masks of the budget. Collective over `ground.shares.ranks`.

    Args:
        objective: the terms.
        ground: what a step's masks are drawn from.
        seed: of the masks.

    Returns:
        float64 (number of terms,); 0 for a term that is constant, which then counts nothing.

    Raises:
        ObjectiveError: If a term that counts is not finite; on all ranks.
    """
    objective.prepare(ground, num_masks=NUM_CALIBRATION_MASKS)
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, min(NUM_CALIBRATION_MASKS, MAX_MASK_ELEMENTS // ground.num_samples))
    counts = [min(at_once, NUM_CALIBRATION_MASKS - first) for first in range(0, NUM_CALIBRATION_MASKS, at_once)]
    draws = (ground.budget.uniform_masks(count, generator=generator, device=ground.device) for count in counts)
    parts = (objective.term_values(masks_RN, ground) for masks_RN in draws)
    values = torch.cat(list(parts), dim=1)
    give_back_memory()
    objective.check_finite(values, when="in calibration, before the first step")
    spread, size = values.std(dim=1, correction=1), values.abs().amax(1)
    is_varying = spread > RELATIVE_SPREAD * size
    for index, term in enumerate(objective.terms):
        # other terms are made of float32 products: such a spread may be their rounding
        is_dropped = isinstance(term.objective, Quality) and term.weight > 0 and not bool(is_varying[index])
        if is_dropped and bool(spread[index] > WARNED_SPREAD * size[index]):
            warn(
                f"model.calibrate: {term.name} counts nothing, since its spread over random masks is less than "
                f"{RELATIVE_SPREAD:g} of its size; scale it (data.quality_scaling), or set model.calibrate: false."
            )
    return torch.where(is_varying, spread, 0.0)


def calibrate_terms(objective: JointObjective, ground: GroundSet, method: Method, *, seed: int) -> Tensor:
    """What the terms are divided by: `calibrate`, or 1 where the method does not calibrate."""
    if not method.calibrate:
        return torch.ones(len(objective.terms), dtype=torch.float64, device=ground.device)
    return calibrate(objective, ground, seed=seed)


def round_logits(
    logits_N: Tensor,
    *,
    objective: JointObjective,
    ground: GroundSet,
    scales: Tensor,
    is_polished: bool,
    best_rollout_N: Tensor | None,
) -> Tensor:
    """The mask of a block: the better of top-k and the best rollout, then swaps that raise the objective.

    Swaps within a budget of costs may end below their start, since what still fits is added even where it lowers the
    objective. So the mask is the best of their start, their end, and the mask of the highest quality.

    Args:
        logits_N: float (N,).
        objective: what is maximised.
        ground: the whole block. Collective over its ranks.
        scales: float64 (number of terms,).
        is_polished: whether to swap.
        best_rollout_N: bool (N,), the best mask of the whole block that was drawn, if any.

    Returns:
        bool (N,), with exactly the budget kept, or of a cost at most that.
    """
    starts = [ground.budget.fill(logits_N)]
    if best_rollout_N is not None:
        starts.append(best_rollout_N)

    def values(masks_RN: Tensor) -> Tensor:
        return objective.combine(objective.term_values(masks_RN, ground), scales)

    def gains(mask_N: Tensor) -> Tensor:
        if not objective.has_expectation:
            return logits_N.double()
        return objective.value_and_gradient(mask_N.double(), ground, scales)[0].gradient_N

    def best(masks: list[Tensor]) -> Tensor:
        """The first of the masks of the highest value."""
        return masks[0] if len(masks) == 1 else masks[int(values(torch.stack(masks)).argmax())]

    has_costs = not ground.budget.is_size_fixed
    top_quality_N = ground.budget.fill(ground.quality_N)
    best_N = best(starts)
    if not is_polished:
        return best([best_N, top_quality_N]) if has_costs else best_N

    def covered(masked_N: Tensor, rows_P: Tensor) -> CandidateCoverage:
        return objective.coverage(masked_N, rows_P, ground, scales)

    def interactions(rows_P: Tensor) -> Interactions:
        pool = ground.part(rows_P)
        return lambda places, others: objective.interactions(places, others, pool, scales)

    polished_N, _ = polish(
        best_N,
        values=values,
        gains=gains,
        features=ground.centered,
        interactions=interactions if objective.has_interactions else None,
        covered=covered if objective.has_coverage else None,
        constraint=ground.budget if isinstance(ground.budget, Constrained) else None,
    )
    return best([polished_N, best_N, top_quality_N] if has_costs else [polished_N, top_quality_N])


def value_of(masks_RN: Tensor, *, objective: JointObjective, ground: GroundSet, scales: Tensor) -> list[Values]:
    """The values of each mask. Collective over the ranks of the ground set.

    Raises:
        ObjectiveError: If a term that counts is not finite; on all ranks.
    """
    terms = objective.term_values(masks_RN, ground)
    objective.check_finite(terms, when="after the last step")
    f_R = objective.combine(terms, scales)
    names = [term.name for term in objective.terms]
    return [
        Values(float(f), dict(zip(names, column.tolist(), strict=True))) for f, column in zip(f_R, terms.T, strict=True)
    ]


def solve(
    state: BlockState, logits_N: Tensor, *, objective: JointObjective, is_polished: bool, seed: int
) -> BlockResult:
    """The mask of a block whose steps are done, next to a random one and the one of highest quality. Collective.

    Args:
        state: of the block.
        logits_N: float32 (N,), after the last step.
        objective: what is maximised.
        is_polished: whether samples near the threshold are swapped.
        seed: of the random mask.
    """
    ground, scales = state.ground, state.scales
    mask_N = round_logits(
        logits_N,
        objective=objective,
        ground=ground,
        scales=scales,
        is_polished=is_polished,
        best_rollout_N=state.best_mask_N,
    )
    random_N = draw_uniform_masks(1, ground, seed=seed)[0]
    masks_RN = torch.stack([mask_N, random_N, ground.budget.fill(ground.quality_N)])
    mask, random, top_quality = value_of(masks_RN, objective=objective, ground=ground, scales=scales)
    names = [term.name for term in objective.terms]
    # writing and drawing the block takes memory in addition
    ground.shares.forget()
    give_back_memory()
    return BlockResult(
        block=state.block,
        num_selected=int(mask_N.sum()),
        mask_N=mask_N.cpu(),
        logits_N=logits_N.cpu().clone(),
        probability_N=ground.budget.probabilities(logits_N).float().cpu(),
        mask=mask,
        random=random,
        top_quality=top_quality,
        scales=dict(zip(names, scales.tolist(), strict=True)),
        num_steps=state.num_steps,
        seconds=state.seconds,
        budgets=ground.budget.spent(mask_N),
    )
