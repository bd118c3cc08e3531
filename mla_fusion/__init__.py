"""Fuse DeepSeek MLA prologues in FX graphs into the single Ascend NPU kernel.

The names below are the whole public surface; each loads its module on first use, and torch with it.
Whoever imports torch has the npu:: operators, before or after this package.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_fusion import _autoload, _gone, _lazy

if not Path(__file__).with_name("meta").exists():
    # A source tree, perhaps before its installation on sys.path: meta/, converters/ and examples/
    # stand beside it.
    __path__.append(str(Path(__file__).parents[1]))

_autoload.keep_torch_importable()
_lazy.operators_with_torch()
_lazy.write_page = lambda report, path: import_module("mla_fusion.tools.page.page").write(
    report, path
)

if "MLA_FUSION_GRAPHS" in os.environ:
    warnings.warn(_gone.sentence(["MLA_FUSION_GRAPHS"]), stacklevel=2)

if TYPE_CHECKING:
    from mla_fusion import (
        inspect as inspect,
    )
    from mla_fusion import (
        meta as meta,
    )
    from mla_fusion import (
        offline as offline,
    )
    from mla_fusion import (
        paging as paging,
    )
    from mla_fusion import (
        reference as reference,
    )
    from mla_fusion.compile.adapted import SlotError as SlotError
    from mla_fusion.compile.backend import backend as backend
    from mla_fusion.compile.hook import torchair_pass as torchair_pass
    from mla_fusion.compile.prepack import (
        Prepacked as Prepacked,
    )
    from mla_fusion.compile.prepack import (
        prepack as prepack,
    )
    from mla_fusion.config import Config as Config
    from mla_fusion.fx.registered import register_operator as register_operator
    from mla_fusion.pipeline import fuse as fuse
    from mla_fusion.report.report import Report as Report
    from mla_fusion.report.store import reports as reports
    from mla_fusion.tools.by_hand.entry import audit as audit
    from mla_fusion.tools.by_hand.outcome import Audit as Audit
    from mla_fusion.tools.inspect.explain import explain as explain
    from mla_fusion.tools.lowering import Lowering as Lowering
    from mla_fusion.tools.lowering import lower as lower
    from mla_fusion.weights.follow import refresh as refresh
    from mla_fusion.weights.follow import release as release


__version__: str

_HOME = {
    "__version__": "mla_fusion._version",
    "Audit": "mla_fusion.tools.by_hand.outcome",
    "Config": "mla_fusion.config",
    "Lowering": "mla_fusion.tools.lowering",
    "Prepacked": "mla_fusion.compile.prepack",
    "Report": "mla_fusion.report.report",
    "SlotError": "mla_fusion.compile.adapted",
    "audit": "mla_fusion.tools.by_hand.entry",
    "backend": "mla_fusion.compile.backend",
    "explain": "mla_fusion.tools.inspect.explain",
    "fuse": "mla_fusion.pipeline",
    "lower": "mla_fusion.tools.lowering",
    "prepack": "mla_fusion.compile.prepack",
    "refresh": "mla_fusion.weights.follow",
    "register_operator": "mla_fusion.fx.registered",
    "release": "mla_fusion.weights.follow",
    "reports": "mla_fusion.report.store",
    "torchair_pass": "mla_fusion.compile.hook",
}
_SUBPACKAGES = ("inspect", "meta", "offline", "paging", "reference")

__all__ = sorted({*_HOME, *_SUBPACKAGES} - {"__version__"})


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"mla_fusion.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    gone = _gone.sentence([f"mf.{name}"])
    raise AttributeError(gone or f"module 'mla_fusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
