"""``mf.prepack``: a model's weights laid out as the kernel reads them, once, before anything is
compiled.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from torch import Tensor, nn

from mla_fusion.compat import FakeTensor, storage_id
from mla_fusion.compile.boundary import PackedWeight, packings
from mla_fusion.compile.device_graph import capture
from mla_fusion.config import Config
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.report.report import Report
from mla_fusion.report.text_tables import size
from mla_fusion.weights.follow import follow
from mla_fusion.weights.prepack import inverse, is_laid_out, lay_out, own, pin

_WIDTH = 80


@dataclass(frozen=True)
class PrepackedWeight:
    """One packed weight of a model.

    name    the parameter's in the model; of several, joined by " + "
    weight  the kernel's argument, such as "weight_dq"
    kind    "view": the parameter is a view of the packed weight. "copy": it is packed beside the
            parameter at the first call. "left": it could be a view, but the parameter may not give
            up its memory, and is packed as a copy.
    bytes   of the packed weight
    reason  why it is a copy, or was left; of a view, whether it lay so before
    """

    name: str
    weight: str
    kind: str
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Prepacked:
    """What :func:`prepack` has done; ``str()`` says it in 80 columns.

    rows           one for each packed weight
    bytes_before   of the model's parameters and buffers before, memory that several share counted
                   once
    bytes_after    the same afterwards
    peak_over_end  how many bytes more than at the end were held meanwhile, at most
    bytes_copied   what the copies of the first call will take
    laid_out       how many parameters this call has laid out, or would
    is_plan        nothing was moved: the parameters hold no memory (meta or fake tensors)
    """

    rows: tuple[PrepackedWeight, ...]
    bytes_before: int
    bytes_after: int
    peak_over_end: int
    bytes_copied: int
    laid_out: int
    is_plan: bool

    def to_json(self) -> str:
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        done = "would be laid out" if self.is_plan else "laid out"
        copies = sum(row.kind != "view" for row in self.rows)
        before, after = size(self.bytes_before), size(self.bytes_after)
        lines = [f"prepack: {self.laid_out} of {len(self.rows)} packed weights {done}"]
        if not self.laid_out:
            lines.append("  nothing to change: what can be a view of its packed weight is one")
        lines += [
            f"  parameters and buffers   {before} before, {after} after",
            f"  peak over the end        {size(self.peak_over_end)}",
            f"  copies at the first call {size(self.bytes_copied)}, of {copies} packed weights",
        ]
        for row in self.rows:
            lines.append(f"  {row.kind}  {row.name}: {row.weight}, {size(row.bytes)}")
            lines += [f"        {line}" for line in wrap(row.reason, _WIDTH - 8)]
        return "\n".join(lines)


def prepack(model: nn.Module, *example_inputs: Any, config: Config | None = None) -> Prepacked:
    """Lay out, once, the weights of which the pass would make packed ones; what became of each.

    model           with its weights loaded, where it is to run, before it is compiled
    example_inputs  as its decode step takes them; they are not computed with
    config          options of the pass that will compile it

    A parameter whose packing only changes the layout becomes a view of the packed weight: the same
    shape and values, other strides, and its old memory is freed. Eager calls, state dicts,
    optimizers and other graphs go on with it, and no memory is added; meanwhile at most one
    parameter is held twice. The rest is packed beside the parameters at the first call, as without
    this function. From here on ``load_state_dict``, steps of ``torch.optim`` optimizers and PEFT's
    ``merge`` end with the weights laid out anew in their memory, so that captured graphs stay
    right. :func:`refresh` does it after other updates, :func:`release` undoes all of it. A second
    call changes nothing. Of a model on the meta device, or of fake tensors, it is a plan.

    What torch.compile has compiled so far in this process is compiled again at its next call.

    Raises ValueError for a model without an MLA prologue that can be fused, TypeError for anything
    but a module, CaptureError where the model does not compile to one graph with these inputs. The
    model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepack takes a torch.nn.Module, got a {type(model).__name__}")
    weights = _wanted(model, example_inputs, Config.given(config))
    gc.collect()  # the capture's tensors hold memory of the parameters
    is_plan = any(
        parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()
    )
    before = _bytes(model)
    rows = list[PrepackedWeight]()
    for weight in weights:
        kind, reason = _settled(weight, model, is_plan)
        name, held = " + ".join(weight.packed.names), weight.value.nbytes
        rows.append(PrepackedWeight(name, weight.name, kind, held, reason))
    moved = [row.bytes for row in rows if row.kind == "view" and not row.reason]
    if not is_plan:
        names = {name for weight in weights for name in weight.packed.names}
        owners = [owner for name in names if (owner := _owner(model, name)) is not None]
        for owner in owners:
            pin(*owner)
        follow(model, {module for module, _ in owners})
    copied = sum(row.bytes for row in rows if row.kind != "view")
    return Prepacked(
        tuple(rows), before, _bytes(model), max(moved, default=0), copied, len(moved), is_plan
    )


def _wanted(model: nn.Module, inputs: tuple[Any, ...], config: Config) -> list[PackedWeight]:
    """What would be packed, laid out as on an NPU. Raises ValueError where nothing would be
    fused.
    """
    on_npu = any(parameter.device.type == "npu" for parameter in model.parameters())
    gm, examples = capture(model, *inputs, device="npu" if on_npu else "cpu", as_backend=True)
    report, found = packings(gm, config, examples)
    if not report.fused:
        what = (
            f"no MLA prologue of this {type(model).__name__} can be fused, so no weight is packed"
        )
        raise ValueError(f"{what}. {_why(report)}")
    return [weight for weight in found if not has_symbols(weight.value.shape)]


def _why(report: Report) -> str:
    if report.rejected:
        nearest = max(report.rejected, key=lambda item: item.score)
        return f"Nearest: [{nearest.code}] {nearest.message}"
    return "\n".join(["Looked for:", *report.absent])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The module that holds the parameter or buffer of this name, and its name there."""
    path, _, within = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return (module, within) if own(module, within) is not None else None


def _why_left(model: nn.Module, name: str, held: Tensor | None) -> str:
    """Why a parameter is not to be moved, as far as the model tells."""
    if not isinstance(held, nn.Parameter):
        return "it is not a parameter of a module of this model"
    every = model.named_parameters(remove_duplicate=False)
    tied = [other for other, one in every if one is held and other != name]
    return f"it is tied to {', '.join(tied)}" if tied else ""


def _settled(weight: PackedWeight, model: nn.Module, is_plan: bool) -> tuple[str, str]:
    """The kind of a row, and the reason; a view without one is a parameter that was moved."""
    made, parameter = weight.packed, weight.parameter
    if parameter is None:
        return "copy", "it is made of several parameters"
    if made.exact is not None:
        return "copy", "its numbers are converted"
    back = None if has_symbols(parameter.shape) else inverse(made.program, parameter)
    if back is None:
        if weight.is_view:
            return "view", _LIES
        return "copy", "its columns are a part of the parameter, padded, or in another order"
    (name,) = made.names
    owner = _owner(model, name)
    held = own(*owner) if owner is not None else None
    if held is None or (held.shape, held.dtype) != (parameter.shape, parameter.dtype):
        owner = held = None
    if owner is not None and is_laid_out(*owner):
        return "view", "it was laid out before"
    reason = _why_left(model, name, held)
    if owner is not None and not reason and not is_plan:
        reason = lay_out(*owner, made.program, back)
    if weight.is_view:
        return "view", _LIES
    return "left" if reason else "view", reason


_LIES = "the parameter lies as the kernel reads it"


def _bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum({storage_id(one): one.untyped_storage().nbytes() for one in tensors}.values())
