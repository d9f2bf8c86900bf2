/* The inner loops of int8.py and modular.py in one pass over memory, bit for bit what the torch operations there do.
   Blocks of 64 elements; `rows` blocks a call. Compile with -ffp-contract=off: a fused multiply-add would round
   differently. Nothing here allocates, and lengths are checked by the caller. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define N 64
#define PLANE(at, width) ((at) * (N / 8) * (width))

static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float of_bits(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* The step rounded up to bfloat16, its two bytes written. A NaN stays one. */
static inline float put_step(float step, float least, uint8_t *out) {
    uint32_t up = (bits_of(step < least ? least : step) + 0xFFFFu) >> 16;
    out[0] = (uint8_t)up;
    out[1] = (uint8_t)(up >> 8);
    return of_bits(up << 16);
}

static inline float get_step(const uint8_t *in) { return of_bits(((uint32_t)in[0] | (uint32_t)in[1] << 8) << 16); }

/* The largest of 64 positive floats or NaN: their bits are in the same order, and NaN is above all. */
static inline float largest(const uint32_t *magnitude) {
    uint32_t most = 0;
    for (int i = 0; i < N; i++) most = magnitude[i] > most ? magnitude[i] : most;
    return of_bits(most);
}

void int8_encode(const float *x, long rows, long count, const uint8_t *dither, float least, uint8_t *steps,
                 uint8_t *codes) {
    for (long r = 0; r < rows; r++, x += N, dither += N, steps += 2, codes += N, count -= N) {
        uint32_t magnitude[N];
        uint8_t block[N];
        for (int i = 0; i < N; i++) magnitude[i] = bits_of(x[i]) & 0x7FFFFFFFu;
        float inverse = 1.0f / put_step(largest(magnitude) * (float)(1.0 / 127.0), least, steps);
        for (int i = 0; i < N; i++) {
            float drawn = (float)dither[i] * (1.0f / 256.0f) + (128.0f + 1.0f / 512.0f);
            float product = x[i] * inverse;
            block[i] = (uint8_t)(int32_t)(product + drawn);
        }
        memcpy(codes, block, count < N ? (size_t)count : N);
    }
}

void int8_decode(const uint8_t *steps, const uint8_t *codes, long count, float *out) {
    for (; count > 0; count -= N, steps += 2, codes += N, out += N) {
        float step = get_step(steps);
        long here = count < N ? count : N;
        if (here == N)
            for (int i = 0; i < N; i++) out[i] = (float)((int32_t)codes[i] - 128) * step;
        else
            for (long i = 0; i < here; i++) out[i] = (float)((int32_t)codes[i] - 128) * step;
    }
}

/* The checksum of what a block does not send; weights 1, 3 ... 125, 129. */
static inline uint8_t checksum(const int32_t *index, int bits) {
    uint32_t sum = 0;
    for (int i = 0; i < N; i++) sum += (uint32_t)(2 * i + 1) * (uint32_t)(index[i] >> bits);
    return (uint8_t)(sum + 2 * (uint32_t)(index[N - 1] >> bits));
}

/* Planes of 4, 2 and 1 bit, element 0 in the lowest bits (bits.py). Eight codes at a time, held in one word. */
static inline uint64_t eight(const uint8_t *codes) { uint64_t w; memcpy(&w, codes, 8); return w; }

static inline void pack4(const uint8_t *codes, uint8_t *out) {
    for (int i = 0; i < N / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, 2);
        out[i] = (uint8_t)((pair & 15) | (pair >> 4 & 0xF0));
    }
}

static inline void pack2(const uint8_t *codes, int shift, uint8_t *out) {
    for (int i = 0; i < N / 4; i++) {
        uint32_t four;
        memcpy(&four, codes + 4 * i, 4);
        four = four >> shift & 0x03030303u;
        out[i] = (uint8_t)(four | four >> 6 | four >> 12 | four >> 18);
    }
}

static inline void pack1(const uint8_t *codes, int shift, uint8_t *out) {
    for (int i = 0; i < N / 8; i++) {
        uint64_t ones = eight(codes + 8 * i) >> shift & 0x0101010101010101u;
        out[i] = (uint8_t)(ones * 0x0102040810204080u >> 56);
    }
}

static inline void unpack4(const uint8_t *in, uint8_t *codes) {
    for (int i = 0; i < N / 2; i++) {
        uint16_t pair = (uint16_t)((in[i] & 15) | (in[i] & 0xF0) << 4);
        memcpy(codes + 2 * i, &pair, 2);
    }
}

