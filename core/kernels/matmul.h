/* matmul.h: matrix products of every weight type, and the look-up of a row: a part of body.h, which includes it once for
 * each instruction set. Refuses: dividing the work; a caller gives panels and rows. */

/* Most accumulators that a register tile may hold: panels x activation rows. */
enum { TILE_MAX = MATMUL_TILE > 4 ? MATMUL_TILE : 4 };

INLINE const uint8_t *x_row(const struct matmul *m, int32_t t)
{
    return (const uint8_t *)m->x + m->x_stride * (size_t)(m->x_rows == NULL ? t : m->x_rows[t]);
}

INLINE void store_tile(const struct matmul *m, int32_t panel, int32_t t, vf v)
{
    float *const y = m->y_rows == NULL ? m->y + (size_t)t * m->y_stride : m->y_rows[t];
    store_at(y, (panel - m->y_panel) * PANEL_ROWS, m->w->rows - m->y_panel * PANEL_ROWS, v);
}

/* P panels from `panel` on, T activation rows from t on; P and T are constants where it is called. */
INLINE void tile_f32(const struct matmul *m, int32_t panel, int32_t t, const int P, const int T)
{
    const size_t bytes = panel_bytes(TYPE_F32, (uint64_t)m->w->cols);
    const uint8_t *w = m->w->data + (size_t)panel * bytes;
    const float *x[TILE_MAX];
    vf acc[TILE_MAX];
    UNROLL for (int j = 0; j < T; j++) x[j] = (const float *)(const void *)x_row(m, t + j);
    UNROLL for (int i = 0; i < P * T; i++) acc[i] = vf_set1(0);
    for (int32_t k = 0; k < m->w->cols; k++, w += 64) {
        UNROLL for (int p = 0; p < P; p++) {
            const vf weight = vf_load((const float *)(const void *)(w + (size_t)p * bytes));
            UNROLL for (int j = 0; j < T; j++) acc[p * T + j] = vf_fma(weight, vf_set1(x[j][k]), acc[p * T + j]);
        }
    }
    UNROLL for (int i = 0; i < P * T; i++) store_tile(m, panel + i / T, t + i % T, acc[i]);
}

INLINE void tile_bf16(const struct matmul *m, int32_t panel, int32_t t, const int P, const int T)
{
    const size_t bytes = panel_bytes(TYPE_BF16, (uint64_t)m->w->cols);
    const uint8_t *w = m->w->data + (size_t)panel * bytes;
    const float *x[TILE_MAX];
    vf acc[TILE_MAX];
    UNROLL for (int j = 0; j < T; j++) x[j] = (const float *)(const void *)x_row(m, t + j);
    UNROLL for (int i = 0; i < P * T; i++) acc[i] = vf_set1(0);
    for (int32_t k = 0; k < m->w->cols; k += 2, w += 64) {
        const bool pair = k + 1 < m->w->cols;
        UNROLL for (int p = 0; p < P; p++) {
            vf even, odd;
            vf_bf16_pair(w + (size_t)p * bytes, &even, &odd);
            UNROLL for (int j = 0; j < T; j++) {
                vf sum = vf_fma(even, vf_set1(x[j][k]), acc[p * T + j]);
                if (pair) sum = vf_fma(odd, vf_set1(x[j][k + 1]), sum);
                acc[p * T + j] = sum;
            }
        }
    }
    UNROLL for (int i = 0; i < P * T; i++) store_tile(m, panel + i / T, t + i % T, acc[i]);
}

