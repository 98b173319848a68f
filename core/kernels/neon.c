/* neon.c: the kernel set for 64-bit ARM, where NEON is always there. Sixteen lanes are four registers. With NEON_DOTPROD
 * (neon_dotprod.c) the set for cores with the dot product instructions, ARMv8.2 on. */
#if defined(__aarch64__)
#include "kernels.h" /* says whether the compiler knows dot products */
#if !defined(NEON_DOTPROD) || defined(COLIBRI_HAS_NEON_DOTPROD)
#if defined(NEON_DOTPROD) && !defined(__ARM_FEATURE_DOTPROD)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#define NEON_POP
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#endif

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

typedef struct vf { float32x4_t a, b, c, d; } vf;
typedef struct vi { int32x4_t a, b, c, d; } vi;
typedef struct wq { int8x16_t a, b, c, d; } wq; /* 4 rows x 4 k each */
typedef int8x16_t aq;                           /* 4 k, four times */
typedef wq nq;

/* An operation on each of the four registers. */
#define ALL1(type, f, x) ((type){f((x).a), f((x).b), f((x).c), f((x).d)})
#define ALL2(type, f, x, y) ((type){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})
#define ALL3(type, f, x, y, z) \
    ((type){f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b), f((x).c, (y).c, (z).c), f((x).d, (y).d, (z).d)})
#define SAME(type, x) ((type){x, x, x, x})

static inline float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
static inline float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

static inline vf vf_load(const float *p) { return (vf){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
static inline vf vf_set1(float x) { return SAME(vf, vdupq_n_f32(x)); }
static inline vf vf_add(vf x, vf y) { return ALL2(vf, vaddq_f32, x, y); }
static inline vf vf_sub(vf x, vf y) { return ALL2(vf, vsubq_f32, x, y); }
static inline vf vf_mul(vf x, vf y) { return ALL2(vf, vmulq_f32, x, y); }
static inline vf vf_div(vf x, vf y) { return ALL2(vf, vdivq_f32, x, y); }
static inline vf vf_fma(vf x, vf y, vf z) { return ALL3(vf, vfmaq_f32, z, x, y); }
static inline vf vf_max(vf x, vf y) { return ALL2(vf, max4, x, y); } /* not fmax: its NaN and zeros are others */
static inline vf vf_min(vf x, vf y) { return ALL2(vf, min4, x, y); }
static inline vi vi_set1(int32_t x) { return SAME(vi, vdupq_n_s32(x)); }
static inline vf vf_from_vi(vi v) { return ALL1(vf, vcvtq_f32_s32, v); }
static inline vi vi_round(vf v) { return ALL1(vi, vcvtnq_s32_f32, v); }

static inline void vf_store(float *p, vf v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
    vst1q_f32(p + 8, v.c);
    vst1q_f32(p + 12, v.d);
}

static inline vf vf_first(vf v, int n, float fill) {
    const int32x4_t first = {0, 1, 2, 3}, count = vdupq_n_s32(n);
    const float32x4_t other = vdupq_n_f32(fill);
    return (vf){vbslq_f32(vcgtq_s32(count, first), v.a, other),
                vbslq_f32(vcgtq_s32(count, vaddq_s32(first, vdupq_n_s32(4))), v.b, other),
                vbslq_f32(vcgtq_s32(count, vaddq_s32(first, vdupq_n_s32(8))), v.c, other),
                vbslq_f32(vcgtq_s32(count, vaddq_s32(first, vdupq_n_s32(12))), v.d, other)};
}

static inline float32x4_t times_pow2(float32x4_t v, float32x4_t n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(vcvtnq_s32_f32(n), 23)));
}

static inline vf vf_times_pow2(vf v, vf n) { return ALL2(vf, times_pow2, v, n); }

static inline vf vf_f16(const uint8_t *p) {
    const float16x8_t low = vreinterpretq_f16_u8(vld1q_u8(p)), high = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return (vf){vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low),
                vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)};
}

static inline uint32x4_t load_words(const uint8_t *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
static inline float32x4_t even4(uint32x4_t pair) { return vreinterpretq_f32_u32(vshlq_n_u32(pair, 16)); }

static inline float32x4_t odd4(uint32x4_t pair) {
    return vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u)));
}

static inline void vf_bf16_pair(const uint8_t *p, vf *even, vf *odd) {
    const struct { uint32x4_t a, b, c, d; } pair = {load_words(p), load_words(p + 16), load_words(p + 32), load_words(p + 48)};
    *even = ALL1(vf, even4, pair);
    *odd = ALL1(vf, odd4, pair);
}

