"""The offline runtime: the published torch_npu and torchair on a machine without NPU and without
CANN.

``symbols`` reads what the wheel expects of CANN, ``standins`` builds inert libraries for it, and
``runtime`` loads the packages over them and cuts torchair off where execution would begin. Nothing
here is used on an NPU machine.
"""

from mla_fusion.compile.offline.runtime import activate, is_active, standins_directory
from mla_fusion.compile.offline.symbols import NpuNotAvailable, OfflineError

__all__ = ["NpuNotAvailable", "OfflineError", "activate", "is_active", "standins_directory"]
