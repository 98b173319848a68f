/* kernels.h: the table of hot functions, one instance per instruction set, and the formats they read.
 *
 * The bit rule: every entry of every table gives the same bits for the same input. It holds because body.h is the only
 * source of the arithmetic, written on 16-lane vectors whose lanes never mix except by a fixed tree. See docs/DESIGN.md.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum weight_type { TYPE_F32 = 1, TYPE_BF16 = 2, TYPE_Q8 = 4, TYPE_Q4 = 5, TYPE_Q6 = 6, TYPE_MXFP4 = 7, TYPE_COUNT = 8 };
enum {
    PANEL_ROWS = 16,       /* rows interleaved in a matrix */
    Q8_GROUP = 32,         /* elements that share a scale */
    Q4_SUPER = 8,          /* groups that share the f16 scales of a q4 or q6 row */
    MXFP4_FOURS = 4,       /* groups whose scales lie together in an mxfp4 panel */
    HEAD_DIM_MAX = 1024,
    KV_BLOCK = 128,        /* positions in a block of the KV cache; part of the bit rule (softmax is merged per block) */
};

/* What the sixteen 4-bit floats of mxfp4 are worth, doubled. */
#define MXFP4_VALUES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

/* A weight matrix [rows, cols] in panels of 16 rows (docs/FORMAT.md §4). data NULL: absent. */
struct matrix {
    const uint8_t *data;
    int32_t rows, cols;
    uint8_t type; /* enum weight_type */
};

static inline int32_t matrix_panels(const struct matrix *w) {
    return (w->rows + PANEL_ROWS - 1) / PANEL_ROWS;
}

/* q4 and q6: bytes of a group's quants, and of the record of scales of a super-group, for 16 rows. */
static inline size_t group_bytes(int type) { return type == TYPE_Q6 ? 384 : 256; }
static inline size_t record_bytes(int type) { return type == TYPE_Q6 ? 288 : 256; }

/* Bytes of one panel of `cols` columns; 0 for an unknown type. */
static inline uint64_t panel_bytes(int type, uint64_t cols) {
    if (type == TYPE_F32) return cols * 64;
    if (type == TYPE_BF16) return (cols + 1) / 2 * 64;
    const uint64_t groups = (cols + Q8_GROUP - 1) / Q8_GROUP;
    if (type == TYPE_Q8) return (groups * 544 + 63) & ~(uint64_t)63;
    if (type == TYPE_MXFP4) return groups * 256 + (groups + MXFP4_FOURS - 1) / MXFP4_FOURS * 64;
    if (type != TYPE_Q4 && type != TYPE_Q6) return 0;
    return (groups * group_bytes(type) + (groups + Q4_SUPER - 1) / Q4_SUPER * record_bytes(type) + 63) & ~(uint64_t)63;
}

/* Bytes of a matrix, 0 for an unknown type. Rows and cols are below 2^32 and a panel's factor below 2^7: no overflow. */
static inline uint64_t matrix_bytes(int type, uint64_t rows, uint64_t cols) {
    return (rows + PANEL_ROWS - 1) / PANEL_ROWS * panel_bytes(type, cols);
}

/* Whether products with this type read activations quantised to int8. */
static inline bool type_reads_q8(int type) {
    return type == TYPE_Q8 || type == TYPE_Q4 || type == TYPE_Q6 || type == TYPE_MXFP4;
}

/* An activation row of n elements quantised to int8, the other factor of q8, q6, q4 and mxfp4 weights:
 * int8 quants [groups][32] padded to 64 bytes, f32 scales [groups], int32 offsets [groups] = -128 x sum of quants
 * (q8 weights are stored + 128), f32 sums [groups] = scale x sum of quants (what a q4 minimum is multiplied by),
 * int16 starts [groups][2][2]: -32 x the sum of those of 16 quants with k mod 4 < 2, and of the others (q6 is stored + 32). */
