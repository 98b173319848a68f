/* forward.c: the map of the engine. A token's embedding passes through the layers, each adding attention and a
 * feed-forward to the residual stream x; the last x, normalised, meets the output head. */
#include "forward.h"

#include "layer.h"
#include "product.h"
#include "rope.h"

#include <string.h>

/* A file that changes under an open model gives an error, not other tokens. */
static int32_t check_file(const struct chunk *c, colibri_error *error) {
    const struct os_file *const file = &c->model->container.file;
    FAIL_IF(atomic_load(&c->model->private_bytes) < file->bytes && os_file_changed(file), error, IO,
            "the model file was written to or cut off while the model was open, or the disk failed; open it again");
    return COLIBRI_OK;
}

/* Reports a finished layer; an answer other than 0, or colibri_cancel, ends the evaluation. */
static int32_t report_layer(struct chunk *c, colibri_error *error) {
    const colibri_observer *const o = c->observer;
    c->done += (uint64_t)c->n;
    TRY(check_file(c, error));
    const bool ends = atomic_load(c->cancelled) || (o->progress != NULL && o->progress(o->user, c->done, c->total) != 0);
    return ends ? COLIBRI_ERROR_CANCELLED : COLIBRI_OK;
}

static int32_t report_routing(struct chunk *c) {
    const colibri_observer *const o = c->observer;
    TRACE("layer %d position %d: expert %d weight %.4f", c->layer, c->positions[0], c->experts[0], (double)c->expert_weights[0]);
    if (o->routing == NULL) return COLIBRI_OK;
    const colibri_routing routing = {c->layer, c->n, c->config->n_experts[c->layer], c->config->n_experts_used, c->sequences,
                                     c->positions, c->router_logits, c->experts, c->expert_weights};
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ROUTER);
    const int32_t answer = o->routing(o->user, &routing);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_OBSERVER);
    return answer == 0 ? COLIBRI_OK : COLIBRI_ERROR_CANCELLED;
}

/* A row's embedding, with its sinusoids, and the cosines and sines that layers rotate by. */
static void embed_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const struct config *const config = c->config;
    const int32_t half = config->n_embd / 2, angles = config->rope_sets * (config->rope_dim / 2);
    const size_t at = (size_t)row * (size_t)config->n_embd, angle = (size_t)row * (size_t)angles;
    float *const x = c->x + at, *const sines = c->h.f32 + at;
    rope_table(c->model->rope_inv_freq, angles, c->positions[row], config->rope_scale, c->rope_cosine + angle, c->rope_sine + angle);
    c->kernels->read_row(&c->model->embedding, c->ids[row], x);
    if (config->embed_scale != 1) c->kernels->add_scaled(x, x, config->embed_scale - 1, config->n_embd);
    if (config->sinusoids == 0) return;
    rope_table(c->model->position_freq, half, c->positions[row] + config->sinusoids, 1, sines + half, sines);
    c->kernels->add_scaled(x, sines, 1, config->n_embd);
}

static int32_t feed_forward(struct chunk *c, colibri_error *error) {
    const struct layer *const w = chunk_layer(c);
    const float eps = c->config->norm_eps;
    const bool routed = c->config->n_experts[c->layer] > 0, both = routed && c->config->parallel_dense;
    c->n_next = 0;
    product_norm(c, c->x, w->ffn_norm, w->ffn_norm_bias, eps, w->ffn_reads_q8, &c->h);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_NORM);
    if (!routed) router_ahead(c);
    if (!routed || both) TRY(ffn_dense(c, error));
    if (both) {
        product_norm(c, c->said, w->dense_post_norm, NULL, eps, false, &c->side);
        product_norm(c, c->x, w->router_norm, NULL, eps, false, &c->h);
    }
    if (routed) {
        router_layer(c);
        record_choices(c);
        TRY(report_routing(c));
        router_ahead(c);
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_ROUTER);
    }
    if (both) product_norm(c, c->x, w->expert_norm, NULL, eps, w->ffn_reads_q8, &c->h);
    if (routed) TRY(ffn_experts(c, error));
    if (routed) record_visits(c);
    product_residual((struct residual){.chunk = c, .said = c->said, .inner_norm = w->expert_post_norm, .norm = w->ffn_post_norm,
                                          .side = both ? c->side.f32 : NULL, .scale = w->scale});
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_DOWN);
    return COLIBRI_OK;
}

