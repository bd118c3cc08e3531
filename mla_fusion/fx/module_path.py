"""Where in the user's model a node comes from, and by which name the user knows it."""

from __future__ import annotations

import ast
import linecache
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, cached_property

from torch.fx import Graph, Node

from mla_fusion.fx.kinds import op_name

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in '
    r'(?P<function>\S+)(?:\n\s*(?!File ")(?P<code>.*))?'
)


_NEARLY_ALL = 0.8


def layer(nodes: Iterable[Node]) -> str:
    """The module path that the nodes share, such as ``model.layers.3.self_attn``; "" where there is
    none.
    """
    found = [path for node in nodes if (path := _path(node)) is not None]
    if len(set(found)) < 2:
        return "".join(found[:1])
    paths = [path.split(".") for path in found]
    shared: list[str] = []
    # what nearly all share: a step that two layers have in common is a node of the first alone
    while paths:
        depth = len(shared)
        name, count = Counter(
            path[depth] if depth < len(path) else "" for path in paths
        ).most_common(1)[0]
        if not name or count < _NEARLY_ALL * len(paths):
            break
        shared.append(name)
        paths = [path for path in paths if path[depth : depth + 1] == [name]]
    return ".".join(shared)


def _path(node: Node) -> str | None:
    """Of the module that made the node; "" for the one that was compiled itself, None where nothing
    tells.
    """
    stack = node.meta.get("nn_module_stack")
    if stack:
        return _plain(str(list(stack.values())[-1][0]))
    return "" if node.op == "call_function" and "stack_trace" in node.meta else None


def root(nodes: Iterable[Node]) -> str:
    """The class of the module that was compiled, ``Attention``, or the function's name; "" where no
    node tells.
    """
    own = (node for node in nodes if node.op == "call_function" and not _path(node))
    stacks = [list(_FRAME.finditer(node.meta.get("stack_trace") or "")) for node in own]
    for frame in (frame for stack in stacks for frame in stack):
        if name := _class_at(frame["file"], int(frame["line"])):
            return name
    return next(
        (stack[0]["function"] for stack in stacks if stack and stack[0]["function"].isidentifier()),
        "",
    )


def _class_at(file: str, line: int) -> str:
    """The innermost class around a line of a file."""
    inside = [(first, name) for first, last, name in _classes(file) if first <= line <= last]
    return max(inside)[1] if inside else ""


@cache
def _classes(file: str) -> tuple[tuple[int, int, str], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in found)


NAME = "mla_fusion_name"  # in a placeholder's meta: what the user calls it
NOTES = "mla_fusion_notes"  # in a graph module's: what to say of a graph in which not all fuses
ARGUMENT = "mla_fusion_argument"  # and whether each call brings its own


def label(node: Node, whole: Callable[[], str] = str) -> str:
    """``q_b.weight`` for an input, ``q_b's addmm`` for what a module computes; the node's name
    where there is no other.

    ``whole``: gives what stands for the path of the module that was compiled, its class.
    """
    if node.op == "placeholder":
        return str(node.meta.get(NAME, node.name))
    if node.op != "call_function":
        return node.name
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return label(node.args[0], whole)
    path, step = _path(node) or whole(), op_name(node).rpartition(":")[2].strip("_")
    return f"{path}'s {'cast' if step == 'to_copy' else step}" if path else node.name


class Labels:
    """The names that a user knows, of nodes of a graph and in a text that names such."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    @cached_property
    def whole(self) -> str:
        """The class of the module that was compiled."""
        return root(self._graph.nodes)

    @cached_property
    def _nodes(self) -> dict[str, Node]:
        return {node.name: node for node in self._graph.nodes}

    def of(self, node: Node) -> str:
        return label(node, lambda: self.whole)

    def __call__(self, text: str) -> str:
        def instead(found: re.Match[str]) -> str:
            node = self._node(found)
            return found[0] if node is None else self.of(node)

        return _WORD.sub(instead, text.replace(_PART, ""))

    def nodes(self, text: str) -> tuple[Node, ...]:
        """The steps that the last clause of a text names, if it names any; else the one before."""
        for clause in reversed(text.split("; ")):
            found = filter(None, map(self._node, _WORD.finditer(clause)))
            if steps := tuple(node for node in found if node.op == "call_function"):
                return tuple(dict.fromkeys(steps))
        return ()

    def _node(self, found: re.Match[str]) -> Node | None:
        """Some words are English too ("no wrapper can view it"): they count at the beginning, and
        before a target.
        """
        word = found[0]
        surely = (
            word not in _ENGLISH or not found.start() or found.string.startswith(" (", found.end())
        )
        return self._nodes.get(word) if surely else None


_PART = f" ({operator.getitem})"  # what Python calls the step that takes one of several results
_ENGLISH = frozenset(
    "view index split copy where sum add norm select repeat slice clone scatter square t to".split()
)
_WORD = re.compile(r"(?<![\w.:])\w+(?![\w:]|\.\w)")


def plain(path: str) -> str:
    """A source of dynamo's as users write it: ``L['self']._modules['q_a']._parameters['bias']`` is
    ``q_a.bias``.
    """
    # the module that was compiled
    whole = re.sub(r"^L\['\w+'\](?=\._(?:modules|parameters|buffers))", "", path)
    whole = re.sub(r"\._(?:parameters|buffers)\['(\w+)'\]", r".\1", whole)
    return _plain(re.sub(r"^L\['(\w+)'\]", r"\1", whole))


@cache
def _plain(path: str) -> str:
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"\['(\w+)'\]", r".\1", re.sub(r"^L\['\w+'\]", "", path))
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return path.strip(".")


def source(node: Node) -> str:
    """``file:line in function: code`` of the innermost frame that made the node; "" where
    unknown.
    """
    return _innermost(node.meta.get("stack_trace") or "")


@cache
def _innermost(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    last = frames[-1]
    # none where the source was not a file
    code = f": {last['code'].strip()}" if last["code"] else ""
    return f"{last['file']}:{last['line']} in {last['function']}{code}"
