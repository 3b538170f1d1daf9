// Decode attention over the paged cache for Hopper: every warp walks keys of its own, and no two warps meet before the end.
//
//     slice i covers keys [i KEYS, (i + 1) KEYS)       lane i mod LANES has it; a lane's slices are added in ascending order
//     s = k q^T scale log2(e);  m' = max(m, max s);  l = l 2^(m - m') + sum 2^(s - m');  o = o 2^(m - m') + v^T 2^(s - m')
//     a + b of two lanes: m = max;  l = l_a 2^(m_a - m) + l_b 2^(m_b - m), o likewise;  out = o / l of all lanes
//
// (flash decoding, arXiv 2311.01282, with lanes that are fixed over absolute positions.) Lanes are added by one tree: half of all apart, a quarter, .. 2, 1.
// A cluster of P blocks of four warps serves one request and KV head; warp W of its 4 P has the lanes W + 4 P j, adds them up where it
// stands, and the rest of the tree is climbed through the cluster's shared memory. So P changes the time and no bit, and neither do the
// number of queries (columns of the matrix instructions) or of requests: what a row does not see has weight 0.
//
// Products are transposed, keys or channels by queries: eight queries are the least that an instruction takes. p goes from the layout of a
// result to that of a factor inside the warp (movmatrix).
//
// K and V of a slice arrive in one buffer each, refilled as soon as it was read; with all warps of a multiprocessor that is more than
// memory needs in flight. What is older than this step's positions is fetched before griddepcontrol.wait: `hopper.py` says why it may.
//
// After numbers.cuh. Macros: LANES; F16 (else bfloat16); FORMAT 0 as they are, 1 e4m3 with a scale for each position and head, 2 e4m3 with one scale; C channels; KEYS;
// S positions of a block; NT eights of query rows; P; LONG_TABLE, LONG_LENS: int64, else int32; BLOCKS of a multiprocessor at least.

#if LONG_TABLE
typedef long long TableEntry;
#else
typedef int TableEntry;
#endif
#if LONG_LENS
typedef long long Length;
#else
typedef int Length;
#endif

struct Args {
    const u16* q;
    const char* k;
    const char* v;
    const float* k_scale;
    const float* v_scale;
    const TableEntry* table;
    const Length* lens;
    u16* out;
    long long table_stride, head_bytes, scale_stride;
    int num_columns, q_len, group, num_kv_heads, window, sent_bytes;  // sent by one warp to one block
    float scale;
};

constexpr int WARPS = 4, OWN_LANES = LANES / (WARPS * P);
constexpr int OWN_BITS = OWN_LANES == 8 ? 3 : OWN_LANES == 4 ? 2 : OWN_LANES == 2 ? 1 : 0;
#define INFINITE __int_as_float(0x7F800000)
constexpr int ROW_BYTES = FORMAT == 0 ? 2 * C : C, CHUNKS = ROW_BYTES / 16;
constexpr int PITCH = CHUNKS % 2 == 0 ? ROW_BYTES + 16 : ROW_BYTES;  // an odd number of 16 bytes: eight rows fall into different banks
constexpr int KEY_TILES = KEYS / 16, C_TILES = C / 16, ROWS = 8 * NT;
constexpr int TILE_BYTES = KEYS * PITCH, WARP_BYTES = 2 * TILE_BYTES;
constexpr bool ONE_BLOCK = S % KEYS == 0;  // of the cache holds a slice
// A block of its own keeps a warp's sums where its tiles were, so that more blocks fit; in a cluster they arrive while others still read tiles.
#define LANDING_PITCH (P == 1 ? WARP_BYTES : args.sent_bytes)

