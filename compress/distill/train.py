"""The one training loop: it trains the reference model, and recovery of pruned models, drafts and scale tuning will run through it.

AdamW (arXiv 1711.05101) with decay on matrices only, or Muon for the matrices inside the layers and AdamW for the rest; linear warm-up,
cosine to zero, clipped gradients; float32 master weights and a lower compute dtype by autocast. The batch of a step is a pure function of
(seed, step), so what a step sees does not depend on when it runs, and the seed decides everything but the rounding of the hardware. A loss
that is not finite stops the run at the next log row, before anybody sees a result.

Shapes: B batch (sequences a step), S sequence, N windows.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.distill.muon import Muon
from compress.errors import UsageError

LossFn = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """`batch_size` sequences a step, computed `micro_batch_size` at a time; `peak_lr` is reached after `warmup_frac` of the steps."""

    num_steps: int
    batch_size: int
    micro_batch_size: int
    peak_lr: float
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup_frac: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    compute_dtype: torch.dtype = torch.bfloat16
    log_every: int = 50
    compile: bool = False

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch_size:
            raise UsageError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}.")

    def learning_rate(self, step: int) -> float:
        warmup = max(1, round(self.num_steps * self.warmup_frac))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.num_steps - warmup)))


@dataclass(frozen=True)
class TrainLogRow:
    """Mean loss in nats per token since the last row, at the end of `step` (1-based)."""

    step: int
    num_tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float


class TokenStream:
    """One long row of token ids as shuffled windows of `seq_len` + 1; every epoch has its own offset and order.

    Raises:
        UsageError: the stream is shorter than a batch of windows.
    """

    def __init__(self, tokens: Tensor, *, seq_len: int, batch_size: int, seed: int) -> None:
        self._tokens, self._seq_len, self._batch_size, self._seed = tokens, seq_len, batch_size, seed
        self._batches_per_epoch = (tokens.numel() - 1 - seq_len) // seq_len // batch_size
        if self._batches_per_epoch < 1:
            raise UsageError(f"{tokens.numel()} training tokens do not fill one batch of {batch_size} x {seq_len}; give more text.")
        self._epoch, self._starts = -1, torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Tensor:
        """int64 [B, S+1] of a step."""
        epoch, idx = divmod(step, self._batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = int(torch.randint(self._seq_len, (1,), generator=generator))
            num_windows = (self._tokens.numel() - 1 - offset) // self._seq_len
            self._starts = (offset + self._seq_len * torch.randperm(num_windows, generator=generator)).to(self._tokens.device)
            self._epoch = epoch
        starts = self._starts[idx * self._batch_size : (idx + 1) * self._batch_size]
        span = torch.arange(self._seq_len + 1, device=self._tokens.device)
        return self._tokens[starts.unsqueeze(1) + span].to(torch.int64)


def train(
    model: nn.Module, loss_fn: LossFn, batch_of: Callable[[int], Tensor], config: TrainConfig, *, device: torch.device
) -> Iterator[TrainLogRow]:
    """Train `model` in place; yields a row every `log_every` steps and at the end.

    Raises:
        UsageError: the loss became NaN or infinite; the message names the step.
    """
    optimizers = _optimizers(model, config, device)
    compute_loss = torch.compile(loss_fn, dynamic=False) if config.compile else loss_fn
    num_micro = config.batch_size // config.micro_batch_size
    window = _Window()
    for step in range(config.num_steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = config.learning_rate(step)
        tokens_BS = batch_of(step).to(device, non_blocking=True)
        for micro_BS in tokens_BS.chunk(num_micro):
            with torch.autocast(device.type, dtype=config.compute_dtype, enabled=config.compute_dtype != torch.float32):
                loss = compute_loss(model, micro_BS) / num_micro
            loss.backward()
            window.add(loss.detach())
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        window.num_steps += 1
        window.num_tokens += tokens_BS.shape[0] * (tokens_BS.shape[1] - 1)
        if (step + 1) % config.log_every == 0 or step + 1 == config.num_steps:
            yield window.row(step + 1, float(grad_norm), config.learning_rate(step))


class _Window:
    """What happened since the last log row; the loss stays on the device until a row is made."""

    def __init__(self) -> None:
        self.total_tokens = 0
        self._restart()

    def _restart(self) -> None:
        self._loss: Tensor | None = None
        self.num_steps, self.num_tokens, self._start_s = 0, 0, time.perf_counter()

    def add(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss

    def row(self, step: int, grad_norm: float, learning_rate: float) -> TrainLogRow:
        assert self._loss is not None
        loss = float(self._loss) / self.num_steps
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UsageError(f"training diverged before step {step}: loss {loss}, gradient norm {grad_norm}. Lower peak_lr.")
        self.total_tokens += self.num_tokens
        speed = self.num_tokens / (time.perf_counter() - self._start_s)
        row = TrainLogRow(step, self.total_tokens, loss, grad_norm, learning_rate, speed)
        self._restart()
        return row


def _optimizers(model: nn.Module, config: TrainConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, and before it Muon when it is asked for. A layer is what stands in a module list named `layers`, as in `Decoder`."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = [p for name, p in trained.items() if config.optimizer == "muon" and p.dim() == 2 and "layers" in name.split(".")]
    rest = [p for p in trained.values() if not any(p is other for other in hidden)]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=device.type == "cuda")
    return [Muon(hidden, lr=config.peak_lr, weight_decay=config.weight_decay), adamw] if hidden else [adamw]
