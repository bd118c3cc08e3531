"""Certificates of the catalogue's fusions: all are accepted, and none of many that were changed in
one place.

    python benchmarks/certificates.py [--mutants 500]

Exit status 1: a certificate was refused, or a changed one accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

from mla_fusion.prove import check
from tests.catalogue import ENTRIES, IN_PLACE, STAGED
from tests.harness import graph_of
from tests.prove.mutants import MUTATED, mutants


def report_of(name: str) -> Any:
    entry = ENTRIES[name]
    torch.manual_seed(0)
    gm = graph_of(entry.model(), *entry.args())
    return json.loads(mf.explain(gm, entry.config(verify="off"), boundary=True).to_json())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=500)
    wanted = parser.parse_args().mutants
    accepted, wrong, mutated = 0, 0, 0
    for name, entry in ENTRIES.items():
        report = report_of(name) if {IN_PLACE, STAGED}.intersection(entry.outcome) else None
        for layer, found in check.checked(report) if report else ():
            if isinstance(found, check.Accepted):
                accepted += 1
            else:
                wrong += 1
                print(f"{name}: {check.line(layer, found)}", flush=True)
    print(f"{accepted} certificates accepted, {wrong} refused")
    started = perf_counter()
    for place, name in enumerate(MUTATED):
        report = report_of(name)
        count = wanted // len(MUTATED) + (place < wanted % len(MUTATED))
        for what, changed in mutants(report, random.Random(name), count):
            mutated += 1
            if any(isinstance(found, check.Accepted) for _, found in check.checked(changed)):
                wrong += 1
                print(f"{name}: accepted with {what}", flush=True)
    print(
        f"{mutated} changed certificates in {perf_counter() - started:.0f} s; {wrong} wrong "
        "outcomes"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
