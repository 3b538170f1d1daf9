"""Tiny random `transformers` models of every family, with the variants in which configs of a family differ.

Norms and biases are perturbed, so that none of them can be dropped or swapped unseen; weights are large
enough that attention is not uniform.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.hy_v4 import modeling_hy_v4

# The class of `transformers` 5.23 rotates halves, the published model neighbours (`archs/hy_v4.py`).
ROTATION_OF_HY_V4 = modeling_hy_v4.apply_rotary_pos_emb
modeling_hy_v4.apply_rotary_pos_emb = modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave


class Tower(transformers.PreTrainedModel):
    """A matrix in place of the vision tower of Gemma 3n, which a package computes that is not installed."""

    config_class = transformers.Gemma3nVisionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.timm_model = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


transformers.AutoModel.register(transformers.Gemma3nVisionConfig, Tower, exist_ok=True)

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "phi3": transformers.Phi3Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "gemma3n_text": transformers.Gemma3nTextConfig,
    "gemma4_text": transformers.Gemma4TextConfig,
    "granite": transformers.GraniteConfig,
    "smollm3": transformers.SmolLM3Config,
    "olmo": transformers.OlmoConfig,
    "nanochat": transformers.NanoChatConfig,
    "phi": transformers.PhiConfig,
    "falcon": transformers.FalconConfig,
    "opt": transformers.OPTConfig,
    "gpt2": transformers.GPT2Config,
    "gpt_bigcode": transformers.GPTBigCodeConfig,
    "phimoe": transformers.PhimoeConfig,
    "olmo2": transformers.Olmo2Config,
    "olmo3": transformers.Olmo3Config,
    "olmo_hybrid": transformers.OlmoHybridConfig,
    "glm": transformers.GlmConfig,
    "glm4": transformers.Glm4Config,
    "ministral": transformers.MinistralConfig,
    "ministral3": transformers.Ministral3Config,
    "cohere": transformers.CohereConfig,
    "cohere2": transformers.Cohere2Config,
    "exaone4": transformers.Exaone4Config,
    "ernie4_5": transformers.Ernie4_5Config,
    "seed_oss": transformers.SeedOssConfig,
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig,
    "minimax_m2": transformers.MiniMaxM2Config,
    "minimax_m3_vl_text": transformers.MiniMaxM3VLTextConfig,
    "dots1": transformers.Dots1Config,
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "deepseek_v32": transformers.DeepseekV32Config,
    "axk1": transformers.AXK1Config,
    "axk2": transformers.AXK2Config,
    "dots3_note_text": transformers.Dots3NoteTextConfig,
    "glm_moe_dsa": transformers.GlmMoeDsaConfig,
    "hy_v4": transformers.HYV4Config,
    "deepseek_v4": transformers.DeepseekV4Config,
    "gpt_oss": transformers.GptOssConfig,
    "granitemoe": transformers.GraniteMoeConfig,
    "granitemoeshared": transformers.GraniteMoeSharedConfig,
    "llama4_text": transformers.Llama4TextConfig,
    "cwm": transformers.CwmConfig,
    "vaultgemma": transformers.VaultGemmaConfig,
    "granitemoehybrid": transformers.GraniteMoeHybridConfig,
    "bamba": transformers.BambaConfig,
    "falcon_h1": transformers.FalconH1Config,
    "nemotron_h": transformers.NemotronHConfig,
    "arcee": transformers.ArceeConfig,
    "nemotron": transformers.NemotronConfig,
    "starcoder2": transformers.Starcoder2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "stablelm": transformers.StableLmConfig,
    "jais2": transformers.Jais2Config,
    "apertus": transformers.ApertusConfig,
    "lfm2": transformers.Lfm2Config,
    "lfm2_moe": transformers.Lfm2MoeConfig,
    "lfm3": transformers.Lfm3Config,
    "laguna": transformers.LagunaConfig,
    "hyperclovax": transformers.HyperCLOVAXConfig,
    "minicpm3": transformers.MiniCPM3Config,
    "solar_open": transformers.SolarOpenConfig,
    "exaone_moe": transformers.ExaoneMoeConfig,
    "hy_v3": transformers.HYV3Config,
    "granite_swa": transformers.GraniteSWAConfig,
    "granitemoe_swa": transformers.GraniteMoeSWAConfig,
    "helium": transformers.HeliumConfig,
    "mellum": transformers.MellumConfig,
    "flex_olmo": transformers.FlexOlmoConfig,
    "afmoe": transformers.AfmoeConfig,
    "kolibri1": transformers.Kolibri1Config,
    "cohere2_moe": transformers.Cohere2MoeConfig,
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "kimi_linear": transformers.KimiLinearConfig,
    "bailing_hybrid": transformers.BailingHybridConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    "qwen4_exp_text": transformers.Qwen4ExpTextConfig,
    "internlm3": transformers.InternLM3Config,
    "iquestcoder": transformers.IQuestCoderConfig,
    "youtu": transformers.YoutuConfig,
    "flint": transformers.FlintConfig,
    "mimo_v2_flash": transformers.MiMoV2FlashConfig,
    "inkling_text": transformers.InklingTextConfig,
    "inkling_mm_model": transformers.InklingConfig,
    "hunyuan_v1_dense": transformers.HunYuanDenseV1Config,
    "hunyuan_v1_moe": transformers.HunYuanMoEV1Config,
    "gemma3": transformers.Gemma3Config,
    "gemma3n": transformers.Gemma3nConfig,
    "gemma4": transformers.Gemma4Config,
    "llama4": transformers.Llama4Config,
    "mistral3": transformers.Mistral3Config,
    "mistral_large4": transformers.MistralLarge4Config,
    "minimax_m3_vl": transformers.MiniMaxM3VLConfig,
    "kimi_k25": transformers.Kimi_K25Config,
    "qwen2_5_vl": transformers.Qwen2_5_VLConfig,
    "qwen2_vl": transformers.Qwen2VLConfig,
    "glm4v": transformers.Glm4vConfig,
    "llava": transformers.LlavaConfig,
    "qwen3_vl": transformers.Qwen3VLConfig,
    "qwen3_vl_moe": transformers.Qwen3VLMoeConfig,
    "qwen3_5": transformers.Qwen3_5Config,
    "qwen3_5_moe": transformers.Qwen3_5MoeConfig,
    "qwen4_exp": transformers.Qwen4ExpConfig,
    "gemma4_unified": transformers.Gemma4UnifiedConfig,
    "glm46v": transformers.Glm46VConfig,
    "glm4v_moe": transformers.Glm4vMoeConfig,
    "internvl": transformers.InternVLConfig,
    "llava_next": transformers.LlavaNextConfig,
    "llava_onevision": transformers.LlavaOnevisionConfig,
    "idefics3": transformers.Idefics3Config,
    "smolvlm": transformers.SmolVLMConfig,
    "muse_glimmer": transformers.MuseGlimmerConfig,
    "paddleocr_vl": transformers.PaddleOCRVLConfig,
    "glm_ocr": transformers.GlmOcrConfig,
    "lfm2_vl": transformers.Lfm2VlConfig,
    "lfm3_vl": transformers.Lfm3VlConfig,
    "exaone4_5": transformers.Exaone4_5_Config,
    "lighton_ocr": transformers.LightOnOcrConfig,
    "hyperclovax_vision_v2": transformers.HyperCLOVAXVisionV2Config,
    "granite4_vision": transformers.Granite4VisionConfig,
    "qwen3_omni_moe": transformers.Qwen3OmniMoeConfig,
    "qwen3_omni_moe_thinker": transformers.Qwen3OmniMoeThinkerConfig,
    "nemotron_h_omni": transformers.NemotronH_Omni_Reasoning_V3_Config,
    "perception_lm": transformers.PerceptionLMConfig,
    "fast_vlm": transformers.FastVlmConfig,
    "video_llama_3": transformers.VideoLlama3Config,
    "deepseek_ocr2": transformers.DeepseekOcr2Config,
    "vipllava": transformers.VipLlavaConfig,
    "llava_next_video": transformers.LlavaNextVideoConfig,
    "video_llava": transformers.VideoLlavaConfig,
    "aya_vision": transformers.AyaVisionConfig,
    "cohere2_vision": transformers.Cohere2VisionConfig,
    "ovis2": transformers.Ovis2Config,
    "minicpmv4_6": transformers.MiniCPMV4_6Config,
    "minicpmv4_7": transformers.MiniCPMV4_7Config,
    "minicpm_ocr": transformers.MiniCPMOcrConfig,
    "qianfan_ocr": transformers.QianfanOCRConfig,
    "janus": transformers.JanusConfig,
    "deepseek_vl": transformers.DeepseekVLConfig,
    "granite_docling": transformers.GraniteDoclingConfig,
    "hunyuan_vl": transformers.HunYuanVLConfig,
    "glmga": transformers.GlmgaConfig,
    "phi4_multimodal": transformers.Phi4MultimodalConfig,
    "aria": transformers.AriaConfig,
    "ernie4_5_vl_moe": transformers.Ernie4_5_VLMoeConfig,
    "step3p7": transformers.Step3p7Config,
    "dots3_note": transformers.Dots3NoteConfig,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_GLM4V = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "image_size": 28,
    },
    "image_token_id": 97,
    "video_token_id": 98,
    "image_start_token_id": 99,
    "image_end_token_id": 100,
    "video_start_token_id": 101,
    "video_end_token_id": 102,
}
_QWEN_IDS = {
    "image_token_id": 97,
    "video_token_id": 98,
    "vision_start_token_id": 99,
    "vision_end_token_id": 100,
}
_THINKER = {
    "vision_config": _QWEN3_VISION,
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "downsample_hidden_size": 16,
        "num_mel_bins": 16,
    },
    "image_token_id": 97,
    "video_token_id": 98,
    "audio_token_id": 99,
}
# What is around the text model of a wrapper; ids of images are beyond the vocabulary.
AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": _VISION,
        "image_token_index": 97,
        "boi_token_index": 98,
        "eoi_token_index": 99,
        "mm_tokens_per_image": 4,
    },
    "gemma3n": {
        "vision_config": {"hidden_size": 32, "vocab_offset": 97, "vocab_size": 4},
        "audio_config": {
            "hidden_size": 32,
            "vocab_offset": 101,
            "vocab_size": 4,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [8, 4],
        },
        "image_token_id": 97,
        "audio_token_id": 101,
        "boi_token_id": 98,
        "eoi_token_id": 99,
        "boa_token_id": 102,
        "eoa_token_id": 103,
    },
    "gemma4": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 16,
        },
        "image_token_id": 97,
        "video_token_id": 98,
        "audio_token_id": 99,
        "boi_token_id": 100,
        "eoi_token_id": 101,
        "boa_token_id": 102,
        "eoa_token_index": 103,
    },
    "llama4": {
        "vision_config": {
            **_VISION,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 97,
        "boi_token_index": 98,
        "eoi_token_index": 99,
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **_VISION},
        "image_token_index": 97,
    },
    "mistral_large4": {
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **_VISION},
        "image_token_index": 97,
    },
    "minimax_m3_vl": {
        "vision_config": _VISION,
        "projector_hidden_size": 32,
        "image_token_index": 97,
        "video_token_index": 98,
    },
    "kimi_k25": {
        "vision_config": {
            "patch_size": 14,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "projection_hidden_size": 32,
        **_QWEN_IDS,
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "fullatt_block_indexes": [0],
        },
        **_QWEN_IDS,
    },
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": 97,
    },
    "glm4v": _GLM4V,
    "glm46v": {**_GLM4V, "vision_config": {"model_type": "glm4v_vision", **_GLM4V["vision_config"]}},
    "glm4v_moe": _GLM4V,
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8, "patch_size": 2, "model_patch_size": 6},
        "audio_config": {"audio_embed_dim": 32},
        "image_token_id": 97,
        "video_token_id": 98,
        "audio_token_id": 99,
        "boi_token_id": 100,
        "eoi_token_id": 101,
        "boa_token_id": 102,
        "eoa_token_index": 103,
    },
    "internvl": {
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 97,
    },
    "llava_next": {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": 97,
    },
    "llava_onevision": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": 97,
        "video_token_index": 98,
    },
    "idefics3": {"vision_config": _VISION, "image_token_id": 97},
    "smolvlm": {"vision_config": _VISION, "image_token_id": 97},
    "muse_glimmer": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "out_hidden_size": 4 * _VISION["hidden_size"],
        "projector_hidden_size": 24,
        "image_token_id": 97,
        "video_token_id": 98,
    },
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2}, **_QWEN_IDS},
    "qwen3_vl": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "qwen3_vl_moe": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "qwen3_5": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "qwen3_5_moe": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "qwen4_exp": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "paddleocr_vl": {"vision_config": _VISION, **_QWEN_IDS},
    "glm_ocr": _GLM4V,
    "lfm2_vl": {
        "vision_config": {"model_type": "siglip2_vision_model", "num_patches": 4, **_VISION},
        "projector_hidden_size": 32,
        "image_token_id": 97,
    },
    "lfm3_vl": {
        "vision_config": {**_VISION, "num_hidden_layers": 3, "num_key_value_heads": 1},
        "projector_hidden_size": 32,
        **_QWEN_IDS,
    },
    "qwen3_omni_moe": _THINKER,
    "qwen3_omni_moe_thinker": _THINKER,
    "nemotron_h_omni": {
        "vision_config": {
            "model_type": "radio",
            **_VISION,
            "max_img_size": 56,
            "mlp_ratio": 2.0,
            "video_temporal_patch_size": 2,
        },
        "audio_config": {
            "model_type": "parakeet_encoder",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 8,
            "projection_hidden_size": 32,
            "projection_bias": False,
        },
        "projector_hidden_size": 32,
        "vision_hidden_size": 32,
        "image_token_id": 97,
        "video_token_id": 98,
        "audio_token_id": 99,
    },
    # The towers of these two are of timm, which is not installed; those of SigLIP stand in for them.
    "perception_lm": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            **_VISION,
            "model_args": {"embed_dim": 32},
        },
        "image_token_id": 97,
        "video_token_id": 98,
    },
    "fast_vlm": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": 97,
    },
    "inkling_mm_model": {
        "vision_config": {"patch_size": 4, "temporal_patch_size": 2, "num_hidden_layers": 3},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
        "image_token_id": 96,
        "audio_token_id": 95,
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {
                **{name: size for name, size in _VISION.items() if name != "intermediate_size"},
                "image_size": 64,
                "patch_size": 16,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": [0],
                "downsample_channels": [16, 32],
            },
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
        "image_token_id": 97,
    },
    "video_llama_3": {
        "vision_config": {name: size for name, size in _VISION.items() if name != "image_size"},
        "image_token_id": 97,
        "video_token_id": 98,
    },
    "vipllava": {
        "vision_config": {
            "model_type": "clip_vision_model",
            "projection_dim": 32,
            **_VISION,
        },
        "vision_feature_layer": [-1, 0],
        "image_token_index": 97,
    },
    "llava_next_video": {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": 97,
        "video_token_index": 98,
    },
    "video_llava": {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": 97,
        "video_token_index": 98,
    },
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": 97,
    },
    "cohere2_vision": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "alignment_intermediate_size": 64,
        "image_token_id": 97,
    },
    "ovis2": {
        "hidden_size": 48,
        "vocab_size": 97,
        "vision_config": {**_VISION, "vocab_size": 40, "num_visual_indicator_tokens": 5},
        "image_token_id": 97,
        "visual_indicator_token_ids": [98, 99, 100, 101, 102],
    },
    "minicpmv4_6": {
        "vision_config": {**_VISION, "num_hidden_layers": 2, "insert_layer_id": 0},
        "insert_layer_id": 0,
        "image_size": 28,
        "image_token_id": 97,
    },
    "minicpmv4_7": {
        "vision_config": {**_VISION, "num_hidden_layers": 2, "insert_layer_id": 0},
        "insert_layer_id": 0,
        "image_size": 28,
        "image_token_id": 97,
    },
    "minicpm_ocr": {
        "vision_config": {**_VISION, "num_hidden_layers": 2, "insert_layer_id": 0},
        "insert_layer_id": 0,
        "image_token_id": 97,
    },
    "dots3_note": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "moe_intermediate_size": 16,
            "adapter_in_dim": 32,
            "pyramid_num_routed": [-1, 4],
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "feature_size": 16,
            "downsample_hidden_size": 8,
            "adapter_input_size": 32,
        },
    },
    "step3p7": {
        "vision_config": {
            "hidden_size": 32,
            "mlp_ratio": 2.0,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "image_token_id": 97,
    },
    "qianfan_ocr": {
        "vision_config": {
            **_VISION,
            "image_size": [28, 28],
            "patch_size": [14, 14],
            "use_qk_norm": True,
        },
        "image_token_id": 97,
    },
    "janus": {
        "vision_config": {**_VISION, "projection_dim": 48, "mlp_ratio": 1.0},
        "vq_config": {
            "num_embeddings": 16,
            "embed_dim": 8,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "num_patches": 2,
            "projection_dim": 48,
        },
        "image_token_id": 97,
    },
    "deepseek_vl": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_id": 97,
    },
    "granite_docling": {
        "vision_config": {**_VISION, "out_hidden_size": 48, "scale_factor": 2},
        "image_token_id": 97,
    },
    "hunyuan_vl": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "out_hidden_size": 48,
            "text_hidden_size": 48,
            "max_image_size": 28,
            "min_image_size": 14,
        },
        "image_token_id": 97,
    },
    "glmga": {**_GLM4V, "vision_config": {"model_type": "glm4v_vision", **_GLM4V["vision_config"]}},
    "ernie4_5_vl_moe": {
        "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
        "image_token_id": 97,
        "video_token_id": 98,
        "image_start_token_id": 99,
        "image_end_token_id": 100,
        "video_start_token_id": 101,
        "video_end_token_id": 102,
    },
    "aria": {
        "vision_config": {"model_type": "idefics3_vision", **_VISION},
        "projector_patch_to_query_dict": {4: 3},
        "image_token_index": 97,
    },
    "phi4_multimodal": {
        "vision_config": {**_VISION, "crop_size": 28, "image_token_id": 97},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "input_size": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "bias_max_distance": 8,
            "audio_token_id": 98,
        },
    },
    "exaone4_5": {
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 97,
        "video_token_id": 98,
    },
    "lighton_ocr": {
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **_VISION},
        "image_token_id": 97,
    },
    "hyperclovax_vision_v2": {
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 97,
        "video_token_id": 98,
    },
    "granite4_vision": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION, "hidden_size": 64},
        "qformer_config": {
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
        "image_token_index": 97,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_vision_layer": -1,
        "spatial_target_layers": [1],
    },
}
BY_ANOTHER_NAME = {
    "vlm": "hyperclovax_vision_v2",
    "kimi_k2": "deepseek_v3",
    "phi4mm": "phi4_multimodal",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h_omni",
}
"""What transformers calls a family that has another name in checkpoints with their own code."""
TEXT_FAMILIES = [family for family in CONFIGS if family not in AROUND]
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# What the modeling code of a family needs and its configuration class does not derive.
_GEMMA4 = {"hidden_size_per_layer_input": 0}
_GEMMA3N = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97,
    "laurel_rank": 8,
}
_QWEN4 = {
    "head_dim": 8,
    "hc_lowrank": 20,
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 70,
}
NEEDED: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neox": {"num_key_value_heads": 6},
    "opt": {"num_key_value_heads": 6},
    "gpt2": {"num_key_value_heads": 6},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "ministral": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "youtu": {"num_key_value_heads": 6},
    "kimi_k25": {"num_key_value_heads": 6},
    "minicpm3": {"num_key_value_heads": 6},
    "kimi_linear": {"num_key_value_heads": 6},
    "bailing_hybrid": {"num_key_value_heads": 6},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_key_value_heads": 6, "num_experts_per_tok": 2},
    "deepseek_ocr2": {
        "head_dim": None,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "deepseek_v3": {"num_key_value_heads": 6},
    "deepseek_v32": {"num_key_value_heads": 6},
    "axk1": {"num_key_value_heads": 6},
    "axk2": {"num_key_value_heads": 6},
    "dots3_note_text": {"num_key_value_heads": 6},
    "dots3_note": {"num_key_value_heads": 6},
    "glm_moe_dsa": {"num_key_value_heads": 6},
    "hy_v4": {"num_key_value_heads": 6},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2},
    "mistral_large4": {"model_type": "mistral_large4_text", "num_key_value_heads": 6},
    "glm4_moe_lite": {"num_key_value_heads": 6},
    "minimax_m3_vl_text": {"head_dim": 8, "rotary_dim": 8},
    "minimax_m3_vl": {"head_dim": 8, "rotary_dim": 8},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": _QWEN4,
    "gemma3n_text": _GEMMA3N,
    "gemma3n": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "granitemoehybrid": {"num_local_experts": 0, "mamba_n_heads": 2, "layer_types": ["full_attention"] * 3},
    "bamba": {"mamba_n_heads": 2},
    "falcon_h1": {"mamba_n_heads": 2, "mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "internvl": {"model_type": "qwen2"},
    "llava_next": {"model_type": "llama"},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "exaone4_5": {"model_type": "exaone4"},
}
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # one of the four frequencies of a head of 8 is kept, one interpolated, two divided
    "original_max_position_embeddings": 100,
    "rope_theta": 10000.0,
}
STRETCHED = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
# Six dimensions of a head of 8 rotate; sequences of more than 16 tokens take the long factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.2, 3.0, 7.0],
}
LONGROPE_OF_MIXTURE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.5, 2.5, 3.0],
    "long_factor": [1.2, 3.0, 7.0, 9.0],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
}
LATENT_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5, 2.5],
    "long_factor": [1.2, 3.0, 7.0],
}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
GROWING_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]

LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
INKLING = {
    "head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 9,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "logits_mup_width_multiplier": 2.0,
    "log_scaling_n_floor": 6,
    "log_scaling_alpha": 0.5,
}
# Chunks end within a prompt and between two steps of a decode; queries without a rope grow at 4, 8, ...
CHUNKED = {
    "head_dim": 8,
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.4,
    "num_local_experts": 6,
    "intermediate_size": 40,
    "intermediate_size_mlp": 72,
}
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
}
STEP = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "share_expert_dim": 24,
    "head_dim": 8,
    "sliding_window": 5,
}
NARROW_VALUES = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 12,
    "v_head_dim": 8,
}
# Two value heads for each key head, values wider than keys, and attention in every other layer.
DELTA_NET = {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Qwen4: embeddings of n-grams in both layers with a delta net, and an indexer that chooses all blocks.
NGRAMS = {
    **EXPERTS,
    **DELTA_NET,
    "shared_expert_intermediate_size": 56,
    "hc_count": 3,
    "indexer_budget": 36,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "ple_layer_ids": [1, 3],
    "heads_per_ngram": 2,
    "split_ngram_parts": 3,
    "make_ngram_vocab_size_divisible_by": 16,
}
# A delta net of OLMo Hybrid, whose betas are doubled, before attention.
TWO_BLOCKS = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# One key head, a short convolution, and attention in the first layer.
OTHER_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_value_heads": 3,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
# Values narrower than keys, latents narrower and wider than a head.
DENSE_LATENTS = {
    "q_lora_rank": 28,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_key_value_heads": 6,
}
LATENTS = {
    **DENSE_LATENTS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}

KIMI_DELTA = {
    **{name: value for name, value in LATENTS.items() if name != "n_routed_experts"},
    "q_lora_rank": None,
    "num_local_experts": 6,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
"""Delta nets with a decay of each channel, and latent attention without positions."""
LING = {
    **{name: value for name, value in LATENTS.items() if name not in ("n_routed_experts", "q_lora_rank")},
    "num_local_experts": 6,
    "n_group": 2,
    "topk_group": 2,
    "head_dim": 8,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
}
"""Delta nets whose decays of channels are bounded, and latent attention whose heads have gates."""
COMPRESSED: dict[str, Any] = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 20,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
    "sliding_window": 6,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 1.5,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}
INDEXERS = {"index_topk": 32, "index_n_heads": 4, "index_head_dim": 8}
"""Of as many keys as the tests have positions."""
DOTS3 = {
    **LATENTS,
    **INDEXERS,
    "qk_rope_head_dim": 8,
    "head_dim": 16,
    "sliding_window": 5,
    "shared_experts_intermediate_size": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 18,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 10,
}
OF_BLOCKS = {
    **LOCAL_EXPERTS,
    "head_dim": 16,
    "rotary_dim": 8,
    "intermediate_size": 40,
    "dense_intermediate_size": 72,
    "shared_intermediate_size": 80,
    "routed_scaling_factor": 1.7,
    "rope_parameters": HALF_ROTATED,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 24,
    "index_block_size": 8,
    "index_topk_blocks": 4,
}
"""Layers of MiniMax-M3 with indexers that choose all blocks of the tests."""
LARGE4 = {
    **{name: each for name, each in LATENTS.items() if name != "q_lora_rank"},
    **INDEXERS,
    "index_head_dim": 16,  # at least as wide as what rotates
    "rms_norm_eps": 1e-4,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
OTHER_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_expand": 1,
    "mamba_conv_bias": False,
    "mamba_chunk_size": 16,
}
FALCON_FACTORS = {
    "embedding_multiplier": 5.7,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.35, 0.6, 0.8, 0.5, 0.7],
    "mlp_multipliers": [0.9, 0.6],
}
# Its class bounds the steps of time of prompts, and not those of decode.
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 8,
    "head_dim": 12,
    "time_step_min": 1e-12,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {"rms_norm_eps": 1e-5}),
    "llama-mha-default-rope": (
        "llama",
        {"num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-exact-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-swish": ("llama", {"hidden_act": "swish"}),
    "llama-gelu-new": ("llama", {"hidden_act": "gelu_new"}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama-yarn-stated": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-upper-windows": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
    ),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types-yarn": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": MIXED,
            "rope_parameters": YARN,
        },
    ),
    "phi3": ("phi3", {"num_key_value_heads": 6}),
    "phi3-window-gqa": ("phi3", {"sliding_window": 5}),
    "phi3-partial-tied": (
        "phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3-partial-heads-above-a-block": (
        "phi3",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3-longrope-long": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma-one-kv-head": ("gemma", {"head_dim": 8, "num_key_value_heads": 1, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    ),
    "gemma2-narrow-caps": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    ),
    "gemma3-scaled-rope": (
        "gemma3_text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "layer_types": MIXED,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3n": ("gemma3n_text", {"head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True}),
    "gemma3n-slices": (
        "gemma3n_text",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 61,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "intermediate_size": [80, 64, 96, 80, 96, 64],
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.8, 0.0],
            "altup_num_inputs": 3,
            "laurel_rank": 4,
            "head_dim": 12,
            "attention_bias": True,
            "sliding_window": 4,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-own-values": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 4,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4-e": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma4-e-keys-are-values": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "sliding_window": 4,
            "layer_types": [
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "gemma4-equal-widths": (
        "gemma4_text",
        {"head_dim": 16, "global_head_dim": 16, "attention_k_eq_v": True, "attention_bias": True},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "granite-tied-biases": (
        "granite",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.5,
            "logits_scaling": 3.0,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-windows-yarn": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": MIXED,
            "rope_parameters": YARN,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-mha-biases": ("olmo2", {"num_key_value_heads": 6, "attention_bias": True}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "olmo3-yarn-on-full": (
        "olmo3",
        {
            "sliding_window": 4,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "glm": ("glm", {"head_dim": 8}),
    "glm-wide-heads-no-biases": (
        "glm",
        {
            "head_dim": 16,
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "glm4": ("glm4", {"head_dim": 8}),
    "glm4-whole-rotary-tied": (
        "glm4",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "ministral": ("ministral", {"sliding_window": 5}),
    "ministral-layer-types": ("ministral", {"sliding_window": 4, "layer_types": MIXED, "head_dim": 12}),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": GROWING_YARN}),
    "ministral3-window": (
        "ministral3",
        {"head_dim": 16, "sliding_window": 6, "rope_parameters": {**GROWING_YARN, "mscale": 0.5}},
    ),
    "cohere": ("cohere", {"tie_word_embeddings": True}),
    "cohere-untied-biases": ("cohere", {"attention_bias": True, "logit_scale": 0.7}),
    "cohere-norms-of-heads": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 5, "layer_types": MIXED, "tie_word_embeddings": True}),
    "cohere2-biases": (
        "cohere2",
        {"sliding_window": 4, "sliding_window_pattern": 2, "attention_bias": True},
    ),
    "exaone4": ("exaone4", {"sliding_window": 5, "layer_types": MIXED}),
    "exaone4-no-window": (
        "exaone4",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "seed_oss-other-biases": (
        "seed_oss",
        {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-vision": ("gemma3", {"head_dim": 16, "sliding_window": 5, "tie_word_embeddings": True}),
    "gemma3n-vision": (
        "gemma3n",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 90,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-vision": (
        "gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-e-vision": (
        "gemma4",
        {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4-vision-experts": (
        "gemma4",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 5,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3-mistral": ("mistral3", {"model_type": "mistral", "head_dim": 8, "sliding_window": None}),
    "mistral3-mistral4": (
        "mistral3",
        {
            **LATENTS,
            "model_type": "mistral4",
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 4,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
            "first_k_dense_replace": 1,
        },
    ),
    "kimi_k25": (
        "kimi_k25",
        {**LATENTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "mistral_large4": (
        "mistral_large4",
        {
            **LARGE4,
            "no_rope_layers": [1, 0, 1],
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
        },
    ),
    "mistral_large4-shared-latents": (
        "mistral_large4",
        {
            **LARGE4,
            "num_hidden_layers": 5,
            "no_rope_layers": [1, 1, 0, 1, 0],
            "kv_source_layers": [0, 0, 2, 0, 2],
            "indexer_types": ["full", "shared", "full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
        },
    ),
    "minimax_m3_vl": ("minimax_m3_vl", OF_BLOCKS),
    "minimax_m3_vl-tied": (
        "minimax_m3_vl",
        {
            **OF_BLOCKS,
            "head_dim": 12,
            "rotary_dim": 12,
            "rope_parameters": YARN,
            "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "shared_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", OF_BLOCKS),
    "minimax_m3_vl_text-without-indexers": (
        "minimax_m3_vl_text",
        {
            **{
                name: each
                for name, each in OF_BLOCKS.items()
                if name not in ("layer_types", "mlp_layer_types")
            },
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "minimax-m3-text-dense": ("minimax_m3_vl_text", {**OF_BLOCKS, "mlp_layer_types": ["dense"] * 3}),
    "mistral3-ministral3": (
        "mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 8,
            "rope_parameters": GROWING_YARN,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llava-llama": ("llava", {"model_type": "llama", "attention_bias": True}),
    "llava-mistral": (
        "llava",
        {
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "glm4v": (
        "glm4v",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4v-whole-rotary-tied": ("glm4v", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2_vl": ("qwen2_vl", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen2_vl-tied-window": (
        "qwen2_vl",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3_vl": ("qwen3_vl", {"head_dim": 12}),
    "qwen3_vl-tied-biases": (
        "qwen3_vl",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_interleaved": True},
        },
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe", {**EXPERTS, "head_dim": 8}),
    "qwen3_vl_moe-some-dense": (
        "qwen3_vl_moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "mixtral-window": ("mixtral", {**LOCAL_EXPERTS, "num_experts_per_tok": 3, "sliding_window": 5}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "qwen3-moe-listed-dense": (
        "qwen3_moe",
        {**EXPERTS, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen2-moe-some-dense": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("olmoe", EXPERTS),
    "olmoe-biases": ("olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "glm4-moe": ("glm4_moe", {**ROUTED, "routed_scaling_factor": 1.7}),
    "glm4-moe-groups": (
        "glm4_moe",
        {
            **ROUTED,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **LATENTS,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v3-dense": (
        "deepseek_v3",
        {
            **LATENTS,
            "q_lora_rank": None,
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "axk1": (
        "axk1",
        {
            **LATENTS,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
        },
    ),
    "axk1-types": (
        "axk1",
        {
            **LATENTS,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "v_head_dim": 16,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "dots3_note_text": (
        "dots3_note_text",
        {**DOTS3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "dots3_note_text-windows": (
        "dots3_note_text",
        {
            **DOTS3,
            "use_dsa": False,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "dots3_note": (
        "dots3_note",
        {**DOTS3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "axk2": (
        "axk2",
        {
            **LATENTS,
            **INDEXERS,
            "gated_norm_rank": 4,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
        },
    ),
    "axk2-groups": (
        "axk2",
        {
            **LATENTS,
            **INDEXERS,
            "gated_norm_rank": 12,
            "v_head_dim": 16,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            **LATENTS,
            **INDEXERS,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v32-dense": (
        "deepseek_v32",
        {
            **LATENTS,
            **INDEXERS,
            "v_head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**LATENTS, **INDEXERS, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    ),
    "glm_moe_dsa-shared-indexers": (
        "glm_moe_dsa",
        {
            **LATENTS,
            **INDEXERS,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "shared", "full"],
            "attention_bias": True,
        },
    ),
    "hy_v4": (
        "hy_v4",
        {**LATENTS, **INDEXERS, "hc_mult": 3, "hc_eps": 1e-3, "hc_magnitude": 1.7},
    ),
    "hy_v4-dense-between": (
        "hy_v4",
        {
            **LATENTS,
            **INDEXERS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "indexer_types": ["full", "shared", "full"],
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v4": ("deepseek_v4", COMPRESSED),
    "deepseek_v4-yarn-tables": (
        "deepseek_v4",
        {
            **COMPRESSED,
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
            "index_topk": 22,
            "o_groups": 3,
            "layer_types": ["heavily_compressed_attention"] * 2 + ["compressed_sparse_attention"],
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
            "rope_parameters": dict(YARN),
            "compress_rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            **LATENTS,
            "n_shared_experts": 1,
            "n_routed_experts": 9,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek_v2-query-latent": (
        "deepseek_v2",
        {
            **LATENTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENTS, "rope_parameters": YARN}),
    "glm4_moe_lite-types": (
        "glm4_moe_lite",
        {
            **LATENTS,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "tie_word_embeddings": True},
    ),
    "ernie4_5_moe-range": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "num_key_value_heads": 1,
            "use_bias": False,
        },
    ),
    "minimax_m2": ("minimax_m2", {**LOCAL_EXPERTS, "head_dim": 8, "partial_rotary_factor": 0.5}),
    "minimax_m2-heads-above-a-block": (
        "minimax_m2",
        {**LOCAL_EXPERTS, "head_dim": 136, "partial_rotary_factor": 0.5},
    ),
    "minimax_m2-rotary-dim": (
        "minimax_m2",
        {
            **LOCAL_EXPERTS,
            "head_dim": 16,
            "rotary_dim": 12,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
        },
    ),
    "dots1": (
        "dots1",
        {
            "n_shared_experts": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "dots1-groups-windows": (
        "dots1",
        {
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "head_dim": 12,
            "attention_bias": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "gpt-oss": ("gpt_oss", {**LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "gpt-oss-other-layers": (
        "gpt_oss",
        {**LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 4, "layer_types": MIXED, "rope_parameters": YARN},
    ),
    "granitemoe": ("granitemoe", {**LOCAL_EXPERTS, "attention_multiplier": 0.4}),
    "granitemoe-multipliers": (
        "granitemoe",
        {
            **LOCAL_EXPERTS,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoeshared": (
        "granitemoeshared",
        {**LOCAL_EXPERTS, "shared_intermediate_size": 56, "residual_multiplier": 0.5},
    ),
    "llama4-scout": (
        "llama4_text",
        {**CHUNKED, "no_rope_layers": [1, 0, 1], "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
    ),
    "llama4-maverick": (
        "llama4_text",
        {
            **CHUNKED,
            "head_dim": 16,
            "attention_chunk_size": 7,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_bias": True,
        },
    ),
    "llama4-listed-layers": (
        "llama4_text",
        {
            **CHUNKED,
            "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0, 0],
            "moe_layers": [1],
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "llama4-vision": ("llama4", {**CHUNKED, "no_rope_layer_interval": 2, "moe_layers": [1, 2]}),
    "granitemoeshared-none": ("granitemoeshared", {**LOCAL_EXPERTS, "attention_multiplier": 0.4}),
    "cwm": ("cwm", {"head_dim": 8, "sliding_window": 5}),
    "cwm-layer-types": (
        "cwm",
        {
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": MIXED,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    ),
    "vaultgemma-narrow-caps": (
        "vaultgemma",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "attention_bias": True,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-no-positions": (
        "granitemoehybrid",
        {"shared_intermediate_size": 56, "attention_multiplier": 0.4, "attention_bias": True},
    ),
    "granitemoehybrid-h": (
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 80,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid-h-experts": (
        "granitemoehybrid",
        {
            **OTHER_MAMBA,
            "layer_types": ["mamba", "mamba", "attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "attention_multiplier": 0.3,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "bamba-groups-biases": (
        "bamba",
        {**OTHER_MAMBA, "attn_layer_indices": [2], "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA, **FALCON_FACTORS, "mamba_d_ssm": 48, "mamba_d_head": 12}),
    "falcon_h1-norm-biases": (
        "falcon_h1",
        {
            **OTHER_MAMBA,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.9,
            "mlp_multipliers": [0.9, 0.6],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["full_attention", "mlp", "linear_attention"]},
    ),
    "nemotron_h-biases": (
        "nemotron_h",
        {
            **NEMOTRON,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "mlp_bias": True,
        },
    ),
    "nemotron_h-experts": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            "moe_shared_expert_intermediate_size": 72,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h-latents": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 24,
            "routed_scaling_factor": 5.0,
        },
    ),
    "nemotron_h-latents-biases": (
        "nemotron_h",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["full_attention", "moe", "linear_attention"],
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 80,
            "mlp_bias": True,
        },
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "nemotron": ("nemotron", {"rope_parameters": HALF_ROTATED}),
    "nemotron-biases": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": HALF_ROTATED},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 5, "tie_word_embeddings": True}),
    "starcoder2-without-biases": (
        "starcoder2",
        {"use_bias": False, "hidden_act": "gelu", "num_key_value_heads": 1},
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": HALF_ROTATED}),
    "gpt_neox-one-half-after-the-other": (
        "gpt_neox",
        {"use_parallel_residual": False, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
    ),
    "gpt_neox-heads-above-a-block": (
        "gpt_neox",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "attention_bias": False,
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-halves-side-by-side": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "rope_parameters": HALF_ROTATED,
        },
    ),
    "jais2": ("jais2", {"head_dim": 12}),
    "jais2-tied-without-biases": (
        "jais2",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
    ),
    "apertus": ("apertus", {"rope_parameters": LLAMA3}),
    "apertus-tied-biases": (
        "apertus",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-adjusted-width-untied": (
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "block_multiple_of": 8,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm2_moe-without-bias": (
        "lfm2_moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 2,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "head_dim": 8,
            "sliding_window": 5,
        },
    ),
    "lfm3-biases-untied": (
        "lfm3",
        {
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "head_dim": 16,
            "sliding_window": 4,
            "conv_L_cache": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-without-norms-or-gates": (
        "lfm3",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "head_dim": 8,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
        },
    ),
    "laguna": (
        "laguna",
        {
            **EXPERTS,
            "layer_types": MIXED,
            "head_dim": 8,
            "sliding_window": 5,
            "num_attention_heads_per_layer": [12, 6, 12],
            "shared_expert_intermediate_size": 24,
            "moe_routed_scaling_factor": 2.5,
        },
    ),
    "laguna-yarn-biases-tied": (
        "laguna",
        {
            **EXPERTS,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "head_dim": 16,
            "sliding_window": 4,
            "num_attention_heads_per_layer": [6, 12, 6],
            "shared_expert_intermediate_size": 40,
            "gating": "per-head",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "laguna-by-default": (
        "laguna",
        {**EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 24, "sliding_window": 5},
    ),
    "hyperclovax": (
        "hyperclovax",
        {
            "embedding_multiplier": 10.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.125,
        },
    ),
    "hyperclovax-without-post-norms-tied": (
        "hyperclovax",
        {
            "use_post_norm": False,
            "head_dim": 12,
            "residual_multiplier": 0.25,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "solar_open": (
        "solar_open",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "head_dim": 8,
            "routed_scaling_factor": 1.7,
        },
    ),
    "solar_open-groups-yarn": (
        "solar_open",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "head_dim": 16,
            "attention_bias": True,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "exaone_moe": ("exaone_moe", {**EXPERTS, "sliding_window": 5, "sliding_window_pattern": 2}),
    "exaone_moe-groups": (
        "exaone_moe",
        {
            **EXPERTS,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "n_group": 3,
            "topk_group": 2,
            "num_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "layer_types": MIXED,
            "sliding_window": 4,
            "norm_topk_prob": False,
        },
    ),
    "mellum": ("mellum", {**EXPERTS, "head_dim": 8, "sliding_window": 5}),
    "mellum-types-yarn": (
        "mellum",
        {
            **EXPERTS,
            "head_dim": 12,
            "sliding_window": 4,
            "layer_types": MIXED,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "hy_v3": ("hy_v3", {**EXPERTS, "head_dim": 8}),
    "hy_v3-types": (
        "hy_v3",
        {
            **EXPERTS,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "num_shared_experts": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "enable_moe_fp32_combine": False,
            "router_scaling_factor": 1.5,
        },
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "prefix_dense_intermediate_size": 96,
            "intermediate_size": 32,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "cohere2_moe-shared-average": (
        "cohere2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "layer_types": MIXED,
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-6,
            "logit_scale": 0.5,
        },
    ),
    "cohere2_moe-shared-sum": (
        "cohere2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "prefix_dense_intermediate_size": 64,
            "intermediate_size": 16,
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": MIXED,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_sliding_window_pattern": 2,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "attention_bias": True,
        },
    ),
    "afmoe": ("afmoe", {**EXPERTS, "head_dim": 8, "sliding_window": 5, "global_attn_every_n_layers": 2}),
    "kolibri1": (
        "kolibri1",
        {
            **EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "kolibri1-renormalized": (
        "kolibri1",
        {
            **EXPERTS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": YARN,
            "tie_word_embeddings": True,
        },
    ),
    "afmoe-scaled": (
        "afmoe",
        {
            **EXPERTS,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_attention_heads": 4,
            "head_dim": 16,
            "sliding_window": 4,
            "layer_types": MIXED,
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "route_scale": 2.5,
            "mup_enabled": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 8}),
    "internlm3-biases": (
        "internlm3",
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "iquestcoder": ("iquestcoder", {"head_dim": 8, "attention_bias": True, "rope_parameters": LLAMA3}),
    "youtu": ("youtu", {**DENSE_LATENTS, "rope_parameters": YARN}),
    "youtu-plain-queries": ("youtu", {**DENSE_LATENTS, "q_lora_rank": None, "tie_word_embeddings": False}),
    "flint": (
        "flint",
        {**EXPERTS, "head_dim": 8, "sliding_window": 5, "shared_expert_intermediate_size": 32},
    ),
    "flint-types": (
        "flint",
        {
            **EXPERTS,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "layer_types": MIXED,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **NARROW_VALUES,
            "sliding_window": 5,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "full_attention": HALF_ROTATED,
                "sliding_attention": {**HALF_ROTATED, "rope_theta": 50.0},
            },
        },
    ),
    "mimo_v2_flash-groups-yarn-biases-tied": (
        "mimo_v2_flash",
        {
            **NARROW_VALUES,
            "num_key_value_heads": 3,
            "head_dim": 136,
            "v_head_dim": 16,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "layer_types": MIXED,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 4,
            "attention_value_scale": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.25},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    "mimo_v2_flash-dense": (
        "mimo_v2_flash",
        {
            "head_dim": 16,
            "v_head_dim": 10,
            "sliding_window": 5,
            "mlp_layer_types": ["dense"] * 3,
            "rope_parameters": {"full_attention": HALF_ROTATED, "sliding_attention": HALF_ROTATED},
        },
    ),
    "mimo_v2_flash-as-published": (
        "mimo_v2_flash",
        {
            **NARROW_VALUES,
            "v_head_dim": 12,
            "swa_v_head_dim": 12,
            "swa_head_dim": 12,
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_rope_theta": 10000.0,
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 0.334,
            "layernorm_epsilon": 1e-5,
            "hybrid_layer_pattern": [0, 1, 1],
            "moe_layer_freq": [0, 1, 1],
            "sliding_window": 5,
            "sliding_window_size": 5,
            "attention_chunk_size": 5,
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": None,
        },
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 8, "rope_parameters": STRETCHED}),
    "hunyuan_v1_dense-bias": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"head_dim": 8, "num_experts": 6, "moe_topk": 2, "rope_parameters": STRETCHED},
    ),
    "hunyuan_v1_moe-one-kv-head": (
        "hunyuan_v1_moe",
        {"head_dim": 12, "num_key_value_heads": 1, "num_experts": 5, "moe_topk": [3, 3, 3]},
    ),
    "granite_swa": ("granite_swa", {"sliding_window": 5, "attention_multiplier": 0.4}),
    "granite_swa-no-positions": (
        "granite_swa",
        {
            "sliding_window": 4,
            "layer_types": MIXED,
            "layer_rope_theta": [0, 500.0, 500],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {**LOCAL_EXPERTS, "sliding_window": 5, "attention_multiplier": 0.4},
    ),
    "granitemoe_swa-shared": (
        "granitemoe_swa",
        {
            **LOCAL_EXPERTS,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "shared_intermediate_size": 56,
            "residual_multiplier": 0.5,
            "layer_types": MIXED,
            "layer_rope_theta": [0, 10000.0, 10000.0],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56}),
    "qwen3_next-heads-above-a-block": (
        "qwen3_next",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56, "head_dim": 256},
    ),
    "qwen3_next-some-dense": (
        "qwen3_next",
        {
            **EXPERTS,
            **OTHER_DELTA_NET,
            "shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "kimi_linear": ("kimi_linear", KIMI_DELTA),
    "kimi_linear-lists": (
        "kimi_linear",
        {
            **KIMI_DELTA,
            "layer_types": None,
            "linear_attn_config": {"full_attn_layers": [1, 3], "kda_layers": [2]},
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 28,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
        },
    ),
    "bailing_hybrid": ("bailing_hybrid", LING),
    "bailing_hybrid-types": (
        "bailing_hybrid",
        {
            **LING,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_head_dim": 12,
            "linear_num_heads": 3,
            "linear_conv_kernel_dim": 3,
            "kda_safe_gate": False,
            "attention_bias": True,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale_all_dim": 1.0},
        },
    ),
    "bailing_hybrid-loose-bound": ("bailing_hybrid", {**LING, "kda_lower_bound": -0.7}),
    "qwen3_5_text": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_text-tied": ("qwen3_5_text", OTHER_DELTA_NET),
    "qwen3_5_text-heads-above-a-block": ("qwen3_5_text", {**DELTA_NET, "head_dim": 256}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 56},
    ),
    "qwen3_5": ("qwen3_5", OTHER_DELTA_NET),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40, "head_dim": 16},
    ),
    "qwen4_exp_text": ("qwen4_exp_text", NGRAMS),
    "qwen4_exp_text-tied": (
        "qwen4_exp_text",
        {
            **EXPERTS,
            **OTHER_DELTA_NET,
            "norm_topk_prob": False,
            "ple_layer_ids": [3],
            "ngram_size": 4,
            "heads_per_ngram": 1,
            "ple_embed_dim": 18,
            "ple_conv_kernel_size": 3,
            "split_ngram_parts": 1,
            "seed": 7,
            "eos_token_id": [5, 2],
        },
    ),
    "qwen4_exp_text-without-ngrams": (
        "qwen4_exp_text",
        {**EXPERTS, **DELTA_NET, "indexer_compress_ratio": 8},
    ),
    "qwen4_exp": ("qwen4_exp", {**NGRAMS, "head_dim": 16}),
    "qwen4_exp-without-ngrams": (
        "qwen4_exp",
        {**EXPERTS, **DELTA_NET, "head_dim": 16, "shared_expert_intermediate_size": 40},
    ),
    "nanochat": ("nanochat", {"rope_parameters": LLAMA3}),
    "nanochat-biases-tied": (
        "nanochat",
        {
            "num_key_value_heads": None,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "rms_norm_eps": 1e-4,
        },
    ),
    "nanochat-heads-above-a-block": (
        "nanochat",
        {
            "hidden_size": 512,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "rope_parameters": LINEAR,
        },
    ),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80}),
    "falcon-one-norm-biases": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 3,
            "num_key_value_heads": 3,
            "bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-one-kv-head": (
        "falcon",
        {"num_key_value_heads": 1, "ffn_hidden_size": 80, "tie_word_embeddings": True},
    ),
    "falcon-all-heads-one-half-after-the-other": (
        "falcon",
        {
            "num_key_value_heads": 6,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "layer_norm_epsilon": 1e-4,
            "rope_parameters": LINEAR,
        },
    ),
    "opt": ("opt", {"ffn_dim": 80, "tie_word_embeddings": True}),
    "opt-no-biases-gelu": (
        "opt",
        {
            "ffn_dim": 72,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "gpt2": ("gpt2", {"n_inner": 80, "tie_word_embeddings": True}),
    "gpt2-unscaled-apart": (
        "gpt2",
        {
            "n_inner": 72,
            "scale_attn_weights": False,
            "reorder_and_upcast_attn": True,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 80, "tie_word_embeddings": True}),
    "gpt_bigcode-all-heads-apart": (
        "gpt_bigcode",
        {
            "n_inner": 72,
            "multi_query": False,
            "num_key_value_heads": 6,
            "scale_attn_weights": False,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "phi": ("phi", {"rope_parameters": HALF_ROTATED}),
    "phi-all-heads": (
        "phi",
        {
            "num_key_value_heads": None,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-4,
            "rope_parameters": LINEAR,
        },
    ),
    "phi-heads-above-a-block": (
        "phi",
        {
            "hidden_size": 576,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        },
    ),
    "phimoe": ("phimoe", {"num_local_experts": 6, "intermediate_size": 40, "attention_bias": True}),
    "phimoe-longrope": (
        "phimoe",
        {
            "num_local_experts": 5,
            "intermediate_size": 24,
            "router_jitter_noise": 0.2,
            "lm_head_bias": True,
            "sliding_window": 5,
            "rope_parameters": LONGROPE_OF_MIXTURE,
        },
    ),
    "olmo": ("olmo", {}),
    "olmo-biases-tied": (
        "olmo",
        {
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**TWO_BLOCKS, "rope_parameters": {"rope_theta": None}}),
    "olmo_hybrid-rope-biases-tied": (
        "olmo_hybrid",
        {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "rms_norm_eps": 1e-4,
        },
    ),
    "helium": ("helium", {}),
    "helium-biases": (
        "helium",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "flex_olmo-biases": (
        "flex_olmo",
        {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "head_dim": 16,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 5,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "glm46v": ("glm46v", {}),
    "glm4v_moe": ("glm4v_moe", {**ROUTED, "rope_parameters": HALF_ROTATED, "routed_scaling_factor": 1.7}),
    "glm4v_moe-groups": (
        "glm4v_moe",
        {
            **ROUTED,
            "rope_parameters": HALF_ROTATED,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "attention_bias": False,
            "head_dim": 16,
            "norm_topk_prob": False,
        },
    ),
    "internvl": ("internvl", {}),
    "internvl-qwen3-tied": (
        "internvl",
        {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    ),
    "internvl-qwen3-moe": ("internvl", {"model_type": "qwen3_moe", **EXPERTS, "head_dim": 8}),
    "internvl-llama": ("internvl", {"model_type": "llama", "rms_norm_eps": 1e-5}),
    "llava_next": ("llava_next", {"rms_norm_eps": 1e-5}),
    "llava_next-mistral": ("llava_next", {"model_type": "mistral", "sliding_window": 5}),
    "llava_next-qwen2": ("llava_next", {"model_type": "qwen2"}),
    "llava_onevision": ("llava_onevision", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "idefics3": ("idefics3", {"rms_norm_eps": 1e-5}),
    "smolvlm": ("smolvlm", {"head_dim": 16, "tie_word_embeddings": True}),
    "muse_glimmer": ("muse_glimmer", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 5}),
    "muse_glimmer-tied-other-numbers": (
        "muse_glimmer",
        {
            "head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "layer_types": MIXED,
            "layer_rope_theta": [0, 1e6, 1e6],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "qk_scale_factor": 1.5,
            "output_multiplier": 0.7,
            "post_norm_eps": 0.01,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "paddleocr_vl": ("paddleocr_vl", {"head_dim": 12, "use_bias": True}),
    "paddleocr_vl-tied": (
        "paddleocr_vl",
        {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "glm_ocr": ("glm_ocr", {"head_dim": 16, "rope_parameters": HALF_ROTATED}),
    "glm_ocr-whole-rotary-tied": ("glm_ocr", {"head_dim": 12, "tie_word_embeddings": True}),
    "lfm2_vl": (
        "lfm2_vl",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_vl-tied": (
        "lfm2_vl",
        {"full_attn_idxs": [0, 2], "conv_L_cache": 4, "block_multiple_of": 128, "tie_word_embeddings": True},
    ),
    "lfm3_vl": (
        "lfm3_vl",
        {"head_dim": 8, "sliding_window": 5, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    ),
    "lfm3_vl-tied": (
        "lfm3_vl",
        {
            "head_dim": 16,
            "conv_L_cache": 3,
            "layer_types": ["sliding_attention", "full_attention", "conv"],
            "tie_word_embeddings": True,
        },
    ),
    "minicpm3": ("minicpm3", {**DENSE_LATENTS, "scale_emb": 3, "dim_model_base": 16}),
    "minicpm3-longrope": ("minicpm3", {**DENSE_LATENTS, "rope_parameters": LATENT_LONGROPE}),
    "minicpm3-unscaled-biases": (
        "minicpm3",
        {
            **DENSE_LATENTS,
            "q_lora_rank": None,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "exaone4_5": ("exaone4_5", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "exaone4_5-tied": (
        "exaone4_5",
        {
            "head_dim": 16,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
        },
    ),
    "lighton_ocr": ("lighton_ocr", {"head_dim": 12}),
    "lighton_ocr-tied": ("lighton_ocr", {"head_dim": 8, "tie_word_embeddings": True}),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        {
            "embedding_multiplier": 10.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.125,
        },
    ),
    "hyperclovax_vision_v2-tied": (
        "hyperclovax_vision_v2",
        {"use_post_norm": False, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "granite4_vision": (
        "granite4_vision",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "granite4_vision-tied": (
        "granite4_vision",
        {"attention_multiplier": 0.4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "vipllava": ("vipllava", {"attention_bias": True}),
    "llava_next_video": ("llava_next_video", {"model_type": "mistral", "sliding_window": 5}),
    "video_llava": ("video_llava", {"tie_word_embeddings": True}),
    "aya_vision": (
        "aya_vision",
        {
            "model_type": "cohere2",
            "sliding_window": 5,
            "layer_types": MIXED,
            "tie_word_embeddings": True,
            "logit_scale": 1.0,
        },
    ),
    "cohere2_vision": (
        "cohere2_vision",
        {"sliding_window": 4, "sliding_window_pattern": 2, "logit_scale": 1.0},
    ),
    "ovis2": ("ovis2", {"tie_word_embeddings": True}),
    "minicpmv4_6": ("minicpmv4_6", OTHER_DELTA_NET),
    "minicpmv4_7": ("minicpmv4_7", {**DELTA_NET, "tie_word_embeddings": True}),
    "minicpm_ocr": ("minicpm_ocr", {**OTHER_DELTA_NET, "tie_word_embeddings": True}),
    "step3p7": (
        "step3p7",
        {
            **STEP,
            "layer_types": MIXED,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_sliding_attention_heads": 4,
            "swiglu_limits": [0.5, 0, 0.3],
            "swiglu_limits_shared": [0.7, 0.4, 0.0],
            "moe_router_scaling_factor": 3.0,
            "rope_parameters": {
                "full_attention": {**LLAMA3, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "step3p7-as-published": (
        "step3p7",
        {
            **STEP,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "moe_layers_enum": "1,2",
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8},
            "rope_theta": [500.0, 10000.0, 500.0],
            "partial_rotary_factors": [0.5, 1.0, 0.5],
            "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
            "swiglu_limits": [0.0, 0.0, 0.3],
            "swiglu_limits_shared": [0.0, 0.0, 0.5],
        },
    ),
    "step3p7-biases-tied": (
        "step3p7",
        {
            **STEP,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "mlp_bias": True,
            "query_pre_attn_scalar": 20,
            "share_expert_dim": 80,
            "tie_word_embeddings": True,
        },
    ),
    "qianfan_ocr": ("qianfan_ocr", {"head_dim": 12}),
    "qianfan_ocr-tied": ("qianfan_ocr", {"head_dim": 12, "tie_word_embeddings": True}),
    "janus": ("janus", {"head_dim": 12}),
    "deepseek_vl": ("deepseek_vl", {"tie_word_embeddings": True}),
    "granite_docling": (
        "granite_docling",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "hunyuan_vl": (
        "hunyuan_vl",
        {"head_dim": 8, "rope_parameters": STRETCHED},
    ),
    "glmga": ("glmga", {}),
    "phi4_multimodal": (
        "phi4_multimodal",
        {
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "rope_parameters": {**HALF_ROTATED, "partial_rotary_factor": 0.75},
        },
    ),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": [40, 24],
            "moe_num_shared_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "ernie4_5_vl_moe-dense-in-the-middle": (
        "ernie4_5_vl_moe",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "moe_num_experts": 5,
            "moe_k": 3,
            "moe_intermediate_size": [24, 40],
            "moe_num_shared_experts": 0,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "aria": ("aria", {"intermediate_size": 40, "moe_num_experts": 6, "moe_topk": 2}),
    "aria-one-shared": (
        "aria",
        {
            "intermediate_size": 32,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_num_experts": 5,
            "moe_topk": 3,
            "moe_num_shared_experts": 1,
            "rope_parameters": LINEAR,
        },
    ),
    "inkling_text": ("inkling_text", INKLING),
    "inkling_text-dense": (
        "inkling_text",
        {
            **INKLING,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "mlp_layer_types": ["dense"] * 3,
            "log_scaling_n_floor": None,
            "conv_kernel_size": 3,
            "d_rel": 1,
        },
    ),
    "inkling_text-one-shared": (
        "inkling_text",
        {
            **INKLING,
            "swa_num_key_value_heads": 2,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "route_scale": 1.5,
            "rel_extent": 3,
            "sliding_window_size": 12,
            "conv_kernel_size": 2,
        },
    ),
    "inkling_mm_model": ("inkling_mm_model", INKLING),
    "phi4_multimodal-longrope": (
        "phi4_multimodal",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "perception_lm": ("perception_lm", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "fast_vlm": ("fast_vlm", {}),
    "fast_vlm-tied": ("fast_vlm", {"tie_word_embeddings": True}),
    "video_llama_3": ("video_llama_3", {"tie_word_embeddings": True}),
    "deepseek_ocr2": (
        "deepseek_ocr2",
        {"n_routed_experts": 6, "moe_intermediate_size": 24, "n_shared_experts": 2},
    ),
    "deepseek_ocr2-groups": (
        "deepseek_ocr2",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "nemotron_h_omni": (
        "nemotron_h_omni",
        {
            **NEMOTRON,
            **{name: value for name, value in ROUTED.items() if name != "partial_rotary_factor"},
            "layers_block_type": ["moe", "full_attention", "linear_attention"],
            "moe_shared_expert_intermediate_size": 72,
            "num_nextn_predict_layers": 1,
        },
    ),
    "nemotron_h_omni-dense": (
        "nemotron_h_omni",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    ),
    "qwen3_omni_moe": ("qwen3_omni_moe", {**EXPERTS, "head_dim": 8}),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_thinker",
        {**EXPERTS, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "qwen3_omni_moe-some-dense": (
        "qwen3_omni_moe",
        {
            **EXPERTS,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "head_dim": 12,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
}


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
        return {**sizes, "head_dim": of_head, "rotary_dim": of_head // 2 if rotates_in_part else of_head}
    for field in ("ffn_hidden_size", "ffn_dim", "n_inner"):
        if field in changes:
            return {field: 4 * size}
    if "v_head_dim" in changes and "kv_lora_rank" not in changes:
        return {"head_dim": size // 2, "v_head_dim": of_head}
    if "o_lora_rank" in changes:
        ranks = {"q_lora_rank": size, "o_lora_rank": size // 2, "o_groups": 2}
        return {"num_key_value_heads": 1, **dict.fromkeys(("head_dim", "index_head_dim"), size // 2), **ranks}
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
        "head_dim": of_head if "layer_group_size" in changes else None,  # of the delta nets of Ling
        "q_lora_rank": size if changes.get("q_lora_rank") else None,
        "kv_lora_rank": size,
        "qk_nope_head_dim": of_head,
        "v_head_dim": of_head,
    }


OWN_EPS = {"olmo": 1e-5, "opt": 1e-5}
"""What the norms of families add that no field states."""
DERIVED_HEADS = ("falcon",)
"""Families whose configs refuse the size of a head."""
TWICE_IN_WINDOWS = ("mimo_v2_flash",)
"""Families whose layers with a window have twice the KV heads that their configs state."""
FLAT = ("phi4_multimodal",)
"""Wrappers whose config holds the fields of the text model among its own."""
WIDE_AS_TEXT = ("granite_docling", "hunyuan_vl")
"""Families whose vision tower has outputs as wide as the text model."""
HEARS_AS_WIDE = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")
"""Families whose audio tower has outputs as wide as the text model."""
WITHOUT_SECTIONS = ("exaone4_5", "hyperclovax_vision_v2", "ernie4_5_vl_moe")
"""Families with a vision tower of Qwen2.5-VL or like it whose text model has a plain rope, or sections in
another order."""


def kv_heads_of(stated: Any, *, in_window: bool = False) -> int:
    """Return the heads of keys and values of a layer, with a window or without, by a configuration of
    `transformers`."""
    if stated.model_type == "inkling_text" and in_window:
        return int(stated.swa_num_key_value_heads)
    if stated.model_type == "falcon":
        one_or_all = 1 if stated.multi_query else stated.num_attention_heads
        return int(stated.num_kv_heads if stated.new_decoder_architecture else one_or_all)
    return int(getattr(stated, "num_key_value_heads", stated.num_attention_heads))


def build_config(family: str, changes: dict[str, Any]) -> Any:
    """Return the configuration of a tiny model of that family."""
    stated = copy.deepcopy({**SMALL, **NEEDED.get(family, {}), **changes})
    if stated.get("head_dim", 0) is None or family in DERIVED_HEADS:
        stated.pop("head_dim", None)
    by_layer = ("layer_types", "layers_block_type", "mlp_layer_types", "activation_sparsity_pattern")
    for name in (*by_layer, "intermediate_size"):
        if isinstance(stated.get(name), list):  # of the model with the most layers; some tests make fewer
            stated[name] = stated[name][: stated["num_hidden_layers"]]
    if stated.get("kv_source_layers"):
        for name in ("kv_source_layers", "no_rope_layers", "indexer_types"):
            stated[name] = stated[name][: stated["num_hidden_layers"]]
    if stated.get("ple_layer_ids"):
        stated["ple_layer_ids"] = [
            each for each in stated["ple_layer_ids"] if each <= stated["num_hidden_layers"]
        ]
    if family not in AROUND:
        return CONFIGS[family](**stated)
    around = copy.deepcopy(AROUND[family])
    if family in FLAT:
        return CONFIGS[family](**stated, **around)
    around["tie_word_embeddings"] = stated["tie_word_embeddings"]
    if family == "dots3_note":
        for tower in ("vision_config", "audio_config"):
            around[tower]["adapter_out_dim"] = stated["hidden_size"]
    if family in WIDE_AS_TEXT:
        around["vision_config"]["out_hidden_size"] = stated["hidden_size"]
    if "depth" in around["vision_config"]:
        width = "hidden_size" if "embed_dim" in around["vision_config"] else "out_hidden_size"
        around["vision_config"][width] = stated["hidden_size"]
    if ("depth" in around["vision_config"] or family == "paddleocr_vl") and family not in WITHOUT_SECTIONS:
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
        around["audio_config"]["output_dim"] = stated["hidden_size"]
    if family in OF_THINKERS:
        thinker = {"text_config": stated, **around}
        return CONFIGS[family](thinker_config=thinker, enable_audio_output=False)
    return CONFIGS[family](text_config=stated, **around)


OF_THINKERS = ("qwen3_omni_moe",)
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
        found = transformers.AutoModelForMultimodalLM.from_pretrained(path, **how)
        model = found[0] if isinstance(found, tuple) else found
        model.forward = model.thinker.forward
        return found


def auto_class(family: str) -> Any:
    """Return the class that loads models of a family."""
    if family in OF_THINKERS:
        return Thinkers
    if family in AROUND and family not in FLAT:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def build(family: str, changes: dict[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of that family on the CPU, in eval mode."""
    config = build_config(family, changes)
    torch.manual_seed(seed)
    model = auto_class(family).from_config(config, attn_implementation="eager")
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
