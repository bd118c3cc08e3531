"""Lower a model with the real torchair, with no NPU in sight; keep its graphs as files, and read
them back.

    python examples/inspect_a_dump.py [FOLDER]

Needs torch_npu; CANN and a device are not needed. Dumps that torchair wrote on your NPU machine are
read the same way: the file is enough.
"""

import sys
import tempfile
from pathlib import Path

from mla_fusion.examples.fuse_your_model import example

import mla_fusion as mf


def main(folder: Path) -> None:
    model, arguments = example()
    mf.lower(model, *arguments).save(folder)

    graph = mf.inspect.read(folder / "graph.pbtxt")  # what an NPU would run
    print(mf.inspect.summarise(graph))

    before = folder / "fx_before.txt"  # what torch.compile handed over
    print(mf.explain(before))
    print("files:", *sorted(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
