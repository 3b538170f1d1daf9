"""What a recipe says of validation: evaluation text, what is timed, and the gates that decide."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from compress.errors import UsageError, did_you_mean
from compress.models.arch import Arch
from compress.recipe import Spec, checked_by
from compress.runtime.engine_config import EngineConfig
from compress.validate.gates import parse_gates

KVFormat = Literal["DENSE", "FP8_STATIC", "FP8_TOKEN_HEAD", "INT8_TOKEN_HEAD", "INT4_TOKEN_HEAD"]


class Latency(Spec):
    """What is timed, on this machine."""

    batch_sizes: tuple[int, ...] = Field((1, 4), min_length=1)
    prompt_tokens: int = Field(128, ge=1)
    output_tokens: int = Field(32, ge=2)
    repeats: int = Field(5, ge=2)
    warmups: int = Field(1, ge=0)


class Validate(Spec):
    """Evaluation text, latency conditions, and the gates that decide."""

    against: Literal["source"] = "source"
    data: str = Field("builtin://python-eval", description="evaluation text: a data card or builtin://python-eval")
    num_samples: int = Field(32, ge=2)
    seq_len: int = Field(512, ge=8)
    kv_format: KVFormat | None = Field(
        None, description="of the candidate's KV cache; by default what the artifact states, the model's dtype where it states nothing"
    )
    latency: Latency | None = Latency()
    gates: Annotated[dict[str, float | dict[str, float]], checked_by(parse_gates)] = Field(
        default_factory=dict, description="metric -> limit, latency per device"
    )

    def engine_config(self) -> EngineConfig:
        """Room for what is measured and no more: two engines share the device, and a cache for the model's full length would fill it."""
        if self.latency is None:
            return EngineConfig(max_batch_size=1, max_model_len=self.seq_len)
        length = max(self.seq_len, self.latency.prompt_tokens + self.latency.output_tokens)
        return EngineConfig(max_batch_size=max(self.latency.batch_sizes), max_model_len=length)

    def windows_at_once(self, arch: Arch) -> int:
        """Windows whose float32 logits stay near half a gigabyte a side."""
        return max(1, min(8, (1 << 27) // (self.seq_len * arch.vocab_size)))


def kv_format_named(name: str | None) -> KVFormat | None:
    """Raises UsageError: there is no KV cache of that name."""
    known = {each: each for each in get_args(KVFormat)}
    if name is not None and name not in known:
        raise UsageError(f"unknown KV cache format '{name}'.{did_you_mean(name, known)}")
    return known.get(name)
