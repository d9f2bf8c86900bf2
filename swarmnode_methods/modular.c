/* The inner loops of modular.py in one pass over memory, bit for bit what the torch operations there do. `rows` blocks a
   call. Nothing here allocates, and lengths are checked by the caller. */
#include "block.h"

#define WEIGHT(i) (2 * (i) + 1 + 2 * ((i) == N - 1)) /* of the checksum: 1, 3 ... 125, 129 */
#define WEIGHT_0(i) WEIGHT(i), 0
#define EIGHT(DO, i) DO(i), DO(i + 1), DO(i + 2), DO(i + 3), DO(i + 4), DO(i + 5), DO(i + 6), DO(i + 7)
#define ALL(DO) \
    EIGHT(DO, 0), EIGHT(DO, 8), EIGHT(DO, 16), EIGHT(DO, 24), EIGHT(DO, 32), EIGHT(DO, 40), EIGHT(DO, 48), EIGHT(DO, 56)

/* The checksum of a block's Q mod 2^16: of what is not sent. */
static inline uint8_t checksum(const uint16_t *words, int bits) {
    uint16_t sum = (uint16_t)(2 * words[N - 1]);
    for (int i = 0; i < N; i++) sum = (uint16_t)(sum + (uint16_t)((uint16_t)(2 * i + 1) * words[i]));
    return (uint8_t)(sum >> bits);
}

/* Packed codes (modular_kernels.py), `n` at a time, which lie in one part: a block in a whole chunk, or else 8. `at` is
   the element of the chunk where they begin, of `count`; blocks of a chunk are packed in ascending order, so parts overwrite first. */
static inline __attribute__((always_inline)) void pack_six(const uint8_t *six, const int n, long at, long count, int fresh, uint8_t *out) {
    const long part = count / 4;
    uint8_t *to = out + at;
    if (at >= 3 * part)
        for (int plane = 0; plane < 3; plane++) {
            to = out + plane * part + at - 3 * part;
            for (int i = 0; i < n; i++) to[i] = (uint8_t)(to[i] | (six[i] << (6 - 2 * plane) & 0xC0));
        }
    else if (fresh) memcpy(to, six, (size_t)n);
    else
        for (int i = 0; i < n; i++) to[i] |= six[i];
}

static inline __attribute__((always_inline)) void unpack_six(const uint8_t *in, const int n, long at, long count, uint8_t *six) {
    const long part = count / 4;
    const uint8_t *from = in + (at < 3 * part ? at : at - 3 * part);
    if (at < 3 * part)
        for (int i = 0; i < n; i++) six[i] = from[i] & 0x3F;
    else
        for (int i = 0; i < n; i++)
            six[i] = (uint8_t)(from[i] >> 6 | (from[part + i] >> 4 & 0x0C) | (from[2 * part + i] >> 2 & 0x30));
}

static inline __attribute__((always_inline)) void pack_run(const uint8_t *codes, const int n, long at, long whole, const int bits, uint8_t *out) {
    const int high = bits != 6 && at >= whole / 2, shift = high ? bits : 0;
    const long inside = high ? at - whole / 2 : at;
    uint8_t held[N];
    for (int i = 0; i < n; i++) held[i] = (uint8_t)((codes[i] & ((1 << bits) - 1)) << shift);
    if (bits != 4) pack_six(held, n, inside, bits == 6 ? whole : whole / 2, !high, out);
    else if (!high) memcpy(out + inside, held, (size_t)n);
    else
        for (int i = 0; i < n; i++) out[inside + i] |= held[i];
}

static inline __attribute__((always_inline)) void unpack_run(const uint8_t *in, const int n, long at, long whole, const int bits, uint8_t *codes) {
    const int high = bits != 6 && at >= whole / 2;
    const long inside = high ? at - whole / 2 : at;
    uint8_t held[N];
    const uint8_t *from = bits == 4 ? in + inside : held;
    if (bits != 4) unpack_six(in, n, inside, bits == 6 ? whole : whole / 2, held);
    if (high)
        for (int i = 0; i < n; i++) codes[i] = (uint8_t)(from[i] >> bits & ((1 << bits) - 1));
    else
        for (int i = 0; i < n; i++) codes[i] = (uint8_t)(from[i] & ((1 << bits) - 1));
}

/* The block that begins at element `first` of a chunk of `whole`. */
static inline __attribute__((always_inline)) void pack(const uint8_t *codes, long first, long whole, const int bits, uint8_t *out) {
    if (whole % (8 * N) == 0) pack_run(codes, N, first, whole, bits, out);
    else
        for (int i = 0; i < N; i += 8) pack_run(codes + i, 8, first + i, whole, bits, out);
}

