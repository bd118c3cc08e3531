"""The public names and where each stands: one list, for type checkers and for ``__init__.py``."""

from mla_fusion import inspect as inspect
from mla_fusion import meta as meta
from mla_fusion import offline as offline
from mla_fusion import paging as paging
from mla_fusion import reference as reference
from mla_fusion._version import __version__ as __version__
from mla_fusion.compile.adapted import SlotError as SlotError
from mla_fusion.compile.backend import backend as backend
from mla_fusion.compile.hook import torchair_pass as torchair_pass
from mla_fusion.compile.prepack import Prepacked as Prepacked
from mla_fusion.compile.prepack import prepack as prepack
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
