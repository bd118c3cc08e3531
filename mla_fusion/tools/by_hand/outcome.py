"""The results of an audit, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mla_fusion.report import text_tables


@dataclass(frozen=True)
class Finding:
    """A mistake of a call, or a suspicion.

    code      stable: "tables.swapped", "epsilon", "contract:..", ..
    message   what is wrong, and what would be right
    argument  the operator's argument at fault, if an argument is
    operator  the operator of the call
    call      the number of the call
    line      the line of the caller's code, with the path of the module
    certain   True if numbers or the contract show it; False for a suspicion
    error     for a slip: the largest error after the slip alone is undone
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
        number = f", call {self.call}" if self.call is not None else ""
        call = f"{self.operator}{number}: " if self.operator else ""
        error = f" (largest error then {self.error:.2g})" if self.error is not None else ""
        line = f"\n      at {self.line}" if self.line else ""
        return f"  {mark} [{self.code}] {call}{self.message}{error}{line}"


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    operators  the operators of the calls, in order; none for two functions that call none
    findings   mistakes and suspicions
    equal      True if every compared value is the reference's; None if nothing is compared, or if
               the audit does not decide
    errors     the relative error of each compared value
    tolerance  the error of each value that counts as rounding
    draws      the inputs on which values are compared
    proof      what proves two functions equal over the real numbers
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
        """Returns True if nothing is known to be wrong."""
        return self.equal is not False and not any(item.certain for item in self.findings)

    def to_json(self) -> str:
        """Returns ``ok`` and every field but the witness, as JSON text."""
        fields = asdict(replace(self, witness=None))
        del fields["witness"]
        return text_tables.as_json({"ok": self.ok, **fields})

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
