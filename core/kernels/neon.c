/* neon.c: the kernel set for 64-bit ARM, where NEON is always there. Sixteen lanes are four registers. With NEON_DOTPROD
 * (neon_dotprod.c) the set for cores with the dot product instructions, ARMv8.2 on. */
#include "kernels.h" /* says whether the compiler knows dot products */

#if defined(__aarch64__) && (!defined(NEON_DOTPROD) || defined(COLIBRI_HAS_NEON_DOTPROD))
#if defined(NEON_DOTPROD) && !defined(__ARM_FEATURE_DOTPROD)
#if defined(__clang__)
TARGET("dotprod")
#else
TARGET("arch=armv8.2-a+dotprod")
#endif
#define TARGETED
#endif
#include <arm_neon.h>

#define REGISTER 16
#include "lanes.h"

typedef vi wq; /* 4 rows x 4 k in each register */

/* A function of two registers, or of a register and one operand, on each of the four. */
#define EACH2(type, f, x, y) ((type){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})
#define WITH(type, f, x, y) ((type){f((x).a, y), f((x).b, y), f((x).c, y), f((x).d, y)})
#define BYTES(x) ((int8x16_t)(x))

INLINE float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE vf vf_max(vf x, vf y) { return EACH2(vf, max4, x, y); } /* not fmax: its NaN and zeros are others */
INLINE vf vf_min(vf x, vf y) { return EACH2(vf, min4, x, y); }
INLINE vi vi_round(vf v) { return EACH(vi, vcvtnq_s32_f32, v); }

INLINE vf vf_fma(vf x, vf y, vf z) {
    return (vf){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}

INLINE vf vf_first(vf v, int n, float fill) {
    const ints first = {0, 1, 2, 3}, count = n - (ints){0};
    const floats other = fill - (floats){0};
    return (vf){vbslq_f32(vcgtq_s32(count, first), v.a, other), vbslq_f32(vcgtq_s32(count, first + 4), v.b, other),
                vbslq_f32(vcgtq_s32(count, first + 8), v.c, other), vbslq_f32(vcgtq_s32(count, first + 12), v.d, other)};
}

INLINE vf vf_f16(const uint8_t *p) {
    const float16x8_t low = vreinterpretq_f16_u8(vld1q_u8(p)), high = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return (vf){vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low),
                vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)};
}

INLINE vf vf_i8(const uint8_t *p) {
    const int16x8_t low = vmovl_s8(vld1_s8((const int8_t *)p)), high = vmovl_s8(vld1_s8((const int8_t *)p + 8));
    const vi wide = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    return vf_from_vi(wide);
}

INLINE wq wq_load(const uint8_t *p) { return BOTH(wq, vi_load(p), ^, vi_set1((int32_t)0x80808080u)); } /* the true weights */
INLINE ints mxfp4(ints n) { return (ints)vqtbl1q_s8((int8x16_t){MXFP4_VALUES}, (uint8x16_t)n); }
INLINE wq wq_mxfp4(nq n) { return EACH(wq, mxfp4, n); }

#if defined(NEON_DOTPROD)
INLINE vi vi_dot4(vi acc, wq w, aq x) {
    return (vi){vdotq_s32(acc.a, BYTES(w.a), BYTES(x)), vdotq_s32(acc.b, BYTES(w.b), BYTES(x)),
                vdotq_s32(acc.c, BYTES(w.c), BYTES(x)), vdotq_s32(acc.d, BYTES(w.d), BYTES(x))};
}

#define KERNELS kernels_neon_dotprod
#define KERNELS_NAME "neon-dotprod"
#else
typedef struct ni { int16x8_t a, b, c, d; } ni; /* two lanes a row: 8 x 2 x 15 x 127 fits, 4 x 2 x 32 x 127 too */

/* Two lanes a row, each the sum of two products: 2 x 128 x 127 fits. */
INLINE int16x8_t pairs(ints w, aq x) {
    return vpaddq_s16(vmull_s8(vget_low_s8(BYTES(w)), vget_low_s8(BYTES(x))), vmull_high_s8(BYTES(w), BYTES(x)));
}

INLINE vi vi_dot4(vi acc, wq w, aq x) { return EACH2(vi, vpadalq_s16, acc, WITH(ni, pairs, w, x)); }

#define NI_OWN
INLINE ni ni_zero(void) { return SAME(ni, vdupq_n_s16(0)); }
INLINE ni ni_start(const uint8_t *p) { return SAME(ni, (int16x8_t)aq_load(p)); } /* sums wrap, and back */
INLINE ni ni_dot4(ni acc, nq n, aq x) { return EACH2(ni, vaddq_s16, acc, WITH(ni, pairs, n, x)); }
INLINE vi ni_sum(ni acc) { return EACH(vi, vpaddlq_s16, acc); }

#define KERNELS kernels_neon
#define KERNELS_NAME "neon"
#endif

#define Q8_SIGNED 1
#define KEEP(v) __asm__("" : "+w"((v).a), "+w"((v).b), "+w"((v).c), "+w"((v).d))
#define MATMUL_TILE 4 /* 16 sums, 4 weights and 4 activations in 32 registers: nothing spills */
#define MATMUL_PANELS 4
#include "body.h"

#if defined(TARGETED)
TARGET_END
#endif
#endif
