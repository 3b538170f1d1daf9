// y = x W^T for few rows x (M = 1..512) on Hopper: e4m3 weights by e4m3 rows and int8 weights by int8 rows (W8A8), four-bit weights by e4m3 (W4A8) or
// 16-bit rows; numbers of e2m1, int8 and 16-bit weights by 16-bit rows.
//
// Orientation: W is the A operand of wgmma (64 rows), tokens are its columns (8, 16, 32, 64 or 128), sums are float32. A block owns `tiles` row
// tiles of 16 (gated: 8 gate rows over their 8 up rows, so that both are in one thread). One warp has the copy engine fill a ring of stages
// with tiles of W and x, 128 columns of K to a chunk (64 of 16-bit weights); W of the first `early` stages is asked for before the kernel
// before this one has ended, later at most `window` stages are on their way at a time: memory serves all that was asked for evenly, and the first
// would come among the last. The others are warpgroups: ROW_GROUPS of 64 rows, by K_SLOTS along K. Weights of 8 and 16 bits go from shared memory to the
// tensor cores, and no register ever holds one; four-bit weights become numbers of the rows' type in registers on the way. Where weights are scaled in
// blocks (BLOCKED), each stage also brings the scales of its rows, and those of a block of tokens are brought before its first.
//
// The sum of an output has one shape, whatever M. Chunk c belongs to part c mod (SEGMENTS K_SLOTS). A chunk sums from zero in the
// instruction and is then added to its part in float32, chunks ascending: the FP8 instruction keeps about 14 bits of a sum, and a chunk is a
// group of four-bit weights or a block of e4m3, whose scale is applied here, after the tokens' scale of the block. A chunk of SUBGROUPS = 2 or 4
// groups is as many sums, which are scaled and added one after another, while the next is multiplied. Chunks of 16-bit weights
// need neither, nor do those of int8, whose sums are whole numbers of 32 bits and exact until the end: the instruction adds them to their part
// itself; nor do int8 weights by 16-bit rows (W8), which become exact numbers of 16 bits in registers. So do numbers of e2m1 times the scales of
// their groups (FP4), whose chunks sum from zero all the same. Outputs of both are multiplied by what is left of the scales. Parts meet in
// a balanced tree. A stage has K_SLOTS chunks, one for each
// warpgroup along K. SEGMENTS = 2: a cluster of two blocks shares the chunks of a unit, and each block adds the sums of both for half of the
// outputs. How many tokens an instruction takes changes no bit (tested, H200), nor do two instructions where a block has 128 tokens, which
// read a weight from memory once for both.
//
// One row may come raw (RAW: before its norm, its rounding to e4m3 or int8, or both; numbers.cuh): every block then prepares it by itself while its
// first weights are on their way, and it stays in shared memory without a swizzle, its 16-byte pieces side by side. The instruction takes the
// pieces that follow for tokens 1 to 7, whose sums nobody reads.
//
// Rows of a prompt (PROMPTS: four-bit weights, K_SLOTS = SEGMENTS = 1) need no bits of their own: by 16-bit rows, weights are scaled before they
// are multiplied, rounded to 16 bits as `prefill_w4a16.py` rounds them, and the instruction adds all chunks, so that a thread has registers for
// 128 tokens and the next weights become numbers while those before them are multiplied.
//
// Macros: FORMAT, NT, ACT, F16, OUT32, NORM and QUANT as in stream.cu; RAW; ROW_GROUPS, K_SLOTS, SEGMENTS; KEEP = chunks of 8 numbers of a
// raw row that a thread keeps; PROMPTS, 2 where the weight has 8 gate rows over their 8 up rows and y all gates before all ups; REGISTERS of a
// thread that multiplies, where it takes some from those that copy; ZEROS = rows of int8 have zero points, whose products with the sums of an
// output's codes are subtracted from its sums.

#define DIRECT_SUMS (K_SLOTS * SEGMENTS == 1)  // a thread has whole sums
#define DENSE (FORMAT == 0)
#define IN_16_BITS (W8 || (PROMPTS && !W4A8))  // weights, whole, before they are multiplied
#define OVERLAPPED (W4A8 && PROMPTS && ROW_GROUPS <= 2)  // scales sums of a chunk while the next one is multiplied
#define SCALED_SUMS (SUBGROUPS > 1 && !FP4)
#define LEAVES_PRODUCTS (DENSE || IN_16_BITS || (INT8 && NT <= 8))  // under way while the next step begins; 128 tokens leave too few stages
#define CODE_ROWS (E4M3_ROWS || INT8)
#ifndef ZEROS
#define ZEROS 0
#endif

constexpr int MAX_STAGES = 16, MAX_ROWS = 512;
constexpr int CHUNK = K_STAGE;                        // columns of one chunk of a stage
constexpr int X_ROW = CODE_ROWS ? CHUNK : 2 * CHUNK;  // bytes of a row of x in it
constexpr int W_TILE = A_BYTES;                       // of a row tile in it
constexpr int CONSUMERS = ROW_GROUPS * K_SLOTS * 4;   // warps
// Four-bit weights by more than 16 tokens, and the sums of two chunks of 128 tokens, want more registers than 17 warps can have: the others of the
// copying warp's group leave theirs. With fewer tokens a small kernel finds room beside a block.
constexpr bool TRADES_REGISTERS = (W4 && NT > 2) || (FP8 && NT > 8);
constexpr int THREADS = CONSUMERS * 32;               // of theirs
constexpr int DEEP = W4 && NT <= 4 ? 2 : 1;           // chunks of a warpgroup in one stage
constexpr float UNIT = W4A8 ? 512.0f : W8 && !F16 ? 64.0f : CODE_UNIT;  // of a sum, in products of codes
constexpr int PLACES = DEEP * K_SLOTS;                // chunks in one stage
constexpr int PARTS = SCALED_SUMS && SUBGROUPS > 2 ? SUBGROUPS : 2;  // of a chunk: one becomes numbers while the one before it is multiplied
constexpr int STEPS = (W4A8 ? 4 : 8) / PARTS;         // instructions of a part
constexpr int X_BYTES = RAW ? 0 : TOKENS * X_ROW;     // of x in it

