/* body.h: all hot arithmetic, once. Included by one file per instruction set, after that file has defined:
 *
 *   vf                     16 f32 lanes        vi   16 int32 lanes
 *   vf_load(p) vf_store(p, v) vf_set1(x)       unaligned
 *   vf_add vf_sub vf_mul vf_div                lane by lane, IEEE, round to nearest even
 *   vf_fma(a, b, c)                            a * b + c, rounded once
 *   vf_max(a, b)                               a > b ? a : b      (b if a lane is NaN)
 *   vf_min(a, b)                               a < b ? a : b      (b if a lane is NaN)
 *   vf_first(v, n, fill)                       lanes 0 … n - 1 of v, `fill` in the others
 *   vf_times_pow2(v, n)                        adds int(n) to the exponent bits of v; n integral
 *   vf_f16(p)                                  16 halves, widened
 *   vf_bf16_pair(p, &even, &odd)               16 x 2 bf16, widened
 *   vf_i8(p)                               16 signed bytes, widened
 *   vf_from_vi(v)   vi_set1(i)   vi_store_i8(p, v)   vi_round(v)  (f32 to int32, exact for integral v)
 *   vi_load(p) vi_bits(v, shift, n)            bits shift … shift + n - 1 of each lane, as a number
 *   wq, wq_load(p)         64 weight bytes: 16 rows x 4 k, stored + 128
 *   aq, aq_load(p)         4 activation bytes, signed, for all rows
 *   vi_dot4(acc, w, a)     acc + sum of 4 products per lane, exact; if Q8_SIGNED is defined, of the true weights, else
 *                          of the stored bytes
 *   nq, nq_bits(p, shift, mask)  nq_or(x, y)   16 rows x 4 k of up to 6 bits: each of 64 bytes >> shift & mask
 *   wq_mxfp4(n)            nq of 4-bit floats as wq of doubled integers (MXFP4_VALUES)
 *   ni, ni_zero()          sums of products over at most 8 quads of 4 bits, however the set likes to hold them
 *   ni_start(p)            for 4 quads of 6 bits: begins with a start of a q8 row, so that sums are of q - 32
 *   ni_dot4(acc, n, a)     acc + sum of 4 products per lane, exact
 *   ni_sum(acc)            the 16 sums as vi
 *   KEEP(v)                says that v (vf, vi, ni) is in registers here: gcc otherwise spills a tile's sums inside its loop
 *   MATMUL_TILE            activation rows per register tile
 *   MATMUL_PANELS          4: few rows take several panels at a time; 1: never (less code)
 *   KERNELS                name of the table to define;  KERNELS_NAME its text
 *
 * Order rules that make the bits the same everywhere: a row's sum runs over k upwards in one lane; groups of a q8 row
 * add in order by fma; other sums run in 32 lanes (element i in lane i mod 32) and fold by halves. */

#include "kernels.h"

#include <string.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

/* Loops over the panels and rows of a tile: their bodies must be laid out for sums to stay in registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* ---- reductions ---------------------------------------------------------------------------------------------- */

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

/* Up to 16 floats, zeros behind them. */
INLINE vf load_tail(const float *x, int32_t n) {
    float lane[16] = {0};
    memcpy(lane, x, (size_t)n * sizeof *x);
    return vf_load(lane);
}

INLINE void store_tail(float *y, vf v, int32_t n) {
    float lane[16];
    vf_store(lane, v);
    memcpy(y, lane, (size_t)n * sizeof *y);
}

INLINE vf load_at(const float *x, int32_t i, int32_t n) {
    return n - i >= 16 ? vf_load(x + i) : n > i ? load_tail(x + i, n - i) : vf_set1(0);
}

INLINE void store_at(float *y, int32_t i, int32_t n, vf v) {
    if (n - i >= 16) vf_store(y + i, v);
    else store_tail(y + i, v, n - i);
}

INLINE float kernel_dot(const float *a, const float *b, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = 0; i < n; i += 32) {
        low = vf_fma(load_at(a, i, n), load_at(b, i, n), low);
        high = vf_fma(load_at(a, i + 16, n), load_at(b, i + 16, n), high);
    }
    return fold_add(low, high);
}

