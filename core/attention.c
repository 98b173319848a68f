/* attention.c: projection, biases, q/k norm, clip, RoPE, cache, attention, output. Grouped-query attention: Ainslie et
 * al., arXiv:2305.13245. The arithmetic is in kernels/body.h. */
#include "layer.h"
#include "product.h"

struct attention_work {
    const struct chunk *chunk;
    const struct attention_weights *weights;
    bool source;         /* the keys are those of the source, all of which every row sees; else those before the row */
    bool asks, writes;   /* queries of the rows are made, keys and values are */
    const float *bias;   /* [n_heads][2 attn_bias_span + 1]; NULL: none */
    int32_t parts; /* chunk_attend_parts */
    int32_t rows;  /* of a work item; 0: all, each block of the past an item of its own */
    int32_t first_block; /* of the past, that a work item may look at */
};

/* Bias, norm, clip and rotation of one row of q or k [n_heads][head_dim]; norm and bias NULL: none. */
static void prepare_heads(const struct attention_work *work, int32_t row, float *heads, int32_t n_heads, const float *bias,
                          const float *norm) {
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const struct kernels *const kernels = c->kernels;
    const int32_t dim = config_head_dim(config, c->layer), width = n_heads * dim;
    const bool rotates = config->rope_dim > 0 && config->rope_set[c->layer] != 2;
    const size_t at = rotates ? chunk_rope_at(c, row) : 0;
    if (bias != NULL) kernels->add_scaled(heads, bias, 1, width);
    if (norm != NULL && config->qk_norm == 2) kernels->rms_norm(heads, heads, norm, width, config->norm_eps);
    if (config->qkv_clip > 0) kernels->clamp(heads, -config->qkv_clip, config->qkv_clip, width);
    for (int32_t h = 0; h < n_heads; h++, heads += dim) {
        if (norm != NULL && config->qk_norm != 2) kernels->rms_norm(heads, heads, norm, dim, config->norm_eps);
        if (rotates) kernels->rotate(heads, c->rope_cosine + at, c->rope_sine + at, config_rope_dim(config, c->layer));
    }
}

/* The sequence of the cache that holds a row's keys. */
static int32_t table_of(const struct attention_work *work, int32_t row) {
    return work->chunk->sequences[row] + (work->source ? work->chunk->cache->first_source : 0);
}

/* Where the keys that a row sees begin and end. */
static int32_t first_key(const struct attention_work *work, int32_t row) {
    const int32_t window = work->source ? 0 : work->chunk->config->window[work->chunk->layer], end = work->chunk->positions[row] + 1;
    if (window > 0 && work->chunk->config->window_aligned) return (end - 1) / window * window;
    return window > 0 && window < end ? end - window : 0;
}

static int32_t end_key(const struct attention_work *work, int32_t row) {
    return work->source ? work->chunk->cache->lengths[table_of(work, row)] : work->chunk->positions[row] + 1;
}

static void prepare_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct attention_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const struct attention_weights *const w = work->weights;
    const int32_t kv_heads = config_kv_heads(config, c->layer);
    const size_t dim = (size_t)config_head_dim(config, c->layer), kv_width = (size_t)kv_heads * dim;
    float *const k = c->k + (size_t)row * kv_width, *const v = c->v + (size_t)row * kv_width;
    if (work->asks) {
        float *const q = c->q + (size_t)row * (size_t)config->n_heads * dim;
        prepare_heads(work, row, q, config->n_heads, w->q_bias, w->q_norm);
        if (config->temperature_step > 0 && config->rope_set[c->layer] == 2) {
            const int32_t last = config->context_length / config->temperature_step, step = (c->positions[row] + 1) / config->temperature_step;
            c->kernels->add_scaled(q, q, c->model->attn_temperature[step < last ? step : last], (int32_t)((size_t)config->n_heads * dim));
        }
    }
    if (!work->writes) return;
    prepare_heads(work, row, k, kv_heads, w->k_bias, w->k_norm);
    if (w->v_bias != NULL) c->kernels->add_scaled(v, w->v_bias, 1, (int32_t)kv_width);
    if (config->qkv_clip > 0) c->kernels->clamp(v, -config->qkv_clip, config->qkv_clip, (int32_t)kv_width);
    for (int32_t h = 0; h < kv_heads; h++) {
        float *const value = v + (size_t)h * dim;
        if (config->value_norm) c->kernels->rms_norm(value, value, NULL, (int32_t)dim, config->norm_eps);
        cache_write(c->cache, table_of(work, row), c->layer, h, c->positions[row], k + (size_t)h * dim, value);
    }
}

