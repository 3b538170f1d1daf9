// y = x W^T for few rows x (decode and verification, M = 1..512): weights stream once from memory through tensor cores. Every device from
// sm_80 on; on Hopper itself `hopper.cu` serves four-bit and e4m3 weights, except shapes that fill no tile.
//
// Orientation: W is the A operand of the matrix instruction (16 output rows x 16 of K), tokens are its n8 columns, accumulators are float32.
// A block owns up to `tiles` row tiles of 16 over one segment of K. Its warps are (row tile) x (part of the segment). Every warp keeps a ring
// of its own weights in shared memory, filled by cp.async before the kernel waits for the one before it (weights are constant). x lies once
// per part in shared memory: all of it (RESIDENT: no barrier in the loop), or as many stages as the ring has.
//
// The sum of an output has one shape, whatever M, and every instruction used here agrees bit for bit (mma.sync and wgmma do, on an H200,
// in bfloat16 and float16): K is cut into 1, 2, 4 or 8 parts, within a part k ascends (in W4 each group of 128 sums from zero on exact
// integers, then is scaled in float32), and parts meet in a balanced tree. A block holds a subtree, a segment, and sums it by itself;
// segments meet in the shared memory of a cluster from sm_90 on, in global memory before.
//
// x may come as it is, before its RMSNorm (NORM) and its rounding to e4m3 (QUANT 1: a scale for each row, 2: a given one), where x is RESIDENT:
// every block then does both as it reads the rows, a launch or two less, and as many waits.
//
// Macros: FORMAT 0 = 16 bit, 1 = int4 symmetric, 2 = int4 with zero points, 3 = e4m3 weights and activations; F16 0 = bfloat16,
// 1 = float16 (the model's dtype); NT = token tiles of 8; ACT 0 = plain, 1 = silu, 2 = gelu, 3 = gelu by tanh (gated: a tile is 8 gate rows
// over the 8 matching up rows); OUT32 = float32 output; WGMMA = wgmma instead of mma.sync; RESIDENT
// and STAGES as above; PORTABLE = without what only sm_90 has, to test it there.

struct alignas(64) Args {
    char x_map[128];
    const char* w;
    const char* x;
    const float* w_scale;
    const float* x_scale;
    const u16* bias;
    const u16* residual;
    void* y;
    float* partials;
    u32* arrivals;
    int num_tokens, n, k, num_tiles, tiles, parts, segments, arriving_bytes;
    const u16* norm_weight;
    const float* static_scale;
    float norm_eps;
};

