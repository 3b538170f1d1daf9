// y = x W^T for few rows x (decode and verification, M = 1..512), of one matrix or of each expert's, for every format and size: sums over I
// are cut into at most eight slices.
//
//     slice s of the steps of I (128 columns; 64 of 16-bit numbers) is [s per, (s + 1) per), per = ceil(steps / 8)
//     sum of a slice    steps ascend; columns of a step by matrix instructions in one order. Four bits: a group of 128 columns, or a smaller
//                       scale group, sums from zero on exact integers and is added times its scale; blocks of e4m3 likewise by their two scales;
//                       numbers of e2m1 are multiplied by their scales first, exactly
//     y                 slices ascend, in float32
//
// Sums of int8 are whole numbers of 32 bits, exact in any order, until both scales multiply them; before that, the product of a row's zero point and
// the sum of the output's codes is subtracted where ZEROS is 1 (rows in order alone).
//
// So the sum of an output has one shape, and a row's bits depend on the row alone: not on the number of rows, nor on the outputs that a warp
// takes, nor on the warps of an item: PARTS that share its slices, where outputs are few, or one for all.
//
// An item is 16 MT outputs (of gate and of up where gated) of a unit: 8 NT rows, or those of one expert's tokens. Any order of columns serves
// that x and W share, so a thread loads 16 bytes next to one another, as the registers of matrix instructions want them; DEPTH steps are under
// way, the first of the weights before griddepcontrol.wait, unless the launch ahead decides which they are. They wait in registers, or, STAGED, in
// places of shared memory that a thread has to itself, so that nobody waits for another. e4m3 codes are multiplied as float16, exactly: FP8
// instructions would keep 14 bits of a sum.
//
// Layouts of W: kernels/operands/matrices.py. Macros: F16 0 = bfloat16, 1 = float16 (the model's dtype); FORMAT 0 = 16 bits, 1 = four bits,
// 2 = e4m3 with a scale for each output and row, 3 = e4m3 in blocks, 4 = int8 with a scale for each output and row, 5 = int8 with a scale for each
// output, and rows of 16 bits, 6 = e2m1; SUBGROUPS scale groups in 128 columns of four bits (1 also where a group has more); OFFSETS =
// asymmetric; ACT as in products.cuh (gated: W is gate over up), or RELU2 = the squared relu of outputs without a gate; UNITS 0 = rows in order
// and one matrix, 1 = units of experts, whose pairs are numbered token times choices + choice, 2 = units that are older than the launch ahead,
// whose rows of x are pairs; COMBINE = the choices of a token, which the block adds, or 0; OUT32 = y is float32; PARTS 1, 2, 4 or 8; STAGED; TAIL
// = the last step is not whole; MT, NT, DEPTH; WARPS of a block at most, BLOCKS of a multiprocessor at least.

#ifndef ZEROS
#define ZEROS 0
#endif
#define NIBBLES (FORMAT == 1 || FORMAT == 6)
#if FORMAT == 4
typedef int Sum;
#else
typedef float Sum;
#endif
struct alignas(16) Sums {
    Sum x, y, z, w;
};

constexpr int SLICES = 8;
constexpr bool FP8 = FORMAT == 2 || FORMAT == 3, HALF = F16 || FP8, FROM_ZERO = FORMAT == 1 || FORMAT == 3;
constexpr int MATRICES = ACT ? 2 : 1, WARP = 32, TOKENS = 8 * NT, OUTPUTS = 16 * MT, TILES = MATRICES * MT;
constexpr int W_VECTORS = NIBBLES ? 1 : 2, X_VECTORS = NIBBLES || FORMAT == 5 ? 4 : 2;  // of 64 bytes that four threads share, of a row in a step
constexpr int W_STEP = NIBBLES ? 1024 : 128, X_STEP = 64 * X_VECTORS;  // bytes from a step to the next
constexpr int X_QUARTER = FORMAT == 5 ? 32 : 16;  // bytes from a thread to the next: 16 codes beside 16-bit rows go with two vectors
constexpr int SCALES = FORMAT == 6 ? 4 : SUBGROUPS;  // that a thread needs of an output in 128 columns of four bits
constexpr bool X_AHEAD = STAGED || NT * X_VECTORS <= 8;  // else there are no registers for it
constexpr int W_PLACES = TILES * 2 * W_VECTORS, PLACES = W_PLACES + NT * X_VECTORS;  // of 16 bytes of a thread, in a step that is STAGED
constexpr bool SPLIT = PARTS > 1;
static_assert(!COMBINE || FORMAT != 3, "the rows of all choices have no scales in shared memory");
constexpr int SUMS = TILES * NT * 128;  // of a slice of an item
constexpr int STAGES = STAGED ? DEPTH * PLACES * 128 : 0;
// Slices of a warp where they are shared; those whose sums have places of their own while it works; numbers of shared memory of a warp.
constexpr int EACH = SLICES / PARTS, KEPT = !SPLIT ? 1 : EACH > 1 ? EACH : 0, OWN = KEPT ? STAGES + KEPT * SUMS : STAGES > SUMS ? STAGES : SUMS;

