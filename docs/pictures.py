"""The picture of README: a terminal with what ``mla-fusion explain`` says.

make pictures      # nothing of this machine is in it
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
MODEL = """
import torch
from mla_fusion.examples.fuse_your_model import HCQ, N, D, DR, example


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([example()[0], example()[0]])
        self.layers[1].q_b = torch.nn.Linear(HCQ, N * (D + DR), dtype=torch.bfloat16)

    def forward(self, x, cos, sin, slots, *caches):
        first = self.layers[0](x, cos, sin, slots, *caches[:2])
        return first, self.layers[1](2 * x, cos, sin, slots, *caches[2:])


def example_of_two():
    *inputs, kv_cache, kr_cache = example()[1]
    return Model(), (*inputs, kv_cache, kr_cache, kv_cache.clone(), kr_cache.clone())
"""
_WIDTH, _LINE, _MARGIN = 92, 19, 18


def main() -> None:
    from mla_fusion.tools import cli

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.py").write_text(MODEL)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.main(["explain", f"{folder}/model.py:example_of_two"])
        said = re.sub(r"(?<=at )\S*/(?=\w+\.py:)", "", output.getvalue())
        (ASSETS / "terminal.svg").write_text(
            terminal("mla-fusion explain model.py:example_of_two", said)
        )


def terminal(command: str, output: str) -> str:
    """The command and its output as an SVG."""
    lines = [("$ " + command, "#9ecbff")]
    for text in output.rstrip().splitlines():
        colour = {"+": "#85e89d", "-": "#ff938a"}.get(text.strip()[:1], "#c9d1d9")
        indent = len(text) - len(text.lstrip())
        while text:
            cut = text.rfind(" ", indent + 1, _WIDTH) if len(text) > _WIDTH else len(text)
            lines.append((text[:cut], colour))
            text = text[cut:].strip() and " " * (indent + 2) + text[cut:].strip()
    height = len(lines) * _LINE + 2 * _MARGIN
    width = _WIDTH * 8 + 2 * _MARGIN
    rows = "".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * place + 13}" fill="{colour}" '
        'xml:space="preserve">'
        f"{escape(text)}</text>"
        for place, (text, colour) in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" '
        f'font-size="13"><title>{escape(command)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/>{rows}</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
