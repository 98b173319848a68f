/* status.c: texts of failures, of statuses and of the version. Owns nothing; never prints. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

int32_t status_fail(colibri_error *error, int32_t status, const char *format, ...) {
    if (error == NULL) return status;
    va_list arguments;
    va_start(arguments, format);
    error->status = status;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}

int32_t status_range(colibri_error *error, const char *name, int32_t value, int32_t least, int32_t most) {
    if (value >= least && value <= most) return COLIBRI_OK;
    return status_fail(error, COLIBRI_ERROR_ARGUMENT, "%s: expected %d to %d, found %d", name, least, most, value);
}

const char *colibri_version(void) {
    return COLIBRI_VERSION;
}

const char *colibri_status_text(int32_t status) {
    static const char *const texts[] = {
        [-COLIBRI_OK] = "ok", [-COLIBRI_ERROR_ARGUMENT] = "argument out of range", [-COLIBRI_ERROR_IO] = "refused by the operating system",
        [-COLIBRI_ERROR_FORMAT] = "damaged or foreign model file", [-COLIBRI_ERROR_UNSUPPORTED] = "not supported by this build or machine",
        [-COLIBRI_ERROR_MEMORY] = "not enough memory", [-COLIBRI_ERROR_CONTEXT] = "context is full",
        [-COLIBRI_ERROR_CANCELLED] = "cancelled", [-COLIBRI_ERROR_NUMERIC] = "NaN or infinite logit",
    };
    return status > 0 || status < COLIBRI_ERROR_NUMERIC ? "unknown status" : texts[-status];
}
