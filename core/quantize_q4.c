/* quantize_q4.c: the search for the scales of q4 and q6, and their bytes.
 *
 * Owns: choosing d, dmin, sc, m so that the weighted squared error of a super-group is small: a line for each group
 * (least squares over candidate steps), 6-bit multiples of common units, then descent on the error itself. Refuses:
 * checks of weights (quantize.c). */
#include "quantize_q4.h"

#include <float.h>
#include <stdbool.h>

#include "kernels/kernels.h"
#include "quantize_lanes.h"

enum { GROUP = Q8_GROUP };

/* The super-group [Q4_SUPER_COLS] of LANES rows, and what the squared error of each element counts. A group that ends early
 * repeats its last element with weight 0. */
struct strip {
    int32_t groups;
    vf x[Q4_SUPER_COLS], weight[Q4_SUPER_COLS];
};

/* value = q scale sc - q_min m; sc and m are integers from 0 to 63. */
struct scales {
    vf d, dmin, sc[Q4_SUPER], m[Q4_SUPER];
};

/* Weighted sums over a group: of 1, x, x^2; and with its quants q: of q, q^2, q x. */
struct sums {
    vf one, x, xx, q, qq, qx;
};

struct line { /* x = q scale - min, and its weighted squared error */
    vf scale, min, error;
};

INLINE vf q4_quant(vf x, vf inverse, vf min) { return nearest(between((x + min) * inverse, 0, 15)); }

/* The quants of a group by one scale and minimum, into s. in_range: the caller knows that none needs clipping. */
INLINE void sum_quants(const vf *x, const vf *weight, vf inverse, vf min, bool in_range, struct sums *s)
{
    s->q = s->qq = s->qx = all(0);
    for (int k = 0; k < GROUP; k++) {
        const vf q = in_range ? nearest((x[k] + min) * inverse) : q4_quant(x[k], inverse, min), wq = weight[k] * q;
        s->q += wq;
        s->qq += wq * q;
        s->qx += wq * x[k];
    }
}

