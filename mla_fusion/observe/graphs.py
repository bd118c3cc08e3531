"""The graph as files, before the pass and after each stage that changes it:
``MLA_FUSION_GRAPHS=dir``.

``<process>_<pass>_0_given.txt``, ``.._1_normalised.txt`` and ``.._2_fused.txt``, each the listing
that ``GraphModule.print_readable`` prints, which ``mla-fusion inspect`` and ``diff`` read.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from inspect import isfunction
from pathlib import Path

from torch.fx import GraphModule

VARIABLE = "MLA_FUSION_GRAPHS"
STAGES = ("given", "normalised", "fused")

log = logging.getLogger("mla_fusion")
_numbers = itertools.count(1)


class Graphs:
    """The files of one pass; none where they are not asked for. A folder that cannot be written
    stops nothing.
    """

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._stem = Path(folder) / f"{os.getpid()}_{next(_numbers):03d}" if folder else None

    def write(self, stage: str, gm: GraphModule) -> None:
        if self._stem is None:
            return
        path = self._stem.with_name(f"{self._stem.name}_{STAGES.index(stage)}_{stage}.txt")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(gm.print_readable(print_output=False), encoding="utf-8")
        except OSError as error:
            log.warning("no graph was written: %s", error)
            self._stem = None


def count_operators(gm: GraphModule) -> dict[str, int]:
    """How often each operator is called, the commonest first."""
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    # their hashes and names cost more than the counting
    by_identity = {id(target): target for target in targets}
    counts = Counter[str]()
    for identity, count in Counter(map(id, targets)).items():
        target = by_identity[identity]
        # str of a Python function has its address
        counts[target.__name__ if isfunction(target) else str(target)] += count
    return dict(counts.most_common())