/* ---- elementary functions ------------------------------------------------------------------------------------ */

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, Taylor to r^7 (relative error below 1e-7). Saturates at both ends so that
 * the result stays a normal number; NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set1(12582912.0f); /* 1.5 x 2^23: adding it rounds to an integer */
    x = vf_min(vf_set1(88.0f), vf_max(vf_set1(-86.6f), x));
    const vf n = vf_sub(vf_fma(x, vf_set1(1.44269504088896341f), magic), magic);
    vf r = vf_fma(n, vf_set1(-0.693359375f), x); /* ln 2 in two pieces, the first exact in 9 bits */
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.0f / 5040);
    p = vf_fma(p, r, vf_set1(1.0f / 720));
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_times_pow2(p, n);
}

static float kernel_exp(float x) {
    float lane[16];
    vf_store(lane, vf_exp(vf_set1(x)));
    return lane[0];
}

/* a sigmoid(x) */
INLINE vf vf_sigmoid_mul(vf a, vf x) {
    return vf_div(a, vf_add(vf_set1(1), vf_exp(vf_sub(vf_set1(0), x))));
}

/* ln(1 + e^x) = max(x, 0) + 2 artanh(s), s = u / (2 + u), u = e^-|x|: series to s^15 (relative error below 1e-8). */
INLINE vf vf_softplus(vf x) {
    const vf u = vf_exp(vf_min(x, vf_sub(vf_set1(0), x))), s = vf_div(u, vf_add(vf_set1(2), u)), z = vf_mul(s, s);
    vf p = vf_set1(2.0f / 15);
    for (int i = 13; i > 0; i -= 2) p = vf_fma(p, z, vf_set1(2.0f / (float)i));
    return vf_fma(p, s, vf_max(x, vf_set1(0)));
}

static void kernel_silu_mul(float *gate, const float *up, int32_t n, float limit, float alpha, float cubic, float offset) {
    const vf zero = vf_set1(0), factor = vf_set1(alpha);
    const vf most = vf_set1(limit > 0 ? limit : __builtin_inff()), least = vf_sub(zero, most);
    const vf added = vf_set1(offset == 0 ? -0.0f : offset); /* the one number that adds nothing, not even a sign */
    for (int32_t i = 0; i < n; i += 16) {
        const vf g = vf_min(most, load_at(gate, i, n)), u = vf_max(least, vf_min(most, load_at(up, i, n)));
        const vf bent = vf_fma(vf_mul(vf_mul(vf_set1(cubic), g), g), g, g); /* g itself where cubic is 0 */
        store_at(gate, i, n, vf_mul(vf_sigmoid_mul(g, vf_mul(factor, bent)), vf_add(u, added)));
    }
}

static void kernel_sigmoid_mul(float *y, const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) store_at(y, i, n, vf_sigmoid_mul(load_at(y, i, n), load_at(x, i, n)));
}

INLINE float largest(const float *x, int32_t n) {
    vf most = vf_set1(x[0]);
    for (int32_t i = 0; i < n; i += 16) {
        most = vf_max(n - i < 16 ? vf_first(load_at(x, i, n), n - i, x[0]) : vf_load(x + i), most);
    }
    return fold_max(most);
}

static int32_t kernel_argmax(const float *x, int32_t n) {
    const float most = largest(x, n);
    int32_t i = 0;
    while (i < n - 1 && x[i] != most) i++;
    return i;
}

static void kernel_softmax(float *x, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    const vf max = vf_set1(largest(x, n));
    for (int32_t i = 0; i < n; i += 16) {
        const int32_t left = n - i < 16 ? n - i : 16;
        const vf e = vf_first(vf_exp(vf_sub(load_at(x, i, n), max)), left, 0);
        if (i % 32 == 0) low = vf_add(low, e);
        else high = vf_add(high, e);
        store_at(x, i, n, e);
    }
    const vf sum = vf_set1(fold_add(low, high));
    for (int32_t i = 0; i < n; i += 16) store_at(x, i, n, vf_div(load_at(x, i, n), sum));
}

/* ---- element by element -------------------------------------------------------------------------------------- */