static inline __attribute__((always_inline)) void unpack(const uint8_t *in, long first, long whole, const int bits, uint8_t *codes) {
    if (whole % (8 * N) == 0) unpack_run(in, N, first, whole, bits, codes);
    else
        for (int i = 0; i < N; i += 8) unpack_run(in, 8, first + i, whole, bits, codes + i);
}

#define CENTRE 98304.0f
#define DITHER(byte) ((float)((byte) & 0xFE)) /* in 256ths: what float32 keeps beside CENTRE */
#define NEAR 0x1p-64f

static inline __attribute__((always_inline)) void encode_blocks(const float *x, const float *phi, long rows, const uint8_t *dither, float scale,
                                 const int bits, long first, long whole, uint8_t *steps,
                                 uint8_t *sums, uint8_t *packed, float *own) {
    for (long r = 0; r < rows; r++, x += N, phi += N, dither += N, first += N) {
        uint32_t magnitude[N];
        uint16_t words[N];
        uint8_t codes[N];
        for (int i = 0; i < N; i++) magnitude[i] = bits_of(x[i] - phi[i]) & 0x7FFFFFFFu;
        const float apart = largest(magnitude), near = NEAR * (apart - 0.5f * NEAR), nearer = 0.5f * apart * apart;
        own[r] = put_step((apart >= NEAR ? near : nearer) * (scale / NEAR), own[r], steps + 2 * r);
        float inverse = 1.0f / own[r];
        for (int i = 0; i < N; i++)
            words[i] = (uint16_t)(int32_t)FUSED(x[i], inverse, FUSED(DITHER(dither[i]), 1.0f / 256.0f, CENTRE));
        for (int i = 0; i < N; i++) codes[i] = (uint8_t)words[i];
        sums[r] = checksum(words, bits);
        pack(codes, first, whole, bits, packed);
    }
}

/* Added to a float below 2^22 and taken away again: the nearest whole number, which the low bits of the sum tell. */
#define WHOLE 0x1.8p23f
#define AHEAD 2048 /* bytes; measured: 0.53 ns an element of decoding, 0.60 without; streaming stores: 0.66 */

static const int16_t WEIGHTS[N] = {ALL(WEIGHT)};
static const int16_t LOW_WEIGHTS[2 * N] = {ALL(WEIGHT_0)}; /* of the lower halves of 64 words */

/* In 256ths of a step: how far our theta lies above the value that Q = code stands for; less the nearest multiple of the
   range that is how far it lies above the value decoded. */
static inline __attribute__((always_inline)) void decode_blocks(const uint8_t *steps, const uint8_t *sums, const uint8_t *packed,
                                 long first, long whole, const float *ours, long rows, const uint8_t *dither,
                                 const int bits, float *out, float *step_out, uint8_t *wrapped, float *far) {
    const float ranges = (float)(1 << bits), turn = WHOLE * 256.0f * ranges;
    for (long r = 0; r < rows; r++, ours += N, out += N, dither += N, first += N) {
        uint8_t codes[N];
        int16_t shift[N], turns[2 * N];
        float above[N];
        for (int i = 0; i < N; i += 16) { /* by number: behind the end, where that is nothing's */
            __builtin_prefetch((const void *)((uintptr_t)(ours + i) + AHEAD));
            __builtin_prefetch((const void *)((uintptr_t)(out + i) + AHEAD), 1);
        }
        unpack(packed, first, whole, bits, codes);
        for (int i = 0; i < N; i++) shift[i] = (int16_t)((dither[i] | 1) - 128 - 256 * codes[i]);
        const float step = get_step(steps + 2 * r), inverse = 256.0f / step, fine = step * (1.0f / 256.0f);
        uint32_t most = 0, sum = 0;
        for (int i = 0; i < N; i++) {
            const float all = FUSED(ours[i], inverse, (float)shift[i]), turned = all + turn;
            above[i] = all - (turned - turn);
            memcpy(turns + 2 * i, &turned, 4);
            const uint32_t magnitude = bits_of(above[i]) & 0x7FFFFFFFu;
            most = magnitude > most ? magnitude : most;
        }
        for (int i = 0; i < 2 * N; i++) sum += (uint32_t)(turns[i] * LOW_WEIGHTS[i]);
        sum <<= bits;
        for (int i = 0; i < N; i++) sum += (uint32_t)(codes[i] * WEIGHTS[i]);
        step_out[r] = step;
        wrapped[r] = (uint8_t)(sum >> bits) != sums[r];
        far[r] = wrapped[r] ? step * ranges : of_bits(most) * fine;
        for (int i = 0; i < N; i++) out[i] = FUSED(above[i], -fine, ours[i]);
    }
}

/* A packet's layout (modular.py), and where dither lies in the pool (tiles.py). */
#define CHUNK (1L << 18)
#define TILE (1L << 19)
#define OFFSETS 64
#define PACKED(count, bits) ((count) / 8 * (bits))

