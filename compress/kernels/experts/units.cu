// Pairs sorted by expert, in their order within an expert, and cut into units of at most `size`: PARTS warps for each expert, each of which has
// a part of the pairs.
//
// Every block counts the pairs of all experts, part by part; a warp then knows where the units of its expert begin and how many pairs the
// parts before its own have, and finds its pairs by ballots, 32 at a time. So there is no order that threads decide. Units past the end have
// no expert, -1, and a unit that is not full ends in pairs of -1.
//
// Macros: EXPERTS; WARPS of a block; PARTS; STAGED = the most pairs, whose ids stay in shared memory, or 0: they are read again.

constexpr int WARP = 32, OWNERS = WARPS / PARTS, AHEAD = STAGED ? 1 : 8;

struct Args {
    const int* ids;
    int* experts;
    int* pairs;
    int num_pairs, num_units, num_experts, size, part_size;
};


extern "C" __global__ void __launch_bounds__(WARPS * WARP) sort_pairs(const __grid_constant__ Args args) {
    __shared__ int counts[PARTS][EXPERTS];
    __shared__ int staged[STAGED ? STAGED : 1];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, part = warp % PARTS, owner = warp / PARTS;
    const int expert = blockIdx.x * OWNERS + owner, begin = part * args.part_size, end = min(begin + args.part_size, args.num_pairs);
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    for (int i = threadIdx.x; i < PARTS * EXPERTS; i += blockDim.x) counts[i / EXPERTS][i % EXPERTS] = 0;
    __syncthreads();
    constexpr int STRIDE = OWNERS * WARP;
    for (int at = begin + owner * WARP + lane; at < end; at += AHEAD * STRIDE) {
        int ids[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) ids[j] = at + j * STRIDE < end ? load_index(args.ids + at + j * STRIDE) : -1;
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (STAGED && at + j * STRIDE < end) staged[at + j * STRIDE] = ids[j];
            if (ids[j] >= 0 && ids[j] < args.num_experts) atomicAdd(&counts[part][ids[j]], 1);
        }
    }
    __syncthreads();

    auto pairs_of = [&](int i, int parts) {  // in the first parts
        int sum = 0;
        for (int p = 0; p < parts; ++p) sum += counts[p][i];
        return sum;
    };
    auto units_of = [&](int i) { return (pairs_of(i, PARTS) + args.size - 1) / args.size; };
    int first = 0;
    for (int i = lane; i < min(expert, args.num_experts); i += WARP) first += units_of(i);
    first = sum_of_lanes(first);
    if (expert >= args.num_experts) return;
    if (part == 0) {
        const int own = pairs_of(expert, PARTS), units = units_of(expert);
        for (int i = own + lane; i < units * args.size; i += WARP) args.pairs[first * args.size + i] = -1;
        for (int i = lane; i < units; i += WARP) args.experts[first + i] = expert;
        if (expert == args.num_experts - 1)
            for (int i = first + units + lane; i < args.num_units; i += WARP) args.experts[i] = -1;
    }

    int slot = first * args.size + pairs_of(expert, part);
    for (int at = begin + lane; at - lane < end; at += AHEAD * WARP) {
        int ids[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int i = at + j * WARP;
            ids[j] = i >= end ? -1 : STAGED ? staged[i] : load_index(args.ids + i);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const bool is_own = ids[j] == expert;
            const u32 found = __ballot_sync(0xFFFFFFFFu, is_own);
            if (is_own) args.pairs[slot + __popc(found & ((1u << lane) - 1))] = at + j * WARP;
            slot += __popc(found);
        }
    }
}
