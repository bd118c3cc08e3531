"""``mode=`` and ``options=`` of ``torch.compile``, in this project's terms.

| mode | with a device | without |
|---|---|---|
| ``"default"`` | torchair's GE graphs | as always |
| ``"max-autotune"``, ``"max-autotune-no-cudagraphs"`` | GE graphs | said once |
| ``"reduce-overhead"`` | captured graphs (npugraph_ex) | said once |

A ``compiler_config`` given to ``mf.backend`` holds torchair's own mode and decides alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

from mla_fusion.config import Config

log = logging.getLogger("mla_fusion")
_TORCHAIR = {
    "default": "ge",
    "max-autotune": "ge",
    "max-autotune-no-cudagraphs": "ge",
    "reduce-overhead": "npugraph_ex",
}


def configured(config: Config, options: Mapping[str, Any]) -> Config:
    """``config`` with some of its fields set anew. Raises ValueError for names that are no
    fields.
    """
    known = [field.name for field in fields(Config)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"torch.compile(options=..) of mla_fusion: no option {', '.join(map(repr, unknown))}; "
            f"there are {', '.join(known)}"
        )
    return replace(config, **options) if options else config


def torchair_mode(mode: str | None, *, has_config: bool) -> str:
    """The package of torchair that a mode asks for; what cannot be honoured is said once."""
    if mode is None or mode == "default":
        return "ge"
    if has_config:
        _say(mode, "has no effect: the compiler_config given to mla_fusion.backend holds the mode")
        return "ge"
    if mode not in _TORCHAIR:
        _say(mode, f"is unknown to mla_fusion and has no effect; there are {', '.join(_TORCHAIR)}")
    return _TORCHAIR.get(mode, "ge")


def without_device(mode: str | None) -> None:
    """No mode changes how the graph is run on a CPU."""
    if mode is not None and mode != "default":
        _say(
            mode,
            "has no effect: no tensor lies on an NPU, so the fused graph runs by the CPU "
            "reference kernel",
        )


@cache
def _say(mode: str, what: str) -> None:
    """Once a process."""
    log.warning("torch.compile(mode=%r) %s", mode, what)
