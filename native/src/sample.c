/*
 * The sampler: one token from one row of logits, the same on every machine.
 *
 * All steps below are in f32 unless double is said, exp is that of docs/numerics.md, and "order" means logit descending, then id ascending.
 *
 *   1. log-probabilities to report are taken from the row as the model gave it: logit − (max + log Σ exp(logit − max)).
 *   2. repetition penalty r, for each distinct token of the history: logit > 0 ? logit / r : logit × r.
 *   3. presence and frequency penalty, for each distinct generated token with count c: logit − (frequency × c + presence).
 *   4. bias: logit + value, one entry after the other.
 *   5. candidates are the tokens of the mask whose logit is not −inf now. None: COLIBRI_E_NUMERIC.
 *   6. temperature 0: the first candidate in order. No number is drawn.
 *   7. top-k: the first k in order.
 *   8. weight w = exp((logit − largest) / temperature).
 *   9. top-p below 1: the shortest beginning, in order, whose weights sum up to at least top_p × the sum of all. Sums run in double; the sum
 *      of all runs in the order in which step 7 left the candidates: sorted if it cut, by id if not.
 *  10. min-p: those with w ≥ min_p; the first in order always stays.
 *  11. the draw: u = (53 bits of Philox4x32-10, key = seed, counter = position; low words first) / 2^53, from words 0 (high) and 1; the first candidate whose
 *      running sum in double exceeds u × the sum, sorted if step 7 or 9 cut, by id if not.
 *
 * Sorting a vocabulary for each token would cost more than small models take to compute it, so steps 7 and 9 take the best from a
 * heap, one by one, until they have what they need. Order is total, so the heap's shape does not matter.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "context.h"
#include "philox.h"

/* ---- checks ---- */

static int check_penalties(struct colibri_error error, const colibri_sampling_t *s) {
    if (!isfinite(s->temperature) || s->temperature < 0)
        return colibri_fail(error, COLIBRI_E_INVALID, "temperature: %g is not a finite number from 0 on", (double)s->temperature);
    if (!(s->top_p > 0 && s->top_p <= 1)) return colibri_fail(error, COLIBRI_E_INVALID, "top_p: %g is not in (0, 1]", (double)s->top_p);
    if (!(s->min_p >= 0 && s->min_p <= 1)) return colibri_fail(error, COLIBRI_E_INVALID, "min_p: %g is not in [0, 1]", (double)s->min_p);
    if (!isfinite(s->repetition_penalty) || s->repetition_penalty <= 0)
        return colibri_fail(error, COLIBRI_E_INVALID, "repetition_penalty: %g is not a finite number above 0", (double)s->repetition_penalty);
    if (!isfinite(s->presence_penalty) || !isfinite(s->frequency_penalty))
        return colibri_fail(error, COLIBRI_E_INVALID, "presence_penalty, frequency_penalty: not finite");
    if (s->n_top_logprobs > COLIBRI_MAX_TOP_LOGPROBS)
        return colibri_fail(error, COLIBRI_E_INVALID, "n_top_logprobs: %" PRIu32 " is above %d", s->n_top_logprobs, COLIBRI_MAX_TOP_LOGPROBS);
    return COLIBRI_OK;
}

static int check_ids(struct colibri_error error, const char *name, const int32_t *ids, size_t n, uint32_t vocabulary) {
    if (n && !ids) return colibri_fail(error, COLIBRI_E_INVALID, "%s: %zu entries, but NULL", name, n);
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocabulary)
            return colibri_fail(error, COLIBRI_E_INVALID, "%s: %" PRId32 " at %zu is not in a vocabulary of %" PRIu32, name, ids[i], i, vocabulary);
    return COLIBRI_OK;
}

static int check_sampling(struct colibri_context *ctx, size_t i, const colibri_sampling_t *s) {
    struct colibri_error error = colibri_error_of(ctx);
    uint32_t vocabulary = ctx->model->header.vocabulary;
    int code;
    if (!s || s->struct_bytes != sizeof *s) return colibri_fail(error, COLIBRI_E_INVALID, "sampling: struct_bytes must be %zu", sizeof *s);
    if (i >= ctx->n_held) return colibri_fail(error, COLIBRI_E_INVALID, "row %zu: %zu rows of logits are held", i, ctx->n_held);
    if ((code = check_penalties(error, s)) || (code = check_ids(error, "history", s->history, s->n_history, vocabulary)) ||
        (code = check_ids(error, "bias_ids", s->bias_ids, s->n_bias, vocabulary)))
        return code;
    if (s->n_prompt > s->n_history)
        return colibri_fail(error, COLIBRI_E_INVALID, "n_prompt: %zu of a history of %zu", s->n_prompt, s->n_history);
    if (s->n_bias && !s->bias_values) return colibri_fail(error, COLIBRI_E_INVALID, "bias_values: NULL");
    for (size_t j = 0; j < s->n_bias; j++)
        if (isnan(s->bias_values[j]) || s->bias_values[j] == INFINITY)
            return colibri_fail(error, COLIBRI_E_INVALID, "bias_values: %g at %zu", (double)s->bias_values[j], j);
    if (ctx->held_bad[i]) return colibri_fail(error, COLIBRI_E_NUMERIC, "row %zu: its logits are not finite", i);
    return COLIBRI_OK;
}

