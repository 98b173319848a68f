/* stream_test.c: streamed experts from C, with reads that fail. Loads a MoE model and checks
 *   slots     the same logits as mapped, for 1 slot, one token's demand, half and all, both policies, many lanes, prefetch or not
 *   counts    what colibri_traffic says fits together: uses do not depend on slots, bytes are those of misses
 *   memory    slots in a buffer of exactly the planned size: nothing written outside, all wiped by colibri_free
 *   groups    limits of control groups count, those above the process's own too
 *   limits    any limit for memory gives as many slots as it has room for
 *   gate      prefetch is kept where evaluations with it are quicker, else not; the other way when a later trial says so
 *   reads     interrupted, short, or refused past the page cache: the same logits
 *   faults    for every n the n-th read fails: an error, sequences as they were, and the same logits when asked again
 *   file      cut off, or written to, while it is open: an error
 *   threads   contexts of several threads on one model, some of them streamed: the same logits
 *
 *   stream_test MODEL.colibri SCRATCH_FILE    (a copy of the model is made there and removed)
 *
 * It defines pread, preadv2 and open itself: the engine's reads come through here, and what the system tells of control groups. */
#define _GNU_SOURCE
#include "../../core/session.h"

#define PROGRAM "stream_test"
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { N = 24, THREADS = 4 };

/* What happens to reads: the n-th one fails with an errno (0: none does), or each in a way. */
enum manner { PLAIN, INTERRUPTED, SHORT, ODD, ODD_ONCE, NOT_DIRECT };
static _Atomic long n_reads, n_fails_at;
static _Atomic int manner, fails_with;

ssize_t pread(int descriptor, void *to, size_t bytes, off_t from) {
    const long n = atomic_fetch_add(&n_reads, 1) + 1;
    const int how = atomic_load(&manner);
    if (atomic_load(&n_fails_at) == n || (how == INTERRUPTED && n % 2 == 1)) {
        errno = how == INTERRUPTED ? EINTR : atomic_load(&fails_with);
        return errno == 0 ? 0 : -1; /* 0: as if the file ended here */
    }
    if (how == NOT_DIRECT && (fcntl(descriptor, F_GETFL) & O_DIRECT) != 0) {
        errno = EINVAL;
        return -1;
    }
    if (how == SHORT && bytes > OS_PAGE) bytes = OS_PAGE;
    if ((how == ODD || (how == ODD_ONCE && from % OS_PAGE == 0)) && bytes > 1000) bytes = (fcntl(descriptor, F_GETFL) & O_DIRECT) != 0 ? 512 : 777;
    return syscall(SYS_pread64, descriptor, to, bytes, from);
}

/* The page cache holds nothing. */
ssize_t preadv2(int descriptor, const struct iovec *parts, int n, off_t from, int flags) {
    (void)descriptor, (void)parts, (void)n, (void)from, (void)flags;
    errno = EAGAIN;
    return -1;
}

/* A directory in whose files control groups are described; "": the system's own. */
static char groups[256];

int open(const char *path, int flags, ...) {
    char other[1024];
    va_list more;
    va_start(more, flags);
    const int mode = (flags & O_CREAT) != 0 ? va_arg(more, int) : 0;
    va_end(more);
    const bool told = groups[0] != '\0' && (strncmp(path, "/sys/fs/cgroup/", 15) == 0 || strcmp(path, "/proc/self/cgroup") == 0);
    snprintf(other, sizeof other, "%s%s", told ? groups : "", path);
    return (int)syscall(SYS_openat, AT_FDCWD, other, flags, mode);
}

static colibri_model *open_model(const char *path) {
    colibri_model *model;
    colibri_error error;
    if (colibri_open(path, &model, &error) != COLIBRI_OK) stop("colibri_open", error.text);
    return model;
}

static colibri_params params_of(const colibri_model *model, int32_t slots, colibri_traffic *traffic) {
    colibri_params params;
    colibri_default_params(model, &params);
    params.context = params.context < 64 ? params.context : 64;
    params.threads = 2;
    params.chunk = 16; /* the prompt comes in two chunks */
    params.expert_slots = slots;
    params.prefetch = COLIBRI_PREFETCH_ON;
    params.traffic = traffic;
    return params;
}

