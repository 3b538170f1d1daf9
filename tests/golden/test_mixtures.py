"""Checkpoints of mixtures of experts in the layouts that the hub and `transformers` have."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compress.errors import UnsupportedFormat
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.export.refusals import check_rules
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.config_file import read_config
from compress.models.moe import best
from compress.models.overrides import overridden
from compress.models.random_source import RandomSource
from compress.models.weights import Weights, build_decoder, dense
from compress.quant.e2m1 import VALUES
from compress.quant.model_scheme import ModelScheme
from compress.quant.mxfp4 import from_mxfp4
from compress.quant.numerics import nearest_weight
from compress.quant.scale_grid import LARGEST_BYTE
from compress.quant.scheme import SCHEMES, QuantizedWeight
from tests.golden.test_families import assert_same_tensors, tensors_of, tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import auto_class, build, inner_widths, saved, tokens

CPU = torch.device("cpu")
EXPORTED = [
    ("mixtral", "W4A16_G128"),
    ("phimoe", "W4A16_G128"),
    ("phimoe", "FP8_DYNAMIC"),
    ("qwen2-moe", "W4A16_G128"),
    ("qwen3-moe", "W4A16_G128"),
    ("qwen3-moe-some-dense", "FP8_DYNAMIC"),
    ("olmoe", "W8A16"),
    ("jamba", "FP8_DYNAMIC"),
    ("minimax", "W4A16_G128"),
    ("minimax-alternating-tied", "FP8_DYNAMIC"),
    ("glm4-moe", "FP8_DYNAMIC"),
    ("ernie4_5_moe", "W4A16_G128"),
    ("minimax_m2", "FP8_DYNAMIC"),
    ("dots1", "W4A16_G128"),
    ("deepseek_v2", "W4A16_G128"),
    ("deepseek_v3", "FP8_DYNAMIC"),
    ("deepseek_v32", "FP8_DYNAMIC"),
    ("glm_moe_dsa", "W4A16_G128"),
    ("glm4_moe_lite", "W4A16_G128"),
    ("afmoe", "W4A16_G128"),
    ("axk1", "W4A16_G128"),
    ("axk2", "FP8_DYNAMIC"),
    ("dots3_note_text", "W4A16_G128"),
    ("kolibri1", "FP8_DYNAMIC"),
    ("cohere2_moe-shared-average", "W4A16_G128"),
    ("hunyuan_v1_moe", "FP8_DYNAMIC"),
    ("qwen3_next", "W4A16_G128"),
    ("lfm2_moe", "FP8_DYNAMIC"),
    ("nemotron_h-experts", "W4A16_G128"),
    ("nemotron_h-latents", "FP8_DYNAMIC"),
    ("laguna-by-default", "W4A16_G128"),
    ("kimi_linear", "FP8_DYNAMIC"),
    ("mimo_v2_flash", "W4A16_G128"),
    ("bailing_hybrid", "FP8_DYNAMIC"),
    ("qwen4_exp_text-without-ngrams", "W4A16_G128"),
    ("qwen4_exp_text", "FP8_DYNAMIC"),
    ("deepseek_v4", "FP8_DYNAMIC"),
    ("deepseek_v4", "W4A16_G128"),
]
WHOLE_GROUPS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
}
OF_EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "share_expert_dim": 256,
}
FP8_BLOCKS = [
    *("qwen3-moe", "qwen3-moe-some-dense", "qwen2-moe", "mixtral", "glm4-moe", "minimax_m2"),
    "mimo_v2_flash",
]
OF_BLOCKS: dict[str, dict[str, int]] = {
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 192, "v_head_dim": 64}
}
"""Widths by which every linear of a case is whole blocks, where four KV heads do not make it so."""
IN_MEMORY = (
    "mixtral",
    "jamba",
    "minimax",
    "qwen2-moe-some-dense",
    "qwen3-moe",
    "olmoe",
    "glm4-moe",
    "granitemoe",
    "granitemoeshared",
    "ernie4_5_moe",
    "minimax_m2",
    "dots1",
    "hy_v3",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "afmoe",
    "axk1",
    "axk1-types",
    "kolibri1",
    "cohere2_moe",
    "hunyuan_v1_moe",
    "flint",
    "mimo_v2_flash",
    "qwen3_next",
    "qwen4_exp_text-without-ngrams",
    "granitemoehybrid-h-experts",
    "lfm2_moe",
)
RENAMED = (
    "laguna",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "deepseek_ocr2",
    "kimi_linear",
    "phimoe",
    "aria",
    "aria_text",
    "mistral_large4-shared-latents",
    "bailing_hybrid",
    "minimax_m3_vl",
    "step3p7",
    "hy_v4",
    "axk2",
    "axk2-groups",
    "dots3_note_text",
    "dots3_note_text-windows",
    "deepseek_v4",
    "glm5_next",
)
"""Cases of which `transformers` has other names in memory, which are read and not written."""


@pytest.mark.parametrize("case", [*IN_MEMORY, *RENAMED])
@pytest.mark.one_in(4)
def test_what_transformers_has_in_memory_is_read_and_written_as_it_was_read(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "apart").mkdir()
    saved(tmp_path / "apart", *CASES[case], dtype=torch.bfloat16)
    build(*CASES[case], dtype=torch.bfloat16).save_pretrained(tmp_path / "in-one", save_original_format=False)
    in_one = Checkpoint(tmp_path / "in-one")
    assert tensors_of(tmp_path / "in-one").keys() != tensors_of(tmp_path / "apart").keys()
    for idx in range(in_one.arch.num_layers):
        ours = in_one.layer(idx)
        theirs = Checkpoint(tmp_path / "apart").layer(idx)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if case not in RENAMED:
        (tmp_path / "written").mkdir()
        write_checkpoint(tmp_path / "written", in_one)
        assert_same_tensors(tmp_path / "written", tmp_path / "in-one")


@pytest.mark.parametrize(
    "case",
    [
        "gemma4-experts",
        "gemma4-vision-experts",
        "qwen3_vl_moe",
        "mistral3-mistral4",
        "aria",
        "aria_text",
        "minimax_m3_vl_text-without-indexers",
        "inkling_text-one-shared",
    ],
)
def test_codes_of_experts_that_transformers_does_not_gather_are_written_apart_and_read_again(
    case: str, tmp_path: Path
) -> None:
    """Checkpoints with codes have a tensor for each expert; transformers does not gather them into the one
    tensor that it has."""
    family, changes = CASES[case]
    widths = {**WHOLE_GROUPS, "moe_intermediate_size": 96}
    if "dense_intermediate_size" in changes:
        widths |= inner_widths(changes, 128)
    if "d_rel" in changes:
        widths |= {
            **inner_widths(changes, 128),
            "moe_intermediate_size": 96,
            "mlp_layer_types": ["sparse"] * 2,
        }
    if "kv_lora_rank" in changes:
        widths |= {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
        widths |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "first_k_dense_replace": 0}
    saved(
        tmp_path / "plain",
        family,
        {name: each for name, each in (changes | widths).items() if name != "layer_types"},
    )
    source = Checkpoint(tmp_path / "plain")
    scheme = ModelScheme(SCHEMES["W4A16_G32"])
    random = RandomSource(source.arch, device=CPU, dtype=torch.float32, scheme=scheme.layers)
    written = tmp_path / "written"
    written.mkdir()
    write_format("compressed-tensors", written, random, scheme)
    tensors = tensors_of(written)
    experts = {name for name in tensors if ".layers.0." in name and ".experts.3." in name}
    assert {name.partition(".experts.3.")[2] for name in experts} == {
        f"{part}_proj.weight_{leaf}"
        for part in ("gate", "up", "down")
        for leaf in ("packed", "scale", "shape")
    }
    again = open_checkpoint(written)
    for idx in range(2):
        ours, theirs = again.layer(idx), random.layer(idx)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(dense(ours[name]), dense(theirs[name])) for name in theirs)
    (refusal,) = (
        each.note
        for each in FORMATS.get("compressed-tensors").consumers(source.arch, scheme)
        if each.name == "transformers" and not each.loads
    )
    assert "does not gather" in refusal


def test_transposed_experts_of_the_hub_are_read_and_written_as_they_were_read(tmp_path: Path) -> None:
    """Both layouts of Qwen3-VL have the same names; widths at which one tensor is square are told apart by
    the other."""
    family, changes = CASES["qwen3_vl_moe"]
    for idx, width in enumerate((24, 40, 48)):
        plain, hub, written = (tmp_path / f"{name}-{idx}" for name in ("plain", "hub", "written"))
        model = saved(plain, family, {**changes, "moe_intermediate_size": width})
        hub.mkdir(), written.mkdir()
        tensors = {
            name: each.transpose(1, 2).contiguous() if ".experts." in name else each
            for name, each in tensors_of(plain).items()
        }
        save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})
        (hub / "config.json").write_bytes((plain / "config.json").read_bytes())
        source = Checkpoint(hub)
        for layer in range(source.arch.num_layers):
            ours, theirs = source.layer(layer), Checkpoint(plain).layer(layer)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        write_checkpoint(written, source)
        assert_same_tensors(written, hub)
        if width == 40:
            again = auto_class(family).from_pretrained(hub, attn_implementation="eager").eval()
            with torch.no_grad():
                assert torch.equal(again(tokens(1, 12)).logits, model(tokens(1, 12)).logits)


def test_mxfp4_blocks_are_read_as_the_numbers_that_transformers_makes_of_them(tmp_path: Path) -> None:
    family, changes = CASES["gpt-oss"]
    changes = {**changes, "hidden_size": 64, "intermediate_size": 96}
    model = saved(tmp_path, family, changes, dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path)
    generator = torch.Generator().manual_seed(3)
    state = dict(model.named_parameters())
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors.pop(name).shape
        shape = (num_experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].data.copy_(convert_moe_packed_tensors(blocks, scales))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Checkpoint(tmp_path)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    reference = build(family, changes)  # a model cast to bfloat16 and back has other frequencies
    reference.load_state_dict({name: each.float() for name, each in model.state_dict().items()})
    with torch.no_grad():
        expected = reference(tokens(2, 12)).logits
        assert (decoder(tokens(2, 12)) - expected).abs().max() <= tolerance(expected)
    (tmp_path / "dense").mkdir()
    write_checkpoint(tmp_path / "dense", source)
    model.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(tmp_path / "dense", tmp_path / "theirs")


def test_all_scales_of_mxfp4_that_bfloat16_represents_are_exact() -> None:
    scales = torch.arange(LARGEST_BYTE + 1, dtype=torch.uint8).unsqueeze(1)
    blocks = torch.arange(16, dtype=torch.uint8).expand(len(scales), 1, 16)
    exact = torch.tensor([*VALUES, *(-each for each in VALUES)], dtype=torch.float64)
    exact = exact * 2.0 ** (scales.to(torch.float64) - 127)
    found = from_mxfp4(blocks, scales)[:, 0::2].to(torch.float64)
    assert torch.equal(found, exact)


def test_of_equal_scores_the_expert_with_the_lower_index_is_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert best(scores, 3).tolist() == [[1, 2, 4], [0, 1, 2]]


def test_selection_biases_stay_in_float32(tmp_path: Path) -> None:
    saved(tmp_path / "source", *CASES["glm4-moe"], dtype=torch.bfloat16)
    tensors = tensors_of(tmp_path / "source")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].float() + 1e-5
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    source = Checkpoint(tmp_path / "source")
    decoder = build_decoder(source, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(decoder.layers[1].moe.selection_bias, tensors[name])
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert_same_tensors(tmp_path / "written", tmp_path / "source")


class Rounded:
    """A source with its linears rounded to nearest."""

    kv_format: str | None = None

    def __init__(self, source: Checkpoint, scheme: ModelScheme) -> None:
        self._source = source
        self._scheme = scheme
        self.arch = source.arch

    def outer(self) -> Weights:
        outer = self._source.outer()
        head = self._scheme.head
        if head is None:
            return outer
        return {**outer, "head.weight": nearest_weight(dense(outer["head.weight"]), head, torch.bfloat16)}

    def layer(self, layer_idx: int) -> Weights:
        weights = dict(self._source.layer(layer_idx))
        for linear in self.arch.layers[layer_idx].linears:
            scheme = self._scheme.for_linear(f"layers.{layer_idx}.{linear}")
            if scheme is not None:
                dense_OI = dense(weights[f"{linear}.weight"])
                weights[f"{linear}.weight"] = nearest_weight(dense_OI, scheme, torch.bfloat16)
        return weights


def rounded(
    directory: Path,
    case: str,
    scheme_name: str,
    *,
    overrides: Mapping[str, str | None] | None = None,
    head: str | None = None,
    **more: int,
) -> tuple[Rounded, ModelScheme]:
    family, changes = CASES[case]
    sizes = WHOLE_GROUPS | {key: size for key, size in OF_EXPERTS.items() if key in changes}
    sizes |= inner_widths(changes, 128)
    saved(directory, family, {**changes, **sizes, **more}, dtype=torch.bfloat16)
    source = Checkpoint(directory)
    schemes = {pattern: SCHEMES[name] if name else None for pattern, name in (overrides or {}).items()}
    of_head = None if head is None else SCHEMES[head]
    scheme = overridden(SCHEMES[scheme_name], schemes, source.arch, head=of_head)
    return Rounded(source, scheme), scheme


@pytest.mark.parametrize(("case", "scheme_name"), EXPORTED)
@pytest.mark.one_in(4)
def test_transformers_loads_each_exported_expert_with_our_bits(
    case: str, scheme_name: str, tmp_path: Path
) -> None:
    source, scheme = rounded(tmp_path / "source", case, scheme_name)
    (tmp_path / "exported").mkdir()
    write_format("compressed-tensors", tmp_path / "exported", source, scheme)
    ignored = read_config(tmp_path / "exported")["quantization_config"]["ignore"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    opened = open_checkpoint(tmp_path / "exported")
    theirs = dict(model.named_parameters())
    for idx, layer in enumerate(source.arch.layers):
        ours = opened.layer(idx)
        if layer.experts is None:
            continue
        routers = opened.family.names_in_memory(opened.family.to_disk(f"layers.{idx}.moe.router"))
        assert {*routers} <= {*ignored}
        halves = [f"model.layers.{idx}.{half}" for half in ("mlp", "feed_forward", "mixer")]
        prefix = next(half for half in halves if f"{half}.experts.down_proj" in theirs)
        named = (f"{prefix}.gate.weight", *(f"{router}.weight" for router in routers))
        in_memory = next(name for name in named if name in theirs)
        assert torch.equal(theirs[in_memory], ours["moe.router.weight"])
        for expert in range(layer.experts.num_experts):
            *first, down = (
                dense(ours[linear]) for linear in ours if linear.startswith(f"moe.experts.{expert}.")
            )
            stack = "gate_up_proj" if layer.gated else "up_proj"
            assert torch.equal(theirs[f"{prefix}.experts.{stack}"][expert], torch.cat(first))
            assert torch.equal(theirs[f"{prefix}.experts.down_proj"][expert], down)


DENSE_EXPERTS: dict[str, str | None] = {"*.moe.experts.*": None}
COMBINED: list[tuple[str, str, str | None, dict[str, str | None], bool]] = [
    ("mixtral", "W4A16_G128", "FP8_DYNAMIC", {}, True),
    ("mixtral", "FP8_DYNAMIC", "W8A16", {}, True),
    ("qwen3-moe", "W4A16_G128", None, {"*.attn.*": "FP8_DYNAMIC"}, True),
    ("qwen3-moe", "INT8_DYNAMIC", None, {"*.moe.experts.*": "W8A16"}, True),
    ("mixtral", "FP8_DYNAMIC", None, DENSE_EXPERTS, True),
    ("mixtral", "W8A16", None, DENSE_EXPERTS, False),
    ("mixtral", "INT8_DYNAMIC", None, {}, False),
    ("mixtral", "W4A16_G128_ASYM", None, {}, False),
    ("qwen3-moe", "FP8_BLOCK", None, {}, False),
    ("qwen3-moe", "NVFP4", None, {}, False),
    ("mixtral", "MXFP4", None, {}, True),
    ("mixtral", "W4A16_G128", None, {"layers.0.moe.experts.*": "W8A16"}, False),
    ("kimi_linear", "W4A16_G128", None, {}, False),
    ("kimi_linear", "W4A16_G128", None, {"*.moe.experts.*": "FP8_DYNAMIC"}, True),
    ("kimi_linear", "W8A16", None, DENSE_EXPERTS, False),
    ("bailing_hybrid", "W4A16_G128", None, {}, False),
    ("bailing_hybrid", "W4A16_G128", None, {"*.moe.experts.*": "FP8_DYNAMIC"}, True),
    ("bailing_hybrid", "W8A16", None, DENSE_EXPERTS, False),
    ("qwen4_exp_text", "W4A16_G128", None, {}, False),
    ("qwen4_exp_text", "W4A16_G128", None, {"*.moe.experts.*": "FP8_DYNAMIC"}, True),
]


@pytest.mark.parametrize(("case", "scheme_name", "head", "overrides", "loads"), COMBINED)
@pytest.mark.one_in(4)
def test_transformers_loads_experts_where_the_format_names_it(
    case: str,
    scheme_name: str,
    head: str | None,
    overrides: dict[str, str | None],
    loads: bool,
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    source, scheme = rounded(tmp_path / "source", case, scheme_name, overrides=overrides, head=head, **sizes)
    (tmp_path / "exported").mkdir()
    write_format("compressed-tensors", tmp_path / "exported", source, scheme)
    (named,) = (
        each
        for each in FORMATS.get("compressed-tensors").consumers(source.arch, scheme)
        if each.name == "transformers"
    )
    assert named.loads == loads
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    except RuntimeError:
        same = False
    else:
        opened = open_checkpoint(tmp_path / "exported")
        theirs = dict(model.named_parameters())
        same = all(
            torch.equal(
                theirs[f"model.layers.{idx}.mlp.experts.down_proj"][expert],
                dense(opened.layer(idx)[f"moe.experts.{expert}.down.weight"]),
            )
            for idx, layer in enumerate(source.arch.layers)
            for expert in range(layer.experts.num_experts if layer.experts else 0)
        )
    assert same == loads


@pytest.mark.parametrize("scheme_name", ["FP8_BLOCK", "W4A16_G128"])
def test_experts_of_one_tensor_are_refused_in_every_scheme(scheme_name: str, tmp_path: Path) -> None:
    source, scheme = rounded(tmp_path, "gpt-oss", scheme_name, hidden_size=256, intermediate_size=256)
    rules = FORMATS.get("compressed-tensors").broken_rules(source.arch, scheme)
    assert "experts-apart" in {each.name for each in rules}


@pytest.mark.parametrize("case", FP8_BLOCKS)
def test_blocks_of_fp8_open_with_our_codes_and_transformers_loads_them(case: str, tmp_path: Path) -> None:
    widths = OF_BLOCKS.get(case, {"num_key_value_heads": 4})
    source, scheme = rounded(tmp_path / "source", case, "FP8_BLOCK", **widths)
    (tmp_path / "exported").mkdir()
    write_format("fp8", tmp_path / "exported", source, scheme)
    opened = open_checkpoint(tmp_path / "exported")
    for idx in range(source.arch.num_layers):
        ours = source.layer(idx)
        theirs = opened.layer(idx)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if isinstance(value, QuantizedWeight):
                assert torch.equal(
                    theirs[key].codes_OI.view(torch.uint8), value.codes_OI.view(torch.uint8)
                ), key
                assert torch.equal(theirs[key].scale_OG.float(), value.scale_OG.float()), key
            else:
                assert torch.equal(theirs[key], value), key
    kept_dense = read_config(tmp_path / "exported")["quantization_config"]["modules_to_not_convert"]
    for idx, layer in enumerate(source.arch.layers):
        if layer.experts is not None:
            assert opened.family.to_disk(f"layers.{idx}.moe.router") in kept_dense
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    parameters = dict(model.named_parameters())
    for idx, layer in enumerate(source.arch.layers):
        if layer.experts is None:
            continue
        ours = opened.layer(idx)
        prefix = f"model.layers.{idx}.mlp"
        assert torch.equal(parameters[f"{prefix}.gate.weight"], dense(ours["moe.router.weight"]))
        for expert in range(layer.experts.num_experts):
            gate, up, down = (
                dense(ours[f"moe.experts.{expert}.{name}.weight"]) for name in ("gate", "up", "down")
            )
            assert torch.equal(parameters[f"{prefix}.experts.gate_up_proj"][expert], torch.cat((gate, up)))
            assert torch.equal(parameters[f"{prefix}.experts.down_proj"][expert], down)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors", "awq"])
@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-some-dense"])
def test_an_export_opens_with_the_same_codes(name: str, case: str, tmp_path: Path) -> None:
    source, scheme = rounded(tmp_path / "source", case, "W4A16_G128" if name != "awq" else "W4A16_G128_ASYM")
    source.arch = source.arch.replace(dtype="float16")
    (tmp_path / "exported").mkdir()
    write_format(name, tmp_path / "exported", _InFloat16(source), scheme)
    opened = open_checkpoint(tmp_path / "exported")
    for idx in range(source.arch.num_layers):
        ours = _InFloat16(source).layer(idx)
        theirs = opened.layer(idx)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if isinstance(value, QuantizedWeight):
                assert torch.equal(theirs[key].codes_OI, value.codes_OI), key
                assert torch.equal(theirs[key].scale_OG, value.scale_OG), key
            else:
                assert torch.equal(theirs[key], value), key


class _InFloat16(Rounded):
    """The same with scales that float16 holds, as GPTQ and AWQ files do."""

    def __init__(self, source: Rounded) -> None:
        super().__init__(source._source, source._scheme)
        self.arch = source.arch

    def outer(self) -> Weights:
        return {name: dense(value, torch.float16) for name, value in self._source.outer().items()}

    def layer(self, layer_idx: int) -> Weights:
        found: dict[str, torch.Tensor | QuantizedWeight] = {}
        for name, value in super().layer(layer_idx).items():
            if isinstance(value, QuantizedWeight):
                found[name] = replace(value, scale_OG=value.scale_OG.to(torch.float16))
            else:
                found[name] = value.to(torch.float16)
        return found


@pytest.mark.parametrize("case", ["gpt-oss", "granitemoe", "step3p7"])
def test_codes_of_experts_that_share_a_tensor_are_refused(case: str, tmp_path: Path) -> None:
    source, scheme = rounded(tmp_path / "source", case, "W4A16_G128")
    with pytest.raises(UnsupportedFormat, match="experts-apart"):
        check_rules("compressed-tensors", source.arch, scheme)
    dense_experts = overridden(SCHEMES["W4A16_G128"], {"*.moe.experts.*": None}, source.arch)
    (tmp_path / "exported").mkdir()
    write_format(
        "compressed-tensors", tmp_path / "exported", Rounded(source._source, dense_experts), dense_experts
    )
    open_checkpoint(tmp_path / "exported").layer(1)