__device__ __forceinline__ u32 load_fresh(const void* at) {  // past the first-level cache, which may hold what was there before
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ int load_index(const int* at) { return (int)load_fresh(at); }
__device__ __forceinline__ int load_index(const long long* at) { return (int)load_fresh(at); }  // the low half
__device__ __forceinline__ u32 load_word(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
// To shared memory: 16 bytes, or zeros.
__device__ __forceinline__ void copy(u32 to, const char* from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void wait_pending() {  // until at most GROUPS of the newest are unfinished
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
    __syncwarp();
}
// Blocks of 8 x 8 numbers of 16 bits from shared memory, a row's address from a thread: thread 4 g + t has columns 2 t and 2 t + 1 of row g, or,
// transposed, rows 2 t and 2 t + 1 of column g.
__device__ __forceinline__ void load_blocks(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void await_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float at_least_finite(float m) { return m == -INFINITE ? 0.0f : m; }

#if F16
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
__device__ __forceinline__ u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 w;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(w) : "r"(v));
    return w;
}

// e4m3 in wider floats times a power of two (kernels/operands/e4m3.py): bfloat16 reads value * 2^-120, float16 value * 2^-8. The factors that make
// up for it are dealt out so that nothing is subnormal.
constexpr int WIDER = F16 ? 1 : 4;
constexpr u32 MAGNITUDE = F16 ? 0x3F803F80 : 0x07F007F0;
__device__ __forceinline__ u32 decode_odd(u32 v) { return (v & 0x80008000) | ((v >> WIDER) & MAGNITUDE); }
__device__ __forceinline__ u32 decode_even(u32 v) { return decode_odd(v << 8); }
constexpr float TO_60 = 1152921504606846976.0f;
constexpr float Q_FACTOR = FORMAT && !F16 ? TO_60 : 1.0f, P_FACTOR = Q_FACTOR;
constexpr float S_FACTOR = FORMAT ? (F16 ? 256.0f : TO_60) : 1.0f, O_FACTOR = S_FACTOR;

// To a block of the cluster, by the address that the same thing has here; its barrier counts the bytes.
__device__ __forceinline__ void send(u32 to, int block, u32 barrier, float v) {
#if P > 1
    asm volatile("{.reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %1; mapa.shared::cluster.u32 counter, %2, %1;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counter];}"
                 ::"r"(to), "r"(block), "r"(barrier), "r"(__float_as_uint(v)) : "memory");
#else
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
#endif
}
__device__ __forceinline__ void load_four(float (&v)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at) : "memory");
}

// A lane's sums, or those of several: of the channels 16 i + g (+ 8) and query rows 8 n + 2 t (+ 1), thread 4 g + t of the warp. Within a
// lane l is of the thread's own keys.
struct State {
    float o[C_TILES][NT][4], m[NT][2], l[NT][2];
};
__device__ __forceinline__ void clear(State& a) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        a.m[n][0] = a.m[n][1] = -INFINITE, a.l[n][0] = a.l[n][1] = 0.0f;
#pragma unroll
        for (int i = 0; i < C_TILES; ++i) a.o[i][n][0] = a.o[i][n][1] = a.o[i][n][2] = a.o[i][n][3] = 0.0f;
    }
}
__device__ __forceinline__ float sum(float a, float weight_a, float b, float weight_b) { return __fmaf_rn(a, weight_a, __fmul_rn(b, weight_b)); }
__device__ __forceinline__ void weigh(float& m_a, float m_b, float& weight_a, float& weight_b) {
    const float m = fmaxf(m_a, m_b), finite = at_least_finite(m);
    weight_a = exp2_of(m_a - finite), weight_b = exp2_of(m_b - finite);
    m_a = m;
}
__device__ __forceinline__ void add(State& b, const State& a) {  // b = a + b, a the lower lane
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float m = a.m[n][r], weight_a, weight_b;
            weigh(m, b.m[n][r], weight_a, weight_b);
            b.m[n][r] = m;
            b.l[n][r] = sum(a.l[n][r], weight_a, b.l[n][r], weight_b);
#pragma unroll
            for (int i = 0; i < C_TILES; ++i) {
                b.o[i][n][r] = sum(a.o[i][n][r], weight_a, b.o[i][n][r], weight_b);
                b.o[i][n][r + 2] = sum(a.o[i][n][r + 2], weight_a, b.o[i][n][r + 2], weight_b);
            }
        }
}

