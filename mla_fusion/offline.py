"""The real torch_npu and torchair on a machine without CANN; on an NPU machine nothing here changes
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mla_fusion.compile.offline import NpuNotAvailable, activate

__all__ = ["NpuNotAvailable", "activate", "on_npu"]


def on_npu(
    module_or_fn: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A module and its arguments on the NPU; where there is none, copies of both over fake tensors
    on device npu.

    module_or_fn, arguments  what :func:`lower` or torch.compile would be given

    Fake ones go through torch.compile and torchair as real ones would, up to where the device would
    run the compiled graph: there ``NpuNotAvailable`` is raised. Calls :func:`activate`.
    """
    from mla_fusion.compat import tree_map_only
    from mla_fusion.compile.fakes import relocate

    activate()
    import torch
    import torch_npu

    if not torch_npu.npu.is_available():
        return relocate(module_or_fn, tuple(arguments), "npu")
    if isinstance(module_or_fn, torch.nn.Module):
        module_or_fn = module_or_fn.to("npu")
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("npu"), tuple(arguments))
    return module_or_fn, moved
