"""Training of an EAGLE-3 head: its unrolled steps are those of drafting, it learns to be accepted, and a run
may be cut anywhere.
"""

import pytest
import torch
from torch import Tensor

from compress.distill.draft_head import DraftHeadObjective, Target, frequent_tokens, measure_head, unrolled
from compress.distill.losses import Divergence
from compress.distill.train import TrainConfig, Training
from compress.errors import UnsupportedFormat
from compress.models.arch import Arch
from compress.models.attention import FullAttention
from compress.models.decoder import Decoder
from compress.models.eagle3 import Eagle3Decoder, eagle3_facts
from compress.models.fresh_eagle3 import fresh_eagle3
from compress.stages.draft.quantized_head import head_scheme
from compress.stages.quantize.spec import Quantize
from tests.support.tiny_decoder import LLAMA, tiny_arch, tiny_decoder, tiny_source

CPU = torch.device("cpu")
VOCAB = 61
WORDS = 50


def make_arch() -> Arch:
    return tiny_arch(LLAMA, num_hidden_layers=2, mlp_bias=False, max_position_embeddings=128)


def make_head(arch: Arch, words: Tensor) -> Eagle3Decoder:
    facts = eagle3_facts(arch, draft_vocab_size=len(words))
    return fresh_eagle3(facts, tiny_source(arch), words, generator=torch.Generator().manual_seed(1))