/* The line of least squares through (q, x) with scale and min not negative. */
INLINE struct line least_squares(const struct sums *s)
{
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
static struct line search_line(const vf *x, const vf *weight, struct sums *s)
{
    enum { STEPS = 24, REFINEMENTS = 2 };
    vf low = all(0), high = x[0];
    *s = (struct sums){0};
    for (int k = 0; k < GROUP; k++) {
        const vf wx = weight[k] * x[k];
        low = smaller(low, x[k]);
        high = larger(high, x[k]);
        s->one += weight[k];
        s->x += wx;
        s->xx += wx * x[k];
    }
    const vf unit = over(all(1), high - low);
    struct line best = {all(0), -low, all(FLT_MAX)};
    struct sums next = *s;
    for (int i = 0; i < STEPS + REFINEMENTS; i++) {
        const float steps = 12 + 0.17f * (float)i;
        if (i >= STEPS) sum_quants(x, weight, over(all(1), best.scale), best.min, false, &next);
        else if (steps < 15.4f) sum_quants(x, weight, unit * steps, -low, true, &next);
        else sum_quants(x, weight, unit * steps, -low, false, &next);
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
static vf common_unit(int n, const vf *target, const vf *curvature, int most, vf *k)
{
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
static void first_scales(const struct strip *p, struct sums *s, struct scales *out)
{
    vf target[Q4_SUPER] = {0}, curvature[Q4_SUPER] = {0};
    for (int g = 0; g < p->groups; g++) {
        target[g] = search_line(p->x + g * GROUP, p->weight + g * GROUP, &s[g]).scale;
        const vf free = s[g].qq - over(s[g].q * s[g].q, s[g].one); /* 0 if all quants are equal */
        curvature[g] = larger(free, all(0)) + 1e-3f * s[g].qq;
    }
    out->d = common_unit(p->groups, target, curvature, 63, out->sc);
    for (int g = 0; g < p->groups; g++) {
        target[g] = larger(over(out->d * out->sc[g] * s[g].q - s[g].x, s[g].one), all(0));
        curvature[g] = s[g].one;
    }
    out->dmin = common_unit(p->groups, target, curvature, 63, out->m);
}

INLINE vf group_error(const vf *x, const vf *weight, vf scale, vf min)
{
    const vf inverse = over(all(1), scale);
    vf error = all(0);
    for (int k = 0; k < GROUP; k++) {
        const vf off = (x[k] + min) - q4_quant(x[k], inverse, min) * scale;
        error += weight[k] * off * off;
    }
    return error;
}

/* Moves every sc and m by up to 2 to where the group's error is least, and returns the sum of errors. Larger scales
 * want larger minima, so the two move together or nearly so. */
static vf improve(const struct strip *p, struct scales *s)
{
    vf sum = all(0);
    for (int g = 0; g < p->groups; g++) {
        const vf sc = s->sc[g], m = s->m[g];
        vf least = all(FLT_MAX);
        for (int i = -2; i <= 2; i++) {
            for (int j = i > -2 ? i - 1 : i; j <= i + 1 && j <= 2; j++) {
                const vf a = between(sc + (float)i, 0, 63), b = between(m + (float)j, 0, 63);
                const vf error = group_error(p->x + g * GROUP, p->weight + g * GROUP, s->d * a, s->dmin * b);
                const vi better = error < least;
                least = choose(better, error, least);
                s->sc[g] = choose(better, a, s->sc[g]);
                s->m[g] = choose(better, b, s->m[g]);
            }
        }
        sum += least;
    }
    return sum;
}

/* d and dmin of least squares for the quants that the scales give now; they stay where that has no answer. */
static void refit_units(const struct strip *p, struct sums *s, struct scales *t)
{
    vf aa = all(0), ab = aa, bb = aa, ax = aa, bx = aa; /* a = sc q and b = m, weighted */
    for (int g = 0; g < p->groups; g++) {
        const vf sc = t->sc[g], m = t->m[g];
        sum_quants(p->x + g * GROUP, p->weight + g * GROUP, over(all(1), t->d * sc), t->dmin * m, false, &s[g]);
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

static void fit_scales(const struct strip *p, struct scales *best)
{
    struct sums s[Q4_SUPER];
    *best = (struct scales){0};
    first_scales(p, s, best);
    const vf error = improve(p, best);
    struct scales next = *best;
    refit_units(p, s, &next);
    const vi better = improve(p, &next) < error;
    best->d = choose(better, next.d, best->d);
    best->dmin = choose(better, next.dmin, best->dmin);
    for (int g = 0; g < p->groups; g++) {
        best->sc[g] = choose(better, next.sc[g], best->sc[g]);
        best->m[g] = choose(better, next.m[g], best->m[g]);
    }
}

/* Columns of a tile [cols][16], of which the strip takes LANES rows. An element's error counts by its column's
 * importance, by the size of its group and, less, by its own; the scale of these weights is arbitrary. */
static void load_strip(const float *tile, int cols, const float *importance, struct strip *p)
{
    vf total = all(0);
    p->groups = (cols + GROUP - 1) / GROUP;
    for (int k = 0; k < p->groups * GROUP; k++) {
        p->x[k] = load(tile + (k < cols ? k : cols - 1) * PANEL_ROWS);
        if (k < cols) total += magnitude(p->x[k]);
    }
    const vf unit = over(all(1), total);
    for (int first = 0; first < cols; first += GROUP) {
        const int n = cols - first < GROUP ? cols - first : GROUP;
        vf *const x = p->x + first, *const weight = p->weight + first;
        vf size = all(0);
        for (int k = 0; k < n; k++) size += magnitude(x[k]);
        for (int k = 0; k < GROUP; k++) {
            weight[k] = k < n ? importance[first + k] * ((magnitude(x[k]) + 2.5f * size / (float)n) * unit) : all(0);
        }
    }
}

/* The record of a super-group; its 6-bit numbers fill three words, the last of them the ends that are left. */
static void store_scales(const struct scales *s, int lane, uint8_t *out)
{
    vu n[2 * Q4_SUPER];
    for (int g = 0; g < Q4_SUPER; g++) {
        n[g] = (vu)(s->sc[g] + TO_BITS) & 63;
        n[Q4_SUPER + g] = (vu)(s->m[g] + TO_BITS) & 63;
    }
    store_f16(out + lane * 2, f16_bits(s->d));
    store_f16(out + 32 + lane * 2, f16_bits(s->dmin));
    for (int word = 0; word < 3; word++) {
        vu bits = n[15] >> 2 * word << 30;
        for (int i = 0; i < 5; i++) bits |= n[5 * word + i] << 6 * i;
        store(out + 64 * (word + 1) + lane * 4, bits);
    }
}

void quantize_q4(const float *tile, int cols, const float *importance, int lane, uint8_t *quants, uint8_t *record)
{
    struct strip p;
    struct scales s;
    load_strip(tile + lane, cols, importance, &p);
    fit_scales(&p, &s);
    for (int g = 0; g < p.groups; g++) {
        const vf scale = s.d * s.sc[g], inverse = over(all(1), scale), min = s.dmin * s.m[g];
        for (int i = 0; i < 4; i++) {
            vu bits = {0};
            for (int nibble = 0; nibble < 8; nibble++) { /* those of a byte are 16 elements apart */
                const int k = g * GROUP + 4 * i + nibble / 2 + nibble % 2 * 16;
                if (k < cols) bits |= ((vu)(q4_quant(p.x[k], inverse, min) + TO_BITS) & 15) << 4 * nibble;
            }
            store(quants + g * 256 + i * 64 + lane * 4, bits);
        }
    }
    store_scales(&s, lane, record);
}

/* ---- q6: value = q d sc, q from -32 to 31, sc from -127 to 127; 16 elements share an sc ------------------------- */

enum { RUN = 16, RUNS = Q4_SUPER_COLS / RUN };

INLINE vf q6_quant(vf x, vf inverse) { return nearest(between(x * inverse, -32, 31)); }

/* The scale of least squares best among those that begin with a run's peak, which is negative, at -31.1 to -32.9.
 * *curvature: what the square of an error in it costs. */
static vf q6_search(const vf *x, const vf *weight, vf peak, vf *curvature)
{
    vf best = all(0), scale = all(0);
    *curvature = all(0);
    for (int i = -9; i <= 9; i++) {
        const vf inverse = over(all(32 + 0.1f * (float)i), peak);
        vf qq = all(0), qx = all(0);
        for (int k = 0; k < RUN; k++) {
            const vf q = q6_quant(x[k], inverse), wq = weight[k] * q;
            qq += wq * q;
            qx += wq * x[k];
        }
        const vf found = over(qx, qq), gain = found * qx;
        const vi better = gain > best;
        best = choose(better, gain, best);
        scale = choose(better, found, scale);
        *curvature = choose(better, qq, *curvature);
    }
    return scale;
}

void quantize_q6(const float *tile, int cols, const float *importance, int lane, uint8_t *quants, uint8_t *record)
{
    struct strip p;
    vf scale[RUNS] = {0}, curvature[RUNS] = {0}, sc[RUNS] = {0};
    vi turned[RUNS] = {0}; /* all ones: the run's signs were changed, so that its peak is negative */
    load_strip(tile + lane, cols, importance, &p);
    const int runs = p.groups * GROUP / RUN;
    for (int r = 0; r < runs; r++) {
        vf *const x = p.x + r * RUN, low = x[0], high = x[0];
        for (int k = 1; k < RUN; k++) low = smaller(low, x[k]), high = larger(high, x[k]);
        turned[r] = high > -low;
        for (int k = 0; k < RUN; k++) x[k] = choose(turned[r], -x[k], x[k]);
        scale[r] = q6_search(x, p.weight + r * RUN, larger(high, -low), &curvature[r]);
    }
    const vf d = common_unit(runs, scale, curvature, 127, sc);
    for (int r = 0; r < runs; r++) {
        const vf inverse = over(all(1), d * sc[r]);
        vu q[RUN];
        for (int k = 0; k < RUN; k++) {
            const vf value = r * RUN + k < cols ? q6_quant(p.x[r * RUN + k], inverse) : all(0);
            q[k] = (vu)(value + (TO_BITS + 32)) & 63;
        }
        for (int i = 0; i < 3; i++) {
            vu bits = {0};
            for (int j = 0; j < 4; j++) bits |= (q[4 * i + j] | (q[12 + j] >> 2 * i & 3) << 6) << 8 * j;
            store(quants + r * 192 + i * 64 + lane * 4, bits);
        }
    }
    store_f16(record + lane * 2, f16_bits(d));
    for (int r = 0; r < RUNS; r++) {
        const vu bits = (vu)(choose(turned[r], -sc[r], sc[r]) + TO_BITS);
        for (int i = 0; i < LANES; i++) record[32 + r * 16 + lane + i] = (uint8_t)bits[i];
    }
}
