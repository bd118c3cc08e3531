"""The exception of the contract."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class ContractError(ValueError):
    """Raised for a call that the operator does not take.

    ``code`` is stable ("dims.he", "dtype.token_x", "required.cache_index", ...); ``argument`` names
    the offending argument; ``expected`` and ``found`` are text; ``dims`` holds the axis sizes known
    when the rule failed; ``source`` names the official file the rule is read from.
    """

    def __init__(
        self,
        code: str,
        argument: str,
        expected: str,
        found: str,
        dims: Mapping[str, Any] | None = None,
        source: str = "",
        op: str = "",
    ) -> None:
        self.code, self.argument, self.expected, self.found = code, argument, expected, found
        self.dims, self.source, self.op = dict(dims or {}), source, op
        where = f"{op}: " if op else ""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.dims.items())
        context = "".join(f" [{text}]" for text in (sizes, source) if text)
        # assigned: Dynamo does not trace super().__init__, and a refusal in a function that is
        # compiled would be reported as that
        self.args = (f"{where}{argument}: expected {expected}, found {found} ({code}){context}",)


def known_name(argument: str, value: object, names: Collection[str], **context: Any) -> str:
    """Returns the value. Raises ContractError ``<argument>`` unless it is among these names."""
    if not isinstance(value, str) or value not in names:
        raise ContractError(
            argument, argument, f"one of {', '.join(names)}", repr(value), **context
        )
    return value
