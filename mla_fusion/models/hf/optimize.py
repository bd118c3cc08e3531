"""Turns the MLA attentions of a loaded ``transformers`` model into their absorbed form, and back.

Modules and parameters stay. An attention's ``forward`` calls two other functions
(``latent_forward``): one leaves latents as they are instead of expanding them, before or after they
are cached. The other attends over these latents.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as kept
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from mla_fusion.models.hf.asked import ask
from mla_fusion.models.hf.examine import examine, is_attention
from mla_fusion.models.hf.generation import use_paged_cache
from mla_fusion.models.hf.latent_attention import BLOCK_SIZE
from mla_fusion.models.hf.latent_forward import latent_forward
from mla_fusion.models.hf.paged_layer import PageTable
from mla_fusion.models.hf.summary import Converted, Skipped, Summary
from mla_fusion.models.refusal import OptimizeError

# the attribute of a converted attention that holds the function of its forward
CONVERTED = "_mla_fusion_forward"


def optimize(model: nn.Module, *, cache: bool = True, block_size: int = BLOCK_SIZE) -> Summary:
    """Converts every MLA attention of ``model`` in place, and returns a summary.

    model       of transformers, loaded; parameters are shared, not copied
    cache       makes ``generate()`` use an ``MlaPagedCache`` in place of a dynamic or a static
                cache
    block_size  tokens a page of that cache, a multiple of 16 up to 1024

    Attentions without an absorbed form are left alone; the summary has a code and a reason for
    each. A second call returns the summary of the first call. ``revert`` undoes all of it. Raises
    TypeError for what is no module, ValueError for another block size.
    """
    earlier: Summary | None = getattr(model, "_mla_fusion_summary", None)
    if earlier is not None:
        return earlier
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model of transformers, got {type(model).__name__}")
    PageTable(block_size, None)  # a wrong size is refused before anything is converted
    converted, skipped, forwards = [], [], list[tuple[Any, Callable[..., Any]]]()
    answers: dict[object, Callable[[], tuple[str, str]]] = {}
    for name, module in model.named_modules():
        if not is_attention(module):
            continue
        try:
            form = examine(module)
        except OptimizeError as refusal:
            skipped.append(Skipped(name, refusal.code, refusal.message))
            continue
        size = getattr(module, form.kv_up).weight.element_size()
        forward = latent_forward(type(module), form, name)
        forwards.append((module, forward))
        shapes = tuple((key, value.shape, value.dtype) for key, value in module.named_parameters())
        # the pass is asked once for all attentions that differ only in the layer
        alike = type(module), form, shapes, id(module.config)
        answer = answers.setdefault(alike, kept(partial(ask, module, form, forward)))
        converted.append(
            Converted(name, int(module.layer_idx), form.heads, form.dims, size, answer)
        )
    summary = Summary(tuple(converted), tuple(skipped))
    # set after all have been made, so that an error leaves the model as it was
    for module, forward in forwards:
        setattr(module, CONVERTED, forward)
        module.forward = MethodType(forward, module)
    if converted:
        if cache and hasattr(model, "_prepare_cache_for_generation"):
            use_paged_cache(model, block_size)
        model._mla_fusion_summary = summary  # type: ignore[assignment]
    return summary


def revert(model: nn.Module) -> None:
    """Undoes ``optimize``: modules, parameters and results are those of before.

    model  that ``optimize`` has converted

    Raises OptimizeError ``model.state``; nothing is changed then.
    """
    if getattr(model, "_mla_fusion_summary", None) is None:
        raise OptimizeError("model.state", f"this {type(model).__name__} is not optimised")
    converted = {
        name: module for name, module in model.named_modules() if hasattr(module, CONVERTED)
    }
    for name, module in converted.items():
        if getattr(vars(module).get("forward"), "__func__", None) is not getattr(module, CONVERTED):
            raise OptimizeError(
                "model.state",
                f"{name}.forward has been replaced since optimize(): undo that, then revert",
            )
    for module in converted.values():
        delattr(module, "forward")
        delattr(module, CONVERTED)
    for name in ("_prepare_cache_for_generation", "_mla_fusion_longest", "_mla_fusion_summary"):
        model.__dict__.pop(name, None)
