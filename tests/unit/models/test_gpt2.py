"""OPT, GPT-2 and StarCoder: how their configs state sizes and heads, the names by which older checkpoints
store their tensors, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.export import FORMATS
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "dtype": "float32",
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 64,
    "ffn_dim": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "dtype": "float32",
}


def read(config: dict[str, Any], **changes: Any) -> Arch:
    config = {**config, **changes}
    return family_of(config).read_config(config)


def test_sizes_are_stated_by_names_of_gpt2() -> None:
    arch = read(GPT2)
    assert (arch.hidden_size, arch.num_layers, arch.max_position) == (64, 2, 32)
    assert (arch.position_offset, arch.num_position_rows) == (0, 32)
    assert all(layer.rope is None and layer.widths == (4, 4, 16, 256) for layer in arch.layers)
    narrower = arch.replace(layers=arch.layers[:1])
    written = family_of_arch(narrower).write_config(narrower)
    assert written["n_layer"] == 1
    assert not written.keys() & {"hidden_size", "num_hidden_layers", "num_attention_heads"}
    assert read(written).replace(config={}) == narrower.replace(config={})


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (
            {**GPT2, "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
            124_439_808,
        ),
        (
            {
                **OPT,
                "vocab_size": 50272,
                "max_position_embeddings": 2048,
                "hidden_size": 768,
                "ffn_dim": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
            },
            125_239_296,
        ),
    ],
)
def test_small_published_models_have_their_number_of_parameters(
    config: dict[str, Any], num_params: int
) -> None:
    assert read(config).num_params == num_params


@pytest.mark.parametrize(("one", "kv_heads"), [(None, 1), (True, 1), (False, 4)])
def test_starcoder_has_one_head_of_keys_or_as_many_as_of_queries(one: bool | None, kv_heads: int) -> None:
    stated = {} if one is None else {"multi_query": one}
    arch = read(GPT2, model_type="gpt_bigcode", num_key_value_heads=2, **stated)
    layer = arch.layers[0]
    assert (layer.num_kv_heads, layer.num_turns(("attn.q", "attn.k", "attn.v"))) == (kv_heads, kv_heads)
    assert family_of_arch(arch).write_config(arch)["multi_query"] == (kv_heads == 1)
    some = arch.replace(layers=tuple(replace(each, num_kv_heads=2) for each in arch.layers))
    with pytest.raises(UnsupportedArch, match="2 heads of keys for 4 of queries"):
        family_of_arch(some).write_config(some)


def test_the_table_of_opt_has_two_rows_before_the_first_position() -> None:
    arch = read(OPT)
    assert (arch.position_offset, arch.num_position_rows) == (2, 34)
    assert (arch.norm_eps, arch.norm_bias, arch.unit_norms) == (1e-5, True, False)
    plain = read(OPT, enable_bias=False, layer_norm_elementwise_affine=False)
    assert (plain.norm_bias, plain.unit_norms) == (False, True)
    assert not any((plain.qkv_bias, plain.o_bias, plain.ffn_bias))


@pytest.mark.parametrize(("stated", "scale"), [(True, 0.25), (False, 1.0)])
def test_scores_of_gpt2_have_the_factor_that_its_config_states(stated: bool, scale: float) -> None:
    arch = read(GPT2, scale_attn_weights=stated, reorder_and_upcast_attn=True)
    assert arch.score_scale(arch.layers[0]) == scale


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before = false, norms after each half"),
        (OPT, {"word_embed_proj_dim": 32}, r"embeddings of 32 numbers .*into 64, as in OPT-350M"),
        (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (OPT, {"num_attention_heads": 3}, "num_attention_heads"),
        (OPT, {"head_dim": 8}, "head_dim = 8; it must be 64 / 4"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2, {"hidden_size": 128}, "hidden_size = 128"),
        (GPT2, {"activation_function": "tanh"}, "activation 'tanh'"),
    ],
)
def test_what_is_computed_otherwise_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        read(config, **changes)


@pytest.mark.parametrize(
    ("case", "prefix"),
    [
        ("gpt2", "transformer."),
        ("gpt2-unscaled-apart", "transformer."),
        ("gpt_bigcode", "transformer."),
        ("opt", "model."),
        ("biogpt", "biogpt."),
        ("xglm", "model."),
    ],
)
def test_names_without_the_prefix_of_the_whole_are_read_and_written_with_it(
    case: str, prefix: str, tmp_path: Path
) -> None:
    saved(tmp_path, *CASES[case])
    plain = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    assert len(older.keys() - tensors.keys()) >= len(tensors) - 1
    if prefix == "transformer.":  # masks, which are no parameters
        older |= {f"h.{idx}.attn.bias": torch.ones(1, 1, 64, 64).tril() for idx in range(3)}
        older |= {f"h.{idx}.attn.masked_bias": torch.tensor(-1e4) for idx in range(3)}
    save_file(older, file, metadata={"format": "pt"})
    source = Checkpoint(tmp_path)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    assert torch.equal(decoder(tokens(1, 8)), plain(tokens(1, 8)))
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_nobody_reads_is_still_refused(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["gpt2"])
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "h.0.other.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedArch, match=r"transformer\.h\.0\.other\.weight"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("form", "scheme", "changes", "reason"),
    [
        ("compressed-tensors", "W4A16_G32", {}, None),
        ("compressed-tensors", "W8A16", {}, None),
        ("gptq", "W4A16_G32", {}, None),
        ("compressed-tensors", "FP8_DYNAMIC", {}, "transposes all that is named `weight`"),
        ("compressed-tensors", "INT8_DYNAMIC", {}, "transposes all that is named `weight`"),
        ("modelopt", "FP8_STATIC", {}, "transposes all that is named `weight`"),
        ("modelopt", "NVFP4", {}, "transposes all that is named `weight`"),
        ("compressed-tensors", "W4A16_G32", {"scale_attn_weights": False}, "scales attention scores"),
        ("gptq", "W4A16_G32", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
    ],
)
def test_what_vllm_loads_of_gpt2(form: str, scheme: str, changes: dict[str, Any], reason: str | None) -> None:
    consumers = FORMATS.get(form).consumers(read(GPT2, **changes), ModelScheme(SCHEMES[scheme]))
    (vllm,) = [each for each in consumers if each.name == "vLLM"]
    assert vllm.loads == (reason is None)
    assert (reason or "") in vllm.note


def test_what_vllm_and_transformers_load_of_opt() -> None:
    consumers = FORMATS.get("compressed-tensors").consumers(read(OPT), ModelScheme(SCHEMES["FP8_DYNAMIC"]))
    loads = {each.name: each.loads for each in consumers}
    assert loads["vLLM"]
    assert loads["transformers"]
