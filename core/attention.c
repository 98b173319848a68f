/* attention.c: projection, biases, q/k norm, clip, RoPE, cache, attention, output. Grouped-query attention: Ainslie et
 * al., arXiv:2305.13245. The arithmetic is in kernels/body.h. */
#include "attention.h"

#include "delta.h"
#include "latent.h"
#include "product.h"
#include "rope.h"

static void position_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct chunk *const c = argument;
    const int32_t half = c->config->rope_sets * (c->config->rope_dim / 2);
    const size_t at = (size_t)row * (size_t)half;
    rope_table(c->model->rope_inv_freq, half, c->positions[row], c->config->rope_scale, c->rope_cosine + at,
               c->rope_sine + at);
}

void attention_positions(const struct chunk *chunk) {
    if (chunk->config->rope_dim == 0) return;
    threads_run(chunk->threads, position_item, (void *)(uintptr_t)chunk, chunk->n, 32 * row_bytes(chunk->n, chunk->config->rope_dim));
}

struct attention_work {
    const struct chunk *chunk;
    const struct layer *weights;
    int32_t layer;
    int32_t parts; /* chunk_attend_parts */
    int32_t rows;  /* of a work item */
    int32_t first_block; /* of the past, that a work item may look at */
};

/* Bias, norm, clip and rotation of one row of q or k [n_heads][head_dim]; norm and bias NULL: none. */
static void prepare_heads(const struct chunk *c, int32_t layer, int32_t row, float *heads, int32_t n_heads, const float *bias,
                          const float *norm) {
    const struct config *const config = c->config;
    const struct kernels *const kernels = c->kernels;
    const int32_t dim = config->head_dim, width = n_heads * dim;
    const bool rotates = config->rope_dim > 0 && config->rope_set[layer] != 2;
    const size_t at = rotates ? chunk_rope_at(config, row, layer) : 0;
    if (bias != NULL) kernels->add(heads, bias, width);
    if (norm != NULL && config->qk_norm == 2) kernels->rms_norm(heads, heads, norm, width, config->norm_eps);
    if (config->qkv_clip > 0) kernels->clamp(heads, config->qkv_clip, width);
    for (int32_t h = 0; h < n_heads; h++, heads += dim) {
        if (norm != NULL && config->qk_norm != 2) kernels->rms_norm(heads, heads, norm, dim, config->norm_eps);
        if (rotates) kernels->rotate(heads, c->rope_cosine + at, c->rope_sine + at, config->rope_dim);
    }
}

static void prepare_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct attention_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const size_t dim = (size_t)config->head_dim, kv_width = (size_t)config->n_kv_heads * dim;
    float *const q = c->q + (size_t)row * (size_t)config->n_heads * dim;
    float *const k = c->k + (size_t)row * kv_width, *const v = c->v + (size_t)row * kv_width;
    prepare_heads(c, work->layer, row, q, config->n_heads, work->weights->q_bias, work->weights->q_norm);
    prepare_heads(c, work->layer, row, k, config->n_kv_heads, work->weights->k_bias, work->weights->k_norm);
    if (config->temperature_step > 0 && config->rope_set[work->layer] == 2) {
        const int32_t last = config->context_length / config->temperature_step, step = (c->positions[row] + 1) / config->temperature_step;
        c->kernels->add_scaled(q, q, c->model->attn_temperature[step < last ? step : last], (int32_t)((size_t)config->n_heads * dim));
    }
    if (work->weights->v_bias != NULL) c->kernels->add(v, work->weights->v_bias, (int32_t)kv_width);
    if (config->qkv_clip > 0) c->kernels->clamp(v, config->qkv_clip, (int32_t)kv_width);
    for (int32_t h = 0; h < config->n_kv_heads; h++) {
        cache_write(c->cache, c->sequences[row], work->layer, h, c->positions[row], k + (size_t)h * dim,
                    v + (size_t)h * dim);
    }
}

