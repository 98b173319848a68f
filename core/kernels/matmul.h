/* matmul.h: matrix products of every weight type, and the look-up of a row: a part of body.h, which includes it once for
 * each instruction set. Refuses: dividing the work; a caller gives panels and rows. */

enum {
    BLOCK_GROUPS = Q4_SUPER,                 /* groups of a panel that are taken apart at once */
    BLOCK_QUADS = BLOCK_GROUPS * Q8_GROUP / 4,
    SLAB = 64,                               /* rows that a panel's block is used for before the next block */
};

INLINE const uint8_t *x_row(const struct matmul *m, int32_t t)
{
    return (const uint8_t *)m->x + m->x_stride * (size_t)(m->x_rows == NULL ? t : m->x_rows[t]);
}

INLINE void store_sum(const struct matmul *m, int32_t panel, int32_t t, vf v)
{
    float *const y = m->y_rows == NULL ? m->y + (size_t)t * m->y_stride : m->y_rows[t];
    store_at(y, (panel - m->y_panel) * PANEL_ROWS, m->w->rows - m->y_panel * PANEL_ROWS, v);
}

INLINE vf x_scale(const uint8_t *x, size_t cols, size_t g)
{
    return vf_set1(((const float *)(const void *)(x + q8_scales_at(cols)))[g]);
}

INLINE vi q8_zero(const uint8_t *x, size_t cols, size_t g)
{
#ifdef Q8_SIGNED
    (void)x, (void)cols, (void)g;
    return vi_set1(0);
#else
    return vi_set1(((const int32_t *)(const void *)(x + q8_offsets_at(cols)))[g]);
#endif
}

