"""CodeGen: the rows of the one tensor of queries, values and keys, older names of tensors, and counts of
parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compress.errors import UnsupportedArch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.weights import build_decoder, dense
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("Salesforce/codegen")])
def test_published_models_have_the_parameters_that_they_have_in_transformers(name: str) -> None:
    config = ROWS[name]["config"]
    with torch.device("meta"):
        model = transformers.CodeGenForCausalLM(transformers.CodeGenConfig(**config))
    num_params = sum(each.numel() for each in model.parameters())
    assert family_of(config).read_config(config).num_params == num_params


def test_rows_are_those_of_queries_values_and_keys_of_a_quarter_of_the_heads(tmp_path: Path) -> None:
    """Eight heads of 8 dimensions, of which 4 rotate, as pairs of neighbours on disk."""
    saved(tmp_path, *CASES["codegen"])
    source = Checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["transformer.h.1.attn.qkv_proj.weight"]
    quarters = stored.view(4, 3, 2, 8, 64)
    parts = dict(zip("qvk", quarters.permute(1, 0, 2, 3, 4).reshape(3, 8, 8, 64), strict=True))
    layer = source.layer(1)
    assert torch.equal(dense(layer["attn.v.weight"]), parts["v"].flatten(0, 1))
    halves = [0, 2, 4, 5, 1, 3, 6, 7]  # what rotates of each half of a head comes first
    for name in "qk":
        expected = parts[name][:, halves].flatten(0, 1)
        assert torch.equal(dense(layer[f"attn.{name}.weight"]), expected)


def test_heads_without_quarters_are_refused_where_a_config_is_written(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["codegen"])
    arch = Checkpoint(tmp_path).arch
    fewer = arch.replace(
        hidden_size=48, layers=tuple(replace(each, num_heads=6, num_kv_heads=6) for each in arch.layers)
    )
    with pytest.raises(UnsupportedArch, match="n_head = 6; it must be a multiple of 4"):
        family_of_arch(fewer).write_config(fewer)


def test_names_without_the_prefix_of_the_whole_and_masks_are_read_and_written_with_it(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["codegen"])
    plain = build_decoder(Checkpoint(tmp_path), dtype=torch.float32, device=CPU)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    older = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    older |= {f"h.{idx}.attn.causal_mask": torch.ones(1, 1, 64, 64).tril() for idx in range(3)}
    save_file(older, file, metadata={"format": "pt"})
    source = Checkpoint(tmp_path)
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    assert torch.equal(decoder(tokens(1, 8)), plain(tokens(1, 8)))
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", source)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
