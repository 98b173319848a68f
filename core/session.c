/* session.c: lays a context out in one reservation, and evaluates batches chunk by chunk. Owns the context's memory;
 * a failed evaluation leaves every sequence as it was. */
#include "session.h"

#include <inttypes.h>
#include <string.h>

static int32_t check_count(const char *name, int64_t value, int64_t max, colibri_error *error)
{
    if (value >= 1 && value <= max) return COLIBRI_OK;
    return status_fail(error, COLIBRI_ERROR_ARGUMENT, "%s: expected 1 to %" PRId64 ", found %" PRId64, name, max, value);
}

enum { MAX_BATCH = 4096, MAX_CHUNK = 4096, MAX_CONTEXT = 1 << 30 };

static int32_t check_params(const colibri_params *p, colibri_error *error)
{
    TRY(check_count("context", p->context, MAX_CONTEXT, error));
    TRY(check_count("max_batch", p->max_batch, MAX_BATCH, error));
    TRY(check_count("threads", p->threads, THREADS_MAX, error));
    TRY(check_count("chunk", p->chunk, MAX_CHUNK, error));
    FAIL_IF(p->pin != 0 && p->pin != 1, error, ARGUMENT, "pin: expected 0 or 1, found %d", p->pin);
    FAIL_IF(p->memory != NULL && (uintptr_t)p->memory % OS_PAGE != 0, error, ARGUMENT,
            "memory: expected an address aligned to %d bytes, found %p", OS_PAGE, p->memory);
    return COLIBRI_OK;
}

/* Rows that a chunk can hold at most: buffers for more would never be used. */
static int32_t usable_chunk(const colibri_params *p)
{
    const int64_t rows = (int64_t)p->context * p->max_batch;
    return rows < p->chunk ? (int32_t)rows : p->chunk;
}

/* The one layout of a context. Counting fills the plan; with a base it hands the pieces out. */
static void layout(const colibri_model *model, const colibri_params *p, colibri_context *context, struct arena *arena,
                   void **stacks, colibri_memory_plan *plan)
{
    uint64_t mark = arena->used;
    arena_take(arena, 1, sizeof *context);
    context->lengths_before = arena_take(arena, (uint64_t)p->max_batch, sizeof(int32_t));
    context->in_batch = arena_take(arena, (uint64_t)p->max_batch, sizeof(bool));
    plan->control = arena->used - mark;
    mark = arena->used;
    threads_layout(&context->threads, arena, p->threads, stacks);
    plan->threads = arena->used - mark;
    mark = arena->used;
    chunk_layout(&context->chunk, arena, model, p, usable_chunk(p));
    plan->activations = arena->used - mark;
    mark = arena->used;
    sample_layout(&context->sampler, arena, model->config.n_vocab);
    plan->sampling = arena->used - mark;
    mark = arena->used;
    cache_layout(&context->cache, arena, &model->config, p->context, p->max_batch); /* last: its tail may stay untouched */
    plan->kv_cache = arena->used - mark;
    mark = (OS_PAGE - arena->used % OS_PAGE) % OS_PAGE;
    plan->control += mark;
    plan->context_bytes = arena->used + mark;
    plan->weights_resident = atomic_load(&model->private_bytes);
    plan->weights_mapped = model->info.file_bytes - plan->weights_resident;
    plan->model = model->info.model_bytes;
    plan->total_bytes = plan->weights_mapped + plan->weights_resident + plan->model + plan->context_bytes;
}

int32_t session_plan(const colibri_model *model, const colibri_params *p, colibri_memory_plan *plan, colibri_error *error)
{
    struct arena arena = {0};
    colibri_context scratch;
    void *stacks;
    TRY(check_params(p, error));
    layout(model, p, &scratch, &arena, &stacks, plan);
    FAIL_IF(arena.overflow || arena.used > (uint64_t)1 << 62, error, MEMORY,
            "context %d x max_batch %d, chunk %d: sizes that cannot be counted; ask for less", p->context, p->max_batch,
            p->chunk);
    return COLIBRI_OK;
}

/* The memory a context will live in: the caller's or a new reservation, refused early if it cannot become real. */
static int32_t find_memory(const colibri_params *p, uint64_t bytes, void **memory, colibri_error *error)
{
    if (p->memory != NULL) {
        *memory = p->memory;
        if (p->memory_bytes >= bytes) return COLIBRI_OK;
        return status_fail(error, COLIBRI_ERROR_MEMORY, "memory_bytes: expected at least %" PRIu64 ", found %" PRIu64, bytes,
                           p->memory_bytes);
    }
    const uint64_t available = os_available_bytes();
    *memory = bytes <= available ? os_reserve(bytes) : NULL;
    if (*memory != NULL) return COLIBRI_OK;
    FAIL_IF(bytes <= available, error, MEMORY,
            "the system refused %" PRIu64 " bytes for the context (context %d x max_batch %d, chunk %d); a limit of this "
            "process (ulimit -v) is lower; raise it or ask for a smaller context", bytes, p->context, p->max_batch,
            p->chunk);
    return status_fail(error, COLIBRI_ERROR_MEMORY,
                       "the context needs %" PRIu64 " bytes (context %d x max_batch %d, chunk %d), available are %" PRIu64
                       "; ask for a smaller context",
                       bytes, p->context, p->max_batch, p->chunk, available);
}

