/* product.h: matrix products spread over the thread pool. Which thread does which panels never changes a bit. */
#pragma once

#include "chunk.h"

/* The product of `n` rows of an activation (picked by `rows`, NULL: the first n) with w, into y [n][y_stride]. */
struct matmul product(const struct matrix *w, const struct activation *x, const int32_t *rows, int32_t n, float *y,
                      size_t y_stride);
/* Bytes that `rows` rows of `width` floats take: the measure of a row-wise work list. */
static inline uint64_t row_bytes(int32_t rows, int64_t width) {
    return (uint64_t)rows * (uint64_t)width * sizeof(float);
}
/* Weight bytes of w times rows: the measure of a product. */
static inline uint64_t product_bytes(const struct matrix *w, int32_t rows) {
    return matrix_bytes(w->type, (uint64_t)w->rows, (uint64_t)w->cols) * (uint64_t)rows;
}
/* Does chunk->products [0 … count) as one work list. */
void product_run(struct chunk *chunk, int32_t count);
/* Panels that one item of a work list should take, even, given the panels of the whole list. */
int32_t product_step(const struct chunk *chunk, int64_t panels);
/* One row normalised: RMSNorm, with a bias LayerNorm. out may be x. */
void product_norm_row(const struct chunk *chunk, float *out, const float *x, const float *weight, const float *bias, int32_t n, float eps);
/* The rows x [n][to->width] normalised into `to`, and quantised if `q8`. x may be to->f32. */
void product_norm(const struct chunk *chunk, const float *x, const float *weight, const float *bias, float eps, bool q8,
                  const struct activation *to);
/* What happens to rows `said` before x += said, in this order, and to x then; NULL: nothing. */
struct residual {
    const struct chunk *chunk;
    float *said;                           /* [n][n_embd]; changed */
    const float *bias, *inner_norm, *norm; /* [n_embd] */
    const float *side;                     /* [n][n_embd] added between the norms */
    const float *scale;                    /* [1] multiplies x */
};
void product_residual(struct residual residual);
/* Quantises the first n times `each` rows, `each` an item. */
void product_quantize(const struct chunk *chunk, const struct activation *a, int32_t n, int32_t each);
