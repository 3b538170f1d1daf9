// Numbers of the model's dtype (F16 0 = bfloat16, 1 = float16), the RMSNorm of a row (arXiv 1910.07467), and its rounding to e4m3 or int8:
//
//     y = round(round(x / sqrt(mean(x^2) + eps)) * weight)        mean and quotient in float32; round: to the model's dtype
//     scale = max(absmax(y) / 448, 2^-40),  q = e4m3(y / scale)   as kernels/operands/rows.py defines it; a static scale is given
//     scale = max(absmax(y) / 127, 2^-40),  q = int8(y / scale)   to the nearest, ties to even; where the row is rounded to int8
//
// Squares are summed in one order whoever sums them: a segment is 32 chunks of 8 numbers, a chunk a lane, its lanes added by halves; then
// lane l has segments l, l + 32, .. ascending, and lanes are added by halves again. So many warps can share a row.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#if __CUDA_ARCH__ >= 900 && !defined(PORTABLE)
#define HOPPER 1
#else
#define HOPPER 0
#endif
__device__ __forceinline__ float widen(u16 bits) {
#if F16
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
#else
    return __uint_as_float((u32)bits << 16);
#endif
}
__device__ __forceinline__ u16 narrow(float v) {
    u16 bits;
#if F16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
#endif
    return bits;
}
__device__ __forceinline__ float rounded(float v) { return widen(narrow(v)); }
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// How the second-level cache keeps what is read: numbers that are read once leave before all others.
__device__ __forceinline__ u64 policy_of(bool once) {
    u64 first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return once ? first : normal;
}
__device__ __forceinline__ float low(u32 pair) { return widen((u16)(pair & 0xFFFF)); }
__device__ __forceinline__ float high(u32 pair) { return widen((u16)(pair >> 16)); }

constexpr int SEGMENT = 32;  // chunks

template <typename T> __device__ __forceinline__ T sum_of_lanes(T v) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, lanes);
    return v;
}
// A warp's segment: the chunk of this lane, zeros past the end of the row.
__device__ __forceinline__ float segment_squares(uint4 chunk) {
    const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(low(pairs[i]), low(pairs[i]), sum);
        sum = fmaf(high(pairs[i]), high(pairs[i]), sum);
    }
    return sum_of_lanes(sum);
}
// 1 / rms of a row of k, by a warp, from the squares of its segments.
template <typename Segment> __device__ __forceinline__ float inverse_rms(int k, float eps, int lane, Segment segment) {
    float sum = 0.0f;
    for (int s = lane; s * SEGMENT * 8 < k; s += 32) sum += segment(s);
    return rsqrtf(sum_of_lanes(sum) / (float)k + eps);
}
__device__ __forceinline__ float larger(float a, float b) {  // NaN if either is: a broken row must not look sound
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
__device__ __forceinline__ float max_magnitude(float most, uint4 v) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) most = larger(most, larger(fabsf(low(pairs[i])), fabsf(high(pairs[i]))));
    return most;
}
__device__ __forceinline__ float warp_max(float most) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) most = larger(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
    return most;
}
__device__ __forceinline__ float scale_of(float most, float largest = 448.0f) { return larger(__fdiv_rn(most, largest), 9.094947017729282e-13f); }
// v / scale, rounded once: with the correctly rounded 1 / scale, one step of correction gives the correctly rounded quotient (Markstein), in half
// of the time of a division. Not for quotients that overflow. A residual v - q scale would lose the sign of -0.
__device__ __forceinline__ float quotient(float v, float scale, float inverse) {
    const float q = v * inverse;
    return fmaf(fmaf(q, scale, -v), -inverse, q);
}
// Bytes of four integers, the quotients of two pairs: none is beyond 127 but for its rounding, and 1.5 * 2^23 has 1 for its last bit.
__device__ __forceinline__ u32 int8_word(u32 first, u32 second, float scale) {
    const float inverse = __frcp_rn(scale);
    auto whole = [&](float v) { return __float_as_uint(__fadd_rn(quotient(v, scale, inverse), 12582912.0f)); };
    const u32 low_pair = __byte_perm(whole(low(first)), whole(high(first)), 0x0040), high_pair = __byte_perm(whole(low(second)), whole(high(second)), 0x0040);
    return __byte_perm(low_pair, high_pair, 0x5410);
}
__device__ __forceinline__ uint2 int8_chunk(uint4 v, float scale) { return make_uint2(int8_word(v.x, v.y, scale), int8_word(v.z, v.w, scale)); }
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 e4m3_pair(u32 pair, float scale) {  // saturates at 448; the low number to the low byte
    u16 bytes;
#if QUANT == 1  // the scale is that of the row, so that no quotient overflows
    const float inverse = __frcp_rn(scale), first = quotient(low(pair), scale, inverse), second = quotient(high(pair), scale, inverse);
#else
    const float first = __fdiv_rn(low(pair), scale), second = __fdiv_rn(high(pair), scale);
#endif
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
    return bytes;
}
__device__ __forceinline__ uint2 e4m3_chunk(uint4 v, float scale) {  // eight numbers
    return make_uint2(e4m3_pair(v.x, scale) | (e4m3_pair(v.y, scale) << 16), e4m3_pair(v.z, scale) | (e4m3_pair(v.w, scale) << 16));
}
#endif
__device__ __forceinline__ u32 normed_pair(u32 pair, float scale, u32 weight) {
    const u16 first = narrow(rounded(low(pair) * scale) * low(weight)), second = narrow(rounded(high(pair) * scale) * high(weight));
    return (u32)first | ((u32)second << 16);
}
__device__ __forceinline__ uint4 normed(uint4 v, float scale, uint4 weight) {
    return make_uint4(normed_pair(v.x, scale, weight.x), normed_pair(v.y, scale, weight.y), normed_pair(v.z, scale, weight.z),
                      normed_pair(v.w, scale, weight.w));
}
