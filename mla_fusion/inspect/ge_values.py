"""What a GE tensor can be while its graph is rebuilt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node


@dataclass(frozen=True)
class Constant:
    """Numbers that the graph holds; sizes may be symbolic."""

    numbers: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def scalar(self) -> Any:
        return self.numbers[0] if self.shape == () and len(self.numbers) == 1 else None


@dataclass(frozen=True)
class Rows:
    """Which input a value is a view of, and whether a write lies between."""

    placeholder: Node
    written: bool = False


Result = Node | Constant | None


class Unmapped(Exception):
    """A GE operator, or a use of one, that has no counterpart here."""
