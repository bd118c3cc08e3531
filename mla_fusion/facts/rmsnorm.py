"""RMSNorm by meaning: y = gamma * u / sqrt(mean(u^2) + eps) * scale, with u some columns of a
product.

Whatever the spelling (pow or square or x*x, rsqrt or sqrt and division, npu_rms_norm,
aten.rms_norm, npu_add_rms_norm with a zero residual), the node's values at a very small and at a
large u say which columns, weight, ``eps`` and ``scale`` these are. Exact arithmetic decides, when
the plan is proved.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.decode import Decoder, Reading, small_scalars
from mla_fusion.fx.cone import Cone
from mla_fusion.fx.kinds import Kind, is_cast, is_getitem, is_view, kind_of, one_dtype
from mla_fusion.fx.program import nodes_between
from mla_fusion.operators.known import value_of

_EXACT = 1e-9
_CLOSE = 1e-7  # eps and scale are solved to nine digits
_MOVES = Kind.MOVEMENT, Kind.GATHER  # round nothing


@dataclass(frozen=True, kw_only=True)
class NormFact:
    """``node`` is RMSNorm of ``columns`` of the cone's product, one row a token.

    columns        product columns, in the order in which the node holds them
    gamma          the weight, [len(columns)]; None where the norm has none
    eps            solved from the values; ``runtime_eps`` instead where it is an input of the graph
    scale          1.0, or the factor of LongCat-like models
    codes          of the node's shape: token * len(columns) + place
    low_precision  a statistic (mean of squares, its root) that is rounded to less than float32, or
                   None
    """

    node: Node
    columns: tuple[int, ...]
    gamma: Node | None
    eps: float
    runtime_eps: Node | None
    scale: float
    low_precision: Node | None
    codes: torch.Tensor


def find(cone: Cone, decoder: Decoder, readings: dict[Node, Reading]) -> list[NormFact]:
    """Norms in the cone in graph order; views and casts of a norm are not repeated, multiples of it
    are.
    """
    candidates = {
        n: r for n, r in readings.items() if r.degree == 0 and not is_view(n) and not is_cast(n)
    }
    if not candidates:
        return []
    drawn = _Draw(decoder.probe, decoder.bases, cone, candidates)
    others = small_scalars(cone.draw(decoder.generator))
    found: list[NormFact] = []
    weighted: set[tuple[int, ...]] = set()
    # a weighted norm is found before the same without its weight
    for node, reading in reversed(candidates.items()):
        fact = _check(cone, node, reading, drawn, others, weighted)
        if fact is not None:
            found.append(fact)
            weighted |= {fact.columns} if fact.gamma is not None else set()
    return [
        fact for fact in reversed(found) if fact.gamma is not None or fact.columns not in weighted
    ]


_SCALES = (1e-10, 1e3)  # at the first nearly any epsilon is larger than the mean square
# a scale so small that the epsilon alone decides the norm; at zero itself both sides would be 0 / 0
_NOTHING = 1e-30


class _Draw:
    """One probe and the values of the bases; the cone run on the probe at each scale."""

    def __init__(
        self, probe: torch.Tensor, bases: list[torch.Tensor], cone: Cone, wanted: Iterable[Node]
    ) -> None:
        self.bases = bases
        self.cone, self.probe = cone, probe
        self.runs = [cone.run(probe * scale, bases, wanted) for scale in _SCALES]
        self.rows = cone.rows(probe)

    def scaled(self, columns: torch.Tensor) -> torch.Tensor:
        """[scales, tokens, columns]: those columns of the product."""
        return self.rows[:, columns] * torch.tensor(_SCALES, dtype=torch.float64).reshape(-1, 1, 1)

    def outputs(self, slot: int, width: int) -> torch.Tensor | None:
        """[scales, tokens, columns]: a node's value, where it has one at every scale."""
        values = [run[slot] for run in self.runs]
        whole = [value.reshape(-1, width) for value in values if isinstance(value, torch.Tensor)]
        return torch.stack(whole) if len(whole) == len(values) else None


def _check(
    cone: Cone,
    node: Node,
    reading: Reading,
    drawn: _Draw,
    others: list[torch.Tensor],
    weighted: Collection[tuple[int, ...]],
) -> NormFact | None:
    """The node as a norm; of columns that are ``weighted`` elsewhere only as one with a weight.

    others   values of the bases, on which a scale must not depend
    """
    codes = reading.first
    width = codes.shape[-1] if codes.dim() else 0
    if codes.numel() == 0 or codes.numel() != cone.tokens * width or width < 2:
        return None
    rows = codes.reshape(-1, width)
    columns = rows[0]
    each_token = torch.arange(cone.tokens).unsqueeze(1) * cone.width
    if int(columns.max()) >= cone.width or not torch.equal(rows, columns + each_token):
        return None
    listed = tuple(columns.tolist())
    if len(set(listed)) != width:
        return None
    outputs, u = drawn.outputs(cone.slot(node), width), drawn.scaled(columns)
    if outputs is None:
        return None
    for index in (*_gammas(cone, width), *([None] if listed not in weighted else [])):
        solved = _solve(u, _gamma(drawn, index, width), outputs)
        if solved is None:
            continue
        eps, scale = solved
        if scale != 1.0:
            again = _Draw(drawn.probe, others, cone, [node])
            values = again.outputs(cone.slot(node), width)
            same = values is not None and _solve(u, _gamma(again, index, width), values)
            if not same or abs(same[1] - scale) > _CLOSE * abs(scale):
                continue
        if eps == 0.0:
            eps = _at_zero(drawn, node, columns, _gamma(drawn, index, width), scale)
        runtime = _runtime_eps(cone, drawn, eps)
        return NormFact(
            node=node,
            columns=listed,
            gamma=None if index is None else cone.bases[index],
            eps=_literal(cone, eps),
            runtime_eps=None if runtime is None else cone.bases[runtime],
            scale=scale,
            low_precision=_low_precision(cone, node),
            codes=torch.arange(codes.numel()).reshape(codes.shape),
        )
    return None


