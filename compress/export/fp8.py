"""FP8 checkpoints of `quant_method: fp8`: in blocks, as DeepSeek-V3 (arXiv 2412.19437) was published and
Qwen3 and others since; `transformers` and vLLM load them as they are. Also read, not written: one scale a
matrix or channel.

    <module>.weight            float8_e4m3fn [O, I]
    <module>.weight_scale_inv  [ceil(O/128), ceil(I/128)] of blocks; value = code * scale, despite its name
    <module>.weight_scale      [], [1] or [O, 1] without blocks; some call it weight_scale_inv here too
    <module>.input_scale       [] or [1], static activations only; some call it activation_scale
    <module>.scale             name of the scales in DeepSeek-V4: of blocks as above, and [O, I/32] of experts
                               in four-bit floats (`expert_dtype: fp4`), whose weight is int8 [O, I/2], e2m1,
                               the lower column in the low half of a byte

`quantization_config` states `weight_block_size` ([128, 128], or null for no blocks), `activation_scheme`
(dynamic or static) and in `modules_to_not_convert` (`ignored_layers` of other programs) the dense
modules: prefixes, regular expressions from the start to the end of a module's name, or endings. Inputs of
blocks are rounded in groups of 128 columns, others a token at a time. The head is dense.

Checked against the sources of vLLM 0.32 and transformers 5.23, which divides the rows of a weight evenly
among the rows of its scales: a number of rows that is no multiple of 128 it would scale wrongly without
an error. So such a model is read here, and not written.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule
from compress.export.compressed_tensors import decode_unpacked
from compress.export.config_groups import matches_module
from compress.export.own_code import why_no_codes, why_no_codes_at_load
from compress.export.rules import in_layers, layout_rules, shapes
from compress.export.vllm import vllm_builds
from compress.models.arch import Arch
from compress.quant import e2m1
from compress.quant.codec import ForeignCodec, check_leaf, check_matrix
from compress.quant.model_scheme import ModelScheme
from compress.quant.scale_grid import BIAS, LARGEST_BYTE
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.untrusted.fields import Fields

BLOCKS = SCHEMES["FP8_BLOCK"]
FOUR_BIT = SCHEMES["MXFP4"]
"""The scheme of the experts of DeepSeek-V4, in blocks of 32."""
BLOCK_SIZE = [128, 128]
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
NAMES_OF_E4M3 = ("e4m3", "float8_e4m3fn")
"""How configs name the numbers of codes."""


class Fp8Codec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk."""

    aliases: Mapping[str, str] = MappingProxyType(
        {
            "weight_scale": "weight_scale_inv",
            "weight_scale_inv": "scale",
            "input_scale": "activation_scale",
        }
    )

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        return frozenset(
            {"weight", _scale_leaf(scheme)} | ({"input_scale"} if scheme.activation == "tensor" else set())
        )

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        leaves = {"weight": weight.codes_OI, _scale_leaf(weight.scheme): weight.scale_OG}
        return leaves if weight.input_scale is None else leaves | {"input_scale": weight.input_scale}

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        scale = leaves[_scale_leaf(scheme)]
        scale = scale.to(torch.float32) if scale.dtype == torch.float8_e8m0fnu else scale
        if scheme.num_bits == FOUR_BIT.num_bits:
            return _decode_four_bits(leaves["weight"], scale)
        return decode_unpacked(leaves["weight"], scale, leaves.get("input_scale"), scheme)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        for unread in ("kv_cache_scheme", "modules_to_convert"):
            if quantization_config.get(unread):
                raise UnsupportedFormat(
                    f"the checkpoint's quantization_config has {unread}, which is not read."
                )
        if (quantization_config.get("fmt") or "e4m3") not in NAMES_OF_E4M3 or (
            quantization_config.get("scale_fmt") or "float"
        ) != "float":
            raise UnsupportedFormat(
                f"the checkpoint is FP8 of fmt {quantization_config.get('fmt')} and scale_fmt "
                f"{quantization_config.get('scale_fmt')}; e4m3 "
                "with scales that are floats is read, and with powers of two (ue8m0)."
            )
        scheme = _scheme(
            quantization_config.get("weight_block_size"), quantization_config.get("activation_scheme")
        )
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        dense = [
            pattern
            for name in ("modules_to_not_convert", "ignored_layers")
            for pattern in stated.texts(name, default=())
        ]
        of_experts = _scheme_of_experts(stated, scheme)
        return {
            linear: of_experts if _OF_EXPERT.search(linear) else scheme
            for linear in in_layers(linears)
            if not any(names(each, linear) for each in dense)
        }

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        return None


def _scale_leaf(scheme: Scheme) -> str:
    has_blocks = scheme.block_rows > 1 or scheme.num_bits == FOUR_BIT.num_bits
    return "weight_scale_inv" if has_blocks else "weight_scale"


