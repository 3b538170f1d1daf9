"""What layers read beside the stream, while a model is calibrated layer by layer: embeddings of tokens for
each layer are those of the whole decoder, and keys and values that later layers read are those of the
compressed layer, or of the source's for the source's samples. The whole decoder is the witness.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.layer_run import LayerRun, sample_range, shards_of_rank
from compress.calibrate.layer_state import LayerPass, LayerState, Row
from compress.calibrate.memory_guard import MemoryGuard
from compress.calibrate.observe import replay_
from compress.calibrate.residual import walk
from compress.calibrate.samples import Samples
from compress.calibrate.sequential import Compression, run_sequential
from compress.calibrate.side_inputs import SideInputs
from compress.calibrate.stats import CrossMoment, SecondMoment, Stat
from compress.context import Context, OneRank, SilentProgress
from compress.errors import Interrupted
from compress.methods.quantize.passes import RoundPass
from compress.methods.quantize.rtn import Rtn
from compress.models import layer_embedding
from compress.models.attention import FullAttention
from compress.models.canonical import layer_name, load_weights
from compress.models.decoder import Decoder
from compress.models.layer_shape import LayerShape
from compress.models.weights import Weights, WeightSource, build_decoder, build_layer, dense, embedding_tables
from compress.quant.kv import KV_SCALES
from compress.quant.scheme import FP8_MAX, SCHEMES, QuantizedWeight, Scheme
from compress.stages.quantize.layers import quantization_passes
from compress.stages.quantize.spec import Quantize
from tests.support.slow import slow
from tests.support.stop_after import StopAfter
from tests.support.tiny_decoder import tiny_tokens
from tests.support.tiny_source import LIKE_GEMMA4_E, tiny_source

CPU = torch.device("cpu")
NUM_SAMPLES = 11
SEQ_LEN = 13
LAYERS: tuple[LayerShape, ...] = LIKE_GEMMA4_E["layers"]
READERS = {idx: layer.kv_source for idx, layer in enumerate(LAYERS) if layer.kv_source is not None}
TAPS = ("attn_in", "attn_out", "ffn_in", "ffn_mid")
COARSE = Scheme("W2", 2, symmetric=True, group_size=None)  # dense layers would give quite other keys
W8 = SCHEMES["W8A16"]


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return tiny_source(**LIKE_GEMMA4_E)


@pytest.fixture(scope="module", name="tokens_NS")
def calibration_tokens(source: WeightSource) -> Tensor:
    return tiny_tokens(source.arch, NUM_SAMPLES, SEQ_LEN)


def decoder_of(source: WeightSource) -> Decoder:
    return build_decoder(source, dtype=torch.float32, device=CPU)


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def run_of(
    source: WeightSource, tokens_NS: Tensor, piece_tokens: int, *, rank: int = 0, num_ranks: int = 1
) -> LayerRun:
    """The run of one rank before the first layer."""
    shards = shards_of_rank(len(tokens_NS), rank=rank, num_ranks=num_ranks)
    own_NS = tokens_NS[sample_range(shards)]
    outer = source.outer()
    x_NSD = embedding_tables(outer).embedded(source.arch, own_NS.long())
    samples = Samples.from_tensor(x_NSD)
    side_inputs = SideInputs.of(source.arch, outer, own_NS, dtype=torch.float32, device=CPU)
    guard = MemoryGuard(None, samples)
    run = LayerRun(samples, None, shards, OneRank(), guard, torch.float32, side_inputs=side_inputs)
    return replace(run, piece_tokens=piece_tokens)


def outputs_of(source: WeightSource, run: LayerRun) -> list[Tensor]:
    """The samples [N, S, D] behind each layer."""
    outputs = []
    for idx in range(source.arch.num_layers):
        layer = build_layer(source.arch, idx, source.layer(idx), dtype=torch.float32, device=CPU)
        replay_(layer, run.samples, run)
        outputs.append(run.samples[:].clone())
    return outputs


def outputs_of_decoder(decoder: Decoder, tokens_NS: Tensor) -> list[Tensor]:
    """The same of the whole decoder over all samples at once."""
    seen: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, args, out: seen.append(out)) for layer in decoder.layers]
    assert_near(decoder.hidden(tokens_NS.long()), decoder.norm(seen[-1]))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("piece_tokens", [1, 2 * SEQ_LEN, 2048])
def test_layer_after_layer_the_stream_is_that_of_the_whole_decoder(
    piece_tokens: int, source: WeightSource, tokens_NS: Tensor
) -> None:
    found = outputs_of(source, run_of(source, tokens_NS, piece_tokens))
    expected = outputs_of_decoder(decoder_of(source), tokens_NS)
    for x_NSD, expected_NSD in zip(found, expected, strict=True):
        assert_near(x_NSD, expected_NSD)


def test_two_ranks_have_the_streams_of_one(source: WeightSource, tokens_NS: Tensor) -> None:
    halves = [
        outputs_of(source, run_of(source, tokens_NS, 2 * SEQ_LEN, rank=rank, num_ranks=2)) for rank in (0, 1)
    ]
    whole = outputs_of(source, run_of(source, tokens_NS, 2 * SEQ_LEN))
    for *of_ranks, expected_NSD in zip(*halves, whole, strict=True):
        assert all(len(each) < NUM_SAMPLES for each in of_ranks)
        assert_near(torch.cat(of_ranks), expected_NSD)


def test_a_rank_may_have_no_samples(source: WeightSource, tokens_NS: Tensor) -> None:
    inputs = SideInputs.of(source.arch, source.outer(), tokens_NS[:0], dtype=torch.float32, device=CPU)
    assert inputs.inputs_ULP is not None
    assert inputs.inputs_ULP.shape == (0, len(LAYERS), 8)


def test_embeddings_for_layers_do_not_depend_on_how_many_tokens_are_embedded_at_once(
    source: WeightSource, tokens_NS: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(source)
    attention = FullAttention()
    decoder.embedded(tokens_NS.long(), torch.arange(tokens_NS.shape[1]), attention)
    for at_once in (7, 4096):
        monkeypatch.setattr(layer_embedding, "_TOKENS_AT_ONCE", at_once)
        inputs = SideInputs.of(source.arch, source.outer(), tokens_NS, dtype=torch.float32, device=CPU)
        found = inputs.attention(slice(3, 8)).layer_inputs
        assert list(found) == list(range(len(LAYERS)))
        for idx in range(len(LAYERS)):
            assert_near(found[idx], attention.layer_inputs[idx][3:8])


def test_a_model_without_either_has_none(tokens_NS: Tensor) -> None:
    plain = tiny_source()
    inputs = SideInputs.of(plain.arch, plain.outer(), tokens_NS, dtype=torch.float32, device=CPU)
    assert (inputs.inputs_ULP, inputs.rows_NS) == (None, None)
    assert not inputs.kept


def test_only_what_later_layers_read_is_kept(source: WeightSource, tokens_NS: Tensor) -> None:
    run = run_of(source, tokens_NS, 2 * SEQ_LEN)
    outputs_of(source, run)
    assert run.side_inputs is not None
    assert set(run.side_inputs.kept) == {0, 1}
    attention = FullAttention()
    decoder_of(source).hidden(tokens_NS.long(), attention=attention)
    assert set(attention.kept) == {0, 1}
    found = run.side_inputs.attention(slice(2, 9)).kept
    for idx, keys_values in attention.kept.items():
        for x_BSKC, expected_NSKC in zip(found[idx], keys_values, strict=True):
            assert_near(x_BSKC, expected_NSKC[2:9])


def test_a_twin_keeps_keys_and_values_of_its_own(source: WeightSource, tokens_NS: Tensor) -> None:
    run = run_of(source, tokens_NS, 2 * SEQ_LEN)
    outputs_of(source, run)
    assert run.side_inputs is not None
    twin = run.side_inputs.twin()
    before = twin.kept[0][:].clone()
    assert torch.equal(before, run.side_inputs.kept[0][:])
    k_BSKC, v_BSKC = run.side_inputs.attention(slice(0, 2)).kept[0]
    run.side_inputs.attention(slice(0, 2)).kept[0] = (k_BSKC + 1, v_BSKC)
    assert not torch.equal(before, run.side_inputs.kept[0][:])
    assert torch.equal(before, twin.kept[0][:])


def test_the_residual_stream_is_that_of_the_whole_decoder(
    source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    seen: dict[int, list[Tensor]] = {}
    x_NSD = walk(
        source,
        tokens_NS,
        Context("cpu", 0, tmp_path),
        compute_dtype=torch.float32,
        task="",
        visit=lambda idx, before_TD, after_TD: seen.setdefault(idx, []).append(after_TD.clone()),
    )
    expected = outputs_of_decoder(decoder_of(source), tokens_NS)
    assert_near(x_NSD, expected[-1])
    for idx, expected_NSD in enumerate(expected):
        assert_near(torch.stack(seen[idx]), expected_NSD)


class Look:
    """A pass that keeps the moments of every tap, with the source's and of its own, and changes nothing."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def needs(self) -> tuple[type[Stat], ...]:
        return SecondMoment, CrossMoment

    def apply(self, state: LayerState) -> None:
        for tap, stats in state.stats.items():
            self.seen[state.layer_idx, tap] = stats[SecondMoment].mean(), stats[CrossMoment].mean()


