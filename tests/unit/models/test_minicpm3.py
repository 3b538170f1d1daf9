"""MiniCPM3: a factor that depends on the number of layers, and fields that a config leaves out."""

from typing import Any

import pytest

from compress.errors import UnsupportedArch
from compress.models.family import family_of

CONFIG: dict[str, Any] = {
    "model_type": "minicpm3",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
}


def test_what_a_half_layer_adds_stays_in_a_model_with_fewer_layers() -> None:
    family = family_of(CONFIG)
    arch = family.read_config(CONFIG)
    assert arch.residual_scale == 1.4 / 2
    written = family.write_config(arch.replace(layers=arch.layers[:3]))
    assert written["num_hidden_layers"] == 3
    assert family.read_config(written).residual_scale == pytest.approx(0.7, rel=1e-12)
    assert "scale_depth" not in family.write_config(arch)


def test_a_null_leaves_a_factor_out_and_derives_the_width_of_a_value() -> None:
    nulls = dict.fromkeys(("scale_depth", "dim_model_base", "v_head_dim"))
    family = family_of(CONFIG)
    arch = family.read_config({**CONFIG, **nulls})
    assert (arch.residual_scale, arch.logit_scale) == (1.0, 1.0)
    assert arch.layers[0].value_dim == 8
    shorter = family.write_config(arch.replace(layers=arch.layers[:1]))
    assert family.read_config(shorter).residual_scale == 1.0


def test_code_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="auto_map"):
        family_of(CONFIG).read_config({**CONFIG, "auto_map": {"AutoModel": "modeling_other.OtherModel"}})
