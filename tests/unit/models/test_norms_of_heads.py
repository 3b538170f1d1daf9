"""Norms of q and k with a weight for each head (Command R+): one vector here, a matrix on disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.errors import UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.norms import Norm
from compress.models.weights import dense
from compress.stages.prune.spec import Prune
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved
from tests.support.tiny_source import tiny_shape, tiny_source


@pytest.mark.parametrize("centered", [True, False])
def test_each_head_is_normed_by_a_norm_of_its_own(centered: bool) -> None:
    x_TKC = torch.randn(5, 3, 8)
    norm = Norm(24, 1e-5, offset=1.0, centered=centered, heads=3)
    norm.weight.data = torch.randn(24)
    for head in range(3):
        own = Norm(8, 1e-5, offset=1.0, centered=centered)
        own.weight.data = norm.weight.data[8 * head : 8 * head + 8]
        torch.testing.assert_close(norm(x_TKC)[:, head], own(x_TKC[:, head]), rtol=0, atol=0)


def test_a_matrix_with_a_row_for_each_head_is_read_and_written_back(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["cohere-norms-of-heads"])
    source = Checkpoint(tmp_path)
    layer = source.arch.layers[0]
    stored = load_file(tmp_path / "model.safetensors")
    for name, num_heads in (("q_norm", layer.num_heads), ("k_norm", layer.num_kv_heads)):
        disk = stored[source.family.tensor(f"layers.0.attn.{name}.weight")]
        assert disk.shape == (num_heads, layer.head_dim)
        halves_KC = torch.cat((disk[:, ::2], disk[:, 1::2]), dim=1)  # neighbours rotate as a pair on disk
        assert torch.equal(dense(source.layer(0)[f"attn.{name}.weight"]), halves_KC.flatten())
    (tmp_path / "again").mkdir()
    write_checkpoint(tmp_path / "again", source)
    again = load_file(next((tmp_path / "again").glob("*.safetensors")))
    assert again.keys() == stored.keys()
    assert all(torch.equal(each, stored[name]) for name, each in again.items())


def test_a_model_of_the_family_without_them_is_read_as_before(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["cohere"])
    arch = Checkpoint(tmp_path).arch
    assert not arch.qk_norm
    assert not arch.own_qk_norm


def test_heads_with_norms_of_their_own_are_counted_stated_and_not_pruned() -> None:
    arch = tiny_source(qk_norm=True, own_qk_norm=True).arch
    shared = arch.replace(own_qk_norm=False)
    shape = arch.layers[0]
    more = (shape.num_heads + shape.num_kv_heads - 2) * shape.head_dim
    assert arch.num_params == shared.num_params + more * arch.num_layers
    assert Arch.from_json(*json.loads(json.dumps(arch.to_json()))) == arch
    with pytest.raises(UsageError, match="each head of q and k of this llama model has a norm of its own"):
        Prune.model_validate({"heads": {"keep": 2}, "multiple": 1}).check_model(arch)


@pytest.mark.parametrize("facts", [{"qk_norm": False}, {"qk_norm": True, "whole_qk_norm": True}])
def test_weights_for_each_head_are_those_of_norms_of_single_heads(facts: dict[str, bool]) -> None:
    with pytest.raises(UnsupportedArch, match="a weight for each head are those of single heads"):
        tiny_source(own_qk_norm=True, layers=(tiny_shape(),), **facts)
