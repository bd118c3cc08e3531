"""What must not change when the code does: of every entry of the catalogue, report and graph.

    python -m tests.recorder write FILE [--only WORDS]
    python -m tests.recorder compare BEFORE AFTER

``write`` captures each model (with symbolic sizes too, where the entry is tagged so), fuses it, and
records the report without its figures, times and pictures, what it says with a wrapper around the
graph, and the fused graph: each node's operator, literals and inputs by their places, no names.
``compare`` names the entries that differ and the first difference of each, and exits with 1 if
there are any. Record before a change and after it, on one machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tests.catalogue import ENTRIES, Entry
from tests.harness import graph_of

# where this copy lies, and its packages
PLACES = re.compile(rf"\S*/site-packages|{re.escape(str(Path(__file__).resolve().parents[1]))}")
LEFT_OUT = frozenset("config timings seconds machine steps figures".split())


def main() -> int:
    options = _options()
    if options.command == "compare":
        before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
        lines = list(differences(before, after))
        print("\n".join(lines) or f"{len(before)} records are equal")
        return 1 if lines else 0
    entries = [entry for entry in ENTRIES.values() if options.only in entry.name]
    found = {name: record for entry in entries for name, record in records(entry)}
    options.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} records of {len(entries)} entries")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    write.add_argument("--only", default="", help="a part of the entries' names")
    compare = commands.add_parser("compare")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    return parser.parse_args()


def records(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Of one entry, by name: one for static sizes, and one for symbolic ones if it has such."""
    for dynamic in (False, True) if "symbolic" in entry.tags else (False,):
        torch.manual_seed(0)
        gm = graph_of(entry.model(), *entry.args(), dynamic=dynamic)
        config = entry.config(verify="off")
        told = _told(mf.explain(gm, config))
        report = mf.fuse(gm, config)
        name = f"{entry.name}, symbolic" if dynamic else entry.name
        yield name, {"explained": told, "fused": _told(report), "graph": _graph(gm)}


def _told(report: mf.Report) -> Any:
    return _without(json.loads(report.to_json()))


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(item) for key, item in value.items() if key not in LEFT_OUT}
    if isinstance(value, list):
        return [_without(item) for item in value]
    return PLACES.sub("", value) if isinstance(value, str) else value


def _graph(gm: GraphModule) -> list[str]:
    """A line for each node, with the places of its inputs."""
    place = {node: number for number, node in enumerate(gm.graph.nodes)}

    def spelled(node: Node) -> str:
        given = map_arg((node.args, node.kwargs), lambda read: f"%{place[read]}")
        return f"{node.op} {node.target if node.op == 'call_function' else ''} {given}"

    return list(map(spelled, gm.graph.nodes))


def differences(before: Any, after: Any) -> Iterator[str]:
    """The first difference of each record."""
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            yield f"{name}: only {'before' if name in before else 'after'}"
        elif (found := next(_apart(before[name], after[name]), None)) is not None:
            yield f"{name}: {found}"


def _apart(before: Any, after: Any, where: str = "") -> Iterator[str]:
    if type(before) is type(after) is dict and before.keys() == after.keys():
        for key in before:
            yield from _apart(before[key], after[key], f"{where}.{key}")
    elif type(before) is type(after) is list and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _apart(*pair, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"


if __name__ == "__main__":
    sys.exit(main())
