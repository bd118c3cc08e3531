"""A defect while committing: the graph stays as it was, to the letter, and the report says that the
pass failed.

The defect is injected into one function of the commit at its k-th call. Nothing half-done may stay:
no node, no buffer, no code, no fusion in the report; ``Config(strict=True)`` raises the defect
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch.fx import GraphModule

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary

from .. import captures, inputs
from ..compare import differs
from ..member import Attack, Family, Member, Outcome, Verdict
from ..program import STYLES, prologue
from ..running import Invalid, on, run_seeded

PLACES = (
    "mla_fusion.graph.read:Graph.__init__",
    "mla_fusion.propose.prologue:_Joiner.proposal",
    "mla_fusion.plan.planner:Planner.plan",
    "mla_fusion.plan.contract:check_contract",
    "mla_fusion.pipeline:partition_nodes",
    "mla_fusion.commit.verify:compare",
    "mla_fusion.observe.record:Record.add_fusion",
    "mla_fusion.fx.build:GraphBuilder.call",
    "mla_fusion.fx.build:GraphBuilder.propagate",
    "mla_fusion.fx.build:GraphBuilder.constant",
    "mla_fusion.fx.build:GraphBuilder.once",
    "mla_fusion.fx.build:GraphBuilder.reshape",
    "mla_fusion.fx.build:GraphBuilder.at",
    "mla_fusion.fx.build:GraphBuilder.finish",
    "mla_fusion.compile.boundary:BoundaryBuilder.packed",
    "mla_fusion.compile.boundary:BoundaryBuilder.cache",
    "mla_fusion.compile.boundary:BoundaryBuilder._input",
    "mla_fusion.compile.boundary:BoundaryBuilder._program",
    "mla_fusion.compile.boundary:BoundaryBuilder.finish",
    "mla_fusion.commit.rewrite:emit_call",
    "mla_fusion.fx.strides:follow",
    "mla_fusion.graph.lower:Lowering.of",
    "mla_fusion.commit.rewrite:Writer.write",
    "mla_fusion.pipeline:keep_output_names",
    "mla_fusion.commit.transaction:install",
    "torch.fx:Graph.lint",
    "torch.fx:GraphModule.recompile",
    "torch.fx:Graph.erase_node",
)

_FAILED = ("pass.failed", "verify.mismatch")  # the codes of a defect


class Injected(RuntimeError):
    """The defect."""


def _holder(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    owner: Any = import_module(module)
    *parents, last = names.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    getattr(owner, last)  # it is there
    return owner, last


@contextmanager
def broken(path: str, at: int) -> Iterator[list[int]]:
    """The function raises at its ``at``-th call; yields the calls made."""
    owner, name = _holder(path)
    original: Callable[..., Any] = getattr(owner, name)
    own = name in vars(owner)
    calls = [0]

    def raising(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Injected(f"injected into {path}, call {at}")
        return original(*args, **kwargs)

    setattr(owner, name, raising)
    try:
        yield calls
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _seen(gm: GraphModule) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    attributes = tuple(sorted(name for name, _ in gm.named_buffers()))
    return str(gm.graph), gm.code, attributes, tuple(sorted(vars(gm)))


def _judge(member: Member) -> Outcome:
    path, at = member.attack.rsplit("#", 1)
    style, alone = STYLES[member.style], member.regime == "fuse"
    example = inputs.ordinary(8)
    captured = captures.static(lambda i: prologue(i, style), example)
    gm = captured.graph
    before, want = _seen(gm), run_seeded(on(captured, captured.plain), example)
    reached, strict = _fused(
        captured, path, int(at), alone, mf.Config(strict=True), captures.copied(gm)
    )
    if not reached:
        return Outcome(member, Verdict.REFUSED, "the call is not made")
    # what emits the call is first run by verification, which says that the call does not run
    in_witness = isinstance(strict, mf.Report) and [item.code for item in strict.rejected] == [
        "verify.mismatch"
    ]
    broken, report = _fused(captured, path, int(at), alone, mf.Config(strict=False), gm)
    if isinstance(report, Exception):
        return Outcome(member, Verdict.RAISED, f"without strict: {type(report).__name__}: {report}")
    if report.fused or not any(rejection.code in _FAILED for rejection in report.rejected):
        return Outcome(
            member, Verdict.WRONG, f"the report does not say that the pass failed: {report}"
        )
    kinds = ("graph", "code", "buffers", "attributes")
    changed = [kind for kind, old, new in zip(kinds, before, _seen(gm), strict=True) if old != new]
    if changed:
        return Outcome(member, Verdict.WRONG, f"changed: {', '.join(changed)}")
    if differs(run_seeded(on(captured, gm), example), want):
        return Outcome(member, Verdict.WRONG, "the graph gives other numbers")
    if not isinstance(strict, Injected) and not in_witness:
        return Outcome(
            member, Verdict.WRONG, f"strict does not raise the defect, but gives {strict!r:.80}"
        )
    if not broken:
        raise Invalid("the call is not made a second time")
    return Outcome(member, Verdict.REFUSED, "left as it was")


def _fused(
    captured: captures.Captured, path: str, at: int, alone: bool, config: mf.Config, gm: GraphModule
) -> tuple[bool, Any]:
    """Was the defect reached; and the report, or what was raised."""
    with broken(path, at) as calls:
        try:
            report: Any = (
                mf.fuse(gm, config) if alone else fuse_with_boundary(gm, captured.inputs, config)[0]
            )
        except Exception as error:
            report = error
    return calls[0] >= at, report


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


_CASES = tuple(
    Attack(f"{path}#{at}", _nothing, ("commit",), ("boundary", "fuse"), ("paged", "neox", "angles"))
    for path in PLACES
    for at in (1, 2, 5, 17)
)
FAMILIES = [Family("transaction.defect", "an exception while committing", _CASES, judge=_judge)]
