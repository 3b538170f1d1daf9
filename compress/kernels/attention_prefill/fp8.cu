// Prefill attention with products of e4m3 numbers on Hopper, over tiles of keys and values as `fp8_tiles.py` lays them out.
//
//     s = (q8 k8^T) (scale of q) (scale of the tile's keys) scale log2(e);   m = max(m, max s);   u' = max(max s, m - 60)
//     w = e4m3(2^(s - u' + 8));   o = o 2^(u - u') + w v8 (scale of the tile's values);   l = l 2^(u - u') + sum w;   out = o / l
//
// (online softmax, arXiv 2307.08691; weights and queries in e4m3 as in arXiv 2407.08608.) s are the scores of one tile, and u' is the unit of its
// weights: its own largest score, so that a key that has most of the weight does not push the weights of other tiles below the numbers of e4m3. A
// row of queries and head has a scale of its own. The sum of the rounded weights is one more column of the second product: below the channels of a
// tile of values lies a row of ones. A key with all of the weight therefore has the weight 1.
//
// Both products take their first factor from registers and have 128 columns of the second in shared memory, by keys and by channels. The
// instruction adds with fewer bits than float32 (FP8 sums of DeepSeek-V3, arXiv 2412.19437, section 3.3.2), so a tile sums from zero and is added in
// float32. A thread that has scores 2 t and 2 t + 1 of each eight keys packs them as the four neighbours of a first factor: values lie in that
// order of keys, and nothing is exchanged.
//
// A block has 128 rows, of a tile of tokens and the heads of one KV head, a half for each of two warpgroups: one can multiply while the other
// computes weights. A warpgroup starts the products of a tile's values and of the next tile's keys together, and adds the first while the second
// runs. Another warp copies tiles into a ring of stages. Scores of tiles that some row sees only in part are masked.
//
// After numbers.cuh and shared.cuh. Macros: F16; C channels, 64 or 128; KEYS of a tile, 128; STAGES.

constexpr int WARPGROUPS = 2;  // of 64 rows
constexpr int K_BYTES = KEYS * 128, V_BYTES = (C + 8) * KEYS, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int SUM_TILES = C / 8 + 1;  // of eight columns: channels, and the sum of weights
constexpr int SCALES_AT = K_BYTES + (C + 1) * KEYS;  // of keys and of values, in a row whose product nobody reads
constexpr float RANGE = 60.0f;  // of units below the largest score, in powers of two: sums stay far from the end of float32
#define INFINITE __int_as_float(0x7F800000)

struct Args {
    const u16* q;
    const char* k;
    const char* v;
    const int* tiles;  // of queries: first row, tokens, position of the first, sequence
    const int* table;
    u16* out;
    long long table_stride, tiles_of_head;
    int num_kv_heads, group, window;
    float scale;
};

