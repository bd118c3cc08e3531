"""Where in the user's model a node comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')


def layer(nodes: Iterable[Node]) -> str:
    """The module path that the nodes share, such as ``model.layers.3.self_attn``; "" where there is none."""
    paths = []
    for node in nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = str(list(stack.values())[-1][0])
            paths.append(_plain(path).split("."))
    if not paths:
        return ""
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return ".".join(names[0] for names in shared)


def _plain(path: str) -> str:
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\['(\w+)'\]", r".\1", re.sub(r"^L\['\w+'\]", "", path))
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return path.strip(".")


def source(node: Node) -> str:
    """``file:line in function: code`` of the innermost frame that made the node; "" where unknown."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['function']}: {last['code'].strip()}"