static colibri_context *start(colibri_model *model, const colibri_params *params) {
    colibri_context *context;
    colibri_error error;
    if (colibri_init(model, params, &context, &error) != COLIBRI_OK) stop("colibri_init", error.text);
    return context;
}

/* A prompt of N ids in two evaluations and two ids one by one; logits [4][n_vocab] */
static int32_t evaluate(colibri_context *context, float *logits) {
    const int32_t n_vocab = context->model->info.n_vocab, parts[] = {1, N - 1, 1, 1};
    int32_t ids[N + 2], at = 0;
    for (int32_t i = 0; i < N + 2; i++) ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)context->model->info.n_vocab_used);
    if (context->model->config.n_encoder_layers > 0) TRY(colibri_encode(context, 0, ids, 8, NULL));
    for (int i = 0; i < 4; at += parts[i++]) {
        const colibri_input input = {.n_ids = parts[i], .ids = ids + at, .n_logits = 1, .logits = logits + (size_t)i * (size_t)n_vocab};
        TRY(colibri_evaluate(context, &input, 1, NULL));
    }
    return COLIBRI_OK;
}

/* An evaluation's way: prefetch off (0), on (1), or whatever is kept. Layers take longer in those that go the slow one. */
static int slow_way, way;

static int32_t slow_layer(void *user, uint64_t done, uint64_t total) {
    (void)user, (void)done, (void)total;
    if (way == slow_way) usleep(2000);
    return 0;
}

struct reference {
    colibri_model *model;
    float *logits;
    size_t bytes;
};

/* Whether a context with these parameters gives the same logits. */
static bool same(const struct reference *mapped, const colibri_params *params) {
    float *const logits = take(mapped->bytes);
    colibri_context *const context = start(mapped->model, params);
    const bool good = evaluate(context, logits) == COLIBRI_OK && memcmp(logits, mapped->logits, mapped->bytes) == 0;
    if (!good) printf("        %s\n", colibri_last_error(context)->text);
    colibri_free(context);
    free(logits);
    return good;
}

static void check_slots(const struct reference *mapped) {
    const colibri_model *const model = mapped->model;
    const int32_t n_layers = model->info.n_layers, all = model->n_experts, counts[] = {1, model->info.n_experts_used, (all + 3) / 4, (all + 1) / 2, all};
    uint64_t uses_of_one = 0;
    for (int i = 0; i < 10; i++) {
        colibri_traffic *const traffic = take((size_t)n_layers * sizeof *traffic), sum = {0};
        colibri_params params = params_of(model, counts[i / 2], traffic);
        params.expert_policy = i % 2;
        params.lanes = i % 3 == 0 ? 1 : i % 3 * 8;
        params.prefetch = i % 4 == 3 ? COLIBRI_PREFETCH_OFF : i % 4 == 2 ? COLIBRI_PREFETCH_AUTO : COLIBRI_PREFETCH_ON;
        const bool good = same(mapped, &params);
        for (int32_t layer = 0; layer < n_layers; layer++) {
            sum.hits += traffic[layer].hits;
            sum.misses += traffic[layer].misses;
            sum.bytes_read += traffic[layer].bytes_read;
            sum.asked += traffic[layer].asked;
            sum.asked_used += traffic[layer].asked_used;
        }
        if (i == 0) uses_of_one = sum.hits + sum.misses;
        check(good, "slots: %d of %d, policy %d, %d lanes: same logits (%llu hits, %llu misses)", params.expert_slots, all, i % 2,
              params.lanes, (unsigned long long)sum.hits, (unsigned long long)sum.misses);
        check(sum.hits + sum.misses == uses_of_one && sum.misses >= 1 && sum.bytes_read == sum.misses * ffn_bytes(&model->experts[0]),
              "counts: %llu uses, bytes are those of the misses", (unsigned long long)uses_of_one);
        check((params.prefetch == COLIBRI_PREFETCH_AUTO || (sum.asked > 0) == (params.prefetch == COLIBRI_PREFETCH_ON)) && sum.asked_used <= sum.asked && sum.asked_used <= sum.misses,
              "counts: prefetch %d: of %llu experts asked for ahead %llu came to use", params.prefetch, (unsigned long long)sum.asked,
              (unsigned long long)sum.asked_used);
        check(params.expert_slots < all || sum.misses <= (uint64_t)all, "counts: with all slots no expert is read twice");
        free(traffic);
    }
}

