"""Linears are found by names and shapes as their architectures have them, and patterns change the choice."""

from typing import Any

import pytest
import torch

from compress.artifact.header import TensorHeader
from compress.errors import UnsupportedFormat, UsageError
from compress.export.config_groups import matches_module
from compress.models.named_linears import (
    Choice,
    choose_linears,
    other_matrices,
    stated_vocab_size,
    targets,
    template,
)


def header(name: str, *shape: int, dtype: str = "BF16") -> TensorHeader:
    return TensorHeader(name, dtype, shape, 0, 0)


def choose(*headers: TensorHeader, **how: Any) -> dict[str, Choice]:
    return {each.module: each for each in choose_linears(headers, **{"vocab_size": 512, **how})}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (128, 128)),
        ("model.layers.3.mlp.gate_proj.weight", (256, 128)),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (256, 128)),
        ("gpt_neox.layers.0.attention.query_key_value.weight", (384, 128)),
        ("bert.encoder.layer.0.attention.output.dense.weight", (128, 128)),
        ("bert.encoder.layer.0.output.dense.weight", (128, 256)),
        ("model.decoder.project_in.weight", (128, 64)),
        ("backbone.layers.0.mixer.in_proj.weight", (512, 128)),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", (256, 128)),
        ("model.layers.0.mlp.up.weight", (512, 128)),  # as many rows as words, in a layer
        ("model.layers.0.mlp.gate.weight", (512, 128)),  # a gate with more rows than columns is no router
    ],
)
def test_a_linear_is_quantized(name: str, shape: tuple[int, ...]) -> None:
    (choice,) = choose(header(name, *shape)).values()
    assert choice.reason is None
    assert (choice.tensor, choice.matrix) == (name, shape)
    assert choice.size_bytes == 2 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.embed_tokens.weight", (512, 128), "embedding"),
        ("transformer.wte.weight", (512, 128), "embedding"),
        ("emb.weight", (512, 128), "embedding"),
        ("shared.weight", (512, 128), "embedding"),
        ("backbone.embeddings.weight", (512, 128), "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (64, 64), "embedding"),
        ("lm_head.weight", (512, 128), "head"),
        ("embed_out.weight", (512, 128), "head"),
        ("proj_to_words.weight", (512, 128), "head"),
        ("classifier.weight", (48, 128), "head"),
        ("cls.predictions.transform.dense.weight", (128, 128), "head"),
        ("model.layers.0.mlp.gate.weight", (64, 128), "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 128), "router"),
        ("encoder.layers.0.router.classifier.weight", (64, 128), "router"),
        ("model.layers.0.input_layernorm.weight", (64, 64), "norm"),
        ("h.0.ln_1.weight", (64, 64), "norm"),
        ("backbone.layers.0.mixer.conv1d.weight", (256, 1, 4), "convolution"),
        ("model.layers.0.mlp.experts.weight", (8, 64, 64), "more than two dimensions"),
        ("backbone.layers.0.mixer.dt_proj.weight", (256, 64), "step sizes"),
        ("model.layers.0.q_proj.lora_A.weight", (64, 128), "adapter"),
        ("model.layers.0.tiny.weight", (16, 128), "fewer than 32"),
        ("model.layers.0.tiny.weight", (128, 16), "fewer than 32"),
    ],
)
def test_other_matrices_stay_dense(name: str, shape: tuple[int, ...], reason: str) -> None:
    (choice,) = choose(header(name, *shape)).values()
    assert choice.reason is not None
    assert reason in choice.reason


def test_vectors_and_parameters_are_no_choice_and_dtypes_decide() -> None:
    headers = [
        header("model.norm.weight", 128),
        header("model.layers.0.experts.gate_up_proj", 8, 128, 256),
        header("model.layers.0.wide.weight", 64, 64, dtype="F64"),
    ]
    assert {name: each.reason for name, each in choose(*headers).items()} == {
        "model.layers.0.wide": "dtype F64"
    }
    assert [each.name for each in other_matrices(headers)] == ["model.layers.0.experts.gate_up_proj"]


STACK = "model.layers.3.mlp.experts"


