/* quantize_lanes.h: vectors of 4 rows for packing weights. Lanes never mix, and there is nothing but + - * /, comparisons
 * and bits, so bytes are the same on every machine. 4 lanes are the vector of every 64-bit machine; compilers take
 * wider ones apart where they may not use them. */
#ifndef COLIBRI_QUANTIZE_LANES_H
#define COLIBRI_QUANTIZE_LANES_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

enum { LANES = 4 };

#define F16_MAX 65504.0f
#define TO_BITS 0x1.8p23f /* added to a small number it rounds to nearest even, into the low bits */

INLINE vf all(float x) { return (vf){x, x, x, x}; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf between(vf v, float low, float high) { return smaller(larger(v, all(low)), all(high)); }
INLINE vf nearest(vf v) { return (v + TO_BITS) - TO_BITS; }
INLINE vf magnitude(vf v) { return (vf)((vi)v & 0x7fffffff); }
/* a / b, 0 where b is 0, negative or too small to divide by */
INLINE vf over(vf a, vf b) { const vi sound = b > 1e-30f; return choose(sound, a / choose(sound, b, all(1)), all(0)); }

/* f16 of numbers from 0 to below 65520. A subnormal is a count of 2^-24, the last bit of floats from 0.5 to 1. */
INLINE vu f16_bits(vf v)
{
    const vu bits = (vu)v, normal = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
    const vu tiny = (vu)(v + 0.5f) - 0x3f000000u;
    return (vu)choose(v < 0x1p-14f, (vf)tiny, (vf)normal);
}

INLINE vf f16_value(vu half)
{
    return choose((vi)half < 0x400, __builtin_convertvector((vi)half, vf) * 0x1p-24f, (vf)((half << 13) + (112u << 23)));
}

INLINE vf as_f16(vf v) { return f16_value(f16_bits(between(v, 0, F16_MAX))); }
INLINE void store(uint8_t *p, vu v) { memcpy(p, &v, sizeof v); }

INLINE void store_f16(uint8_t *p, vu v)
{
    const uint16_t half[LANES] = {(uint16_t)v[0], (uint16_t)v[1], (uint16_t)v[2], (uint16_t)v[3]};
    memcpy(p, half, sizeof half);
}

#endif
