/* os.h: every call to the operating system that the engine makes; a port changes os.c and nothing else. */
#ifndef COLIBRI_OS_H
#define COLIBRI_OS_H

#include "status.h"

#include <stddef.h>

enum { OS_PAGE = 4096 };

struct os_file {
    const uint8_t *data; /* read-only mapping of the whole file */
    uint64_t bytes;
};

int32_t os_map_file(const char *path, struct os_file *file, colibri_error *error);
void os_unmap_file(struct os_file *file);

/* Zeroed private memory, page aligned; NULL if the system refuses. */
void *os_reserve(uint64_t bytes);
void os_release(void *memory, uint64_t bytes);
/* Overwrites with zeros; the compiler may not drop it. */
void os_wipe(void *memory, uint64_t bytes);

/* Bytes that this process may still take: the least of MemAvailable and the cgroup's limit minus its use. */
uint64_t os_available_bytes(void);
/* CPUs of the affinity mask, cut to the cgroup's CPU quota; at least 1. */
int32_t os_cpu_count(void);
const char *os_environment(const char *name);

typedef struct os_thread { void *handle; } os_thread;
/* Starts a thread on the given stack with all signals blocked: they belong to the application's threads. */
int32_t os_thread_start(os_thread *thread, void *stack, size_t stack_bytes, void *(*run)(void *), void *argument);
void os_thread_join(os_thread thread);
/* Tells a process from its forked children. */
int64_t os_process_id(void);
/* Monotonic time. */
uint64_t os_clock_ns(void);
/* A counter of constant rate, cheap enough for every work item; nanoseconds where there is none. */
uint64_t os_ticks(void);
/* Lets another runnable thread have the CPU. */
void os_yield(void);

#ifdef COLIBRI_TRACE
/* Debug builds only: one line to stderr by a plain write, nothing buffered. */
__attribute__((format(printf, 1, 2))) void os_trace(const char *format, ...);
#define TRACE(...) os_trace(__VA_ARGS__)
#else
#define TRACE(...) ((void)0)
#endif

#endif
