"""The absorbed product: q_nope W_uk, one matrix per head, whatever operator carries it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.decode import Reading
from mla_fusion.facts.projection import Projection
from mla_fusion.graph.cone import Cone


@dataclass(frozen=True)
class AbsorbFact:
    """``node[t, n, c] = sum_d q[t, columns[n][d]] * weight[n, d, c]``.

    columns     [N][D] columns of the product below (W_uq_qr's output)
    factor      what q_nope is multiplied by on the way (LongCat's scale), 1.0 where nothing is
    to_ndc      permutation of the weight operand after which a reshape gives [N, D, Hckv]
    codes       of the node's shape: (token * N + n) * Hckv + c
    """

    projection: Projection
    columns: tuple[tuple[int, ...], ...]
    factor: float
    to_ndc: tuple[int, ...]
    codes: torch.Tensor

    @property
    def node(self) -> Node:
        return self.projection.node

    @property
    def weight(self) -> Node:
        return self.projection.weight

    @property
    def heads(self) -> int:
        return len(self.columns)

    @property
    def nope_dim(self) -> int:
        return len(self.columns[0])


def find(cone: Cone, probe: torch.Tensor, readings: dict[Node, Reading], projection: Projection) -> AbsorbFact | None:
    """The projection as an absorb of columns of ``cone``'s product, or None."""
    reading = readings.get(projection.activation)
    if reading is None or not reading.single or reading.degree != 1:
        return None
    labels = projection.activation_labels
    summed, tokens, columns = projection.summed, projection.token_labels, projection.column_labels
    batch = projection.batch
    if len(summed) != 1 or len(columns) != 1 or not batch:
        return None
    sizes = dict(zip(labels, reading.first.shape, strict=True))
    order = [labels.index(label) for label in (*batch, *tokens, *summed)]
    heads = math.prod(sizes[label] for label in batch)
    count = math.prod(sizes[label] for label in tokens)
    grid = reading.first.permute(order).reshape(heads, count, -1)  # [n, t, d] codes of q
    if count != cone.tokens:
        return None
    token, column = grid // cone.width, grid % cone.width
    if not bool((token == torch.arange(count).reshape(1, -1, 1)).all()) or not bool((column == column[:, :1]).all()):
        return None
    factor = uniform_factor(cone, probe, reading)
    if factor is None:
        return None
    weight = projection.weight_labels
    broadcast = [label for label in weight if label not in (*batch, *summed, *columns)]  # axes of size 1
    to_ndc = tuple(weight.index(label) for label in (*broadcast, *batch, *summed, *columns))
    weight_shape = projection.weight.meta["val"].shape
    width = cone.view.binding.size(weight_shape[weight.index(columns[0])])
    out = projection.product.out_labels
    canonical = torch.arange(count * heads * width).reshape(
        [sizes[label] for label in (*tokens, *batch)] + [width]
    )
    axes = (*tokens, *batch, *columns)
    codes = canonical.permute([axes.index(label) for label in out])
    return AbsorbFact(projection, tuple(map(tuple, column[:, 0].tolist())), factor, to_ndc, codes)


def uniform_factor(cone: Cone, probe: torch.Tensor, reading: Reading) -> float | None:
    """What every element is multiplied by on its way from the product."""
    values = torch.empty(cone.tokens * cone.width, dtype=torch.float64)
    values[cone.codes.reshape(-1)] = probe.reshape(-1)
    ratio = reading.total / (values[reading.first] * 1e3)
    factor = float(ratio.reshape(-1)[0])
    if not torch.allclose(ratio, torch.full_like(ratio, factor), rtol=1e-9, atol=0.0):
        return None
    return 1.0 if abs(factor - 1) < 1e-9 else float(f"{factor:.10g}")
