"""Lower a model with the real torchair, with no NPU in sight, and look at the graph that an NPU would run.

    python examples/inspect_graph.py [FOLDER]

Needs torch_npu; CANN and a device are not needed.
"""

import sys
from pathlib import Path

import mla_fusion as mf

sys.path.insert(0, str(Path(__file__).parent))
from fuse_your_model import example


def main() -> None:
    model, arguments = example()
    lowered = mf.lower(model, *arguments)
    print(lowered.report)
    for operator, count in lowered.ge_ops.most_common():
        print(f"{count:4d} {operator}")
    assert lowered.ge_ops["MlaPrologV3"] == 1
    if len(sys.argv) > 1:
        print("written:", *lowered.save(sys.argv[1]))


if __name__ == "__main__":
    main()
