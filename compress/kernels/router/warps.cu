// The router of decode rows in one launch: logits by matrix instructions, the choice by a warp for each row.
//
//     logits = (x W^T + bias) factor     columns are cut into eight slices, a warp for each, whose vectors of 32 columns ascend; slices ascend, in float32
//     scores = softmax, or the sigmoid of each, the root of the softplus of each, or the logits; compared = scores + selection bias, or logits, alone or + that bias
//     chosen = the largest compared, of equal ones the lowest ids; of the groups whose best one or two have the largest sums, where there are groups;
//              or those that a table has for the token
//     weights = scores of the chosen (softmax of their logits; divided by their sum; of SparseMixer each by the logits near it), times a factor, and one of the expert
//
// A block takes 16 experts and 8 rows. Two, four or eight blocks of all experts are a cluster on Hopper, whose first block is sent their logits and
// chooses; else the one that arrives last for its rows does. So a row's bits depend on the row alone. A key is the compared number as an unsigned
// integer of the same order: 0 was taken or is absent, 1 is in no chosen group, where ZEROES does not make it the key of 0. `models/moe.py` has the definition.
//
// After products.cuh (ACT 0). Macros: F16; VECTORS of a slice; PER_LANE experts of a lane; SCORE 0 = softmax, 1 = sigmoid, 2 = softmax of the
// chosen, 3 = SparseMixer, 4 = root of the softplus; TABLE = a table chooses; RENORMALIZE; GROUPED; SELECTION = there is a selection bias; OF_LOGITS = it is added to logits; ZEROES = experts of
// groups that were not chosen are compared with 0; CLUSTER = blocks of a cluster, or 0.

constexpr int WARP = 32, WARPS = 8, ROWS = 8, EXPERTS = 16;  // ROWS and EXPERTS of a block
constexpr int AT_ONCE = VECTORS < 16 ? VECTORS : 16;  // vectors that a thread has in registers
constexpr bool BY_LOGIT = SCORE == 0 && !SELECTION && !GROUPED && !TABLE;

struct Args {
    const u16* x;
    const u16* w;
    const float* bias;
    const float* selection_bias;
    const float* output_scale;
    float* logits;
    u32* arrivals;
    const long long* tokens;
    const long long* table;
    int* ids;
    float* weights;
    int size, num_experts, num_rows, choices, num_groups, top_groups, group_best, shared;
    float logit_scale, scale, least, gap;
};

__device__ __forceinline__ u32 ordered(float v) {
    const u32 bits = __float_as_uint(v + 0.0f);  // of two zeros, too, the lowest id is first
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float sqrt_softplus(float v) { return sqrtf(fmaxf(v, 0.0f) + log1pf(__expf(-fabsf(v)))); }
__device__ __forceinline__ float number(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }
// Takes the largest key of all lanes, of equal ones that of the lowest id = j 32 + lane.
template <int N> __device__ __forceinline__ int take_largest(u32 (&keys)[N], int lane, u32& largest) {
    u32 best[N], ids[N];  // in trees, whose ends are near
#pragma unroll
    for (int j = 0; j < N; ++j) best[j] = keys[j];
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int j = 0; j + step < N; j += 2 * step) best[j] = max(best[j], best[j + step]);
    largest = __reduce_max_sync(0xFFFFFFFFu, best[0]);
#pragma unroll
    for (int j = 0; j < N; ++j) ids[j] = keys[j] == largest ? j * WARP + lane : 0xFFFFFFFFu;
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int j = 0; j + step < N; j += 2 * step) ids[j] = min(ids[j], ids[j + step]);
    const int id = __reduce_min_sync(0xFFFFFFFFu, ids[0]);
#pragma unroll
    for (int j = 0; j < N; ++j)
        if (j * WARP + lane == id) keys[j] = 0;
    return id;
}

