"""Muon against `torch.optim.Muon`, which computes the same one matrix at a time, and against what an
orthogonal matrix is.
"""

import torch
from torch import nn

from compress.distill.muon import Muon, orthogonalise

SHAPES = [(24, 16), (16, 24), (24, 16), (16, 16)]


def test_orthogonalised_matrices_keep_singular_vectors_and_level_singular_values() -> None:
    matrices = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrices).to(torch.float32)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    in_basis = u.mT @ result @ vh.mT
    diagonal = torch.diagonal(in_basis, dim1=-2, dim2=-1)
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.3
    assert (in_basis - torch.diag_embed(diagonal)).abs().max() < 0.03


def test_steps_agree_with_the_one_in_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    optimizer = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for before, p, q in zip(start, ours, theirs, strict=True):
        moved = (q - before).norm()
        assert moved > 0.1
        assert (p - q).norm() / moved < 0.01  # bfloat16 iterations: the order of sums may differ
