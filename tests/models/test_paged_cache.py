"""MlaPagedCache beside the dynamic cache of transformers: the same tokens after each operation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models import hf

from .hf_models import config_of
from .paged import rows

R, DR, DI, LAYERS, BLOCK = 32, 8, 16, 2, 16


def config() -> Any:
    mf.offline.activate()
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        num_hidden_layers=LAYERS,
        hidden_size=32,
        kv_lora_rank=R,
        qk_rope_head_dim=DR,
        num_attention_heads=2,
    )


def indexed_config() -> Any:
    """Of a model whose attentions keep an indexer's keys beside their latents."""
    mf.offline.activate()
    sizes = {
        "num_hidden_layers": LAYERS,
        "hidden_size": 32,
        "kv_lora_rank": R,
        "qk_rope_head_dim": DR,
    }
    return config_of("deepseek_v32", {**sizes, "num_attention_heads": 2, "index_head_dim": DI})


class Pair:
    """One sequence of operations on both caches; what they hold is compared after each."""

    def __init__(self, max_cache_len: int | None, batch: int = 3, indexed: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.config, self.indexed = indexed_config() if indexed else config(), indexed
        self.paged = hf.MlaPagedCache(self.config, max_cache_len=max_cache_len, block_size=BLOCK)
        self.plain = self.empty()
        self.batch = batch

    def empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def update(self, tokens: int) -> None:
        for layer in range(LAYERS):
            states = [
                torch.randn(self.batch, 1, tokens, width, generator=self.generator)
                for width in (R, DR)
            ]
            found, wanted = (cache.update(*states, layer) for cache in (self.paged, self.plain))
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a[:, :, : b.shape[2]], b)
            if self.indexed:
                keys = torch.randn(self.batch, tokens, DI, generator=self.generator)
                a, b = (cache.update_indexer(keys, layer) for cache in (self.paged, self.plain))
                assert torch.equal(a[:, : b.shape[1]], b)

    def both(self, name: str, *arguments: Any) -> None:
        for cache in (self.paged, self.plain):
            getattr(cache, name)(*arguments)
        self.check()

    def check(self) -> None:
        assert int(self.paged.get_seq_length()) == self.plain.get_seq_length()
        for mine, other in zip(self.paged.paged_layers, self.plain.layers, strict=True):
            keys = (other.indexer_keys.unsqueeze(1),) if self.indexed else ()
            for a, b in zip(rows(mine), (other.keys, other.values, *keys), strict=True):
                assert torch.equal(a, b)


