"""Models scored one after the other: each is loaded, or read layer by layer, while no other is in memory.

The scores of the source stay on disk (`validate/kept_scores.py`), with the results that
several runs reuse, so that the next candidate of the same source finds them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compress
from compress.context import Context
from compress.data.tokens import TokenSet
from compress.digest import digest_json
from compress.errors import UsageError
from compress.export import open_weights
from compress.machine import arithmetic_class
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.streamed_model import StreamedModel
from compress.stages import Inputs, Port
from compress.stages.validate.spec import Apart, Validate
from compress.validate.accuracy import Accuracy
from compress.validate.kept_scores import KeptScores, compare_kept

SOURCE = "source"
DENSE = "dense"
CANDIDATE = "candidate"
LoadEngine = Callable[[str, Path], Engine]
"""(side, directory) -> the loaded model."""


def score_apart(
    spec: Validate,
    inputs: Inputs,
    paths: Mapping[str, Path],
    tokens: TokenSet,
    load: LoadEngine,
    config: EngineConfig,
    ctx: Context,
) -> tuple[dict[tuple[str, str], Accuracy], dict[str, Engine], dict[str, Any]]:
    """Return the accuracy of the candidate against the source and, with weights in between, of each step by
    itself; the candidate, still loaded; and facts of the scoring. With `top_k` KL is an estimate.
    `config` has the sizes that `load` gives an engine.

    Raises:
        UsageError: models of several vocabularies, or logits that are not finite.
    """
    assert spec.apart is not None
    device = torch.device(ctx.device)
    arches = {side: open_weights(path).arch for side, path in paths.items()}
    sizes = {side: arch.vocab_size for side, arch in arches.items()}
    if len(set(sizes.values())) > 1:
        raise UsageError(
            f"the source {inputs.source.name} has {sizes[SOURCE]} tokens and the artifact "
            f"{sizes[CANDIDATE]}: it was not made from this model. Name its own source."
        )
    batch_size = spec.windows_at_once(arches[SOURCE])
    tokens_NS = tokens.tokens_NS.to(device)
    scored = partial(_scored, spec, paths, load, config, tokens_NS, batch_size, ctx)
    compare = partial(
        compare_kept, tokens_NS=tokens_NS, num_bytes=tokens.num_scored_bytes, batch_size=batch_size
    )
    kept: dict[str, KeptScores] = {}
    found: dict[tuple[str, str], tuple[Accuracy, Accuracy]] = {}
    for side in (each for each in (SOURCE, DENSE) if each in paths):
        if side == DENSE:
            found[SOURCE, DENSE] = compare([kept[SOURCE]], scored(side))[0]
        digest = inputs.source.digest if side == SOURCE else inputs[Port.DENSE].digest
        kept[side] = _kept(spec.apart, config, arches[side].dtype, digest, tokens, batch_size, ctx)
        if not kept[side].are_whole():
            kept[side].fill(scored(side))
    candidate = load(CANDIDATE, paths[CANDIDATE])
    logits = (candidate.runner.score(batch) for batch in tokens_NS.split(batch_size))
    with torch.inference_mode():
        for side, pair in zip(kept, compare(list(kept.values()), logits), strict=True):
            found[side, CANDIDATE] = pair
    lower, whole = found[SOURCE, CANDIDATE]
    facts = {
        "streamed": spec.apart.streamed,
        "top_k": spec.apart.top_k,
        "kept_bytes": sum(each.num_bytes() for each in kept.values()),
        "kl_mean_lower": lower.kl_mean.value,
        "kl_mean": whole.kl_mean.value,
    }
    order = [(SOURCE, CANDIDATE), (SOURCE, DENSE), (DENSE, CANDIDATE)]
    accuracy = {pair: found[pair][1] for pair in order if pair in found}
    return accuracy, {CANDIDATE: candidate}, facts


def _kept(
    apart: Apart,
    config: EngineConfig,
    stored_dtype: str,
    digest: str,
    tokens: TokenSet,
    batch_size: int,
    ctx: Context,
) -> KeptScores:
    identity = {
        "source": digest,
        "tokens": tokens.digest(),
        "dtype": stored_dtype,
        "machine": arithmetic_class(ctx.device),
        "sizes": digest_json({name: str(value) for name, value in asdict(config).items()}),
        "torch": torch.__version__,
        "compress": compress.__version__,
    }
    return KeptScores(
        ctx.scratch if ctx.kept is None else ctx.kept,
        tokens.tokens_NS,
        identity=identity,
        batch_size=batch_size,
        top_k=apart.top_k,
        log=ctx.progress.log,
    )


def _scored(
    spec: Validate,
    paths: Mapping[str, Path],
    load: LoadEngine,
    config: EngineConfig,
    tokens_NS: Tensor,
    batch_size: int,
    ctx: Context,
    side: str,
) -> Iterator[Tensor]:
    """Yield the logits of a model for each batch; the model is freed at the end."""
    assert spec.apart is not None
    if spec.apart.streamed:
        device = torch.device(ctx.device)
        source = open_weights(paths[side])
        model = StreamedModel(source, device=device, config=config)
        num_layers = source.arch.num_layers

        def done(layer_idx: int) -> None:
            ctx.boundary(layer_idx, num_layers, f"scoring the {side}, layer {layer_idx} of {num_layers}")

        yield from model.score(tokens_NS, batch_size=batch_size, done=done)
        return
    ctx.boundary(0, 1, f"scoring the {side}")
    engine = load(side, paths[side])
    for batch in tokens_NS.split(batch_size):
        with torch.inference_mode():
            yield engine.runner.score(batch)