def _scheme_of_experts(stated: Fields, scheme: Scheme) -> Scheme:
    """Return the scheme of the routed experts of a model whose other linears have `scheme`."""
    named = stated.text("expert_dtype", default="fp8")
    if named not in ("fp8", "fp4"):
        raise UnsupportedFormat(
            f"the checkpoint has experts of expert_dtype '{named:.40}'; fp8, as its other linears, and fp4 "
            "are read. Name a checkpoint with these, or one without codes."
        )
    return FOUR_BIT if named == "fp4" else scheme


def _decode_four_bits(bytes_OI: Tensor, scale_OG: Tensor) -> QuantizedWeight:
    """Return a weight of four-bit floats that are bytes of two."""
    wanted = torch.uint8 if bytes_OI.dtype == torch.uint8 else torch.int8
    rows, num_bytes = check_matrix({"weight": bytes_OI}, "weight")
    check_leaf({"weight": bytes_OI}, "weight", wanted, (rows, num_bytes))
    assert FOUR_BIT.group_size is not None
    num_groups = 2 * num_bytes // FOUR_BIT.group_size
    scale_OG = check_leaf({"scale": scale_OG}, "scale", None, (rows, num_groups))
    if not bool((scale_OG <= 2.0 ** (LARGEST_BYTE - BIAS)).all()):
        raise UnsupportedFormat("a scale of its four-bit floats is beyond the range of bfloat16.")
    return QuantizedWeight(FOUR_BIT, e2m1.unpack(bytes_OI.view(torch.uint8)), scale_OG)


def _scheme(block_size: Any, activation: Any) -> Scheme:
    if block_size is None and activation in ("dynamic", "static"):
        return SCHEMES[f"FP8_{str(activation).upper()}"]
    if block_size == BLOCK_SIZE and activation == "dynamic":
        return BLOCKS
    raise UnsupportedFormat(
        f"the checkpoint is FP8 with weight_block_size {block_size} and activation_scheme {activation}; "
        f"blocks of {BLOCK_SIZE} with "
        "dynamic activations are read, and no blocks (null) with dynamic or static ones."
    )


def names(pattern: str, module: str) -> bool:
    """Return whether an entry of the list of dense modules names this one, as transformers and, after `re:`,
    other programs read it."""
    pattern = pattern.removeprefix("re:")
    return module.endswith(pattern) or matches_module(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)


class Fp8:
    quant_method = "fp8"
    scale_dtype = None
    codec: ForeignCodec = Fp8Codec()
    static_kv = None

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        return {
            "quant_method": self.quant_method,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": BLOCK_SIZE,
            "modules_to_not_convert": sorted({*scheme.dense, head})
            + [
                name
                for part in untouched
                for name in dict.fromkeys((part, f"model.{part.removeprefix('model.')}"))
            ],
        }

    def refusal_by_name(self, scheme: Scheme) -> str | None:
        return None if scheme == BLOCKS else f"fp8 is written in {BLOCKS.name} alone, not in {scheme.name}."

    def reason_dense(self, scheme: Scheme, out_features: int, in_features: int) -> str | None:
        for axis, size in (("N", out_features), ("K", in_features)):
            if size % 128:
                return f"{axis} = {size}, no multiple of 128"
        return None

    def config_by_name(
        self, scheme: Scheme, *, quantized: Sequence[str], dense: Sequence[str]
    ) -> dict[str, Any]:
        return {
            "quant_method": self.quant_method,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": BLOCK_SIZE,
            "modules_to_not_convert": [name.removeprefix("re:") for name in dense],
        }

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = layout_rules(arch, scheme, self.quant_method)
        if scheme.layers.num_bits != 8:
            rules.append(Rule("bits", f"{scheme.layers.num_bits} bits; e4m3 has 8."))
        if scheme.of_layers != (BLOCKS,):
            rules.append(
                Rule(
                    "blocks",
                    f"{scheme.layers.name} is not {BLOCKS.name}, which alone is written as fp8.",
                )
            )
        for name, (out_features, in_features) in shapes(arch):
            if in_features % 128:
                rules.append(Rule("whole-groups", f"{name} has K = {in_features}, not a multiple of 128."))
            if out_features % 128:
                rules.append(
                    Rule(
                        "whole-blocks",
                        f"{name} has N = {out_features}, not a multiple of 128; transformers would misread "
                        "it.",
                    )
                )
        if scheme.head is not None:
            rules.append(
                Rule(
                    "dense-head",
                    "consumers take the head of an fp8 checkpoint to be dense; compressed-tensors has a "
                    "place for it.",
                )
            )
        return rules

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        biased = any(arch.has_bias(linear, layer) for layer in arch.layers for linear in layer.linears)
        refused = why_no_codes(arch) or why_no_codes_at_load(arch)
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer(
                "transformers",
                loads=refused is None,
                note=refused or "multiplies in FP8 on a GPU from sm_89 on; elsewhere it decompresses at load",
            ),
            *vllm_builds(
                arch,
                scheme,
                "reads fp8 natively",
                cpu_refused="its kernel of blocks takes no 16-bit bias" if biased else None,
            ),
        ]


FORMATS.add("fp8", Fp8())
