/* evaluate.c: what is done with a context: batches, evaluated chunk by chunk, sequences, drawing. A failed evaluation
 * leaves every sequence as it was. */
#include "session.h"

#include <stdio.h>
#include <string.h>

static int32_t check_ids(colibri_context *context, const char *name, const int32_t *ids, int32_t n_ids) {
    const int32_t n_vocab = context->model->config.n_vocab;
    for (int32_t i = 0; i < n_ids; i++) {
        FAIL_IF(ids[i] < 0 || ids[i] >= n_vocab, &context->error, ARGUMENT, "%s[%d]: expected 0 to %d, found %d", name, i,
                n_vocab - 1, ids[i]);
    }
    return COLIBRI_OK;
}

/* The sequence and the ids of an input, called `name` in messages. */
static int32_t check_input(colibri_context *context, const colibri_input *in, const char *name) {
    char part[64];
    snprintf(part, sizeof part, "%ssequence", name);
    TRY(status_range(&context->error, part, in->sequence, 0, context->params.max_batch - 1));
    snprintf(part, sizeof part, "%sids", name);
    FAIL_IF(in->n_ids < 1 || in->ids == NULL, &context->error, ARGUMENT, "%s: expected at least one id, found %d", part, in->n_ids);
    return check_ids(context, part, in->ids, in->n_ids);
}

static int32_t check_target(colibri_context *context, const colibri_input *in, int32_t index) {
    colibri_error *const error = &context->error;
    char name[32];
    snprintf(name, sizeof name, "inputs[%d].", index);
    TRY(check_input(context, in, name));
    const int32_t source = context->cache.first_source, held = context->cache.lengths[in->sequence];
    FAIL_IF(context->in_batch[in->sequence], error, ARGUMENT, "%ssequence: %d is in this batch already", name, in->sequence);
    context->in_batch[in->sequence] = true;
    FAIL_IF(source > 0 && context->cache.lengths[source + in->sequence] == 0, error, ARGUMENT,
            "%ssequence: %d has no source, which this model attends to; give it one with colibri_encode", name, in->sequence);
    FAIL_IF(in->n_logits < 0 || in->n_logits > in->n_ids || (in->n_logits > 0 && in->logits == NULL), error, ARGUMENT,
            "%sn_logits: expected 0 to %d and a place for them, found %d", name, in->n_ids, in->n_logits);
    FAIL_IF(in->n_ids > context->params.context - held, error, CONTEXT,
            "sequence %d holds %d positions and %d more were given, but the context is %d; open the model with a larger "
            "context or shorten the input", in->sequence, held, in->n_ids, context->params.context);
    return COLIBRI_OK;
}

/* Fills the chunk with the next rows and reserves their positions; *at is the first input that has some left. Sequence s of
 * an input is held as sequence `first` + s. */