int32_t session_start(colibri_model *model, const colibri_params *p, colibri_context **out, colibri_error *error)
{
    colibri_memory_plan plan;
    void *memory, *stacks;
    TRY(session_plan(model, p, &plan, error));
    TRY(find_memory(p, plan.context_bytes, &memory, error));
    struct arena arena = {.base = memory};
    colibri_context *const context = memory;
    memset(context, 0, sizeof *context);
    layout(model, p, context, &arena, &stacks, &plan);
    context->model = model;
    context->params = *p;
    context->params.chunk = usable_chunk(p);
    context->bytes = plan.context_bytes;
    context->owns_memory = p->memory == NULL;
    context->chunk.model = model;
    context->chunk.config = &model->config;
    context->chunk.kernels = model->kernels;
    context->chunk.threads = &context->threads;
    context->chunk.cache = &context->cache;
    atomic_init(&context->cancelled, false);
    cache_reset(&context->cache);
    atomic_fetch_add(&model->references, 1);
    const int32_t status = threads_start(&context->threads, p->threads, p->pin != 0, stacks, error);
    if (status != COLIBRI_OK) session_end(context);
    else *out = context;
    return status;
}

void session_end(colibri_context *context)
{
    colibri_model *const model = context->model;
    const struct cache cache = context->cache;
    const uint64_t bytes = context->bytes;
    const bool owned = context->owns_memory;
    if (context->threads.started == context->threads.n - 1) threads_stop(&context->threads);
    /* Everything before the pool, then the blocks that were ever written: untouched pages stay untouched. */
    const uint64_t before_pool = (uint64_t)(cache.pool - (uint8_t *)context);
    const uint64_t written = before_pool + (uint64_t)cache.n_touched * cache.block_bytes;
    os_wipe(context, written < bytes ? written : bytes);
    if (owned) os_release(context, bytes);
    weights_release(model);
}

static int32_t check_ids(colibri_context *context, const char *name, int32_t index, const int32_t *ids, int32_t n_ids)
{
    const int32_t n_vocab = context->model->config.n_vocab;
    FAIL_IF(n_ids < 1 || ids == NULL, &context->error, ARGUMENT, "%s[%d]: expected at least one id, found %d", name, index, n_ids);
    for (int32_t i = 0; i < n_ids; i++) {
        if (ids[i] >= 0 && ids[i] < n_vocab) continue;
        return status_fail(&context->error, COLIBRI_ERROR_ARGUMENT, "%s[%d].ids[%d]: expected 0 to %d, found %d", name, index, i,
                           n_vocab - 1, ids[i]);
    }
    return COLIBRI_OK;
}

static int32_t check_input(colibri_context *context, const colibri_input *in, int32_t index)
{
    colibri_error *const error = &context->error;
    const int32_t source = context->cache.first_source;
    FAIL_IF(in->sequence < 0 || in->sequence >= context->params.max_batch, error, ARGUMENT,
            "inputs[%d].sequence: expected 0 to %d, found %d", index, context->params.max_batch - 1, in->sequence);
    FAIL_IF(context->in_batch[in->sequence], error, ARGUMENT, "inputs[%d].sequence: %d is in this batch already", index,
            in->sequence);
    context->in_batch[in->sequence] = true;
    TRY(check_ids(context, "inputs", index, in->ids, in->n_ids));
    FAIL_IF(source > 0 && context->cache.lengths[source + in->sequence] == 0, error, ARGUMENT,
            "inputs[%d].sequence: %d has no source, which this model attends to; give it one with colibri_encode", index, in->sequence);
    FAIL_IF(in->n_logits < 0 || in->n_logits > in->n_ids || (in->n_logits > 0 && in->logits == NULL), error, ARGUMENT,
            "inputs[%d].n_logits: expected 0 to %d and a place for them, found %d", index, in->n_ids, in->n_logits);
    const int32_t held = context->cache.lengths[in->sequence];
    FAIL_IF(in->n_ids > context->params.context - held, error, CONTEXT,
            "sequence %d holds %d positions and %d more were given, but the context is %d; open the model with a larger "
            "context or shorten the input", in->sequence, held, in->n_ids, context->params.context);
    return COLIBRI_OK;
}

/* Where the next chunk starts: an input and an id of it. */
struct cursor { int32_t input, id; };