/* sum += scale x (sum of q x), sum -= minimum x (sum of x), both fused. */
INLINE vf q4_add(vf sum, ni dot, vf scale, vf minus, const uint8_t *x, size_t cols, size_t g)
{
    const vf total = vf_set1(((const float *)(const void *)(x + q8_sums_at(cols)))[g]);
    return vf_fma(minus, total, vf_fma(vf_from_vi(ni_sum(dot)), vf_mul(scale, x_scale(x, cols, g)), sum));
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

/* Scales of group g of a panel of mxfp4, 16 rows, halved since elements come doubled: 2^(e - 126), a normal number,
 * times 2^-2. */
INLINE vf mxfp4_scale(const uint8_t *panel, size_t cols, size_t g)
{
    const vi e = vi_bits(vi_load(panel + q8_groups(cols) * 256 + g / MXFP4_FOURS * 64), (int)(g % MXFP4_FOURS) * 8, 8);
    return vf_mul(vf_times_pow2(vf_set1(1), vf_sub(vf_from_vi(e), vf_set1(126))), vf_set1(0.25f));
}

INLINE void mxfp4_load(const uint8_t *p, wq *low, wq *high)
{
    nq a, b;
    nq_load(p, &a, &b);
    *low = wq_mxfp4(a), *high = wq_mxfp4(b);
}

/* ---- few rows: P panels at a time, from where they lie, so that several streams of memory are read at once ----- */

INLINE void row_f32(const struct matmul *m, int32_t panel, int32_t t, const int P)
{
    const size_t bytes = panel_bytes(TYPE_F32, (uint64_t)m->w->cols);
    const uint8_t *w = m->w->data + (size_t)panel * bytes;
    const float *const x = (const float *)(const void *)x_row(m, t);
    vf acc[4];
    UNROLL for (int p = 0; p < P; p++) acc[p] = vf_set1(0);
    for (int32_t k = 0; k < m->w->cols; k++, w += 64) {
        UNROLL for (int p = 0; p < P; p++) {
            acc[p] = vf_fma(vf_load((const float *)(const void *)(w + (size_t)p * bytes)), vf_set1(x[k]), acc[p]);
        }
    }
    UNROLL for (int p = 0; p < P; p++) store_sum(m, panel + p, t, acc[p]);
}

INLINE void row_bf16(const struct matmul *m, int32_t panel, int32_t t, const int P)
{
    const size_t bytes = panel_bytes(TYPE_BF16, (uint64_t)m->w->cols);
    const uint8_t *w = m->w->data + (size_t)panel * bytes;
    const float *const x = (const float *)(const void *)x_row(m, t);
    vf acc[4];
    UNROLL for (int p = 0; p < P; p++) acc[p] = vf_set1(0);
    for (int32_t k = 0; k < m->w->cols; k += 2, w += 64) {
        const bool pair = k + 1 < m->w->cols;
        UNROLL for (int p = 0; p < P; p++) {
            vf even, odd;
            vf_bf16_pair(w + (size_t)p * bytes, &even, &odd);
            acc[p] = vf_fma(even, vf_set1(x[k]), acc[p]);
            if (pair) acc[p] = vf_fma(odd, vf_set1(x[k + 1]), acc[p]);
        }
    }
    UNROLL for (int p = 0; p < P; p++) store_sum(m, panel + p, t, acc[p]);
}

/* mxfp4: quads come in pairs from halves of 64 bytes. */
INLINE void row_bytes_q8(const struct matmul *m, int32_t panel, int32_t t, const int P, const bool mxfp4)
{
    const int quads = mxfp4 ? Q8_GROUP / 8 : Q8_GROUP / 4;
    const size_t cols = (size_t)m->w->cols, bytes = panel_bytes(m->w->type, cols), groups = q8_groups(cols);
    const uint8_t *const w = m->w->data + (size_t)panel * bytes, *const x = x_row(m, t);
    vf acc[4];
    UNROLL for (int p = 0; p < P; p++) acc[p] = vf_set1(0);
    for (size_t g = 0; g < groups; g++) {
        vi dot[4];
        UNROLL for (int p = 0; p < P; p++) dot[p] = q8_zero(x, cols, g);
#pragma GCC unroll 1
        for (int quad = 0; quad < quads; quad++) {
            const uint8_t *const at = x + g * Q8_GROUP + (size_t)quad * 4;
            const aq a = aq_load(at), b = mxfp4 ? aq_load(at + 16) : a;
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t *const from = w + (size_t)p * bytes + g * (mxfp4 ? 256 : 512) + (size_t)quad * 64;
                wq low, high;
                if (mxfp4) mxfp4_load(from, &low, &high);
                dot[p] = vi_dot4(dot[p], mxfp4 ? low : wq_load(from), a);
                if (mxfp4) dot[p] = vi_dot4(dot[p], high, b);
                KEEP(dot[p]);
            }
        }
        UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *const from = w + (size_t)p * bytes;
            const vf ws = mxfp4 ? mxfp4_scale(from, cols, g) : vf_f16(from + groups * 512 + g * 32);
            acc[p] = vf_fma(vf_from_vi(dot[p]), vf_mul(ws, x_scale(x, cols, g)), acc[p]);
        }
    }
    UNROLL for (int p = 0; p < P; p++) store_sum(m, panel + p, t, acc[p]);
}

#define row_q8(m, panel, t, P) row_bytes_q8(m, panel, t, P, false)
#define row_mxfp4(m, panel, t, P) row_bytes_q8(m, panel, t, P, true)

