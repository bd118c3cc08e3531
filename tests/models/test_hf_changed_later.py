"""What is done to a module after ``hf.optimize`` counts as before, or is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_fusion.models import hf
from mla_fusion.models.features import EXPANDS_AFTER_CACHE
from tests.exhaustive import one_in

from .hf_models import build, prompt

GREEDY: dict[str, Any] = dict(
    do_sample=False, return_dict_in_generate=True, output_logits=True, max_new_tokens=6
)


def attentions(model: Any) -> Iterator[Any]:
    for layer in model.model.layers:
        yield layer.self_attn


class Lora(nn.Module):
    """As PEFT wraps a Linear: the base's weight is still to be read."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(1)
        down = torch.randn(4, base.in_features, generator=generator) * base.in_features**-0.5
        self.down, self.up = down, torch.randn(base.out_features, 4, generator=generator)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def wrapped_by_lora(attention: Any) -> None:
    attention.kv_b_proj = Lora(attention.kv_b_proj)


def hooked(attention: Any) -> None:
    attention.kv_b_proj.register_forward_hook(lambda module, given, found: found * 1.5)


def hooked_before(attention: Any) -> None:
    attention.kv_b_proj.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))


def biased(attention: Any) -> None:
    up = attention.kv_b_proj
    up.bias = nn.Parameter(torch.ones(up.out_features), requires_grad=False)


def patched(attention: Any) -> None:
    up = attention.kv_b_proj
    up.forward = lambda x: nn.functional.linear(x, up.weight) * 1.2


def replaced(attention: Any) -> None:
    up = attention.kv_b_proj
    attention.kv_b_proj = nn.Linear(up.in_features, up.out_features, bias=False)
    attention.kv_b_proj.weight = nn.Parameter(up.weight.flip(0), requires_grad=False)


class Quantised(nn.Module):
    """As weight-only quantisation replaces a Linear: its ``weight`` is none that can be read."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.abs().amax(1, keepdim=True) / 127
        self.scale, self.codes = scale, (base.weight / scale).round().to(torch.int8)

    def weight(self) -> Tensor:
        return self.codes

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale)


def quantised(attention: Any) -> None:
    attention.kv_b_proj = Quantised(attention.kv_b_proj)


def parametrised(attention: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    nn.utils.parametrize.register_parametrization(attention.kv_b_proj, "weight", Doubled())


def expanding_otherwise(attention: Any) -> None:
    if not EXPANDS_AFTER_CACHE.has(type(attention)):
        pytest.skip("this transformers has no expand_kv")
    usual = attention.expand_kv
    attention.expand_kv = lambda c_kv, k_pe: tuple(x * 1.1 for x in usual(c_kv, k_pe))


CHANGES = [
    wrapped_by_lora, hooked, hooked_before, biased, patched, replaced, quantised, parametrised,
    expanding_otherwise,
]  # fmt: skip


def distance(found: Any, wanted: Any) -> float:
    pairs = zip(found.logits, wanted.logits, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("name", one_in(1, ["deepseek_v3", "longcat_flash"]))
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_counts_as_in_the_plain_model(name: str, change: Callable[[Any], None]) -> None:
    """Float32 logits within 1e-4 of the plain model's with the same change."""
    plain, model, inputs = build(name), build(name), prompt()
    attention_of = list if name == "longcat_flash" else lambda both: [both]
    hf.optimize(model)
    before = model.generate(**inputs, **GREEDY)
    for each in (plain, model):
        for held in attentions(each):
            for attention in attention_of(held):
                change(attention)
    wanted, found = plain.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY)
    assert distance(found, wanted) < 1e-4 < distance(before, wanted)


def test_an_attention_that_expands_since_says_so() -> None:
    model = build("deepseek_v3")
    hf.optimize(model)
    hooked(model.model.layers[1].self_attn)
    with pytest.warns(UserWarning, match="expanded to all heads") as said:
        model.generate(**prompt(), **GREEDY)
    assert all(str(item.message).startswith("model.layers.1.self_attn.kv_b_proj") for item in said)


