/* os.h: every call to the operating system that the engine makes; a port changes os.c and nothing else. */
#pragma once

#include "status.h"

#include <stdbool.h>
#include <stddef.h>

enum { OS_PAGE = 4096, OS_HUGE_PAGE = 2 * 1024 * 1024 };

struct os_file {
    const uint8_t *data; /* read-only mapping of the whole file */
    uint64_t bytes;
    void *space;         /* that it was mapped into */
    int32_t descriptor;
    int32_t direct;      /* the same file, read past the page cache; -1: the system has no such way to it */
    int64_t changed_ns;  /* when it was last written, at the time it was opened */
};

/* While it is mapped, what is cut off the file reads as zeros instead of raising SIGBUS: ask os_file_changed. */
int32_t os_map_file(const char *path, struct os_file *file, colibri_error *error);
void os_unmap_file(struct os_file *file);
/* Brings a part of a mapped file into memory and into the page table; at most a hint where the system is old. */
void os_prefetch(const struct os_file *file, uint64_t from, uint64_t bytes);
/* Whether somebody has written to the file, or cut it, since it was opened. */
bool os_file_changed(const struct os_file *file);
/* Reads a part of the file: what the page cache holds from there, the rest past it where the system lets us. Up to the next page
 * more may be written. `from` and `to` are multiples of OS_PAGE. Returns 0 or an errno; ENODATA: the file ends before. */
int32_t os_read(const struct os_file *file, uint64_t from, void *to, uint64_t bytes);
/* Puts a private copy in huge pages (where the system grants them) in the place of a part of a mapped file, at the same
 * address, while others may read there. `from` is a multiple of OS_PAGE. */
int32_t os_make_private(const struct os_file *file, uint64_t from, uint64_t bytes, colibri_error *error);
/* Wipes what os_make_private made; the file must not be read there any more. */
void os_wipe_private(const struct os_file *file, uint64_t from, uint64_t bytes);

/* Zeroed private memory, page aligned; NULL if the system refuses. */
void *os_reserve(uint64_t bytes);
void os_release(void *memory, uint64_t bytes);
/* Overwrites with zeros; the compiler may not drop it. */
void os_wipe(void *memory, uint64_t bytes);

/* Bytes that this process has in memory; only those of files. */
uint64_t os_resident_bytes(bool of_files);
/* Bytes that this process may still take: the least of MemAvailable and the cgroup's limit minus its use. */
uint64_t os_available_bytes(void);
/* Physical cores of the affinity mask, cut to the cgroup's CPU quota; 1 to 256. */
int32_t os_core_count(void);
/* A CPU of the index-th physical core of the affinity mask, -1 beyond the last; *count: how many it has. */
int32_t os_core_cpu(int32_t index, int32_t *count);
const char *os_environment(const char *name);

typedef struct os_thread { void *handle; } os_thread;
/* Starts a thread on the given stack with all signals blocked but SIGBUS: they belong to the application's threads. cpu: where
 * it stays, or -1. */
int32_t os_thread_start(os_thread *thread, void *stack, size_t stack_bytes, int32_t cpu, void *(*run)(void *), void *argument);
void os_thread_join(os_thread thread);
/* Tells a process from its forked children. */
int64_t os_process_id(void);
/* Monotonic time. */
uint64_t os_clock_ns(void);
/* Lets another runnable thread have the CPU. */
void os_yield(void);

#ifdef COLIBRI_TRACE
/* Debug builds only: one line to stderr by a plain write, nothing buffered. */
__attribute__((format(printf, 1, 2))) void os_trace(const char *format, ...);
#define TRACE(...) os_trace(__VA_ARGS__)
#else
#define TRACE(...) ((void)0)
#endif
