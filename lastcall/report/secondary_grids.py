"""The tables of the secondary analyses: one function a section of `analyses.json`."""

from __future__ import annotations

from lastcall.report.grid import (
    NONE,
    Cell,
    Column,
    Grid,
    Group,
    Row,
    gain,
    loss,
    magnitude,
    ratio,
    row,
    share,
)
from lastcall.report.wording import number, p_value, percent, plain, plural
from lastcall.secondary import (
    Allocation,
    Allocations,
    CallCost,
    Ceilings,
    ControllerResult,
    HorizonResult,
    IndependenceResult,
    QuotaCurves,
    QuotaPoint,
    ThirdActionResult,
)

BUDGETS = (0.01, 0.05, 0.1, 0.2, 0.5)
"""Budgets shown in a table, as near as the study's come; all of the study's where it has no more."""

_UNMATCHED = "unforced: not a matched budget"


def costs(found: list[CallCost]) -> Grid:
    columns = (
        Column("checkpoint", words=True),
        Column("operation", words=True),
        Column("operations a token", "operations\na token"),
        Column("of all operations", "of all\noperations"),
        Column("bytes a token", "bytes\na token"),
        Column("of all bytes", "of all\nbytes"),
    )
    rows = [
        row(
            c["checkpoint"],
            c["operation"],
            magnitude(c["operations_a_token"]),
            percent(c["share_of_operations"], 2),
            f"{magnitude(c['bytes_a_token'])}B",
            percent(c["share_of_bytes"], 2),
        )
        for c in found
    ]
    note = "By count, nothing here is timed."
    return Grid("what a bypassed call would save", columns, (Group("", tuple(rows), note),))


def horizon(found: list[HorizonResult]) -> Grid:
    columns = (
        Column("router", words=True),
        Column("NLL, forced", "NLL\nforced", brief=True),
        Column("gain over never, forced", "gain\nforced", brief=True),
        Column("NLL", "NLL\nunforced:\nbudget not\nmatched", brief=True, span=_UNMATCHED),
        Column("calls", "calls\nunforced:\nbudget not\nmatched", span=_UNMATCHED),
        Column("calls at the core horizon", "calls\nunforced\nat the core\nhorizon", span=_UNMATCHED),
    )
    return Grid("longer horizon", columns, tuple(_longer(h) for h in found))


def _longer(h: HorizonResult) -> Group:
    references = [
        row(name, loss(h[key]), NONE, NONE, NONE, NONE, kind="reference")  # type: ignore[literal-required]
        for name, key in (("never", "nll_never"), ("always", "nll_always"))
    ]
    routers = [
        row(
            r["name"],
            loss(r["forced"]),
            gain(r["forced_gain"]),
            loss(r["unforced"]),
            share(r["activation"]),
            share(r["activation_core"]),
        )
        for r in h["routers"]
    ]
    note = (
        f"{plural(h['horizon'], 'prediction')}, {h['scored']:,} scored; forced: exactly {h['calls']:,} "
        f"calls, {percent(h['calls'] / h['scored'])}. {plural(h['books'], 'test book')}, "
        f"{len(h['left_out']):,} left out. {percent(h['overlap'])} of the scored predictions are scored in a "
        "core block too."
    )
    return Group(h["checkpoint"], (*references, *routers), note)


def curves(found: dict[str, QuotaCurves]) -> list[Grid]:
    return [
        _shares("share of the oracle’s gain", found, "oracle_share"),
        _shares("share of the knowable ceiling’s gain", found, "knowable_share"),
    ]


def _shares(title: str, found: dict[str, QuotaCurves], key: str) -> Grid:
    def cell(point: QuotaPoint) -> Cell:
        return share(point[key])  # type: ignore[literal-required]

    first = next(iter(found.values()))
    shown = _few(first)
    columns = [Column("router", words=True)]
    for i in shown:
        budget, calls = percent(first["calls"][i] / first["positions"]), plural(first["calls"][i], "call")
        columns.append(Column(f"{budget}, {calls}", f"{budget}\n{calls}", brief=True))
    groups = [
        Group(
            name, tuple(row(router, *(cell(of[i]) for i in shown)) for router, of in curve["routers"].items())
        )
        for name, curve in found.items()
    ]
    return Grid(title, tuple(columns), tuple(groups))


def _few(curve: QuotaCurves) -> list[int]:
    """Places in `calls` of the budgets shown."""
    shares = [k / curve["positions"] for k in curve["calls"]]
    if len(shares) <= len(BUDGETS):
        return list(range(len(shares)))
    nearest = [min(range(len(shares)), key=lambda i: abs(shares[i] - wanted)) for wanted in BUDGETS]
    return list(dict.fromkeys(nearest))


def ceilings(found: dict[str, Ceilings]) -> list[Grid]:
    trust = Grid(
        "the knowable ceiling",
        (Column("figure", words=True), Column("value"), Column("what it is", words=True)),
        tuple(Group(name, _trust(of)) for name, of in found.items()),
    )
    return [trust, _allocations({name: of["allocations"] for name, of in found.items()})]


def _trust(of: Ceilings) -> tuple[Row, ...]:
    reliability, knowable = of["reliability"], of["knowable"]
    k, scale = plural(knowable["calls"], "call"), number(knowable["scale"], 3)
    return (
        row("slope", ratio(reliability["slope"]), "utility on KL through the origin; 1 where calibrated"),
        row("ratio", ratio(reliability["ratio"]), "mean utility over mean KL; 1 where calibrated"),
        row("claimed", gain(knowable["claimed"]), f"what the full branch expects of the {k} of largest KL"),
        row(
            "corrected",
            gain(knowable["corrected"]),
            f"claimed times {scale}, the slope of the calibration split, taken as exact",
        ),
        row("realised", gain(knowable["realised"]), "what these calls gain over never"),
    )


