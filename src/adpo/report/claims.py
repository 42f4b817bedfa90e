"""What the paper says of each experiment, and what the results at hand say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from adpo.report.parts import Claim

NOT_HERE = "not in these results"


def claims_of(experiment: str, results: dict[str, Any]) -> list[Claim]:
    """None for an experiment that the paper does not have, or that has no results yet."""
    return [Claim(said, found(results)) for said, found in CLAIMS.get(experiment, [])] if results else []


def _reported(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results.get("rows", []) if row.get("study") == "seeds"]


def _accuracies(results: dict[str, Any]) -> str:
    rows = [(row["method"], row.get(f"{results['exams'][0]}: greedy")) for row in _reported(results)]
    return "; ".join(f"{method} {value[0]:.1%} ± {value[1]:.1%}" for method, value in rows if value) or NOT_HERE


def _collapses(results: dict[str, Any]) -> str:
    rows = [row for row in results.get("rows", []) if row.get("study") in ("seeds", "range")]
    counts: dict[str, list[int]] = {}
    for row in rows:
        total = counts.setdefault(row["method"], [0, 0])
        total[0] += row["collapsed"]
        total[1] += row["seeds"]
    return "; ".join(f"{method}: {bad} of {all_} runs" for method, (bad, all_) in counts.items()) or NOT_HERE


def _diversity(results: dict[str, Any]) -> str:
    rows = [(row["method"], row.get("last rollouts: distinct")) for row in _reported(results)]
    told = [f"{method} {value[0]:.2f}" for method, value in rows if value]
    return "different answers in a group at the end: " + "; ".join(told) if told else NOT_HERE


def _best_of_scenarios(results: dict[str, Any]) -> str:
    """How often each method is first by its mean."""
    table = results["summary"]["sampled"]
    scenarios = [name for name in next(iter(table.values())) if name != "all"]
    first = Counter(max(table, key=lambda method: table[method][name][0]) for name in scenarios)
    told = "; ".join(f"{method} in {count}" for method, count in first.most_common())
    return f"sampled WinMass is highest, of {len(scenarios)} scenarios: {told}"


def _over_dpo(method: str, *kinds: str) -> Callable[[dict[str, Any]], str]:
    """Over the better DPO, mean over the levels of a corruption."""

    def told(results: dict[str, Any]) -> str:
        table = results["summary"]["sampled"]
        if not {method, "dpo-hard", "dpo-soft"} <= table.keys():
            return NOT_HERE
        found = []
        for kind in kinds:
            gains = [
                table[method][name][0] / max(table[dpo][name][0] for dpo in ("dpo-hard", "dpo-soft")) - 1
                for name in table[method]
                if name.startswith(f"{kind}-")
            ]
            if gains:
                found.append(f"{kind} {sum(gains) / len(gains):+.1%}")
        return f"{method} over the better DPO, sampled WinMass: " + "; ".join(found) if found else NOT_HERE

    return told


def _distances(results: dict[str, Any]) -> str:
    """Of what an anchored target and plain distillation leave between student and teacher."""
    wanted = ("KD, candidates", "ADPO anchored target")
    told = [
        f"{claim['environment']}, {claim['method']}: {claim['found']}"
        for claim in results.get("claims", [])
        if claim.get("method") in wanted and str(claim.get("claim", "")).startswith("KL")
    ]
    return "KL: " + "; ".join(told) if told else NOT_HERE


def _lists(results: dict[str, Any]) -> str:
    told = []
    for other, lines in results.get("against", {}).items():
        mean, low, high = lines["adpo-ranking"]["pair_accuracy"]
        told.append(f"over {other} {100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]")
    return "anchored ranking, points of pairs in order: " + "; ".join(told) if told else NOT_HERE


def _goals(results: dict[str, Any]) -> str:
    goals = results.get("goals", [])
    met = [goal for goal in goals if goal.get("met")]
    return f"{len(met)} of {len(goals)} goals are met; the ratios are in the table" if goals else NOT_HERE


def _held(results: dict[str, Any]) -> str:
    claims = results.get("claims", [])
    holds = [claim for claim in claims if claim.get("holds")]
    return f"{len(holds)} of {len(claims)} lines of what must hold do" if claims else NOT_HERE


def _curvature(results: dict[str, Any]) -> str:
    worst = max(
        abs(mine / right - 1)
        for row in results["curvature"]
        for mine, right in zip(row["measured"], row["expected"], strict=True)
    )
    return f"measured Hessian and formula differ by less than {max(worst, 1e-6):.0e} of it, in log-probabilities"


def _bottom(results: dict[str, Any]) -> str:
    bowl = next(each for each in results["bowls"] if each["tau"] == 1)
    return f"its bottom is at ({bowl['minimum'][0]:g}, {bowl['minimum'][1]:g}), the anchor at (0, 0)"


CLAIMS: dict[str, Sequence[tuple[str, Callable[[dict[str, Any]], str]]]] = {
    "bandits": (
        ("TRPO is best in 8 of 12 scenarios.", _best_of_scenarios),
        ("TRPO is +2.5 % to +10.6 % over DPO.", _over_dpo("trpo", "gaussian", "shift", "flips", "cauchy")),
        (
            "Listwise-Raw is +13.6 % over DPO under distribution shift, +9.3 % under adversarial corruption.",
            _over_dpo("adpo-raw", "shift", "flips"),
        ),
        ("PPO is -8.8 % under distribution shift.", _over_dpo("ppo-clip", "shift")),
    ),
    "listwise": (("Listwise targets hold what pairs miss.", _lists),),
    "reasoning": (
        ("Peak reward in training 0.89 for ADPO, 0.75 for GSPO, 0.68 for GRPO, one run each.", _accuracies),
        ("ADPO does not collapse; the others fall behind their peak.", _collapses),
        ("Generations stay diverse.", _diversity),
    ),
    "efficiency": (
        ("An actor update takes 19.7 s against 71.0 s (GSPO) and 68.5 s (GRPO), because of the loss.", _goals),
    ),
    "distill": (
        ("Students of the anchored methods keep more of the teacher than distillation.", _held),
        ("The KL between student and teacher falls by 4 to 49 times, from 30.5 and 17.0.", _distances),
    ),
    "geometry": (
        ("The curvature of the bowl is that of the softmax Fisher matrix over tau².", _curvature),
        ("The bowl is centred at the anchor.", _bottom),
    ),
}