// Where a warp is: the n-th of its lanes, and a slice of it. Lanes come in the order in which the tree adds them.
struct Place {
    int n, slice;
    __device__ __forceinline__ void to_lane(int lane_n, int own, int first_slice) {
        n = lane_n;
        int j = 0;
#pragma unroll
        for (int bit = 1; bit < OWN_LANES; bit *= 2) j = 2 * j + (n & bit ? 1 : 0);
        slice = own + WARPS * P * j;
        if (slice < first_slice) slice += (first_slice - slice + LANES - 1) / LANES * LANES;
    }
    __device__ __forceinline__ void skip_empty(int own, int first_slice, int end_slice) {
        while (slice >= end_slice && n + 1 < OWN_LANES) to_lane(n + 1, own, first_slice);
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) attend_lanes(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) char shared_memory[];
    __shared__ float ml[WARPS * P][2][ROWS];
    __shared__ unsigned long long arrivals;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u32 shared = (u32)__cvta_generic_to_shared(shared_memory);
    const u32 k_tile = shared + warp * WARP_BYTES, v_tile = k_tile + TILE_BYTES;
    const int rank = blockIdx.x % P, pair = blockIdx.x / P, own = rank * WARPS + warp;
    const int request = pair / args.num_kv_heads, kv_head = pair - request * args.num_kv_heads;
    const int num_rows = args.q_len * args.group, first_row = blockIdx.y * ROWS;
    const TableEntry* table = args.table + request * args.table_stride;
    const char* k_head = args.k + kv_head * args.head_bytes;
    const char* v_head = args.v + kv_head * args.head_bytes;

