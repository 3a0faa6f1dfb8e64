// Windows whose columns are picked, scaled and cast on the way. order.cu and gather.cu come before this text.

#ifdef __CUDACC__
__device__ __forceinline__ unsigned short nearest_half(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
#endif

// How a served column comes from the rows. Mirrors COLUMN in gather.py; the methods are those of samples/normalize.py.
struct Column {
    int source, method;
    int close;  // the column whose last value "last" divides by
    int padding;
    double mean, deviation;  // what was fitted
};
enum { NONE, LAST, LOG1P, ZSCORE, FITTED };

// Where windows lie, and what is served of them.
struct Windows {
    i64 count;
    int window, row_floats, n_columns;
    int step;  // rows from one row of a window to the next
};

// One thread sums up one column of one window, in float64 and in the order of samples/normalize.py: mean and deviation,
// or the last close that is there. Of missing values, as panels have them, nothing is counted.
extern "C" __global__ void window_stats(
    const u64 *__restrict__ addresses, const Windows windows, const Column *__restrict__ columns,
    double2 *__restrict__ stats) {
    const i64 n_series = windows.count * windows.n_columns;
    const i64 step = (i64)windows.step * windows.row_floats;
    for (i64 s = blockIdx.x * (i64)blockDim.x + threadIdx.x; s < n_series; s += (i64)gridDim.x * blockDim.x) {
        const Column column = columns[s % windows.n_columns];
        const float *values = (const float *)addresses[s / windows.n_columns];
        double2 found = {0.0, 1.0};
        if (column.method == ZSCORE) {
            values += column.source;
            double sum = 0.0, squares = 0.0;
            int n = 0;
            for (int k = 0; k < windows.window; ++k) {
                double v = __ldg(values + k * step);
                if (v == v) sum = __dadd_rn(sum, v), ++n;
            }
            found.x = __ddiv_rn(sum, n);
            for (int k = 0; k < windows.window; ++k) {
                double d = __dsub_rn(__ldg(values + k * step), found.x);
                if (d == d) squares = __dadd_rn(squares, __dmul_rn(d, d));
            }
            found.y = __dsqrt_rn(__ddiv_rn(squares, n));
            if (found.y == 0.0) found.y = 1.0;
        } else if (column.method == LAST) {
            int k = windows.window - 1;
            values += column.close;
            while (k > 0 && __ldg(values + k * step) != __ldg(values + k * step)) --k;
            found.x = __ldg(values + k * step);
        }
        stats[s] = found;
    }
}

// value / close - 1 in float64, where `reciprocal` is 1 / close: of two float32, one correction of the product is the
// rounded quotient, because quotients of 24-bit numbers keep further from the middle between two doubles than it is off.
// Of zeros and infinities `rest` is no number.
struct Last {
    double close, reciprocal;

    __device__ __forceinline__ explicit Last(double value) : close(value), reciprocal(__drcp_rn(value)) {}
    __device__ __forceinline__ float of(float value, double &rest) const {
        const double q = __dmul_rn(value, reciprocal);
        rest = __fma_rn(-q, close, value);
        return (float)__dsub_rn(__fma_rn(rest, reciprocal, q), 1.0);
    }
    __device__ __forceinline__ float of_any(float value) const {
        return (float)__dsub_rn(__ddiv_rn(value, close), 1.0);
    }
};

__device__ __forceinline__ float log_of(float value) { return copysignf(log1pf(fabsf(value)), value); }

__device__ __forceinline__ float standard(float value, double mean, double deviation) {
    return (float)__ddiv_rn(__dsub_rn(value, mean), deviation);
}

// The bits of the nearest float16 or bfloat16, ties to even; one NaN for all, of either sign.
__device__ __forceinline__ u32 half_bits(float value) {
    if (value != value) return __float_as_uint(value) >> 16 & 0x8000 | 0x7e00;
    return nearest_half(value);
}
__device__ __forceinline__ u32 bfloat16_bits(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return bits >> 16 & 0x8000 | 0x7fc0;
    return bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

// A type that values are cast to, and how some of them are stored at once.
struct AsFloat {
    typedef float type;
    static __device__ __forceinline__ float of(float v) { return v; }
    template <int n>
    static __device__ __forceinline__ void put(float *to, const float *v) {
#pragma unroll
        for (int j = 0; j < n; j += 4) __stcs((float4 *)(to + j), float4{v[j], v[j + 1], v[j + 2], v[j + 3]});
    }
};

template <u32 (*bits)(float)>
struct AsTwoBytes {
    typedef unsigned short type;
    static __device__ __forceinline__ unsigned short of(float v) { return (unsigned short)bits(v); }
    template <int n>
    static __device__ __forceinline__ void put(unsigned short *to, const float *v) {
        u32 two[n / 2];
#pragma unroll
        for (int j = 0; j < n / 2; ++j) two[j] = bits(v[2 * j]) | bits(v[2 * j + 1]) << 16;
        if (n == 8) {
            __stcs((uint4 *)to, uint4{two[0], two[1], two[n / 2 - 2], two[n / 2 - 1]});
        } else {
            __stcs((uint2 *)to, uint2{two[0], two[1]});
        }
    }
};
typedef AsTwoBytes<half_bits> AsHalf;
typedef AsTwoBytes<bfloat16_bits> AsBfloat16;

// Columns in any order, scaled and cast on the way, of rows that may lie apart.
template <typename As>
__device__ __forceinline__ void serve(
    const u64 *__restrict__ addresses, typename As::type *__restrict__ out, const Windows &windows,
    const Column *__restrict__ columns, const double2 *__restrict__ stats) {
    const int lanes = (int)(gridDim.y * blockDim.x), n_columns = windows.n_columns, n = windows.window * n_columns;
    const i64 step = (i64)windows.step * windows.row_floats;
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < windows.count; i += (i64)gridDim.x * blockDim.y) {
        const float *__restrict__ from = (const float *)addresses[i];
        const float *__restrict__ last_row = from + (windows.window - 1) * step;
        for (int k = (int)(blockIdx.y * blockDim.x + threadIdx.x); k < n; k += lanes) {
            const int row = k / n_columns, c = k % n_columns;
            const Column column = columns[c];
            float value = __ldg(from + row * step + column.source);
            const double2 mine = stats ? stats[i * n_columns + c] : double2{0.0, 1.0};
            if (column.method == LAST) {
                const Last last(stats ? mine.x : (double)__ldg(last_row + column.close));
                double rest;
                const float scaled = last.of(value, rest);
                value = rest == rest ? scaled : last.of_any(value);
            } else if (column.method == LOG1P) {
                value = log_of(value);
            } else if (column.method == ZSCORE) {
                value = standard(value, mine.x, mine.y);
            } else if (column.method == FITTED) {
                value = standard(value, column.mean, column.deviation);
            }
            __stcs(out + i * n + k, As::of(value));
        }
    }
}

// Some of four values by the last close, without branches, so that they go side by side.
__device__ __forceinline__ void scale_by(const Last &last, float *v, int which) {
    float scaled[4];
    bool odd = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        double rest;
        scaled[j] = last.of(v[j], rest);
        odd |= rest != rest && which >> j & 1;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (odd) scaled[j] = last.of_any(v[j]);
        v[j] = which >> j & 1 ? scaled[j] : v[j];
    }
}

