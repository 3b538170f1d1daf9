// Several linears of few rows one after the other in one launch: from attention's output to the next layer's qkv.
//
//     h1 = h + o(x);  m = act(gate) * up of norm(h1);  h2 = h1 + down(m);  qkv = norm(h2) W^T
//
// One block on each multiprocessor, all at once. Every warp has a ring of weight blocks in shared memory, as in stream.cu, and the ring runs
// on across the linears: while blocks wait for one another, and for attention before this launch, the first weights of what comes next are
// already on their way. Blocks meet at a counter between linears; what another block wrote is read past the first-level cache.
//
// Sums have the shape that stream.cu gives them (parts of K, a tree over parts, all inside one block here): the bits are the same.

#define MAX_LINEARS 4

struct Linear {
    const char* w;
    const char* x;
    const u16* norm_weight;  // of x, or null
    const u16* bias;
    const u16* residual;
    u16* y;
    int n, k, num_tiles, tiles, parts, gated;
};

struct Args {
    Linear linears[MAX_LINEARS];
    u32* counters;  // arrivals at the meeting point, departures; both 0 between launches
    int num_linears, num_tokens;
    float norm_eps;
};

__device__ __forceinline__ u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_fresh(const void* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ u16 load_fresh_number(const u16* at) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
    return v;
}

extern "C" __global__ void __launch_bounds__(512, 1) walk_linears(const __grid_constant__ Args args) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ char shared_memory[];
    const u32 shared = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
    __shared__ float scales[8];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_tokens = args.num_tokens;
    const u32 a_warp = shared + warp * (STAGES * A_BYTES), x_base = shared + 16 * (STAGES * A_BYTES);
    const int subtile_bytes = num_tokens * 128;

    // What this warp has of a linear: blocks of one row tile along one part of K.
    auto tile_of = [&](const Linear& it, int& part, int& tile, int& first, int& count) {
        part = warp / it.tiles;
        const int groups = it.k / 128, start = (int)((long long)blockIdx.x * it.num_tiles / gridDim.x);
        const int stop = (int)((long long)(blockIdx.x + 1) * it.num_tiles / gridDim.x);
        tile = start + warp - part * it.tiles;
        first = part * groups / it.parts;
        count = part < it.parts && tile < stop ? (part + 1) * groups / it.parts - first : 0;
    };
    int loading = -1, to_load = 0;
    const char* w_next = nullptr;
    auto load_weights = [&](u32 slot_bytes) {
        while (to_load == 0 && loading + 1 < args.num_linears) {
            const Linear& it = args.linears[++loading];
            int part, tile, first;
            tile_of(it, part, tile, first, to_load);
            w_next = it.w + ((long long)tile * (it.k / 128) + first) * A_BYTES + lane * 16;
        }
        if (to_load > 0) {
            const u32 to = a_warp + slot_bytes + lane * 16;
            copy16(to, w_next);
            copy16(to + 512, w_next + 512);
            if (lane < SCALE_BYTES / 16) copy16(to + 1024, w_next + 1024);
            w_next += A_BYTES;
            --to_load;
        }
        commit();
    };
#pragma unroll 1
    for (int i = 0; i < AHEAD; ++i) load_weights(i * A_BYTES);

    int slot = 0, fill = AHEAD;
#pragma unroll 1
    for (int step = 0; step < args.num_linears; ++step) {
        const Linear& it = args.linears[step];
        int part, tile, first, count;
        tile_of(it, part, tile, first, count);
        // The norm's weight is constant: a thread's first chunk of it is here before x is.
        const int chunks = it.k / 8;
        uint4 first_weight = make_uint4(0, 0, 0, 0);
        if (it.norm_weight && threadIdx.x < chunks) first_weight = ((const uint4*)it.norm_weight)[threadIdx.x];
        if (step == 0) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
        } else {
            if (threadIdx.x == 0)
                while (load_acquire(args.counters) < step * gridDim.x) {}
            __syncthreads();
        }

        // x: subtiles of 64 columns, [tokens][64], chunks of 16 bytes swizzled by the token. One trip to memory, also for the norm.
        auto x_at = [&](int token, int chunk) { return x_base + (chunk >> 3) * subtile_bytes + token * 128 + (((chunk & 7) ^ (token & 7)) << 4); };
        for (int token = 0; token < num_tokens; ++token)
