"""The kernels of vLLM 0.32 for the checkpoints written here, for GPUs and in its CPU build."""

from collections.abc import Collection
from dataclasses import replace

from compress.export import Consumer, vllm_untested
from compress.export.experts import has_several_schemes
from compress.models.arch import Arch
from compress.models.mixture import FIRST_DENSE
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Scheme

ROUTERS = {
    "ernie4_5_moe": "its router on a CPU leaves out the bias of a softmax",
    **dict.fromkeys(("minimax_m2", "laguna"), "its router on a CPU takes no sigmoid without groups"),
}
"""Families whose routers vLLM's CPU build does not compute, and why."""
BIASED_SELECTION = (
    "it has no kernel for experts of four bits behind a router with a bias of selection ('No WNA16 MoE "
    "backend supports ...')"
)
MIXED_SELECTION = (
    "its experts of four bits are chosen by a softmax alone, whatever the router of the model is"
)
OF_TRITON = {
    "olmo_hybrid": "its class of OLMo Hybrid sets an allocator of Triton, which its CPU build has not"
}
"""Families whose classes in vLLM's CPU build (0.32) need Triton, and why: 'module 'triton' has no attribute
'set_allocator''."""
NARROW_VALUES = "it has no attention whose values are narrower than keys"
LATENTS = "it computes latent attention otherwise than transformers, of dense weights too"
"""Why its CPU build (0.32) is stated to load no model with latent attention: only its first token agrees."""

SHORT_CONVS = "it computes short convolutions otherwise than transformers, in every scheme"
"""Its CPU build (0.32) is stated to load no model with them: log-probabilities differ by 0.13 on average."""
DELTA_NETS = "gated delta nets in bfloat16 alone"
"""Its CPU build (0.32) refuses other dtypes: 'CPU GDN attention requires BF16.'"""
UNGATED_EXPERTS = "it has no experts without gates ('is_act_and_mul=False is supported only for CUDA, ...')"
RENAMED = "it looks up the linears of Mamba-2 mixers by another name (mixer)"
"""So it finds no codes of those in `gptq`: 'KeyError: layers.0.mamba.in_proj.qweight'. The class of Falcon-H1
also looks up those of attention and of the FFN by others."""
MIMO_STATES = (
    "hybrid_layer_pattern",
    "moe_layer_freq",
    "layernorm_epsilon",
    "rope_theta",
    "swa_rope_theta",
    "partial_rotary_factor",
    "sliding_window_size",
    "add_swa_attention_sink_bias",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
)
"""Fields of MiMo-V2-Flash that vLLM's class reads; configs that `transformers` writes have others."""
MIMO_WINDOW = (
    "its windows hold sliding_window_size positions with the query, and those of transformers one more"
)
FALCON_FACTOR = 4
"""The width of FFNs over that of hidden states in vLLM's class of Falcon."""
PHIMOE_CLASS = "PhiMoEForCausalLM"
PHIMOE_JITTER = 0.01
"""The name of vLLM's class of Phi-3.5-MoE, and the jitter of its router."""
TRANSPOSED = "its class of GPT-2 transposes all that is named `weight` in a linear, codes, too"
"""Why vLLM does not load codes of GPT-2 that have that name."""
KIMI_STATES = ("linear_attn_config", "mla_use_nope")
"""Fields of Kimi Linear that vLLM's class reads; configs that `transformers` writes may have others."""
STACKS_ALONE = {
    "aria": "its class of Aria loads the experts of a layer from one tensor for each product only"
}
"""Families whose experts vLLM does not gather from tensors of each, and why."""
UNKNOWN = {
    **vllm_untested.reasons(),
    "gemma3n_text": "its class of Gemma 3n looks up dense linears by names of its own, takes them for codes, "
    "and computed other logits of a tiny model where it did not",
    "axk2": "it knows no model_type axk2",
    "dots3_note": "it knows no model_type dots3_note",
    "dots3_note_text": "it knows no model_type dots3_note_text",
    "inkling_text": "it has no class for the text model of Inkling alone",
    "minimax_m3_vl_text": "it has no class for the text model of MiniMax-M3 alone",
    "mllama": "it has had no class for Llama 3.2 Vision after 0.10.2",
    "persimmon": "it has had no class for Persimmon after 0.25.0",
    "nanochat": "it knows no model_type nanochat",
    "minicpm_ocr": "it knows no model_type minicpm_ocr",
    "qwen3_omni_moe_thinker": "it has no class for the thinker of Qwen3-Omni alone",
    "NemotronH_Nano_Omni_Reasoning_V3": "it knows this model_type by the code of a checkpoint only",
    "bamba": "it has no class for Bamba, and loads others with attention in every layer",
    "jamba": "its Mamba-1 mixers have dense linears alone, and no export of Jamba was tested with it",
    "mamba": "its Mamba-1 mixers have dense linears alone, and no export of Mamba was tested with it",
    "falcon_mamba": "its Mamba-1 mixers have dense linears alone, and no export of Falcon Mamba was tested "
    "with it",
    "flint": "it knows no model_type flint",
    "kolibri1": "it knows no model_type kolibri1",
    "internlm3": "it knows the model_type internlm3 by the code of a checkpoint only",
    "lfm3": "it knows no model_type lfm3",
    "lfm3_vl": "it knows no model_type lfm3_vl",
    "vlm": "it knows the model_type vlm by the code of a checkpoint only",
    "hyperclovax_vision_v2": "it knows no model_type hyperclovax_vision_v2",
    "mistral_large4": "it knows no model_type mistral_large4",
    "granite_docling": "it knows no model_type granite_docling",
    "ernie4_5_vl_moe": "it reads this model by the config of a checkpoint with its own code only",
    "phi4_multimodal": "it knows this model by the code of a checkpoint (phi4mm) only",
    "phi4mm": "it knows the model_type phi4mm by the code of a checkpoint only",
    "iquestcoder": "it knows the model_type iquestcoder by the code of a checkpoint only",
}
"""Families of which vLLM 0.32 loads no checkpoint without code of its own, and why."""


