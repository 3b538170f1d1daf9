"""The one training loop: for the reference model, recovery of pruned models, and students of their own
config.

AdamW (arXiv 1711.05101) with decay on matrices only, or Muon for the matrices inside the layers and AdamW
for the rest; linear warm-up, cosine to zero, clipped gradients; float32 master weights and a lower
compute dtype by autocast. The batch of a step is a pure function of (seed, step), so it does not depend
on when the step runs, and the seed decides everything but the rounding of the hardware; nothing else is
drawn while a model trains, so a state holds no generator. A loss that is not finite stops the run at the
next log row, before any result is used or a state is stored.

Shapes: B batch (sequences a step), S sequence, N windows.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from compress.context import OneRank, Ranks
from compress.distill.muon import Muon
from compress.errors import UsageError

Batch = Tensor | tuple[Tensor, ...]
"""Token ids int64 [B, S+1], alone or before other tensors with a row for each sequence."""
LossFn = Callable[..., Tensor]
"""(model, *batch) -> mean loss over the tokens of the batch."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of the loop: `batch_size` sequences a step, computed `micro_batch_size` at a time; `peak_lr`
    is reached after `warmup_frac` of the steps."""

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
            raise UsageError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}."
            )

    def learning_rate(self, step: int) -> float:
        warmup = max(1, round(self.num_steps * self.warmup_frac))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        return (
            self.peak_lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.num_steps - warmup)))
        )


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
    """One long row of token ids as shuffled windows of `seq_len` + 1; every epoch has its own offset and
    order.

    Raises:
        UsageError: the stream is shorter than a batch of windows.
    """

    def __init__(self, tokens: Tensor, *, seq_len: int, batch_size: int, seed: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._seed = seed
        self._batches_per_epoch = (tokens.numel() - 1 - seq_len) // seq_len // batch_size
        if self._batches_per_epoch < 1:
            raise UsageError(
                f"{tokens.numel()} training tokens do not fill one batch of {batch_size} x {seq_len}; give "
                "more text."
            )
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> Tensor:
        """Return int64 [B, S+1] of a step."""
        epoch, idx = divmod(step, self._batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = int(torch.randint(self._seq_len, (1,), generator=generator))
            num_windows = (self._tokens.numel() - 1 - offset) // self._seq_len
            self._starts = (offset + self._seq_len * torch.randperm(num_windows, generator=generator)).to(
                self._tokens.device
            )
            self._epoch = epoch
        starts = self._starts[idx * self._batch_size : (idx + 1) * self._batch_size]
        span = torch.arange(self._seq_len + 1, device=self._tokens.device)
        return self._tokens[starts.unsqueeze(1) + span].to(torch.int64)


class Windows:
    """A fixed set of windows int32 [N, S+1] in batches; every epoch has its own order, and the last windows
    that fill no batch wait for the next epoch.

    Raises:
        UsageError: fewer windows than a batch has.
    """

    def __init__(self, tokens_NS: Tensor, *, batch_size: int, seed: int) -> None:
        self._tokens_NS = tokens_NS
        self._batch_size = batch_size
        self._seed = seed
        self._batches_per_epoch = tokens_NS.shape[0] // batch_size
        if self._batches_per_epoch < 1:
            raise UsageError(
                f"{tokens_NS.shape[0]} windows of text do not fill one batch of {batch_size}; give more "
                "tokens."
            )
        self._epoch = -1
        self._order = list[int]()

    def chosen(self, step: int) -> list[int]:
        """Return the indices of a step's windows."""
        epoch, idx = divmod(step, self._batches_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._tokens_NS.shape[0], generator=generator).tolist()
            self._epoch = epoch
        return self._order[idx * self._batch_size : (idx + 1) * self._batch_size]

    def batch(self, step: int) -> Tensor:
        """Return int64 [B, S+1] of a step."""
        return self._tokens_NS[self.chosen(step)].to(torch.int64)

    def weighted(self, step: int, counted_NS: Tensor) -> tuple[Tensor, Tensor]:
        """Return int64 [B, S+1] of a step, and the weight of each token in its loss, float32: 0 where it does
        not count, and the same for all others of the batch, so that the mean over all is that over them."""
        chosen = self.chosen(step)
        counted_BS = counted_NS[chosen].to(torch.float32)
        predicted_BS = counted_BS[:, 1:]
        return self.batch(step), counted_BS * (predicted_BS.numel() / predicted_BS.sum().clamp(min=1))


