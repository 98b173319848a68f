/* quantize.c: float matrices to packed panels.
 *
 * Owns: the bytes of f32, bf16 and q8, and what is refused. q4 and q6 are quantize_q4.c's. Refuses: files, threads (the caller
 * splits a matrix at multiples of 16 rows). */
#include "quantize.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/kernels.h"
#include "quantize_lanes.h"
#include "quantize_q4.h"

enum { GROUP = Q8_GROUP, TILE = Q4_SUPER_COLS }; /* columns transposed at a time: a q4 super-group, whole q8 groups */

static void pack_q8(const float *tile, int cols, int lane, uint8_t *quants, uint8_t *scales)
{
    for (int first = 0; first < cols; first += GROUP) {
        const float *const group = tile + first * PANEL_ROWS + lane;
        vf peak = all(0);
        for (int k = 0; k < GROUP; k++) peak = larger(peak, magnitude(load(group + k * PANEL_ROWS)));
        const vu half = f16_bits(peak * (1.0f / 127.0f));
        const vf scale = f16_value(half), divisor = choose(scale > 0, scale, all(F16_MAX));
        for (int k = 0; k < GROUP; k += 4) {
            vu bits = {0};
            for (int j = 0; j < 4; j++) {
                const vf q = choose(scale > 0, load(group + (k + j) * PANEL_ROWS) / divisor, all(0));
                bits |= ((vu)(between(q, -127, 127) + (TO_BITS + 128)) & 0xff) << 8 * j;
            }
            store(quants + first * PANEL_ROWS + k * PANEL_ROWS + lane * 4, bits);
        }
        store_f16(scales + first + lane * 2, half); /* 32 bytes a group of 32 */
    }
}

static uint32_t bf16_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void pack_bf16(const float *tile, int cols, uint8_t *out)
{
    for (int k = 0; k < cols; k += 2) { /* an odd last column finds zeros beside it */
        uint32_t pairs[PANEL_ROWS];
        const float *const even = tile + k * PANEL_ROWS;
        for (int r = 0; r < PANEL_ROWS; r++) pairs[r] = bf16_bits(even[r]) | bf16_bits(even[PANEL_ROWS + r]) << 16;
        memcpy(out + k * 32, pairs, sizeof pairs);
    }
}

struct source {
    int32_t type, rows, cols;
    const float *weights, *importance; /* [rows][cols]; [cols] or NULL */
    double mean_importance;
};

/* Columns `first` on of the 16 rows from `row` on, transposed: tile [TILE][16], zeros beyond the matrix. */
static void load_tile(const struct source *s, int32_t row, int32_t first, int cols, float *tile)
{
    memset(tile, 0, TILE * PANEL_ROWS * sizeof *tile);
    for (int32_t r = 0; r < PANEL_ROWS && row + r < s->rows; r++) {
        const float *const from = s->weights + (size_t)(row + r) * (size_t)s->cols + first;
        for (int k = 0; k < cols; k++) tile[k * PANEL_ROWS + r] = from[k];
    }
}

/* What an error in each column costs: its importance over the mean, softened, since importances are estimates. */
static void load_importance(const struct source *s, int32_t first, int cols, float *out)
{
    for (int k = 0; k < cols; k++) {
        out[k] = s->mean_importance > 0 ? (float)(s->importance[first + k] / s->mean_importance) + 0.125f : 1;
    }
}

static void pack_panel(const struct source *s, int32_t row, uint8_t *panel)
{
    const uint64_t size = panel_bytes(s->type, (uint64_t)s->cols), groups = q8_groups((size_t)s->cols);
    _Alignas(64) float tile[TILE * PANEL_ROWS], importance[TILE];
    memset(panel + size - 32, 0, 32); /* what q8 and q6 lack to a multiple of 64 */
    for (int32_t first = 0; first < s->cols; first += TILE) {
        const int cols = s->cols - first < TILE ? s->cols - first : TILE;
        const size_t at = (size_t)first;
        load_tile(s, row, first, cols, tile);
        if (s->type == TYPE_F32) memcpy(panel + at * 64, tile, (size_t)cols * 64);
        if (s->type == TYPE_BF16) pack_bf16(tile, cols, panel + at * 32);
        if (s->type == TYPE_Q4 || s->type == TYPE_Q6) load_importance(s, first, cols, importance);
        for (int lane = 0; lane < PANEL_ROWS; lane += LANES) {
            if (s->type == TYPE_Q8) pack_q8(tile, cols, lane, panel + at * 16, panel + groups * 512 + at);
            if (s->type == TYPE_Q4) quantize_q4(tile, cols, importance, lane, panel + at * 8, panel + groups * 256 + at);
            if (s->type == TYPE_Q6) quantize_q6(tile, cols, importance, lane, panel + at * 12, panel + groups * 384 + at / 256 * 288);
        }
    }
}

