/* latent.c: multi-head latent attention, arXiv:2405.04434. One latent per position stands for the keys and values of all
 * heads. It is never expanded: a query is taken into latent space by the matrix that would make its head's keys, and what
 * a head attended to comes back by the one that would make its values. The cache holds [rotated key | latent]. */
#include "layer.h"
#include "product.h"

#include <string.h>

/* Each head's own matrix w[h] times its x: from [n][n_heads][x_width] to [n][n_heads][y_width]. */
static void multiply_heads(struct chunk *c, const struct matrix *w, float *x, int32_t x_width, float *y, int32_t y_width) {
    const int32_t n_heads = c->config->n_heads;
    const size_t q8_bytes = q8_row_bytes((size_t)w->cols);
    const struct activation heads = {x, c->head_q8, w->cols, (size_t)x_width, q8_bytes};
    bool q8 = false;
    for (int32_t h = 0; h < n_heads; h++) {
        const struct activation head = {x + h * x_width, c->head_q8 + (size_t)h * q8_bytes, w->cols,
                                        (size_t)(n_heads * x_width), (size_t)n_heads * q8_bytes};
        c->products[h] = product(&w[h], &head, NULL, c->n, y + h * y_width, (size_t)(n_heads * y_width));
        q8 = q8 || type_reads_q8(w[h].type);
    }
    if (q8) product_quantize(c, &heads, c->n, n_heads);
    product_run(c, n_heads);
}

/* Rotates the leading elements of a row's queries and key, norms its latent, and writes both to the cache. */
static void prepare_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const struct config *const config = c->config;
    const struct kernels *const kernels = c->kernels;
    const int32_t rope = config->rope_dim, key_dim = config_key_dim(config, c->layer);
    const size_t at = chunk_rope_at(c, row);
    const float *const cosine = c->rope_cosine + at, *const sine = c->rope_sine + at;
    for (int32_t h = 0; h < config->n_heads; h++) {
        const size_t head = (size_t)row * (size_t)config->n_heads + (size_t)h;
        float *const from = c->attended.f32 + head * (size_t)config->head_dim;
        kernels->rotate(from, cosine, sine, rope);
        memcpy(c->q + head * (size_t)key_dim, from, (size_t)rope * sizeof *from);
    }
    float *const key = c->k + (size_t)row * (size_t)key_dim, *const latent = key + rope;
    kernels->rms_norm(latent, latent, chunk_layer(c)->self.k_norm, config->kv_latent_dim, config->latent_norm_eps);
    kernels->rotate(key, cosine, sine, rope);
    cache_write(c->cache, c->sequences[row], c->layer, 0, c->positions[row], key, latent);
}

void latent_queries(struct chunk *c) {
    const struct attention_weights *const w = &chunk_layer(c)->self;
    const struct config *const config = c->config;
    const int32_t key_dim = config_key_dim(config, c->layer), rope = config->rope_dim;
    const size_t width = (size_t)config->n_heads * (size_t)config->head_dim;
    c->products[0] = product(&w->k, &c->h, NULL, c->n, c->k, (size_t)key_dim);
    c->products[1] = product(&w->q, &c->h, NULL, c->n, c->attended.f32, width);
    if (config->q_latent_dim > 0) {
        c->products[1] = product(&w->q_latent, &c->h, NULL, c->n, c->q_latent.f32, (size_t)config->q_latent_dim);
    }
    product_run(c, 2);
    if (config->q_latent_dim > 0) {
        product_norm(c, c->q_latent.f32, w->q_norm, NULL, config->latent_norm_eps, type_reads_q8(w->q.type), &c->q_latent);
        c->products[0] = product(&w->q, &c->q_latent, NULL, c->n, c->attended.f32, width);
        product_run(c, 1);
    }
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_QKV);
    threads_run(c->threads, prepare_item, c, c->n, 4 * row_bytes(c->n, (int64_t)width));
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ROPE);
    multiply_heads(c, w->heads, c->attended.f32 + rope, config->head_dim, c->q + rope, key_dim);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_QKV);
}

void latent_values(struct chunk *c) {
    const struct matrix *const up = chunk_layer(c)->self.heads + c->config->n_heads;
    multiply_heads(c, up, c->q, config_key_dim(c->config, c->layer), c->attended.f32, c->config->value_dim);
}
