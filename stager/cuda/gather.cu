// The gather: resolve turns positions of an epoch into addresses; copy_windows moves whole windows; serve picks, scales and
// casts their columns. And one kernel of staging. order.cu comes before this text.

#ifdef __CUDACC_RTC__
// The bits of the nearest float16, ties to even; one NaN for all, of either sign.
__device__ __forceinline__ unsigned short half_bits(float value) {
    u32 bits = __float_as_uint(value);
    unsigned short half;
    if (value != value) return (unsigned short)(bits >> 16 & 0x8000 | 0x7e00);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
#endif

// Samples follow from the order, or come as blocks of consecutive ones: those of a decision instant.
extern "C" __global__ void resolve(
    const Order order, i64 first, i64 count,
    const i64 *__restrict__ block_places, const i64 *__restrict__ block_samples, i64 n_blocks,
    i64 window, i64 row_nbytes,
    const i64 *__restrict__ span_ids, const i64 *__restrict__ span_rows, i64 n_spans,
    const u64 *__restrict__ bases, i64 base_rows,
    const float *__restrict__ target, int n_targets, u64 *__restrict__ addresses, float *__restrict__ y) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        i64 sample;
        if (n_blocks) {
            i64 block = find_span(block_places, n_blocks, i);
            sample = block_samples[block] + (i - block_places[block]);
        } else {
            sample = sample_at(order, first + i);
        }
        i64 span = find_span(span_ids, n_spans, sample);
        i64 row = span_rows[span] + (sample - span_ids[span]);
        i64 start = row - window + 1;
        i64 base = start / base_rows;
        addresses[i] = bases[base] + (u64)(start - base * base_rows) * row_nbytes;
        if (y) {
            for (int k = 0; k < n_targets; ++k) y[i * n_targets + k] = target[row * n_targets + k];
        }
    }
}

// Where a graph of the user's is in its epochs; it goes on with each replay. Mirrors CURSOR in graphs.py.
struct Cursor {
    i64 epoch, batch;  // of the next batch; epochs count from the first whose order is in the table
    u32 n_done;        // blocks of this launch that are done
    u32 padding;
};

// The same for the batch at a cursor, which then goes on. Past the end of an epoch positions begin again and are not
// valid. Past the last order nothing is known: `nothing` is a window of missing values.
extern "C" __global__ void resolve_next(
    Cursor *__restrict__ cursor, const Order *__restrict__ orders, i64 n_orders, i64 n_batches, i64 stride, i64 offset,
    i64 count, i64 window, i64 row_nbytes,
    const i64 *__restrict__ span_ids, const i64 *__restrict__ span_rows, i64 n_spans,
    const u64 *__restrict__ bases, i64 base_rows, u64 nothing,
    const float *__restrict__ target, int n_targets, u64 *__restrict__ addresses, float *__restrict__ y,
    unsigned char *__restrict__ valid) {
    const i64 epoch = ((volatile Cursor *)cursor)->epoch, batch = ((volatile Cursor *)cursor)->batch;
    const bool known = epoch < n_orders;
    const Order *__restrict__ order = orders + (known ? epoch : 0);
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const i64 position = batch * stride + offset + i;
        valid[i] = known && position < order->n;
        i64 row = 0;
        if (known) {
            const i64 sample = sample_at(*order, position % order->n);
            const i64 span = find_span(span_ids, n_spans, sample);
            row = span_rows[span] + (sample - span_ids[span]);
            const i64 start = row - window + 1, base = start / base_rows;
            addresses[i] = bases[base] + (u64)(start - base * base_rows) * row_nbytes;
        } else {
            addresses[i] = nothing;
        }
        if (y) {
            for (int k = 0; k < n_targets; ++k) {
                y[i * n_targets + k] = known ? target[row * n_targets + k] : *(const float *)nothing;
            }
        }
    }
    // The last block to end knows that all others have read the cursor.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&cursor->n_done, 1u) == gridDim.x - 1) {
        cursor->n_done = 0;
        cursor->batch = batch + 1 == n_batches ? 0 : batch + 1;
        if (batch + 1 == n_batches) cursor->epoch = epoch + 1;
    }
}

// Staging: rows that came segment after segment go to their places. Row sources[p] + k of a piece goes to places[p] + k.
extern "C" __global__ void scatter_rows(
    const float *__restrict__ from, float *__restrict__ rows, i64 first, i64 count, int n_columns,
    const i64 *__restrict__ sources, const i64 *__restrict__ places, i64 n_pieces) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        i64 piece = find_span(sources, n_pieces, first + i);
        float *to = rows + (places[piece] + (first + i - sources[piece])) * n_columns;
        for (int k = 0; k < n_columns; ++k) to[k] = from[i * n_columns + k];
    }
}

