/* check.h: what the C tests that load a model share: a line for each check, the count of those that failed, memory in whole
 * pages. Included once by a program, which defines PROGRAM, its name, before. */
#pragma once

#include "../../core/os.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;

static void check(int good, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("%s  ", good ? "  ok  " : " FAIL ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    if (!good) failures++;
}

static _Noreturn void stop(const char *what, const char *why) {
    fprintf(stderr, PROGRAM ": %s: %s\n", what, why);
    exit(1);
}

static void *take(size_t bytes) {
    void *const memory = aligned_alloc(OS_PAGE, (bytes + OS_PAGE - 1) / OS_PAGE * OS_PAGE);
    if (memory == NULL) stop("memory", "the system refused it");
    memset(memory, 0, bytes);
    return memory;
}