extern "C" __global__ void __launch_bounds__(512) stream_linear(const __grid_constant__ Args args) {
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    extern __shared__ char shared_memory[];
    const u32 shared = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;  // known to be the same for all lanes
    const int part = warp / args.tiles, tile_slot = warp - part * args.tiles, num_warps = args.tiles * args.parts;
    // Blocks of tokens that share rows of the weight are neighbours, so that memory is asked for those once.
    const int cluster = (blockIdx.y * gridDim.x + blockIdx.x) / args.segments, token_block = cluster % gridDim.y;
    const int segment = blockIdx.x % args.segments, row_block = cluster / gridDim.y;
    const int num_row_blocks = gridDim.x / args.segments, tile_start = (int)((long long)row_block * args.num_tiles / num_row_blocks);
    const int tile_stop = (int)((long long)(row_block + 1) * args.num_tiles / num_row_blocks), tile = tile_start + tile_slot;
    const int token_start = token_block * TOKENS, num_tokens = min(args.num_tokens - token_start, TOKENS);
    const int num_groups = args.k / K_STAGE, num_parts = args.segments * args.parts;
    const int first = (segment * args.parts + part) * num_groups / num_parts;
    const int count = (segment * args.parts + part + 1) * num_groups / num_parts - first;
    const int iterations = (num_groups + num_parts - 1) / num_parts;

    // Shared memory: sums arriving from the cluster | x (resident: all of it; else STAGES, or 2 if e4m3), by part | weights, by warp.
    const int rows = args.tiles * 16, num_outputs = ACT ? rows / 2 : rows;
    const int x_rows = RESIDENT ? num_tokens : TOKENS, subtile_bytes = x_rows * 128, x_bytes = SUBTILES * subtile_bytes;
    const int x_slots = RESIDENT ? iterations : FP8 ? 2 : STAGES;
    const u32 x_part = shared + args.arriving_bytes + part * x_slots * x_bytes;
    const u32 a_warp = shared + args.arriving_bytes + args.parts * x_slots * x_bytes + warp * (STAGES * A_BYTES);

#if HOPPER
    __shared__ u64 arrived_bytes;
    const u32 arrived = (u32)__cvta_generic_to_shared(&arrived_bytes);
    const int output_start = segment * num_outputs / args.segments;
    const int num_own = (segment + 1) * num_outputs / args.segments - output_start;
    if (args.segments > 1) {
        if (threadIdx.x == 0) {
            init_barrier(arrived, 1);
            publish_barriers();
            arrive_expecting(arrived, args.segments * num_tokens * num_own * (ACT ? 2 : 1) * 4);
        }
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif

#if TMA
    __shared__ u64 x_arrived[8][STAGES], x_free[8][STAGES];  // of each part of the block
    const u32 x_arrived_at = (u32)__cvta_generic_to_shared(x_arrived[part]), x_free_at = (u32)__cvta_generic_to_shared(x_free[part]);
    if (threadIdx.x == 0) {
        for (int i = 0; i < args.parts * STAGES; ++i) {
            init_barrier((u32)__cvta_generic_to_shared(&x_arrived[i / STAGES][i % STAGES]), 1);
            init_barrier((u32)__cvta_generic_to_shared(&x_free[i / STAGES][i % STAGES]), args.tiles);
        }
        publish_barriers();
    }
#endif

    // Weights: `w_next` walks along K, one stage a step.
    const int row_bytes = FP8 ? args.k : args.k * 2;
#if W4
    const bool idle = tile >= tile_stop;  // a warp without a tile: zeros instead of weights
    int loaded = 0;
    const char* w_next = args.w + ((long long)min(tile, args.num_tiles - 1) * num_groups + first) * A_BYTES;
    const u32 a_lane = lane * 16;
    if (idle)
        for (int at = lane * 16; at < STAGES * A_BYTES; at += 512) store_shared(a_warp + at, make_uint4(0, 0, 0, 0));
    __syncwarp();
#else
    int to_load = tile < tile_stop ? count : 0;
    const int real_tile = min(tile, args.num_tiles - 1);
    const char* w_next = args.w + (long long)(real_tile * (ACT ? 8 : 16) + (lane >> 3)) * row_bytes + (long long)first * 128 + (lane & 7) * 16;
    const long long row_quad = 4 * row_bytes, row_half = ACT ? (long long)(args.n / 2) * row_bytes : 8 * row_bytes;
    const u32 a_lane = (((lane >> 3) & 1) * 8 + (lane & 7)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const u32 a_fill = a_warp + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4);
#endif
    auto load_weights = [&](int slot) {
#if W4
        if (!idle && loaded < (RESIDENT ? count : iterations)) {  // past the end of a part x is zero, and its last block serves again
            copy_block(a_warp + slot * A_BYTES, w_next, lane);
            w_next += ++loaded < count ? A_BYTES : 0;
        }
        if (RESIDENT || TMA) commit();
#else
        const u32 to = a_fill + slot * A_BYTES;
        const bool there = to_load > 0;
#if RESIDENT
        if (there)
#endif
        {
            copy16_or_zero(to, w_next, there);
            copy16_or_zero((to + 512) ^ 64, w_next + row_quad, there);
            copy16_or_zero(to + 1024, w_next + row_half, there);
            copy16_or_zero((to + 1536) ^ 64, w_next + row_half + row_quad, there);
            w_next += there ? 128 : 0;
        }
        --to_load;
        if (RESIDENT || FP8 || TMA) commit();
#endif
    };

    const int part_threads = args.tiles * 32, part_thread = threadIdx.x - part * part_threads;
    const char* x_first = args.x + (long long)token_start * row_bytes + (long long)first * (FP8 ? 128 : K_STAGE * 2);
    auto swizzled = [&](int token, int chunk) { return token * 128 + (((chunk & 7) ^ (token & 7)) << 4); };
    auto store_as_f16 = [&](u32 tile_at, int token, int chunk, uint4 v) {  // sixteen e4m3, in the order that e4m3_to_f16 gives W
        const uint2 p = e4m3_to_f16(v.x), q = e4m3_to_f16(v.y), r = e4m3_to_f16(v.z), s = e4m3_to_f16(v.w);
        const u32 at = tile_at + (chunk >> 2) * subtile_bytes;
        store_shared(at + swizzled(token, 2 * chunk), make_uint4(p.x, q.x, r.x, s.x));
        store_shared(at + swizzled(token, 2 * chunk + 1), make_uint4(p.y, q.y, r.y, s.y));
    };

#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        load_weights(i);
    }
#if NORM
    for (int at = threadIdx.x * 128; at < args.k * 2; at += num_warps * 32 * 128) prefetch((const char*)args.norm_weight + at);
#endif
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

#if NORM || QUANT
    // Raw rows: chunks of 16 bytes, 8 numbers.
    const int raw_chunks = args.k / 8, part_chunk = first * (K_STAGE / 8);
    const uint4* raw = (const uint4*)args.x + (long long)token_start * raw_chunks;
    __shared__ float factors[TOKENS];
#if NORM
    const int row_segments = (raw_chunks + SEGMENT - 1) / SEGMENT;
#pragma unroll 4
    for (int at = warp; at < num_tokens * row_segments; at += num_warps) {  // their squares wait where x will be
        const int row = at / row_segments, c = (at - row * row_segments) * SEGMENT + lane;
        const float squares = segment_squares(c < raw_chunks ? raw[(long long)row * raw_chunks + c] : make_uint4(0, 0, 0, 0));
        if (lane == 0) store_float(shared + args.arriving_bytes + 4 * at, squares);
    }
    __syncthreads();
    for (int row = warp; row < num_tokens; row += num_warps) {
        const u32 squares = shared + args.arriving_bytes + 4 * row * row_segments;
        const float factor = inverse_rms(args.k, args.norm_eps, lane, [&](int s) { return load_float(squares + 4 * s); });
        if (lane == 0) factors[row] = factor;
    }
    __syncthreads();
    const uint4* norm_weight = (const uint4*)args.norm_weight;
    auto row_chunk = [&](int row, int c) { return normed(raw[(long long)row * raw_chunks + c], factors[row], norm_weight[c]); };
#else
    auto row_chunk = [&](int row, int c) { return raw[(long long)row * raw_chunks + c]; };
#endif
#if QUANT
    __shared__ float row_scales[TOKENS];
#if QUANT == 1
    __shared__ float most_of[TOKENS][16];
    for (int row = 0; row < num_tokens; ++row) {
        float most = 0.0f;
#pragma unroll 4
        for (int c = threadIdx.x; c < raw_chunks; c += num_warps * 32) most = max_magnitude(most, row_chunk(row, c));
        most = warp_max(most);
        if (lane == 0) most_of[row][warp] = most;
    }
    __syncthreads();
    if (threadIdx.x < num_tokens) {
        float most = 0.0f;
        for (int w = 0; w < num_warps; ++w) most = larger(most, most_of[threadIdx.x][w]);
        row_scales[threadIdx.x] = scale_of(most);
    }
#else
    if (threadIdx.x < num_tokens) row_scales[threadIdx.x] = *args.static_scale;
#endif
    __syncthreads();
#endif
#endif

#if RESIDENT
    {  // a thread moves chunks `part_threads` apart, row by row
        const int row_chunks = count * (FP8 ? 8 : SUBTILES * 8);
        int token = part_thread / row_chunks, chunk = part_thread - token * row_chunks;
        auto advance = [&] {
            for (chunk += part_threads; chunk >= row_chunks; chunk -= row_chunks) ++token;
        };
#if QUANT
        for (; token < num_tokens; advance()) {
            const uint2 even = e4m3_chunk(row_chunk(token, part_chunk + 2 * chunk), row_scales[token]);
            const uint2 odd = e4m3_chunk(row_chunk(token, part_chunk + 2 * chunk + 1), row_scales[token]);
            store_as_f16(x_part, token, chunk, make_uint4(even.x, even.y, odd.x, odd.y));
        }
#elif NORM
        for (; token < num_tokens; advance())
            store_shared(x_part + (chunk >> 3) * subtile_bytes + swizzled(token, chunk), row_chunk(token, part_chunk + chunk));
#else
        auto from = [&] { return x_first + (long long)token * row_bytes + chunk * 16; };
#if FP8
        constexpr int BATCH = 4;
        while (token < num_tokens) {
            uint4 v[BATCH];
            int tokens[BATCH], chunks[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                tokens[j] = token, chunks[j] = chunk;
                if (token < num_tokens) v[j] = *(const uint4*)from();
                advance();
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                if (tokens[j] < num_tokens) store_as_f16(x_part, tokens[j], chunks[j], v[j]);
        }
#else
        for (; token < num_tokens; advance()) copy16(x_part + (chunk >> 3) * subtile_bytes + swizzled(token, chunk), from());
        commit();
        wait_pending<0>();
#endif
#endif
        __syncthreads();
    }
#else
    constexpr int CHUNKS = FP8 ? 8 : SUBTILES * 8;  // of one token in one stage; a thread moves the same ones in every stage
    const int x_chunk = part_thread % CHUNKS, x_token = part_thread / CHUNKS, x_stride = part_threads / CHUNKS;
    const char* x_next = x_first + (long long)x_token * row_bytes + x_chunk * 16;
    int x_left = count;
#if TMA
    auto load_x = [&](int i) {  // stage i of this part, by its first thread; columns past the end come from past the end of x, and are zero
        if (part_thread != 0 || i >= iterations) return;
        const int use = i / STAGES, to = i - use * STAGES, column = i < count ? (first + i) * SUBTILES : args.k / 64;
        if (use > 0) wait_barrier(x_free_at + 8 * to, (use - 1) & 1);
        const u32 barrier = x_arrived_at + 8 * to;
        arrive_expecting(barrier, x_bytes);
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                     ::"r"(x_part + to * x_bytes), "l"(args.x_map), "r"(0), "r"(token_start), "r"(column), "r"(barrier) : "memory");
    };
    __syncthreads();
    constexpr int X_AHEAD = STAGES > AT_ONCE + 1 ? STAGES - AT_ONCE - 1 : 1;  // less than would fit, so that warps need not keep step
    for (int i = 0; i < X_AHEAD; ++i) load_x(i);
#elif FP8
    constexpr int X_BATCH = NT > 2 ? 4 : 2 * NT;  // the plan gives a part threads enough
    uint4 x_raw[X_BATCH];
    auto load_x = [&](int) {  // into registers; the next iteration stores it as float16
#pragma unroll
        for (int j = 0; j < X_BATCH; ++j)
            if (x_left > 0 && x_token + j * x_stride < num_tokens) x_raw[j] = *(const uint4*)(x_next + (long long)j * x_stride * row_bytes);
        x_next += CHUNKS * 16;
        --x_left;
    };
    load_x(0);
#else
    auto load_x = [&](int slot) {
        const u32 to = x_part + slot * x_bytes + (x_chunk >> 3) * subtile_bytes;
        const bool there = x_left > 0;
        const char* from = x_next;
        for (int token = x_token; token < num_tokens; token += x_stride, from += (long long)x_stride * row_bytes)
            copy16_or_zero(to + swizzled(token, x_chunk), from, there);
        x_next += there ? CHUNKS * 16 : 0;
        --x_left;
        commit();
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load_x(i);
#endif
#endif

    float total[NT][4] = {};
    const u32 x_lane = x_lane_offset(lane, x_rows);
    const int steps = RESIDENT ? count : iterations;
    int slot = 0, fill = AHEAD % STAGES, step = 0;
    u32 phase = 0;  // of the barriers, which flips as `slot` comes round
    auto walk = [&](auto number) {  // that many stages, side by side
        constexpr int COUNT = decltype(number)::value;
        u32 a_tile[COUNT], x_tile[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            a_tile[c] = a_warp + (slot + c < STAGES ? slot + c : slot + c - STAGES) * A_BYTES;
            x_tile[c] = x_part + (RESIDENT ? step + c : FP8 ? (step + c) & 1 : slot + c < STAGES ? slot + c : slot + c - STAGES) * x_bytes;
        }
#if FP8 && !RESIDENT
#pragma unroll
        for (int j = 0; j < X_BATCH; ++j)
            if (x_token + j * x_stride < num_tokens) {
                if (step >= count) x_raw[j] = make_uint4(0, 0, 0, 0);
                store_as_f16(x_tile[0], x_token + j * x_stride, x_chunk, x_raw[j]);
            }
#endif
        wait_pending<AHEAD - COUNT>();
#if TMA
#pragma unroll
        for (int c = 0; c < COUNT; ++c) load_x(step + c + X_AHEAD);
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const bool round = slot + c >= STAGES;
            wait_barrier(x_arrived_at + 8 * (round ? slot + c - STAGES : slot + c), phase ^ round);
        }
#endif
#if RESIDENT || TMA
        __syncwarp();
#else
        __syncthreads();
#endif
        auto release_x = [&] {
#if TMA
            if (lane != 0) return;
#pragma unroll
            for (int c = 0; c < COUNT; ++c)
                asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(x_free_at + 8 * (slot + c < STAGES ? slot + c : slot + c - STAGES)) : "memory");
#endif
        };
        add_products<COUNT>(total, a_tile, x_tile, a_lane, x_lane, subtile_bytes, lane, [&] {
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                load_weights(fill);
#if !RESIDENT && !TMA
                load_x(fill);
#endif
                fill = fill + 1 == STAGES ? 0 : fill + 1;
            }
            if (X_IN_REGISTERS) release_x();
        });
        if (!X_IN_REGISTERS) release_x();
        step += COUNT;
        slot += COUNT;
        if (slot >= STAGES) slot -= STAGES, phase ^= 1;
    };
    if (steps % AT_ONCE) walk(Number<1>());
    while (step < steps) walk(Number<AT_ONCE>());

    // Sums go to shared memory as [part][token][row]; a pitch of 4 (mod 8) words keeps the stores free of bank conflicts.
    wait_pending<0>();
    __syncthreads();
    const int pitch = rows + 4;
    const u32 sums = shared + args.arriving_bytes;
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            store_float(sums + 4 * ((part * TOKENS + j * 8 + (lane & 3) * 2 + (c & 1)) * pitch + tile_slot * 16 + (c >> 1) * 8 + (lane >> 2)),
                        total[j][c]);
    __syncthreads();
    auto part_sum = [&](int token, int row) {
        return tree_sum(args.parts, [&](int p) { return load_float(sums + 4 * ((p * TOKENS + token) * pitch + row)); });
    };
    const int token_step = blockDim.x / rows, my_row = threadIdx.x % rows, my_token = threadIdx.x / rows;  // blockDim = rows * 2 * parts

