"""FP8 scales by nvidia-modelopt, to be compared with ours: runs in the environment of `install_peers.py`,
imports nothing of this project.

    modelopt_scales.py MODEL TOKENS.safetensors OUT.safetensors

MODEL is a Hugging Face directory, TOKENS hold [N, S] under `tokens`. OUT has, for each linear that modelopt
quantizes, `<module>.weight` (largest magnitude of each output channel / 448) and `<module>.input` (largest
magnitude of all inputs / 448, a scalar), in float32: the amax of its quantizers after calibration by their
maximum, the model in float32.
"""

import sys

import modelopt.torch.quantization as mtq
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FP8_MAX = 448


def main() -> None:
    model_path, tokens_path, out = sys.argv[1:]
    tokens_NS = load_file(tokens_path)["tokens"].to(torch.int64)

    def calibrate(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for row in tokens_NS:
                model(row[None])

    scales = {}
    for config, kind in ((mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, "weight"), (mtq.FP8_DEFAULT_CFG, "input")):
        model = mtq.quantize(
            AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), config, calibrate
        )
        for name, module in model.named_modules():
            quantizer = getattr(module, f"{kind}_quantizer", None)
            if quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
                amax = quantizer.amax.to(torch.float32).reshape(-1)
                scales[f"{name}.{kind}"] = (amax if kind == "weight" else amax.reshape(())) / FP8_MAX
    save_file({name: scale.contiguous() for name, scale in scales.items()}, out)


if __name__ == "__main__":
    main()
