"""``mla-fusion check-model``: reports what ``optimize`` converts in a checkpoint, and compares its
tokens before and after.
"""

from __future__ import annotations

import json
from argparse import Namespace
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mla_fusion.compile.device_graph import CaptureError
from mla_fusion.compile.prepack import Prepacked, prepack
from mla_fusion.models import hf
from mla_fusion.report import text_tables
from mla_fusion.tools.target import UserError

PROMPT_TOKENS = 8
_MOST = 10_000  # layers, or experts a layer: ten times those of the largest models


@dataclass(frozen=True)
class Comparison:
    """Greedy generation before and after: the first ``equal`` of ``tokens`` are equal."""

    tokens: int
    equal: int


@dataclass(frozen=True)
class Outcome:
    """What ``optimize`` converts in the checkpoint.

    summary   what ``optimize`` returns
    compared  tokens before and after, if asked for
    plan      what ``mf.prepack`` would do with a layer, or why that is unknown, if asked for
    is_fine   True if a layer is converted and float32 tokens stay the same
    """

    model_type: str
    is_quantised: bool
    summary: Any
    compared: Comparison | None
    plan: Prepacked | str | None
    is_fine: bool

    def to_json(self) -> str:
        """Returns all fields as JSON text."""
        data = {
            "model_type": self.model_type,
            "quantized": self.is_quantised,
            **self.summary.to_dict(),
            "generated": self.compared and asdict(self.compared),
            "prepack": asdict(self.plan) if isinstance(self.plan, Prepacked) else self.plan,
        }
        return text_tables.as_json(data)

    def __str__(self) -> str:
        lines = [f"{self.model_type}: {self.summary}"]
        if self.is_quantised:
            lines.append(
                "  the checkpoint is quantised: load it dequantised, or its projections will be "
                "left alone"
            )
        if found := self.compared:
            lines.append(f"  generated {found.tokens} tokens: the first {found.equal} are equal")
        if self.plan is not None:
            lines.append(f"of the first of {len(self.summary.converted)} layers:\n{self.plan}")
        return "\n".join(lines)


def run(arguments: Namespace) -> Outcome:
    """Returns what becomes of the checkpoint. Raises UserError."""
    config = _config(arguments.folder)
    summary = hf.optimize(_skeleton(config))
    is_quantised = bool(getattr(config, "quantization_config", None))
    compared = _compare(arguments, config) if arguments.tokens and summary.converted else None
    plan = _plan(config) if arguments.prepack and summary.converted else None
    differs = compared is not None and compared.equal < compared.tokens
    is_fine = bool(summary.converted) and not (differs and arguments.dtype == "float32")
    return Outcome(config.model_type, is_quantised, summary, compared, plan, is_fine)


def _plan(config: Any) -> Prepacked | str:
    """Returns what ``mf.prepack`` would do with one layer, or why that is unknown."""
    config = deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = 1
    if hasattr(text, "first_k_dense_replace"):
        text.first_k_dense_replace = 1  # the choice of experts would end the graph
    model = _skeleton(config).to(torch.bfloat16)
    hf.optimize(model)
    step = hf.DecodeStep(model, hf.MlaPagedCache(model, max_cache_len=PROMPT_TOKENS))
    try:
        return prepack(step, torch.zeros(1, 1, dtype=torch.int64, device="meta"))
    except (ValueError, CaptureError) as error:
        return f"prepack: not planned: {text_tables.first_line(error)}"


def _config(folder: Path) -> Any:
    """Returns the configuration of a checkpoint, without the names of the checkpoint's classes."""
    hf.modeling()
    from transformers import AutoConfig

    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{folder} holds no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a field of a wrong type can raise anything
        raise UserError(
            _own_classes(file)
            or f"transformers cannot read {file}: {text_tables.first_line(error)}"
        ) from error
    # transformers asks the user whether to trust code that a nested configuration names
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            vars(part).pop("auto_map", None)
    for name, value in vars(config.get_text_config()).items():
        if name.endswith(("layers", "experts")) and isinstance(value, int) and value > _MOST:
            raise UserError(f"{file}: {name} is {value:,}; no model has more than {_MOST:,}")
    return config


def _own_classes(file: Path) -> str:
    """Returns what to do with a checkpoint that has classes of its own; "" if it has none."""
    try:
        data = json.loads(file.read_bytes())
        model_type, code = data.get("model_type"), data["auto_map"]["AutoConfig"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return (
        f"{file} asks for code of the checkpoint ({code}), which is never run here: transformers "
        f"has no class for model_type {model_type!r}. If the model is one of transformers' own by "
        "another name, write that name as model_type (deepseek_v3 for kimi_k2). Else read the "
        "code, load the model yourself, and call mla_fusion.models.hf.optimize(model)"
    )


def _auto_class(config: Any) -> Any:
    """Returns the class of ``transformers`` that makes a language model of a configuration."""
    import transformers

    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise UserError(
        f"{config.model_type} is no language model of transformers {transformers.__version__}, "
        "neither of text nor of images and text"
    )


def _skeleton(config: Any) -> Any:
    """Returns the model on meta, without weights."""
    auto_class = _auto_class(config)
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device("meta"):
            return auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # sizes of the config may be impossible
        raise UserError(
            f"transformers makes no model of this config.json: {text_tables.first_line(error)}"
        ) from error


def _compare(arguments: Namespace, config: Any) -> Comparison:
    """Loads the weights, and generates tokens before and after ``optimize``."""
    try:
        model = _auto_class(config).from_pretrained(
            arguments.folder,
            config=config,
            dtype=getattr(torch, arguments.dtype),
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # config or weights may be broken
        raise UserError(
            f"transformers cannot load {arguments.folder}: {text_tables.first_line(error)}"
        ) from error
    model.eval()
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(0, size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    before = _generate(model, ids, arguments.tokens)
    hf.optimize(model)
    after = _generate(model, ids, arguments.tokens)
    return Comparison(arguments.tokens, int((before == after).cumprod(0).sum()))


def _generate(model: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the new tokens."""
    with torch.no_grad():
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
    tokens_made: torch.Tensor = sequences[0, ids.shape[1] :]
    return tokens_made