@pytest.mark.parametrize(
    ("gate_up", "down", "transposed"),
    [
        ((2, 128, 96), (2, 96, 64), False),
        ((2, 96, 128), (2, 64, 96), True),
        ((2, 128, 128), (2, 128, 64), False),  # as wide as gate and up together
        ((2, 128, 128), (2, 64, 128), True),
        ((2, 128, 64), (2, 64, 64), False),  # as wide as an expert
        ((2, 64, 128), (2, 64, 64), True),
    ],
)
def test_experts_in_stacks_are_linears_each(
    gate_up: tuple[int, ...], down: tuple[int, ...], transposed: bool
) -> None:
    headers = [header(f"{STACK}.gate_up_proj", *gate_up), header(f"{STACK}.down_proj", *down)]
    chosen = choose(*headers)
    hidden, ffn = down[:0:-1] if transposed else down[1:]
    assert {module.removeprefix(STACK): each.matrix for module, each in chosen.items()} == {
        f".{expert}.{linear}": (hidden, ffn) if linear == "down_proj" else (ffn, hidden)
        for expert in range(2)
        for linear in ("gate_proj", "up_proj", "down_proj")
    }
    assert all(each.reason is None for each in chosen.values())
    assert other_matrices(headers) == []
    # Each number of a stack is in one matrix, where its name says.
    generator = torch.Generator().manual_seed(0)
    stacks = {each.name: torch.randn(each.shape, generator=generator) for each in headers}
    x = torch.randn(hidden, generator=generator)
    for expert in range(2):
        both, last = (stacks[each.name][expert] for each in headers)
        expected = (x @ both if transposed else both @ x).chunk(2)
        for linear, wanted in zip(("gate_proj", "up_proj"), expected, strict=True):
            choice = chosen[f"{STACK}.{expert}.{linear}"]
            assert choice.stacked is not None
            torch.testing.assert_close(choice.stacked.place.matrix_of(stacks[choice.tensor]) @ x, wanted)
        choice = chosen[f"{STACK}.{expert}.down_proj"]
        assert choice.stacked is not None
        place = choice.stacked.place
        assert torch.equal(place.matrix_of(stacks[choice.tensor]), last.t() if transposed else last)


@pytest.mark.parametrize(
    "headers",
    [
        [header(f"{STACK}.gate_up_proj", 2, 128, 96)],
        [header(f"{STACK}.gate_up_proj", 2, 128, 96), header(f"{STACK}.down_proj", 3, 96, 64)],
        [header(f"{STACK}.gate_up_proj", 2, 128, 96), header(f"{STACK}.down_proj", 2, 80, 64)],
        [
            header("model.layers.3.mlp.gate_up_proj", 2, 128, 96),
            header("model.layers.3.mlp.down_proj", 2, 96, 64),
        ],
        [
            header(f"{STACK}.gate_up_proj", 2, 96, 128),
            header(f"{STACK}.gate_up_proj_bias", 2, 128),
            header(f"{STACK}.down_proj", 2, 64, 96),
        ],
    ],
    ids=["alone", "other experts", "other widths", "no experts", "biases"],
)
def test_stacks_that_may_mean_something_else_stay_as_they_are(headers: list[TensorHeader]) -> None:
    assert choose(*headers) == {}
    assert [each.name for each in other_matrices(headers)] == sorted(each.name for each in headers)


def test_matrices_that_are_stored_input_first_are_seen_by_their_bias() -> None:
    """GPT-2: the fused projection and both of the FFN show it; the square output projection follows them."""
    layer = [
        header("h.0.attn.c_attn.weight", 128, 384),
        header("h.0.attn.c_attn.bias", 384),
        header("h.0.attn.c_proj.weight", 128, 128),
        header("h.0.attn.c_proj.bias", 128),
        header("visual.0.fc.weight", 256, 128),
        header("visual.0.fc.bias", 256),
        header("visual.0.square.weight", 128, 128),
        header("visual.0.square.bias", 128),
    ]
    found = {name: each.reason for name, each in choose(*layer).items()}
    assert found["h.0.attn.c_attn"] == found["h.0.attn.c_proj"] == "stored input x output"
    assert found["visual.0.fc"] is None
    assert found["visual.0.square"] is None
    with pytest.raises(UsageError, match="stored input x output"):
        choose(*layer, include=("h.*.c_attn",))


MODEL = [
    header("model.embed_tokens.weight", 512, 128),
    *(header(f"model.layers.{idx}.fc{number}.weight", 128, 128) for idx in range(3) for number in (1, 2)),
    header("lm_head.weight", 512, 128),
]


def test_patterns_change_the_choice_and_ignore_decides_last() -> None:
    found = choose(*MODEL, include=("lm_head",), ignore=("*.layers.0.*", "*.{1,2}.fc2"))
    assert [name for name, each in found.items() if each.reason is None] == [
        "lm_head",
        "model.layers.1.fc1",
        "model.layers.2.fc1",
    ]
    assert found["model.layers.0.fc1"].reason == "ignored by the recipe"
    assert choose(*MODEL, include=("lm_head",), ignore=("lm_head.weight",))["lm_head"].reason is not None


