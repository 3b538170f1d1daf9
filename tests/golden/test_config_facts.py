"""The facts about config fields that ship with the package are those of the pinned `transformers`."""

import json
import re
from pathlib import Path

import pytest
import transformers

from compress.models.config_facts import FACTS_FILE, facts_of
from compress.models.family import FAMILIES
from scripts.config_defaults import document, reads_of
from tests.support.tiny_families import ATTENTION_FREE, TEXT_FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_facts_that_ship_are_those_of_the_pinned_transformers() -> None:
    shipped = json.loads(FACTS_FILE.read_text(encoding="utf-8"))
    pinned = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert shipped["transformers"] == transformers.__version__ == pinned[1]
    assert shipped == json.loads(json.dumps(document())), "run python -m scripts.config_defaults"


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_what_decides_the_function_is_among_the_names_that_are_read(family: str) -> None:
    reads = facts_of(family).reads
    assert reads is not None
    everywhere = {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *(
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "tie_word_embeddings",
            "vocab_size",
        ),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "is_causal"),
        *("original_max_position_embeddings", "sliding_window", "layer_types", "attention_chunk_size"),
    }
    spelled = FAMILIES.get(family).spelled
    if family in ("gpt_oss", "lfm2", "lfm2_moe", "lfm3"):
        everywhere -= {"hidden_act"}  # their gates are written out
    if family in ("olmo", "opt", "biogpt", "xglm"):
        everywhere -= {"rms_norm_eps"}  # a constant of their classes
    if family in ("gpt_neox", "gpt_neox_japanese", "gpt_neo", "persimmon", "biogpt", "deepseek_v4"):
        everywhere -= {"num_key_value_heads"}  # as many as heads of queries, or one
    if family in ("opt", "xglm", "gpt2", "gpt_bigcode", "gptj", "codegen"):
        everywhere -= {"intermediate_size", "num_key_value_heads"}  # by another name; as many as of queries
    if family == "longcat_flash":
        everywhere -= {"intermediate_size", "num_hidden_layers"}  # its class reads both by standard names
    if family in ("gpt2", "gpt_bigcode", "gptj", "codegen"):
        everywhere -= {"num_attention_heads"}  # they read `n_head` by its standard name
    if family in ("bloom", "mpt"):  # they have one width and activation, and read sizes by standard names
        everywhere -= {"hidden_act", "intermediate_size", "num_key_value_heads"}
        spelled = {"rms_norm_eps": "layer_norm_epsilon"}
    if family == "falcon":
        everywhere -= {
            "head_dim",
            "intermediate_size",
            "num_key_value_heads",
        }  # it has others, or derives them
    if family == "openai-gpt":  # it has a width and activations of its own, and builds its mask itself
        everywhere -= {"intermediate_size", "num_key_value_heads", "hidden_act"}
        everywhere -= {"is_causal", "attention_chunk_size"}
    if family == "gpt_neox_japanese":
        everywhere -= {"intermediate_size"}  # a multiple of the hidden size
    if family == "dbrx":  # it has other names in mappings of its own, and a constant
        everywhere -= {"rms_norm_eps", "hidden_act", "intermediate_size", "num_key_value_heads"}
    if family == "gemma4_unified_text":
        everywhere -= {"num_key_value_heads"}  # its class reads it from the config of each layer
    if family in ATTENTION_FREE:
        of_mixers = {"hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"}
        everywhere = {*of_mixers, "tie_word_embeddings", "vocab_size", *(spelled.keys() - {"mamba_d_ssm"})}
    assert {spelled.get(name, name) for name in everywhere} <= reads
    of_bloom = {"pretraining_tp"} if family == "bloom" else set()
    assert not (reads - of_bloom) & {"pretraining_tp", "use_mrope", "is_llama_config", "unsloth_fixed"}


def test_reads_of_every_form_are_found() -> None:
    source = """
    def forward(self, config, **kwargs):
        a = self.config.plain + config.passed
        b = getattr(config, "optional", None) or getattr(self.config, "flag", True)
        c = hasattr(self.config, "asked")
        d = kwargs.pop("popped", 1), kwargs.get("got")
        if "named" in kwargs:
            config.written = 1
        return config.called(config.argument), self.mine, other.not_config
    """
    found = reads_of([source])
    assert found.attributes == {"plain", "passed", "popped", "got", "named", "argument"}
    assert found.optional.keys() == {"optional", "flag", "asked"}
    assert (found.optional["optional"], found.optional["flag"]) == ([None], [True])
    assert "mine" in reads_of([source], self_is_config=True).attributes