/* The tile of one kv head and the rows from `first` on, empty yet. */
static struct attend empty_tile(const struct attention_work *work, int32_t kv_head) {
    const struct chunk *const c = work->chunk;
    return (struct attend){
        .pool = c->cache->pool,
        .block_bytes = c->cache->block_bytes,
        .k_offset = cache_key_offset(c->cache, work->layer, kv_head),
        .v_offset = cache_value_offset(c->cache, work->layer, kv_head),
        .key_dim = c->cache->key_dim,
        .value_dim = c->cache->value_dim,
        .block_positions = c->cache->block_positions,
        .scale = c->config->attn_scale,
    };
}

/* The first key that a row sees. */
static int32_t first_key(const struct attention_work *work, int32_t row) {
    const int32_t window = work->chunk->config->window[work->layer], end = work->chunk->positions[row] + 1;
    if (window > 0 && work->chunk->config->window_aligned) return (end - 1) / window * window;
    return window > 0 && window < end ? end - window : 0;
}

static float *partial_at(const struct chunk *c, size_t row_head, int32_t block) {
    return c->partials + (row_head * (size_t)c->partial_blocks + (size_t)block) * attend_partial_floats(c->cache->value_dim);
}

/* One kv head, or a tile of the query heads that read it, and up to work->rows neighbouring rows: they go through in tiles
 * that share keys. block: the only one to look at, or -1: all. Output takes the place of the query. */
static void attend_rows(const struct attention_work *work, int32_t part, int32_t first, int32_t block) {
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const int32_t group = config->n_heads / config->n_kv_heads, tiles = work->parts / config->n_kv_heads;
    const int32_t kv_head = part / tiles, from = part % tiles * ATTEND_TILE;
    const int32_t to = from + ATTEND_TILE < group ? from + ATTEND_TILE : group;
    const int32_t end = first + work->rows < c->n ? first + work->rows : c->n;
    const float *const sinks = work->weights->sinks;
    struct attend tile = empty_tile(work, kv_head);
    for (int32_t row = first; row < end; row++) {
        const int32_t *const table = cache_table(c->cache, c->sequences[row]);
        if (block >= 0 && (block * KV_BLOCK > c->positions[row] || block < first_key(work, row) / KV_BLOCK)) continue;
        for (int32_t g = from; g < to; g++) {
            if (tile.n == ATTEND_TILE || (tile.n > 0 && tile.table != table)) {
                c->kernels->attend(&tile, block);
                tile.n = 0;
            }
            const size_t head = (size_t)row * (size_t)config->n_heads + (size_t)(kv_head * group + g);
            tile.table = table;
            tile.out[tile.n] = c->q + head * (size_t)tile.key_dim;
            tile.q[tile.n] = tile.out[tile.n];
            tile.sink[tile.n] = sinks == NULL ? NULL : sinks + kv_head * group + g;
            if (block >= 0) tile.partial[tile.n] = partial_at(c, head, block);
            tile.first_key[tile.n] = first_key(work, row);
            tile.n_keys[tile.n++] = c->positions[row] + 1;
        }
    }
    if (tile.n > 0) c->kernels->attend(&tile, block);
}

static void attend_item(void *argument, int32_t item, int32_t worker) {
    (void)worker;
    const struct attention_work *const work = argument;
    attend_rows(work, item % work->parts, item / work->parts * work->rows, -1);
}

static void block_item(void *argument, int32_t item, int32_t worker) {
    (void)worker;
    const struct attention_work *const work = argument;
    attend_rows(work, item % work->parts, 0, work->first_block + item / work->parts);
}

static void merge_item(void *argument, int32_t head, int32_t worker) {
    (void)worker;
    const struct attention_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const int32_t row = head / c->config->n_heads, first = first_key(work, row) / KV_BLOCK;
    const float *const sinks = work->weights->sinks;
    c->kernels->attend_merge(partial_at(c, (size_t)head, first), c->positions[row] / KV_BLOCK + 1 - first, c->cache->value_dim,
                             sinks == NULL ? NULL : sinks + head % c->config->n_heads, c->q + (size_t)head * (size_t)c->cache->key_dim);
}

/* Keys and values that all query heads of all rows read. */
static uint64_t attended_bytes(const struct attention_work *work) {
    const struct chunk *const c = work->chunk;
    uint64_t bytes = 0;
    const int64_t width = (int64_t)c->config->n_heads * (c->cache->key_dim + c->cache->value_dim);
    for (int32_t row = 0; row < c->n; row++) bytes += row_bytes(c->positions[row] + 1 - first_key(work, row), width);
    return bytes;
}