// The same, some values of a window at a time. The lanes are a multiple of what makes a lane's columns the same in all
// rounds, so they are looked up once; and all columns that are scaled by a close are scaled by the same.
// `whole`: all columns in their order, in multiples of as many values, are loads of 16 bytes. Eight values at a time are
// scaled by LAST and LOG1P alone: divisions take the registers.
template <typename As, int wide, bool whole, bool scaled>
__device__ __forceinline__ void serve_wide(
    const u64 *__restrict__ addresses, typename As::type *__restrict__ out, const Windows &windows,
    const Column *__restrict__ columns, const double2 *__restrict__ stats) {
    const int lanes = (int)(gridDim.y * blockDim.x), n_columns = windows.n_columns;
    const int n = windows.window * n_columns / wide, first = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    // A window is less than 2^31 floats long.
    const int step = windows.step * windows.row_floats, on = wide * lanes / n_columns * step;
    const int last_row = (windows.window - 1) * step;
    int place[wide], lasts = 0, logs = 0, others = 0, close = 0, closed = 0;
#pragma unroll
    for (int j = 0; j < wide; ++j) {
        const int served = (wide * first + j) % n_columns;
        const Column column = columns[served];
        place[j] = (wide * first + j) / n_columns * step + column.source;
        lasts |= (column.method == LAST) << j;
        logs |= (column.method == LOG1P) << j;
        others |= (column.method == ZSCORE || column.method == FITTED) << j;
        if (column.method == LAST) close = column.close, closed = served;
    }
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < windows.count; i += (i64)gridDim.x * blockDim.y) {
        const float *__restrict__ from = (const float *)addresses[i];
        const double2 *mine = stats + i * n_columns;
        const Last last(!scaled || !lasts ? 1.0 : stats ? mine[closed].x : (double)__ldg(from + last_row + close));
        typename As::type *to = out + (i * n + first) * wide;
        for (int k = first; k < n; k += lanes, from += on, to += wide * lanes) {
            float v[wide];
            if (whole) {
#pragma unroll
                for (int j = 0; j < wide; j += 4) {
                    const float4 loaded = __ldg((const float4 *)(from + place[j]));
                    v[j] = loaded.x, v[j + 1] = loaded.y, v[j + 2] = loaded.z, v[j + 3] = loaded.w;
                }
            } else {
#pragma unroll
                for (int j = 0; j < wide; ++j) v[j] = __ldg(from + place[j]);
            }
            if (scaled) {
#pragma unroll
                for (int j = 0; j < wide; j += 4) {
                    if (lasts >> j & 15) scale_by(last, v + j, lasts >> j);
                }
            }
            if (scaled && logs) {
#pragma unroll
                for (int j = 0; j < wide; ++j) {
                    if (logs >> j & 1) v[j] = log_of(v[j]);
                }
            }
            if (scaled && wide == 4 && others) {
#pragma unroll
                for (int j = 0; j < wide; ++j) {
                    if (others >> j & 1) {
                        const int served = (wide * first + j) % n_columns;
                        const Column *__restrict__ column = columns + served;
                        const bool fitted = column->method == FITTED;
                        v[j] = standard(
                            v[j], fitted ? column->mean : mine[served].x, fitted ? column->deviation : mine[served].y);
                    }
                }
            }
            As::template put<wide>(to, v);
        }
    }
}

