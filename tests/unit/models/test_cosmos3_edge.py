"""Cosmos 3 Edge: the tensors of the generator next to those of the reasoner, and names of tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.errors import UnsupportedArch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.weights import build_decoder
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import auto_class, build_config, saved, tokens

CPU = torch.device("cpu")
OUTSIDE = ("action_modality_embed", "action_proj_in.fc.weight", "time_embedder.linear_1.weight")
IN_A_LAYER = (
    *("input_layernorm_moe_gen.weight", "post_attention_layernorm_moe_gen.weight"),
    *("mlp_moe_gen.up_proj.weight", "mlp_moe_gen.down_proj.weight", "self_attn.add_q_proj.weight"),
    *("self_attn.add_k_proj.weight", "self_attn.add_v_proj.weight", "self_attn.to_add_out.weight"),
    *("self_attn.norm_added_q.weight", "self_attn.norm_added_k.weight"),
    "self_attn.k_norm_und_for_gen.weight",
)
MORE = (*OUTSIDE, "proj_in.weight", "proj_out.bias", "norm_moe_gen.weight")


def with_generator(directory: Path) -> dict[str, Tensor]:
    """Add tensors of a generator to a tiny model, as they are in the published checkpoint, and return all."""
    file = directory / "model.safetensors"
    names = [*MORE, *(f"layers.{idx}.{each}" for idx in range(3) for each in IN_A_LAYER)]
    tensors = load_file(file) | {name: torch.full((2, 2), float(at)) for at, name in enumerate(names)}
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def test_tensors_of_the_generator_stay_as_they_are(tmp_path: Path) -> None:
    model = saved(tmp_path / "source", *CASES["cosmos3_edge"])
    tensors = with_generator(tmp_path / "source")
    source = Checkpoint(tmp_path / "source")
    tokens_BS = tokens(2, 12)
    with torch.no_grad():
        expected = model(tokens_BS, use_cache=False).logits
    logits = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    ours = load_file(tmp_path / "written" / "model.safetensors")
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)
    theirs = (
        auto_class("cosmos3_edge").from_pretrained(tmp_path / "written", attn_implementation="eager").eval()
    )
    with torch.no_grad():
        assert torch.equal(theirs(tokens_BS, use_cache=False).logits, expected)


def test_modules_by_their_names_in_memory_are_read_and_written_as_published(tmp_path: Path) -> None:
    model = saved(tmp_path / "source", *CASES["cosmos3_edge"])
    published = load_file(tmp_path / "source" / "model.safetensors")
    in_memory = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert in_memory.keys() != published.keys()
    save_file(in_memory, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(tmp_path / "source"))
    ours = load_file(tmp_path / "written" / "model.safetensors")
    of_text = {name for name in published if not name.startswith("model.")}
    assert {name for name in ours if not name.startswith("model.")} == of_text
    assert all(torch.equal(ours[name], published[name]) for name in of_text)


def test_the_published_model_has_the_parameters_that_it_has_in_transformers() -> None:
    config = ROWS["nvidia/Cosmos3-Edge"]["config"]
    with torch.device("meta"):
        model = auto_class("cosmos3_edge").from_config(transformers.Cosmos3EdgeConfig(**config))
    of_text = sum(
        each.numel()
        for name, each in model.named_parameters()
        if not name.startswith(("model.visual", "model.projector"))
    )
    assert family_of(config).read_config(config).num_params == of_text


def test_a_tied_head_is_refused() -> None:
    """Its class ties none."""
    config: dict[str, Any] = build_config(*CASES["cosmos3_edge"]).to_dict()
    with pytest.raises(UnsupportedArch, match="tie_word_embeddings"):
        family_of(config).read_config({**config, "tie_word_embeddings": True})
