"""The ten tasks of docs/tasks.md, each in a process of its own, timed: what a new user waits for.

python benchmarks/new_user.py [--install]     # --install: also the first, into a fresh environment,
                                              which downloads
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
PAGE, INSTALL = ROOT / "docs" / "tasks.md", ROOT / "docs" / "quick-start.md"
_BLOCK = re.compile(r'^```(python|sh)(?: title="[^"]*")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def tasks() -> list[tuple[str, list[tuple[str, str]]]]:
    """The title of each task, and its blocks; Python goes on from task to task."""
    parts = re.split(r"^\*\*(\d+\. [^*]*?)\.?\*\*", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = [
        (title, _BLOCK.findall(text)) for title, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    install = re.search(
        r"^## On a laptop\n(.*?)^## ", INSTALL.read_text(), re.DOTALL | re.MULTILINE
    )
    assert install is not None
    # the clone and its environment are there
    lines = re.findall(r"^pip install .*\n", install[1], re.MULTILINE)
    return [(found[0][0], [("sh", "".join(lines))]), *found[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true")
    install = parser.parse_args().install
    so_far, failed = "", False
    with tempfile.TemporaryDirectory() as folder:
        python = Path(sys.executable)
        if install:
            venv.create(f"{folder}/venv", with_pip=True)
            python = Path(folder, "venv", "bin", "python")
        for title, held in tasks():
            if title.startswith("1.") and not install:
                continue
            started = perf_counter()
            for kind, text in held:
                where = ROOT if title.startswith("1.") else folder
                if kind == "python":
                    so_far += text
                    command = [str(python), "-c", so_far]
                else:  # the commands of the environment come first
                    command = [
                        "bash",
                        "-ec",
                        f'export PATH="{python.parent}:$PATH"; {_on_a_cpu(text)}',
                    ]
                failed |= (
                    subprocess.run(
                        command, cwd=where, stdout=subprocess.DEVNULL, check=False
                    ).returncode
                    != 0
                )
            print(
                f"{perf_counter() - started:7.1f} s  {title}{'  FAILED' if failed else ''}",
                flush=True,
            )
    return int(failed)


def _on_a_cpu(text: str) -> str:
    """The self-test's whole table takes minutes without an NPU: one scenario of it."""
    return text.replace(
        "mla-fusion selftest", "mla-fusion selftest --only 'npu_mla_prolog_v3 w0 kv0 PA_BSND'"
    )


if __name__ == "__main__":
    sys.exit(main())