#define SERVE_WIDE(NAME, AS, WIDE, WHOLE, SCALED)                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) serve_##NAME(                                                 \
        const u64 *addresses, AS::type *out, const Windows windows, const Column *columns, const double2 *stats) {   \
        serve_wide<AS, WIDE, WHOLE, SCALED>(addresses, out, windows, columns, stats);                                \
    }

#define SERVE(NAME, AS)                                                                                              \
    extern "C" __global__ void serve_##NAME(                                                                         \
        const u64 *addresses, AS::type *out, const Windows windows, const Column *columns, const double2 *stats) {   \
        serve<AS>(addresses, out, windows, columns, stats);                                                          \
    }                                                                                                                \
    SERVE_WIDE(4_##NAME, AS, 4, false, false)                                                                        \
    SERVE_WIDE(8_##NAME, AS, 8, false, false)                                                                        \
    SERVE_WIDE(4_whole_##NAME, AS, 4, true, false)                                                                   \
    SERVE_WIDE(8_whole_##NAME, AS, 8, true, false)                                                                   \
    SERVE_WIDE(4_scaled_##NAME, AS, 4, false, true)                                                                  \
    SERVE_WIDE(8_scaled_##NAME, AS, 8, false, true)                                                                  \
    SERVE_WIDE(4_whole_scaled_##NAME, AS, 4, true, true)                                                             \
    SERVE_WIDE(8_whole_scaled_##NAME, AS, 8, true, true)

SERVE(float32, AsFloat)
SERVE(float16, AsHalf)
SERVE(bfloat16, AsBfloat16)