INLINE void row_q4(const struct matmul *m, int32_t panel, int32_t t, const int P)
{
    const size_t cols = (size_t)m->w->cols, bytes = panel_bytes(TYPE_Q4, cols), groups = q8_groups(cols);
    const uint8_t *const w = m->w->data + (size_t)panel * bytes, *const x = x_row(m, t);
    vf acc[4];
    UNROLL for (int p = 0; p < P; p++) acc[p] = vf_set1(0);
    for (size_t first = 0, n; first < groups; first += n) {
        n = groups - first < Q4_SUPER ? groups - first : Q4_SUPER;
        vf scale[4][Q4_SUPER], minus[4][Q4_SUPER];
        for (int p = 0; p < P; p++) q4_scales(w + (size_t)p * bytes + (groups + first / Q4_SUPER) * 256, scale[p], minus[p]);
#pragma GCC unroll 1
        for (size_t i = 0; i < n; i++) {
            const uint8_t *const quants = x + (first + i) * Q8_GROUP;
            ni dot[4];
            UNROLL for (int p = 0; p < P; p++) dot[p] = ni_zero();
#pragma GCC unroll 1
            for (int quad = 0; quad < 4; quad++) {
                UNROLL for (int p = 0; p < P; p++) {
                    nq low, high;
                    nq_load(w + (size_t)p * bytes + (first + i) * 256 + (size_t)quad * 64, &low, &high);
                    dot[p] = ni_dot4(ni_dot4(dot[p], low, aq_load(quants + quad * 4)), high, aq_load(quants + quad * 4 + 16));
                    KEEP(dot[p]);
                }
            }
            UNROLL for (int p = 0; p < P; p++) acc[p] = q4_add(acc[p], dot[p], scale[p][i], minus[p][i], x, cols, first + i);
        }
    }
    UNROLL for (int p = 0; p < P; p++) store_sum(m, panel + p, t, acc[p]);
}

/* ---- many rows: a block of a panel is taken apart once for a slab of rows, whose sums wait in the cache -------- */

struct block_f32 { const uint8_t *w; }; /* floats are read where they lie, all columns at once */
struct block_q8 { wq quad[BLOCK_QUADS]; vf scale[BLOCK_GROUPS]; };
struct block_q4 { nq quad[BLOCK_QUADS]; vf scale[BLOCK_GROUPS], minus[BLOCK_GROUPS]; }; /* quads in the order of k */

INLINE void open_f32(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_f32 *b)
{
    (void)first, (void)n;
    b->w = m->w->data + (size_t)panel * panel_bytes(m->w->type, (uint64_t)m->w->cols);
}

INLINE void open_q8(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_q8 *b)
{
    const size_t cols = (size_t)m->w->cols;
    const uint8_t *const w = m->w->data + (size_t)panel * panel_bytes(TYPE_Q8, cols);
    for (size_t quad = 0; quad < n * 8; quad++) b->quad[quad] = wq_load(w + first * 512 + quad * 64);
    for (size_t i = 0; i < n; i++) b->scale[i] = vf_f16(w + q8_groups(cols) * 512 + (first + i) * 32);
}

INLINE void open_mxfp4(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_q8 *b)
{
    const size_t cols = (size_t)m->w->cols;
    const uint8_t *const w = m->w->data + (size_t)panel * panel_bytes(TYPE_MXFP4, cols), *at = w + first * 256;
    for (size_t i = 0; i < n; i++) {
        for (wq *quad = b->quad + i * 8; quad < b->quad + i * 8 + 4; quad++, at += 64) mxfp4_load(at, quad, quad + 4);
        b->scale[i] = mxfp4_scale(w, cols, first + i);
    }
}

INLINE void open_q4(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_q4 *b)
{
    const size_t cols = (size_t)m->w->cols;
    const uint8_t *const w = m->w->data + (size_t)panel * panel_bytes(TYPE_Q4, cols);
    for (size_t i = 0; i < n; i++) {
        for (size_t quad = 0; quad < 4; quad++) {
            nq_load(w + (first + i) * 256 + quad * 64, &b->quad[i * 8 + quad], &b->quad[i * 8 + quad + 4]);
        }
    }
    q4_scales(w + (q8_groups(cols) + first / Q4_SUPER) * 256, b->scale, b->minus);
}

/* T rows x by the groups first … first + n - 1 of a block; T is a constant where it is called. */
INLINE void tile_f32(const struct block_f32 *b, const uint8_t *const *x, size_t cols, size_t first, size_t n, vf *sum, const int T)
{
    vf acc[MATMUL_TILE];
    (void)first, (void)n;
    UNROLL for (int j = 0; j < T; j++) acc[j] = sum[j];
    for (size_t k = 0; k < cols; k++) {
        const vf weight = vf_load((const float *)(const void *)(b->w + k * 64));
        UNROLL for (int j = 0; j < T; j++) {
            acc[j] = vf_fma(weight, vf_set1(((const float *)(const void *)x[j])[k]), acc[j]);
            KEEP(acc[j]);
        }
    }
    UNROLL for (int j = 0; j < T; j++) sum[j] = acc[j];
}

