"""One catalogue of prologues: what each varies, where it is fused or why not, and who writes it so.

Tests select entries by their tags; a new entry is a class with ``@entry(..)`` or ``@miss(..)``
above it.
"""

from importlib import import_module
from pkgutil import iter_modules

from .entry import ENTRIES, IN_PLACE, STAGED, TAGS, Entry, select

for module in iter_modules(__path__):
    if not module.name.startswith("test_"):
        import_module(f"{__name__}.{module.name}")

__all__ = ["ENTRIES", "IN_PLACE", "STAGED", "TAGS", "Entry", "select"]