/* ---- step 1 ---- */

static bool is_before(struct candidate a, struct candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

/* The n first of the vocabulary in order. */
static void find_top(const float *logits, size_t vocabulary, size_t n, struct candidate *top) {
    size_t held = 0;
    for (size_t id = 0; id < vocabulary && n > 0; id++) {
        struct candidate candidate = {logits[id], (int32_t)id};
        if (held == n && !is_before(candidate, top[n - 1])) continue;
        size_t at = held < n ? held++ : n - 1;
        for (; at > 0 && is_before(candidate, top[at - 1]); at--) top[at] = top[at - 1];
        top[at] = candidate;
    }
}

static void report_top(const float *logits, size_t vocabulary, size_t n, float max, float sum, colibri_sampled_t *out) {
    struct candidate top[COLIBRI_MAX_TOP_LOGPROBS];
    n = colibri_smaller(n, vocabulary);
    find_top(logits, vocabulary, n, top);
    for (size_t i = 0; i < n; i++) {
        out->top_ids[i] = top[i].id;
        out->top_logprobs[i] = colibri_logprob(top[i].logit, max, sum);
    }
}

/* ---- steps 2 to 5: candidates by id, a slot for every token until step 5 ---- */

static void penalise(const struct colibri_context *ctx, const colibri_sampling_t *s, struct candidate *all) {
    for (size_t i = 0; i < s->n_history; i++) {
        ctx->seen[s->history[i]]++;
        ctx->generated[s->history[i]] += i >= s->n_prompt;
    }
    for (size_t i = 0; i < s->n_history; i++) {
        int32_t id = s->history[i];
        if (!ctx->seen[id]) continue; /* done already */
        float *logit = &all[id].logit;
        *logit = *logit > 0 ? *logit / s->repetition_penalty : *logit * s->repetition_penalty;
        if (ctx->generated[id]) *logit -= s->frequency_penalty * (float)ctx->generated[id] + s->presence_penalty;
        ctx->seen[id] = ctx->generated[id] = 0;
    }
}

static bool is_allowed(const colibri_sampling_t *s, int32_t id) { return !s->allowed || (s->allowed[id / 32] >> (id % 32) & 1); }

static size_t make_candidates(const struct colibri_context *ctx, const colibri_sampling_t *s, const float *logits, struct candidate *all) {
    size_t vocabulary = ctx->model->header.vocabulary, n = 0;
    for (size_t id = 0; id < vocabulary; id++) all[id] = (struct candidate){logits[id], (int32_t)id};
    penalise(ctx, s, all);
    for (size_t i = 0; i < s->n_bias; i++) all[s->bias_ids[i]].logit += s->bias_values[i];
    for (size_t id = 0; id < vocabulary; id++)
        if (is_allowed(s, (int32_t)id) && all[id].logit > -INFINITY) all[n++] = all[id];
    return n;
}

static struct candidate first_in_order(const struct candidate *candidates, size_t n) {
    struct candidate first = candidates[0];
    for (size_t i = 1; i < n; i++)
        if (is_before(candidates[i], first)) first = candidates[i];
    return first;
}

/* ---- steps 7 to 11 ---- */

/* A heap with the first in order on top. */
static void sift_down(struct candidate *heap, size_t n, size_t at) {
    struct candidate moving = heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && is_before(heap[child + 1], heap[child])) child++;
        if (!is_before(heap[child], moving)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

static void make_heap(struct candidate *heap, size_t n) {
    for (size_t at = n / 2; at-- > 0;) sift_down(heap, n, at);
}

/* Takes the top off a heap of n and puts it to heap[n − 1]: what was taken stands behind what is left, in reverse. */
static struct candidate pop(struct candidate *heap, size_t n) {
    struct candidate top = heap[0];
    heap[0] = heap[n - 1];
    if (n > 1) sift_down(heap, n - 1, 0);
    heap[n - 1] = top;
    return top;
}

/* After pops: what was taken comes to the front, in order. */
static void bring_forward(struct candidate *heap, size_t n) {
    for (size_t i = 0, j = n; i + 1 < j; i++) {
        struct candidate swapped = heap[i];
        heap[i] = heap[--j];
        heap[j] = swapped;
    }
}

static size_t keep_top_k(struct candidate *candidates, size_t n, size_t k) {
    make_heap(candidates, n);
    for (size_t taken = 0; taken < k; taken++) pop(candidates, n - taken);
    bring_forward(candidates, n);
    return k;
}

static float weight_of(const struct colibri_context *ctx, struct candidate candidate, float largest, float temperature) {
    float w = (candidate.logit - largest) / temperature;
    ctx->kernels->exp(&w, 1, &w);
    return w;
}

static void find_weights(const struct colibri_context *ctx, const struct candidate *candidates, size_t n, float largest, float temperature, float *w) {
    for (size_t i = 0; i < n; i++) w[i] = (candidates[i].logit - largest) / temperature;
    ctx->kernels->exp(w, n, w);
}

static double sum_of(const float *w, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)w[i];
    return sum;
}

static size_t keep_top_p(const struct colibri_context *ctx, const colibri_sampling_t *s, struct candidate *candidates, size_t n, float largest,
                         const float *w) {
    double wanted = (double)s->top_p * sum_of(w, n), sum = 0;
    size_t taken = 0;
    make_heap(candidates, n);
    while (taken < n && (taken == 0 || sum < wanted)) {
        sum += (double)weight_of(ctx, pop(candidates, n - taken), largest, s->temperature);
        taken++;
    }
    bring_forward(candidates, n);
    return taken;
}

static size_t keep_min_p(struct candidate *candidates, size_t n, float *w, float min_p) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (w[i] < min_p) continue; /* the first in order has weight 1 */
        candidates[kept] = candidates[i];
        w[kept++] = w[i];
    }
    return kept;
}

