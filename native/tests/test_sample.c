/*
 * The sampler against a plain second version in double, and each of its promises alone.
 */
#include <math.h>

#include "../src/philox.h"
#include "check.h"
#include "sequences.h"
#include "tiny_model.h"

enum { V = TINY_VOCABULARY, N_DRAWS = 20000, TWIN_LOW = 17, TWIN_HIGH = 80 };

static colibri_context_t *ctx;
static const float *logits;
static struct test_batch batch;

static colibri_sampling_t plain(float temperature) {
    return (colibri_sampling_t){.struct_bytes = sizeof(colibri_sampling_t), .temperature = temperature, .top_p = 1, .repetition_penalty = 1};
}

static int32_t draw(colibri_sampling_t sampling) {
    colibri_sampled_t sampled;
    int code = colibri_sample(ctx, 0, &sampling, &sampled);
    if (code) FAIL("%s", colibri_last_error(ctx));
    return sampled.token;
}

/* Does token a come before b: logit descending, then id? */
static bool before(const double *l, int a, int b) { return l[a] > l[b] || (l[a] == l[b] && a < b); }

/* Probabilities that the sampler should draw with, by sorting and in double. */
static void reference(const colibri_sampling_t *s, const double *l, double *p) {
    int order[V], n = V;
    double w[V], total = 0, sum = 0;
    for (int i = 0; i < V; i++) {
        int at = i;
        for (; at > 0 && before(l, i, order[at - 1]); at--) order[at] = order[at - 1];
        order[at] = i;
        p[i] = 0;
    }
    if (s->top_k && (int)s->top_k < n) n = (int)s->top_k;
    for (int i = 0; i < n; i++) total += w[i] = exp((l[order[i]] - l[order[0]]) / (double)s->temperature);
    int kept = 0;
    while (kept < n && (kept == 0 || sum < (double)s->top_p * total)) sum += w[kept++];
    while (kept > 1 && w[kept - 1] < (double)s->min_p) sum -= w[--kept];
    for (int i = 0; i < kept; i++) p[order[i]] = w[i] / sum;
}

/* Chi-square of the draws against the reference: far below 200 for at most 98 degrees of freedom unless something is wrong. */
static void expect_distribution(colibri_sampling_t s, const double *l) {
    double p[V], chi_square = 0;
    int counts[V] = {0};
    reference(&s, l, p);
    for (s.position = 0; s.position < N_DRAWS; s.position++) counts[draw(s)]++;
    for (int i = 0; i < V; i++) {
        double expected = p[i] * N_DRAWS;
        if (p[i] == 0 && counts[i]) FAIL("token %d was drawn %d times, but is cut off", i, counts[i]);
        if (expected > 1) chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    if (chi_square > 200) FAIL("chi-square %g: top_k %u, top_p %g, min_p %g", chi_square, s.top_k, (double)s.top_p, (double)s.min_p);
}

static void test_draws_follow_the_distribution(void) {
    double l[V];
    for (int i = 0; i < V; i++) l[i] = (double)logits[i];
    colibri_sampling_t s = plain(1.3f);
    s.seed = 42;
    expect_distribution(s, l);
    s.top_k = 7;
    expect_distribution(s, l);
    s.top_p = 0.6f;
    expect_distribution(s, l);
    s.top_k = 0;
    expect_distribution(s, l);
    s.top_p = 1;
    s.min_p = 0.2f;
    expect_distribution(s, l);
}

static void test_penalties_and_bias_change_the_logits_as_stated(void) {
    const int32_t history[] = {3, 4, 4, 5, 5, 5, 3}, bias_ids[] = {9, 9};
    const float bias_values[] = {1, 0.5f};
    double l[V];
    for (int i = 0; i < V; i++) l[i] = (double)logits[i];
    for (int id = 3; id <= 5; id++) l[id] = l[id] > 0 ? l[id] / 1.5 : l[id] * 1.5;
    l[3] -= 0.25 * 1 + 0.5; /* of its two, one was generated */
    l[5] -= 0.25 * 3 + 0.5;
    l[9] += 1.5;
    colibri_sampling_t s = plain(1);
    s.repetition_penalty = 1.5f;
    s.frequency_penalty = 0.25f;
    s.presence_penalty = 0.5f;
    s.history = history;
    s.n_history = 7;
    s.n_prompt = 3; /* 3, 4, 4 */
    s.bias_ids = bias_ids;
    s.bias_values = bias_values;
    s.n_bias = 2;
    expect_distribution(s, l);
}

static void test_temperature_zero_takes_the_largest_and_the_lower_id_on_a_tie(void) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    CHECK(draw(plain(0)) == best);
    CHECK(logits[TWIN_LOW] == logits[TWIN_HIGH]);
    uint32_t allowed[(V + 31) / 32] = {0};
    allowed[TWIN_LOW / 32] |= 1u << TWIN_LOW % 32;
    allowed[TWIN_HIGH / 32] |= 1u << TWIN_HIGH % 32;
    colibri_sampling_t s = plain(0);
    s.allowed = allowed;
    CHECK(draw(s) == TWIN_LOW);
    s.temperature = 1;
    s.top_k = 1; /* a cut through a tie keeps the lower */
    for (s.position = 0; s.position < 100; s.position++) CHECK(draw(s) == TWIN_LOW);
    s.top_k = 0;
    bool both[2] = {false, false};
    for (s.position = 0; s.position < 100; s.position++) both[draw(s) == TWIN_HIGH] = true;
    CHECK(both[0] && both[1]);
}

