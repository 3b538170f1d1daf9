"""The training loop: it learns, its batches are a function of the step alone, its schedule has the stated
shape, and NaN stops it.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compress.distill.losses import next_token
from compress.distill.train import TokenStream, TrainConfig, train
from compress.errors import UsageError
from compress.models.decoder import Decoder
from compress.models.initialise import fresh_decoder
from tests.support.tiny_decoder import LLAMA, tiny_arch

CPU = torch.device("cpu")
PERIOD = 11


def config(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "num_steps": 60,
        "batch_size": 4,
        "micro_batch_size": 4,
        "peak_lr": 3e-3,
        "compute_dtype": torch.float32,
    }
    return TrainConfig(**{**base, **changes})  # type: ignore[arg-type]


def repeating(num_tokens: int = 2000) -> Tensor:
    """A fixed permutation of 11 ids over and over: after one period every token is certain."""
    pattern = torch.randperm(61, generator=torch.Generator().manual_seed(1))[:PERIOD]
    return pattern.repeat(num_tokens // PERIOD)


def decoder() -> Decoder:
    return fresh_decoder(tiny_arch(LLAMA, num_hidden_layers=2), generator=torch.Generator().manual_seed(0))


def test_a_decoder_learns_a_sequence_that_repeats() -> None:
    stream = TokenStream(repeating(), seq_len=24, batch_size=4, seed=0)
    model = decoder()
    rows = list(train(model, next_token, stream.batch, config(log_every=10), device=CPU))
    assert [row.step for row in rows] == [10, 20, 30, 40, 50, 60]
    assert [row.num_tokens for row in rows] == [row.step * 4 * 24 for row in rows]
    assert rows[0].loss < math.log(61) * 1.05  # a fresh model knows nothing: log of the vocabulary
    assert rows[-1].loss < 0.5 * math.log(PERIOD)  # better than knowing which ids occur, without their order
    assert all(row.tokens_per_s > 0 and row.grad_norm > 0 for row in rows)
    assert rows[-1].learning_rate == config().learning_rate(59)


def test_a_run_repeats_itself_bit_for_bit() -> None:
    states = []
    for _ in range(2):
        model = decoder()
        stream = TokenStream(repeating(), seq_len=24, batch_size=4, seed=0)
        list(train(model, next_token, stream.batch, config(num_steps=5), device=CPU))
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_micro_batches_add_up_to_the_batch() -> None:
    """One optimizer step of one large batch, whole or in parts, up to the order of summation."""
    stream = TokenStream(repeating(), seq_len=24, batch_size=4, seed=0)
    losses = []
    norms = []
    for micro_batch_size in (4, 2, 1):
        (row,) = train(
            decoder(),
            next_token,
            stream.batch,
            config(num_steps=1, micro_batch_size=micro_batch_size),
            device=CPU,
        )
        losses.append(row.loss)
        norms.append(row.grad_norm)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    with pytest.raises(UsageError, match="not a multiple"):
        config(micro_batch_size=3)


def test_the_loss_is_the_cross_entropy_of_the_next_token() -> None:
    model = decoder()
    tokens_BS = repeating()[:50].view(2, 25)
    log_probs = model(tokens_BS[:, :-1]).detach().double().log_softmax(-1)
    expected = -sum(float(log_probs[b, s, tokens_BS[b, s + 1]]) for b in range(2) for s in range(24)) / 48
    assert float(next_token(model, tokens_BS).detach()) == pytest.approx(expected, rel=1e-5)


def test_only_matrices_decay_and_frozen_parameters_stay() -> None:
    """With gradients of zero, decay is the only thing that moves a parameter."""
    model = decoder()
    model.embed.weight.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def flat(module: nn.Module, tokens_BS: Tensor) -> Tensor:
        return 0.0 * sum((parameter.sum() for parameter in module.parameters()), torch.zeros(()))

    list(
        train(
            model,
            flat,
            lambda step: torch.zeros(4, 9, dtype=torch.int64),
            config(num_steps=1, weight_decay=0.5),
            device=CPU,
        )
    )
    factor = 1 - config(num_steps=1).learning_rate(0) * 0.5
    for name, parameter in model.named_parameters():
        kept = parameter.dim() < 2 or name == "embed.weight"
        assert torch.allclose(parameter, before[name] * (1.0 if kept else factor), rtol=1e-6, atol=0), name


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step() -> None:
    def breaks_at_third(model: nn.Module, tokens_BS: Tensor) -> Tensor:
        loss = next_token(model, tokens_BS)
        return loss * float("nan") if int(tokens_BS[0, 0]) == 2 else loss

    def batch_of(step: int) -> Tensor:
        return torch.full((4, 9), step, dtype=torch.int64)

    rows = train(decoder(), breaks_at_third, batch_of, config(num_steps=10, log_every=1), device=CPU)
    assert [next(rows).step, next(rows).step] == [1, 2]
    with pytest.raises(UsageError, match="step 3: loss nan"):
        next(rows)


def test_a_loss_that_is_not_finite_between_log_rows_is_not_forgotten() -> None:
    def batch_of(step: int) -> Tensor:
        return torch.full((4, 9), step, dtype=torch.int64)

    def breaks_once(model: nn.Module, tokens_BS: Tensor) -> Tensor:
        return next_token(model, tokens_BS) + (float("inf") if int(tokens_BS[0, 0]) == 1 else 0.0)

    with pytest.raises(UsageError, match="loss inf"):
        list(train(decoder(), breaks_once, batch_of, config(num_steps=6, log_every=6), device=CPU))


@given(num_steps=st.integers(1, 400), warmup_frac=st.floats(0, 1))
def test_the_rate_rises_in_a_line_to_its_peak_and_falls_along_a_cosine(
    num_steps: int, warmup_frac: float
) -> None:
    schedule = config(num_steps=num_steps, warmup_frac=warmup_frac, peak_lr=1.0)
    rates = [schedule.learning_rate(step) for step in range(num_steps)]
    warmup = max(1, round(num_steps * warmup_frac))
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)][:num_steps])
    assert rates[warmup - 1] == pytest.approx(1.0)
    falling = rates[warmup:]
    assert falling == sorted(falling, reverse=True)
    middle = warmup + (num_steps - warmup) / 2
    if falling and middle == int(middle) and middle < num_steps:
        assert rates[int(middle)] == pytest.approx(0.5)


@settings(deadline=None)
@given(seed=st.integers(0, 5), order=st.permutations(range(12)))
def test_a_batch_is_a_function_of_the_step_alone(seed: int, order: list[int]) -> None:
    tokens = torch.arange(500)
    fresh = [TokenStream(tokens, seq_len=16, batch_size=8, seed=seed).batch(step) for step in range(12)]
    used = TokenStream(tokens, seq_len=16, batch_size=8, seed=seed)
    for step in order:
        assert torch.equal(used.batch(step), fresh[step])


def batches(stream: TokenStream, steps: Iterator[int] | range) -> Tensor:
    return torch.cat([stream.batch(step) for step in steps])


def test_an_epoch_shows_each_window_once_and_the_next_cuts_elsewhere() -> None:
    tokens = torch.arange(1000)
    seq_len = 16
    stream = TokenStream(tokens, seq_len=seq_len, batch_size=6, seed=3)
    per_epoch = (1000 - 1 - seq_len) // seq_len // 6
    first = batches(stream, range(per_epoch))
    second = batches(stream, range(per_epoch, 2 * per_epoch))
    for epoch in (first, second):
        assert epoch.shape == (6 * per_epoch, seq_len + 1)
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(seq_len + 1))  # windows of neighbours
        starts = epoch[:, 0]
        assert starts.unique().numel() == starts.numel()
        assert (starts % seq_len).unique().numel() == 1
    assert not torch.equal(first, second)
    assert int(first.max()) < 1000


def test_text_too_short_for_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="100 training tokens do not fill"):
        TokenStream(torch.arange(100), seq_len=16, batch_size=8, seed=0)


@given(
    num_tokens=st.integers(40, 200),
    seq_len=st.integers(2, 16),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 50),
)
@settings(deadline=None)
def test_every_batch_of_every_epoch_is_full(
    num_tokens: int, seq_len: int, batch_size: int, seed: int
) -> None:
    try:
        stream = TokenStream(torch.arange(num_tokens), seq_len=seq_len, batch_size=batch_size, seed=seed)
    except UsageError:
        return
    for step in range(30):
        assert stream.batch(step).shape == (batch_size, seq_len + 1)
