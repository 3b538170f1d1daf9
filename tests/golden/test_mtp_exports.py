"""Layers that predict further tokens in the exports of their model: they stay where other programs read
them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from compress.export import FORMATS, codecs, open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.mtp_reader import has_mtp, read_mtp
from compress.models.mtp_tensors import mtp_tensors
from compress.models.weights import dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_families import tensors_of
from tests.golden.test_mtp import WIDTHS, in_blocks_of_fp8
from tests.support.tiny_hf import auto_class
from tests.support.tiny_mtp import saved_with_mtp
from tests.support.wrappers import Rounded

BLOCKS = FORMATS.get("fp8").codec
OF_HEAD = {
    "glm4-moe": r"^model\.layers\.3\.",
    "exaone_moe": r"^mtp\.",
    "mimo_v2_flash": r"^model\.mtp\.",
    "qwen3_next": r"^mtp\.",
    "step3p7": r"^model\.layers\.3\.",
    "hy_v3": r"^model\.layers\.3\.",
    "bailing_hybrid": r"^model\.layers\.3\.",
    "ernie4_5_moe": r"^model\.mtp_",
    "exaone4_5": r"^mtp\.",
    "glm_ocr": r"^model\.language_model\.layers\.3\.",
    "nemotron_h-experts": r"^mtp\.",
    "nemotron_h_omni": r"^language_model\.mtp\.",
}
"""The names of tensors of the head of a case. No format writes the experts of Step 3.7."""
_WITH_DELTA_NETS = {
    **WIDTHS,
    "shared_expert_intermediate_size": 128,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
OF_BLOCKS = {"glm4-moe": WIDTHS, "qwen3_next": _WITH_DELTA_NETS, "qwen3_5_moe": _WITH_DELTA_NETS}
"""Cases whose head has experts, and whole blocks of FP8 in each linear."""


def exported(path: Path, source: Checkpoint, form: str, scheme: str) -> Path:
    """Write an export of a model whose linears have a scheme."""
    whole = ModelScheme(SCHEMES[scheme])
    path.mkdir()
    write_format(form, path, Rounded(source, whole), whole, mtp=mtp_tensors(source, source.arch, BLOCKS))
    return path


def of_head(case: str, path: Path) -> dict[str, Tensor]:
    return {name: each for name, each in tensors_of(path).items() if re.search(OF_HEAD[case], name)}


@pytest.mark.parametrize("case", [each for each in OF_HEAD if each != "step3p7"])
@pytest.mark.parametrize("form", ["compressed-tensors"])
def test_a_head_is_exported_as_it_is_and_read_again(case: str, form: str, tmp_path: Path) -> None:
    saved_with_mtp(tmp_path / "source", case)
    source = open_checkpoint(tmp_path / "source")
    path = exported(tmp_path / "out", source, form, "FP8_DYNAMIC")
    before, after = of_head(case, tmp_path / "source"), of_head(case, path)
    assert before
    assert before.keys() == after.keys()
    assert all(torch.equal(each, after[name]) for name, each in before.items())
    stated = json.loads((path / "config.json").read_text())["quantization_config"]
    modules = {name.rpartition(".")[0] for name in after}
    patterns = [each.removeprefix("re:") for each in stated["ignore"]]
    assert all(any(re.match(each, module) for each in patterns) for module in modules)
    first, again = (read_mtp(open_checkpoint(each), codecs()) for each in (tmp_path / "source", path))
    assert first.arch.layers == again.arch.layers
    assert first.weights.keys() == again.weights.keys()
    assert all(torch.equal(dense(each), dense(again.weights[name])) for name, each in first.weights.items())


@pytest.mark.parametrize("case", OF_HEAD)
def test_a_trained_head_has_the_names_that_it_came_with(case: str, tmp_path: Path) -> None:
    """Norms that are those of the model stay as they are."""
    saved_with_mtp(tmp_path, case)
    source = open_checkpoint(tmp_path)
    head = read_mtp(source, codecs())
    doubled = replace(head, weights={name: 2 * dense(each) for name, each in head.weights.items()})
    found = mtp_tensors(source, source.arch, BLOCKS)
    assert found is not None
    after = dict(found.with_head(doubled, source.arch.num_layers).tensors())
    before = of_head(case, tmp_path)
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    assert after.keys() == before.keys()
    for name, each in before.items():
        wanted = each if name.endswith(copies) else 2 * each
        assert torch.allclose(after[name], wanted), name


@pytest.mark.parametrize("form", ["fp8", "compressed-tensors"])
def test_a_head_in_blocks_of_fp8_is_exported_dense(form: str, tmp_path: Path) -> None:
    saved_with_mtp(tmp_path / "source", "glm4-moe", **WIDTHS)
    in_blocks_of_fp8(tmp_path / "source", of_head=True)
    source = open_checkpoint(tmp_path / "source")
    path = tmp_path / "out"
    path.mkdir()
    scheme = ModelScheme(SCHEMES["FP8_BLOCK"])
    write_format(form, path, source, scheme, mtp=mtp_tensors(source, source.arch, BLOCKS))
    after = of_head("glm4-moe", path)
    assert after
    assert all(each.dtype == torch.float32 for each in after.values())
    wanted, found = (read_mtp(open_checkpoint(each), codecs()) for each in (tmp_path / "source", path))
    assert wanted.weights.keys() == found.weights.keys()
    for name, each in wanted.weights.items():
        assert torch.equal(dense(each), dense(found.weights[name])), name


@pytest.mark.parametrize("case", OF_BLOCKS)
def test_the_fp8_format_lists_each_matrix_of_a_head(case: str, tmp_path: Path) -> None:
    """vLLM compares whole names there, and takes the experts of a layer for one module."""
    saved_with_mtp(tmp_path / "source", case, **OF_BLOCKS[case])
    source = open_checkpoint(tmp_path / "source")
    path = exported(tmp_path / "out", source, "fp8", "FP8_BLOCK")
    listed = json.loads((path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    head = re.compile(OF_HEAD.get(case, r"^mtp\."))
    stored = {name: each for name, each in tensors_of(path).items() if head.match(name)}
    matrices = {name.rpartition(".")[0] for name, each in stored.items() if each.ndim > 1}
    experts = {f"{name.partition('.experts')[0]}.experts" for name in matrices if ".experts" in name}
    assert {name for name in matrices if ".experts." not in name} | experts <= {*listed}
    assert experts
    heads = [read_mtp(open_checkpoint(each), codecs()).weights for each in (tmp_path / "source", path)]
    assert all(torch.equal(dense(each), dense(heads[1][name])) for name, each in heads[0].items())


def test_a_head_follows_the_last_of_the_layers_that_are_left(tmp_path: Path) -> None:
    saved_with_mtp(tmp_path, "glm4-moe")
    source = open_checkpoint(tmp_path)
    fewer = source.arch.replace(layers=source.arch.layers[1:])
    found = mtp_tensors(source, fewer, BLOCKS)
    assert found is not None
    assert found.modules == ("model.layers.2",)
    assert {name for name, _ in found.tensors()} == {
        name.replace("layers.3.", "layers.2.") for name in of_head("glm4-moe", tmp_path)
    }


@pytest.mark.parametrize("changes", [{"num_heads": 2}, {"experts": None}])
@pytest.mark.parametrize("case", ["glm4-moe", "qwen3_next"])
def test_a_head_of_other_widths_than_the_model_is_left_out(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Also where it is among the untouched parts, which come from the source as they are."""
    saved_with_mtp(tmp_path / "source", case)
    source = open_checkpoint(tmp_path / "source")
    other = source.arch.replace(layers=tuple(replace(each, **changes) for each in source.arch.layers))
    left_out = mtp_tensors(source, other, BLOCKS)
    assert left_out is not None
    assert left_out.reason is not None
    assert "other widths" in left_out.reason
    assert not left_out.names
    (tmp_path / "out").mkdir()
    write_format("compressed-tensors", tmp_path / "out", source, None, mtp=left_out)
    assert not of_head(case, tmp_path / "out")
    assert not has_mtp(open_checkpoint(tmp_path / "out"))


