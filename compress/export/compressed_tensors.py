"""compressed-tensors: the default format; `transformers` and vLLM load it as it is.

Integer codes (`pack-quantized`, `int-quantized`)

    <module>.weight_packed      int32 [O, ceil(I*b/32)]
    <module>.weight_scale       [O, G], the model's dtype
    <module>.weight_shape       int64 [2] = [O, I]
    <module>.weight_zero_point  int32 [ceil(O*b/32), G]

Float codes (FP8 e4m3; `float-quantized`)

    <module>.weight             float8_e4m3fn [O, I]
    <module>.weight_scale       [O, 1], the model's dtype; of blocks of 128 x 128: [ceil(O/128), I/128]
    <module>.input_scale        float32 [1], static activations only
    <module>.input_zero_point   int8 [1], static asymmetric activations (integers) only

Floats with scales of one byte (`nvfp4-pack-quantized`, `mxfp4-pack-quantized` and `mxfp8-quantized`)

    <module>.weight_packed        uint8 [O, I/2], e2m1, the lower column in the low half of a byte
    <module>.weight               float8_e4m3fn [O, I], MXFP8
    <module>.weight_scale         float8_e4m3fn [O, I/16], or uint8 [O, I/32]: value 2^(s - 127)
    <module>.weight_global_scale  float32 [1], e4m3 scales only: value = code * scale / global scale
    <module>.input_global_scale   float32 [1], e2m1 inputs with e4m3 scales only

Integers are packed along I (`codes + 2^(b-1)`), zero points of asymmetric schemes along O; value = (code
- zero_point) * scale. Codes of three bits lie without gaps, as compressed-tensors packs them since 0.20;
before, ten of them were a word, which is refused by its shape. Where the inputs are rounded to integers
too, codes are int8 in the layout of float codes. The last block of rows may be partial, blocks of columns
may not.

One group of `quantization_config` in `config.json` states how all linears are coded, or one for each
scheme that layers have, by exact names, and another one the head if it is quantized; linears that stay
dense are listed in `ignore` by exact name. `kv_cache_scheme` states a KV cache in FP8 with calibrated
scales; its scales are `<attention>.k_scale` and `.v_scale`, float32 [1]; where all weights are dense,
there are no groups. `dequantize` asks transformers to decompress at load, where it would lose zero points
otherwise. Checked against compressed-tensors 0.20, transformers 5.23 and vLLM 0.32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule, StaticKV
from compress.export.byte_scales import decode_byte_scales, encode_byte_scales
from compress.export.config_groups import (
    ALL_LINEARS,
    MIXED_FORMAT,
    PACK_FORMAT,
    format_of,
    group_of,
    read_groups,
)
from compress.export.experts import why_transformers_refuses, with_pattern_of_experts
from compress.export.own_code import why_no_codes, why_no_codes_of
from compress.export.rules import layout_rules, quantized_linears, shapes, start_of, whole_group_rules
from compress.export.vllm import STACKS_ALONE, on_a_gpu, vllm_builds
from compress.models.arch import Arch
from compress.models.family import family_of_arch
from compress.models.linear_groups import LINEAR_GROUPS
from compress.quant.codec import (
    ForeignCodec,
    byte_scale_leaves,
    check_leaf,
    check_matrix,
    input_leaves,
)
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.packing import num_words, pack, unpack
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.untrusted.fields import Fields

FORMAT_VERSION = "0.20.0"
DENSE_FORMAT = "dense"
"""Format of dense weights with a quantized KV cache."""
KV_KEY = "kv_cache_scheme"
STORED_BITS = {2, 3, 4, 8}
"""Bits of codes that are written; a scheme has a name for each."""
STATIC_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
_KV_DEFAULTS = {"symmetric": True, "dynamic": False}
"""Defaults of the format's own library where a scheme leaves fields out."""


class CompressedTensorsCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk."""

    aliases: Mapping[str, str] = MappingProxyType({})

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        if scheme.scale_type is not None:
            codes = "weight_packed" if scheme.num_bits == 4 else "weight"
            scales = (f"weight_{leaf}" for leaf in byte_scale_leaves(scheme))
            return frozenset({codes, *scales, *input_leaves(scheme)})
        if format_of(scheme) != PACK_FORMAT:
            return frozenset({"weight", "weight_scale", *input_leaves(scheme)})
        return frozenset(
            {"weight_packed", "weight_scale", "weight_shape"}
            | (set() if scheme.symmetric else {"weight_zero_point"})
        )

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        if weight.scheme.scale_type is not None:
            return encode_byte_scales(weight)
        bits = weight.scheme.num_bits
        leaves = {"weight_scale": weight.scale_OG}
        if format_of(weight.scheme) != PACK_FORMAT:
            leaves["weight"] = weight.codes_OI
        else:
            leaves["weight_packed"] = pack(weight.codes_OI, bits)
            leaves["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if weight.zero_point_OG is not None:
            leaves["weight_zero_point"] = pack(weight.zero_point_OG.t().contiguous(), bits).t().contiguous()
        if weight.input_scale is not None:
            leaves["input_scale"] = weight.input_scale.reshape(1)
        if weight.input_zero_point is not None:
            leaves["input_zero_point"] = weight.input_zero_point.reshape(1)
        return leaves

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        if scheme.scale_type is not None:
            return decode_byte_scales(leaves, scheme)
        if format_of(scheme) != PACK_FORMAT:
            decoded = decode_unpacked(
                leaves["weight"], leaves["weight_scale"], leaves.get("input_scale"), scheme
            )
            return replace(decoded, input_zero_point=_input_zero_point(leaves, scheme))
        stated = leaves["weight_shape"]
        if stated.dtype not in (torch.int64, torch.int32) or stated.numel() != 2:
            raise UnsupportedFormat("its weight_shape is not two whole numbers.")
        out_features, in_features = stated.flatten().tolist()
        if min(out_features, in_features) < 1:
            raise UnsupportedFormat(f"its weight_shape is {[out_features, in_features]}.")
        bits = scheme.num_bits
        num_groups = scheme.num_groups(in_features)
        packed_OI = check_leaf(
            leaves, "weight_packed", torch.int32, (out_features, num_words(in_features, bits))
        )
        check_leaf(leaves, "weight_scale", None, (out_features, num_groups))
        codes_OI = unpack(packed_OI, bits, in_features)
        zero_point_OG = None
        if not scheme.symmetric:
            shape = num_words(out_features, bits), num_groups
            packed_GO = check_leaf(leaves, "weight_zero_point", torch.int32, shape).t().contiguous()
            zero_point_OG = unpack(packed_GO, bits, out_features).t().contiguous()
        return QuantizedWeight(scheme, codes_OI, leaves["weight_scale"], zero_point_OG)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        stated = Fields(quantization_config, "quantization_config", UnsupportedFormat)
        if stated.has("sparsity_config") and quantization_config["sparsity_config"]:
            raise UnsupportedFormat("the checkpoint has a sparsity_config; sparse checkpoints are not read.")
        groups = stated.mapping("config_groups", default={})
        if not groups and not stated.mapping(KV_KEY, default={}):
            raise UnsupportedFormat(
                "the checkpoint's quantization_config has no config_groups, so nothing says how its weights "
                "are coded."
            )
        return read_groups(quantization_config, linears)

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        kv_scheme = Fields(quantization_config, "quantization_config", UnsupportedFormat).mapping(
            KV_KEY, default={}
        )
        if not kv_scheme:
            return None
        if any(kv_scheme.get(key, _KV_DEFAULTS.get(key)) != value for key, value in STATIC_KV.items()):
            stated = ", ".join(f"{key} {kv_scheme.get(key)}" for key in STATIC_KV)
            raise UnsupportedFormat(
                f"the checkpoint's {KV_KEY} is {stated}; keys and values of 8 bits, type float, symmetric, "
                "strategy tensor and not "
                "dynamic are read."
            )
        return FP8_STATIC


def decode_unpacked(
    codes_OI: Tensor, scale: Tensor, input_scale: Tensor | None, scheme: Scheme
) -> QuantizedWeight:
    """Decode a weight whose codes are not packed. Other tools may write one weight scale for the whole
    matrix, and scalars of shape [] or [1] in any dtype.

    Raises:
        UnsupportedFormat: codes of another type than they claim, or scales that are not one a block, a
            channel or a matrix.
    """
    if codes_OI.dtype != scheme.code_dtype:
        form = "e4m3" if scheme.type == "float" else "int8"
        raise UnsupportedFormat(
            f"the checkpoint says that its weights are {scheme.type} of 8 bits and stores them as "
            f"{codes_OI.dtype}, not {form}."
        )
    out_features, in_features = check_matrix({"weight": codes_OI}, "weight")
    if not scale.dtype.is_floating_point:
        raise UnsupportedFormat(f"its weight scales are {scale.dtype}, which are no floats.")
    if input_scale is not None and (input_scale.numel() != 1 or not input_scale.dtype.is_floating_point):
        raise UnsupportedFormat(
            f"its input scale is {input_scale.dtype} {list(input_scale.shape)}, where one float belongs."
        )
    wanted = scheme.num_scale_rows(out_features), scheme.num_groups(in_features)
    if scheme.block_rows == 1 and scale.numel() in (1, out_features):
        scale = scale.reshape(-1, 1).expand(wanted)
    if scale.shape != wanted:
        raise UnsupportedFormat(
            f"it is {out_features} x {in_features} with scales {list(scale.shape)}, where {scheme.name} has "
            f"{wanted}."
        )
    static = None if input_scale is None else input_scale.to(torch.float32).reshape(())
    return QuantizedWeight(scheme, codes_OI, scale.contiguous(), input_scale=static)


def _input_zero_point(leaves: Mapping[str, Tensor], scheme: Scheme) -> Tensor | None:
    """Return the zero point of a static input, int8 [], None where the scheme has none. Other tools store it
    in int32.

    Raises:
        UnsupportedFormat: it is not one integer of eight bits.
    """
    if "input_zero_point" not in input_leaves(scheme):
        return None
    stored = leaves["input_zero_point"]
    if (
        stored.numel() != 1
        or stored.dtype not in (torch.int8, torch.int32, torch.int64)
        or not -128 <= int(stored) <= 127
    ):
        raise UnsupportedFormat(
            f"its input_zero_point is {stored.dtype} {list(stored.shape)}, where one integer of 8 bits "
            "belongs."
        )
    return stored.reshape(()).to(torch.int8)


class CompressedTensors:
    quant_method = "compressed-tensors"
    scale_dtype = None
    static_kv: StaticKV | None = StaticKV(
        beside={KV_KEY: STATIC_KV},
        alone={
            "quant_method": quant_method,
            "format": DENSE_FORMAT,
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
            KV_KEY: STATIC_KV,
            "version": FORMAT_VERSION,
        },
    )
    codec: ForeignCodec = CompressedTensorsCodec()

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return one group for all linears, or one for each scheme of the layers with the names of its
        linears: vLLM looks up a fused linear, and takes a group of the whole class before one that names
        the parts.

        A quantized head is a group of its own, even in the layers' scheme, because vLLM does not count a
        head among the linears; and it is the first, because compressed-tensors warns of a name that
        follows a class which includes it.
        """
        coded = [(scheme.head, [head])] if scheme.head is not None else []
        if len(scheme.of_layers) == 1:
            coded.append((scheme.layers, [ALL_LINEARS]))
        else:
            coded += [
                (each, [linear for linear in linears if scheme.for_linear(linear) == each])
                for each in scheme.of_layers
            ]
        assert all(targets for _, targets in coded), "a scheme without linears"
        coded = with_pattern_of_experts(coded, scheme, linears, head=head)
        groups = {f"group_{idx}": group_of(each, targets) for idx, (each, targets) in enumerate(coded)}
        formats = {str(group["format"]) for group in groups.values()}
        one_by_one = {linear.rpartition(".")[0] for linear in scheme.dense}
        # transformers 5.23 drops zero points unless it decompresses at load; it does that by one scheme only.
        at_load = len(scheme.all) == 1 and not scheme.layers.symmetric
        return {
            "quant_method": self.quant_method,
            "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted({*scheme.dense} if scheme.head is not None else {*scheme.dense, head})
            + [rf"re:{start_of(part)}(\.|$)" for part in untouched if f"{part}.0" not in one_by_one],
            KV_KEY: None,
            "version": FORMAT_VERSION,
            **({"dequantize": True} if at_load else {}),
        }

    def refusal_by_name(self, scheme: Scheme) -> str | None:
        return None if scheme.num_bits in STORED_BITS else f"{scheme.num_bits} bits are not written."

    def reason_dense(self, scheme: Scheme, out_features: int, in_features: int) -> str | None:
        if in_features % (scheme.group_size or 1):
            return f"K = {in_features}, no multiple of {scheme.group_size}"
        return None

    def config_by_name(
        self, scheme: Scheme, *, quantized: Sequence[str], dense: Sequence[str]
    ) -> dict[str, Any]:
        """Return one group with the names of its linears, because the class of all linears would include
        heads that have no tensor of their own.

        Packed codes are decompressed at load: some classes (Falcon, Mamba, T5) initialise the parameter
        `weight`, which a packed linear does not have.
        """
        return {
            "quant_method": self.quant_method,
            "format": format_of(scheme),
            "quantization_status": "compressed",
            "config_groups": {"group_0": group_of(scheme, list(quantized))},
            "ignore": list(dense),
            KV_KEY: None,
            "version": FORMAT_VERSION,
            **({"dequantize": True} if scheme.num_bits < 8 or format_of(scheme) == PACK_FORMAT else {}),
        }

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = []
        for bits in sorted({each.num_bits for each in scheme.all} - STORED_BITS):
            rules.append(Rule("bits", f"{bits} bits; 2, 3, 4 and 8 are written."))
        return [*rules, *layout_rules(arch, scheme, self.quant_method), *whole_group_rules(arch, scheme)]

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        narrow = sorted(
            {name for name, size, each in quantized_linears(arch, scheme) if each.type == "int" and size % 32}
        )
        blocks = [each for each in scheme.of_layers if each.block_rows > 1]
        ragged = _fused_ragged(arch, blocks[0]) if blocks else []
        vllm = (
            f"needs K % 32 = 0; {', '.join(narrow)} is not"
            if narrow
            else on_a_gpu(scheme, {format_of(each) for each in scheme.all})
        )
        if ragged:
            rows = scheme.layers.block_rows
            vllm = f"fuses linears at whole blocks; N of {', '.join(ragged)} is no multiple of {rows}"
        of_experts = arch.has_experts and not all(each.symmetric for each in scheme.of_layers)
        if of_experts:
            vllm = "takes symmetric codes only in experts"
        stacked = STACKS_ALONE.get(arch.family)
        transformers = "decompresses at load: no speed, no memory saved"
        loads = True
        if not all(each.symmetric for each in scheme.all):
            loads = len(scheme.all) == 1
            transformers = "decompresses at load, as its config asks: no speed, no memory saved"
            if not loads:
                transformers = "keeps zero points only where it decompresses the whole model by one scheme"
        if loads and any(each.scale_type is not None for each in scheme.all):
            transformers = "decompresses at load, to bfloat16 alone: no speed, no memory saved"
        if family_of_arch(arch).in_parts and not all(map(_is_fp8, scheme.all)):
            loads = False
            transformers = "drops tensors that it joins from parts, next to other codes than FP8"
        refused = why_no_codes(arch) or why_no_codes_of(arch, scheme.of_layers)
        if refused := refused or why_transformers_refuses(arch, scheme, self.quant_method):
            loads = False
            transformers = refused
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer("transformers", loads=loads, note=transformers),
            *vllm_builds(
                arch, scheme, stacked or vllm, loads=not (narrow or ragged or of_experts or stacked)
            ),
        ]


def _is_fp8(scheme: Scheme) -> bool:
    return (scheme.type, scheme.num_bits) == ("float", 8)


def _fused_ragged(arch: Arch, scheme: Scheme) -> list[str]:
    """Return linears that end within a block and are followed by another where vLLM fuses q, k and v, the
    linears of their latents, those of a recurrence, or gate and up."""
    fused = [*(name for group in LINEAR_GROUPS.values() for name in group.linears[:-1]), "attn.q_down"]
    mixers = {layer.recurrence for layer in arch.layers if layer.recurrence is not None}
    fused += [name for each in mixers for name in each.first_linears[:-1]]
    ragged = {name for name, (out_features, _) in shapes(arch) if out_features % scheme.block_rows}
    return sorted(ragged.intersection(fused))


FORMATS.add("compressed-tensors", CompressedTensors())
