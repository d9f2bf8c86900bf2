/* The inner loops of topk.py, bit for bit what numpy does there: chunks of `n` elements, `k` of each, both powers of two,
   k < n <= 4096. Finite numbers; of others the packet is refused by whoever gets it, whatever it is.

   Thresholds are found bit by bit: how many of an array reach a number is counted by whole vectors, without branches. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define N_MOST 4096
#define FIRST_BIT 16 /* of the threshold for groups: the upper half of a float32 */
#define FEW 128 /* measured: sorting by bytes is faster above */
/* Of the processor's own vectors: wider ones gcc takes apart into single numbers (measured: four times as slow). */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define TOGETHER (LANES == 16 ? 2 : 4) /* vectors that one number is compared with, fetched once for them */
#define WORD 64 /* flags at a time */
#define GUESS 3 /* eighths of k more than k: measured, one chunk of 50 then has too few or too many that reach the guess */
#define ALIKE (1 << 21) /* a quarter of an octave: chunks farther apart tell nothing of each other; guess */

typedef int32_t Lanes __attribute__((vector_size(4 * LANES))); /* gcc and clang, on any processor */

static inline int32_t magnitude_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0x7FFFFFFF;
    return bits < 0x7F800000 ? bits : 0x7F800000; /* what is not a number is as large as infinity */
}

/* The same in the same order, for numbers that are compared only: the sign shifted out. */
static inline uint32_t twice_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits << 1;
}

static inline float float_of(int32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

/* What the next chunk needs, asked of memory little by little while this one is worked on: a quarter in each call for
   `part` of `parts`. Its two buffers may lie anywhere. Only where there is AVX-512: there it was measured to help, and on
   an EPYC that has none to cost an eighth of the time. */
typedef struct { const char *fresh, *kept; long nbytes; } Next;

static inline void ask(const Next *next, long quarter, long part, long parts) {
#ifdef __AVX512F__
    long each = next->nbytes / (4 * parts), from = quarter * (next->nbytes / 4) + part * each;
    for (long at = from; at < from + each; at += 64) {
        __builtin_prefetch(next->fresh + at);
        __builtin_prefetch(next->kept + at, 1);
    }
#else
    (void)next, (void)quarter, (void)part, (void)parts;
#endif
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

static inline int first_of(uint64_t ones) { return __builtin_ctzll(ones); }

/* Which of 64 numbers are `twice` or more, one bit each, the first the lowest. */
static inline uint64_t reach_of(const float *x, uint32_t twice) {
    uint64_t found = 0;
#ifdef __AVX512F__
    for (int i = 0; i < 4; i++) {
        __m512i bits = _mm512_slli_epi32(_mm512_loadu_si512(x + 16 * i), 1);
        found |= (uint64_t)_mm512_cmpge_epu32_mask(bits, _mm512_set1_epi32((int32_t)twice)) << (16 * i);
    }
#elif defined(__AVX2__)
    const __m256i below = _mm256_set1_epi32((int32_t)(twice >> 1) - 1);
    for (int i = 0; i < 8; i++) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(x + 8 * i));
        __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)), below);
        found |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(over)) << (8 * i);
    }
#else
    uint8_t flags[WORD];
    for (int i = 0; i < WORD; i++) flags[i] = twice_of(x[i]) >= twice;
    for (int i = 0; i < WORD / 8; i++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * i, 8);
        found |= (eight * 0x0102040810204080u >> 56) << (8 * i);
    }
#endif
    return found;
}

/* row <- decay row + fresh; meanwhile `words`: which elements reach `least`. Returns how many. */
static long accumulate(const float *fresh, float decay, float *row, long n, int32_t least, const Next *next, uint64_t *words) {
    const uint32_t twice = 2 * (uint32_t)least;
    long count = 0;
    for (long i = 0; i + WORD <= n; i += WORD) {
        ask(next, 0, i / WORD, n / WORD);
        for (long j = i; j < i + WORD; j++) {
            float kept = row[j] * decay;
            row[j] = kept + fresh[j];
        }
        words[i / WORD] = reach_of(row + i, twice);
        count += __builtin_popcountll(words[i / WORD]);
    }
    for (long j = n / WORD * WORD; j < n; j++) {
        float kept = row[j] * decay;
        row[j] = kept + fresh[j];
    }
    return n % WORD ? 0 : count;
}

/* The elements that `words` name, ascending by place: `magnitudes` and `places`. */
static long named(const float *row, long n, const uint64_t *words, const Next *next, int32_t *magnitudes, uint16_t *places) {
    long count = 0;
    for (long i = 0; i < n; i += WORD) {
        uint64_t ones = words[i / WORD];
        ask(next, 1, i / WORD, n / WORD);
        /* Two of each word at once, whether there are so many or not: what branches on chance waits. */
        const long some = __builtin_popcountll(ones);
        uint64_t rest = ones & (ones - 1);
        places[count] = (uint16_t)(i + first_of(ones | (uint64_t)1 << 63));
        places[count + 1] = (uint16_t)(i + first_of(rest | (uint64_t)1 << 63));
        for (long j = 2; j < some; j++) {
            rest &= rest - 1;
            places[count + j] = (uint16_t)(i + first_of(rest));
        }
        count += some;
    }
    for (long i = 0; i < count; i++) magnitudes[i] = magnitude_of(row[places[i]]);
    return count;
}

/* Those elements of a chunk, ascending by place, that reach some number which at least k do: `magnitudes` and `places`.
   Groups of every step-th element whose largest is smaller are never looked into (topk.py). */
