/* The thread pool: every item of every job runs exactly once, whoever sleeps. Made for ThreadSanitizer. */
#include <time.h>

#include "../src/threads.h"
#include "check.h"

enum { N_JOBS = 3000, MAX_ITEMS = 40, N_THREADS = 4 };

struct counted {
    int runs[MAX_ITEMS]; /* not atomic: the pool alone must keep threads apart */
    unsigned n_threads;
};

static void count(void *argument, size_t item, unsigned worker) {
    struct counted *job = argument;
    CHECK(worker < job->n_threads);
    job->runs[item]++;
}

static void test_every_item_runs_once_and_is_seen_by_the_caller(void) {
    static struct worker workers[N_THREADS];
    static struct pool pool;
    uint64_t random = 3;
    CHECK(colibri_pool_open(&pool, workers, N_THREADS, (struct colibri_error){NULL, 0}) == 0);
    for (int i = 0; i < N_JOBS; i++) {
        struct counted job = {.n_threads = 1 + random_below(&random, N_THREADS)}; /* each on the stack: a late thread would be noticed */
        size_t n_items = random_below(&random, MAX_ITEMS + 1);
        colibri_pool_run(&pool, job.n_threads, n_items, count, &job);
        for (size_t item = 0; item < MAX_ITEMS; item++) CHECK(job.runs[item] == (item < n_items));
        if (i % 500 == 0) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* longer than they spin: all fall asleep */
    }
    colibri_pool_close(&pool);
}

static void test_at_least_one_core_is_usable(void) { CHECK(colibri_usable_cores() >= 1 && colibri_usable_cores() <= COLIBRI_MAX_THREADS); }

int main(void) {
    test_every_item_runs_once_and_is_seen_by_the_caller();
    test_at_least_one_core_is_usable();
    return 0;
}