    const u32 barrier = (u32)__cvta_generic_to_shared(&arrivals), ml_at = (u32)__cvta_generic_to_shared(&ml[0][0][0]);
    const u32 landing = P == 1 ? shared : shared + WARPS * WARP_BYTES;
    const int fours = min(num_rows - first_row, ROWS) * C / 4;  // of elements of the result: 32 of them are one block's, the next 32 the next's
#if P > 1
    if (threadIdx.x == 0) {
        int own_fours = 0;
        for (int at = rank * 32; at < fours; at += 32 * P) own_fours += min(32, fours - at);
        asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(WARPS * P * (own_fours * 16 + 8 * ROWS)) : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif

    const int key_lane = ONE_BLOCK ? 0 : lane % KEYS;  // of a slice's keys the one whose slot this thread looks up
    const int first_entry = load_index(table + min((own * KEYS + key_lane) / S, args.num_columns - 1));  // beside the length, not after it
    const int context_len = load_index(args.lens + request), old_len = context_len - args.q_len;
    const int first_key = args.window ? max(old_len + 1 - args.window, 0) : 0;
    const int first_slice = first_key / KEYS, end_slice = (context_len + KEYS - 1) / KEYS;

    // The slot of this thread's key of a slice (of its first key where they follow one another), and their order.
    auto slot_of = [&](int slice) {
        const int key = slice * KEYS + key_lane;
        if (key >= context_len) return 0;
        return (slice == own ? first_entry : load_index(table + key / S)) * S + key % S;
    };
    auto load_rows = [&](u32 to, const char* head, int slice, int slot, int from_key, int to_key) {
        if (ONE_BLOCK && 32 % CHUNKS == 0 && slice * KEYS >= from_key && (slice + 1) * KEYS <= min(to_key, context_len)) {
            const char* from = head + (long long)slot * ROW_BYTES + lane * 16;  // all rows, one after the other
            to += lane / CHUNKS * PITCH + lane % CHUNKS * 16;
#pragma unroll
            for (int i = 0; i < KEYS * CHUNKS / 32; ++i) copy(to + i * (32 / CHUNKS) * PITCH, from + i * 512, true);
        } else {
#pragma unroll 1
            for (int i = 0; i < KEYS * CHUNKS / 32; ++i) {
                const int chunk = i * 32 + lane, row = chunk / CHUNKS, byte = (chunk - row * CHUNKS) * 16, key = slice * KEYS + row;
                const int at = ONE_BLOCK ? slot + row : __shfl_sync(0xFFFFFFFFu, slot, row);
                if (key >= from_key && key < to_key) copy(to + row * PITCH + byte, head + (long long)at * ROW_BYTES + byte, key < context_len);
            }
        }
    };
    float k_scale = 1.0f, v_scale = 1.0f;  // of key `lane`
    auto load_scales = [&](int slice, int slot) {
#if FORMAT == 1
        const bool real = slice * KEYS + lane < context_len;
        const long long at = kv_head * args.scale_stride + slot + (ONE_BLOCK ? lane : 0);
        k_scale = real ? __uint_as_float(load_fresh(args.k_scale + at)) : 0.0f;
        v_scale = real ? __uint_as_float(load_fresh(args.v_scale + at)) : 0.0f;
#endif
    };

    Place next;
    next.to_lane(0, own, first_slice);
    next.skip_empty(own, first_slice, end_slice);
    int slot = slot_of(next.slice);
    const int first = next.slice;
    if (first < end_slice) load_rows(k_tile, k_head, first, slot, 0, old_len);
    commit();
    if (first < end_slice) load_rows(v_tile, v_head, first, slot, 0, old_len);
    commit();
    await_launches();
    let_next_start();  // not before the wait: the next launch may be another of this kernel
    const bool incomplete = first < end_slice && (first + 1) * KEYS > old_len;
    if (incomplete) {
        load_rows(k_tile, k_head, first, slot, old_len, 0x7FFFFFFF);
        load_rows(v_tile, v_head, first, slot, old_len, 0x7FFFFFFF);
        commit();
    }
    if (first < end_slice) load_scales(first, slot);

    u32 q[NT][C_TILES][2];
    int position[NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = first_row + 8 * n + g;
        const long long head = ((long long)request * args.q_len + row / args.group) * args.num_kv_heads * args.group;
        const u16* at = args.q + (head + kv_head * args.group + row % args.group) * C;
#pragma unroll
        for (int i = 0; i < C_TILES; ++i) {
            u32 low = 0, high = 0;
            if (row < num_rows) {
                const int channel = 16 * i + (FORMAT ? 4 * t : 2 * t);
                low = *(const u32*)(at + channel), high = *(const u32*)(at + channel + (FORMAT ? 2 : 8));
            }
#if FORMAT
            // The order of channels in which four codes come apart: even, then odd.
            const u32 even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
            low = narrow_pair(widen((u16)even) * Q_FACTOR, widen((u16)(even >> 16)) * Q_FACTOR);
            high = narrow_pair(widen((u16)odd) * Q_FACTOR, widen((u16)(odd >> 16)) * Q_FACTOR);
#endif
            q[n][i][0] = low, q[n][i][1] = high;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) position[n][r] = old_len + (first_row + 8 * n + 2 * t + r) / args.group;
    }
    float s_factor = args.scale * 1.4426950408889634f * S_FACTOR, o_factor = O_FACTOR;
#if FORMAT == 2
    s_factor *= *args.k_scale, o_factor *= *args.v_scale;
#endif

    State state, waiting[OWN_BITS + 1];
    bool all = incomplete;
#pragma unroll 1
    for (int n = 0; n < OWN_LANES; ++n) {
        clear(state);
#pragma unroll 1
        while (next.n == n && next.slice < end_slice) {
            const int slice = next.slice;
            next.slice += LANES;
            next.skip_empty(own, first_slice, end_slice);
            const bool more = next.slice < end_slice;
            slot = more ? slot_of(next.slice) : 0;

            if (all) wait_pending<0>();
            else wait_pending<1>();
            float s[KEY_TILES][NT][4] = {};
#pragma unroll
            for (int i = 0; i < C_TILES; ++i)
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j) {
                    u32 a[4];
#if FORMAT == 0
                    load_blocks(a, k_tile + (16 * j + (lane & 15)) * PITCH + 32 * i + (lane >> 4) * 16);
#else
                    const u32 at = k_tile + (16 * j + g) * PITCH + 16 * i + 4 * t;
                    const u32 above = load_word(at), below = load_word(at + 8 * PITCH);
                    a[0] = decode_even(above), a[1] = decode_even(below), a[2] = decode_odd(above), a[3] = decode_odd(below);
#endif
#pragma unroll
                    for (int m = 0; m < NT; ++m) mma(s[j][m], a, q[m][i][0], q[m][i][1]);
                }
            __syncwarp();
            if (more) load_rows(k_tile, k_head, next.slice, slot, 0, 0x7FFFFFFF);
            commit();

            float key_scale[KEY_TILES][2], value_scale[KEY_TILES][2];
#pragma unroll
            for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    key_scale[j][h] = s_factor, value_scale[j][h] = P_FACTOR;
#if FORMAT == 1
                    key_scale[j][h] *= __shfl_sync(0xFFFFFFFFu, k_scale, 16 * j + 8 * h + g);
                    value_scale[j][h] *= __shfl_sync(0xFFFFFFFFu, v_scale, 16 * j + 8 * h + g);
#endif
                }
            if (more) load_scales(next.slice, slot);

            u32 p[KEY_TILES][NT][2];
#pragma unroll
            for (int m = 0; m < NT; ++m) {
                float weight[KEY_TILES][4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float most = -INFINITE;
#pragma unroll
                    for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int key = slice * KEYS + 16 * j + 8 * h + g;
                            const bool seen = key <= position[m][r] && (!args.window || key > position[m][r] - args.window);
                            float& score = s[j][m][2 * h + r];
                            score = seen ? score * key_scale[j][h] : -INFINITE;
                            most = fmaxf(most, score);
                        }
#pragma unroll
                    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
                    const float top = fmaxf(state.m[m][r], most), finite = at_least_finite(top), alpha = exp2_of(state.m[m][r] - finite);
                    state.m[m][r] = top;
                    float total = 0.0f;
#pragma unroll
                    for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const float each = exp2_of(s[j][m][2 * h + r] - finite);
                            total += each;
                            weight[j][2 * h + r] = FORMAT ? each * value_scale[j][h] : each;
                        }
                    state.l[m][r] = __fmaf_rn(state.l[m][r], alpha, total);
#pragma unroll
                    for (int i = 0; i < C_TILES; ++i) state.o[i][m][r] *= alpha, state.o[i][m][r + 2] *= alpha;
                }
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h) p[j][m][h] = transposed(narrow_pair(weight[j][2 * h], weight[j][2 * h + 1]));
            }

            if (!all) wait_pending<1>();
            all = false;