def why_vllm_refuses(arch: Arch, scheme: ModelScheme) -> str | None:
    """Return why vLLM does not load a model in any format, None where the format decides."""
    if arch.family == "afmoe" and arch.qkv_bias:
        return "its attention of Trinity has no biases"
    if arch.family == "olmo_hybrid" and arch.qkv_bias:
        return "its attention of OLMo Hybrid has no biases"
    if arch.family == "axk1" and arch.config.get(FIRST_DENSE) is None:
        return f"its class of A.X K1 reads {FIRST_DENSE}, which this config does not state"
    if arch.family == "kimi_linear" and (reason := _why_kimi_refused(arch)):
        return reason
    if arch.family == "mimo_v2_flash" and (reason := _why_mimo_refused(arch)):
        return reason
    if arch.family == "falcon" and any(
        each.intermediate_size != FALCON_FACTOR * arch.hidden_size for each in arch.layers
    ):
        return f"its class of Falcon has FFNs {FALCON_FACTOR} times as wide as the hidden states"
    if arch.family == "falcon" and arch.layers[0].alibi is not None:
        return "no export of a Falcon with ALiBi was tested with it"
    if arch.family == "phimoe" and (reason := _why_phimoe_refused(arch)):
        return reason
    if arch.family == "gpt2" and (reason := _why_gpt2_refused(arch, scheme)):
        return reason
    if arch.family == "bloom" and (reason := _why_bloom_refused(arch, scheme)):
        return reason
    if has_several_schemes(arch, scheme):
        return "takes one scheme for all linears of a layer's experts"
    renamed = "." if arch.family == "falcon_h1" else ".mamba."
    is_by_name = len(scheme.of_layers) > 1 or any(renamed in linear for linear in scheme.dense)
    if is_by_name and renames_mixers(arch):
        return f"{RENAMED}, and finds neither schemes of theirs nor that they are dense"
    return UNKNOWN.get(arch.family)


