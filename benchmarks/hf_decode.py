"""CPU decode and prefill of one Hugging Face layer, as it is and optimised: times, ratios, distance
from the bounds.

    python benchmarks/hf_decode.py [--quick] [--eager] [--threads N] [--json FILE]

Both sides share their weights, are compiled alike (Inductor where there is a C++ compiler,
otherwise not at all) and are timed in turns. Bounds are of the machine in the same run: its own
product of two bfloat16 matrices, its own copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Threads that spin at the end of a short kernel keep a busy machine's other threads, and the
# kernel's own, from it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hf_layer
import torch
from hf_layer import HEADS, SIDES, best, interleaved, milliseconds
from torch import nn

R, DR, D, DV = 512, 64, 128, 128
BYTES = 2
ROUNDS = 20


@dataclass(frozen=True)
class Machine:
    flops: float
    bytes: float
    threads: int
    compiled: bool


@dataclass(frozen=True)
class Row:
    """Milliseconds of one size, and the bytes and operations that the side's own algorithm cannot
    avoid.
    """

    context: int
    side: str
    median: float
    fastest: float
    bytes: float
    flops: float
    error: float

    def bounds(self, machine: Machine) -> tuple[float, float]:
        """The least milliseconds by memory and by arithmetic."""
        return self.bytes / machine.bytes * 1e3, self.flops / machine.flops * 1e3

    def share(self, machine: Machine) -> float:
        return max(self.bounds(machine)) / self.fastest


def measure_machine(compiled: bool) -> Machine:
    matrix = torch.randn(2048, 2048).bfloat16()
    source = torch.randn(2**26)
    target = torch.empty_like(source)
    flops = 2 * 2048**3 / best(lambda: matrix @ matrix, ROUNDS)
    speed = 2 * source.nbytes / best(lambda: target.copy_(source), ROUNDS)
    return Machine(flops, speed, torch.get_num_threads(), compiled)


def faster(first: Machine, second: Machine) -> Machine:
    """Of two measurements, each figure's better: neighbours only take away."""
    return replace(
        first, flops=max(first.flops, second.flops), bytes=max(first.bytes, second.bytes)
    )


def work(side: str, layer: nn.Module, batch: int, context: int) -> tuple[float, float]:
    """(bytes, products * 2) that a decode step of the side's algorithm cannot avoid.

    Weights and latents are read once. The original writes keys and values of all heads, and reads
    them.
    """
    weights = sum(parameter.numel() for parameter in layer.parameters())
    latents = batch * context * (R + DR)
    flops = 2.0 * weights * batch
    if side == "original":
        expanded = batch * context * HEADS * (D + DR + DV)
        flops += 2 * batch * context * HEADS * (R * (D + DV) + (D + DR) + DV)
        return BYTES * (weights + latents + 2 * expanded), flops
    flops += 2 * batch * context * HEADS * (2 * R + DR)
    return BYTES * (weights + latents), flops


def decode(machine: Machine, batch: int, context: int, rounds: int) -> list[Row]:
    made = hf_layer.layers()
    inputs = hf_layer.decode_inputs(batch, context)
    outputs, runs = {}, {}
    for side in SIDES:
        past = hf_layer.cache(side, batch, context)
        call = torch.compile(hf_layer.step, dynamic=False) if machine.compiled else hf_layer.step

        def run(call: Any = call, layer: nn.Module = made[side], past: Any = past) -> torch.Tensor:
            hf_layer.rewind(past, context)
            return call(layer, *inputs, past)

        outputs[side] = run()
        run()
        runs[side] = run
    seconds = interleaved(runs, rounds)
    exact = reference(made["original"], batch, context)
    rows = []
    for side in SIDES:
        size, flops = work(side, made[side], batch, context)
        error = float((outputs[side].float() - exact).norm() / exact.norm())
        times = milliseconds(seconds[side]), min(seconds[side]) * 1e3
        rows.append(Row(context, side, *times, size, flops, error))
    torch._dynamo.reset()
    return rows


