"""Slow, literal twins of `lastcall.routing`: loops over positions, float64, as sections 3 to 5 word them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import fmean, pstdev

import numpy as np

Vector = Sequence[float]

_UNCERTAINTY = ["entropy", "top_logprob", "margin"]
_TRAJECTORY = ["extrapolation_error", "curvature", "error_change"]
_POSITION = ["log_position", "relative_position"]
SEES = {
    "B": [*_UNCERTAINTY, "displacement", *_POSITION],
    "T": [*_UNCERTAINTY, "displacement", *_POSITION, *_TRAJECTORY],
    "S32": [*_UNCERTAINTY, "displacement", *_POSITION],
    "S35": [*_UNCERTAINTY, "displacement", *_POSITION],
    "J32": [*_UNCERTAINTY, "displacement", *_POSITION, *_TRAJECTORY],
    "C_RP3": [*_UNCERTAINTY, "displacement", *_POSITION],
    "I_B": ["incoming_displacement", *_POSITION],
    "I_S35": ["incoming_displacement", *_POSITION],
    "I_J32": ["incoming_displacement", *_POSITION, *("incoming_" + name for name in _TRAJECTORY)],
}
"""Scalar features of every learned router, in the order the network reads them (section 4)."""


def quota(scores: Vector, threshold: float, calls: int) -> list[bool]:
    """Section 5, one position at a time: call if b > 0 and (score > τ or b ≥ r)."""
    n, b, made = len(scores), calls, []
    for i in range(n):
        r = n - i
        call = b > 0 and (scores[i] > threshold or b >= r)
        b -= call
        made.append(call)
    return made


def largest(values: Vector, calls: int) -> list[bool]:
    """The `calls` largest, picked one by one; of equals, the earlier position."""
    made = [False] * len(values)
    for _ in range(calls):
        best = -1
        for i, value in enumerate(values):
            if not made[i] and (best < 0 or value > values[best]):
                best = i
        made[best] = True
    return made


def every_fifth(positions: int) -> list[bool]:
    """i mod 5 = 0."""
    return [i % 5 == 0 for i in range(positions)]


def evenly(calls: int, positions: int) -> list[bool]:
    """i mod m = 0, m the whole number nearest n / k, where that is k positions; else floor(j · n / k)."""
    m = round(Fraction(positions, calls))
    chosen = [i for i in range(positions) if i % m == 0]
    if len(chosen) != calls:
        chosen = [math.floor(Fraction(j * positions, calls)) for j in range(calls)]
    return [i in chosen for i in range(positions)]


def threshold(scores: Vector, calls: int, positions: int) -> float:
    """The (1 − k/n) quantile of the pooled scores: between its two order statistics, linearly."""
    ordered = sorted(scores)
    place = (1 - calls / positions) * (len(ordered) - 1)
    below = min(math.floor(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def trajectory(states: Sequence[Vector]) -> dict[str, list[float]]:
    """Displacement and trajectory features of one block's states (section 3); 0 where one lacks a state."""
    s = [np.asarray(state, dtype=np.float64) for state in states]
    found: dict[str, list[float]] = {n: [] for n in ("displacement", *_TRAJECTORY)}
    for t in range(len(s)):
        found["displacement"].append(_over(_norm(s[t] - s[t - 1]), _norm(s[t - 1])) if t >= 1 else 0.0)
        found["extrapolation_error"].append(_error(s, t) if t >= 2 else 0.0)
        found["curvature"].append(_curvature(s[t] - s[t - 1], s[t - 1] - s[t - 2]) if t >= 2 else 0.0)
        found["error_change"].append(_error(s, t) - _error(s, t - 1) if t >= 3 else 0.0)
    return found


def _error(s: Sequence[np.ndarray], t: int) -> float:
    return _over(_norm(s[t] - (2 * s[t - 1] - s[t - 2])), _norm(s[t - 1]))


def _curvature(step: np.ndarray, before: np.ndarray) -> float:
    lengths = _norm(step) * _norm(before)
    return 1 - float(step @ before) / lengths if lengths > 0 else 0.0


def _norm(vector: np.ndarray) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in vector))


