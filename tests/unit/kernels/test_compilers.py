"""Facts by which kernels choose how they load."""

import pytest
import torch

from compress.kernels.compilers.triton import describable


@pytest.mark.parametrize(
    ("head_dim", "dtype", "described"),
    [
        (128, torch.bfloat16, True),
        (80, torch.bfloat16, True),
        (100, torch.bfloat16, False),
        (100, torch.float32, True),
        (24, torch.int8, False),
    ],
)
def test_matrices_with_rows_of_multiples_of_16_bytes_are_described(
    head_dim: int, dtype: torch.dtype, described: bool
) -> None:
    pages = torch.zeros(2, 3, 16, head_dim, dtype=dtype)
    assert describable(pages) == described
    assert not describable(pages.transpose(0, 1))
