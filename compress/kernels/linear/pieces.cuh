// What kernels that stream weights share: asynchronous copies, wgmma, the four-bit trick, sums over parts of K. After operands/shared.cuh.
// Macros as in stream.cu.

#define W4A8 (FORMAT == 5 || FORMAT == 6)  // four-bit weights by e4m3 rows, -8 among the codes (6) or not
#define FP4 (FORMAT == 8)      // numbers of e2m1, by hopper.cu alone
#define W8 (FORMAT == 9)       // int8 by 16-bit rows, by hopper.cu alone
#define W4 (FORMAT == 1 || FORMAT == 2 || W4A8 || FP4)
#define FP8 (FORMAT == 3 || FORMAT == 4)
#define E4M3_ROWS (FP8 || W4A8)
#define INT8 (FORMAT == 7)     // by hopper.cu alone
#define BLOCKED (FORMAT == 4)  // a scale for each output, or row, and 128 columns
#define MMA_F16 (F16 || FP8)
#define TMA (HOPPER && !RESIDENT && !FP8)  // x by the copy engine

constexpr int K_STAGE = FORMAT == 0 ? 64 : 128;  // of K in one stage
constexpr int SUBTILES = K_STAGE / 64;           // an x subtile is [tokens][64] of 16 bits, rows of 128 bytes, 16-byte chunks swizzled by token
constexpr int TOKENS = NT * 8;
#ifndef SUBGROUPS
#define SUBGROUPS 1  // scale groups in 128 columns of four-bit weights; several by hopper.cu alone
#endif
constexpr int SCALE_BYTES = W4 ? (FORMAT == 2 ? 64 : 32) * SUBGROUPS : 0;
constexpr float CODE_UNIT = W4 && !W4A8 && !FP4 && !F16 ? 64.0f : 1.0f;  // of a sum, in products of codes
constexpr int A_BYTES = W4 ? 1024 + SCALE_BYTES : 2048;  // one row tile in one stage
constexpr int AT_ONCE = W4 && NT <= 2 && STAGES > 2 ? 2 : 1;  // stages that a warp multiplies side by side
constexpr bool X_IN_REGISTERS = !WGMMA && NT <= 2;  // before a stage is multiplied
constexpr int AHEAD = W4 ? STAGES : STAGES - 1;     // the weights of W4 always are, so that their place in the ring is free at once