template <typename V>
__device__ __forceinline__ void copy_rows(const u64 *__restrict__ addresses, V *__restrict__ out, i64 count, int n) {
    // blockDim.x lanes of gridDim.y blocks share a sample; blockDim.y samples share a block.
    const int lanes = (int)(gridDim.y * blockDim.x);
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < count; i += (i64)gridDim.x * blockDim.y) {
        const V *__restrict__ from = (const V *)addresses[i];
        V *__restrict__ to = out + i * n;
        int k = (int)(blockIdx.y * blockDim.x + threadIdx.x);
        for (; k + 3 * lanes < n; k += 4 * lanes) {
            V a = __ldg(from + k), b = __ldg(from + k + lanes);
            V c = __ldg(from + k + 2 * lanes), d = __ldg(from + k + 3 * lanes);
            __stcs(to + k, a);
            __stcs(to + k + lanes, b);
            __stcs(to + k + 2 * lanes, c);
            __stcs(to + k + 3 * lanes, d);
        }
        for (; k < n; k += lanes) __stcs(to + k, __ldg(from + k));
    }
}

extern "C" __global__ void copy_windows_16(const u64 *addresses, float4 *out, i64 count, int n) {
    copy_rows<float4>(addresses, out, count, n);
}

extern "C" __global__ void copy_windows_8(const u64 *addresses, float2 *out, i64 count, int n) {
    copy_rows<float2>(addresses, out, count, n);
}

extern "C" __global__ void copy_windows_4(const u64 *addresses, float *out, i64 count, int n) {
    copy_rows<float>(addresses, out, count, n);
}

// The same where rows do not keep to 16 bytes, as five columns do not: `shift` floats lie before a window in its first
// 16 bytes, and each lane puts together what it stores from two loads, of which the second is in the cache.
extern "C" __global__ void copy_windows_shifted(
    const u64 *__restrict__ addresses, float4 *__restrict__ out, i64 count, int n) {
    const int lanes = (int)(gridDim.y * blockDim.x);
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < count; i += (i64)gridDim.x * blockDim.y) {
        const int shift = (int)(addresses[i] >> 2 & 3);
        const float4 *__restrict__ from = (const float4 *)(addresses[i] & ~15ull);
        float4 *__restrict__ to = out + i * n;
#pragma unroll 4
        for (int k = (int)(blockIdx.y * blockDim.x + threadIdx.x); k < n; k += lanes) {
            float4 a = __ldg(from + k), b = a;
            if (shift && k + 1 < n) {
                b = __ldg(from + k + 1);
            } else if (shift) {
                // Nothing is read beyond the window, which may be the last one of its memory.
                const float *__restrict__ rest = (const float *)(from + k + 1);
                b.x = __ldg(rest);
                if (shift > 1) b.y = __ldg(rest + 1);
                if (shift > 2) b.z = __ldg(rest + 2);
            }
            if (shift == 1) a = {a.y, a.z, a.w, b.x};
            if (shift == 2) a = {a.z, a.w, b.x, b.y};
            if (shift == 3) a = {a.w, b.x, b.y, b.z};
            __stcs(to + k, a);
        }
    }
}

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

// v / close in float64 of two float32: one correction of the product with the rounded reciprocal is the rounded quotient,
// because quotients of 24-bit numbers keep further from the middle between two doubles than the correction is off.
__device__ __forceinline__ double divide(double v, double close) {
    double reciprocal = __drcp_rn(close), q = __dmul_rn(v, reciprocal), rest = __fma_rn(-q, close, v);
    if (rest != rest) return __ddiv_rn(v, close);  // zeros and infinities
    return __fma_rn(rest, reciprocal, q);
}

__device__ __forceinline__ float scale(
    float value, const Column &column, const float *__restrict__ last_row, const double2 *__restrict__ stats) {
    double v = value;
    switch (column.method) {
        case LAST: {
            double close = stats ? stats->x : (double)__ldg(last_row + column.close);
            return (float)__dsub_rn(divide(v, close), 1.0);
        }
        case LOG1P: return (float)copysign(log1p(fabs(v)), v);
        case ZSCORE: return (float)__ddiv_rn(__dsub_rn(v, stats->x), stats->y);
        case FITTED: return (float)__ddiv_rn(__dsub_rn(v, column.mean), column.deviation);
        default: return value;
    }
}

