"""Parameters that wrap other tensors: DTensors, quantised weights.

A compiled graph is given the tensors inside. What changes the wrapper (``load_state_dict``, an
optimizer) is counted by torch for the wrapper alone, and so has to be counted for these before each
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from mla_fusion.compat import is_wrapper, parts_of, version_of


def counting(compiled: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """``compiled``, which is given wrappers where the examples are some."""
    places = [place for place, value in enumerate(examples) if is_wrapper(value)]
    seen: dict[int, int] = {}

    def count(whole: Any) -> None:
        if not isinstance(whole, Tensor) or whole.is_inference():
            return
        if seen.get(id(whole)) != version_of(whole):
            seen[id(whole)] = version_of(whole)
            for part in parts_of(whole):
                if not part.is_inference():
                    increment_version(part)

    @wraps(compiled)
    def call(*args: Any) -> Any:
        for place in places:
            count(args[place])
        return compiled(*args)

    return call if places else compiled


def plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, in place of each wrapper those inside."""
    for tensor in tensors:
        yield from parts_of(tensor)
