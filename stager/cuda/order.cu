// The order of an epoch: position -> sample, and the search that finds where a sample lies. gather.cu follows this text.
// NVRTC compiles both without the host's headers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Mirrors ORDER in order.py.
struct Order {
    i64 n;
    u32 left_size, right_size;
    u32 n_rounds;  // 0: the samples' own order
    u32 keys[32];
};

__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x;
}

// samples/order.py states the algorithm; golden vectors hold both to it.
__device__ __forceinline__ i64 sample_at(const Order &order, i64 position) {
    if (order.n_rounds == 0) return position;
    i64 x = position;
    do {
        u32 left = (u32)((u64)x / order.right_size);
        u32 right = (u32)((u64)x - (u64)left * order.right_size);
        for (u32 round = 0; round < order.n_rounds; round += 2) {
            left += __umulhi(mix(right + order.keys[round]), order.left_size);
            left = min(left, left - order.left_size);
            right += __umulhi(mix(left + order.keys[round + 1]), order.right_size);
            right = min(right, right - order.right_size);
        }
        x = (i64)((u64)left * order.right_size + right);
    } while (x >= order.n);
    return x;
}

// The last span (or block) that begins at or before the sample (or place).
__device__ __forceinline__ i64 find_span(const i64 *span_ids, i64 n_spans, i64 sample) {
    i64 lo = 0, hi = n_spans;
    while (hi - lo > 1) {
        i64 middle = (lo + hi) >> 1;
        if (span_ids[middle] <= sample) lo = middle; else hi = middle;
    }
    return lo;
}
