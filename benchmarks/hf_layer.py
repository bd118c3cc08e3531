"""One DeepSeek-V3 decoder layer of Hugging Face at the dims of one rank of eight: the ground of the
hf_* benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mla_fusion.models import hf

HEADS = 16
HIDDEN = 7168
INTERMEDIATE = 18432 // 8
SIDES = ("original", "optimized")


def config() -> Any:
    return hf.modeling().DeepseekV3Config(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        first_k_dense_replace=1,
        attn_implementation="sdpa",
    )


def layers() -> dict[str, nn.Module]:
    """The layer in bfloat16 twice, sharing its weights: as it is, and optimised."""
    made: dict[str, nn.Module] = {}
    source, settings = hf.modeling(), config()
    for side in SIDES:
        with torch.device("meta"):
            layer = source.DeepseekV3DecoderLayer(settings, 0).to(torch.bfloat16).eval()
        if not made:
            layer.to_empty(device="cpu").requires_grad_(False)
            generator = torch.Generator().manual_seed(0)
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                else:
                    parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            layer.load_state_dict(made["original"].state_dict(), assign=True)
        made[side] = layer.requires_grad_(False)
    hf.optimize(made["optimized"])
    return made


def rows(batch: int, tokens: int, width: int, seed: int) -> Tensor:
    return torch.empty(batch, tokens, width, dtype=torch.bfloat16).normal_(
        generator=torch.Generator().manual_seed(seed)
    )


def cache(side: str, batch: int, context: int) -> Any:
    """A cache of ``context`` tokens, all but the last of them filled with the same random latents
    on both sides.
    """
    from transformers import StaticCache

    made: Any
    if side == "original":
        made = StaticCache(config=config(), max_cache_len=context)
    else:
        made = hf.MlaPagedCache(config(), max_cache_len=context)
    made.update(
        rows(batch, context - 1, 512, 1)[:, None], rows(batch, context - 1, 64, 2)[:, None], 0
    )
    return made


def rewind(made: Any, context: int) -> None:
    """One token less than full again."""
    length = (
        made.table.length
        if isinstance(made, hf.MlaPagedCache)
        else made.layers[0].cumulative_length
    )
    length.fill_(context - 1)


def step(
    layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: Any
) -> Tensor:
    output: Tensor = layer(
        hidden, attention_mask=mask, past_key_values=past, position_embeddings=(cos, sin)
    )
    return output


def decode_inputs(batch: int, context: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden state, rotary tables and mask of the last token."""
    hidden = rows(batch, 1, HIDDEN, 3)
    positions = torch.full((batch, 1), context - 1)
    cos, sin = hf.modeling().DeepseekV3RotaryEmbedding(config())(hidden, positions)
    return hidden, cos, sin, torch.ones(batch, 1, 1, context, dtype=torch.bool)


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run, one after the other in each round, so that both meet the same
    neighbours.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def best(run: Callable[[], Any], rounds: int = 5) -> float:
    run()
    return min(interleaved({"": run}, rounds)[""])


def milliseconds(seconds: Sequence[float]) -> float:
    return median(seconds) * 1e3
