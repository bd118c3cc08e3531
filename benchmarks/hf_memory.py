"""Memory of optimised Hugging Face decoding: bytes of cache a token, peak of one decode step.

    python benchmarks/hf_memory.py [--context 16384] [--batch 4] [--json FILE]

Each side runs one eager decode step of one layer (DeepSeek-V3, one rank of eight) in a process of
its own, by the kernel's account of its peak; weights and cache stand before the step begins.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hf_layer
import torch

V3_HEADS = 128
LATENT, EXPANDED = 512 + 64, V3_HEADS * (192 + 128)


def status(name: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name + ":")
    )
    return int(line.split()[1]) * 1024


def measure(side: str, batch: int, context: int) -> dict[str, int]:
    """In this process: bytes of the cache, and by how much one step raises the peak."""
    torch.set_num_threads(1)
    layer = hf_layer.layers()[side]
    past = hf_layer.cache(side, batch, context)
    inputs = hf_layer.decode_inputs(batch, context)
    hf_layer.rewind(past, 2)
    held = sum(pool.nbytes for entry in past.layers for pool in (entry.keys, entry.values))
    with torch.no_grad():
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        hf_layer.rewind(past, context)
        hf_layer.step(layer, *inputs, past)
    return {"cache": held, "peak": status("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=hf_layer.SIDES, help="measure one side in this process")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.batch, options.context)))
        return
    found: dict[str, Any] = {side: _in_a_process(side, options) for side in hf_layer.SIDES}
    tokens = options.batch * options.context
    print(
        f"batch {options.batch}, context {options.context:,}, one layer of N {hf_layer.HEADS}, "
        "bfloat16\n"
    )
    print("| side | cache, elements a token | step's peak above weights and cache, MiB |")
    print("|---|---:|---:|")
    for side, row in found.items():
        print(f"| {side} | {row['cache'] / tokens / 2:.0f} | {row['peak'] / 2**20:.0f} |")
    print(
        f"\nkeys and values of {V3_HEADS} heads: {EXPANDED:,} elements a token, "
        f"{EXPANDED / LATENT:.1f} x {LATENT}"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found | {"tokens": tokens}, indent=2))


def _in_a_process(side: str, options: argparse.Namespace) -> dict[str, int]:
    command = [sys.executable, __file__, "--side", side]
    command += ["--batch", str(options.batch), "--context", str(options.context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