struct Args {
    const char* x;
    const float* x_scale;
    const char* w;
    const void* scale;
    const u16* offset;
    const u16* bias;
    const u16* residual;
    void* y;
    const int* experts;
    const int* pairs;  // NULL: unit u is pair u
    const float* weights;
    u16* combined;
    long long expert_bytes, expert_scales;
    int out, in, steps, per, scale_steps, scale_rows, num_scales, num_rows, choices;
    const int* x_zero;  // ZEROS
    const int* w_sum;
    const float* outer;  // of each output, NULL where there are none
};

// 16 bytes of a weight, or zeros past the end of its row: without a branch, so that loads stay one after another.
__device__ __forceinline__ uint4 load_weight(const char* at, bool inside, u64 policy) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (TAIL)
        asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
                     : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(at), "r"((u32)inside), "l"(policy));
    else
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "l"(policy));
    return v;
}
// 16 bytes of a row, past the first-level cache, which may hold what was there before, or zeros past its end. Of no row v may stay: what a token
// that is not there has concerns no other.
__device__ __forceinline__ void load_row(uint4& v, const char* at, bool there) {
    if (TAIL) v = make_uint4(0, 0, 0, 0);
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(at), "r"((u32)there) : "memory");
}

// The same, to shared memory.
__device__ __forceinline__ void copy_weight(uint4* to, const char* from, bool inside, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                 ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_row(uint4* to, const char* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int STEPS> __device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(STEPS) : "memory"); }

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
// Nibbles i of two words, minus their zero point, exactly; `offset` is -(8 + zero point), in float16 - 1024, twice. In bfloat16 it is 2^-6 of them, and so
// is `offset`: with an exponent of 0 or 1 a nibble's bits are the number, each worth 2^-133, so that the high half of a byte needs no shift.
__device__ __forceinline__ u32 numbers(u32 words, int i, u32 offset) {
    u32 v;
#if F16
    asm("lop3.b32 %0, %1, 0x000F000F, 0x64006400, 0xEA;" : "=r"(v) : "r"(words >> (4 * i)));
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(offset));
#else
    v = (i < 2 ? words : words >> 8) & (i & 1 ? 0x00F000F0 : 0x000F000F);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(v), "r"(i & 1 ? 0x7D007D00 : 0x7F007F00), "r"(offset));  // 2^123, 2^127
#endif
    return v;
}
// `offset` of what is stored: in bfloat16 - 128 - (8 + zero point).
__device__ __forceinline__ u32 offset_of(u16 stored) {
    u32 v = stored * 0x10001u;
#if !F16
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3C803C80), "r"(0x40004000));  // / 64 + 2
#endif
    return v;
}

// The numbers of e2m1 that nibbles i of two words are, times their scale, exactly. Bits of exponent and mantissa alone are 2^-126 (float16: 2^-14) of it.
__device__ __forceinline__ u32 scaled(u32 words, int i, u32 scale) {
    u32 v = words >> (4 * i);
#if F16
    v = (v & 0x00070007) << 9 | (v << 12 & 0x80008000);
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x74007400));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(scale));
#else
    v = (v & 0x00070007) << 6 | (v << 12 & 0x80008000);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(v), "r"(0x7E807E80), "r"(0x80008000));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(v), "r"(scale), "r"(0x80008000));
#endif
    return v;
}
// Bytes 2 i and 2 i + 1 of a word, int8, as numbers. Of bfloat16 the low seven bits are added to 128, of which 256 or 128 is taken off: the sign is the
// last bit of that exponent. Of float16 byte + 128 is added to 1024.
__device__ __forceinline__ u32 widened(u32 word, int i) {
    const u32 bytes = __byte_perm(word, 0, i ? 0x4342 : 0x4140);
    u32 v;
#if F16
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"((bytes ^ 0x00800080) | 0x64006400), "r"(0xE480E480));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"((bytes & 0x007F007F) | 0x43004300), "r"(0x3F803F80), "r"((bytes & 0x00800080) | 0xC300C300));
#endif
    return v;
}

