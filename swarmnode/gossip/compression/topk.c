/* The inner loops of topk.py, bit for bit what numpy does there: chunks of `n` elements, `k` of each, both powers of two,
   k < n <= 4096. Finite numbers; of others the packet is refused by whoever gets it, whatever it is.

   Thresholds are found bit by bit: how many of an array reach a number is counted by whole vectors, without branches. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define N_MOST 4096
#define FIRST_BIT 16 /* of the threshold for groups: the upper half of a float32 */
#define FEW 128 /* measured: sorting by bytes is faster above */
#define LANES 16
#define TRIES 8 /* to guess a threshold from the last one */

typedef int32_t Lanes __attribute__((vector_size(4 * LANES))); /* gcc and clang, on any processor */

static inline int32_t magnitude_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0x7FFFFFFF;
    return bits < 0x7F800000 ? bits : 0x7F800000; /* what is not a number is as large as infinity */
}

static inline float float_of(int32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

/* What the next chunk needs, asked of memory little by little while this one is worked on: a quarter in each call for
   `part` of `parts`. Its two buffers may lie anywhere. */
typedef struct { const char *fresh, *kept; long nbytes; } Next;

static inline void ask(const Next *next, long quarter, long part, long parts) {
    long each = next->nbytes / (4 * parts), from = quarter * (next->nbytes / 4) + part * each;
    for (long at = from; at < from + each; at += 64) {
        __builtin_prefetch(next->fresh + at);
        __builtin_prefetch(next->kept + at, 1);
    }
}

static inline int32_t reaching(const int32_t *x, long n, int32_t threshold) {
    int32_t count = 0;
    for (long i = 0; i < n; i++) count += x[i] >= threshold;
    return count;
}

/* The greatest multiple of 2^low that at least k of the n `x` reach. */
static int32_t reached(const int32_t *x, long n, int32_t k, int low) {
    int32_t found = 0;
    for (int bit = 30; bit >= low; bit--) {
        int32_t higher = found | (int32_t)1 << bit;
        if (reaching(x, n, higher) >= k) found = higher;
    }
    return found;
}

/* Those elements of a chunk, ascending by place, that reach some number which at least k do: `magnitudes` and `places`.
   Groups of every step-th element whose largest is smaller are never looked into (topk.py, `largest`). A `guess` near the
   k-th largest, from the chunk before, saves time: it changes how many are returned, never which k are largest. */
static long candidates(const float *row, long n, int32_t k, int32_t guess, const Next *next, int32_t *magnitudes,
                       uint16_t *places) {
    int32_t tops[N_MOST];
    uint16_t groups[N_MOST];
    long layers = 1, step = n, chosen = 0, count = 0;
    while (4 * layers * layers * k <= n) { layers *= 2; step /= 2; }
    for (long i = 0; i < step; i++) tops[i] = magnitude_of(row[i]);
    for (long layer = 1; layer < layers; layer++) {
        ask(next, 0, layer - 1, layers - 1);
        for (long i = 0; i < step; i++) {
            int32_t value = magnitude_of(row[layer * step + i]);
            tops[i] = tops[i] > value ? tops[i] : value;
        }
    }
    int32_t least = guess, found = 0;
    for (int tries = 0; tries < TRIES && found < k; tries++) {
        least -= least >> 13; /* some 1 % of a float32 */
        found = reaching(tops, step, least);
    }
    if (found < k || found > 2 * k) least = reached(tops, step, k, FIRST_BIT);
    for (long part = 0; part < 8; part++) {
        ask(next, 1, part, 8);
        for (long i = part * step / 8; i < (part + 1) * step / 8; i++) {
            groups[chosen] = (uint16_t)i;
            chosen += tops[i] >= least;
        }
    }
    for (long layer = 0; layer < layers; layer++) {
        ask(next, 2, layer, layers);
        for (long i = 0; i < chosen; i++) {
            long place = layer * step + groups[i];
            places[count] = (uint16_t)place;
            count += magnitude_of(row[place]) >= least;
        }
    }
    for (long i = 0; i < count; i++) magnitudes[i] = magnitude_of(row[places[i]]);
    return count;
}

/* `order`: the numbers of `x` [k], ascending by magnitude, of equal ones the first. By counting who is smaller. */
static void order_few(const int32_t *x, long k, const Next *next, uint16_t *order) {
    int32_t smaller[FEW];
    uint16_t seen[FEW] = {0};
    for (long j = 0; j < k; j += LANES) { /* x is readable, whatever it holds, up to a multiple of LANES */
        Lanes mine, count = {0};
        ask(next, 3, j / LANES, (k + LANES - 1) / LANES);
        memcpy(&mine, x + j, sizeof mine);
        for (long i = 0; i < k; i++) count -= mine > x[i];
        memcpy(smaller + j, &count, sizeof count);
    }
    for (long j = 0; j < k; j++) order[smaller[j] + seen[smaller[j]]++] = (uint16_t)j;
}

/* The same for many: least significant byte first. */
static void order_many(const int32_t *x, long k, uint16_t *order) {
    uint16_t other[N_MOST];
    for (long j = 0; j < k; j++) order[j] = (uint16_t)j;
    for (int shift = 0; shift < 32; shift += 8) {
        uint16_t at[257] = {0};
        for (long j = 0; j < k; j++) at[(x[j] >> shift & 255) + 1]++;
        if (at[(x[0] >> shift & 255) + 1] == k) continue; /* all alike in this byte */
        for (int byte = 0; byte < 256; byte++) at[byte + 1] = (uint16_t)(at[byte + 1] + at[byte]);
        for (long j = 0; j < k; j++) other[at[x[order[j]] >> shift & 255]++] = order[j];
        memcpy(order, other, (size_t)k * 2);
    }
}

/* Of a positive float32, at most 65504: the nearest float16, ties to even. */
static uint16_t half_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (bits > 0x7F800000u) return 0x7E00;
    if (x >= 0x1p-14f) {
        bits -= (127u - 15u) << 23;
        return (uint16_t)((bits + 0xFFFu + (bits >> 13 & 1)) >> 13);
    }
    return (uint16_t)(int32_t)rintf(x * 0x1p24f); /* subnormal: in units of 2^-24 */
}