class Mixed:
    """Stored linears in the layers before one and at its own taps before `tap`, the source's from there
    on."""

    kv_format: str | None = None

    def __init__(self, source: WeightSource, directory: Path, layer_idx: int, tap: str = TAPS[0]) -> None:
        self._source = source
        self._directory = directory
        self._end = (layer_idx, TAPS.index(tap))
        self.arch = source.arch

    def outer(self) -> dict[str, Tensor | QuantizedWeight]:
        return self._source.outer()

    def layer(self, layer_idx: int) -> dict[str, Tensor | QuantizedWeight]:
        weights = self._source.layer(layer_idx)
        stored: Weights = load_weights(self._directory / layer_name(layer_idx), COARSE)
        taps = self.arch.layers[layer_idx].linears
        done = [linear for linear, tap in taps.items() if (layer_idx, TAPS.index(tap)) < self._end]
        return weights | {f"{linear}.weight": stored[f"{linear}.weight"] for linear in done}


def inputs_at(weights: WeightSource, tokens_NS: Tensor, layer_idx: int, tap: str) -> Tensor:
    """What the whole decoder has at a tap, float64 [T, I]."""
    read = list[Tensor]()
    linear = next(linear for linear, its in weights.arch.layers[layer_idx].linears.items() if its == tap)
    decoder = decoder_of(weights)
    decoder.get_submodule(f"layers.{layer_idx}.{linear}").register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].flatten(0, 1))
    )
    decoder(tokens_NS.long())
    return read[0].double()


