/* quantize.c: the search for the scales of q4 and q6; who calls puts its numbers in the order of a file.
 *
 * Owns: choosing units, steps and quants so that the weighted squared error of a super-group is small: a line for each
 * group (least squares over candidates), steps that are multiples of common units, then descent on the error itself.
 * Refuses: weights that are not finite or too large; the caller looks for them. Lanes never mix, and there is nothing but
 * + - * /, comparisons and bits, so results are the same on every machine. 4 lanes are the vector of every 64-bit
 * machine; compilers take wider ones apart where they may not use them. */
#include "colibri.h"

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

enum { LANES = 4, COLS = 256, GROUPS = 8, GROUP = 32, RUNS = 16, RUN = 16 }; /* of a super-group; columns of each */

#define TO_BITS 0x1.8p23f /* added to a small number it rounds to nearest even, into the low bits */

INLINE vf all(float x) { return (vf){x, x, x, x}; }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf between(vf v, float low, float high) { return smaller(larger(v, all(low)), all(high)); }
INLINE vf nearest(vf v) { return (v + TO_BITS) - TO_BITS; }
/* a / b, 0 where b is 0, negative or too small to divide by */
INLINE vf over(vf a, vf b) { const vi sound = b > 1e-30f; return choose(sound, a / choose(sound, b, all(1)), all(0)); }

/* Rounded to the numbers of f16 from 0 on. Its subnormals are multiples of the last bit of floats from 0.5 to 1. */
INLINE vf as_f16(vf v) {
    const vf least = between(v, 0, 65504.0f);
    const vu bits = (vu)least, normal = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    return choose(least < 0x1p-14f, (least + 0.5f) - 0.5f, (vf)normal);
}

/* A super-group of LANES rows, and what the squared error of each element costs. */
struct strip { vf x[COLS], cost[COLS]; };

/* q4: value = q d step[g] - dmin step[8 + g], steps from 0 to 63; q6: value = q d step[r], steps from 0 to 127. */
struct scales { vf d, dmin, step[RUNS]; };

/* Weighted sums over a group: of 1, x, x^2; and with its quants q: of q, q^2, q x. */
struct sums { vf one, x, xx, q, qq, qx; };

struct line { vf scale, min, error; }; /* x = q scale - min, and its weighted squared error */

INLINE vf q4_quant(vf x, vf inverse, vf min) { return nearest(between((x + min) * inverse, 0, 15)); }

/* The quants of a group by one scale and minimum, into s. in_range: the caller knows that none needs clipping. */
INLINE void sum_quants(const vf *x, const vf *cost, vf inverse, vf min, bool in_range, struct sums *s) {
    s->q = s->qq = s->qx = all(0);
    for (int k = 0; k < GROUP; k++) {
        const vf q = in_range ? nearest((x[k] + min) * inverse) : q4_quant(x[k], inverse, min), cq = cost[k] * q;
        s->q += cq;
        s->qq += cq * q;
        s->qx += cq * x[k];
    }
}

/* The line of least squares through (q, x) with scale and min not negative. */
INLINE struct line least_squares(const struct sums *s) {
    const vf det = s->one * s->qq - s->q * s->q;
    const vi sound = det > 1e-5f * s->one * s->qq; /* else all quants are equal */
    const vf a = over(s->one * s->qx - s->x * s->q, det), b = over(s->q * s->qx - s->qq * s->x, det);
    const vi free = sound & (a > 0) & (b > 0), level = ~sound & (s->x < 0);
    const vf scale = choose(free, a, choose(level, all(0), larger(over(s->qx, s->qq), all(0))));
    const vf min = choose(free, b, choose(level, over(-s->x, s->one), all(0)));
    const vf error = (s->xx + scale * scale * s->qq + min * min * s->one) +
                     2.0f * ((min * s->x - scale * s->qx) - scale * min * s->q);
    return (struct line){scale, min, error};
}

/* The best line for one group among those that begin with its range cut into 12 to 16 steps, then refined: quants by
 * the line, line by the quants. *s: the sums of its quants. */
