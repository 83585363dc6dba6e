#include "colibri.h"

const char *colibri_version(void) { return "0.1.0"; }
