"""A head with a bias, where logits are computed: in the decoder, in gradients, in losses and for drafts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calibrate.gradients import EmbedAndHead
from compress.calibrate.residual import kl_between
from compress.distill.draft_head import Target
from compress.distill.losses import Divergence
from compress.distill.objective import Objective, Teacher, measure
from compress.distill.student import Shape, sliced_decoder, student_arch
from compress.errors import UnsupportedArch
from compress.models.arch import Arch
from compress.models.decoder import Decoder
from compress.models.weights import MemorySource, build_decoder, parameter_names
from tests.support.tiny_source import tiny_source

CPU = torch.device("cpu")
FACTS: dict[str, Any] = {"head_bias": True, "logit_softcap": 3.0, "logit_scale": 0.5}
TOKENS = torch.randint(101, (2, 12), generator=torch.Generator().manual_seed(0))


def decoder_of(source: MemorySource) -> Decoder:
    return build_decoder(source, dtype=torch.float32, device=CPU)


def expected_logits(decoder: Decoder, tokens_BS: Tensor) -> Tensor:
    """Return the logits by their definition."""
    hidden = decoder.hidden(tokens_BS)
    products = torch.einsum("bsd,vd->bsv", hidden, decoder.head.weight) + decoder.head.bias
    return 3.0 * torch.tanh(products / 3.0)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_it_is_a_parameter_and_a_fact() -> None:
    source = tiny_source(**FACTS)
    decoder = decoder_of(source)
    assert "head.bias" in parameter_names(source.arch)[0]
    assert source.arch.num_params == sum(each.numel() for each in decoder.parameters())
    assert Arch.from_json(*source.arch.to_json()) == source.arch
    assert float(decoder.head.bias.abs().min()) > 0
    close(decoder(TOKENS), expected_logits(decoder, TOKENS))


def test_one_of_a_head_that_is_the_embedding_is_refused() -> None:
    with pytest.raises(UnsupportedArch, match="the head has a bias and is the embedding"):
        tiny_source(**FACTS, tied_head=True)


def test_gradients_and_residuals_have_it() -> None:
    source = tiny_source(**FACTS)
    decoder = decoder_of(source)
    outer = EmbedAndHead.load(source, compute_dtype=torch.float32, device=CPU)
    states = []
    handle = decoder.layers[-1].register_forward_hook(lambda *args: states.append(args[-1]))
    logits = [expected_logits(decoder, each) for each in (TOKENS, TOKENS.flip(1))]
    handle.remove()
    close(outer.logits(source.arch, states[0][0]), logits[0][0])
    p, q = (each.log_softmax(-1) for each in logits)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert kl_between(source, states[0], states[1], CPU) == pytest.approx(float(kl), rel=1e-4)


def test_teachers_students_and_targets_of_drafts_have_it() -> None:
    source = tiny_source(**FACTS)
    decoder = decoder_of(source)
    expected = expected_logits(decoder, TOKENS).flatten(0, 1)
    close(Teacher(decoder, device=CPU).targets(TOKENS)(slice(None)), expected)  # type: ignore[arg-type]
    found = measure(decoder, Teacher(decoder, device=CPU), TOKENS, CPU, compute_dtype=torch.float32)
    assert found.kl_mean == pytest.approx(0, abs=1e-6)
    labels = TOKENS[:, 1:].flatten()
    of_text = expected_logits(decoder, TOKENS[:, :-1]).flatten(0, 1).log_softmax(-1)
    nll = -of_text.gather(1, labels.unsqueeze(1)).sum()
    assert found.student_nll == pytest.approx(float(nll), rel=1e-5)
    chosen_W = torch.tensor([3, 8, 50])
    target = Target(decoder, (0, 1), chosen_W, device=CPU)
    assert target.bias_W is not None
    assert torch.equal(target.bias_W, decoder.head.bias[chosen_W])


def test_a_student_learns_it() -> None:
    source = tiny_source(**FACTS)
    teacher = decoder_of(source)
    student = decoder_of(source)
    with torch.no_grad():
        student.head.bias.zero_()
    student.head.bias.requires_grad_()
    objective = Objective(Divergence(), Teacher(teacher, device=CPU))
    before = objective(student, TOKENS)
    before.backward()
    assert student.head.bias.grad is not None
    step = torch.zeros_like(student.head.bias)
    step[7] = 1e-2
    with torch.no_grad():
        student.head.bias += step
        up = objective(student, TOKENS)
        student.head.bias -= 2 * step
        down = objective(student, TOKENS)
    slope = float(up - down) / 2e-2
    assert float(student.head.bias.grad[7]) == pytest.approx(slope, rel=2e-2, abs=1e-6)


def test_a_narrower_student_keeps_it_whole() -> None:
    source = tiny_source(**FACTS)
    student = sliced_decoder(source, student_arch(source.arch, Shape(hidden=32)))
    assert torch.equal(student.head.bias, decoder_of(source).head.bias)
