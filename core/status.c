/* status.c: writes the text of a failure. Owns nothing; never prints. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

int32_t status_fail(colibri_error *error, int32_t status, const char *format, ...)
{
    if (error == NULL) return status;
    va_list arguments;
    va_start(arguments, format);
    error->status = status;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}
