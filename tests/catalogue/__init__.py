"""One catalogue of prologues: what each varies, where it is fused or why not, and who writes it so.

Tests select entries by their tags; a new entry is a class with ``@entry(..)`` or ``@miss(..)`` above it.
"""

from . import (
    absorbs,
    assembled,
    base,
    int8,
    int8_attention,
    int8_caches,
    int8_misses,
    int8_plain,
    int8_plain_misses,
    int8_plain_models,
    layouts,
    misses_norms,
    misses_products,
    misses_rotations,
    misses_writes,
    norms,
    projections,
    prologues,
    rotations,
    tables,
    writes,
)
from .entry import ENTRIES, IN_PLACE, STAGED, TAGS, Entry, select

__all__ = [
    "ENTRIES",
    "IN_PLACE",
    "STAGED",
    "TAGS",
    "Entry",
    "absorbs",
    "assembled",
    "base",
    "int8",
    "int8_attention",
    "int8_caches",
    "int8_misses",
    "int8_plain",
    "int8_plain_misses",
    "int8_plain_models",
    "layouts",
    "misses_norms",
    "misses_products",
    "misses_rotations",
    "misses_writes",
    "norms",
    "projections",
    "prologues",
    "rotations",
    "select",
    "tables",
    "writes",
]
