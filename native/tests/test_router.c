/* The router's choice against the plainest way to make it, with many equal logits, zeros of both signs and extremes among them. */
#include "check.h"
#include "router.h"

#define MOST 300

/* The largest that is left, of equal ones the first, k times. */
static void choose_plainly(const float *logits, size_t n, size_t k, int32_t *best) {
    bool taken[MOST] = {false};
    for (size_t j = 0; j < k; j++) {
        size_t at = n;
        for (size_t i = 0; i < n; i++)
            if (!taken[i] && (at == n || logits[i] > logits[at])) at = i;
        taken[at] = true;
        best[j] = (int32_t)at;
    }
}

static void test_best_experts_are_the_largest_logits_and_of_equal_ones_the_first(void) {
    static const float values[] = {0.f, -0.f, 1, -1, 3.4e38f, -3.4e38f, 1e-45f, -1e-45f};
    static const size_t sizes[] = {1, 2, 7, 8, 60, 64, 128, MOST};
    uint64_t state = 1;
    for (int round = 0; round < 200; round++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            size_t n = sizes[s], k = 1 + random_below(&state, (uint32_t)n < COLIBRI_MAX_TOP_K ? (uint32_t)n : COLIBRI_MAX_TOP_K);
            float logits[MOST];
            int32_t best[COLIBRI_MAX_TOP_K], expected[COLIBRI_MAX_TOP_K];
            for (size_t i = 0; i < n; i++) logits[i] = round % 2 ? random_float(&state) : values[random_below(&state, 8)];
            struct router router = {.n_experts = n, .top_k = k};
            colibri_best_experts(&router, logits, best);
            choose_plainly(logits, n, k, expected);
            CHECK(memcmp(best, expected, k * sizeof *best) == 0);
        }
}

int main(void) {
    test_best_experts_are_the_largest_logits_and_of_equal_ones_the_first();
    return 0;
}
