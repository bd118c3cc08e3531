"""Values of a graph, as Values over the results of a call."""

from __future__ import annotations

from collections.abc import Iterable

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import MOVES, Form, Value


class Given:
    """What claims say, and what follows of it for Values that are moved."""

    def __init__(self, form: Form, claims: Iterable[Claim] = ()) -> None:
        self._form = form
        self._of: dict[Value, Value | None] = {}
        for claim in claims:
            self.add(claim.graph, claim.kernel)

    def add(self, value: Value, given: Value) -> None:
        """Known without the number in front, and without reshapes."""
        times, rest = self._form.split(value)
        by = times.power(-1)
        assert by is not None
        given = self._form.scaled(given, by)
        if rest.op == "reshape":
            inner = rest.sources[0]
            self.add(inner, self._form.reshape(given, inner.shape))
        else:
            self._of[rest] = given

    def of(self, value: Value) -> Value | None:
        """Of a Value that is moved from such, too, or multiplied with what is not made of x."""
        if value not in self._of:
            self._of[value] = self._moved(value)
        return self._of[value]

    def _moved(self, value: Value) -> Value | None:
        times, rest = self._form.split(value)
        if rest is not value:
            inner = self.of(rest)
            return None if inner is None else self._form.scaled(inner, times)
        if value.op == "product" and value.active:
            return self._multiplied(value)
        if value.op not in MOVES or not value.active:
            return None
        sources = [self.of(one) if one.active else one for one in value.sources]
        if any(one is None for one in sources):
            return None
        return self._form.rebuilt(value, [one for one in sources if one is not None])

    def _multiplied(self, value: Value) -> Value | None:
        """A Value that is known, times others that are not made of x."""
        factors = [*zip(value.sources, value.literal[0], strict=True)]
        active = [factor for factor in factors if factor[0].active]
        inner = self.of(active[0][0]) if len(active) == 1 and active[0][1] == 1 else None
        if inner is None:
            return None
        return self._form.product(
            [(inner if one.active else one, by) for one, by in factors], value.literal[1]
        )
