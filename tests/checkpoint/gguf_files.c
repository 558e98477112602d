/* SPDX-License-Identifier: Apache-2.0 */
/* From a path to GGUF files: by name, alone in a directory, split into parts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gguf_fixture.h"

static const gguf_layer layer = {.type = GGUF_MXFP4,
                                 .s = {.hidden = 32, .intermediate = 32, .experts = 2}};

static void save_whole(const char *name) {
    gguf file = gguf_start();
    gguf_text(&file, "general.architecture", "qwen3moe");
    gguf_add_experts(&file, &layer);
    gguf_save(&file, name);
    gguf_free(&file);
}

static void u16(gguf *file, const char *key, uint16_t value) {
    gguf_value(file, key, VALUE_U16, &value, sizeof value);
}

/* Three parts, the first of which has the metadata and no tensor. */
static void save_parts(const char *directory) {
    mkdir(t_path(directory), 0777);
    gguf whole = gguf_start();
    gguf_add_experts(&whole, &layer);
    for (uint16_t part = 0; part < 3; part++) {
        gguf file = gguf_start();
        if (part == 0)
            gguf_text(&file, "general.architecture", "qwen3moe");
        u16(&file, "split.no", part);
        u16(&file, "split.count", 3);
        gguf_value(&file, "split.tensors.count", VALUE_I32, &(int32_t){3}, 4);
        for (size_t i = 0; i < whole.n; i++)
            if ((i == 0 ? 1 : 2) == part) {
                const gguf_tensor *from = &whole.tensors[i];
                memcpy(gguf_add(&file, from->type, SHAPE(2, 32, 32), "%s", from->name)->data,
                       from->data, from->bytes);
            }
        char name[128];
        snprintf(name, sizeof name, "%s/model-%05d-of-00003.gguf", directory, part + 1);
        gguf_save(&file, name);
        gguf_free(&file);
    }
    gguf_free(&whole);
}

T_CASE(a_file_opens_by_name_and_by_content) {
    save_whole("some.gguf");
    T_OK(try_weights(t_path("some.gguf"), 0));
    rename(t_path("some.gguf"), t_path("other"));
    T_OK(try_weights(t_path("other"), 0));
    write_text(t_path("no.gguf"), "GGML");
    FAILS(try_open(t_path("no.gguf")), MEGAMOE_EFORMAT, "no.gguf", "starts with \"GGUF\"");
    write_text(t_path("empty.gguf"), "");
    FAILS(try_open(t_path("empty.gguf")), MEGAMOE_EFORMAT, "empty.gguf", "starts with \"GGUF\"");
    FAILS(try_open(t_path("none.gguf")), MEGAMOE_ENOTFOUND, "none.gguf");
}

T_CASE(a_directory_may_hold_one_model) {
    mkdir(t_path("one"), 0777);
    save_whole("one/any.gguf");
    write_text(t_path("one/.gguf"), "hidden");
    write_text(t_path("one/config.json"), "not JSON");
    FAILS(try_open(t_path("one")), MEGAMOE_EFORMAT, "config.json");
    write_text(t_path("one/config.json"), "{\"hidden_size\":7}");
    T_OK(try_weights(t_path("one"), 0)); /* the file has its own */
    save_whole("one/second.gguf");
    FAILS(try_open(t_path("one")), MEGAMOE_EFORMAT, "2 .gguf files", "any.gguf", "second.gguf");
    T_OK(try_weights(t_path("one/second.gguf"), 0));
}

T_CASE(parts_are_opened_together) {
    save_parts("split");
    static const char *const paths[] = {"split", "split/model-00001-of-00003.gguf",
                                        "split/model-00003-of-00003.gguf"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        megamoe_checkpoint *checkpoint = opened(t_path(paths[i]));
        megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
        T_OK(megamoe_checkpoint_describe(checkpoint, &info));
        T_EQ_INT((int64_t)info.files, 3);
        T_EQ_INT((int64_t)info.tensors, 3);
        T_EQ_STR(info.model_type, "qwen3moe");
        megamoe_checkpoint_close(checkpoint);
        T_OK(try_weights(t_path(paths[i]), 0));
    }
    /* Another model beside it. */
    save_whole("split/model.gguf");
    FAILS(try_open(t_path("split")), MEGAMOE_EFORMAT, "4 .gguf files");
    T_OK(try_weights(t_path(paths[1]), 0));
}

T_CASE(parts_must_be_complete_and_agree) {
    save_parts("parts");
    rename(t_path("parts/model-00002-of-00003.gguf"), t_path("parts/second"));
    FAILS(try_open(t_path("parts")), MEGAMOE_ENOTFOUND, "model-00002-of-00003.gguf", "3 parts",
          "download");
    FAILS(try_open(t_path("parts/second")), MEGAMOE_EFORMAT, "parts/second", "split.count is 3",
          "-00001-of-00003.gguf");
    /* The third under the second's name. */
    size_t bytes;
    void *third = t_read_file(t_path("parts/model-00003-of-00003.gguf"), &bytes);
    t_write_file(t_path("parts/model-00002-of-00003.gguf"), third, bytes);
    FAILS(try_open(t_path("parts")), MEGAMOE_EFORMAT, "model-00002-of-00003.gguf", "split.no 2",
          "must be 1 and 3");
    free(third);

    gguf file = gguf_start();
    u16(&file, "split.no", 1);
    u16(&file, "split.count", 3);
    gguf_save(&file, "parts/model-00002-of-00003.gguf");
    FAILS(try_open(t_path("parts")), MEGAMOE_EFORMAT, "split.tensors.count is 3",
          "parts hold 2 tensors");
    gguf_add(&file, GGUF_MXFP4, SHAPE(2, 32, 32), "blk.0.ffn_up_exps.weight");
    gguf_save(&file, "parts/model-00002-of-00003.gguf");
    FAILS(try_open(t_path("parts")), MEGAMOE_EFORMAT, "blk.0.ffn_up_exps.weight",
          "two tensors have this name");
    gguf_free(&file);

    /* More parts than there can be files. */
    file = gguf_start();
    u16(&file, "split.no", 0);
    gguf_u32(&file, "split.count", 2147483647);
    gguf_save(&file, "huge-00001-of-00003.gguf");
    FAILS(try_open(t_path("huge-00001-of-00003.gguf")), MEGAMOE_EFORMAT, "split.count");
    gguf_free(&file);
}

T_CASE(a_part_that_is_cut_is_named) {
    save_parts("cut");
    size_t bytes;
    uint8_t *part = t_read_file(t_path("cut/model-00003-of-00003.gguf"), &bytes);
    t_write_file(t_path("cut/model-00003-of-00003.gguf"), part, bytes - 64);
    free(part);
    FAILS(try_open(t_path("cut")), MEGAMOE_EFORMAT, "model-00003-of-00003.gguf", "past the end",
          "download");
}
