"""CUDA kernels on a CPU: products in slices (`operands/slices.cu`), the router of decode rows
(`router/warps.cu`), pairs sorted by expert (`experts/units.cu`), experts in one launch
(`experts/resident.cu`), decode attention by one block for each request and KV head
(`attention_decode/lanes.cu`), and rows prepared for a linear (`linear/prepare_rows.cu`)."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from compress.kernels.attention_decode import hopper
from compress.kernels.compilers.nvrtc import Source
from compress.kernels.experts import resident, units
from compress.kernels.experts import slices as expert_slices
from compress.kernels.linear import launch as linear
from compress.kernels.operands import slices
from compress.kernels.operands.gpu import Gpu
from compress.kernels.router import warps
from tests.support.cuda_emulator import EmulatedFunction

GLOBAL_IN_CPP = {
    "load_index": "static int load_index(const int* at) { return *at; }\n",
    "load_float": "static float load_float(const float* at) { return *at; }\n",
    "load_number": "static u16 load_number(const u16* at) { return *at; }\n",
    "load_chunk": """
static uint4 load_chunk(const u16* at) {
    uint4 v;
    memcpy(&v, at, 16);
    return v;
}
""",
}
"""What global.cuh has in PTX."""


IN_CPP = {
    **GLOBAL_IN_CPP,
    "load_weight": """
static uint4 load_weight(const char* at, bool there, u64) {
    uint4 v = {};
    if (there) memcpy(&v, at, 16);
    return v;
}
""",
    "load_row": """
static void load_row(uint4& v, const char* at, bool there) {
    if (TAIL) v = {};
    if (there) memcpy(&v, at, 16);
}
""",
    "copy_weight": """
static void copy_weight(uint4* to, const char* from, bool inside, u64) {
    *to = {};
    if (inside) memcpy(to, from, 16);
}
""",
    "copy_row": """
static void copy_row(uint4* to, const char* from, bool inside) { copy_weight(to, from, inside, 0); }
""",
    "end_copies": "static void end_copies() {}\n",
    "await_copies": "template <int> static void await_copies() {}\n",
    "numbers": """
static u32 numbers(u32 words, int i, u32 offset) {
    u32 pair = 0;
    for (int h = 0; h < 2; ++h) {
        const float code = words >> (16 * h + 4 * i) & 15;
        pair |= (u32)narrow((F16 ? code + 1024.0f : code / 64) + widen(offset >> 16 * h)) << 16 * h;
    }
    return pair;
}
""",
    "offset_of": """
static u32 offset_of(u16 stored) { return (F16 ? stored : narrow(widen(stored) / 64 + 2)) * 0x10001u; }
""",
    "scaled": """
static u32 scaled(u32 words, int i, u32 scale) {
    const float sizes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    u32 pair = 0;
    for (int h = 0; h < 2; ++h) {
        const u32 half = words >> (16 * h + 4 * i) & 15;
        const float size = sizes[half & 7] * widen(scale >> 16 * h);
        pair |= (u32)narrow(half & 8 ? -size : size) << 16 * h;
    }
    return pair;
}
""",
    "widened": """
static u32 widened(u32 word, int i) {
    return narrow((signed char)(word >> 16 * i)) | (u32)narrow((signed char)(word >> 16 * i + 8)) << 16;
}
""",
}
"""What slices.cu has in PTX."""


BARRIER = """
struct Barrier {
    uint16_t arrivals, left;
    int bytes_and_phase;  // twice the bytes that are missing, and the phase
    void settle() {
        if (left || bytes_and_phase >> 1) return;
        left = arrivals, bytes_and_phase ^= 1;
    }
};
static Barrier& barrier_at(u32 at) { return *(Barrier*)shared_at(at); }
static void init_barrier(u32 at, u32 arrivals) {
    barrier_at(at) = {(uint16_t)arrivals, (uint16_t)arrivals, 0};
}
"""
BARRIERS_IN_CPP = {
    "init_barrier": BARRIER,
    "publish_barriers": "static void publish_barriers() {}\n",
    "arrive": "static void arrive(u32 at) { --barrier_at(at).left, barrier_at(at).settle(); }\n",
    "arrive_expecting": """
