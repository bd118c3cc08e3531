"""What an audit found, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mla_fusion.report import text_tables
from mla_fusion.tools.page import plain

Errors = dict[str, float]  # of each value, relative


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or looks so.

    code      stable: "tables.swapped", "epsilon", "contract:..", ..
    message   what is wrong, and what would be right
    argument  the operator's argument at fault, where it is one
    operator  that of the call
    call      its number among the calls
    certain   shown by numbers or by the contract; else a suspicion
    line      of the caller's code
    error     the largest error that is left when this, and all findings before it, are mended
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
    draws      on which inputs values were compared
    equal      is every compared value the reference's? None where there was no reference, or where
               it is not decided
    errors     relative error of each compared value, as written
    repaired   the same with every repair that was found
    tolerance  of each value, the error that is rounding
    tried      how many runs of the repaired function it took
    proof      what was shown, of two functions that are equal over the real numbers
    witness    inputs on which they differ
    """

    operators: tuple[str, ...]
    findings: tuple[Finding, ...]
    equal: bool | None = None
    errors: dict[str, float] | None = None
    repaired: dict[str, float] | None = None
    tolerance: dict[str, float] | None = None
    draws: tuple[str, ...] = ()
    tried: int = 0
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
        calls = f"{len(self.operators)} call{'s' * (len(self.operators) != 1)} of " + ", ".join(
            dict.fromkeys(self.operators)
        )
        if not self.operators:
            calls = "two functions that call no fused operator"
        verdict = {
            True: f"proved equal to the reference: {self.proof}"
            if self.proof
            else "equal to the reference",
            False: "NOT equal to the reference",
            None: "no reference to compare with" if self.operators else "not decided",
        }[self.equal]
        lines = [f"mla_fusion audit: {calls}; {verdict}"]
        if self.errors:
            lines.append(f"  compared on {' and '.join(self.draws)}")
            width = max(map(len, self.errors))
            beside = {"repaired": self.repaired, "rounding up to": self.tolerance}
            for name, error in self.errors.items():
                more = [f"   {what} {of[name]:.2g}" for what, of in beside.items() if of]
                lines.append(f"    {name:<{width}}  error {error:.2g}{''.join(more)}")
        lines += map(str, self.findings)
        if (
            self.equal is False
            and self.operators
            and not any(item.error is not None for item in self.findings)
        ):
            lines.append(
                f"  no repair that is known explains it ({self.tried} runs; `tries` and "
                "`seconds` allow more)"
            )
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> Path:
        """Write a page that stands alone."""
        repaired = self.repaired or {}
        rows = [
            (name, f"{error:.2g}", f"{repaired.get(name, error):.2g}")
            for name, error in (self.errors or {}).items()
        ]
        notes = [
            (
                "wrong" if item.certain else "maybe",
                f"[{item.code}] {item.operator}: {item.message}",
                [f"largest error then {item.error:.2g}"] * (item.error is not None)
                + [item.line] * bool(item.line),
            )
            for item in self.findings
        ]
        header = ("value", "error", "repaired")
        headings = str(self).splitlines()[:1]
        return plain.write(
            path, "mla_fusion audit", headings, notes, header, rows, "Nothing found."
        )
