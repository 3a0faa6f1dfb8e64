// The gather: resolve turns positions of an epoch into addresses, copy_windows moves the windows. And one kernel of staging.
// order.cu comes before this text.

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

// Some columns of the rows, in any order; n is the number of values of a sample.
extern "C" __global__ void copy_columns(
    const u64 *__restrict__ addresses, float *__restrict__ out, i64 count, int n,
    const int *__restrict__ columns, int n_chosen, int n_columns) {
    const int lanes = (int)(gridDim.y * blockDim.x);
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < count; i += (i64)gridDim.x * blockDim.y) {
        const float *__restrict__ from = (const float *)addresses[i];
        for (int k = (int)(blockIdx.y * blockDim.x + threadIdx.x); k < n; k += lanes) {
            int row = k / n_chosen;
            __stcs(out + i * n + k, __ldg(from + (i64)row * n_columns + columns[k - row * n_chosen]));
        }
    }
}

// One thread scales one column of one window, in float64; samples/normalize.py does the same in the same order, so that
// only the logarithm may differ. The intrinsics keep multiplication and addition from being fused.
extern "C" __global__ void normalize(
    const u64 *__restrict__ addresses, float *__restrict__ x, i64 n_series, int window, int n_columns,
    const int *__restrict__ methods, i64 last_close, const double *__restrict__ fitted) {
    for (i64 s = blockIdx.x * (i64)blockDim.x + threadIdx.x; s < n_series; s += (i64)gridDim.x * blockDim.x) {
        i64 sample = s / n_columns;
        int column = (int)(s - sample * n_columns);
        float *values = x + sample * window * n_columns + column;
        int method = methods[column];
        if (method == 1) {
            double close = ((const float *)addresses[sample])[last_close];
            for (int k = 0; k < window; ++k) {
                float *value = values + (i64)k * n_columns;
                *value = (float)__dsub_rn(__ddiv_rn(*value, close), 1.0);
            }
        } else if (method == 2) {
            for (int k = 0; k < window; ++k) {
                float *value = values + (i64)k * n_columns;
                double v = *value;
                *value = (float)copysign(log1p(fabs(v)), v);
            }
        } else if (method == 3) {
            double mean = 0.0, squares = 0.0;
            for (int k = 0; k < window; ++k) mean = __dadd_rn(mean, values[(i64)k * n_columns]);
            mean = __ddiv_rn(mean, window);
            for (int k = 0; k < window; ++k) {
                double d = __dsub_rn(values[(i64)k * n_columns], mean);
                squares = __dadd_rn(squares, __dmul_rn(d, d));
            }
            double deviation = __dsqrt_rn(__ddiv_rn(squares, window));
            if (deviation == 0.0) deviation = 1.0;
            for (int k = 0; k < window; ++k) {
                float *value = values + (i64)k * n_columns;
                *value = (float)__ddiv_rn(__dsub_rn(*value, mean), deviation);
            }
        } else if (method == 4) {
            double mean = fitted[column], deviation = fitted[n_columns + column];
            for (int k = 0; k < window; ++k) {
                float *value = values + (i64)k * n_columns;
                *value = (float)__ddiv_rn(__dsub_rn(*value, mean), deviation);
            }
        }
    }
}