static void kernel_rms_norm(float *out, const float *x, const float *weight, int32_t n, float eps) {
    const float mean = kernel_dot(x, x, n) / (float)n;
    const vf scale = vf_set1(1.0f / __builtin_sqrtf(mean + eps));
    for (int32_t i = 0; i < n; i += 16) {
        const vf y = vf_mul(load_at(x, i, n), scale);
        store_at(out, i, n, weight == NULL ? y : vf_mul(y, load_at(weight, i, n)));
    }
}

static void kernel_soft_cap(float *x, float cap, int32_t n) {
    const vf most = vf_set1(cap), twice = vf_set1(2 * cap), slope = vf_set1(2 / cap);
    for (int32_t i = 0; i < n; i += 16) {
        const vf e = vf_exp(vf_mul(slope, load_at(x, i, n)));
        store_at(x, i, n, vf_sub(most, vf_div(twice, vf_add(vf_set1(1), e))));
    }
}

static void kernel_centre(float *out, const float *x, int32_t n) {
    vf low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = 0; i < n; i += 32) {
        low = vf_add(load_at(x, i, n), low);
        high = vf_add(load_at(x, i + 16, n), high);
    }
    const vf mean = vf_set1(fold_add(low, high) / (float)n);
    for (int32_t i = 0; i < n; i += 16) store_at(out, i, n, vf_sub(load_at(x, i, n), mean));
}

static void kernel_rotate(float *x, const float *cosine, const float *sine, int32_t dim) {
    const int32_t half = dim / 2;
    for (int32_t i = 0; i < half; i += 16) {
        const vf a = load_at(x, i, half), b = load_at(x + half, i, half);
        const vf c = load_at(cosine, i, half), s = load_at(sine, i, half);
        store_at(x, i, half, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        store_at(x + half, i, half, vf_add(vf_mul(b, c), vf_mul(a, s)));
    }
}

static void kernel_add(float *y, const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) store_at(y, i, n, vf_add(load_at(y, i, n), load_at(x, i, n)));
}

static void kernel_add_scaled(float *y, const float *x, float a, int32_t n) {
    const vf factor = vf_set1(a);
    for (int32_t i = 0; i < n; i += 16) store_at(y, i, n, vf_fma(factor, load_at(x, i, n), load_at(y, i, n)));
}

static void kernel_clamp(float *x, float limit, int32_t n) {
    for (int32_t i = 0; i < n; i += 16) {
        store_at(x, i, n, vf_min(vf_set1(limit), vf_max(vf_set1(-limit), load_at(x, i, n))));
    }
}

static bool kernel_all_finite(const float *x, int64_t n) {
    vf sum = vf_set1(0); /* x * 0 is NaN where x is not finite */
    for (int64_t i = 0; i < n; i += 16) {
        const int32_t left = n - i < 16 ? (int32_t)(n - i) : 16;
        sum = vf_fma(load_at(x + i, 0, left), vf_set1(0), sum);
    }
    return fold_add(sum, vf_set1(0)) == 0;
}

static void kernel_quantize(const float *x, int32_t n, int32_t first, int32_t count, uint8_t *row) {
    float *const scales = (float *)(void *)(row + q8_scales_at((size_t)n));
    int32_t *const offsets = (int32_t *)(void *)(row + q8_offsets_at((size_t)n));
    float *const sums = (float *)(void *)(row + q8_sums_at((size_t)n));
    int16_t *const starts = (int16_t *)(void *)(row + q8_starts_at((size_t)n));
    const vf zero = vf_set1(0);
    for (int32_t g = first; g < first + count; g++) {
        const int32_t at = (g - first) * Q8_GROUP, end = n - first * Q8_GROUP;
        const vf low = load_at(x, at, end), high = load_at(x, at + 16, end);
        const vf size = vf_max(vf_max(low, vf_sub(zero, low)), vf_max(high, vf_sub(zero, high)));
        const float most = fold_max(size);
        const float taint = fold_add(vf_mul(low, zero), vf_mul(high, zero)); /* 0, or NaN if not all are finite */
        const vf inverse = vf_set1(most > 0 && most + taint < __builtin_inff() ? 127.0f / most : 0);
        const vf magic = vf_set1(12582912.0f);
        const vf limit = vf_set1(127), minimum = vf_set1(-127);
        vf ql = vf_sub(vf_add(vf_mul(low, inverse), magic), magic);
        vf qh = vf_sub(vf_add(vf_mul(high, inverse), magic), magic);
        ql = vf_max(vf_min(ql, limit), minimum); /* NaN quants become 127: the scale tells */
        qh = vf_max(vf_min(qh, limit), minimum);
        int8_t *const q = (int8_t *)row + g * Q8_GROUP;
        vi_store_i8(q, vi_round(ql));
        vi_store_i8(q + 16, vi_round(qh));
        int32_t sum = 0;
        for (int i = 0; i < 4; i++) {
            int32_t part = 0;
            for (int k = i / 2 * 16 + i % 2 * 2, quad = 0; quad < 4; quad++) part += q[k + quad * 4] + q[k + quad * 4 + 1];
            starts[g * 4 + i] = (int16_t)(-32 * part);
            sum += part;
        }
        scales[g] = most / 127.0f + taint;
        offsets[g] = -128 * sum;
        sums[g] = scales[g] * (float)sum;
    }
}

