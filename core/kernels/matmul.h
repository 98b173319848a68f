/* matmul.h: matrix products of every weight type, and the look-up of a row: a part of body.h, which includes it once for
 * each instruction set. Refuses: dividing the work; a caller gives panels and rows. */

enum {
    BLOCK_GROUPS = Q4_SUPER,                 /* groups of a panel that are taken apart at once */
    BLOCK_QUADS = BLOCK_GROUPS * Q8_GROUP / 4,
    SLAB = 64,                               /* rows that a panel's block is used for before the next block */
};

INLINE const uint8_t *x_row(const struct matmul *m, int32_t t) {
    return (const uint8_t *)m->x + m->x_stride * (size_t)(m->x_rows == NULL ? t : m->x_rows[t]);
}

INLINE void store_sum(const struct matmul *m, int32_t panel, int32_t t, vf v) {
    float *const y = m->y_rows == NULL ? m->y + (size_t)t * m->y_stride : m->y_rows[t];
    store_at(y, (panel - m->y_panel) * PANEL_ROWS, m->w->rows - m->y_panel * PANEL_ROWS, v);
}

INLINE vf x_scale(const uint8_t *x, size_t cols, size_t g) {
    return vf_set1(((const float *)(const void *)(x + q8_scales_at(cols)))[g]);
}

INLINE vi q8_zero(const uint8_t *x, size_t cols, size_t g) {
#ifdef Q8_SIGNED
    (void)x, (void)cols, (void)g;
    return vi_set1(0);
#else
    return vi_set1(((const int32_t *)(const void *)(x + q8_offsets_at(cols)))[g]);
#endif
}

