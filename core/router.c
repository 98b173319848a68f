/* router.c: gate logits in f32 from the hidden state before quantisation, scores made of them, the best k (of the best
 * groups), and the grouping of rows by expert. Owns the order of everything: ties to the lowest, rows in row order. */
#include "layer.h"
#include "product.h"
#include "topk.h"

#include <math.h>
#include <string.h>

static float sigmoid(const struct chunk *c, float x) {
    return 1.0f / (1.0f + c->kernels->exp(-x));
}

/* Takes experts outside the best groups out of the choice. arXiv:2405.04434, arXiv:2412.19437 */
static void keep_groups(const struct config *config, float *choice, int32_t n_experts) {
    const int32_t size = n_experts / config->n_expert_groups;
    float scores[CONFIG_MAX_GROUPS];
    int32_t best[2], kept[CONFIG_MAX_GROUPS];
    bool keep[CONFIG_MAX_GROUPS] = {false};
    for (int32_t g = 0; g < config->n_expert_groups; g++) {
        const float *const group = choice + g * size;
        topk_select(group, size, config->group_score ? 2 : 1, best);
        scores[g] = config->group_score ? group[best[0]] + group[best[1]] : group[best[0]];
    }
    topk_select(scores, config->n_expert_groups, config->n_groups_used, kept);
    for (int32_t i = 0; i < config->n_groups_used; i++) keep[kept[i]] = true;
    for (int32_t e = 0; e < n_experts; e++) {
        if (!keep[e / size]) choice[e] = config->group_score ? -INFINITY : 0;
    }
}

/* Experts one after the other; the weight of each is its share in a softmax over the logits near to its own.
 * arXiv:2409.12136 */
static void choose_in_turn(const struct chunk *c, const float *logits, int32_t n_experts, float *left, int32_t *experts, float *scores) {
    float near[CONFIG_MAX_EXPERTS];
    memcpy(left, logits, (size_t)n_experts * sizeof *left);
    for (int32_t i = 0; i < c->config->n_experts_used; i++) {
        topk_select(left, n_experts, 1, &experts[i]);
        const float most = left[experts[i]];
        for (int32_t e = 0; e < n_experts; e++) {
            const float size = fabsf(logits[e]), distance = (most - logits[e]) / (size > most ? size : most);
            near[e] = distance > c->config->router_near ? -INFINITY : left[e];
        }
        c->kernels->softmax(near, n_experts);
        scores[experts[i]] = near[experts[i]];
        left[experts[i]] = -INFINITY;
    }
}

/* The experts of a layer that a row chooses by its products with the router, best first, and their weights. */
static void choose(const struct chunk *c, const struct layer *layer, float *logits, int32_t *experts, float *weights) {
    const struct config *const config = c->config;
    const int32_t used = config->n_experts_used, n_experts = layer->router.rows;
    const float *const bias = layer->router_bias;
    /* exp is monotone only up to rounding, so the choice is made among scores, as the references do. */
    float scores[CONFIG_MAX_EXPERTS], biased[CONFIG_MAX_EXPERTS], *choice = scores;
    if (layer->router_logit_bias != NULL) c->kernels->add_scaled(logits, layer->router_logit_bias, 1, n_experts);
    memcpy(scores, logits, (size_t)n_experts * sizeof *logits);
    if (config->router_score == 0) c->kernels->softmax(scores, n_experts);
    else for (int32_t e = 0; e < n_experts; e++) scores[e] = sigmoid(c, logits[e]);
    if (config->router_score == 2) choice = memcpy(biased, logits, (size_t)n_experts * sizeof *logits); /* sigmoids tie at 1 */
    if (bias != NULL) {
        choice = memcpy(biased, scores, (size_t)n_experts * sizeof *scores);
        c->kernels->add_scaled(choice, bias, 1, n_experts);
    }
    if (config->n_expert_groups > 0) keep_groups(config, choice, n_experts);
    if (config->router_near > 0) choose_in_turn(c, logits, n_experts, biased, experts, scores);
    else topk_select(choice, n_experts, used, experts);
    float sum = 1e-20f + config->router_norm_add; /* the first changes no sum but 0 */
    for (int32_t i = 0; i < used; i++) sum += weights[i] = scores[experts[i]];
    if (sum < config->router_norm_min) sum = config->router_norm_min;
    for (int32_t i = 0; i < used; i++) {
        if (config->router_norm) weights[i] /= sum;
        weights[i] *= config->router_scale;
    }
}

