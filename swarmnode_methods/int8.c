/* The inner loops of int8.py in one pass over memory, bit for bit what the torch operations there do. `rows` blocks a
   call. Nothing here allocates, and lengths are checked by the caller. */
#include "block.h"

#define TILE (1L << 19)
#define TOGETHER 64 /* blocks of each packet that are multiplied while they are in the first cache */

void int8_encode(const float *x, long rows, long count, const uint8_t *dither, float least, uint8_t *steps,
                 uint8_t *codes) {
    for (long r = 0; r < rows; r++, x += N, dither += N, steps += 2, codes += N, count -= N) {
        uint32_t magnitude[N];
        uint8_t block[N];
        for (int i = 0; i < N; i++) magnitude[i] = bits_of(x[i]) & 0x7FFFFFFFu;
        float inverse = 1.0f / put_step(largest(magnitude) * (float)(1.0 / 127.0), least, steps);
        for (int i = 0; i < N; i++) {
            float drawn = (float)dither[i] * (1.0f / 256.0f) + (128.0f + 1.0f / 512.0f);
            block[i] = (uint8_t)(int32_t)FUSED(x[i], inverse, drawn);
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

static inline int32_t dot(const uint8_t *a, const uint8_t *b, long count) {
    int32_t sum = 0;
    if (count >= N)
        for (int i = 0; i < N; i++) sum += ((int32_t)a[i] - 128) * ((int32_t)b[i] - 128);
    else
        for (long i = 0; i < count; i++) sum += ((int32_t)a[i] - 128) * ((int32_t)b[i] - 128);
    return sum;
}

/* The inner product of each two of `many` packets of `parameters` elements, into out [many, many]. Of a block it is
   exact, and blocks are added in order: the same bits everywhere. */
void int8_products(const uint8_t *const *packets, long many, long parameters, double *out) {
    memset(out, 0, (size_t)(many * many) * sizeof(double));
    for (long tile = 0, at = 0; tile < parameters; tile += TILE) {
        const long here = parameters - tile < TILE ? parameters - tile : TILE, rows = (here + N - 1) / N;
        for (long first = 0; first < rows; first += TOGETHER) {
            const long last = first + TOGETHER < rows ? first + TOGETHER : rows;
            for (long i = 0; i < many; i++)
                for (long j = i; j < many; j++) {
                    const uint8_t *a = packets[i] + at, *b = packets[j] + at;
                    double sum = out[i * many + j];
                    for (long r = first; r < last; r++) {
                        const double steps = (double)get_step(a + 2 * r) * (double)get_step(b + 2 * r);
                        sum += (double)dot(a + 2 * rows + r * N, b + 2 * rows + r * N, here - r * N) * steps;
                    }
                    out[i * many + j] = sum;
                }
        }
        at += 2 * rows + here;
    }
    for (long i = 0; i < many; i++)
        for (long j = 0; j < i; j++) out[i * many + j] = out[j * many + i];
}

/* The sum of `many` packets of `parameters` elements, each times its share, into out [parameters]. */
void int8_sum(const uint8_t *const *packets, const float *shares, long many, long parameters, float *out) {
    for (long tile = 0, at = 0; tile < parameters; tile += TILE) {
        const long here = parameters - tile < TILE ? parameters - tile : TILE, rows = (here + N - 1) / N;
        for (long r = 0; r < rows; r++) {
            const long count = here - r * N < N ? here - r * N : N;
            float sum[N] = {0};
            for (long j = 0; j < many; j++) {
                const uint8_t *codes = packets[j] + at + 2 * rows + r * N;
                const float step = get_step(packets[j] + at + 2 * r), share = shares[j];
                if (count == N)
                    for (int i = 0; i < N; i++) sum[i] += (float)((int32_t)codes[i] - 128) * step * share;
                else
                    for (long i = 0; i < count; i++) sum[i] += (float)((int32_t)codes[i] - 128) * step * share;
            }
            memcpy(out + tile + r * N, sum, (size_t)count * sizeof(float));
        }
        at += 2 * rows + here;
    }
}
