"""XGLM: sinusoidal positions, which are computed wherever the input of the first layer is, and counts of
parameters."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from compress.errors import StorageError, UnsupportedArch
from compress.models.arch import Arch
from compress.models.checkpoint import Checkpoint
from compress.models.checkpoint_writer import write_checkpoint
from compress.models.family import family_of
from compress.models.sinusoids import sinusoid_table, sinusoids
from compress.models.weights import POSITIONS, build_decoder, embedding_tables
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved, tokens
from tests.support.tiny_source import tiny_source

CPU = torch.device("cpu")
PUBLISHED = [name for name, row in ROWS.items() if row["config"]["model_type"] == "xglm"]
STORED = "model.embed_positions.weights"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_they_have_in_transformers(name: str) -> None:
    config = ROWS[name]["config"]
    with torch.device("meta"):
        model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**config))
    num_params = sum(each.numel() for each in model.parameters())
    assert family_of(config).read_config(config).num_params == num_params


@pytest.mark.parametrize("hidden_size", [4, 48, 1024])
def test_sinusoids_are_those_of_transformers_to_the_last_bit(hidden_size: int) -> None:
    arch = tiny_source(position_offset=2, sinusoidal_positions=True).arch
    arch = arch.replace(hidden_size=hidden_size, max_position=2048)
    theirs = XGLMSinusoidalPositionalEmbedding(arch.max_position, hidden_size, padding_idx=1)
    assert torch.equal(sinusoid_table(arch), theirs.weights[2:])
    some = torch.tensor([[7, 0], [2047, 3]])
    assert torch.equal(sinusoids(arch, some), theirs.weights[some + 2])


def test_calibration_adds_them_as_the_decoder_does(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["xglm"])
    source = Checkpoint(tmp_path)
    assert POSITIONS not in source.outer()
    decoder = build_decoder(source, dtype=torch.float32, device=CPU)
    tokens_BS = tokens(2, 9)
    expected = decoder.embed(tokens_BS) + decoder.positions(torch.arange(9))
    assert torch.equal(embedding_tables(source.outer()).embedded(source.arch, tokens_BS), expected)


def test_a_stored_table_of_older_programs_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, *CASES["xglm"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert STORED not in tensors
    save_file({**tensors, STORED: torch.zeros(514, 48)}, file, metadata={"format": "pt"})
    (tmp_path / "written").mkdir()
    write_checkpoint(tmp_path / "written", Checkpoint(tmp_path))
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_a_padding_token_in_the_row_of_a_position_is_refused() -> None:
    """The class of this family writes zeros to that row."""
    config = build_config(*CASES["xglm"]).to_dict()
    family_of(config).read_config({**config, "pad_token_id": 1})
    with pytest.raises(UnsupportedArch, match="pad_token_id = 2; it must be 0 or 1"):
        family_of(config).read_config({**config, "pad_token_id": 2})


def test_sinusoids_need_halves_of_the_hidden_size_and_a_first_row() -> None:
    arch = tiny_source(position_offset=0, sinusoidal_positions=True).arch
    for changes in ({"hidden_size": 49}, {"hidden_size": 2}, {"position_offset": None}):
        with pytest.raises(UnsupportedArch, match="positions are sinusoidal"):
            arch.replace(**changes)


def test_a_manifest_has_the_fact_where_it_holds() -> None:
    arch = tiny_source(position_offset=2, sinusoidal_positions=True).arch
    facts, layers = arch.to_json()
    assert Arch.from_json(facts, layers) == arch
    assert "sinusoidal_positions" not in tiny_source().arch.to_json()[0]
    with pytest.raises(StorageError, match="sinusoidal_positions"):
        Arch.from_json({**facts, "sinusoidal_positions": 1}, layers)
