"""Call the fused operator by hand: its arguments checked, one call, then the same call in a graph.

    python examples/call_the_operator.py

On an NPU both run there. Without one the call runs on CPU, through a kernel that rounds where the
NPU's rounds, and the graph is compiled by the real torchair and not run.
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

T, HE, HCQ, HCKV, N, D, DR = 3, 1024, 1536, 512, 2, 128, 64  # named as in the operator's document
BLOCKS, BLOCK_SIZE, NZ = 2, 128, 29
SLOTS = [0, 5, 200]


def arguments() -> dict[str, torch.Tensor]:
    """bfloat16 tensors of legal shapes. W_dq, W_uq_qr and W_dkv_kr are [in, out]; caches are
    written in place.
    """

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0, shape[-2] ** -0.5).bfloat16()

    angles = torch.rand(T, DR // 2) * 6.28
    sin, cos = (torch.cat((t, t), dim=-1).bfloat16() for t in (angles.sin(), angles.cos()))
    return {
        "token_x": torch.randn(T, HE).bfloat16(),
        "weight_dq": weight(HE, HCQ),
        "weight_uq_qr": weight(HCQ, N * (D + DR)),
        "weight_uk": weight(N, D, HCKV),
        "weight_dkv_kr": weight(HE, HCKV + DR),
        "rmsnorm_gamma_cq": torch.ones(HCQ).bfloat16(),
        "rmsnorm_gamma_ckv": torch.ones(HCKV).bfloat16(),
        "rope_sin": sin,
        "rope_cos": cos,
        "kv_cache": torch.zeros(BLOCKS, BLOCK_SIZE, 1, HCKV).bfloat16(),
        "kr_cache": torch.zeros(BLOCKS, BLOCK_SIZE, 1, DR).bfloat16(),
        "cache_index": torch.tensor(SLOTS),
    }


OPTIONS = {"rmsnorm_epsilon_cq": 1e-6, "rmsnorm_epsilon_ckv": 1e-6, "cache_mode": "PA_BSND"}


def call(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # In GE graphs torchair of torch_npu 2.13 returns the later results of this form in another
    # order; these two are right in every mode. `npu_mla_prolog_v3_functional` returns all of them,
    # and the caches.
    query, query_rope, *_ = torch.ops.npu.npu_mla_prolog_v3(**tensors, **OPTIONS)
    return query, query_rope


def on_npu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch_npu

    moved = {name: tensor.npu() for name, tensor in tensors.items()}
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        moved[name] = torch_npu.npu_format_cast(moved[name], NZ)
    return moved


def check(tensors: dict[str, torch.Tensor]) -> None:
    """What the device would refuse, said beforehand: by argument, with dims."""
    mf.meta.check("npu_mla_prolog_v3", **tensors, **OPTIONS)
    try:
        mf.meta.check(
            "npu_mla_prolog_v3",
            **{**tensors, "cache_index": tensors["cache_index"].float()},
            **OPTIONS,
        )
    except mf.meta.ContractError as error:
        print(f"refused: [{error.code}] {error}")


def main() -> None:
    torch.manual_seed(0)
    tensors = arguments()
    check(tensors)

    mf.offline.activate()  # does nothing where there is CANN
    device_present = torch.npu.is_available()
    if device_present:
        tensors = on_npu(tensors)

    query, query_rope = call(tensors)
    print(f"single operator: query {list(query.shape)}, query_rope {list(query_rope.shape)}")
    written = tensors["kv_cache"].flatten(0, 2).abs().sum(-1).nonzero().flatten().tolist()
    print(f"rows written: {written}")
    assert written == SLOTS

    if device_present:
        import torchair

        compiled = torch.compile(
            call, backend=torchair.get_npu_backend(), dynamic=False, fullgraph=True
        )
        assert torch.equal(compiled(tensors)[0], query)
    graph = mf.lower(call, tensors, config=mf.Config(enable=False))
    print(
        "graph:",
        ", ".join(f"{count} {operator}" for operator, count in sorted(graph.ge_ops.items())),
    )
    assert graph.ge_ops["MlaPrologV3"] == 1


if __name__ == "__main__":
    main()