static inline void vi_store_i8(int8_t *p, vi v) {
    const int16x8_t low = vcombine_s16(vmovn_s32(v.a), vmovn_s32(v.b)), high = vcombine_s16(vmovn_s32(v.c), vmovn_s32(v.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static inline vi vi_load(const uint8_t *p) {
    const struct { uint32x4_t a, b, c, d; } v = {load_words(p), load_words(p + 16), load_words(p + 32), load_words(p + 48)};
    return ALL1(vi, vreinterpretq_s32_u32, v);
}

static inline vf vf_i8(const uint8_t *p) {
    const int16x8_t low = vmovl_s8(vld1_s8((const int8_t *)p)), high = vmovl_s8(vld1_s8((const int8_t *)p + 8));
    const vi wide = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    return vf_from_vi(wide);
}

static inline int32x4_t bits4(int32x4_t v, int shift, int n) {
    const uint32x4_t moved = vshlq_u32(vreinterpretq_u32_s32(v), vdupq_n_s32(-shift));
    return vreinterpretq_s32_u32(vandq_u32(moved, vdupq_n_u32((1u << n) - 1)));
}

static inline vi vi_bits(vi v, int shift, int n) {
    return (vi){bits4(v.a, shift, n), bits4(v.b, shift, n), bits4(v.c, shift, n), bits4(v.d, shift, n)};
}

static inline int8x16_t centred(const uint8_t *p) /* the true weights */
{
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(128)));
}

static inline wq wq_load(const uint8_t *p) { return (wq){centred(p), centred(p + 16), centred(p + 32), centred(p + 48)}; }

static inline aq aq_load(const uint8_t *p) {
    return vreinterpretq_s8_s32(vld1q_dup_s32((const int32_t *)(const void *)p));
}

static inline int8x16_t bits16(const uint8_t *p, int shift, int mask) {
    return vreinterpretq_s8_u8(vandq_u8(vshlq_u8(vld1q_u8(p), vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((uint8_t)mask)));
}

static inline nq nq_bits(const uint8_t *p, int shift, int mask) {
    return (nq){bits16(p, shift, mask), bits16(p + 16, shift, mask), bits16(p + 32, shift, mask), bits16(p + 48, shift, mask)};
}

static inline nq nq_or(nq x, nq y) { return ALL2(nq, vorrq_s8, x, y); }

static inline int8x16_t mxfp4(int8x16_t n) { return vqtbl1q_s8((int8x16_t){MXFP4_VALUES}, vreinterpretq_u8_s8(n)); }
static inline wq wq_mxfp4(nq n) { return ALL1(wq, mxfp4, n); }

#if defined(NEON_DOTPROD)
typedef vi ni;

static inline vi vi_dot4(vi acc, wq w, aq x) {
    return (vi){vdotq_s32(acc.a, w.a, x), vdotq_s32(acc.b, w.b, x), vdotq_s32(acc.c, w.c, x), vdotq_s32(acc.d, w.d, x)};
}

static inline ni ni_zero(void) { return vi_set1(0); }
static inline ni ni_start(const uint8_t *p) { return SAME(ni, vpaddlq_s16(vreinterpretq_s16_s8(aq_load(p)))); }
static inline ni ni_dot4(ni acc, nq w, aq x) { return vi_dot4(acc, w, x); }
static inline vi ni_sum(ni acc) { return acc; }

#define KERNELS kernels_neon_dotprod
#define KERNELS_NAME "neon-dotprod"
#else
typedef struct ni { int16x8_t a, b, c, d; } ni; /* two lanes a row: 8 x 2 x 15 x 127 fits, 4 x 2 x 32 x 127 too */

/* Two lanes a row, each the sum of two products: 2 x 128 x 127 fits. */
static inline int16x8_t pairs(int8x16_t w, int8x16_t x) {
    return vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
}

static inline vi vi_dot4(vi acc, wq w, aq x) {
    return (vi){vpadalq_s16(acc.a, pairs(w.a, x)), vpadalq_s16(acc.b, pairs(w.b, x)),
                vpadalq_s16(acc.c, pairs(w.c, x)), vpadalq_s16(acc.d, pairs(w.d, x))};
}

static inline ni ni_zero(void) { return SAME(ni, vdupq_n_s16(0)); }
static inline ni ni_start(const uint8_t *p) { return SAME(ni, vreinterpretq_s16_s8(aq_load(p))); } /* sums wrap, and back */

static inline ni ni_dot4(ni acc, nq w, aq x) {
    return (ni){vaddq_s16(acc.a, pairs(w.a, x)), vaddq_s16(acc.b, pairs(w.b, x)),
                vaddq_s16(acc.c, pairs(w.c, x)), vaddq_s16(acc.d, pairs(w.d, x))};
}

static inline vi ni_sum(ni acc) { return ALL1(vi, vpaddlq_s16, acc); }

#define KERNELS kernels_neon
#define KERNELS_NAME "neon"
#endif

#define Q8_SIGNED 1
#define KEEP(v) __asm__("" : "+w"((v).a), "+w"((v).b), "+w"((v).c), "+w"((v).d))
#define MATMUL_TILE 4 /* 16 sums, 4 weights and 4 activations in 32 registers: nothing spills */
#define MATMUL_PANELS 4
#include "body.h"

#if defined(NEON_POP)
#pragma clang attribute pop
#endif
#endif
#else
typedef int no_neon_here;
#endif
