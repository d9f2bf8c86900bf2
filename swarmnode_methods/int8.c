/* The inner loops of int8.py in one pass over memory, bit for bit what the torch operations there do. `rows` blocks a
   call. Nothing here allocates, and lengths are checked by the caller. */
#include "block.h"

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
