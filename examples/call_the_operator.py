"""Call the fused operator by hand, on CPU, and have its arguments checked first.

    python examples/call_the_operator.py
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch

T, HE, HCQ, HCKV, N, D, DR = 3, 1024, 1536, 512, 2, 128, 64
BLOCKS, BLOCK_SIZE = 2, 128


def arguments() -> dict[str, torch.Tensor | str | float]:
    """bfloat16 tensors of legal shapes; sizes are named as in the operator's document."""

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * shape[-2] ** -0.5 if len(shape) > 1 else torch.ones(shape)).bfloat16()

    angles = torch.rand(T, DR // 2) * 6.28
    cos, sin = (torch.cat((t, t), dim=-1).bfloat16() for t in (angles.cos(), angles.sin()))
    return {
        "token_x": torch.randn(T, HE).bfloat16(),
        "weight_dq": random(HE, HCQ),
        "weight_uq_qr": random(HCQ, N * (D + DR)),
        "weight_uk": random(N, D, HCKV),
        "weight_dkv_kr": random(HE, HCKV + DR),
        "rmsnorm_gamma_cq": random(HCQ),
        "rmsnorm_gamma_ckv": random(HCKV),
        "rope_sin": sin,
        "rope_cos": cos,
        "kv_cache": torch.zeros(BLOCKS, BLOCK_SIZE, 1, HCKV).bfloat16(),
        "kr_cache": torch.zeros(BLOCKS, BLOCK_SIZE, 1, DR).bfloat16(),
        "cache_index": torch.tensor([0, 5, 200]),
        "rmsnorm_epsilon_cq": 1e-6,
        "rmsnorm_epsilon_ckv": 1e-6,
        "cache_mode": "PA_BSND",
    }


def main() -> None:
    torch.manual_seed(0)
    given = arguments()
    mf.meta.check("npu_mla_prolog_v3", **given)
    query, query_rope, _, _, _, kv_cache, kr_cache = torch.ops.npu.npu_mla_prolog_v3_functional(**given)
    print(f"query {list(query.shape)}, query_rope {list(query_rope.shape)}")
    written = kv_cache.view(-1, HCKV).abs().sum(-1).nonzero().flatten().tolist()
    print(f"rows written: {written}; kr_cache {list(kr_cache.shape)}")
    assert written == [0, 5, 200]

    try:
        mf.meta.check("npu_mla_prolog_v3", **{**given, "cache_index": torch.tensor([0.0, 5.0, 200.0])})
    except mf.meta.ContractError as error:
        print(f"refused: [{error.code}] {error}")


if __name__ == "__main__":
    main()