static float *partial_at(const struct chunk *c, size_t row_head, int32_t block) {
    return c->partials + (row_head * (size_t)c->partial_blocks + (size_t)block) * attend_partial_floats(config_kv_value_dim(c->config, c->layer));
}

/* One kv head, or a tile of the query heads that read it, and up to work->rows neighbouring rows, or all and one block:
 * they go through in tiles that share keys. Output takes the place of the query. */
static void attend_item(void *argument, int32_t item, UNUSED int32_t worker) {
    const struct attention_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const int32_t kv_heads = config_kv_heads(config, c->layer), group = config->n_heads / kv_heads, tiles = work->parts / kv_heads;
    const int32_t kv_head = item % work->parts / tiles, from = item % work->parts % tiles * ATTEND_TILE;
    const int32_t to = from + ATTEND_TILE < group ? from + ATTEND_TILE : group, at = item / work->parts;
    const int32_t block = work->rows > 0 ? -1 : work->first_block + at, first = at * work->rows;
    const int32_t end = block < 0 && first + work->rows < c->n ? first + work->rows : c->n;
    const float *const sinks = work->weights->sinks;
    struct attend tile = {
        .pool = c->cache->pool,
        .half = c->cache->number_bytes == 2,
        .block_bytes = c->cache->block_bytes,
        .k_offset = cache_key_offset(c->cache, c->layer, kv_head),
        .v_offset = cache_key_offset(c->cache, c->layer, kv_head) + cache_key_bytes(c->cache, c->layer),
        .key_dim = config_key_dim(config, c->layer),
        .value_dim = config_kv_value_dim(config, c->layer),
        .block_positions = c->cache->block_positions,
        .scale = config->attn_scale,
        .bias_span = work->bias == NULL ? 0 : config->attn_bias_span,
    };
    for (int32_t row = first; row < end; row++) {
        const int32_t *const table = cache_table(c->cache, table_of(work, row));
        if (block >= 0 && (block * KV_BLOCK >= end_key(work, row) || block < first_key(work, row) / KV_BLOCK)) continue;
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
            tile.position[tile.n] = c->positions[row];
            if (work->bias != NULL) tile.bias[tile.n] = work->bias + (size_t)(kv_head * group + g) * (size_t)(2 * tile.bias_span + 1) + tile.bias_span;
            if (block >= 0) tile.partial[tile.n] = partial_at(c, head, block);
            tile.first_key[tile.n] = first_key(work, row);
            tile.n_keys[tile.n++] = end_key(work, row);
        }
    }
    if (tile.n > 0) c->kernels->attend(&tile, block);
}

static void merge_item(void *argument, int32_t head, UNUSED int32_t worker) {
    const struct attention_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const int32_t row = head / c->config->n_heads, first = first_key(work, row) / KV_BLOCK;
    const float *const sinks = work->weights->sinks;
    c->kernels->attend_merge(partial_at(c, (size_t)head, first), (end_key(work, row) - 1) / KV_BLOCK + 1 - first,
                             config_kv_value_dim(c->config, c->layer), sinks == NULL ? NULL : sinks + head % c->config->n_heads,
                             c->q + (size_t)head * (size_t)config_key_dim(c->config, c->layer));
}

