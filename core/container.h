/* container.h: a `.colibri` file as docs/FORMAT.md describes it: mapped, its header and directory checked.
 * Every offset and size is untrusted until container_entry has passed it. */
#pragma once

#include "os.h"

enum { CONTAINER_VERSION = 1, CONTAINER_ENTRY_BYTES = 128, CONTAINER_NAME_BYTES = 64 };
enum container_kind { KIND_VECTOR = 1, KIND_MATRIX = 2, KIND_EXPERT = 3, KIND_BLOB = 4 };

struct container {
    struct os_file file;
    const uint8_t *config;
    uint64_t config_bytes;
    const uint8_t *directory;
    uint32_t n_entries;
};

struct container_entry { /* docs/FORMAT.md §3, as it begins in the file */
    char name[CONTAINER_NAME_BYTES];
    uint64_t offset, bytes;
    uint32_t rows, cols;
    uint8_t kind, types[3], zeros[4];
    const uint8_t *data;
};

int32_t container_open(const char *path, struct container *container, colibri_error *error);
/* Reads entry `index`; its data lie in the file, aligned for its kind, at or after `previous_end`. */
int32_t container_entry(const struct container *container, uint32_t index, uint64_t previous_end,
                        struct container_entry *entry, colibri_error *error);
