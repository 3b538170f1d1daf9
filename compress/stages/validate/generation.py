"""Texts of both models and their behaviour at long context, where the recipe asks for them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.export import open_weights
from compress.runtime.engine import Engine
from compress.runtime.request import SamplingParams
from compress.stages import Inputs
from compress.stages.validate.spec import Generation, LongContext, Validate
from compress.validate.generation.needle import probe
from compress.validate.generation.positions import by_position
from compress.validate.generation.texts import GenerationRow, compare_texts, read_prompts
from compress.validate.tasks.text_model import TextModel


def generate_texts(own: Generation, models: Mapping[str, TextModel], *, seed: int) -> list[GenerationRow]:
    """Return the rows of greedy and of sampled texts.

    Raises:
        UsageError: as `read_prompts`, or `chat` and the model has no chat template.
    """
    params = {"greedy": SamplingParams(max_tokens=own.max_tokens)}
    if own.temperature > 0:
        params["sampled"] = SamplingParams(
            max_tokens=own.max_tokens, temperature=own.temperature, top_p=own.top_p, seed=seed
        )
    prompts = read_prompts(Path(own.prompts), own.num_prompts)
    return compare_texts(models, prompts, params, num_shown=own.num_shown, chat=own.chat)


def long_context(
    spec: Validate,
    own: LongContext,
    inputs: Inputs,
    models: Mapping[str, TextModel],
    candidate_path: Path,
    ctx: Context,
) -> dict[str, Any]:
    """Return perplexity by position and the needle's rows, of the candidate and of its weights with each
    further KV cache format.

    Raises:
        UsageError: too little text for the windows.
    """
    tokens, facts = read_tokens(
        inputs.source,
        own.data or spec.data,
        num_samples=own.num_samples,
        seq_len=own.seq_len,
        seed=None,
        offline=ctx.offline,
    )
    source = models["source"]
    texts = tokens.tokens_NS.tolist()
    lengths = own.needle_lengths or tuple(sorted({own.seq_len // 2, own.seq_len}))
    positions = []
    needles = []
    for name in ("candidate", *own.kv_formats):
        model = models["candidate"]
        if name != "candidate":
            config = replace(model.engine.config, kv_format=name)
            weights = open_weights(candidate_path)
            model = TextModel(Engine(weights, device=model.engine.device, config=config), inputs.source.path)
        engine = model.engine
        rows = by_position(
            source.engine.runner.score,
            engine.runner.score,
            tokens.tokens_NS.to(engine.device),
            num_buckets=own.num_buckets,
        )
        positions.append(
            {"model": name, "kv_format": engine.kv_format, "rows": [each.as_json() for each in rows]}
        )
        if own.depths:
            compared = {"source": source, name: model}
            found = probe(compared, texts, lengths=lengths, depths=own.depths, seed=ctx.seed)
            needles += [each.as_json() for each in found if each.model == name or name == "candidate"]
    return {
        "data": facts["title"],
        "seq_len": own.seq_len,
        "num_windows": len(texts),
        "source_kv_format": source.engine.kv_format,
        "positions": positions,
        "needle": needles,
    }
