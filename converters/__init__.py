"""Converts the MLA prologue operators from FX to GE, where TorchAir has no converter for them.

``register()`` may be called any number of times, before or after a compilation. It needs torchair,
which needs CANN or ``mla_fusion.offline.activate()``; importing this package needs neither.
``register_unfused()`` adds converters for the aten operators of unfused graphs that torchair
refuses, ``with unfused_registered():`` for a while.
"""

from mla_fusion.converters.registry import (
    OPERATORS,
    UNFUSED,
    provenance,
    register,
    register_unfused,
    unfused_registered,
)

__all__ = [
    "OPERATORS",
    "UNFUSED",
    "provenance",
    "register",
    "register_unfused",
    "unfused_registered",
]