#include "matmul.h"

/* ---- attention ----------------------------------------------------------------------------------------------- */

/* Keys and values of a block lie 16 side by side: of a key, element d of 16 neighbouring positions; of a value, 16
 * elements of one position. A score is one lane's sum over d, an output element one lane's sum over keys, blocks merge in
 * order (online softmax, Milakov and Gimelshein, arXiv:1805.02867): nothing depends on the tile or on how the prompt was
 * cut. Queries go four by four through registers; a tile of them finds each 16 keys or values in the first cache. */
struct attend_state {
    float max[ATTEND_TILE], sum[ATTEND_TILE];
    int32_t low[ATTEND_TILE];               /* keys of a block that lie before a query's first one */
    float p[ATTEND_TILE][KV_BLOCK];         /* scores of a block, then the weights made of them */
    float out[ATTEND_TILE * HEAD_DIM_MAX];  /* [n][roundup16(value_dim)] */
};

INLINE size_t attend_stride(const struct attend *a) { return attend_partial_floats(a->value_dim) - 2; }

/* Scores of the 16 keys from `first` on in a block for T queries from j on; lanes past a query's last key hold -3.4e38. */
INLINE void attend_scores(const struct attend *a, const float *keys, struct attend_state *s, const int32_t *n, int32_t first,
                          int j, const int T) {
    const float *const k = keys + (size_t)first * (size_t)a->key_dim;
    vf acc[4];
    UNROLL for (int i = 0; i < T; i++) acc[i] = vf_set1(0);
    for (int32_t d = 0; d < a->key_dim; d++) {
        const vf key = vf_load(k + (size_t)d * 16);
        UNROLL for (int i = 0; i < T; i++) {
            acc[i] = vf_fma(key, vf_set1(a->q[j + i][d]), acc[i]);
            KEEP(acc[i]);
        }
    }
    UNROLL for (int i = 0; i < T; i++) {
        const int32_t left = n[j + i] - first, lanes = left < 0 ? 0 : left < 16 ? left : 16;
        vf_store(s->p[j + i] + first, vf_first(vf_mul(acc[i], vf_set1(a->scale)), lanes, -3.4e38f));
    }
}

/* Turns the scores of one query in one block into weights, 0 for the first `before` of the n; returns their maximum and
 * sum through the pointers. */
INLINE void attend_weights(float *p, int32_t before, int32_t n, float *max, float *sum) {
    const int32_t start = before & ~15;
    for (int32_t i = start; i < before; i++) p[i] = -3.4e38f;
    vf most = vf_load(p + start), low = vf_set1(0), high = vf_set1(0);
    for (int32_t i = start + 16; i < n; i += 16) most = vf_max(vf_load(p + i), most);
    *max = fold_max(most);
    const vf base = vf_set1(*max);
    for (int32_t i = start; i < n; i += 16) {
        vf e = vf_first(vf_exp(vf_sub(vf_load(p + i), base)), n - i < 16 ? n - i : 16, 0);
        if (i < before) e = vf_sub(e, vf_first(e, before - i, 0));
        if (i % 32 == 0) low = vf_add(low, e);
        else high = vf_add(high, e);
        vf_store(p + i, e);
    }
    *sum = fold_add(low, high);
}