#if GROUPED
// The groups that may be chosen from, a bit each; lane g looks at group g.
__device__ __forceinline__ u32 kept_groups(const float* compared, const Args& args, int lane) {
    const int members = args.num_experts / args.num_groups;
    u32 keys[1] = {0};
    if (lane < args.num_groups) {
        float first = __uint_as_float(0xFF800000), second = first;
        for (int i = 0; i < members; ++i) {
            const float v = compared[lane * members + i];
            second = v > first ? first : fmaxf(second, v);
            first = fmaxf(first, v);
        }
        keys[0] = ordered(members > 1 && args.group_best > 1 ? first + second : first);
    }
    u32 kept = 0, largest;
    for (int i = 0; i < args.top_groups; ++i) kept |= 1u << take_largest(keys, lane, largest);
    return kept;
}
#endif

// `logit_of` reads a logit; all are on their way at once, so nothing is between the reads. `biases` of the experts of a lane.
template <typename Logit>
__device__ __forceinline__ void choose(const Args& args, int row, int lane, const float* biases, float* compared_of, Logit logit_of) {
    float logits[PER_LANE], scores[PER_LANE];
    float most = __uint_as_float(0xFF800000), total = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) logits[j] = logit_of(min(j * WARP + lane, args.num_experts - 1));
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        if (j * WARP + lane >= args.num_experts) logits[j] = __uint_as_float(0xFF800000);
        most = larger(most, logits[j]);
    }
    if (SCORE == 0) {
        most = warp_max(most);
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += scores[j] = __expf(logits[j] - most);
        total = sum_of_lanes(total);
    }
    u32 keys[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int id = j * WARP + lane;
        if (SCORE != 0) scores[j] = SCORE == 1 ? 1.0f / (1.0f + __expf(-logits[j])) : SCORE == 4 ? sqrt_softplus(logits[j]) : logits[j];
        else scores[j] /= total;
        float compared = BY_LOGIT || OF_LOGITS ? logits[j] : scores[j];
        if (SELECTION) compared += biases[j];
        keys[j] = id < args.num_experts ? ordered(compared) : 0;
        if (GROUPED && id < args.num_experts) compared_of[id] = compared;
    }
#if GROUPED
    __syncwarp();
    const u32 kept = kept_groups(compared_of, args, lane);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        const int id = j * WARP + lane;
        const bool is_kept = id >= args.num_experts || kept >> id / (args.num_experts / args.num_groups) & 1;
        if (!is_kept) keys[j] = ZEROES ? ordered(0.0f) : 1;
    }
#endif
    int chosen = 0;
    float weight = SCORE == 2 ? __uint_as_float(0xFF800000) : 0.0f;
    const bool holds = lane < args.choices;
#if TABLE
    if (holds) chosen = (int)args.table[args.tokens[row] * args.choices + lane];
#else
    for (int k = 0; k < args.choices; ++k) {
        u32 largest;
        const int id = take_largest(keys, lane, largest);
        float score = number(largest);
        if (SCORE == 3) {  // its share of itself and of the logits near it that were not taken before
            float near = 0.0f;
#pragma unroll
            for (int j = 0; j < PER_LANE; ++j) {
                const bool there = keys[j] != 0 || j * WARP + lane == id;
                if (there && score - logits[j] <= args.gap * fmaxf(fabsf(logits[j]), score)) near += __expf(logits[j] - score);
            }
            score = 1.0f / sum_of_lanes(near);
        }
        if (lane == k) chosen = id, weight = score;
    }