struct alignas(64) Args {
    char w_map[128];
    char x_map[128];
    char scale_map[128];
    const float* w_scale;
    const float* x_scale;
    const u16* bias;
    const u16* residual;
    void* y;
    const uint4* raw;
    const uint4* norm_weight;
    const float* static_scale;
    int num_tokens, n, k, tiles, stages, window, early, num_items, token_blocks, inbox_bytes, x_bytes, scale_bytes;
    float norm_eps;
    const int* x_zero;  // ZEROS
    const int* w_sum;
};

template <int WORDS> __device__ __forceinline__ void load_words(u32 (&to)[WORDS], u32 at) {
    if constexpr (WORDS == 4) asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    else if constexpr (WORDS == 2) asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at) : "memory");
    else asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(at) : "memory");
}
__device__ __forceinline__ void copy_tiles(u32 to, const char* map, int column, int row, int tile, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(tile), "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy_weights(u32 to, const char* map, int chunk, int tile, u32 barrier, u64 policy) {
#if W4
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(chunk), "r"(tile), "r"(barrier), "l"(policy) : "memory");
#elif ACT
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(tile), "r"(chunk), "r"(barrier), "l"(policy) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(tile * 16), "r"(chunk), "r"(barrier), "l"(policy) : "memory");
#endif
}
#if BLOCKED
__device__ __forceinline__ void copy_scales(u32 to, const char* map, int chunk, int tile, u32 barrier) {
#if ACT
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4}], [%5];"
                 ::"r"(to), "l"(map), "r"(0), "r"(tile), "r"(chunk), "r"(barrier) : "memory");
#else
    copy_tiles(to, map, 0, tile, chunk, barrier);