static inline size_t q8_groups(size_t n) { return (n + Q8_GROUP - 1) / Q8_GROUP; }
static inline size_t q8_scales_at(size_t n) { return (q8_groups(n) * Q8_GROUP + 63) & ~(size_t)63; }
static inline size_t q8_offsets_at(size_t n) { return q8_scales_at(n) + q8_groups(n) * 4; }
static inline size_t q8_sums_at(size_t n) { return q8_offsets_at(n) + q8_groups(n) * 4; }
static inline size_t q8_starts_at(size_t n) { return q8_sums_at(n) + q8_groups(n) * 4; }
static inline size_t q8_row_bytes(size_t n) { return (q8_starts_at(n) + q8_groups(n) * 8 + 63) & ~(size_t)63; }

/* y[t][r] = sum over k of w[r][k] x[row(t)][k], for 16 x n_panels rows r from panel first_panel on. */
struct matmul {
    const struct matrix *w;
    int32_t first_panel, n_panels;
    const void *x;           /* f32 rows, or q8 rows if type_reads_q8 */
    size_t x_stride;         /* bytes from row to row */
    const int32_t *x_rows;   /* [n] which rows of x; NULL: 0 … n - 1 */
    int32_t n;
    float *y;                /* element r of row t at y[t * y_stride + r - 16 * y_panel] */
    int32_t y_panel;         /* the panel that y begins with */
    size_t y_stride;         /* floats */
    float *const *y_rows;    /* [n] where each row starts instead, or NULL */
};

/* Attention of a tile of queries over one key/value head. Queries see keys first_key … n_keys - 1. */
enum { ATTEND_TILE = 16 };
struct attend {
    int32_t n;                                /* queries, 1 to ATTEND_TILE */
    const float *q[ATTEND_TILE];              /* [key_dim] */
    float *out[ATTEND_TILE];                  /* [value_dim] */
    int32_t first_key[ATTEND_TILE], n_keys[ATTEND_TILE];
    const uint8_t *pool;                      /* KV blocks */
    bool half;                                /* of f16 instead of f32 */
    const int32_t *table;                     /* block of positions 128 b … : pool + table[b] * block_bytes */
    size_t block_bytes, k_offset, v_offset;   /* of this layer and head inside a block */
    int32_t key_dim, value_dim, block_positions;
    float scale;
    int32_t bias_span;                        /* with one: key k adds bias[k - position] to its score, of what lies beyond */
    const float *bias[ATTEND_TILE];           /* -span … span, counted from the middle, the 16 nearest do; 0: no biases */
    int32_t position[ATTEND_TILE];
    const float *sink[ATTEND_TILE];           /* a logit beside the scores, of no key: it only adds to their sum; NULL: none */
    float *partial[ATTEND_TILE];              /* [attend_partial_floats]; where one block is attended to */
};

/* Floats of what one block says about one query: maximum, sum, and the output not yet divided, by lanes of 16. */
static inline size_t attend_partial_floats(int32_t value_dim) { return 2 + (((size_t)value_dim + 15) & ~(size_t)15); }

/* The gated delta rule of one head, arXiv:2412.06464, row by row: with sigmoid(beta) and with decay = e^(-e^log_rate
 * softplus(decay + bias)), state *= decay; state += k (v - k state) beta; v becomes q state / sqrt(key_dim). */
struct delta {
    int32_t n, key_dim, value_dim;
    const float *q, *k;          /* of length sqrt(key_dim), here taken as 1 */
    float *v;
    const float *beta, *decay;   /* [1] */
    size_t stride;               /* floats from row to row, of all */
    float log_rate, bias;
    float *state;                /* [roundup16(value_dim) / 16][key_dim][16] */
};