#if HOPPER
    if (args.segments > 1) {  // every block owns some outputs, and receives its sums as [segment][token][own row]
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        const int output = ACT ? (my_row >> 4) * 8 + (my_row & 7) : my_row;
        const int owner = ((output + 1) * args.segments - 1) / num_outputs;
        const int start = owner * num_outputs / args.segments, own = (owner + 1) * num_outputs / args.segments - start;
        const int own_rows = ACT ? 2 * own : own, at = output - start + (ACT && (my_row & 8) ? own : 0);
        u32 to, barrier;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared + 4 * (segment * num_tokens * own_rows + at)), "r"(owner));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(arrived), "r"(owner));
        for (int token = my_token; token < num_tokens; token += token_step)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         ::"r"(to + 4 * token * own_rows), "r"(__float_as_uint(part_sum(token, my_row))), "r"(barrier) : "memory");
    }
#else
    const int output_start = 0, num_own = num_outputs;
    float* stored = args.partials + ((long long)token_block * num_row_blocks + row_block) * args.segments * TOKENS * rows;
    if (args.segments > 1) {  // the last block of a row block to arrive adds what all of them stored, in order
        for (int token = my_token; token < num_tokens; token += token_step)
            stored[(segment * TOKENS + token) * rows + my_row] = part_sum(token, my_row);
        __threadfence();
        __syncthreads();
        __shared__ u32 arrived;
        if (threadIdx.x == 0) arrived = atomicAdd(args.arrivals + token_block * num_row_blocks + row_block, 1u);
        __syncthreads();
        if (arrived + 1 != args.segments) return;
        __threadfence();
    }