// What a thread holds of a step: outputs g and g + 8 of each tile of 16, row g of each tile of 8, and quarter t of their columns.
struct Step {
#if !STAGED
    uint4 w[TILES][2][W_VECTORS], x[X_AHEAD ? NT : 1][X_VECTORS];
#endif
#if NIBBLES
    u16 scale[TILES][2][SCALES];
#if OFFSETS
    u16 offset[TILES][2][SUBGROUPS];
#endif
#elif FORMAT == 3
    float scale[TILES][2];
#endif
};

extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS) sliced_product(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) float shared_sums[];  // of each warp, and for blocks of e4m3 the scales of x [TOKENS][steps]
    float* x_scales = shared_sums + WARPS * OWN;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane >> 2, t = lane & 3;
    float* sums = shared_sums + warp * OWN;
    uint4* places = (uint4*)(sums + KEPT * SUMS) + lane;
    const int w_bytes = args.in * (FORMAT == 0 ? 2 : 1), x_bytes = args.in * (FP8 || FORMAT == 4 ? 1 : 2);  // of a row; w_bytes not of four bits
    const int parts = SPLIT ? blockDim.x / WARP / (COMBINE ? COMBINE : 1) : 1, part = SPLIT ? warp % parts : 0;
    const int size = args.out / MATRICES, unit = COMBINE ? blockIdx.y * COMBINE + warp / parts : blockIdx.y;
    const int tile = SPLIT || COMBINE ? blockIdx.x : blockIdx.x * WARPS + warp, first_output = tile * OUTPUTS;
    const int first = part * EACH * args.per, count = SPLIT ? min(EACH * args.per, args.steps - first) : args.steps;
    __shared__ int pair_at[UNITS ? TOKENS : 1];  // -1: there is none
#if HOPPER
    if (UNITS == 1) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");  // if UNITS 1, the next launch may read what was written before this one
#endif
    const int expert = UNITS ? load_index(args.experts + unit) : 0;
    if (expert < 0) return;
    if (args.bias && lane < TILES) prefetch(args.bias + (long long)expert * args.out + lane / MT * size + min(first_output + lane % MT * 16, size - 1));
#if COMBINE  // a thread for each choice of an output
    const int choice = lane % COMBINE, choice_pair = blockIdx.y * COMBINE + choice, choice_expert = load_index(args.experts + choice_pair);
    const float choice_weight = load_float(args.weights + choice_pair);
#endif
    const long long scales = expert * args.expert_scales;

    // Where the next step of this warp begins, and in it the tiles, or, of other formats than four bits, their halves.
    constexpr int HALVES = NIBBLES ? 1 : 2;
    const char* w = args.w + expert * args.expert_bytes + (long long)first * W_STEP + t * 16;
#if NIBBLES
    const int first_group = SUBGROUPS > 1 ? first * SUBGROUPS : first / args.scale_steps;
    const u16 *scale = (const u16*)args.scale + scales + first_group * 16, *offset = args.offset + scales + first_group * 16;
    int group_left = args.scale_steps - first % args.scale_steps;  // steps
#else
    const float* scale = (const float*)args.scale + scales + first;
#endif
    u32 w_at[TILES][HALVES], scale_at[TILES][HALVES];  // in 16 bytes, in numbers
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                u32 &at = w_at[m * MT + i][h], &own_scale = scale_at[m * MT + i][h];
#if NIBBLES
                const int block = min(tile * MT + i, size / 16 - 1) + m * (size / 16);
                at = block * (args.steps * 64u) + g * 4, own_scale = block * (args.num_scales * 16) + g;
#else
                const int own = min(first_output + 16 * i + 8 * h + g, size - 1);
                at = (m * size + own) * (w_bytes / 16u);
                own_scale = (m * ((size + args.scale_rows - 1) / args.scale_rows) + own / args.scale_rows) * args.steps;
