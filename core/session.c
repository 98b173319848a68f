/* session.c: the life of a context: parameters, its layout in one reservation, start and end. Owns the context's memory. */
#include "session.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_BATCH = 4096, MAX_CHUNK = 4096, MAX_CONTEXT = 1 << 30 };

static int32_t check_params(const colibri_params *p, colibri_error *error) {
    TRY(status_range(error, "context", p->context, 1, MAX_CONTEXT));
    TRY(status_range(error, "max_batch", p->max_batch, 1, MAX_BATCH));
    TRY(status_range(error, "threads", p->threads, 1, THREADS_MAX));
    TRY(status_range(error, "chunk", p->chunk, 1, MAX_CHUNK));
    TRY(status_range(error, "pin", p->pin, 0, 1));
    FAIL_IF(p->memory != NULL && (uintptr_t)p->memory % OS_PAGE != 0, error, ARGUMENT,
            "memory: expected an address aligned to %d bytes, found %p", OS_PAGE, p->memory);
    return COLIBRI_OK;
}

/* Rows that a chunk can hold at most: buffers for more would never be used. */
static int32_t usable_chunk(const colibri_params *p) {
    const int64_t rows = (int64_t)p->context * p->max_batch;
    return rows < p->chunk ? (int32_t)rows : p->chunk;
}

/* The one layout of a context. Counting fills the plan; with a base it hands the pieces out. */
static void layout(const colibri_model *model, const colibri_params *p, colibri_context *context, struct arena *arena,
                   void **stacks, colibri_memory_plan *plan) {
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

int32_t colibri_plan(const colibri_model *model, const colibri_params *p, colibri_memory_plan *plan, colibri_error *error) {
    FAIL_IF(model == NULL || p == NULL || plan == NULL, error, ARGUMENT,
            "colibri_plan: expected a model, parameters and a place for the plan");
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
static int32_t find_memory(const colibri_params *p, uint64_t bytes, void **memory, colibri_error *error) {
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

int32_t colibri_default_params(const colibri_model *model, colibri_params *params) {
    if (model == NULL || params == NULL) return COLIBRI_ERROR_ARGUMENT;
    const int32_t trained = model->config.context_length, context = trained < 4096 ? trained : 4096;
    *params = (colibri_params){
        .context = context,
        .max_batch = 1,
        .threads = os_core_count(),
        .chunk = 1024,
    };
    return COLIBRI_OK;
}

int32_t colibri_init(colibri_model *model, const colibri_params *p, colibri_context **out, colibri_error *error) {
    if (out != NULL) *out = NULL;
    FAIL_IF(model == NULL || out == NULL, error, ARGUMENT, "colibri_init: expected a model and a place for the context");
    colibri_params defaults;
    if (p == NULL) {
        colibri_default_params(model, &defaults);
        p = &defaults;
    }
    colibri_memory_plan plan;
    void *memory, *stacks;
    TRY(colibri_plan(model, p, &plan, error));
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
    if (status != COLIBRI_OK) colibri_free(context);
    else *out = context;
    return status;
}

void colibri_free(colibri_context *context) {
    if (context == NULL) return;
    colibri_model *const model = context->model;
    const struct cache cache = context->cache;
    const uint64_t bytes = context->bytes;
    const bool owned = context->owns_memory;
    if (context->threads.started == context->threads.n - 1) threads_stop(&context->threads);
    /* States and blocks that were ever written, then all before them: untouched pages stay untouched. */
    for (int32_t i = 0; cache.state_bytes > 0 && i < cache.n_sequences * STATES; i++) {
        if (cache.marks[i / STATES][i % STATES] >= 0) os_wipe(cache.states + (size_t)i * cache.state_bytes, cache.state_bytes);
    }
    os_wipe(cache.pool, (uint64_t)cache.n_touched * cache.block_bytes);
    os_wipe(context, (uint64_t)(cache.states - (uint8_t *)context));
    if (owned) os_release(context, bytes);
    colibri_close(model);
}
