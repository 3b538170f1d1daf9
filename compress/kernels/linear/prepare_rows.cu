// What a linear wants of its rows, as a kernel of its own: RMSNorm (NORM), then e4m3 with a scale for each row (QUANT 1) or a given one
// (QUANT 2). The arithmetic is numbers.cuh's. Rows of k, a multiple of 8; a row a block of 128 threads.

struct Args {
    const uint4* x;
    const uint4* weight;
    void* y;
    float* scales;
    const float* static_scale;
    int k;
    float eps;
};

extern "C" __global__ void __launch_bounds__(128) prepare_rows(const __grid_constant__ Args args) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunks = args.k / 8;
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
#if NORM
    for (int at = threadIdx.x * 128; at < args.k * 2; at += 128 * 128) prefetch((const char*)args.weight + at);
#endif
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const uint4* x = args.x + (long long)blockIdx.x * chunks;
#if NORM
    __shared__ float quarters[4][32];
    float sum = 0.0f;
#pragma unroll 8
    for (int c = threadIdx.x; c < chunks; c += 128) sum = plus_squares(sum, x[c]);
    quarters[warp][lane] = sum;
    __syncthreads();
    const float factor = inverse_rms(quarters[0][lane], quarters[1][lane], quarters[2][lane], quarters[3][lane], args.k, args.eps);
    auto row = [&](int c) { return normed(x[c], factor, args.weight[c]); };
#else
    auto row = [&](int c) { return x[c]; };
#endif
#if QUANT
#if QUANT == 1
    __shared__ float most_of[4];
    float most = 0.0f;
#pragma unroll 8
    for (int c = threadIdx.x; c < chunks; c += 128) most = max_magnitude(most, row(c));
    most = warp_max(most);
    if (lane == 0) most_of[warp] = most;
    __syncthreads();
    const float scale = scale_of(larger(larger(most_of[0], most_of[1]), larger(most_of[2], most_of[3])));
#else
    const float scale = *args.static_scale;
#endif
    if (threadIdx.x == 0) args.scales[blockIdx.x] = scale;
    uint2* y = (uint2*)args.y + (long long)blockIdx.x * chunks;
#pragma unroll 4
    for (int c = threadIdx.x; c < chunks; c += 128) y[c] = e4m3_chunk(row(c), scale);
#else
    uint4* y = (uint4*)args.y + (long long)blockIdx.x * chunks;
#pragma unroll 8
    for (int c = threadIdx.x; c < chunks; c += 128) y[c] = row(c);
#endif
}
