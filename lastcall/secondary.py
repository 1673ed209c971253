"""The shape of `analyses.json`: the secondary questions of a study, every key typed and explained.

Every answer is secondary: labelled so, outside the planned family, under the same lock. Losses and gains are
nats a token; an interval is a plain whole-cluster one. A section is absent where a study does not ask for it.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from lastcall.results import CalibrationBin, Family, Interval, PositionBin

SCHEMA = 1
"""Version of the shape; a reader refuses another."""


class HorizonRouter(TypedDict):
    """One router at both horizons, on the same test books."""

    name: str
    forced: Interval
    """NLL under the quota at the longer horizon."""
    forced_gain: Interval
    """NLL(never) − NLL under the quota, there."""
    unforced: Interval
    """NLL of the rule score > τ alone, there: no matched budget."""
    activation: Interval
    """Share of the longer blocks' positions that the unforced rule calls."""
    activation_core: Interval
    """The same share in the core blocks of the same books."""
    drift: list[PositionBin]
    """Share called by the unforced rule along the longer block (`utility` holds the share)."""


class HorizonResult(TypedDict):
    """The longer blocks of one checkpoint (section 8)."""

    checkpoint: str
    horizon: int
    calls: int
    scored: int
    books: int
    left_out: list[str]
    """Test books too short for any checkpoint, left out for all."""
    overlap: float
    """Share of the longer blocks' scored predictions that are scored in a core block too."""
    nll_never: Interval
    nll_always: Interval
    routers: list[HorizonRouter]


class ControllerResult(TypedDict):
    """One controller on one router; mean over seeds, then blocks, then books."""

    controller: str
    router: str
    slack: float
    """c: calls up to t are within rate · t ± c, for every t and any scores."""
    called: float
    """Share of positions really called: the budget is not spent exactly."""
    gain: Interval
    """NLL(never) − NLL(this)."""
    deadline_gain: Interval
    """The deadline rule's gain at the share really called, its horizon known."""
    oracle_gain: Interval
    """The oracle's gain at that share."""


class QuotaPoint(TypedDict):
    """A router at one quota; mean over seeds, then blocks, then books."""

    gain: Interval
    """NLL(never) − NLL(this)."""
    oracle_share: Interval | None
    """gain over the oracle's at the same quota; null where that is not positive."""
    knowable_share: Interval | None
    """gain over the knowable ceiling's at the same quota; null where that is not positive."""


class QuotaCurves(TypedDict):
    """Gains at every quota, in the order of `calls`."""

    calls: list[int]
    """k of a block's n."""
    positions: int
    """n."""
    chance: list[Interval]
    """k positions at random: k / n of the mean utility, the exact expectation."""
    knowable: list[Interval]
    oracle: list[Interval]
    routers: dict[str, list[QuotaPoint]]


class Reliability(TypedDict):
    """Does the utility agree with what the full branch expects of it? Over scored test positions."""

    bins: list[CalibrationBin]
    """By tenths of KL: mean KL (`predicted`) and mean utility; fewer where KL ties."""
    slope: Interval
    """Least squares of utility on KL through the origin, Σ u · KL / Σ KL²: 1 where calibrated. The few
    positions of large KL weigh most."""
    ratio: Interval
    """Mean utility over mean KL: 1 where calibrated; every position weighs by its KL."""


class KnowableCeiling(TypedDict):
    """The knowable ceiling at k calls, claimed, corrected and realised."""

    calls: int
    scale: float
    """a: Σ u · KL / Σ KL² over the calibration split. A positive scale changes no order, so the positions
    and `realised` are the same with or without it."""
    claimed: Interval
    """KL of the chosen positions: the gain that the full branch expects there."""
    corrected: Interval
    """a times `claimed`. The interval holds a fixed: it does not show that a was estimated."""
    realised: Interval
    """Utility of the chosen positions: the ceiling's gain over `never`."""


class Allocation(TypedDict):
    """What some choice of positions gains over `never`, and how many positions it takes."""

    called: float
    """Share of scored positions."""
    gain: Interval


