"""Models with a vision tower: the text model is compressed, all else travels through untouched, and the
result loads in the class of the source."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.cli.app import main
from compress.errors import UnsupportedArch, UnsupportedFormat
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.mixture import AS_IN_MEMORY
from compress.models.overrides import decide
from compress.models.stored_tensors import members_of, other_experts, places_of
from compress.models.weights import UNTOUCHED, Dense, build_decoder, dense, parameter_names, split_outer
from compress.quant.model_scheme import ModelScheme, with_exceptions
from compress.quant.scheme import SCHEMES, Scheme
from tests.support.split_towers import SPLIT, split_plain_tensors
from tests.support.tiny_cases import CASES
from tests.support.tiny_families import SMALL
from tests.support.tiny_hf import auto_class, saved, tokens
from tests.support.tiny_wrappers import AROUND
from tests.support.wrappers import WRAPPERS, Rounded, wide

COMPRESSED = FORMATS.get("compressed-tensors")
each_wrapper = pytest.mark.parametrize("case", WRAPPERS)
RENAMED = (
    *("kimi_k25", "lfm3_vl", "hunyuan_vl", "ernie4_5_vl_moe", "mistral_large4", "qianfan_ocr", "step3p7"),
    *("nemotron_h_omni", "deepseek_ocr2", "dots3_note", "molmo2", "cosmos3_edge"),
)
"""Families whose vision tower transformers has under other names."""
NAMED_OTHERWISE = ("nemotron_h_omni",)
"""Cases whose experts transformers has by names that no family reads."""
IN_HALVES = ("ernie4_5_vl_moe", "ernie4_5_vl_moe-dense-in-the-middle")
"""Cases whose experts transformers gathers from tensors of each by an operation that reads no scales."""
NOT_GATHERED = (
    "gemma4-vision-experts",
    "qwen3_vl_moe",
    "qwen3_vl_moe-some-dense",
    "mistral3-mistral4",
    "aria",
    "aria-one-shared",
    "muse_spark",
    "muse_spark-some-dense-other-numbers",
    *IN_HALVES,
)
"""Cases whose experts transformers does not gather from the tensors that compressed-tensors has of each."""
JOINED = ("minimax_m3_vl", "minimax_m3_vl-tied")
"""Cases of whose FFNs transformers joins gates and ups while it loads, and no packed codes of theirs."""
SPLIT_AT_LOAD = ("molmo2", "molmo2-olmo")
"""Cases whose stacked linears transformers splits while it loads, and then decodes no codes."""
SPLIT_FFNS = ("inkling_mm_model",)
"""Cases whose gates and ups transformers splits while it loads, and then loads no codes at all."""
STACKED = (
    *("step3p7", "step3p7-as-published", "step3p7-biases-tied", "dots3_note", "qwen4_exp", "glm5_next"),
)
"""Cases whose gates and ups of dense experts, tables of n-grams or convolutions transformers joins, and drops
next to packed codes."""


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def dense_experts(source: Checkpoint, form: str) -> dict[str, Any]:
    """Return overrides for experts whose codes no checkpoint of a format stores."""
    if not source.arch.has_experts:
        return {}
    layer = next(idx for idx, layer in enumerate(source.arch.layers) if layer.experts is not None)
    stacked = source.family.in_format(form).holds_all_experts(f"layers.{layer}.moe.experts.0.down")
    return {"*.moe.experts.*": "dense"} if stacked else {}


@each_wrapper
@pytest.mark.one_in(8)
def test_names_that_some_versions_wrote_are_read_and_written_as_the_others(case: str, tmp_path: Path) -> None:
    family = family_of({"model_type": CASES[case][0]})
    saved(tmp_path / "source", *CASES[case])
    stored = tensors_of(tmp_path / "source")
    (tmp_path / "other").mkdir()
    save_file(
        {family.to_memory(name): each for name, each in stored.items()}, tmp_path / "other/model.safetensors"
    )
    (tmp_path / "other/config.json").write_bytes((tmp_path / "source/config.json").read_bytes())
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(tmp_path / "other"))
    written = tensors_of(tmp_path / "written")
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_a_flat_config_of_qwen_means_the_same(tmp_path: Path) -> None:
    model = saved(tmp_path, *CASES["qwen2_5_vl"])
    modern = Checkpoint(tmp_path).arch
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    source = Checkpoint(tmp_path)
    assert source.arch.replace(config={}) == modern.replace(config={})
    written = source.family.write_config(source.arch)
    assert "text_config" not in written
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens(1, 12)).logits, model(tokens(1, 12)).logits)


@pytest.mark.parametrize("inside", [{"dtype": None}, {}, {"dtype": "float16"}])
def test_a_text_model_that_states_no_dtype_has_that_of_the_whole(inside: dict[str, Any]) -> None:
    family, changes = CASES["mistral3-mistral"]
    text = {**SMALL, **changes, **inside}
    config = {"model_type": family, "dtype": "bfloat16", "text_config": text, **AROUND[family]}
    assert family_of(config).read_config(config).dtype == (inside.get("dtype") or "bfloat16")


def test_another_text_model_inside_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "qwen3"}}
    with pytest.raises(UnsupportedArch, match=r"'qwen3'; known there: mistral, ministral3"):
        family_of(config).read_config(config)


@each_wrapper
@pytest.mark.one_in(3)
def test_what_is_dense_keeps_the_other_tensors_as_they_are(case: str, tmp_path: Path) -> None:
    saved(tmp_path, *CASES[case])
    source = Checkpoint(tmp_path)
    own, untouched = split_outer(Dense(source).outer())
    assert set(own) == set(parameter_names(source.arch)[0])
    embed = source.family.tensor("embed.weight")
    assert (UNTOUCHED + embed in untouched) == (source.family.more_embeddings > 0)
    for name, value in untouched.items():
        whole = source.files.get(name.removeprefix(UNTOUCHED))
        first = source.arch.vocab_size if name == UNTOUCHED + embed else 0
        assert torch.equal(value, whole[first:] if first else whole)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in WRAPPERS
        if case not in (*NOT_GATHERED, *JOINED, *STACKED, *NAMED_OTHERWISE, *SPLIT_FFNS)
    ],
)
@pytest.mark.one_in(20)
def test_several_schemes_and_dense_linears_are_named_as_the_stock_class_names_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_plain_tensors(CASES[case][0], monkeypatch)
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    stacked = dense_experts(source, "compressed-tensors")
    experts = decide(dict.fromkeys(stacked), source.arch)
    last = [f"layers.{idx}.{source.arch.layers[idx].attention_groups[-1].linears[0]}" for idx in (0, 1)]
    other = "layers.0.ffn.down" if "ffn.down" in source.arch.layers[0].linears else last[0]
    names: dict[str, Scheme | None] = {**experts, other: SCHEMES["FP8_DYNAMIC"], last[1]: None}
    scheme = with_exceptions(SCHEMES["W4A16_G128"], names)
    (tmp_path / "out").mkdir()
    write_format("compressed-tensors", tmp_path / "out", Rounded(source, scheme), scheme)
    opened = open_checkpoint(tmp_path / "out")
    assert opened.schemes[other] == names[other]
    assert last[1] not in opened.schemes
    model, info = auto_class(CASES[case][0]).from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    with torch.no_grad():
        model.eval()(tokens(1, 8))  # unpacks the linears
    weights = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    whole = family_of({"model_type": CASES[case][0]})
    stacked = [each for each in whole.expert_layouts if "*" not in each.modules["moe.experts.*.down"]]
    in_memory = stacked[-1] if whole.in_memory_inside and stacked else AS_IN_MEMORY
    for idx in range(opened.arch.num_layers):
        for name, value in opened.layer(idx).items():
            full = f"layers.{idx}.{name}"
            module, _, leaf = full.rpartition(".")
            family = opened.family
            if (
                family.names_in_memory(family.tensor(full))[-1] not in weights
            ):  # experts that are apart on disk
                family = family.with_layout(in_memory)
            theirs = weights[family.names_in_memory(family.tensor(full))[-1]]
            if family.holds_all_experts(module):
                _, _, expert, part, _ = name.split(".")
                halves = theirs[int(expert)].chunk(2)
                theirs = theirs[int(expert)] if part == "down" else halves[part == "up"]
            elif leaf in ("weight", "bias"):
                members = members_of(opened.family, opened.arch, full)
                sizes = [opened.layer(idx)[each.split(".", 2)[2]].shape[0] for each in members]
                places = places_of(opened.family, opened.arch, members, sizes)
                theirs = places[members.index(full)].read(theirs)
            assert torch.equal(theirs.to(torch.bfloat16), dense(value, torch.bfloat16)), name
    one_dense = with_exceptions(SCHEMES["W4A16_G128"], {**experts, last[1]: None})
    with pytest.raises(UnsupportedFormat, match="dense-linears"):
        check_rules("gptq", source.arch, one_dense)


@each_wrapper
@pytest.mark.parametrize(
    ("scheme", "form"),
    [("W4A16_G128", "compressed-tensors"), ("FP8_BLOCK", "fp8"), ("FP8_DYNAMIC", "compressed-tensors")],
)
@pytest.mark.one_in(40)
def test_a_run_quantizes_the_text_model_and_the_stock_class_loads_the_rest_untouched(
    case: str,
    scheme: str,
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case in (*IN_HALVES, *SPLIT_FFNS) or (case in NOT_GATHERED and form == "compressed-tensors"):
        pytest.skip("what transformers would load is tested in `test_mixtures.py`, or refused below")
    if case in (*JOINED, *STACKED) and scheme == "W4A16_G128":
        pytest.skip("what transformers refuses is tested below")
    if case in SPLIT_AT_LOAD and form == "fp8":
        pytest.skip("what transformers refuses is tested below")
    if "kv_lora_rank" in CASES[case][1] and form == "fp8":
        pytest.skip("the rows of latents end within a block, which no such checkpoint holds")
    split_plain_tensors(CASES[case][0], monkeypatch)
    monkeypatch.chdir(tmp_path)
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    if source.arch.has_recurrence("mamba") and form == "fp8":
        pytest.skip("the rows of steps of time end within a block, which no such checkpoint holds")
    quantize: dict[str, Any] = {"kind": "quantize", "scheme": scheme, "round": {"kind": "rtn"}}
    quantize["overrides"] = dense_experts(source, form)
    (tmp_path / "model/preprocessor_config.json").write_text('{"size": 28}')
    recipe = {
        "version": 1,
        "model": "./model",
        "stages": [
            quantize,
            {"kind": "export", "formats": [form]},
        ],
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    code = main(["run", "recipe.yaml", "--offline", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err + out
    (found,) = {
        file.parent for file in tmp_path.rglob("compress.json") if (file.parent / "config.json").exists()
    }
    before, after = tensors_of(tmp_path / "model"), tensors_of(found)
    family = family_of({"model_type": CASES[case][0]})
    others = other_experts(family, source.arch)
    untouched = [name for name in before if family.is_untouched(name, others)]
    assert untouched
    for name in untouched:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])
    assert (found / "preprocessor_config.json").read_text() == '{"size": 28}'
    model, info = auto_class(CASES[case][0]).from_pretrained(
        found, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert not any(
        info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    weights = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name in untouched:
        in_memory = family.to_memory(name)
        if in_memory in weights or CASES[case][0] not in RENAMED:
            assert torch.equal(weights[in_memory], before[name])
    with torch.no_grad():
        ours = build_decoder(open_checkpoint(found), dtype=torch.float32, device=torch.device("cpu"))
        exact = ours(tokens(2, 12))
        theirs = model.eval()(tokens(2, 12)).logits.float()
    errors_BS = (theirs - exact).square().mean(-1)
    # An input rounded to eight bits sends a token to another expert now and then.
    error = errors_BS.median() if source.arch.has_experts else errors_BS.mean()
    # What latents are made of is rounded, and they are rounded themselves; the norm of a delta net divides by
    # the size of what a query finds in the state, and magnifies what rounding did to it. Scores of heads that
    # are normed and multiplied magnify it, too: in FP8 Muse Glimmer itself is 12 % from its source.
    is_sharp = source.arch.has_latents or source.arch.unit_norm_unrotated
    bound = 0.15 if is_sharp else 0.2 if source.arch.has_recurrences else 0.1
    assert error.sqrt() < bound * exact.square().mean().sqrt()


@pytest.mark.parametrize("case", STACKED)
@pytest.mark.one_in(3)
def test_transformers_is_stated_to_load_no_packed_codes_next_to_experts_that_it_joins(
    case: str, tmp_path: Path
) -> None:
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    dense_ones = decide(dict.fromkeys(dense_experts(source, "compressed-tensors")), source.arch)
    for name, joins in (("FP8_DYNAMIC", True), ("W8A16", False)):
        scheme = with_exceptions(SCHEMES[name], dense_ones)
        loads = {each.name: each.loads for each in COMPRESSED.consumers(source.arch, scheme)}
        assert loads["transformers"] is joins
        assert loads["compress runtime"]
    (tmp_path / "out").mkdir()
    write_format("compressed-tensors", tmp_path / "out", Rounded(source, scheme), scheme)
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        auto_class(CASES[case][0]).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("case", SPLIT_FFNS)
@pytest.mark.parametrize("scheme_name", ["W8A16", "FP8_DYNAMIC"])
def test_transformers_is_stated_to_load_no_codes_of_linears_that_it_splits(
    case: str, scheme_name: str, tmp_path: Path
) -> None:
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    scheme = ModelScheme(SCHEMES[scheme_name])
    loads = {each.name: each.loads for each in COMPRESSED.consumers(source.arch, scheme)}
    assert not loads["transformers"]
    assert loads["compress runtime"]
    (tmp_path / "out").mkdir()
    rounded = Rounded(source, scheme)
    write_format("compressed-tensors", tmp_path / "out", rounded, scheme)
    if scheme_name == "W8A16":
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            auto_class(CASES[case][0]).from_pretrained(tmp_path / "out")
    else:
        _, info = auto_class(CASES[case][0]).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert any(".mlp." in name for name in info["missing_keys"])
    opened = open_checkpoint(tmp_path / "out")
    for idx in range(source.arch.num_layers):
        found, expected = opened.layer(idx), rounded.layer(idx)
        assert found.keys() == expected.keys()
        assert all(torch.equal(dense(found[name]), dense(expected[name])) for name in expected)


@pytest.mark.parametrize("family", SPLIT)
@pytest.mark.parametrize(("scheme", "form"), [("W8A16", "compressed-tensors"), ("FP8_BLOCK", "fp8")])
def test_transformers_is_stated_to_load_no_codes_next_to_a_tower_that_it_splits(
    family: str, scheme: str, form: str, tmp_path: Path
) -> None:
    wide(family, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    uniform = ModelScheme(SCHEMES[scheme])
    loads = {each.name: each.loads for each in FORMATS.get(form).consumers(source.arch, uniform)}
    assert not loads["transformers"]
    assert loads["compress runtime"]
    (tmp_path / "out").mkdir()
    write_format(form, tmp_path / "out", Rounded(source, uniform), uniform)
    with pytest.raises(ValueError, match="you can only have one to many"):
        auto_class(family).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("case", SPLIT_AT_LOAD)
@pytest.mark.parametrize(
    ("scheme", "form"), [("W4A16_G128_ASYM", "compressed-tensors"), ("FP8_BLOCK", "fp8")]
)
def test_transformers_is_stated_to_load_no_codes_that_it_decodes_next_to_steps_that_split(
    case: str, scheme: str, form: str, tmp_path: Path
) -> None:
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    uniform = ModelScheme(SCHEMES[scheme])
    loads = {each.name: each.loads for each in FORMATS.get(form).consumers(source.arch, uniform)}
    assert not loads["transformers"]
    assert loads["compress runtime"]
    (tmp_path / "out").mkdir()
    rounded = Rounded(source, uniform)
    write_format(form, tmp_path / "out", rounded, uniform)
    with pytest.raises(ValueError, match="you can only have one to many"):
        auto_class(CASES[case][0]).from_pretrained(tmp_path / "out")
    opened = open_checkpoint(tmp_path / "out")
    for idx in range(source.arch.num_layers):
        found, expected = opened.layer(idx), rounded.layer(idx)
        assert found.keys() == expected.keys()
        assert all(torch.equal(dense(found[name]), dense(expected[name])) for name in expected)


@pytest.mark.parametrize(
    ("scheme", "loads"), [("W4A16_G128", False), ("W8A16", False), ("FP8_DYNAMIC", True)]
)
@pytest.mark.parametrize("case", JOINED)
def test_transformers_is_stated_to_load_no_packed_codes_of_linears_that_it_joins(
    case: str, scheme: str, loads: bool, tmp_path: Path
) -> None:
    wide(case, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    uniform = ModelScheme(SCHEMES[scheme])
    (theirs,) = (
        each
        for each in FORMATS.get("compressed-tensors").consumers(source.arch, uniform)
        if each.name == "transformers"
    )
    assert theirs.loads == loads
    (tmp_path / "out").mkdir()
    write_format("compressed-tensors", tmp_path / "out", Rounded(source, uniform), uniform)
    if loads:
        auto_class("minimax_m3_vl").from_pretrained(tmp_path / "out")
        return
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        auto_class("minimax_m3_vl").from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    "case", ["internvl", "internvl-qwen3-tied", "llava_next", "smolvlm", "minicpm_ocr", "qianfan_ocr"]
)
def test_tensors_decide_the_head_where_no_config_does(case: str, tmp_path: Path) -> None:
    """Versions of `transformers` differ in what they take a config for that says nothing."""
    model = saved(tmp_path, *CASES[case])
    config = json.loads((tmp_path / "config.json").read_text())
    tied = config.pop("tie_word_embeddings")
    config["text_config"].pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Checkpoint(tmp_path)
    assert source.arch.tied_head == tied
    tokens_BS = tokens(1, 8)
    with torch.no_grad():
        decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
        assert torch.allclose(decoder(tokens_BS), model(tokens_BS).logits, atol=1e-4)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    written = json.loads((tmp_path / "written/config.json").read_text())
    assert written["tie_word_embeddings"] == tied


def test_a_text_config_ties_the_head_of_llava_whatever_the_whole_says() -> None:
    config: dict[str, Any] = {
        "model_type": "llava_onevision",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen2",
            "tie_word_embeddings": True,
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    }
    theirs = transformers.LlavaOnevisionConfig(**json.loads(json.dumps(config)))
    assert theirs.tie_word_embeddings
    assert family_of(config).read_config(config).tied_head


def test_text_configs_may_leave_sizes_to_the_defaults_of_their_class() -> None:
    """`transformers` 4 saved of a text config what differs from its class."""
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for model_type, kinds in {
        "internvl": ("qwen2", "qwen3", "qwen3_moe", "llama"),
        "qianfan_ocr": ("qwen3",),
        "llava_next": ("qwen2", "llama", "mistral"),
        "llava_onevision": ("qwen2",),
        "idefics2": ("mistral",),
        "idefics3": ("llama",),
        "smolvlm": ("llama",),
    }.items():
        for kind in kinds:
            config = {"model_type": model_type, "text_config": {"model_type": kind}}
            arch = family_of(config).read_config(config)
            theirs = transformers.CONFIG_MAPPING[kind]()
            ours = (arch.vocab_size, arch.hidden_size, arch.num_layers, arch.layers[0].num_heads)
            assert ours == tuple(getattr(theirs, size) for size in sizes)
            assert arch.max_position == theirs.max_position_embeddings
            assert arch.layers[0].num_kv_heads == theirs.num_key_value_heads
