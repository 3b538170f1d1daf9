// Matrix instructions on 16-bit numbers, with e4m3 codes as their factors, and on int8, and the activations of gated FFNs. After numbers.cuh.
//
// Macros: ACT 0 = none, 1 = silu, 2 = gelu, 3 = gelu by tanh, 4 = silu(1.702 gate) clamped (gpt-oss),
// 5 = silu of a gate that is at most CAP; CAP, if there is one: the most of an activated gate (of the gate itself with
// 5), and of the magnitude of what it multiplies.

// d = a b, or d += a b, for 16 outputs and 8 tokens; factors are float16, else bfloat16.
template <bool FLOAT16> __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool accumulate) {
    const float c[4] = {accumulate ? d[0] : 0.0f, accumulate ? d[1] : 0.0f, accumulate ? d[2] : 0.0f, accumulate ? d[3] : 0.0f};
#define MMA(TYPES)                                                                                                            \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))
    if constexpr (FLOAT16) MMA("f16.f16");
    else MMA("bf16.bf16");
#undef MMA
}

// d += a b for 16 outputs and 8 tokens of 32 columns of int8.
__device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 bytes as float16 / 256, exactly: odd bytes in .x, even bytes in .y. Any order of K serves if W and x share it.
__device__ __forceinline__ uint2 e4m3_to_f16(u32 v) {
    u32 even = v << 8;
    return make_uint2((v & 0x80008000) | ((v & 0x7F007F00) >> 1), (even & 0x80008000) | ((even & 0x7F007F00) >> 1));
}

// Four e4m3 codes as float16 times a power of two, that of their products being 1 / E4M3_FACTOR: odd bytes and even bytes, or halves.
#if __CUDA_ARCH__ >= 890
#define E4M3_FACTOR 1.0f
__device__ __forceinline__ uint2 factors_of(u32 codes) {
    uint2 v;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}" : "=r"(v.x), "=r"(v.y) : "r"(codes));
    return v;
}
#else
#define E4M3_FACTOR 65536.0f
__device__ __forceinline__ uint2 factors_of(u32 codes) { return e4m3_to_f16(codes); }
#endif

#if ACT
__device__ __forceinline__ float activated(float v) {
#if ACT == 1 || ACT == 5
    return __fdividef(v, 1.0f + __expf(-v));  // within 2^-21: the exact division branches, thread by thread
#elif ACT == 2
    return 0.5f * v * (1.0f + erff(v * 0.70710678118654752440f));
#elif ACT == 3
    return 0.5f * v * (1.0f + tanhf(0.79788456080286535588f * (v + 0.044715f * v * v * v)));
#else
    return __fdividef(v, 1.0f + __expf(-1.702f * v));
#endif
}
__device__ __forceinline__ float gated(float gate, float up) {
#if ACT == 4
    return __fmul_rn(activated(fminf(gate, 7.0f)), __fadd_rn(fminf(fmaxf(up, -7.0f), 7.0f), 1.0f));
#elif ACT == 5
    constexpr float cap = CAP;
    return __fmul_rn(activated(fminf(gate, cap)), fminf(fmaxf(up, -cap), cap));
#elif defined(CAP)
    constexpr float cap = CAP;
    return __fmul_rn(fminf(activated(gate), cap), fminf(fmaxf(up, -cap), cap));
#else
    return __fmul_rn(activated(gate), up);
#endif
}
#endif