#endif
}
__device__ __forceinline__ float load_fresh(const float* at) {  // past the first-level cache, which may hold what was there before
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
#endif
__device__ __forceinline__ void copy_rows(u32 to, const char* map, int chunk, int token, u32 barrier) {
    copy_tiles(to, map, 0, token, chunk * (X_ROW / 128), barrier);
}

#if INT8
typedef int Sum;
__device__ __forceinline__ u32 bits_of(Sum v) { return (u32)v; }
__device__ __forceinline__ Sum load_sum(u32 at) { return (int)load_word(at); }
#else
typedef float Sum;
__device__ __forceinline__ u32 bits_of(Sum v) { return __float_as_uint(v); }
__device__ __forceinline__ Sum load_sum(u32 at) { return load_float(at); }
#endif

#if FP8 || INT8 || DENSE
constexpr int WIDE = NT < 8 ? NT : 8, HALVES = NT / WIDE;  // eights of tokens that one instruction takes, and how many it takes for all
#if FP8
#define OUT4(j) "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])
#elif INT8
#define OUT4(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#else
#define OUT4(j) D4(j)
#endif
#define OUT16(j) OUT4(j), OUT4(j + 1), OUT4(j + 2), OUT4(j + 3)
#if NT == 1
#define D_LIST "{%0,%1,%2,%3}"
#define AB "%4; mov.b64 b, %5;\n"
#define WIDTH "8"
#define D_OUT OUT4(0)
#elif NT == 2
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define AB "%8; mov.b64 b, %9;\n"
#define WIDTH "16"
#define D_OUT OUT4(0), OUT4(1)
#elif NT == 4
#define D_LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define AB "%16; mov.b64 b, %17;\n"
#define WIDTH "32"
#define D_OUT OUT16(0)
#else
#define D_LIST                                                                                                                            \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define AB "%32; mov.b64 b, %33;\n"
#define WIDTH "64"
#define D_OUT OUT16(0), OUT16(4)
#endif
#define STEP "add.s64 a, a, 2;\nadd.s64 b, b, 2;\n"
#if FP8
#define MULTIPLY "wgmma.mma_async.sync.aligned.m64n" WIDTH "k32.f32.e4m3.e4m3 " D_LIST ", a, b, p, 1, 1;\n"
// d = a b: one chunk of 64 rows and the tokens of an instruction. Waits for it.
__device__ __forceinline__ void multiply(float (&d)[WIDE][4], u64 a, u64 b) {
    asm volatile("{.reg .pred p; .reg .b64 a, b;\nmov.b64 a, " AB
                 "wgmma.fence.sync.aligned;\n"
                 "setp.ne.b32 p, 0, 0;\n" MULTIPLY "setp.eq.b32 p, 0, 0;\n" STEP MULTIPLY STEP MULTIPLY STEP MULTIPLY
                 "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"
                 : D_OUT : "l"(a), "l"(b) : "memory");
}
#else
#if INT8
#define MULTIPLY "wgmma.mma_async.sync.aligned.m64n" WIDTH "k32.s32.s8.s8 " D_LIST ", a, b, p;\n"
#else
#define MULTIPLY "wgmma.mma_async.sync.aligned.m64n" WIDTH "k16.f32." MMA_TYPES " " D_LIST ", a, b, p, 1, 1, 0, 0;\n"
#endif
// d += a b, the same. Not waited for.
__device__ __forceinline__ void multiply(Sum (&d)[WIDE][4], u64 a, u64 b) {
    asm volatile("{.reg .pred p; .reg .b64 a, b;\nmov.b64 a, " AB "setp.eq.b32 p, 0, 0;\n" MULTIPLY STEP MULTIPLY STEP MULTIPLY STEP MULTIPLY "}"
                 : D_OUT : "l"(a), "l"(b) : "memory");
}
#endif
// The sums of an instruction's tokens among those of all.
__device__ __forceinline__ Sum (&sums_of(Sum (&d)[NT][4], int half))[WIDE][4] { return *(Sum(*)[WIDE][4])d[WIDE * half]; }
#endif

#if W4
// One of the two 16-bit numbers of a word, twice: those of rows g and g + 8.
__device__ __forceinline__ u32 twice(u32 pair, int row) { return __byte_perm(pair, 0, row ? 0x3232 : 0x1010); }
// What `dequantize` adds for a row.
__device__ __forceinline__ u32 zero_of_rows(u32 pair, int row) { return FORMAT == 2 ? zero_added(twice(pair, row)) : NO_ZERO; }
#if FP4
// Eight codes of one thread in one k16 step, times the scales of rows g and g + 8. The bits of a magnitude, where 16 bits have the lowest of their
// exponent and the highest of their mantissa, are 2^-126 (2^-14 in float16) of the number, which the scales make up for.
__device__ __forceinline__ void e2m1_numbers(u32 (&a)[4], u32 word, u32 low_scale, u32 high_scale) {
    constexpr u32 SIGN = 0x80008000, MAGNITUDE = F16 ? 0x0E000E00 : 0x01C001C0;
    const u32 up3 = word << 3, far = F16 ? word << 9 : word >> 3;  // `fp4.py` has the places of the bits
    IN_ORDER("and.b32 %0, %1, %2;" : "=r"(a[0]) : "r"(word), "n"(SIGN | MAGNITUDE));
    IN_ORDER("and.b32 %0, %1, %2;" : "=r"(a[1]) : "r"(up3), "n"(SIGN | MAGNITUDE));
    IN_ORDER("{.reg .b32 t; and.b32 t, %1, %3; lop3.b32 %0, %2, %4, t, 0xEA;}" : "=r"(a[2]) : "r"(word << 2), "r"(word << 6), "n"(SIGN), "n"(MAGNITUDE));
    IN_ORDER("{.reg .b32 t; and.b32 t, %1, %3; lop3.b32 %0, %2, %4, t, 0xEA;}" : "=r"(a[3]) : "r"(word << 1), "r"(far), "n"(SIGN), "n"(MAGNITUDE));
    scale_numbers(a, low_scale, high_scale);
}
// The scales of a half of a chunk, in which a thread has rows g and g + 8.
__device__ __forceinline__ void load_scales(u32 (&to)[SUBGROUPS / 2], u32 tile, int half, int lane) {
    load_words(to, tile + 1024 + ((lane >> 2) * 2 + half) * (2 * SUBGROUPS));
}
#endif
#endif
#if W8
// Eight codes of one thread in one k16 step, those of rows g and g + 8, less 128. As bits of a bfloat16 number a code is 2^-133 of it, and a
// 2^-6 of it comes out; in float16 it is the lower half of 1024 + code. Past the end a byte of 0 is no weight of 0, and is made one.
__device__ __forceinline__ void int8_numbers(u32 (&a)[4], u32 word, u32 word_below, bool inside) {
    const u32 factor = inside ? (F16 ? 0x3C003C00 : 0x7F007F00) : 0, less = inside ? (F16 ? 0xE480E480 : 0xC000C000) : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 codes = j & 1 ? word_below : word;
        u32 v;
        IN_ORDER("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(codes), "r"(F16 ? 0x64646464 : 0), "r"(j < 2 ? 0x4140 : 0x4342));
#if F16
        IN_ORDER("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(a[j]) : "r"(v), "r"(factor), "r"(less));
#else
        IN_ORDER("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[j]) : "r"(v), "r"(factor), "r"(less));
#endif
    }
}
#endif

template <int GROUPS> __device__ __forceinline__ void wait_products() {  // until at most GROUPS of the newest are unfinished
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }  // the consumers

#if RAW
// The raw row: a thread keeps its chunks of 8 numbers in registers.
struct RawRow {
    uint4 kept[KEEP], weight[NORM ? KEEP : 1];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    __device__ __forceinline__ int segment(int j) { return j * CONSUMERS + warp; }
    __device__ __forceinline__ int chunk(int j) { return segment(j) * SEGMENT + lane; }
    __device__ __forceinline__ void load(uint4* to, const uint4* from, int chunks) {
#pragma unroll
        for (int j = 0; j < KEEP; ++j) to[j] = chunk(j) < chunks ? from[chunk(j)] : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load_weight(const Args& args) {
        if (NORM) load(weight, args.norm_weight, args.k / 8);
    }
    // Writes it to `to`, and gives its scale.
    __device__ __forceinline__ float prepare(const Args& args, u32 to) {
        load(kept, args.raw, args.k / 8);
#if NORM
        __shared__ float squares[KEEP * CONSUMERS];
#pragma unroll
        for (int j = 0; j < KEEP; ++j) {
            const float sum = segment_squares(kept[j]);
            if (lane == 0) squares[segment(j)] = sum;
        }
        meet();
        const float factor = inverse_rms(args.k, args.norm_eps, lane, [&](int s) { return squares[s]; });
#pragma unroll
        for (int j = 0; j < KEEP; ++j) kept[j] = normed(kept[j], factor, weight[j]);
#endif
#if QUANT == 1 || QUANT == 3
        __shared__ float most_of[CONSUMERS];
        float most = 0.0f;
#pragma unroll
        for (int j = 0; j < KEEP; ++j) most = max_magnitude(most, kept[j]);
        most = warp_max(most);
        if (lane == 0) most_of[warp] = most;
        meet();
        const float scale = scale_of(warp_max(lane < CONSUMERS ? most_of[lane] : 0.0f), INT8 ? 127.0f : 448.0f);
#elif QUANT == 2
        const float scale = *args.static_scale;
#else
        const float scale = 1.0f;
#endif
#pragma unroll
        for (int j = 0; j < KEEP; ++j) {
            if (chunk(j) >= args.k / 8) continue;
#if QUANT
            const uint2 v =
#if INT8
                int8_chunk(kept[j], scale);
#else
                e4m3_chunk(kept[j], scale);
#endif
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 8 * chunk(j)), "r"(v.x), "r"(v.y) : "memory");
#else
            store_shared(to + 16 * chunk(j), kept[j]);
#endif
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet();
        return scale;
    }
};
__device__ __forceinline__ u64 raw_descriptor(u32 at) {  // no swizzle, 16 bytes of a row every 16 bytes
    return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32);
}
#endif

// Scales and biases of an output: of both rows where it is gated.
struct Channel {
    float scale[ACT ? 2 : 1], bias[ACT ? 2 : 1];
#if ZEROS
    int sum[ACT ? 2 : 1];
#endif
};
__device__ __forceinline__ Channel channel_of(const Args& args, int channel, bool there) {
    Channel c = {};
#pragma unroll
    for (int half = 0; half < (ACT ? 2 : 1); ++half) {
        const int row = channel + half * (args.n / 2);
        if (((FP8 && !BLOCKED) || INT8 || FP4 || W8) && there) c.scale[half] = args.w_scale[row];
        if (there && args.bias) c.bias[half] = widen(args.bias[row]);
#if ZEROS
        if (there) c.sum[half] = args.w_sum[row];
#endif
    }
    return c;
}
__device__ __forceinline__ long long place(const Args& args, int token, int channel) {
    return (long long)token * (ACT ? args.n / 2 : args.n) + channel;
}
__device__ __forceinline__ float residual_at(const Args& args, long long at) { return args.residual ? widen(args.residual[at]) : 0.0f; }
// The zero point of a token's codes, past the first-level cache, which may hold what was there before.
__device__ __forceinline__ int zero_of(const Args& args, int token) {
    int v = 0;
#if ZEROS
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(args.x_zero + min(token, args.num_tokens - 1)) : "memory");
#endif
    return v;
}
// An output from its sums, before it is rounded: `up` counts where it is gated. Whole numbers are corrected before they are numbers of 32 bits.
__device__ __forceinline__ float finished(const Args& args, const Channel& c, float token_scale, int zero, Sum sum, Sum up) {
    auto value = [&](Sum whole, int half) {
#if ZEROS
        whole -= zero * c.sum[half];
#endif
        const float s = (float)whole;
        const float v = INT8 ? s * token_scale * c.scale[half] : FP8 && !BLOCKED ? s * c.scale[half] * token_scale : W4A8 ? s * token_scale : FP4 || W8 ? s * UNIT * c.scale[half] : s * UNIT;
        return args.bias ? v + c.bias[half] : v;
    };
#if ACT
    return rounded(activated(rounded(value(sum, 0)))) * rounded(value(up, 1));
#else
    return value(sum, 0);
#endif
}
__device__ __forceinline__ void put(const Args& args, long long at, float v, float residual) {
#if OUT32
    ((float*)args.y)[at] = v + residual;
#else
    const u16 bits = narrow(v);
    ((u16*)args.y)[at] = args.residual ? narrow(widen(bits) + residual) : bits;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS + (TRADES_REGISTERS ? 128 : 32), 1) hopper_linear(const __grid_constant__ Args args) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ char shared_memory[];
    __shared__ u64 barriers[2 * MAX_STAGES];
    const u32 shared = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;  // inbox | raw row | scales of x | ring
    const u32 x_at = shared + args.inbox_bytes, scales_at = x_at + args.x_bytes, ring = scales_at + args.scale_bytes;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * MAX_STAGES;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int block = blockIdx.x / SEGMENTS, num_blocks = gridDim.x / SEGMENTS, segment = SEGMENTS == 1 ? 0 : blockIdx.x & 1;
    const int num_chunks = args.k / CHUNK, num_blocks_of_chunks = (num_chunks + 2 * K_SLOTS - 1) / (2 * K_SLOTS);
    const int steps = (num_blocks_of_chunks + SEGMENTS - 1) / SEGMENTS * (2 / DEEP);
    // A stage: x of its chunks, then W of them: [tile][chunk] of blocks, or [chunk][row] of e4m3, then scales [chunk][row].
    const int w_bytes = PLACES * args.tiles * W_TILE, scales_in_stage = PLACES * X_BYTES + w_bytes;
    const int filled = scales_in_stage + (BLOCKED ? PLACES * args.tiles * 64 : 0), stage_bytes = (filled + 1023) & ~1023;
    auto chunk = [&](int step, int place) {  // place = warpgroup along K + K_SLOTS * (0 .. DEEP - 1). Past the end: zeros
        const int i = step * DEEP + place / K_SLOTS;
        return ((i / 2 * SEGMENTS + segment) * 2 + i % 2) * K_SLOTS + place % K_SLOTS;
    };

    // Items are units of `tiles` row tiles by blocks of tokens, those of a unit beside one another.
    if (warp >= CONSUMERS) {
        if (TRADES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp > CONSUMERS) {
#if SEGMENTS > 1
            asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
            __syncthreads();
#if SEGMENTS > 1
            asm volatile("barrier.cluster.wait.acquire.aligned;\nbarrier.cluster.arrive.release.aligned;" ::: "memory");
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
            return;
        }
        const int total = (args.num_items - block + num_blocks - 1) / num_blocks * steps, ahead = min(total, args.early);
        const int first = RAW ? 1 : ahead;  // a raw row must not wait until all copies are asked for
        const u64 policy = policy_of(args.token_blocks == 1);
        auto load_weights = [&](int item, int step, int slot) {
            const u32 barrier = full + 8 * slot;
            arrive_expecting(barrier, filled);
#if BLOCKED
            copy_scales(ring + slot * stage_bytes + scales_in_stage, args.scale_map, chunk(step, 0), item / args.token_blocks * args.tiles, barrier);
#endif
            copy_weights(ring + slot * stage_bytes + PLACES * X_BYTES, args.w_map, chunk(step, 0), item / args.token_blocks * args.tiles, barrier, policy);
        };
        if (lane < args.stages) {
            init_barrier(full + 8 * lane, 1), init_barrier(empty + 8 * lane, CONSUMERS);
            publish_barriers();
        }
        __syncwarp();
        if (lane == 0) {
            for (int i = 0; i < first; ++i) load_weights(block + i / steps * num_blocks, i % steps, i);
        }
        __syncwarp();
#if SEGMENTS > 1
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
        __syncthreads();
        if (lane == 0) {
            for (int i = first; i < ahead; ++i) load_weights(block + i / steps * num_blocks, i % steps, i);
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int slot = 0, done = 0, arrived = 0, oldest = 0;  // oldest: of the stages on their way
            u32 phase = 1, oldest_phase = 0;     // of `empty` (a stage never used is free), and of `full`
            for (int item = block; item < args.num_items; item += num_blocks)
                for (int step = 0; step < steps; ++step, ++done) {
                    if (done >= ahead) {
                        for (; done - arrived >= args.window; ++arrived) {
                            wait_barrier(full + 8 * oldest, oldest_phase);
                            if (++oldest == args.stages) oldest = 0, oldest_phase ^= 1;
                        }
                        wait_barrier(empty + 8 * slot, phase);
                        load_weights(item, step, slot);
                    }
#if !RAW
                    copy_rows(ring + slot * stage_bytes, args.x_map, chunk(step, 0), item % args.token_blocks * TOKENS, full + 8 * slot);
#endif
                    if (++slot == args.stages) slot = 0, phase ^= 1;
                }
        }
#if SEGMENTS > 1
        __syncwarp();
        asm volatile("barrier.cluster.wait.acquire.aligned;\nbarrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        return;
    }
    if (TRADES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#if SEGMENTS > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
#if RAW
    RawRow raw_row;
    raw_row.load_weight(args);
#endif
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    __shared__ float token_scales[MAX_ROWS];  // read behind a barrier at the end
#if RAW
    token_scales[0] = raw_row.prepare(args, x_at) * UNIT;
#elif BLOCKED
    int scaled_token = -1;  // the first of those whose scales are there, [chunk][token]
#elif CODE_ROWS && !PROMPTS
    for (int token = threadIdx.x; token < args.num_tokens; token += THREADS) token_scales[token] = args.x_scale[token] * UNIT;
#endif

    const int warpgroup = __shfl_sync(0xFFFFFFFFu, warp / 4, 0), group = warpgroup % ROW_GROUPS, k_slot = warpgroup / ROW_GROUPS;
    const u32 a_offset = PLACES * X_BYTES + (W4 ? ((group * 4 + (warp & 3)) * PLACES + k_slot) * W_TILE : (k_slot * args.tiles + group * 4) * W_TILE);
    const u32 b_offset = k_slot * X_BYTES;
#if W8
    const u32 code_row = (warp & 3) * W_TILE + ((lane >> 3 & 1) * 8 + (lane & 7)) * 128;  // of a lane's row, in tiles with swizzled pieces of 16 bytes
#endif
    int slot = 0;
    u32 phase = 0;
    for (int item = block; item < args.num_items; item += num_blocks) {
        const int first_tile = item / args.token_blocks * args.tiles, first_token = item % args.token_blocks * TOKENS;
        const int num_tokens = min(args.num_tokens - first_token, TOKENS), tile_slot = group * 4 + (warp & 3);
        Sum total[NT][4] = {};
#if IN_16_BITS
        u32 factors[2][4][4];  // of the halves of a chunk: one becomes numbers while the one before it is multiplied
#endif
#if BLOCKED
        if (first_token != scaled_token) {
            meet();  // all have read those of the item before
            for (int i = threadIdx.x; i < num_tokens * num_chunks; i += THREADS)
                store_float(scales_at + 4 * (i % num_chunks * TOKENS + i / num_chunks), load_fresh(args.x_scale + first_token * num_chunks + i));
            meet();
            scaled_token = first_token;
        }
#endif
#if DIRECT_SUMS
        const int tile = first_tile + tile_slot, row = lane >> 2;
        const bool there = tile_slot < args.tiles && tile < args.n / 16;
        auto channel_at = [&](int half) { return PROMPTS == 2 ? half * (args.n / 2) + tile * 8 + row : tile * (ACT ? 8 : 16) + half * 8 + row; };
#if ACT
        const Channel channels[1] = {channel_of(args, channel_at(0), there)};
#else
        const Channel channels[2] = {channel_of(args, channel_at(0), there), channel_of(args, channel_at(1), there)};
#endif
#else
        // Each block of a cluster finishes half of the outputs, and sends its sums of the other half as [token][row of that half].
        const int rows = args.tiles * 16, pitch = rows + 4, own_rows = rows / SEGMENTS, own_outputs = ACT ? own_rows / 2 : own_rows;
        const int output = threadIdx.x % own_outputs, my_token = threadIdx.x / own_outputs, token_step = THREADS / own_outputs;
        const int r = ACT ? (output >> 3) * 16 + (output & 7) : output;
        const int channel = first_tile * (ACT ? 8 : 16) + segment * own_outputs + output;
        const bool there = my_token < token_step && channel < (ACT ? args.n / 2 : args.n);
        const Channel scales = channel_of(args, channel, there);
        constexpr int BATCH = 4;
        float residuals[BATCH];
        auto load_residuals = [&](int token) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                residuals[i] = there && token + i * token_step < num_tokens
                                   ? residual_at(args, place(args, first_token + token + i * token_step, channel)) : 0.0f;
        };
        load_residuals(my_token);
#endif
#if OVERLAPPED
        // Half of a chunk becomes numbers while the half before it is multiplied, and the sums of a chunk are scaled while the next one is
        // multiplied into others. `low` and `high` are the scales of rows g and g + 8.
        float sums[2][NT][4], low, high;
        u32 a[2][2][4];
        uint4 codes[2];
        auto load_codes = [&] {
            wait_barrier(full + 8 * slot, phase);
            __syncwarp();
            const u32 at = ring + slot * stage_bytes + a_offset, pair = load_word(at + 1024 + (lane >> 2) * 4);
            codes[0] = load_shared(at + lane * 16), codes[1] = load_shared(at + 512 + lane * 16);
            low = widen(pair & 0xFFFF), high = widen(pair >> 16);
        };
        auto begin_half = [&](float (&to)[NT][4], int half) {
            codes_of(a[half][0][0], a[half][0][1], codes[half].x), codes_of(a[half][0][2], a[half][0][3], codes[half].y);
            codes_of(a[half][1][0], a[half][1][1], codes[half].z), codes_of(a[half][1][2], a[half][1][3], codes[half].w);
            const u64 x = descriptor(ring + slot * stage_bytes + b_offset) + half * 4;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            wgmma(to, a[half][0], x, half), wgmma(to, a[half][1], x + 2, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        };
        auto add_scaled = [&](const float (&from)[NT][4], float low_scale, float high_scale) {
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) total[j][c] = fmaf(c < 2 ? low_scale : high_scale, from[j][c], total[j][c]);
        };
        auto advance = [&](float (&now)[NT][4], const float (&before)[NT][4]) {
            const float low_before = low, high_before = high;
            const u32 emptied = empty + 8 * slot;
            if (++slot == args.stages) slot = 0, phase ^= 1;
            load_codes();
            wait_products<1>();
            begin_half(now, 0);
            wait_products<1>();
            if (lane == 0) arrive(emptied);
            begin_half(now, 1);
            add_scaled(before, low_before, high_before);
        };
        auto finish = [&](const float (&last)[NT][4]) {
            wait_products<0>();
            if (lane == 0) arrive(empty + 8 * slot);
            if (++slot == args.stages) slot = 0, phase ^= 1;
            add_scaled(last, low, high);
        };
        load_codes(), begin_half(sums[0], 0), begin_half(sums[0], 1);
        int step = 1;
        for (; step + 1 < steps; step += 2) advance(sums[1], sums[0]), advance(sums[0], sums[1]);
        if (step < steps) advance(sums[1], sums[0]), finish(sums[1]);
        else finish(sums[0]);
#else
        for (int step = 0; step < steps; ++step) {
            const u32 stage = ring + slot * stage_bytes;
            auto x_of = [&](int deep) {
#if RAW
                const int x_chunk = min(chunk(step, k_slot + deep * K_SLOTS), num_chunks - 1);  // past the end W is zero, and x must be a number
                return raw_descriptor(x_at + x_chunk * X_ROW);
#else
                return descriptor(stage + b_offset + deep * K_SLOTS * X_BYTES);
#endif
            };
            wait_barrier(full + 8 * slot, phase);
            __syncwarp();
#if DENSE || INT8
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int half = 0; half < HALVES; ++half) multiply(sums_of(total, half), descriptor(stage + a_offset), x_of(0) + half * (WIDE * 64));
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#if LEAVES_PRODUCTS
            wait_products<1>();
            if (step > 0 && lane == 0) arrive(empty + 8 * (slot == 0 ? args.stages - 1 : slot - 1));
#else
            wait_products<0>();
            if (lane == 0) arrive(empty + 8 * slot);
#endif
#elif FP8
#if BLOCKED
            const u32 row_scale = stage + scales_in_stage + ((k_slot * args.tiles + tile_slot) * 16 + (lane >> 2)) * 4;
            const float above = load_float(row_scale), below = load_float(row_scale + 32);  // of rows g and g + 8
            const u32 token_scale = scales_at + 4 * (min(chunk(step, k_slot), num_chunks - 1) * TOKENS + (lane & 3) * 2);
#endif
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                float sums[WIDE][4];
                multiply(sums, descriptor(stage + a_offset), x_of(0) + half * (WIDE * 64));
                if (half == HALVES - 1 && lane == 0) arrive(empty + 8 * slot);
                float(&so_far)[WIDE][4] = sums_of(total, half);
#pragma unroll
                for (int j = 0; j < WIDE; ++j) {
#if BLOCKED
                    const u32 of_token = token_scale + (WIDE * half + j) * 32;
                    const float of_tokens[2] = {load_float(of_token), load_float(of_token + 4)};
#pragma unroll
                    for (int c = 0; c < 4; ++c) so_far[j][c] = fmaf(__fmul_rn(sums[j][c], of_tokens[c & 1]), c < 2 ? above : below, so_far[j][c]);
#else
#pragma unroll
                    for (int c = 0; c < 4; ++c) so_far[j][c] += sums[j][c];
#endif
                }
            }
#elif IN_16_BITS
            const u32 at = stage + a_offset;
            const bool inside = !RAW || chunk(step, k_slot) < num_chunks;  // of K: other rows than raw ones are zero past its end
#if W4
            const uint4 words[2] = {load_shared(at + lane * 16), load_shared(at + 512 + lane * 16)};
#endif
#if W4 && !FP4
            u32 scales[SUBGROUPS], zeros[SUBGROUPS] = {};
            load_words(scales, at + 1024 + (lane >> 2) * (4 * SUBGROUPS));
            if (FORMAT == 2) load_words(zeros, at + 1024 + 32 * SUBGROUPS + (lane >> 2) * (4 * SUBGROUPS));
#endif
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                wait_products<1>();  // those that read this half of `factors`, and at the second half all of the step before
                if (half == 1 && step > 0 && lane == 0) arrive(empty + 8 * (slot == 0 ? args.stages - 1 : slot - 1));
#if W8
#pragma unroll
                for (int s = 0; s < 4; s += 2) {
                    u32 codes[4];  // of rows g and g + 8, in two steps
                    load_matrices(codes, at + code_row + (((half * 4 + s + (lane >> 4)) ^ (lane & 7)) << 4));
                    int8_numbers(factors[half][s], codes[0], codes[1], inside), int8_numbers(factors[half][s + 1], codes[2], codes[3], inside);
                }
#else
                const u32 each[4] = {words[half].x, words[half].y, words[half].z, words[half].w};
#if FP4
                u32 scales[SUBGROUPS / 2];
                load_scales(scales, at, half, lane);
#endif
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const u32 pair = scales[(FP4 ? s : half * 4 + s) * SUBGROUPS / 8], low_scale = twice(pair, 0), high_scale = twice(pair, 1);
#if FP4
                    e2m1_numbers(factors[half][s], each[s], low_scale, high_scale);
#else
                    const u32 zero = zeros[(half * 4 + s) * SUBGROUPS / 8];
                    dequantize(factors[half][s], each[s], zero_of_rows(zero, 0), zero_of_rows(zero, 1));
                    scale_numbers(factors[half][s], low_scale, high_scale);
#endif
                }
#endif
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int s = 0; s < 4; ++s) wgmma(total, factors[half][s], x_of(0) + half * (RAW ? 8 : TOKENS * 8) + s * 2, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
#else
            uint4 words[DEEP][2];
#if !FP4
            u32 scales[DEEP][SUBGROUPS], zeros[DEEP][SUBGROUPS] = {};
#endif
            u64 x[DEEP];
#pragma unroll
            for (int deep = 0; deep < DEEP; ++deep) {
                const u32 at = stage + a_offset + deep * K_SLOTS * W_TILE;
                words[deep][0] = load_shared(at + lane * 16), words[deep][1] = load_shared(at + 512 + lane * 16);
#if !FP4
                load_words(scales[deep], at + 1024 + (lane >> 2) * (4 * SUBGROUPS));
                if (FORMAT == 2) load_words(zeros[deep], at + 1024 + 32 * SUBGROUPS + (lane >> 2) * (4 * SUBGROUPS));
#endif
                x[deep] = x_of(deep);
            }
            constexpr int BUFFERS = NT > 4 ? 1 : SCALED_SUMS ? 2 : DEEP;  // of sums of a chunk or a group
            float sums[BUFFERS][NT][4];
            u32 a[2][STEPS][4];
            auto make_numbers = [&](int deep, int part) {
#if FP4
                u32 pairs[SUBGROUPS / 2];
                load_scales(pairs, stage + a_offset + deep * K_SLOTS * W_TILE, part, lane);
#endif
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const int step = part * STEPS + s, first = W4A8 ? 2 * step : step;
                    const uint4 word = words[deep][first / 4];
                    const u32 each[4] = {word.x, word.y, word.z, word.w};
                    u32(&to)[4] = a[part % 2][s];
#if W4A8
                    codes_of(to[0], to[1], each[first % 4]), codes_of(to[2], to[3], each[first % 4 + 1]);
#elif FP4
                    e2m1_numbers(to, each[step % 4], twice(pairs[s * SUBGROUPS / 8], 0), twice(pairs[s * SUBGROUPS / 8], 1));
#else
                    const u32 zero = zeros[deep][step * SUBGROUPS / 8];
                    dequantize(to, each[step % 4], zero_of_rows(zero, 0), zero_of_rows(zero, 1));
#endif
                }
            };
            auto begin_products = [&](int buffer, int deep, int part) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    const int step = part * STEPS + s;
                    const u64 x_step = W4A8 || RAW ? step * 2 : step / 4 * (TOKENS * 8) + step % 4 * 2;
                    wgmma(sums[buffer], a[part % 2][s], x[deep] + x_step, (!SCALED_SUMS && part > 0) || s > 0);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            };
