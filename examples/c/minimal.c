/* minimal.c: the next token of a prompt, from C. Build against an installed libcolibri:
 *     cc minimal.c -o minimal $(pkg-config --cflags --libs colibri)
 * Run:  ./minimal MODEL.colibri ID [ID ...], with ids from Python's colibri.load(MODEL).tokenizer.encode(TEXT) */
#include <colibri.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    colibri_model *model;
    colibri_context *context;
    colibri_error error;
    int32_t ids[256], next, n_ids = 0;
    if (argc < 3) return fprintf(stderr, "usage: %s MODEL.colibri ID [ID ...]\n", argv[0]), 2;
    for (; n_ids < argc - 2 && n_ids < 256; n_ids++) ids[n_ids] = atoi(argv[2 + n_ids]);

    if (colibri_open(argv[1], &model, &error) != 0) return fprintf(stderr, "%s\n", error.text), 1;
    if (colibri_init(model, NULL, &context, &error) != 0) return fprintf(stderr, "%s\n", error.text), 1;
    float *logits = malloc(sizeof *logits * (size_t)colibri_info(model)->n_vocab);
    if (logits == NULL || colibri_run_inference(context, ids, n_ids, logits) != 0) {
        return fprintf(stderr, "%s\n", colibri_last_error(context)->text), 1;
    }
    colibri_topk_select(logits, colibri_info(model)->n_vocab, 1, &next);
    printf("next token: %d (logit %.3f)\n", next, (double)logits[next]);
    free(logits);
    colibri_free(context);
    colibri_close(model);
    return 0;
}
