// The order of an epoch: place of a batch -> position -> sample, and the search that finds where a sample lies.
// gather.cu follows this text.
// NVRTC compiles both without the host's headers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Mirrors NETWORK in order.py.
struct Network {
    i64 n;
    u32 left_size, right_size;
    u32 n_rounds;
    u32 keys[32];
};

// Mirrors ORDER in order.py.
struct Order {
    i64 n;
    i64 batch_size, stride;  // of a batch, and from one to the next; they differ where other ranks have positions between
    u64 table;               // WEIGHTED: address of (n, 2) u64, threshold and alias
    u64 draw_keys[3];
    i64 block, place, rotation;  // BLOCKS
    Network whole;               // of samples, or of full blocks
    Network inside, rest;        // inside a full block, and inside the shorter one
    u32 kind;
    u32 tweaks[2];
};

enum Kind { UNSHUFFLED, FULL, BLOCKS, WEIGHTED };

// lowbias32 without its last step.
__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x;
}

__device__ __forceinline__ u32 mix_whole(u32 x) {
    x = mix(x);
    return x ^ x >> 16;
}

__device__ __forceinline__ u64 mix_wide(u64 x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

// samples/order.py and samples/sampling.py state the algorithms; golden vectors hold both to them.
__device__ __forceinline__ i64 permuted(const Network &network, i64 x, u32 tweak) {
    do {
        u32 left = (u32)((u64)x / network.right_size);
        u32 right = (u32)((u64)x - (u64)left * network.right_size);
        for (u32 round = 0; round < network.n_rounds; round += 2) {
            left += __umulhi(mix(right + network.keys[round] + tweak), network.left_size);
            left = min(left, left - network.left_size);
            right += __umulhi(mix(left + network.keys[round + 1] + tweak), network.right_size);
            right = min(right, right - network.right_size);
        }
        x = (i64)((u64)left * network.right_size + right);
    } while (x >= network.n);
    return x;
}

__device__ __forceinline__ i64 in_block(const Order &order, i64 position) {
    i64 first = order.place * order.block;
    bool is_short = position >= first && position < first + order.rest.n;
    if (position >= first + order.rest.n) position -= order.rest.n;
    i64 block = position / order.block;
    i64 sample = position - block * order.block;
    block = is_short ? order.whole.n : permuted(order.whole, block, 0);
    u32 tweak = mix_whole(mix_whole((u32)block + order.tweaks[0]) + (u32)(block >> 32) + order.tweaks[1]);
    // Not a reference to one of the two: the compiler would copy the parameters to local memory.
    if (is_short) sample = permuted(order.rest, sample, tweak);
    else sample = permuted(order.inside, sample, tweak);
    sample += block * order.block + order.rotation;
    return sample < order.n ? sample : sample - order.n;
}

__device__ __forceinline__ i64 drawn(const Order &order, i64 position) {
    u64 a = mix_wide(mix_wide((u64)position + order.draw_keys[0]) ^ order.draw_keys[1]);
    u64 column = __umul64hi(a, (u64)order.n);
    const u64 *entry = (const u64 *)order.table + 2 * column;
    return (i64)(mix_wide(a + order.draw_keys[2]) >> 11 < entry[0] ? column : entry[1]);
}

__device__ __forceinline__ i64 sample_at(const Order &order, i64 position) {
    if (order.kind == FULL) return permuted(order.whole, position, 0);
    if (order.kind == BLOCKS) return in_block(order, position);
    return order.kind == WEIGHTED ? drawn(order, position) : position;
}

// The position of place i of some batches, of which the first begins at `first`; past the end it goes on at the beginning.
__device__ __forceinline__ i64 position_at(const Order &order, i64 first, i64 i) {
    i64 position = first + i;
    if (order.stride != order.batch_size) position += i / order.batch_size * (order.stride - order.batch_size);
    return position < order.n ? position : position % order.n;
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

// The same by the 32 threads of a warp, which look in 32 places at a time: for one sample alone each look takes long.
__device__ __forceinline__ i64 find_span_by_warp(const i64 *span_ids, i64 n_spans, i64 sample) {
#ifdef __CUDACC__
    const int lane = (int)(threadIdx.x & 31);
    i64 lo = 0, hi = n_spans;
    while (hi - lo > 1) {
        const i64 step = (hi - lo + 31) / 32, place = lo + lane * step;
        const u32 before = __ballot_sync(0xffffffffu, place < hi && span_ids[place < hi ? place : lo] <= sample);
        lo += (__popc(before) - 1) * step;
        hi = min(hi, lo + step);
    }
    return lo;
#else
    return find_span(span_ids, n_spans, sample);
#endif
}