static void test_a_draw_depends_on_seed_and_position_alone(void) {
    colibri_sampling_t s = plain(2);
    int32_t first[50], n_other_seed = 0;
    for (s.position = 0; s.position < 50; s.position++) first[s.position] = draw(s);
    for (s.position = 50; s.position-- > 0;) CHECK(draw(s) == first[s.position]);
    s.seed = 1;
    for (s.position = 0; s.position < 50; s.position++) n_other_seed += draw(s) != first[s.position];
    CHECK(n_other_seed > 10);
    s.position = 1ull << 33; /* the counter has 64 bits */
    s.seed = 1ull << 40;
    draw(s);
}

static void test_log_probabilities_are_the_model_s_own(void) {
    double sum = 0, largest = -INFINITY;
    for (int i = 0; i < V; i++) largest = fmax(largest, (double)logits[i]);
    for (int i = 0; i < V; i++) sum += exp((double)logits[i] - largest);
    colibri_sampling_t s = plain(0.5f);
    const float bias = -INFINITY;
    const int32_t best = draw(plain(0));
    s.bias_ids = &best;
    s.bias_values = &bias;
    s.n_bias = 1;
    s.n_top_logprobs = COLIBRI_MAX_TOP_LOGPROBS;
    colibri_sampled_t sampled;
    CHECK_CODE(colibri_sample(ctx, 0, &s, &sampled), COLIBRI_OK);
    CHECK(sampled.token != best && sampled.top_ids[0] == best);
    CHECK(fabs((double)sampled.logprob - ((double)logits[sampled.token] - largest - log(sum))) < 1e-5);
    for (int i = 0; i < COLIBRI_MAX_TOP_LOGPROBS; i++) {
        CHECK(fabs((double)sampled.top_logprobs[i] - ((double)logits[sampled.top_ids[i]] - largest - log(sum))) < 1e-5);
        if (i) CHECK(sampled.top_logprobs[i] <= sampled.top_logprobs[i - 1]);
    }
}

static void expect_refusal(colibri_sampling_t s, int code, const char *field) {
    colibri_sampled_t sampled;
    CHECK_CODE(colibri_sample(ctx, 0, &s, &sampled), code);
    if (!strstr(colibri_last_error(ctx), field)) FAIL("\"%s\" does not name %s", colibri_last_error(ctx), field);
}