/* Heads of all rows; where they are too few for the threads and the past is long, its blocks are shared out as well. */
static void attend(struct attention_work *work) {
    const struct chunk *const c = work->chunk;
    const int32_t parts = work->parts;
    const uint64_t bytes = attended_bytes(work);
    int32_t blocks = 0;
    work->first_block = INT32_MAX;
    for (int32_t row = 0; row < c->n; row++) {
        const int32_t held = c->positions[row] / KV_BLOCK + 1, first = first_key(work, row) / KV_BLOCK;
        work->first_block = first < work->first_block ? first : work->first_block;
        blocks = held > blocks ? held : blocks;
    }
    blocks -= work->first_block;
    if (c->partials == NULL || c->n > ATTEND_SPLIT || blocks == 1) {
        /* Large tiles read keys and values less often; small ones keep all threads busy. */
        work->rows = (int64_t)c->n * parts < 2 * ATTEND_TILE * (int64_t)c->threads->n ? 4 : ATTEND_TILE;
        threads_run(c->threads, attend_item, work, (c->n + work->rows - 1) / work->rows * parts, bytes);
        return;
    }
    work->rows = c->n;
    threads_run(c->threads, block_item, work, blocks * parts, bytes);
    threads_run(c->threads, merge_item, work, c->n * c->config->n_heads, bytes / KV_BLOCK);
}

static void grouped_queries(struct chunk *c, int32_t layer, struct attention_work *work) {
    const struct layer *const w = work->weights;
    const size_t q_width = (size_t)c->attended.width;
    const size_t kv_width = (size_t)c->config->n_kv_heads * (size_t)c->config->head_dim;
    c->products[0] = product(&w->q, &c->h, NULL, c->n, c->q, q_width);
    c->products[1] = product(&w->k, &c->h, NULL, c->n, c->k, kv_width);
    c->products[2] = product(&w->v, &c->h, NULL, c->n, c->v, kv_width);
    c->products[3] = product(&w->gate, &c->h, NULL, c->n, c->gate, q_width);
    product_run(c, c->config->attn_gate ? 4 : 3);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_QKV);
    threads_run(c->threads, prepare_item, work, c->n, 4 * row_bytes(c->n, (int64_t)(q_width + 2 * kv_width)));
    profile_mark(&c->profile, layer, COLIBRI_PHASE_ROPE);
}

static void gate_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct chunk *const c = argument;
    const size_t at = (size_t)row * (size_t)c->attended.width;
    c->kernels->sigmoid_mul(c->attended.f32 + at, c->gate + at, c->attended.width);
}

static void attend_to(struct chunk *c, int32_t layer, struct attention_work *work) {
    const bool latent = c->config->kv_latent_dim > 0;
    if (latent) latent_queries(c, layer);
    else grouped_queries(c, layer, work);
    attend(work);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_ATTEND);
    if (latent) latent_values(c, layer);
    if (c->config->attn_gate) threads_run(c->threads, gate_item, c, c->n, 4 * row_bytes(c->n, c->attended.width));
}

void attention_layer(struct chunk *c, int32_t layer) {
    const struct layer *const w = &c->model->layers[layer];
    const bool attends = c->config->mixer[layer] == 0;
    const struct activation *const given = attends ? &c->attended : &c->delta_out;
    struct attention_work work = {c, w, layer, chunk_attend_parts(c->config), 0, 0};
    const bool q8 = type_reads_q8(w->q.type) || type_reads_q8(w->k.type) || type_reads_q8(w->v.type) ||
                    type_reads_q8(w->gate.type) || type_reads_q8(w->q_latent.type);
    product_norm(c, c->x, w->attn_norm, w->attn_norm_bias, c->config->norm_eps, q8, &c->h);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_NORM);
    if (attends) attend_to(c, layer, &work);
    else delta_layer(c, layer);
    if (type_reads_q8(w->out.type)) product_quantize(c, given, c->n);
    c->products[0] = product(&w->out, given, NULL, c->n, c->h.f32, (size_t)c->config->n_embd);
    product_run(c, 1);
    product_residual(c, w->out_bias, w->attn_post_norm);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_ATTN_OUT);
}