struct kernels {
    const char *name;
    void (*matmul[TYPE_COUNT])(const struct matmul *m); /* by the type of w */
    /* Quantises groups first … first + count - 1 of a row of n floats into its q8 row; x: where the first group begins. NaN and infinity end up in the
     * scale, so that they reach the logits. */
    void (*quantize)(const float *x, int32_t n, int32_t first, int32_t count, uint8_t *row);
    /* out = x / sqrt(mean(x^2) + eps) * weight (NULL: 1). out may be x. Zhang and Sennrich, arXiv:1910.07467 */
    void (*rms_norm)(float *out, const float *x, const float *weight, int32_t n, float eps);
    void (*centre)(float *out, const float *x, int32_t n);     /* out = x - mean(x); out may be x */
    void (*soft_cap)(float *x, float cap, int32_t n);          /* x = cap * tanh(x / cap) */
    /* gate = (up + offset) * gate * sigmoid(alpha * (gate + cubic * gate^3)), where limit > 0 of a gate of at most limit and of up within
     * +- limit. With 0, 1, 0, 0: silu(gate) * up. arXiv:2002.05202 */
    void (*silu_mul)(float *gate, const float *up, int32_t n, float limit, float alpha, float cubic, float offset);
    void (*sigmoid_mul)(float *y, const float *x, int32_t n);  /* y *= sigmoid(x) */
    /* In place, each row of x [n][stride] becomes the sum over j < width of weight [j][w_stride] times the row width - 1 - j in
     * front of it, or silu of that. past [width - 1][cols]: the rows in front of the first, then of those to come. */
    void (*convolve)(float *x, size_t stride, int32_t n, int32_t cols, const float *weight, size_t w_stride, int32_t width,
                     float *past, bool silu);
    void (*delta)(const struct delta *d);
    int32_t (*argmax)(const float *x, int32_t n);              /* the lowest index of the largest; n >= 1, no NaN */
    void (*softmax)(float *x, int32_t n);                      /* in place; n >= 1 */
    /* Rotates pairs (i, i + dim/2) of x by cos, sin [dim/2]. RoFormer, arXiv:2104.09864 */
    void (*rotate)(float *x, const float *cosine, const float *sine, int32_t dim);
    void (*add_scaled)(float *y, const float *x, float a, int32_t n); /* y = fma(a, x, y); y += x where a is 1 */
    void (*clamp)(float *x, float least, float most, int32_t n);
    float (*dot)(const float *a, const float *b, int32_t n);
    float (*exp)(float x);
    /* block -1: all that each query sees, into `out`. For many threads the same bits come in two steps: one block of keys into
     * `partial` (nothing for a query that sees none of it), then the partials of a query [n_blocks] and its sink in order
     * into out [value_dim]. */
    void (*attend)(const struct attend *a, int32_t block);
    void (*attend_merge)(const float *partials, int32_t n_blocks, int32_t value_dim, const float *sink, float *out);
    /* Row r of w as f32 [cols]: the embedding look-up. */
    void (*read_row)(const struct matrix *w, int32_t r, float *out);
    bool (*all_finite)(const float *x, int64_t n);
};

extern const struct kernels kernels_scalar;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2;
extern const struct kernels kernels_avx512;
#if defined(COLIBRI_AVX_VNNI_HEADER) || __has_include(<avxvnniintrin.h>) /* gcc 11, clang 12 */
#define COLIBRI_HAS_AVX2_VNNI
extern const struct kernels kernels_avx2_vnni;
#endif
#elif defined(__aarch64__)
extern const struct kernels kernels_neon;
#if defined(__ARM_FEATURE_DOTPROD) || (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 8)
#define COLIBRI_HAS_NEON_DOTPROD
extern const struct kernels kernels_neon_dotprod;
#endif
#endif

/* What stands between TARGET and TARGET_END is compiled for CPUs that have the instructions named. */
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define TARGET(names) PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#else
#define TARGET(names) PRAGMA(GCC target(names))
#define TARGET_END
#endif

/* The kernel set at `index`, best first, or NULL past the end; *usable says whether this machine can run it. */
const struct kernels *kernels_list(int index, bool *usable);