__device__ __forceinline__ void copy_bytes(u32 to, const char* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 at) {  // rows of 128 bytes, swizzled, eight of them every 1024 bytes
    return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
#define D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define D16(j) D4(j), D4(j + 1), D4(j + 2), D4(j + 3)
#define PRODUCT(WIDTH, LIST, A0, A1, A2, A3, B, P)                                                                                     \
    "{.reg .pred p; setp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" WIDTH "k32.f32.e4m3.e4m3 {" LIST "}, {" A0 "," A1 "," \
    A2 "," A3 "}, " B ", p, 1, 1;}"
#define LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// d (+)= a b, b through a descriptor: 128 keys, or the channels of a tile of values and the sum.
__device__ __forceinline__ void multiply(float (&d)[16][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(PRODUCT("128", LIST64, "%64", "%65", "%66", "%67", "%68", "%69")
                 : D16(0), D16(4), D16(8), D16(12) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#if C == 64
__device__ __forceinline__ void multiply(float (&d)[9][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(PRODUCT("72", LIST32 ",%32,%33,%34,%35", "%36", "%37", "%38", "%39", "%40", "%41")
                 : D16(0), D16(4), D4(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#else
__device__ __forceinline__ void multiply(float (&d)[17][4], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(PRODUCT("136", LIST64 ",%64,%65,%66,%67", "%68", "%69", "%70", "%71", "%72", "%73")
                 : D16(0), D16(4), D16(8), D16(12), D4(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#endif
// The product of all of K: `a` is 32 columns of it at a time.
template <int N, int STEPS> __device__ __forceinline__ void begin_product(float (&d)[N][4], const u32 (&a)[STEPS][4], u32 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) multiply(d, a[step], descriptor(b) + step * 2, step > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int GROUPS> __device__ __forceinline__ void wait_products() {  // until at most GROUPS of the newest are unfinished
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 e4m3_word(float a, float b, float c, float d) {  // a in the lowest byte
    u32 word;
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
        : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
}
__device__ __forceinline__ float max_of_four_lanes(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1) attend_fp8(const __grid_constant__ Args args) {
    extern __shared__ char shared_memory[];
    __shared__ u64 barriers[2 * STAGES];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 ring = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, WARPGROUPS * 4);
        publish_barriers();
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int* entry = args.tiles + blockIdx.x / args.num_kv_heads * 4;
    const int kv_head = blockIdx.x % args.num_kv_heads;
    const int first_token = entry[0], num_tokens = entry[1], first_position = entry[2], sequence = entry[3], end = first_position + num_tokens;
    if (num_tokens == 0) return;
    const int first_tile = args.window ? max(first_position + 1 - args.window, 0) / KEYS : 0, end_tile = (end + KEYS - 1) / KEYS;
    int slot = 0;
    u32 phase = 0;
    if (warp >= WARPGROUPS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == WARPGROUPS * 4 && lane == 0) {
            const long long first = kv_head * args.tiles_of_head + args.table[sequence * args.table_stride];
            for (int tile = first_tile; tile < end_tile; ++tile) {
                wait_barrier(empty + 8 * slot, phase ^ 1);
                const u32 stage = ring + slot * STAGE_BYTES, barrier = full + 8 * slot;
                arrive_expecting(barrier, STAGE_BYTES);
                copy_bytes(stage, args.k + (first + tile) * K_BYTES, K_BYTES, barrier);
                copy_bytes(stage + K_BYTES, args.v + (first + tile) * V_BYTES, V_BYTES, barrier);
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

    u32 q[C / 32][4];
    float q_scale[2];
    int position[2];
    long long row_at[2];  // of this thread's two rows in q and out, the rows g and g + 8 of a warp
    bool there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = warp * 16 + h * 8 + g, token = row / args.group;
        there[h] = token < num_tokens;
        position[h] = first_position + min(token, num_tokens - 1);
        row_at[h] = ((long long)(first_token + token) * args.num_kv_heads * args.group + kv_head * args.group + row % args.group) * C;
        uint2 numbers[C / 32][2];
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < C / 32; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint2& v = numbers[i][half] = there[h] ? *(const uint2*)(args.q + row_at[h] + 32 * i + 16 * half + 4 * t) : make_uint2(0, 0);
                most = larger(most, larger(larger(fabsf(low(v.x)), fabsf(high(v.x))), larger(fabsf(low(v.y)), fabsf(high(v.y)))));
            }
        most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
        most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
        const float scale = scale_of(most), inverse = __frcp_rn(scale);
#pragma unroll
        for (int i = 0; i < C / 32; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint2 v = numbers[i][half];
                q[i][2 * half + h] = e4m3_word(low(v.x) * inverse, high(v.x) * inverse, low(v.y) * inverse, high(v.y) * inverse);
            }
        q_scale[h] = scale * args.scale * 1.4426950408889634f;
    }

    float o[SUM_TILES][4] = {}, most[2] = {-INFINITE, -INFINITE}, unit[2] = {-INFINITE, -INFINITE}, v_scale = 1.0f, s[KEYS / 8][4];
    u32 weights[KEYS / 32][4];
    float alpha[2];
    // Makes the weights of a tile's scores.
    auto weigh = [&](int tile, float k_scale) {
        if ((tile + 1) * KEYS > first_position + 1 || (args.window && tile * KEYS <= end - 1 - args.window)) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int key = tile * KEYS + 8 * j + 2 * t + (e & 1), last = position[e >> 1];
                    if (key > last || (args.window && key <= last - args.window)) s[j][e] = -INFINITE;
                }
        }
        float factor[2], offset[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float own = -INFINITE;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) own = fmaxf(own, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            factor[h] = q_scale[h] * k_scale;
            own = max_of_four_lanes(own) * factor[h];
            most[h] = fmaxf(most[h], own);
            // A tile of which a row sees nothing leaves its bits as they are, whichever rows share its block.
            const float next = own == -INFINITE ? unit[h] : fmaxf(own, most[h] - RANGE), finite = next == -INFINITE ? 0.0f : next;
            alpha[h] = exp2_of(unit[h] - finite);
            offset[h] = 8.0f - finite;
            unit[h] = next;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 32; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int h = r & 1, j = 4 * i + (r & 2);
                auto weight = [&](int of, int e) { return exp2_of(fmaf(s[of][2 * h + e], factor[h], offset[h])); };
                weights[i][r] = e4m3_word(weight(j, 0), weight(j, 1), weight(j + 1, 0), weight(j + 1, 1));
            }
    };
    // The products of a tile's values, added to those before it.
    auto add = [&](const float (&sums)[SUM_TILES][4], float next_v_scale) {
        const float to_next = v_scale / next_v_scale, of_values[2] = {alpha[0] * to_next, alpha[1] * to_next};
#pragma unroll
        for (int j = 0; j < SUM_TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[j][e] = fmaf(o[j][e], j < C / 8 ? of_values[e >> 1] : alpha[e >> 1], sums[j][e]);
        v_scale = next_v_scale;
    };
    u32 stage = ring;
    wait_barrier(full, 0);
    __syncwarp();
    begin_product(s, q, stage);
    wait_products<0>();
    for (int tile = first_tile; tile + 1 < end_tile; ++tile) {
        weigh(tile, load_float(stage + SCALES_AT));
        const float next_v_scale = load_float(stage + SCALES_AT + 4);
        const u32 emptied = empty + 8 * slot, values = stage + K_BYTES;
        if (++slot == STAGES) slot = 0, phase ^= 1;
        stage = ring + slot * STAGE_BYTES;
        wait_barrier(full + 8 * slot, phase);
        __syncwarp();
        float sums[SUM_TILES][4];
        begin_product(sums, weights, values);
        begin_product(s, q, stage);
        wait_products<1>();
        if (lane == 0) arrive(emptied);
        add(sums, next_v_scale);
        wait_products<0>();
    }
    weigh(end_tile - 1, load_float(stage + SCALES_AT));
    float last_sums[SUM_TILES][4];
    begin_product(last_sums, weights, stage + K_BYTES);
    wait_products<0>();
    add(last_sums, load_float(stage + SCALES_AT + 4));

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float total = __shfl_sync(0xFFFFFFFFu, o[C / 8][2 * h], lane & ~3), factor = v_scale / total;
        if (!there[h]) continue;
#pragma unroll
        for (int j = 0; j < C / 8; ++j)
            *(u32*)(args.out + row_at[h] + 8 * j + 2 * t) = (u32)narrow(o[j][2 * h] * factor) | (u32)narrow(o[j][2 * h + 1] * factor) << 16;
    }
}