#endif
    if (SELECTION || TABLE) {
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) {
            const float score = __shfl_sync(0xFFFFFFFFu, scores[j], chosen % WARP);
            if (holds && chosen / WARP == j) weight = score;
        }
    }
    if (BY_LOGIT) weight = holds ? __expf(weight - most) / total : 0.0f;
    if (SCORE == 2) {
        weight = __expf(weight - warp_max(weight));
        weight /= sum_of_lanes(weight);
    } else if (RENORMALIZE) weight /= sum_of_lanes(weight) + args.least;
    const int columns = args.choices + args.shared;
    if (lane < columns) {
        if (holds && args.output_scale) weight *= args.output_scale[chosen];
        args.ids[(long long)row * columns + lane] = holds ? chosen : args.num_experts + lane - args.choices;
        args.weights[(long long)row * columns + lane] = holds ? weight * args.scale : 1.0f;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP) route_rows(const __grid_constant__ Args args) {
    __shared__ float compared[GROUPED ? WARPS * PER_LANE * WARP : 1];
    __shared__ float sums[WARPS][EXPERTS * ROWS];
#if CLUSTER
    __shared__ float all_logits[ROWS][CLUSTER * EXPERTS];  // of the first block
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
    __shared__ bool last;
#endif
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane >> 2, t = lane & 3;
    const int first_expert = blockIdx.x * EXPERTS, first_row = blockIdx.y * ROWS, num_rows = min(args.num_rows - first_row, ROWS);
    const int column = warp * VECTORS * 32 + t * 8;  // of this thread, in the first vector
    const u16 *w[2], *x = args.x + (long long)(first_row + min(g, num_rows - 1)) * args.size + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) w[h] = args.w + (long long)min(first_expert + 8 * h + g, args.num_experts - 1) * args.size + column;
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    float biases[SELECTION ? PER_LANE : 1];
#if SELECTION
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) biases[j] = load_float(args.selection_bias + min(j * WARP + lane, args.num_experts - 1));
#endif
    float sum[4] = {};
#pragma unroll
    for (int first = 0; first < VECTORS; first += AT_ONCE) {
        uint4 factors[2][AT_ONCE] = {}, rows[AT_ONCE] = {};
#pragma unroll
        for (int v = 0; v < AT_ONCE; ++v)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (column + (first + v) * 32 < args.size && first + v < VECTORS) factors[h][v] = *(const uint4*)(w[h] + (first + v) * 32);
#if HOPPER
        if (first == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#pragma unroll
        for (int v = 0; v < AT_ONCE; ++v)
            if (column + (first + v) * 32 < args.size && first + v < VECTORS) rows[v] = load_chunk(x + (first + v) * 32);
#pragma unroll
        for (int v = 0; v < AT_ONCE; ++v) {
            const u32 low_half[4] = {factors[0][v].x, factors[1][v].x, factors[0][v].y, factors[1][v].y};
            const u32 high_half[4] = {factors[0][v].z, factors[1][v].z, factors[0][v].w, factors[1][v].w};
            mma<F16>(sum, low_half, rows[v].x, rows[v].y, true);
            mma<F16>(sum, high_half, rows[v].z, rows[v].w, true);
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) sums[warp][(2 * t + r % 2) * EXPERTS + g + 8 * (r / 2)] = sum[r];
    __syncthreads();
    if (threadIdx.x < EXPERTS * ROWS) {
        const int expert = first_expert + threadIdx.x % EXPERTS, row = threadIdx.x / EXPERTS;
        float logit = sums[0][threadIdx.x];
#pragma unroll
        for (int s = 1; s < WARPS; ++s) logit += sums[s][threadIdx.x];
        if (args.bias && expert < args.num_experts) logit += args.bias[expert];
        logit *= args.logit_scale;
#if CLUSTER
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the first block runs
        u32 to;
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(to) : "r"((u32)__cvta_generic_to_shared(&all_logits[row][expert])));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(logit) : "memory");
#else
        if (expert < args.num_experts && row < num_rows) args.logits[(long long)(first_row + row) * args.num_experts + expert] = logit;
#endif
    }
#if CLUSTER
    else asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (blockIdx.x == 0 && warp < num_rows)
        choose(args, first_row + warp, lane, biases, compared + (GROUPED ? warp * PER_LANE * WARP : 0), [&](int id) { return all_logits[warp][id]; });
#else
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(args.arrivals + blockIdx.y, 1) == gridDim.x - 1;
        if (last) args.arrivals[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    const float* logits = args.logits + (long long)(first_row + warp) * args.num_experts;
    if (last && warp < num_rows)
        choose(args, first_row + warp, lane, biases, compared + (GROUPED ? warp * PER_LANE * WARP : 0), [&](int id) { return load_float(logits + id); });
#endif
}
