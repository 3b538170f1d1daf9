"""BioGPT: the factor of embeddings, the eps of norms, and counts of parameters."""

from pathlib import Path

import pytest
import torch
import transformers

from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of, family_of_arch
from compress.models.weights import POSITIONS, dense
from tests.golden.test_known_configs import ROWS
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import saved

PUBLISHED = [name for name, row in ROWS.items() if row["config"]["model_type"] == "biogpt"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_they_have_in_transformers(name: str) -> None:
    config = ROWS[name]["config"]
    with torch.device("meta"):
        model = transformers.BioGptForCausalLM(transformers.BioGptConfig(**config))
    num_params = sum(each.numel() for each in model.parameters())
    assert family_of(config).read_config(config).num_params == num_params


def test_the_eps_of_norms_is_that_of_its_class_and_not_the_one_that_configs_state() -> None:
    config = ROWS["microsoft/biogpt"]["config"]
    assert config["layer_norm_eps"] == 1e-12
    assert family_of(config).read_config(config).norm_eps == torch.nn.LayerNorm(1).eps


def test_embeddings_have_the_root_of_the_hidden_size_for_a_factor_if_they_are_scaled() -> None:
    config = ROWS["microsoft/biogpt"]["config"]
    assert family_of(config).read_config(config).embed_scale == 32
    assert family_of(config).read_config({**config, "scale_embedding": False}).embed_scale == 1


def test_the_table_has_two_rows_before_the_first_position(tmp_path: Path) -> None:
    model = saved(tmp_path, *CASES["biogpt"])
    source = Checkpoint(tmp_path)
    table_PD = dense(source.outer()[POSITIONS])
    assert torch.equal(table_PD, model.biogpt.embed_positions.weight)
    assert len(table_PD) == source.arch.max_position + 2
    written = family_of_arch(source.arch).write_config(source.arch)
    assert family_of(written).read_config(written).replace(config={}) == source.arch.replace(config={})