static float float_of_half(uint16_t half) {
    if (half < 0x0400) return (float)half * 0x1p-24f;
    return float_of((int32_t)(((uint32_t)half << 13) + ((127u - 15u) << 23)));
}

/* The exact two-means of the k > 1 magnitudes that `order` names ascending; returns the number of the last smaller one. */
static long two_means(const int32_t *x, const uint16_t *order, int32_t k, float *means) {
    double sums[N_MOST], gain[N_MOST], sum = 0.0, best = -1.0;
    for (long j = 0; j < k; j++) sums[j] = sum += (double)float_of(x[order[j]]);
    for (int32_t j = 0; j < k - 1; j++) {
        double above = sum - sums[j];
        gain[j] = sums[j] * sums[j] / (double)(j + 1) + above * above / (double)(k - 1 - j);
    }
    long split = 0;
    for (long j = 0; j < k - 1; j++) {
        split = gain[j] > best ? j : split;
        best = gain[j] > best ? gain[j] : best;
    }
    means[0] = (float)(sums[split] / (double)(split + 1));
    means[1] = (float)((sum - sums[split]) / (double)(k - 1 - split));
    return split;
}

static int log2_of(long x) { return __builtin_ctzl((unsigned long)x); }

static long chunk_nbytes(long n, long k) { return (k * log2_of(n / k) + 7) / 8 + (2 * k + 7) / 8 + 2 * ((k + 7) / 8) + 4; }

