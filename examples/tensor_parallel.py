"""Tensor parallel on two processes: Hugging Face's own plan, each rank's prologues fused with half
of the heads.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Needs transformers. Runs on CPU over gloo with a small random GLM-4.7-Flash, whose plan shards MLA
by heads. (That of DeepSeek-V3 in transformers leaves attention whole: there every rank fuses all
heads.)
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mla_fusion.models import hf

PROMPT, NEW_TOKENS = list(range(3, 15)), 12
SIZES = dict(
    hidden_size=1024, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2,
    vocab_size=256,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    intermediate_size=256, mlp_layer_types=["dense", "dense"], max_position_embeddings=256,
)  # fmt: skip


def model():
    """The same random model on every rank."""
    hf.modeling()  # lets transformers import where torch_npu has no CANN
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("glm4_moe_lite", **SIZES)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    )


def shard(whole, mesh):
    """The model's plan, in torch's styles; what it does not name stays whole on every rank."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {
        f"model.{path}": styles[how]()
        for path, how in whole.config.base_model_tp_plan.items()
        if how in styles
    }
    return parallelize_module(
        whole, mesh, {path: how for path, how in plan.items() if "experts" not in path}
    )


@torch.no_grad()
def greedy(forward, cache):
    """Tokens and the logits they were taken from."""
    ids, tokens, logits = torch.tensor([PROMPT]), [], []
    for _ in range(NEW_TOKENS):
        last = forward(input_ids=ids, past_key_values=cache).logits[0, -1].float()
        logits.append(last)
        tokens.append(int(last.argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    from transformers import DynamicCache

    whole = model()
    expected, alone = greedy(whole, DynamicCache(config=whole.config))

    ours = shard(model(), init_device_mesh("cpu", (dist.get_world_size(),)))
    hf.optimize(ours)
    cache = hf.MlaPagedCache(ours.config, max_cache_len=64)
    compiled = torch.compile(ours.forward, backend="mla_fusion", dynamic=False)
    found, logits = greedy(compiled, cache)
    assert found == expected

    with torch.no_grad(), torch.profiler.profile() as step:
        compiled(input_ids=torch.tensor([found[-1:]]), past_key_values=cache)
    reduced = sum(event.name == "gloo:all_reduce" for event in step.events())
    report = mf.reports()[-1]
    heads = {layer.dims["N"] for layer in report.fused}
    for turn in range(dist.get_world_size()):
        if turn == rank:
            print(
                f"rank {rank}: {report}\n  heads of this rank {heads}; {reduced} all-reduces a "
                "step;",
                end=" ",
            )
            print(f"tokens {found}, as in one process", flush=True)
        dist.barrier()
    if rank == 0:
        first, second = alone.topk(2).values.unbind(-1)
        error, margin = (logits - alone).abs().max(), (first - second).min()
        print(
            f"logits differ by up to {error:.3f}; the closest choice of a token was by {margin:.3f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
