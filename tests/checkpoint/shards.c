/* SPDX-License-Identifier: Apache-2.0 */
/* From a path to files: directories, indexes, single files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fixture.h"

static const sizes small = {.hidden = 64, .intermediate = 32, .experts = 2};

/* Creates a directory below the program's own and returns the path of a name in it. */
static const char *in(const char *directory, const char *name) {
    char joined[256];
    mkdir(t_path(directory), 0777);
    snprintf(joined, sizeof joined, "%s/%s", directory, name);
    return t_path(joined);
}

/* Two shards: the weights of the experts in one, their scales in the other. */
static void save_split(const char *directory) {
    built whole = built_start();
    add_mxfp4(&whole, "layers.%d.ffn.", 0, numbered, "scale", small);
    built parts[2] = {built_start(), built_start()};
    char index[8192] = "{\"metadata\":{\"total_size\":1},\"weight_map\":{";
    for (size_t i = 0; i < whole.n; i++) {
        const built_tensor *from = &whole.tensors[i];
        const int part = strcmp(from->dtype, "I8") == 0 ? 0 : 1;
        int64_t shape[9];
        memcpy(shape, from->shape, sizeof from->shape);
        shape[from->rank] = -1;
        memcpy(built_add(&parts[part], from->dtype, shape, "%s", from->name)->data, from->data,
               from->bytes);
        snprintf(index + strlen(index), sizeof index - strlen(index), "%s\"%s\":\"%s.safetensors\"",
                 i ? "," : "", from->name, part ? "scales" : "codes");
    }
    strcat(index, "}}");
    built_save(&parts[0], in(directory, "codes.safetensors"));
    built_save(&parts[1], in(directory, "scales.safetensors"));
    write_text(in(directory, "model.safetensors.index.json"), index);
    built_free(&parts[0]);
    built_free(&parts[1]);
    built_free(&whole);
}

static void save_layer(const char *path, int32_t layer) {
    built model = built_start();
    add_mxfp4(&model, "layers.%d.ffn.", layer, numbered, "scale", small);
    built_save(&model, path);
    built_free(&model);
}

T_CASE(weights_and_scales_may_lie_in_different_shards) {
    save_split("split");
    megamoe_checkpoint *checkpoint = opened(t_path("split"));
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    T_OK(megamoe_checkpoint_describe(checkpoint, &info));
    T_EQ_INT((int64_t)info.files, 2);
    T_EQ_INT((int64_t)info.tensors, 12);
    T_EQ_INT(info.layers, 1);
    T_EQ_STR(info.family, "deepseek-v4");
    struct stat codes, scales;
    T_REQUIRE(stat(in("split", "codes.safetensors"), &codes) == 0);
    T_REQUIRE(stat(in("split", "scales.safetensors"), &scales) == 0);
    T_EQ_INT((int64_t)info.bytes, codes.st_size + scales.st_size);
    megamoe_checkpoint_close(checkpoint);
    T_OK(try_weights(t_path("split"), 0));
}

T_CASE(one_shard_alone_opens_and_says_what_it_lacks) {
    save_split("split");
    FAILS(try_weights(in("split", "codes.safetensors"), 0), MEGAMOE_EFORMAT, "codes.safetensors",
          "layers.0.ffn.experts.0.w1.scale", "missing");
}

T_CASE(index_file_names_are_plain_names) {
    static const char *const tricks[] = {"../x.safetensors", "/etc/passwd",    "..", ".", "",
                                         "a/b.safetensors",  "./x.safetensors"};
    for (size_t i = 0; i < sizeof tricks / sizeof *tricks; i++) {
        char index[256];
        snprintf(index, sizeof index, "{\"weight_map\":{\"x\":\"%s\"}}", tricks[i]);
        write_text(in("tricks", "model.safetensors.index.json"), index);
        FAILS(try_open(t_path("tricks")), MEGAMOE_EFORMAT, "index.json: x:", "plain name");
    }
    write_text(in("tricks", "model.safetensors.index.json"),
               "{\"weight_map\":{\"x\":\"a\\u0000b.safetensors\"}}");
    FAILS(try_open(t_path("tricks")), MEGAMOE_EFORMAT, "index.json", "line 1");
    write_text(in("tricks", "model.safetensors.index.json"), "{\"weight_map\":{\"x\":1}}");
    FAILS(try_open(t_path("tricks")), MEGAMOE_EFORMAT, "index.json: x:", "string");
}

T_CASE(malformed_indexes_are_refused) {
    static const struct {
        const char *text, *part;
    } indexes[] = {{"", "line"},
                   {"[]", "one JSON object"},
                   {"{}", "weight_map"},
                   {"{\"weight_map\":[]}", "weight_map"},
                   {"{\"weight_map\":{\"x\":\"a\",\"x\":\"b\"}}", "duplicate"},
                   {"{\"weight_map\":{\"x\":\"a\"}", "line"},
                   {"{\"weight_map\":{}}", "no expert tensors"}};
    for (size_t i = 0; i < sizeof indexes / sizeof *indexes; i++) {
        write_text(in("malformed", "model.safetensors.index.json"), indexes[i].text);
        const megamoe_status status = try_open(t_path("malformed"));
        T_CHECK(status == MEGAMOE_EFORMAT || status == MEGAMOE_EUNSUPPORTED);
        T_CONTAINS(megamoe_last_error(), indexes[i].part);
    }
}

