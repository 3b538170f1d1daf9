"""Checkpoints as nvidia-modelopt writes them, to be read by this project: runs in the environment of
`install_peers.py`, imports nothing of this project.

    modelopt_checkpoints.py MODEL TOKENS.safetensors OUT ALGORITHM ...

MODEL is a Hugging Face directory, TOKENS hold [N, S] under `tokens`. OUT/<ALGORITHM> is the unified
checkpoint of the model, quantized by modelopt's own calibration in the dtype of its config. FP8 has an FP8 KV
cache, too. W4A16_AWQ is rounded to nearest, because AWQ's own scales would remain as factors of the inputs.
"""

import sys
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def with_fp8_kv(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "quant_cfg": [*config["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]}


CONFIGS = {
    "FP8": with_fp8_kv(mtq.FP8_DEFAULT_CFG),
    "FP8_PER_CHANNEL_PER_TOKEN": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "W8A16": mtq.INT8_WEIGHT_ONLY_CFG,
    "W4A16_AWQ": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG,
    "W4A16_NVFP4": mtq.W4A16_NVFP4_CFG,
    "NVFP4": mtq.NVFP4_DEFAULT_CFG,
}
"""quant_algo -> the configuration of modelopt that is exported under that name."""


def main() -> None:
    model_path, tokens_path, out, *algorithms = sys.argv[1:]
    tokens_NS = load_file(tokens_path)["tokens"].to(torch.int64)

    def calibrate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for row in tokens_NS:
                model(row[None])

    for algorithm in algorithms:
        model = AutoModelForCausalLM.from_pretrained(model_path)
        model = mtq.quantize(model, CONFIGS[algorithm], calibrate)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=f"{out}/{algorithm}")


if __name__ == "__main__":
    main()
