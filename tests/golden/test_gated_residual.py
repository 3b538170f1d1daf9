"""Gated residuals, embeddings of n-grams and the reach of indexers are those of Qwen4 in `transformers`, for
weights that matter: in a tiny model at random, few terms are of the size of the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextGatedResidual,
    Qwen4ExpTextNGramEmbedding,
    Qwen4ExpTextPLELayer,
    Qwen4ExpTextQSAIndexer,
    Qwen4ExpTextRotaryEmbedding,
)

from compress.models.arch import Arch
from compress.models.attention import CachedAttention, FullAttention
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of
from compress.models.gated_residual_layer import GatedHead, GatedResidual
from compress.models.ngram_layer import NGramEmbedding, inputs_of_ngrams
from compress.models.ngrams import NGrams
from compress.models.weights import build_decoder
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from tests.support.tiny_cases import CASES
from tests.support.tiny_hf import build, build_config

CPU = torch.device("cpu")
SIZE = 48
EOS = 2


def config_of(**changes: Any) -> Any:
    return build_config("qwen4_exp_text", {**CASES["qwen4_exp_text"][1], **changes})


def arch_of(config: Any) -> Arch:
    stated = {**config.to_dict(), "dtype": "float32"}
    return family_of(stated).read_config(stated)


def ngrams_of(config: Any, layer_idx: int) -> tuple[Arch, NGrams]:
    arch = arch_of(config)
    facts = arch.layers[layer_idx].ngrams
    assert facts is not None
    return arch, facts


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_with_ends(num_sequences: int, length: int, seed: int = 0) -> Tensor:
    """Return tokens of which a third ends a sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(97, (num_sequences, length), generator=generator)
    return tokens_BS.where(torch.rand(num_sequences, length, generator=generator) > 1 / 3, EOS)


def filled_(module: nn.Module) -> nn.Module:
    """Give a module of `transformers` weights by which every term is of the size of the others."""
    for seed, each in enumerate(module.parameters()):
        scale = 0.3 if each.dim() == 1 else 2 * each.shape[-1] ** -0.5
        each.data.copy_(scale * randn(*each.shape, seed=seed))
    return module.requires_grad_(False).eval()


RESIDUAL = {
    "norm.weight": "hc_norm.weight",
    "down.weight": "input_mix_weight_down.weight",
    "up.weight": "input_mix_weight_up.weight",
    "inject.weight": "block_inject_weight.weight",
}


@pytest.mark.parametrize("num_streams", [2, 3, 4])
def test_half_layers_read_and_write_streams_as_transformers_does(num_streams: int) -> None:
    config = config_of(hc_count=num_streams)
    theirs = filled_(Qwen4ExpTextGatedResidual(config))
    arch = arch_of(config)
    ours = GatedResidual(arch, arch.hyper).requires_grad_(False)  # type: ignore[arg-type]
    assert RESIDUAL.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict({name: theirs.get_parameter(each) for name, each in RESIDUAL.items()})
    streams_BSE = randn(2, 5, num_streams * SIZE, seed=9)
    y_BSD = randn(2, 5, SIZE, seed=10)
    read_BSD, _, factors_BSn = theirs(streams_BSE)
    found_BSD, leave = ours.enter(streams_BSE)
    torch.testing.assert_close(found_BSD, read_BSD, rtol=1e-5, atol=1e-5)
    injected = (y_BSD.unsqueeze(-2) * factors_BSn.unsqueeze(-1)).flatten(-2)
    assert injected.abs().mean() > 0.1
    torch.testing.assert_close(leave(y_BSD), streams_BSE + injected, rtol=1e-5, atol=1e-5)


def test_the_head_reads_streams_as_transformers_does() -> None:
    config = config_of()
    theirs = filled_(Qwen4ExpTextGatedResidual(config, use_combine=False))
    arch = arch_of(config)
    ours = GatedHead(arch, arch.hyper).requires_grad_(False)  # type: ignore[arg-type]
    names = {f"hyper.{name}": each for name, each in RESIDUAL.items() if name != "inject.weight"}
    assert names.keys() == dict(ours.named_parameters()).keys()
    ours.load_state_dict({name: theirs.get_parameter(each) for name, each in names.items()})
    streams_BSE = randn(2, 5, 3 * SIZE, seed=9)
    torch.testing.assert_close(ours(streams_BSE), theirs(streams_BSE), rtol=1e-5, atol=1e-5)


ORDERS: dict[str, dict[str, Any]] = {
    "pairs": {"ngram_size": 2, "heads_per_ngram": 3},
    "triples": {},
    "longer": {"ngram_size": 5, "heads_per_ngram": 1, "seed": 3, "ngram_vocab_size_base": 10_007},
}
each_order = pytest.mark.parametrize("changes", ORDERS.values(), ids=list(ORDERS))


@each_order
@pytest.mark.parametrize("layer_idx", [0, 2])
def test_the_numbers_of_hashes_are_those_of_transformers(changes: dict[str, Any], layer_idx: int) -> None:
    config = config_of(**changes)
    arch, facts = ngrams_of(config, layer_idx)
    theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, layer_idx, layer_idx // 2)
    assert theirs.layer_multipliers.tolist() == list(facts.factors(arch.vocab_size))
    assert theirs.ngram_heads_vocab_sizes.tolist() == list(facts.head_sizes)
    assert theirs.ngram_heads_offsets.tolist() == list(facts.head_starts)
    assert theirs.ngram_embedding.weight.shape == (facts.num_rows, facts.head_dim)
    parts = theirs.ngram_embedding.weight.chunk(facts.num_parts)
    assert [len(each) for each in parts] == list(facts.part_sizes)


