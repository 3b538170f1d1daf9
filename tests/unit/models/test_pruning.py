"""Surgery keeps the function where what goes does nothing, whatever the family, and what is left is a
checkpoint that others load.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import Decoder
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.pruning import (
    HeadUnit,
    LayerSubset,
    Recast,
    Units,
    Widths,
    add_biases_,
    as_mistral,
    can_have_bias,
    fits_consumers,
    head_units,
    keep_channels_,
    keep_heads_,
    resized,
    with_biases,
    with_layers,
)
from compress.models.weights import MemorySource, WeightSource, build_decoder, dense
from compress.quant.scheme import QuantizedWeight
from tests.support.tiny_decoder import tiny_tokens

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-windows": {"model_type": "qwen2", **WINDOWED},
    "qwen3": {"model_type": "qwen3", "attention_bias": True},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "attention_bias": True},
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_n_heads": 4,
        "mamba_d_state": 12,
        "mamba_d_ssm": 48,
        "key_multiplier": 0.5,
        "attention_out_multiplier": 0.9,
        "mlp_multipliers": [0.8, 0.7],
    },
    "olmo": {"model_type": "olmo", "attention_bias": True},
    "nanochat": {"model_type": "nanochat"},
    "phi": {"model_type": "phi"},
    "afmoe": {"model_type": "afmoe", "num_dense_layers": 4, "sliding_window": 5},
    "laguna": {
        "model_type": "laguna",
        "mlp_layer_types": ["dense"] * 4,
        "sliding_window": 5,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "layer_types": ["full_attention"] * 4,
        "mlp_layer_types": ["dense"] * 4,
        "v_head_dim": 6,
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    },
    "minimax_m3": {
        "model_type": "minimax_m3_vl_text",
        "dense_intermediate_size": 40,
        "mlp_layer_types": ["dense"] * 4,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        "index_head_dim": 12,
    },
    "qwen3-layer-types": {
        "model_type": "qwen3",
        **{key: value for key, value in WINDOWED.items() if key != "max_window_layers"},
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}
KEPT_GROUPS = [0, 2, 3]
KEPT_LAYERS = [0, 2, 3]
each_family = pytest.mark.parametrize("family", FAMILIES)


def arch_of(family: str, **changes: Any) -> Arch:
    config = {**BASE, **FAMILIES[family], **changes}
    return family_of(config).read_config(config)


def decoder_of(arch: Arch, seed: int = 0) -> Decoder:
    generator = torch.Generator().manual_seed(seed)
    decoder = fresh_decoder(arch, generator=generator)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                parameter + 0.3 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5
            )
    return decoder.requires_grad_(False)


def logits(source: WeightSource) -> Tensor:
    return build_decoder(source, dtype=torch.float32, device=CPU)(tiny_tokens(source.arch, 2, 20).long())


def mask(size: int, kept: list[int]) -> Tensor:
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, torch.tensor(kept), True)


class Sliced:
    """A model whose layers went through surgery."""

    kv_format: str | None = None

    def __init__(
        self, source: WeightSource, arch: Arch, unit: HeadUnit, heads_U: Tensor, channels_U: Tensor
    ) -> None:
        self._source = source
        self.arch = arch
        self._unit = unit
        self._heads_U = heads_U
        self._channels_U = channels_U

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = {name: dense(value) for name, value in self._source.layer(layer_idx).items()}
        keep_heads_(weights, self._source.arch.layers[layer_idx], self._unit, self._heads_U)
        keep_channels_(weights, self._channels_U)
        return dict(weights)


def pruned(source: WeightSource, unit: HeadUnit) -> tuple[WeightSource, Tensor, Tensor]:
    """Three of four KV groups, or one of two query heads in each; a channel in five goes. With bool [U] of
    heads and of channels.
    """
    heads_U = mask(4, KEPT_GROUPS) if unit == "kv_group" else mask(8, [0, 3, 4, 7])
    channels_U = torch.arange(40) % 5 != 2
    heads = (6, 3) if unit == "kv_group" else (4, 4)
    num_layers = source.arch.num_layers
    return (
        Sliced(source, resized(source.arch, Widths(*heads, 32, num_layers)), unit, heads_U, channels_U),
        heads_U,
        channels_U,
    )


@each_family
@pytest.mark.parametrize("unit", ["kv_group", "query_head"])
def test_what_does_nothing_goes_without_changing_a_logit(family: str, unit: HeadUnit) -> None:
    """Units are silenced at their reader, so surgery has to take rows of theirs from the right places."""
    decoder = decoder_of(arch_of(family))
    _, heads_U, channels_U = pruned(MemorySource(decoder, dtype=torch.float32), unit)
    columns = head_units(decoder.arch.layers[0], unit).columns(heads_U)
    for layer in decoder.layers:
        layer.attn.o.weight[:, ~columns] = 0  # type: ignore[index, union-attr]
        layer.ffn.down.weight[:, ~channels_U] = 0  # type: ignore[index, union-attr]
    source = MemorySource(decoder, dtype=torch.float32)
    small, _, _ = pruned(source, unit)
    assert small.arch.num_params < source.arch.num_params
    expected = logits(source)
    found = logits(small)
    tolerance = 64 * torch.finfo(torch.float32).eps * 48**0.5 * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= tolerance
    speaking = logits(MemorySource(decoder_of(arch_of(family)), dtype=torch.float32))
    assert float((speaking - found).abs().max()) > 1000 * tolerance  # what was silenced did matter


@each_family
def test_layers_that_add_nothing_go_without_changing_a_logit(family: str) -> None:
    decoder = decoder_of(arch_of(family))
    idle = decoder.layers[1]
    of_mixer = (idle.mamba.o,) if hasattr(idle, "mamba") else ()  # type: ignore[union-attr]
    for linear in (idle.attn.o, *of_mixer, idle.ffn.down):  # type: ignore[union-attr]
        for parameter in linear.parameters():  # type: ignore[union-attr]
            parameter.zero_()
    source = MemorySource(decoder, dtype=torch.float32)
    small = LayerSubset(source, KEPT_LAYERS)
    assert [each.window for each in small.arch.layers] == [
        source.arch.layers[idx].window for idx in KEPT_LAYERS
    ]
    assert torch.equal(logits(small), logits(source))


@each_family
@pytest.mark.parametrize("unit", ["kv_group", "query_head"])
@pytest.mark.one_in(3)
def test_transformers_loads_what_is_left_and_computes_the_same(
    family: str, unit: HeadUnit, tmp_path: Path
) -> None:
    import transformers

    source = LayerSubset(MemorySource(decoder_of(arch_of(family)), dtype=torch.float32), KEPT_LAYERS)
    small, _, _ = pruned(source, unit)
    write_checkpoint(tmp_path, small)
    read = Checkpoint(tmp_path)
    assert read.arch.replace(config={}) == small.arch.replace(config={})
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = logits(small)
    with torch.no_grad():
        found = model(tiny_tokens(small.arch, 2, 20).long()).logits
    assert float((found - expected).abs().max()) <= 256 * torch.finfo(torch.float32).eps * 48**0.5 * float(
        expected.abs().max()
    )
    assert model.config.head_dim == 8


def test_units_keep_the_same_number_of_every_part_and_the_first_of_equals() -> None:
    units = Units(6, width=2, num_parts=2)
    kept = units.best(torch.tensor([1.0, 5.0, 1.0, 9.0, 8.0, 7.0]), 4)
    assert kept.tolist() == [True, True, False, True, True, False]
    assert units.columns(kept).nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert head_units(arch_of("llama").layers[0], "kv_group") == Units(4, 16)
    assert head_units(arch_of("llama").layers[0], "query_head") == Units(8, 8, num_parts=4)


def test_layer_types_are_cut_along_or_spelled_out() -> None:
    stated = with_layers(arch_of("qwen3-layer-types"), [0, 1, 3])
    assert stated.config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    by_rule = with_layers(arch_of("qwen2-windows"), [1, 2])
    assert by_rule.config["layer_types"] == ["full_attention", "sliding_attention"]
    again = family_of(by_rule.config).read_config({**by_rule.config, "num_hidden_layers": 2})
    assert [each.window for each in again.layers] == [None, 3]


@pytest.mark.parametrize(
    ("family", "linear", "can"),
    [
        ("llama", "attn.o", True),
        ("llama", "ffn.down", True),
        ("qwen3", "attn.o", True),
        ("qwen3", "ffn.down", False),
        ("qwen2", "attn.o", False),
    ],
)
def test_a_bias_is_added_where_the_config_has_a_word_for_it(family: str, linear: str, can: bool) -> None:
    arch = arch_of(family, attention_bias=False) if family == "qwen3" else arch_of(family)
    assert can_have_bias(arch, linear) == can
    if not can:
        return
    more = with_biases(arch, [linear])
    config = family_of(more.config).write_config(more)
    assert family_of(config).read_config(config).replace(config={}) == more.replace(config={})
    weights = {
        name: dense(value)
        for name, value in MemorySource(decoder_of(arch), dtype=torch.float32).layer(0).items()
    }
    add_biases_(weights, more, arch.layers[0])
    assert {name for name in weights if name.endswith(".bias")} == {
        f"{each}.bias" for each in arch.layers[0].linears if more.has_bias(each)
    }
    assert not weights[f"{linear}.bias"].any()


def test_a_llama_as_a_mistral_computes_the_same_with_any_number_of_heads(tmp_path: Path) -> None:
    import transformers

    source = MemorySource(
        decoder_of(
            arch_of("llama", hidden_size=40, attention_bias=False, rope_parameters={"rope_theta": 5e3})
        ),
        dtype=torch.float32,
    )
    other = Recast(source, as_mistral(source.arch))
    assert torch.equal(logits(other), logits(source))
    assert not fits_consumers(source.arch, 6)
    assert fits_consumers(other.arch, 6)
    small, _, _ = pruned(other, "kv_group")
    write_checkpoint(tmp_path, small)
    assert Checkpoint(tmp_path).arch.family == "mistral"
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = logits(small)
    with torch.no_grad():
        found = model(tiny_tokens(small.arch, 2, 20).long()).logits
    assert float((found - expected).abs().max()) <= 256 * torch.finfo(torch.float32).eps * 40**0.5 * float(
        expected.abs().max()
    )
    for family in ("qwen3", "llama-biases-tied"):
        with pytest.raises(UsageError, match=r"this .* model is none"):
            as_mistral(arch_of(family))