#endif
            }
    const u64 policy = policy_of(UNITS || gridDim.y == 1);
    auto load_weights = [&](Step& to, int step, int place) {  // of one step after the other
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int v = 0; v < W_VECTORS; ++v) {
                    const bool inside = NIBBLES || (first + step) * 128 + v * 64 + t * 16 < w_bytes;
                    const char* at = w + (u64)w_at[i][h % HALVES] * 16 + (h / HALVES * 512 + v * 64);
#if STAGED
                    copy_weight(places + (place * PLACES + (i * 2 + h) * W_VECTORS + v) * WARP, at, inside, policy);
#else
                    to.w[i][h][v] = load_weight(at, inside, policy);
#endif
                }
#if NIBBLES
#pragma unroll
                for (int s = 0; s < SCALES; ++s) {
                    const int group = SUBGROUPS == 8 ? 2 * s + t / 2 : s;  // quarter t of 32 columns lies in one of two groups of 16
                    to.scale[i][h][s] = (scale + scale_at[i][0])[h * 8 + group * 16];
#if OFFSETS
                    to.offset[i][h][s] = (offset + scale_at[i][0])[h * 8 + s * 16];
#endif
                }
#elif FORMAT == 3
                to.scale[i][h] = scale[scale_at[i][h]];
#endif
            }
        w += W_STEP;
#if NIBBLES
        if (SUBGROUPS > 1 || --group_left == 0) group_left = args.scale_steps, scale += 16 * SUBGROUPS, offset += 16 * SUBGROUPS;
#else
        scale += 1;
#endif
    };

    Step ring[DEPTH] = {};  // what is loaded of no row stays zero
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d < count) load_weights(ring[d], d, d);
#if HOPPER
    if (UNITS != 1) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

    if (UNITS && args.pairs) {
        if (threadIdx.x < TOKENS) pair_at[threadIdx.x] = load_index(args.pairs + unit * TOKENS + threadIdx.x);
        __syncthreads();
    }
    auto pair_of = [&](int token) {
        const int row = unit * TOKENS + token;
        return !UNITS ? (row < args.num_rows ? row : -1) : args.pairs ? pair_at[token] : token == 0 ? unit : -1;
    };
    auto row_of = [&](int pair) { return UNITS == 1 ? pair / args.choices : pair; };
    const char* x[NT];
    bool there[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int pair = pair_of(8 * n + g);
        there[n] = pair >= 0;
        x[n] = args.x + (long long)row_of(max(pair, 0)) * x_bytes + first * X_STEP + t * X_QUARTER;
    }
    auto x_at = [](int v) { return FORMAT == 5 ? v / 2 * 128 + v % 2 * 16 : v * 64; };  // vector v of a thread
    auto inside = [&](int step, int v) { return !TAIL || (first + step) * X_STEP + x_at(v) + t * X_QUARTER < x_bytes; };
    auto load_x = [&](uint4& to, int n, int step, int v) { load_row(to, x[n] + x_at(v), there[n] && inside(step, v)); };
    auto load_rows = [&](Step& to, int step, int place) {  // of one step after the other
#pragma unroll
        for (int n = 0; n < (X_AHEAD ? NT : 0); ++n) {
#pragma unroll
            for (int v = 0; v < X_VECTORS; ++v)
#if STAGED
                if (there[n]) copy_row(places + (place * PLACES + W_PLACES + n * X_VECTORS + v) * WARP, x[n] + x_at(v), inside(step, v));
#else
                load_x(to.x[n][v], n, step, v);
#endif
            x[n] += X_STEP;
        }
    };

    Sum total[TILES][NT][4] = {};
    auto multiply = [&](const Step& from, int step, int place) {
        uint4 rows[NT][X_VECTORS];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int v = 0; v < X_VECTORS; ++v) {
#if STAGED
                rows[n][v] = places[(place * PLACES + W_PLACES + n * X_VECTORS + v) * WARP];
#else
                rows[n][v] = X_AHEAD ? from.x[X_AHEAD ? n : 0][v] : make_uint4(0, 0, 0, 0);
                if (!X_AHEAD) load_x(rows[n][v], n, step, v);
#endif
            }
            if (!X_AHEAD) x[n] += X_STEP;
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            auto weights = [&](int h, int v) {
#if STAGED
                return places[(place * PLACES + (i * 2 + h) * W_VECTORS + v) * WARP];
#else
                return from.w[i][h][v];
#endif
            };
            Sum group_sum[NT][4];
            auto fold = [&](int s) {  // adds the sums of scale group s
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        Sum& sum = total[i][n][r];
#if FORMAT == 1
                        sum = __fmaf_rn(group_sum[n][r], widen(from.scale[i][r / 2][s]), sum);
#elif FORMAT == 3
                        const float x_scale = x_scales[(8 * n + 2 * t + r % 2) * args.steps + first + step] * E4M3_FACTOR;
                        sum = __fmaf_rn(__fmul_rn(group_sum[n][r], x_scale), from.scale[i][r / 2], sum);
#endif
                    }
            };
