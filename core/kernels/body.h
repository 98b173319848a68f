/* body.h: all hot arithmetic, once; what it is made of lies in the parts that are included below, by subject. Included by one
 * file per instruction set, after that file has defined:
 *
 *   vf                     16 f32 lanes        vi   16 int32 lanes; lanes.h makes both of registers, and what operators do
 *   vf_fma(a, b, c)                            a * b + c, rounded once
 *   vf_max(a, b)                               a > b ? a : b      (b if a lane is NaN)
 *   vf_min(a, b)                               a < b ? a : b      (b if a lane is NaN)
 *   vf_first(v, n, fill)                       lanes 0 … n - 1 of v, `fill` in the others
 *   vf_f16(p)  vf_i8(p)                        16 halves, 16 signed bytes, widened
 *   vi_round(v)                                f32 to int32, exact for integral v, a multiple of 512 for NaN
 *   wq, wq_load(p)         64 weight bytes: 16 rows x 4 k, stored + 128
 *   vi_dot4(acc, w, a)     acc + sum of 4 products per lane, exact; if Q8_SIGNED is defined, of the true weights, else
 *                          of the stored bytes; a: see lanes.h
 *   wq_mxfp4(n)            nq (lanes.h) of 4-bit floats as wq of doubled integers (MXFP4_VALUES)
 *   NI_OWN                 with it: sums of products over at most 8 quads of 4 bits, however the set likes to hold them:
 *     ni, ni_zero()
 *     ni_start(p)          for 4 quads of 6 bits: begins with a start of a q8 row, so that sums are of q - 32
 *     ni_dot4(acc, n, a)   acc + sum of 4 products per lane, exact
 *     ni_sum(acc)          the 16 sums as vi
 *   KEEP(v)                says that v (vf, vi, ni) is in registers here: gcc otherwise spills a tile's sums inside its loop
 *   MATMUL_TILE            activation rows per register tile
 *   MATMUL_PANELS          4: few rows take several panels at a time; 1: never (less code)
 *   KERNELS                name of the table to define;  KERNELS_NAME its text
 *
 * Order rules that make the bits the same everywhere: a row's sum runs over k upwards in one lane; groups of a q8 row
 * add in order by fma; other sums run in 32 lanes (element i in lane i mod 32) and fold by halves. */

#ifndef NI_OWN /* sums of 4 or 6 bits as those of bytes */
typedef vi ni;
INLINE ni ni_zero(void) { return vi_set1(0); }
INLINE ni ni_dot4(ni acc, nq n, aq a) { return vi_dot4(acc, n, a); }
INLINE vi ni_sum(ni acc) { return acc; }
INLINE ni ni_start(const uint8_t *p) {
    int16_t half[2];
    memcpy(half, p, sizeof half);
    return vi_set1(half[0] + half[1]);
}
#endif

/* Loops over the panels and rows of a tile: their bodies must be laid out for sums to stay in registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* 32 lanes to one: 32 -> 16 -> 8 -> 4 -> 2 -> 1, lane i takes lane i + half. */
INLINE float fold_add(vf low, vf high) {
    float lane[16];
    vf_store(lane, vf_add(low, high));
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    }
    return lane[0];
}

INLINE float fold_max(vf v) {
    float lane[16];
    vf_store(lane, v);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    }
    return lane[0];
}

/* Elements i … i + 15 of n, zeros behind the last. */
INLINE vf load_at(const float *x, int32_t i, int32_t n) {
    if (n - i >= 16) return vf_load(x + i);
    if (n <= i) return vf_set1(0);
    float lane[16] = {0};
    memcpy(lane, x + i, (size_t)(n - i) * sizeof *x);
    return vf_load(lane);
}

INLINE void store_at(float *y, int32_t i, int32_t n, vf v) {
    float lane[16];
    if (n - i >= 16) {
        vf_store(y + i, v);
        return;
    }
    vf_store(lane, v);
    memcpy(y + i, lane, (size_t)(n - i) * sizeof *y);
}

INLINE float kernel_dot(const float *a, const float *b, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = 0; i < n; i += 32) {
        low = vf_fma(load_at(a, i, n), load_at(b, i, n), low);
        high = vf_fma(load_at(a, i + 16, n), load_at(b, i + 16, n), high);
    }
    return fold_add(low, high);
}

/* f(..., j, T) for j of n, T at a time: fours, then what is left. */
#define BY_FOURS(n, f, ...)                                                      \
    do {                                                                         \
        int j_ = 0;                                                              \
        for (; (n) - j_ >= 4; j_ += 4) f(__VA_ARGS__, j_, 4);                    \
        if ((n) - j_ == 3) f(__VA_ARGS__, j_, 3);                                \
        else if ((n) - j_ == 2) f(__VA_ARGS__, j_, 2);                           \
        else if ((n) - j_ == 1) f(__VA_ARGS__, j_, 1);                           \
    } while (0)

#include "elementwise.h"
#include "matmul.h"
#include "attend.h"
#include "delta_rule.h"

#define ENTRY(name) .name = kernel_##name
#define PRODUCT(TYPE, type) [TYPE_##TYPE] = matmul_##type
const struct kernels KERNELS = {
    .name = KERNELS_NAME,
    .matmul = {PRODUCT(F32, f32), PRODUCT(BF16, bf16), PRODUCT(Q8, q8), PRODUCT(Q4, q4), PRODUCT(Q6, q6), PRODUCT(MXFP4, mxfp4)},
    ENTRY(quantize), ENTRY(rms_norm), ENTRY(centre), ENTRY(soft_cap), ENTRY(silu_mul), ENTRY(sigmoid_mul),
    ENTRY(convolve), ENTRY(delta), ENTRY(argmax), ENTRY(softmax), ENTRY(rotate), ENTRY(add_scaled), ENTRY(clamp),
    ENTRY(dot), ENTRY(exp), ENTRY(attend), ENTRY(attend_merge), ENTRY(read_row), ENTRY(all_finite),
};
