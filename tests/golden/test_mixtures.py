"""Checkpoints of mixtures of experts in the layouts that the hub and `transformers` have."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compress.models.checkpoint import Checkpoint, read_config, write_checkpoint
from compress.models.moe import best
from compress.models.weights import build_decoder
from compress.quant.mxfp4 import MAX_SCALE, VALUES, from_mxfp4
from tests.golden.test_families import assert_same_tensors, tensors_of, tolerance
from tests.support.tiny_hf import CASES, build, saved, tokens

CPU = torch.device("cpu")
IN_MEMORY = ("mixtral", "qwen2-moe-some-dense", "qwen3-moe", "olmoe", "glm4-moe", "granitemoe")


@pytest.mark.parametrize("case", IN_MEMORY)
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
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", in_one)
    assert_same_tensors(tmp_path / "written", tmp_path / "in-one")


def test_mxfp4_blocks_are_read_as_the_numbers_that_transformers_makes_of_them(tmp_path: Path) -> None:
    family, changes = CASES["gpt-oss"]
    changes = {**changes, "hidden_size": 64, "intermediate_size": 96}
    model = saved(tmp_path, family, changes, dtype=torch.bfloat16)
    tensors = {name: tensor for name, tensor in tensors_of(tmp_path).items()}
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
    scales = torch.arange(MAX_SCALE + 1, dtype=torch.uint8).unsqueeze(1)
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
