/*
 * Serialises the choice of an instruction set, whose trial must not run twice at once, and gives the checksum its default table.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "context.h"

static pthread_mutex_t trial = PTHREAD_MUTEX_INITIALIZER;

const struct colibri_kernels *colibri_kernels_open(const char *name, struct colibri_error error) {
    pthread_mutex_lock(&trial);
    const struct colibri_kernels *kernels = colibri_kernels_get(name, error.text, error.bytes);
    pthread_mutex_unlock(&trial);
    return kernels;
}

const char *colibri_isa_name(size_t i) {
    for (size_t at = 0; at < i; at++)
        if (!colibri_isa_names[at]) return NULL;
    return colibri_isa_names[i];
}

uint64_t colibri_checksum(const void *data, size_t n_bytes) {
    static _Atomic(const struct colibri_kernels *) cached;
    const struct colibri_kernels *kernels = atomic_load(&cached);
    if (!kernels) {
        kernels = colibri_kernels_open(NULL, (struct colibri_error){NULL, 0});
        if (!kernels) kernels = colibri_kernels_built("scalar"); /* $COLIBRI_ISA names what is not here; the sum is the same */
        atomic_store(&cached, kernels);
    }
    return kernels->checksum(data, n_bytes);
}
