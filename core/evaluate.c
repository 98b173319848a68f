/* evaluate.c: what is done with a context: batches, evaluated chunk by chunk, sequences, drawing. A failed evaluation
 * leaves every sequence as it was. */
#include "session.h"

#include <string.h>

static int32_t check_input(colibri_context *context, const colibri_input *in, int32_t index) {
    colibri_error *const error = &context->error;
    const int32_t n_vocab = context->model->config.n_vocab;
    FAIL_IF(in->sequence < 0 || in->sequence >= context->params.max_batch, error, ARGUMENT,
            "inputs[%d].sequence: expected 0 to %d, found %d", index, context->params.max_batch - 1, in->sequence);
    FAIL_IF(context->in_batch[in->sequence], error, ARGUMENT, "inputs[%d].sequence: %d is in this batch already", index,
            in->sequence);
    context->in_batch[in->sequence] = true;
    FAIL_IF(in->n_ids < 1 || in->ids == NULL, error, ARGUMENT, "inputs[%d]: expected at least one id, found %d", index,
            in->n_ids);
    FAIL_IF(in->n_logits < 0 || in->n_logits > in->n_ids || (in->n_logits > 0 && in->logits == NULL), error, ARGUMENT,
            "inputs[%d].n_logits: expected 0 to %d and a place for them, found %d", index, in->n_ids, in->n_logits);
    const int32_t held = context->cache.lengths[in->sequence];
    FAIL_IF(in->n_ids > context->params.context - held, error, CONTEXT,
            "sequence %d holds %d positions and %d more were given, but the context is %d; open the model with a larger "
            "context or shorten the input", in->sequence, held, in->n_ids, context->params.context);
    for (int32_t i = 0; i < in->n_ids; i++) {
        if (in->ids[i] >= 0 && in->ids[i] < n_vocab) continue;
        return status_fail(error, COLIBRI_ERROR_ARGUMENT, "inputs[%d].ids[%d]: expected 0 to %d, found %d", index, i,
                           n_vocab - 1, in->ids[i]);
    }
    return COLIBRI_OK;
}

/* Fills the chunk with the next rows and reserves their positions; *at is the first input that has some left. */
static void next_chunk(colibri_context *context, const colibri_input *inputs, int32_t n_inputs, int32_t *at) {
    struct chunk *const c = &context->chunk;
    const size_t n_vocab = (size_t)c->config->n_vocab;
    c->n = 0;
    c->n_outputs = 0;
    while (*at < n_inputs && c->n < context->params.chunk) {
        const colibri_input *const in = &inputs[*at];
        const int32_t end = context->lengths_before[in->sequence] + in->n_ids, position = context->cache.valid[in->sequence];
        const int32_t room = context->params.chunk - c->n, left = end - position, take = left < room ? left : room;
        const int32_t *const ids = cache_ids(&context->cache, in->sequence);
        cache_reserve(&context->cache, in->sequence, take, context->lengths_before[in->sequence]);
        for (int32_t i = position; i < position + take; i++, c->n++) {
            c->ids[c->n] = ids[i];
            c->sequences[c->n] = in->sequence;
            c->positions[c->n] = i;
            if (i < end - in->n_logits) continue;
            c->output_rows[c->n_outputs] = c->n;
            c->outputs[c->n_outputs++] = in->logits + (size_t)(i - (end - in->n_logits)) * n_vocab;
        }
        if (take == left) ++*at;
    }
}

static int32_t run_chunks(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                          const colibri_observer *observer) {
    struct watch watch = {.observer = observer, .cancelled = &context->cancelled};
    struct chunk *const c = &context->chunk;
    for (int32_t i = 0; i < n_inputs; i++) {
        const int32_t end = context->lengths_before[inputs[i].sequence] + inputs[i].n_ids;
        watch.total += (uint64_t)(end - context->cache.valid[inputs[i].sequence]) * (uint64_t)c->config->n_layers;
    }
    for (int32_t at = 0; at < n_inputs;) {
        next_chunk(context, inputs, n_inputs, &at);
        TRY(forward(c, &watch, &context->error));
        for (int32_t row = 0; row < c->n; row += chunk_run(c, row)) {
            cache_commit(c->cache, c->sequences[row], c->positions[row], chunk_run(c, row));
        }
    }
    return COLIBRI_OK;
}

/* Fails while an evaluation of this context runs, which only its own observer can ask in. */
static int32_t check_idle(colibri_context *context) {
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    if (!context->evaluating) return COLIBRI_OK;
    return status_fail(&context->error, COLIBRI_ERROR_ARGUMENT,
                       "the context is evaluating: an observer may call colibri_cancel and nothing else of its context");
}