#pragma unroll
            for (int v = 0; v < X_VECTORS; ++v) {
#pragma unroll
                for (int k = 0; k < (FP8 ? 4 : 2); ++k) {  // 16 columns, of int8 32
                    u32 a[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const uint4 words = weights(h, NIBBLES ? 0 : FORMAT == 5 ? v / 2 : v);
#if FORMAT == 6
                        const u32 scale = from.scale[i][h][v] * 0x10001u;
                        a[h] = scaled(word_of(words, 2 * k), v, scale), a[2 + h] = scaled(word_of(words, 2 * k + 1), v, scale);
#elif FORMAT == 5
                        const u32 word = word_of(words, v % 2 * 2 + k);
                        a[h] = widened(word, 0), a[2 + h] = widened(word, 1);
#elif FORMAT == 1
                        u32 offset = F16 ? 0xE408E408 : 0xBE00BE00;  // -1032, -8 / 64
#if OFFSETS
                        offset = offset_of(from.offset[i][h][v * SUBGROUPS / 4]);
#endif
                        a[h] = numbers(word_of(words, 2 * k), v, offset), a[2 + h] = numbers(word_of(words, 2 * k + 1), v, offset);
#elif FORMAT == 0 || FORMAT == 4
                        a[h] = word_of(words, 2 * k), a[2 + h] = word_of(words, 2 * k + 1);
#else
                        const uint2 codes = factors_of(word_of(words, k));
                        a[h] = codes.x, a[2 + h] = codes.y;
#endif
                    }
                    const bool accumulate = FROM_ZERO ? k > 0 || (FORMAT == 1 ? v * SUBGROUPS % 4 != 0 : v > 0) : true;
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        Sum(&sum)[4] = FROM_ZERO ? group_sum[n] : total[i][n];
#if FORMAT == 4
                        mma(sum, a, word_of(rows[n][v], 2 * k), word_of(rows[n][v], 2 * k + 1));
#else
                        if (FP8) {
                            const uint2 codes = factors_of(word_of(rows[n][v], k));
                            mma<HALF>(sum, a, codes.x, codes.y, accumulate);
                        } else mma<HALF>(sum, a, word_of(rows[n][v], 2 * k), word_of(rows[n][v], 2 * k + 1), accumulate);
#endif
                    }
                }
                if (FORMAT == 1 && (v + 1) * SUBGROUPS % 4 == 0) fold(v * SUBGROUPS / 4);
            }
            if (FORMAT == 3) fold(0);
        }
    };

    Sums* before = (Sums*)sums + lane;  // the sum of the slices so far, or where they are shared those of one after the other
    if (!SPLIT)
#pragma unroll
        for (int j = 0; j < TILES * NT; ++j) before[j * WARP] = {(Sum)-0.0f, (Sum)-0.0f, (Sum)-0.0f, (Sum)-0.0f};  // which change nothing, whatever the sign
    auto close_slice = [&] {
#pragma unroll
        for (int j = 0; j < TILES * NT; ++j) {
            Sum(&own)[4] = total[j / NT][j % NT];
            Sums& sum = before[j * WARP];
            if (SPLIT) sum = {own[0], own[1], own[2], own[3]};
            else sum = {sum.x + own[0], sum.y + own[1], sum.z + own[2], sum.w + own[3]};
            own[0] = own[1] = own[2] = own[3] = 0;
        }
        if (SPLIT) before += SUMS / 4;
    };
    int left = args.per;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (d < count) load_rows(ring[d], d, d);
        if (STAGED) end_copies();
    }
#if FORMAT == 3
    // Every warp reads scales of few rows: from memory, they would all ask the same few places for four bytes at a time.
    for (int at = threadIdx.x; at < TOKENS * args.steps; at += blockDim.x) {
        const int pair = pair_of(at / args.steps);
        if (pair >= 0) x_scales[at] = load_float(args.x_scale + (long long)row_of(pair) * args.steps + at % args.steps);
    }
    __syncthreads();