#endif
    const int own_step = blockDim.x / num_own, own = threadIdx.x % num_own, slot_output = output_start + own;
    const int channel = tile_start * (ACT ? 8 : 16) + slot_output, out_stride = ACT ? args.n / 2 : args.n;
    int token = threadIdx.x / num_own;
    const int channel_stop = min(tile_stop * (ACT ? 8 : 16), out_stride);
    const bool mine = token < own_step && channel < channel_stop;
    float bias[2] = {}, scale[2] = {};
#pragma unroll
    for (int half = 0; half < (ACT ? 2 : 1); ++half) {
        if (args.bias && mine) bias[half] = widen(args.bias[channel + half * out_stride]);
        if (FP8 && mine) scale[half] = 65536.0f * args.w_scale[channel + half * out_stride];
    }
#if HOPPER
    if (args.segments > 1) {
        wait_barrier(arrived, 0);
    }
#endif
    if (!mine) return;
    for (; token < num_tokens; token += own_step) {
        const long long at = (long long)(token_start + token) * out_stride + channel;
        const float residual = args.residual ? widen(args.residual[at]) : 0.0f;
#if QUANT
        const float token_scale = row_scales[token];
#else
        const float token_scale = FP8 ? args.x_scale[token_start + token] : 0.0f;
#endif
        auto value = [&](int half) {
            float v;
            const int row = ACT ? (slot_output >> 3) * 16 + half * 8 + (slot_output & 7) : slot_output;
            if (args.segments == 1) {
                v = part_sum(token, row);
            } else {
#if HOPPER
                const int own_rows = ACT ? 2 * num_own : num_own;
                const u32 from = shared + 4 * (token * own_rows + own + half * num_own);
                v = tree_sum(args.segments, [&](int s) { return load_float(from + 4 * s * num_tokens * own_rows); });
#else
                v = tree_sum(args.segments, [&](int s) { return __ldcg(stored + (s * TOKENS + token) * rows + row); });
#endif
            }
            if (FP8) v = v * scale[half] * token_scale;
            return args.bias ? v + bias[half] : v;
        };
#if ACT
        const float gate = rounded(value(0)), up = rounded(value(1));
        const float v = rounded(activated(gate)) * up;
#else
        const float v = value(0);
#endif
#if OUT32
        ((float*)args.y)[at] = v + residual;
#else
        const u16 bits = narrow(v);
        ((u16*)args.y)[at] = args.residual ? narrow(widen(bits) + residual) : bits;
#endif
    }
}
