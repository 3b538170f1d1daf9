"""Checkpoints as other programs write them: `transformers` saves dense ones, and numpy packs quantized ones
by the description of the formats. No manifest comes with any.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support import packed_numpy
from tests.support.packed_numpy import Linear

GROUP_SIZE = 128
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": 4,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "group_size": GROUP_SIZE,
        "lm_head": False,
        "meta": {"quantizer": ["another tool:1.0"], "damp_percent": 0.01, "true_sequential": True},
        "pack_dtype": "int32",
        "quant_method": "gptq",
        "sym": True,
    },
    "awq": {
        "bits": 4,
        "group_size": GROUP_SIZE,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
}
PACKED = {"gptq": packed_numpy.gptq_packed, "awq": packed_numpy.awq_packed}


def save_with_transformers(source: Path, path: Path, *, noise: float = 0.0) -> Path:
    """Have `transformers` load a model and save it again, each matrix with noise of that share of its
    deviation.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * draw)
    model.save_pretrained(path)
    shutil.copy(source / "tokenizer.json", path)
    return path


def write_packed(method: str, source: Path, path: Path, *, dense_twin: Path) -> Path:
    """Round the linears of a dense model to four bits in numpy, pack them, and write the checkpoint; beside
    it the dense one in float32 of what its codes mean.
    """
    tensors = load_file(source / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = dense[name] = tensor
            continue
        linear = _rounded(tensor.float().numpy(), symmetric=method == "gptq")
        leaves = PACKED[method](linear)
        packed |= {
            f"{name.removesuffix('.weight')}.{leaf}": torch.from_numpy(leaves[leaf]) for leaf in leaves
        }
        dense[name] = torch.from_numpy(linear.values())
    config = json.loads((source / "config.json").read_text())
    for place, held, facts in (
        (path, packed, {"quantization_config": CONFIGS[method]}),
        (dense_twin, {name: tensor.float() for name, tensor in dense.items()}, {"dtype": "float32"}),
    ):
        place.mkdir(parents=True)
        save_file(held, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps({**config, **facts}))
        shutil.copy(source / "tokenizer.json", place)
    (path / "quantize_config.json").write_text(json.dumps(CONFIGS[method]))
    return path


def _rounded(weight: Any, *, symmetric: bool) -> Linear:
    groups = weight.reshape(weight.shape[0], -1, GROUP_SIZE)
    if symmetric:
        scales = (np.abs(groups).max(-1) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(int)
    steps = np.rint(groups / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return Linear(np.clip(steps, 0, 15).astype(int).reshape(weight.shape), zeros, scales)


def mean_kl(source: Path, candidate: Path, tokens_NS: torch.Tensor) -> float:
    """Return the mean KL of two dense models over the scored positions, by `transformers` in float64."""
    import transformers

    logs = []
    for path in (source, candidate):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(input_ids=tokens_NS.long()).logits[:, :-1].double()
        logs.append(logits.log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