def _gammas(cone: Cone, width: int) -> list[int]:
    """Which bases may be the weight."""
    sizes = [math.prod(cone.shape(base)) for base in cone.bases]
    return [
        i
        for i, base in enumerate(cone.bases)
        if sizes[i] == width and base.meta["val"].is_floating_point()
    ]


def _gamma(draw: _Draw, index: int | None, width: int) -> torch.Tensor:
    return (
        torch.ones(width, dtype=torch.float64) if index is None else draw.bases[index].reshape(-1)
    )


def _ratios(u: torch.Tensor, gamma: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor | None:
    """[scales, tokens]: what each row is multiplied by; None where its columns do not agree."""
    ratio = outputs / (u * gamma)
    first = ratio[..., :1]
    return first[..., 0] if bool(((ratio - first).abs() <= _EXACT * first.abs()).all()) else None


def _solve(
    u: torch.Tensor, gamma: torch.Tensor, outputs: torch.Tensor
) -> tuple[float, float] | None:
    """Solve (mean + eps) / scale^2 = 1 / r^2 from the first token; the others agree, or there is no
    norm.
    """
    ratios = _ratios(u, gamma, outputs)
    if ratios is None:
        return None
    low_mean, high_mean = u[[0, -1], 0].square().mean(-1).tolist()
    low, high = ratios[[0, -1], 0].square().reciprocal().tolist()
    squared = (high_mean - low_mean) / (high - low) if high != low else math.nan
    factor = math.copysign(math.sqrt(squared), float(ratios[-1, 0])) if squared > 0 else math.nan
    eps = squared * low - low_mean
    eps = 0.0 if abs(eps) < 1e-26 else eps
    if not math.isfinite(factor) or eps < 0:
        return None
    wanted = factor / (u.square().mean(-1) + eps).sqrt()
    if not bool(((wanted - ratios).abs() <= _CLOSE * ratios.abs()).all()):
        return None
    return eps, 1.0 if abs(factor - 1) < 1e-8 else float(f"{factor:.9g}")


def _at_zero(
    draw: _Draw, node: Node, columns: torch.Tensor, gamma: torch.Tensor, scale: float
) -> float:
    """The epsilon that a norm without one (F.normalize) has next to zero, where it is clamped; 0.0
    where it is not.

    A row of padding is zero, and stays so in a model that clamps; with no epsilon at all the kernel
    would divide by 0.
    """
    output = draw.cone.run(draw.probe * _NOTHING, draw.bases, [node])[draw.cone.slot(node)]
    u = draw.rows[:, columns] * _NOTHING
    if not isinstance(output, torch.Tensor) or not bool(output.isfinite().all()):
        return 0.0
    squared = float((u * gamma * scale / output.reshape(u.shape)).square()[0, 0])
    mean = float(u[0].square().mean())
    return squared if math.isfinite(squared) and squared > 2 * mean else 0.0


def _runtime_eps(cone: Cone, draw: _Draw, eps: float) -> int | None:
    """Which base is the epsilon."""
    for index, value in enumerate(draw.bases):
        if (
            value.numel() == 1
            and value.is_floating_point()
            and abs(float(value) - eps) < 1e-6 * eps
        ):
            return index
    return None


def _literal(cone: Cone, eps: float) -> float:
    """The literal that the graph holds for the solved epsilon, else the solved one to seven digits.

    F.rms_norm leaves float32(1e-6) = 9.999999974752427e-07 in the graph; the operator's attribute
    is a float32 too, so the short decimal of the same float32 is meant.
    """
    for literal in cone.program.literals:
        if literal > 0 and abs(literal - eps) <= 1e-7 * literal:
            eps = literal
            break
    short = float(f"{eps:.6g}")
    return short if _float32(short) == _float32(eps) or abs(short - eps) < 1e-12 * eps else eps


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _low_precision(cone: Cone, norm: Node) -> Node | None:
    """The first node below float32 on the way to a per-token statistic (all-bf16 norms are not the
    kernel's).
    """
    inside = set(cone.nodes)
    path = [
        n
        for n in nodes_between((cone.node,), norm)
        if n in inside and isinstance(value_of(n), torch.Tensor)
    ]
    statistics = [
        n for n in path if _numel(cone, n) == cone.all_tokens and not is_view(n) and not is_cast(n)
    ]
    for statistic in statistics:
        for node in nodes_between((cone.node,), statistic):
            is_moved = is_cast(node) or is_getitem(node) or kind_of(node) in _MOVES
            below_float32 = one_dtype(node) in (torch.bfloat16, torch.float16)
            if node in inside and not is_moved and below_float32:
                return node
    return None


def _numel(cone: Cone, node: Node) -> int:
    return cone.view.binding.count_of(node)