def test_a_head_that_is_tied_stays_dense() -> None:
    assert choose(*MODEL, include=("lm_head",), tied=True)["lm_head"].reason == "head, tied to the embedding"


@pytest.mark.parametrize("key", ["include", "ignore"])
def test_a_pattern_without_a_match_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=rf"{key}: the pattern 'model.layers.\*.fc3' matches no matrix"):
        choose(*MODEL, **{key: ("model.layers.*.fc3",)})


@pytest.mark.parametrize(
    "tensor",
    [
        header("a.weight", 64, 64, dtype="F8_E4M3"),
        header("a.weight", 64, 64, dtype="I8"),
        header("a.weight_scale", 64, 1),
        header("a.qweight", 64, 64, dtype="I32"),
        header("a.weight_packed", 64, 8, dtype="I32"),
    ],
    ids=lambda each: f"{each.name}-{each.dtype}",
)
def test_a_quantized_checkpoint_is_refused_by_name(tensor: TensorHeader) -> None:
    with pytest.raises(UnsupportedFormat, match=f"quantized already: it has the tensor '{tensor.name}'"):
        choose(tensor)


def test_targets_name_exactly_the_modules() -> None:
    modules = [f"model.layers.{idx}.a-b.fc" for idx in range(12)] + ["top.fc"]
    others = [f"model.layers.{idx}.gate" for idx in range(12)] + ["x.model.layers.3.a-b.fc2"]
    names = targets(modules, others)
    assert names == [r"re:.*\blayers\.\d+\.a-b\.fc$", "top.fc"]
    pattern = names[0].removeprefix("re:")
    assert all(matches_module(pattern, each) for each in modules[:-1])
    assert matches_module(pattern, "backbone.layers.3.a-b.fc")
    assert not any(matches_module(pattern, each) for each in [*others, "top.fc", "players.1.a-b.fc"])


@pytest.mark.parametrize("other", ["vision.layers.7.q", "layers.1.q", "a.2.layers.0.q", "m.x-layers.0.q"])
def test_a_prefix_is_stated_where_a_dense_module_ends_alike(other: str) -> None:
    (name,) = targets(["text.layers.0.q", "text.layers.1.q"], [other])
    assert name == r"re:text\.layers\.\d+\.q$"
    assert not matches_module(name.removeprefix("re:"), other)


def test_targets_state_the_layers_where_some_are_dense() -> None:
    modules = [f"backbone.layers.{idx}.mixer.up" for idx in (1, 2, 11)]
    (name,) = targets(modules, ["backbone.layers.0.mixer.up", "head"])
    assert name == r"re:.*\blayers\.(1|2|11)\.mixer\.up$"
    pattern = name.removeprefix("re:")
    assert all(matches_module(pattern, each.replace("backbone", "model")) for each in modules)
    assert not any(matches_module(pattern, f"model.layers.{idx}.mixer.up") for idx in (0, 3, 12, 111))
    assert targets(modules, ["backbone.layers.0.mixer.up", "x.layers.5.mixer.up"]) == [
        r"re:backbone\.layers\.(1|2|11)\.mixer\.up$"
    ]


def test_targets_state_numbers_where_a_layer_is_dense_in_part() -> None:
    modules = ["m.layers.0.experts.0.up", "m.layers.0.experts.2.up", "m.layers.1.experts.0.up"]
    assert targets(modules, ["m.layers.0.experts.1.up"]) == [
        r"re:.*\blayers\.(1)\.experts\.\d+\.up$",
        r"re:.*\blayers\.0\.experts\.0\.up$",
        r"re:.*\blayers\.0\.experts\.2\.up$",
    ]
    others = ["m.layers.0.experts.1.up", "x.layers.0.experts.2.up"]
    assert "m.layers.0.experts.2.up" in targets(modules, others)
    assert template("model.layers.11.mlp.fc1") == "model.layers.*.mlp.fc1"


def test_the_vocabulary_of_a_config_may_be_that_of_its_language_model() -> None:
    assert stated_vocab_size({"vocab_size": 7}) == 7
    assert stated_vocab_size({"text_config": {"vocab_size": 9}}) == 9
    assert stated_vocab_size({"text_config": "odd"}) is None
    with pytest.raises(UnsupportedFormat, match="vocab_size"):
        stated_vocab_size({"vocab_size": "many"})
