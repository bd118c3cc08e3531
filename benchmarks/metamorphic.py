"""The pass against generated graphs: spellings that must fuse, and mutants that must not be
misread.

    python benchmarks/metamorphic.py --spellings 500 --mutants 2000 --seed 0 --jobs 2
    python benchmarks/metamorphic.py --spellings 0 --mutants 0 --quantised 250

Exit status 1 where a spelling does not fuse as exactly, or where a mutant is fused wrongly, makes
the pass raise, or is misread and stopped by verification alone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.fusion.generator import campaign
from tests.fusion.generator.campaign import Outcome
from tests.fusion.generator.judge import Verdict

_NOT_WRONG = {Verdict.FUSED, Verdict.DECLINED}
GOOD = {"spelling": {Verdict.FUSED}, "mutant": _NOT_WRONG, "quantised mutant": _NOT_WRONG}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spellings", type=int, default=500)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument(
        "--quantised", type=int, default=0, help="mutants of quantised graphs of the catalogue"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    given = parser.parse_args()
    campaign.quiet()
    failures = 0
    for sort, outcomes in (
        ("spelling", campaign.spellings(given.spellings, given.seed, given.jobs)),
        ("mutant", campaign.mutants(given.mutants, given.seed, given.jobs)),
        ("quantised mutant", campaign.quantised_mutants(given.quantised, given.seed, given.jobs)),
    ):
        started = perf_counter()
        found = [_shown(outcome, sort) for outcome in outcomes]
        failures += sum(outcome.verdict not in GOOD[sort] for outcome in found)
        _print_verdicts(sort, found, perf_counter() - started)
        if not found:
            continue
        if sort == "spelling":
            _print_misses(found)
        else:
            _print_kinds(found)
    return 1 if failures else 0


def _shown(outcome: Outcome, sort: str) -> Outcome:
    if outcome.verdict not in GOOD[sort]:
        print(outcome, file=sys.stderr, flush=True)
    return outcome


def _print_verdicts(sort: str, found: list[Outcome], seconds: float) -> None:
    print(
        f"\n{len(found)} {sort}s of distinct structure, {seconds:.0f} s\n\n| verdict | {sort}s "
        "|\n|---|---:|"
    )
    counts = Counter(outcome.verdict for outcome in found)
    for verdict in Verdict:
        if verdict is not Verdict.INVALID:
            print(f"| {verdict.value} | {counts[verdict]} |")


def _print_misses(found: Iterable[Outcome]) -> None:
    """Options of the spellings that did not fuse, most often missed first."""
    used: Counter[tuple[str, str]] = Counter()
    missed: Counter[tuple[str, str]] = Counter()
    for outcome in found:
        used.update(outcome.choices.items())
        if outcome.verdict is not Verdict.FUSED:
            missed.update(outcome.choices.items())
    if missed:
        print("\n| choice | option | missed | of |\n|---|---|---:|---:|")
    for (axis, option), count in sorted(
        missed.items(), key=lambda entry: -entry[1] / used[entry[0]]
    )[:20]:
        print(f"| {axis} | {option} | {count} | {used[axis, option]} |")


def _print_kinds(found: Iterable[Outcome]) -> None:
    counts = Counter((outcome.kind, outcome.verdict) for outcome in found)
    columns = (Verdict.DECLINED, Verdict.FUSED, Verdict.WRONG, Verdict.MISREAD, Verdict.CRASHED)
    print(
        "\n| change | "
        + " | ".join(verdict.value for verdict in columns)
        + " |\n|---"
        + "|---:" * len(columns)
        + "|"
    )
    for kind in sorted({kind for kind, _ in counts}):
        print(f"| {kind} | " + " | ".join(str(counts[kind, verdict]) for verdict in columns) + " |")


if __name__ == "__main__":
    sys.exit(main())
