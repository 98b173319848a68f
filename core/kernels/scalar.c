/* scalar.c: the kernel set of every machine, in plain C with the vector types of gcc and clang, which become whatever the
 * target has; the reference that the others are compared with. Owns the exact fused multiply-add for CPUs without one. */
#include "kernels.h"
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors never cross a function that is not inlined */
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef vu wq; /* 16 rows x 4 bytes */
typedef vi aq; /* the same 4 bytes in each lane */
typedef vu nq; /* 16 rows x 4 bytes below 16 */
typedef vi ni;
typedef int8_t vb __attribute__((vector_size(16)));
typedef double vd __attribute__((vector_size(128)));
typedef int64_t vl __attribute__((vector_size(128)));

INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vf_set1(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi vi_set1(int32_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vf_max(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf vf_min(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf vf_from_vi(vi v) { return __builtin_convertvector(v, vf); }
INLINE wq wq_load(const uint8_t *p) { wq w; memcpy(&w, p, sizeof w); return w; }

/* a * b + c rounded once. The product of two floats is exact in double; the sum is rounded to odd (Boldo and
 * Melquiond, 2008), which keeps the last rounding, to float, right. */
#ifdef __FP_FAST_FMAF
INLINE vf vf_fma(vf a, vf b, vf c) {
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#else
static __attribute__((noinline)) void fused(const vf *x, const vf *y, vf *z) /* z = x * y + z; long: one copy is enough */
{
    const vf a = *x, b = *y, c = *z;
    const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd);
    const vd addend = __builtin_convertvector(c, vd), sum = product + addend, part = sum - product;
    const vd lost = (product - (sum - part)) + (addend - part), zero = {0};
    const vl inexact = (lost > zero) | (lost < zero), even = -(~(vl)sum & 1);
    const vl away = -2 * (((lost > zero) ^ (sum > zero)) & 1) + 1; /* + 1 if the lost part makes |sum| larger */
    *z = __builtin_convertvector((vd)((vl)sum + (away & inexact & even)), vf);
}

INLINE vf vf_fma(vf a, vf b, vf c) {
    fused(&a, &b, &c);
    return c;
}
#endif

INLINE vf vf_first(vf v, int n, float fill) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return choose(lane < vi_set1(n), v, vf_set1(fill));
}

INLINE vi vi_round(vf v) {
    return __builtin_convertvector(choose(v == v, v, vf_set1(0)), vi); /* NaN would be undefined here */
}

INLINE vf vf_times_pow2(vf v, vf n) { return (vf)((vu)v + ((vu)vi_round(n) << 23)); }

INLINE void vi_store_i8(int8_t *p, vi v) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)v[i];
}

INLINE vf vf_f16(const uint8_t *p) {
    uint16_t half[16];
    vu bits;
    memcpy(half, p, sizeof half);
    for (int i = 0; i < 16; i++) bits[i] = half[i];
    const vu sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    /* Shifted into place the exponent is 112 too small; for inf and NaN it must become 255; a subnormal is rest units of
     * 2^-24. */
    const vf normal = (vf)((rest << 13) + (112u << 23)), endless = (vf)((rest << 13) | 0x7f800000u);
    const vf tiny = __builtin_convertvector((vi)rest, vf) * 0x1p-24f;
    const vf size = choose((vi)rest < 0x400, tiny, choose((vi)rest < 0x7c00, normal, endless));
    return (vf)((vu)size | sign);
}

INLINE void vf_bf16_pair(const uint8_t *p, vf *even, vf *odd) {
    const vu pair = wq_load(p);
    *even = (vf)(pair << 16);
    *odd = (vf)(pair & 0xffff0000u);
}

INLINE aq aq_load(const uint8_t *p) {
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return vi_set1(quad);
}

INLINE vi vi_dot4(vi acc, wq w, aq a) {
    for (int shift = 0; shift < 32; shift += 8) {
        const vi weight = (vi)(w >> shift & 0xff), factor = (vi)((vu)a << (24 - shift)) >> 24;
        acc += weight * factor;
    }
    return acc;
}

INLINE vf vf_i8(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, vf); }
INLINE vi vi_load(const uint8_t *p) { return (vi)wq_load(p); }
INLINE vi vi_bits(vi v, int shift, int n) { return (vi)((vu)v >> shift & ((1u << n) - 1)); }
INLINE ni ni_zero(void) { return vi_set1(0); }
INLINE ni ni_start(const uint8_t *p) { const vi halves = aq_load(p); return ((vi)((vu)halves << 16) >> 16) + (halves >> 16); }
INLINE ni ni_dot4(ni acc, nq w, aq a) { return vi_dot4(acc, w, a); }
INLINE vi ni_sum(ni acc) { return acc; }
INLINE nq nq_bits(const uint8_t *p, int shift, unsigned mask) { return wq_load(p) >> shift & mask * 0x01010101u; }
INLINE nq nq_or(nq x, nq y) { return x | y; }

INLINE wq wq_mxfp4(nq n) {
    static const int values[] = {MXFP4_VALUES};
    wq w = {0};
    for (int i = 0; i < 64; i++) w[i / 4] |= (uint32_t)(values[n[i / 4] >> i % 4 * 8 & 15] + 128) << i % 4 * 8;
    return w;
}

#define KEEP(v) ((void)0) /* 16 lanes are more than the registers anyway */
#define MATMUL_TILE 4
#define MATMUL_PANELS 1
#define KERNELS kernels_scalar
#define KERNELS_NAME "scalar"
#include "body.h"
