/*
 * The thread pool.
 *
 * A job is published by raising the number in the high half of `next`; its items are handed out by compare-and-swap on the low half. While
 * the description of the next job is written, `next` holds an odd number that no item goes with. Whoever has read a part of the new
 * description (acquire) therefore cannot swap in the name of the old job any more: a swap that succeeds proves that the description
 * belongs to the item. So a thread that wakes late finds nothing to take, and nobody waits for it.
 *
 * A thread that finds nothing spins for up to SPIN_NS, since the next stage of a layer comes within microseconds, and then sleeps on a
 * condition variable. Sleeping and waking meet as in Dekker's algorithm: each side writes its word, then reads the other's, all
 * sequentially consistent, so at least one of them sees the other.
 */
#include "threads.h"

#include <stdbool.h>
#include <string.h>
#include <time.h>

#include "colibri.h"
#include "kernels/kernels.h"

/* Longer than the pause between two stages of a step, shorter than what a time slice costs another process. */
#define SPIN_NS 50000
/* Looks at the clock once in so many turns: reading it takes about as long as 20 of them. */
#define SPINS_PER_CLOCK 64
#define NO_ITEMS UINT32_MAX /* low half of `next` while a job is being described */

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t colibri_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Has a job after number `seen` been published, or the pool been stopped? */
static bool has_work(struct pool *pool, uint32_t seen) {
    return (uint32_t)(atomic_load(&pool->next) >> 32) != seen || atomic_load(&pool->stop);
}

static bool is_done(struct pool *pool, uint32_t n_items) { return atomic_load(&pool->n_done) == n_items; }

/* Takes items of the job now published until none is left; returns its number. */
static uint32_t take_items(struct pool *pool, unsigned number) {
    uint64_t next = atomic_load(&pool->next);
    uint32_t job_number = (uint32_t)(next >> 32);
    task_fn *task = atomic_load_explicit(&pool->task, memory_order_acquire);
    void *job = atomic_load_explicit(&pool->job, memory_order_acquire);
    uint32_t n_items = atomic_load_explicit(&pool->n_items, memory_order_acquire);
    if (number >= atomic_load_explicit(&pool->n_threads, memory_order_acquire)) return job_number;
    while ((uint32_t)(next >> 32) == job_number && (uint32_t)next < n_items) { /* NO_ITEMS is never below */
        if (!atomic_compare_exchange_weak(&pool->next, &next, next + 1)) continue;
        task(job, (uint32_t)next, number);
        bool last = atomic_fetch_add(&pool->n_done, 1) + 1 == n_items;
        if (last && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
        next = atomic_load(&pool->next);
    }
    return job_number;
}

static void wait_for_work(struct pool *pool, uint32_t seen) {
    int64_t deadline = colibri_now_ns() + SPIN_NS;
    for (unsigned turn = 1; !has_work(pool, seen); turn++) {
        pause_briefly();
        if (turn % SPINS_PER_CLOCK || colibri_now_ns() < deadline) continue;
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->n_sleepers, 1);
        while (!has_work(pool, seen)) pthread_cond_wait(&pool->work, &pool->mutex);
        atomic_fetch_sub(&pool->n_sleepers, 1);
        pthread_mutex_unlock(&pool->mutex);
        return;
    }
}

static void wait_until_done(struct pool *pool, uint32_t n_items) {
    int64_t deadline = colibri_now_ns() + SPIN_NS;
    for (unsigned turn = 1; !is_done(pool, n_items); turn++) {
        pause_briefly();
        if (turn % SPINS_PER_CLOCK || colibri_now_ns() < deadline) continue;
        pthread_mutex_lock(&pool->mutex);
        atomic_store(&pool->caller_sleeps, true);
        while (!is_done(pool, n_items)) pthread_cond_wait(&pool->done, &pool->mutex);
        atomic_store(&pool->caller_sleeps, false);
        pthread_mutex_unlock(&pool->mutex);
        return;
    }
}

static void *run_worker(void *argument) {
    struct worker *worker = argument;
    struct pool *pool = worker->pool;
    colibri_fp_enter();
    for (uint32_t seen = 0; !atomic_load(&pool->stop);) {
        wait_for_work(pool, seen);
        seen = take_items(pool, worker->number);
    }
    return NULL;
}

static void wake_all(struct pool *pool) {
    if (atomic_load(&pool->n_sleepers) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

void colibri_pool_run(struct pool *pool, unsigned n_threads, size_t n_items, task_fn *task, void *job) {
    if (n_threads <= 1 || n_items <= 1 || pool->n_workers == 0) {
        for (size_t item = 0; item < n_items; item++) task(job, item, 0);
        return;
    }
    uint64_t number = (atomic_load(&pool->next) >> 32) + 1;
    atomic_store(&pool->next, number << 32 | NO_ITEMS);
    atomic_store(&pool->n_done, 0);
    atomic_store_explicit(&pool->task, task, memory_order_release);
    atomic_store_explicit(&pool->job, job, memory_order_release);
    atomic_store_explicit(&pool->n_items, (uint32_t)n_items, memory_order_release);
    atomic_store_explicit(&pool->n_threads, n_threads, memory_order_release);
    atomic_store(&pool->next, (number + 1) << 32);
    wake_all(pool);
    take_items(pool, 0);
    wait_until_done(pool, (uint32_t)n_items);
}

int colibri_pool_open(struct pool *pool, struct worker *workers, unsigned n_threads, struct colibri_error error) {
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->workers = workers;
    for (unsigned i = 0; i + 1 < n_threads; i++) {
        workers[i] = (struct worker){.pool = pool, .number = i + 1};
        int failed = pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]);
        if (failed) return colibri_fail(error, COLIBRI_E_NOMEM, "starting thread %u of %u: %s", i + 1, n_threads - 1, strerror(failed));
        pool->n_workers++;
    }
    return COLIBRI_OK;
}

void colibri_pool_close(struct pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->n_workers; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
}
