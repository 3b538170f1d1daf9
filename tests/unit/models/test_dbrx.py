"""DBRX: experts in tensors of two dimensions, the base of its rope, and fields that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from compress.errors import UnsupportedArch
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.config_notes import unread_note
from compress.models.family import family_of
from compress.models.overrides import decide
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder, dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_families import tensors_of, tolerance
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = ROWS["databricks/dbrx-base"]["config"]


def changed(part: str, **fields: Any) -> dict[str, Any]:
    return {**CONFIG, part: {**CONFIG[part], **fields}}


def test_published_models_have_the_parameters_of_their_checkpoints() -> None:
    """The hub counts 131,596,523,520; 36 billions are active on any input, by the model card."""
    arch = family_of(CONFIG).read_config(CONFIG)
    assert arch.num_params == 131_596_523_520
    assert arch.num_active_params // 10**9 == 36


def test_experts_are_rows_of_three_tensors_and_that_of_the_downs_is_transposed(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["dbrx"])
    stored = load_file(tmp_path / "model.safetensors")
    layer = Checkpoint(tmp_path).layer(1)
    for name, disk in (("gate", "w1"), ("up", "v1"), ("down", "w2")):
        matrices = stored[f"transformer.blocks.1.ffn.experts.mlp.{disk}"].view(6, 40, 48)
        for idx in range(6):
            expected = matrices[idx].t() if name == "down" else matrices[idx]
            assert torch.equal(dense(layer[f"moe.experts.{idx}.{name}.weight"]), expected)


def test_codes_of_experts_are_written_apart_and_read_again(tmp_path: Path) -> None:
    changes = {**CASES["dbrx"][1], "hidden_size": 64, "num_attention_heads": 4}
    changes["ffn_config"] = {**changes["ffn_config"], "ffn_hidden_size": 96}
    config = build_config("dbrx", changes).to_dict() | {"dtype": "float32"}
    arch = family_of(config).read_config(config)
    scheme = ModelScheme(SCHEMES["W4A16_G32"])
    source = RandomSource(arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    write_format("compressed-tensors", tmp_path, source, scheme)
    experts = {name for name in tensors_of(tmp_path) if ".blocks.0." in name and ".experts.mlp.3." in name}
    assert {name.partition(".mlp.3.")[2] for name in experts} == {
        f"{part}.weight_{leaf}" for part in ("w1", "v1", "w2") for leaf in ("packed", "scale", "shape")
    }
    again = open_checkpoint(tmp_path)
    for idx in range(arch.num_layers):
        ours, theirs = again.layer(idx), source.layer(idx)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(dense(ours[name]), dense(theirs[name])) for name in theirs)
    consumers = FORMATS.get("compressed-tensors").consumers(arch, scheme)
    (refusal,) = (each.note for each in consumers if each.name == "transformers" and not each.loads)
    assert "does not gather" in refusal


def test_dense_experts_stay_three_tensors_beside_codes(tmp_path: Path) -> None:
    config = build_config("dbrx", {**CASES["dbrx"][1], "hidden_size": 64, "num_attention_heads": 4}).to_dict()
    arch = family_of(config).read_config({**config, "dtype": "float32"})
    exceptions = tuple(decide({"*.moe.experts.*": None}, arch).items())
    scheme = ModelScheme(SCHEMES["FP8_DYNAMIC"], exceptions=exceptions)
    source = _DenseExperts(arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    write_format("compressed-tensors", tmp_path, source, scheme)
    again = open_checkpoint(tmp_path)
    for idx in range(arch.num_layers):
        ours, theirs = again.layer(idx), source.layer(idx)
        assert all(torch.equal(dense(ours[name]), dense(theirs[name])) for name in theirs)


class _DenseExperts(RandomSource):
    def layer(self, layer_idx: int) -> dict[str, Any]:
        weights = super().layer(layer_idx)
        return {name: dense(each) if ".experts." in name else each for name, each in weights.items()}


def test_the_base_of_the_rope_is_that_of_attention_and_an_export_states_it_where_transformers_reads_it(
    tmp_path: Path,
) -> None:
    family, changes = CASES["dbrx"]
    alone = {name: each for name, each in changes.items() if name != "rope_parameters"}
    plain, written = tmp_path / "plain", tmp_path / "written"
    theirs = saved(plain, family, alone)
    source = Checkpoint(plain)
    note = unread_note(source.arch)
    assert note is not None
    assert "rope_theta = 500, as in the model's own code; the class of transformers takes 10000" in note
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    written.mkdir()
    write_checkpoint(written, source)
    again = transformers.AutoModelForCausalLM.from_pretrained(written, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = again(tokens(2, 24)).logits
        other = theirs(tokens(2, 24)).logits
    assert (decoder(tokens(2, 24)) - expected).abs().max() <= tolerance(expected)
    assert (other - expected).abs().max() > 1000 * tolerance(expected)
    assert unread_note(Checkpoint(written).arch) is None


@pytest.mark.parametrize("mapping", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_a_rope_of_longer_contexts_is_read_by_either_name_and_stays_in_exports(
    mapping: str, name: str
) -> None:
    config = {**CONFIG, mapping: {name: "yarn", "factor": 4.0}}
    arch = family_of(config).read_config(config)
    (rope,) = {layer.rope for layer in arch.layers}
    assert rope is not None
    assert (rope.kind, rope.factor, rope.theta) == ("yarn", 4.0, 500_000.0)
    written = family_of(config).write_config(arch)
    assert family_of(written).read_config(written).layers == arch.layers
    theirs = transformers.DbrxConfig(**{mapping: written[mapping]}).rope_parameters
    assert (theirs["rope_type"], theirs["factor"], theirs["rope_theta"]) == ("yarn", 4.0, 500_000.0)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            changed("ffn_config", moe_normalize_expert_weights=2.0),
            "moe_normalize_expert_weights = 2.0; it must",
        ),
        (changed("ffn_config", moe_shared_experts=1), "moe_shared_experts = 1; it must be absent"),
        (changed("ffn_config", ffn_act_fn={"name": "silu", "beta": 2}), "ffn_act_fn"),
        (changed("attn_config", sliding_window=128), "sliding_window = 128; it must be absent"),
        (changed("attn_config", clip_qkv=0), "clip_qkv = 0"),
        ({**CONFIG, "rope_theta": 5000.0}, "rope_theta = 500000.0; it must be 5000"),
        ({**CONFIG, "tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArch, match=named):
        family_of(config).read_config(config)


def test_weights_are_not_divided_where_the_order_of_the_norm_is_null() -> None:
    for order, divides in ((None, False), (1, True), (1.0, True)):
        config = changed("ffn_config", moe_normalize_expert_weights=order)
        experts = family_of(config).read_config(config).layers[0].experts
        assert experts is not None
        assert experts.renormalize is divides
