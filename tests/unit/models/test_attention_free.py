"""Models without attention: what their configs state, and what is written back of them."""

from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.attention_free import MAX_TRAINED
from compress.models.family import family_of
from compress.models.initialise import fresh_decoder
from compress.models.mamba1 import Mamba1
from compress.models.mamba2 import Mamba2
from compress.models.pruning import LayerSubset, with_layers
from compress.models.weights import MemorySource, build_decoder
from tests.support.tiny_decoder import tiny_tokens

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "dtype": "float32"}
MAMBA = {**SIZES, "model_type": "mamba", "state_size": 12}
FALCON = {**SIZES, "model_type": "falcon_mamba", "mixer_rms_eps": 1e-3}
MAMBA2 = {**SIZES, "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 12}
each = pytest.mark.parametrize("config", [MAMBA, FALCON, MAMBA2], ids=lambda config: config["model_type"])
OF_ATTENTION = {
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "layer_types"),
    *("intermediate_size", "rms_norm_eps"),
}


def arch_of(config: dict[str, Any], **changes: Any) -> Arch:
    stated = {**config, **changes}
    return family_of(stated).read_config(stated)


def test_mixers_have_the_widths_that_a_config_states() -> None:
    assert {layer.recurrence for layer in arch_of(MAMBA).layers} == {
        Mamba1.of(64, 12, 4, 2, conv_bias=True, normed=False)
    }
    assert {layer.recurrence for layer in arch_of(FALCON, time_step_rank=5, expand=3).layers} == {
        Mamba1.of(96, 16, 4, 5, conv_bias=True, unit_norms=True)
    }
    assert {layer.recurrence for layer in arch_of(MAMBA2).layers} == {Mamba2(4, 2, 12, 16, 4, conv_bias=True)}


def test_channels_that_a_config_states_are_those_whatever_the_factor() -> None:
    """The class of `transformers` derives them first, and takes those that are stated after."""
    facts = arch_of(MAMBA, intermediate_size=40, expand=16).layers[0].recurrence
    assert facts is not None
    assert facts.value_size == 40


def test_norms_of_mixers_have_an_eps_of_their_own() -> None:
    arch = arch_of(FALCON)
    assert (arch.norm_eps, arch.eps_of("mamba1.dt_norm")) == (1e-5, 1e-3)


@each
def test_no_layer_attends_or_has_an_ffn_and_positions_have_one_bound(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    assert not any(layer.attends or layer.has_ffn for layer in arch.layers)
    assert arch.max_position == MAX_TRAINED
    assert arch.cached_numbers == 0


@each
def test_what_is_written_states_no_widths_of_attention(config: dict[str, Any]) -> None:
    arch = with_layers(arch_of(config), [0, 2])
    written = family_of(config).write_config(arch)
    assert not OF_ATTENTION & written.keys()
    assert ("head_dim" in written) == (config["model_type"] == "mamba2")
    assert written["num_hidden_layers"] == 2
    assert arch_of(written).replace(config={}) == arch.replace(config={})


@each
def test_a_manifest_is_read_back_equal(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    facts, layers = arch.to_json()
    assert Arch.from_json(facts, layers) == arch


@each
@pytest.mark.parametrize(("name", "value"), [("use_bias", True), ("hidden_act", "gelu"), ("expand", 0)])
def test_what_the_decoder_does_not_compute_is_refused(config: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArch, match=name):
        arch_of(config, **{name: value})


@pytest.mark.parametrize(
    "changes",
    [{"time_step_limit": [0.0, 1.0]}, {"head_dim": 8}, {"num_heads": 3}],
    ids=lambda changes: next(iter(changes)),
)
def test_steps_with_a_bound_and_heads_of_another_width_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch):
        arch_of(MAMBA2, **changes)


def test_norms_without_weights_of_a_mixer_without_norms_are_refused() -> None:
    facts = Mamba1.of(64, 12, 4, 2, conv_bias=True, normed=False, unit_norms=True)
    assert facts.why_unfit() == "norms of a Mamba-1 mixer have no weights, and it has no norms."


@each
def test_a_layer_whose_output_is_zero_can_go(config: dict[str, Any]) -> None:
    arch = arch_of(config)
    decoder = fresh_decoder(arch, generator=torch.Generator().manual_seed(0))
    name = "mamba" if config["model_type"] == "mamba2" else "mamba1"
    decoder.get_parameter(f"layers.1.{name}.o.weight").detach().zero_()
    source = MemorySource(decoder, dtype=torch.float32)
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    tokens_BS = tiny_tokens(arch, 2, 40)
    with torch.no_grad():
        whole = build_decoder(source, **how)(tokens_BS)
        fewer = build_decoder(LayerSubset(source, [0, 2]), **how)(tokens_BS)
        other = build_decoder(LayerSubset(source, [0, 1]), **how)(tokens_BS)
    assert torch.equal(whole, fewer)
    assert not torch.equal(whole, other)
