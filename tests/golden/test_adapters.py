"""Phi-4-multimodal as it was published: linears are bases of adapters, which stay untouched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.calibrate.layer_state import LayerState
from compress.cli.app import main
from compress.distill.norm_weights import NormInTraining, train_norms_
from compress.errors import UnsupportedArch, UsageError
from compress.export import FORMATS, open_checkpoint
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.config_notes import unread_note
from compress.models.family import family_of, family_of_arch
from compress.models.pruning import why_heads_stay, why_layers_stay
from compress.models.weights import build_decoder
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES
from compress.stages.prune.spec import Prune
from tests.golden.test_families import assert_same_tensors, tensors_of, tolerance
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens
from tests.support.wrappers import WIDE

LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
CODE = {
    "AutoConfig": "configuration_phi4mm.Phi4MMConfig",
    "AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM",
}


def published(directory: Path, case: str, **changes: Any) -> Any:
    """Save a tiny model in the form that Microsoft published, and return that of `transformers`."""
    family, of_case = CASES[case]
    model = saved(directory, family, {**of_case, **changes}, dtype=changes.pop("dtype", torch.float32))
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".layers." not in name or "extend" in name or not module.endswith(LINEARS):
            tensors[name] = tensor
            continue
        tensors[f"{module}.base_layer.weight"] = tensor
        for part in ("vision", "speech"):
            for side, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                adapter = torch.randn(shape, generator=generator).to(tensor.dtype)
                tensors[f"{module}.lora_{side}.{part}.weight"] = adapter
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    around = {name: config.pop(name) for name in ("vision_config", "audio_config")}
    config |= {"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "auto_map": CODE}
    config |= {"embd_layer": around, "vision_lora": {"r": 4}, "speech_lora": {"r": 4}}
    config |= {"audio_processor": {"name": "cascades"}, "img_processor": None, "attention_bias": False}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("case", ["phi4_multimodal", "phi4_multimodal-longrope"])
def test_text_is_that_of_the_bases_and_every_tensor_is_written_as_it_was(case: str, tmp_path: Path) -> None:
    model = published(tmp_path / "model", case)
    source = Checkpoint(tmp_path / "model")
    decoder = build_decoder(source, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        expected = model(tokens(2, 24)).logits
        assert (decoder(tokens(2, 24)) - expected).abs().max() <= tolerance(expected)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    assert_same_tensors(tmp_path / "written", tmp_path / "model")
    written = json.loads((tmp_path / "written/config.json").read_text())
    assert family_of(written).read_config(written).replace(config={}) == source.arch.replace(config={})
    assert written["auto_map"] == CODE
    assert unread_note(source.arch) is None


def test_a_run_leaves_the_adapters_and_what_they_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "model", "phi4_multimodal", **WIDE, dtype=torch.bfloat16)
    quantize = {"kind": "quantize", "scheme": "W4A16_G128", "round": {"kind": "rtn"}}
    stages: list[dict[str, Any]] = [quantize, {"kind": "export", "formats": ["compressed-tensors"]}]
    (tmp_path / "recipe.yaml").write_text(json.dumps({"version": 1, "model": "./model", "stages": stages}))
    code = main(["run", "recipe.yaml", "--offline", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err + out
    (found,) = {
        file.parent for file in tmp_path.rglob("compress.json") if (file.parent / "config.json").exists()
    }
    before, after = tensors_of(tmp_path / "model"), tensors_of(found)
    codes = {name for name in before if name.endswith(".base_layer.weight")}
    assert codes
    assert not codes & after.keys()
    assert all(f"{name}_packed" in after for name in codes)
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - codes)
    opened = open_checkpoint(found)
    assert len(opened.schemes) == 7 * opened.arch.num_layers
    consumers = FORMATS.get("compressed-tensors").consumers(opened.arch, ModelScheme(SCHEMES["W4A16_G128"]))
    assert {each.name for each in consumers if each.loads} == {"compress runtime"}


@pytest.mark.parametrize("save", [published, lambda path, case: saved(path, *CASES[case])])
def test_nothing_moves_into_what_adapters_read_and_nothing_is_removed(save: Any, tmp_path: Path) -> None:
    save(tmp_path, "phi4_multimodal")
    arch = Checkpoint(tmp_path).arch
    state = LayerState.start(arch, 0, {}, None)  # type: ignore[arg-type]
    assert state.pairs == []
    assert why_layers_stay(arch) is not None
    assert "adapters" in str(why_heads_stay(arch))
    with pytest.raises(UsageError, match=r"ffn: linears of this phi4.* model have adapters"):
        Prune.model_validate({"ffn": {"keep": 0.5}}).check_model(arch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_map", {"AutoConfig": "other.OtherConfig"}),
        ("attention_bias", True),
    ],
)
def test_what_another_program_would_compute_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    published(tmp_path, "phi4_multimodal")
    config = json.loads((tmp_path / "config.json").read_text()) | {name: value}
    with pytest.raises(UnsupportedArch, match=name):
        family_of(config).read_config(config)


@pytest.mark.parametrize(("case", "left"), [("phi4_multimodal", 0), ("ernie4_5_vl_moe", 1), ("phi3", 2)])
def test_norms_that_untouched_parts_read_are_not_trained(case: str, left: int, tmp_path: Path) -> None:
    """Of the two norms of a layer, as many are trained as no adapter and no expert of images reads."""
    saved(tmp_path, *CASES[case])
    decoder = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    train_norms_(decoder, pace=1.0, left=family_of_arch(decoder.arch).shared_norms)
    layer = decoder.layers[0]
    trained = [isinstance(norm, NormInTraining) for norm in (layer.attn_norm, layer.ffn_norm)]
    assert sum(trained) == left
    assert isinstance(decoder.norm, NormInTraining)
