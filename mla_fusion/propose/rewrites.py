"""Rewrites Values of a graph as Values over the results of a call.

Claims say what some Values are. ``plan/`` and ``cache_variants.py`` ask what follows for other
Values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mla_fusion.exact.prove import Claim
from mla_fusion.graph.form import MOVES, Form, Value


def claims_over(
    form: Form, claims: Iterable[Claim], replacements: Mapping[Value, Value]
) -> list[Claim]:
    """Returns the claims with other Values in place of some that the kernel's side is made of."""
    return [
        Claim(claim.part, claim.graph, form.substituted(claim.kernel, replacements))
        for claim in claims
    ]


class Rewrites:
    """Holds what claims say of the graph's Values, and derives it for Values computed from them."""

    def __init__(self, form: Form, claims: Sequence[Claim] = ()) -> None:
        self._form, self.claims = form, claims
        self._rewrites: dict[Value, Value | None] = {}
        for claim in claims:
            self._add(claim.graph, claim.kernel)

    def update(self, other: Rewrites) -> None:
        """Adds what other claims say, and what was derived from them."""
        known = other._rewrites.items()
        self._rewrites |= {value: rewrite for value, rewrite in known if rewrite}

    def _add(self, value: Value, rewrite: Value) -> None:
        """Adds that ``value`` is ``rewrite``. Numbers in front and reshapes are taken off both."""
        factor, unscaled = self._form.split(value)
        rewrite = self._form.scaled(rewrite, factor.inverse)
        if unscaled.op == "reshape":
            inner = unscaled.sources[0]
            self._add(inner, self._form.reshape(rewrite, inner.shape))
        else:
            self._rewrites[unscaled] = rewrite

    def of(self, value: Any) -> Value | None:
        """Returns what a Value is over the results, or None if that is not known.

        It follows moves, and products with Values that are not made of x. Any other reading of a
        node than a Value is nothing over the results.
        """
        if not isinstance(value, Value):
            return None
        if value not in self._rewrites:
            self._rewrites[value] = self._derive(value)
        return self._rewrites[value]

    def _derive(self, value: Value) -> Value | None:
        """Returns the rewrite of a Value that no claim names."""
        if not value.active:
            return None
        factor, unscaled = self._form.split(value)
        if unscaled is not value:
            inner = self.of(unscaled)
            return None if inner is None else self._form.scaled(inner, factor)
        if value.op == "product":
            return self._derive_product(value)
        if value.op not in MOVES:
            return None
        sources = [self.of(source) if source.active else source for source in value.sources]
        if any(source is None for source in sources):
            return None
        return self._form.rebuilt(value, [source for source in sources if source is not None])

    def _derive_product(self, value: Value) -> Value | None:
        """Returns the rewrite of a known Value times Values that are not made of x."""
        active = [factor for factor in value.operands if factor[0].active]
        rewrite = self.of(active[0][0]) if len(active) == 1 and active[0][1] == 1 else None
        if rewrite is None:
            return None
        return self._form.product(
            [(rewrite if term.active else term, power) for term, power in value.operands],
            value.number,
        )