/* Scales and minima (negated) of the 8 groups of a q4 super-group, 16 rows each; p: its 256 bytes (docs/FORMAT.md). */
INLINE void q4_scales(const uint8_t *p, vf scale[Q4_SUPER], vf minus[Q4_SUPER]) {
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
INLINE vf mxfp4_scale(const uint8_t *panel, size_t cols, size_t g) {
    const vi e = vi_bits(vi_load(panel + q8_groups(cols) * 256 + g / MXFP4_FOURS * 64), (int)(g % MXFP4_FOURS) * 8, 8);
    return vf_mul(vf_of(vi_left(vi_add(e, vi_set1(1)), 23)), vf_set1(0.25f));
}

INLINE void mxfp4_load(const uint8_t *p, wq *low, wq *high) {
    *low = wq_mxfp4(nq_bits(p, 0, 15)), *high = wq_mxfp4(nq_bits(p, 4, 15));
}

/* q4 and q6 (type, a constant wherever this is called): runs of 8 or of 4 quads share a scale. */
enum { RUNS_MOST = 2 * Q4_SUPER }; /* in a super-group */
INLINE size_t runs_of(size_t groups, const int type) { return type == TYPE_Q6 ? groups * 2 : groups; }
INLINE size_t run_bytes(const int type) { return group_bytes(type) / runs_of(1, type); }

/* Scales of a super-group's runs and, of q4, the minima, negated; p: its record. */
INLINE void k_scales(const uint8_t *p, const int type, vf *scale, vf *minus) {
    if (type == TYPE_Q4) {
        q4_scales(p, scale, minus);
        return;
    }
    for (int i = 0; i < RUNS_MOST; i++) scale[i] = vf_mul(vf_i8(p + 32 + i * 16), vf_f16(p)); /* exact */
}

/* Quad i of the run at p, in the order of k. */
INLINE nq k_quad(const uint8_t *p, const int i, const int type) {
    if (type == TYPE_Q4) return nq_bits(p + i % 4 * 64, i < 4 ? 0 : 4, 15);
    if (i < 3) return nq_bits(p + i * 64, 0, 63);
    return nq_or(nq_bits(p, 6, 3), nq_or(nq_bits(p + 64, 4, 12), nq_bits(p + 128, 2, 48)));
}

INLINE ni k_start(const uint8_t *x, size_t cols, size_t run, const int type) {
    return type == TYPE_Q6 ? ni_start(x + q8_starts_at(cols) + run * 4) : ni_zero();
}

/* sum += scale x (sum of q x) and, of q4, sum -= minimum x (sum of x), both fused. */
INLINE vf k_add(vf sum, ni dot, vf scale, vf minus, const uint8_t *x, size_t cols, size_t run, const int type) {
    const size_t g = run / runs_of(1, type);
    sum = vf_fma(vf_from_vi(ni_sum(dot)), vf_mul(scale, x_scale(x, cols, g)), sum);
    return type == TYPE_Q6 ? sum : vf_fma(minus, vf_set1(((const float *)(const void *)(x + q8_sums_at(cols)))[g]), sum);
}

/* ---- few rows: P panels at a time, from where they lie, so that several streams of memory are read at once ----- */

/* sum += P panels of floats, `bytes` apart, times T rows x; sums of a panel are neighbours. P and T are constants where it is called. */
INLINE void add_floats(const uint8_t *w, size_t bytes, const uint8_t *const *x, size_t cols, vf *sum, const int P, const int T, const bool bf16) {
    vf acc[MATMUL_TILE];
    UNROLL for (int i = 0; i < P * T; i++) acc[i] = sum[i];
    for (size_t k = 0; k < cols; k += bf16 ? 2 : 1, w += 64) {
        UNROLL for (int p = 0; p < P; p++) {
            const vi bits = vi_load(w + (size_t)p * bytes);
            const vf even = vf_of(bf16 ? vi_left(bits, 16) : bits), odd = vf_of(vi_and(bits, vi_set1(-65536)));
            UNROLL for (int j = 0; j < T; j++) {
                const float *const row = (const float *)(const void *)x[j];
                acc[p * T + j] = vf_fma(even, vf_set1(row[k]), acc[p * T + j]);
                if (bf16 && k + 1 < cols) acc[p * T + j] = vf_fma(odd, vf_set1(row[k + 1]), acc[p * T + j]);
                KEEP(acc[p * T + j]);
            }
        }
    }
    UNROLL for (int i = 0; i < P * T; i++) sum[i] = acc[i];
}

/* The same of q8 and mxfp4, one row x. Quads of mxfp4 come in pairs from halves of 64 bytes. */
INLINE void add_bytes(const uint8_t *w, size_t bytes, size_t ahead, const uint8_t *x, size_t cols, vf *acc, const int P, const bool mxfp4) {
    const int quads = mxfp4 ? Q8_GROUP / 8 : Q8_GROUP / 4;
    const size_t groups = q8_groups(cols);
    const uint8_t *scales = w + groups * (size_t)quads * 64;
    for (size_t g = 0; g < groups; g++, scales += 32) {
        vi dot[4];
        UNROLL for (int p = 0; p < P; p++) dot[p] = q8_zero(x, cols, g);
#pragma GCC unroll 1
        for (int quad = 0; quad < quads; quad++, w += 64) {
            const uint8_t *const at = x + g * Q8_GROUP + (size_t)quad * 4;
            const aq a = aq_load(at), b = mxfp4 ? aq_load(at + 16) : a;
            UNROLL for (int p = 0; p < P; p++) {
                const uint8_t *const from = w + (size_t)p * bytes;
                wq low, high;
                __builtin_prefetch(from + (mxfp4 ? 2048 : 1024), 0, 2);
                if (mxfp4) mxfp4_load(from, &low, &high);
                dot[p] = vi_dot4(dot[p], mxfp4 ? low : wq_load(from), a);
                if (mxfp4) dot[p] = vi_dot4(dot[p], high, b);
                KEEP(dot[p]);
            }
        }
        UNROLL for (int p = 0; p < P; p++) {
            const uint8_t *const from = scales + (size_t)p * bytes;
            if (!mxfp4) __builtin_prefetch(from + ahead, 0, 2);
            const vf ws = mxfp4 ? mxfp4_scale(from - g * 32 - groups * 256, cols, g) : vf_f16(from);
            acc[p] = vf_fma(vf_from_vi(dot[p]), vf_mul(ws, x_scale(x, cols, g)), acc[p]);
        }
    }
}

INLINE void add_q4(const uint8_t *w, size_t bytes, size_t ahead, const uint8_t *x, size_t cols, vf *acc, const int P) {
    const size_t groups = q8_groups(cols);
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
                    const uint8_t *const at = w + (size_t)p * bytes + (first + i) * 256 + (size_t)quad * 64;
                    __builtin_prefetch(at + ahead, 0, 2);
                    dot[p] = ni_dot4(dot[p], nq_bits(at, 0, 15), aq_load(quants + quad * 4));
                    dot[p] = ni_dot4(dot[p], nq_bits(at, 4, 15), aq_load(quants + quad * 4 + 16));
                    KEEP(dot[p]);
                }
            }
            UNROLL for (int p = 0; p < P; p++) {
                acc[p] = k_add(acc[p], dot[p], scale[p][i], minus[p][i], x, cols, first + i, TYPE_Q4);
            }
        }
    }
}