def file_of(attention: Any) -> Any:
    return sys.modules[type(attention).__module__]


def other_rotation(attention: Any, patch: pytest.MonkeyPatch) -> str:
    name = "apply_rotary_pos_emb_interleave"
    usual = getattr(file_of(attention), name)
    patch.setattr(file_of(attention), name, lambda *given, **options: usual(*given, **options))
    return name


def other_forward(attention: Any, patch: pytest.MonkeyPatch) -> str:
    usual = type(attention).forward
    patch.setattr(
        type(attention), "forward", lambda self, *given, **options: usual(self, *given, **options)
    )
    return f"{type(attention).__name__}.forward"


def other_class(attention: Any, patch: pytest.MonkeyPatch) -> str:
    kind = type(attention)
    body = {"forward": lambda self, *given, **options: kind.forward(self, *given, **options)}
    attention.__class__ = type("Patched", (kind,), body)
    return "Patched.forward"


NAME = r"ALL_ATTENTION_FUNCTIONS\['sdpa'\]"


def halved(usual: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*given: Any, **options: Any) -> Any:
        output, weights = usual(*given, **options)
        return output * 0.5, weights

    return attend


def registered(attention: Any, patch: pytest.MonkeyPatch) -> str:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    usual = functions["sdpa"]
    functions.register("sdpa", halved(usual))
    patch.setitem(functions._global_mapping, "sdpa", functions["sdpa"])  # undone to what was before
    patch._setitem[-1] = (functions._global_mapping, "sdpa", usual)
    return NAME


def overwritten(attention: Any, patch: pytest.MonkeyPatch) -> str:
    functions = file_of(attention).ALL_ATTENTION_FUNCTIONS
    patch.setitem(functions._local_mapping, "sdpa", halved(functions["sdpa"]))
    return NAME


def replaced_table(attention: Any, patch: pytest.MonkeyPatch) -> str:
    functions = file_of(attention).ALL_ATTENTION_FUNCTIONS
    other = type(functions)()
    other["sdpa"] = halved(functions["sdpa"])
    patch.setattr(file_of(attention), "ALL_ATTENTION_FUNCTIONS", other)
    return "ALL_ATTENTION_FUNCTIONS"


REPLACED = [other_rotation, other_forward, other_class, registered, overwritten, replaced_table]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", one_in(3, REPLACED))
def test_code_replaced_later_is_refused_by_name(
    change: Any, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model, ids = build("deepseek_v3"), prompt()["input_ids"]
    hf.optimize(model)
    run = torch.compile(model, backend="eager") if compiles else model
    with torch.no_grad():
        run(input_ids=ids, use_cache=False)
        what = change(model.model.layers[1].self_attn, monkeypatch)
        with pytest.raises(
            hf.OptimizeError, match=rf"\[forward.unknown\] .*{what}.* has been replaced"
        ) as refused:
            run(input_ids=ids, use_cache=False)
    assert "model.layers." in str(refused.value) and "hf.revert(model)" in str(refused.value)


def test_revert_leaves_a_forward_that_somebody_else_has_set() -> None:
    """As accelerate wraps forwards. Undone by its owner, revert goes on."""
    model = build("deepseek_v3")
    hf.optimize(model)
    last = model.model.layers[1].self_attn
    ours = last.forward
    last.forward = MethodType(lambda self, *given, **options: ours(*given, **options), last)
    model.generate(**prompt(), **GREEDY)
    with pytest.raises(hf.OptimizeError, match=r"\[model.state\] model.layers.1.self_attn.forward"):
        hf.revert(model)
    assert "forward" in vars(model.model.layers[0].self_attn)  # nothing was undone
    last.forward = ours
    hf.revert(model)
    assert all("forward" not in vars(attention) for attention in attentions(model))
