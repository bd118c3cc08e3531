"""Makes tests/dumps/fixtures: small graphs, fused and unfused, in every form that the real torchair
dumps.

    python tests/dumps/make_fixtures.py

The model is that of examples/fuse_your_model.py; the dumps are written by torchair's own code for
its option ``config.debug.graph_dump`` and by ``print_readable``, which its FX dumps are. Paths are
shortened, nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch import nn

from mla_fusion import converters
from mla_fusion.compile import torchair_bridge

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "fixtures"
OFF = mf.Config(enable=False)


class Dynamic(nn.Module):
    """The example's layer with any number of tokens: tables by position, computed slots."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, positions: Any, cos: Any, sin: Any, *caches: Any) -> Any:
        return self.layer(x, cos[positions], sin[positions], positions + 128, *caches)


def main() -> None:
    FIXTURES.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT / "examples"))
    example = __import__("fuse_your_model").example
    layer, arguments = example()
    x, cos, sin, slots, *caches = arguments
    runners = capture_runners()

    fused = mf.lower(layer, *arguments)
    dump(runners[-1], "fused", ("pbtxt", "txt", "py"))
    with converters.unfused_registered():
        unfused = mf.lower(layer, *arguments, config=OFF)
    dump(runners[-1], "unfused", ("pbtxt", "py"))
    original(layer, arguments)

    write("fx_before.txt", readable(unfused.fx_before))
    write("fx_after.txt", readable(fused.fx_after))
    write(
        "fx_strides.txt",
        unfused.fx_before.print_readable(False, include_stride=True, include_device=True),
    )

    positions = slots % 4
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    tables = (table.repeat(128, 1) for table in (cos, sin))
    lowered = mf.lower(Dynamic(layer), x, positions, *tables, *caches)
    dump(runners[-1], "dynamic", ("txt",))
    write("fx_dynamic.txt", readable(lowered.fx_before))


def capture_runners() -> list[Any]:
    """What torchair compiled, newest last; its ``dump`` is what the option calls."""
    kept: list[Any] = []
    compile_graph: Callable[..., Any] = torchair_bridge.compile_graph

    def keeping(*arguments: Any) -> Any:
        compiled = compile_graph(*arguments)
        kept.append(compiled.runner)
        return compiled

    torchair_bridge.compile_graph = keeping
    return kept


def dump(runner: Any, name: str, kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        path = FIXTURES / f"{name}.{kind}"
        runner.dump(str(path))
        text = path.read_text()
        path.unlink()
        # Generated Python is told by its content; under its own name linters would take it for
        # ours.
        write(f"{name}_py.txt" if kind == "py" else path.name, text)


def original(layer: nn.Module, arguments: Any) -> None:
    """The fused graph before GE's passes, by the option itself: it still copies the caches."""
    compiler_config = torchair_bridge.compiler_config
    folder = FIXTURES / "_option"
    folder.mkdir()

    def dumping(mode: str = "ge") -> Any:
        config = compiler_config(mode)
        config.debug.graph_dump.type, config.debug.graph_dump.path = "pbtxt", str(folder)
        return config

    torchair_bridge.compiler_config = dumping
    try:
        mf.lower(layer, *arguments)
    finally:
        torchair_bridge.compiler_config = compiler_config
    (written,) = folder.glob("dynamo_original_graph_*.pbtxt")
    write("fused_original.pbtxt", written.read_text())
    written.unlink()
    folder.rmdir()


def readable(gm: Any) -> str:
    return str(gm.print_readable(False))


def write(name: str, text: str) -> None:
    (FIXTURES / name).write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")


if __name__ == "__main__":
    main()