INLINE void tile_q8(const struct matmul *m, int32_t panel, int32_t t, const int P, const int T)
{
    const size_t cols = (size_t)m->w->cols, bytes = panel_bytes(TYPE_Q8, cols), groups = q8_groups(cols);
    const uint8_t *const w = m->w->data + (size_t)panel * bytes;
    const uint8_t *x[TILE_MAX];
    vf acc[TILE_MAX];
    UNROLL for (int j = 0; j < T; j++) x[j] = x_row(m, t + j);
    UNROLL for (int i = 0; i < P * T; i++) acc[i] = vf_set1(0);
    for (size_t g = 0; g < groups; g++) {
        vi dot[TILE_MAX];
        UNROLL for (int i = 0; i < P * T; i++) {
#ifdef Q8_SIGNED
            dot[i] = vi_set1(0);
#else
            dot[i] = vi_set1(((const int32_t *)(const void *)(x[i % T] + q8_offsets_at(cols)))[g]);
#endif
        }
#pragma GCC unroll 1
        for (int quad = 0; quad < Q8_GROUP / 4; quad++) {
            if (P > T) { /* few rows: activations wait in registers, a panel's weights are used at once */
                aq a[4];
                UNROLL for (int j = 0; j < T; j++) a[j] = aq_load(x[j] + g * Q8_GROUP + (size_t)quad * 4);
                UNROLL for (int p = 0; p < P; p++) {
                    const wq weight = wq_load(w + (size_t)p * bytes + g * 512 + (size_t)quad * 64);
                    UNROLL for (int j = 0; j < T; j++) dot[p * T + j] = vi_dot4(dot[p * T + j], weight, a[j]);
                }
                continue;
            }
            wq weight[4];
            UNROLL for (int p = 0; p < P; p++) weight[p] = wq_load(w + (size_t)p * bytes + g * 512 + (size_t)quad * 64);
            UNROLL for (int j = 0; j < T; j++) {
                const aq a = aq_load(x[j] + g * Q8_GROUP + (size_t)quad * 4);
                UNROLL for (int p = 0; p < P; p++) dot[p * T + j] = vi_dot4(dot[p * T + j], weight[p], a);
            }
        }
        UNROLL for (int p = 0; p < P; p++) {
            const vf ws = vf_f16(w + (size_t)p * bytes + groups * 512 + g * 32);
            UNROLL for (int j = 0; j < T; j++) {
                const vf xs = vf_set1(((const float *)(const void *)(x[j] + q8_scales_at(cols)))[g]);
                acc[p * T + j] = vf_fma(vf_from_vi(dot[p * T + j]), vf_mul(ws, xs), acc[p * T + j]);
            }
        }
    }
    UNROLL for (int i = 0; i < P * T; i++) store_tile(m, panel + i / T, t + i % T, acc[i]);
}

/* Scales and minima (negated) of the 8 groups of a q4 super-group, 16 rows each; p: its 256 bytes (docs/FORMAT.md). */
INLINE void q4_scales(const uint8_t *p, vf scale[Q4_SUPER], vf minus[Q4_SUPER])
{
    const vf d = vf_f16(p), dmin = vf_sub(vf_set1(0), vf_f16(p + 32));
    const vi word[3] = {vi_load(p + 64), vi_load(p + 128), vi_load(p + 192)};
    for (int i = 0; i < 5; i++) scale[i] = vf_mul(d, vf_from_vi(vi_bits(word[0], 6 * i, 6)));
    for (int i = 5; i < 8; i++) scale[i] = vf_mul(d, vf_from_vi(vi_bits(word[1], 6 * (i - 5), 6)));
    for (int i = 0; i < 2; i++) minus[i] = vf_mul(dmin, vf_from_vi(vi_bits(word[1], 6 * (i + 3), 6)));
    for (int i = 2; i < 7; i++) minus[i] = vf_mul(dmin, vf_from_vi(vi_bits(word[2], 6 * (i - 2), 6)));
    const vf low = vf_from_vi(vi_bits(word[0], 30, 2)), middle = vf_from_vi(vi_bits(word[1], 30, 2));
    const vf high = vf_from_vi(vi_bits(word[2], 30, 2));
    minus[7] = vf_mul(dmin, vf_fma(high, vf_set1(16), vf_fma(middle, vf_set1(4), low)));
}

struct q4_factors { vf scale[4][Q4_SUPER], minus[4][Q4_SUPER]; }; /* of up to 4 panels */

