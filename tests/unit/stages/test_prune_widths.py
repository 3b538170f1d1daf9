"""Numbers of heads that stay, of published models."""

import pytest

from compress.errors import UsageError
from compress.models.arch import Arch
from compress.models.family import family_of
from compress.models.known import known_config
from compress.stages.prune.spec import Prune


def arch_of(name: str) -> Arch:
    config = known_config(name)
    assert config is not None
    return family_of(config).read_config(config)


def heads_left(name: str, **keys: object) -> int:
    spec = Prune.model_validate({"heads": {"keep": 0.75}, **keys})
    return spec.explicit_widths(spec.recast(arch_of(name))).num_heads


def test_a_llama_whose_heads_must_divide_its_hidden_size_is_told_of_the_key_that_lifts_this() -> None:
    name = "meta-llama/Llama-3.1-8B"
    with pytest.raises(
        UsageError, match=r"heads: keep 0.75 leaves all 32.* smaller legal number is 16"
    ) as refused:
        heads_left(name)
    assert "divide the hidden size of a llama model, 4096; with `as_mistral: true` any" in str(refused.value)
    assert heads_left(name, as_mistral=True) == 24


def test_where_heads_need_not_divide_the_hidden_size_nothing_is_said_of_it() -> None:
    assert heads_left("Qwen/Qwen3-8B") == 24
    with pytest.raises(UsageError, match=r"leaves all 32: nothing would go.*`multiple: 128`\.$"):
        Prune.model_validate({"heads": {"keep": 32}}).explicit_widths(arch_of("Qwen/Qwen3-8B"))
