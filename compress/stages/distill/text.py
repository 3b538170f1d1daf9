"""The text of a training: windows of a data card, a few of them held out. The teacher may write the
windows itself, from their first tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.artifact.resume import ResumePoint
from compress.context import Context
from compress.data.model_tokens import read_tokens
from compress.data.tokens import TokenSet
from compress.models.weights import WeightSource
from compress.registry.model_source import ModelSource
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.stages.distill.learning import Learning, SampledText

SAMPLES_NAME = "sampled-{:05d}.safetensors"
SAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class TrainingText:
    """Windows int32 [N, S+1] to train on and to measure on, and the number of bytes of the predicted
    tokens of the latter. `held_out_counted_NS`, bool, are those of them that count, None where all do."""

    training: TokenSet
    held_out_NS: Tensor
    num_bytes: int
    held_out_counted_NS: Tensor | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Title, license and digest of the text to train on."""
        card = self.training.source
        return {"title": card["title"], "license": card["license"], "digest": self.training.digest()}

    def to_parts(self) -> tuple[Any, ...]:
        """Return the values that make up the text, as they are sent between ranks."""
        tokens = self.training
        counts = tokens.num_bytes, tokens.num_scored_bytes
        training = (tokens.tokens_NS, *counts, dict(tokens.source), tokens.counted_NS)
        return training, self.held_out_NS, self.num_bytes, self.held_out_counted_NS

    @staticmethod
    def from_parts(parts: tuple[Any, ...]) -> "TrainingText":
        """Return the text that these parts make up."""
        training, *held_out = parts
        return TrainingText(TokenSet(*training), *held_out)

    def with_training(self, tokens_NS: Tensor) -> "TrainingText":
        """Return this text with other windows to train on, which keep the facts of the text that they were
        made from; all of their tokens count."""
        return replace(self, training=replace(self.training, tokens_NS=tokens_NS, counted_NS=None))


def read_text(spec: Learning, source: ModelSource, ctx: Context) -> TrainingText:
    """Return windows to train on and windows that are held out, from one draw. A larger sample begins with
    the smaller one, so the held-out windows are the first and keep their byte count."""

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
    counted_NS = everything.counted_NS
    rest_counted_NS = None if counted_NS is None else counted_NS[spec.eval_samples :]
    return TrainingText(
        TokenSet(rest_NS, 0, 0, everything.source, rest_counted_NS),
        held_out.tokens_NS,
        held_out.num_scored_bytes,
        held_out.counted_NS,
    )


def prepared_text(
    spec: Learning, source: ModelSource, teacher: WeightSource, ctx: Context, *, device: torch.device
) -> TrainingText:
    """Return the text with its windows to train on, written by the teacher where the recipe asks for that."""
    ctx.boundary(0, spec.num_steps, f"reading {spec.data}")
    text = read_text(spec, source, ctx)
    return (
        text
        if spec.sample is None
        else text.with_training(
            sample_text(spec.sample, text.training.tokens_NS, teacher, ctx, device=device)
        )
    )


def shared_text(
    spec: Learning, source: ModelSource, teacher: WeightSource, ctx: Context, *, device: torch.device
) -> TrainingText:
    """Return the prepared text on every rank; rank 0 reads it and sends it to the others."""
    return TrainingText.from_parts(
        ctx.ranks.from_lead(lambda: prepared_text(spec, source, teacher, ctx, device=device).to_parts())
    )


def sample_text(
    sample: SampledText, prompts_NS: Tensor, teacher: WeightSource, ctx: Context, *, device: torch.device
) -> Tensor:
    """Return the windows with all but their first tokens written by the teacher, end-of-text tokens
    included; resumable."""
    length = prompts_NS.shape[1]
    engine: Engine | None = None
    parts: list[Tensor] = []
    for idx, part in enumerate(prompts_NS.split(SAMPLED_AT_ONCE)):
        point = ResumePoint(ctx.scratch / SAMPLES_NAME.format(idx), ctx.progress.log)
        ctx.boundary(idx * SAMPLED_AT_ONCE, prompts_NS.shape[0], "text written by the teacher")
        stored = point.load_tensors()
        if stored is None:
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
            stored = {"tokens": torch.tensor(written, dtype=torch.int32)}
            point.save_tensors(stored)
        parts.append(stored["tokens"])
    return torch.cat(parts)