/* Scales are read run by run: a super-group's at once would leave the streams of memory idle meanwhile. */
INLINE void add_q6(const uint8_t *w, size_t bytes, size_t ahead, const uint8_t *x, size_t cols, vf *acc, const int P) {
    const size_t runs = runs_of(q8_groups(cols), TYPE_Q6);
    const uint8_t *record = w + runs * run_bytes(TYPE_Q6);
    for (size_t run = 0; run < runs; record += record_bytes(TYPE_Q6)) {
        const size_t end = runs - run < RUNS_MOST ? runs : run + RUNS_MOST;
        const uint8_t *scales = record + 32;
        vf d[4];
        UNROLL for (int p = 0; p < P; p++) d[p] = vf_f16(record + (size_t)p * bytes);
#pragma GCC unroll 1
        for (; run < end; run++, w += run_bytes(TYPE_Q6), scales += 16) {
            ni dot[4];
            UNROLL for (int p = 0; p < P; p++) dot[p] = k_start(x, cols, run, TYPE_Q6);
            UNROLL for (int quad = 0; quad < 4; quad++) {
                UNROLL for (int p = 0; p < P; p++) {
                    if (quad < 3) __builtin_prefetch(w + (size_t)p * bytes + ahead + quad * 64, 0, 2);
                    dot[p] = ni_dot4(dot[p], k_quad(w + (size_t)p * bytes, quad, TYPE_Q6), aq_load(x + run * 16 + quad * 4));
                    KEEP(dot[p]);
                }
            }
            UNROLL for (int p = 0; p < P; p++) {
                const vf scale = vf_mul(vf_i8(scales + (size_t)p * bytes), d[p]);
                acc[p] = k_add(acc[p], dot[p], scale, scale, x, cols, run, TYPE_Q6);
            }
        }
    }
}

/* A row by P panels. Meanwhile the same places of the next P panels (of q8 their scales) are asked for, into the second cache, since the
 * first has few misses under way at a time. */
INLINE void row_panels(const struct matmul *m, int32_t panel, int32_t t, const int P, const int type) {
    const size_t cols = (size_t)m->w->cols, bytes = panel_bytes(type, cols);
    const size_t ahead = panel + 2 * P <= matrix_panels(m->w) ? (size_t)P * bytes : 0;
    const uint8_t *const w = m->w->data + (size_t)panel * bytes, *const x = x_row(m, t);
    vf acc[4];
    UNROLL for (int p = 0; p < P; p++) acc[p] = vf_set1(0);
    if (type == TYPE_Q4) add_q4(w, bytes, ahead, x, cols, acc, P);
    else if (type == TYPE_Q6) add_q6(w, bytes, ahead, x, cols, acc, P);
    else if (type_reads_q8(type)) add_bytes(w, bytes, ahead, x, cols, acc, P, type == TYPE_MXFP4);
    else add_floats(w, bytes, &x, cols, acc, P, 1, type == TYPE_BF16);
    UNROLL for (int p = 0; p < P; p++) store_sum(m, panel + p, t, acc[p]);
}

/* ---- many rows: a block of a panel is taken apart once for a slab of rows, whose sums wait in the cache -------- */

struct block_floats { const uint8_t *w; }; /* floats are read where they lie, all columns at once */
struct block_bytes { wq quad[BLOCK_QUADS]; vf scale[BLOCK_GROUPS]; };
struct block_k { nq quad[BLOCK_QUADS]; vf scale[RUNS_MOST], minus[RUNS_MOST]; }; /* quads in the order of k */

INLINE void open_floats(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_floats *b, const int type) {
    (void)first, (void)n;
    b->w = m->w->data + (size_t)panel * panel_bytes(type, (uint64_t)m->w->cols);
}

INLINE void open_bytes(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_bytes *b, const int type) {
    const size_t cols = (size_t)m->w->cols, bytes = type == TYPE_Q8 ? 512 : 256;
    const uint8_t *const w = m->w->data + (size_t)panel * panel_bytes(type, cols), *at = w + first * bytes;
    for (size_t i = 0; i < n; i++) {
        for (wq *quad = b->quad + i * 8; quad < b->quad + i * 8 + bytes / 64; quad++, at += 64) {
            if (type == TYPE_Q8) *quad = wq_load(at);
            else mxfp4_load(at, quad, quad + 4);
        }
        b->scale[i] = type == TYPE_Q8 ? vf_f16(w + q8_groups(cols) * bytes + (first + i) * 32) : mxfp4_scale(w, cols, first + i);
    }
}