def _why_gpt2_refused(arch: Arch, scheme: ModelScheme) -> str | None:
    """Return why vLLM does not load, or computes otherwise, a GPT-2, None where it does neither."""
    if arch.attn_scale is not None:
        return "its class of GPT-2 scales attention scores, whatever scale_attn_weights says"
    if arch.config.get("reorder_and_upcast_attn"):
        return "its class of GPT-2 takes no config with reorder_and_upcast_attn"
    return TRANSPOSED if any(_is_a_byte_each(each) for each in scheme.all) else None


def _why_bloom_refused(arch: Arch, scheme: ModelScheme) -> str | None:
    """Return why vLLM does not load a BLOOM, None where it does. It puts the rows of q, k and v in another
    order as it reads each tensor of them, by the number of rows."""
    if not arch.tied_head:
        return "its class of BLOOM has no head apart from the embedding"
    if not all(_is_a_byte_each(each) and each.strategy == "channel" for each in scheme.all):
        return "its class of BLOOM orders rows of q, k and v, and takes neither packed codes nor block scales"
    return None


def _is_a_byte_each(scheme: Scheme) -> bool:
    """Return whether a checkpoint has weights of a scheme as numbers of a byte each, not packed."""
    return scheme.num_bits == 8 and (scheme.type == "float" or scheme.activation is not None)


def _why_phimoe_refused(arch: Arch) -> str | None:
    """Return why vLLM does not load, or computes otherwise, a Phi-3.5-MoE, None where it does neither."""
    if PHIMOE_CLASS not in (arch.config.get("architectures") or ()):
        return f"it knows the class {PHIMOE_CLASS}, which this config does not name"
    if arch.head_bias:
        return "its class of Phi-3.5-MoE loads the bias of the head and does not add it"
    jitters = {layer.experts.jitter for layer in arch.layers if layer.experts is not None}
    if jitters != {PHIMOE_JITTER}:
        return f"its router of Phi-3.5-MoE has a router_jitter_noise of {PHIMOE_JITTER:g}, whatever is stated"
    return None


def _why_kimi_refused(arch: Arch) -> str | None:
    """Return why vLLM's class of Kimi Linear does not load a model, None where it does."""
    if arch.qkv_bias or arch.o_bias or any(each.latent and each.latent.q_rank for each in arch.layers):
        return "its class of Kimi Linear has no latent of queries and no biases"
    absent = [name for name in KIMI_STATES if not arch.config.get(name)]
    if absent:
        return f"its class of Kimi Linear reads {' and '.join(absent)}, which this config does not state"
    return None


def _why_mimo_refused(arch: Arch) -> str | None:
    """Return why vLLM's class of MiMo-V2-Flash does not load a model, None where it does."""
    absent = [name for name in MIMO_STATES if arch.config.get(name) is None]
    if absent:
        return f"its class of MiMo-V2-Flash reads {', '.join(absent)}, which this config does not state"
    ropes = {layer.rope.kind for layer in arch.layers if layer.rope is not None}
    scales = {layer.experts.scale for layer in arch.layers if layer.experts is not None}
    if ropes != {"default"} or scales - {1.0}:
        return "its class of MiMo-V2-Flash has plain ropes and no factor of the weights of experts"
    return None


def renames_mixers(arch: Arch) -> bool:
    """Return whether vLLM looks up the linears of Mamba-2 mixers by other names than a model has."""
    return arch.family in ("granitemoehybrid", "falcon_h1") and arch.has_recurrence("mamba")


def vllm_builds(
    arch: Arch, scheme: ModelScheme, note: str, *, loads: bool = True, cpu_refused: str | None = None
) -> tuple[Consumer, Consumer]:
    """Return how vLLM and its CPU build load a checkpoint. Where `loads` is false, `note` is the reason;
    `cpu_refused` is one of the CPU build alone."""
    refused = why_vllm_refuses(arch, scheme) or (None if loads else note)
    if arch.family == "mimo_v2_flash":
        note = f"{note}; {MIMO_WINDOW}"
    on_gpu = Consumer("vLLM", loads=refused is None, note=refused or note)
    return on_gpu, on_a_cpu(arch, scheme, refused=refused or cpu_refused)


