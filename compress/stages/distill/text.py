"""The text of a distillation: windows of a data card, a few of them held out, or windows that the teacher
goes on writing itself."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.artifact.tensors import load_tensors, save_tensors
from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.data.tokens import TokenSet
from compress.models.weights import WeightSource
from compress.registry.model_source import ModelSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.stages.distill.learning import Learning, Sample

SAMPLES_NAME = "sampled-{:05d}.safetensors"
SAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class Text:
    """Windows int32 [N, S+1] to train on and to measure on; the bytes that the latter's predicted tokens
    stand for."""

    training: TokenSet
    held_out_NS: Tensor
    num_bytes: int

    @property
    def facts(self) -> dict[str, Any]:
        card = self.training.source
        return {"title": card["title"], "license": card["license"], "digest": self.training.digest()}

    def with_training(self, tokens_NS: Tensor) -> "Text":
        """The same with other windows to train on, which go by the facts of the text that they were made
        from."""
        return replace(self, training=replace(self.training, tokens_NS=tokens_NS))


def read_text(spec: Learning, source: ModelSource, ctx: Context) -> Text:
    """Both from one draw: a larger sample begins with the smaller one, so the held-out windows are the first
    and keep their byte count."""

    def draw(num_samples: int) -> TokenSet:
        tokens, _ = read_tokens(
            source,
            spec.data,
            num_samples=num_samples,
            seq_len=spec.seq_len + 1,
            seed=ctx.seed,
            offline=ctx.offline,
        )
        return tokens

    held_out = draw(spec.eval_samples)
    everything = draw(spec.eval_samples + spec.num_windows)
    rest_NS = everything.tokens_NS[spec.eval_samples :]
    return Text(TokenSet(rest_NS, 0, 0, everything.source), held_out.tokens_NS, held_out.num_scored_bytes)


def prepared_text(
    spec: Learning, source: ModelSource, teacher: WeightSource, ctx: Context, *, device: torch.device
) -> Text:
    """The windows that are trained on, written by the teacher if that is asked for, and those held out."""
    ctx.boundary(0, spec.num_steps, f"reading {spec.data}")
    text = read_text(spec, source, ctx)
    return (
        text
        if spec.sample is None
        else text.with_training(sampled(spec.sample, text.training.tokens_NS, teacher, ctx, device=device))
    )


def sampled(
    sample: Sample, prompts_NS: Tensor, teacher: WeightSource, ctx: Context, *, device: torch.device
) -> Tensor:
    """The windows with all but their first tokens written by the teacher, end-of-text tokens as they come;
    resumable."""
    length = prompts_NS.shape[1]
    engine: Engine | None = None
    parts: list[Tensor] = []
    for idx, part in enumerate(prompts_NS.split(SAMPLED_AT_ONCE)):
        file = ctx.scratch / SAMPLES_NAME.format(idx)
        ctx.boundary(idx * SAMPLED_AT_ONCE, prompts_NS.shape[0], "text written by the teacher")
        if not file.exists():
            engine = engine or Engine(
                teacher,
                device=device,
                config=EngineConfig(max_batch_size=SAMPLED_AT_ONCE, max_model_len=length),
            )
            params: dict[str, Any] = {"temperature": sample.temperature, "ignore_eos": True}
            requests = [
                Request(
                    str(row),
                    tuple(prompt[: sample.prompt_tokens]),
                    SamplingParams(
                        length - sample.prompt_tokens,
                        seed=ctx.seed * 1_000_003 + idx * SAMPLED_AT_ONCE + row,
                        **params,
                    ),
                )
                for row, prompt in enumerate(part.tolist())
            ]
            written = [[*each.prompt, *each.tokens] for each in engine.generate(requests)]
            save_tensors(file, {"tokens": torch.tensor(written, dtype=torch.int32)})
        parts.append(load_tensors(file)["tokens"])
    return torch.cat(parts)