#if !FP4
            auto add_scaled = [&](int buffer, u32 pair) {
                const float low_scale = widen(pair & 0xFFFF), high_scale = widen(pair >> 16);
#pragma unroll
                for (int j = 0; j < NT; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) total[j][c] = fmaf(c < 2 ? low_scale : high_scale, sums[buffer][j][c], total[j][c]);
            };
#endif
#if SCALED_SUMS
            make_numbers(0, 0), begin_products(0, 0, 0);
#pragma unroll
            for (int i = 0; i < DEEP * PARTS; ++i) {
                const int next = i + 1, deep = next / PARTS, part = next % PARTS;
                const bool more = next < DEEP * PARTS;
                if (more) make_numbers(deep, part);
                if (more && BUFFERS > 1) begin_products(next % BUFFERS, deep, part), wait_products<1>();
                else wait_products<0>();
                if (!more && lane == 0) arrive(empty + 8 * slot);
                add_scaled(i % BUFFERS, scales[i / PARTS][i % PARTS]);
                if (more && BUFFERS == 1) begin_products(0, deep, part);
            }
#else
            auto begin_half = [&](int deep, int half) { make_numbers(deep, half), begin_products(deep % BUFFERS, deep, half); };
            begin_half(0, 0), begin_half(0, 1);
