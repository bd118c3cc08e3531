"""MLA attention in decoding, as serving code for Ascend writes it out today: torch_npu's operators,
one by one.

Weights are [in, out], as such code keeps them; caches are paged. The other examples here compile
it.
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from torch import nn

from mla_fusion.models.attention import mla_paged_attention

T, HE, HCQ, HCKV, N, D, DR, DV = 4, 1024, 1536, 512, 16, 128, 64, 128
BLOCKS, BLOCK_SIZE, EPSILON = 20, 128, 1e-6
NZ = 29


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "w_dq": (HE, HCQ),
            "w_uq_qr": (HCQ, N * (D + DR)),
            "w_uk": (N, D, HCKV),
            "w_dkv_kr": (HE, HCKV + DR),
            "w_uv": (N, HCKV, DV),
            "w_o": (N * DV, HE),
        }
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape).normal_(0, shape[-2] ** -0.5))
            )
        self.gamma_cq, self.gamma_ckv = (
            nn.Parameter(torch.ones(HCQ)),
            nn.Parameter(torch.ones(HCKV)),
        )
        self.to(torch.bfloat16).requires_grad_(False)

    def prologue(self, x, cos, sin, slots, kv_cache, kr_cache):
        npu = torch.ops.npu
        c_q, _ = npu.npu_rms_norm(x @ self.w_dq, self.gamma_cq, EPSILON)
        q_nope, q_pe = (c_q @ self.w_uq_qr).view(-1, N, D + DR).split([D, DR], dim=-1)
        query = npu.npu_transpose_batchmatmul(
            q_nope, self.w_uk, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        cos, sin = cos.view(-1, 1, 1, DR), sin.view(-1, 1, 1, DR)
        query_rope = npu.npu_interleave_rope(q_pe.view(-1, N, 1, DR), cos, sin).view(-1, N, DR)
        latent = (x @ self.w_dkv_kr).view(-1, 1, 1, HCKV + DR)
        npu.npu_kv_rmsnorm_rope_cache_v2(
            latent,
            self.gamma_ckv,
            cos,
            sin,
            slots,
            kr_cache,
            kv_cache,
            epsilon=EPSILON,
            cache_mode="PA_BNSD",
        )
        return query, query_rope

    def forward(self, x, cos, sin, slots, block_tables, seq_lens, kv_cache, kr_cache):
        query, query_rope = self.prologue(x, cos, sin, slots, kv_cache, kr_cache)
        context = mla_paged_attention(
            query, query_rope, kv_cache, kr_cache, block_tables, seq_lens, scale=(D + DR) ** -0.5
        )
        values = torch.bmm(context.transpose(0, 1), self.w_uv).transpose(0, 1)
        return values.reshape(-1, N * DV) @ self.w_o


def example():
    """A layer, and the arguments of one step: four sequences, one new token each."""
    mf.reference  # noqa: B018  # CPU kernels of the npu:: operators
    torch.manual_seed(0)
    angles = torch.rand(T, DR // 2) * 6.28
    cos, sin = (torch.cat((t, t), dim=-1).bfloat16() for t in (angles.cos(), angles.sin()))
    block_tables = torch.randperm(BLOCKS).view(T, -1).int()
    seq_lens = torch.tensor([5, 129, 300, 640])
    last = seq_lens - 1
    block = block_tables.gather(1, (last // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
    slots = block * BLOCK_SIZE + last % BLOCK_SIZE
    caches = (torch.randn(BLOCKS, BLOCK_SIZE, 1, width).bfloat16() for width in (HCKV, DR))
    return Attention(), (
        torch.randn(T, HE).bfloat16(),
        cos,
        sin,
        slots,
        block_tables,
        seq_lens,
        *caches,
    )


def on_npu(model, arguments):
    """Both on an NPU, weights in FRACTAL_NZ; without one as fake tensors, which compile and cannot
    run.
    """
    model, arguments = mf.offline.on_npu(model, arguments)
    import torch_npu

    if torch_npu.npu.is_available():
        for weight in (model.w_dq, model.w_uq_qr, model.w_dkv_kr):
            weight.data = torch_npu.npu_format_cast(weight.data, NZ)
    return model, arguments