def on_a_cpu(arch: Arch, scheme: ModelScheme, *, refused: str | None = None) -> Consumer:
    """Return how vLLM's CPU build loads a checkpoint; its kernels are fewer than those for GPUs."""
    name = "vLLM on a CPU"
    refused = refused or ROUTERS.get(arch.family) or (LATENTS if arch.has_latents else None)
    refused = refused or OF_TRITON.get(arch.family)
    refused = refused or (SHORT_CONVS if arch.has_recurrence("conv") else None)
    if refused is not None:
        return Consumer(name, loads=False, note=refused)
    if any(layer.narrow_value_dim is not None for layer in arch.layers):
        return Consumer(name, loads=False, note=NARROW_VALUES)
    if any(layer.experts is not None and not layer.gated for layer in arch.layers):
        return Consumer(name, loads=False, note=UNGATED_EXPERTS)
    experts = _of_experts(arch, scheme)
    if any(each.type == "float" and each.num_bits == 8 and each.block_rows == 1 for each in experts):
        return Consumer(name, loads=False, note="it has no FP8 experts ('Unsupported FP8 MoE backend')")
    if any(each.type == "int" and each.num_bits == 8 and each.activation is not None for each in experts):
        return Consumer(name, loads=False, note="it has no INT8 experts ('No Int8 MoE backend supports ...')")
    is_biased = any(layer.experts is not None and layer.experts.selection_bias for layer in arch.layers)
    if is_biased and any(each.type == "int" and each.num_bits == 4 for each in experts):
        return Consumer(name, loads=False, note=BIASED_SELECTION)
    is_mixed = any(
        layer.experts is not None and layer.experts.score == "sparsemixer" for layer in arch.layers
    )
    if is_mixed and any(each.type == "int" and each.num_bits == 4 for each in experts):
        return Consumer(name, loads=False, note=MIXED_SELECTION)
    if rows := _rows_of_mixers(arch, scheme):
        note = f"its kernel of four bits takes N % 32 = 0, and Mamba-2 mixers have {rows}"
        return Consumer(name, loads=False, note=note)
    found = _linears_on_a_cpu(name, scheme)
    if not found.loads:
        return found
    notes = [found.note]
    if experts:
        notes.append("experts on a CPU with AMX alone")
    if arch.has_recurrence("delta"):
        notes.append(DELTA_NETS)
    return replace(found, note="; ".join(notes))


def _rows_of_mixers(arch: Arch, scheme: ModelScheme) -> int | None:
    """Return the rows of the first linears of Mamba-2 mixers in four bits, one tensor, where they are no
    multiple of 32."""
    if not any(each.type == "int" and each.num_bits == 4 for each in scheme.all):
        return None
    mixers = [
        layer.recurrence
        for layer in arch.layers
        if layer.recurrence is not None and layer.recurrence.module == "mamba"
    ]
    shapes = [(each.first_linears, each.linear_shapes(arch.hidden_size)) for each in mixers]
    sums = [sum(of_linear[name][0] for name in first) for first, of_linear in shapes]
    return next((rows for rows in sums if rows % 32), None)


