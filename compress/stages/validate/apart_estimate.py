"""Memory, disk and reading of models that are scored one after the other, from shapes alone.

loaded      the weights in the dtype of the computation, or the codes of a candidate on a GPU
streamed    the most of: embedding and head as they are read, and the embedding as it is used; one layer as it
            is read and as kernels hold it, two where layers end in a norm; embedding and head as they are
            read, and the head in two layouts, while it is repacked, with the last layer where that ends in
            a norm; and with each the streams of all windows, before and after a layer
both        a copy of the largest linear group while it is repacked; pages of a batch; scores of indexers and
            terms of distance of a batch; float32 logits of a batch, their log probabilities and as much again
            while windows are compared
"""

from dataclasses import dataclass

from compress.models.arch import Arch
from compress.models.choices import choice_sources
from compress.models.layer_shape import LayerShape
from compress.runtime.kv_cache import max_pass_bytes, slot_bytes
from compress.runtime.latent_linears import absorbed_params
from compress.runtime.outer_weights import served_params
from compress.runtime.pass_memory import choosing_bytes, terms_bytes
from compress.stages import PlanFacts
from compress.stages.quantize.schemes import most_linear_bytes, outer_bytes
from compress.stages.quantize.spec import Quantize
from compress.stages.validate.spec import Validate
from compress.validate.kept_scores import kept_bytes

STORED_BYTES = 2
"""Bytes of a weight as a checkpoint stores it."""


@dataclass(frozen=True)
class ApartNeeds:
    """Bytes at the peak of scoring each model, of an engine of the candidate, of the scores on disk, and read
    from disk by streaming."""

    source_bytes: int
    candidate_bytes: int
    engine_bytes: int
    kept_bytes: int
    read_bytes: int
    streamed: bool
    top_k: int | None

    def notes(self) -> list[str]:
        """Return the needs in words."""
        way = "read layer by layer" if self.streamed else "loaded alone"
        kind = "all logits" if self.top_k is None else f"the {self.top_k} likeliest tokens of each position"
        found = [
            f"one after the other: the source {way}, {self.source_bytes / 1e9:.3f} GB, then the candidate, "
            f"{self.candidate_bytes / 1e9:.3f} GB",
            f"the source's scores are kept on disk: {kind}, {self.kept_bytes / 1e9:.3f} GB",
        ]
        if self.streamed:
            found.append(f"{self.read_bytes / 1e9:.3f} GB are read from disk for it")
        return found


def apart_needs(
    spec: Validate, source: Arch, candidate: Arch, facts: PlanFacts, *, num_kept: int
) -> ApartNeeds:
    """Return what scoring needs; `num_kept` models are kept, all but the candidate."""
    assert spec.apart is not None
    width = 4 if facts.device == "cpu" else 2
    shared = batch_bytes(source, spec, width)
    streamed = spec.apart.streamed
    largest = source if source.num_params > candidate.num_params else candidate
    of_source = streamed_bytes(largest, spec, width) if streamed else width * served_params(largest)
    of_engine = _candidate_bytes(candidate, facts, width) + _cache_bytes(candidate, spec, width)
    return ApartNeeds(
        of_source + shared,
        of_engine + shared,
        of_engine,
        num_kept * kept_bytes(spec.num_samples, spec.seq_len, source.vocab_size, spec.apart.top_k),
        num_kept * STORED_BYTES * source.num_params if streamed else 0,
        streamed,
        spec.apart.top_k,
    )


def streamed_bytes(arch: Arch, spec: Validate, width: int) -> int:
    """Return the bytes of what a streamed model holds, without those of a batch."""
    ends_in_norm = any(map(arch.ends_in_norm, arch.layers))
    outer = arch.vocab_size * arch.hidden_size
    stored = STORED_BYTES * arch.num_outer_params
    layer = max(_layer_params(arch, each) for each in arch.layers)
    of_layers = layer * ((2 if ends_in_norm else 1) * width + STORED_BYTES)
    of_head = stored + 2 * width * outer + (width * layer if ends_in_norm else 0)
    streams = 2 * width * spec.num_samples * spec.seq_len * arch.stream_size
    return max(stored + width * outer, of_layers, of_head) + streams + _choice_bytes(arch, spec)


def _choice_bytes(arch: Arch, spec: Validate) -> int:
    """Return the bytes of the chosen positions of all samples, which a streamed model keeps where layers
    attend to the choice of an earlier one."""
    indexers = [arch.layers[idx].indexer for idx in choice_sources(arch)]
    kept = [each.top_k for each in indexers if each is not None and each.top_k < spec.seq_len]
    return 8 * spec.num_samples * spec.seq_len * max(kept, default=0)


def batch_bytes(arch: Arch, spec: Validate, width: int) -> int:
    """Return the bytes of scoring one batch of windows: activations, pages and logits."""
    rows = min(spec.windows_at_once(arch), spec.num_samples) * spec.seq_len
    widest = max(
        max(layer.linear_shape(name, arch.hidden_size)) for layer in arch.layers for name in layer.linears
    )
    group = max(
        sum(
            layer.linear_shape(name, arch.hidden_size)[0] * layer.linear_shape(name, arch.hidden_size)[1]
            for name in each.linears
        )
        for layer in arch.layers
        for each in layer.groups
    )
    states = max_pass_bytes(arch, rows, spec.windows_at_once(arch))
    computed = choosing_bytes(arch, spec.seq_len, rows) + terms_bytes(arch, rows)
    return width * (4 * rows * widest + group) + 3 * 4 * rows * arch.vocab_size + states + computed


def _layer_params(arch: Arch, layer: LayerShape) -> int:
    shapes = (layer.linear_shape(name, arch.hidden_size) for name in layer.linears)
    return sum(out * into for out, into in shapes) + layer.around_experts(arch.hidden_size)


def _candidate_bytes(arch: Arch, facts: PlanFacts, width: int) -> int:
    """Return the bytes of the candidate's weights: its codes on a GPU; on a CPU as if kernels held them in
    the dtype of the computation."""
    quantize = facts.specs.get("quantize")
    if isinstance(quantize, Quantize) and facts.device != "cpu":
        return (
            most_linear_bytes(quantize, arch)
            + outer_bytes(arch, quantize.head_scheme, itemsize=width)
            + (
                width * arch.vocab_size * arch.hidden_size  # a tied head is a second copy
            )
            + width * _shared_params(arch)  # of which decode rows have their own copy, too
            + 2 * width * absorbed_params(arch)  # whole and absorbed, of linears whose codes count above
        )
    return width * served_params(arch)


def _shared_params(arch: Arch) -> int:
    """Return the parameters of the shared experts that decode rows have among the others."""
    sizes = (each.experts.expert_size * each.shared_parts for each in arch.layers if each.experts is not None)
    return 3 * arch.hidden_size * sum(sizes)


def _cache_bytes(arch: Arch, spec: Validate, width: int) -> int:
    config = spec.engine_config(speculates=False)
    assert config.max_model_len is not None
    of_position = arch.numbers_cached(config.max_model_len) * width
    of_request = config.max_model_len * of_position + slot_bytes(arch, config.num_kept)
    return config.max_batch_size * of_request
