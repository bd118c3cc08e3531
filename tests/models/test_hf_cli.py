"""``mla-fusion check-model`` on checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_fusion.models import hf
from mla_fusion.tools import cli
from tests.exhaustive import pairs

from .hf_models import BASE, KERNEL, build, config_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build("deepseek_v3").save_pretrained(folder)
    return folder


def test_a_config_is_enough(tmp_path, capsys):
    build("deepseek_v3", KERNEL).config.save_pretrained(tmp_path)
    assert cli.main(["check-model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "deepseek_v3: optimized 3 of 3 attentions" in printed
    assert "fusable in bfloat16" in printed and "bytes a token" in printed
    assert "prepack" not in printed


@pytest.mark.exhaustive
def test_what_prepack_would_do_is_said_on_demand(tmp_path, capsys):
    build("deepseek_v3", KERNEL).config.save_pretrained(tmp_path)
    assert cli.main(["check-model", str(tmp_path), "--prepack", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["prepack"]
    kinds = {row["weight"]: row["kind"] for row in plan["rows"]}
    assert (
        plan["is_plan"]
        and plan["laid_out"] == 3
        and plan["bytes_before"] == plan["bytes_after"] > 0
    )
    assert kinds == {
        "weight_dq": "view",
        "weight_uq_qr": "view",
        "weight_dkv_kr": "view",
        "weight_uk": "copy",
    }
    assert plan["peak_over_end"] > 0 and plan["bytes_copied"] > 0
    assert cli.main(["check-model", str(tmp_path), "--prepack"]) == 0
    printed = capsys.readouterr().out
    assert "of the first of 3 layers" in printed and "prepack: 3 of 4" in printed


def test_tokens_are_compared(checkpoint, capsys):
    assert cli.main(["check-model", str(checkpoint), "--tokens", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["converted"]) == 2 and found["fusable"] == 0
    assert found["generated"]["tokens"] == found["generated"]["equal"] == 12


def test_other_tokens_are_status_1(checkpoint, capsys, monkeypatch):
    from mla_fusion.models.hf import latent_forward

    right = latent_forward.absorbed_attention
    monkeypatch.setattr(
        latent_forward,
        "absorbed_attention",
        lambda *tensors, scaling, **options: right(*tensors, scaling=-scaling, **options),
    )
    assert cli.main(["check-model", str(checkpoint), "--tokens", "12"]) == 1
    assert "the first 12 are equal" not in capsys.readouterr().out


def test_nothing_to_convert_is_status_1(tmp_path, capsys):
    hf.modeling()
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    assert cli.main(["check-model", str(tmp_path)]) == 1
    assert "[attention.not_mla]" in capsys.readouterr().out


def test_a_quantised_checkpoint_is_named(tmp_path, capsys):
    config = build("deepseek_v3").config
    config.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert cli.main(["check-model", str(tmp_path)]) == 0
    assert "is quantised" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "holds no config.json"),
        ("{", "cannot read"),
        ('{"model_type": "no_such_model"}', "cannot read"),
        ('{"model_type": "t5"}', "t5 is no language model of transformers"),
    ],
)
def test_bad_folders_are_status_2(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert cli.main(["check-model", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_weights_says_so(tmp_path, capsys):
    build("deepseek_v3").config.save_pretrained(tmp_path)
    assert cli.main(["check-model", str(tmp_path), "--tokens", "4"]) == 2
    assert "cannot load" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model_type, changes, status, said",
    [
        ("mistral_large4", {"num_hidden_layers": 4}, 0, "mistral_large4: optimized 3 of 4"),
        ("kimi_k25", {}, 0, "kimi_k25: optimized 2 of 2"),
        ("glm5_next", {"qk_rope_head_dim": 0}, 1, "glm5_next: optimized 0 of"),
    ],
)
def test_the_language_model_inside_a_multimodal_one(
    tmp_path, capsys, model_type, changes, status, said
):
    text = config_of(model_type, {}).get_text_config()
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": model_type,
                "text_config": {"model_type": text.model_type, **BASE, **changes},
            }
        )
    )
    assert cli.main(["check-model", str(tmp_path)]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "arguments"),
    pairs(
        [
            {"model_type": "kimi_k2"},
            {"model_type": "t5"},  # known, and still no class that writes text
            {
                "model_type": "kimi_k25",
                "text_config": {
                    "model_type": "encoder-decoder",  # known, and no class of AutoModel's
                    "encoder": {"model_type": "bert"},
                    "decoder": {"model_type": "bert"},
                    "auto_map": {"AutoModel": "modeling_own.Own"},
                },
            },
        ],
        [[], ["--tokens", "2"]],
    ),
)
def test_code_of_a_checkpoint_is_never_run(tmp_path, capsys, monkeypatch, config, arguments):
    hf.modeling()
    written = tmp_path / "written"
    classes = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    for name in ("configuration_own", "modeling_own"):
        (tmp_path / f"{name}.py").write_text(f"open({str(written)!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": classes} | config))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(text) or "y")
    assert cli.main(["check-model", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert not written.exists() and not asked and said.count("\n") == 1
    if config["model_type"] == "kimi_k2":
        assert "asks for code of the checkpoint (configuration_own.Own)" in said
        assert "deepseek_v3" in said and "hf.optimize(model)" in said