static void arrive_expecting(u32 at, u32 bytes) { barrier_at(at).bytes_and_phase += 2 * bytes, arrive(at); }
""",
    "wait_barrier": """
static void wait_barrier(u32 at, u32 phase) {
    while (__ballot_sync(0, (barrier_at(at).bytes_and_phase & 1) == phase)) {}
}
""",
}
"""What shared.cuh has in PTX for barriers."""


LANES_IN_CPP = {
    **GLOBAL_IN_CPP,
    **BARRIERS_IN_CPP,
    "wait_barrier": """
struct Copy {
    char* to;
    const char* from;
    u32 bytes, barrier;
};
static std::vector<Copy> copies;  // by the engine, made only when a thread waits for their barrier
static void bring_later(u32 to, const char* from, u32 bytes, u32 barrier) {
    memset(shared_at(to), 255, bytes);
    copies.push_back({shared_at(to), from, bytes, barrier});
}
static void wait_barrier(u32 at, u32 phase) {
    for (size_t i = 0; i < copies.size();) {
        const Copy copy = copies[i];
        if (copy.barrier != at && ++i) continue;
        memcpy(copy.to, copy.from, copy.bytes);
        barrier_at(at).bytes_and_phase -= 2 * copy.bytes, barrier_at(at).settle();
        copies[i] = copies.back(), copies.pop_back();
    }
    while (__ballot_sync(0, (barrier_at(at).bytes_and_phase & 1) == phase)) {}
}
""",
    "load_word": """
static u32 load_word(u32 at) {
    u32 v;
    memcpy(&v, shared_at(at), 4);
    return v;
}
""",
    "copy": """
static void copy(u32 to, const char* from, int real) {
    memset(shared_at(to), 0, 16);
    memcpy(shared_at(to), from, real);
}
""",
    "copy_tile": """
struct Described {
    const char* data;
    long long head_bytes, row_bytes, part_bytes, rows;
};
static void copy_tile(u32 to, const TileMap* map, int slot, int head, u32 barrier, u64) {
    Described of;
    memcpy(&of, map, sizeof of);
    for (int row = 0; row < of.rows; ++row)
        for (int byte = 0; byte < of.row_bytes; byte += 16) {
            const int part = byte / of.part_bytes, at = row * of.part_bytes + byte % of.part_bytes;
            const int chunk = at / 16 ^ at / 128 % (of.part_bytes / 16);
            const char* from = of.data + head * of.head_bytes + (slot + row) * of.row_bytes + byte;
            bring_later(to + part * of.rows * of.part_bytes + 16 * chunk, from, 16, barrier);
        }
}
""",
    "copy_scales": """
static void copy_scales(u32 to, const float* from, u32 bytes, u32 barrier, u64) {
    bring_later(to, (const char*)from, bytes, barrier);
}
""",
    "let_engine_overwrite": "static void let_engine_overwrite() {}\n",
    "commit": "static void commit() {}\n",
    "wait_pending": "template <int> static void wait_pending() { __syncwarp(); }\n",
    "load_blocks": """
static void load_blocks(u32 (&a)[4], u32 at) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) a[i] = load_word(__shfl_sync(0, at, 8 * i + g) + 4 * t);
}
""",
    "load_transposed": """
template <int N> static void load_transposed(u32 (&a)[N], u32 at) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < N; ++i) {
        a[i] = 0;
        for (int h = 0; h < 2; ++h) {
            const u32 row = __shfl_sync(0, at, 8 * i + 2 * t + h);
            a[i] |= (u32)*(const u16*)shared_at(row + 2 * g) << 16 * h;
        }
    }
}
""",
    "transposed": """