/* 16 elements from d on of the sum over a block's keys of weight x value, merged into the state: T queries from j on. */
INLINE void attend_values(const struct attend *a, const float *values, struct attend_state *s, const int32_t *n,
                          const float *old_scale, const float *new_scale, int32_t d, int j, const int T) {
    const float *const v = values + (size_t)d * (size_t)a->block_positions;
    int32_t start = s->low[j], end = n[j]; /* keys that all of them see; then end is no less than start */
    UNROLL for (int i = 1; i < T; i++) {
        start = s->low[j + i] > start ? s->low[j + i] : start;
        end = n[j + i] < end ? n[j + i] : end;
    }
    end = end > start ? end : start;
    vf acc[4];
    UNROLL for (int i = 0; i < T; i++) {
        acc[i] = vf_set1(0);
        for (int32_t key = s->low[j + i]; key < start && key < n[j + i]; key++) {
            acc[i] = vf_fma(vf_load(v + (size_t)key * 16), vf_set1(s->p[j + i][key]), acc[i]);
        }
    }
    for (int32_t key = start; key < end; key++) {
        const vf value = vf_load(v + (size_t)key * 16);
        UNROLL for (int i = 0; i < T; i++) {
            acc[i] = vf_fma(value, vf_set1(s->p[j + i][key]), acc[i]);
            KEEP(acc[i]);
        }
    }
    UNROLL for (int i = 0; i < T; i++) {
        if (n[j + i] == 0) continue; /* sees nothing of this block */
        for (int32_t key = end; key < n[j + i]; key++) {
            acc[i] = vf_fma(vf_load(v + (size_t)key * 16), vf_set1(s->p[j + i][key]), acc[i]);
        }
        float *const out = s->out + (size_t)(j + i) * attend_stride(a) + d;
        const vf old = vf_mul(vf_load(out), vf_set1(old_scale[j + i]));
        vf_store(out, vf_fma(acc[i], vf_set1(new_scale[j + i]), old));
    }
}

/* call(j, T) for all queries: fours, then what is left. */
#define BY_FOURS(n, call)                                                        \
    do {                                                                         \
        int j_ = 0;                                                              \
        for (; (n) - j_ >= 4; j_ += 4) call(j_, 4);                              \
        if ((n) - j_ == 3) call(j_, 3);                                          \
        else if ((n) - j_ == 2) call(j_, 2);                                     \
        else if ((n) - j_ == 1) call(j_, 1);                                     \
    } while (0)

INLINE void attend_tile_values(const struct attend *a, const float *values, struct attend_state *s, const int32_t *n,
                               const float *old_scale, const float *new_scale) {
    for (int32_t d = 0; d < a->value_dim; d += 16) {
#define CALL(j, T) attend_values(a, values, s, n, old_scale, new_scale, d, j, T)
        BY_FOURS(a->n, CALL);
#undef CALL
    }
}

/* Takes a block's maximum and sum into a query's (0: the first block); the factors are those of what was there and of the block. */
INLINE void attend_join(float *max, float *sum, float block_max, float block_sum, float *old_scale, float *new_scale) {
    const float merged = *max > block_max ? *max : block_max;
    *old_scale = *sum == 0 ? 0 : kernel_exp(*max - merged);
    *new_scale = kernel_exp(block_max - merged);
    *sum = *sum * *old_scale + block_sum * *new_scale;
    *max = merged;
}

/* Divides a query's output by its sum, which a sink joins as a last block of one key without a value. */
INLINE void attend_end(float *to, const float *out, float max, float sum, const float *sink, int32_t value_dim) {
    float old_scale = 1, new_scale;
    if (sink != NULL) attend_join(&max, &sum, *sink, 1, &old_scale, &new_scale);
    const vf scale = vf_set1(old_scale), divisor = vf_set1(sum);
    for (int32_t d = 0; d < value_dim; d += 16) store_at(to, d, value_dim, vf_div(vf_mul(vf_load(out + d), scale), divisor));
}