def _linears_on_a_cpu(name: str, scheme: ModelScheme) -> Consumer:
    """Return how vLLM's CPU build loads linears that every token goes through."""
    if any(each.type == "int" and each.num_bits == 8 and each.activation is None for each in scheme.all):
        return Consumer(name, loads=False, note="it has no kernel for 8-bit weights with 16-bit inputs")
    if any(each.scale_type is not None for each in scheme.all):
        in_four_bits = any(each.scale_type is not None and each.num_bits == 4 for each in scheme.all)
        floats = "four-bit floats" if in_four_bits else "floats with scales of one byte"
        return Consumer(name, loads=False, note=f"it has no kernel for {floats}")
    if few := _few_bits(scheme):
        return Consumer(name, loads=False, note=f"it has no kernel for weights of {few} bits")
    if _has_float_inputs(scheme):
        return Consumer(name, loads=False, note="it has no kernel for four-bit weights with FP8 inputs")
    if any(each.activation == "tensor" and each.type == "float" for each in scheme.all):
        return Consumer(name, loads=False, note="it takes no static scale of inputs with channel scales")
    if any(each.block_rows > 1 for each in scheme.all):
        return Consumer(
            name, loads=True, note="only on a CPU with AMX, which its kernel for FP8 blocks needs"
        )
    if any(each.type == "int" and each.activation is not None for each in scheme.all):
        return Consumer(
            name,
            loads=True,
            note="in bfloat16 on a CPU with AMX, in any dtype without; wrongly on one that lacks VNNI",
        )
    if any(each.type == "int" and each.activation is None for each in scheme.all):
        return Consumer(name, loads=True, note="in bfloat16 or float16")
    return Consumer(name, loads=True, note="weights and inputs in FP8, products in wider numbers")


def on_a_gpu(scheme: ModelScheme, forms: Collection[str]) -> str:
    """Return how vLLM computes a checkpoint of these compressed-tensors forms on a GPU."""
    notes = [f"reads {' and '.join(sorted(forms))} natively"]
    if few := _few_bits(scheme):
        notes.append(f"multiplies {few} bits by the kernels of the package humming, from sm_75")
    notes += [_BYTE_SCALES[each] for each in dict.fromkeys(map(_byte_scales, scheme.all)) if each is not None]
    if any(each.type == "float" and each.num_bits == 8 and each.scale_type is None for each in scheme.all):
        notes.append("multiplies in FP8 from sm_89 on, below that it takes the weights only")
    if any(each.block_rows > 1 for each in scheme.all):
        notes.append("multiplies blocks from sm_90 on its fast kernels")
    if any(each.type == "int" and each.num_bits == 8 and each.activation is not None for each in scheme.all):
        notes.append("multiplies in INT8 from sm_75 to sm_90")
    if _has_float_inputs(scheme):
        notes.append(
            "multiplies four-bit weights in FP8 on sm_90 alone, and rounds their scales to e4m3 first"
        )
    return "; ".join(notes)


_BYTE_SCALES = {
    (4, "e4m3", False): "multiplies four-bit floats with 16-bit inputs, from sm_75",
    (4, "e4m3", True): "multiplies in FP4 from sm_100 on, below that it takes the weights only, from sm_75",
    (4, "e8m0", False): (
        "multiplies four-bit floats from sm_80; from sm_100 on it rounds the inputs to MXFP4, too"
    ),
    (4, "e8m0", True): "multiplies in FP4 from sm_100 on, below that it takes the weights only, from sm_80",
    (8, "e8m0", True): "multiplies in MXFP8 from sm_100 on, below that it takes the weights only, from sm_80",
}
"""How floats with scales of one byte are multiplied: by their bits, the type of the scales, and whether
inputs are rounded, too. Read from the kernels' own conditions (`vllm/model_executor/kernels/linear`)."""


def _byte_scales(scheme: Scheme) -> tuple[int, str, bool] | None:
    return (
        None
        if scheme.scale_type is None
        else (scheme.num_bits, scheme.scale_type, scheme.activation is not None)
    )


def _of_experts(arch: Arch, scheme: ModelScheme) -> set[Scheme]:
    """Return the schemes of the linears of experts, shared ones aside."""
    found = {
        scheme.for_linear(f"layers.{idx}.{name}")
        for idx, layer in enumerate(arch.layers)
        for name in layer.linears
        if name.startswith("moe.experts.")
    }
    return {each for each in found if each is not None}


def _has_float_inputs(scheme: ModelScheme) -> bool:
    """Return whether integer codes have float inputs of eight bits."""
    return any(each.type == "int" and each.activation_type == "float" for each in scheme.all)


def _few_bits(scheme: ModelScheme) -> str:
    """Return the numbers of bits below four that integer codes have, "2 and 3" for both."""
    found = {each.num_bits for each in scheme.all if each.type == "int" and each.num_bits < 4}
    return " and ".join(map(str, sorted(found)))
