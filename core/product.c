/* product.c: cuts lists of matrix products into items of a few panels for the pool, and prepares what they read. */
#include "product.h"

struct matmul product(const struct matrix *w, const struct activation *x, const int32_t *rows, int32_t n, float *y,
                      size_t y_stride) {
    const bool q8 = type_reads_q8(w->type);
    return (struct matmul){
        .w = w,
        .n_panels = matrix_panels(w),
        .x = q8 ? (const void *)x->q8 : x->f32,
        .x_stride = q8 ? x->q8_bytes : (size_t)x->width * sizeof(float),
        .x_rows = rows,
        .n = n,
        .y = y,
        .y_stride = y_stride,
    };
}

int32_t product_step(const struct chunk *chunk, int64_t panels) {
    const int64_t step = panels / ((int64_t)chunk->threads->n * 8) & ~(int64_t)1;
    return step < 2 ? 2 : step > 16 ? 16 : (int32_t)step;
}

struct product_list {
    const struct chunk *chunk;
    int32_t step;
};

static void product_item(void *argument, int32_t item, int32_t worker) {
    (void)worker;
    const struct product_list *const list = argument;
    const struct matmul *m = list->chunk->products;
    int32_t items;
    while (item >= (items = (m->n_panels + list->step - 1) / list->step)) {
        item -= items;
        m++;
    }
    struct matmul part = *m;
    part.first_panel = item * list->step;
    if (part.n_panels - part.first_panel < list->step) part.n_panels -= part.first_panel;
    else part.n_panels = list->step;
    list->chunk->kernels->matmul[m->w->type](&part);
}

void product_run(const struct chunk *chunk, int32_t count) {
    int64_t panels = 0, items = 0;
    uint64_t bytes = 0;
    for (int32_t i = 0; i < count; i++) {
        panels += chunk->products[i].n_panels;
        bytes += product_bytes(chunk->products[i].w, chunk->products[i].n);
    }
    struct product_list list = {chunk, product_step(chunk, panels)};
    for (int32_t i = 0; i < count; i++) items += (chunk->products[i].n_panels + list.step - 1) / list.step;
    threads_run(chunk->threads, product_item, &list, (int32_t)items, bytes);
}

struct norm_list {
    const struct chunk *chunk;
    const float *x, *weight, *bias;
    float eps;
    bool q8;
    const struct activation *to;
};

static void quantize_row(const struct chunk *chunk, const struct activation *a, int32_t row) {
    const int32_t groups = (int32_t)q8_groups((size_t)a->width);
    chunk->kernels->quantize(a->f32 + (size_t)row * (size_t)a->width, a->width, 0, groups,
                             a->q8 + (size_t)row * a->q8_bytes);
}

void product_norm_row(const struct chunk *chunk, float *out, const float *x, const float *weight, const float *bias, int32_t n, float eps) {
    const struct kernels *const kernels = chunk->kernels;
    if (bias != NULL) kernels->centre(out, x, n);
    kernels->rms_norm(out, bias != NULL ? out : x, weight, n, eps);
    if (bias != NULL) kernels->add(out, bias, n);
}

static void norm_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct norm_list *const list = argument;
    const struct chunk *const c = list->chunk;
    const size_t at = (size_t)row * (size_t)list->to->width;
    product_norm_row(c, list->to->f32 + at, list->x + at, list->weight, list->bias, list->to->width, list->eps);
    if (list->q8) quantize_row(c, list->to, row);
}

void product_norm(const struct chunk *chunk, const float *x, const float *weight, const float *bias, float eps, bool q8,
                  const struct activation *to) {
    struct norm_list list = {chunk, x, weight, bias, eps, q8, to};
    threads_run(chunk->threads, norm_item, &list, chunk->n, 4 * row_bytes(chunk->n, to->width));
}

struct quantize_list {
    const struct chunk *chunk;
    const struct activation *activation;
};

static void quantize_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct quantize_list *const list = argument;
    quantize_row(list->chunk, list->activation, row);
}

void product_quantize(const struct chunk *chunk, const struct activation *a, int32_t rows) {
    struct quantize_list list = {chunk, a};
    threads_run(chunk->threads, quantize_item, &list, rows, 2 * row_bytes(rows, a->width));
}

struct residual_list {
    const struct chunk *chunk;
    const float *bias, *norm;
};

static void residual_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct residual_list *const list = argument;
    const struct chunk *const c = list->chunk;
    const int32_t n_embd = c->config->n_embd;
    const size_t at = (size_t)row * (size_t)n_embd;
    float *const h = c->h.f32 + at;
    if (list->bias != NULL) c->kernels->add(h, list->bias, n_embd);
    if (list->norm != NULL) c->kernels->rms_norm(h, h, list->norm, n_embd, c->config->norm_eps);
    c->kernels->add_scaled(c->x + at, h, c->config->residual_scale, n_embd);
}

void product_residual(const struct chunk *chunk, const float *bias, const float *norm) {
    struct residual_list list = {chunk, bias, norm};
    threads_run(chunk->threads, residual_item, &list, chunk->n, 3 * row_bytes(chunk->n, chunk->config->n_embd));
}