@pytest.mark.parametrize("case", ["glm4-moe", "qwen3_5_moe_text"])
def test_experts_of_a_head_may_be_stored_otherwise_than_those_of_the_layers(
    case: str, tmp_path: Path
) -> None:
    """Exports have the experts of layers apart and the head as the source has it."""
    saved_with_mtp(tmp_path / "source", case)
    tensors = tensors_of(tmp_path / "source")
    stacked = _with_stacked_experts(tensors)
    assert stacked.keys() != tensors.keys()
    wanted = read_mtp(open_checkpoint(tmp_path / "source"), codecs())
    save_file(stacked, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    source = open_checkpoint(tmp_path / "source")
    path = exported(tmp_path / "out", source, "compressed-tensors", "FP8_DYNAMIC")
    for each in (source, open_checkpoint(path)):
        found = read_mtp(each, codecs())
        assert found.weights.keys() == wanted.weights.keys()
        assert all(
            torch.equal(dense(value), dense(found.weights[name])) for name, value in wanted.weights.items()
        )


def _with_stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with those of all experts of a layer in one, as modules have
    them."""
    parts: dict[str, dict[int, dict[str, Tensor]]] = {}
    others = {}
    for name, each in tensors.items():
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found is None:
            others[name] = each
        else:
            parts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = each
    for module, experts in parts.items():
        of_all = [experts[idx] for idx in sorted(experts)]
        others[f"{module}.gate_up_proj"] = torch.stack(
            [torch.cat((each["gate"], each["up"])) for each in of_all]
        )
        others[f"{module}.down_proj"] = torch.stack([each["down"] for each in of_all])
    return others


def test_an_untouched_head_in_blocks_of_fp8_is_exported_dense(tmp_path: Path) -> None:
    """Other programs take the codes of an untouched part for weights."""
    widths = {**WIDTHS, "shared_expert_intermediate_size": 128}
    widths |= {"linear_num_value_heads": 4, "linear_value_head_dim": 32}
    saved_with_mtp(tmp_path / "source", "qwen3_next", **widths)
    wanted = of_head("qwen3_next", tmp_path / "source")
    in_blocks_of_fp8(tmp_path / "source", of_head=True)
    source = open_checkpoint(tmp_path / "source")
    found = mtp_tensors(source, source.arch, BLOCKS)
    assert found is not None
    after = dict(found.tensors())
    assert after.keys() == wanted.keys()
    for name, each in after.items():
        assert each.dtype == torch.float32
        assert float((each - wanted[name]).abs().max()) <= 0.07 * float(wanted[name].abs().max()), name


COUNTS = {
    "glm4-moe": "num_nextn_predict_layers",
    "qwen3_5_moe": "mtp_num_hidden_layers",
    "glm_ocr": "num_nextn_predict_layers",
    "step3p7-as-published": "num_nextn_predict_layers",
}
"""Cases with the field that counts their heads: of a text model, an untouched part, and configs inside."""


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("case", COUNTS)
def test_a_config_counts_the_heads_that_are_written(case: str, kept: bool, tmp_path: Path) -> None:
    """Entries of fields by layer for layers that are not written would be refused by `transformers`."""
    saved_with_mtp(tmp_path / "source", case)
    path = tmp_path / "source" / "config.json"
    before = json.loads(path.read_text())
    (before.get("text_config") or before)[COUNTS[case]] = 1
    path.write_text(json.dumps(before))
    source = open_checkpoint(tmp_path / "source")
    found = mtp_tensors(source, source.arch, BLOCKS)
    assert found is not None
    (tmp_path / "out").mkdir()
    without = replace(found, names={}, reason="for this test")
    write_format("compressed-tensors", tmp_path / "out", source, None, mtp=found if kept else without)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert has_mtp(open_checkpoint(tmp_path / "out")) is kept
    text = config.get("text_config") or config
    assert text[COUNTS[case]] == int(kept)
    types = text.get("layer_types") or []
    assert len(types) <= source.arch.num_layers or kept
    AutoConfig.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kept", [True, False])
def test_a_count_of_heads_that_decides_what_a_tower_computes_stays(kept: bool, tmp_path: Path) -> None:
    """`transformers` norms images of Nemotron 3 Omni once more where its config counts such heads."""
    case = "nemotron_h_omni"
    saved_with_mtp(tmp_path / "source", case)
    source = open_checkpoint(tmp_path / "source")
    found = mtp_tensors(source, source.arch, BLOCKS)
    assert found is not None
    (tmp_path / "out").mkdir()
    without = replace(found, names={}, reason="for this test")
    write_format("compressed-tensors", tmp_path / "out", source, None, mtp=found if kept else without)
    assert has_mtp(open_checkpoint(tmp_path / "out")) is kept
    features_BND = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    projected = []
    for name in ("source", "out"):
        model = auto_class(case).from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        with torch.no_grad():
            projected.append(model.project_vision_features(features_BND, 4, 4))
    assert torch.equal(*projected)