// The bits of the nearest bfloat16, ties to even; NaN likewise.
__device__ __forceinline__ unsigned short bfloat16_bits(float value) {
    u32 bits = __float_as_uint(value);
    if (value != value) return (unsigned short)(bits >> 16 & 0x8000 | 0x7fc0);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct AsFloat {
    typedef float type;
    typedef float4 four;
    static __device__ __forceinline__ float of(float v) { return v; }
};
struct AsHalf {
    typedef unsigned short type;
    typedef ushort4 four;
    static __device__ __forceinline__ unsigned short of(float v) { return half_bits(v); }
};
struct AsBfloat16 {
    typedef unsigned short type;
    typedef ushort4 four;
    static __device__ __forceinline__ unsigned short of(float v) { return bfloat16_bits(v); }
};

// Columns in any order, scaled and cast on the way, of rows that may lie apart.
template <typename As>
__device__ __forceinline__ void serve(
    const u64 *__restrict__ addresses, typename As::type *__restrict__ out, const Windows &windows,
    const Column *__restrict__ columns, const double2 *__restrict__ stats) {
    const int lanes = (int)(gridDim.y * blockDim.x), n_columns = windows.n_columns, n = windows.window * n_columns;
    const i64 step = (i64)windows.step * windows.row_floats;
    const int rows_on = lanes / n_columns, columns_on = lanes % n_columns;
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < windows.count; i += (i64)gridDim.x * blockDim.y) {
        const float *__restrict__ from = (const float *)addresses[i];
        const float *__restrict__ last_row = from + (windows.window - 1) * step;
        int k = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = k / n_columns, c = k % n_columns;
        for (; k < n; k += lanes) {
            const Column &column = columns[c];
            float value = __ldg(from + row * step + column.source);
            const double2 *mine = stats ? stats + i * n_columns + c : nullptr;
            __stcs(out + i * n + k, As::of(scale(value, column, last_row, mine)));
            row += rows_on, c += columns_on;
            if (c >= n_columns) c -= n_columns, ++row;
        }
    }
}

// The same for all columns in their order, in multiples of four: 16 bytes are read at a time.
template <typename As>
__device__ __forceinline__ void serve_fours(
    const u64 *__restrict__ addresses, typename As::four *__restrict__ out, const Windows &windows,
    const Column *__restrict__ columns, const double2 *__restrict__ stats) {
    const int lanes = (int)(gridDim.y * blockDim.x), n_fours = windows.n_columns / 4, n = windows.window * n_fours;
    const i64 step = (i64)windows.step * windows.row_floats;
    const int rows_on = lanes / n_fours, fours_on = lanes % n_fours;
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < windows.count; i += (i64)gridDim.x * blockDim.y) {
        const float *__restrict__ from = (const float *)addresses[i];
        const float *__restrict__ last_row = from + (windows.window - 1) * step;
        int k = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = k / n_fours, four = k % n_fours;
        for (; k < n; k += lanes) {
            const Column *__restrict__ column = columns + 4 * four;
            const double2 *mine = stats ? stats + i * windows.n_columns + 4 * four : nullptr;
            const float4 v = __ldg((const float4 *)(from + row * step) + four);
            typename As::four to;
            to.x = As::of(scale(v.x, column[0], last_row, mine));
            to.y = As::of(scale(v.y, column[1], last_row, mine ? mine + 1 : nullptr));
            to.z = As::of(scale(v.z, column[2], last_row, mine ? mine + 2 : nullptr));
            to.w = As::of(scale(v.w, column[3], last_row, mine ? mine + 3 : nullptr));
            __stcs(out + i * n + k, to);
            row += rows_on, four += fours_on;
            if (four >= n_fours) four -= n_fours, ++row;
        }
    }
}

#define SERVE(NAME, AS)                                                                                              \
    extern "C" __global__ void serve_##NAME(                                                                         \
        const u64 *addresses, AS::type *out, const Windows windows, const Column *columns, const double2 *stats) {   \
        serve<AS>(addresses, out, windows, columns, stats);                                                          \
    }                                                                                                                \
    extern "C" __global__ void serve_fours_##NAME(                                                                   \
        const u64 *addresses, AS::four *out, const Windows windows, const Column *columns, const double2 *stats) {   \
        serve_fours<AS>(addresses, out, windows, columns, stats);                                                    \
    }

SERVE(float32, AsFloat)
SERVE(float16, AsHalf)
SERVE(bfloat16, AsBfloat16)