/* Bytes of a plan with so many slots. */
static uint64_t total_of(const colibri_model *model, colibri_params params, int32_t slots) {
    colibri_memory_plan plan;
    colibri_error error;
    params.expert_slots = slots;
    params.memory_limit = 0;
    if (colibri_plan(model, &params, &plan, &error) != COLIBRI_OK) stop("colibri_plan", error.text);
    return plan.total_bytes;
}

/* Any limit from that of one slot on gives as many slots as it has room for, wherever in a page the tables end. */
static void check_limits(const colibri_model *model) {
    colibri_params params = params_of(model, 0, NULL);
    colibri_memory_plan plan;
    int wrong = 0, tried = 0, streamed = 0, tight = 0; /* tight: one slot takes less than a mapped file; of a tiny model it does not */
    params.lanes = 1;
    params.prefetch = COLIBRI_PREFETCH_OFF;
    for (params.context = 8; params.context <= 64; params.context += 8) {
        const uint64_t least = total_of(model, params, 1), slot = (total_of(model, params, 2) - least) & ~(uint64_t)(OS_PAGE - 1);
        tight += total_of(model, params, 0) > least + OS_PAGE;
        for (uint64_t more = 0; more < (uint64_t)(model->n_experts - 1) * slot; more += slot / 37 + 1, tried++) {
            params.memory_limit = least + more;
            const int32_t status = colibri_plan(model, &params, &plan, NULL), n = plan.expert_slots; /* the process may grow meanwhile */
            streamed += n > 0;
            wrong += status == COLIBRI_OK ? plan.total_bytes > params.memory_limit : total_of(model, params, 1) <= params.memory_limit;
            wrong += n > 0 && n < model->n_experts && total_of(model, params, n + 1) + OS_PAGE <= params.memory_limit;
        }
    }
    check(wrong == 0 && (streamed > 0) == (tight > 0), "limits: %d of %d gave no plan, or one that is too large or too small; %d gave slots", wrong, tried, streamed);
}

static void check_memory(const struct reference *mapped, int32_t slots) {
    enum { PATTERN = 0xa5 };
    colibri_params params = params_of(mapped->model, slots, NULL);
    colibri_memory_plan plan;
    colibri_error error;
    if (colibri_plan(mapped->model, &params, &plan, &error) != COLIBRI_OK) stop("colibri_plan", error.text);
    check(plan.expert_slots == slots && plan.expert_cache >= (uint64_t)slots * plan.slot_bytes &&
              plan.context_bytes == plan.control + plan.threads + plan.activations + plan.sampling + plan.kv_cache + plan.expert_cache,
          "memory: the plan's categories add up to %llu bytes", (unsigned long long)plan.context_bytes);
    uint8_t *const buffer = take(plan.context_bytes + 2 * OS_PAGE);
    memset(buffer, PATTERN, plan.context_bytes + 2 * OS_PAGE);
    params.memory = buffer + OS_PAGE;
    params.memory_bytes = plan.context_bytes;
    colibri_context *const context = start(mapped->model, &params);
    float *const logits = take(mapped->bytes);
    check(evaluate(context, logits) == COLIBRI_OK && memcmp(logits, mapped->logits, mapped->bytes) == 0, "memory: same logits in the caller's");
    const uint8_t *const slot = context->experts.places[0].weights.gate.data, *const memory = context->experts.memory;
    const int32_t filled = context->experts.n_ahead + context->experts.n_written;
    const uint8_t before = slot[0];
    const struct ffn_weights *const held = &mapped->model->experts[context->experts.places[0].expert];
    check(memcmp(slot, held->gate.data, ffn_bytes(held)) == 0, "memory: a slot holds its expert as it lies in the file (byte 0: %d)", before);
    colibri_free(context);
    uint64_t left = 0, outside = 0;
    for (uint64_t i = 0; i < (uint64_t)filled * plan.slot_bytes; i++) left += memory[i] != 0;
    for (uint64_t i = 0; i < OS_PAGE; i++) outside += buffer[i] != PATTERN || buffer[OS_PAGE + plan.context_bytes + i] != PATTERN;
    for (uint64_t i = 0; i + 64 <= plan.context_bytes && filled > 0; i += 64) left += memcmp(buffer + OS_PAGE + i, held->gate.data, 64) == 0;
    check(left == 0 && outside == 0, "memory: %llu bytes of %d slots survive colibri_free, %llu were written outside", (unsigned long long)left,
          filled, (unsigned long long)outside);
    free(buffer);
    free(logits);
}

