"""What the report claims: "verified" of outputs that were compared, and of nothing else.

Caches too large to draw, or token counts whose outputs are, are captured on fake tensors. Every
replaced value must have a figure where the report says "verified".
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary
from tests.catalogue.base import DR, HCKV

from .. import captures, inputs
from ..member import Attack, Family, Member, Outcome, Verdict
from ..program import STYLES, Named, prologue

BLOCKS = {"small": 32, "limit": 4096, "over": 4112, "large": 40000, "huge": 1 << 22}


def _judge(member: Member) -> Outcome:
    style, blocks = STYLES[member.style], BLOCKS[member.attack]
    example = inputs.ordinary(8)
    names = captures._used(lambda i: prologue(i, style), example)
    with FakeTensorMode() as mode:
        fakes: Named = {
            name: mode.from_tensor(v) if isinstance(v, Tensor) else v for name, v in example.items()
        }
        for name, width in (("kv_cache", HCKV), ("kr_cache", DR)):
            fakes[name] = torch.empty(blocks, 16, 1, width, dtype=torch.bfloat16)
    model = captures._Model(lambda i: prologue(i, style), names, example)
    gm = captures._aot(model, [fakes[name] for name in names])
    given = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    config = mf.Config(
        verify=member.regime, staging="always" if member.place == "staged" else "auto"
    )
    try:
        report, _, _ = fuse_with_boundary(gm, given, config)
    except Exception as error:
        return Outcome(member, Verdict.RAISED, f"{type(error).__name__}: {error}")
    if not report.fused:
        return Outcome(member, Verdict.REFUSED, "; ".join(item.code for item in report.rejected))
    (fusion,) = report.fused
    compared = {figure.output for figure in fusion.figures}
    unseen = sorted(set(fusion.replaced.values()) - compared)
    if unseen and re.fullmatch("verified", fusion.verified):
        return Outcome(
            member, Verdict.WRONG, f"'verified', and {', '.join(unseen)} was compared with nothing"
        )
    return Outcome(
        member, Verdict.FUSED if fusion.placement == "in place" else Verdict.STAGED, fusion.verified
    )


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


_CASES = tuple(
    Attack(size, _nothing, ("auto", "staged"), ("first", "all"), tuple(STYLES)) for size in BLOCKS
)
FAMILIES = [Family("claims.verified", "verified means compared", _CASES, judge=_judge)]