static u32 transposed(u32 v) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u32 w = 0;
    for (int h = 0; h < 2; ++h) {
        const u32 pair = __shfl_sync(0, v, (2 * t + h) * 4 + g / 2);
        w |= (pair >> 16 * (g % 2) & 0xFFFF) << 16 * h;
    }
    return w;
}
""",
    "mma": """
static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma<F16>(d, a, b0, b1, true); }
""",
    "plus_128_of_low_bytes": """
static u32 plus_128_of_low_bytes(u32 v) { return (v ^ 0x00800080) & 0x00FF00FF; }
""",
    "await_launches": "static void await_launches() {}\n",
    "let_next_start": "static void let_next_start() {}\n",
    "exp2_of": "static float exp2_of(float v) { return exp2f(v); }\n",
    "narrow_pair": """
static u32 narrow_pair(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }
""",
    "send": "static void send(u32 to, int, u32, float v) { memcpy(shared_at(to), &v, 4); }\n",
    "send_four": """
static void send_four(u32 to, int, u32, const float (&v)[4]) { memcpy(shared_at(to), v, 16); }
""",
    "store_four": "static void store_four(u32 to, const float (&v)[4]) { memcpy(shared_at(to), v, 16); }\n",
    "load_four": "static void load_four(float (&v)[4], u32 at) { memcpy(v, shared_at(at), 16); }\n",
}
"""What lanes.cu has in PTX, for clusters of one block."""


RESIDENT_IN_CPP = {
    **GLOBAL_IN_CPP,
    **BARRIERS_IN_CPP,
    "await_launches": LANES_IN_CPP["await_launches"],
    "load_word": LANES_IN_CPP["load_word"],
    "store_shared": """
template <typename T> static void store_shared(u32 at, T v) { memcpy(shared_at(at), &v, sizeof v); }
""",
    "load_matrices": LANES_IN_CPP["load_blocks"].replace("load_blocks", "load_matrices"),
    "copy_tiles": """
struct Described {
    const char* data;
    long long rows, row_bytes, number_bytes, copied;
};
static void copy_tiles(u32 to, const TileMap* map, int column, int row, u32 barrier, u64) {
    Described of;
    memcpy(&of, map, sizeof of);
    for (int r = 0; r < of.copied; ++r)
        for (int c = 0; c < 8; ++c) {
            const long long from = column * of.number_bytes + 16 * c;
            char* place = shared_at(to + 128 * r + 16 * (c ^ r % 8));
            memset(place, 0, 16);
            if (row + r >= of.rows || from >= of.row_bytes) continue;
            memcpy(place, of.data + (row + r) * of.row_bytes + from, std::min(16LL, of.row_bytes - from));
        }
    barrier_at(barrier).bytes_and_phase -= 2 * 128 * of.copied, barrier_at(barrier).settle();
}
""",
    "count_up": "static void count_up(int* counter) { ++*counter; }\n",
    "await_count": """
static void await_count(const int* counter, int count) {
    if (*counter != count) abort();  // blocks run one after the other
}
""",
    "prefetch_map": "static void prefetch_map(const TileMap*) {}\n",
    "store_pair": """
static void store_pair(u64* at, u32 pair, u32 launch) { *at = (u64)launch << 32 | pair; }
""",
    "load_pairs": """
static Chunk load_pairs(const u64* at, u32 launch) {
    for (int i = 0; i < 2; ++i)
        if (at[i] >> 32 != launch) abort();  // blocks run one after the other
    return {make_uint4(at[0], at[1], 0, 0), 0};
}
""",
    "load_shared": """
static uint4 load_shared(u32 at) {
    uint4 v;
    memcpy(&v, shared_at(at), 16);
    return v;
}
""",
    "rest_a_moment": "static void rest_a_moment() {}\n",
    "meet": """
static void meet() {
    static unsigned arrived, round;
    const unsigned own = round;
    if (++arrived == blockDim.x - 32) arrived = 0, ++round;
    while (__ballot_sync(0, round == own)) {}
}
""",
    "e4m3_chunk": """