static inline void unpack2(const uint8_t *in, int shift, uint8_t *codes) {
    for (int i = 0; i < N / 4; i++) {
        uint32_t b = in[i], four = (b | b << 6 | b << 12 | b << 18) & 0x03030303u, held;
        memcpy(&held, codes + 4 * i, 4);
        held |= four << shift;
        memcpy(codes + 4 * i, &held, 4);
    }
}

static inline void unpack1(const uint8_t *in, int shift, uint8_t *codes) {
    for (int i = 0; i < N / 8; i++) {
        uint64_t one = in[i] * 0x0101010101010101u & 0x8040201008040201u; /* bit k in byte k */
        one = (one + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        one = one << shift | eight(codes + 8 * i);
        memcpy(codes + 8 * i, &one, 8);
    }
}

static inline void pack_plane(const uint8_t *codes, int shift, int width, uint8_t *out) {
    if (width == 4) pack4(codes, out);
    else if (width == 2) pack2(codes, shift, out);
    else pack1(codes, shift, out);
}

static inline void unpack_plane(const uint8_t *in, int shift, int width, uint8_t *codes) {
    if (shift == 0 && width != 4) memset(codes, 0, N);
    if (width == 4) unpack4(in, codes);
    else if (width == 2) unpack2(in, shift, codes);
    else unpack1(in, shift, codes);
}

static inline __attribute__((always_inline)) void encode_blocks(const float *x, const float *phi, long rows, const uint8_t *dither, float scale,
                                 const float *least, const int bits, const int low, const int high, uint8_t *steps,
                                 uint8_t *sums, uint8_t *plane0, uint8_t *plane1, float *own) {
    for (long r = 0; r < rows; r++, x += N, phi += N, dither += N) {
        uint32_t magnitude[N];
        int32_t index[N];
        uint8_t codes[N];
        for (int i = 0; i < N; i++) magnitude[i] = bits_of(x[i] - phi[i]) & 0x7FFFFFFFu;
        own[r] = put_step(largest(magnitude) * scale, least[r], steps + 2 * r);
        float inverse = 1.0f / own[r];
        for (int i = 0; i < N; i++) {
            float product = x[i] * inverse;
            index[i] = (int32_t)floorf(product + (float)dither[i] * (1.0f / 256.0f));
        }
        for (int i = 0; i < N; i++) codes[i] = (uint8_t)index[i];
        sums[r] = checksum(index, bits);
        pack_plane(codes, 0, low, plane0 + PLANE(r, low));
        if (high) pack_plane(codes, low, high, plane1 + PLANE(r, high));
    }
}

static inline __attribute__((always_inline)) void decode_blocks(const uint8_t *steps, const uint8_t *sums, const uint8_t *plane0,
                                 const uint8_t *plane1, const float *ours, long rows, const uint8_t *dither,
                                 const int bits, const int low, const int high, float *out, float *step_out, uint8_t *wrapped,
                                 float *far) {
    const int32_t half = 1 << (bits + 7), mask = (1 << (bits + 8)) - 1;
    for (long r = 0; r < rows; r++, ours += N, out += N, dither += N) {
        uint8_t codes[N];
        int32_t index[N];
        unpack_plane(plane0 + PLANE(r, low), 0, low, codes);
        if (high) unpack_plane(plane1 + PLANE(r, high), low, high, codes);
        float step = step_out[r] = get_step(steps + 2 * r);
        float inverse = 1.0f / step * 256.0f, scale = step * (-1.0f / 256.0f);
        for (int i = 0; i < N; i++) {
            uint32_t word = (uint32_t)(int32_t)rintf(ours[i] * inverse);
            index[i] = (int32_t)(word - ((uint32_t)codes[i] << 8) + (uint32_t)(dither[i] + half - 128));
        }
        wrapped[r] = checksum(index, bits + 8) != sums[r];
        for (int i = 0; i < N; i++) {
            index[i] = (index[i] & mask) - half;
            float moved = (float)index[i] * scale;
            out[i] = ours[i] + moved;
        }
        int32_t most = 0;
        for (int i = 0; i < N; i++) {
            int32_t apart = index[i] < 0 ? -index[i] : index[i];
            most = apart > most ? apart : most;
        }
        far[r] = wrapped[r] ? step * (float)(1 << bits) : (float)most * step * (1.0f / 256.0f);
    }
}

/* A packet's layout (modular.py), and where dither lies in the pool (dither.py). */
#define CHUNK (1L << 17)
#define TILE (1L << 19)
#define OFFSETS 64

static inline long blocks_of(long elements) { return (elements + N - 1) / N; }
static inline long least_of(long a, long b) { return a < b ? a : b; }
static inline const uint8_t *dither_of(const uint8_t *pool, long turn, long chunk) {
    return pool + (turn + chunk % OFFSETS * 37) % OFFSETS * N;
}

#define EACH(bits, DO) \
    do { \
        if (bits == 3) DO(3, 2, 1); \
        else if (bits == 4) DO(4, 4, 0); \
        else if (bits == 6) DO(6, 4, 2); \
    } while (0)
#define LOW(bits) ((bits) == 3 ? 2 : 4)

/* One tile of `count` elements, the `chunk`-th chunk of the message the first, to `tile`. */
void modular_encode(const float *x, const float *phi, long count, const uint8_t *pool, long turn, long chunk, float scale,
                    const float *least, int bits, uint8_t *tile, float *own) {
    const long tile_rows = blocks_of(count), low = LOW(bits);
    uint8_t *steps = tile, *sums = tile + 2 * tile_rows, *plane0 = sums + tile_rows;
    for (; count > 0; chunk++) {
        const uint8_t *dither = dither_of(pool, turn, chunk);
        const long here = least_of(count, CHUNK), whole = blocks_of(here);
        uint8_t *plane1 = plane0 + PLANE(whole, low);
        long rows = here / N;
#define ENCODE(b, l, h) encode_blocks(x, phi, rows, dither, scale, least, b, l, h, steps, sums, plane0, plane1, own)
        EACH(bits, ENCODE);
        if (rows < whole) { /* the last block, filled up with zeros */
            float last[2][N] = {{0}};
            memcpy(last[0], x + rows * N, (size_t)(here - rows * N) * 4);
            memcpy(last[1], phi + rows * N, (size_t)(here - rows * N) * 4);
            x = last[0], phi = last[1];
            dither += rows * N, least += rows, steps += 2 * rows, sums += rows, own += rows;
            plane0 += PLANE(rows, low), plane1 += PLANE(rows, bits - low), rows = 1;
            EACH(bits, ENCODE);
            return;
        }
        x += here, phi += here, count -= here, plane0 += PLANE(rows, bits);
        least += rows, steps += 2 * rows, sums += rows, own += rows;
    }
}

/* Elements [start, end) of a packet of `parameters`, whose tiles begin at `tiles`. */
void modular_decode(const uint8_t *tiles, long parameters, long start, long end, const float *ours, const uint8_t *pool,
                    long turn, int bits, float *out, float *step_out, uint8_t *wrapped, float *far) {
    const long low = LOW(bits);
    for (long stop; start < end; start = stop) {
        const long base = start / TILE * TILE, chunk = start / CHUNK * CHUNK, row = (start - base) / N;
        stop = least_of(chunk + CHUNK, end);
        const long tile_rows = blocks_of(least_of(TILE, parameters - base)), skipped = (start - chunk) / N;
        const uint8_t *tile = tiles + base / N * (3 + 8 * bits), *dither = dither_of(pool, turn, chunk / CHUNK) + start - chunk;
        const uint8_t *steps = tile + 2 * row, *sums = tile + 2 * tile_rows + row;
        const uint8_t *plane0 = tile + 3 * tile_rows + PLANE((chunk - base) / N, bits);
        const uint8_t *plane1 = plane0 + PLANE(blocks_of(least_of(CHUNK, parameters - chunk)), low) + PLANE(skipped, bits - low);
        plane0 += PLANE(skipped, low);
        long rows = (stop - start) / N;
#define DECODE(b, l, h) \
    decode_blocks(steps, sums, plane0, plane1, ours, rows, dither, b, l, h, out, step_out, wrapped, far)
        EACH(bits, DECODE);
        if (rows * N < stop - start) {
            const long left = stop - start - rows * N;
            float mine[N] = {0}, found[N], *whole = out + rows * N;
            memcpy(mine, ours + rows * N, (size_t)left * 4);
            ours = mine, out = found;
            dither += rows * N, steps += 2 * rows, sums += rows, step_out += rows, wrapped += rows, far += rows;
            plane0 += PLANE(rows, low), plane1 += PLANE(rows, bits - low), rows = 1;
            EACH(bits, DECODE);
            memcpy(whole, found, (size_t)left * 4);
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
