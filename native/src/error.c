#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int colibri_fail(struct colibri_error error, int code, const char *format, ...) {
    if (error.text && error.bytes) {
        va_list args;
        va_start(args, format);
        vsnprintf(error.text, error.bytes, format, args);
        va_end(args);
    }
    return code;
}