/* sum += scale x (sum of q x), sum -= minimum x (sum of x), both fused; g: the group in the row x, i in its super-group. */
INLINE vf q4_add(vf sum, ni dot, const struct q4_factors *f, int p, size_t i, const uint8_t *x, size_t cols, size_t g)
{
    const vf xs = vf_set1(((const float *)(const void *)(x + q8_scales_at(cols)))[g]);
    const vf total = vf_set1(((const float *)(const void *)(x + q8_sums_at(cols)))[g]);
    return vf_fma(f->minus[p][i], total, vf_fma(vf_from_vi(ni_sum(dot)), vf_mul(f->scale[p][i], xs), sum));
}

/* One group of one row: its quants wait in registers, the panels come one by one. */
INLINE void q4_row_group(const uint8_t *w, size_t bytes, const uint8_t *x, size_t cols, size_t g, size_t i,
                         const struct q4_factors *f, const int P, vf *acc)
{
    aq a[8];
    UNROLL for (int k = 0; k < 8; k++) a[k] = aq_load(x + g * Q8_GROUP + (size_t)k * 4);
#pragma GCC unroll 1
    for (int p = 0; p < P; p++) {
        ni dot = ni_zero();
        UNROLL for (int quad = 0; quad < 4; quad++) {
            nq low, high;
            nq_load(w + (size_t)p * bytes + g * 256 + (size_t)quad * 64, &low, &high);
            dot = ni_dot4(ni_dot4(dot, low, a[quad]), high, a[quad + 4]);
        }
        acc[p] = q4_add(acc[p], dot, f, p, i, x, cols, g);
    }
}

/* One group of T rows, a quad at a time: its weights are taken apart once. */
INLINE void q4_tile_group(const uint8_t *w, size_t bytes, const uint8_t *const *x, size_t cols, size_t g, size_t i,
                          const struct q4_factors *f, const int P, const int T, vf *acc)
{
    ni dot[TILE_MAX];
    UNROLL for (int k = 0; k < P * T; k++) dot[k] = ni_zero();
#pragma GCC unroll 1
    for (size_t quad = 0; quad < 4; quad++) {
        UNROLL for (int p = 0; p < P; p++) {
            nq low, high;
            nq_load(w + (size_t)p * bytes + g * 256 + quad * 64, &low, &high);
            UNROLL for (int j = 0; j < T; j++) {
                const uint8_t *const at = x[j] + g * Q8_GROUP + quad * 4;
                dot[p * T + j] = ni_dot4(ni_dot4(dot[p * T + j], low, aq_load(at)), high, aq_load(at + 16));
            }
        }
    }
    UNROLL for (int k = 0; k < P * T; k++) acc[k] = q4_add(acc[k], dot[k], f, k / T, i, x[k % T], cols, g);
}

INLINE void tile_q4(const struct matmul *m, int32_t panel, int32_t t, const int P, const int T)
{
    const size_t cols = (size_t)m->w->cols, bytes = panel_bytes(TYPE_Q4, cols), groups = q8_groups(cols);
    const uint8_t *const w = m->w->data + (size_t)panel * bytes;
    const uint8_t *x[TILE_MAX];
    vf acc[TILE_MAX];
    UNROLL for (int j = 0; j < T; j++) x[j] = x_row(m, t + j);
    UNROLL for (int i = 0; i < P * T; i++) acc[i] = vf_set1(0);
    for (size_t first = 0; first < groups; first += Q4_SUPER) {
        struct q4_factors f;
        for (int p = 0; p < P; p++) {
            q4_scales(w + (size_t)p * bytes + (groups + first / Q4_SUPER) * 256, f.scale[p], f.minus[p]);
        }
        for (size_t i = 0; i < Q4_SUPER && first + i < groups; i++) {
            if (T == 1) q4_row_group(w, bytes, x[0], cols, first + i, i, &f, P, acc);
            else q4_tile_group(w, bytes, x, cols, first + i, i, &f, P, T, acc);
        }
    }
    UNROLL for (int i = 0; i < P * T; i++) store_tile(m, panel + i / T, t + i % T, acc[i]);
}

