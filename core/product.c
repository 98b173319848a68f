/* product.c: cuts lists of matrix products into items of a few panels for the pool, and prepares what they read. */
#include "product.h"

#include <string.h>

struct matmul product(const struct matrix *w, const struct activation *x, const int32_t *rows, int32_t n, float *y,
                      size_t y_stride) {
    const bool q8 = type_reads_q8(w->type);
    return (struct matmul){
        .w = w, .n_panels = matrix_panels(w), .y = y, .y_stride = y_stride, .x_rows = rows, .n = n,
        .x = q8 ? (const void *)x->q8 : x->f32, .x_stride = q8 ? x->q8_bytes : x->stride * sizeof(float),
    };
}

int32_t product_step(const struct chunk *chunk, int64_t panels) {
    const int64_t step = panels / ((int64_t)chunk->threads->n * 8) & ~(int64_t)1;
    return step < 2 ? 2 : step > 16 ? 16 : (int32_t)step;
}

static void product_item(void *argument, int32_t item, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const struct matmul *m = c->products;
    for (int32_t items; item >= (items = (m->n_panels + c->step - 1) / c->step); m++) item -= items;
    struct matmul part = *m;
    part.first_panel = item * c->step;
    part.n_panels = part.n_panels - part.first_panel < c->step ? part.n_panels - part.first_panel : c->step;
    c->kernels->matmul[m->w->type](&part);
}

void product_run(struct chunk *chunk, int32_t count) {
    int64_t panels = 0, items = 0;
    uint64_t bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        panels += chunk->products[i].n_panels;
        bytes += product_bytes(chunk->products[i].w, chunk->products[i].n);
    }
    chunk->step = product_step(chunk, panels);
    for (int32_t i = 0; i < count; i++) items += (chunk->products[i].n_panels + chunk->step - 1) / chunk->step;
    threads_run(chunk->threads, product_item, chunk, (int32_t)items, bytes);
}

/* Rows normalised, or as they are where `x` is NULL, and quantised. */
struct row_list {
    const struct chunk *chunk;
    const float *x, *weight, *bias;
    float eps;
    int32_t each; /* rows of `to` that an item takes */
    bool q8;
    const struct activation *to;
};

void product_norm_row(const struct chunk *chunk, float *out, const float *x, const float *weight, const float *bias, int32_t n, float eps) {
    const struct kernels *const kernels = chunk->kernels;
    if (bias != NULL) kernels->centre(out, x, n);
    kernels->rms_norm(out, bias != NULL ? out : x, weight, n, eps);
    if (bias != NULL) kernels->add_scaled(out, bias, 1, n);
}

static void row_item(void *argument, int32_t item, UNUSED int32_t worker) {
    const struct row_list *const list = argument;
    const struct activation *const to = list->to;
    const int32_t groups = (int32_t)q8_groups((size_t)to->width);
    for (size_t row = (size_t)item * (size_t)list->each, end = row + (size_t)list->each; row < end; row++) {
        float *const f32 = to->f32 + row * to->stride;
        if (list->x != NULL) product_norm_row(list->chunk, f32, list->x + row * to->stride, list->weight, list->bias, to->width, list->eps);
        if (list->q8) list->chunk->kernels->quantize(f32, to->width, 0, groups, to->q8 + row * to->q8_bytes);
    }
}

void product_norm(const struct chunk *chunk, const float *x, const float *weight, const float *bias, float eps, bool q8,
                  const struct activation *to) {
    struct row_list list = {chunk, x, weight, bias, eps, 1, q8, to};
    threads_run(chunk->threads, row_item, &list, chunk->n, 4 * row_bytes(chunk->n, to->width));
}

void product_quantize(const struct chunk *chunk, const struct activation *a, int32_t n, int32_t each) {
    struct row_list list = {.chunk = chunk, .each = each, .q8 = true, .to = a};
    threads_run(chunk->threads, row_item, &list, n, 2 * row_bytes(n, (int64_t)each * a->width));
}

static void residual_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct residual *const r = argument;
    const struct chunk *const c = r->chunk;
    const int32_t n_embd = c->config->n_embd;
    const size_t at = (size_t)row * (size_t)n_embd;
    float *const h = r->said + at, *const x = c->x + at;
    if (r->bias != NULL) c->kernels->add_scaled(h, r->bias, 1, n_embd);
    if (r->inner_norm != NULL) c->kernels->rms_norm(h, h, r->inner_norm, n_embd, c->config->norm_eps);
    if (r->side != NULL) c->kernels->add_scaled(h, r->side + at, 1, n_embd);
    if (r->norm != NULL) c->kernels->rms_norm(h, h, r->norm, n_embd, c->config->norm_eps);
    c->kernels->add_scaled(x, h, c->config->residual_scale, n_embd);
    if (r->scale == NULL) return;
    memcpy(h, x, (size_t)n_embd * sizeof *h);
    memset(x, 0, (size_t)n_embd * sizeof *x);
    c->kernels->add_scaled(x, h, *r->scale, n_embd);
}

void product_residual(struct residual r) {
    threads_run(r.chunk->threads, residual_item, &r, r.chunk->n, 3 * row_bytes(r.chunk->n, r.chunk->config->n_embd));
}