class RouterAllocation(TypedDict):
    """A router's scores without its threshold; mean over seeds."""

    ranking: Allocation
    """The k best scores of each block, which needs the whole block: its order alone."""
    sign: Allocation
    """Wherever a gain is predicted (score > 0), without a budget: its sign alone."""


class Allocations(TypedDict):
    """The value of ranking against the value of knowing the sign (no budget)."""

    calls: int
    """k of a block, where there is a budget."""
    always: Allocation
    chance: Allocation
    """k positions at random: the exact expectation."""
    fixed_fit: Allocation | None
    """The same k positions in every block: the best of the fit split; null where no profile is given."""
    fixed_hindsight: Allocation
    """The same, the best mean utility over the test books themselves. Chosen on what it is judged on (once,
    not in every draw), so it is a ceiling of fixed positions and its interval is optimistic."""
    knowable: Allocation
    oracle: Allocation
    hindsight_sign: Allocation
    """Exactly where utility > 0, without a budget: no choice of positions gains more."""
    routers: dict[str, RouterAllocation]


class Ceilings(TypedDict):
    """What could be gained at most, and how far that can be trusted."""

    reliability: Reliability
    knowable: KnowableCeiling
    allocations: Allocations


class IndependenceFeature(TypedDict):
    """What is left between utility and one trajectory feature."""

    name: str
    z: float
    """Positive where they go together."""
    p: float
    """Two-sided, this feature by itself."""
    correlation: float
    """Of the residuals."""
    explained: float
    """Share of the feature's variance that what is given explains."""


class IndependenceResult(TypedDict):
    """Is utility independent of the trajectory, given state, uncertainty, displacement and position?"""

    checkpoint: str
    learner: str
    """Of the regressions inside."""
    folds: int
    features: list[IndependenceFeature]
    p_together: float
    """Of the features together, by the multiplier bootstrap of clusters."""
    explained_utility: float
    """Share of the utility's variance that what is given explains; may be negative."""


class ThirdActionRouter(TypedDict):
    """A router that may bypass, call locally or call in full, under one cost budget."""

    name: str
    nll: Interval
    gain: Interval
    """NLL(never) − NLL(this)."""
    over_two: Interval
    """NLL of the same router between bypass and full at the same cost, less NLL(this)."""
    full: float
    """Share of positions called in full."""
    local: float
    """Share called locally."""
    cost: float
    """Cost spent a position; a full call costs 1."""


class ThirdActionResult(TypedDict):
    """Routing between three actions on one checkpoint."""

    checkpoint: str
    window: int
    local_cost: float
    """Cost of a local call, of a full one's: keys read, in the mean over the block."""
    budget: float
    """Cost a position that may be spent."""
    routers: list[ThirdActionRouter]
    oracle: Interval
    """Gain of hindsight's choice at the same cost."""


class CallCost(TypedDict):
    """What a bypassed call would save, by count (section 8); nothing here is timed."""

    checkpoint: str
    operation: str
    operations_a_token: float
    """Multiply-adds times two, in the mean over the block's positions."""
    share_of_operations: float
    """Of the whole forward's."""
    bytes_a_token: float
    """Weights and cached keys and values that a decode step would not read, in the mean over the block."""
    share_of_bytes: float


class Answers(TypedDict):
    """The whole of `analyses.json`."""

    schema: int
    software: str
    study: str
    lock: str
    """Hash of the lock under which the test records were made."""
    records: str
    """Digest of the hashes of these records."""
    alpha: float
    practical_threshold: float
    costs: NotRequired[list[CallCost]]
    horizon: NotRequired[list[HorizonResult]]
    curves: NotRequired[dict[str, QuotaCurves]]
    """By checkpoint."""
    ceilings: NotRequired[dict[str, Ceilings]]
    controllers: NotRequired[dict[str, list[ControllerResult]]]
    learners: NotRequired[list[Family]]
    """The planned comparisons judged anew by each learner, each a family of its own."""
    independence: NotRequired[list[IndependenceResult]]
    third_action: NotRequired[list[ThirdActionResult]]


Section = Literal[
    "costs", "horizon", "curves", "ceilings", "controllers", "learners", "independence", "third_action"
]
