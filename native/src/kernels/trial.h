#ifndef COLIBRI_KERNELS_TRIAL_H
#define COLIBRI_KERNELS_TRIAL_H

#include "kernels.h"

/* Runs every function of both tables on small problems. NULL if all bits are equal, else a clause that says what differs, or that table met an
 * illegal instruction. Takes about a millisecond; not for two threads at once: its memory is static, so that leaving by a jump loses nothing. */
const char *colibri_kernels_trial(const struct colibri_kernels *table, const struct colibri_kernels *reference);

/* For tests: from now on the CPU is taken to lack the feature of that name (dispatch.c); "" hides none. `name` stays the caller's. */
void colibri_kernels_hide_feature(const char *name);

#endif
