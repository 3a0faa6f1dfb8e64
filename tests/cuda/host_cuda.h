// What the kernels need of CUDA, for a compiler of plain C++: one thread runs at a time, whose place the test sets.
#include <cmath>
#include <cstring>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(n)

struct Place {
    int x, y;
};
extern "C" {
Place blockIdx, threadIdx, blockDim, gridDim;
}

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};

inline void __syncthreads() {}
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned *p, unsigned value) {
    const unsigned before = *p;
    *p += value;
    return before;
}

template <typename T>
T __ldg(const T *p) {
    return *p;
}
template <typename T>
void __stcs(T *p, T value) {
    *p = value;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// Halves by arithmetic: the kernels use an instruction.
inline unsigned short nearest_half(float value) {
    const unsigned sign = __float_as_uint(value) >> 16 & 0x8000;
    const double size = std::fabs((double)value);
    if (size >= 65520.0) return (unsigned short)(sign | 0x7c00);
    int exponent;
    std::frexp(size, &exponent);
    const int unit = exponent < -13 ? -24 : exponent - 11;
    const unsigned units = (unsigned)std::nearbyint(std::ldexp(size, -unit));
    const bool small = size == 0.0 || exponent < -13;
    return (unsigned short)(sign | (small ? units : (unsigned)(exponent + 14 << 10) + units - 1024));
}