def compress(
    source: WeightSource,
    tokens_NS: Tensor,
    passes: Sequence[LayerPass],
    out: Path,
    *,
    scheme: Scheme,
    true_sequential: bool,
    kv_scales: bool = False,
    stop_after: int = 99,
) -> list[Row]:
    out.mkdir(exist_ok=True)
    return run_sequential(
        source,
        tokens_NS,
        Compression(passes, scheme=scheme, true_sequential=true_sequential, kv_scales=kv_scales),
        out,
        Context("cpu", 0, out, SilentProgress(), StopAfter(stop_after)),
        compute_dtype=torch.float32,
    )


@pytest.mark.parametrize("true_sequential", [slow(False), True])
def test_readers_are_calibrated_on_keys_of_the_compressed_layer_and_the_sources_on_its_own(
    true_sequential: bool, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    look = Look()
    passes: list[LayerPass] = [look, RoundPass(Rtn(), COARSE, torch.float32)]
    compress(source, tokens_NS, passes, tmp_path, scheme=COARSE, true_sequential=true_sequential)
    assert set(look.seen) == {(idx, tap) for idx in range(len(LAYERS)) for tap in TAPS}
    for (idx, tap), (moment, cross) in look.seen.items():
        mixed = Mixed(source, tmp_path, idx, tap if true_sequential else TAPS[0])
        x_TI = inputs_at(mixed, tokens_NS, idx, tap)
        source_TI = inputs_at(source, tokens_NS, idx, tap)
        for found, expected in ((moment, x_TI.t() @ x_TI), (cross, (source_TI - x_TI).t() @ x_TI)):
            expected /= len(x_TI)
            assert torch.allclose(
                found.double(), expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
            ), (idx, tap)


@pytest.mark.parametrize("layer_idx", READERS)
def test_keys_of_a_dense_source_layer_would_be_others(
    layer_idx: int, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    """The test above sees whose keys and values a reader reads: what it attends to differs by far more than
    its tolerance."""
    passes: list[LayerPass] = [RoundPass(Rtn(), COARSE, torch.float32)]
    compress(source, tokens_NS, passes, tmp_path, scheme=COARSE, true_sequential=False)
    compressed = decoder_of(Mixed(source, tmp_path, layer_idx))
    attention, of_source, exchanged = FullAttention(), FullAttention(), FullAttention()
    compressed.hidden(tokens_NS.long(), attention=attention)
    decoder_of(source).hidden(tokens_NS.long(), attention=of_source)
    exchanged.layer_inputs, exchanged.kept = attention.layer_inputs, of_source.kept
    reads: list[Tensor] = []
    layer = compressed.layers[layer_idx]
    layer.get_submodule("attn.o").register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0]))
    x_NSD = outputs_of_decoder(compressed, tokens_NS)[layer_idx - 1]
    reads.clear()
    for each in (attention, exchanged):
        layer(x_NSD, torch.arange(SEQ_LEN), each)
    assert float((reads[0] - reads[1]).norm() / reads[0].norm()) > 0.05


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("stop_after", [1, 2, 4])
@pytest.mark.parametrize("true_sequential", [False, True])
@pytest.mark.one_in(4)
def test_a_run_stopped_at_a_layer_boundary_ends_in_the_same_bytes(
    true_sequential: bool, stop_after: int, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    spec = Quantize.model_validate(
        {"scheme": "W8A16", "target": {"kind": "gptaq"}, "round": {"kind": "gptq"}}
    )
    passes = quantization_passes(spec, W8, torch.float32)

    def run(out: Path, stop_after: int = 99) -> list[Row]:
        return compress(
            source,
            tokens_NS,
            passes,
            out,
            scheme=W8,
            true_sequential=true_sequential,
            kv_scales=True,
            stop_after=stop_after,
        )

    undisturbed = run(tmp_path / "undisturbed")
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", stop_after)
    stored = [(tmp_path / "cut" / layer_name(idx)).exists() for idx in range(len(LAYERS))]
    assert stored == [idx < stop_after for idx in range(len(LAYERS))]
    assert run(tmp_path / "cut") == undisturbed
    assert contents(tmp_path / "cut") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("true_sequential", [False, True])
def test_layers_with_keys_of_their_own_have_scales_of_a_cache_and_no_others(
    true_sequential: bool, source: WeightSource, tokens_NS: Tensor, tmp_path: Path
) -> None:
    passes: list[LayerPass] = [RoundPass(Rtn(), COARSE, torch.float32)]
    rows = compress(
        source, tokens_NS, passes, tmp_path, scheme=COARSE, true_sequential=true_sequential, kv_scales=True
    )
    owners = [idx for idx in range(len(LAYERS)) if idx not in READERS]
    assert [(row["layer"], row["cache"]) for row in rows if "cache" in row] == [
        (idx, name) for idx in owners for name in KV_SCALES
    ]
    attention = FullAttention()
    decoder_of(Mixed(source, tmp_path, len(LAYERS))).hidden(tokens_NS.long(), attention=attention)
    for idx in range(len(LAYERS)):
        stored = load_weights(tmp_path / layer_name(idx), COARSE)
        names = set(KV_SCALES.values()) & stored.keys()
        assert names == (set(KV_SCALES.values()) if idx in owners else set())
        if idx in owners:
            for name, x_NSKC in zip(KV_SCALES, attention.kept[idx], strict=True):
                scale = float(dense(stored[KV_SCALES[name]]))
                assert scale == pytest.approx(float(x_NSKC.abs().max()) / FP8_MAX, rel=1e-3)


@pytest.mark.parametrize("own", [slice(0, 3), slice(3, 8)])
def test_a_rank_computes_the_embeddings_of_its_tokens_among_those_of_all(own: slice) -> None:
    """The sizes are such that a product of fewer rows has other last bits, at least on some machines."""
    source = tiny_source(block="sandwich", layer_embed_size=64, vocab_size=5000, hidden_size=1536)
    tokens_NS = tiny_tokens(source.arch, 8, 2)
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    of_all = SideInputs.of(source.arch, source.outer(), tokens_NS, **how).attention(own)
    of_rank = SideInputs.of(source.arch, source.outer(), tokens_NS, own=own, **how).attention(slice(None))
    for idx in range(source.arch.num_layers):
        assert torch.equal(of_rank.layer_inputs[idx], of_all.layer_inputs[idx])