/* Heads of all rows; where they are too few for the threads and the past is long, its blocks are shared out as well. */
static void attend(struct attention_work *work) {
    const struct chunk *const c = work->chunk;
    const int32_t parts = work->parts, dims = config_key_dim(c->config, c->layer) + config_kv_value_dim(c->config, c->layer);
    uint64_t bytes = 0; /* of keys and values that all query heads of all rows read */
    int32_t blocks = 0;
    work->first_block = INT32_MAX;
    for (int32_t row = 0; row < c->n; row++) {
        const int32_t end = end_key(work, row), begin = first_key(work, row), held = (end - 1) / KV_BLOCK + 1, first = begin / KV_BLOCK;
        bytes += row_bytes(end - begin, (int64_t)c->config->n_heads * dims);
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
    work->rows = 0;
    threads_run(c->threads, attend_item, work, blocks * parts, bytes);
    threads_run(c->threads, merge_item, work, c->n * c->config->n_heads, bytes / KV_BLOCK);
}

static void grouped_rows(struct chunk *c, struct attention_work *work) {
    const struct attention_weights *const w = work->weights;
    const size_t q_width = (size_t)c->attended.width;
    const size_t kv_width = (size_t)config_kv_heads(c->config, c->layer) * (size_t)config_head_dim(c->config, c->layer);
    int32_t n = 0;
    if (work->asks) c->products[n++] = product(&w->q, &c->h, NULL, c->n, c->q, q_width);
    if (work->asks && c->config->attn_gate) c->products[n++] = product(&w->gate, &c->h, NULL, c->n, c->gate, q_width);
    if (work->writes) c->products[n++] = product(&w->k, &c->h, NULL, c->n, c->k, kv_width);
    if (work->writes) c->products[n++] = product(&w->v, &c->h, NULL, c->n, c->v, kv_width);
    product_run(c, n);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_QKV);
    threads_run(c->threads, prepare_item, work, c->n, 4 * row_bytes(c->n, (int64_t)(q_width + 2 * kv_width)));
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ROPE);
}

/* cross: from a layer behind an encoder to the source, whose rows these are if `written`. */
static struct attention_work work_of(const struct chunk *c, bool cross, bool written) {
    const bool encoder = c->layer < c->config->n_encoder_layers;
    return (struct attention_work){
        .chunk = c, .weights = cross ? &chunk_layer(c)->cross : &chunk_layer(c)->self, .parts = chunk_attend_parts(c->config, c->layer),
        .source = cross || encoder, .asks = !written, .writes = !cross || written,
        .bias = cross ? NULL : encoder ? c->model->encoder_attn_bias : c->model->attn_bias,
    };
}

void attention_source(struct chunk *c) {
    struct attention_work work = work_of(c, true, true);
    grouped_rows(c, &work);
}

static void gate_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const size_t at = (size_t)row * (size_t)c->attended.width;
    c->kernels->sigmoid_mul(c->attended.f32 + at, c->gate + at, c->attended.width);
}

static void attend_to(struct chunk *c, struct attention_work *work) {
    const bool latent = c->config->kv_latent_dim > 0;
    activation_width(&c->attended, c->config->n_heads * config_out_dim(c->config, c->layer));
    if (latent) latent_queries(c);
    else grouped_rows(c, work);
    attend(work);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ATTEND);
    if (latent) latent_values(c);
    if (c->config->attn_gate) threads_run(c->threads, gate_item, c, c->n, 4 * row_bytes(c->n, c->attended.width));
}

void attention_layer(struct chunk *c) {
    const bool attends = c->config->mixer[c->layer] == 0;
    const struct activation *const given = attends ? &c->attended : &c->delta_out;
    for (int cross = 0; cross <= (chunk_layer(c)->cross.q.data != NULL); cross++) {
        struct attention_work work = work_of(c, cross != 0, false);
        const struct attention_weights *const w = work.weights;
        product_norm(c, c->x, w->norm, w->norm_bias, c->config->norm_eps, w->reads_q8, &c->h);
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_NORM);
        if (attends) attend_to(c, &work);
        else delta_layer(c);
        if (type_reads_q8(w->out.type)) product_quantize(c, given, c->n, 1);
        c->products[0] = product(&w->out, given, NULL, c->n, c->h.f32, (size_t)c->config->n_embd);
        product_run(c, 1);
        product_residual((struct residual){.chunk = c, .said = c->h.f32, .bias = w->out_bias, .norm = w->post_norm});
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ATTN_OUT);
    }
}