/* The largest magnitude that a type can hold, and how that is told. */
struct limit {
    float largest;
    const char *text;
};

static struct limit limit_of(int32_t type)
{
    switch (type) {
    case TYPE_BF16: return (struct limit){0x1.fefffep127f, "bf16 (at most 3.39e38). Convert with type f32"};
    case TYPE_Q8: /* the next float over 127 rounds to 65520, which f16 lacks */
        return (struct limit){0x1.fbe03ep22f, "the f16 scale of q8 (at most 65504 x 127). Convert with type bf16 or f32"};
    case TYPE_Q4:
        return (struct limit){F16_MAX * 63, "the f16 scales of q4 (at most 65504 x 63). Convert with type bf16 or f32"};
    case TYPE_Q6:
        return (struct limit){F16_MAX * 127 * 31, "the f16 scales of q6 (at most 65504 x 3937). Convert with type bf16 or f32"};
    default: return (struct limit){FLT_MAX, ""};
    }
}

static int32_t refuse_weight(const struct limit *limit, int32_t row, int32_t col, float found, colibri_error *error)
{
    if (isfinite(found)) {
        return status_fail(error, COLIBRI_ERROR_ARGUMENT, "weights[%d, %d] is %g, too large for %s.", row, col, (double)found,
                           limit->text);
    }
    return status_fail(error, COLIBRI_ERROR_ARGUMENT,
                       "weights[%d, %d] is %s: weights must be finite. The checkpoint is damaged or its training "
                       "diverged; download it again.",
                       row, col, isnan(found) ? "nan" : found > 0 ? "inf" : "-inf");
}

static int32_t check_weights(const struct source *s, colibri_error *error)
{
    const struct limit limit = limit_of(s->type);
    for (int32_t r = 0; r < s->rows; r++) {
        const float *const row = s->weights + (size_t)r * (size_t)s->cols;
        int32_t wrong = 0;
        for (int32_t k = 0; k < s->cols; k++) wrong |= !(fabsf(row[k]) <= limit.largest);
        for (int32_t k = 0; wrong && k < s->cols; k++) {
            if (!(fabsf(row[k]) <= limit.largest)) return refuse_weight(&limit, r, k, row[k], error);
        }
    }
    return COLIBRI_OK;
}

static int32_t check_importance(struct source *s, colibri_error *error)
{
    for (int32_t k = 0; s->importance != NULL && k < s->cols; k++) {
        const float found = s->importance[k];
        if (!(found >= 0 && found <= FLT_MAX)) {
            return status_fail(error, COLIBRI_ERROR_ARGUMENT,
                               "importance[%d]: expected a finite number, 0 or more (a mean of squares), found %g; pass "
                               "NULL if it is not known.",
                               k, (double)found);
        }
        s->mean_importance += (double)found / s->cols;
    }
    return COLIBRI_OK;
}

int32_t quantize_matrix(int32_t type, int32_t rows, int32_t cols, const float *weights, const float *importance,
                        void *packed, uint64_t packed_bytes, colibri_error *error)
{
    const uint64_t bytes = panel_bytes(type, cols > 0 ? (uint64_t)cols : 1);
    if (bytes == 0 || type == TYPE_MXFP4) {
        return status_fail(error, COLIBRI_ERROR_ARGUMENT, "type: expected 1 (f32), 2 (bf16), 4 (q8), 5 (q4) or 6 (q6), found %d.",
                           type);
    }
    if (rows < 1 || cols < 1 || cols > INT32_MAX - (TILE - 1) || weights == NULL || packed == NULL) {
        return status_fail(error, COLIBRI_ERROR_ARGUMENT,
                           "colibri_quantize: expected weights of at least one row and column (at most %d), a place for the "
                           "bytes, found %d x %d%s%s.",
                           INT32_MAX - (TILE - 1), rows, cols,
                           weights == NULL ? ", no weights" : "", packed == NULL ? ", no place" : "");
    }
    const uint64_t panels = ((uint64_t)rows + PANEL_ROWS - 1) / PANEL_ROWS;
    if (packed_bytes != panels * bytes) {
        return status_fail(error, COLIBRI_ERROR_ARGUMENT,
                           "packed_bytes: expected %llu for %d x %d weights of type %d (docs/FORMAT.md, section 4), found "
                           "%llu.",
                           (unsigned long long)(panels * bytes), rows, cols, type, (unsigned long long)packed_bytes);
    }
    struct source s = {.type = type, .rows = rows, .cols = cols, .weights = weights, .importance = importance};
    TRY(check_importance(&s, error));
    TRY(check_weights(&s, error));
    for (uint64_t i = 0; i < panels; i++) {
        pack_panel(&s, (int32_t)(i * PANEL_ROWS), (uint8_t *)packed + i * bytes);
    }
    return COLIBRI_OK;
}
