"""``mla_fusion.offline.activate()``: the real torch_npu and torchair on a machine without CANN."""

from mla_fusion.compile.offline import NpuNotAvailable, activate

__all__ = ["NpuNotAvailable", "activate"]
