"""The configs of Ling 3.0: widths of delta nets that follow from others or are stated, bounds of decays, the
layers that attend, what other programs alone compute, and who loads exports."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.caps import caps_after
from compress.models.config_notes import unread_note
from compress.models.decoder import Decoder
from compress.models.delta_net import DeltaNet
from compress.models.family import family_of
from compress.models.pruning import with_layers
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.untrusted.fields import Fields

LING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 32,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def arch_of(**changes: Any) -> Arch:
    config = {**LING, **changes}
    return family_of(config).read_config(config)


def recurrences(arch: Arch) -> list[Any]:
    return [layer.recurrence for layer in arch.layers]


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    family = family_of(arch.config)
    config = family.write_config(arch)
    assert family.read_config(config).replace(config={}) == arch.replace(config={})
    return config


def test_delta_nets_have_the_heads_of_attention_or_those_that_are_stated() -> None:
    delta = DeltaNet(4, 4, 32, 32, 4, by_channel=True, decay_bound=5.0)
    assert recurrences(arch_of()) == [delta, None, delta, None]
    stated = {"linear_num_heads": 2, "linear_head_dim": 24, "linear_conv_kernel_dim": 3, "head_dim": 8}
    assert recurrences(arch_of(**stated))[0] == DeltaNet(2, 2, 24, 24, 3, by_channel=True, decay_bound=5.0)
    assert recurrences(arch_of(short_conv_kernel_size=2))[0].kernel_size == 2


def test_a_manifest_is_read_back_equal_and_counts_the_parameters_of_the_decoder() -> None:
    for arch in (
        arch_of(),
        arch_of(kda_safe_gate=False, q_lora_rank=24),
        arch_of(kda_lower_bound=-0.3),
        arch_of(**FLASH),
    ):
        assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
        with torch.device("meta"):
            decoder = Decoder(arch)
        assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())


def test_only_layers_that_attend_have_gates_of_heads() -> None:
    assert [layer.head_gate for layer in arch_of().layers] == [None, "sigmoid"] * 2
    assert [layer.latent is not None for layer in arch_of().layers] == [False, True] * 2


def test_a_decay_has_the_bound_that_a_config_states_unless_its_gate_has_none() -> None:
    assert recurrences(arch_of(kda_lower_bound=-2))[0].decay_bound == 2.0
    assert recurrences(arch_of(kda_lower_bound=-2, kda_safe_gate=False))[0].decay_bound == 0.0
    for bound in (0, 1.0, -1e6):
        with pytest.raises(UnsupportedArch, match="kda_lower_bound"):
            arch_of(kda_lower_bound=bound)


FLASH = {"expert_swiglu_limit_list": [4, 0, 0, 4], "share_expert_swiglu_limit_list": [5, 0, 5.5, 7, 9]}
"""Caps as in Ling 3.0 Flash; vLLM computes none in dense layers, of which the first is one."""


def test_layers_with_experts_have_the_caps_that_a_config_lists() -> None:
    layers = arch_of(**FLASH).layers
    assert [layer.expert_cap for layer in layers] == [None, None, None, 4.0]
    assert [layer.ffn_cap for layer in layers] == [None, None, 5.5, 7.0]


def test_layers_that_stay_keep_their_caps() -> None:
    config = written(with_layers(arch_of(**FLASH), [0, 2, 3]))
    assert config["expert_swiglu_limit_list"] == [4, 0, 4]
    assert config["share_expert_swiglu_limit_list"] == [5, 5.5, 7, 9]  # the last is of the MTP layer
    assert written(arch_of(**FLASH))["expert_swiglu_limit_list"] == FLASH["expert_swiglu_limit_list"]


def test_a_note_says_who_computes_caps() -> None:
    assert "transformers computes none" in str(unread_note(arch_of(**FLASH)))


def test_layers_that_stay_are_listed_by_their_types() -> None:
    config = written(with_layers(arch_of(), [0, 1, 3]))
    assert config["layer_types"] == ["linear_attention", "full_attention", "full_attention"]
    assert config["num_hidden_layers"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_swiglu_limit_list": [0, 0, 4]}, "expert_swiglu_limit_list = .*4 caps, one for each layer"),
        ({"expert_swiglu_limit_list": [0, 0, 0, -4]}, "expert_swiglu_limit_list = -4.*a list of caps"),
        ({"share_expert_swiglu_limit_list": [0, 0, True, 0]}, "share_expert_swiglu_limit_list = True"),
        ({"share_expert_swiglu_limit_list": [0, "5", 0, 0]}, "share_expert_swiglu_limit_list = '5'"),
        ({"expert_swiglu_limit_list": 4.0}, "expert_swiglu_limit_list = 4.0"),
        ({"moe_shared_expert_intermediate_size": 64}, "moe_shared_expert_intermediate_size = 64.*32"),
        ({"no_kda_lora": False}, "no_kda_lora = False"),
        ({"use_kda_lora": True}, "use_kda_lora = True"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'?element_wise"),
        ({"group_norm_size": 4}, "group_norm_size = 4"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"use_qkv_bias": True}, "use_qkv_bias = True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
        ({"head_dim": 32, "linear_head_dim": 0}, "linear_head_dim = 0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"auto_map": {"AutoModel": "modeling_bailing_moe_v2_5.BailingMoeV2_5Model"}}, "auto_map"),
    ],
    ids=str,
)
def test_what_only_other_programs_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(**changes)


def test_what_changes_nothing_is_read() -> None:
    plain = arch_of().replace(config={})
    for same in (
        {"expert_swiglu_limit_list": [0, 0.0, None, 0], "share_expert_swiglu_limit_list": [0] * 4},
        {"moe_shared_expert_intermediate_size": 32},
        {"partial_rotary_factor": 0.25, "rotary_dim": 8},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5}},
        {"auto_map": {"AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config"}},
    ):
        assert arch_of(**same).replace(config={}) == plain


def refusals(arch: Arch, form: str, scheme: str) -> Mapping[str, str | None]:
    """Return the consumers of an export and why they do not load it, None where they do."""
    stated = FORMATS.get(form).consumers(arch, ModelScheme(SCHEMES[scheme]))
    return {each.name: None if each.loads else each.note for each in stated}


@pytest.mark.parametrize(("form", "scheme"), [("compressed-tensors", "FP8_DYNAMIC"), ("fp8", "FP8_BLOCK")])
def test_transformers_loads_exports_without_latents_of_queries(form: str, scheme: str) -> None:
    widths = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    widths |= {"kv_lora_rank": 128, "v_head_dim": 32, "qk_nope_head_dim": 120}
    assert refusals(arch_of(**widths), form, scheme)["transformers"] is None
    with_latents = refusals(arch_of(**widths, q_lora_rank=128), form, scheme)
    assert "no latent of queries" in str(with_latents["transformers"])
    assert "no caps" in str(refusals(arch_of(**widths, **FLASH), form, scheme)["transformers"])
    assert "no export of Ling 3.0 was tested" in str(with_latents["vLLM"])


def test_caps_of_layers_that_predict_further_tokens_are_one() -> None:
    stated = Fields({"caps": [5, 0, 7, 7]}, "the config", UnsupportedArch)
    assert caps_after(stated, "caps", 2) == 7
    assert caps_after(stated, "caps", 4) is None
    with pytest.raises(UnsupportedArch, match="the same for all layers that predict further tokens"):
        caps_after(stated, "caps", 1)