def _allocations(found: dict[str, Allocations]) -> Grid:
    first = next(iter(found.values()))
    ranking, sign = f"ranking: the best {first['calls']} of a block", "sign: wherever a gain is predicted"
    columns = (
        Column("policy", words=True),
        Column("calls", "ranking\ncalls", span=ranking),
        Column("gain over never", "ranking\ngain", brief=True, span=ranking),
        Column("calls", "sign\ncalls", span=sign),
        Column("gain over never", "sign\ngain", brief=True, span=sign),
    )
    return Grid("ranking against sign", columns, tuple(Group(n, _choices(of)) for n, of in found.items()))


def _choices(of: Allocations) -> tuple[Row, ...]:
    """Routers, then what needs no router, then hindsight's ceilings."""

    def both(ranked: Allocation | None, signed: Allocation | None) -> list[Cell]:
        return [
            cell
            for side in (ranked, signed)
            for cell in ((Cell(percent(side["called"])), gain(side["gain"])) if side else (NONE, NONE))
        ]

    fixed = of["fixed_fit"]
    return (
        *(row(name, *both(r["ranking"], r["sign"])) for name, r in of["routers"].items()),
        row("chance", *both(of["chance"], None), kind="reference"),
        *([row("fixed positions", *both(fixed, None), kind="reference")] if fixed else []),
        row("always", *both(None, of["always"]), kind="reference"),
        row("fixed, in hindsight", *both(of["fixed_hindsight"], None), kind="ceiling"),
        row("knowable", *both(of["knowable"], None), kind="ceiling"),
        row("oracle", *both(of["oracle"], None), kind="ceiling"),
        row("sign, in hindsight", *both(None, of["hindsight_sign"]), kind="ceiling"),
    )


def controllers(found: dict[str, list[ControllerResult]]) -> Grid:
    at = "at the share really called"
    columns = (
        Column("controller", words=True),
        Column("router", words=True),
        Column("calls up to t", "calls up\nto t"),
        Column("really called", "really\ncalled"),
        Column("gain over never", "gain", brief=True),
        Column("deadline rule’s gain", "deadline’s\ngain there", brief=True, span=at),
        Column("oracle’s gain", "oracle’s\ngain there", brief=True, span=at),
    )
    groups = [Group(name, tuple(_controlled(c) for c in results)) for name, results in found.items()]
    return Grid("controllers without a horizon", columns, tuple(groups))


def _controlled(c: ControllerResult) -> Row:
    guarantee = f"rate·t ± {plain(round(c['slack'], 2))}"
    gains = (gain(c["gain"]), gain(c["deadline_gain"]), gain(c["oracle_gain"]))
    return row(c["controller"], c["router"], guarantee, percent(c["called"]), *gains)


def independence(found: list[IndependenceResult], alpha: float) -> Grid:
    columns = (
        Column("feature", words=True),
        Column("z"),
        Column("p"),
        Column("correlation of the residuals", "residual\ncorrelation"),
        Column("its variance explained", "variance\nexplained"),
    )
    groups = [
        Group(
            of["checkpoint"],
            tuple(
                row(
                    f["name"].replace("_", " "),
                    number(f["z"], 2),
                    p_value(f["p"]),
                    number(f["correlation"]),
                    percent(f["explained"]),
                )
                for f in of["features"]
            ),
            independence_said(of, alpha),
        )
        for of in found
    ]
    return Grid("utility and the trajectory, given the rest", columns, tuple(groups))


def independence_said(of: IndependenceResult, alpha: float) -> str:
    """What the test says and does not say, in plain sentences."""
    p = p_value(of["p_together"])
    together = f"Together p {p}" if p.startswith("<") else f"Together p = {p}"
    said = (
        f"{together}: something between utility and trajectory is left once the rest is given. That does not "
        "say how much there is to gain, nor that a router can use it; and what the regressions miss of the "
        "state passes for the trajectory."
        if of["p_together"] <= alpha
        else f"{together}: nothing is shown to be left between utility and trajectory once the rest is "
        "given. That is no proof of independence: what is too weak for these books, or cancels on average, "
        "goes unseen."
    )
    return (
        f"{said} The rest explains {percent(of['explained_utility'])} of the utility’s variance "
        f"({of['learner']}, {of['folds']} folds)."
    )


def third_action(found: list[ThirdActionResult]) -> Grid:
    columns = (
        Column("router", words=True),
        Column("full calls", "full\ncalls"),
        Column("local calls", "local\ncalls"),
        Column("cost a position", "cost a\nposition"),
        Column("NLL", brief=True),
        Column("gain over never", "gain over\nnever", brief=True),
        Column("over two actions", "over two\nactions"),
    )
    return Grid("a third action", columns, tuple(_third(of) for of in found))


def _third(of: ThirdActionResult) -> Group:
    rows = [
        row(
            r["name"],
            percent(r["full"]),
            percent(r["local"]),
            number(r["cost"]),
            loss(r["nll"]),
            gain(r["gain"]),
            gain(r["over_two"]),
        )
        for r in of["routers"]
    ]
    oracle = row("oracle", NONE, NONE, NONE, NONE, gain(of["oracle"]), NONE, kind="ceiling")
    note = (
        f"A full call costs 1, a local one of {of['window']} positions {number(of['local_cost'], 3)} (keys "
        f"read); {number(of['budget'], 3)} a position may be spent."
    )
    return Group(of["checkpoint"], (*rows, oracle), note)