static struct line search_line(const vf *x, const vf *cost, struct sums *s) {
    enum { STEPS = 24, REFINEMENTS = 2 };
    vf low = all(0), high = x[0];
    *s = (struct sums){0};
    for (int k = 0; k < GROUP; k++) {
        const vf wx = cost[k] * x[k];
        low = smaller(low, x[k]);
        high = larger(high, x[k]);
        s->one += cost[k];
        s->x += wx;
        s->xx += wx * x[k];
    }
    const vf unit = over(all(1), high - low);
    struct line best = {all(0), -low, all(FLT_MAX)};
    struct sums next = *s;
    for (int i = 0; i < STEPS + REFINEMENTS; i++) {
        const float steps = 12 + 0.17f * (float)i;
        if (i >= STEPS) sum_quants(x, cost, over(all(1), best.scale), best.min, false, &next);
        else if (steps < 15.4f) sum_quants(x, cost, unit * steps, -low, true, &next);
        else sum_quants(x, cost, unit * steps, -low, false, &next);
        const struct line line = least_squares(&next);
        const vi better = line.error < best.error;
        best.scale = choose(better, line.scale, best.scale);
        best.min = choose(better, line.min, best.min);
        best.error = choose(better, line.error, best.error);
        s->q = choose(better, next.q, s->q);
        s->qq = choose(better, next.qq, s->qq);
        s->qx = choose(better, next.qx, s->qx);
    }
    return best;
}

/* The f16 unit whose multiples k[g] = 0 … most come nearest to all targets, each counting by its curvature. Every
 * unit that is exact has a multiple from most / 2 on of the largest target, or its half has. */
static vf common_unit(int n, const vf *target, const vf *curvature, int most, vf *k) {
    vf top = all(0), best = all(0), least = all(FLT_MAX);
    for (int g = 0; g < n; g++) top = larger(top, target[g]);
    const vf smallest = choose(top > 0x1p-25f, all(0x1p-24f), all(0)); /* of f16 */
    for (int steps = most; steps > most / 2; steps--) {
        const vf unit = larger(as_f16(top / (float)steps), smallest), inverse = over(all(1), unit);
        vf error = all(0);
        for (int g = 0; g < n; g++) {
            const vf off = target[g] - unit * nearest(smaller(target[g] * inverse, all((float)most)));
            error += curvature[g] * off * off;
        }
        const vi better = error < least;
        best = choose(better, unit, best);
        least = choose(better, error, least);
    }
    for (int g = 0; g < n; g++) k[g] = nearest(smaller(target[g] * over(all(1), best), all((float)most)));
    return best;
}

/* First scales: each group's line, rounded to common units; the minima follow the rounded scales. */
static void first_scales(const struct strip *p, struct sums *s, struct scales *out) {
    vf target[GROUPS] = {0}, curvature[GROUPS] = {0};
    for (int g = 0; g < GROUPS; g++) {
        target[g] = search_line(p->x + g * GROUP, p->cost + g * GROUP, &s[g]).scale;
        const vf free = s[g].qq - over(s[g].q * s[g].q, s[g].one); /* 0 if all quants are equal */
        curvature[g] = larger(free, all(0)) + 1e-3f * s[g].qq;
    }
    out->d = common_unit(GROUPS, target, curvature, 63, out->step);
    for (int g = 0; g < GROUPS; g++) {
        target[g] = larger(over(out->d * out->step[g] * s[g].q - s[g].x, s[g].one), all(0));
        curvature[g] = s[g].one;
    }
    out->dmin = common_unit(GROUPS, target, curvature, 63, out->step + GROUPS);
}

INLINE vf group_error(const vf *x, const vf *cost, vf scale, vf min) {
    const vf inverse = over(all(1), scale);
    vf error = all(0);
    for (int k = 0; k < GROUP; k++) {
        const vf off = (x[k] + min) - q4_quant(x[k], inverse, min) * scale;
        error += cost[k] * off * off;
    }
    return error;
}

/* Moves every sc and m by up to 2 to where the group's error is least, and returns the sum of errors. Larger scales
 * want larger minima, so the two move together or nearly so. */
static vf improve(const struct strip *p, struct scales *s) {
    vf sum = all(0);
    for (int g = 0; g < GROUPS; g++) {
        const vf sc = s->step[g], m = s->step[GROUPS + g];
        vf least = all(FLT_MAX);
        for (int i = -2; i <= 2; i++) {
            for (int j = i > -2 ? i - 1 : i; j <= i + 1 && j <= 2; j++) {
                const vf a = between(sc + (float)i, 0, 63), b = between(m + (float)j, 0, 63);
                const vf error = group_error(p->x + g * GROUP, p->cost + g * GROUP, s->d * a, s->dmin * b);
                const vi better = error < least;
                least = choose(better, error, least);
                s->step[g] = choose(better, a, s->step[g]);
                s->step[GROUPS + g] = choose(better, b, s->step[GROUPS + g]);
            }
        }
        sum += least;
    }
    return sum;
}