def test_the_published_sizes_of_tables_are_found_fast() -> None:
    facts = NGrams(3, 8, 128, 4, 4, 20_000_000, 1, 1234, 5, 128, 512)
    theirs = [20_000_003 <= each < 20_001_000 for each in facts.head_sizes]
    assert all(theirs)
    assert len(set(facts.head_sizes)) == 16
    assert facts.num_rows % 128 == 0
    assert sum(facts.part_sizes) == facts.num_rows


@each_order
@pytest.mark.parametrize("cuts", [(17,), (1, 2, 3, 9, 17), tuple(range(1, 18))], ids=str)
def test_a_layer_adds_what_that_of_transformers_adds(changes: dict[str, Any], cuts: tuple[int, ...]) -> None:
    config = config_of(**changes)
    arch, facts = ngrams_of(config, 2)
    theirs = filled_(Qwen4ExpTextPLELayer(config, 2, 1))
    ours = NGramEmbedding(arch, facts).requires_grad_(False)
    names = {
        "key.weight": "key_proj.weight",
        "value.weight": "value_proj.weight",
        "key_norm.weight": "norm_key.weight",
        "query_norm.weight": "norm_query.weight",
        "conv_norm.weight": "norm_conv.weight",
        "conv.weight": "conv1d.weight",
    }
    table = theirs.get_parameter("ple_embedding.ngram_embedding.weight").split(facts.part_sizes)
    ours.load_state_dict(
        {
            **{name: theirs.get_parameter(each) for name, each in names.items()},
            **{f"table.{idx}.weight": each for idx, each in enumerate(table)},
        }
    )
    tokens_BS = tokens_with_ends(3, 17)
    streams_BSE = randn(3, 17, 3 * SIZE, seed=11)
    expected_BSE = streams_BSE + theirs(streams_BSE, tokens_BS, None)
    attention = FullAttention() if cuts == (17,) else CachedAttention()
    kept: dict[int, Tensor] = {}
    found = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        rows = inputs_of_ngrams(arch, tokens_BS[:, start:stop], attention)
        assert rows.keys() == {0, 2}
        found.append(ours(streams_BSE[:, start:stop], rows[2], kept, 2))
    assert (expected_BSE - streams_BSE).abs().mean() > 0.1
    torch.testing.assert_close(torch.cat(found, dim=1), expected_BSE, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("budget", "ratio"), [(12, 4), (15, 5), (6, 1)])
def test_queries_see_every_key_up_to_as_many_positions_as_are_chosen(budget: int, ratio: int) -> None:
    """One position more, and an indexer of `transformers` hides a block from the last query."""
    config = config_of(indexer_budget=budget, indexer_compress_ratio=ratio)
    indexer = arch_of(config).layers[1].block_indexer
    assert indexer is not None
    most = indexer.top_k
    assert most == budget + ratio - 1
    theirs = filled_(Qwen4ExpTextQSAIndexer(config, 1))
    length = most + 1
    visible = torch.ones(length, length, dtype=torch.bool).tril().view(1, 1, length, length)
    x_1SD = randn(1, length, SIZE, seed=4)
    cos_sin = Qwen4ExpTextRotaryEmbedding(config)(x_1SD, torch.arange(length).view(1, 1, -1))
    chosen = theirs(x_1SD, cos_sin, visible, None)
    assert torch.equal((chosen & visible)[..., :most, :], visible[..., :most, :])
    assert int(chosen[0, 0, -1].sum()) == length - ratio


def test_a_model_as_deep_as_the_class_by_default_is_computed_and_served(tmp_path: Path) -> None:
    """40 layers, every fourth with attention: errors of the decoder and of the engine add up over all. Half
    layers add a tenth of what they do elsewhere, as in a trained model; without that, the roundings of
    `transformers` itself in float32 and in float64 come to choose other experts."""
    kinds = [*["linear_attention"] * 3, "indexed_attention"] * 10
    changes = {"num_hidden_layers": 40, "layer_types": kinds, "ple_layer_ids": [2, 15, 39]}
    theirs = build("qwen4_exp_text", {**CASES["qwen4_exp_text"][1], **changes})
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                parameter.mul_(0.1)
    theirs.save_pretrained(tmp_path)
    source = Checkpoint(tmp_path)
    tokens_BS = tokens_with_ends(2, 24, seed=3)
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
        found = build_decoder(source, dtype=torch.float32, device=CPU)(tokens_BS)
    # Forty halves of each kind after the depth of one layer, of 144 numbers.
    atol = 80 * torch.finfo(torch.float32).eps * 144**0.5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    engine = Engine(source, device=CPU, config=EngineConfig(max_model_len=32))
    torch.testing.assert_close(engine.runner.score(tokens_BS), expected, rtol=0, atol=atol)
    params = SamplingParams(6, ignore_eos=True)
    (done,) = engine.generate([Request("0", tuple(tokens_BS[0, :17].tolist()), params)])
    whole = torch.tensor([done.prompt + done.tokens])
    with torch.no_grad():
        logits_SV = theirs(whole).logits[0, 16:-1]
    chosen_S = logits_SV.gather(1, whole[0, 17:, None]).squeeze(1)
    assert float((logits_SV.amax(1) - chosen_S).max()) <= 2 * atol