class Training:
    """One run of the loop: a model in training, its optimizers, and the current step.

    Ranks share each batch: every rank takes its share of the micro-batches, gradients are summed, and all
    take the same step, so that the replicas stay equal bit for bit. `tensors` between two rows is the
    whole state; a restored run goes on as if it had never stopped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch_of: Callable[[int], Batch],
        config: TrainConfig,
        *,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.step = 0
        self._config = config
        self._batch_of = batch_of
        self._device = device
        self._ranks: Ranks = OneRank() if ranks is None else ranks
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizers = _optimizers(self._trained, config, device)
        self._model = model
        self._loss_fn = torch.compile(loss_fn, dynamic=False) if config.compile else loss_fn
        self._window = _Window()

    def rows(self) -> Iterator[TrainLogRow]:
        """Train in place to the last step; a row every `log_every` steps and at the end.

        Raises:
            UsageError: the loss became NaN or infinite; the message names the step.
        """
        config = self._config
        self._window = _Window(self._window.total_tokens)
        while self.step < config.num_steps:
            grad_norm = self._take_step()
            if self.step % config.log_every == 0 or self.step == config.num_steps:
                yield self._window.row(
                    self.step, float(grad_norm), config.learning_rate(self.step - 1), self._ranks
                )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the coming steps depend on; views, not copies."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self._trained.items()}
        for idx, optimizer in enumerate(self._optimizers):
            for parameter_idx, values in optimizer.state_dict()["state"].items():
                state |= {f"optimizer.{idx}.{parameter_idx}.{name}": value for name, value in values.items()}
        return state | {
            "step": torch.tensor(self.step),
            "num_tokens": torch.tensor(self._window.total_tokens),
        }

    def restore_(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(tensors[f"model.{name}"])
        for idx, optimizer in enumerate(self._optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith(prefix := f"optimizer.{idx}."):
                    parameter_idx, _, leaf = name.removeprefix(prefix).partition(".")
                    states.setdefault(int(parameter_idx), {})[leaf] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        self.step = int(tensors["step"])
        self._window = _Window(int(tensors["num_tokens"]))

    def _take_step(self) -> Tensor:
        config = self._config
        num_micro = self._config.batch_size // self._config.micro_batch_size
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            group["lr"] = config.learning_rate(self.step)
        batch = self._batch_of(self.step)
        parts = [
            part.to(self._device, non_blocking=True)
            for part in (batch if isinstance(batch, tuple) else (batch,))
        ]
        micros = list(zip(*(part.chunk(num_micro) for part in parts), strict=True))
        for micro in micros[self._ranks.rank :: self._ranks.size]:
            with torch.autocast(
                self._device.type, dtype=config.compute_dtype, enabled=config.compute_dtype != torch.float32
            ):
                loss = self._loss_fn(self._model, *micro) / num_micro
            loss.backward()
            self._window.add(loss.detach())
        if self._ranks.size > 1:
            self._ranks.all_reduce([_gradient(parameter) for parameter in self._trained.values()])
        grad_norm = nn.utils.clip_grad_norm_(self._trained.values(), config.max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._window.num_steps += 1
        self._window.num_tokens += parts[0].shape[0] * (parts[0].shape[1] - 1)
        return grad_norm


def train(
    model: nn.Module,
    loss_fn: LossFn,
    batch_of: Callable[[int], Batch],
    config: TrainConfig,
    *,
    device: torch.device,
) -> Iterator[TrainLogRow]:
    """Train `model` in place, from the first step to the last; rows as of `Training.rows`."""
    return Training(model, loss_fn, batch_of, config, device=device).rows()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; zeros on a rank that had no micro-batch."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Window:
    """The events since the last log row; the loss stays on the device until a row is made."""

    def __init__(self, total_tokens: int = 0) -> None:
        self.total_tokens = total_tokens
        self._restart()

    def _restart(self) -> None:
        self._loss = torch.zeros(())
        self.num_steps = 0
        self.num_tokens = 0
        self._start_s = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        self._loss = self._loss.to(loss.device) + loss

    def row(self, step: int, grad_norm: float, learning_rate: float, ranks: Ranks) -> TrainLogRow:
        if ranks.size > 1:
            ranks.all_reduce([self._loss])
        loss = float(self._loss) / self.num_steps
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise UsageError(
                f"training diverged before step {step}: loss {loss}, gradient norm {grad_norm}. Lower the "
                "learning rate."
            )
        self.total_tokens += self.num_tokens
        speed = self.num_tokens / (time.perf_counter() - self._start_s)
        row = TrainLogRow(step, self.total_tokens, loss, grad_norm, learning_rate, speed)
        self._restart()
        return row


def _optimizers(
    trained: Mapping[str, nn.Parameter], config: TrainConfig, device: torch.device
) -> list[torch.optim.Optimizer]:
    """Return AdamW, and before it Muon where that is chosen. A layer is an entry of a module list named
    `layers`, as in `Decoder`."""
    hidden = [
        p
        for name, p in trained.items()
        if config.optimizer == "muon" and p.dim() == 2 and "layers" in name.split(".")
    ]
    rest = [p for p in trained.values() if not any(p is other for other in hidden)]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=device.type == "cuda")
    return [Muon(hidden, lr=config.peak_lr, weight_decay=config.weight_decay), adamw] if hidden else [adamw]
