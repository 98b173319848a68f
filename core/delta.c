/* delta.c: gated delta networks, arXiv:2412.06464. Queries, keys and values pass a short causal convolution; each head
 * keeps a matrix that decays and learns, token after token, to give a key's value. Rows go one by one in order, so that no
 * cutting of a prompt changes a bit; heads are shared out over the threads. */
#include "delta.h"

#include "product.h"

#include <string.h>

static const float LENGTH_EPS = 1e-6f; /* joins the squared length that a query or key is divided by */

struct delta_work {
    const struct chunk *chunk;
    const struct layer *weights;
    int32_t layer;
};

/* Rows first … first + n - 1 of a head, all of one sequence, whose state is at `state`. */
typedef void pass_rows(const struct delta_work *work, int32_t head, int32_t first, int32_t n, float *state);

/* Takes a head through all rows, sequence by sequence; `floats` of a state from `at` on are the head's. On the way the part is
 * kept where cache.h says. */
static void pass(const struct delta_work *work, pass_rows *rows, int32_t head, size_t at, size_t floats)
{
    const struct chunk *const c = work->chunk;
    for (int32_t row = 0, n; row < c->n; row += n) {
        n = chunk_run(c, row);
        const int32_t sequence = c->sequences[row], position = c->positions[row], left = c->cache->marks[sequence].left;
        const int32_t before = left == STATE_NOW ? n : cache_kept(position, n) - position;
        float *const now = cache_state(c->cache, sequence, STATE_NOW, work->layer) + at;
        if (position == 0) memset(now, 0, floats * sizeof *now);
        rows(work, head, row, before, now);
        if (left == STATE_NOW) continue;
        memcpy(cache_state(c->cache, sequence, left, work->layer) + at, now, floats * sizeof *now);
        rows(work, head, row + before, n - before, now);
    }
}

/* Where the channels of a head begin: those of queries, then of keys, then of values. */
static int32_t first_channel(const struct config *c, int32_t head)
{
    const int32_t keys = 2 * c->delta_key_heads;
    return head < keys ? head * c->delta_key_dim : keys * c->delta_key_dim + (head - keys) * c->delta_value_dim;
}

static void convolve_rows(const struct delta_work *work, int32_t head, int32_t first, int32_t n, float *state)
{
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const size_t channels = (size_t)config_channels(config);
    const bool key = head < 2 * config->delta_key_heads;
    const int32_t at = first_channel(config, head), dim = key ? config->delta_key_dim : config->delta_value_dim;
    float *const x = c->delta_qkv + (size_t)first * channels + at;
    c->kernels->convolve(x, channels, n, dim, work->weights->conv + at, channels, config->conv_width, state, true);
    for (int32_t row = 0; key && row < n; row++) {
        float *const one = x + (size_t)row * channels;
        c->kernels->rms_norm(one, one, NULL, dim, LENGTH_EPS / (float)dim);
    }
}

/* One head of queries, keys or values; the last item makes beta and decay. */
static void convolve_item(void *argument, int32_t head, int32_t worker)
{
    (void)worker;
    const struct delta_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const int32_t heads = config->delta_heads, before = config->conv_width - 1;
    if (head < 2 * config->delta_key_heads + heads) {
        const int32_t at = first_channel(config, head);
        pass(work, convolve_rows, head, (size_t)at * (size_t)before, (size_t)(first_channel(config, head + 1) - at) * (size_t)before);
        return;
    }
    for (int32_t row = 0; row < c->n; row++) {
        float *const beta = c->delta_gates + (size_t)row * 2 * (size_t)heads;
        c->kernels->delta_gates(beta, beta + heads, work->weights->log_rate, work->weights->decay_bias, heads);
    }
}

static void delta_rows(const struct delta_work *work, int32_t head, int32_t first, int32_t n, float *state)
{
    const struct chunk *const c = work->chunk;
    const struct config *const config = c->config;
    const int32_t heads = config->delta_heads, key_heads = config->delta_key_heads, key = head / (heads / key_heads);
    const int32_t dim = config->delta_value_dim;
    float *const qkv = c->delta_qkv + (size_t)first * (size_t)config_channels(config);
    const float *const gates = c->delta_gates + (size_t)first * 2 * (size_t)heads + head;
    const struct delta d = {
        .n = n,
        .key_dim = config->delta_key_dim,
        .value_dim = dim,
        .q = qkv + first_channel(config, key),
        .k = qkv + first_channel(config, key_heads + key),
        .v = qkv + first_channel(config, 2 * key_heads + head),
        .beta = gates,
        .decay = gates + heads,
        .stride = (size_t)config_channels(config),
        .gate_stride = 2 * (size_t)heads,
        .state = state,
    };
    c->kernels->delta(&d);
    for (int32_t row = 0; row < n; row++) {
        float *const v = d.v + (size_t)row * d.stride;
        float *const gate = c->delta_out.f32 + (size_t)(first + row) * (size_t)c->delta_out.width + head * dim;
        c->kernels->rms_norm(v, v, work->weights->value_norm, dim, config->norm_eps);
        c->kernels->silu_mul(gate, v, dim, 0, 1, 0);
    }
}

static void delta_item(void *argument, int32_t head, int32_t worker)
{
    (void)worker;
    const struct delta_work *const work = argument;
    const size_t floats = cache_head_floats(work->chunk->config);
    pass(work, delta_rows, head, cache_conv_floats(work->chunk->config) + (size_t)head * floats, floats);
}

void delta_layer(struct chunk *c, int32_t layer)
{
    const struct layer *const w = &c->model->layers[layer];
    const struct config *const config = c->config;
    const int32_t heads = config->delta_heads, channels = config_channels(config);
    struct delta_work work = {c, w, layer};
    c->products[0] = product(&w->q, &c->h, NULL, c->n, c->delta_qkv, (size_t)channels);
    c->products[1] = product(&w->k, &c->h, NULL, c->n, c->delta_gates, 2 * (size_t)heads);
    c->products[2] = product(&w->v, &c->h, NULL, c->n, c->delta_gates + heads, 2 * (size_t)heads);
    c->products[3] = product(&w->gate, &c->h, NULL, c->n, c->delta_out.f32, (size_t)c->delta_out.width);
    product_run(c, 4);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_QKV);
    threads_run(c->threads, convolve_item, &work, 2 * config->delta_key_heads + heads + 1, 4 * row_bytes(c->n, channels));
    threads_run(c->threads, delta_item, &work, heads, 2 * row_bytes(c->n, (int64_t)heads * (int64_t)cache_head_floats(config)));
    profile_mark(&c->profile, layer, COLIBRI_PHASE_DELTA);
}
