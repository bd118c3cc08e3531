"""What the index of a graph answers to the files that it is made with.

:class:`mla_fusion.fx.view.View` is this index. Ranges, terms and the rules of proof ask it while it
is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.fx import Node

from mla_fusion.fx.sizes import Binding


class Indexed(Protocol):
    @property
    def binding(self) -> Binding: ...

    @property
    def contractions(self) -> Mapping[Node, Any]: ...

    def is_constant(self, node: Node) -> bool: ...

    def depends_on_products(self, node: Node) -> bool: ...

    def squares_of(self, node: Node) -> Node | None: ...

    def number(self, node: Node) -> int: ...

    def call(self, node: Node) -> tuple[int, list[Node]]: ...