static int32_t encode_chunk(float *row, long n, long k, int32_t guess, const Next *next, uint8_t *out) {
    int32_t near[N_MOST + LANES];
    uint16_t where[N_MOST + 1], order[N_MOST + 1], places[N_MOST + 1];
    uint8_t part[N_MOST], greater[N_MOST + 1];
    float means[2];
    const int low_bits = log2_of(n / k);
    uint8_t *ones = out + (k * low_bits + 7) / 8, *negative = ones + (2 * k + 7) / 8, *upper = negative + (k + 7) / 8;
    long count = candidates(row, n, (int32_t)k, guess, next, near, where);
    if (count <= FEW) order_few(near, count, next, order);
    else order_many(near, count, order);
    /* The k last are largest; of those equal to the least of them, the first in the chunk are. */
    const int32_t threshold = near[order[count - k]];
    long first = count - k, last = count - k;
    while (first > 0 && near[order[first - 1]] == threshold) first--;
    while (last + 1 < count && near[order[last + 1]] == threshold) last++;
    if (first < count - k) memmove(order + count - k, order + first, (size_t)(last - (count - k) + 1) * 2);
    const uint16_t *taken = order + count - k;
    long split = two_means(near, taken, (int32_t)k, means), at = 0;
    memset(part, 2, (size_t)count);
    for (long j = 0; j < k; j++) part[taken[j]] = j > split;
    for (long i = 0; i < count; i++) {
        places[at] = where[i];
        greater[at] = part[i];
        at += part[i] < 2;
    }
    memset(out, 0, (size_t)chunk_nbytes(n, k));
    uint16_t halves[2];
    for (int i = 0; i < 2; i++) {
        halves[i] = half_of(means[i] > 65504.0f ? 65504.0f : means[i]);
        means[i] = float_of_half(halves[i]);
        upper[(k + 7) / 8 + 2 * i] = (uint8_t)halves[i];
        upper[(k + 7) / 8 + 2 * i + 1] = (uint8_t)(halves[i] >> 8);
    }
    const float signed_means[4] = {means[0], means[1], -means[0], -means[1]};
    uint64_t held = 0;
    int fill = 0;
    uint8_t *low = out;
    for (long j = 0; j < k; j++) {
        held |= (uint64_t)(places[j] & ((1 << low_bits) - 1)) << fill;
        for (fill += low_bits; fill >= 8; fill -= 8, held >>= 8) *low++ = (uint8_t)held;
        long one = (places[j] >> low_bits) + j;
        ones[one / 8] = (uint8_t)(ones[one / 8] | 1 << one % 8);
        float value = row[places[j]];
        int below = value < 0.0f;
        negative[j / 8] = (uint8_t)(negative[j / 8] | below << j % 8);
        upper[j / 8] = (uint8_t)(upper[j / 8] | greater[j] << j % 8);
        row[places[j]] = value - signed_means[2 * below + greater[j]];
    }
    if (fill) *low = (uint8_t)held;
    return threshold;
}

/* rows <- decay rows + fresh, chunk by chunk, then the packets of that, and what they say taken from it. */
void topk_encode(const float *fresh, float decay, float *rows, long count, long n, long k, uint8_t *out) {
    int32_t guess = 0;
    for (long nbytes = chunk_nbytes(n, k); count > 0; count--, fresh += n, rows += n, out += nbytes) {
        Next next = {(const char *)(fresh + n), (const char *)(rows + n), count > 1 ? n * 4 : 0};
        for (long i = 0; i < n; i++) {
            float kept = rows[i] * decay;
            rows[i] = kept + fresh[i];
        }
        guess = encode_chunk(rows, n, k, guess, &next, out);
    }
}

/* Of inspected packets. */
void topk_decode(const uint8_t *in, long count, long n, long k, float *out) {
    const int low_bits = log2_of(n / k);
    const long nbytes = chunk_nbytes(n, k);
    for (; count > 0; count--, in += nbytes, out += n) {
        const uint8_t *ones = in + (k * low_bits + 7) / 8, *negative = ones + (2 * k + 7) / 8, *upper = negative + (k + 7) / 8;
        const uint8_t *tail = upper + (k + 7) / 8, *low = in;
        float means[4];
        for (int i = 0; i < 2; i++) {
            means[i] = float_of_half((uint16_t)(tail[2 * i] | tail[2 * i + 1] << 8));
            means[2 + i] = -means[i];
        }
        memset(out, 0, (size_t)n * 4);
        uint64_t held = 0;
        int fill = 0;
        long j = 0;
        for (long byte = 0; byte < (2 * k + 7) / 8; byte++)
            for (uint32_t left = ones[byte]; left && j < k; left &= left - 1, j++) {
                for (; fill < low_bits; fill += 8) held |= (uint64_t)*low++ << fill;
                long place = (8 * byte + __builtin_ctz(left) - j) << low_bits | (long)(held & ((1u << low_bits) - 1));
                held >>= low_bits;
                fill -= low_bits;
                out[place & (n - 1)] = means[(upper[j / 8] >> j % 8 & 1) + 2 * (negative[j / 8] >> j % 8 & 1)];
            }
    }
}
