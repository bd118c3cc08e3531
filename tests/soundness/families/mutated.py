"""Inputs written between the reads of the prologue, in graphs that are functional and in graphs
that are not.

An in-place step on an input that is no cache is not a cache write: whoever reads that input later
reads other numbers, and the caller sees it changed. ``aot`` graphs hold the write as a ``copy_`` at
the end; ``make_fx`` and ``export`` graphs hold it where it was written, which is where a fusion
that moves reads goes wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary

from .. import captures, inputs
from ..compare import differs
from ..member import Attack, Family, Member, Outcome, Verdict
from ..program import FLOATS, OUTPUTS, STYLES, Change, Named, Step, prologue
from ..running import Invalid, verdict

WAYS = ("make_fx", "export", "aot")


def _written(name: str, write: Callable[[Tensor], Any]) -> Step:
    def step(v: Any, i: Named) -> Any:
        write(i[name])
        return v

    return step


def _in_place(write: Callable[[Tensor], Any]) -> Step:
    """The value of the place itself is written."""

    def step(v: Tensor, i: Named) -> Tensor:
        write(v)
        return v

    return step


def _zero_first(tensor: Tensor) -> None:
    tensor[0] = 0


_STEPS: dict[str, Step] = {
    **{
        f"{name}_doubled": _written(name, lambda t: t.mul_(2))
        for name in ("w_dq", "w_uq", "w_uk", "w_dkv_kr")
    },
    **{f"{name}_halved": _written(name, lambda t: t.mul_(0.5)) for name in ("gamma_q", "gamma_kv")},
    "x_zeroed": _written("x", lambda t: t.zero_()),
    "x_shifted": _written("x", lambda t: t.add_(1)),
    "x_first_zeroed": _written("x", _zero_first),
    "x_replaced": _written("x", lambda t: t.copy_(t.flip(0))),
    "x_diagonal_scaled": _written("x", lambda t: t.diagonal().mul_(50)),
    "gamma_replaced": _written("gamma_q", lambda t: t.copy_(t.flip(0))),
    "slots_moved": _written("slots", lambda t: t.copy_((t + 1) % inputs.ROWS)),
    "cache_cleared": _written("kv_cache", lambda t: t.zero_()),
    "key_cache_halved": _written("kr_cache", lambda t: t.mul_(0.5)),
    "cache_filled_by_x": _written("kv_cache", lambda t: t.view(-1)[:512].fill_(3)),
}
_TABLES: dict[str, Step] = {
    "positions_moved": _written("positions", lambda t: t.add_(7)),
    "tables_negated": _written("all_sin", lambda t: t.neg_()),
}
_VALUES: dict[str, Step] = {
    "doubled": _in_place(lambda v: v.mul_(2)),
    "bounded": _in_place(lambda v: v.clamp_(-1, 1)),
    "first_zeroed": _in_place(_zero_first),
    "windows_doubled": _in_place(lambda v: v.unfold(-1, 8, 8).mul_(2)),
    "diagonal_zeroed": _in_place(lambda v: v.diagonal(0, 0, -1).zero_()),
    "memory_doubled": _in_place(lambda v: v.as_strided((3,), (1,)).mul_(2)),
    "shifted": _in_place(lambda v: v.add_(0.5)),
}
_PLACES = ("x_q", "c_q", "x_kv", "kv_raw", "c_kv", "q_nope", "k_pe", "slots", "query")
_MAY_CHANGE = tuple(
    "x w_dq w_uq w_uk w_dkv_kr gamma_q gamma_kv slots positions all_sin kv_cache kr_cache".split()
)


def _judge(member: Member) -> Outcome:
    change = Change((member.place,), {**_STEPS, **_TABLES, **_VALUES}[member.attack])
    style = STYLES[member.style]

    def program(i: Named) -> tuple[Tensor, ...]:
        return prologue(i, style, change)

    def unchanged(i: Named) -> tuple[Tensor, ...]:
        return prologue(i, style)

    example = inputs.ordinary(8)
    names = captures._used(program, example)
    draws = [example, inputs.ordinary(8, 11)]
    wanted = [
        _run(lambda *given: program(dict(zip(names, given, strict=True))), names, named)
        for named in draws
    ]
    usual = _run(lambda *given: unchanged(dict(zip(names, given, strict=True))), names, example)
    if not differs(wanted[0], usual):
        raise Invalid("it means what its control means")
    try:
        gm = _captured(member.regime, program, names, example)
    except Exception as error:
        raise Invalid(f"it is not captured: {type(error).__name__}: {error}") from error
    plain = _run(captures.copied(gm), names, example)
    if differs(plain, wanted[0]):
        raise Invalid("the captured graph means something else")
    try:
        if member.regime == "aot":
            graph_inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
            report, _, wrap = fuse_with_boundary(gm, graph_inputs, mf.Config())
            function = wrap(gm.forward)
        else:
            report, function = mf.fuse(gm), gm
    except Exception as error:
        return Outcome(member, Verdict.RAISED, f"the pass: {type(error).__name__}: {error}")
    wrong = None
    for named, want in zip(draws, wanted, strict=True):
        try:
            detail = differs(_run(function, names, named), want)
        except Exception as error:
            wrong = wrong or (Verdict.RAISED, f"{type(error).__name__}: {error}")
            continue
        wrong = wrong or ((Verdict.WRONG, detail) if detail else None)
    return verdict(member, [report], wrong, len(draws))


def _captured(
    way: str, program: Callable[[Named], Any], names: list[str], example: Named
) -> GraphModule:
    if way == "aot":
        return captures.static(program, example).graph

    class Model(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return tuple(program(dict(zip(names, given, strict=True))))

    given = tuple(example[name].clone() for name in names)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "make_fx":
            return make_fx(Model())(*given)
        return torch.export.export(Model(), given).module()  # type: ignore[return-value]


def _run(function: Callable[..., Any], names: list[str], named: Named) -> tuple[Tensor, ...]:
    """Results, then every input as the call leaves it."""
    given = {name: named[name].clone() for name in names}
    with torch.no_grad():
        results = function(*given.values())
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    return (
        *(value.clone() for value in results),
        *(given[name] for name in _MAY_CHANGE if name in given),
    )


def _attacks() -> tuple[Attack, ...]:
    def of(
        steps: dict[str, Step], places: tuple[str, ...], styles: tuple[str, ...]
    ) -> list[Attack]:
        return [Attack(name, step, places, WAYS, styles) for name, step in steps.items()]

    return tuple(
        of(_STEPS, _PLACES, ("paged", "neox"))
        + of(_TABLES, _PLACES[:5], ("paged", "blocks"))
        + of(_VALUES, (*FLOATS[1:], *OUTPUTS, "w_uk", "gamma_q"), ("paged", "neox"))
    )


FAMILIES = [
    Family(
        "mutated.inputs", "an input or value is written between the reads", _attacks(), judge=_judge
    )
]
