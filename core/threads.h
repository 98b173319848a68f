/* threads.h: one pool per context. The caller is a worker too; the others spin a while between two pieces of work,
 * then park. Items may run in any order on any thread: results must not depend on it. */
#pragma once

#include "arena.h"
#include "os.h"

#include <pthread.h>
#include <stdatomic.h>

#if defined(__SANITIZE_THREAD__)
enum { THREADS_STACK = 2 * 1024 * 1024 }; /* ThreadSanitizer keeps its own state there */
#else
enum { THREADS_STACK = 512 * 1024 };      /* the deepest kernel takes 80 KiB */
#endif
enum { THREADS_MAX = 256 };

typedef void threads_work(void *argument, int32_t item, int32_t worker); /* worker 0 is the caller */
#define UNUSED __attribute__((unused)) /* a parameter that a function of such a type has no use for */

struct threads {
    _Atomic uint64_t ticket;   /* generation (16 bits) | items (24) | next item (24) */
    _Atomic int32_t unfinished;/* items of this generation that are not done */
    _Atomic int32_t parked;
    _Atomic int32_t numbered;  /* workers that have their number */
    _Atomic bool stop;
    threads_work *work;
    void *argument;
    int32_t n;                 /* workers, the caller included */
    int32_t started;           /* threads to join */
    int32_t spins;             /* of a worker without work before it parks */
    bool timed;                /* whether `waited` is kept */
    uint64_t waited;           /* nanoseconds that the caller waited for the others */
    int64_t process;           /* that started them: a forked child has none of them */
    os_thread *workers;        /* [n - 1] */
    uint8_t *stacks;           /* [n - 1][THREADS_STACK] */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

/* Takes stacks and tables from the arena; starts nothing. */
void threads_layout(struct threads *threads, struct arena *arena, int32_t n);
/* pin: each worker stays on a physical core of its own, as far as they go; the first core is left to the caller. busy: workers
 * spin for a millisecond or two before they park. Where it fails some may run: threads_stop is for the caller. */
int32_t threads_start(struct threads *threads, bool pin, bool busy, colibri_error *error);
void threads_stop(struct threads *threads);
/* Work that touches fewer bytes than this stays on the caller: handing it out would cost more (about 5 us of memory
 * traffic), and a worker that the system has put aside would hold everybody up. */
enum { THREADS_GRAIN = 128 * 1024 };

/* Hands items 0 … items - 1 of work(argument, item, worker) to the workers, the caller not among them; until threads_end, which
 * does what nobody has begun and returns when all are done. */
void threads_begin(struct threads *threads, threads_work *work, void *argument, int32_t items);
void threads_end(struct threads *threads);
/* Both, for items that together touch about `bytes`. */
void threads_run(struct threads *threads, threads_work *work, void *argument, int32_t items, uint64_t bytes);
