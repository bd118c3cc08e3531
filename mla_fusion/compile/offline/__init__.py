"""Runs the published torch_npu and torchair on a machine without NPU and without CANN.

``symbols`` reads what the wheel needs of CANN. ``standins`` builds inert libraries with these
symbols. ``runtime`` loads the packages over them, and stops torchair before execution. An NPU
machine uses none of this.
"""

from mla_fusion.compile.offline.runtime import activate, is_active, standins_directory
from mla_fusion.compile.offline.symbols import NpuNotAvailable, OfflineError

__all__ = ["NpuNotAvailable", "OfflineError", "activate", "is_active", "standins_directory"]
