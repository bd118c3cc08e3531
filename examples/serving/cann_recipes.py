"""Code in the style of cann-recipes: a layer of torch_npu operators, torchair's GE graphs,
parameters frozen.

    python examples/serving/cann_recipes.py

Two lines of configuration put one kernel in place of the prologue. Without an NPU all but the last
step runs.
"""

import layer  # imports mla_fusion before torch
import torch

import mla_fusion as mf


def compiled(model):
    import torchair

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = mf.torchair_pass()
    # GE then packs the weights once, not at every step
    config.experimental_config.frozen_parameter = True
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(model, backend=backend, dynamic=False, fullgraph=True)


@torch.no_grad()
def main() -> None:
    model, arguments = layer.on_npu(*layer.example())
    try:
        print("output", compiled(model)(*arguments).shape)
    except mf.offline.NpuNotAvailable as error:
        print(f"compiled; stopped before {error.asked}")
    print(mf.reports()[-1])

    for title, config in (("as it was", mf.Config(enable=False)), ("fused", mf.Config())):
        graph = mf.lower(model, *arguments, config=config, hook=True).ge_ops
        print(
            f"GE operators, {title}:",
            ", ".join(f"{count} {name}" for name, count in sorted(graph.items())),
        )


if __name__ == "__main__":
    main()