static void route_item(void *argument, int32_t row, UNUSED int32_t worker) {
    const struct chunk *const c = argument;
    const struct layer *const weights = chunk_layer(c);
    const int32_t used = c->config->n_experts_used;
    const size_t at = (size_t)row * (size_t)used;
    choose(c, weights, c->router_logits + (size_t)row * (size_t)weights->router.rows, c->experts + at, c->expert_weights + at);
    for (int32_t i = row * used; weights->expert_scale != NULL && i < (row + 1) * used; i++) {
        c->expert_weights[i] *= weights->expert_scale[c->experts[i]];
    }
    if (c->config->n_ff_shared == 0) return;
    float gate = 1;
    if (weights->shared_router != NULL) {
        const float logit = c->kernels->dot(weights->shared_router,
                                            c->h.f32 + (size_t)row * (size_t)c->config->n_embd, c->config->n_embd);
        gate = sigmoid(c, logit);
    }
    c->shared_weights[row] = gate;
}

/* Counting sort of (row, rank) pairs by expert: slots of one expert are neighbours, in row order. Those beyond an expert's
 * capacity weigh nothing. arXiv:2101.03961 */
static void group_rows(struct chunk *c) {
    const struct layer *const weights = chunk_layer(c);
    const bool limited = c->layer < c->config->n_encoder_layers && c->config->expert_capacity > 0;
    const int32_t capacity = limited ? c->config->expert_capacity : INT32_MAX;
    const int32_t n_experts = weights->router.rows, pairs = c->n * c->config->n_experts_used;
    int32_t *const first = c->expert_slots;
    memset(first, 0, ((size_t)n_experts + 1) * sizeof *first);
    for (int32_t i = 0; i < pairs; i++) {
        if (++first[c->experts[i] + 1] > capacity) c->expert_weights[i] = 0;
    }
    for (int32_t e = 0; e < n_experts; e++) first[e + 1] += first[e];
    c->n_groups = 0;
    for (int32_t e = 0; e < n_experts; e++) {
        if (first[e + 1] == first[e]) continue;
        c->groups[c->n_groups] = (struct ffn_group){&weights->experts[e], c->slot_rows + first[e], c->slot_weights + first[e],
                                                    first[e + 1] - first[e], first[e], e, c->n_groups, false};
        c->n_groups++;
    }
    for (int32_t i = 0; i < pairs; i++) {
        const int32_t slot = first[c->experts[i]]++;
        c->slot_rows[slot] = i / c->config->n_experts_used;
        c->slot_weights[slot] = c->expert_weights[i];
    }
    if (c->config->n_ff_shared > 0) c->groups[c->n_groups++] = (struct ffn_group){&weights->shared, NULL, c->shared_weights, c->n, pairs, -1, 0, false};
}

void router_layer(struct chunk *c) {
    const struct matrix *const w = &chunk_layer(c)->router;
    c->products[0] = product(w, &c->h, NULL, c->n, c->router_logits, (size_t)w->rows);
    product_run(c, 1);
    threads_run(c->threads, route_item, c, c->n, 8 * row_bytes(c->n, w->rows));
    group_rows(c);
}

void router_ahead(struct chunk *c) {
    const int32_t next = c->layer + 1, used = c->config->n_experts_used, n_embd = c->config->n_embd;
    const bool last = next == c->config->n_layers || next == c->config->n_encoder_layers;
    if (!c->residency->asks || last || c->config->n_experts[next] == 0) return;
    const struct layer *const l = &c->model->layers[next];
    const struct activation guess = {c->said, NULL, n_embd, (size_t)n_embd, 0};
    product_norm(c, c->x, l->router_norm != NULL ? l->router_norm : l->ffn_norm, l->ffn_norm_bias, c->config->norm_eps, false, &guess);
    c->products[0] = product(&l->router, &guess, NULL, c->n, c->router_logits, (size_t)l->router.rows);
    product_run(c, 1);
    for (int32_t i = 0; i < c->n; i++) choose(c, l, c->router_logits + i * l->router.rows, c->experts + i * used, c->expert_weights + i * used);
    c->n_next = c->n * used;
}
