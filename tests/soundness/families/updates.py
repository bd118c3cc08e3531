"""Weights that change between calls: packed copies must follow, however the change was made.

Each member runs a compiled prologue, changes one weight, and runs again. Parameters whose changes
leave no trace in a version counter (made under inference_mode, views of one flat buffer, written
through ``.data``, numpy or DLPack) are the attack, and looked for at every call (what rounds find,
and when, is tests/weights/test_reload.py); ordinary updates are the controls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mla_fusion as mf
from mla_fusion.compile.boundary import fuse_with_boundary

from .. import captures, inputs
from ..compare import differs
from ..member import Attack, Family, Member, Outcome, Verdict
from ..program import STYLES, WEIGHTS, Named, prologue
from ..running import Invalid, on, run_seeded, verdict, witness

Made = tuple[Tensor, Any]  # the weight, and what it is a part of
Update = Callable[[Tensor, Any], Any]


def _parameter(value: Tensor) -> Made:
    return nn.Parameter(value.clone(), requires_grad=False), None


def _trained(value: Tensor) -> Made:
    return nn.Parameter(value.clone()), None


def _inference(value: Tensor) -> Made:
    with torch.inference_mode():
        return nn.Parameter(value.clone(), requires_grad=False), None


def _flat(value: Tensor) -> Made:
    """As FSDP and ZeRO hold it: a view of one buffer of all parameters."""
    buffer = torch.cat(
        [torch.zeros(64, dtype=value.dtype), value.flatten(), torch.zeros(64, dtype=value.dtype)]
    )
    return nn.Parameter(buffer[64:-64].view(value.shape), requires_grad=False), buffer


def _plain_view(value: Tensor) -> Made:
    buffer = value.clone()
    return buffer.view(value.shape), buffer


def _transposed(value: Tensor) -> Made:
    buffer = value.transpose(0, -1).contiguous()
    return nn.Parameter(buffer.transpose(0, -1), requires_grad=False), buffer


def _expanded(value: Tensor) -> Made:
    buffer = value.clone()[None]
    return nn.Parameter(buffer[0], requires_grad=False), buffer


def _copy(weight: Tensor, _: Any) -> None:
    with torch.no_grad():
        weight.copy_(weight * 2 + 0.125)


def _optimiser(weight: Tensor, _: Any) -> None:
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        weight.sub_(weight.grad, alpha=0.5)


def _reload(weight: Tensor, _: Any) -> None:
    holder = nn.Module()
    holder.register_parameter("w", weight)  # type: ignore[arg-type]
    holder.load_state_dict({"w": weight.detach() * 2 + 0.125})


def _inference_copy(weight: Tensor, _: Any) -> None:
    with torch.inference_mode():
        weight.copy_(weight * 2 + 0.125)


def _foreach(weight: Tensor, _: Any) -> None:
    with torch.no_grad():
        torch._foreach_add_([weight], 0.5)


def _part(weight: Tensor, _: Any) -> None:
    with torch.no_grad():
        weight[: len(weight) // 2].mul_(-2)


def _data_assigned(weight: Tensor, _: Any) -> None:
    weight.data = weight.data.add_(0.25)


def _data_new(weight: Tensor, _: Any) -> None:
    weight.data = weight.data * 2 + 0.125


def _data_copied(weight: Tensor, _: Any) -> None:
    weight.data.copy_(weight.data * 2 + 0.125)


def _base(weight: Tensor, base: Any) -> None:
    with torch.no_grad():
        base.mul_(2).add_(0.125)


def _base_data(weight: Tensor, base: Any) -> None:
    base.data.mul_(2).add_(0.125)


def _numpy(weight: Tensor, _: Any) -> None:
    weight.detach().view(torch.int16).numpy()[...] ^= -(1 << 15)


def _dlpack(weight: Tensor, _: Any) -> None:
    torch.from_dlpack(weight.detach()).mul_(2).add_(0.125)


def _storage(weight: Tensor, _: Any) -> None:
    weight.untyped_storage().copy_((weight.detach() * 2 + 0.125).contiguous().untyped_storage())


def _silently(weight: Tensor, _: Any) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2).add_(0.125)


def _set(weight: Tensor, _: Any) -> None:
    with torch.no_grad():
        weight.set_(weight * 2 + 0.125)  # type: ignore[call-overload]


def _swap(weight: Tensor, _: Any) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2 + 0.125, requires_grad=False))


MAKE = {
    "parameter": _parameter,
    "trained": _trained,
    "inference": _inference,
    "flat": _flat,
    "view": _plain_view,
}
MAKE |= {"transposed": _transposed, "expanded": _expanded}
UPDATES: dict[str, Update] = {
    function.__name__[1:]: function
    for function in (
        _copy,
        _optimiser,
        _reload,
        _inference_copy,
        _foreach,
        _part,
        _data_assigned,
        _data_new,
    )
} | {
    function.__name__[1:]: function
    for function in (
        _data_copied,
        _base,
        _base_data,
        _numpy,
        _dlpack,
        _storage,
        _silently,
        _set,
        _swap,
    )
}
_ORDINARY = [
    ("parameter", u) for u in ("copy", "reload", "foreach", "part", "data_new", "set", "swap")
]
_ORDINARY += [("trained", u) for u in ("copy", "optimiser", "reload")]
_HIDDEN = [
    ("parameter", u)
    for u in ("data_assigned", "data_copied", "numpy", "dlpack", "storage", "silently")
]
_HIDDEN += [("inference", u) for u in ("inference_copy", "data_copied", "numpy", "storage")]
_HIDDEN += [
    (made, u)
    for made in ("flat", "view", "transposed", "expanded")
    for u in ("base", "base_data", "numpy")
]
_HIDDEN += [
    ("flat", "copy"),
    ("parameter", "inference_copy"),
    ("transposed", "copy"),
    ("flat", "data_copied"),
]
_NO_REGIME = ("copy",)


def _judge(member: Member) -> Outcome:
    made, update = member.attack.split(".")
    named = dict(inputs.ordinary(8))
    weight, base = MAKE[made](named[member.place])
    named[member.place] = weight
    style = STYLES[member.style]

    def program(i: Named) -> tuple[Tensor, ...]:
        return prologue(i, style)

    captured = captures.static(program, inputs.ordinary(8))
    looks = "every call" if member.family == "updates.hidden" else "rounds"
    config = mf.Config(updates=looks)
    report, _, wrap = fuse_with_boundary(captured.graph, captured.inputs, config)
    run = on(captured, wrap(captured.graph.forward))
    wrong = None
    before = run_seeded(program, named)
    run_seeded(run, named)
    try:
        UPDATES[update](weight, base)
    except Exception as error:  # the same update of a weight that nobody has packed works
        return Outcome(member, Verdict.RAISED, f"the update: {type(error).__name__}: {error}")
    for turn in range(2):
        want, got = run_seeded(program, named), run_seeded(run, named)
        if not differs(want, before):
            raise Invalid("the update changes nothing")
        wrong = wrong or differs(got, want, witness(program, named, random=False))
        before = want if turn else before
    return verdict(
        member, [report], (Verdict.WRONG, f"after the update: {wrong}") if wrong else None, 2
    )


def _nothing(*_: Any) -> None:
    """Members are told by their names alone."""


def _pairs(found: list[tuple[str, str]]) -> tuple[Attack, ...]:
    return tuple(
        Attack(f"{made}.{u}", _nothing, WEIGHTS, _NO_REGIME, ("paged", "neox")) for made, u in found
    )


def _controls() -> tuple[Attack, ...]:
    return tuple(
        Attack(f"{m}.{u}", _nothing, ("w_dq", "w_uk", "gamma_q"), _NO_REGIME, ("paged",))
        for m, u in _ORDINARY
    )


FAMILIES = [
    Family(
        "updates.hidden",
        "changes that no version counter shows",
        _pairs(_HIDDEN),
        _controls(),
        judge=_judge,
    ),
    Family("updates.ordinary", "changes that torch counts", _pairs(_ORDINARY), judge=_judge),
]