@pytest.fixture(
    params=[(None, False), (200, False), (None, True), (200, True)],
    ids=["growing", "static", "growing indexed", "static indexed"],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    limit, indexed = request.param
    if indexed:
        cache_utils = pytest.importorskip("transformers.cache_utils")
        if not hasattr(cache_utils, "StaticIndexedLayer"):
            pytest.skip("this transformers keeps an indexer's keys elsewhere")
    return Pair(limit, indexed=indexed)


def positive_crops() -> bool:
    """Does the release count the tokens that stay, where the number is not negative?"""
    from transformers.cache_utils import DynamicLayer

    return "max_length" in inspect.signature(DynamicLayer.crop).parameters


def test_crops_that_count_what_stays(pair: Pair) -> None:
    pair.update(20)
    if positive_crops():
        pair.both("crop", 30)
        pair.both("crop", 13)
        pair.update(2)
        pair.check()
    else:
        with pytest.raises(ValueError, match="negative"):
            pair.paged.crop(13)


def test_prefill_and_steps(pair: Pair) -> None:
    for tokens in (5, 1, 1, 30, 1, 70, 1):
        pair.update(tokens)
    pair.check()
    cache = pair.paged
    assert cache.bytes_per_token == LAYERS * (R + DR + pair.indexed * DI) * 4
    assert [list(pool.shape[1:]) for pool in (cache.layers[0].keys, cache.layers[0].values)] == [
        [BLOCK, 1, R],
        [BLOCK, 1, DR],
    ]


def test_sequences_repeated_and_selected(pair: Pair) -> None:
    pair.update(20)
    pair.both("reorder_cache", torch.tensor([1, 1, 2]))
    pair.both("batch_repeat_interleave", 2)
    pair.batch = 6
    pair.update(15)
    pair.both("batch_select_indices", torch.tensor([4, 1]))
    pair.batch = 2
    pair.update(2)
    pair.check()
    for cache in (pair.paged, pair.plain):
        cache.batch_select_indices(
            torch.tensor([False, True]) if cache is pair.paged else torch.tensor([1])
        )
    pair.check()


def test_random_operations(pair: Pair) -> None:
    generator = torch.Generator().manual_seed(5)
    pair.update(7)
    for _ in range(40):
        choice = int(torch.randint(0, 4, (), generator=generator))
        held = pair.plain.get_seq_length()
        if choice == 0:
            pair.both("reorder_cache", torch.randint(0, 3, (3,), generator=generator))
        elif choice == 1 and held > 20:
            pair.both("crop", -int(torch.randint(1, 20, (), generator=generator)))
        elif held < 180:
            pair.update(int(torch.randint(1, 20, (), generator=generator)))
    pair.check()


def test_reset_and_again(pair: Pair) -> None:
    pair.update(20)
    pair.both("reorder_cache", torch.tensor([1, 1, 2]))
    pools = [layer.keys for layer in pair.paged.paged_layers]
    pair.paged.reset()
    pair.plain = pair.empty()  # not reset(): up to 5.5 that leaves rows of zeros
    assert int(pair.paged.get_seq_length()) == 0
    pair.update(18)
    pair.check()
    same = [layer.keys is pool for layer, pool in zip(pair.paged.paged_layers, pools, strict=True)]
    assert all(same) if pair.paged.is_compileable else not any(same)


def test_an_indexer_s_keys_come_after_their_latents() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(cache_utils, "StaticIndexedLayer"):
        pytest.skip("this transformers keeps an indexer's keys elsewhere")
    pair = Pair(20, indexed=True)
    with pytest.raises(hf.OptimizeError, match=r"\[cache.kind\]"):
        pair.paged.update_indexer(torch.zeros(3, 1, DI), 0)
    pair.update(2)
    pair.check()


def test_a_full_cache_says_so() -> None:
    pair = Pair(20)
    pair.update(18)
    with pytest.raises(
        hf.OptimizeError,
        match=r"\[cache.full\] the cache holds 18 of 20 tokens "
        r".* 3 more",
    ):
        pair.update(3)
    pair.check()
    pair.update(2)
    pair.check()


@pytest.mark.parametrize("size", [0, 8, 24, 2048, "128"])
def test_block_sizes_of_the_kernel(size: Any) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        hf.MlaPagedCache(config(), block_size=size)


def test_what_is_no_latent_is_refused() -> None:
    cache = hf.MlaPagedCache(config())
    with pytest.raises(hf.OptimizeError, match=r"\[cache.kind\] layer 0 caches 4 heads"):
        cache.update(torch.zeros(2, 4, 1, R), torch.zeros(2, 4, 1, DR), 0)
    cache.update(torch.zeros(2, 1, 1, R), torch.zeros(2, 1, 1, DR), 0)
    with pytest.raises(
        hf.OptimizeError,
        match=r"\[cache.kind\] the cache holds 2 sequences, .* "
        r"\[3, 1, 1, ",
    ):
        cache.update(torch.zeros(3, 1, 1, R), torch.zeros(3, 1, 1, DR), 0)
    if not positive_crops():
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)
    for size in (0, 1.5):
        with pytest.raises(ValueError, match="max_cache_len must be a positive integer"):
            hf.MlaPagedCache(config(), max_cache_len=size)
    with pytest.raises(hf.OptimizeError, match="int has no kv_lora_rank"):
        hf.MlaPagedCache(3)
