"""Residuals of several streams while a model is calibrated and trained layer by layer: what tests of several
kinds of streams have in common."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.calibrate.residual import kl_between, walk
from compress.calibrate.stats import Stat
from compress.context import Context
from compress.models.weights import WeightSource
from tests.unit.calibrate.test_gradients_shared import assert_same, of_whole_graph, visited
from tests.unit.calibrate.test_side_inputs import (
    assert_near,
    decoder_of,
    outputs_of,
    outputs_of_decoder,
    run_of,
)


def check_streams(source: WeightSource, tokens_NS: Tensor, piece_tokens: int) -> None:
    """Check that the streams after each layer are those of the whole decoder."""
    found = outputs_of(source, run_of(source, tokens_NS, piece_tokens))
    for x_NSE, expected_NSE in zip(found, outputs_of_decoder(decoder_of(source), tokens_NS), strict=True):
        assert x_NSE.shape == (*tokens_NS.shape, source.arch.stream_size)
        assert_near(x_NSE, expected_NSE)


def check_gradients(source: WeightSource, directory: Path, kinds: Sequence[type[Stat]] = ()) -> None:
    """Check that gradients layer by layer are those of the whole graph."""
    found = visited(source, directory, *kinds)
    inputs, gradients = of_whole_graph(source)
    assert_same(found.gradients, gradients)
    assert_same(found.inputs, inputs)


def check_walk(source: WeightSource, tokens_NS: Tensor, directory: Path) -> None:
    """Check that a walk ends in the streams that the head reads."""
    x_NSE = walk(source, tokens_NS, Context("cpu", 0, directory), compute_dtype=torch.float32, task="a test")
    decoder = decoder_of(source)
    assert_near(decoder.norm(x_NSE), decoder.hidden(tokens_NS.long()))
    cpu = torch.device("cpu")
    assert kl_between(source, x_NSE, x_NSE, cpu) == 0
    assert kl_between(source, x_NSE, x_NSE + torch.randn_like(x_NSE), cpu) > 0
