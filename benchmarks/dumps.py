"""inspect and explain on dumps of a 61-layer model: seconds and peak memory, each in a process of
its own.

    python benchmarks/dumps.py [--layers 61] [--json FILE]

The dumps come from the real torchair: an absorbed decoder with small dims, lowered unfused and
fused once. Reading needs neither torchair nor a device, and is what is timed; GE graphs are not
explained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
from model import Decoder, Sizes, model_arguments

from mla_fusion import converters
from mla_fusion.compile import torchair_bridge

OFF = mf.Config(enable=False)
INSPECT = "mf.inspect.summarise(mf.inspect.read(sys.argv[1]))"
EXPLAIN = "mf.explain(sys.argv[1])"
MEASURE = """
import sys, time
import mla_fusion as mf, torch
torch.set_num_threads(1)
started = time.perf_counter()
found = {call}
seconds = time.perf_counter() - started
# getrusage has the parent's
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 2**10
explained = hasattr(found, "fused")
fused = len(found.fused) if explained else 0
print(seconds, peak, fused, 0 if explained else sum(found.operators.values()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(path) for path in make(Path(folder), options.layers)]
    print("| dump | MiB | operators | inspect | explain | peak MiB | would fuse |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(map(text, row.values()))} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


def text(cell: float | int | str) -> str:
    return (
        f"{cell:.2f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell
    )


def make(folder: Path, layers: int) -> list[Path]:
    """Every form of both graphs, written by torchair's own dump."""
    sizes = Sizes()
    model, arguments = Decoder(sizes, layers).requires_grad_(False), model_arguments(sizes, layers)
    runners: list[Any] = []
    compile_graph = torchair_bridge.compile_graph

    def keeping(*given: Any) -> Any:
        runners.append(compile_graph(*given))
        return runners[-1]

    torchair_bridge.compile_graph = keeping
    mf.offline.activate()
    with converters.unfused_registered():
        unfused = mf.lower(model, *arguments, config=OFF)
    fused = mf.lower(model, *arguments)
    paths = []
    for name, compiled in zip(("unfused", "fused"), runners, strict=True):
        for kind in ("pbtxt", "txt", "py"):
            paths.append(folder / f"{name}.{kind}")
            compiled.runner.dump(str(paths[-1]))
    for name, gm in (("unfused_fx", unfused.fx_before), ("fused_fx", fused.fx_after)):
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(gm.print_readable(False))
    return paths


def measure(path: Path) -> dict[str, Any]:
    inspected, one, _, operators = run(INSPECT, path)
    is_fx = path.stem.endswith("_fx")
    explained, other, fused, _ = run(EXPLAIN, path) if is_fx else (0.0, 0.0, 0, 0)
    return {
        "dump": path.name,
        "MiB": path.stat().st_size / 2**20,
        "operators": int(operators),
        "inspect": inspected,
        "explain": explained,
        "peak": round(max(one, other)),
        "fused": int(fused),
    }


def run(call: str, path: Path) -> list[float]:
    code = MEASURE.format(call=call)
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    return [float(word) for word in found.stdout.split()[-4:]]


if __name__ == "__main__":
    main()
