"""The layers of a quantized model: the scheme of each linear, and the passes that compress layer after
layer."""

from dataclasses import replace
from typing import Any, cast

import torch

from compress.calibrate.arithmetic import compute_dtype
from compress.calibrate.data_free import run_data_free
from compress.calibrate.guide import GuideFiles, make_guide
from compress.calibrate.layer_state import LayerPass, Row
from compress.calibrate.sequential import Compression, run_sequential
from compress.context import Context
from compress.data.model_tokens import TOKENS_NAME
from compress.data.tokens import TokenSet, load_token_set
from compress.export import open_weights
from compress.methods.quantize import Refiner, Rounder, RoundingTarget, Smoother
from compress.methods.quantize.passes import BaselinePass, DataFreePass, RoundPass, SmoothPass
from compress.models.weights import WeightSource
from compress.quant.kv import FP8_STATIC
from compress.quant.model_scheme import ModelScheme
from compress.quant.scheme import Schemes
from compress.stages import Inputs, Port
from compress.stages.budget.choose import choose
from compress.stages.budget.spec import Mixed
from compress.stages.quantize.schemes import mixed_schemes, model_scheme, outer_bytes
from compress.stages.quantize.spec import Quantize
from compress.stages.quantize.tune import check_num_samples, tune_scales


def quantization_passes(
    spec: Quantize, schemes: Schemes | None, stored_dtype: torch.dtype
) -> list[LayerPass]:
    """Return the passes of a spec in their order; none where all weights stay dense."""
    if schemes is None:
        return []
    passes: list[LayerPass] = [BaselinePass(schemes, stored_dtype)]
    if spec.smooth is not None:
        passes.append(SmoothPass(cast(Smoother, spec.smooth), schemes, stored_dtype))
    refiner = cast(Refiner | None, spec.refine)
    target = cast(RoundingTarget | None, spec.target)
    passes.append(RoundPass(cast(Rounder, spec.round), schemes, stored_dtype, refiner, target))
    return passes


def data_free_passes(spec: Quantize, schemes: Schemes | None, stored_dtype: torch.dtype) -> list[LayerPass]:
    """Return the passes of a spec that needs no activations; none where all weights stay dense."""
    if schemes is None:
        return []
    return [DataFreePass(cast(Rounder, spec.round), schemes, stored_dtype)]


def quantize_layers(
    spec: Quantize, inputs: Inputs, ctx: Context
) -> tuple[ModelScheme | None, dict[str, Any], list[Row]]:
    """Compress every layer into the scratch directory, on all ranks.

    Rank 0 chooses the schemes. Where nothing depends on activations, rank 0 compresses all layers, and no
    token goes through any.

    Returns:
        The schemes (None: all dense), facts of how they were chosen and tuned, and the rows of the layer
            report.
    """
    source = open_weights(inputs[Port.DENSE].path)
    stored_dtype = getattr(torch, source.arch.dtype)
    if not spec.needs_activations:
        scheme = model_scheme(spec, source.arch)
        if ctx.ranks.rank == 0:
            run_data_free(source, data_free_passes(spec, scheme, stored_dtype), ctx.scratch, ctx)
        return scheme, {}, []
    tokens = load_token_set(inputs[Port.CALIB].path / TOKENS_NAME)
    tokens_NS = tokens.tokens_NS
    if spec.tune is not None:
        check_num_samples(spec.tune, len(tokens_NS))  # before the layers, which may take hours
    chosen, explained = ctx.ranks.from_lead(lambda: _schemes(spec, source, tokens, ctx))
    scheme = None if chosen is None else ModelScheme.from_json(chosen)
    in_dtype = compute_dtype(ctx.device, stored_dtype)
    if spec.guide is not None and ctx.ranks.rank == 0:
        make_guide(spec.guide, source, tokens_NS, ctx, compute_dtype=in_dtype, counted_NS=tokens.counted_NS)
    ctx.ranks.barrier()  # rank 0 writes the guide before any rank reads it
    passes = quantization_passes(spec, scheme, stored_dtype)
    kv_scales = spec.kv_format() == FP8_STATIC
    rows = run_sequential(
        source,
        tokens_NS,
        Compression(
            passes,
            scheme=scheme,
            kv_scales=kv_scales,
            guide=None if spec.guide is None else GuideFiles(ctx),
            true_sequential=spec.true_sequential,
            experts=spec.expert_policy,
            counted_NS=tokens.counted_NS,
        ),
        ctx.scratch,
        ctx,
        compute_dtype=in_dtype,
    )
    if spec.tune is not None and scheme is not None:
        ctx.ranks.barrier()  # rank 0 writes the last layer before any rank reads it
        explained = {
            **explained,
            "tuning": tune_scales(spec.tune, source, scheme, tokens, ctx, compute_dtype=in_dtype),
        }
    return scheme, explained, rows


def _schemes(
    spec: Quantize, source: WeightSource, tokens: TokenSet, ctx: Context
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the model's scheme as JSON, None where all linears stay dense, and facts of the choice."""
    arch = source.arch
    if not isinstance(spec.scheme, Mixed):
        scheme = model_scheme(spec, arch)
        return None if scheme is None else scheme.to_json(), {}
    chosen, facts = choose(
        spec.scheme,
        mixed_schemes(spec, spec.scheme, arch),
        source,
        tokens,
        ctx,
        compute_dtype=compute_dtype(ctx.device, getattr(torch, arch.dtype)),
        outer_bytes=outer_bytes(arch, spec.head_scheme),
    )
    return replace(chosen, head=spec.head_scheme).to_json(), {"mixed": facts}
