"""Shortcut-connected mixtures and experts that return their input (LongCat-Flash): what is added when, what
is refused with them, and that they are read as they are written."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import StorageError, UnsupportedArch, UsageError
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.checkpoint import Checkpoint
from compress.models.decoder import Decoder
from compress.models.expert_pruning import with_experts
from compress.models.experts import Experts
from compress.models.family import family_of, family_of_arch
from compress.models.pruning import Widths, resized, why_layers_stay
from compress.models.shortcut import Shortcuts
from compress.models.weights import UNTOUCHED, build_decoder
from compress.untrusted.fields import Fields
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build_config, saved
from tests.support.tiny_source import tiny_shape, tiny_source
from tests.unit.runtime.test_shortcuts_served import DELAYED, LAYERS

CPU = torch.device("cpu")


def decoder_of(**changes: Any) -> Decoder:
    source = tiny_source(**{"layers": LAYERS, "hyper": Shortcuts(), **changes})
    return build_decoder(source, dtype=torch.float32, device=CPU)


def arch_of_case(**changes: Any) -> Arch:
    config = build_config(*CASES["longcat_flash"]).to_dict()
    return family_of(config).read_config({**config, **changes})


def stream(num_rows: int = 12) -> torch.Tensor:
    x_BSD = torch.randn(1, num_rows, 56, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.pad(x_BSD, (0, 56))


def test_the_output_of_experts_is_added_after_the_next_layer_and_read_by_none_before() -> None:
    decoder = decoder_of()
    positions = torch.arange(12)
    first = decoder.layers[0](stream(), positions, FullAttention())
    x, waiting = first.chunk(2, dim=-1)
    assert float(waiting.abs().sum()) > 0
    second = decoder.layers[1](first, positions, FullAttention())
    without = decoder.layers[1](torch.cat((x, 0 * waiting), -1), positions, FullAttention())
    torch.testing.assert_close(second[..., :56] - without[..., :56], waiting, rtol=1e-4, atol=1e-4)
    assert float(second[..., 56:].abs().sum()) == 0


def test_an_expert_without_weights_returns_its_input_times_its_weight() -> None:
    decoder = decoder_of()
    moe = decoder.layers[0].moe
    moe.selection_bias.copy_(torch.tensor([0.0] * 6 + [10.0] * 3))  # all three choices are such experts
    x_TD = torch.randn(7, 56, generator=torch.Generator().manual_seed(2))
    routed_TD = moe(x_TD, lambda name, value: None)[:, 56:]
    scores_T9 = torch.nn.functional.linear(x_TD, moe.router.weight).softmax(-1)
    expected_TD = 6.0 * scores_T9[:, 6:].sum(-1, keepdim=True) * x_TD
    torch.testing.assert_close(routed_TD, expected_TD, rtol=1e-5, atol=1e-5)


def test_facts_are_read_as_they_are_written_and_count_all_parameters() -> None:
    arch = decoder_of().arch
    facts, layers = arch.to_json()
    assert facts["hyper"] == {"shortcuts": True}
    assert Arch.from_json(facts, layers) == arch
    assert arch.num_params == sum(each.numel() for each in decoder_of().parameters())
    assert arch.layers[0].token_frac("moe.experts.0.up") == pytest.approx(3 / 9)
    assert DELAYED.expected_hit(10**6) == pytest.approx(6)


def test_a_manifest_that_denies_shortcuts_is_refused() -> None:
    facts, layers = decoder_of().arch.to_json()
    with pytest.raises(StorageError, match="shortcuts"):
        Arch.from_json({**facts, "hyper": {"shortcuts": False}}, layers)


def of_disk(directory: Path, changed: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    """Return the tiny checkpoint of `transformers` with other tensors."""
    saved(directory, *CASES["longcat_flash"])
    file = directory / "model.safetensors"
    tensors = load_file(file)
    changed(tensors)
    save_file(tensors, file)
    return Checkpoint(directory)


@pytest.mark.parametrize("expert", ["4711.gate_proj", "9.gate_proj", "8.down_proj"])
def test_experts_that_no_router_reaches_and_downs_of_those_without_weights_are_refused(
    tmp_path: Path, expert: str
) -> None:
    name = f"model.layers.0.mlp.experts.{expert}.weight"
    with pytest.raises(UnsupportedArch, match=name.replace(".", r"\.")):
        of_disk(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 2)}))


def test_gates_and_ups_of_experts_without_weights_stay_untouched(tmp_path: Path) -> None:
    source = of_disk(tmp_path, lambda tensors: None)
    untouched = {name for name in source.outer() if name.startswith(UNTOUCHED)}
    experts = source.arch.layers[0].experts
    assert experts is not None
    without_weights = range(experts.num_experts, experts.num_experts + experts.zero_experts)
    assert len(without_weights) == 3
    assert untouched == {
        f"{UNTOUCHED}model.layers.{idx}.mlp.experts.{expert}.{name}_proj.weight"
        for idx in range(2)
        for expert in without_weights
        for name in ("gate", "up")
    }


def test_norms_are_trained_and_experts_pruned_where_none_returns_its_input() -> None:
    arch = arch_of_case(zero_expert_num=0)
    assert family_of_arch(arch).shared_norms == ()
    kept = {layer.experts.num_experts for layer in with_experts(arch, 4).layers if layer.experts}
    assert kept == {4}


def test_a_layer_that_is_absent_is_named_as_on_disk_with_the_field_of_the_family(tmp_path: Path) -> None:
    def without_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if each.startswith("model.layers.1.")]:
            del tensors[name]

    with pytest.raises(UnsupportedArch, match=r"layer 1 on disk, .* has num_layers = 2;"):
        of_disk(tmp_path, without_layer)


@pytest.mark.parametrize(
    "changes",
    [
        {"shared_size": 0},
        {"shared_gate": True},
        {"shared_scale": 0.5},
        {"post_norm": True},
        {"num_groups": 3, "top_groups": 2},
        {"latent_size": 16},
        {"output_scale": True},
        {"one_output_scale": True},
        {"zero_experts": -1},
    ],
)
def test_facts_of_experts_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StorageError, match=r"delayed|zero_experts"):
        Experts.from_json(Fields({**DELAYED.to_json(), **changes}, "a manifest", StorageError))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"block": "sandwich"}, "the block is 'sandwich'"),
        ({"hyper": None}, "layer 0: experts are delayed, and the residual has no stream for them"),
        ({"layers": LAYERS[:1]}, "experts of layer 0 waits for no FFN"),
        ({"layers": (*LAYERS[:1], *LAYERS[:2])}, "experts of layer 0 waits for no FFN"),
        (
            {"layers": (tiny_shape(experts=replace(DELAYED, delayed=False)), tiny_shape())},
            "layer 0 has experts whose output is added at once",
        ),
        ({"layers": (tiny_shape(only_half="mixer"),)}, "some layers have one half"),
    ],
)
def test_what_is_not_computed_with_them_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedArch, match=reason):
        decoder_of(**facts)


def test_layers_and_experts_stay_and_the_reasons_are_stated() -> None:
    arch = arch_of_case()
    assert why_layers_stay(arch) == (
        "what experts of this longcat_flash model compute is added after the next layer."
    )
    with pytest.raises(UsageError, match="that return their input follow the others by index"):
        with_experts(arch, 4)


def test_a_config_counts_two_layers_for_each_of_its_own_and_one_width_of_dense_ffns() -> None:
    arch = arch_of_case()
    assert (arch.num_layers, arch.config["num_layers"]) == (4, 2)
    assert [layer.experts is not None for layer in arch.layers] == [True, False, True, False]
    written = family_of(arch.config).write_config(arch)
    assert written["num_layers"] == 2
    assert "num_hidden_layers" not in written
    old = Widths.of(arch)
    narrow = resized(arch, replace(old, intermediate_size=old.intermediate_size - 8))
    with pytest.raises(UnsupportedArch, match="states one number for those next to experts"):
        family_of(arch.config).write_config(narrow)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("router_bias", True),
        ("zero_expert_type", "copy"),
        ("mla_scale_q_lora", False),
        ("num_layers", 0),
        ("num_hidden_layers", 4),
        ("head_dim", 64),
        ("norm_topk_prob", True),
    ],
)
def test_a_field_that_no_decoder_here_computes_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArch, match=name):
        arch_of_case(**{name: value})