INLINE void open_k(const struct matmul *m, int32_t panel, size_t first, size_t n, struct block_k *b, const int type) {
    const size_t cols = (size_t)m->w->cols, bytes = group_bytes(type);
    const uint8_t *const w = m->w->data + (size_t)panel * panel_bytes(type, cols);
    const int quads = 8 / (int)runs_of(1, type);
    for (size_t i = 0; i < runs_of(n, type); i++) {
        UNROLL for (int quad = 0; quad < quads; quad++) {
            b->quad[i * (size_t)quads + (size_t)quad] = k_quad(w + first * bytes + i * run_bytes(type), quad, type);
        }
    }
    k_scales(w + q8_groups(cols) * bytes + first / Q4_SUPER * record_bytes(type), type, b->scale, b->minus);
}

/* tile_*: T rows x by the groups first … first + n - 1 of a block; T is a constant where it is called. */
#define tile_floats(b, x, cols, first, n, sum, T, type) add_floats((b)->w, 0, x, cols, sum, 1, T, type == TYPE_BF16)

#define DEFINE_TILE(form, sums, dot4, start, add)                                                                       \
    INLINE void tile_##form(const struct block_##form *b, const uint8_t *const *x, size_t cols, size_t first, size_t n, \
                            vf *sum, const int T, const int type) {                                                     \
        const size_t quads = 8 / runs_of(1, type), before = runs_of(first, type);                                       \
        for (size_t i = 0; i < runs_of(n, type); i++) {                                                                 \
            sums dot[MATMUL_TILE];                                                                                      \
            UNROLL for (int j = 0; j < T; j++) dot[j] = start;                                                          \
            _Pragma("GCC unroll 1") for (size_t quad = i * quads; quad < i * quads + quads; quad++) {                   \
                const __typeof__(b->quad[0]) weight = b->quad[quad];                                                    \
                UNROLL for (int j = 0; j < T; j++) {                                                                    \
                    dot[j] = dot4(dot[j], weight, aq_load(x[j] + first * Q8_GROUP + quad * 4));                         \
                    KEEP(dot[j]);                                                                                       \
                }                                                                                                       \
            }                                                                                                           \
            UNROLL for (int j = 0; j < T; j++) sum[j] = add;                                                            \
        }                                                                                                               \
    }
DEFINE_TILE(bytes, vi, vi_dot4, q8_zero(x[j], cols, before + i),
            vf_fma(vf_from_vi(dot[j]), vf_mul(b->scale[i], x_scale(x[j], cols, before + i)), sum[j]))
DEFINE_TILE(k, ni, ni_dot4, k_start(x[j], cols, before + i, type),
            k_add(sum[j], dot[j], b->scale[i], b->minus[i], x[j], cols, before + i, type))

/* form: of functions and of an opened block, which open_##form fills with `step` groups at most. */
#define DEFINE_MATMUL(type, TYPE, form, step)                                                                          \
    static void many_##type(const struct matmul *m, int32_t panel, int32_t from, int32_t rows)                         \
    {                                                                                                                  \
        const size_t cols = (size_t)m->w->cols, groups = q8_groups(cols);                                              \
        const int32_t full = rows - rows % MATMUL_TILE;                                                                \
        struct block_##form b;                                                                                         \
        vf sum[SLAB];                                                                                                  \
        const uint8_t *x[SLAB];                                                                                        \
        for (int32_t t = 0; t < rows; t++) {                                                                           \
            sum[t] = vf_set1(0);                                                                                       \
            x[t] = x_row(m, from + t);                                                                                 \
        }                                                                                                              \
        for (size_t first = 0, n; first < groups; first += n) {                                                        \
            int32_t t = 0;                                                                                             \
            n = groups - first < (size_t)(step) ? groups - first : (size_t)(step);                                     \
            open_##form(m, panel, first, n, &b, TYPE);                                                                 \
            for (; t < full; t += MATMUL_TILE) tile_##form(&b, x + t, cols, first, n, sum + t, MATMUL_TILE, TYPE);     \
            for (; MATMUL_TILE > 4 && rows - t >= 4; t += 4) tile_##form(&b, x + t, cols, first, n, sum + t, 4, TYPE); \
            for (; t < rows; t++) tile_##form(&b, x + t, cols, first, n, sum + t, 1, TYPE);                            \
        }                                                                                                              \
        for (int32_t t = 0; t < rows; t++) store_sum(m, panel, from + t, sum[t]);                                      \
    }                                                                                                                  \
    static void matmul_##type(const struct matmul *m)                                                                  \
    {                                                                                                                  \
        const int32_t end = m->first_panel + m->n_panels;                                                              \
        int32_t p = m->first_panel;                                                                                    \
        for (; m->n >= 4 && p < end; p++) {                                                                            \
            for (int32_t t = 0; t < m->n; t += SLAB) many_##type(m, p, t, m->n - t < SLAB ? m->n - t : SLAB);          \
        }                                                                                                              \
        for (; MATMUL_PANELS > 1 && end - p >= 4; p += 4) {                                                            \
            for (int32_t t = 0; t < m->n; t++) row_panels(m, p, t, 4, TYPE);                                           \
        }                                                                                                              \
        for (; p < end; p++) {                                                                                         \
            for (int32_t t = 0; t < m->n; t++) row_panels(m, p, t, 1, TYPE);                                           \
        }                                                                                                              \
    }