int32_t colibri_measure(colibri_context *context, const colibri_profile *profile) {
    TRY(check_idle(context));
    const colibri_model_info *const info = &context->model->info;
    FAIL_IF(profile != NULL && (profile->n_layers != info->n_layers || profile->n_experts != info->n_experts),
            &context->error, ARGUMENT, "profile: expected n_layers %d and n_experts %d as in colibri_info, found %d and %d",
            info->n_layers, info->n_experts, profile->n_layers, profile->n_experts);
    FAIL_IF(profile != NULL && (profile->phase_ns == NULL || profile->wait_ns == NULL || (profile->expert_ticks == NULL &&
            info->n_experts > 0)), &context->error, ARGUMENT, "profile: expected arrays for all times, found NULL");
    context->profile = profile;
    return COLIBRI_OK;
}

int32_t colibri_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer) {
    TRY(check_idle(context));
    const int32_t most = context->params.max_batch;
    FAIL_IF(inputs == NULL || n_inputs < 1 || n_inputs > most, &context->error, ARGUMENT,
            "n_inputs: expected 1 to %d, found %d", most, inputs == NULL ? 0 : n_inputs);
    int32_t status = COLIBRI_OK;
    memset(context->in_batch, 0, (size_t)context->params.max_batch * sizeof *context->in_batch);
    for (int32_t i = 0; status == COLIBRI_OK && i < n_inputs; i++) status = check_input(context, &inputs[i], i);
    if (status != COLIBRI_OK) return status;
    for (int32_t i = 0; i < n_inputs; i++) {
        const int32_t sequence = inputs[i].sequence, held = context->cache.lengths[sequence];
        context->lengths_before[sequence] = held;
        memcpy(cache_ids(&context->cache, sequence) + held, inputs[i].ids, (size_t)inputs[i].n_ids * sizeof *inputs[i].ids);
    }
    context->evaluating = true;
    profile_begin(&context->chunk.profile, context->profile, &context->threads);
    status = run_chunks(context, inputs, n_inputs, observer);
    context->evaluating = false;
    if (status == COLIBRI_OK) return COLIBRI_OK;
    atomic_store(&context->cancelled, false); /* a cancellation is spent by the evaluation that it ends */
    for (int32_t i = 0; i < n_inputs; i++) {
        cache_rewind(&context->cache, inputs[i].sequence, context->lengths_before[inputs[i].sequence]);
    }
    return status;
}

int32_t colibri_run_inference(colibri_context *context, const int32_t *input_ids, int32_t n_ids, float *logits) {
    const colibri_input input = {.sequence = 0, .n_ids = n_ids, .ids = input_ids, .n_logits = 1, .logits = logits};
    return colibri_evaluate(context, &input, 1, NULL);
}

void colibri_cancel(colibri_context *context) {
    if (context != NULL) atomic_store(&context->cancelled, true);
}

const colibri_error *colibri_last_error(const colibri_context *context) {
    return context == NULL ? NULL : &context->error;
}

static int32_t check_sequence(const colibri_context *context, const char *name, int32_t sequence, colibri_error *error) {
    if (sequence >= 0 && sequence < context->params.max_batch) return COLIBRI_OK;
    return status_fail(error, COLIBRI_ERROR_ARGUMENT, "%s: expected 0 to %d, found %d", name, context->params.max_batch - 1,
                       sequence);
}

int32_t colibri_position(const colibri_context *context, int32_t sequence) {
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(check_sequence(context, "sequence", sequence, NULL));
    return context->cache.lengths[sequence];
}

int32_t colibri_rewind(colibri_context *context, int32_t sequence, int32_t position) {
    TRY(check_idle(context));
    TRY(check_sequence(context, "sequence", sequence, &context->error));
    FAIL_IF(position < 0 || position > context->cache.lengths[sequence], &context->error, ARGUMENT,
            "position: expected 0 to %d (what sequence %d holds), found %d", context->cache.lengths[sequence], sequence,
            position);
    cache_rewind(&context->cache, sequence, position);
    return COLIBRI_OK;
}

int32_t colibri_fork(colibri_context *context, int32_t source, int32_t target) {
    TRY(check_idle(context));
    TRY(check_sequence(context, "source", source, &context->error));
    TRY(check_sequence(context, "target", target, &context->error));
    cache_fork(&context->cache, source, target);
    return COLIBRI_OK;
}

int32_t colibri_sample(colibri_context *context, const float *logits, const colibri_sampling *sampling,
                       const int32_t *history, int32_t n_history, uint64_t position, int32_t *id) {
    TRY(check_idle(context));
    colibri_error *const error = &context->error;
    const struct config *const config = &context->model->config;
    FAIL_IF(logits == NULL || sampling == NULL || id == NULL || n_history < 0 || (n_history > 0 && history == NULL),
            error, ARGUMENT,
            "colibri_sample: expected logits, sampling, a place for the id, and history if n_history is not 0");
    TRY(sample_check(sampling, error));
    for (int32_t i = 0; i < n_history; i++) {
        if (history[i] >= 0 && history[i] < config->n_vocab) continue;
        return status_fail(error, COLIBRI_ERROR_ARGUMENT, "history[%d]: expected 0 to %d, found %d", i, config->n_vocab - 1,
                           history[i]);
    }
    return sample_draw(&context->sampler, context->model->kernels, logits, config->n_vocab_used, sampling,
                       history, n_history, position, id, error);
}
