"""Configs of what is around the text models of tiny wrappers: towers and projectors."""

from typing import Any

import torch
import transformers


class Tower(transformers.PreTrainedModel):
    """A matrix in place of the vision tower of Gemma 3n, which a package computes that is not installed."""

    config_class = transformers.Gemma3nVisionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.timm_model = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


transformers.AutoModel.register(transformers.Gemma3nVisionConfig, Tower, exist_ok=True)
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
_GEMMA3 = {
    "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    "image_token_index": 97,
    "boi_token_index": 98,
    "eoi_token_index": 99,
    "mm_tokens_per_image": 4,
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
_SAM = {
    **{name: size for name, size in _VISION.items() if name != "intermediate_size"},
    "image_size": 64,
    "patch_size": 16,
    "output_channels": 16,
    "window_size": 2,
    "global_attn_indexes": [0],
    "mlp_dim": 32,
}
_THINKER_2_5 = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "fullatt_block_indexes": [0],
    },
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_mel_bins": 16,
    },
    "image_token_index": 97,
    "video_token_index": 98,
    "audio_token_index": 99,
}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 8,
}
_GRANITE_SPEECH = {
    "encoder_config": {
        "input_dim": 16,
        "num_layers": 2,
        "hidden_dim": 32,
        "feedforward_mult": 2,
        "num_heads": 2,
        "dim_head": 16,
        "output_dim": 8,
        "context_size": 8,
        "max_pos_emb": 8,
    },
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "encoder_hidden_size": 32,
        "cross_attention_frequency": 1,
    },
    "audio_token_index": 97,
    "has_lora_adapter": False,
}
_TOKENIZER_ENCODER = {"hidden_size": 16, "num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2]}
# What is around the text model of a wrapper; ids of images are beyond the vocabulary.
AROUND: dict[str, dict[str, Any]] = {
    "glm5_next": {
        **_GLM4V,
        "vision_config": {**_GLM4V["vision_config"], "projection_intermediate_size": 32},
    },
    "gemma3": _GEMMA3,
    "shieldgemma2": _GEMMA3,
    "paligemma": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "image_token_index": 97,
        "projection_dim": 48,
        "hidden_size": 48,
        "vocab_size": 97,
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
    "mllama": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "num_attention_heads"},
            "attention_heads": 2,
            "num_global_layers": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image_token_index": 97,
    },
    "molmo2": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "num_key_value_heads": 2,
            "head_dim": 16,
            "image_size": [28, 28],
        },
        "adapter_config": {
            "vision_feature_layer": [0],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
        },
        "image_start_token_id": 97,
        "image_end_token_id": 98,
        "image_patch_id": 99,
        "low_res_image_start_token_id": 100,
        "frame_start_token_id": 101,
        "frame_end_token_id": 102,
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
    "idefics2": {
        "vision_config": _VISION,
        "perceiver_config": {
            "resampler_n_latents": 2,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
        },
        "image_token_id": 97,
    },
    "idefics3": {"vision_config": _VISION, "image_token_id": 97},
    "cosmos3_edge": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "num_patches": 4,
        },
        "projector_hidden_size": 32,
        **_QWEN_IDS,
    },
    "smolvlm": {"vision_config": _VISION, "image_token_id": 97},
    "muse_spark": {
        "vision_config": {
            **{name: size for name, size in _VISION.items() if name != "image_size"},
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "audio_config": {
            "patch_sizes": [4, 2],
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "mlp_ratio": 2.0,
        },
        "out_hidden_size": 4 * _VISION["hidden_size"],
        "projector_hidden_size": 24,
        "image_token_id": 97,
        "video_token_id": 98,
        "audio_token_id": 99,
    },
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
    "qwen2_5_omni": _THINKER_2_5,
    "qwen2_5_omni_thinker": _THINKER_2_5,
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
    "deepseek_vl_hybrid": {
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
        "high_res_vision_config": {"model_type": "sam_vision_model", **_SAM},
        "image_token_id": 97,
    },
    "got_ocr2": {"vision_config": _SAM, "image_token_index": 97, "image_seq_length": 4},
    "pp_chart2table": {"vision_config": _SAM, "image_token_index": 97, "image_seq_length": 4},
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
    "cohere_compass": {"vision_config": _QWEN3_VISION, **_QWEN_IDS},
    "audioflamingo3": {
        "audio_config": {"model_type": "audioflamingo3_encoder", **_WHISPER},
        "audio_token_id": 97,
    },
    "musicflamingo": {
        "audio_config": {"model_type": "audioflamingo3_encoder", **_WHISPER},
        "audio_token_id": 97,
        "audio_bos_token_id": 98,
        "audio_eos_token_id": 99,
    },
    "voxtral": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 128,  # the projector reads four frames of the tower at once
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 16,
            "max_source_positions": 8,
        },
        "audio_token_id": 97,
    },
    "qwen2_audio": {"audio_config": _WHISPER, "audio_token_index": 97},
    "qwen3_asr": {
        "audio_config": {
            **{name: size for name, size in _WHISPER.items() if name != "max_source_positions"},
            "downsample_hidden_size": 16,
            "output_dim": 32,
        },
        "audio_token_id": 97,
        "timestamp_token_id": 98,
    },
    "granite_speech": _GRANITE_SPEECH,
    "granite_speech_plus": {
        **_GRANITE_SPEECH,
        "encoder_config": {**_GRANITE_SPEECH["encoder_config"], "cat_hidden_layers": [0]},
        "projector_config": {**_GRANITE_SPEECH["projector_config"], "encoder_hidden_size": 64},
    },
    "glmasr": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 128,  # the projector reads four frames of the tower at once
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 16,
        },
        "audio_token_id": 97,
    },
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": _TOKENIZER_ENCODER,
        "semantic_tokenizer_encoder_config": {**_TOKENIZER_ENCODER, "hidden_size": 8},
        "audio_token_id": 97,
        "audio_bos_token_id": 98,
        "audio_eos_token_id": 99,
    },
    "fun_asr_nano": {
        "audio_config": {
            "num_mel_bins": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_timestamp_prediction_layers": 1,
            "num_stacked_frames": 2,
        },
        "adaptor_config": {
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "projector_hidden_size": 32,
        },
        "audio_token_id": 97,
    },
}
