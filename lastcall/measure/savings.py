"""What a bypassed call would save, counted from shapes (section 8); nothing here is timed.

A bypassed call leaves out, at its own position only:

    attention     query, gate and output projections, and the scores and sums over the causal prefix; keys and
                  values are projected and appended all the same, for later positions
    ffn           its matrices; of a mixture, those of the experts that a token uses, gates and shared ones
    block         both (a state space beside the attention goes on for later positions, and is not counted)
    heads         their share of these projections, scores and sums; a group's cached keys and values only
                  where all its query heads are bypassed
    window        scores, sums and cached keys and values beyond the window and the sinks

Operations are two a multiply-add, as in `lastcall.measure.costs`. Bytes are those of a decode step of one
sequence: each weight once, and the cached keys and values of the prefix, the current position's included.
Counted over t + 1 keys for the query at t, sliding window or not, in the mean over the scored positions of a
block. Left out, being small: elementwise work, norms, biases, short convolutions, the embedding's row, a
beginning-of-text token, and the recurrence and its states in linear attention and state spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from lastcall.measure import costs
from lastcall.measure.anatomy import TABLE, Site
from lastcall.measure.bypass import require
from lastcall.measure.outline import outline
from lastcall.operation import Operation
from lastcall.secondary import CallCost
from lastcall.study import Checkpoint, Study


@final
@dataclass(frozen=True)
class Work:
    """Of one token, in the mean over scored positions."""

    operations: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)


@final
@dataclass(frozen=True)
class Saving:
    """What a bypassed call saves, and what the whole forward takes."""

    call: Work
    forward: Work

    @property
    def share_of_operations(self) -> float:
        return self.call.operations / self.forward.operations

    @property
    def share_of_bytes(self) -> float:
        return self.call.bytes / self.forward.bytes


@final
@dataclass(frozen=True)
class _Attention:
    """One attention by the shapes of its projections."""

    heads: int
    """Query heads."""
    groups: int
    """Key heads, and as many value heads; consecutive query heads share one."""
    width: int
    """Of a head."""
    called: int
    """Weights of all projections but those of keys and values."""

    @classmethod
    def of(cls, module: Any, site: Site) -> _Attention:
        """`module` is an attention of `site`'s model. Where it has no key projection of its own (GPT-2,
        GPT-NeoX, Phi-3), query, keys and values are one matrix: (heads + 2 · groups) · width rows of d."""
        config: Any = site.model.config
        d, weights = costs.width(site), costs.matrices(module, config)
        output = module.get_submodule(TABLE[config.model_type].projection).weight.numel()
        row = output // site.heads  # the weights of one head in one projection: width · d
        if hasattr(module, "k_proj"):
            groups = module.k_proj.weight.numel() // row
        else:
            groups = ((weights - output) // row - site.heads) // 2
        return cls(site.heads, groups, row // d, weights - 2 * groups * row)

    def prefix(self, keys: float, size: int, heads: Sequence[int]) -> Work:
        """Scores and sums of `heads` over `keys` keys, and the cached keys and values they alone read."""
        each = self.heads // self.groups
        alone = sum(set(range(g * each, (g + 1) * each)) <= set(heads) for g in range(self.groups))
        return Work(4 * len(heads) * self.width * keys, 2 * alone * self.width * keys * size)

    def call(self, keys: float, size: int, heads: Sequence[int]) -> Work:
        """What a call of `heads` computes and reads."""
        return _product(self.called * len(heads) / self.heads, size) + self.prefix(keys, size, heads)


def _product(weights: float, size: int) -> Work:
    """One token multiplied by matrices of `weights` numbers of `size` bytes."""
    return Work(2 * weights, weights * size)


def call_cost(site: Site, operation: Operation, horizon: int, context: int, bytes_a_number: int) -> Saving:
    """What a bypassed call of `operation` saves a token, over scored t = context … horizon − 1.

    `bytes_a_number` is of weights and caches alike. Raises ModelError for a head that is not there.
    """
    require(site, operation)
    prefix = range(context + 1, horizon + 1)
    seen = operation.window + operation.sinks if operation.kind == "window" else 0
    keys = sum(max(0, at - seen) for at in prefix) / len(prefix)
    attention, every = _Attention.of(site.attention, site), range(site.heads)
    ffn = _product(costs.matrices(site.ffn, site.model.config), bytes_a_number)
    call = {
        "attention": attention.call(keys, bytes_a_number, every),
        "ffn": ffn,
        "block": attention.call(keys, bytes_a_number, every) + ffn,
        "heads": attention.call(keys, bytes_a_number, operation.heads),
        "window": attention.prefix(keys, bytes_a_number, every),
    }[operation.kind]
    return Saving(call, forward(site, sum(prefix) / len(prefix), bytes_a_number))


def forward(site: Site, keys: float, size: int) -> Work:
    """The whole forward of one token that attends to `keys` keys: blocks and head, as `costs.operations`."""
    config: Any = site.model.config
    row = TABLE[config.model_type]
    layers = list(site.model.get_submodule(row.blocks).children())
    total = _product(site.head.weight.numel() + sum(costs.matrices(of, config) for of in layers), size)
    attentions: list[nn.Module] = [getattr(of, row.attention) for of in layers if hasattr(of, row.attention)]
    for attention in attentions:
        total += _Attention.of(attention, site).prefix(keys, size, range(site.heads))
    return total


def call_costs(checkpoint: Checkpoint, study: Study) -> CallCost | None:
    """What a bypassed call saves on `checkpoint`, from its shapes alone.

    None where they are not known: it is not downloaded, or its own code would have to run. Raises as
    `outline` does, and ModelError for a head that is not there.
    """
    if (site := outline(checkpoint).site) is None:
        return None
    operation, blocks = Operation.parse(study.operation), study.blocks
    saving = call_cost(site, operation, blocks.horizon, blocks.context, site.head.weight.element_size())
    return {
        "checkpoint": checkpoint.name,
        "operation": study.operation,
        "operations_a_token": saving.call.operations,
        "share_of_operations": saving.share_of_operations,
        "bytes_a_token": saving.call.bytes,
        "share_of_bytes": saving.share_of_bytes,
    }
