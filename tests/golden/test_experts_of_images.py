"""ERNIE 4.5 VL: layers hold experts of text, which are compressed, and experts of images, which stay."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.cli.app import main
from compress.errors import UnsupportedFormat, UsageError
from compress.export import FORMATS, open_checkpoint
from compress.export.format_writer import write_format
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.decoder import DecoderLayer
from compress.models.expert_pruning import with_experts
from compress.models.pruning import why_layers_stay
from compress.models.random_source import RandomSource
from compress.models.weights import build_decoder, dense
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from tests.golden.test_wrappers import tensors_of
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens
from tests.support.wrappers import Rounded, wide

CASE = "ernie4_5_vl_moe"
CPU = torch.device("cpu")
BIASES = "model.layers.1.mlp.moe_statics.e_score_correction_bias"


def of_images(name: str) -> bool:
    """Return whether a tensor of a tiny model with six experts of each kind is of images, at least partly."""
    _, named, expert = name.partition(".mlp.experts.")
    if named:
        return int(expert.partition(".")[0]) >= 6
    return (
        ".mlp.gate.weight_1" in name or ".moe_statics." in name or ".vision_" in name or ".resampler_" in name
    )


@pytest.mark.parametrize(
    ("form", "scheme"), [("compressed-tensors", "W4A16_G128"), ("gptq", "W4A16_G128"), ("fp8", "FP8_BLOCK")]
)
def test_codes_of_text_are_read_again_and_experts_of_images_stay_as_they_are(
    form: str, scheme: str, tmp_path: Path
) -> None:
    wide(CASE, tmp_path / "model")
    source = Checkpoint(tmp_path / "model")
    coded = Rounded(source, ModelScheme(SCHEMES[scheme]))
    (tmp_path / "out").mkdir()
    write_format(form, tmp_path / "out", coded, ModelScheme(SCHEMES[scheme]))
    before, after = tensors_of(tmp_path / "model"), tensors_of(tmp_path / "out")
    stays = [name for name in before if of_images(name)]
    assert {name for name in after if of_images(name)} == {*stays}
    assert all(torch.equal(before[name], after[name]) for name in stays)
    assert "model.layers.1.mlp.experts.0.down_proj.weight" not in {*after} or form == "fp8"
    opened = open_checkpoint(tmp_path / "out")
    for idx in range(opened.arch.num_layers):
        ours, theirs = opened.layer(idx), coded.layer(idx)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(dense(ours[name]).float(), dense(theirs[name]).float()) for name in theirs)
    consumers = FORMATS.get(form).consumers(source.arch, ModelScheme(SCHEMES[scheme]))
    assert not any(each.loads for each in consumers if each.name in ("transformers", "vLLM"))


def test_routers_and_biases_of_images_change_nothing_for_text(tmp_path: Path) -> None:
    saved(tmp_path / "model", *CASES[CASE])
    logits = [build_decoder(Checkpoint(tmp_path / "model"), dtype=torch.float32, device=CPU)(tokens(2, 12))]
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    for name in filter(of_images, tensors):
        tensors[name] = tensors[name].clone()
        (tensors[name][1:] if name.endswith("e_score_correction_bias") else tensors[name]).zero_()
    save_file(tensors, file)
    logits.append(
        build_decoder(Checkpoint(tmp_path / "model"), dtype=torch.float32, device=CPU)(tokens(2, 12))
    )
    assert torch.equal(*logits)
    tensors[BIASES][0] += 1000 * torch.arange(6)
    save_file(tensors, file)
    other = build_decoder(Checkpoint(tmp_path / "model"), dtype=torch.float32, device=CPU)(tokens(2, 12))
    assert not torch.allclose(other, logits[0], atol=1e-3)


class OtherBiases(Rounded):
    """A source with other biases of the choice of experts than its matrix has."""

    def layer(self, layer_idx: int) -> Any:
        weights = self._source.layer(layer_idx)
        biases = {name: dense(each) + 1 for name, each in weights.items() if name == "moe.selection_bias"}
        return {**weights, **biases}


def test_a_first_row_that_is_not_that_of_the_matrix_is_not_written(tmp_path: Path) -> None:
    saved(tmp_path / "model", *CASES[CASE])
    source = Checkpoint(tmp_path / "model")
    random = RandomSource(source.arch, device=CPU, dtype=torch.float32)
    sources: list[Any] = [OtherBiases(source, ModelScheme(SCHEMES["W8A16"])), random]
    for each in sources:
        with pytest.raises(UnsupportedFormat, match="first row"):
            write_checkpoint(tmp_path, each)


def test_no_scale_is_moved_into_what_experts_of_images_read(tmp_path: Path) -> None:
    saved(tmp_path, *CASES[CASE])
    arch = Checkpoint(tmp_path).arch
    with torch.device("meta"):
        dense_layer, *others = [DecoderLayer(arch, idx).smoothing_pairs() for idx in range(arch.num_layers)]
    assert "ffn_norm" in {pair.producer for pair in dense_layer}
    assert all(
        "norm" not in pair.producer or pair.producer == "attn_norm" for each in others for pair in each
    )


def test_neither_experts_nor_layers_are_removed(tmp_path: Path) -> None:
    saved(tmp_path, *CASES[CASE])
    arch = Checkpoint(tmp_path).arch
    with pytest.raises(UsageError, match="as many experts as its text"):
        with_experts(arch, 4)
    assert why_layers_stay(arch) is not None


def test_a_run_carries_what_is_of_images_through_its_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wide(CASE, tmp_path / "model")
    quantize = {"kind": "quantize", "scheme": "W8A16", "round": {"kind": "rtn"}}
    stages: list[dict[str, Any]] = [quantize, {"kind": "export", "formats": ["compressed-tensors"]}]
    (tmp_path / "recipe.yaml").write_text(json.dumps({"version": 1, "model": "./model", "stages": stages}))
    code = main(["run", "recipe.yaml", "--offline", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err + out
    (found,) = {
        file.parent for file in tmp_path.rglob("compress.json") if (file.parent / "config.json").exists()
    }
    before, after = tensors_of(tmp_path / "model"), tensors_of(found)
    stays = {name for name in before if of_images(name)}
    assert all(torch.equal(before[name], after[name]) for name in stays)
    decoders = [
        build_decoder(source, dtype=torch.float32, device=CPU)
        for source in (open_checkpoint(found), Checkpoint(tmp_path / "model"))
    ]
    with torch.no_grad():
        ours, exact = (decoder(tokens(2, 12)) for decoder in decoders)
    error_S = (ours - exact).square().mean(-1).median()
    assert error_S.sqrt() < 0.1 * exact.square().mean().sqrt()
