"""The npugraph_ex backend, which captures ACL graphs: the pass is one of its options.

    python examples/serving/npugraph_ex.py

Lengths are host integers here: a captured graph takes them anew at every replay. Without an NPU all
but the last step runs.
"""

import layer  # imports mla_fusion before torch
import torch

import mla_fusion as mf


def compiled(model):
    options = {"post_grad_custom_pre_pass": mf.torchair_pass(), "frozen_parameter": True}
    return torch.compile(
        model, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True
    )


@torch.no_grad()
def main() -> None:
    model, arguments = layer.example()
    host_lengths = arguments[5].tolist()
    model, arguments = layer.on_npu(model, (*arguments[:5], host_lengths, *arguments[6:]))
    graph = mf.lower(model, *arguments, mode="npugraph_ex", hook=True).fx_ops
    print("calls a step:", ", ".join(f"{count} {name}" for name, count in sorted(graph.items())))

    try:
        print("output", compiled(model)(*arguments).shape)
    except mf.offline.NpuNotAvailable as error:
        print(f"compiled; stopped before {error.asked}")
    print(mf.reports()[-1])


if __name__ == "__main__":
    main()
