"""``mf.prepack`` lays a model's weights out as the kernel reads them, once, before compilation."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from torch import Tensor, nn

from mla_fusion.compat import FakeTensor, storage_id
from mla_fusion.compile.boundary import PackedWeight, packed_weights
from mla_fusion.compile.device_graph import capture
from mla_fusion.config import Config
from mla_fusion.fx.sizes import has_symbols
from mla_fusion.report.report import Report
from mla_fusion.report.text_tables import as_json, size
from mla_fusion.weights.follow import follow
from mla_fusion.weights.prepack import inverse, is_laid_out, lay_out, own, pin

_WIDTH = 80


@dataclass(frozen=True)
class PrepackedWeight:
    """Describes one packed weight of a model.

    name    the parameter's name in the model; names of several parameters are joined by " + "
    weight  the kernel's argument, such as "weight_dq"
    kind    "view": the parameter is a view of the packed weight. "copy": the weight is packed
            beside the parameter at the first call. "left": the parameter could be a view, but may
            not give up its memory, so the weight is packed as a copy.
    bytes   bytes of the packed weight
    reason  why the weight is a copy, or was left; for a view, whether it had this layout before
    """

    name: str
    weight: str
    kind: str
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Prepacked:
    """Says what :func:`prepack` has done. ``str()`` prints it in 80 columns.

    rows           a row for each packed weight
    bytes_before   bytes of the model's parameters and buffers before; shared memory counts once
    bytes_after    the same afterwards
    peak_over_end  at most so many bytes more than at the end were allocated meanwhile
    bytes_copied   bytes that the copies of the first call will take
    laid_out       how many parameters this call has laid out, or would
    is_plan        True if nothing was moved: the parameters have no memory (meta or fake tensors)
    """

    rows: tuple[PrepackedWeight, ...]
    bytes_before: int
    bytes_after: int
    peak_over_end: int
    bytes_copied: int
    laid_out: int
    is_plan: bool

    def to_json(self) -> str:
        """Returns all fields as a JSON object."""
        return as_json(asdict(self))

    def __str__(self) -> str:
        """Returns a summary, and a paragraph for each packed weight."""
        done = "would be laid out" if self.is_plan else "laid out"
        copies = sum(row.kind != "view" for row in self.rows)
        lines = [f"prepack: {self.laid_out} of {len(self.rows)} packed weights {done}"]
        if not self.laid_out:
            lines.append("  nothing to change: what can be a view of its packed weight is one")
        lines += [
            f"  parameters and buffers   {size(self.bytes_before)} before, "
            f"{size(self.bytes_after)} after",
            f"  peak over the end        {size(self.peak_over_end)}",
            f"  copies at the first call {size(self.bytes_copied)}, of {copies} packed weights",
        ]
        for row in self.rows:
            lines.append(f"  {row.kind}  {row.name}: {row.weight}, {size(row.bytes)}")
            lines += [f"        {line}" for line in wrap(row.reason, _WIDTH - 8)]
        return "\n".join(lines)


def prepack(model: nn.Module, *example_inputs: Any, config: Config | None = None) -> Prepacked:
    """Lays out, once, the weights that the pass would pack. Returns what became of each.

    model           with its weights loaded, where it is to run, before its first call
    example_inputs  the arguments of a decode step; nothing is computed with them
    config          options of the pass that will compile it

    A parameter whose packing only changes the layout becomes a view of the packed weight: the same
    shape and values, other strides, and its old memory is freed. Eager calls, state dicts,
    optimizers and other graphs go on with it, and no memory is added; meanwhile at most one
    parameter is in memory twice. Other weights are packed beside the parameters at the first call,
    as without this function. From here on ``load_state_dict``, steps of ``torch.optim`` optimizers
    and PEFT's ``merge`` lay the weights out again in their memory, so that captured graphs stay
    right. :func:`refresh` does it after other updates, :func:`release` undoes all of it. A second
    call changes nothing. Of a model on the meta device, or of fake tensors, it is a plan.

    What torch.compile has compiled so far in this process is compiled again at its next call. No
    other thread may run compiled code meanwhile: torch drops it all, and can crash.

    Raises ValueError for a model without an MLA prologue that can be fused, TypeError for anything
    but a module, CaptureError where the model does not compile to one graph with these inputs. The
    model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepack takes a torch.nn.Module, got a {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of what torch.compile returned
    weights = _packable_weights(model, example_inputs, Config.given(config))
    gc.collect()  # the capture's tensors keep memory of the parameters
    is_plan = any(
        parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()
    )
    before = _bytes(model)
    rows = list[PrepackedWeight]()
    for weight in weights:
        kind, reason = _lay_out(weight, model, is_plan)
        name = " + ".join(weight.packed.names)
        rows.append(PrepackedWeight(name, weight.name, kind, weight.value.nbytes, reason))
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


def _packable_weights(
    model: nn.Module, inputs: tuple[Any, ...], config: Config
) -> list[PackedWeight]:
    """Returns the weights that the pass packs on an NPU. Raises ValueError if it fuses nothing."""
    on_npu = any(parameter.device.type == "npu" for parameter in model.parameters())
    gm, examples = capture(model, *inputs, device="npu" if on_npu else "cpu", as_backend=True)
    report, weights = packed_weights(gm, config, examples)
    if not report.fused:
        raise ValueError(
            f"no MLA prologue of this {type(model).__name__} can be fused, so no weight is packed. "
            f"{_nearest_miss(report)}"
        )
    return [weight for weight in weights if not has_symbols(weight.value.shape)]


def _nearest_miss(report: Report) -> str:
    """Returns why the most similar prologue does not fuse, or what the graph has of one."""
    if report.rejected:
        nearest = max(report.rejected, key=lambda rejection: rejection.score)
        return f"Nearest: [{nearest.code}] {nearest.message}"
    return "\n".join(["Looked for:", *report.absent])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Returns the module of a parameter or buffer, and its name there; None if there is none."""
    path, _, within = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return (module, within) if own(module, within) is not None else None


def _lay_out(weight: PackedWeight, model: nn.Module, is_plan: bool) -> tuple[str, str]:
    """Lays out the parameter of a packed weight, if it can be a view of it. Returns kind and reason
    of the row.

    The reason of a view is empty if this call has moved the parameter, or would.
    """
    packing, parameter = weight.packed, weight.parameter
    if parameter is None:
        return "copy", "it is made of several parameters"
    if packing.exact is not None:
        return "copy", "its numbers are converted"
    back = None if has_symbols(parameter.shape) else inverse(packing.program, parameter)
    if back is None:
        if weight.is_view:
            return "view", _LIES
        return "copy", "its columns are a part of the parameter, padded, or in another order"
    (name,) = packing.names
    owner = _owner(model, name)
    tensor = own(*owner) if owner is not None else None
    if tensor is None or (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
        owner = tensor = None
    if owner is not None and is_laid_out(*owner):
        return "view", "it was laid out before"
    reason = _reason_to_leave(model, name, tensor)
    if owner is not None and not reason and not is_plan:
        reason = lay_out(*owner, packing.program, back)
    if weight.is_view:
        return "view", _LIES
    return "left" if reason else "view", reason


def _reason_to_leave(model: nn.Module, name: str, tensor: Tensor | None) -> str:
    """Returns why a parameter must stay where it is, or "" if the model has no reason."""
    if not isinstance(tensor, nn.Parameter):
        return "it is not a parameter of a module of this model"
    parameters = model.named_parameters(remove_duplicate=False)
    tied = [other for other, parameter in parameters if parameter is tensor and other != name]
    return f"it is tied to {', '.join(tied)}" if tied else ""


_LIES = "the parameter lies as the kernel reads it"


def _bytes(model: nn.Module) -> int:
    """Returns the bytes of parameters and buffers. Shared memory counts once."""
    storages = {
        storage_id(tensor): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())
