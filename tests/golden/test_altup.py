"""AltUp, LAuReL and sparse gates are those of Gemma 3n in `transformers`, for weights that matter: in a tiny
model at random, the coefficients of streams are near 0."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gemma3n.modeling_gemma3n import (
    Gemma3nTextAltUp,
    Gemma3nTextLaurelBlock,
    Gemma3nTextMLP,
)

from compress.models.altup import (
    first_streams,
    joined_streams,
    matched,
    mean_of_pairs,
    small_product,
    with_others_plus,
)
from compress.models.altup_layer import AltUp
from compress.models.arch import Arch
from compress.models.ffn import sparse_gate
from compress.models.laurel import Laurel
from tests.support.tiny_hf import build_config
from tests.support.tiny_source import tiny_source

SIZE = 56
STREAMS = [2, 3, 4]


def arch_of(num_streams: int) -> Arch:
    return tiny_source(block="sandwich", altup_streams=num_streams, laurel_rank=8).arch


def config_of(num_streams: int, **changes: Any) -> Any:
    stated = {"hidden_size": SIZE, "num_attention_heads": 4, "altup_num_inputs": num_streams, **changes}
    return build_config("gemma3n_text", {"head_dim": 14, **stated})


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """Give a module of `transformers` weights by which every term is of the size of the others."""
    for seed, (name, each) in enumerate(module.named_parameters()):
        size = scale if "router.weight" in name or "modality" in name else 0.4
        each.data.copy_((1.0 if "norm" in name else 0.0) + size * randn(*each.shape, seed=seed))
    return module.requires_grad_(False).eval()


@pytest.mark.parametrize("num_streams", STREAMS)
@pytest.mark.parametrize("seed", [1, 2])
def test_streams_are_predicted_and_corrected_as_transformers_does(num_streams: int, seed: int) -> None:
    theirs = filled_(Gemma3nTextAltUp(config_of(num_streams)), scale=8.0)
    ours = AltUp(arch_of(num_streams)).requires_grad_(False)
    names = {
        "router.weight": "modality_router.weight",
        "router_norm.weight": "router_norm.weight",
        "predict.weight": "prediction_coefs.weight",
        "correct.weight": "correction_coefs.weight",
        "output_scale": "correct_output_scale",
    }
    assert names.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict({name: theirs.get_parameter(each) for name, each in names.items()})
    x_nBSD = randn(num_streams, 2, 7, SIZE, seed=seed)
    y_BSD = randn(2, 7, SIZE, seed=seed + 10)
    predicted = theirs.predict(x_nBSD)
    assert (predicted - x_nBSD).abs().mean() > 0.1
    streams_BSE = torch.cat(list(x_nBSD), dim=-1)
    predicted_BSE, first_BSD = ours.before(streams_BSE)
    torch.testing.assert_close(predicted_BSE, torch.cat(list(predicted), dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(first_BSD, predicted_BSE[..., :SIZE])
    corrected = theirs.correct(predicted, y_BSD)
    found = ours.after(torch.cat(list(predicted), dim=-1), y_BSD)
    torch.testing.assert_close(found, torch.cat(list(corrected), dim=-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparsity", [0.95, 0.5, 0.01])
@pytest.mark.parametrize("size", [80, 97, 1])
def test_sparse_gates_are_those_of_transformers(sparsity: float, size: int) -> None:
    widths = {"intermediate_size": size, "activation_sparsity_pattern": [sparsity] * 3}
    theirs = Gemma3nTextMLP(config_of(2, **widths))
    x_TF = 3 * randn(40, size) + 0.7
    expected = theirs._gaussian_topk(x_TF)
    found = sparse_gate(x_TF, sparsity)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if size > 1:
        share = float((found == 0).float().mean())
        assert share == pytest.approx(sparsity, abs=0.05)


def test_the_residual_around_attention_is_that_of_transformers() -> None:
    theirs = filled_(Gemma3nTextLaurelBlock(config_of(2)))
    ours = Laurel(arch_of(2)).requires_grad_(False)
    names = ("linear_left", "linear_right", "post_laurel_norm")
    weights = [theirs.get_parameter(f"{name}.weight") for name in names]
    ours.load_state_dict(
        {f"{name}.weight": each for name, each in zip(("left", "right", "norm"), weights, strict=True)}
    )
    h_TD = randn(9, SIZE)
    x_TD = randn(9, SIZE, seed=1)
    expected = (x_TD + theirs(h_TD)) / 2**0.5
    torch.testing.assert_close(ours(x_TD, h_TD), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 97])
def test_a_mean_by_pairs_is_the_mean_and_a_row_has_the_same_bits_in_any_company(size: int) -> None:
    x_TF = randn(33, size)
    found = mean_of_pairs(x_TF)
    torch.testing.assert_close(found, x_TF.double().mean(-1, keepdim=True).float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[5:6], mean_of_pairs(x_TF[5:6]))


def test_a_small_product_is_the_product() -> None:
    x_Tn = randn(5, 4)
    weight_OI = randn(16, 4, seed=1)
    torch.testing.assert_close(small_product(x_Tn, weight_OI), x_Tn @ weight_OI.t())


def test_streams_begin_with_the_magnitude_of_the_embedding_and_end_in_a_mean() -> None:
    x_TD = 5 * randn(6, SIZE)
    matrices = [randn(SIZE, SIZE, seed=seed) for seed in (1, 2)]
    streams_TE = first_streams(x_TD, 3, lambda idx, x: x @ matrices[idx].t())
    parts = streams_TE.split(SIZE, dim=-1)
    assert torch.equal(parts[0], x_TD)
    for part, matrix in zip(parts[1:], matrices, strict=True):
        torch.testing.assert_close(part.square().mean(-1), x_TD.square().mean(-1))
        cosines = nn.functional.cosine_similarity(part, x_TD @ matrix.t())
        torch.testing.assert_close(cosines, torch.ones(6))
    same_TE = torch.cat([x_TD] * 3, dim=-1)
    torch.testing.assert_close(joined_streams(same_TE, 3, lambda idx, x: 7 * x), x_TD)


def test_a_stream_of_zeros_stays_finite() -> None:
    zeros_TD = torch.zeros(2, SIZE)
    assert torch.equal(matched(zeros_TD, torch.ones(2, 1)), zeros_TD)
    assert torch.equal(first_streams(zeros_TD, 2, lambda idx, x: x), torch.zeros(2, 2 * SIZE))


def test_a_term_is_added_to_all_streams_but_the_first() -> None:
    streams_TE = randn(4, 3 * SIZE)
    term_TD = randn(4, SIZE, seed=1)
    expected = torch.cat([torch.zeros_like(term_TD), term_TD, term_TD], dim=-1)
    assert torch.equal(with_others_plus(streams_TE, term_TD), streams_TE + expected)


def test_the_class_of_transformers_has_the_defaults_that_are_read() -> None:
    stated = transformers.Gemma3nTextConfig()
    assert (stated.altup_active_idx, stated.altup_correct_scale) == (0, True)