/* Evaluations with prefetch, or those without it, take longer: what is kept? One id at a time, up to the end of a trial. */
static void check_gate(const struct reference *mapped) {
    colibri_gate gate = {0};
    colibri_params params = params_of(mapped->model, 4, NULL);
    params.prefetch = COLIBRI_PREFETCH_AUTO;
    params.gate = &gate;
    colibri_context *const context = start(mapped->model, &params);
    const int32_t id = 1, source[] = {1, 2, 3};
    const colibri_input input = {.n_ids = 1, .ids = &id};
    const colibri_observer observer = {.progress = slow_layer};
    uint64_t n = 0;
    if (mapped->model->config.n_encoder_layers > 0 && colibri_encode(context, 0, source, 3, NULL) != COLIBRI_OK) stop("colibri_encode", "failed");
    const uint64_t before = gate.evaluations[0] + gate.evaluations[1];
    for (int trial = 0; trial < 3; trial++) {
        const int slow = slow_way = trial % 2;
        do {
            const int32_t at = context->experts.n_decoded;
            way = at < TRIAL ? (at ^ at >> 1) & 1 : -1;
            if (colibri_position(context, 0) >= 16) colibri_rewind(context, 0, 0);
            if (colibri_evaluate(context, &input, 1, &observer) != COLIBRI_OK) stop("colibri_evaluate", colibri_last_error(context)->text);
            n++;
        } while (gate.trials == trial);
        check(gate.state == (slow ? COLIBRI_PREFETCH_OFF : COLIBRI_PREFETCH_ON) && (gate.median_ns[1] > gate.median_ns[0]) == slow,
              "gate: trial %d: without %llu ns, with %llu ns: %s", trial, (unsigned long long)gate.median_ns[0],
              (unsigned long long)gate.median_ns[1], gate.state == COLIBRI_PREFETCH_ON ? "on" : "off");
    }
    check(n == 2 * TRIAL_EVERY + TRIAL - before && gate.evaluations[0] + gate.evaluations[1] == n + before && gate.evaluations[1] > TRIAL_EVERY,
          "gate: of %llu evaluations %llu with prefetch", (unsigned long long)n, (unsigned long long)gate.evaluations[1]);
    colibri_free(context);
}

static void check_reads(const struct reference *mapped) {
    const char *const names[] = {"plain", "interrupted", "short", "odd", "odd at first", "refused past the page cache"};
    const colibri_params params = params_of(mapped->model, 2, NULL);
    for (int i = PLAIN; i <= NOT_DIRECT; i++) {
        atomic_store(&manner, i);
        check(same(mapped, &params), "reads: %s: same logits", names[i]);
    }
    atomic_store(&manner, PLAIN);
}

static void check_faults(const struct reference *mapped) {
    const int errors[] = {EIO, 0, EBADF};
    const colibri_params params = params_of(mapped->model, 2, NULL);
    float *const logits = take(mapped->bytes);
    long tried = 0, wrong = 0;
    for (long at = 1;; at++, tried++) {
        colibri_context *const context = start(mapped->model, &params);
        atomic_store(&fails_with, errors[at % 3]);
        atomic_store(&n_reads, 0);
        atomic_store(&n_fails_at, at);
        const int32_t status = evaluate(context, logits);
        const long reads = atomic_load(&n_reads);
        atomic_store(&n_fails_at, 0);
        /* A read that is refused past the page cache is tried through it: only one in two is a fault. */
        const bool good = status == COLIBRI_OK ? memcmp(logits, mapped->logits, mapped->bytes) == 0
                                               : status == COLIBRI_ERROR_IO && strstr(colibri_last_error(context)->text, "read") != NULL;
        const int32_t held = colibri_position(context, 0);
        const bool whole = held == 0 || held == 1 || held == N || held == N + 1 || held == N + 2;
        colibri_rewind(context, 0, 0);
        const bool again = evaluate(context, logits) == COLIBRI_OK && memcmp(logits, mapped->logits, mapped->bytes) == 0;
        wrong += !good || !whole || !again;
        colibri_free(context);
        if (reads < at) break;
    }
    check(wrong == 0 && tried > 4, "faults: %ld of %ld single failed reads went wrong", wrong, tried);
    free(logits);
}

