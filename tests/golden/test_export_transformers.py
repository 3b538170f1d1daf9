"""A quantized checkpoint as `transformers` sees it: it loads without a stray key and computes what our own
decoder computes of it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from compress.calibrate.layer_state import LayerPass
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.export import FORMATS, open_checkpoint
from compress.export.conversion import stated_scheme
from compress.export.format_writer import write_format
from compress.kernels.operands.rows import input_quant, quantize
from compress.methods.quantize.awq import Awq
from compress.methods.quantize.gptq import Gptq
from compress.methods.quantize.passes import RoundPass, SmoothPass
from compress.models.arch import Arch
from compress.models.canonical import layer_name, load_weights
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.family import FAMILIES, family_of_arch
from compress.models.overrides import linear_names, overridden
from compress.models.weights import WeightSource, build_decoder, dense
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import SCHEMES, QuantizedWeight, Scheme
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.stages.budget.spec import scheme_or_dense
from tests.support.split_towers import split_plain_tensors
from tests.support.tiny_cases import CASES
from tests.support.tiny_families import BY_ANOTHER_NAME, SMALL
from tests.support.tiny_hf import attention_of, auto_class, inner_widths, saved, tokens

NUM_LAYERS = 2
WHOLE_GROUPS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "head_dim": 32,
}
EXPORTED = [
    ("llama-gqa", "W4A16_G128"),
    ("llama-all-biases", "W8A16"),
    ("llama-tied", "W4A16_G128"),
    ("mistral-window", "W4A16_G128"),
    ("qwen2", "W4A16_G128"),
    ("qwen2-tied-upper-windows", "W8A16"),
    ("qwen3", "W4A16_G128"),
    ("qwen3-biases", "W8A16"),
    ("llama-gqa", "W4A16_G128_ASYM"),
    ("qwen3-biases", "W4A16_G128_ASYM"),
    ("qwen2", "FP8_DYNAMIC"),
    ("llama-all-biases", "FP8_STATIC"),
    ("qwen2", "W4A16_G64"),
    ("llama-gqa", "W4A16_G64_ASYM"),
    ("llama-gqa", "W4A16_G32"),
    ("mistral-window", "W4A16_G32_ASYM"),
    ("qwen3", "W4A16_CHANNEL"),
    ("llama-gqa", "W3A16_G128"),
    ("qwen2", "W3A16_G64_ASYM"),
    ("qwen3-biases", "W2A16_G64"),
    ("llama-tied", "W3A16_G64"),
    ("mistral-window", "W3A16_G128_ASYM"),
    ("llama-gqa", "W2A16_G128"),
    ("qwen2", "W2A16_G128_ASYM"),
    ("qwen3", "W2A16_G64_ASYM"),
    ("llama-gqa", "W4A8_FP8"),
    ("hunyuan_v1_dense", "W4A16_G128"),
    ("internlm3", "W8A16"),
    ("iquestcoder", "FP8_DYNAMIC"),
    ("youtu", "W4A16_G64"),
    ("llama-gqa", "NVFP4"),
    ("phi3-window-gqa", "NVFP4"),
    ("qwen2", "MXFP4"),
    ("llama-gqa", "NVFP4_W4A4"),
    ("qwen2", "MXFP4_W4A4"),
    ("qwen3", "MXFP8"),
    ("llama-tied", "W4A16_CHANNEL_ASYM"),
    ("qwen3-biases", "INT8_DYNAMIC"),
    ("llama-gqa", "INT8_STATIC"),
    ("qwen2", "INT8_STATIC_ASYM"),
    ("llama-tied", "INT8_DYNAMIC_ASYM"),
    ("llama-all-biases", "FP8_BLOCK"),
    ("phi3-window-gqa", "W4A16_G128"),
    ("phi3-partial-tied", "FP8_STATIC"),
    ("phi3-window-gqa", "W4A16_G64_ASYM"),
    ("gemma", "W4A16_G128"),
    ("gemma2", "W4A16_G128"),
    ("gemma3", "W4A16_G64"),
    ("gemma3-scaled-rope", "FP8_DYNAMIC"),
    ("granite-tied-biases", "W4A16_G128"),
    ("smollm3", "W4A16_G128"),
    ("bitnet", "W4A16_G128"),
    ("bitnet-biases-silu", "FP8_DYNAMIC"),
    ("nanochat", "INT8_DYNAMIC"),
    ("nanochat", "MXFP8"),
    ("nanochat-biases-tied", "FP8_DYNAMIC"),
    ("phi", "W8A16"),
    ("falcon", "INT8_DYNAMIC"),
    ("falcon-one-kv-head", "FP8_DYNAMIC"),
    ("falcon-alibi", "FP8_DYNAMIC"),
    ("phi-all-heads", "FP8_DYNAMIC"),
    ("opt", "W8A16"),
    ("xglm", "W8A16"),
    ("xglm-unscaled-relu", "INT8_DYNAMIC"),
    ("biogpt", "W8A16"),
    ("biogpt-unscaled-relu", "FP8_DYNAMIC"),
    ("persimmon", "W8A16"),
    ("persimmon-plain-heads-tied", "FP8_DYNAMIC"),
    ("codegen", "W8A16"),
    ("codegen-whole-heads", "FP8_DYNAMIC"),
    ("gpt_neo", "W8A16"),
    ("gpt_neo-windows-apart", "FP8_DYNAMIC"),
    ("bloom", "W8A16"),
    ("bloom-apart", "FP8_DYNAMIC"),
    ("mpt", "W8A16"),
    ("mpt-clipped", "FP8_DYNAMIC"),
    ("gptj", "W8A16"),
    ("gptj-whole-heads", "FP8_DYNAMIC"),
    ("gpt_bigcode", "INT8_DYNAMIC"),
    ("gpt_bigcode-all-heads-apart", "FP8_DYNAMIC"),
    ("opt-no-biases-gelu", "FP8_DYNAMIC"),
    ("olmo", "W4A16_G128"),
    ("olmo-biases-tied", "FP8_DYNAMIC"),
    ("olmo-clipped", "FP8_DYNAMIC"),
    ("olmo2", "W4A16_G128"),
    ("olmo3", "FP8_DYNAMIC"),
    ("glm", "W4A16_G128_ASYM"),
    ("glm4", "W4A16_G128"),
    ("glm4", "INT8_DYNAMIC"),
    ("ministral", "W8A16"),
    ("ministral3", "W4A16_G128"),
    ("cohere", "W4A16_G128"),
    ("cohere2", "FP8_DYNAMIC"),
    ("exaone4", "W4A16_G128"),
    ("ernie4_5", "W4A16_G128"),
    ("seed_oss", "W4A16_G128"),
    ("gemma3-vision", "W4A16_G128"),
    ("gemma3n", "W4A16_G32"),
    ("qwen4_exp_text-tied", "FP8_DYNAMIC"),
    ("qwen4_exp", "FP8_DYNAMIC"),
    ("gemma3n-slices", "FP8_DYNAMIC"),
    ("gemma3n-vision", "INT8_DYNAMIC"),
    ("gemma4", "W4A16_G32"),
    ("cohere-norms-of-heads", "W4A16_G128"),
    ("gemma4-vision", "FP8_DYNAMIC"),
    ("gemma4-e", "W4A16_G32"),
    ("gemma4-e-vision", "FP8_DYNAMIC"),
    ("mistral3-ministral3", "FP8_DYNAMIC"),
    ("qwen2_5_vl", "W4A16_G128"),
    ("qwen2_vl", "W4A16_G128"),
    ("llava-mistral", "W4A16_G128"),
    ("glm4v", "FP8_DYNAMIC"),
    ("qwen3_vl", "FP8_DYNAMIC"),
    ("cwm", "W4A16_G128"),
    ("vaultgemma", "FP8_DYNAMIC"),
    ("granitemoehybrid", "W8A16"),
    ("granitemoehybrid-h", "W8A16"),
    ("bamba", "W4A16_G128"),
    ("jamba-dense-tied", "W4A16_G128"),
    ("mamba", "INT8_DYNAMIC"),
    ("mamba2", "FP8_DYNAMIC"),
    ("falcon_mamba", "FP8_DYNAMIC"),
    ("olmo_hybrid", "FP8_BLOCK"),
    ("olmo_hybrid-rope-biases-tied", "FP8_DYNAMIC"),
    ("falcon_h1", "W4A16_G128"),
    ("falcon_h1-norm-biases", "FP8_DYNAMIC"),
    ("nemotron_h", "W4A16_G128"),
    ("arcee", "FP8_DYNAMIC"),
    ("nemotron", "W4A16_G128"),
    ("starcoder2", "FP8_DYNAMIC"),
    ("starcoder2-without-biases", "W8A16"),
    ("gpt_neox", "FP8_DYNAMIC"),
    ("gpt_neox-one-half-after-the-other", "W8A16"),
    ("gpt_neox_japanese", "FP8_DYNAMIC"),
    ("gpt_neox_japanese-half-rotated", "W8A16"),
    ("stablelm", "W8A16"),
    ("stablelm-halves-side-by-side", "INT8_DYNAMIC"),
    ("jais2", "FP8_DYNAMIC"),
    ("apertus", "W4A16_G128"),
    ("apertus-tied-biases", "FP8_DYNAMIC"),
    ("lfm2", "W4A16_G128"),
    ("lfm3", "FP8_DYNAMIC"),
    ("hyperclovax", "W4A16_G128"),
    ("gemma4_unified", "FP8_DYNAMIC"),
    ("gemma4-unified", "W4A16_G64"),
    ("gemma4-unified-shared-keys", "FP8_DYNAMIC"),
    ("glm46v", "W4A16_G128"),
    ("internvl", "W4A16_G128"),
    ("llava_next", "FP8_DYNAMIC"),
    ("mllama", "W4A16_G128"),
    ("molmo2", "W4A16_G128"),
    ("molmo2-olmo", "FP8_DYNAMIC"),
    ("got_ocr2", "W4A16_G128"),
    ("pp_chart2table", "FP8_DYNAMIC"),
    ("deepseek_vl_hybrid", "W4A16_G128"),
    ("qwen2_5_omni", "FP8_DYNAMIC"),
    ("qwen2_5_omni_thinker", "W4A16_G128"),
    ("paligemma", "FP8_DYNAMIC"),
    ("paligemma-gemma2", "W4A16_G128"),
    ("shieldgemma2", "W4A16_G128"),
    ("llava_onevision", "W4A16_G128"),
    ("idefics2", "W4A16_G128"),
    ("idefics3", "FP8_DYNAMIC"),
    ("cosmos3_edge", "W4A16_G128"),
    ("cosmos3_edge-biases", "FP8_DYNAMIC"),
    ("smolvlm", "W4A16_G128"),
    ("muse_glimmer", "FP8_DYNAMIC"),
    ("paddleocr_vl", "W4A16_G128"),
    ("glm_ocr", "FP8_DYNAMIC"),
    ("lfm2_vl", "W4A16_G128"),
    ("lfm3_vl", "FP8_DYNAMIC"),
    ("minicpm3", "W4A16_G128"),
    ("exaone4_5", "FP8_DYNAMIC"),
    ("lighton_ocr", "W4A16_G128"),
    ("hyperclovax_vision_v2", "W4A16_G128"),
    ("granite4_vision", "FP8_DYNAMIC"),
    ("nemotron_h_omni-dense", "W4A16_G128"),
    ("perception_lm", "FP8_DYNAMIC"),
    ("fast_vlm", "W4A16_G128"),
    ("video_llama_3", "FP8_DYNAMIC"),
    ("vipllava", "W4A16_G128"),
    ("cohere_compass_text", "W4A16_G128"),
    ("cohere_compass-vision", "FP8_DYNAMIC"),
    ("audioflamingo3", "W4A16_G128"),
    ("musicflamingo", "FP8_DYNAMIC"),
    ("voxtral", "W4A16_G128"),
    ("qwen2_audio", "FP8_DYNAMIC"),
    ("qwen3_asr", "W4A16_G128"),
    ("granite_speech", "FP8_DYNAMIC"),
    ("granite_speech_plus", "W4A16_G128"),
    ("glmasr", "FP8_DYNAMIC"),
    ("vibevoice_asr", "W4A16_G128"),
    ("fun_asr_nano", "FP8_DYNAMIC"),
    ("llava_next_video", "FP8_DYNAMIC"),
    ("video_llava", "W4A16_G128"),
    ("aya_vision", "FP8_DYNAMIC"),
    ("cohere2_vision", "W4A16_G128"),
    ("ovis2", "FP8_DYNAMIC"),
    ("minicpmv4_6", "W4A16_G128"),
    ("minicpmv4_7", "FP8_DYNAMIC"),
    ("minicpm_ocr", "W4A16_G128"),
    ("qianfan_ocr", "FP8_DYNAMIC"),
    ("qianfan_ocr-tied", "W4A16_G128"),
    ("janus", "W4A16_G128"),
    ("deepseek_vl", "FP8_DYNAMIC"),
    ("granite_docling", "W4A16_G128"),
    ("hunyuan_vl", "FP8_DYNAMIC"),
    ("glmga", "W4A16_G128"),
    ("phi4_multimodal", "FP8_DYNAMIC"),
    ("deepseek_v3-dense", "W4A16_G128"),
    ("deepseek_v3-dense", "FP8_DYNAMIC"),
    ("deepseek_v32-dense", "W4A16_G128"),
    ("helium", "W4A16_G128"),
    ("granite_swa", "FP8_DYNAMIC"),
    ("mimo_v2_flash-dense", "W4A16_G128"),
    ("mimo_v2_flash-dense", "FP8_DYNAMIC"),
    ("inkling_text-dense", "W3A16_G64"),
    ("inkling_text-dense", "FP8_DYNAMIC"),
    ("qwen3_5_text", "W4A16_G128"),
    ("qwen3_5", "FP8_DYNAMIC"),
]
WITH_HEAD = [
    ("llama-gqa", "W4A16_G128", "FP8_DYNAMIC"),
    ("qwen3", "FP8_STATIC", "FP8_DYNAMIC"),
    ("mistral-window", "W4A16_G128", "W8A16"),
    ("qwen2", "INT8_DYNAMIC", "INT8_DYNAMIC"),
    ("mistral-window", "FP8_BLOCK", "FP8_BLOCK"),
]


SEVERAL: list[tuple[str, str, str | None, dict[str, str | None]]] = [
    ("llama-gqa", "FP8_DYNAMIC", None, {"layers.0.*": None}),
    ("qwen3", "W4A16_G128", None, {"*.ffn.down": "FP8_DYNAMIC", "layers.1.attn.o": None}),
    (
        "qwen2",
        "FP8_STATIC",
        "FP8_DYNAMIC",
        {"layers.0.attn.[qkv]": "W8A16", "layers.1.ffn.gate": None, "layers.1.ffn.up": None},
    ),
    ("mistral-window", "INT8_DYNAMIC", "W8A16", {"layers.1.ffn.down": None, "layers.1.*": "W4A16_G64"}),
    ("llama-tied", "W4A16_G128", None, {"*.attn.o": "W4A16_G32", "*.ffn.down": "W8A16"}),
]


class Stored:
    """The canonical files of a run as a weight source."""

    def __init__(self, source: Checkpoint, directory: Path, scheme: ModelScheme | None) -> None:
        self._source = source
        self._directory = directory
        self.scheme = scheme
        self.kv_format: str | None = None

    @property
    def arch(self) -> Arch:
        return self._source.arch

    def outer(self) -> dict[str, Any]:
        head = None if self.scheme is None else self.scheme.head
        outer = self._source.outer()
        return (
            outer
            if head is None
            else outer | {"head.weight": nearest_weight(dense(outer["head.weight"]), head, torch.bfloat16)}
        )

    def layer(self, layer_idx: int) -> dict[str, Any]:
        return load_weights(
            self._directory / layer_name(layer_idx), self.scheme, prefix=f"layers.{layer_idx}."
        )


def quantized(
    tmp_path: Path,
    case: str,
    scheme: Scheme | None,
    head: Scheme | None = None,
    overrides: Mapping[str, str | None] | None = None,
    *,
    kv_scales: bool = False,
) -> tuple[Stored, Path]:
    """Quantize a tiny bf16 model with AWQ and GPTQ and export it; the canonical weights and the exported
    directory. Without a scheme its weights stay dense.
    """
    family, changes = CASES[case]
    layers = {key: value[:NUM_LAYERS] for key, value in changes.items() if key == "layer_types"}
    if "num_kv_shared_layers" in changes:  # the second layer reads the keys and values of the first
        layers = {"layer_types": ["full_attention"] * NUM_LAYERS, "num_kv_shared_layers": 1}
    sizes = {**WHOLE_GROUPS, **layers, **inner_widths(changes, 128)}
    saved(tmp_path / "source", family, {**changes, **sizes}, dtype=torch.bfloat16)
    source = Checkpoint(tmp_path / "source")
    (tmp_path / "canonical").mkdir()
    schemes = {pattern: SCHEMES[name] if name else None for pattern, name in (overrides or {}).items()}
    whole = None if scheme is None else overridden(scheme, schemes, source.arch, head=head)
    passes: list[LayerPass] = []
    if whole is not None:
        passes = [
            SmoothPass(Awq(num_ratios=3), whole, torch.bfloat16),
            RoundPass(Gptq(), whole, torch.bfloat16),
        ]
    ctx = Context("cpu", 0, tmp_path / "canonical")
    run_sequential(
        source,
        tokens(8, 16),
        Compression(passes, scheme=whole, kv_scales=kv_scales),
        ctx.scratch,
        ctx,
        compute_dtype=torch.float32,
    )
    stored = Stored(source, ctx.scratch, whole)
    (tmp_path / "exported").mkdir()
    stored.kv_format = FP8_STATIC if kv_scales else None
    write_format("compressed-tensors", tmp_path / "exported", stored, whole, max_shard_bytes=200_000)
    return stored, tmp_path / "exported"


def rounded_input(
    x: Tensor, input_scale: Tensor | None, dtype: torch.dtype, group_size: int | None = None
) -> Tensor:
    """x on the grid of e4m3 or int8, in x's dtype: one scale a row, or group of its columns, from its largest
    number, or the one given.
    """
    if group_size is not None:
        return rounded_input(x.unflatten(-1, (-1, group_size)), None, dtype).flatten(-2)
    x_f32 = x.to(torch.float32)
    if dtype == torch.int8:
        scale = x_f32.abs().amax(-1, keepdim=True) / 127
        return ((x_f32 / scale).round() * scale).to(x.dtype)
    scale = x_f32.abs().amax(-1, keepdim=True) / 448 if input_scale is None else input_scale
    return ((x_f32 / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale).to(x.dtype)


def decoder_of(source: WeightSource, dtype: torch.dtype) -> Decoder:
    """Our decoder with the inputs of its linears rounded where the scheme says so."""
    decoder = build_decoder(source, dtype=dtype, device=torch.device("cpu"))
    weights = [
        ("", source.outer()),
        *((f"layers.{idx}.", source.layer(idx)) for idx in range(source.arch.num_layers)),
    ]
    for prefix, values in weights:
        for name, value in values.items():
            if isinstance(value, QuantizedWeight) and value.scheme.activation is not None:
                linear = decoder.get_submodule(prefix + name.removesuffix(".weight"))
                linear.register_forward_pre_hook(_rounding(value))
    return decoder


def _rounding(weight: QuantizedWeight) -> Callable[..., tuple[Tensor]]:
    scheme = weight.scheme
    assert scheme.input_dtype is not None
    group_size = scheme.group_size if scheme.activation == "group" else None
    if scheme.scale_type is not None or not scheme.input_symmetric:
        quant = input_quant([weight], torch.device("cpu"))
        assert quant is not None
        return lambda _, inputs: (
            quantize(inputs[0].flatten(0, -2), quant).dequantize(inputs[0].dtype).view_as(inputs[0]),
        )
    return lambda _, inputs: (rounded_input(inputs[0], weight.input_scale, scheme.input_dtype, group_size),)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_every_family_is_exported() -> None:
    dense = {name for name in FAMILIES.names() if FAMILIES.get(name).mixture is None}
    gemma4 = {"gemma4", "gemma4_text", "gemma4_unified"}
    with_and_without = {*gemma4, "deepseek_v3", "deepseek_v32", "granitemoehybrid", "nemotron_h"}
    with_and_without |= {
        "mimo_v2_flash",
        "nemotron_h_omni",
        "inkling_text",
        "qwen4_exp",
        "qwen4_exp_text",
        "jamba",
    }
    # Mixtures of experts: `test_mixtures.py`. What is read by two names is exported by one.
    exported = (dense | with_and_without) - BY_ANOTHER_NAME.keys() - {"gpt2", "openai-gpt"}
    assert {CASES[case][0] for case, _ in EXPORTED} == exported
    assert {scheme for _, scheme in EXPORTED} == set(SCHEMES)


@pytest.mark.parametrize(("case", "scheme_name", "head"), [*((*each, None) for each in EXPORTED), *WITH_HEAD])
@pytest.mark.one_in(48)
def test_transformers_loads_the_export_and_computes_the_same(
    case: str, scheme_name: str, head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_plain_tensors(CASES[case][0], monkeypatch)
    scheme = SCHEMES[scheme_name]
    _, exported = quantized(tmp_path, case, scheme, SCHEMES[head] if head else None)
    model, info = auto_class(CASES[case][0]).from_pretrained(
        exported,
        dtype=torch.bfloat16,
        attn_implementation=attention_of(CASES[case][0]),
        output_loading_info=True,
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    opened = open_checkpoint(exported)
    decoder = decoder_of(opened, torch.bfloat16)
    reference = decoder_of(opened, torch.float32)
    weights_only = build_decoder(opened, dtype=torch.float32, device=torch.device("cpu"))
    original = build_decoder(Checkpoint(tmp_path / "source"), dtype=torch.float32, device=torch.device("cpu"))
    tokens_BS = tokens(2, 16)
    with torch.no_grad():
        theirs = model.eval()(tokens_BS).logits.float()
        ours = decoder(tokens_BS).float()
        exact = reference(tokens_BS)
        before = original(tokens_BS)
        unrounded = weights_only(tokens_BS)
    eps = torch.finfo(torch.bfloat16).eps
    # each of the about ten bf16 roundings a layer moves a logit by eps at random: their root mean square adds
    of_bf16 = eps * (10 * NUM_LAYERS) ** 0.5 * rms(exact)
    # Inputs rounded to e4m3 land on another number when bf16 moves them over a tie: then two programs differ
    # by as much as the rounding itself does, each on its own side of what it would be without.
    bound = of_bf16 + 2**0.5 * rms(exact - unrounded)
    assert rms(theirs - exact) < bound
    assert rms(ours - exact) < bound
    assert rms(theirs - ours) < 2**0.5 * bound
    if scheme.num_bits <= 4:
        assert (
            rms(before - unrounded) > 2 * of_bf16
        )  # 4-bit codes differ from the source by more than bf16 does
    if scheme.input_dtype == torch.float8_e4m3fn:
        assert rms(theirs - unrounded) > of_bf16  # they round the inputs too
    elif scheme.activation is not None:  # to integers, by less than bf16 moves them
        in_float32 = auto_class(CASES[case][0]).from_pretrained(
            exported, dtype=torch.float32, attn_implementation=attention_of(CASES[case][0])
        )
        with torch.no_grad():
            shift = rms(in_float32.eval()(tokens_BS).logits - unrounded)
        assert 0.5 < shift / rms(exact - unrounded) < 2


@pytest.mark.parametrize("case", ["nanochat", "falcon", "gpt_bigcode", "mamba", "mamba2", "falcon_mamba"])
@pytest.mark.one_in(3)
def test_transformers_reads_a_weight_that_packed_codes_have_not(case: str, tmp_path: Path) -> None:
    scheme = SCHEMES["W4A16_G128"]
    _, exported = quantized(tmp_path, case, scheme)
    arch = open_checkpoint(exported).arch
    consumers = FORMATS.get("compressed-tensors").consumers(arch, ModelScheme(scheme))
    (stated,) = [each for each in consumers if each.name == "transformers"]
    assert not stated.loads
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)(tokens(1, 4))


@pytest.mark.parametrize(
    ("case", "scheme_name"),
    [("gpt2", "W4A16_G128"), ("gpt2", "FP8_DYNAMIC"), ("openai-gpt", "FP8_DYNAMIC")],
)
def test_transformers_loads_no_codes_into_linears_of_gpt2(
    case: str, scheme_name: str, tmp_path: Path
) -> None:
    """Its linears are of another class there, whose weights it initializes instead."""
    scheme = SCHEMES[scheme_name]
    stored, exported = quantized(tmp_path, case, scheme)
    opened = open_checkpoint(exported)
    for idx in range(NUM_LAYERS):
        again = opened.layer(idx)
        for name, value in stored.layer(idx).items():
            assert torch.equal(dense(again[name]), dense(value)), name
    (stated,) = [
        each
        for each in FORMATS.get("compressed-tensors").consumers(opened.arch, ModelScheme(scheme))
        if each.name == "transformers"
    ]
    assert not stated.loads
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
    )
    scales = {f"transformer.h.{idx}.attn.c_attn.weight_scale" for idx in range(NUM_LAYERS)}
    assert scales <= set(info["unexpected_keys"])


def opened_by_disk_name(opened: Checkpoint) -> dict[str, Tensor]:
    """Weights of the layers, dequantized, as transformers names them."""
    return {
        f"{opened.family.to_disk(f'layers.{idx}.{module}')}.{leaf}": dense(value)
        for idx in range(NUM_LAYERS)
        for (module, _, leaf), value in (
            (name.rpartition("."), value) for name, value in opened.layer(idx).items()
        )
    }


@pytest.mark.parametrize(
    ("case", "scheme_name"),
    [
        ("llama-gqa", "W4A16_G128"),
        ("qwen3", "W8A16"),
        ("qwen2", "W8A16"),
        ("qwen3", "dense"),
        ("qwen2", "dense"),
    ],
)
def test_transformers_rounds_keys_and_values_by_the_scales_of_the_export(
    case: str, scheme_name: str, tmp_path: Path
) -> None:
    """In float32 and with the same weights to the bit (transformers, asked for float32, does not round them
    to the model's dtype), so that next to nothing but the rounding of the cache is left between the two.
    """
    _, exported = quantized(tmp_path, case, scheme_or_dense(scheme_name), kv_scales=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    opened = open_checkpoint(exported)
    tokens_BS = tokens(2, 16)

    def served(kv_format: str | None) -> Tensor:
        config = EngineConfig(dtype=torch.float32, max_batch_size=2, max_model_len=32, kv_format=kv_format)
        return Engine(opened, device=torch.device("cpu"), config=config).runner.score(tokens_BS)

    with torch.no_grad():
        model.eval()(tokens_BS)  # unpacks the linears
        for name, weight in opened_by_disk_name(opened).items():
            model.get_parameter(name).copy_(weight)
    with torch.inference_mode():
        theirs = model.eval()(tokens_BS).logits
        ours = served(None)
        unrounded = served("DENSE")
    for layer_idx in range(NUM_LAYERS):
        attention = model.get_submodule(f"model.layers.{layer_idx}.self_attn")
        for name in ("k_scale", "v_scale"):
            assert attention.get_parameter(name) == dense(opened.layer(layer_idx)[f"attn.{name}"])
    assert rms(ours - unrounded) > 100 * torch.finfo(torch.float32).eps * rms(unrounded)
    assert (
        rms(theirs - ours) < rms(ours - unrounded) / 10
    )  # a tie that is decided the other way, here and there


@pytest.mark.parametrize(("case", "scheme_name", "head", "overrides"), SEVERAL)
@pytest.mark.one_in(4)
def test_transformers_loads_layers_of_several_schemes_and_computes_the_same(
    case: str, scheme_name: str, head: str | None, overrides: dict[str, str | None], tmp_path: Path
) -> None:
    stored, exported = quantized(
        tmp_path, case, SCHEMES[scheme_name], SCHEMES[head] if head else None, overrides
    )
    opened = open_checkpoint(exported)
    whole = stated_scheme(opened)
    assert {linear: whole.for_linear(linear) for linear in ["head", *linear_names(stored.arch)]} == {
        linear: stored.scheme.for_linear(linear) for linear in ["head", *linear_names(stored.arch)]
    }
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    decoder = decoder_of(opened, torch.bfloat16)
    reference = decoder_of(opened, torch.float32)
    weights_only = build_decoder(opened, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(
        opened,
        device=torch.device("cpu"),
        config=EngineConfig(dtype=torch.float32, max_batch_size=2, max_model_len=48),
    )
    tokens_BS = tokens(2, 16)
    with torch.no_grad():
        theirs = model.eval()(tokens_BS).logits.float()
        ours = decoder(tokens_BS).float()
        served = engine.runner.score(tokens_BS)
        exact = reference(tokens_BS)
        unrounded = weights_only(tokens_BS)
    of_bf16 = torch.finfo(torch.bfloat16).eps * (10 * NUM_LAYERS) ** 0.5 * rms(exact)
    of_inputs = 2**0.5 * rms(exact - unrounded)  # as in the test above
    assert rms(theirs - exact) < of_bf16 + of_inputs
    assert rms(ours - exact) < of_bf16 + of_inputs
    assert rms(served - exact) < 1e-4 * rms(exact) + of_inputs
    weights = dict(model.named_parameters())
    family = family_of_arch(stored.arch)
    for idx in range(NUM_LAYERS):
        for name, value in stored.layer(idx).items():
            disk = family.to_disk(f"layers.{idx}.{name.rpartition('.')[0]}") + "." + name.rpartition(".")[2]
            assert torch.equal(weights[disk].to(torch.bfloat16), dense(value)), disk
            assert torch.equal(dense(opened.layer(idx)[name]), dense(value)), disk


@pytest.mark.parametrize(("case", "scheme_name", "head"), [*((*each, None) for each in EXPORTED), *WITH_HEAD])
@pytest.mark.one_in(48)
def test_the_export_opens_with_the_same_codes_and_scales(
    case: str, scheme_name: str, head: str | None, tmp_path: Path
) -> None:
    scheme = SCHEMES[scheme_name]
    stored, exported = quantized(tmp_path, case, scheme, SCHEMES[head] if head else None)
    opened = open_checkpoint(exported)
    schemes = opened.schemes
    assert schemes.pop("head", None) == (SCHEMES[head] if head else None)
    assert set(schemes) == {
        f"layers.{idx}.{name}" for idx, layer in enumerate(stored.arch.layers) for name in layer.linears
    }
    assert set(schemes.values()) == {scheme}
    assert opened.arch.replace(config={}) == stored.arch.replace(config={})
    pairs = [
        (opened.outer(), stored.outer()),
        *((opened.layer(idx), stored.layer(idx)) for idx in range(NUM_LAYERS)),
    ]
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, QuantizedWeight):
                again = found[name]
                assert isinstance(again, QuantizedWeight)
                assert again.codes_OI.dtype == value.codes_OI.dtype
                assert torch.equal(again.codes_OI.view(torch.uint8), value.codes_OI.view(torch.uint8))
                assert torch.equal(again.scale_OG, value.scale_OG)
                one_byte = value.scheme.scale_type is not None
                assert again.scale_OG.dtype == (torch.float32 if one_byte else torch.bfloat16)
                assert again.scheme == value.scheme
                assert (again.zero_point_OG is None) == value.scheme.symmetric
                assert (again.input_scale is None) == (value.scheme.activation != "tensor")
                assert again.input_scale == value.input_scale
                assert (again.input_global_scale is None) != value.scheme.has_input_global_scale
                assert again.input_global_scale == value.input_global_scale
                if value.zero_point_OG is not None and again.zero_point_OG is not None:
                    assert torch.equal(again.zero_point_OG, value.zero_point_OG)
            else:
                assert torch.equal(dense(found[name]), value), name


@pytest.mark.parametrize(
    ("case", "scheme_name", "head"),
    [
        ("llama-gqa", "W4A16_G128_ASYM", None),
        ("qwen3-biases", "W4A16_G128_ASYM", None),
        ("qwen3", "FP8_STATIC", "FP8_DYNAMIC"),
        ("llama-gqa", "NVFP4_W4A4", None),
        WITH_HEAD[0],
    ],
)
@pytest.mark.one_in(3)
def test_the_library_decompresses_each_weight_to_our_bits(
    case: str, scheme_name: str, head: str | None, tmp_path: Path
) -> None:
    """compressed-tensors' own decompression inside transformers, weight by weight: at load if there are zero
    points, because the checkpoint's config asks for it, else before the first step."""
    stored, exported = quantized(tmp_path, case, SCHEMES[scheme_name], SCHEMES[head] if head else None)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    if SCHEMES[scheme_name].symmetric:
        model(tokens(1, 2))
    weights = dict(model.named_parameters())
    family = family_of_arch(stored.arch)
    for idx in range(NUM_LAYERS):
        for name, value in stored.layer(idx).items():
            disk = family.to_disk(f"layers.{idx}.{name.rpartition('.')[0]}") + "." + name.rpartition(".")[2]
            expected = value.dequantize() if isinstance(value, QuantizedWeight) else value
            assert torch.equal(weights[disk].to(torch.bfloat16), expected), disk
            if isinstance(value, QuantizedWeight) and value.input_scale is not None:
                assert (
                    weights[disk.replace(".weight", ".input_scale")].to(torch.float32) == value.input_scale
                )  # kept in bf16 there
            if isinstance(value, QuantizedWeight) and value.input_global_scale is not None:
                loaded = weights[disk.replace(".weight", ".input_global_scale")]
                assert loaded.to(torch.float32) == value.input_global_scale
    if head is not None:
        assert torch.equal(weights["lm_head.weight"].to(torch.bfloat16), dense(stored.outer()["head.weight"]))
    assert SMALL["vocab_size"] == weights["model.embed_tokens.weight"].shape[0]