static uint8_t e4m3_of(float v) {
    const float size = fabsf(v);
    const uint8_t sign = std::signbit(v) ? 128 : 0;
    if (v != v) return 127;
    if (size >= 448) return sign | 126;
    int exponent;
    frexpf(size, &exponent);  // size = m 2^exponent, m in [0.5, 1)
    exponent = std::max(exponent - 1, -6);
    const int steps = (int)nearbyintf(ldexpf(size, 3 - exponent));  // of 2^(exponent - 3)
    return sign | (steps + (exponent + 6) * 8);
}
static uint2 e4m3_chunk(uint4 v, float scale) {
    u16 numbers[8];
    uint8_t codes[8];
    memcpy(numbers, &v, 16);
    for (int i = 0; i < 8; ++i) codes[i] = e4m3_of(widen(numbers[i]) / scale);
    uint2 both;
    memcpy(&both, codes, 8);
    return both;
}
""",
}
"""What resident.cu has in PTX, and its map of a tile."""


A100 = Gpu(80, 108, 163 * 1024)
"""What they plan for."""
KERNELS: dict[ModuleType, tuple[Callable[[Any], Source], dict[str, str]]] = {
    slices: (lambda made: made.source, IN_CPP),
    warps: (lambda made: made.source, GLOBAL_IN_CPP),
    units: (units.source_of, GLOBAL_IN_CPP),
    resident: (lambda made: made.source, RESIDENT_IN_CPP),
    hopper: (lambda made: made.source, LANES_IN_CPP),
}
"""The source of a compiled variant, and what it has in PTX, by the module that launches it."""


def described(view: Tensor, tile: tuple[int, ...]) -> bytes:
    """Describe a matrix to the emulated copy engine."""
    rows, columns = tile
    assert rows in (16, 32, 48, 64)
    assert columns == 128 // view.element_size()
    facts = (view.data_ptr(), len(view), view.shape[1] * view.element_size(), view.element_size(), rows)
    return struct.pack("=QQQQQ", *facts).ljust(128)


def described_rows(view: Tensor, tile: tuple[int, ...]) -> bytes:
    """Describe the rows of all heads, in parts, to the emulated copy engine."""
    _, parts, _, numbers = view.shape
    part_bytes = numbers * view.element_size()
    assert tile == (1, parts, tile[2], numbers)
    assert part_bytes in (32, 64, 128)
    assert view.stride() == (view.stride(0), numbers, parts * numbers, 1)
    head_bytes = view.stride(0) * view.element_size()
    facts = (view.data_ptr(), head_bytes, parts * part_bytes, part_bytes, tile[2])
    return struct.pack("=QQQQQ", *facts).ljust(128)


def use_emulated(monkeypatch: pytest.MonkeyPatch, folder: Path, gpu: Gpu = A100) -> None:
    """Let these kernels run on this CPU; what is compiled for it stays in `folder`."""
    for module in KERNELS:
        monkeypatch.setattr(module, "_function", partial(_emulated, module, folder))
    for module in (*KERNELS, expert_slices):
        if hasattr(module, "gpu_of"):
            monkeypatch.setattr(module, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(resident, "tile_map", described)
    monkeypatch.setattr(hopper, "tile_map", described_rows)


def use_emulated_rows(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let rows be prepared for a linear on this CPU."""
    monkeypatch.setattr(
        linear,
        "_prepare_function",
        lambda *made_of: EmulatedFunction(linear.prepare_source(*made_of[:-1]), {}, folder),
    )
    monkeypatch.setattr(linear, "gpu_of", lambda device: A100)


def _emulated(module: ModuleType, folder: Path, *made_of: Any) -> EmulatedFunction:
    *facts, _ = made_of  # the last is the device
    source_of, replaced = KERNELS[module]
    return EmulatedFunction(source_of(*facts), replaced, folder)