static void copy_file(const char *from, const char *to) {
    FILE *const in = fopen(from, "rb"), *const out = fopen(to, "wb");
    char part[65536];
    if (in == NULL || out == NULL) stop(to, "cannot be written");
    for (size_t n; (n = fread(part, 1, sizeof part, in)) > 0;) {
        if (fwrite(part, 1, n, out) != n) stop(to, "cannot be written");
    }
    fclose(in);
    if (fclose(out) != 0) stop(to, "cannot be written");
}

static int32_t nothing(void *user, uint64_t done, uint64_t total) {
    (void)user, (void)done, (void)total;
    return 0;
}

/* Cuts everything off after the first layer. */
static UNUSED int32_t cut(void *user, uint64_t done, uint64_t total) {
    (void)done, (void)total;
    return truncate(user, 0) != 0;
}

/* Groups a/b of version 2 and v/w of version 1, the outer ones with the lower limits, then the inner ones. */
static void check_groups(const char *scratch) {
    static const char *const files[][2] = {
        {"/proc", NULL}, {"/proc/self", NULL}, {"/proc/self/cgroup", "7:memory:/v/w\n6:cpu,cpuacct:/v/w\n0::/a/b\n"}, {"/sys", NULL},
        {"/sys/fs", NULL}, {"/sys/fs/cgroup", NULL}, {"/sys/fs/cgroup/a", NULL}, {"/sys/fs/cgroup/a/b", NULL},
        {"/sys/fs/cgroup/a/b/memory.max", "max\n"}, {"/sys/fs/cgroup/a/b/memory.current", "5\n"},
        {"/sys/fs/cgroup/a/memory.max", "1000000\n"}, {"/sys/fs/cgroup/a/memory.current", "600000\n"},
        {"/sys/fs/cgroup/a/memory.stat", "anon 1\nfile 500000\n"}, {"/sys/fs/cgroup/a/b/cpu.max", "max 100000\n"},
        {"/sys/fs/cgroup/a/cpu.max", "50000 100000\n"}, {"/sys/fs/cgroup/memory", NULL}, {"/sys/fs/cgroup/memory/v", NULL},
        {"/sys/fs/cgroup/memory/v/w", NULL}, {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "800000\n"},
        {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n"}, {"/sys/fs/cgroup/memory/v/w/memory.limit_in_bytes", "500000\n"},
        {"/sys/fs/cgroup/memory/v/w/memory.usage_in_bytes", "100000\n"},
    };
    enum { FILES = sizeof files / sizeof *files };
    const uint64_t left[] = {900000, 700000, 400000}; /* as files are there: of a; of the root; of v/w */
    char path[1024];
    int found = 0;
    snprintf(groups, sizeof groups, "%s.groups", scratch);
    mkdir(groups, 0777);
    for (int i = 0; i < FILES; i++) {
        snprintf(path, sizeof path, "%s%s", groups, files[i][0]);
        FILE *const file = files[i][1] == NULL ? NULL : fopen(path, "w");
        if (files[i][1] == NULL ? mkdir(path, 0777) != 0 : file == NULL || fputs(files[i][1], file) < 0 || fclose(file) != 0) stop(path, "cannot be written");
        if (found < 3 && os_available_bytes() == left[found]) found++;
        if (strcmp(files[i][0], "/sys/fs/cgroup/a/cpu.max") == 0) check(os_core_count() == 1, "groups: half a CPU for the group above is one core");
    }
    check(found == 3, "groups: %d of 3 limits counted, the lowest of all groups in turn", found);
    for (int i = FILES; i-- > 0;) {
        snprintf(path, sizeof path, "%s%s", groups, files[i][0]);
        remove(path);
    }
    remove(groups);
    groups[0] = '\0';
}

static void check_file(const char *path, const char *scratch, const struct reference *mapped) {
    for (int written = 0; written <= 1; written++) {
        copy_file(path, scratch);
        colibri_model *const model = open_model(scratch);
        const colibri_params params = params_of(model, 2, NULL);
        colibri_error error;
        if (colibri_fetch(model, COLIBRI_STREAMED, nothing, NULL, &error) != COLIBRI_OK) stop("colibri_fetch", error.text);
        colibri_context *const context = start(model, &params);
        const int descriptor = open(scratch, O_WRONLY);
        const off_t bytes = (off_t)model->info.file_bytes;
        usleep(20000); /* clocks of file systems are coarse */
        if (written ? pwrite(descriptor, "x", 1, bytes - 1) != 1 : ftruncate(descriptor, bytes / 2) != 0) stop(scratch, "cannot be changed");
        close(descriptor);
        float *const logits = take(mapped->bytes);
        const int32_t status = evaluate(context, logits);
        check(status == COLIBRI_ERROR_IO, "file: %s: %s", written ? "written to" : "cut off", colibri_last_error(context)->text);
        free(logits);
        colibri_free(context);
        colibri_close(model);
    }
#if !defined(__SANITIZE_THREAD__) /* which takes the zeros that come in for a race */
    copy_file(path, scratch);
    colibri_model *const model = open_model(scratch);
    const colibri_params params = params_of(model, 0, NULL);
    colibri_context *const context = start(model, &params);
    float *const logits = take(mapped->bytes);
    const int32_t ids[] = {1, 2, 3};
    const colibri_input input = {.n_ids = 3, .ids = ids, .n_logits = 1, .logits = logits};
    const colibri_observer observer = {.progress = cut, .user = (void *)(uintptr_t)scratch};
    if (model->config.n_encoder_layers > 0 && colibri_encode(context, 0, ids, 3, NULL) != COLIBRI_OK) stop("colibri_encode", "failed");
    const int32_t status = colibri_evaluate(context, &input, 1, &observer);
    check(status == COLIBRI_ERROR_IO, "file: cut off while it is mapped and read: %s", colibri_last_error(context)->text);
    free(logits);
    colibri_free(context);
    colibri_close(model);
    unlink(scratch);
#endif
}

struct job {
    const struct reference *mapped;
    int32_t slots;
    bool good;
};

static void *work(void *argument) {
    struct job *const job = argument;
    const colibri_params params = params_of(job->mapped->model, job->slots, NULL);
    job->good = same(job->mapped, &params) && same(job->mapped, &params);
    return NULL;
}

static void check_threads(const struct reference *mapped) {
    pthread_t threads[THREADS];
    struct job jobs[THREADS];
    colibri_error error;
    for (int32_t i = 0; i < THREADS; i++) {
        jobs[i] = (struct job){.mapped = mapped, .slots = i * 2};
        if (pthread_create(&threads[i], NULL, work, &jobs[i]) != 0) stop("pthread_create", "refused");
    }
    const int32_t fetched = colibri_fetch(mapped->model, COLIBRI_STREAMED, nothing, NULL, &error);
    for (int32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        check(jobs[i].good, "threads: context %d with %d slots: same logits", i, jobs[i].slots);
    }
    check(fetched == COLIBRI_OK, "threads: weights were copied meanwhile");
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc != 3) stop("usage", "stream_test MODEL.colibri SCRATCH_FILE");
    struct reference mapped = {.model = open_model(argv[1])};
    if (mapped.model->n_experts < 6) stop(argv[1], "it has too few routed experts");
    mapped.bytes = 4 * (size_t)mapped.model->info.n_vocab * sizeof(float);
    mapped.logits = take(mapped.bytes);
    check_limits(mapped.model); /* before any of the file is in memory */
    const colibri_params params = params_of(mapped.model, 0, NULL);
    colibri_context *const context = start(mapped.model, &params);
    if (evaluate(context, mapped.logits) != COLIBRI_OK) stop("colibri_evaluate", colibri_last_error(context)->text);
    colibri_free(context);
    check_slots(&mapped);
    check_memory(&mapped, 1);
    check_memory(&mapped, mapped.model->n_experts);
    atomic_store(&manner, ODD_ONCE); /* what is left then ends in the same page as the whole */
    check_memory(&mapped, 1);
    check_gate(&mapped);
    check_reads(&mapped);
    check_faults(&mapped);
    check_file(argv[1], argv[2], &mapped);
    check_groups(argv[2]);
    check_threads(&mapped);
    free(mapped.logits);
    colibri_close(mapped.model);
    printf(failures == 0 ? "all good\n" : "%d checks failed\n", failures);
    return failures != 0;
}
