"""The growth of Ministral 3's queries stands twice in the config of an export: where `transformers` reads it
and where vLLM does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import UnsupportedArch
from compress.export import open_checkpoint
from compress.export.format_writer import write_format
from compress.models.config_file import read_config
from compress.models.family import family_of
from compress.models.random_source import RandomSource
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import SCHEMES

CONFIG: dict[str, Any] = {
    "model_type": "ministral3",
    "dtype": "bfloat16",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1,
    },
}
RESTATED = {"original_max_position_embeddings": 16, "beta": 0.1}


def export(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    scheme = SCHEMES["FP8_DYNAMIC"]
    arch = family_of(config).read_config(config)
    source = RandomSource(arch, device=torch.device("cpu"), dtype=torch.bfloat16, scheme=scheme)
    write_format("compressed-tensors", directory, source, ModelScheme(scheme))
    assert open_checkpoint(directory).arch.replace(config={}) == arch.replace(config={})
    return read_config(directory)


def test_an_export_states_the_growth_in_both_places(tmp_path: Path) -> None:
    written = export(tmp_path, CONFIG)
    assert written["llama_4_scaling"] == RESTATED
    assert written["rope_parameters"] == CONFIG["rope_parameters"]
    assert family_of(CONFIG).unread_fields(written) == family_of(CONFIG).unread_fields(CONFIG)


def test_a_wrapper_states_it_in_its_text_config(tmp_path: Path) -> None:
    written = export(tmp_path, {"model_type": "mistral3", "dtype": "bfloat16", "text_config": CONFIG})
    assert written["text_config"]["llama_4_scaling"] == RESTATED
    assert "llama_4_scaling" not in written


def test_queries_that_do_not_grow_need_no_field(tmp_path: Path) -> None:
    mistral = {**CONFIG, "model_type": "mistral", "rope_parameters": {"rope_theta": 1e6}}
    assert "llama_4_scaling" not in export(tmp_path, mistral)


@pytest.mark.parametrize("other", [{"beta": 0.2}, {"original_max_position_embeddings": 32}])
def test_a_config_that_contradicts_itself_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArch, match=r"llama_4_scaling .*as in rope_parameters"):
        family_of(CONFIG).read_config({**CONFIG, "llama_4_scaling": RESTATED | other})
