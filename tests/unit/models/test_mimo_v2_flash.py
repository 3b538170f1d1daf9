"""MiMo-V2-Flash: two kinds of layers, values narrower than keys, and the fields of published configs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.calibrate.kv import KeysValues
from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.latent import Latent
from compress.models.layer_checks import why_layer_unfit
from compress.models.layer_shape import Rope
from compress.models.mamba2 import Mamba2
from compress.models.pruning import with_layers
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.runtime.kv_cache import kv_bytes_per_token
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved
from tests.support.tiny_source import tiny_shape, tiny_source

PUBLISHED: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "layernorm_epsilon": 1e-5,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": None,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "add_swa_attention_sink_bias": True,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "torch_dtype": "float32",
}
SCHEME = ModelScheme(SCHEMES["W4A16_G32"])


def arch_of(**changes: Any) -> Arch:
    config = {**PUBLISHED, **changes}
    return family_of(config).read_config(config)


def written(arch: Arch) -> dict[str, Any]:
    """Return the config of an arch, which is that arch again."""
    config = family_of(arch.config).write_config(arch)
    assert family_of(config).read_config(config).replace(config={}) == arch.replace(config={})
    return config


def test_layers_with_a_window_have_twice_the_kv_heads_a_rope_of_their_own_and_sinks() -> None:
    arch = arch_of()
    full = (None, 2, Rope(5000000.0, rotary_dim=8), False)
    windowed = (129, 4, Rope(10000.0, rotary_dim=8), True)  # the query and 128 positions before it
    found = [(layer.window, layer.num_kv_heads, layer.rope, arch.has_sinks(layer)) for layer in arch.layers]
    assert found == [windowed if each else full for each in PUBLISHED["hybrid_layer_pattern"]]
    assert [layer.experts is not None for layer in arch.layers] == [False] + [True] * 6
    parameters = dict(Decoder(arch).named_parameters())
    assert arch.num_params == sum(each.numel() for each in parameters.values())
    of_sinks = [name for name in parameters if name.endswith("sinks")]
    assert of_sinks == [f"layers.{idx}.attn.sinks" for idx in (1, 2, 3, 4, 6)]


def test_values_are_narrower_and_their_factor_is_one_of_what_reads_them() -> None:
    arch = arch_of()
    shapes = {name: arch.layers[1].linear_shape(f"attn.{name}", 64) for name in "qkvo"}
    assert shapes == {"q": (192, 64), "k": (96, 64), "v": (64, 64), "o": (64, 128)}
    assert arch.linear_factors == (("attn.o", 0.707),)
    assert arch_of(attention_value_scale=None).linear_factors == ()
    assert arch_of(attention_value_scale=1.0).linear_factors == ()
    as_wide = arch_of(v_head_dim=24, swa_v_head_dim=24)
    assert {layer.narrow_value_dim for layer in as_wide.layers} == {None}


def test_a_config_of_transformers_states_the_same_layers() -> None:
    theirs = {
        name: value
        for name, value in PUBLISHED.items()
        if not name.startswith(
            ("swa_", "sliding", "add_", "hybrid", "moe_layer", "layernorm", "rope", "partial")
        )
    }
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    for stated in ({}, {"rope_parameters": ropes}):
        config = {**theirs, **stated}
        assert family_of(config).read_config(config).replace(config={}) == arch_of().replace(config={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hybrid_layer_pattern", [0, 1, 1, 1, 1, 1, 0]),
        ("hybrid_layer_pattern", [0, 1, 1]),
        ("moe_layer_freq", [1] * 7),
        ("layernorm_epsilon", 1e-6),
        ("rope_theta", 10000),
        ("swa_rope_theta", 5000000),
        ("partial_rotary_factor", 0.5),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e6}),
        ("rope_parameters", {"full_attention": {"rope_theta": 5e6}}),
        ("swa_num_attention_heads", 16),
        ("swa_num_key_value_heads", 2),
        ("swa_head_dim", 16),
        ("swa_v_head_dim", 24),
        ("add_full_attention_sink_bias", True),
        ("add_swa_attention_sink_bias", False),
        ("scoring_func", "softmax"),
        ("n_shared_experts", 1),
        ("auto_map", {"AutoModel": "modeling_other.OtherModel"}),
    ],
)
def test_a_field_that_programs_read_otherwise_than_transformers_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArch):
        arch_of(**{name: value})


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_other_types_of_layers_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedArch, match=r"layer_types.*full_attention or sliding_attention"):
        arch_of(layer_types=["full_attention"] * 6 + [kind], hybrid_layer_pattern=None)


def test_values_wider_than_keys_are_refused() -> None:
    with pytest.raises(UnsupportedArch, match="values of 32 dimensions and keys of 24"):
        arch_of(v_head_dim=32, swa_v_head_dim=32)


def test_a_model_of_fewer_layers_states_which_are_left() -> None:
    config = written(with_layers(arch_of(), [0, 2, 5]))
    assert config["hybrid_layer_pattern"] == [0, 1, 0]
    assert config["moe_layer_freq"] == [0, 1, 1]
    assert config["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    assert config["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    only_windows = written(with_layers(arch_of(), [1, 2]))
    assert (only_windows["num_key_value_heads"], only_windows["swa_num_key_value_heads"]) == (2, 4)


def test_kv_heads_that_no_config_states_are_refused() -> None:
    arch = arch_of()
    family = family_of(arch.config)
    same = arch.replace(layers=tuple(tiny_shape(window=each) for each in (None, 5)))
    assert "twice the KV heads" in str(family.why_unstated(same))
    odd = arch.replace(layers=(tiny_shape(num_heads=3, num_kv_heads=3, window=5),))
    assert "twice the KV heads" in str(family.why_unstated(odd))
    assert family.why_unstated(arch) is None


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["mimo_v2_flash"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.mtp.layers.0.eh_proj.weight": torch.zeros(4, 8)}
    save_file(tensors, file, metadata={"format": "pt"})
    source = Checkpoint(tmp_path)
    assert {"attn.sinks"} == {name for name in source.layer(1) if "sink" in name}


@pytest.mark.parametrize(
    "facts",
    [
        {"narrow_value_dim": 16},
        {"narrow_value_dim": 18},
        {"narrow_value_dim": 7},
        {"narrow_value_dim": 8, "output_gate": True},
        {"narrow_value_dim": 8, "keys_are_values": True},
        {"narrow_value_dim": 8, "kv_source": 0},
        {"narrow_value_dim": 8, "joint": True, "recurrence": Mamba2(4, 1, 16, 12, 4, conv_bias=True)},
        {
            "narrow_value_dim": 8,
            "num_kv_heads": 4,
            "rope": Rope(1e4, rotary_dim=6),
            "latent": Latent(q_rank=0, kv_rank=12, rope_dim=6, value_dim=12, interleaved=True),
        },
    ],
)
def test_narrower_values_beside_other_facts_are_refused(facts: dict[str, Any]) -> None:
    assert "values" in str(why_layer_unfit(tiny_shape(**facts)))
    assert why_layer_unfit(tiny_shape(narrow_value_dim=8)) is None


def test_normed_narrower_values_and_windowed_sinks_without_sinks_are_refused() -> None:
    with pytest.raises(UnsupportedArch, match="normed and narrower"):
        tiny_source(v_norm=True, layers=(tiny_shape(narrow_value_dim=8),))
    with pytest.raises(UnsupportedArch, match="attention sinks"):
        tiny_source(windowed_sinks=True)


def test_a_cache_holds_narrower_values_as_wide_as_keys_and_their_scales_are_of_values_alone() -> None:
    source = tiny_source(layers=(tiny_shape(narrow_value_dim=6), tiny_shape()))
    assert kv_bytes_per_token(source.arch, "BF16") == 2 * 2 * (2 * 16) * 2
    weights = source.layer(0)
    cached = KeysValues.from_weights(source.arch, 0, weights, dtype=torch.float32, device=torch.device("cpu"))
    seen: dict[str, tuple[int, ...]] = {}

    def tap(name: str, x: torch.Tensor) -> None:
        seen[name] = tuple(x.shape)
        assert bool((x != 0).any(dim=(0, 1)).all())

    x_BSD = torch.randn(1, 5, source.arch.hidden_size, generator=torch.Generator().manual_seed(0))
    cached(x_BSD, torch.arange(5), FullAttention(), tap)
    assert seen == {"k": (1, 5, 2 * 16), "v": (1, 5, 2 * 6)}


def test_vllm_loads_configs_with_the_fields_that_its_class_reads() -> None:
    def loads(arch: Arch) -> dict[str, tuple[bool, str]]:
        consumers = FORMATS.get("compressed-tensors").consumers(arch, SCHEME)
        return {each.name: (each.loads, each.note) for each in consumers}

    published = loads(arch_of())
    assert published["vLLM"][0]
    assert "sliding_window_size positions" in published["vLLM"][1]
    assert published["vLLM on a CPU"] == (False, "it has no attention whose values are narrower than keys")
    scaled = loads(arch_of(routed_scaling_factor=2.5))
    assert scaled["vLLM"] == (
        False,
        "its class of MiMo-V2-Flash has plain ropes and no factor of the weights of experts",
    )
    absent = loads(arch_of(hybrid_layer_pattern=None))
    assert "reads hybrid_layer_pattern, which this config does not state" in absent["vLLM"][1]