/* Tiles of activation rows panel by panel; the rows left over one by one on several panels at a time, whose weights the
 * second of them finds in the cache. */
#define DEFINE_MATMUL(type)                                                                                      \
    static void matmul_##type(const struct matmul *m)                                                            \
    {                                                                                                            \
        const int32_t end = m->first_panel + m->n_panels, full = m->n - m->n % MATMUL_TILE;                      \
        const int32_t half = MATMUL_TILE > 4 ? m->n - m->n % 4 : full;                                           \
        for (int32_t p = m->first_panel; p < end; p++) {                                                         \
            for (int32_t t = 0; t < full; t += MATMUL_TILE) tile_##type(m, p, t, 1, MATMUL_TILE);                \
            if (half > full) tile_##type(m, p, full, 1, 4);                                                      \
        }                                                                                                        \
        int32_t p = m->first_panel;                                                                              \
        for (; MATMUL_PANELS > 1 && end - p >= 4; p += 4) {                                                      \
            for (int32_t t = half; t < m->n; t++) tile_##type(m, p, t, 4, 1);                                    \
        }                                                                                                        \
        for (; p < end; p++) {                                                                                   \
            for (int32_t t = half; t < m->n; t++) tile_##type(m, p, t, 1, 1);                                    \
        }                                                                                                        \
    }
DEFINE_MATMUL(f32)
DEFINE_MATMUL(bf16)
DEFINE_MATMUL(q8)
DEFINE_MATMUL(q4)

static void read_row_q8(const uint8_t *panel, size_t cols, size_t lane, float *out)
{
    const uint8_t *const scales = panel + q8_groups(cols) * 512;
    for (size_t k = 0, g = 0; k < cols; g++) {
        float scale[16];
        vf_store(scale, vf_f16(scales + g * 32));
        for (size_t i = 0; i < Q8_GROUP && k < cols; i++, k++) {
            out[k] = (float)(panel[g * 512 + i / 4 * 64 + lane * 4 + i % 4] - 128) * scale[lane];
        }
    }
}

static void read_row_q4(const uint8_t *panel, size_t cols, size_t lane, float *out)
{
    const size_t groups = q8_groups(cols);
    for (size_t first = 0; first < groups; first += Q4_SUPER) {
        vf scale[Q4_SUPER], minus[Q4_SUPER];
        q4_scales(panel + (groups + first / Q4_SUPER) * 256, scale, minus);
        for (size_t i = 0; i < Q4_SUPER && first + i < groups; i++) {
            float factor[16], least[16];
            vf_store(factor, scale[i]);
            vf_store(least, minus[i]);
            const uint8_t *const group = panel + (first + i) * 256 + lane * 4;
            for (size_t e = 0, k = (first + i) * Q8_GROUP; e < Q8_GROUP && k < cols; e++, k++) {
                const uint8_t pair = group[e % 16 / 4 * 64 + e % 4];
                out[k] = (float)(e < 16 ? pair & 15 : pair >> 4) * factor[lane] + least[lane];
            }
        }
    }
}

static void kernel_read_row(const struct matrix *w, int32_t r, float *out)
{
    const size_t cols = (size_t)w->cols, lane = (size_t)(r % PANEL_ROWS);
    const uint8_t *const panel = w->data + (size_t)(r / PANEL_ROWS) * panel_bytes(w->type, cols);
    if (w->type == TYPE_Q8) {
        read_row_q8(panel, cols, lane, out);
        return;
    }
    if (w->type == TYPE_Q4) {
        read_row_q4(panel, cols, lane, out);
        return;
    }
    for (size_t k = 0; k < cols; k++) {
        uint8_t bits[4] = {0};
        if (w->type == TYPE_F32) memcpy(bits, panel + k * 64 + lane * 4, 4);
        else memcpy(bits + 2, panel + k / 2 * 64 + lane * 4 + k % 2 * 2, 2); /* bf16 is the upper half of an f32 */
        memcpy(&out[k], bits, 4);
    }
}
