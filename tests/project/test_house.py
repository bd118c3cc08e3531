"""The house of docs/architecture.md: a room imports only rooms above it, in no circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "mla_fusion": "mla_fusion",
    "meta": "mla_fusion.meta",
    "converters": "mla_fusion.converters",
}
ABOVE_ALL = ("_autoload", "_lazy", "_version")  # small files that any room may import
# of the command line; they use the public names, as anybody does
COMMANDS = tuple(f"tools/{name}" for name in ("cli", "demo"))
# Loading the package loads no tool; the other two are public names of tools.
PUBLIC_NAMES = ("mla_fusion", "mla_fusion.inspect", "mla_fusion.cli")
TOOLS = "mla_fusion.tools"
MOST_FOLDERS = 20


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a file imports: at its top, in functions, or for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mla_fusion"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def imports() -> dict[str, set[str]]:
    known = modules()
    return {
        name: {other for other in imported(path, known) if other != name}
        for name, path in known.items()
    }


def rooms() -> list[str]:
    """As the page lists them."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = page[page.index("## Rooms") : page.index("## Stages")]
    return [
        name.rstrip("/").removesuffix(".py")
        for cell in re.findall(r"^\| (`[^|]+) \|", listed, flags=re.MULTILINE)
        for name in re.findall(r"`([\w./]+)`", cell)
    ]


def room(module: str) -> str:
    """As the page names it; a room of the tools with their folder."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if parts[0] == "tools" else 1]) if parts else module


def test_no_import_runs_in_a_circle() -> None:
    """Nor does one by a name in a string, but for the public names, which rooms do not import."""
    known = modules()
    by_name = {
        name: set() if name in PUBLIC_NAMES else (known.keys() - {"mla_fusion"}) & {*_strings(path)}
        for name, path in known.items()
    }
    found = {name: others | by_name[name] - {name} for name, others in imports().items()}
    TopologicalSorter(found).prepare()  # CycleError names the circle


def test_a_room_imports_only_rooms_above_it() -> None:
    order = {name: place for place, name in enumerate(rooms())}
    others = ("mla_fusion", "offline", "inspect", "cli")  # public names, and files that hold some
    order |= dict.fromkeys(ABOVE_ALL, -1) | {name: len(order) for name in (*others, *COMMANDS)}
    below = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if room(name) not in (*others, *COMMANDS) and order[room(other)] > order[room(name)]
    ]
    assert not below


def test_nothing_but_the_public_names_imports_the_tools() -> None:
    """Neither at the top of a file, nor in a function, nor by a name in a string."""
    known = modules()
    found = [
        f"{name} imports {other}"
        for name, path in known.items()
        if name not in PUBLIC_NAMES and not _is_tool(name)
        for other in (*imported(path, known), *_strings(path))
        if _is_tool(other)
    ]
    assert not found


def _is_tool(module: str) -> bool:
    return module == TOOLS or module.startswith(f"{TOOLS}.")


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_folder_is_a_room_of_the_page() -> None:
    tools = {f"tools/{name}" for name in _packages(ROOT / "mla_fusion" / "tools")}
    assert _packages(ROOT / "mla_fusion") | tools <= set(rooms())


def test_the_house_has_few_rooms() -> None:
    assert len(_packages(ROOT / "mla_fusion") | FOLDERS.keys() - {"mla_fusion"}) <= MOST_FOLDERS


def _packages(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}


def test_the_tests_of_a_room_stand_in_a_folder_of_its_name() -> None:
    """Beside these folders: whole fusions, what all tests share, attacks, the releases, the project
    itself, and ``mf.fuse`` beside ``mf.explain``.
    """
    others = {"fusion", "catalogue", "soundness", "project", "matrix", "entry"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert folders - others <= {name.rpartition("/")[2] for name in rooms()}
