"""Finds where in the model a node comes from, and the name by which the user knows it."""

from __future__ import annotations

import ast
import linecache
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

import torch
from torch.fx import Graph, Node

from mla_fusion.fx.kinds import op_name

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in '
    r'(?P<function>\S+)(?:\n\s*(?!File ")(?P<code>.*))?'
)


_NEARLY_ALL = 0.8
_TORCH = str(Path(torch.__file__).parent)


def layer(nodes: Iterable[Node]) -> str:
    """Returns the module path that nearly all nodes share, such as ``model.layers.3.self_attn``.

    Returns "" if there is none. A step that two layers share belongs to the first of them, so a few
    nodes may have another path.
    """
    paths = [path.split(".") for node in nodes if (path := _path(node)) is not None]
    shared: list[str] = []
    while paths:
        depth = len(shared)
        names = Counter(path[depth] if depth < len(path) else "" for path in paths)
        name, count = names.most_common(1)[0]
        if not name or count < _NEARLY_ALL * len(paths):
            break
        shared.append(name)
        paths = [path for path in paths if path[depth : depth + 1] == [name]]
    return ".".join(shared)


def _path(node: Node) -> str | None:
    """Returns the path of the module that made the node.

    Returns "" for the module that was compiled, None if the node has no such metadata.
    """
    stack = node.meta.get("nn_module_stack")
    if stack:
        return _plain(str(list(stack.values())[-1][0]))
    return "" if node.op == "call_function" and "stack_trace" in node.meta else None


def root(nodes: Iterable[Node]) -> str:
    """Returns the class of the module that was compiled, or the name of the function.

    Returns "" if no node has that.
    """
    root_nodes = (node for node in nodes if node.op == "call_function" and not _path(node))
    stacks = [list(_FRAME.finditer(node.meta.get("stack_trace") or "")) for node in root_nodes]
    for frame in chain(*stacks):
        if name := _class_at(frame["file"], int(frame["line"])):
            return name
    functions = (stack[0]["function"] for stack in stacks if stack)
    return next(filter(str.isidentifier, functions), "")


def _class_at(file: str, line: int) -> str:
    """Returns the name of the innermost class around a line of a file, or ""."""
    around = ((first, name) for first, last, name in _classes(file) if first <= line <= last)
    return max(around, default=(0, ""))[1]


@cache
def _classes(file: str) -> tuple[tuple[int, int, str], ...]:
    """Returns first line, last line and name of each class in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in classes)


NAME = "mla_fusion_name"  # in a placeholder's meta: the user's name of the input
ARGUMENT = "mla_fusion_argument"  # in a placeholder's meta: True if each call has its own
NOTES = "mla_fusion_notes"  # in a graph module's meta: notes for a report in which not all fuses


def label(node: Node, root_name: Callable[[], str] = str) -> str:
    """Returns ``q_b.weight`` for an input, ``q_b's addmm`` for a step of a module.

    It is the node's name if there is no other.

    root_name  returns the name of the module that was compiled, which has no path
    """
    if node.op == "placeholder":
        return str(node.meta.get(NAME, node.name))
    if node.op != "call_function":
        return node.name
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return label(node.args[0], root_name)
    path, step = _path(node) or root_name(), op_name(node).rpartition(":")[2].strip("_")
    step = step or node.name  # a condition, or a loop
    return f"{path}'s {'cast' if step == 'to_copy' else step}" if path else node.name


class Labels:
    """The user's names of nodes of a graph. A call replaces the names of nodes in a text."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def whole(self) -> str:
        """The class of the module that was compiled."""
        return root(self._graph.nodes)

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self._graph.nodes}

    def of(self, node: Node) -> str:
        """Returns the user's name of a node."""
        return label(node, lambda: self.whole)

    def __call__(self, text: str) -> str:
        """Returns a text with the user's names in place of the names of nodes."""

        def user_name(word: re.Match[str]) -> str:
            """Returns the user's name of a node, or the word itself."""
            node = self._node(word)
            return word[0] if node is None else self.of(node)

        return _WORD.sub(user_name, text.replace(_GETITEM, ""))

    def nodes(self, text: str) -> tuple[Node, ...]:
        """Returns the steps that a text names in its last clause that names any."""
        for clause in reversed(text.split("; ")):
            nodes = filter(None, map(self._node, _WORD.finditer(clause)))
            if steps := dict.fromkeys(node for node in nodes if node.op == "call_function"):
                return tuple(steps)
        return ()

    def _node(self, word: re.Match[str]) -> Node | None:
        """Returns the node that a word of a text names.

        An English word ("no wrapper can view it") is a name only at the beginning, and before a
        target.
        """
        is_first, is_before_target = not word.start(), word.string.startswith(" (", word.end())
        is_name = word[0] not in _ENGLISH or is_first or is_before_target
        return self._nodes.get(word[0]) if is_name else None


_GETITEM = f" ({operator.getitem})"  # the target of a step that takes one of several results
_ENGLISH = frozenset(
    "view index split copy where sum add norm select repeat slice clone scatter square t to".split()
)
_WORD = re.compile(r"(?<![\w.:])\w+(?![\w:]|\.\w)")


def plain(path: str) -> str:
    """Returns a source of dynamo's as users write it.

    ``L['self']._modules['q_a']._parameters['bias']`` is ``q_a.bias``.
    """
    # what is not reached through the module that was compiled keeps its first name
    return _plain(re.sub(rf"^L\['(\w+)'\](?!{_TABLES})", r"\1", path))


_TABLES = r"\._(?:modules|parameters|buffers)"


@cache
def _plain(path: str) -> str:
    """Returns a module path as users write it. A module may have another forward of its own."""
    path = path.replace(".forward.__self__", "")
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(rf"(?:{_TABLES})?\['(\w+)'\]", r".\1", path)
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")


def source(node: Node) -> str:
    """Returns ``file:line in function: code`` of the innermost frame that made the node, or ""."""
    return _innermost(node.meta.get("stack_trace") or "")


@cache
def _innermost(trace: str) -> str:
    """Returns the last frame of a stack trace outside torch, or else the last."""
    frames = frames_outside_torch(trace) or list(_FRAME.finditer(trace))
    return describe_frame(frames[-1]) if frames else ""


def frames_outside_torch(trace: str) -> list[re.Match[str]]:
    """Returns the frames of a stack trace that are of no file of torch's, innermost last."""
    return [frame for frame in _FRAME.finditer(trace) if not frame["file"].startswith(_TORCH)]


def describe_frame(frame: re.Match[str]) -> str:
    """Returns a frame as ``file:line in function: code``."""
    # no code if the source was not a file
    code = f": {frame['code'].strip()}" if frame["code"] else ""
    return f"{frame['file']}:{frame['line']} in {frame['function']}{code}"