INLINE void tile_bf16(const struct block_f32 *b, const uint8_t *const *x, size_t cols, size_t first, size_t n, vf *sum, const int T)
{
    vf acc[MATMUL_TILE];
    (void)first, (void)n;
    UNROLL for (int j = 0; j < T; j++) acc[j] = sum[j];
    for (size_t k = 0; k < cols; k += 2) {
        vf even, odd;
        vf_bf16_pair(b->w + k * 32, &even, &odd);
        UNROLL for (int j = 0; j < T; j++) {
            const float *const row = (const float *)(const void *)x[j];
            acc[j] = vf_fma(even, vf_set1(row[k]), acc[j]);
            if (k + 1 < cols) acc[j] = vf_fma(odd, vf_set1(row[k + 1]), acc[j]);
            KEEP(acc[j]);
        }
    }
    UNROLL for (int j = 0; j < T; j++) sum[j] = acc[j];
}

INLINE void tile_q8(const struct block_q8 *b, const uint8_t *const *x, size_t cols, size_t first, size_t n, vf *sum, const int T)
{
    for (size_t i = 0; i < n; i++) {
        vi dot[MATMUL_TILE];
        UNROLL for (int j = 0; j < T; j++) dot[j] = q8_zero(x[j], cols, first + i);
#pragma GCC unroll 1
        for (size_t quad = i * 8; quad < i * 8 + 8; quad++) {
            const wq weight = b->quad[quad];
            UNROLL for (int j = 0; j < T; j++) {
                dot[j] = vi_dot4(dot[j], weight, aq_load(x[j] + first * Q8_GROUP + quad * 4));
                KEEP(dot[j]);
            }
        }
        UNROLL for (int j = 0; j < T; j++) {
            sum[j] = vf_fma(vf_from_vi(dot[j]), vf_mul(b->scale[i], x_scale(x[j], cols, first + i)), sum[j]);
        }
    }
}

INLINE void tile_q4(const struct block_q4 *b, const uint8_t *const *x, size_t cols, size_t first, size_t n, vf *sum, const int T)
{
    for (size_t i = 0; i < n; i++) {
        ni dot[MATMUL_TILE];
        UNROLL for (int j = 0; j < T; j++) dot[j] = ni_zero();
#pragma GCC unroll 1
        for (size_t quad = i * 8; quad < i * 8 + 8; quad++) {
            const nq weight = b->quad[quad];
            UNROLL for (int j = 0; j < T; j++) {
                dot[j] = ni_dot4(dot[j], weight, aq_load(x[j] + first * Q8_GROUP + quad * 4));
                KEEP(dot[j]);
            }
        }
        UNROLL for (int j = 0; j < T; j++) {
            sum[j] = q4_add(sum[j], dot[j], b->scale[i], b->minus[i], x[j], cols, first + i);
        }
    }
}