#pragma unroll
            for (int deep = 0; deep < DEEP; ++deep) {
                const bool more = deep + 1 < DEEP;
                if (more && NT <= 4) wait_products<1>(), begin_half(deep + 1, 0), wait_products<1>();
                else wait_products<0>();
                if (!more && lane == 0) arrive(empty + 8 * slot);
#if FP4
#pragma unroll
                for (int j = 0; j < NT; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) total[j][c] += sums[deep % BUFFERS][j][c];
#else
                add_scaled(deep % BUFFERS, scales[deep][0]);
#endif
                if (more && NT > 4) begin_half(deep + 1, 0);
                if (more) begin_half(deep + 1, 1);
            }
#endif
#endif
            if (++slot == args.stages) slot = 0, phase ^= 1;
        }
#endif
#if LEAVES_PRODUCTS
        wait_products<0>();
        if (lane == 0) arrive(empty + 8 * (slot == 0 ? args.stages - 1 : slot - 1));
#endif

#if DIRECT_SUMS
        if (!PROMPTS) meet();
        float y[NT][ACT ? 2 : 4];
        auto scale_of_token = [&](int token) {
            if (!CODE_ROWS) return 1.0f;
            return PROMPTS ? args.x_scale[min(token, args.num_tokens - 1)] * UNIT : token_scales[token];
        };
        auto token_of = [&](int j, int c) { return first_token + j * 8 + (lane & 3) * 2 + (c & 1); };
