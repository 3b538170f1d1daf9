"""The residual stream of a whole model, one layer at a time: the input and output of every layer, and how far
two models differ at the end.

Between layers the samples are in host memory, and one layer of the model is on the device, as in the
sequential runner.

Shapes: N samples, S sequence (T tokens of one sample), D hidden, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.calibrate.observe import forward
from compress.calibrate.side_inputs import SideInputs
from compress.context import Context
from compress.models.logits import capped
from compress.models.norms import final_norm
from compress.models.tap import no_tap
from compress.models.weights import WeightSource, build_layer, dense, embedding_tables, fill_, norm_weights

Visit = Callable[[int, Tensor, Tensor], None]
"""A callback with (layer index, input, output) of one sample, both [T, D]."""


def ignore(layer_idx: int, before_TD: Tensor, after_TD: Tensor) -> None:
    """Do nothing: the caller of `walk` needs only the final activations."""


def walk(
    source: WeightSource,
    tokens_NS: Tensor,
    ctx: Context,
    *,
    compute_dtype: torch.dtype,
    task: str,
    visit: Visit = ignore,
) -> Tensor:
    """Return the outputs of the last layer, [N, S, D] on the host.

    Args:
        task: what the walk is for, shown with the progress.
        visit: called for every layer and sample.

    Raises:
        Interrupted: between layers, when a signal asked for it.
    """
    arch = source.arch
    device = torch.device(ctx.device)
    outer = source.outer()
    tables = embedding_tables(outer, dtype=compute_dtype)
    side_inputs = SideInputs.of(arch, outer, tokens_NS, dtype=compute_dtype, device=device, on_host=True)
    del outer
    x_NSD = torch.stack(
        [tables.embedded(arch, sample).to(compute_dtype) for sample in tokens_NS.to(torch.int64)]
    )
    for idx in range(arch.num_layers):
        ctx.boundary(idx, arch.num_layers, f"{task}: layer {idx} of {arch.num_layers}")
        layer = build_layer(arch, idx, source.layer(idx), dtype=compute_dtype, device=device)
        for sample in range(len(x_NSD)):
            piece = slice(sample, sample + 1)
            before_1SD = x_NSD[piece].to(device)
            after_1SD = forward(layer, before_1SD, no_tap, side_inputs.attention(piece))
            visit(idx, before_1SD[0], after_1SD[0])
            x_NSD[sample] = after_1SD[0].to("cpu")
    return x_NSD


@torch.no_grad()
def kl_between(source: WeightSource, x_NSD: Tensor, y_NSD: Tensor, device: torch.device) -> float:
    """Return the mean KL per token, in nats, from the predictions that the source's norm and head make of x
    to those that they make of y."""
    outer = source.outer()
    arch = source.arch
    norm = final_norm(arch)
    fill_(norm, norm_weights(outer), dtype=x_NSD.dtype, device=device)
    head_VD = dense(outer["embed.weight" if arch.tied_head else "head.weight"]).to(
        device=device, dtype=x_NSD.dtype
    )
    bias_V = dense(outer["head.bias"]).to(device=device, dtype=x_NSD.dtype) if arch.head_bias else None
    total = 0.0
    for x_SD, y_SD in zip(x_NSD, y_NSD, strict=True):
        p_SV, q_SV = (
            F.log_softmax(logits_SV.to(torch.float32), dim=-1)
            for logits_SV in (
                capped(arch, F.linear(norm(each.to(device)), head_VD, bias_V)) for each in (x_SD, y_SD)
            )
        )
        total += float((p_SV.exp() * (p_SV - q_SV)).sum(dtype=torch.float64))
    return total / (x_NSD.shape[0] * x_NSD.shape[1])
