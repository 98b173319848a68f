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
    switch (status) {
    case COLIBRI_OK: return "ok";
    case COLIBRI_ERROR_ARGUMENT: return "argument out of range";
    case COLIBRI_ERROR_IO: return "refused by the operating system";
    case COLIBRI_ERROR_FORMAT: return "damaged or foreign model file";
    case COLIBRI_ERROR_UNSUPPORTED: return "not supported by this build or machine";
    case COLIBRI_ERROR_MEMORY: return "not enough memory";
    case COLIBRI_ERROR_CONTEXT: return "context is full";
    case COLIBRI_ERROR_CANCELLED: return "cancelled";
    case COLIBRI_ERROR_NUMERIC: return "NaN or infinite logit";
    default: return "unknown status";
    }
}