#pragma unroll
        for (int j = 0; j < NT; ++j)  // all before the first is stored, so that they overlap
#pragma unroll
            for (int c = 0; c < (ACT ? 2 : 4); ++c)
                y[j][c] = finished(args, channels[c >> 1], scale_of_token(token_of(j, c)), zero_of(args, token_of(j, c)), total[j][c], total[j][2 + (c & 1)]);
        if (there)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int c = 0; c < (ACT ? 2 : 4); ++c) {
                    if (token_of(j, c) >= args.num_tokens) continue;
                    const long long at = place(args, token_of(j, c), channel_at(c >> 1));
                    put(args, at, y[j][c], residual_at(args, at));
                }
#else
        // Sums go where the ring was, as [part][token][row]: the plan gives a block of this kind one item.
        auto sum_at = [&](int part, int token, int r) { return ring + 4 * ((part * TOKENS + token) * pitch + r); };
        meet();
        if (tile_slot < args.tiles)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    store_word(sum_at(k_slot, j * 8 + (lane & 3) * 2 + (c & 1), tile_slot * 16 + (c >> 1) * 8 + (lane >> 2)), bits_of(total[j][c]));
        meet();
        auto part_sum = [&](int token, int r) { return tree_sum(K_SLOTS, [&](int p) { return load_sum(sum_at(p, token, r)); }); };
#if SEGMENTS > 1
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        u32 inbox;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(inbox) : "r"(shared), "r"(segment ^ 1));
        for (int at = threadIdx.x; at < num_tokens * own_rows; at += THREADS) {
            const int token = at / own_rows, r = at - token * own_rows;
            const Sum sum = part_sum(token, (segment ^ 1) * own_rows + r);
            asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(inbox + 4 * at), "r"(bits_of(sum)) : "memory");
        }
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        if (there)
            for (int token = my_token; token < num_tokens; token += BATCH * token_step) {
                if (token != my_token) load_residuals(token);
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const int each = token + i * token_step;
                    if (each >= num_tokens) break;
                    auto sum = [&](int at) {
                        const Sum mine = part_sum(each, segment * own_rows + at);
                        return SEGMENTS == 1 ? mine : mine + load_sum(shared + 4 * (each * own_rows + at));
                    };
                    const float v = finished(args, scales, CODE_ROWS ? token_scales[first_token + each] : 1.0f, zero_of(args, first_token + each), sum(r), ACT ? sum(r + 8) : (Sum)0);
                    put(args, place(args, first_token + each, channel), v, residuals[i]);
                }
            }
#endif
    }
}
