"""RMSNorm by meaning: y = gamma * u / sqrt(mean(u^2) + eps) * scale, with u some columns of a product.

Whatever the spelling (pow or square or x*x, rsqrt or sqrt and division, npu_rms_norm, aten.rms_norm,
npu_add_rms_norm with a zero residual), the node's values satisfy this at three magnitudes of u or they do not.
``eps`` and ``scale`` are solved from the values, never assumed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fusion.facts.decode import Decoder, Reading
from mla_fusion.graph.cone import Cone
from mla_fusion.graph.kinds import is_cast, is_getitem, is_view
from mla_fusion.graph.program import nodes_between

_EXACT = 1e-9


@dataclass(frozen=True)
class NormFact:
    """``node`` is RMSNorm of ``columns`` of the cone's product, one row a token.

    columns        product columns, in the order in which the node holds them
    gamma          the weight, [len(columns)]; None where the norm has none
    eps            solved from the values; ``runtime_eps`` instead where it is an input of the graph
    scale          1.0, or the factor of LongCat-like models
    codes          of the node's shape: token * len(columns) + place
    low_precision  a statistic (mean of squares, its root) that is rounded to less than float32, or None
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
    """Norms in the cone in graph order; views and casts of a norm are not repeated, multiples of it are."""
    candidates = {n: r for n, r in readings.items() if r.degree == 0 and not is_view(n) and not is_cast(n)}
    if not candidates:
        return []
    scales = (1e-4, 1.0, 1e3)
    runs = [cone.run(decoder.probe * scale, decoder.bases) for scale in scales]
    facts = []
    for node, reading in candidates.items():
        values = [run[cone.slot(node)] for run in runs]
        fact = _check(cone, decoder, node, reading, scales, values)
        if fact is not None:
            facts.append(fact)
    weighted = {fact.columns for fact in facts if fact.gamma is not None}
    return [fact for fact in facts if fact.gamma is not None or fact.columns not in weighted]


def _check(
    cone: Cone,
    decoder: Decoder,
    node: Node,
    reading: Reading,
    scales: tuple[float, ...],
    values: list[object],
) -> NormFact | None:
    codes = reading.first
    width = codes.shape[-1] if codes.dim() else 0
    if codes.numel() == 0 or codes.numel() != cone.tokens * width or width < 2:
        return None
    rows = codes.reshape(-1, width)
    token, column = rows // cone.width, rows % cone.width
    if not bool((token == torch.arange(cone.tokens).unsqueeze(1)).all()) or not bool((column == column[0]).all()):
        return None
    columns = column[0]
    if len(set(columns.tolist())) != width:
        return None
    flat = torch.empty(cone.tokens * cone.width, dtype=torch.float64)
    flat[cone.codes.reshape(-1)] = decoder.probe.reshape(-1)
    u = flat.reshape(cone.tokens, cone.width)[:, columns]
    outputs = [value.reshape(-1, width) for value in values if isinstance(value, torch.Tensor)]
    for base, gamma in [*_gammas(cone, decoder, width), (None, torch.ones(width, dtype=torch.float64))]:
        solved = _solve(u, gamma, outputs, scales)
        if solved is not None:
            eps, scale = solved
            runtime = _runtime_eps(cone, decoder, eps)
            return NormFact(
                node,
                tuple(columns.tolist()),
                base,
                _literal(cone, eps),
                runtime,
                scale,
                _low_precision(cone, node),
                torch.arange(codes.numel()).reshape(codes.shape),
            )
    return None


def _gammas(cone: Cone, decoder: Decoder, width: int) -> list[tuple[Node, torch.Tensor]]:
    pairs = zip(cone.bases, decoder.bases, strict=True)
    return [(node, value.reshape(-1)) for node, value in pairs if value.numel() == width and value.is_floating_point()]


def _solve(
    u: torch.Tensor, gamma: torch.Tensor, outputs: list[torch.Tensor], scales: tuple[float, ...]
) -> tuple[float, float] | None:
    """Solve (mean + eps) / scale^2 = 1 / r^2 from the smallest and largest probe; check it on all."""
    means, ratios = [], []
    for scale, output in zip(scales, outputs, strict=True):
        ratio = output / (u * scale * gamma)
        if not torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=_EXACT, atol=0.0):
            return None
        ratios.append(ratio[:, 0])
        means.append((u * scale).square().mean(-1))
    low, high = 1 / ratios[0].square(), 1 / ratios[-1].square()
    squared = ((means[-1] - means[0]) / (high - low))[0]
    factor = float(squared.sqrt()) * math.copysign(1.0, float(ratios[-1][0]))
    eps = float((squared * low - means[0])[0])
    eps = 0.0 if abs(eps) < 1e-18 else eps
    if not math.isfinite(factor) or eps < 0:
        return None
    for mean, ratio in zip(means, ratios, strict=True):
        if not torch.allclose(factor / (mean + eps).sqrt(), ratio, rtol=_EXACT, atol=0.0):
            return None
    return eps, 1.0 if abs(factor - 1) < 1e-8 else float(f"{factor:.9g}")


def _runtime_eps(cone: Cone, decoder: Decoder, eps: float) -> Node | None:
    for node, value in zip(cone.bases, decoder.bases, strict=True):
        if value.numel() == 1 and value.is_floating_point() and abs(float(value) - eps) < 1e-6 * eps:
            return node
    return None


def _literal(cone: Cone, eps: float) -> float:
    """The literal that the graph holds for the solved epsilon, else the solved one to seven digits.

    F.rms_norm leaves float32(1e-6) = 9.999999974752427e-07 in the graph; the operator's attribute is a
    float32 too, so the short decimal of the same float32 is meant.
    """
    for literal in _floats([step.args for step in cone.program.steps] + [step.kwargs for step in cone.program.steps]):
        if literal > 0 and abs(literal - eps) <= 1e-7 * literal:
            eps = literal
            break
    short = float(f"{eps:.6g}")
    return short if _float32(short) == _float32(eps) or abs(short - eps) < 1e-12 * eps else eps


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _floats(template: object) -> list[float]:
    if isinstance(template, float):
        return [template]
    if isinstance(template, dict):
        template = list(template.values())
    if isinstance(template, (list, tuple)):
        return [value for item in template for value in _floats(item)]
    return []


def _low_precision(cone: Cone, norm: Node) -> Node | None:
    """The first node below float32 on the way to a per-token statistic (all-bf16 norms are not the kernel's)."""
    inside = set(cone.nodes)
    path = [n for n in nodes_between((cone.node,), norm) if n in inside and isinstance(n.meta.get("val"), torch.Tensor)]
    statistics = [n for n in path if _numel(cone, n) == cone.all_tokens and not is_view(n) and not is_cast(n)]
    for statistic in statistics:
        for node in nodes_between((cone.node,), statistic):
            if node in inside and not (is_view(node) or is_cast(node) or is_getitem(node)):
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                    return node
    return None


def _numel(cone: Cone, node: Node) -> int:
    return math.prod(cone.view.binding.shape(node.meta["val"].shape))
