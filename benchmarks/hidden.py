"""Functions that no probe tells from the identity, at random places of a prologue: refused by exact
arithmetic alone.

    python benchmarks/hidden.py --members 2000 --seed 0

Verification is off. Exit status 1: one is fused. A member with the identity in its place is a
control, and must fuse.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

from tests.catalogue.base import paged_args
from tests.exact.hidden import BEFORE, At, Function, Member, member
from tests.harness import graph_of

_CONTROL = 20  # one for so many members


def fuses(one: Member, function: Function) -> bool:
    torch.manual_seed(0)
    gm = graph_of(At(one.place, function), *paged_args(), dynamic=one.dynamic)
    return bool(mf.explain(gm, mf.Config(verify="off"), boundary=True).fused)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    drawn = [
        member(arguments.seed * 1_000_000 + place, BEFORE) for place in range(arguments.members)
    ]
    wrong = controls = commuting = 0
    for place, one in enumerate(drawn):
        if one.commutes:
            commuting += 1
        elif fuses(one, one.function):
            wrong += 1
            print(f"fused: {one.name} of {one.place}", flush=True)
        if place % _CONTROL == 0:
            controls += fuses(one, lambda value: value)
    wanted = -(-len(drawn) // _CONTROL)
    print(
        f"{len(drawn) - commuting} members, {wrong} fused; {commuting} that commute with W_uk left "
        f"out; {controls} of {wanted} controls fuse"
    )
    return 1 if wrong or controls < wanted else 0


if __name__ == "__main__":
    sys.exit(main())
