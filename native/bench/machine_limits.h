/*
 * What this machine can do at most, measured on the spot: the int8 and f32 multiplications of an instruction set from registers alone, and reads
 * from memory. A busy machine moves all three, so a figure counts beside a measurement of the same minute only.
 *
 * Every function starts n_threads − 1 threads, runs for some tens of milliseconds, and may be called by any thread.
 */
#ifndef COLIBRI_MACHINE_LIMITS_H
#define COLIBRI_MACHINE_LIMITS_H

#include <stddef.h>

/* cffi: begin */

/* Operations per second, a multiplication and an addition being two; 0 where the instruction set is unknown here. isa: a name of
 * colibri_isa_name() that this processor has. */
double colibri_limit_int8(const char *isa, unsigned n_threads);
double colibri_limit_f32(const char *isa, unsigned n_threads);
/* Bytes per second of one pass over data, which should be larger than every cache and already be in memory; 0 if n_bytes is below 1 MiB. */
double colibri_limit_read(const void *data, size_t n_bytes, unsigned n_threads);

/* cffi: end */

#endif