/* Rows whose logits are wanted are moved to the front of h, normalised, and meet the output head. */
static void output_head(struct chunk *c) {
    const colibri_model *const model = c->model;
    if (c->n_outputs == 0) return;
    for (int32_t i = 0; i < c->n_outputs; i++) {
        const size_t width = (size_t)c->config->n_embd;
        product_norm_row(c, c->h.f32 + (size_t)i * width, c->x + (size_t)c->output_rows[i] * width, model->output_norm,
                         model->output_norm_bias, c->config->n_embd, c->config->norm_eps);
    }
    if (type_reads_q8(model->output.type)) product_quantize(c, &c->h, c->n_outputs, 1);
    c->products[0] = product(&model->output, &c->h, NULL, c->n_outputs, NULL, 0);
    c->products[0].y_rows = c->outputs;
    product_run(c, 1);
    for (int32_t i = 0; i < c->n_outputs; i++) {
        if (model->output_bias != NULL) c->kernels->add_scaled(c->outputs[i], model->output_bias, 1, c->config->n_vocab);
        if (c->config->output_cap > 0) c->kernels->soft_cap(c->outputs[i], c->config->output_cap, c->config->n_vocab);
    }
}

static int32_t check_logits(const struct chunk *c, colibri_error *error) {
    for (int32_t i = 0; i < c->n_outputs; i++) {
        if (c->kernels->all_finite(c->outputs[i], c->config->n_vocab)) continue;
        return status_fail(error, COLIBRI_ERROR_NUMERIC,
                           "a logit of sequence %d at position %d is NaN or infinite; damaged weights or overflow: check "
                           "the file with: colibri inspect MODEL --verify",
                           c->sequences[c->output_rows[i]], c->positions[c->output_rows[i]]);
    }
    return COLIBRI_OK;
}

/* What a source has become turns into keys and values of every layer that attends to it. */
static void hand_over(struct chunk *c, int32_t first) {
    bool q8 = false;
    for (c->layer = first; c->layer < c->config->n_layers; c->layer++) q8 = q8 || chunk_layer(c)->cross.reads_q8;
    product_norm(c, c->x, c->model->encoder_norm, c->model->encoder_norm_bias, c->config->norm_eps, q8, &c->h);
    for (c->layer = first; c->layer < c->config->n_layers; c->layer++) attention_source(c);
}

int32_t forward(struct chunk *c, bool source, colibri_error *error) {
    const int32_t n_layers = c->config->n_layers, encoder = c->config->n_encoder_layers, end = source ? encoder : n_layers;
    TRY(check_file(c, error));
    experts_begin(c->residency, c->n);
    threads_run(c->threads, embed_item, c, c->n, row_bytes(c->n, 4 * (int64_t)c->config->n_embd + 32 * c->config->rope_dim));
    profile_mark(&c->profile, n_layers, COLIBRI_PHASE_EMBED);
    for (c->layer = source ? 0 : encoder; c->layer < end; c->layer++) {
        TRACE("layer %d: %d rows, attention, %s", c->layer, c->n, c->config->n_experts[c->layer] ? "experts" : "dense");
        attention_layer(c);
        TRY(feed_forward(c, error));
        TRY(report_layer(c, error));
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_OBSERVER);
    }
    record_rows(c, source);
    if (source) {
        hand_over(c, encoder);
        return COLIBRI_OK;
    }
    output_head(c);
    TRY(check_file(c, error));
    const int32_t status = check_logits(c, error);
    profile_mark(&c->profile, n_layers, COLIBRI_PHASE_OUTPUT);
    experts_end(c->residency);
    return status;
}
