"""The pass against families of attacks: graphs that look like the prologue and mean something else.

    python benchmarks/families.py --members 1500 --seed 0 --jobs 2

Every member is compiled at the default configuration and held against the model on inputs that
expose the attack. Exit status 1 where one is fused wrongly, makes the pass or the compiled model
raise, or where a control, which means the plain prologue, does not fuse. ``--family NAME`` (a
prefix, repeatable) and ``--json`` narrow and record it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.soundness import campaign
from tests.soundness.families import FAMILIES
from tests.soundness.member import Outcome, Verdict

GOOD_CONTROL = (Verdict.FUSED, Verdict.STAGED)
BAD = (Verdict.WRONG, Verdict.RAISED, Verdict.INVALID)
COLUMNS = tuple(Verdict)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="NAME",
        help="a family, or a prefix of some",
    )
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument(
        "--without", default="", choices=campaign.OPINIONS, help="let the other one decide alone"
    )
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    given = parser.parse_args()
    names = tuple(
        name for name in FAMILIES if not given.family or any(map(name.startswith, given.family))
    )
    if not names:
        parser.error(f"no such family; there are {', '.join(FAMILIES)}")
    started = perf_counter()
    chosen = campaign.members(given.members, given.seed, names)
    chosen += [] if given.no_controls else campaign.controls(names)
    outcomes = [_shown(outcome) for outcome in campaign.judged(chosen, given.jobs, given.without)]
    _print_table(outcomes)
    print(f"\n{len(outcomes)} graphs in {perf_counter() - started:.0f} s")
    if given.json:
        given.json.write_text(json.dumps([_plain(outcome) for outcome in outcomes], indent=1))
    return 1 if any(map(_is_bad, outcomes)) else 0


def _is_bad(outcome: Outcome) -> bool:
    if outcome.member.control and outcome.verdict not in GOOD_CONTROL:
        return True
    return outcome.verdict in BAD


def _shown(outcome: Outcome) -> Outcome:
    if _is_bad(outcome):
        print(
            f"{outcome.verdict.value}: {outcome.member}: {outcome.detail[:240]}",
            file=sys.stderr,
            flush=True,
        )
    return outcome


def _print_table(outcomes: list[Outcome]) -> None:
    heads = ["family", "members", *(verdict.value for verdict in COLUMNS), "controls fused"]
    print("\n| " + " | ".join(heads) + " |\n|---" + "|---:" * (len(heads) - 1) + "|")
    for name, found in [*campaign.grouped(outcomes), ("total", outcomes)]:
        attacks = [outcome for outcome in found if not outcome.member.control]
        controls = [outcome for outcome in found if outcome.member.control]
        counts = Counter(outcome.verdict for outcome in attacks)
        fused = sum(outcome.verdict in GOOD_CONTROL for outcome in controls)
        cells = [
            name,
            len(attacks),
            *(counts[verdict] for verdict in COLUMNS),
            f"{fused}/{len(controls)}",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


def _plain(outcome: Outcome) -> dict[str, object]:
    return {
        **vars(outcome.member),
        "verdict": outcome.verdict.value,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
