// The gather: resolve turns positions of an epoch into addresses; copy_windows moves whole windows. And one kernel of
// staging. order.cu comes before this text, serve.cu after it.

// Where the samples of an index lie. Mirrors SAMPLES in gather.py.
struct Samples {
    const i64 *span_ids, *span_rows;
    i64 n_spans;
    const u64 *bases;  // of each stretch of so many rows
    i64 base_rows, row_nbytes;
    i64 reach;  // rows from a window's first to its last
    const float *target;
    i64 n_targets;
};

__device__ __forceinline__ i64 row_of(const Samples &samples, i64 sample) {
    const i64 span = find_span(samples.span_ids, samples.n_spans, sample);
    return samples.span_rows[span] + (sample - samples.span_ids[span]);
}

// Where the window begins that ends at a row.
__device__ __forceinline__ u64 address_of(const Samples &samples, i64 row) {
    const i64 start = row - samples.reach + 1, base = start / samples.base_rows;
    return samples.bases[base] + (u64)(start - base * samples.base_rows) * samples.row_nbytes;
}

// Samples follow from the order, or come as blocks of consecutive ones: those of a decision instant.
extern "C" __global__ void resolve(
    const Order order, const Samples samples, i64 first, i64 count,
    const i64 *__restrict__ block_places, const i64 *__restrict__ block_samples, i64 n_blocks,
    u64 *__restrict__ addresses, float *__restrict__ y) {
    const i64 n_targets = samples.n_targets;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        i64 sample;
        if (n_blocks) {
            i64 block = find_span(block_places, n_blocks, i);
            sample = block_samples[block] + (i - block_places[block]);
        } else {
            sample = sample_at(order, position_at(order, first, i));
        }
        const i64 row = row_of(samples, sample);
        addresses[i] = address_of(samples, row);
        for (i64 k = 0; k < n_targets; ++k) y[i * n_targets + k] = samples.target[row * n_targets + k];
    }
}

// Where a graph of the user's is in its epochs; it goes on with each replay. Mirrors CURSOR in gather.py.
struct Cursor {
    i64 epoch, batch;  // of the next batch; epochs count from the first whose order is in the table
    u32 n_done;        // blocks of this launch that are done
    u32 padding;
};

// What the batch at a cursor is made from. Mirrors NEXT in gather.py.
struct Next {
    Cursor *cursor;
    const Order *orders;
    i64 n_orders, n_batches;
    i64 stride, offset;  // positions from one batch to the next, and before the first of one
    i64 count;
    u64 nothing;  // a window of missing values
    float *y;
    unsigned char *valid;
    Samples samples;
};

// Where a sample of a batch lies; the row is -1 past the last order, where nothing is known. Past the end of an epoch
// positions begin again and are not valid.
struct Found {
    u64 address;
    i64 row;
};

// By all threads of a warp for the same sample, where there are whole warps.
template <bool by_warp>
__device__ __forceinline__ Found look_up(const Next &next, i64 epoch, i64 batch, i64 i) {
    const Samples &samples = next.samples;
    if (epoch >= next.n_orders) return {next.nothing, -1};
    const Order *__restrict__ order = next.orders + epoch;
    const u64 base = samples.bases[0];
    const i64 position = batch * next.stride + next.offset + i;
    const i64 sample = sample_at(*order, position < order->n ? position : position % order->n);
    const i64 span = by_warp ? find_span_by_warp(samples.span_ids, samples.n_spans, sample)
                             : find_span(samples.span_ids, samples.n_spans, sample);
    const i64 row = samples.span_rows[span] + (sample - samples.span_ids[span]), start = row - samples.reach + 1;
    return {start < samples.base_rows ? base + (u64)start * samples.row_nbytes : address_of(samples, row), row};
}

// What else a sample has, by some lanes.
__device__ __forceinline__ void tell(const Next &next, i64 epoch, i64 batch, i64 i, i64 row, int lane, int lanes) {
    const i64 n_targets = next.samples.n_targets;
    for (i64 k = lane; k < n_targets; k += lanes) {
        next.y[i * n_targets + k] = row < 0 ? *(const float *)next.nothing : next.samples.target[row * n_targets + k];
    }
    if (lane == 0) next.valid[i] = row >= 0 && batch * next.stride + next.offset + i < next.orders[epoch].n;
}

