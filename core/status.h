/* status.h: how a failure travels. A function returns COLIBRI_OK or a negative status; the text is written once,
 * where the fault is found: what was expected, what was found, where, what to do next. */
#pragma once

#include "../include/colibri.h"

/* Writes status and text into `error` (may be NULL) and returns the status. */
__attribute__((format(printf, 3, 4))) int32_t status_fail(colibri_error *error, int32_t status, const char *format,
                                                          ...);

/* Fails where an argument is not from `least` to `most`. */
int32_t status_range(colibri_error *error, const char *name, int32_t value, int32_t least, int32_t most);

/* Leaves the calling function with a status and its text where a condition holds. code: FORMAT for COLIBRI_ERROR_FORMAT */
#define FAIL_IF(condition, error, code, ...)                                            \
    do {                                                                                \
        if (condition) return status_fail(error, COLIBRI_ERROR_##code, __VA_ARGS__);    \
    } while (0)

/* Leaves the calling function with the status of a failed expression. */
#define TRY(expression)                       \
    do {                                      \
        const int32_t try_ = (expression);    \
        if (try_ != COLIBRI_OK) return try_;  \
    } while (0)
