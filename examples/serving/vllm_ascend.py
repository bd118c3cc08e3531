"""vLLM-Ascend's graph fusion manager: what it does with our pass, and what it cannot do about an
opaque operator.

    python examples/serving/vllm_ascend.py

vLLM is not needed: `Manager` and `fusion_pass_compile` below do what vLLM-Ascend's do to a graph.
In vLLM itself:

    CompilationConfig(inductor_passes={"graph_fusion_manager":
    mla_fusion.serving.vllm_ascend_pass()})
    additional_config={"ascend_compilation_config": {"enable_npugraph_ex": False}}   # else no
                                                                                     manager is
                                                                                     called
"""

import layer  # imports mla_fusion before torch
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import mla_fusion as mf
from mla_fusion.serving import vllm_ascend_pass


class Manager:
    """Runs the passes that apply to a range of batch sizes over a graph, which is then executed as
    it is.
    """

    def __init__(self, *passes) -> None:
        self.passes = passes

    def __call__(self, graph):
        for each in self.passes:
            if each.is_applicable_for_range(range(1, 513)):
                each(graph)
        graph.recompile()
        return graph


def fusion_pass_compile(manager):
    return aot_autograd(
        fw_compiler=lambda graph, example_inputs: manager(graph),
        decompositions=select_decomp_table(),
    )


@torch.library.custom_op("vllm::mla_forward", mutates_args=("output", "kv_cache", "kr_cache"))
def mla_forward(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_cache: torch.Tensor,
    kr_cache: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """vLLM-Ascend's boundary: the graph holds this one node, the attention is found by name and
    runs inside.
    """
    output.copy_(LAYERS[layer_name](x, cos, sin, slots, block_tables, seq_lens, kv_cache, kr_cache))


LAYERS = {}


class Opaque(torch.nn.Module):
    def forward(self, x, *rest):
        output = torch.empty_like(x)
        torch.ops.vllm.mla_forward(x, *rest, output, "layers.0")
        return output


@torch.no_grad()
def main() -> None:
    model, arguments = layer.example()
    LAYERS["layers.0"] = model
    expected = model(*(argument.clone() for argument in arguments))
    for title, module in (("open", model), ("opaque", Opaque())):
        torch._dynamo.reset()
        compiled = torch.compile(
            module, backend=fusion_pass_compile(Manager(vllm_ascend_pass())), fullgraph=True
        )
        found = compiled(*(argument.clone() for argument in arguments))
        error = (found - expected).norm() / expected.norm()
        print(f"{title}: {mf.reports()[-1]}\n  relative difference from eager {error:.1e}")


if __name__ == "__main__":
    main()
