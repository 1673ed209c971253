"""The shape of `judged.json`: every key typed and explained.

`stats` writes it, `report` draws it, and neither computes what the other owns. It holds no times and no
paths, so that one study on one machine judges to the same bytes. Losses and gains are nats a token.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

SCHEMA = 1
"""Version of the shape; a reader refuses another."""

Verdict = Literal["gain", "loss", "no gain of practical size", "undecided"]


class Interval(TypedDict):
    """An estimate with its plain percentile interval over whole-cluster bootstrap draws."""

    estimate: float
    low: float
    high: float


class Unforced(TypedDict):
    """The rule score > τ without budget or deadline: not a matched budget (section 5)."""

    nll: float
    activation: float
    """Share of scored positions called; the budget's share is what it should be."""
    activation_by_quarter: list[float]
    """The same by quarter of the scored positions of a block: its drift along the block."""


class RouterResult(TypedDict):
    """One policy on one checkpoint; mean over seeds, then blocks, then books."""

    name: str
    kind: Literal["learned", "fixed", "reference", "ceiling"]
    """reference: never, always. ceiling: oracle, knowable; neither is a router."""
    seeds: list[int]
    nll: Interval
    gain: Interval
    """NLL(never) − NLL(this)."""
    oracle_share: float | None
    """gain over the oracle's gain; null where that is not positive."""
    knowable_share: float | None
    """gain over the knowable ceiling's gain; null where that is not positive."""
    calls_min: int
    """Fewest calls in any block and seed."""
    calls_max: int
    """Most calls in any block and seed."""
    forced_share: float | None
    """Share of calls at or below τ, which only the deadline made; null where there is no τ."""
    unforced: Unforced | None
    """null where there is no τ."""


class Histogram(TypedDict):
    """Distribution of the signed utility over scored test positions."""

    edges: list[float]
    """Bin edges, nats; one more than shares."""
    shares: list[float]
    """Share of positions a bin."""
    below: float
    """Share under the first edge."""
    above: float
    """Share over the last edge."""


class PositionBin(TypedDict):
    """Mean utility over a run of positions."""

    first: int
    last: int
    """Positions t, both included."""
    utility: Interval


class CalibrationBin(TypedDict):
    """A tenth of the scored test positions, by predicted utility, seeds pooled."""

    predicted: float
    """Mean predicted utility."""
    realised: Interval
    """Mean utility."""


class CheckpointResult(TypedDict):
    """Everything judged of one checkpoint."""

    name: str
    nll_full: Interval
    nll_bypass: Interval
    nll_local: dict[str, Interval]
    """By local window."""
    gain_full: Interval
    """Mean utility: NLL(bypass) − NLL(full)."""
    share_positive: Interval
    """Share of scored positions with positive utility."""
    local_recovery: dict[str, Interval]
    """(NLL(bypass) − NLL(local)) / (NLL(bypass) − NLL(full)), by local window; empty where some draw's
    denominator is not positive, since the ratio then means nothing."""
    routers: list[RouterResult]
    """never, always, then the study's routers in its order, then knowable and oracle."""
    histogram: Histogram
    by_position: list[PositionBin]
    calibration: dict[str, list[CalibrationBin]]
    """By learned router, ten bins in rising order of prediction; fewer where predictions tie."""


class ComparisonResult(TypedDict):
    """Δ(A over B) = NLL(B) − NLL(A) on one checkpoint; positive favours A (section 6)."""

    checkpoint: str
    a: str
    b: str
    delta: Interval
    simultaneous_low: float
    simultaneous_high: float
    """Δ ± q·se over the family."""
    se: float
    p: float
    """One-sided."""
    p_holm: float
    per_seed: list[float]
    """Δ of each fit seed (the i-th seed of A against the i-th of B; a seedless side repeats)."""
    verdict: Verdict


class Family(TypedDict):
    """Comparisons corrected together."""

    name: str
    planned: bool
    """False: secondary, labelled so, outside the planned family."""
    comparisons: list[ComparisonResult]


class Amendment(TypedDict):
    """A change of plan after the first lock; shown for ever."""

    lock: str
    """Hash of the lock it made."""
    reason: str
    changed: list[str]


class TestMeasurement(TypedDict):
    """One measurement of the test split that was made, whether used or not."""

    lock: str
    """Hash of the lock under which it was made."""
    files: int
    repeated: int
    """Times that one of them was written again under the same lock."""
    used: bool


class LockResult(TypedDict):
    """What the verdict is bound to, and what of it was re-hashed while judging."""

    hash: str
    software: str
    """Version that made the lock."""
    verified: list[str]
    unverified: list[str]
    """What could not be re-hashed here, each with the reason."""
    warnings: list[str]
    amendments: list[Amendment]
    test_measurements: list[TestMeasurement]


class Setup(TypedDict):
    """The figures one needs to read the rest."""

    horizon: int
    context: int
    scored: int
    calls: int
    blocks_a_book: int
    books: dict[str, int]
    """Books a split."""
    cluster: Literal["book", "author"]
    clusters: int
    """Test clusters, the units of resampling."""
    draws: int
    seed: int
    alpha: float
    practical_threshold: float
    warnings: list[str]
    """Such as fewer than 20 clusters."""


class Provenance(TypedDict):
    """One checkpoint's recorded facts, from the lock."""

    name: str
    facts: dict[str, str]
    """architecture, dtype, attention backend, kernels, weights and tokenizer hashes, bos rule, …"""


class PublishedFigure(TypedDict):
    """One figure of a published study beside ours."""

    checkpoint: str | None
    """null for a figure of all checkpoints together."""
    what: str
    """Its key, as in the study file."""
    value: float
    """As published, with the ends of its interval where it has one."""
    low: float | None
    high: float | None
    ours: float | None
    """null where it is not measured here."""
    ours_low: float | None
    ours_high: float | None
    """Our plain interval over whole clusters; null for counts, bounds and what is not measured."""
    difference: float | None
    """ours − value; null where not measured, and for a bound."""
    agrees: bool | None
    """Whether the published value lies in our interval; of a count, whether it is the same; of a bound,
    whether ours lies below it. null where not measured."""
    unmeasured: str | None
    """Why it is not measured here; null where it is."""


class PublishedResult(TypedDict):
    """What a published study reports, and how this one differs from it."""

    source: str
    """Where its figures come from."""
    figures: list[PublishedFigure]
    """In the study file's order."""
    unmeasured: list[str]
    """What else it reports, a sentence each."""
    differences: list[str]
    """How this study differs from it, a sentence each: computed ones, then the study file's own."""


class Judged(TypedDict):
    """The whole of `judged.json`."""

    schema: int
    software: str
    """Version that judged."""
    study: str
    question: str
    claim: str
    setup: Setup
    lock: LockResult
    provenance: list[Provenance]
    left_out: list[str]
    """Books left out, each with the reason."""
    checkpoints: list[CheckpointResult]
    families: list[Family]
    """`planned` first."""
    published: NotRequired[PublishedResult]
    """Absent where the study file names no published study."""