T_CASE(an_index_must_hold_against_its_files) {
    save_layer(in("lies", "a.safetensors"), 0);
    write_text(in("lies", "model.safetensors.index.json"),
               "{\"weight_map\":{\"layers.0.ffn.experts.0.w1.weight\":\"a.safetensors\","
               "\"layers.9.ffn.experts.0.w1.weight\":\"a.safetensors\"}}");
    FAILS(try_open(t_path("lies")), MEGAMOE_EFORMAT, "index.json",
          "layers.9.ffn.experts.0.w1.weight", "a.safetensors", "lacks it");
    write_text(in("lies", "model.safetensors.index.json"),
               "{\"weight_map\":{\"layers.0.ffn.experts.0.w1.weight\":\"b.safetensors\"}}");
    FAILS(try_open(t_path("lies")), MEGAMOE_ENOTFOUND, "index.json", "b.safetensors", "not there");
}

T_CASE(the_index_decides_between_files_with_the_same_tensor) {
    save_layer(in("twice", "a.safetensors"), 0);
    save_layer(in("twice", "b.safetensors"), 0);
    write_text(in("twice", "model.safetensors.index.json"),
               "{\"weight_map\":{\"layers.0.ffn.experts.0.w1.weight\":\"b.safetensors\","
               "\"layers.0.ffn.experts.0.w2.weight\":\"a.safetensors\"}}");
    megamoe_checkpoint *checkpoint = opened(t_path("twice"));
    megamoe_checkpoint *files[2];
    T_OK(megamoe_tensors_open(in("twice", "a.safetensors"), &files[0]));
    T_OK(megamoe_tensors_open(in("twice", "b.safetensors"), &files[1]));
    static const char *const names[2] = {"layers.0.ffn.experts.0.w2.weight",
                                         "layers.0.ffn.experts.0.w1.weight"};
    for (int i = 0; i < 2; i++) {
        megamoe_tensor is, must;
        T_OK(megamoe_checkpoint_tensor(checkpoint, names[i], &is));
        T_OK(megamoe_checkpoint_tensor(files[i], names[i], &must));
        T_EQ_INT((int64_t)is.bytes, (int64_t)must.bytes);
        T_EQ_MEM(is.data, must.data, is.bytes);
        megamoe_checkpoint_close(files[i]);
    }
    /* What the index does not list is not there. */
    megamoe_tensor unlisted;
    T_STATUS(megamoe_checkpoint_tensor(checkpoint, "layers.0.ffn.experts.0.w3.weight", &unlisted),
             MEGAMOE_ENOTFOUND);
    megamoe_checkpoint_close(checkpoint);
}

T_CASE(directories_without_an_index) {
    mkdir(t_path("empty"), 0777);
    FAILS(try_open(t_path("empty")), MEGAMOE_ENOTFOUND, "empty", "no .safetensors file");
    FAILS(try_open(t_path("nowhere")), MEGAMOE_ENOTFOUND, "nowhere");
    save_layer(in("one", "any-name.safetensors"), 3);
    write_text(in("one", ".safetensors"), "not one");
    T_OK(try_weights(t_path("one"), 3));
    save_layer(in("one", "other.safetensors"), 4);
    FAILS(try_open(t_path("one")), MEGAMOE_EFORMAT, "2 .safetensors files", "index.json");
    save_layer(in("one", "model.safetensors"), 5);
    megamoe_checkpoint *checkpoint = opened(t_path("one"));
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 0), 5);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, 1), -1);
    T_EQ_INT(megamoe_checkpoint_layer(checkpoint, -1), -1);
    megamoe_checkpoint_close(checkpoint);
}

T_CASE(a_file_is_opened_with_the_config_beside_it) {
    save_layer(in("file", "some.safetensors"), 0);
    write_text(in("file", "config.json"), "{\"model_type\":\"deepseek_v4\",\"hidden_size\":128}");
    FAILS(try_weights(in("file", "some.safetensors"), 0), MEGAMOE_EFORMAT, "some.safetensors",
          "w1.weight", "hidden_size 64", "config.json", "128");
    unlink(in("file", "config.json"));
    T_OK(try_weights(in("file", "some.safetensors"), 0));
    char before[512];
    T_REQUIRE(getcwd(before, sizeof before) != NULL);
    T_REQUIRE(chdir(t_path("file")) == 0);
    T_OK(try_weights("some.safetensors", 0));
    T_REQUIRE(chdir(before) == 0);
}

T_CASE(a_broken_shard_is_named) {
    save_split("broken");
    size_t bytes;
    void *file = t_read_file(in("broken", "scales.safetensors"), &bytes);
    t_write_file(in("broken", "scales.safetensors"), file, bytes - 1);
    free(file);
    FAILS(try_open(t_path("broken")), MEGAMOE_EFORMAT, "scales.safetensors", "past the end");
}
