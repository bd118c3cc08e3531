"""Models without MLA: as if the backend were not there: same bits, nothing fused or reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_fusion as mf
from mla_fusion.models.hf import modeling
from tests.exhaustive import one_in
from tests.harness import distance

modeling()  # first, so that transformers is imported as the project imports it
transformers = pytest.importorskip("transformers")

WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**WIDTHS, "num_key_value_heads": 2}),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {
            **WIDTHS,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "Bert": ("BertForMaskedLM", WIDTHS),
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    ),
}


@pytest.mark.portable
@pytest.mark.parametrize("name", one_in(2, MODELS))
def test_other_models_are_left_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    head, widths = MODELS[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **widths)
    model = getattr(transformers, head)(config).eval()
    tokens = torch.randint(0, 99, (2, 9))
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if name == "T5" else {})
    seen = len(mf.reports())
    with torch.no_grad():
        expected = model(**given).logits
        logits = torch.compile(model, backend="mla_fusion")(**given).logits
    assert distance(logits, expected) < 1e-5  # float32
    reports = mf.reports()[seen:]
    assert reports and not any(report.fused or report.rejected for report in reports)
    assert not [record for record in caplog.records if record.name == "mla_fusion"]