def _over(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def position(t: int, horizon: int) -> dict[str, float]:
    """log(1 + t) and t / horizon."""
    return {"log_position": math.log(1 + t), "relative_position": t / horizon}


def moments(values: Vector) -> tuple[float, float]:
    """Mean and deviation of all values; a deviation of 0 scales nothing."""
    return fmean(values), pstdev(values) or 1.0


def root_mean_square(values: Vector) -> float:
    """√ mean x²."""
    return math.sqrt(fmean(x * x for x in values))


def gelu(x: float) -> float:
    """x · Φ(x), exact."""
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def huber(predicted: Vector, utility: Vector, delta: float) -> float:
    """Mean Huber loss: quadratic within δ, linear beyond."""
    losses = []
    for p, u in zip(predicted, utility, strict=True):
        off = abs(p - u)
        losses.append(0.5 * off * off if off <= delta else delta * (off - 0.5 * delta))
    return fmean(losses)


def predicted_utility(weights: Mapping[str, np.ndarray], scalars: Vector, state: Vector) -> float:
    """The network of section 4 at one position, from the tensors of a fitted file, by their names there."""
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    s = np.asarray(state, dtype=np.float64)
    raw = [*scalars, *(float(s @ column) for column in w["scaling.projection"].T)]
    inputs = [(x - m) / d for x, m, d in zip(raw, w["scaling.mean"], w["scaling.deviation"], strict=True)]
    if "state_map" in w:
        inputs += list((s / w["scaling.rms"]) @ w["state_map"])
    hidden = [
        gelu(float(row @ np.array(inputs)) + bias)
        for row, bias in zip(w["hidden.weight"], w["hidden.bias"], strict=True)
    ]
    return float(w["out.weight"][0] @ np.array(hidden) + w["out.bias"][0])


class Network:
    """Hidden layer, output and state map, trained by hand: gradients on paper, AdamW by its update."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.w = {name: np.array(tensor, dtype=np.float64) for name, tensor in weights.items()}
        self._first = {name: np.zeros_like(tensor) for name, tensor in self.w.items()}
        self._second = {name: np.zeros_like(tensor) for name, tensor in self.w.items()}
        self._steps = 0

    def forward(self, scaled: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, the hidden layer before GELU, and the prediction, of [positions, …]."""
        mapped = [states @ self.w["state_map"]] if "state_map" in self.w else []
        x = np.concatenate([scaled, *mapped], axis=1)
        h = x @ self.w["hidden.weight"].T + self.w["hidden.bias"]
        return x, h, np.vectorize(gelu)(h) @ self.w["out.weight"][0] + self.w["out.bias"][0]

    def gradients(
        self, scaled: np.ndarray, states: np.ndarray, utility: np.ndarray, delta: float
    ) -> dict[str, np.ndarray]:
        """Of the mean Huber loss."""
        x, h, y = self.forward(scaled, states)
        dy = np.clip(y - utility, -delta, delta) / len(y)
        cumulative = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(h)
        slope = cumulative + h * np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
        dh = np.outer(dy, self.w["out.weight"][0]) * slope
        found = {
            "out.weight": (dy @ np.vectorize(gelu)(h))[None],
            "out.bias": dy.sum(keepdims=True),
            "hidden.weight": dh.T @ x,
            "hidden.bias": dh.sum(0),
        }
        if "state_map" in self.w:
            found["state_map"] = states.T @ (dh @ self.w["hidden.weight"])[:, scaled.shape[1] :]
        return found

    def step(self, gradients: Mapping[str, np.ndarray], rate: float, decay: float) -> None:
        """AdamW: β = 0.9 and 0.999, ε = 1e-8, decay apart from the moments."""
        self._steps += 1
        for name, g in gradients.items():
            self.w[name] -= rate * decay * self.w[name]
            self._first[name] = 0.9 * self._first[name] + 0.1 * g
            self._second[name] = 0.999 * self._second[name] + 0.001 * g * g
            mean = self._first[name] / (1 - 0.9**self._steps)
            square = self._second[name] / (1 - 0.999**self._steps)
            self.w[name] -= rate * mean / (np.sqrt(square) + 1e-8)