#pragma unroll
            for (int i = 0; i < C_TILES; ++i)
#pragma unroll
                for (int j = 0; j < KEY_TILES; ++j) {
                    u32 a[4];
#if FORMAT == 0
                    load_transposed(a, v_tile + (16 * j + (lane >> 4) * 8 + (lane & 7)) * PITCH + 32 * i + ((lane >> 3) & 1) * 16);
#else
                    u32 pairs[2];  // of channels, of the first eight keys and of the others
                    load_transposed(pairs, v_tile + (16 * j + (lane & 15)) * PITCH + 16 * i);
                    a[0] = decode_even(pairs[0]), a[1] = decode_odd(pairs[0]), a[2] = decode_even(pairs[1]), a[3] = decode_odd(pairs[1]);
#endif
#pragma unroll
                    for (int m = 0; m < NT; ++m) mma(state.o[i][m], a, p[j][m][0], p[j][m][1]);
                }
            __syncwarp();
            if (more) load_rows(v_tile, v_head, next.slice, slot, 0, 0x7FFFFFFF);
            commit();
        }
#pragma unroll
        for (int m = 0; m < NT; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int step = 4; step < 32; step *= 2) state.l[m][r] += __shfl_xor_sync(0xFFFFFFFFu, state.l[m][r], step);
        // Lanes meet as a counter carries: a subtree waits for its neighbour, or is added to the one that waits.
        bool closes = true;
