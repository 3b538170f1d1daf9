"""Errors name the fields of a config as the config spells them, not as other families do."""

from typing import Any

import pytest

from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.family import family_of
from tests.golden.test_known_configs import ROWS


def config_of(family: str) -> dict[str, Any]:
    """Return the config of a published model of a family."""
    configs: list[dict[str, Any]] = [row["config"] for row in ROWS.values()]
    return next(each for each in configs if each["model_type"] == family)


def arch_of(family: str, **changes: Any) -> Arch:
    config = {**config_of(family), **changes}
    return family_of(config).read_config(config)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gptj", {"rotary_dim": 5}, r"has rotary_dim = 5; it must be even, a part of the \d+ dimensions"),
        ("gptj", {"rotary_dim": 1 << 20}, r"has rotary_dim = 1048576; it must be a whole number from 2 to"),
        ("gptj", {"n_embd": "wide"}, r"has n_embd = 'wide'"),
        ("gptj", {"n_positions": 0}, r"has n_positions = 0"),
        ("gptj", {"activation_function": "cosine"}, r"activation 'cosine'"),
        ("codegen", {"n_head": 10, "n_embd": 640}, r"has n_head = 10; it must be a multiple of 4"),
        ("codegen", {"rotary_dim": 66}, r"has rotary_dim = 66; it must be a whole number from 2 to 64"),
        ("minimax", {"rotary_dim": 3}, r"has rotary_dim = 3; it must be even"),
        ("minimax", {"rotary_dim": 4096}, r"has rotary_dim = 4096; it must be a whole number from 2 to"),
        ("minimax_m2", {"rotary_dim": 3, "partial_rotary_factor": None}, r"has rotary_dim = 3; it must be"),
        ("mamba2", {"head_dim": 7}, r"has head_dim = 7; it must be \d+ / \d+"),
        ("mamba2", {"num_heads": 7}, r"has num_heads = 7; it must be a divisor of"),
        ("mamba2", {"state_size": 0}, r"has state_size = 0"),
        ("gpt2", {"n_head": 0}, r"has n_head = 0"),
        ("gpt2", {"n_layer": None}, r"has no field 'n_layer'"),
    ],
    ids=str,
)
def test_a_refused_field_has_the_name_that_it_has_in_the_config(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArch, match=message):
        arch_of(family, **changes)


def test_a_name_of_both_is_the_one_that_is_read() -> None:
    """`head_dim` of Nemotron-H has another name in some configs, which is read where it is there."""
    config = {name: value for name, value in config_of("nemotron_h").items() if "head_dim" not in name}
    for name in ("attention_head_dim", "head_dim"):
        with pytest.raises(UnsupportedArch, match=rf"has {name} = 0"):
            family_of(config).read_config({**config, name: 0})


@pytest.mark.parametrize("rotary_dim", [30, 44])
def test_any_even_number_of_dimensions_rotates(rotary_dim: int) -> None:
    """44 times the quotient 30 / 44 is less than 30 in floating point."""
    sizes = {"n_embd": 88, "n_head": 2, "rotary_dim": rotary_dim}
    (rope,) = {layer.rope for layer in arch_of("gptj", **sizes).layers}
    assert rope is not None
    assert (rope.rotary_dim or 44) == rotary_dim
