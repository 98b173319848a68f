/* forward.c: the map of the engine. A token's embedding passes through the layers, each adding attention and a
 * feed-forward to the residual stream x; the last x, normalised, meets the output head. */
#include "forward.h"

#include "attention.h"
#include "ffn.h"
#include "product.h"
#include "router.h"

#include <string.h>

static int32_t cancelled(colibri_error *error) {
    return status_fail(error, COLIBRI_ERROR_CANCELLED, "evaluation was cancelled; the sequences are as before it");
}

/* Reports a finished layer; an answer other than 0, or colibri_cancel, ends the evaluation. */
static int32_t report_layer(const struct chunk *c, struct watch *watch, colibri_error *error) {
    const colibri_observer *const o = watch->observer;
    watch->done += (uint64_t)c->n;
    if (atomic_load(watch->cancelled)) return cancelled(error);
    if (o != NULL && o->progress != NULL && o->progress(o->user, watch->done, watch->total) != 0) return cancelled(error);
    return COLIBRI_OK;
}

static int32_t report_routing(const struct chunk *c, int32_t layer, const struct watch *watch, colibri_error *error) {
    const colibri_observer *const o = watch->observer;
    for (int32_t i = 0; i < c->config->n_experts_used; i++) {
        TRACE("layer %d position %d: expert %d weight %.4f", layer, c->positions[0], c->experts[i],
              (double)c->expert_weights[i]);
    }
    if (o == NULL || o->routing == NULL) return COLIBRI_OK;
    const colibri_routing routing = {
        .layer = layer,
        .n_rows = c->n,
        .n_experts = c->config->n_experts[layer],
        .n_experts_used = c->config->n_experts_used,
        .sequences = c->sequences,
        .positions = c->positions,
        .logits = c->router_logits,
        .experts = c->experts,
        .weights = c->expert_weights,
    };
    return o->routing(o->user, &routing) == 0 ? COLIBRI_OK : cancelled(error);
}

static void embed_item(void *argument, int32_t row, int32_t worker) {
    (void)worker;
    const struct chunk *const c = argument;
    float *const x = c->x + (size_t)row * (size_t)c->config->n_embd;
    c->kernels->read_row(&c->model->embedding, c->ids[row], x);
    if (c->config->embed_scale != 1) c->kernels->add_scaled(x, x, c->config->embed_scale - 1, c->config->n_embd);
}

static int32_t feed_forward(struct chunk *c, int32_t layer, const struct watch *watch, colibri_error *error) {
    const struct layer *const weights = &c->model->layers[layer];
    product_norm(c, c->x, weights->ffn_norm, weights->ffn_norm_bias, c->config->norm_eps, weights->ffn_reads_q8, &c->h);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_NORM);
    if (c->config->n_experts[layer] == 0) {
        ffn_dense(c, layer);
        return COLIBRI_OK;
    }
    router_layer(c, layer);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_ROUTER);
    TRY(report_routing(c, layer, watch, error));
    profile_mark(&c->profile, layer, COLIBRI_PHASE_OBSERVER);
    ffn_experts(c, layer);
    return COLIBRI_OK;
}

/* Rows whose logits are wanted are moved to the front of h, normalised, and meet the output head. */
static void output_head(const struct chunk *c) {
    const colibri_model *const model = c->model;
    if (c->n_outputs == 0) return;
    for (int32_t i = 0; i < c->n_outputs; i++) {
        const size_t width = (size_t)c->config->n_embd;
        product_norm_row(c, c->h.f32 + (size_t)i * width, c->x + (size_t)c->output_rows[i] * width, model->output_norm,
                         model->output_norm_bias, c->config->n_embd, c->config->norm_eps);
    }
    if (type_reads_q8(model->output.type)) product_quantize(c, &c->h, c->n_outputs);
    c->products[0] = product(&model->output, &c->h, NULL, c->n_outputs, NULL, 0);
    c->products[0].y_rows = c->outputs;
    product_run(c, 1);
    for (int32_t i = 0; i < c->n_outputs; i++) {
        if (model->output_bias != NULL) c->kernels->add(c->outputs[i], model->output_bias, c->config->n_vocab);
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

int32_t forward(struct chunk *c, struct watch *watch, colibri_error *error) {
    threads_run(c->threads, embed_item, c, c->n, 4 * row_bytes(c->n, c->config->n_embd));
    attention_positions(c);
    profile_mark(&c->profile, c->config->n_layers, COLIBRI_PHASE_EMBED);
    for (int32_t layer = 0; layer < c->config->n_layers; layer++) {
        TRACE("layer %d: %d rows, attention, %s", layer, c->n, c->config->n_experts[layer] ? "experts" : "dense");
        attention_layer(c, layer);
        TRY(feed_forward(c, layer, watch, error));
        TRY(report_layer(c, watch, error));
        profile_mark(&c->profile, layer, COLIBRI_PHASE_OBSERVER);
    }
    output_head(c);
    const int32_t status = check_logits(c, error);
    profile_mark(&c->profile, c->config->n_layers, COLIBRI_PHASE_OUTPUT);
    return status;
}
