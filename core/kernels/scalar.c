/* scalar.c: the kernel set of every machine, in plain C with the vector types of gcc and clang, which become whatever the
 * target has; the reference that the others are compared with. Owns the exact fused multiply-add for CPUs without one. */
#include "kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors never cross a function that is not inlined */
#endif

#define REGISTER 64
#include "lanes.h"

typedef vi wq; /* 16 rows x 4 bytes */
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int8_t vb __attribute__((vector_size(16)));
typedef double vd __attribute__((vector_size(128)));
typedef int64_t vl __attribute__((vector_size(128)));

INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vf_max(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf vf_min(vf a, vf b) { return choose(a < b, a, b); }
INLINE wq wq_load(const uint8_t *p) { return vi_load(p); }

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

INLINE vf vf_f16(const uint8_t *p) {
    uint16_t half[16];
    vu bits;
    memcpy(half, p, sizeof half);
    for (int i = 0; i < 16; i++) bits[i] = half[i];
    const vu sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    /* Shifted into place the exponent is 112 too small; for inf and NaN it must become 255; a subnormal is rest units of
     * 2^-24. */
    const vf normal = (vf)((rest << 13) + (112u << 23)), endless = (vf)((rest << 13) | 0x7f800000u);
    const vf tiny = vf_from_vi((vi)rest) * 0x1p-24f;
    const vf size = choose((vi)rest < 0x400, tiny, choose((vi)rest < 0x7c00, normal, endless));
    return (vf)((vu)size | sign);
}

INLINE vi vi_dot4(vi acc, wq w, aq a) {
    for (int shift = 0; shift < 32; shift += 8) {
        const vi weight = w >> shift & 0xff, factor = (vi)((vu)a << (24 - shift)) >> 24;
        acc += weight * factor;
    }
    return acc;
}

INLINE vf vf_i8(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return __builtin_convertvector(v, vf); }

INLINE wq wq_mxfp4(nq n) {
    static const int values[] = {MXFP4_VALUES};
    vu w = {0};
    for (int i = 0; i < 64; i++) w[i / 4] |= (uint32_t)(values[n[i / 4] >> i % 4 * 8 & 15] + 128) << i % 4 * 8;
    return (wq)w;
}

#define KEEP(v) ((void)0) /* 16 lanes are more than the registers anyway */
#define MATMUL_TILE 4
#define MATMUL_PANELS 1
#define KERNELS kernels_scalar
#define KERNELS_NAME "scalar"
#include "body.h"
