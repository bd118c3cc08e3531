"""How many seeded mistakes of hand-written calls are detected, and how many are named exactly.

    python benchmarks/audit.py

One mistake for each row of the table. A case is named exactly where the audit gives that code and
argument, and no other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.by_hand.faults import FAULTS, Hand, args, model


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    detected = named = 0
    for name, (code, argument, fault) in FAULTS.items():
        torch.manual_seed(0)
        module, inputs = model(), args()
        found = mf.audit(Hand(module, fault), module, *inputs)
        said = {(item.code, item.argument) for item in found.findings if item.error is not None}
        exact = said == {(code, argument)}
        detected, named = detected + (found.equal is False), named + exact
        if not exact:
            print(f"{name}: {sorted(said) or 'no slip'}", flush=True)
    print(f"{len(FAULTS)} cases: {detected} detected, {named} named exactly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
