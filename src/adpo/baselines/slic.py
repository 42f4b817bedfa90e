"""Sequence likelihood calibration (Zhao et al. 2023): a hinge on the margin, plus the likelihood of a target text.

max(0, margin - log pi(w) + log pi(l)) - nll_weight log pi(target)
"""

from torch import Tensor


def slic_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    target_logp: Tensor | None = None,
    margin: float = 1.0,
    nll_weight: float = 0.1,
) -> Tensor:
    """All [n]; without ``target_logp`` the chosen candidate is the target text."""
    target_logp = chosen_logp if target_logp is None else target_logp
    return ((margin - chosen_logp + rejected_logp).clamp(min=0) - nll_weight * target_logp).mean()