def make_text(num_windows: int, length: int, *, seed: int) -> Tensor:
    """Counting upwards in steps of 1 to 3 that the first two tokens tell."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (
        torch.randint(low, high, (num_windows, 1), generator=generator) for low, high in ((0, VOCAB), (1, 4))
    )
    return (start + step * torch.arange(length)) % VOCAB


@pytest.fixture(scope="module")
def target() -> Decoder:
    """A model that has learnt to count."""
    decoder = tiny_decoder(make_arch()).requires_grad_(True)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    for step in range(150):
        text = make_text(16, 17, seed=step)
        loss = torch.nn.functional.cross_entropy(decoder(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1.5
    return decoder.requires_grad_(False)


def targeted(decoder: Decoder, head: Eagle3Decoder, words: Tensor) -> Target:
    return Target(decoder, head.facts.layer_ids, words, device=CPU)


def test_unrolled_steps_are_those_of_drafting_from_each_token() -> None:
    """Row t of all steps, from a sequence that ends at t and grows by one row a step."""
    arch = make_arch()
    words = torch.arange(WORDS)
    decoder = tiny_decoder(arch)
    head = make_head(arch, words)
    tokens_BS = make_text(2, 11, seed=0)
    embedded, features, _ = targeted(decoder, head, words).features(tokens_BS)
    steps = list(unrolled(head, embedded, features, 4))
    assert [each.shape[1] for each in steps] == [10, 9, 8, 7]
    for last in range(7):
        hidden = head.fuse(features[:, : last + 1])
        for step in range(4):
            rows = last + 1 + step
            out = head(embedded[:, 1 : 1 + rows], hidden, torch.arange(rows), FullAttention())[:, -1:]
            torch.testing.assert_close(steps[step][:, last], head.norm(out)[:, 0], rtol=1e-4, atol=1e-5)
            hidden = torch.cat((hidden, out), dim=1)


def test_a_head_begins_as_the_targets_last_layer() -> None:
    """Without the embedding in what it reads, it says what the target would after that layer once more."""
    arch = make_arch()
    words = torch.arange(WORDS)
    tokens_BS = make_text(2, 11, seed=0)
    decoder = tiny_decoder(arch)
    head = make_head(arch, words)
    for name in ("q", "k", "v"):
        head.layers[0].attn.get_submodule(name).get_parameter("weight").data[:, : arch.hidden_size] = 0
    _, features, _ = targeted(decoder, head, words).features(tokens_BS)
    positions = torch.arange(10)
    attention = FullAttention()
    deepest = features[:, :10, -arch.hidden_size :]
    expected = decoder.norm(decoder.layers[-1](deepest, positions, attention))
    out = head(torch.randn(2, 10, arch.hidden_size), head.fuse(features[:, :10]), positions, attention)
    torch.testing.assert_close(
        head.head(head.norm(out)), decoder.head(expected)[..., words], rtol=1e-4, atol=1e-4
    )


def test_the_loss_is_zero_where_the_head_says_what_the_target_says() -> None:
    """Every divergence of the target, restricted to the head's words, from itself: a head that hands the
    target's hidden states through.
    """
    arch = make_arch()
    words = torch.arange(0, WORDS)
    decoder = tiny_decoder(arch)
    head = make_head(arch, words)
    target = targeted(decoder, head, words)
    tokens_BS = make_text(3, 12, seed=2)
    _, _, final_BSD = target.features(tokens_BS[:, :-1])
    copies = iter([final_BSD[:, 1:], final_BSD[:, 2:], final_BSD[:, 3:]])
    head.norm.forward = lambda x: next(copies)  # type: ignore[method-assign]
    loss = DraftHeadObjective(Divergence("forward_kl"), target, 3)(head, tokens_BS)
    assert abs(float(loss.detach())) < 1e-6


@pytest.mark.parametrize("kind", ["forward_kl", "tv"])
@pytest.mark.one_in(16)
def test_a_trained_head_is_accepted_more_often(target: Decoder, kind: str) -> None:
    words = torch.arange(WORDS)
    head = make_head(target.arch, words)
    asked = targeted(target, head, words)
    held_out = make_text(32, 17, seed=10_000)
    before = measure_head(head, asked, held_out, CPU, compute_dtype=torch.float32)
    config = TrainConfig(
        num_steps=150, batch_size=16, micro_batch_size=16, peak_lr=3e-3, compute_dtype=torch.float32
    )
    objective = DraftHeadObjective(Divergence(kind), asked, 3)  # type: ignore[arg-type]
    list(Training(head, objective, lambda step: make_text(16, 17, seed=step), config, device=CPU).rows())
    after = measure_head(head, asked, held_out, CPU, compute_dtype=torch.float32)
    assert after.acceptance_length > before.acceptance_length + 0.25
    assert after.acceptance[0] > before.acceptance[0] + 0.2
    assert after.kl < before.kl
    assert 0.5 < after.covered < 1  # 11 of 61 numbers are not the head's
    assert after.acceptance[0] <= after.covered


def test_a_run_that_is_cut_ends_with_the_same_bits() -> None:
    arch = make_arch()
    words = torch.arange(WORDS)
    decoder = tiny_decoder(arch)
    config = TrainConfig(6, 4, 2, 1e-3, optimizer="muon", log_every=3, compute_dtype=torch.float32)

    def training() -> tuple[Eagle3Decoder, Training]:
        head = make_head(arch, words)
        objective = DraftHeadObjective(Divergence(), targeted(decoder, head, words), 3)
        return head, Training(head, objective, lambda step: make_text(4, 13, seed=step), config, device=CPU)

    whole, run = training()
    list(run.rows())
    _, cut = training()
    next(cut.rows())
    state = {name: tensor.clone() for name, tensor in cut.tensors().items()}
    resumed, run = training()
    run.restore_(state)
    list(run.rows())
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_words_are_the_most_frequent_tokens() -> None:
    tokens = torch.tensor([[5, 5, 5, 2, 2, 9], [9, 7, 0, 2, 5, 1]])
    assert frequent_tokens(tokens, 3, vocab_size=10).tolist() == [2, 5, 9]
    assert frequent_tokens(tokens, 5, vocab_size=10).tolist() == [0, 1, 2, 5, 9]  # of equals the lower
    assert frequent_tokens(tokens, 10, vocab_size=10).tolist() == list(range(10))


def test_a_head_whose_columns_are_no_whole_groups_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match=r"fc has 96 columns, no multiple of 128.*one of channels"):
        head_scheme(Quantize(scheme="W4A16_G128"), eagle3_facts(make_arch(), draft_vocab_size=9))