/* d and dmin of least squares for the quants that the scales give now; they stay where that has no answer. */
static void refit_units(const struct strip *p, struct sums *s, struct scales *t) {
    vf aa = all(0), ab = aa, bb = aa, ax = aa, bx = aa; /* a = sc q and b = m, weighted */
    for (int g = 0; g < GROUPS; g++) {
        const vf sc = t->step[g], m = t->step[GROUPS + g];
        sum_quants(p->x + g * GROUP, p->cost + g * GROUP, over(all(1), t->d * sc), t->dmin * m, false, &s[g]);
        aa += sc * sc * s[g].qq;
        ab += sc * m * s[g].q;
        bb += m * m * s[g].one;
        ax += sc * s[g].qx;
        bx += m * s[g].x;
    }
    const vf det = aa * bb - ab * ab, d = over(bb * ax - ab * bx, det), dmin = over(ab * ax - aa * bx, det);
    const vi both = (det > 1e-5f * aa * bb) & (d > 0) & (dmin > 0), alone = (bb <= 0) & (ax > 0);
    t->d = choose(both, as_f16(d), choose(alone, as_f16(over(ax, aa)), t->d));
    t->dmin = choose(both, as_f16(dmin), t->dmin);
}

static void fit_q4(const struct strip *p, struct scales *best) {
    struct sums s[GROUPS];
    first_scales(p, s, best);
    const vf error = improve(p, best);
    struct scales next = *best;
    refit_units(p, s, &next);
    const vi better = improve(p, &next) < error;
    best->d = choose(better, next.d, best->d);
    best->dmin = choose(better, next.dmin, best->dmin);
    for (int i = 0; i < RUNS; i++) best->step[i] = choose(better, next.step[i], best->step[i]);
}

INLINE vf q6_quant(vf x, vf inverse) { return nearest(between(x * inverse, -32, 31)); }

/* The scale of least squares best among those that begin with a run's lowest x at -31.1 to -32.9. *curvature: what the
 * square of an error in it costs. */
static vf search_scale(const vf *x, const vf *cost, vf *curvature) {
    vf peak = all(0), best = all(0), scale = all(0);
    for (int k = 0; k < RUN; k++) peak = larger(peak, -x[k]);
    *curvature = all(0);
    for (int i = -9; i <= 9; i++) {
        const vf inverse = over(all(32 + 0.1f * (float)i), peak);
        vf qq = all(0), qx = all(0);
        for (int k = 0; k < RUN; k++) {
            const vf q = q6_quant(x[k], inverse), cq = cost[k] * q;
            qq += cq * q;
            qx += cq * x[k];
        }
        const vf found = over(qx, qq), gain = found * qx;
        const vi better = gain > best;
        best = choose(better, gain, best);
        scale = choose(better, found, scale);
        *curvature = choose(better, qq, *curvature);
    }
    return scale;
}

static void fit_q6(const struct strip *p, struct scales *s) {
    vf scale[RUNS], curvature[RUNS];
    for (int r = 0; r < RUNS; r++) scale[r] = search_scale(p->x + r * RUN, p->cost + r * RUN, &curvature[r]);
    s->d = common_unit(RUNS, scale, curvature, 127, s->step);
}

/* Integers from 0 to 255, a byte for each lane. */
INLINE void store_bytes(uint8_t *to, vf v) {
    const vu bits = (vu)(v + TO_BITS);
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)bits[i];
}

int32_t colibri_quantize(int32_t type, int32_t n, const float *weights, const float *costs, float *units, uint8_t *steps,
                         uint8_t *quants) {
    const bool q4 = type == 5;
    const size_t stride = (size_t)n;
    if ((!q4 && type != 6) || n < 0 || n % LANES != 0 || !weights || !costs || !units || !steps || !quants) {
        return COLIBRI_ERROR_ARGUMENT;
    }
    for (size_t at = 0; at < stride; at += LANES) {
        struct strip p;
        struct scales s = {0};
        for (size_t k = 0; k < COLS; k++) {
            memcpy(&p.x[k], weights + k * stride + at, sizeof *p.x);
            memcpy(&p.cost[k], costs + k * stride + at, sizeof *p.cost);
        }
        if (q4) fit_q4(&p, &s);
        else fit_q6(&p, &s);
        for (size_t k = 0; k < COLS; k++) {
            const vf inverse = over(all(1), s.d * s.step[q4 ? k / GROUP : k / RUN]);
            const vf q = q4 ? q4_quant(p.x[k], inverse, s.dmin * s.step[GROUPS + k / GROUP]) : q6_quant(p.x[k], inverse) + 32;
            store_bytes(quants + k * stride + at, q);
        }
        for (size_t i = 0; i < RUNS; i++) store_bytes(steps + i * stride + at, s.step[i]);
        memcpy(units + at, &s.d, sizeof s.d);
        memcpy(units + stride + at, &s.dmin, sizeof s.dmin);
    }
    return COLIBRI_OK;
}