/* form: of an opened block, which open_##form fills with `step` groups at most. */
#define DEFINE_MATMUL(type, form, step)                                                                             \
    static void many_##type(const struct matmul *m, int32_t panel, int32_t from, int32_t rows)                      \
    {                                                                                                               \
        const size_t cols = (size_t)m->w->cols, groups = q8_groups(cols);                                           \
        const int32_t full = rows - rows % MATMUL_TILE;                                                             \
        struct block_##form b;                                                                                      \
        vf sum[SLAB];                                                                                               \
        const uint8_t *x[SLAB];                                                                                     \
        for (int32_t t = 0; t < rows; t++) {                                                                        \
            sum[t] = vf_set1(0);                                                                                    \
            x[t] = x_row(m, from + t);                                                                              \
        }                                                                                                           \
        for (size_t first = 0, n; first < groups; first += n) {                                                     \
            int32_t t = 0;                                                                                          \
            n = groups - first < (size_t)(step) ? groups - first : (size_t)(step);                                  \
            open_##form(m, panel, first, n, &b);                                                                    \
            for (; t < full; t += MATMUL_TILE) tile_##type(&b, x + t, cols, first, n, sum + t, MATMUL_TILE);        \
            for (; MATMUL_TILE > 4 && rows - t >= 4; t += 4) tile_##type(&b, x + t, cols, first, n, sum + t, 4);    \
            for (; t < rows; t++) tile_##type(&b, x + t, cols, first, n, sum + t, 1);                               \
        }                                                                                                           \
        for (int32_t t = 0; t < rows; t++) store_sum(m, panel, from + t, sum[t]);                                   \
    }                                                                                                               \
    static void matmul_##type(const struct matmul *m)                                                               \
    {                                                                                                               \
        const int32_t end = m->first_panel + m->n_panels;                                                           \
        int32_t p = m->first_panel;                                                                                 \
        for (; m->n >= 4 && p < end; p++) {                                                                         \
            for (int32_t t = 0; t < m->n; t += SLAB) many_##type(m, p, t, m->n - t < SLAB ? m->n - t : SLAB);       \
        }                                                                                                           \
        for (; MATMUL_PANELS > 1 && end - p >= 4; p += 4) {                                                         \
            for (int32_t t = 0; t < m->n; t++) row_##type(m, p, t, 4);                                              \
        }                                                                                                           \
        for (; p < end; p++) {                                                                                      \
            for (int32_t t = 0; t < m->n; t++) row_##type(m, p, t, 1);                                              \
        }                                                                                                           \
    }
DEFINE_MATMUL(f32, f32, INT32_MAX)
DEFINE_MATMUL(bf16, f32, INT32_MAX)
DEFINE_MATMUL(q8, q8, BLOCK_GROUPS)
DEFINE_MATMUL(q4, q4, BLOCK_GROUPS)
#define block_mxfp4 block_q8 /* once taken apart it is q8 */
#define tile_mxfp4 tile_q8
DEFINE_MATMUL(mxfp4, mxfp4, BLOCK_GROUPS)

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

static void read_row_mxfp4(const uint8_t *panel, size_t cols, size_t lane, float *out)
{
    static const int8_t values[] = {MXFP4_VALUES};
    for (size_t k = 0; k < cols; k++) {
        float scale[16];
        vf_store(scale, mxfp4_scale(panel, cols, k / Q8_GROUP));
        const uint8_t pair = panel[k / Q8_GROUP * 256 + k % 16 / 4 * 64 + lane * 4 + k % 4];
        out[k] = (float)values[k % Q8_GROUP < 16 ? pair & 15 : pair >> 4] * scale[lane];
    }
}

static void kernel_read_row(const struct matrix *w, int32_t r, float *out)
{
    const size_t cols = (size_t)w->cols, lane = (size_t)(r % PANEL_ROWS);
    const uint8_t *const panel = w->data + (size_t)(r / PANEL_ROWS) * panel_bytes(w->type, cols);
    if (w->type == TYPE_Q8) read_row_q8(panel, cols, lane, out);
    if (w->type == TYPE_Q4) read_row_q4(panel, cols, lane, out);
    if (w->type == TYPE_MXFP4) read_row_mxfp4(panel, cols, lane, out);
    for (size_t k = 0; k < cols && !type_reads_q8(w->type); k++) {
        uint8_t bits[4] = {0};
        if (w->type == TYPE_F32) memcpy(bits, panel + k * 64 + lane * 4, 4);
        else memcpy(bits + 2, panel + k / 2 * 64 + lane * 4 + k % 2 * 2, 2); /* bf16 is the upper half of an f32 */
        memcpy(&out[k], bits, 4);
    }
}
