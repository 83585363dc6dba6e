/* Sentences for errors: written into a caller's buffer, never allocated. */
#ifndef COLIBRI_ERROR_H
#define COLIBRI_ERROR_H

#include <stddef.h>

#define COLIBRI_ERROR_BYTES 512

struct colibri_error {
    char *text; /* may be NULL */
    size_t bytes;
};

/* Writes the sentence and returns `code`, so that a check reads `return fail(e, COLIBRI_E_INVALID, "…")`. */
int colibri_fail(struct colibri_error error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
