"""Generate with a Hugging Face model whose attentions decode over paged latents, and compile its
decode step.

    python examples/hf_generate.py

The weights are random and the model is small; with a checkpoint,
``AutoModelForCausalLM.from_pretrained`` takes the place of ``small_model``. Two lines are new:
``hf.optimize(model)``, and the size of the cache for the compiled step.
"""

import mla_fusion as mf  # before torch, where torch_npu is installed without CANN

# isort: split
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from mla_fusion.models import hf


def small_model() -> DeepseekV3ForCausalLM:
    """Two layers of sizes that the kernel takes."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=1024,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=1536,
        kv_lora_rank=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        intermediate_size=256,
        vocab_size=256,
        pad_token_id=0,
        eos_token_id=None,
    )
    return DeepseekV3ForCausalLM(config).eval()


def main() -> None:
    model = small_model()
    prompt = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    options = {"attention_mask": (prompt != 0).long(), "max_new_tokens": 16, "do_sample": False}

    before = model.generate(prompt, **options)
    print(hf.optimize(model))
    after = model.generate(prompt, **options)
    print("float32 tokens equal:", torch.equal(before, after))

    # The kernel computes in bfloat16. A cache of fixed size keeps every step the same graph.
    model.to(torch.bfloat16)
    cache = hf.MlaPagedCache(model, max_cache_len=64)
    step = torch.compile(model.forward, backend="mla_fusion", fullgraph=True, dynamic=False)
    with torch.no_grad():
        token = model(input_ids=prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
        for _ in range(8):
            token = step(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
    print(mf.reports()[-1])
    print("tokens in the cache:", int(cache.get_seq_length()))

    hf.revert(model)


if __name__ == "__main__":
    main()
