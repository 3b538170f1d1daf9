"""A checkpoint is understood wholly or refused: whatever is unknown, missing or misshapen is named. Facts
survive JSON and count right.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UnsupportedArch, UnsupportedFormat, UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.config_facts import is_same
from compress.models.config_file import read_config
from compress.models.config_notes import unread_note
from compress.models.decoder import Decoder, DecoderLayer
from compress.models.family import FAMILIES, Family, family_of
from compress.models.initialise import INIT_STD, fresh_decoder
from compress.models.unknown_family import TABLE
from tests.support.tiny_decoder import LLAMA, QWEN3, tiny_arch, tiny_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


def test_an_unknown_architecture_is_refused_with_the_nearest_ones() -> None:
    count = len(FAMILIES.names())
    with pytest.raises(UnsupportedArch, match=r"'qwen3_mo' \(Qwen3MoForCausalLM\) is not supported") as found:
        family_of({"model_type": "qwen3_mo", "architectures": ["Qwen3MoForCausalLM"]})
    sentence, hint = found.value.message, found.value.hint
    assert f"{count} architectures are read, of which 'qwen3_moe', " in sentence
    assert sentence.count("'") == 8
    assert "spelled most like it (their table is in docs/models.md)." in sentence
    assert hint is not None
    assert "quantize_by_name" in hint
    assert len(sentence) < 250
    with pytest.raises(UnsupportedArch) as found:
        family_of({"model_type": "zzyzx" * 100, "architectures": ["Zzyzx"]})
    assert f"{count} architectures are read (their table" in found.value.message
    for config in ({"architectures": ["LlamaForCausalLM"]}, {"model_type": None}):
        with pytest.raises(UnsupportedArch, match=rf"has no model_type.*one of the {count} in the table of"):
            family_of(config)


def test_the_table_that_the_refusal_names_has_all_architectures() -> None:
    table = (Path(__file__).parents[3] / TABLE).read_text()
    assert not [name for name in FAMILIES.names() if f"| `{name}` |" not in table]


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"sliding_window": 512}, "llama model has sliding_window = 512"),
        (LLAMA, {"attention_chunk_size": 8192}, "attention_chunk_size = 8192"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA, {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        (LLAMA, {"layer_types": ["full_attention"] * 2}, "a list of 3 layer types"),
        (LLAMA, {"layer_types": "full_attention"}, "layer_types"),
        (LLAMA, {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved = True.*False only"),
        (LLAMA, {"rope_interleaved": 0}, "rope_interleaved = 0.*False only"),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
        (QWEN3, {"is_causal": False}, "is_causal = False.*True only"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "ntk_alpha", "rope_theta": 1e4}},
            "'ntk_alpha'.*known rope types: default",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5; it must be 1 in this family",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling, which differ in factor, original_max_position_embeddings, "
            "rope_theta, rope_type:",
        ),
        (
            QWEN3,
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"type": "default"},
                "rope_theta": 1e4,
            },
            "which differ in rope_theta:",
        ),
        ({"model_type": "ernie4_5_moe"}, {"use_bias": True}, "use_bias = True.*False only"),
        (LLAMA, {"hidden_act": "relu2"}, "'relu2'.*silu"),
        (LLAMA, {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        (
            QWEN3,
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_what_the_decoder_cannot_honour_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        tiny_arch(base, **changes)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_shape_is_named(field: str) -> None:
    config = {key: value for key, value in QWEN3.items() if key != field}
    with pytest.raises(UnsupportedArch, match=f"no field '{field}'"):
        family_of(config).read_config(config)


HARMLESS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    (LLAMA, {"sliding_window": None}, None),
    (LLAMA, {"initializer_range": 0.5, "attention_dropout": 0.1, "use_cache": False}, None),
    (LLAMA, {"rope_interleaved": False}, None),
    (LLAMA, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    (LLAMA, {"auto_map": {}}, "auto_map"),
    (QWEN3, {"auto_map": {}, "layer_types": ["full_attention"] * 3}, "auto_map"),
    (LLAMA, {"_attn_implementation": "flash_attention_2", "attn_implementation": "sdpa"}, None),
    (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
    (LLAMA, {"unsloth_fixed": True, "is_llama_config": True}, "is_llama_config, unsloth_fixed"),
    (LLAMA, {"is_encoder_decoder": False}, "is_encoder_decoder"),
    (QWEN3, {"use_mrope": False}, "use_mrope"),
    (QWEN3, {"logit_softcap": 30.0}, "logit_softcap"),
]


@pytest.mark.parametrize(("base", "changes", "named"), HARMLESS, ids=str)
def test_fields_that_nobody_reads_or_that_have_the_default_change_nothing_and_are_named(
    base: dict[str, Any], changes: dict[str, Any], named: str | None
) -> None:
    arch = tiny_arch(base, **changes)
    assert arch.replace(config={}) == tiny_arch(base).replace(config={})
    assert arch.config == base | changes
    note = unread_note(arch)
    assert note is None if named is None else note is not None and note.endswith(f"are not read: {named}.")


def test_one_rope_may_be_stated_by_both_names() -> None:
    newer = {"rope_parameters": {**YARN, "rope_theta": 1e6}}
    older = {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6}
    alone = tiny_arch(LLAMA, **newer).replace(config={})
    assert tiny_arch(LLAMA, **newer, **older).replace(config={}) == alone
    for nothing in ({}, None):
        assert tiny_arch(LLAMA, **newer, rope_scaling=nothing).replace(config={}) == alone


def test_a_factor_of_yarn_is_noted_where_it_is_not_one() -> None:
    for factor, noted in ((0.875, True), (1.0, False), (None, False)):
        arch = tiny_arch(LLAMA, rope_parameters={**YARN, "rope_theta": 1e6, "attn_factor": factor})
        assert ("attn_factor" in (unread_note(arch) or "")) == noted


def test_a_note_is_one_line_of_bounded_length_whatever_the_names_are() -> None:
    arch = tiny_arch(**{f"a\n\x1b{idx:05}" + "x" * 10_000: idx for idx in range(1000)})
    note = unread_note(arch)
    assert note is not None
    assert "and 988 more" in note
    assert note.isprintable()
    assert len(note) < 2000


def test_values_are_the_same_only_in_the_same_type() -> None:
    assert is_same({"a": [1, 0.5, None]}, {"a": [1, 0.5, None]})
    for one, other in ((True, 1), (1, 1.0), (0, False), ([1], [True]), ({"a": 1}, {"a": 1.0}), ("1", 1)):
        assert not is_same(one, other)


def test_a_family_whose_facts_nobody_recorded_refuses_what_its_table_does_not_read() -> None:
    family = Family(model_type="unrecorded", architecture="UnrecordedForCausalLM")
    config = {**LLAMA, "model_type": "unrecorded", "hidden_act": "silu", "is_encoder_decoder": False}
    del config["mlp_bias"]
    assert family.read_config(config).num_layers == 3
    with pytest.raises(UnsupportedArch, match="unsloth_fixed = True"):
        family.read_config({**config, "unsloth_fixed": True})


def _drop(tensors: dict[str, Tensor]) -> str:
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    return r"lacks the tensor 'model\.layers\.1\.self_attn\.k_norm\.weight'"


def _add(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.1.mlp.router.weight"] = torch.ones(3)
    return r"holds the tensor 'model\.layers\.1\.mlp\.router\.weight'"


def _add_bias(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(48)
    return r"holds the tensor 'model\.layers\.0\.mlp\.up_proj\.bias'"


def _add_layer(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.3.input_layernorm.weight"] = torch.ones(32)
    return r"holds the tensor 'model\.layers\.3\.input_layernorm\.weight'"


def _transpose(tensors: dict[str, Tensor]) -> str:
    tensors["model.layers.2.mlp.down_proj.weight"] = (
        tensors["model.layers.2.mlp.down_proj.weight"].t().contiguous()
    )
    return r"'model\.layers\.2\.mlp\.down_proj\.weight' is \[48, 32\], its config says \[32, 48\]"


@pytest.mark.parametrize("damage", [_drop, _add, _add_bias, _add_layer, _transpose])
def test_a_wrong_tensor_is_named(damage: Callable[[dict[str, Tensor]], str], tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, tiny_arch()) / "model.safetensors"
    tensors = load_file(path)
    message = damage(tensors)
    save_file(tensors, path)
    with pytest.raises(UnsupportedArch, match=message):
        Checkpoint(tmp_path)


def test_a_layer_for_further_tokens_is_passed_over_and_another_one_after_the_last_is_not(
    tmp_path: Path,
) -> None:
    path = tiny_checkpoint(tmp_path, tiny_arch()) / "model.safetensors"
    tensors = load_file(path)
    further = {"eh_proj.weight": torch.ones(32, 64), "enorm.weight": torch.ones(32)}
    save_file(tensors | {f"model.layers.3.{name}": each for name, each in further.items()}, path)
    assert Checkpoint(tmp_path).arch.num_layers == 3
    for stray in ("model.layers.2.eh_proj.weight", "model.layers.4.enorm.weight"):
        save_file(
            tensors | {stray: torch.ones(32), "model.layers.3.eh_proj.weight": torch.ones(32, 64)}, path
        )
        with pytest.raises(UnsupportedArch, match=f"holds the tensor '{stray}'"):
            Checkpoint(tmp_path)


def test_stored_rotary_frequencies_and_a_stored_tied_head_are_no_parameters(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, tiny_arch(tie_word_embeddings=True)) / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert set(Checkpoint(tmp_path).outer()) == {"embed.weight", "norm.weight"}


def test_a_tied_head_that_is_another_matrix_on_disk_is_refused(tmp_path: Path) -> None:
    """Programs disagree about which of the two is meant."""
    path = tiny_checkpoint(tmp_path, tiny_arch(tie_word_embeddings=True)) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path)
    with pytest.raises(UnsupportedArch, match=r"ties the head.*'lm_head\.weight' is another matrix"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_config_without_dtype_means_that_of_the_tensors(dtype: str, tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, tiny_arch(dtype=dtype)) / "config.json"
    assert Checkpoint(tmp_path).arch.dtype == dtype
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config))
    assert Checkpoint(tmp_path).arch.dtype == dtype


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UnsupportedFormat, match="pickle"):
        Checkpoint(tmp_path)


def test_a_quantization_method_nobody_reads_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, tiny_arch())
    (tmp_path / "config.json").write_text(
        json.dumps({**QWEN3, "quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(UnsupportedFormat, match="bitsandbytes"):
        Checkpoint(tmp_path)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_config(tmp_path)
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=r"config\.json"):
            read_config(tmp_path)


ARCHES = [
    tiny_arch(),
    tiny_arch(tie_word_embeddings=True, **SLIDING),
    tiny_arch(LLAMA, attention_bias=True, num_key_value_heads=None),
    tiny_arch(LLAMA, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
]


@pytest.mark.parametrize("arch", ARCHES)
def test_facts_survive_json(arch: Arch) -> None:
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch


@pytest.mark.parametrize("arch", ARCHES)
def test_parameters_are_counted_as_the_decoder_has_them(arch: Arch) -> None:
    with torch.device("meta"):
        decoder = Decoder(arch)
    assert arch.num_params == sum(parameter.numel() for parameter in decoder.parameters())
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    linears = [layer.linear(name) for layer in layers for name in layer.shape.linears]
    assert arch.num_linear_params == sum(linear.weight.numel() for linear in linears)
    for layer in layers:
        for name in layer.shape.linears:
            assert (layer.linear(name).bias is not None) == arch.has_bias(name)


def test_layers_may_differ_in_width_in_the_decoder_but_not_in_a_stock_config() -> None:
    arch = tiny_arch()
    narrow = dataclasses.replace(arch.layers[1], num_heads=2, num_kv_heads=1, intermediate_size=16)
    arch = arch.replace(layers=(arch.layers[0], narrow, arch.layers[2]))
    with torch.device("meta"):
        assert arch.num_params == sum(parameter.numel() for parameter in Decoder(arch).parameters())
    with pytest.raises(UnsupportedArch, match="differ in width"):
        family_of({"model_type": arch.family}).write_config(arch)


def test_a_config_is_rewritten_where_the_facts_decide_and_kept_where_not() -> None:
    arch = tiny_arch(layer_types=["full_attention"] * 3, initializer_range=0.5)
    pruned = dataclasses.replace(arch.layers[0], num_heads=2, num_kv_heads=1, intermediate_size=16)
    arch = arch.replace(layers=(pruned, pruned), dtype="bfloat16")
    config = family_of(arch.config).write_config(arch)
    assert config["initializer_range"] == 0.5
    assert config["eos_token_id"] == [2, 3]
    assert family_of(config).read_config(config).replace(config={}) == arch.replace(config={})


def test_end_of_text_ids_are_read_in_every_spelling() -> None:
    assert tiny_arch().eos_token_ids == (2, 3)
    assert tiny_arch(eos_token_id=7).eos_token_ids == (7,)
    assert tiny_arch(eos_token_id=None).eos_token_ids == ()
    assert tiny_arch(eos_token_id=-1).eos_token_ids == ()
    assert unread_note(tiny_arch(eos_token_id=-1)) == (
        "config.json has eos_token_id = -1, which is read as no end-of-sequence token."
    )


def test_fresh_weights_have_the_stated_spread_and_depend_on_the_generator_only() -> None:
    arch = tiny_arch(LLAMA, hidden_size=96, head_dim=24, intermediate_size=128)
    one, same, other = (
        fresh_decoder(arch, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    for (name, parameter), again, different in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(parameter, again)
        if parameter.dim() == 1:
            assert torch.equal(
                parameter,
                torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter),
            )
            continue
        assert not torch.equal(parameter, different)
        std = (
            INIT_STD / (2 * arch.num_layers) ** 0.5
            if name.endswith(("attn.o.weight", "ffn.down.weight"))
            else INIT_STD
        )
        assert float(parameter.detach().std()) == pytest.approx(
            std, rel=5 / (2 * parameter.numel()) ** 0.5
        )  # five standard errors


def test_a_value_of_the_wrong_kind_is_named_not_crashed_on() -> None:
    with pytest.raises(UnsupportedArch, match="num_attention_heads = 'four'; it must be a whole number"):
        family_of(LLAMA).read_config({**LLAMA, "num_attention_heads": "four"})