static long searched(const float *row, long n, int32_t k, int32_t *magnitudes, uint16_t *places) {
    int32_t tops[N_MOST];
    uint16_t groups[N_MOST + 1];
    long layers = 1, step = n, chosen = 0, count = 0;
    while (4 * layers * layers * k <= n) { layers *= 2; step /= 2; }
    for (long i = 0; i < step; i++) tops[i] = magnitude_of(row[i]);
    for (long layer = 1; layer < layers; layer++)
        for (long i = 0; i < step; i++) {
            int32_t value = magnitude_of(row[layer * step + i]);
            tops[i] = tops[i] > value ? tops[i] : value;
        }
    const int32_t least = reached(tops, step, k, FIRST_BIT);
    for (long i = 0; i < step; i++) {
        groups[chosen] = (uint16_t)i;
        chosen += tops[i] >= least;
    }
    for (long layer = 0; layer < layers; layer++)
        for (long i = 0; i < chosen; i++) {
            long place = layer * step + groups[i];
            places[count] = (uint16_t)place;
            count += magnitude_of(row[place]) >= least;
        }
    for (long i = 0; i < count; i++) magnitudes[i] = magnitude_of(row[places[i]]);
    return count;
}

/* `order`: the numbers of `x` [k], ascending by magnitude, of equal ones the first. By counting who is smaller. */
static void order_few(const int32_t *x, long k, const Next *next, uint16_t *order) {
    int32_t smaller[FEW + TOGETHER * LANES];
    uint16_t seen[FEW] = {0};
    const long each = TOGETHER * LANES;
    for (long j = 0; j < k; j += each) { /* x is readable, whatever it holds, up to a multiple of `each` */
        Lanes mine[TOGETHER], count[TOGETHER] = {{0}};
        ask(next, 3, j / each, (k + each - 1) / each);
        memcpy(mine, x + j, sizeof mine);
        for (long i = 0; i < k; i++)
            for (int v = 0; v < TOGETHER; v++) count[v] -= mine[v] > x[i];
        memcpy(smaller + j, count, sizeof count);
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
    double sums[N_MOST], gain[N_MOST], sum = 0.0;
    for (long j = 0; j < k; j++) sums[j] = sum += (double)float_of(x[order[j]]);
    for (int32_t j = 0; j < k - 1; j++) {
        double above = sum - sums[j];
        gain[j] = sums[j] * sums[j] / (double)(j + 1) + above * above / (double)(k - 1 - j);
    }
    int64_t bits, best = -1; /* positive doubles are in the order of their bits */
    for (long j = 0; j < k - 1; j++) {
        memcpy(&bits, gain + j, 8);
        best = bits > best ? bits : best;
    }
    long split = 0;
    for (long j = k - 2; j >= 0; j--) { /* of equal ones the first; none where all are not numbers */
        memcpy(&bits, gain + j, 8);
        split = bits == best ? j : split;
    }
    means[0] = (float)(sums[split] / (double)(split + 1));
    means[1] = (float)((sum - sums[split]) / (double)(k - 1 - split));
    return split;
}

static int log2_of(long x) { return __builtin_ctzl((unsigned long)x); }

static long chunk_nbytes(long n, long k) { return (k * log2_of(n / k) + 7) / 8 + (2 * k + 7) / 8 + 2 * ((k + 7) / 8) + 4; }

/* One chunk of `row`, `count` of whose elements `words` name; returns what more than k of a chunk like it would reach. */
static int32_t encode_chunk(float *row, long n, long k, long count, const uint64_t *words, int32_t guess,
                            const Next *next, uint8_t *out) {
    int32_t near[N_MOST + TOGETHER * LANES];
    uint16_t where[N_MOST + 2], order[N_MOST + 1], places[N_MOST + 1];
    uint8_t part[N_MOST], greater[N_MOST + 1];
    float means[2];
    const int low_bits = log2_of(n / k);
    uint8_t *ones = out + (k * low_bits + 7) / 8, *negative = ones + (2 * k + 7) / 8, *upper = negative + (k + 7) / 8;
    if (count < k || count > 2 * k) count = searched(row, n, (int32_t)k, near, where);
    else named(row, n, words, next, near, where);
    if (count <= FEW) order_few(near, count, next, order);
    else order_many(near, count, order);
    /* The k last are largest; of those equal to the least of them, the first in the chunk are. */
    const int32_t threshold = near[order[count - k]];
    /* As far below it as the one some way up lies above; of many chunks alike a running mean, for one alone is chance. */
    const int32_t beyond = threshold - (near[order[count - k + k * GUESS / 8]] - threshold);
    const int64_t apart = (int64_t)beyond - guess;
    guess = apart < ALIKE && apart > -ALIKE ? guess + (int32_t)apart / 8 : beyond;
    guess = guess > 0 ? guess : 0x7F800000;
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
    return guess;
}

/* rows <- decay rows + fresh, chunk by chunk, then the packets of that, and what they say taken from it. */
void topk_encode(const float *fresh, float decay, float *rows, long count, long n, long k, uint8_t *out) {
    int32_t guess = 0x7F800000;
    uint64_t words[N_MOST / WORD];
    for (long nbytes = chunk_nbytes(n, k); count > 0; count--, fresh += n, rows += n, out += nbytes) {
        Next next = {(const char *)(fresh + n), (const char *)(rows + n), count > 1 ? n * 4 : 0};
        long found = accumulate(fresh, decay, rows, n, guess, &next, words);
        guess = encode_chunk(rows, n, k, found, words, guess, &next, out);
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
