"""`quantize`: round every decoder linear to codes, layer by layer, resumable after each layer; then the head,
if it has a scheme.

How codes are found is a combination of smoother, rounding target, rounder and refiner, for any scheme. The
head is rounded to nearest. Where nothing depends on activations, the stage needs no calibration text and runs
no layer.

spec.py       what a recipe states            layers.py     the linears, compressed layer by layer
schemes.py    the scheme of each linear       tune.py       scales, trained end to end
estimate.py   for `compress plan`             ../budget/    mixed precision
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compress.artifact.atomic import place
from compress.artifact.writer import ArtifactWriter
from compress.calibrate.arithmetic import computes_in
from compress.calibrate.expert_tokens import expert_facts, expert_summary, unseen_warning
from compress.calibrate.kv import cache_warning
from compress.calibrate.layer_state import Row
from compress.context import Context
from compress.digest import digest_json
from compress.export import open_weights
from compress.models.canonical import OUTER_NAME, layer_name, load_weights, save_weights
from compress.models.overrides import described
from compress.models.weights import dense
from compress.quant.numerics import nearest_weight
from compress.quant.scheme import QuantizedWeight, Scheme
from compress.stages import STAGES, Inputs, Port
from compress.stages.budget.spec import Mixed
from compress.stages.budget.times import depends
from compress.stages.quantize.estimate import estimate
from compress.stages.quantize.layers import quantize_layers
from compress.stages.quantize.schemes import check_model
from compress.stages.quantize.spec import Quantize
from compress.stages.quantize.tune import tuned_directory

HEAD_ROWS = 8192
"""Rows of a head that are rounded at once; rows are independent of one another."""


def _depends(spec: Quantize, device: str) -> Mapping[str, str]:
    """Return what decides the result besides recipe and inputs.

    That is the kind of device and its compute dtype, because neither resumes from the other's files; the
    order of overrides, which a mapping in the cache key does not keep; what the times of a budget of time
    depend on; and that a budget of bytes counts those of the model's dtype, where it once counted 16 bits.
    """
    order = {"overrides": digest_json(list(spec.overrides))} if spec.overrides else {}
    costs: Mapping[str, str] = {}
    if isinstance(spec.scheme, Mixed):
        budget = spec.scheme.budget
        costs = depends(budget.device, device) if budget.is_time else {"bytes": "of the model's dtype"}
    return {**computes_in(device), **order, **costs}


def _spares(spec: Quantize) -> tuple[Port, ...]:
    return () if spec.needs_activations else (Port.CALIB,)


@STAGES.stage(
    "quantize",
    version=10,
    takes=(Port.DENSE, Port.CALIB),
    spares=_spares,
    gives=Port.QUANTIZED,
    spec=Quantize,
    estimate=estimate,
    depends=_depends,
    on_all_ranks=quantize_layers,
)
def quantize(spec: Quantize, inputs: Inputs, out: ArtifactWriter, ctx: Context) -> None:
    source = open_weights(inputs[Port.DENSE].path)
    check_model(spec, source.arch)
    scheme, explained, rows = quantize_layers(spec, inputs, ctx)
    directory = tuned_directory(ctx.scratch, explained)
    for name in map(layer_name, range(source.arch.num_layers)):
        place(directory / name, out.path / name)
    if scheme is None or scheme.head is None:
        place(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME)
    else:
        _quantize_head(ctx.scratch / OUTER_NAME, out.path / OUTER_NAME, scheme.head, torch.device(ctx.device))
    arch, layers = described(source.arch, scheme)
    observed = (
        {"layers": [row for row in rows if "linear" in row]}
        if spec.needs_activations
        else {"data_free": True}
    )
    guided = {} if spec.guide is None else {"guided": True}
    facts = {
        "method": spec.method(),
        **observed,
        **guided,
        **_expert_facts(spec, rows, ctx),
        **explained,
        **_cache_facts(spec, rows, ctx),
    }
    out.describe(
        role="quantized",
        arch=arch,
        layers=layers,
        scheme=None if scheme is None else scheme.to_json(),
        facts=facts,
    )


def _quantize_head(stored: Path, path: Path, scheme: Scheme, device: torch.device) -> None:
    """Write the outer weights with codes for the head. Blocks of rows are rounded in turn, because float32
    copies of a whole head would be the peak of the stage."""
    outer = load_weights(stored, None)
    rows = dense(outer["head.weight"]).split(HEAD_ROWS)
    blocks = [nearest_weight(each.to(device), scheme, each.dtype) for each in rows]
    codes, scales = (
        torch.cat([part.cpu() for part in parts])
        for parts in zip(*((b.codes_OI, b.scale_OG) for b in blocks), strict=True)
    )
    save_weights(path, outer | {"head.weight": QuantizedWeight(scheme, codes, scales)})


def _expert_facts(spec: Quantize, rows: list[Row], ctx: Context) -> dict[str, Any]:
    """Return the manifest's facts of the tokens that experts saw, and log them; none for a dense model."""
    facts = expert_facts(rows, spec.expert_policy)
    if not facts:
        return {}
    ctx.progress.log(f"experts: {expert_summary(facts)}")
    if warning := unseen_warning(facts):
        ctx.progress.log(f"warning: {warning}")
    return {"experts": facts}


def _cache_facts(spec: Quantize, rows: list[Row], ctx: Context) -> dict[str, Any]:
    """Return the manifest's facts of a quantized KV cache: its format and, where scales are calibrated, what
    they do to each layer."""
    if (kv_format := spec.kv_format()) is None:
        return {}
    cached = [row for row in rows if "cache" in row]
    if warning := cache_warning(cached):
        ctx.progress.log(warning)
    return {"kv_cache": {"format": kv_format, "layers": cached, "warning": warning}}