static void next_chunk(colibri_context *context, const colibri_input *inputs, int32_t n_inputs, int32_t first, int32_t *at) {
    struct chunk *const c = &context->chunk;
    const size_t n_vocab = (size_t)c->config->n_vocab;
    c->n = 0;
    c->n_outputs = 0;
    while (*at < n_inputs && c->n < context->params.chunk) {
        const colibri_input *const in = &inputs[*at];
        const int32_t before = context->lengths_before[in->sequence], end = before + in->n_ids, held = first + in->sequence;
        const int32_t position = context->cache.valid[held], room = context->params.chunk - c->n, left = end - position;
        const int32_t take = left < room ? left : room, *const ids = cache_ids(&context->cache, held);
        cache_reserve(&context->cache, held, take, before);
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

static int32_t run_chunks(colibri_context *context, const colibri_input *inputs, int32_t n_inputs, int32_t first,
                          const colibri_observer *observer) {
    static const colibri_observer nobody;
    struct chunk *const c = &context->chunk;
    c->observer = observer == NULL ? &nobody : observer;
    c->cancelled = &context->cancelled;
    c->done = c->total = 0;
    const int32_t encoder = c->config->n_encoder_layers, n_layers = first > 0 ? encoder : c->config->n_layers - encoder;
    for (int32_t i = 0; i < n_inputs; i++) {
        const int32_t end = context->lengths_before[inputs[i].sequence] + inputs[i].n_ids;
        c->total += (uint64_t)(end - context->cache.valid[first + inputs[i].sequence]) * (uint64_t)n_layers;
    }
    const colibri_recording *const r = context->recording;
    FAIL_IF(r != NULL && (uint64_t)(r->max_rows - r->n_rows) * (uint64_t)n_layers < c->total, &context->error, ARGUMENT,
            "recording: %d of %d rows are taken and %d more may come; take out what is there, or give more room", r->n_rows, r->max_rows,
            (int32_t)(c->total / (uint64_t)n_layers));
    for (int32_t at = 0; at < n_inputs;) {
        next_chunk(context, inputs, n_inputs, first, &at);
        TRY(forward(c, first > 0, &context->error));
        for (int32_t row = 0; row < c->n; row += chunk_run(c, row)) {
            cache_commit(c->cache, first + c->sequences[row], c->positions[row], chunk_run(c, row));
        }
    }
    return COLIBRI_OK;
}

/* Evaluates inputs that are sound, or leaves their sequences as they were. first: as next_chunk has it. */
static int32_t evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs, int32_t first,
                        const colibri_observer *observer) {
    FAIL_IF(observer != NULL && observer->expert != NULL && observer->outputs == NULL, &context->error, ARGUMENT,
            "observer: expected memory for outputs, which expert needs, found NULL");
    for (int32_t i = 0; i < n_inputs; i++) {
        const int32_t held = first + inputs[i].sequence, before = context->cache.lengths[held];
        context->lengths_before[inputs[i].sequence] = before;
        memcpy(cache_ids(&context->cache, held) + before, inputs[i].ids, (size_t)inputs[i].n_ids * sizeof *inputs[i].ids);
    }
    context->evaluating = true;
    colibri_recording none = {0}, *const recording = context->recording == NULL ? &none : context->recording, recorded = *recording;
    profile_begin(&context->chunk.profile, context->profile, context->recording, &context->threads);
    const int32_t status = run_chunks(context, inputs, n_inputs, first, observer);
    context->evaluating = false;
    if (status == COLIBRI_OK) return COLIBRI_OK;
    if (status == COLIBRI_ERROR_CANCELLED) status_fail(&context->error, status, "evaluation was cancelled; the sequences are as before it");
    *recording = recorded;
    experts_settle(&context->experts);
    atomic_store(&context->cancelled, false); /* a cancellation is spent by the evaluation that it ends */
    for (int32_t i = 0; i < n_inputs; i++) {
        cache_rewind(&context->cache, first + inputs[i].sequence, context->lengths_before[inputs[i].sequence]);
    }
    return status;
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
    FAIL_IF(profile != NULL && (profile->phase_ns == NULL || profile->wait_ns == NULL || (profile->expert_ns == NULL &&
            info->n_experts > 0)), &context->error, ARGUMENT, "profile: expected arrays for all times, found NULL");
    context->profile = profile;
    return COLIBRI_OK;
}

int32_t colibri_record(colibri_context *context, colibri_recording *r) {
    TRY(check_idle(context));
    FAIL_IF(r != NULL && (r->max_rows < 1 || r->chunks == NULL || r->ids == NULL || r->positions == NULL || r->sequences == NULL ||
            r->experts == NULL || r->weights == NULL || r->visit_ns == NULL || r->visit_read == NULL), &context->error, ARGUMENT,
            "recording: expected room for at least one row, and arrays for all but logits, found NULL");
    context->recording = r;
    return COLIBRI_OK;
}

int32_t colibri_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer) {
    TRY(check_idle(context));
    const int32_t most = context->params.max_batch;
    FAIL_IF(inputs == NULL || n_inputs < 1 || n_inputs > most, &context->error, ARGUMENT,
            "n_inputs: expected 1 to %d, found %d", most, inputs == NULL ? 0 : n_inputs);
    memset(context->in_batch, 0, (size_t)most * sizeof *context->in_batch);
    for (int32_t i = 0; i < n_inputs; i++) TRY(check_target(context, &inputs[i], i));
    return evaluate(context, inputs, n_inputs, 0, observer);
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

int32_t colibri_position(const colibri_context *context, int32_t sequence) {
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(status_range(NULL, "sequence", sequence, 0, context->params.max_batch - 1));
    return context->cache.lengths[sequence];
}

int32_t colibri_rewind(colibri_context *context, int32_t sequence, int32_t position) {
    TRY(check_idle(context));
    TRY(status_range(&context->error, "sequence", sequence, 0, context->params.max_batch - 1));
    FAIL_IF(position < 0 || position > context->cache.lengths[sequence], &context->error, ARGUMENT,
            "position: expected 0 to %d (what sequence %d holds), found %d", context->cache.lengths[sequence], sequence,
            position);
    cache_rewind(&context->cache, sequence, position);
    return COLIBRI_OK;
}

int32_t colibri_fork(colibri_context *context, int32_t source, int32_t target) {
    TRY(check_idle(context));
    TRY(status_range(&context->error, "source", source, 0, context->params.max_batch - 1));
    TRY(status_range(&context->error, "target", target, 0, context->params.max_batch - 1));
    cache_fork(&context->cache, source, target);
    return COLIBRI_OK;
}

int32_t colibri_encode(colibri_context *context, int32_t sequence, const int32_t *ids, int32_t n_ids, const colibri_observer *observer) {
    TRY(check_idle(context));
    const struct colibri_input input = {.sequence = sequence, .n_ids = n_ids, .ids = ids};
    const int32_t most = context->params.chunk < context->params.context ? context->params.chunk : context->params.context;
    const int32_t first = context->cache.first_source;
    FAIL_IF(first == 0, &context->error, ARGUMENT, "the model has no encoder: give the ids to colibri_evaluate");
    TRY(check_input(context, &input, ""));
    FAIL_IF(context->cache.lengths[sequence] > 0, &context->error, ARGUMENT,
            "sequence %d holds %d positions made from another source; rewind it to 0 first", sequence, context->cache.lengths[sequence]);
    FAIL_IF(n_ids > most, &context->error, CONTEXT,
            "the source has %d tokens, but is evaluated at once and context and chunk allow %d; open the model with larger ones or "
            "shorten it", n_ids, most);
    cache_rewind(&context->cache, first + sequence, 0);
    return evaluate(context, &input, 1, first, observer);
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
    TRY(check_ids(context, "history", history, n_history));
    return sample_draw(&context->sampler, context->model->kernels, logits, config->n_vocab_used, sampling,
                       history, n_history, position, id, error);
}
