/* delta.c: gated delta networks, arXiv:2412.06464. Queries, keys and values pass a short causal convolution; each head keeps
 * a matrix that decays and learns, row after row, to give a key's value. Heads without keys have no matrix: a convolution of
 * values alone, scaled before and behind. Rows go in order, so that no cutting of a prompt changes a bit; key heads, with the
 * value heads that read them, are shared out over the threads. */
#include "layer.h"
#include "product.h"

#include <string.h>

/* Each row of x [n][stride] times the one of `by`. */
static void multiply(float *x, size_t stride, const float *by, size_t by_stride, int32_t n, int32_t cols) {
    for (int32_t row = 0; row < n; row++, x += stride, by += by_stride) {
        for (int32_t i = 0; i < cols; i++) x[i] *= by[i];
    }
}

/* Takes rows of one sequence through one key head and its value heads, whose states and last inputs lie at `state`. */
static void pass_rows(const struct chunk *c, int32_t key, int32_t first, int32_t n, float *state) {
    const struct attention_weights *const w = &chunk_layer(c)->self;
    const struct config *const config = c->config;
    const struct kernels *const kernels = c->kernels;
    const int32_t heads = config->delta_heads, key_heads = config->delta_key_heads, group = heads / key_heads;
    const int32_t key_dim = config->delta_key_dim, value_dim = config->delta_value_dim, channels = config_channels(config);
    const int32_t at[] = {key * key_dim, (key_heads + key) * key_dim, 2 * key_heads * key_dim + key * group * value_dim};
    const size_t stride = (size_t)channels + 2 * (size_t)heads, lanes = ((size_t)value_dim + 15) & ~(size_t)15;
    float *const rows = c->delta + (size_t)first * stride, *past = state + (size_t)group * lanes * (size_t)key_dim;
    if (key_dim == 0) multiply(rows + at[2], stride, rows + channels + at[2], stride, n, group);
    for (int part = key_dim > 0 ? 0 : 2; part < 3; part++) {
        const int32_t dim = part < 2 ? key_dim : group * value_dim;
        float *one = rows + at[part];
        kernels->convolve(one, stride, n, dim, w->conv + at[part], (size_t)channels, config->conv_width, past, key_dim > 0);
        past += (config->conv_width - 1) * dim;
        for (int32_t row = 0; part < 2 && row < n; row++, one += stride) kernels->rms_norm(one, one, NULL, dim, 1e-6f / (float)dim);
    }
    if (key_dim == 0) {
        multiply(c->delta_out.f32 + (size_t)first * (size_t)heads + at[2], (size_t)heads, rows + at[2], stride, n, group);
        return;
    }
    for (int32_t head = key * group; head < (key + 1) * group; head++, state += lanes * (size_t)key_dim) {
        float *value = rows + at[2] + (head - key * group) * value_dim;
        float *gate = c->delta_out.f32 + (first * heads + head) * (ptrdiff_t)value_dim;
        kernels->delta(&(struct delta){n, key_dim, value_dim, rows + at[0], rows + at[1], value, rows + channels + head,
                                       rows + channels + heads + head, stride, w->log_rate[head],
                                       w->decay_bias[head], state});
        for (int32_t row = 0; row < n; row++, value += stride, gate += heads * value_dim) {
            kernels->rms_norm(value, value, w->value_norm, value_dim, config->norm_eps);
            kernels->silu_mul(gate, value, value_dim, 0, 1, 0, 0);
        }
    }
}

static void delta_item(void *argument, int32_t key, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const size_t bytes = config_state_floats(c->config) * sizeof(float), at = c->cache->layer_offset[c->layer] + (size_t)key * bytes;
    for (int32_t row = 0, n; row < c->n; row += n) {
        n = chunk_run(c, row);
        const int32_t sequence = c->sequences[row], position = c->positions[row], left = c->cache->marks[sequence][STATE_LEFT];
        const int32_t before = left == STATE_NOW ? n : cache_kept(position, n) - position;
        uint8_t *const now = cache_state(c->cache, sequence, STATE_NOW) + at;
        if (position == 0) memset(now, 0, bytes);
        pass_rows(c, key, row, before, (float *)(void *)now);
        if (left == STATE_NOW) continue;
        memcpy(cache_state(c->cache, sequence, left) + at, now, bytes);
        pass_rows(c, key, row + before, n - before, (float *)(void *)now);
    }
}

void delta_layer(struct chunk *c) {
    const struct attention_weights *const w = &chunk_layer(c)->self;
    const int32_t heads = c->config->delta_heads, channels = config_channels(c->config);
    const size_t stride = (size_t)channels + 2 * (size_t)heads;
    c->products[0] = product(&w->q, &c->h, NULL, c->n, c->delta, stride);
    c->products[1] = product(&w->k, &c->h, NULL, c->n, c->delta + channels, stride);
    c->products[2] = product(&w->gate, &c->h, NULL, c->n, c->delta_out.f32, c->delta_out.stride);
    c->products[3] = product(&w->v, &c->h, NULL, c->n, c->delta + channels + heads, stride);
    product_run(c, c->config->delta_key_dim > 0 ? 4 : 3);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_QKV);
    const int64_t states = (int64_t)config_state_floats(c->config) * c->config->delta_key_heads;
    threads_run(c->threads, delta_item, c, c->config->delta_key_heads, 2 * row_bytes(c->n, states));
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_DELTA);
}
