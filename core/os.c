/* os.c: Linux. Maps files, reserves memory, reads limits, starts threads. Refuses to decide policy: callers do.
 * _GNU_SOURCE is for sched_getaffinity and madvise. */
#define _GNU_SOURCE
#include "os.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Address space that a mapping takes so that it can begin where a huge page may. */
static size_t space_bytes(uint64_t bytes) {
    return (((size_t)bytes + OS_PAGE - 1) & ~(size_t)(OS_PAGE - 1)) + OS_HUGE_PAGE;
}

static const void *map_aligned(int descriptor, uint64_t bytes, void **space) {
    errno = ENOMEM;
    if (bytes > SIZE_MAX - 2 * (uint64_t)OS_HUGE_PAGE) return NULL;
    *space = mmap(NULL, space_bytes(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*space == MAP_FAILED) return NULL;
    uint8_t *const start = (uint8_t *)*space + -(uintptr_t)*space % OS_HUGE_PAGE;
    const bool mapped = mmap(start, (size_t)bytes, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) != MAP_FAILED;
    const int reason = errno;
    if (mapped) madvise(start, (size_t)bytes, MADV_HUGEPAGE); /* what is read into the page cache comes in huge pages, where it can */
    else munmap(*space, space_bytes(bytes));
    errno = reason;
    return mapped ? start : NULL;
}

static int64_t written_ns(const struct stat *status) {
    return (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

/* A page of a mapped file that was cut off raises SIGBUS. In our mappings zeros take its place, so that os_file_changed can tell
 * afterwards; what comes from elsewhere goes to the handler that was there before. A process has one table of signals: this is
 * the only thing here that contexts of different models share. */
enum { MAPPINGS = 64 };
static _Atomic uintptr_t mappings[MAPPINGS][3]; /* begin, end, whether zeros have taken the place of a page; 0: free */
static struct sigaction handler_before;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    uint8_t *const page = (uint8_t *)((uintptr_t)info->si_addr & ~(uintptr_t)(OS_PAGE - 1));
    (void)number, (void)context;
    for (int i = 0; i < MAPPINGS; i++) {
        if ((uintptr_t)page < atomic_load(&mappings[i][0]) || (uintptr_t)page >= atomic_load(&mappings[i][1])) continue;
        atomic_store(&mappings[i][2], 1);
        if (mmap(page, OS_PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
    }
    sigaction(SIGBUS, &handler_before, NULL); /* the access is made once more, and fails there */
}

/* Adds what lies in a mapping to those that are watched, or (0) takes it out. */
static void watch(const struct os_file *file, bool begin) {
    const uintptr_t from = (uintptr_t)file->data;
    const struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct sigaction before; /* another thread may have been quicker: then it is ours */
    if (begin && sigaction(SIGBUS, &action, &before) == 0 && before.sa_sigaction != on_bus_error) handler_before = before;
    for (int i = 0; i < MAPPINGS; i++) {
        uintptr_t found = begin ? 0 : from;
        if (!begin && atomic_load(&mappings[i][0]) == from) atomic_store(&mappings[i][1], 0);
        if (!atomic_compare_exchange_strong(&mappings[i][0], &found, begin ? from : 0)) continue;
        if (begin) atomic_store(&mappings[i][2], 0);
        if (begin) atomic_store(&mappings[i][1], from + file->bytes);
        return;
    }
}

int32_t os_map_file(const char *path, struct os_file *file, colibri_error *error) {
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is refused, not waited for */
    FAIL_IF(descriptor < 0, error, IO, "cannot open model file '%s': %s", path, strerror(errno));
    struct stat status;
    const bool regular = fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    const uint64_t bytes = regular ? (uint64_t)status.st_size : 0;
    void *space;
    const void *const data = bytes > 0 ? map_aligned(descriptor, bytes, &space) : NULL;
    const int reason = errno;
    if (data == NULL) close(descriptor);
    FAIL_IF(!regular, error, IO, "'%s' is not a regular file; expected a .colibri file", path);
    FAIL_IF(bytes == 0, error, FORMAT, "'%s' is empty; convert the model again", path);
    FAIL_IF(data == NULL, error, IO, "cannot map '%s': %s%s", path, strerror(reason), reason != ENOMEM ? "" : "; its size takes that much of the "
            "addresses that this process may have: raise the limit (ulimit -v) or take a smaller model");
    char same[64]; /* the path may be another file's by now */
    snprintf(same, sizeof same, "/proc/self/fd/%d", descriptor);
    *file = (struct os_file){data, bytes, space, descriptor, open(same, O_RDONLY | O_CLOEXEC | O_DIRECT), written_ns(&status)};
    watch(file, true);
    return COLIBRI_OK;
}

void os_unmap_file(struct os_file *file) {
    if (file->data == NULL) return;
    watch(file, false);
    munmap(file->space, space_bytes(file->bytes));
    close(file->descriptor);
    if (file->direct >= 0) close(file->direct);
    *file = (struct os_file){0};
}

bool os_file_changed(const struct os_file *file) {
    struct stat status;
    for (int i = 0; i < MAPPINGS; i++) { /* a page that could not be read stays zeros, whatever becomes of the file */
        if (atomic_load(&mappings[i][0]) == (uintptr_t)file->data && atomic_load(&mappings[i][2]) != 0) return true;
    }
    return fstat(file->descriptor, &status) != 0 || (uint64_t)status.st_size != file->bytes || written_ns(&status) != file->changed_ns;
}

int32_t os_read(const struct os_file *file, uint64_t from, void *to, uint64_t bytes) {
    bool direct = file->direct >= 0;
    for (uint64_t done = 0; done < bytes;) {
        struct iovec part = {(uint8_t *)to + done, (size_t)(((bytes + OS_PAGE - 1) & ~(uint64_t)(OS_PAGE - 1)) - done)};
        const off_t at = (off_t)(from + done);
        ssize_t n = preadv2(file->descriptor, &part, 1, at, RWF_NOWAIT);
        direct = direct && done % OS_PAGE == 0;
        if (n <= 0 && direct) n = pread(file->direct, part.iov_base, part.iov_len, at);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            direct = false;
            n = pread(file->descriptor, part.iov_base, part.iov_len, at);
        }
        if (n == 0 || (n < 0 && errno != EINTR)) return n == 0 ? ENODATA : errno;
        done += n > 0 ? (uint64_t)n : 0;
    }
    return 0;
}

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

void os_prefetch(const struct os_file *file, uint64_t from, uint64_t bytes) {
    void *const at = (void *)(uintptr_t)(file->data + from);
    if (madvise(at, (size_t)bytes, MADV_POPULATE_READ) != 0) madvise(at, (size_t)bytes, MADV_WILLNEED);
}

int32_t os_make_private(const struct os_file *file, uint64_t from, uint64_t bytes, colibri_error *error) {
    uint8_t *const target = (uint8_t *)(uintptr_t)file->data + from;
    const size_t taken = space_bytes(bytes), size = taken - OS_HUGE_PAGE;
    uint8_t *const space = mmap(NULL, taken, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FAIL_IF(space == MAP_FAILED, error, MEMORY, "the system refused memory for a copy of the weights at byte %llu; the others stay "
            "mapped", (unsigned long long)from);
    uint8_t *const copy = space + ((uintptr_t)target - (uintptr_t)space) % OS_HUGE_PAGE; /* huge pages can move there as they are */
    madvise(copy, size, MADV_HUGEPAGE);
    int32_t fault = os_read(file, from, copy, bytes);
    mprotect(copy, size, PROT_READ);
    if (fault == 0 && mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) fault = errno;
    munmap(space, taken); /* what lies around the copy, and the copy itself if it could not move */
    FAIL_IF(fault != 0, error, IO, "cannot copy the weights at byte %llu of the model file: %s", (unsigned long long)from, strerror(fault));
    return COLIBRI_OK;
}

void os_wipe_private(const struct os_file *file, uint64_t from, uint64_t bytes) {
    void *const data = (uint8_t *)(uintptr_t)file->data + from;
    if (mprotect(data, (size_t)bytes, PROT_READ | PROT_WRITE) == 0) os_wipe(data, bytes);
}

void *os_reserve(uint64_t bytes) {
    if (bytes == 0 || bytes > SIZE_MAX) return NULL;
    void *const memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (bytes >= 2 * (uint64_t)OS_HUGE_PAGE) madvise(memory, (size_t)bytes, MADV_HUGEPAGE); /* keys and values: long runs */
    return memory;
}

void os_release(void *memory, uint64_t bytes) {
    if (memory != NULL) munmap(memory, (size_t)bytes);
}

void os_wipe(void *memory, uint64_t bytes) {
    if (memory == NULL) return;
    memset(memory, 0, (size_t)bytes);
    __asm__ volatile("" : : "r"(memory) : "memory"); /* the zeros count as read: the store stays */
}

/* Up to 4095 characters of a file; "" if it cannot be read. */
static void read_text(const char *path, char text[4096]) {
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t length = descriptor < 0 ? 0 : read(descriptor, text, 4095);
    if (descriptor >= 0) close(descriptor);
    text[length > 0 ? length : 0] = '\0';
}

/* First number in a file whose line starts with `key` ("" takes the first line); -1 if there is none. */
static int64_t read_number(const char *path, const char *key) {
    char text[4096];
    read_text(path, text);
    const char *const line = strstr(text, key);
    if (line == NULL) return -1;
    char *end;
    errno = 0;
    const long long number = strtoll(line + strlen(key), &end, 10);
    return errno != 0 || end == line + strlen(key) || number < 0 ? -1 : number;
}

uint64_t os_resident_bytes(bool of_files) {
    const int64_t kib = read_number("/proc/self/status", of_files ? "RssFile:" : "VmRSS:");
    return kib < 0 ? 0 : (uint64_t)kib * 1024;
}

/* A number of the control group `up` levels above this process's, the limits of which hold too; -2: above the root. Below a mount the
 * group's path is in v2 the line "0::/path", in v1 the line with ":<controller>:"; what is not there, inside a namespace, counts as -1. */
static int64_t cgroup_number(const char *marker, const char *mount, int up, const char *name, const char *key) {
    char text[4096], path[4500];
    read_text("/proc/self/cgroup", text);
    const char *const found = strstr(text, marker), *const group = found == NULL ? "" : found + strlen(marker);
    int length = (int)strcspn(group, "\n");
    for (; up > 0 && length > 0; up--) while (--length > 0 && group[length] != '/') {}
    if (up > 0) return -2;
    snprintf(path, sizeof path, "%s%.*s/%s", mount, length, group, name);
    return read_number(path, key);
}

uint64_t os_available_bytes(void) {
    const int64_t kib = read_number("/proc/meminfo", "MemAvailable:");
    uint64_t available = kib >= 0 ? (uint64_t)kib * 1024 : UINT64_MAX;
    static const struct { const char *marker, *mount, *limit, *use, *cache; } groups[] = {
        {"0::", "/sys/fs/cgroup", "memory.max", "memory.current", "\nfile "},
        {":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "cache "},
    };
    for (int i = 0; i < 2; i++) {
        int64_t limit;
        for (int up = 0; (limit = cgroup_number(groups[i].marker, groups[i].mount, up, groups[i].limit, "")) != -2; up++) {
            const int64_t use = cgroup_number(groups[i].marker, groups[i].mount, up, groups[i].use, "");
            /* Clean page cache is charged to the group but given back under pressure: it is not in the way. */
            const int64_t cache = cgroup_number(groups[i].marker, groups[i].mount, up, "memory.stat", groups[i].cache);
            const int64_t held = use - (cache > 0 && cache < use ? cache : 0);
            const uint64_t left = limit > held ? (uint64_t)(limit - held) : 0;
            if (limit >= 0 && use >= 0 && left < available) available = left;
        }
    }
    return available;
}

int32_t os_core_cpu(int32_t index, int32_t *count) {
    cpu_set_t allowed, leaders;
    int32_t cpu = -1;
    *count = 0;
    CPU_ZERO(&leaders);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cpu;
    for (int at = 0; at < CPU_SETSIZE; at++) {
        char path[96]; /* of the hardware threads of a core, the first one leads */
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", at);
        const int64_t first = CPU_ISSET(at, &allowed) ? read_number(path, "") : -1;
        const int leader = first < 0 || first >= CPU_SETSIZE ? at : (int)first;
        if (!CPU_ISSET(at, &allowed) || CPU_ISSET(leader, &leaders)) continue;
        CPU_SET(leader, &leaders);
        if ((*count)++ == index) cpu = at;
    }
    return cpu;
}

int32_t os_core_count(void) {
    int32_t cores;
    os_core_cpu(-1, &cores);
    int64_t count = cores, quota, period;
    static const struct { const char *marker, *mount, *quota, *period, *key; } groups[] = {
        {"0::", "/sys/fs/cgroup", "cpu.max", "cpu.max", " "}, /* two numbers */
        {":cpu,cpuacct:", "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us", ""},
    };
    for (int i = 0; i < 2; i++) {
        for (int up = 0; (quota = cgroup_number(groups[i].marker, groups[i].mount, up, groups[i].quota, "")) != -2; up++) {
            period = cgroup_number(groups[i].marker, groups[i].mount, up, groups[i].period, groups[i].key);
            if (quota > 0 && period > 0 && (quota + period - 1) / period < count) count = (quota + period - 1) / period;
        }
    }
    return count < 1 ? 1 : count > 256 ? 256 : (int32_t)count;
}

const char *os_environment(const char *name) {
    return getenv(name);
}

int32_t os_thread_start(os_thread *thread, void *stack, size_t stack_bytes, int32_t cpu, void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    pthread_t handle;
    sigset_t all, previous;
    if (pthread_attr_init(&attributes) != 0) return COLIBRI_ERROR_IO;
    int failed = pthread_attr_setstack(&attributes, stack, stack_bytes);
    if (!failed && cpu >= 0) {
        cpu_set_t place;
        CPU_ZERO(&place);
        CPU_SET(cpu, &place);
        failed = pthread_attr_setaffinity_np(&attributes, sizeof place, &place);
    }
    if (!failed) {
        sigfillset(&all);
        sigdelset(&all, SIGBUS);
        pthread_sigmask(SIG_SETMASK, &all, &previous);
        failed = pthread_create(&handle, &attributes, run, argument);
        pthread_sigmask(SIG_SETMASK, &previous, NULL);
    }
    pthread_attr_destroy(&attributes);
    if (failed) return COLIBRI_ERROR_IO;
    thread->handle = (void *)handle;
    return COLIBRI_OK;
}

void os_thread_join(os_thread thread) {
    pthread_join((pthread_t)thread.handle, NULL);
}

int64_t os_process_id(void) {
    return getpid();
}

uint64_t os_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void os_yield(void) {
    sched_yield();
}

#ifdef COLIBRI_TRACE
void os_trace(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length < 0) return;
    if (length > (int)sizeof line - 2) length = (int)sizeof line - 2;
    line[length] = '\n';
    if (write(STDERR_FILENO, line, (size_t)length + 1) < 0) return;
}
#endif
