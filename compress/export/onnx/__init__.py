"""ONNX decoders: a checkpoint whose directory ONNX Runtime and ONNX Runtime GenAI load.

    model.onnx         the graph, with a KV cache; its weights are byte ranges of the next files
    model.safetensors  (or shards) the weights, under the names of a Hugging Face checkpoint
    config.json        the model; `quantization_config` states the schemes of quantized linears
    genai_config.json  inputs, outputs and sizes for ONNX Runtime GenAI

So weights are on disk once, this project reads back what the graph reads, and a dense model is an ordinary
checkpoint, too. All weights and scales are float32, which holds those of 16 bits exactly; the graph computes
in it. `dtype` in config.json stays that of the model, in which this project computes. Quantized linears:

    four bits     <module>.weight_nibbles         uint8 [O, G, group_size / 2]: code + 8, even inputs low
                  <module>.weight_zero_point      uint8 [O, ceil(G / 2)]: zero_point + 8, even groups low;
                                                  asymmetric schemes only
    W8A16         <module>.weight_codes           int8 [O, I]
    INT8_DYNAMIC  <module>.weight_unsigned_codes  uint8 [O, I]: code + 128
    all           <module>.weight_scale           [O, G]

Value = (code - zero_point) * scale. Checked against ONNX Runtime 1.32 and ONNX Runtime GenAI 0.18.
Specifications: the operators of opset 20, and MatMulNBits of ONNX Runtime's contributed operators.

Not written: mixtures of experts, the parts of a model that are none of its language model, and schemes whose
arithmetic ONNX Runtime does not have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import compress
from compress.artifact.tensors import TensorFiles
from compress.errors import UnsupportedFormat
from compress.export import FORMATS, Consumer, Rule
from compress.export.compressed_tensors import CompressedTensors
from compress.export.onnx.decoder import DecoderGraph
from compress.export.onnx.genai import refusal_of_genai, write_genai_config
from compress.export.onnx.graph import Graph
from compress.export.onnx.linears import (
    NIBBLES,
    SCALE,
    SIGNED,
    UNSIGNED,
    UNSIGNED_ZERO,
    ZERO_POINT,
    Linears,
)
from compress.export.rules import exact_scales, layout_rules, whole_group_rules
from compress.models.arch import Arch
from compress.models.family import family_of_arch
from compress.models.gated_sum import GatedSums
from compress.models.layer_shape import XIELU
from compress.models.normed_sum import NormedSums
from compress.plugins import check_extra
from compress.quant.codec import ForeignCodec, check_leaf, check_matrix
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import QuantizedWeight, Scheme

GRAPH_NAME = "model.onnx"
BLOCK_SIZES = (32, 64, 128)
_GROUPS = CompressedTensors()


@dataclass(frozen=True)
class OnnxCodec:
    """Exact inverse pair between a `QuantizedWeight` and its tensors on disk; the scales come back in
    `scale_dtype`."""

    scale_dtype: torch.dtype
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def leaves(self, scheme: Scheme) -> frozenset[str]:
        zeros = set() if scheme.symmetric else {ZERO_POINT}
        return frozenset({_codes_leaf(scheme), SCALE} | zeros)

    def encode(self, weight: QuantizedWeight) -> dict[str, Tensor]:
        scheme = weight.scheme
        codes_OI = weight.codes_OI
        leaves = {SCALE: exact_scales(weight.scale_OG, self.scale_dtype)}
        if scheme.num_bits == 4:
            stored = in_nibbles(codes_OI)
            leaves[NIBBLES] = stored.view(len(codes_OI), weight.scale_OG.shape[1], -1)
            if weight.zero_point_OG is not None:
                leaves[ZERO_POINT] = in_nibbles(weight.zero_point_OG)
        elif scheme.activation is None:
            leaves[SIGNED] = codes_OI
        else:
            leaves[UNSIGNED] = (codes_OI.to(torch.int16) + UNSIGNED_ZERO).to(torch.uint8)
        return leaves

    def decode(self, leaves: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
        out_features, num_groups = check_matrix(leaves, SCALE)
        check_leaf(leaves, SCALE, None, (out_features, num_groups))
        if scheme.num_bits != 4:
            name = _codes_leaf(scheme)
            _, in_features = check_matrix(leaves, name)
            signed = scheme.activation is None
            dtype = torch.int8 if signed else torch.uint8
            stored = check_leaf(leaves, name, dtype, (out_features, in_features))
            check_leaf(leaves, SCALE, None, (out_features, 1))
            codes_OI = stored if signed else (stored.to(torch.int16) - UNSIGNED_ZERO).to(torch.int8)
            return QuantizedWeight(scheme, codes_OI, leaves[SCALE])
        assert scheme.group_size is not None
        shape = (out_features, num_groups, scheme.group_size // 2)
        stored = check_leaf(leaves, NIBBLES, torch.uint8, shape)
        codes_OI = from_nibbles(stored.reshape(out_features, -1), num_groups * scheme.group_size)
        zero_OG = None
        if not scheme.symmetric:
            shape_of_zeros = (out_features, -(-num_groups // 2))
            zero_OG = from_nibbles(check_leaf(leaves, ZERO_POINT, torch.uint8, shape_of_zeros), num_groups)
        return QuantizedWeight(scheme, codes_OI, leaves[SCALE], zero_OG)

    def schemes(self, quantization_config: Mapping[str, Any], linears: list[str]) -> dict[str, Scheme]:
        found = _GROUPS.codec.schemes(quantization_config, linears)
        for linear, scheme in found.items():
            if rule := unwritten(scheme):
                raise UnsupportedFormat(
                    f"the checkpoint's quantization_config gives {linear} a scheme that is not read: "
                    f"{rule.problem}"
                )
        return found

    def kv_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        return None


def _codes_leaf(scheme: Scheme) -> str:
    if scheme.num_bits == 4:
        return NIBBLES
    return SIGNED if scheme.activation is None else UNSIGNED


def in_nibbles(codes: Tensor) -> Tensor:
    """Return four-bit codes [..., n] plus 8 as uint8 [..., ceil(n / 2)], even places in the low bits; a last
    half byte is padded with 0."""
    stored = (codes + 8).to(torch.uint8)
    if stored.shape[-1] % 2:
        stored = torch.nn.functional.pad(stored, (0, 1))
    return stored[..., 0::2] | (stored[..., 1::2] << 4)


def from_nibbles(stored: Tensor, size: int) -> Tensor:
    """Return the first `size` codes int8 [..., size] of bytes that `in_nibbles` wrote."""
    both = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)[..., :size]
    return both.to(torch.int8) - 8


def unwritten(scheme: Scheme) -> Rule | None:
    """Return why weights of this scheme are not written, None where they are."""
    if scheme.type == "float":
        other = "W4A16_G32" if scheme.num_bits == 4 else "W8A16 or INT8_DYNAMIC"
        return Rule(
            "float-codes",
            f"{scheme.name}: ONNX Runtime has no product of these codes; take {other}.",
        )
    if scheme.num_bits == 4 and scheme.activation is not None:
        return Rule(
            "rounded-inputs", f"{scheme.name}: MatMulNBits takes no rows of eight bits; take W4A16_G128."
        )
    if scheme.type == "int" and (scheme.activation == "tensor" or not scheme.input_symmetric):
        return Rule(
            "rounded-inputs",
            f"{scheme.name}: the graph rounds inputs by token and symmetrically; take INT8_DYNAMIC.",
        )
    if scheme.num_bits not in (4, 8):
        return Rule("bits", f"{scheme.num_bits} bits; 4 (MatMulNBits) and 8 (DequantizeLinear) are written.")
    if scheme.num_bits == 4 and scheme.group_size not in BLOCK_SIZES:
        groups = "channels" if scheme.group_size is None else f"groups of {scheme.group_size}"
        return Rule(
            "block-size", f"four bits in {groups}; MatMulNBits is written in blocks of 32, 64 and 128."
        )
    if scheme.num_bits == 8 and (scheme.group_size is not None or not scheme.symmetric):
        return Rule(
            "channel-scales",
            f"{scheme.name}: eight bits are written with one scale a channel and without zero points.",
        )
    return None


class Onnx:
    """The format with all weights in `dtype`, in which the graph computes."""

    static_kv = None

    def __init__(self, quant_method: str, dtype: torch.dtype) -> None:
        self.quant_method = quant_method
        self.dtype = dtype
        self.scale_dtype: torch.dtype | None = dtype
        self.codec: ForeignCodec = OnnxCodec(dtype)

    def check(self) -> None:
        """Raise EnvironmentUnfit where the package that writes graphs is not installed."""
        check_extra("onnx", extra="onnx", needed_by="ONNX graphs")

    def quantization_config(
        self, scheme: ModelScheme, *, head: str, linears: Sequence[str] = (), untouched: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return groups of schemes and dense linears as compressed-tensors states them."""
        stated = _GROUPS.quantization_config(scheme, head=head, linears=linears, untouched=untouched)
        return {
            "quant_method": self.quant_method,
            "config_groups": stated["config_groups"],
            "ignore": stated["ignore"],
        }

    def broken_rules(self, arch: Arch, scheme: ModelScheme) -> list[Rule]:
        rules = [rule for each in scheme.all if (rule := unwritten(each)) is not None]
        if self.dtype != torch.float32:
            rules += [
                Rule(
                    "rounded-inputs",
                    f"{each.name}: the last bit of a 16-bit input decides its code, so that the graph would "
                    "compute other numbers than the scheme; the format onnx computes in float32.",
                )
                for each in scheme.all
                if each.activation is not None and each.type == "int"
            ]
        return [*rules, *layout_rules(arch, scheme, self.quant_method), *whole_group_rules(arch, scheme)]

    def broken_facts(self, arch: Arch) -> list[Rule]:
        """Return the facts of a model, dense or quantized, that the graph does not express."""
        rules = []
        if arch.has_experts:
            rules.append(
                Rule("experts", "layers have a mixture of experts, and the graph has one FFN a layer.")
            )
        if arch.has_recurrences:
            rules.append(Rule("recurrences", "layers have recurrences, and the graph has attention alone."))
        if arch.linear_factors:
            rules.append(
                Rule("linear-factors", "linears have factors of their outputs, and the graph has none.")
            )
        if any(layer.only_half is not None for layer in arch.layers):
            rules.append(
                Rule("half-layers", "layers have attention or an FFN, and the graph has both in each.")
            )
        if family_of_arch(arch).untouched:
            rules.append(
                Rule(
                    "language-model-only",
                    f"{arch.family} models have other parts than a language model, and the graph takes "
                    "tokens only.",
                )
            )
        if arch.has_latents:
            rules.append(
                Rule("latent-attention", "attention has latents, and the graph has linears of q, k and v.")
            )
        if arch.num_streams > 1:
            rules.append(Rule("streams", "the residual is several streams, and the graph has one."))
        if any(layer.sub_norms for layer in arch.layers):
            rules.append(
                Rule("sub-norms", "inputs of the last linears are normed, which the graph does not compute.")
            )
        if isinstance(arch.hyper, GatedSums) or any(layer.out_norm for layer in arch.layers):
            rules.append(
                Rule("gated-sums", "sums have gates, or outputs of heads norms; the graph computes neither.")
            )
        if isinstance(arch.hyper, NormedSums):
            rules.append(
                Rule("normed-sums", "outputs are added to the normed residual, and the graph has other sums.")
            )
        if any(layer.relative is not None for layer in arch.layers):
            rules.append(Rule("relative-logits", "scores have terms of distance, and the graph's have none."))
        if any(layer.alibi is not None for layer in arch.layers):
            rules.append(Rule("alibi", "scores fall with the distance of keys, and the graph's do not."))
        if arch.qkv_clip is not None:
            rules.append(Rule("clipped-qkv", "q, k and v are clipped, and those of the graph are not."))
        if any(layer.residual_convs is not None for layer in arch.layers):
            rules.append(Rule("convolutions", "layers have convolutions, which the graph does not compute."))
        if arch.embed_norm_weight or arch.head_vocab or any(layer.scaled_ffn for layer in arch.layers):
            rules.append(
                Rule(
                    "factors-of-rows",
                    "the norm of the embedding has a weight, rows of the head are padding, or outputs of "
                    "FFNs have a factor; the graph has none of these.",
                )
            )
        if arch.laurel_rank:
            rules.append(
                Rule("laurel", "a residual around attention is added, which the graph does not have.")
            )
        if any(layer.gate_sparsity is not None for layer in arch.layers):
            rules.append(Rule("sparse-gates", "gates of FFNs are sparse, which the graph does not compute."))
        if arch.own_qk_norm:
            rules.append(
                Rule("norms-of-heads", "heads have norms of their own, and the graph has one for all.")
            )
        if arch.kv_sources:
            rules.append(
                Rule("shared-keys-values", "layers share keys and values, and each of the graph has its own.")
            )
        if arch.layer_embed_size:
            rules.append(
                Rule(
                    "layer-embeddings",
                    "tokens have embeddings for each layer, which the graph does not read.",
                )
            )
        if any(layer.norm_gate_rank for layer in arch.layers):
            rules.append(Rule("gated-norms", "norms have gates, which the graph does not compute."))
        if any(layer.output_gate for layer in arch.layers):
            rules.append(
                Rule("output-gate", "attention has an output gate, which the graph does not compute.")
            )
        if any(layer.narrow_value_dim is not None for layer in arch.layers):
            rules.append(Rule("narrow-values", "values are narrower than keys, and the graph has one width."))
        if arch.attn_sinks:
            rules.append(Rule("attention-sinks", "attention has sinks, which the graph does not compute."))
        if arch.activation in ("swiglu_clamped", XIELU):
            rules.append(Rule("activation", f"the activation {arch.activation} is not in the graph."))
        if any(layer.ffn_cap is not None for layer in arch.layers):
            rules.append(Rule("caps", "activations have a cap, which the graph does not compute."))
        if any(layer.chunk is not None for layer in arch.layers):
            rules.append(Rule("chunks", "attention is cut into chunks, which the graph's masks are not."))
        if any(layer.rope is not None and layer.rope.kind == "longrope" for layer in arch.layers):
            rules.append(
                Rule(
                    "longrope",
                    "the frequencies of a longrope depend on the length of the sequence, those of the graph "
                    "do not.",
                )
            )
        return rules

    def consumers(self, arch: Arch, scheme: ModelScheme) -> list[Consumer]:
        kinds = {_operator(each) for each in scheme.all}
        refusal = refusal_of_genai(arch)
        return [
            Consumer("compress runtime", loads=True, note="any scheme that is exported"),
            Consumer("ONNX Runtime", loads=True, note=f"from 1.22 on; {', '.join(sorted(kinds))}"),
            Consumer(
                "ONNX Runtime GenAI",
                loads=refusal is None,
                note=refusal or "by genai_config.json, with the tokenizer of the directory",
            ),
            Consumer("transformers", loads=False, note=f"it knows no quant_method {self.quant_method}"),
            Consumer("vLLM", loads=False, note=f"it knows no quant_method {self.quant_method}"),
        ]

    def write_graph(self, directory: Path, arch: Arch, scheme: ModelScheme | None) -> None:
        """Write the graph over the checkpoint in the directory, and the config of ONNX Runtime GenAI.
        `scheme` has canonical names."""
        family = family_of_arch(arch).in_format(self.quant_method)
        graph = Graph(TensorFiles(directory))
        linears = Linears(graph, arch, family, scheme)
        DecoderGraph(graph, arch, linears, self.dtype).add()
        graph.save(directory / GRAPH_NAME, producer="compress", version=compress.__version__)
        write_genai_config(directory, arch, GRAPH_NAME)


def _operator(scheme: Scheme) -> str:
    if scheme.num_bits == 4:
        return "MatMulNBits in blocks, sums in the dtype of the inputs"
    if scheme.activation is None:
        return "DequantizeLinear of a whole weight a step: exact, not fast"
    return "MatMulInteger of codes by token, exact on every CPU"


FORMATS.add("onnx", Onnx("onnx", torch.float32))
