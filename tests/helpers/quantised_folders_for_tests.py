"""Writes Hugging Face folders with weights in fewer bits, by the definition of each format, from drawn codes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.models import Decoder, DecoderConfig, build, initialise, save_folder

CONFIG = DecoderConfig(
    vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """How a folder is quantised. `group` None: a scale for each output; 0: one for the tensor."""

    method: str  # gptq, gptq_v2, packed, int8 or fp8
    bits: int = 4
    group: int | None = 32
    is_symmetric: bool = True
    scale: torch.dtype = torch.float16
    has_order: bool = False


CASES = {
    "gptq": Case("gptq"),
    "gptq-v2": Case("gptq_v2", 8, 64),
    "gptq-asymmetric": Case("gptq", 4, 32, False),
    "gptq-v2-asymmetric": Case("gptq_v2", 4, 64, False),
    "gptq-rows": Case("gptq", 8, None),
    "gptq-order": Case("gptq", 4, 32, has_order=True),
    "packed": Case("packed", 4, 32, scale=torch.bfloat16),
    "packed-8": Case("packed", 8, None, scale=torch.bfloat16),
    "packed-asymmetric": Case("packed", 4, 16, False, torch.bfloat16),
    "packed-order": Case("packed", 4, 32, False, torch.bfloat16, has_order=True),
    "int8": Case("int8", 8, None, scale=torch.bfloat16),
    "int8-asymmetric": Case("int8", 8, None, False, torch.float32),
    "fp8": Case("fp8", 8, None, scale=torch.float32),
    "fp8-tensor": Case("fp8", 8, 0, scale=torch.bfloat16),
}


def words(codes: np.ndarray, bits: int, less: int = 0) -> np.ndarray:
    """Codes [rows, n] in words of 32 bits, the lowest bits first; `less` is taken from each word."""
    per_word = 32 // bits
    found = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), dtype=np.int64)
    for column in range(codes.shape[1]):
        found[:, column // per_word] += codes[:, column] << (bits * (column % per_word))
    return ((found - less) % 2**32).astype(np.uint32).view(np.int32)


def drawn(case: Case, num_out: int, num_in: int, rng: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight by the ends of their names, and the weight in float64."""
    group = num_in if not case.group else case.group
    groups = -(-num_in // group)
    rows = 1 if case.group == 0 else num_out
    scale = torch.from_numpy(rng.uniform(0.02, 0.08, (rows, groups))).to(case.scale) / (1 if case.bits == 4 else 16)
    of_input = np.arange(num_in) // group
    if case.has_order:
        of_input = rng.permutation(of_input)
    wide = scale.double().expand(num_out, -1)[:, of_input]
    if case.method == "fp8":
        floats = torch.from_numpy(rng.uniform(-400, 400, (num_out, num_in))).to(torch.float8_e4m3fn)
        scale = scale / 8
        stored = scale if case.group is None else scale[0]
        return {"weight": floats, "weight_scale": stored}, floats.double() * scale.double()
    half, most = 2 ** (case.bits - 1), 2**case.bits
    codes = rng.integers(0, most, (num_out, num_in))
    zero = np.full((num_out, groups), half) if case.is_symmetric else rng.integers(0, most, (num_out, groups))
    weight = torch.from_numpy(codes - zero[:, of_input]).double() * wide
    ones = sum(1 << shift for shift in range(0, 32, case.bits)) if case.method == "gptq" else 0
    tensors: dict[str, Any]
    if case.method.startswith("gptq"):
        tensors = {"qweight": words(codes, case.bits).T, "qzeros": words(zero.T, case.bits, ones)}
        tensors["g_idx"] = of_input.astype(np.int32)
        return {**_torch(tensors), "scales": scale.T.contiguous()}, weight
    if case.method == "packed":
        tensors = {"weight_packed": words(codes, case.bits), "weight_shape": np.array([num_out, num_in])}
        if not case.is_symmetric:
            tensors["weight_zero_point"] = words(zero.T, case.bits).T
        if case.has_order:
            tensors["weight_g_idx"] = of_input.astype(np.int32)
    else:
        tensors = {"weight": (codes - half).astype(np.int8)}
        if not case.is_symmetric:
            tensors["weight_zero_point"] = (zero - half).astype(np.int8)
    return {**_torch(tensors), "weight_scale": scale}, weight


def _torch(tensors: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in tensors.items()}


def table(case: Case) -> dict[str, Any]:
    """The table quantization_config of a folder."""
    if case.method.startswith("gptq"):
        sizes = {"bits": case.bits, "group_size": case.group or -1, "sym": case.is_symmetric}
        rest = {"desc_act": case.has_order, "checkpoint_format": case.method, "damp_percent": 0.1, "meta": {"a": 1}}
        return {"quant_method": "gptq", **sizes, **rest}
    strategy = {None: "channel", 0: "tensor"}.get(case.group, "group")
    weights = {
        "num_bits": case.bits,
        "type": "float" if case.method == "fp8" else "int",
        "symmetric": case.is_symmetric, "strategy": strategy, "group_size": case.group or None,
        "actorder": "group" if case.has_order else None, "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    acts = None if case.method == "packed" else {"num_bits": 8, "dynamic": True, "strategy": "token"}
    form = {"packed": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[case.method]
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts}},
    }  # fmt: skip


def write_folder(folder: Path, case: Case, config: DecoderConfig = CONFIG, experts: bool = False) -> Decoder:
    """Write a folder whose linears are quantised, all but the head. Returns the model of its weights in float64."""
    model = build(config)
    initialise(model, 0)
    assert isinstance(model, Decoder)
    save_folder(folder, model)
    tensors, model = load_file(folder / "model.safetensors"), model.double().eval()
    rng = np.random.default_rng(0)
    for name in [one for one in tensors if one.endswith(("_proj.weight", *((".w1.weight",) if experts else ())))]:
        owner = name.removesuffix(".weight")
        parts, weight = drawn(case, *tensors.pop(name).shape, rng)
        tensors |= {f"{owner}.{end}": one for end, one in parts.items()}
        if not experts:
            with torch.no_grad():
                model.get_parameter(name).copy_(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=table(case))
    return model


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace tensors of a folder by name, or remove them."""
    path = folder / "model.safetensors"
    tensors = {name: one for name, one in {**load_file(path), **change}.items() if one is not None}
    save_file(tensors, path, metadata={"format": "pt"})
