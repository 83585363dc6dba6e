/* What another program does with libcolibri: through its public header alone, built against the static library and against the shared one. */
#include <stdio.h>

#include "colibri.h"

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "usage: %s MODEL\n", argv[0]), 2;
    char error[512] = "";
    colibri_model_t *model = NULL;
    colibri_context_t *ctx = NULL;
    colibri_context_options_t options = {.struct_bytes = sizeof options, .n_pages = 2};
    const int32_t input[] = {5, 6, 7};
    int32_t output[16];
    size_t n = 0;
    int code = colibri_model_open(&model, argv[1], error, sizeof error);
    if (!code) code = colibri_context_open(&ctx, model, &options, error, sizeof error);
    if (!code) code = colibri_infer(ctx, input, 3, output, &n, 16, 0);
    if (code) fprintf(stderr, "%s\n", ctx ? colibri_last_error(ctx) : error);
    for (size_t i = 0; i < n; i++) printf("%d ", (int)output[i]);
    colibri_context_close(ctx);
    colibri_model_close(model);
    return code || n == 0;
}