DEFINE_MATMUL(f32, TYPE_F32, floats, INT32_MAX)
DEFINE_MATMUL(bf16, TYPE_BF16, floats, INT32_MAX)
DEFINE_MATMUL(q8, TYPE_Q8, bytes, BLOCK_GROUPS)
DEFINE_MATMUL(mxfp4, TYPE_MXFP4, bytes, BLOCK_GROUPS)
DEFINE_MATMUL(q4, TYPE_Q4, k, BLOCK_GROUPS)
DEFINE_MATMUL(q6, TYPE_Q6, k, BLOCK_GROUPS)

/* Element e of a run for one row, before its scale; at: the row's first byte. */
INLINE int read_quant(const uint8_t *at, size_t e, const int type) {
    static const int8_t values[] = {MXFP4_VALUES};
    const uint8_t *const four = at + e % 4;
    if (type == TYPE_Q8) return four[e / 4 * 64] - 128;
    if (type == TYPE_Q6) return (e < 12 ? four[e / 4 * 64] & 63 : four[0] >> 6 | four[64] >> 6 << 2 | four[128] >> 6 << 4) - 32;
    const int half = e < 16 ? four[e / 4 * 64] & 15 : four[(e - 16) / 4 * 64] >> 4;
    return type == TYPE_Q4 ? half : values[half];
}

INLINE void read_row_q(const uint8_t *panel, size_t cols, size_t lane, float *out, const int type) {
    const size_t groups = q8_groups(cols), runs = runs_of(Q4_SUPER, type), length = Q8_GROUP * Q4_SUPER / runs;
    const size_t bytes = type == TYPE_Q8 ? 512 : run_bytes(type);
    vf scale[RUNS_MOST], minus[RUNS_MOST];
    for (size_t run = 0, k = 0; k < cols; run++) {
        float factor[16], least[16] = {0};
        const size_t i = run % runs;
        if (type == TYPE_Q8) scale[i] = vf_f16(panel + groups * 512 + run * 32);
        else if (type == TYPE_MXFP4) scale[i] = mxfp4_scale(panel, cols, run);
        else if (i == 0) k_scales(panel + groups * group_bytes(type) + run / runs * record_bytes(type), type, scale, minus);
        vf_store(factor, scale[i]);
        if (type == TYPE_Q4) vf_store(least, minus[i]);
        for (size_t e = 0; e < length && k < cols; e++, k++) {
            out[k] = (float)read_quant(panel + run * bytes + lane * 4, e, type) * factor[lane] + least[lane];
        }
    }
}

static void kernel_read_row(const struct matrix *w, int32_t r, float *out) {
    const size_t cols = (size_t)w->cols, lane = (size_t)(r % PANEL_ROWS);
    const uint8_t *const panel = w->data + (size_t)(r / PANEL_ROWS) * panel_bytes(w->type, cols);
    if (w->type == TYPE_Q8) read_row_q(panel, cols, lane, out, TYPE_Q8);
    if (w->type == TYPE_Q6) read_row_q(panel, cols, lane, out, TYPE_Q6);
    if (w->type == TYPE_Q4) read_row_q(panel, cols, lane, out, TYPE_Q4);
    if (w->type == TYPE_MXFP4) read_row_q(panel, cols, lane, out, TYPE_MXFP4);
    for (size_t k = 0; k < cols && !type_reads_q8(w->type); k++) {
        uint8_t bits[4] = {0};
        if (w->type == TYPE_F32) memcpy(bits, panel + k * 64 + lane * 4, 4);
        else memcpy(bits + 2, panel + k / 2 * 64 + lane * 4 + k % 2 * 2, 2); /* bf16 is the upper half of an f32 */
        memcpy(&out[k], bits, 4);
    }
}
