"""One module for each class of attack; ``FAMILIES`` holds every family by name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from ..member import Family

_MODULES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
FAMILIES: dict[str, Family] = {
    family.name: family
    for name in _MODULES
    for family in import_module(f".{name}", __package__).FAMILIES
}