/* Scores and weights of a block; returns through n where what each query sees of it ends, 0: it sees nothing. */
INLINE const float *attend_enter(const struct attend *a, struct attend_state *s, int32_t from, int32_t *n, float *max, float *sum) {
    const uint8_t *const block = a->pool + (size_t)a->table[from / KV_BLOCK] * a->block_bytes;
    const float *const keys = (const float *)(const void *)(block + a->k_offset);
    int32_t least = KV_BLOCK, most = 0;
    for (int j = 0; j < a->n; j++) {
        const bool seen = a->n_keys[j] > from && a->first_key[j] < from + KV_BLOCK;
        n[j] = !seen ? 0 : a->n_keys[j] - from < KV_BLOCK ? a->n_keys[j] - from : KV_BLOCK;
        s->low[j] = seen && a->first_key[j] > from ? a->first_key[j] - from : 0;
        least = seen && s->low[j] < least ? s->low[j] : least;
        most = n[j] > most ? n[j] : most;
    }
    for (int32_t first = least & ~15; first < most; first += 16) {
#define CALL(j, T) attend_scores(a, keys, s, n, first, j, T)
        BY_FOURS(a->n, CALL);
#undef CALL
    }
    for (int j = 0; j < a->n; j++) {
        if (n[j] > 0) attend_weights(s->p[j], s->low[j], n[j], &max[j], &sum[j]);
    }
    return (const float *)(const void *)(block + a->v_offset);
}

static void kernel_attend(const struct attend *a, int32_t block) {
    struct attend_state s;
    const size_t floats = attend_stride(a);
    int32_t first = block < 0 ? INT32_MAX : block * KV_BLOCK, last = block < 0 ? 0 : first + 1;
    for (int j = 0; j < a->n; j++) {
        s.max[j] = -3.4e38f;
        s.sum[j] = 0;
        if (block < 0 && a->first_key[j] < first) first = a->first_key[j];
        if (block < 0 && a->n_keys[j] > last) last = a->n_keys[j];
    }
    for (size_t i = 0; i < (size_t)a->n * floats; i++) s.out[i] = -0.0f; /* the one number that adds nothing, not even a sign */
    for (int32_t from = first & ~(KV_BLOCK - 1); from < last; from += KV_BLOCK) {
        int32_t n[ATTEND_TILE] = {0};
        float max[ATTEND_TILE], sum[ATTEND_TILE], old_scale[ATTEND_TILE], new_scale[ATTEND_TILE];
        const float *const values = attend_enter(a, &s, from, n, max, sum);
        for (int j = 0; j < a->n; j++) {
            if (n[j] > 0) attend_join(&s.max[j], &s.sum[j], max[j], sum[j], &old_scale[j], &new_scale[j]);
        }
        attend_tile_values(a, values, &s, n, old_scale, new_scale);
    }
    for (int j = 0; j < a->n; j++) {
        const float *const out = s.out + (size_t)j * floats;
        if (block < 0) attend_end(a->out[j], out, s.max[j], s.sum[j], a->sink[j], a->value_dim);
        if (block < 0 || s.sum[j] == 0) continue;
        a->partial[j][0] = s.max[j];
        a->partial[j][1] = s.sum[j];
        memcpy(a->partial[j] + 2, out, floats * sizeof *out);
    }
}

static void kernel_attend_merge(const float *partials, int32_t n_blocks, int32_t value_dim, const float *sink, float *to) {
    float max = -3.4e38f, sum = 0, out[HEAD_DIM_MAX], old_scale, new_scale;
    const size_t floats = attend_partial_floats(value_dim);
    for (size_t d = 0; d < floats - 2; d++) out[d] = -0.0f;
    for (int32_t b = 0; b < n_blocks; b++, partials += floats) {
        attend_join(&max, &sum, partials[0], partials[1], &old_scale, &new_scale);
        for (size_t d = 0; d < floats - 2; d += 16) {
            const vf old = vf_mul(vf_load(out + d), vf_set1(old_scale));
            vf_store(out + d, vf_fma(vf_load(partials + 2 + d), vf_set1(new_scale), old));
        }
    }
    attend_end(to, out, max, sum, sink, value_dim);
}

/* ---- convolution, delta rule ----------------------------------------------------------------------------------- */