/* Fills the chunk with the next rows and reserves their positions. */
static void next_chunk(colibri_context *context, const colibri_input *inputs, int32_t n_inputs, struct cursor *at)
{
    struct chunk *const c = &context->chunk;
    const size_t n_vocab = (size_t)c->config->n_vocab;
    c->n = 0;
    c->n_outputs = 0;
    while (at->input < n_inputs && c->n < context->params.chunk) {
        const colibri_input *const in = &inputs[at->input];
        const int32_t room = context->params.chunk - c->n, left = in->n_ids - at->id, take = left < room ? left : room;
        const int32_t position = context->cache.lengths[in->sequence], first_logits = in->n_ids - in->n_logits;
        cache_reserve(&context->cache, in->sequence, take);
        for (int32_t i = 0; i < take; i++, c->n++) {
            const int32_t id = at->id + i;
            c->ids[c->n] = in->ids[id];
            c->sequences[c->n] = in->sequence;
            c->positions[c->n] = position + i;
            if (id < first_logits) continue;
            c->output_rows[c->n_outputs] = c->n;
            c->outputs[c->n_outputs++] = in->logits + (size_t)(id - first_logits) * n_vocab;
        }
        at->id += take;
        if (at->id == in->n_ids) *at = (struct cursor){at->input + 1, 0};
    }
}

static int32_t run_chunks(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                          const colibri_observer *observer)
{
    const struct config *const c = &context->model->config;
    struct watch watch = {.observer = observer, .cancelled = &context->cancelled};
    struct cursor at = {0, 0};
    for (int32_t i = 0; i < n_inputs; i++) {
        watch.total += (uint64_t)inputs[i].n_ids * (uint64_t)(c->n_layers - c->n_encoder_layers);
    }
    while (at.input < n_inputs) {
        next_chunk(context, inputs, n_inputs, &at);
        TRY(forward(&context->chunk, &watch, &context->error));
    }
    return COLIBRI_OK;
}

int32_t session_check_idle(colibri_context *context)
{
    if (!context->evaluating) return COLIBRI_OK;
    return status_fail(&context->error, COLIBRI_ERROR_ARGUMENT,
                       "the context is evaluating: an observer may call colibri_cancel and nothing else of its context");
}

int32_t session_measure(colibri_context *context, const colibri_profile *profile)
{
    const colibri_model_info *const info = &context->model->info;
    FAIL_IF(profile != NULL && (profile->n_layers != info->n_layers || profile->n_experts != info->n_experts),
            &context->error, ARGUMENT, "profile: expected n_layers %d and n_experts %d as in colibri_info, found %d and %d",
            info->n_layers, info->n_experts, profile->n_layers, profile->n_experts);
    FAIL_IF(profile != NULL && (profile->phase_ns == NULL || profile->wait_ns == NULL || (profile->expert_ticks == NULL &&
            info->n_experts > 0)), &context->error, ARGUMENT, "profile: expected arrays for all times, found NULL");
    context->profile = profile;
    return COLIBRI_OK;
}

int32_t session_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer)
{
    TRY(session_check_idle(context));
    int32_t status = check_count("n_inputs", inputs == NULL ? 0 : n_inputs, context->params.max_batch, &context->error);
    memset(context->in_batch, 0, (size_t)context->params.max_batch * sizeof *context->in_batch);
    for (int32_t i = 0; status == COLIBRI_OK && i < n_inputs; i++) status = check_input(context, &inputs[i], i);
    if (status != COLIBRI_OK) return status;
    for (int32_t i = 0; i < n_inputs; i++) {
        context->lengths_before[inputs[i].sequence] = context->cache.lengths[inputs[i].sequence];
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

int32_t session_encode(colibri_context *context, int32_t sequence, const int32_t *ids, int32_t n_ids, const colibri_observer *observer)
{
    struct chunk *const c = &context->chunk;
    const int32_t n_layers = c->config->n_encoder_layers, source = context->cache.first_source + sequence;
    const int32_t most = context->params.chunk < context->params.context ? context->params.chunk : context->params.context;
    TRY(session_check_idle(context));
    FAIL_IF(n_layers == 0, &context->error, ARGUMENT, "the model has no encoder: give the ids to colibri_evaluate");
    FAIL_IF(sequence < 0 || sequence >= context->params.max_batch, &context->error, ARGUMENT,
            "sequence: expected 0 to %d, found %d", context->params.max_batch - 1, sequence);
    FAIL_IF(context->cache.lengths[sequence] > 0, &context->error, ARGUMENT,
            "sequence %d holds %d positions made from another source; rewind it to 0 first", sequence, context->cache.lengths[sequence]);
    TRY(check_ids(context, "source", sequence, ids, n_ids));
    FAIL_IF(n_ids > most, &context->error, CONTEXT,
            "the source has %d tokens, but is evaluated at once and context and chunk allow %d; open the model with larger ones or "
            "shorten it", n_ids, most);
    cache_rewind(&context->cache, source, 0);
    cache_reserve(&context->cache, source, n_ids);
    c->n = n_ids;
    c->n_outputs = 0;
    for (int32_t i = 0; i < n_ids; i++) {
        c->ids[i] = ids[i];
        c->sequences[i] = sequence;
        c->positions[i] = i;
    }
    struct watch watch = {observer, &context->cancelled, 0, (uint64_t)n_ids * (uint64_t)n_layers};
    context->evaluating = true;
    profile_begin(&c->profile, context->profile, &context->threads);
    const int32_t status = forward_source(c, &watch, &context->error);
    context->evaluating = false;
    if (status == COLIBRI_OK) return COLIBRI_OK;
    atomic_store(&context->cancelled, false);
    cache_rewind(&context->cache, source, 0);
    return status;
}
