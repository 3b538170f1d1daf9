"""GPTQ and AWQ linears, packed and unpacked by numpy element by element, from the formats' description."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

AWQ_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble j of a word holds this column of the word's eight."""
Array = NDArray[Any]


@dataclass(frozen=True)
class Linear:
    """Unsigned codes [N, K], unsigned zero points and scales [N, G]; value = (code - zero) * scale."""

    codes: Array
    zeros: Array
    scales: Array

    def values(self) -> Array:
        group_size = self.codes.shape[1] // self.zeros.shape[1]
        zeros, scales = (
            np.repeat(each, group_size, axis=1)
            for each in (self.zeros.astype(np.float32), self.scales.astype(np.float32))
        )
        return np.asarray((self.codes.astype(np.float32) - zeros) * scales)


def random_linear(
    out_features: int,
    in_features: int,
    *,
    num_groups: int,
    seed: int,
    least_zero: int = 0,
    scale: float = 1.0,
) -> Linear:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (out_features, in_features))
    zeros = rng.integers(least_zero, 16, (out_features, num_groups))
    return Linear(codes, zeros, ((rng.random((out_features, num_groups)) + 0.5) * scale).astype(np.float16))


def bits_in_order(words: Array) -> int:
    """Return 32-bit words as one number, the first word lowest."""
    return sum(int(word) << 32 * idx for idx, word in enumerate(words))


def gptq_unpacked(leaves: dict[str, Array], *, bits: int) -> Linear:
    qweight = leaves["qweight"].view(np.uint32)
    qzeros = leaves["qzeros"].view(np.uint32)
    scales = leaves["scales"]
    g_idx = leaves["g_idx"]
    (num_groups, n_size) = scales.shape
    k_size = len(g_idx)
    columns = [bits_in_order(qweight[:, n]) for n in range(n_size)]
    rows = [bits_in_order(qzeros[g]) for g in range(num_groups)]
    mask = (1 << bits) - 1
    codes = [[column >> bits * k & mask for k in range(k_size)] for column in columns]
    zeros = [[(row >> bits * n & mask) + 1 for row in rows] for n in range(n_size)]
    assert g_idx.tolist() == [k // (k_size // num_groups) for k in range(k_size)]
    return Linear(np.array(codes), np.array(zeros), scales.T)


def gptq_packed(linear: Linear) -> dict[str, Array]:
    """Of 4 bits."""
    (n_size, k_size) = linear.codes.shape
    num_groups = linear.zeros.shape[1]
    qweight = np.zeros((k_size // 8, n_size), np.uint32)
    qzeros = np.zeros((num_groups, n_size // 8), np.uint32)
    for n in range(n_size):
        for k in range(k_size):
            qweight[k // 8, n] |= np.uint32(int(linear.codes[n, k]) << 4 * (k % 8))
        for g in range(num_groups):
            qzeros[g, n // 8] |= np.uint32(int(linear.zeros[n, g]) - 1 << 4 * (n % 8))
    g_idx = np.arange(k_size, dtype=np.int32) // (k_size // num_groups)
    scales = np.ascontiguousarray(linear.scales.T)
    return {
        "qweight": qweight.view(np.int32),
        "qzeros": qzeros.view(np.int32),
        "scales": scales,
        "g_idx": g_idx.astype(np.int32),
    }


def awq_unpacked(leaves: dict[str, Array]) -> Linear:
    scales = leaves["scales"]

    def columns(words: Array) -> Array:
        unpacked = np.zeros((words.shape[0], words.shape[1] * 8), np.int64)
        for row, word in np.ndindex(*words.shape):
            for nibble, column in enumerate(AWQ_COLUMN):
                unpacked[row, 8 * word + column] = int(words.view(np.uint32)[row, word]) >> 4 * nibble & 15
        return unpacked.T[: scales.shape[1]]

    return Linear(columns(leaves["qweight"]), columns(leaves["qzeros"]), scales.T)


def awq_packed(linear: Linear) -> dict[str, Array]:
    def words(codes: Array) -> Array:
        """[N, R] -> int32 [R, N/8]."""
        packed = np.zeros((codes.shape[1], codes.shape[0] // 8), np.uint32)
        for row, word in np.ndindex(*packed.shape):
            for nibble, column in enumerate(AWQ_COLUMN):
                packed[row, word] |= np.uint32(int(codes[8 * word + column, row]) << 4 * nibble)
        return packed.view(np.int32)

    return {
        "qweight": words(linear.codes),
        "qzeros": words(linear.zeros),
        "scales": np.ascontiguousarray(linear.scales.T),
    }
