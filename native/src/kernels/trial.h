#ifndef COLIBRI_KERNELS_TRIAL_H
#define COLIBRI_KERNELS_TRIAL_H

#include "kernels.h"

/* Runs every function of both tables on small problems. NULL if all bits are equal, else a clause that names the first that differs. Takes well
 * under a millisecond; memory is static or on the stack, so that leaving by a jump loses nothing. */
const char *colibri_kernels_trial(const struct colibri_kernels *table, const struct colibri_kernels *reference);

#endif
