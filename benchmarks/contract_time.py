"""Microseconds of one `mf.meta.check`, `infer` and `explain_call`, for a call of every scenario.

python benchmarks/contract_time.py
python benchmarks/contract_time.py --rounds 1000 --json benchmarks/out/contract_time.json
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mla_fusion import meta  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

from mla_fusion.tools.selftest.samples import DEEPSEEK_V3, sample_call

OP = "npu_mla_prolog_v3_functional"
MOST = 100.0  # microseconds that a check may take
IN_ROUND = 20


def calls() -> list[tuple[str, str, dict[str, Any]]]:
    """(scenario, SoC, arguments on meta) of every pair of quantisation modes."""
    on_a3 = meta.limits(OP, "A3").quant_modes
    found = []
    for wq, kv in sorted(meta.limits(OP, "A5").quant_modes | on_a3):
        drawn = sample_call(weight_quant_mode=wq, kv_cache_quant_mode=kv, dims=DEEPSEEK_V3)
        call = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in drawn.items()
        }
        found.append((f"{wq}/{kv}", "A3" if (wq, kv) in on_a3 else "A5", call))
    return found


def microseconds(what: Callable[[], object], rounds: int) -> float:
    """The best mean of short rounds: other work on the machine only adds."""
    what()
    return min(timeit.repeat(what, number=IN_ROUND, repeat=rounds)) / IN_ROUND * 1e6


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=200, help=f"rounds of {IN_ROUND} calls, the best one counts"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    rows = {}
    print(f"{'wq/kv':6} {'eager':>8} {'graph':>8} {'infer':>8} {'explain':>8}  us")
    for scenario, soc, call in calls():
        timed = {
            "eager": partial(meta.check, OP, soc=soc, **call),
            "graph": partial(meta.check, OP, soc=soc, path="graph", **call),
            "infer": partial(meta.infer, OP, **call),
            "explain": partial(meta.explain_call, OP, soc=soc, **call),
        }
        rows[scenario] = {name: microseconds(what, options.rounds) for name, what in timed.items()}
        print(f"{scenario:6} " + " ".join(f"{figure:8.1f}" for figure in rows[scenario].values()))
    worst = max(max(row["eager"], row["graph"]) for row in rows.values())
    print(f"check: at most {worst:.1f} us, limit {MOST:.0f}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=2))
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
