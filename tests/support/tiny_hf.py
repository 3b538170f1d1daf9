"""Tiny random `transformers` models of every family, of the configs in `tiny_families.py` and `tiny_cases`.

Norms and biases are perturbed, so that none of them can be dropped or swapped unseen; weights are large
enough that attention is not uniform.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.hy_v4 import modeling_hy_v4
from transformers.models.mpt import modeling_mpt

from tests.support.tiny_families import ATTENTION_FREE, CONFIGS, NEEDED, OF_OTHERS, SMALL
from tests.support.tiny_wrappers import AROUND

# The class of `transformers` 5.23 rotates halves, the published model neighbours (`archs/hy_v4.py`).
ROTATION_OF_HY_V4 = modeling_hy_v4.apply_rotary_pos_emb
modeling_hy_v4.apply_rotary_pos_emb = modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave


def _biases_of_mpt(
    model: Any, num_heads: int, num_positions: int, *others: Any, **where: Any
) -> torch.Tensor:
    """Return the terms of scores of an MPT with the slopes that its config states. The class of
    `transformers` 5.23 has those of the default, the published code does not (`archs/mpt.py`)."""
    del others
    largest = model.config.attn_config.alibi_bias_max
    return modeling_mpt.build_mpt_alibi_tensor(num_heads, num_positions, largest, **where)


modeling_mpt.MptModel.build_mpt_alibi_tensor = _biases_of_mpt


def inner_widths(changes: dict[str, Any], size: int) -> dict[str, Any]:
    """Return widths by which `size` divides what every linear inside of latent attention with 4 heads, after
    4 heads in windows of Inkling, after
    narrower values of 4 heads, in groups of heads, of a delta net, of a mixer of Falcon-H1, of the FFN of
    Granite 4 H or of MiniMax-M3, or of experts that act on latents reads; none for a case without."""
    of_head = size // 4
    if "d_rel" in changes:
        heads = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": of_head}
        return {**heads, "moe_intermediate_size": size}
    if "linear_value_head_dim" in changes:
        shared = {"shared_expert_intermediate_size": size} if "num_experts" in changes else {}
        return {"linear_num_value_heads": 4, "linear_value_head_dim": of_head, **shared}
    if "mamba_num_heads" in changes:
        shared = {"moe_shared_expert_intermediate_size": size} if "n_routed_experts" in changes else {}
        latents = {"moe_latent_size": size} if "moe_latent_size" in changes else {}
        return {"mamba_num_heads": 4, "mamba_head_dim": of_head, **shared, **latents}
    if "mamba_d_ssm" in changes:
        return {"mamba_d_ssm": 2 * size, "mamba_d_head": "auto"}
    if "mamba_n_heads" in changes and "shared_intermediate_size" in changes:
        return {"shared_intermediate_size": size}
    if "dense_intermediate_size" in changes:
        rotates_in_part = "partial_rotary_factor" in changes["rope_parameters"]
        sizes = dict.fromkeys(("dense_intermediate_size", "shared_intermediate_size"), size)
        sizes["index_head_dim"] = of_head
        return {**sizes, "head_dim": of_head, "rotary_dim": of_head // 2 if rotates_in_part else of_head}
    if "ffn_config" in changes:
        return {"ffn_config": {**changes["ffn_config"], "ffn_hidden_size": size}}
    for field in ("ffn_hidden_size", "ffn_dim", "n_inner"):
        if field in changes:
            return {field: 4 * size}
    if "v_head_dim" in changes and "kv_lora_rank" not in changes:
        return {"head_dim": size // 2, "v_head_dim": of_head}
    if "o_lora_rank" in changes:
        ranks = {"q_lora_rank": size, "o_lora_rank": size // 2, "o_groups": 2}
        return {"num_key_value_heads": 1, **dict.fromkeys(("head_dim", "index_head_dim"), size // 2), **ranks}
    if "moe_hidden_size" in changes:
        return {"moe_hidden_size": size}
    if "kv_lora_rank" not in changes:
        return {}
    delta_net = {"linear_num_heads": 4, "linear_head_dim": of_head} if "linear_head_dim" in changes else {}
    in_windows = {f"swa_{name}": size for name in ("q_lora_rank", "kv_lora_rank")} | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 2 * of_head,
        "swa_qk_nope_head_dim": of_head,
        "swa_v_head_dim": of_head,
        "shared_experts_intermediate_size": size,
        "index_head_dim": size,
    }
    return {
        **delta_net,
        **(in_windows if "swa_v_head_dim" in changes else {}),
        "num_key_value_heads": 4,
        "head_dim": changes["head_dim"]  # what rotates
        if "zero_expert_num" in changes
        else of_head
        if "layer_group_size" in changes
        else None,  # of the delta nets of Ling
        "q_lora_rank": size if changes.get("q_lora_rank") else None,
        "kv_lora_rank": size,
        "qk_nope_head_dim": of_head,
        "v_head_dim": of_head,
    }


OWN_EPS = {"olmo": 1e-5, "dbrx": 1e-5, "opt": 1e-5, "biogpt": 1e-5, "xglm": 1e-5}
"""What the norms of families add that no field states."""

FIXED_ACTIVATIONS = {
    **dict.fromkeys(("gpt_oss", "minimax_m3_vl_text", "minimax_m3_vl"), "swiglu_clamped"),
    **dict.fromkeys(("bloom", "openai-gpt"), "gelu_pytorch_tanh"),
    "mpt": "gelu",
}
"""The activations of families whose configs state none, or by a name that is another elsewhere."""

DERIVED_HEADS = ("falcon",)
"""Families whose configs refuse the size of a head."""

TWICE_IN_WINDOWS = ("mimo_v2_flash",)
"""Families whose layers with a window have twice the KV heads that their configs state."""

FLAT = ("phi4_multimodal",)
"""Wrappers whose config holds the fields of the text model among its own."""

WIDE_AS_TEXT = ("granite_docling", "hunyuan_vl")
"""Families whose vision tower has outputs as wide as the text model."""

HEARS_AS_WIDE = (
    *("qwen3_omni_moe", "qwen3_omni_moe_thinker", "muse_spark"),
    *("qwen2_5_omni", "qwen2_5_omni_thinker"),
)
"""Families whose audio tower has outputs as wide as the text model."""

HEAR_ONLY = (
    *("voxtral", "qwen2_audio", "qwen3_asr", "granite_speech", "granite_speech_plus", "glmasr"),
    *("vibevoice_asr", "fun_asr_nano"),
)
"""Families with an audio tower and no vision tower."""

WITHOUT_SECTIONS = (
    *("exaone4_5", "hyperclovax_vision_v2", "ernie4_5_vl_moe", "glm5_next"),
    "cohere_compass",
)
"""Families with a vision tower of Qwen2.5-VL or like it whose text model has a plain rope, no rope, sections
in another order, or a rope for each type of layer."""


def kv_heads_of(stated: Any, *, in_window: bool = False) -> int:
    """Return the heads of keys and values of a layer, with a window or without, by a configuration of
    `transformers`."""
    if stated.model_type == "inkling_text" and in_window:
        return int(stated.swa_num_key_value_heads)
    if stated.model_type == "falcon":
        one_or_all = 1 if stated.multi_query else stated.num_attention_heads
        return int(stated.num_kv_heads if stated.new_decoder_architecture else one_or_all)
    if stated.model_type == "dbrx":
        return int(stated.attn_config.kv_n_heads)
    return int(getattr(stated, "num_key_value_heads", stated.num_attention_heads))


def ropes_of(stated: Any) -> dict[str, Any]:
    """Return the rope of a configuration of `transformers`, or its ropes by type of layer. The classes of
    GPT-J and CodeGen have a constant base, and state how many dimensions rotate. That of DBRX does not read
    the base that attention states (`archs/dbrx.py`)."""
    if stated.model_type == "dbrx":
        base = getattr(stated.attn_config, "rope_theta", stated.rope_parameters["rope_theta"])
        return {**stated.rope_parameters, "rope_theta": base}
    if stated.model_type not in ("gptj", "codegen"):
        return dict(stated.rope_parameters or {})
    share = stated.rotary_dim * stated.num_attention_heads / stated.hidden_size
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}


def types_of(stated: Any) -> list[str] | None:
    """Return the types of layers of a configuration of `transformers`, None where it has none. The class of
    GPT-Neo has other names of them."""
    if stated.model_type != "gpt_neo":
        return getattr(stated, "layer_types", None)
    names = {"global": "full_attention", "local": "sliding_attention"}
    return [names[kind] for kind in stated.attention_layers]


def window_of(stated: Any) -> int | None:
    """Return the window of a configuration of `transformers`."""
    return getattr(stated, "window_size" if stated.model_type == "gpt_neo" else "sliding_window", None)


def build_config(family: str, changes: dict[str, Any]) -> Any:
    """Return the configuration of a tiny model of that family."""
    stated = copy.deepcopy({**SMALL, **NEEDED.get(family, {}), **changes})
    if family in ATTENTION_FREE:
        stated = {name: value for name, value in stated.items() if name in changes or name not in OF_OTHERS}
    if family == "dbrx":  # its class copies the width for its routers before it reads the other name
        stated["d_model"] = stated.pop("hidden_size")
        stated.pop("num_key_value_heads")  # those of `attn_config` count
    if family == "mamba2":  # its heads are as wide as its factor makes them in sum
        stated["head_dim"] = stated.get("expand", 2) * stated["hidden_size"] // stated["num_heads"]
    if stated.get("head_dim", 0) is None or family in DERIVED_HEADS:
        stated.pop("head_dim", None)
    by_layer = ("layer_types", "layers_block_type", "mlp_layer_types", "activation_sparsity_pattern")
    for name in (*by_layer, "intermediate_size"):
        if isinstance(stated.get(name), list):  # of the model with the most layers; some tests make fewer
            stated[name] = stated[name][: stated["num_hidden_layers"]]
    if "attention_types" in stated:
        types = [kind for kinds, times in stated["attention_types"] for kind in kinds * times]
        stated["attention_types"] = [[types[: stated["num_hidden_layers"]], 1]]
    if stated.get("kv_source_layers"):
        for name in ("kv_source_layers", "no_rope_layers", "indexer_types"):
            stated[name] = stated[name][: stated["num_hidden_layers"]]
    if stated.get("ple_layer_ids"):
        stated["ple_layer_ids"] = [
            each for each in stated["ple_layer_ids"] if each <= stated["num_hidden_layers"]
        ]
    if "cross_attention_layers" in stated:  # tests count the layers of text
        stated["num_hidden_layers"] += len(stated["cross_attention_layers"])
    if family not in AROUND:
        return CONFIGS[family](**stated)
    around = copy.deepcopy(AROUND[family])
    if family in FLAT:
        return CONFIGS[family](**stated, **around)
    around["tie_word_embeddings"] = stated["tie_word_embeddings"]
    if family == "dots3_note":
        for tower in ("vision_config", "audio_config"):
            around[tower]["adapter_out_dim"] = stated["hidden_size"]
    if family == "molmo2":
        around["adapter_config"]["text_hidden_size"] = stated["hidden_size"]
    if family == "fun_asr_nano":
        width = stated["hidden_size"]
        around["adaptor_config"] |= {"hidden_size": width, "intermediate_size": width // 4}
    if family in WIDE_AS_TEXT:
        around["vision_config"]["out_hidden_size"] = stated["hidden_size"]
    sees_in_depth = "depth" in around.get("vision_config", {})
    if sees_in_depth:
        width = "hidden_size" if "embed_dim" in around["vision_config"] else "out_hidden_size"
        around["vision_config"][width] = stated["hidden_size"]
    if (sees_in_depth or family in ("paddleocr_vl", "cosmos3_edge")) and family not in WITHOUT_SECTIONS:
        head_dim = stated.get("head_dim", stated["hidden_size"] // stated["num_attention_heads"])
        rope = stated.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        num_pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [num_pairs - 2 * (num_pairs // 4), num_pairs // 4, num_pairs // 4]
    if family == "ernie4_5_vl_moe":
        num_pairs = stated.get("head_dim", stated["hidden_size"] // stated["num_attention_heads"]) // 2
        rope = stated.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        rope["mrope_section"] = [num_pairs // 4, num_pairs // 4, num_pairs - 2 * (num_pairs // 4)]
    if family == "hunyuan_vl":
        num_pairs = stated.get("head_dim", stated["hidden_size"] // stated["num_attention_heads"]) // 2
        sections = [num_pairs // 4] * 3
        rope = stated.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        rope["mrope_section"] = [*sections, num_pairs - sum(sections)]
    if family in HEARS_AS_WIDE:
        width = "out_hidden_size" if family == "muse_spark" else "output_dim"
        around["audio_config"][width] = stated["hidden_size"]
    if family in OF_THINKERS:
        thinker = {"text_config": stated, **around}
        return CONFIGS[family](thinker_config=thinker, enable_audio_output=False)
    return CONFIGS[family](text_config=stated, **around)


OF_THINKERS = ("qwen3_omni_moe", "qwen2_5_omni")
"""Families whose text model is inside of another wrapper, beside one that speaks."""


class Thinkers:
    """Loads models that speak, as what computes their text."""

    @staticmethod
    def from_config(config: Any, **how: Any) -> Any:
        model = transformers.AutoModelForMultimodalLM.from_config(config, **how)
        model.forward = model.thinker.forward
        return model

    @staticmethod
    def from_pretrained(path: Path, **how: Any) -> Any:
        of_voices = transformers.Qwen2_5OmniForConditionalGeneration
        if json.loads((path / "config.json").read_text())["model_type"] == "qwen2_5_omni":
            # Its own method looks for a pickle of voices after this.
            found = super(of_voices, of_voices).from_pretrained(path, **how)
        else:
            found = transformers.AutoModelForMultimodalLM.from_pretrained(path, **how)
        model = found[0] if isinstance(found, tuple) else found
        model.forward = model.thinker.forward
        return found


class Classifiers:
    """Loads classifiers, as what computes the logits of all tokens."""

    @staticmethod
    def from_config(config: Any, **how: Any) -> Any:
        model = transformers.AutoModelForImageClassification.from_config(config, **how)
        model.forward = model.model.forward
        return model

    @staticmethod
    def from_pretrained(path: Path, **how: Any) -> Any:
        found = transformers.AutoModelForImageClassification.from_pretrained(path, **how)
        model = found[0] if isinstance(found, tuple) else found
        model.forward = model.model.forward
        return found


def auto_class(family: str) -> Any:
    """Return the class that loads models of a family."""
    if family == "shieldgemma2":
        return Classifiers
    if family in OF_THINKERS:
        return Thinkers
    if family in ("audioflamingo3", "musicflamingo"):
        return transformers.AutoModelForSeq2SeqLM
    if family in HEAR_ONLY:
        return transformers.AutoModelForMultimodalLM
    if family in AROUND and family not in FLAT:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def attention_of(family: str) -> str:
    """Return the attention that models of a family compute in tests. Falcon in `transformers` 5.23 adds the
    terms of ALiBi twice where it is eager."""
    return "sdpa" if family == "falcon" else "eager"


def build(family: str, changes: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of that family on the CPU, in eval mode."""
    config = build_config(family, changes)
    torch.manual_seed(seed)
    model = auto_class(family).from_config(config, attn_implementation=attention_of(family))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 or (parameter.dim() == 2 and name.endswith(("_bias", "_norm.weight"))):
                parameter.copy_(parameter + 0.3 * noise)
                if family.startswith(("gemma3n", "gemma4")) and name.endswith("self_attn.q_norm.weight"):
                    parameter.mul_(parameter.numel() ** -0.5)  # these have no other scale of their scores
            else:
                parameter.copy_(noise * parameter.shape[1 if parameter.dim() == 2 else -1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("rotary_emb.alpha"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):
                num_experts = model.config.n_routed_experts
                choices = torch.rand(len(buffer), num_experts, generator=generator).argsort(-1)
                buffer.copy_(choices[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model.to(dtype).eval()


def saved(directory: Path, family: str, changes: dict[str, Any], **how: Any) -> Any:
    """Save such a model as `transformers` does, and return it."""
    shard = {"max_shard_size": how.pop("max_shard_size")} if "max_shard_size" in how else {}
    model = build(family, changes, **how)
    model.save_pretrained(directory, **shard)
    if family in SAVED_OTHERWISE:
        rename(directory, SAVED_OTHERWISE[family])
    if family == "olmo_hybrid":
        save_as_published(directory, model)
    if family == "molmo2":
        cut_as_published(directory, model.config.get_text_config().vocab_size)
    return model


# Names that `transformers` 5.23 saves and no checkpoint has: it takes the layers of the text model for those
# of the vision tower, does not put a prefix back, or renames the FFN of dense layers with the experts.
SAVED_OTHERWISE = {
    "deepseek_v4": {
        "model.embed_tokens.": "embed.",
        "model.layers.": "layers.",
        "model.norm.": "norm.",
        "model.hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    },
    "hy_v4": {
        "model.hc_pre.hc_head.": "model.hc_head.",
        ".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.",
        ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
        ".mlp.linear_gate.": ".mlp.gate_proj.",
        ".shared_experts.linear_gate.": ".shared_experts.gate_proj.",
    },
    "kimi_linear": {
        f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")
    },
    "kimi_k25": {"language_model.model.blocks.": "language_model.model.layers."},
    "shieldgemma2": {
        f"model.model.{part}.": f"model.{part}."
        for part in ("language_model", "vision_tower", "multi_modal_projector")
    },
    "qianfan_ocr": {"language_model.model.encoder.layers.": "language_model.model.layers."},
    "hyperclovax_vision_v2": {
        f"language_model.{part}.": f"language_model.model.{part}."
        for part in ("layers", "embed_tokens", "norm")
    },
}


def save_as_published(directory: Path, model: Any) -> None:
    """Save the tensors of an OLMo Hybrid as they are published: with the names of modules in memory, and the
    convolution in those of queries, keys and values. `transformers` 5.23 cuts it into thirds."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("linear_attn.conv1d.weight"):
            key_size = model.get_parameter(name.replace("conv1d", "q_proj")).shape[0]
            sizes = [key_size, key_size, len(tensor) - 2 * key_size]
            for kind, part in zip("qkv", tensor.split(sizes), strict=True):
                tensors[name.replace("conv1d", f"{kind}_conv1d")] = part.clone()
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor.contiguous()
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cut_as_published(directory: Path, vocab_size: int) -> None:
    """Cut the embedding of a Molmo 2 after the tokens that have logits. `transformers` 5.23 cuts it in
    halves."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.transformer.wte.{part}" for part in ("embedding", "new_embedding")]
    whole = torch.cat([tensors[name] for name in names])
    tensors |= zip(names, (part.clone() for part in whole.tensor_split([vocab_size])), strict=True)
    save_file(tensors, file, metadata={"format": "pt"})


def rename(directory: Path, parts: dict[str, str]) -> None:
    """Give the tensors of a checkpoint of one file other names."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for saved_part, part in parts.items():
        tensors = {name.replace(saved_part, part): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def tokens(num_sequences: int, length: int) -> torch.Tensor:
    return torch.randint(
        SMALL["vocab_size"], (num_sequences, length), generator=torch.Generator().manual_seed(5)
    )
