"""FX to GE converters of the MLA prologue operators for TorchAir, registered only where it has none.

``register()`` may be called any number of times, before or after a compilation. It needs torchair, which
needs CANN or ``mla_fusion.offline.activate()``; importing this package needs neither.
"""

from mla_fusion.converters.registry import OPERATORS, provenance, register

__all__ = ["OPERATORS", "provenance", "register"]
