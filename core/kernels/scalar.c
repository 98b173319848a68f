/* scalar.c: the kernel set of every machine, in plain C; the reference that the others are compared with. Owns the
 * exact fused multiply-add for CPUs without one. */
#include <stdint.h>
#include <string.h>

#define EACH for (int i = 0; i < 16; i++)

typedef struct vf { float lane[16]; } vf;
typedef struct vi { int32_t lane[16]; } vi;
typedef struct wq { uint8_t byte[64]; } wq;
typedef struct aq { int8_t byte[4]; } aq;

/* a * b + c rounded once. The product of two floats is exact in double; the sum is rounded to odd (Boldo and
 * Melquiond, 2008), which keeps the last rounding, to float, right. */
static inline float fused(float a, float b, float c)
{
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, addend = c;
    double sum = product + addend;
    const double part = sum - product;
    const double lost = (product - (sum - part)) + (addend - part);
    if (lost > 0 || lost < 0) {
        uint64_t bits;
        memcpy(&bits, &sum, sizeof bits);
        if ((bits & 1) == 0) bits += (lost > 0) == (sum > 0) ? 1 : UINT64_MAX;
        memcpy(&sum, &bits, sizeof bits);
    }
    return (float)sum;
#endif
}

static inline vf vf_load(const float *p) { vf v; memcpy(v.lane, p, sizeof v.lane); return v; }
static inline void vf_store(float *p, vf v) { memcpy(p, v.lane, sizeof v.lane); }
static inline vf vf_set1(float x) { vf v; EACH v.lane[i] = x; return v; }
static inline vf vf_add(vf a, vf b) { EACH a.lane[i] += b.lane[i]; return a; }
static inline vf vf_sub(vf a, vf b) { EACH a.lane[i] -= b.lane[i]; return a; }
static inline vf vf_mul(vf a, vf b) { EACH a.lane[i] *= b.lane[i]; return a; }
static inline vf vf_div(vf a, vf b) { EACH a.lane[i] /= b.lane[i]; return a; }
static inline vf vf_fma(vf a, vf b, vf c) { EACH c.lane[i] = fused(a.lane[i], b.lane[i], c.lane[i]); return c; }
static inline vf vf_max(vf a, vf b) { EACH a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
static inline vf vf_min(vf a, vf b) { EACH a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
static inline vf vf_first(vf v, int n, float fill) { EACH v.lane[i] = i < n ? v.lane[i] : fill; return v; }
static inline vi vi_set1(int32_t x) { vi v; EACH v.lane[i] = x; return v; }
static inline vf vf_from_vi(vi v) { vf r; EACH r.lane[i] = (float)v.lane[i]; return r; }
static inline vi vi_round(vf v) { vi r; EACH r.lane[i] = (int32_t)v.lane[i]; return r; }
static inline void vi_store_i8(int8_t *p, vi v) { EACH p[i] = (int8_t)v.lane[i]; }
static inline wq wq_load(const uint8_t *p) { wq w; memcpy(w.byte, p, sizeof w.byte); return w; }
static inline aq aq_load(const uint8_t *p) { aq a; memcpy(a.byte, p, sizeof a.byte); return a; }

static inline vf vf_times_pow2(vf v, vf n)
{
    EACH {
        uint32_t bits;
        memcpy(&bits, &v.lane[i], sizeof bits);
        /* A NaN count stays out of the conversion (undefined there); v is NaN then and stays so. */
        bits += (uint32_t)(n.lane[i] == n.lane[i] ? (int32_t)n.lane[i] : 0) << 23;
        memcpy(&v.lane[i], &bits, sizeof bits);
    }
    return v;
}

static inline vf vf_f16(const uint8_t *p)
{
    vf r;
    EACH {
        uint16_t half;
        memcpy(&half, p + 2 * i, sizeof half);
        const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
        /* Shifted into place the exponent is 112 too small; for inf and NaN it must become 255. */
        uint32_t bits = rest >= 0x7c00 ? rest << 13 | 0x7f800000 : (rest << 13) + (112u << 23);
        float x;
        if (rest < 0x400) { /* subnormal: rest units of 2^-24 */
            x = (float)rest * 0x1p-24f;
            memcpy(&bits, &x, sizeof bits);
        }
        bits |= sign;
        memcpy(&r.lane[i], &bits, sizeof bits);
    }
    return r;
}

static inline void vf_bf16_pair(const uint8_t *p, vf *even, vf *odd)
{
    EACH {
        uint32_t pair;
        memcpy(&pair, p + 4 * i, sizeof pair);
        const uint32_t low = pair << 16, high = pair & 0xffff0000u;
        memcpy(&even->lane[i], &low, sizeof low);
        memcpy(&odd->lane[i], &high, sizeof high);
    }
}

static inline vi vi_dot4(vi acc, wq w, aq a)
{
    EACH {
        for (int k = 0; k < 4; k++) acc.lane[i] += (int32_t)w.byte[4 * i + k] * a.byte[k];
    }
    return acc;
}

#define MATMUL_TILE 4
#define KERNELS kernels_scalar
#define KERNELS_NAME "scalar"
#include "body.h"