template <int N> struct Number {
    static constexpr int value = N;
};

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16_or_zero(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void wait_pending() {  // until at most GROUPS of the newest are unfinished
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

#if MMA_F16
#define MMA_TYPES "f16.f16"
#else
#define MMA_TYPES "bf16.bf16"
#endif

#if WGMMA
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#if W4A8
#define A_KIND "k32.f32.e4m3.e4m3"
#define A_END ";}"
#else
#define A_KIND "k16.f32." MMA_TYPES
#define A_END ", 0;}"
#endif
// d (+)= a b for four row tiles (one a warp) and all token tiles; b is an x subtile behind a 128-byte-swizzle descriptor
__device__ __forceinline__ void wgmma(float (&d)[NT][4], const u32 (&a)[4], u64 b, int accumulate) {
#if NT == 1
    asm volatile("{.reg .pred p; setp.ne.b32 p, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8" A_KIND " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1" A_END
                 : D4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif NT == 2
    asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16" A_KIND " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1" A_END
                 : D4(0), D4(1) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif NT == 4
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32" A_KIND " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
                 " {%16,%17,%18,%19}, %20, p, 1, 1" A_END
                 : D4(0), D4(1), D4(2), D4(3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif NT == 8
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64" A_KIND " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1" A_END
                 : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#elif NT == 16
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128" A_KIND " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1" A_END
                 : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
#endif
}
__device__ __forceinline__ u64 descriptor(u32 subtile) {  // K-major, 128-byte swizzle, 8 tokens every 1024 bytes
    return (u64)((subtile & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
#endif

#if WGMMA
#define IN_ORDER asm volatile  // between the asynchronous products that it overlaps, not before all of them
#else
#define IN_ORDER asm
#endif

#if W4
// A block of weights, a row tile's share of a stage, to shared memory.
__device__ __forceinline__ void copy_block(u32 to, const char* from, int lane) {
    copy16(to + lane * 16, from + lane * 16);
    copy16(to + 512 + lane * 16, from + 512 + lane * 16);
    if (lane < SCALE_BYTES / 16) copy16(to + 1024 + lane * 16, from + 1024 + lane * 16);
}
#if W4A8
// Eight codes of one thread in half of one k32 step, four of row g and four of row g + 8, as e4m3 numbers code 2^-9: the least bit of e4m3, where
// bytes 0 to 15 stand for 0 to 15. `word` has the sign of each code and its magnitude, less one where the code is negative and -8 is among them.
__device__ __forceinline__ void codes_of(u32& a, u32& b, u32 word) {
    IN_ORDER("and.b32 %0, %1, 0x87878787;" : "=r"(a) : "r"(word));
    IN_ORDER("{.reg .b32 turned; shf.r.wrap.b32 turned, %1, %1, 4; and.b32 %0, turned, 0x87878787;}" : "=r"(b) : "r"(word));
#if FORMAT == 6
    a += (a & 0x80808080) >> 7, b += (b & 0x80808080) >> 7;
#endif
}
#endif
// Eight codes 0..15 of one thread in one k16 step, minus their zero point, exactly; in bfloat16 2^-6 of it. There the code's bits alone are the number:
// with an exponent of 0 or 1, bits are worth 2^-133 each, so that the high half of a byte needs no shift.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 word, u32 low_zero, u32 high_zero) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 v, zero = j & 1 ? high_zero : low_zero;  // registers 1 and 3 hold row g + 8
#if F16
        IN_ORDER("lop3.b32 %0, %1, 0x000F000F, 0x64006400, 0xEA;" : "=r"(v) : "r"(word >> (4 * j)));
        IN_ORDER("add.rn.f16x2 %0, %1, %2;" : "=r"(a[j]) : "r"(v), "r"(zero));
#else
        IN_ORDER("and.b32 %0, %1, %2;" : "=r"(v) : "r"(j < 2 ? word : word >> 8), "r"(j & 1 ? 0x00F000F0 : 0x000F000F));
        IN_ORDER("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[j]) : "r"(v), "r"(j & 1 ? 0x7D007D00 : 0x7F007F00), "r"(zero));  // 2^123, 2^127
#endif
    }
}
// What it adds for a pair of rows, from -(128 + 8 + zero point) twice, or in float16 -(1024 + 8 + zero point).
__device__ __forceinline__ u32 zero_added(u32 stored) {
#if !F16
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(stored) : "r"(0x3C803C80), "r"(0x40004000));  // / 64 + 2
#endif
    return stored;
}
constexpr u32 NO_ZERO = F16 ? 0xE408E408 : 0xBE00BE00;  // -1032, or -8 / 64
#endif

#if WGMMA && W4
// The numbers of `dequantize` times their scale, which is there twice, rounded to 16 bits.
__device__ __forceinline__ void scale_numbers(u32 (&a)[4], u32 low_scale, u32 high_scale) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#if F16
        IN_ORDER("mul.rn.f16x2 %0, %0, %1;" : "+r"(a[j]) : "r"(j & 1 ? high_scale : low_scale));
#else
        IN_ORDER("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a[j]) : "r"(j & 1 ? high_scale : low_scale));
#endif
}
#endif

// Row address of this lane in an x subtile (k16 step s is at `^ (s << 5)`): two steps of one token tile, or one step of two.
__device__ __forceinline__ u32 x_lane_offset(int lane, int x_rows) {
    const int matrix = lane >> 3, row = lane & 7;
#if NT == 1
    const int there = row < x_rows ? row : 0;
    return there * 128 + ((matrix ^ there) << 4);
#else
    return (row + (matrix >> 1) * 8 < x_rows ? (matrix >> 1) * 8 + row : row) * 128 + (((matrix & 1) ^ row) << 4);
#endif
}

// Adds to `total` the products of COUNT stages, in their order; in W4 a stage is a group, which sums from zero on exact integers first.
// Stages are worked on side by side, so that their matrix instructions do not wait for one another.
//
// `refill` starts copies into shared memory, in W4 into the places that the weights were loaded from. Its copies also keep the compiler from
// putting each load right before its use, and waiting there: it moves no load past them.
template <int COUNT, typename Refill>
__device__ __forceinline__ void add_products(float (&total)[NT][4], const u32 (&a_tile)[COUNT], const u32 (&x_tile)[COUNT], u32 a_lane,
                                             u32 x_lane, int subtile_bytes, int lane, Refill refill) {
    constexpr int STEPS = K_STAGE / 16;
#if W4
    float sums[COUNT][NT][4];
    uint4 words[COUNT][2];
    u32 scales[COUNT], low_zero[COUNT], high_zero[COUNT];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        words[c][0] = load_shared(a_tile[c] + a_lane), words[c][1] = load_shared(a_tile[c] + 512 + a_lane);
        scales[c] = load_word(a_tile[c] + 1024 + (lane >> 2) * 4);
#if FORMAT == 2
        const u32 zeros = load_word(a_tile[c] + 1056 + (lane >> 2) * 4);  // -(128 + zero), or -(1024 + zero) in float16
        low_zero[c] = zero_added(__byte_perm(zeros, 0, 0x1010)), high_zero[c] = zero_added(__byte_perm(zeros, 0, 0x3232));
#else
        low_zero[c] = high_zero[c] = NO_ZERO;
#endif
    }
#endif
#if !WGMMA && NT <= 2
    u32 x[COUNT][STEPS / 2 * NT][4];  // two steps of one token tile, or one step of two
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
#pragma unroll
        for (int f = 0; f < STEPS / 2 * NT; ++f) {
            const int step = f * 2 / NT;
            load_matrices(x[c][f], x_tile[c] + (step >> 2) * subtile_bytes + (x_lane ^ ((step & 3) << 5)));
        }
#endif
    if (W4) __syncwarp();
    refill();

    auto load_a = [&](u32 (&a)[2][4], int c, int pair) {  // two k16 steps
#if W4
        const uint4 word = words[c][pair / 2];
        dequantize(a[0], pair & 1 ? word.z : word.x, low_zero[c], high_zero[c]);
        dequantize(a[1], pair & 1 ? word.w : word.y, low_zero[c], high_zero[c]);
#elif FP8
        u32 r[4];
        load_matrices(r, a_tile[c] + (a_lane ^ (pair << 5)));
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // r: rows g and g + 8 of the first step, then of the second
            const uint2 v = e4m3_to_f16(r[j]);
            a[j >> 1][j & 1] = v.x, a[j >> 1][2 + (j & 1)] = v.y;
        }
#else
        load_matrices(a[0], a_tile[c] + (a_lane ^ (pair << 6)));
        load_matrices(a[1], a_tile[c] + (a_lane ^ (pair << 6) ^ 32));
#endif
    };
#if WGMMA
    u32 a[STEPS / 2][2][4];
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; ++pair) load_a(a[pair], 0, pair);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        wgmma(total, a[step / 2][step % 2], descriptor(x_tile[0] + (step >> 2) * subtile_bytes) + (step & 3) * 2, 1);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#else
#pragma unroll
    for (int pair = 0; pair < STEPS / 2; ++pair)
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            u32 a[2][4];
            load_a(a, c, pair);
#if W4
            float(&sum)[NT][4] = sums[c];
#else
            float(&sum)[NT][4] = total;
#endif
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool accumulate = !W4 || pair > 0 || h > 0;
#if NT == 1
                mma<MMA_F16>(sum[0], a[h], x[c][pair][2 * h], x[c][pair][2 * h + 1], accumulate);
#else
                const int step = 2 * pair + h;
#pragma unroll
                for (int j = 0; j < NT; j += 2) {
#if NT == 2
                    const u32(&b)[4] = x[c][step];
#else
                    u32 b[4];
                    load_matrices(b, x_tile[c] + (step >> 2) * subtile_bytes + j * 1024 + (x_lane ^ ((step & 3) << 5)));
#endif
                    mma<MMA_F16>(sum[j], a[h], b[0], b[1], accumulate);
                    mma<MMA_F16>(sum[j + 1], a[h], b[2], b[3], accumulate);
                }
#endif
            }
        }
#endif
#if W4
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
        const float low_scale = widen(scales[c] & 0xFFFF) * CODE_UNIT, high_scale = widen(scales[c] >> 16) * CODE_UNIT;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            total[j][0] = fmaf(low_scale, sums[c][j][0], total[j][0]), total[j][1] = fmaf(low_scale, sums[c][j][1], total[j][1]);
            total[j][2] = fmaf(high_scale, sums[c][j][2], total[j][2]), total[j][3] = fmaf(high_scale, sums[c][j][3], total[j][3]);
        }
    }
#endif
}

// term(0) + .. + term(count - 1) for count = 1, 2, 4, 8, as a balanced tree: sums of neighbours may then be formed elsewhere first.
// No term is -0 (sums start at +0), so that padding by 0 changes nothing.
template <typename Term> __device__ __forceinline__ auto tree_sum(int count, Term term) {
    decltype(term(0)) v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < count ? term(i) : decltype(term(0))(0);
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}