def reference(layer: nn.Module, batch: int, context: int) -> torch.Tensor:
    """The original in float32, from the same rounded weights, latents and tables."""
    import copy

    exact = copy.deepcopy(layer).float()
    past = hf_layer.cache("original", batch, context)
    past.layers[0].keys, past.layers[0].values = (
        past.layers[0].keys.float(),
        past.layers[0].values.float(),
    )
    hidden, cos, sin, mask = hf_layer.decode_inputs(batch, context)
    hf_layer.rewind(past, context)
    return hf_layer.step(exact, hidden.float(), cos.float(), sin.float(), mask, past)


def prefill(machine: Machine, tokens: int, rounds: int) -> dict[str, float]:
    """One sequence into an empty growing cache; causal, no padding."""
    from transformers import DynamicCache

    made = hf_layer.layers()
    hidden = hf_layer.rows(1, tokens, hf_layer.HIDDEN, 4)
    rotary = hf_layer.hf.modeling().DeepseekV3RotaryEmbedding(hf_layer.config())
    tables = rotary(hidden, torch.arange(tokens)[None])
    caches = {"original": lambda: DynamicCache(config=hf_layer.config()), "optimized": _growing}

    def runner(side: str) -> Any:
        call = torch.compile(hf_layer.step, dynamic=False) if machine.compiled else hf_layer.step
        return lambda: call(made[side], hidden, *tables, None, caches[side]())

    runs = {side: runner(side) for side in SIDES}
    for run in runs.values():
        run()
    found = {side: milliseconds(seconds) for side, seconds in interleaved(runs, rounds).items()}
    torch._dynamo.reset()
    return found


def _growing() -> Any:
    return hf_layer.hf.MlaPagedCache(hf_layer.config())


def show(machine: Machine, rows: list[Row], prefills: dict[int, dict[str, float]]) -> str:
    how = "compiled by Inductor" if machine.compiled else "eager"
    lines = [
        f"{machine.flops / 1e9:.0f} GFLOP/s bfloat16, copy {machine.bytes / 1e9:.1f} GB/s,"
        f" {machine.threads} threads, {how}",
        "",
        "| context | side | median ms | fastest ms | memory bound | compute bound | share reached "
        "| error | ratio |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        for row in (first, second):
            ratio = f"{first.median / second.median:.1f}" if row is second else ""
            memory, compute = row.bounds(machine)
            lines.append(
                f"| {row.context:,} | {row.side} | {row.median:.1f} | {row.fastest:.1f} | "
                f"{memory:.1f} |"
                f" {compute:.1f} | {row.share(machine):.0%} | {row.error:.2e} | {ratio} |"
            )
    lines += ["", "| prefill | original ms | optimized ms | ratio |", "|---:|---:|---:|---:|"]
    for tokens, times in prefills.items():
        before, after = times["original"], times["optimized"]
        lines.append(f"| {tokens:,} | {before:.0f} | {after:.0f} | {before / after:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--eager", action="store_true", help="compile neither side")
    parser.add_argument("--quick", action="store_true", help="one context, one prompt, few rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.prefill, options.rounds = [1024], [256], 5
    torch.set_num_threads(options.threads)
    compiled = not options.eager and any(map(shutil.which, ("g++", "clang++", "c++")))
    with torch.no_grad():
        machine = measure_machine(compiled)
        rows = [
            row
            for context in options.contexts
            for row in decode(machine, options.batch, context, options.rounds)
        ]
        prefills = {tokens: prefill(machine, tokens, options.rounds) for tokens in options.prefill}
        machine = faster(machine, measure_machine(compiled))
    print(show(machine, rows, prefills))
    if options.json:
        data = {
            "machine": asdict(machine),
            "decode": [asdict(row) | {"share": row.share(machine)} for row in rows],
            "prefill": prefills,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=2))


if __name__ == "__main__":
    main()
