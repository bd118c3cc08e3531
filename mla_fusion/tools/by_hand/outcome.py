"""What an audit found, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mla_fusion.report import text_tables


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks so.

    code      stable: "tables.swapped", "epsilon", "contract:..", ..
    message   what is wrong, and what would be right
    argument  the operator's argument at fault, where it is one
    operator  that of the call
    call      its number among the calls
    line      of the caller's code, with the path of the module
    certain   shown by numbers or by the contract; else a suspicion
    error     of a slip: the largest error that is left when it alone is mended
    """

    code: str
    message: str
    argument: str = ""
    operator: str = ""
    call: int | None = None
    line: str = ""
    certain: bool = True
    error: float | None = None

    def __str__(self) -> str:
        mark = "-" if self.certain else "?"
        where = f"\n      at {self.line}" if self.line else ""
        left = f" (largest error then {self.error:.2g})" if self.error is not None else ""
        of = f", call {self.call}" if self.call is not None else ""
        of = f"{self.operator}{of}: " if self.operator else ""
        return f"  {mark} [{self.code}] {of}{self.message}{left}{where}"


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    operators  those that were called, in order; none: two functions were compared, neither of which
               calls one
    findings   what is wrong, or looks so
    equal      is every compared value the reference's? None where nothing was compared, or where it
               is not decided
    errors     relative error of each compared value
    tolerance  of each value, the error that is rounding
    draws      on which inputs values were compared
    proof      what was shown, of two functions that are equal over the real numbers
    witness    inputs on which two functions differ
    """

    operators: tuple[str, ...]
    findings: tuple[Finding, ...]
    equal: bool | None = None
    errors: dict[str, float] | None = None
    tolerance: dict[str, float] | None = None
    draws: tuple[str, ...] = ()
    proof: str = ""
    witness: tuple[Any, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Nothing is known to be wrong."""
        return self.equal is not False and not any(item.certain for item in self.findings)

    def to_json(self) -> str:
        """Every field but the witness, with ``ok``."""
        held = asdict(replace(self, witness=None))
        del held["witness"]
        return text_tables.as_json({"ok": self.ok, **held})

    def __str__(self) -> str:
        count = len(self.operators)
        calls = f"{count} call{'s' * (count != 1)} of {', '.join(dict.fromkeys(self.operators))}"
        verdict = {
            True: f"{'proved ' * bool(self.proof)}equal to the reference",
            False: "NOT equal to the reference",
            None: "not decided" if self.errors or not count else "nothing is compared",
        }[self.equal]
        subject = calls if count else "two functions that call no fused operator"
        proof = f": {self.proof}" if self.proof else ""
        lines = [f"mla_fusion audit: {subject}; {verdict}{proof}"]
        if self.errors:
            lines.append(f"  compared on {' and '.join(self.draws)}")
            for name, error in self.errors.items():
                limit = f"   rounding up to {self.tolerance[name]:.2g}" if self.tolerance else ""
                lines.append(f"    {name:<{max(map(len, self.errors))}}  error {error:.2g}{limit}")
        return "\n".join([*lines, *map(str, self.findings)])
