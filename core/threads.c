/* threads.c: the pool of threads.h. Owns its threads; refuses nested use.
 *
 * All state that decides who does which item is one 64-bit ticket. A worker that comes late draws an item number at or
 * above the count and goes back to waiting; it never looks at `work`, which may already belong to the next call. */
#include "threads.h"

enum { ITEM_BITS = 24, GENERATION_SHIFT = 48, SPINS_BEFORE_YIELD = 2000, SPINS_WHEN_BUSY = 60000 };

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint64_t generation(uint64_t ticket) {
    return ticket >> GENERATION_SHIFT;
}

/* Draws and does items until none is left; returns the generation that was worked on. */
static uint64_t work_off(struct threads *threads, int32_t worker) {
    const uint64_t mask = ((uint64_t)1 << ITEM_BITS) - 1;
    for (;;) {
        const uint64_t ticket = atomic_fetch_add(&threads->ticket, 1);
        const uint64_t item = ticket & mask, items = (ticket >> ITEM_BITS) & mask;
        if (item >= items) return generation(ticket);
        threads->work(threads->argument, (int32_t)item, worker);
        atomic_fetch_sub(&threads->unfinished, 1);
    }
}

static void wait_for_work(struct threads *threads, uint64_t seen) {
    for (int32_t spin = 0; spin < threads->spins; spin++) {
        if (generation(atomic_load(&threads->ticket)) != seen || atomic_load(&threads->stop)) return;
        if (spin % SPINS_BEFORE_YIELD == SPINS_BEFORE_YIELD - 1) os_yield();
        relax();
    }
    pthread_mutex_lock(&threads->mutex);
    atomic_fetch_add(&threads->parked, 1);
    while (generation(atomic_load(&threads->ticket)) == seen && !atomic_load(&threads->stop)) {
        pthread_cond_wait(&threads->wake, &threads->mutex);
    }
    atomic_fetch_sub(&threads->parked, 1);
    pthread_mutex_unlock(&threads->mutex);
}

static void *worker(void *argument) {
    struct threads *const threads = argument;
    const int32_t number = atomic_fetch_add(&threads->numbered, 1) + 1;
    while (!atomic_load(&threads->stop)) wait_for_work(threads, work_off(threads, number));
    return NULL;
}

static void wake_parked(struct threads *threads) {
    if (atomic_load(&threads->parked) == 0 || threads->process != os_process_id()) return;
    pthread_mutex_lock(&threads->mutex);
    pthread_cond_broadcast(&threads->wake);
    pthread_mutex_unlock(&threads->mutex);
}

void threads_layout(struct threads *threads, struct arena *arena, int32_t n) {
    *threads = (struct threads){.n = n};
    threads->workers = arena_take(arena, (uint64_t)(n - 1), sizeof(os_thread));
    threads->stacks = arena_take(arena, (uint64_t)(n - 1), THREADS_STACK);
}

int32_t threads_start(struct threads *threads, bool pin, bool busy, colibri_error *error) {
    int32_t n = threads->n, cores;
    threads->process = os_process_id();
    threads->spins = busy ? SPINS_WHEN_BUSY : 0;
    FAIL_IF(pthread_mutex_init(&threads->mutex, NULL) != 0 || pthread_cond_init(&threads->wake, NULL) != 0, error, IO,
            "the system refused a lock for the thread pool");
    for (int32_t i = 0; i < n - 1; i++) {
        uint8_t *const stack = threads->stacks + (size_t)i * THREADS_STACK;
        const int32_t cpu = pin ? os_core_cpu(i + 1, &cores) : -1;
        FAIL_IF(pin && cpu < 0, error, ARGUMENT, "pin: at most %d threads (physical cores), found %d", i + 1, n);
        FAIL_IF(os_thread_start(&threads->workers[i], stack, THREADS_STACK, cpu, worker, threads) != COLIBRI_OK, error, IO,
                "the system refused thread %d of %d; ask for fewer threads or raise the limit (ulimit -u)", i + 2, n);
        threads->started++;
    }
    return COLIBRI_OK;
}

void threads_stop(struct threads *threads) {
    /* Not started; or forked: nobody to join, and the lock may be held for ever. */
    if (threads->process != os_process_id()) return;
    atomic_store(&threads->stop, true);
    wake_parked(threads);
    for (int32_t i = 0; i < threads->started; i++) os_thread_join(threads->workers[i]);
    threads->started = 0;
    threads->process = 0;
    pthread_cond_destroy(&threads->wake);
    pthread_mutex_destroy(&threads->mutex);
}

void threads_begin(struct threads *threads, threads_work *work, void *argument, int32_t items) {
    threads->work = work;
    threads->argument = argument;
    atomic_store(&threads->unfinished, items);
    const uint64_t next = (generation(atomic_load(&threads->ticket)) + 1) & 0xffff;
    atomic_store(&threads->ticket, next << GENERATION_SHIFT | (uint64_t)items << ITEM_BITS);
    wake_parked(threads);
}

void threads_end(struct threads *threads) {
    work_off(threads, 0);
    const uint64_t since = threads->timed ? os_clock_ns() : 0;
    for (int32_t spin = 1; atomic_load(&threads->unfinished) != 0; spin++) {
        if (spin % SPINS_BEFORE_YIELD == 0) os_yield();
        relax();
    }
    if (threads->timed) threads->waited += os_clock_ns() - since;
}

void threads_run(struct threads *threads, threads_work *work, void *argument, int32_t items, uint64_t bytes) {
    if (items <= 0) return;
    if (threads->n == 1 || items == 1 || bytes < THREADS_GRAIN || threads->process != os_process_id()) {
        for (int32_t item = 0; item < items; item++) work(argument, item, 0);
        return;
    }
    threads_begin(threads, work, argument, items);
    threads_end(threads);
}
