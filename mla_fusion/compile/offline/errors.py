"""The errors of the offline runtime: one for the set-up, one for a call that no stand-in can
answer.
"""

from __future__ import annotations


class OfflineError(ImportError):
    """torch_npu cannot be loaded without CANN here; the message says what to install or to
    change.
    """


class NpuNotAvailable(RuntimeError):
    """Something needed an NPU that this machine does not have; the message names what was asked
    for.
    """

    def __init__(self, asked: str) -> None:
        super().__init__(
            f"{asked} needs an Ascend NPU, and this process runs with the offline stand-ins of "
            "mla_fusion: "
            "graphs can be captured, compiled and inspected here, not executed. "
            "Use CPU tensors, or fake tensors on device npu."
        )
        self.asked = asked
