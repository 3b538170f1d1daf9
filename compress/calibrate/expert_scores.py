"""Scores of experts by what each adds to its layer's output: router-weighted expert activation (REAP, arXiv
2510.13999).

    S_e = mean over the tokens routed to e of  w_e(x) |f_e(x)|

with the router's weight w_e and the expert's output f_e; w_e is one where it is a factor of the input that
f_e reads already. The scores are those of the source model, from one walk through its layers; an expert to
which no token goes has the score 0. Every layer keeps the same number of experts, because a stock config
states one number for all.

Shapes: N samples, S sequence, T tokens of a sample, D hidden, E experts.
"""

import torch
from torch import Tensor

from compress.calibrate.observe import forward
from compress.calibrate.samples import Samples
from compress.calibrate.side_inputs import SideInputs
from compress.context import Context
from compress.models.decoder import DecoderLayer
from compress.models.experts import ALL_TOKENS
from compress.models.tap import no_tap
from compress.models.weights import WeightSource, build_layer, embedding_tables


def expert_scores(
    source: WeightSource, tokens_NS: Tensor, ctx: Context, *, compute_dtype: torch.dtype
) -> list[Tensor]:
    """Return the score of each expert, float64 [E] on the CPU, by layer; empty for a layer without experts.

    Raises:
        Interrupted: between layers, when a signal asked for it.
    """
    arch = source.arch
    device = torch.device(ctx.device)
    outer = source.outer()
    tables = embedding_tables(outer, device, compute_dtype)
    side_inputs = SideInputs.of(arch, outer, tokens_NS, dtype=compute_dtype, device=device)
    del outer
    samples = Samples((*tokens_NS.shape, arch.stream_size), compute_dtype, device)
    for idx, tokens_S in enumerate(tokens_NS.to(device=device, dtype=torch.int64)):
        samples[idx : idx + 1] = tables.embedded(arch, tokens_S).unsqueeze(0)
    found = []
    for idx in range(arch.num_layers):
        ctx.boundary(idx, arch.num_layers, f"scores of experts: layer {idx} of {arch.num_layers}")
        layer = build_layer(arch, idx, source.layer(idx), dtype=compute_dtype, device=device, narrow=True)
        experts = arch.layers[idx].experts
        sums = torch.zeros(0 if experts is None else experts.num_experts, dtype=torch.float64)
        counts = sums.clone()
        for sample in range(len(tokens_NS)):
            taps: dict[str, Tensor] = {}
            piece = slice(sample, sample + 1)
            tap = no_tap if experts is None else taps.__setitem__
            samples[piece] = forward(layer, samples[piece], tap, side_inputs.attention(piece))
            if experts is not None:
                add_scores_(layer, taps[ALL_TOKENS].flatten(0, -2), sums, counts)
        found.append(sums / counts.clamp(min=1))
    return found


@torch.no_grad()
def add_scores_(layer: DecoderLayer, x_TD: Tensor, sums_E: Tensor, counts_E: Tensor) -> None:
    """Add the weighted norms of a sample's outputs, and the number of its tokens, to those of each expert."""
    sums = []
    counts = []
    for _, tokens, weights, out_tL in layer.moe.outputs(x_TD, no_tap):
        norms_t = torch.linalg.vector_norm(layer.moe.added(out_tL), dim=1, dtype=torch.float32)
        sums.append((norms_t * weights).sum(dtype=torch.float64))
        counts.append(len(tokens))
    sums_E += torch.stack(sums).cpu()
    counts_E += torch.tensor(counts, dtype=torch.float64)


def best_experts(score_E: Tensor, num_kept: int, always: int = 0) -> list[int]:
    """Return the indices of the experts with the largest scores, in order of index; of equal ones the
    first. The last `always` ones, which every token chooses, are among them."""
    num_chosen = len(score_E) - always
    order = torch.argsort(score_E[:num_chosen], descending=True, stable=True)[: num_kept - always]
    return [*sorted(order.tolist()), *range(num_chosen, len(score_E))]
