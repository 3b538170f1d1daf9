"""Scales by nvidia-modelopt, to be compared with ours: its calibration on the same tokens, on a CPU.

    python -m scripts.modelopt_scales MODEL TOKENS.safetensors OUT.safetensors

Runs where `pip install 'compress[modelopt]'` was done, or in the environment of `install_peers.py`; imports
nothing of this project. MODEL is a Hugging Face directory, TOKENS hold [N, S] under `tokens`. OUT has, for
each linear that modelopt quantizes, in float32, the model being in float32 too:

    <module>.weight  [O]     largest magnitude of each output channel / 448 (FP8)
    <module>.input   []      largest magnitude of all inputs / 448 (FP8)
    <module>.int8    [O]     largest magnitude of each output channel / 127 (INT8)
    <module>.nvfp4   [O, G]  the scale of each group of 16 weights (NVFP4): e4m3 times weight_scale_2

The first three are the amax of its quantizers after calibration by their maximum, the last what its export
stores. Exit code 3 where modelopt is not installed.
"""

import sys
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

FP8_MAX = 448
INT8_MAX = 127


def main() -> None:
    model_path, tokens_path, out = sys.argv[1:]
    try:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    except ImportError as error:
        print(f"{error.name} is not installed: pip install 'compress[modelopt]'.", file=sys.stderr)
        sys.exit(3)
    tokens_NS = load_file(tokens_path)["tokens"].to(torch.int64)

    def calibrate(model: nn.Module) -> None:
        with torch.no_grad():
            for row in tokens_NS:
                model(row[None])

    def nvfp4_scales(module: nn.Module, quantizer: nn.Module) -> Tensor:
        second = NVFP4QTensor.get_weights_scaling_factor_2_from_quantizer(quantizer)
        stored = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, module.weight, second)[0]
        return stored.to(torch.float32) * second

    def weight_scales(_: nn.Module, quantizer: nn.Module) -> Tensor:
        return quantizer.amax.to(torch.float32).reshape(-1)

    def input_scale(_: nn.Module, quantizer: nn.Module) -> Tensor:
        return quantizer.amax.to(torch.float32).reshape(())

    kinds: tuple[tuple[str, str, str, Callable[[nn.Module, nn.Module], Tensor], int], ...] = (
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "weight", "weight", weight_scales, FP8_MAX),
        ("FP8_DEFAULT_CFG", "input", "input", input_scale, FP8_MAX),
        ("INT8_DEFAULT_CFG", "weight", "int8", weight_scales, INT8_MAX),
        ("W4A16_NVFP4_CFG", "weight", "nvfp4", nvfp4_scales, 1),
    )
    scales = {}
    for config, which, kind, read, largest in kinds:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        model = mtq.quantize(model, getattr(mtq, config), calibrate)
        for name, module, quantizer in _quantizers(model, which):
            scales[f"{name}.{kind}"] = (read(module, quantizer) / largest).contiguous()
    save_file(scales, out)


def _quantizers(model: nn.Module, which: str) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the name, the module and the calibrated quantizer of each module that has one for its `weight` or
    `input`."""
    for name, module in model.named_modules():
        quantizer = getattr(module, f"{which}_quantizer", None)
        if quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
            yield name, module, quantizer


if __name__ == "__main__":
    main()