#endif
#pragma unroll 1
    for (int done = 0; done < count; done += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int step = done + d;
            if (STAGED) await_copies<DEPTH - 1>();
            if (step < count) multiply(ring[d], step, d);
            if (step + DEPTH < count) {
                load_weights(ring[d], step + DEPTH, d);
                load_rows(ring[d], step + DEPTH, d);
            }
            if (STAGED) end_copies();
            if (KEPT && step < count && --left == 0) {
                left = args.per;
                close_slice();
            }
        }
    }

    __syncwarp();  // before sums take the place of what lanes read
    if (!SPLIT || left < args.per || !KEPT) close_slice();
    if (SPLIT || COMBINE) __syncthreads();
    else __syncwarp();

    const int slices = SPLIT ? (args.steps + args.per - 1) / args.per : 1;
    // Output `own` of a token of this block's, or of this warp's, from the sums of `of_warp` and those of the slices after it.
    auto finished = [&](const float* of_warp, int own, int token, int own_expert, int pair) {
        float value[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const Sum* sum = (const Sum*)of_warp + ((m * MT + own / 16) * NT + token / 8) * 128 + (own % 8 * 4 + token % 8 / 2) * 4 + own % 16 / 8 * 2 + token % 2;
            const int output = m * size + first_output + own;
            Sum whole = *sum;
            for (int s = 1; s < slices; ++s) whole += sum[s / EACH * OWN + s % EACH * SUMS];
#if ZEROS
            whole -= load_index(args.x_zero + row_of(pair)) * args.w_sum[output];
#endif
            float v = whole;
            if (FORMAT == 2 || FORMAT == 4) {
                const float x_scale = load_float(args.x_scale + row_of(pair)) * (FP8 ? E4M3_FACTOR : 1.0f);
                v = __fmul_rn(__fmul_rn(v, x_scale), ((const float*)args.scale)[own_expert * args.expert_scales + output]);
            }
            if (FORMAT == 1 && !F16) v = __fmul_rn(v, 64.0f);
            if (FORMAT == 5) v = __fmul_rn(v, ((const float*)args.scale)[own_expert * args.expert_scales + output]);
            if (FORMAT == 6 && args.outer) v = __fmul_rn(v, args.outer[(long long)own_expert * args.out + output]);
            if (args.bias) v += widen(args.bias[(long long)own_expert * args.out + output]);
            value[m] = v;
        }
#if ACT
        return gated(value[0], value[MATRICES - 1]);
#elif RELU2
        return value[0] < 0.0f ? 0.0f : __fmul_rn(value[0], value[0]);
#else
        return value[0];
#endif
    };
#if COMBINE
    constexpr int GROUPS = WARP / COMBINE;  // outputs of a warp at a time
    const int group = lane / COMBINE;
    for (int begin = warp * GROUPS; begin < OUTPUTS && first_output + begin < size; begin += blockDim.x / WARP * GROUPS) {
        const int own = begin + min(group, GROUPS - 1);
        const bool there = own < OUTPUTS && first_output + own < size;
        const float y = there ? finished(shared_sums + choice * parts * OWN, own, 0, choice_expert, choice_pair) : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < COMBINE; ++c)
            sum = __fmaf_rn(__shfl_sync(0xFFFFFFFFu, y, (group * COMBINE + c) & 31), __shfl_sync(0xFFFFFFFFu, choice_weight, c), sum);
        const long long to = (long long)blockIdx.y * size + first_output + own;
        if (there && group < GROUPS && choice == 0) args.combined[to] = args.residual ? narrow(widen(args.residual[to]) + rounded(sum)) : narrow(sum);
    }
#else
    const int thread = SPLIT ? threadIdx.x : lane, threads = SPLIT ? blockDim.x : WARP;
    for (int at = thread; at < OUTPUTS * TOKENS; at += threads) {
        const int own = at % OUTPUTS, token = at / OUTPUTS, pair = pair_of(token);
        if (pair < 0) break;  // nor has any token after it
        if (first_output + own >= size) continue;
        const float y = finished(SPLIT ? shared_sums : sums, own, token, expert, pair);
        const long long to = (long long)pair * size + first_output + own;
#if OUT32
        ((float*)args.y)[to] = args.residual && !UNITS ? widen(args.residual[to]) + y : y;
#else
        ((u16*)args.y)[to] = args.residual && !UNITS ? narrow(widen(args.residual[to]) + rounded(y)) : narrow(y);
#endif
    }
#endif
}