static void test_what_is_out_of_range_is_refused_by_name(void) {
    const int32_t outside = V;
    const uint32_t nothing[(V + 31) / 32] = {0};
    colibri_sampling_t s;
#define REFUSED(field, value) (s = plain(1), s.field = (value), expect_refusal(s, COLIBRI_E_INVALID, #field))
    REFUSED(struct_bytes, 1);
    REFUSED(temperature, -1);
    REFUSED(temperature, NAN);
    REFUSED(top_p, 0);
    REFUSED(top_p, 1.5f);
    REFUSED(min_p, -0.1f);
    REFUSED(repetition_penalty, 0);
    REFUSED(presence_penalty, INFINITY);
    REFUSED(n_top_logprobs, 21);
    REFUSED(n_prompt, 1);
#undef REFUSED
    s = plain(1), s.history = &outside, s.n_history = 1;
    expect_refusal(s, COLIBRI_E_INVALID, "history");
    s = plain(1), s.bias_ids = &outside, s.n_bias = 1;
    expect_refusal(s, COLIBRI_E_INVALID, "bias_ids");
    s = plain(1), s.allowed = nothing;
    expect_refusal(s, COLIBRI_E_NUMERIC, "allow");
    colibri_sampled_t sampled;
    s = plain(1);
    CHECK_CODE(colibri_sample(ctx, 1, &s, &sampled), COLIBRI_E_INVALID);
}

/* Known answers of the paper's own library, Random123. */
static void test_philox_gives_the_published_numbers(void) {
    struct philox zero = colibri_philox(0, (struct philox){{0, 0, 0, 0}});
    CHECK(zero.words[0] == 0x6627e8d5 && zero.words[1] == 0xe169c58d && zero.words[2] == 0xbc57ac4c && zero.words[3] == 0x9b00dbd8);
    struct philox pi = colibri_philox(0x299f31d0a4093822, (struct philox){{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}});
    CHECK(pi.words[0] == 0xd16cfe09 && pi.words[1] == 0x94fdcceb && pi.words[2] == 0x5001e420 && pi.words[3] == 0x24126ea1);
}

int main(void) {
    struct tiny_model file = tiny_build(COLIBRI_FMT_F32, 0, 12);
    colibri_model_t *model;
    for (size_t i = 0; i < tiny_tensor(&file, COLIBRI_T_HEAD, COLIBRI_FILE_NO_LAYER)->cols; i++)
        *tiny_weight(&file, COLIBRI_T_HEAD, COLIBRI_FILE_NO_LAYER, TWIN_HIGH, i) = *tiny_weight(&file, COLIBRI_T_HEAD, COLIBRI_FILE_NO_LAYER, TWIN_LOW, i);
    tiny_seal(&file);
    tiny_write(&file, file.n_bytes);
    CHECK_CODE(colibri_model_open(&model, file.path, NULL, 0), COLIBRI_OK);
    ctx = open_context(model, (colibri_context_options_t){.n_pages = 1, .decode_threads = 1, .prefill_threads = 1});
    batch_add(&batch, (int32_t[]){1, 2, 3}, 0, 3, 0);
    batch.flags[2] = COLIBRI_ROW_LOGITS;
    CHECK_CODE(batch_run(ctx, &batch), COLIBRI_OK);
    logits = colibri_logits(ctx, 0);
    test_draws_follow_the_distribution();
    test_penalties_and_bias_change_the_logits_as_stated();
    test_temperature_zero_takes_the_largest_and_the_lower_id_on_a_tie();
    test_a_draw_depends_on_seed_and_position_alone();
    test_log_probabilities_are_the_model_s_own();
    test_what_is_out_of_range_is_refused_by_name();
    test_philox_gives_the_published_numbers();
    colibri_context_close(ctx);
    colibri_model_close(model);
    tiny_discard(&file);
    return 0;
}