#pragma unroll 4
            for (int chunk = threadIdx.x; chunk < chunks; chunk += 512)
                store_shared(x_at(token, chunk), load_fresh(it.x + ((long long)token * chunks + chunk) * 16));
        __syncthreads();
        if (it.norm_weight) {
            for (int row = warp; row < num_tokens; row += 16) {
                float quarters[4] = {};
#pragma unroll 4
                for (int c = lane; c < chunks; c += 128) {
#pragma unroll
                    for (int q = 0; q < 4; ++q)
                        if (c + 32 * q < chunks) quarters[q] = plus_squares(quarters[q], load_shared(x_at(row, c + 32 * q)));
                }
                const float scale = inverse_rms(quarters[0], quarters[1], quarters[2], quarters[3], it.k, args.norm_eps);
                if (lane == 0) scales[row] = scale;
            }
            __syncthreads();
            for (int token = 0; token < num_tokens; ++token)
                for (int chunk = threadIdx.x; chunk < chunks; chunk += 512) {
                    const uint4 weight = chunk == threadIdx.x ? first_weight : ((const uint4*)it.norm_weight)[chunk];
                    store_shared(x_at(token, chunk), normed(load_shared(x_at(token, chunk)), scales[token], weight));
                }
            __syncthreads();
        }

        float total[4] = {};
        const int matrix = lane >> 3, matrix_row = (lane & 7) < num_tokens ? lane & 7 : 0;
        const u32 x_lane = matrix_row * 128 + ((matrix ^ matrix_row) << 4);
        u32 x_tile = x_base + first * 2 * subtile_bytes;
#pragma unroll 1
        for (int i = 0; i < count; ++i, x_tile += 2 * subtile_bytes) {
            wait_pending<AHEAD - 1>();
            __syncwarp();
            load_weights(fill * A_BYTES);
            const u32 a_tile = a_warp + slot * A_BYTES;
            float sums[4];
            const u32 scale_pair = load_word(a_tile + 1024 + (lane >> 2) * 4);
#if FORMAT == 2
            const u32 zeros = load_word(a_tile + 1056 + (lane >> 2) * 4);
            const u32 low_zero = __byte_perm(zeros, 0, 0x1010), high_zero = __byte_perm(zeros, 0, 0x3232);
#else
            const u32 low_zero = F16 ? 0xE408E408 : 0xC308C308, high_zero = low_zero;
#endif
            uint4 words;
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                u32 a[2][4], b[4];
                if (pair % 2 == 0) words = load_shared(a_tile + (pair / 2) * 512 + lane * 16);
                dequantize(a[0], pair & 1 ? words.z : words.x, low_zero, high_zero);
                dequantize(a[1], pair & 1 ? words.w : words.y, low_zero, high_zero);
                load_matrices(b, x_tile + (pair >> 1) * subtile_bytes + (x_lane ^ ((pair & 1) << 6)));
                const float none[4] = {};
                if (pair == 0) mma(sums, a[0], b[0], b[1], none);
                else mma(sums, a[0], b[0], b[1], sums);
                mma(sums, a[1], b[2], b[3], sums);
            }
            const float low_scale = widen(scale_pair & 0xFFFF), high_scale = widen(scale_pair >> 16);
            total[0] = fmaf(low_scale, sums[0], total[0]), total[1] = fmaf(low_scale, sums[1], total[1]);
            total[2] = fmaf(high_scale, sums[2], total[2]), total[3] = fmaf(high_scale, sums[3], total[3]);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            fill = fill + 1 == STAGES ? 0 : fill + 1;
        }

        // Sums over the parts meet where x was.
        __syncthreads();
        const int rows = it.tiles * 16, pitch = rows + 4;
        if (part < it.parts)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int token = (lane & 3) * 2 + (c & 1), row = (warp - part * it.tiles) * 16 + (c >> 1) * 8 + (lane >> 2);
                if (token < num_tokens) store_float(x_base + 4 * ((part * num_tokens + token) * pitch + row), total[c]);
            }
        __syncthreads();
        const int tile_start = (int)((long long)blockIdx.x * it.num_tiles / gridDim.x);
        const int tile_stop = (int)((long long)(blockIdx.x + 1) * it.num_tiles / gridDim.x);
        const int num_own = it.gated ? rows / 2 : rows, out_stride = it.gated ? it.n / 2 : it.n;
        const int channel_start = tile_start * (it.gated ? 8 : 16), channel_stop = min(tile_stop * (it.gated ? 8 : 16), out_stride);
        for (int at = threadIdx.x; at < num_own * num_tokens; at += 512) {
            const int token = at / num_own, own = at - token * num_own, channel = channel_start + own;
            if (channel >= channel_stop) continue;
            auto value = [&](int half) {
                const int row = it.gated ? (own >> 3) * 16 + half * 8 + (own & 7) : own;
                const float v = tree_sum(it.parts, [&](int p) { return load_float(x_base + 4 * ((p * num_tokens + token) * pitch + row)); });
                return it.bias ? v + widen(it.bias[channel + (half ? it.n / 2 : 0)]) : v;
            };
            const long long out = (long long)token * out_stride + channel;
            u16 bits;
            if (it.gated) {
                const float gate = rounded(value(0)), up = rounded(value(1));
                bits = narrow(rounded(activated(gate)) * up);
            } else {
                bits = narrow(value(0));
                if (it.residual) bits = narrow(widen(bits) + widen(load_fresh_number(it.residual + out)));
            }
            it.y[out] = bits;
        }
        __syncthreads();
        if (threadIdx.x == 0 && step + 1 < args.num_linears) {
            __threadfence();
            atomicAdd(args.counters, 1u);
        }
    }
    wait_pending<0>();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(args.counters + 1, 1u) == gridDim.x - 1) args.counters[0] = 0, args.counters[1] = 0;
    }
}
