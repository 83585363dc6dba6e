/*
 * A model file that gets shorter while it is mapped, or whose disk fails, must not end the process. Touching a page that is gone raises
 * SIGBUS; the handler puts zeros in its place and marks the model as lost, and whoever computed with it looks at the mark at the end.
 *
 * The handler does only what is safe in one: atomic loads and stores, and mmap, which is a plain system call. Faults outside of our
 * mappings are given back to whoever had the signal before.
 */

#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "model.h"

/* Models open at once in a process; one beyond them is served without this protection. */
enum { MAX_MODELS = 64 };

static _Atomic(struct colibri_model *) watched[MAX_MODELS];
static struct sigaction before;
static atomic_flag installed = ATOMIC_FLAG_INIT;
static uintptr_t page_bytes;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    (void)context;
    uintptr_t page = (uintptr_t)info->si_addr & ~(page_bytes - 1);
    for (int i = 0; i < MAX_MODELS; i++) {
        struct colibri_model *model = atomic_load(&watched[i]);
        if (!model || page - (uintptr_t)model->map >= model->map_bytes) continue;
        atomic_store(&model->lost, true);
        if (mmap((void *)page, page_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) return;
    }
    sigaction(number, &before, NULL); /* the access runs again, under it */
}

static void install(void) {
    if (atomic_flag_test_and_set(&installed)) return;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&action.sa_mask);
    (void)sigaction(SIGBUS, &action, &before);
}

void colibri_watch_pages(struct colibri_model *model) {
    install();
    for (int i = 0; i < MAX_MODELS; i++) {
        struct colibri_model *none = NULL;
        if (atomic_compare_exchange_strong(&watched[i], &none, model)) return;
    }
}

void colibri_unwatch_pages(struct colibri_model *model) {
    for (int i = 0; i < MAX_MODELS; i++) {
        struct colibri_model *it = model;
        if (atomic_compare_exchange_strong(&watched[i], &it, NULL)) return;
    }
}

int colibri_check_pages(const struct colibri_model *model, struct colibri_error error) {
    if (!atomic_load(&model->lost)) return COLIBRI_OK;
    return colibri_fail(error, COLIBRI_E_IO, "%s: the file, or a shard of it, was cut or its disk failed while it was in use", model->path);
}