// To be called when all threads of a block have read the cursor.
__device__ __forceinline__ void go_on(const Next &next, i64 epoch, i64 batch) {
    __syncthreads();
    if (threadIdx.x || threadIdx.y) return;
    __threadfence();
    // The last block knows that all others have read it.
    if (atomicAdd(&next.cursor->n_done, 1u) == gridDim.x - 1) {
        const bool last = batch + 1 == next.n_batches;
        next.cursor->n_done = 0;
        next.cursor->batch = last ? 0 : batch + 1;
        if (last) next.cursor->epoch = epoch + 1;
    }
}

extern "C" __global__ void resolve_next(const Next next, u64 *__restrict__ addresses) {
    const i64 epoch = ((volatile Cursor *)next.cursor)->epoch, batch = ((volatile Cursor *)next.cursor)->batch;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < next.count; i += (i64)gridDim.x * blockDim.x) {
        const Found found = look_up<false>(next, epoch, batch, i);
        addresses[i] = found.address;
        tell(next, epoch, batch, i, found.row, 0, 1);
    }
    go_on(next, epoch, batch);
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

// One window, shared by some lanes; n loads.
template <typename V>
__device__ __forceinline__ void copy_window(u64 address, V *__restrict__ to, int n, int k, int lanes) {
    const V *__restrict__ from = (const V *)address;
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

// The same where rows do not keep to 16 bytes, as five columns do not: `shift` floats lie before the window in its first
// 16 bytes, and each lane puts together what it stores from two loads, of which the second is in the cache. The last one
// may go beyond the window, but not beyond its memory, which is whole loads long (see LOAD_NBYTES in driver.py) or pages.
struct Shifted {};
__device__ __forceinline__ void copy_window(u64 address, float4 *__restrict__ to, int n, int k, int lanes, Shifted) {
    const int shift = (int)(address >> 2 & 3);
    const float4 *__restrict__ from = (const float4 *)(address & ~15ull);
#pragma unroll 4
    for (; k < n; k += lanes) {
        float4 a = __ldg(from + k), b = a;
        if (shift) b = __ldg(from + k + 1);
        if (shift == 1) a = {a.y, a.z, a.w, b.x};
        if (shift == 2) a = {a.z, a.w, b.x, b.y};
        if (shift == 3) a = {a.w, b.x, b.y, b.z};
        __stcs(to + k, a);
    }
}

// blockDim.x lanes of gridDim.y blocks share a window; blockDim.y windows share a block.
template <typename V, typename... How>
__device__ __forceinline__ void copy_windows(
    const u64 *__restrict__ addresses, V *__restrict__ out, i64 count, int n, How... how) {
    const int lanes = (int)(gridDim.y * blockDim.x), k = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    for (i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y; i < count; i += (i64)gridDim.x * blockDim.y) {
        copy_window(addresses[i], out + i * n, n, k, lanes, how...);
    }
}

// The batch at a cursor in one kernel: blockDim.y windows of a block are looked up and copied.
template <typename V, typename... How>
__device__ __forceinline__ void next_windows(const Next &next, V *__restrict__ out, int n, How... how) {
    __shared__ Found found[32];
    const i64 epoch = ((volatile Cursor *)next.cursor)->epoch, batch = ((volatile Cursor *)next.cursor)->batch;
    const i64 i = blockIdx.x * (i64)blockDim.y + threadIdx.y;
    const int lane = (int)threadIdx.x, lanes = (int)blockDim.x;
    if (i < next.count && lanes % 32 == 0 && lane < 32) {
        const Found mine = look_up<true>(next, epoch, batch, i);
        if (lane == 0) found[threadIdx.y] = mine;
    } else if (i < next.count && lanes % 32 && lane == 0) {
        found[threadIdx.y] = look_up<false>(next, epoch, batch, i);
    }
    go_on(next, epoch, batch);
    if (i >= next.count) return;
    copy_window(found[threadIdx.y].address, out + i * n, n, lane, lanes, how...);
    tell(next, epoch, batch, i, found[threadIdx.y].row, lane, lanes);
}

#define COPY(NAME, V, ...)                                                                                           \
    extern "C" __global__ void copy_windows_##NAME(const u64 *addresses, V *out, i64 count, int n) {                 \
        copy_windows<V>(addresses, out, count, n, ##__VA_ARGS__);                                                    \
    }                                                                                                                \
    extern "C" __global__ void next_windows_##NAME(const Next next, V *out, int n) {                                 \
        next_windows<V>(next, out, n, ##__VA_ARGS__);                                                                \
    }

COPY(16, float4)
COPY(8, float2)
COPY(4, float)
COPY(shifted, float4, Shifted())