static void kernel_convolve(float *x, size_t stride, int32_t n, int32_t cols, const float *weight, size_t w_stride,
                            int32_t width, float *past, bool silu) {
    for (int32_t row = 0; row < n; row++, x += stride) {
        for (int32_t i = 0; i < cols; i += 16) {
            vf sum = vf_set1(0);
            for (int32_t j = 0; j < width; j++) {
                const vf before = load_at(j == width - 1 ? x : past + (size_t)j * (size_t)cols, i, cols);
                sum = vf_fma(before, load_at(weight + (size_t)j * w_stride, i, cols), sum);
                if (j > 0) store_at(past + (size_t)(j - 1) * (size_t)cols, i, cols, before);
            }
            store_at(x, i, cols, silu ? vf_sigmoid_mul(sum, sum) : sum);
        }
    }
}

/* T times 16 lanes of the state, which stay in the first cache over all rows. A lane's sums run over key_dim upwards. */
INLINE void delta_lanes(const struct delta *d, int32_t first, const int T) {
    const size_t tile = (size_t)d->key_dim * 16;
    const vf scale = vf_set1(1.0f / __builtin_sqrtf((float)d->key_dim)), one = vf_set1(1), rate = vf_exp(vf_set1(d->log_rate));
    float *const state = d->state + (size_t)first * tile;
    for (size_t at = 0; at < (size_t)d->n * d->stride; at += d->stride) {
        const float *const q = d->q + at, *const k = d->k + at;
        float *const v = d->v + at + first * 16;
        const vf beta = vf_mul(vf_sigmoid_mul(one, vf_set1(d->beta[at])), scale);
        const vf decay = vf_exp(vf_mul(vf_sub(vf_set1(0), rate), vf_softplus(vf_set1(d->decay[at] + d->bias))));
        vf step[4], out[4];
        UNROLL for (int t = 0; t < T; t++) step[t] = out[t] = vf_set1(0);
        for (int32_t i = 0; i < d->key_dim; i++) {
            UNROLL for (int t = 0; t < T; t++) {
                step[t] = vf_fma(vf_load(state + (size_t)t * tile + (size_t)i * 16), vf_set1(k[i]), step[t]);
                KEEP(step[t]);
            }
        }
        UNROLL for (int t = 0; t < T; t++) {
            const vf held = vf_mul(vf_mul(step[t], decay), scale);
            step[t] = vf_mul(vf_sub(load_at(v, t * 16, d->value_dim - first * 16), held), beta);
        }
        for (int32_t i = 0; i < d->key_dim; i++) {
            UNROLL for (int t = 0; t < T; t++) {
                float *const s = state + (size_t)t * tile + (size_t)i * 16;
                const vf next = vf_fma(step[t], vf_set1(k[i]), vf_mul(vf_load(s), decay));
                vf_store(s, next);
                out[t] = vf_fma(next, vf_set1(q[i]), out[t]);
                KEEP(out[t]);
            }
        }
        UNROLL for (int t = 0; t < T; t++) store_at(v, t * 16, d->value_dim - first * 16, vf_mul(vf_mul(out[t], scale), scale));
    }
}

static void kernel_delta(const struct delta *d) {
#define CALL(j, T) delta_lanes(d, j, T)
    BY_FOURS((d->value_dim + 15) / 16, CALL);
#undef CALL
}

const struct kernels KERNELS = {
    .name = KERNELS_NAME,
    .matmul = {[TYPE_F32] = matmul_f32, [TYPE_BF16] = matmul_bf16, [TYPE_Q8] = matmul_q8, [TYPE_Q4] = matmul_q4,
               [TYPE_Q6] = matmul_q6, [TYPE_MXFP4] = matmul_mxfp4},
    .quantize = kernel_quantize,
    .rms_norm = kernel_rms_norm,
    .centre = kernel_centre,
    .soft_cap = kernel_soft_cap,
    .silu_mul = kernel_silu_mul,
    .sigmoid_mul = kernel_sigmoid_mul,
    .convolve = kernel_convolve,
    .delta = kernel_delta,
    .argmax = kernel_argmax,
    .softmax = kernel_softmax,
    .rotate = kernel_rotate,
    .add = kernel_add,
    .add_scaled = kernel_add_scaled,
    .clamp = kernel_clamp,
    .dot = kernel_dot,
    .exp = kernel_exp,
    .attend = kernel_attend,
    .attend_merge = kernel_attend_merge,
    .read_row = kernel_read_row,
    .all_finite = kernel_all_finite,
};
