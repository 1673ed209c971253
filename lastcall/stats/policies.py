"""What a policy's calls are worth: gains, shares of the ceilings, spending (sections 4 and 5).

Choosing bypass at one position changes no other, so that the loss of any calls is ℓ1 where called and ℓ0
elsewhere, and the gain over `never` is the utility of the called positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float64

from lastcall.results import Unforced
from lastcall.stats.loading import CheckpointRecords, Policy

Gains = Mapping[str, Float64[np.ndarray, "seeds books"]]
"""NLL(never) − NLL(policy) by policy name, nats a token."""


def all_policies(records: CheckpointRecords, calls: int) -> tuple[Policy, ...]:
    """never, always, the routers, knowable, oracle: in the order of the results."""
    never = np.zeros((1, *records.utility.shape), dtype=np.bool_)
    return (
        Policy("never", "reference", (), never),
        Policy("always", "reference", (), ~never),
        *records.routers,
        Policy("knowable", "ceiling", (), largest(records.kl, calls)[None]),
        Policy("oracle", "ceiling", (), largest(records.utility, calls)[None]),
    )


def largest(
    values: Float64[np.ndarray, "books blocks scored"], calls: int
) -> Bool[np.ndarray, "books blocks scored"]:
    """Each block's `calls` largest values; of equal ones the earlier."""
    chosen = np.argsort(-values, axis=-1, kind="stable")[..., :calls]
    mask = np.zeros(values.shape, dtype=np.bool_)
    np.put_along_axis(mask, chosen, True, axis=-1)
    return mask


def book_gains(
    policy: Policy, utility: Float64[np.ndarray, "books blocks scored"]
) -> Float64[np.ndarray, "seeds books"]:
    """NLL(never) − NLL(policy) of each seed and book, nats a token: the mean over its blocks."""
    gains = [np.where(calls, utility, 0.0).mean(axis=(1, 2)) for calls in policy.calls]
    return np.stack(gains)


def spending(policy: Policy) -> tuple[int, int]:
    """Fewest and most calls in any block and seed."""
    spent = policy.calls.sum(axis=-1)
    return int(spent.min()), int(spent.max())


def exceeds(policy: Policy) -> Bool[np.ndarray, "seeds books blocks scored"] | None:
    """Where the score is above τ, compared in float64; None where there is no τ."""
    if policy.scores is None or policy.thresholds is None:
        return None
    return policy.scores > np.array(policy.thresholds)[:, None, None, None]


def forced_share(policy: Policy, above: Bool[np.ndarray, "seeds books blocks scored"]) -> float:
    """Share of calls at or below τ."""
    return float((policy.calls & ~above).sum() / policy.calls.sum())


def unforced(above: Bool[np.ndarray, "seeds books blocks scored"], records: CheckpointRecords) -> Unforced:
    """The rule score > τ alone; mean over seeds, blocks and books."""
    gains = [records.utility[mask].sum() / mask.size for mask in above]
    quarters = np.array_split(above, min(4, above.shape[-1]), axis=-1)
    return {
        "nll": float(records.loss_bypass.mean() - np.mean(gains)),
        "activation": float(above.mean()),
        "activation_by_quarter": [float(quarter.mean()) for quarter in quarters],
    }