static double uniform(uint64_t seed, uint64_t position) {
    struct philox random = colibri_philox(seed, (struct philox){{(uint32_t)position, (uint32_t)(position >> 32), 0, 0}});
    return (double)(((uint64_t)random.words[0] << 32 | random.words[1]) >> 11) * 0x1p-53;
}

static int32_t draw(const struct colibri_context *ctx, const colibri_sampling_t *s, struct candidate *candidates, size_t n) {
    float largest = first_in_order(candidates, n).logit, *w = ctx->probabilities;
    if (s->top_k && s->top_k < n) n = keep_top_k(candidates, n, s->top_k);
    find_weights(ctx, candidates, n, largest, s->temperature, w);
    if (s->top_p < 1) {
        n = keep_top_p(ctx, s, candidates, n, largest, w);
        find_weights(ctx, candidates, n, largest, s->temperature, w);
    }
    n = keep_min_p(candidates, n, w, s->min_p);
    double target = uniform(s->seed, s->position) * sum_of(w, n), sum = 0;
    for (size_t i = 0; i + 1 < n; i++) {
        sum += (double)w[i];
        if (sum > target) return candidates[i].id;
    }
    return candidates[n - 1].id;
}

/* ---- public ---- */

static int sample(struct colibri_context *ctx, size_t i, const colibri_sampling_t *s, colibri_sampled_t *out) {
    const float *logits = colibri_logits(ctx, i);
    size_t vocabulary = ctx->model->header.vocabulary;
    size_t n = make_candidates(ctx, s, logits, ctx->candidates);
    if (n == 0) return colibri_fail(colibri_error_of(ctx), COLIBRI_E_NUMERIC, "row %zu: mask and bias allow no token", i);
    float max = ctx->kernels->max(logits, vocabulary), sum = ctx->kernels->sum_exp(logits, vocabulary, max);
    *out = (colibri_sampled_t){0};
    out->token = s->temperature == 0 ? first_in_order(ctx->candidates, n).id : draw(ctx, s, ctx->candidates, n);
    out->logprob = colibri_logprob(logits[out->token], max, sum);
    report_top(logits, vocabulary, s->n_top_logprobs, max, sum, out);
    return COLIBRI_OK;
}

int colibri_sample(colibri_context_t *ctx, size_t i, const colibri_sampling_t *sampling, colibri_sampled_t *out) {
    ctx->error[0] = 0;
    int code = check_sampling(ctx, i, sampling);
    if (code) return code;
    if (!out) return colibri_fail(colibri_error_of(ctx), COLIBRI_E_INVALID, "out: NULL");
    uint64_t fp_state = colibri_fp_enter();
    code = sample(ctx, i, sampling, out);
    colibri_fp_restore(fp_state);
    return code;
}
