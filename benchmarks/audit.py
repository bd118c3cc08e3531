"""How many seeded mistakes of hand-written calls are detected, and how many are named exactly.

    python benchmarks/audit.py --cases 60 --seed 1

One mistake for each kind, then combinations of two and three. A case is named exactly where the
audit gives those codes and arguments, and no other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.by_hand.faults import FAULTS, Hand, args, combinations, model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    single = [(name,) for name in FAULTS]
    cases = [*single, *combinations(max(options.cases - len(single), 0), options.seed)]
    detected = named = 0
    for names in cases:
        torch.manual_seed(0)
        module, inputs = model(), args()
        found = mf.audit(Hand(module, *(FAULTS[name][2] for name in names)), module, *inputs)
        said = {(item.code, item.argument) for item in found.findings if item.error is not None}
        exact = said == {FAULTS[name][:2] for name in names}
        detected, named = detected + (found.equal is False), named + exact
        if not exact:
            print(f"{' + '.join(names)}: {sorted(said) or 'no repair'}", flush=True)
    print(
        f"{len(cases)} cases: {detected} detected, {named} named exactly ({named / len(cases):.0%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
