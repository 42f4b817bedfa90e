"""Identity preference optimization (Azar et al. 2024): ``(D - 1/(2 beta))^2`` with DPO's margin D."""

from torch import Tensor

from adpo.baselines.dpo import log_ratio_margin


def ipo_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """All [n]."""
    margin = log_ratio_margin(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return (margin - 1 / (2 * beta)).square().mean()
