/* Blocks of 64 elements with a step in bfloat16: what the codecs' inner loops share. Compile with -ffp-contract=off: a
   multiply-add is fused exactly where torch's addcmul is (on processors that can). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define N 64

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
#define FUSED(a, b, c) fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

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
