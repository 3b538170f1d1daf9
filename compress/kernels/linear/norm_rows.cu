// RMSNorm of rows of k (a multiple of 8), a row a block of 128 threads: the arithmetic of numbers.cuh as a kernel of its own.

struct Args {
    const uint4* x;
    const uint4* weight;
    uint4* y;
    int k;
    float eps;
};

extern "C" __global__ void __launch_bounds__(128) norm_rows(const __grid_constant__ Args args) {
    const int quarter = threadIdx.x >> 5, lane = threadIdx.x & 31, chunks = args.k / 8;
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
    for (int at = threadIdx.x * 128; at < args.k * 2; at += 128 * 128) prefetch((const char*)args.weight + at);
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const uint4* x = args.x + (long long)blockIdx.x * chunks;
    uint4* y = args.y + (long long)blockIdx.x * chunks;
    __shared__ float quarters[4][32];
    float sum = 0.0f;
#pragma unroll 8
    for (int c = threadIdx.x; c < chunks; c += 128) sum = plus_squares(sum, x[c]);
    quarters[quarter][lane] = sum;
    __syncthreads();
    const float scale = inverse_rms(quarters[0][lane], quarters[1][lane], quarters[2][lane], quarters[3][lane], args.k, args.eps);
#pragma unroll 8
    for (int c = threadIdx.x; c < chunks; c += 128) y[c] = normed(x[c], scale, args.weight[c]);
}