static inline long blocks_of(long elements) { return (elements + N - 1) / N; }
static inline long least_of(long a, long b) { return a < b ? a : b; }
static inline const uint8_t *dither_of(const uint8_t *pool, long turn, long chunk) {
    return pool + (turn + chunk % OFFSETS * 37) % OFFSETS * N;
}

#define EACH(bits, DO) \
    do { \
        if (bits == 3) DO(3); \
        else if (bits == 4) DO(4); \
        else if (bits == 6) DO(6); \
    } while (0)

/* One tile of `count` elements, the `chunk`-th chunk of the message the first, to `tile`. Steps are at least what `own`
   holds by block, which becomes them. */
void modular_encode(const float *x, const float *phi, long count, const uint8_t *pool, long turn, long chunk, float scale,
                    int bits, uint8_t *tile, float *own) {
    const long tile_rows = blocks_of(count);
    uint8_t *steps = tile, *sums = tile + 2 * tile_rows, *packed = sums + tile_rows;
    for (; count > 0; chunk++) {
        const uint8_t *dither = dither_of(pool, turn, chunk);
        const long here = least_of(count, CHUNK), whole = blocks_of(here) * N;
        long rows = here / N, first = 0;
#define ENCODE(b) encode_blocks(x, phi, rows, dither, scale, b, first, whole, steps, sums, packed, own)
        EACH(bits, ENCODE);
        if (rows * N < whole) { /* the last block, filled up with zeros */
            float last[2][N] = {{0}};
            first = rows * N;
            memcpy(last[0], x + first, (size_t)(here - first) * 4);
            memcpy(last[1], phi + first, (size_t)(here - first) * 4);
            x = last[0], phi = last[1];
            dither += first, steps += 2 * rows, sums += rows, own += rows, rows = 1;
            EACH(bits, ENCODE);
            return;
        }
        x += here, phi += here, count -= here, packed += PACKED(whole, bits);
        steps += 2 * rows, sums += rows, own += rows;
    }
}

/* Elements [start, end) of a packet of `parameters`, whose tiles begin at `tiles`. */
void modular_decode(const uint8_t *tiles, long parameters, long start, long end, const float *ours, const uint8_t *pool,
                    long turn, int bits, float *out, float *step_out, uint8_t *wrapped, float *far) {
    for (long stop; start < end; start = stop) {
        const long base = start / TILE * TILE, chunk = start / CHUNK * CHUNK, row = (start - base) / N;
        stop = least_of(chunk + CHUNK, end);
        const long tile_rows = blocks_of(least_of(TILE, parameters - base));
        const long whole = blocks_of(least_of(CHUNK, parameters - chunk)) * N;
        const uint8_t *tile = tiles + base / N * (3 + 8 * bits), *dither = dither_of(pool, turn, chunk / CHUNK) + start - chunk;
        const uint8_t *steps = tile + 2 * row, *sums = tile + 2 * tile_rows + row;
        const uint8_t *packed = tile + 3 * tile_rows + PACKED(chunk - base, bits);
        long rows = (stop - start) / N, first = start - chunk;
#define DECODE(b) \
    decode_blocks(steps, sums, packed, first, whole, ours, rows, dither, b, out, step_out, wrapped, far)
        EACH(bits, DECODE);
        if (rows * N < stop - start) {
            const long left = stop - start - rows * N;
            float mine[N] = {0}, found[N], *last = out + rows * N;
            memcpy(mine, ours + rows * N, (size_t)left * 4);
            ours = mine, out = found, first += rows * N;
            dither += rows * N, steps += 2 * rows, sums += rows, step_out += rows, wrapped += rows, far += rows, rows = 1;
            EACH(bits, DECODE);
            memcpy(last, found, (size_t)left * 4);
            return;
        }
        ours += stop - start, out += stop - start, step_out += rows, wrapped += rows, far += rows;
    }
}

/* What one packet tells about the spread, block by block: `memory` is at least `far`; returns into `told` how many blocks
   wrapped, and the sum of what share of the range of our own step each lies off, in 65536ths (integers: in any order). */
void modular_note(const float *far, const uint8_t *wrapped, const float *own, long rows, int bits, float *memory,
                  int64_t *told) {
    const float scale = 1.0f / (float)(1 << bits);
    int64_t shares = 0, count = 0;
    for (long r = 0; r < rows; r++) {
        float share = far[r] / own[r] * scale;
        memory[r] = memory[r] < far[r] ? far[r] : memory[r];
        shares += (int32_t)((share < 1.0f ? share : 1.0f) * 65536.0f);
        count += wrapped[r];
    }
    told[0] = count;
    told[1] = shares;
}