#pragma unroll
        for (int level = 0; level < OWN_BITS; ++level) {
            const bool last = n >> level & 1;
            if (closes && last) add(state, waiting[level]);
            else if (closes) waiting[level] = state;
            closes = closes && last;
        }
    }
    wait_pending<0>();

    // Sums of the warp's lanes go to the blocks that have their elements.
#if P > 1
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // until every barrier is set up
#endif
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = 8 * n + 2 * t + r;
            if (g < P) {
                const u32 to = ml_at + ((own * 2) * ROWS + row) * 4;
                send(to, g, barrier, state.m[n][r]), send(to + ROWS * 4, g, barrier, state.l[n][r]);
            }
            if (first_row + row < num_rows)
#pragma unroll
                for (int i = 0; i < C_TILES; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int channel = FORMAT ? 16 * i + 2 * g + h : 16 * i + 8 * h + g, four = (row * C + channel) / 4, group = four / 32;
                        const u32 to = landing + own * LANDING_PITCH + group / P * 512 + four % 32 * 16 + channel % 4 * 4;
                        send(to, group % P, barrier, state.o[i][n][2 * h + r]);
                    }
        }
#if P > 1
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier) : "memory");
#else
    __syncthreads();
#endif

    // Four threads to four elements, one for each warp of a block.
    const int w = threadIdx.x & 3;
    for (int at = threadIdx.x >> 2, four; (four = at / 32 * 32 * P + rank * 32 + at % 32) < fours; at += 32) {
        const int row = four / (C / 4), channel = four % (C / 4) * 4;
        float m[P], l[P], o[P][4];
#pragma unroll
        for (int b = 0; b < P; ++b) {
            m[b] = ml[b * WARPS + w][0][row], l[b] = ml[b * WARPS + w][1][row];
            load_four(o[b], landing + (b * WARPS + w) * LANDING_PITCH + at * 16);
        }
#pragma unroll
        for (int half = P / 2; half > 0; half /= 2)
#pragma unroll
            for (int b = 0; b < half; ++b) {
                float weight_a, weight_b;
                weigh(m[b], m[b + half], weight_a, weight_b);
                l[b] = sum(l[b], weight_a, l[b + half], weight_b);
#pragma unroll
                for (int i = 0; i < 4; ++i) o[b][i] = sum(o[b][i], weight_a, o[b + half][i], weight_b);
            }
#pragma unroll
        for (int step = 2; step > 0; step /= 2) {
            const unsigned active = 0xFu << (lane & ~3);
            const bool upper = w & step;
            const float m_other = __shfl_xor_sync(active, m[0], step), l_other = __shfl_xor_sync(active, l[0], step);
            float m_a = upper ? m_other : m[0], weight_a, weight_b;
            weigh(m_a, upper ? m[0] : m_other, weight_a, weight_b);
            m[0] = m_a;
            l[0] = sum(upper ? l_other : l[0], weight_a, upper ? l[0] : l_other, weight_b);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float other = __shfl_xor_sync(active, o[0][i], step);
                o[0][i] = sum(upper ? other : o[0][i], weight_a, upper ? o[0][i] : other, weight_b);
            }
        }
        if (w == 0) {
            const int whole_row = first_row + row;
            const long long token = (long long)request * args.q_len + whole_row / args.group;
            const long long head = (token * args.num_kv_heads + kv_head) * args.group + whole_row % args.group;
            const float factor = l[0] == 0.0f ? 0.0f : o_factor / l[0];
            const uint2 four = make_uint2(narrow_pair(o[0][0] * factor, o[0][1] * factor), narrow_pair(o[0][2] * factor, o[0][3] * factor));
            *(uint2*)(args.out + head * C + channel) = four;
        }
    }
}
